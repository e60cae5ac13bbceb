package results

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/millrace/millrace/internal/job"
)

// Binding says that a worker has in its KV cache what a key stands for.
type Binding struct {
	// Key is a cache key as package affinity makes them.
	Key    string
	Worker job.Worker
	// TTL is how long it holds unless it is bound again.
	TTL time.Duration
	// Most bounds how many workers are bound to the key at once. Replace are workers whose place this one may take: the binding moves only if it is still theirs.
	Most    int
	Replace []job.Worker
}

// Owners returns for each key the workers that are bound to it, the latest first. It is asked before a call goes to a worker, so its caller sets a short deadline, and goes on without an
// answer.
func (s *Store) Owners(ctx context.Context, keys ...string) ([][]job.Worker, error) {
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	gets := make([]*redis.StringCmd, 0, len(keys))
	var err error
	if len(keys) == 1 {
		gets = append(gets, s.db.Get(ctx, s.cacheKey(keys[0])))
		err = gets[0].Err()
	} else {
		_, err = s.db.Pipelined(ctx, func(p redis.Pipeliner) error { // they are in different slots
			for _, k := range keys {
				gets = append(gets, p.Get(ctx, s.cacheKey(k)))
			}
			return nil
		})
	}
	if err != nil && !errors.Is(err, redis.Nil) {
		return nil, wrap(err, "asking whose cache holds a prompt")
	}
	owners := make([][]job.Worker, 0, len(keys))
	for _, get := range gets {
		text, err := get.Result()
		if err != nil && !errors.Is(err, redis.Nil) {
			return nil, wrap(err, "asking whose cache holds a prompt")
		}
		owners = append(owners, workers(text))
	}
	return owners, nil
}

// Bind writes bindings, each by one atomic script, and returns for each the workers that are bound then, the latest first. A worker that finds no place among them is not bound.
func (s *Store) Bind(ctx context.Context, all ...Binding) ([][]job.Worker, error) {
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	calls := make([]call, 0, len(all))
	for _, b := range all {
		args := []any{workerText(b.Worker), b.TTL.Milliseconds(), b.Most}
		for _, w := range b.Replace {
			args = append(args, workerText(w))
		}
		calls = append(calls, call{script: bindScript, keys: []string{s.cacheKey(b.Key)}, args: args})
	}
	answers, err := s.inOrder(ctx, func(redis.Pipeliner) {}, calls...)
	if err != nil {
		return nil, wrap(err, "binding a prompt to a worker")
	}
	owners := make([][]job.Worker, 0, len(all))
	for _, a := range answers {
		bound, ok := a.(string)
		if !ok {
			return nil, fmt.Errorf("binding a prompt to a worker: %w: %v", errAnswer, a)
		}
		owners = append(owners, workers(bound))
	}
	return owners, nil
}

func (s *Store) cacheKey(key string) string { return s.cfg.Prefix + "cache:" + key }

// workerText is a worker's name as it stands in a binding, without spaces.
func workerText(w job.Worker) string { return url.QueryEscape(string(w)) }

func workers(text string) []job.Worker {
	var list []job.Worker
	for w := range strings.FieldsSeq(text) {
		if name, err := url.QueryUnescape(w); err == nil {
			list = append(list, job.Worker(name))
		}
	}
	return list
}
