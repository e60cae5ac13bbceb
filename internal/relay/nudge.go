package relay

import (
	"context"

	"github.com/nats-io/nats.go"
)

const nudgeSubject = "millrace.batches"

// Nudge tells dispatchers that a batch was created or cancelled. Best effort: they look by themselves each second.
func (r *Relay) Nudge() { r.say(nudgeSubject, nil) }

// OnNudge calls fn for each Nudge heard, until ctx ends. It returns once it listens. fn must not block.
func (r *Relay) OnNudge(ctx context.Context, fn func()) error {
	return r.on(ctx, nudgeSubject, func(*nats.Msg) { fn() })
}
