package relay

import (
	"context"
	"encoding/json"

	"github.com/nats-io/nats.go"

	"github.com/millrace/millrace/internal/job"
)

const linedSubject = "millrace.lined."

// Lined is a tenant's waiting line at a model that has got a job.
type Lined struct {
	Model  job.Model  `json:"model"`
	Tenant job.Tenant `json:"tenant"`
	Class  job.Class  `json:"class"`
}

// Lined tells dispatchers of a waiting line that has got a job. Best effort: they also look by themselves.
func (r *Relay) Lined(l Lined) {
	data, err := json.Marshal(l)
	if err != nil { // three strings
		r.log.Debug("not published", "subject", linedSubject, "err", err)
		return
	}
	r.say(linedSubject+token(string(l.Model)), data)
}

// OnLined calls fn for each Lined heard, of any model, until ctx ends. It returns once it listens. fn must not block.
func (r *Relay) OnLined(ctx context.Context, fn func(Lined)) error {
	return r.on(ctx, linedSubject+"*", func(m *nats.Msg) {
		var l Lined
		if err := json.Unmarshal(m.Data, &l); err != nil {
			r.log.Debug("not understood", "subject", m.Subject, "err", err)
			return
		}
		fn(l)
	})
}
