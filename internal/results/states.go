package results

import (
	"context"
	"errors"

	"github.com/redis/go-redis/v9"

	"github.com/millrace/millrace/internal/job"
)

// States reads the states of several jobs in one round trip: "" where there is no record.
func (s *Store) States(ctx context.Context, ids []job.ID) ([]job.State, error) {
	if len(ids) == 0 {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	reads := make([]*redis.StringCmd, len(ids))
	_, err := s.db.Pipelined(ctx, func(p redis.Pipeliner) error {
		for i, id := range ids {
			reads[i] = p.HGet(ctx, s.recordKey(id), "s")
		}
		return nil
	})
	if err != nil && !errors.Is(err, redis.Nil) {
		return nil, wrap(err, "reading the states of %d jobs", len(ids))
	}
	states := make([]job.State, len(ids))
	for i, r := range reads {
		state, err := r.Result()
		if err != nil && !errors.Is(err, redis.Nil) {
			return nil, wrap(err, "reading the states of %d jobs", len(ids))
		}
		states[i] = job.State(state)
	}
	return states, nil
}
