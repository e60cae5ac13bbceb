package testenv

import "go.uber.org/goleak"

// NATSLeaves are options for goleak: a NATS server that is stopped while it creates a stream leaves that stream's goroutines behind.
func NATSLeaves() []goleak.Option {
	return []goleak.Option{
		goleak.IgnoreTopFunction("github.com/nats-io/nats-server/v2/server.(*fileStore).flushStreamStateLoop"),
		goleak.IgnoreTopFunction("github.com/nats-io/nats-server/v2/server/ats.Register.func1"),
	}
}
