package api

import (
	"context"
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
	sent     map[job.Worker]*sending
	failures int       // of looks, in a row
	again    time.Time // when the next look may be tried, if there were too many
}

// sending is what went to a worker since one of its heartbeats was heard.
type sending struct {
	heard   time.Time
	jobs    int
	prompts job.Tokens
}

// find returns the worker that j should go to for its cache, "" if it is any. body is its request. left is to be called when the job has ended, or does not go there after all; not
// calling it counts the job until the worker's next heartbeat.
func (w *warmth) find(ctx context.Context, members []cluster.Member, j *job.Job, body *job.Object) (to job.Worker, left func(), result affinity.Result) {
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
	heard := make(map[job.Worker]time.Time, len(members))
	for i := range members {
		heard[job.Worker(members[i].ID)] = members[i].Heard
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for i := range all {
		if s := w.sent[all[i].ID]; s != nil && s.heard.Equal(heard[all[i].ID]) {
			all[i].Assign(s.jobs, s.prompts)
		}
	}
	to, result = affinity.Choose(owners, all)
	if to == "" {
		return "", nil, result
	}
	return to, w.send(to, heard, j.Cost.Prompt), result
}

// send counts a job that goes to worker to, and returns what takes it off again. w.mu is held.
func (w *warmth) send(to job.Worker, heard map[job.Worker]time.Time, prompt job.Tokens) (left func()) {
	s := w.sent[to]
	if s == nil || !s.heard.Equal(heard[to]) {
		for id := range w.sent { // so that the map is no larger than the cluster
			if _, alive := heard[id]; !alive {
				delete(w.sent, id)
			}
		}
		s = &sending{heard: heard[to]}
		w.sent[to] = s
	}
	s.jobs++
	s.prompts += prompt
	return sync.OnceFunc(func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		s.jobs--
		s.prompts -= prompt
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
	case ctx.Err() == nil: // else the client has left
		w.failures++
		w.again = time.Now().Add(lookAgain)
	}
	return owners, err == nil
}
