package api

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/millrace/millrace/internal/affinity"
	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
)

const (
	// lookTimeout bounds the look for a warm cache. The store answers within a fraction of a millisecond, or the request goes on without it.
	lookTimeout = 25 * time.Millisecond
	// lookFailures in a row end the looks; one more is tried each lookAgain until the store answers. So an outage costs a time-out a second, and not one for each request.
	lookFailures = 3
	lookAgain    = time.Second
)

// place is where a job waits.
type place struct {
	lane queue.Lane
	// left notes that the job has ended, or never came. It is nil where nobody counts.
	left func()
}

// leave calls p.left if there is any.
func (p place) leave() {
	if p.left != nil {
		p.left()
	}
}

// warmth finds the workers that have requests' prompts in their caches, and counts what this process has sent to each since its last heartbeat: within that second many could come for
// the same one.
type warmth struct {
	look     func(ctx context.Context, keys ...string) ([][]job.Worker, error)
	prefixes bool

	mu       sync.Mutex // guards what follows
	sent     map[job.Worker]*sent
	failures int       // of looks, one after the other: those at the same time are one
	failed   time.Time // when the last one was noted
	again    time.Time // when the next look may be tried, if there were too many
}

// sent is what went to a worker from here. Of held calls the end is known: those that run now are counted, and those that ran when its last heartbeat was heard, which that one tells too. Of
// durable jobs it is not: they are counted until the next heartbeat.
type sent struct {
	heard     time.Time // of the last heartbeat
	now, then amount    // held calls
	durable   amount    // since heard
}

type amount struct {
	jobs    int
	prompts job.Tokens
}

func (a *amount) add(jobs int, prompts job.Tokens) {
	a.jobs += jobs
	a.prompts += prompts
}

// find returns the worker that j should go to for its cache, "" if it is any. body is its request, live whether it is a held call. left is to be called when a call has ended, or a job does not
// go there after all.
func (w *warmth) find(ctx context.Context, members []cluster.Member, j *job.Job, body *job.Object, live bool) (to job.Worker, left func(), result affinity.Result) {
	all := affinity.Workers(members, j.Model)
	if len(all) < 2 { // no choice
		return "", nil, affinity.Off
	}
	keys := affinity.Keys(j, body, w.prefixes)
	if len(keys) == 0 {
		return "", nil, affinity.Off
	}
	owners, ok := w.owners(ctx, keys)
	if !ok {
		return "", nil, affinity.Off
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.hear(members)
	for i := range all {
		if s := w.sent[all[i].ID]; s != nil {
			// At least those that run now are there, also if it had not got all of them when it told.
			all[i].Assign(max(s.now.jobs-s.then.jobs, s.now.jobs-all[i].Jobs)+s.durable.jobs, s.now.prompts-s.then.prompts+s.durable.prompts)
		}
	}
	to, result = affinity.Choose(owners, all)
	if to == "" {
		return "", nil, result
	}
	return to, w.send(to, members, j.Cost.Prompt, live), result
}

// hear takes in which heartbeats have come, and forgets workers that are gone. w.mu is held.
func (w *warmth) hear(members []cluster.Member) {
	if len(w.sent) == 0 {
		return
	}
	alive := 0
	for i := range members {
		s := w.sent[job.Worker(members[i].ID)]
		if s == nil {
			continue
		}
		alive++
		if !s.heard.Equal(members[i].Heard) {
			s.heard, s.then, s.durable = members[i].Heard, s.now, amount{}
		}
	}
	if alive == len(w.sent) {
		return
	}
	maps.DeleteFunc(w.sent, func(id job.Worker, _ *sent) bool {
		return !slices.ContainsFunc(members, func(m cluster.Member) bool { return m.ID == string(id) })
	})
}

// send counts a job that goes to worker to, and returns what takes it off again. w.mu is held.
func (w *warmth) send(to job.Worker, members []cluster.Member, prompt job.Tokens, live bool) (left func()) {
	s := w.sent[to]
	if s == nil {
		i := slices.IndexFunc(members, func(m cluster.Member) bool { return m.ID == string(to) })
		s = &sent{heard: members[i].Heard}
		w.sent[to] = s
	}
	heard, counted := s.heard, &s.durable
	if live {
		counted = &s.now
	}
	counted.add(1, prompt)
	return sync.OnceFunc(func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		if live || s.heard.Equal(heard) {
			counted.add(-1, -prompt)
		}
	})
}

// owners asks the store, unless it does not answer.
func (w *warmth) owners(ctx context.Context, keys []string) ([][]job.Worker, bool) {
	now := time.Now()
	w.mu.Lock()
	if w.failures >= lookFailures {
		if now.Before(w.again) {
			w.mu.Unlock()
			return nil, false
		}
		w.again = now.Add(lookAgain) // the others do not wait for this one
	}
	w.mu.Unlock()
	short, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	owners, err := w.look(short, keys...)
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case err == nil:
		w.failures = 0
	case ctx.Err() == nil && now.After(w.failed): // else the client has left, or others that asked at this time have found the same
		w.failures++
		w.failed = time.Now()
		w.again = w.failed.Add(lookAgain)
	}
	return owners, err == nil
}
