package dispatcher

import (
	"context"
	"sync/atomic"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
)

// epochs of all leaders: who leads later has the higher one.
var epochs atomic.Uint64

// Lead does the leader's duties without the lease.
func (d *Dispatcher) Lead(ctx context.Context) { d.lead(ctx, epochs.Add(1)) }

// ExpireFiles removes the files whose time is over.
func (d *Dispatcher) ExpireFiles(ctx context.Context) error { return d.expireFiles(ctx) }

// SweepBlobs removes old objects that nobody needs.
func (d *Dispatcher) SweepBlobs(ctx context.Context) error { return d.sweepBlobs(ctx) }

// Leads tells whether d leads.
func (d *Dispatcher) Leads() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.leading
}

// Queues is what the leader's heartbeat tells of the queues.
func (d *Dispatcher) Queues() []cluster.QueueInfo { return d.beat().Queues }

// FeedBeside feeds, and does nothing else, until ctx ends. What feeds that one model hangs.
func (d *Dispatcher) FeedBeside(ctx context.Context, hangs job.Model) {
	f := newFeeder(d, hanging(hangs))
	f.wake(hangs)
	f.run(ctx)
}

// hanging is a model with a supply that has work and hangs when it is asked for it.
type hanging job.Model

func (h hanging) of(m job.Model) []supply {
	if m == job.Model(h) {
		return []supply{h}
	}
	return nil
}

func (h hanging) models() []job.Model                            { return []job.Model{job.Model(h)} }
func (h hanging) tenant() job.Tenant                             { return "a" }
func (h hanging) class() job.Class                               { return job.Batch }
func (h hanging) name() string                                   { return "hangs" }
func (h hanging) head(context.Context) (job.Tokens, bool, error) { return 100, true, nil }
func (h hanging) urgency(float64) float64                        { return 0 }
func (h hanging) feed(ctx context.Context, _ job.Class, _ int, _ job.Tokens) ([]fed, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

// BatchLedger is what a leader asks of the ledger.
type BatchLedger = batchLedger

// SetLedger gives d another ledger, before it leads.
func (d *Dispatcher) SetLedger(l BatchLedger) { d.ledger = l }
