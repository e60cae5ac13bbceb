package results

import (
	"context"

	"github.com/redis/go-redis/v9"

	"github.com/millrace/millrace/internal/job"
)

// Wiped tells whether the sentinel is missing: the store is new or was wiped. SetSentinel says that it is whole again.
func (s *Store) Wiped(ctx context.Context) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	found := make([]*redis.IntCmd, shards)
	_, err := s.db.Pipelined(ctx, func(p redis.Pipeliner) error {
		for i := range shards {
			found[i] = p.Exists(ctx, s.shardKey(i, "whole"))
		}
		return nil
	})
	if err != nil {
		return false, wrap(err, "looking whether the result store was wiped")
	}
	for _, f := range found {
		if f.Val() == 0 {
			return true, nil
		}
	}
	return false, nil
}

// SetSentinel says that the store is whole.
func (s *Store) SetSentinel(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	_, err := s.db.Pipelined(ctx, func(p redis.Pipeliner) error {
		for i := range shards {
			p.Set(ctx, s.shardKey(i, "whole"), 1, 0)
		}
		return nil
	})
	if err != nil {
		return wrap(err, "recording that the result store is whole")
	}
	return nil
}

// QueuedJob is a waiting job and its body.
type QueuedJob struct {
	Job  job.Job
	Body []byte
}

// EndedJob is an ended job.
type EndedJob struct {
	Job     job.Job
	Outcome job.Outcome
}

const (
	// rebuildBytes and rebuildCount bound one round trip of a rebuild, so that it is over long before it counts as hung: the embedded store takes about 0.3 ms for a record.
	rebuildBytes = 4 << 20
	rebuildCount = 100
)

// RestoreQueued writes records of waiting jobs (state queued) where there is none, with their idempotency keys; RestoreEnded those of ended ones, without answers and events.
// Both leave existing records alone, and take many at once in one round trip.
func (s *Store) RestoreQueued(ctx context.Context, jobs []QueuedJob) error {
	all := make([]creation, 0, len(jobs))
	for i := range jobs {
		all = append(all, creation{job: &jobs[i].Job, state: job.Queued, body: jobs[i].Body, key: true})
	}
	return s.restore(ctx, all)
}

// RestoreEnded writes records of ended jobs where there is none, but for those whose outcome is erased, and for batches' lines, whose records are soon gone anyway.
func (s *Store) RestoreEnded(ctx context.Context, jobs []EndedJob) error {
	all := make([]creation, 0, len(jobs))
	for i := range jobs {
		o := &jobs[i].Outcome
		if o.Erased || jobs[i].Job.InBatch() {
			continue
		}
		text, err := encode(o)
		if err != nil {
			return err
		}
		all = append(all, creation{job: &jobs[i].Job, state: o.State, key: true, fields: []any{
			"o", text, "k", int64(o.Token), "n", o.LastEvent, "f", int64(o.FirstToken),
		}})
	}
	return s.restore(ctx, all)
}

// restore creates records, as many in one round trip as is good. Those whose time is over are not kept.
func (s *Store) restore(ctx context.Context, all []creation) error {
	for len(all) > 0 {
		var batch []creation
		size := 0
		for len(all) > 0 && len(batch) < rebuildCount && size < rebuildBytes {
			c := all[0]
			all = all[1:]
			if s.expireAt(c.job) > int64(s.Now()) {
				batch = append(batch, c)
				size += len(c.body)
			}
		}
		if len(batch) == 0 {
			return nil
		}
		short, cancel := context.WithTimeout(ctx, opTimeout)
		_, err := s.create(short, Limits{}, batch...)
		cancel()
		if err != nil {
			return wrap(err, "rebuilding %d records", len(batch))
		}
	}
	return nil
}
