package api

import (
	"context"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
)

// why says why a queued job does not run, and when it may.
func (s *Server) why(v *view) *queueObject {
	j := &v.job
	o := &queueObject{Reason: s.reason(j.Model)}
	if delay := v.notBefore - s.deps.Results.Now(); delay > 0 {
		o.Reason, o.ETASeconds = "retry_delay", seconds(delay)
	}
	info, ok := s.queueInfo(j.Model)
	if !ok {
		return o
	}
	position := info.WaitingLines[j.Tenant]
	for _, c := range job.Classes() {
		if c.Rank() <= j.Class.Rank() {
			position += info.Waiting[c]
		}
	}
	position = max(1, position)
	o.Position = &position
	switch o.Reason {
	case reasonDispatching: // it is on its way; how fast jobs ended while there were few says nothing about it
		o.ETASeconds = new(float64)
	case reasonSaturated: // only full workers end jobs as fast as they can
		if rate := s.pace.of(j.Model); rate > 0 {
			eta := float64(int64(float64(position)/rate*10)) / 10
			o.ETASeconds = &eta
		}
	}
	return o
}

// The reasons that tell when, too.
const (
	reasonDispatching = "dispatching" // a worker has room
	reasonSaturated   = "saturated"   // every ready one is full
)

// reason is the first thing that blocks the jobs of a model.
func (s *Server) reason(m job.Model) string {
	if ok, _ := s.deps.Cluster.Connected(); !ok {
		return "queue_unavailable"
	}
	return blocking(s.deps.Cluster.Workers(m))
}

// blocking names what keeps workers from taking more.
func blocking(workers []cluster.Member) string {
	count := make(map[cluster.WorkerState]int)
	room := false
	for _, w := range workers {
		if w.Worker == nil {
			continue
		}
		count[w.Worker.State]++
		room = room || w.Worker.State == cluster.Ready && w.Worker.Free > 0 && w.Worker.InHand == 0
	}
	switch {
	case room:
		return reasonDispatching
	case count[cluster.Ready] > 0:
		return reasonSaturated
	case count[cluster.Starting] > 0:
		return "starting"
	case count[cluster.Stalled] > 0:
		return "stalled"
	case count[cluster.Unready] > 0:
		return "unready"
	case count[cluster.Draining] > 0:
		return "draining"
	}
	return "no_worker"
}

// comment is the keep-alive of a stream whose job is v: what a person who watches it wants to know.
func (s *Server) comment(v *view) []byte {
	if v == nil || v.state.Public() != job.Queued {
		return []byte(": running\n")
	}
	o := s.why(v)
	b := fmt.Appendf(nil, ": queued reason=%s", o.Reason)
	if o.Position != nil {
		b = fmt.Appendf(b, " position=%d", *o.Position)
	}
	if o.ETASeconds != nil {
		b = fmt.Appendf(b, " eta=%.1f", *o.ETASeconds)
	}
	return append(b, '\n')
}

// leader is the leading dispatcher, as far as it is heard.
func (s *Server) leader() (cluster.Member, bool) {
	for _, m := range s.deps.Cluster.Members() {
		if m.Role == cluster.RoleDispatcher && m.Leader {
			return m, true
		}
	}
	return cluster.Member{}, false
}

// queueInfo is what the leading dispatcher last saw of the model.
func (s *Server) queueInfo(m job.Model) (cluster.QueueInfo, bool) {
	l, _ := s.leader()
	for _, q := range l.Queues {
		if q.Model == m {
			return q, true
		}
	}
	return cluster.QueueInfo{}, false
}

// pace measures how many jobs of each model end per second, from the workers' heartbeats.
type pace struct {
	mu      sync.Mutex
	last    time.Time
	workers map[string]int64 // jobs ended so far, by worker
	rates   map[job.Model]float64
}

func newPace() *pace {
	return &pace{workers: make(map[string]int64), rates: make(map[job.Model]float64)}
}

// of is the model's rate in jobs per second, 0 if none has ended of late.
func (p *pace) of(m job.Model) float64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.rates[m]
}

// paceWeight is the weight of the newest second in the average: its memory is about ten seconds.
const paceWeight = 0.1

// observe takes what the workers say now. A worker of several models counts for each in equal parts.
func (p *pace) observe(now time.Time, workers []cluster.Member) {
	p.mu.Lock()
	defer p.mu.Unlock()
	elapsed := now.Sub(p.last).Seconds()
	first := p.last.IsZero()
	p.last = now
	ended := make(map[job.Model]float64)
	alive := make(map[string]int64, len(workers))
	for _, w := range workers {
		if w.Worker == nil || len(w.Worker.Models) == 0 {
			continue
		}
		total := w.Worker.Completed + w.Worker.Failed
		before, known := p.workers[w.ID]
		alive[w.ID] = total
		for _, m := range w.Worker.Models {
			var n int64 // a worker's first word says nothing about its speed
			if known {
				n = max(0, total-before)
			}
			ended[m] += float64(n) / float64(len(w.Worker.Models))
		}
	}
	p.workers = alive
	if first || elapsed <= 0 {
		return
	}
	for m := range p.rates {
		if _, ok := ended[m]; !ok {
			ended[m] = 0 // a model that has no worker any more fades as well
		}
	}
	for m, n := range ended {
		rate := p.rates[m]*(1-paceWeight) + n/elapsed*paceWeight
		if rate < 0.001 {
			delete(p.rates, m)
			continue
		}
		p.rates[m] = rate
	}
}

// measure feeds pace each second until ctx ends.
func (s *Server) measure(ctx context.Context) {
	t := time.NewTicker(time.Second)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-t.C:
			s.pace.observe(now, s.deps.Cluster.Workers(""))
		}
	}
}

// fills remembers for a short while what the queue itself says: which models it holds work for, and how full it is.
type fills struct {
	queue  *queue.Queue
	asking singleflight.Group // for the models

	mu      sync.Mutex
	models  map[job.Model]bool
	modelAt time.Time
	depth   map[job.Model]depthAt
	done    float64
	doneAt  time.Time
}

type depthAt struct {
	depth queue.Depth
	at    time.Time
}

// fillsAge is how long an answer of the queue's is good for, fillTimeout how long one is waited for.
const (
	fillsAge    = 2 * time.Second
	fillTimeout = 300 * time.Millisecond
)

func newFills(q *queue.Queue) *fills { return &fills{queue: q, depth: make(map[job.Model]depthAt)} }

// holds tells whether the model has a stream of work.
func (f *fills) holds(ctx context.Context, m job.Model) (bool, error) {
	all, err := f.all(ctx)
	return all[m], err
}

// all are the models that have a stream of work; the map is not changed any more. One caller asks the queue, and those that come meanwhile share its answer, so that a queue which hangs delays nobody by more than
// one time-out.
func (f *fills) all(ctx context.Context) (map[job.Model]bool, error) {
	f.mu.Lock()
	models, fresh := f.models, time.Since(f.modelAt) <= fillsAge
	f.mu.Unlock()
	if fresh {
		return models, nil
	}
	answer, err, _ := f.asking.Do("", func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), fillsAge) // others wait for it as well
		defer cancel()
		list, err := f.queue.Models(ctx)
		if err != nil {
			return nil, fmt.Errorf("listing the models that have work: %w", err)
		}
		models := make(map[job.Model]bool, len(list))
		for _, m := range list {
			models[m] = true
		}
		f.mu.Lock()
		defer f.mu.Unlock()
		f.models, f.modelAt = models, time.Now()
		return models, nil
	})
	if err != nil {
		return nil, err
	}
	return answer.(map[job.Model]bool), nil
}

// doneFill is the share of the outcomes' stream in use, as far as is known.
func (f *fills) doneFill(ctx context.Context) float64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	if time.Since(f.doneAt) > fillsAge {
		f.doneAt = time.Now() // also after a failure: the publish itself will tell
		ctx, cancel := context.WithTimeout(ctx, fillTimeout)
		defer cancel()
		if fill, err := f.queue.DoneFill(ctx); err == nil {
			f.done = fill
		}
	}
	return f.done
}

// depthOf is the depth of a model's durable stream, as far as is known.
func (f *fills) depthOf(ctx context.Context, m job.Model) queue.Depth {
	f.mu.Lock()
	defer f.mu.Unlock()
	d := f.depth[m]
	if time.Since(d.at) > fillsAge {
		d.at = time.Now() // also after a failure: the publish itself will tell
		ctx, cancel := context.WithTimeout(ctx, fillTimeout)
		defer cancel()
		if depth, err := f.queue.Depth(ctx, queue.Work, m); err == nil {
			d.depth = depth
		}
		f.depth[m] = d
	}
	return d.depth
}
