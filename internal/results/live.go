package results

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/millrace/millrace/internal/job"
)

const (
	// rebuiltGrace: a record that was rebuilt as waiting may belong to a job that runs; its worker says so when it renews its lease. Until then queue timeouts wait.
	rebuiltGrace = time.Minute
	// forgetAfter: an id without a record whose deadline is so long over is dropped from the live index.
	forgetAfter = 24 * time.Hour
	livePage    = 500
)

// firstDeadline is when a job that has not started must be looked at.
func firstDeadline(j *job.Job) job.Millis {
	if j.QueueTimeout > 0 {
		return min(j.Created+j.QueueTimeout, j.Expires)
	}
	return j.Expires
}

// liveJob is what the live index needs to know of a record.
type liveJob struct {
	state job.State
	next  job.Millis
}

// look reads the records of ids, nil where there is none.
func (s *Store) look(ctx context.Context, ids []job.ID) ([]*liveJob, error) {
	gets := make([]*redis.SliceCmd, len(ids))
	_, err := s.db.Pipelined(ctx, func(p redis.Pipeliner) error {
		for i, id := range ids {
			gets[i] = p.HMGet(ctx, s.recordKey(id), "s", "j", "k", "a", "fr")
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	jobs := make([]*liveJob, len(ids))
	for i, get := range gets {
		m := map[string]string{}
		for f, v := range get.Val() {
			m[[]string{"s", "j", "k", "a", "fr"}[f]] = text(v)
		}
		if m["s"] == "" {
			continue
		}
		r, err := decode(m)
		if err != nil {
			return nil, err
		}
		jobs[i] = &liveJob{state: r.State, next: r.Job.Expires}
		if r.Token == 0 && r.Job.QueueTimeout > 0 {
			next := firstDeadline(&r.Job)
			if m["fr"] == "" {
				next = min(r.Job.Expires, max(next, r.Since+job.Millis(rebuiltGrace.Milliseconds())))
			}
			jobs[i].next = next
		}
	}
	return jobs, nil
}

// Due returns up to limit live jobs whose next deadline (queue timeout while never started, else expiry) is at or before now, earliest first.
// An id whose record is gone is among them: the caller looks into the streams, and calls Forget if it is nowhere.
func (s *Store) Due(ctx context.Context, now job.Millis, limit int) ([]job.ID, error) {
	for round := 0; ; round++ { // each one sets right the entries that it met
		ids, wrong, err := s.due(ctx, now, limit)
		if err != nil {
			return nil, wrap(err, "reading the jobs that are due")
		}
		if wrong == 0 || round == 8 {
			return ids, nil
		}
	}
}

// due returns the due jobs among the first limit entries, and how many of those entries were wrong: ended jobs, which it drops, and jobs that have started or were
// rebuilt since, whose deadline it moves.
func (s *Store) due(ctx context.Context, now job.Millis, limit int) (due []job.ID, wrong int, err error) {
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	reads := make([]*redis.ZSliceCmd, shards)
	_, err = s.db.Pipelined(ctx, func(p redis.Pipeliner) error {
		for i := range shards {
			reads[i] = p.ZRangeByScoreWithScores(ctx, s.shardKey(i, "live"), &redis.ZRangeBy{Min: "-inf", Max: strconv.FormatInt(int64(now), 10), Count: int64(limit)})
		}
		return nil
	})
	if err != nil {
		return nil, 0, err
	}
	var entries []redis.Z
	for _, r := range reads {
		entries = append(entries, r.Val()...)
	}
	slices.SortFunc(entries, func(a, b redis.Z) int { return cmp.Compare(a.Score, b.Score) })
	entries = entries[:min(len(entries), limit)]
	if len(entries) == 0 {
		return nil, 0, nil
	}
	ids := make([]job.ID, len(entries))
	for i, e := range entries {
		ids[i] = job.ID(text(e.Member))
	}
	jobs, err := s.look(ctx, ids)
	if err != nil {
		return nil, 0, err
	}
	_, err = s.db.Pipelined(ctx, func(p redis.Pipeliner) error {
		for i, id := range ids {
			j := jobs[i]
			switch {
			case j == nil && job.Millis(entries[i].Score) > s.Now()-job.Millis(forgetAfter.Milliseconds()):
				due = append(due, id)
			case j == nil || j.state.Ended():
				p.ZRem(ctx, s.liveKey(id), string(id))
				wrong++
			case j.next > now:
				p.ZAddXX(ctx, s.liveKey(id), redis.Z{Score: float64(j.next), Member: string(id)})
				wrong++
			default:
				due = append(due, id)
			}
		}
		return nil
	})
	return due, wrong, err
}

// Live calls fn with pages of the ids of all jobs that have not ended, in no particular order. An id whose record is gone is among them: see Due.
func (s *Store) Live(ctx context.Context, fn func([]job.ID) error) error {
	for i := range shards {
		key := s.shardKey(i, "live")
		// A whole part at once: a job that stays in it is not missed however many leave meanwhile.
		members, err := s.members(ctx, key)
		if err != nil {
			return wrap(err, "reading the live jobs")
		}
		for ids := range slices.Chunk(members, livePage) {
			live, ended, err := s.living(ctx, ids)
			if err != nil {
				return wrap(err, "reading the live jobs")
			}
			s.drop(ctx, key, ended)
			if len(live) > 0 {
				if err := fn(live); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

func (s *Store) members(ctx context.Context, key string) ([]job.ID, error) {
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	all, err := s.db.ZRange(ctx, key, 0, -1).Result()
	return idsOf(all), err
}

// living parts ids into those that have not ended and those that have. What has ended never lives again.
func (s *Store) living(ctx context.Context, ids []job.ID) (live []job.ID, ended []any, err error) {
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	states := make([]*redis.StringCmd, len(ids))
	_, err = s.db.Pipelined(ctx, func(p redis.Pipeliner) error {
		for i, id := range ids {
			states[i] = p.HGet(ctx, s.recordKey(id), "s")
		}
		return nil
	})
	if err != nil && !errors.Is(err, redis.Nil) {
		return nil, nil, err
	}
	for i, id := range ids {
		state, err := states[i].Result()
		switch {
		case err != nil && !errors.Is(err, redis.Nil):
			return nil, nil, err
		case job.State(state).Ended():
			ended = append(ended, string(id))
		default:
			live = append(live, id)
		}
	}
	return live, ended, nil
}

func idsOf(list []string) []job.ID {
	ids := make([]job.ID, len(list))
	for i, id := range list {
		ids[i] = job.ID(id)
	}
	return ids
}

// Forget drops ids from the indexes of live jobs: ids whose record is gone for good.
func (s *Store) Forget(ctx context.Context, ids ...job.ID) error {
	if len(ids) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	_, err := s.db.Pipelined(ctx, func(p redis.Pipeliner) error {
		for _, id := range ids {
			p.ZRem(ctx, s.liveKey(id), string(id))
		}
		return nil
	})
	if err != nil {
		return wrap(err, "forgetting %d jobs", len(ids))
	}
	return nil
}
