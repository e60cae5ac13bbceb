package api

import (
	"context"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"

	"github.com/millrace/millrace/internal/admission"
	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/results"
)

// why says why a queued job does not run, where it stands, and when it may start.
func (s *Server) why(v *view) *queueObject {
	j := &v.job
	workers := s.deps.Cluster.Workers(j.Model)
	var info *cluster.QueueInfo
	if q, ok := s.queueInfo(j.Model); ok {
		info = &q
	}
	mean := s.meanJob(j.Model, info)
	before, known := aheadOf(j, v.place, info, mean)
	cold := s.prospect(j.Model, workers, j.Class, before.jobs)
	o := &queueObject{Reason: cold.reason, ETASeconds: cold.in}
	delay := v.notBefore - s.deps.Results.Now()
	if delay > 0 && (cold.in == nil || *cold.in < delay.Seconds()) {
		o.Reason, o.ETASeconds = reasonRetryDelay, seconds(delay)
	}
	if info != nil && slices.Contains(info.Quota, j.Tenant) && couldRun(o.Reason) && !j.Live() {
		o.Reason = reasonQuota
	}
	if !known {
		return o
	}
	position := before.jobs + 1
	o.Position = &position
	switch o.Reason {
	case reasonDispatching, reasonSaturated, reasonLimit:
		o.ETASeconds = eta(before, mean, o.Reason == reasonDispatching, workers, s.pace.tokens(j.Model, workers, mean))
	case reasonStarting:
		o.ETASeconds = cold.start(before)
	}
	return o
}

// ahead is what goes before a waiting job: jobs that wait, and the tokens that they are expected to need.
type ahead struct {
	jobs   int
	tokens float64
}

// aheadOf is what goes before j; false if nobody knows. With a place those of its own class are counted that came before it, without those that workers have; all of higher classes count. Without one, which a live call has not, it is an upper
// bound: all that wait of its class and above, and those in its tenant's line.
func aheadOf(j *job.Job, p *results.Place, q *cluster.QueueInfo, mean float64) (ahead, bool) {
	var a ahead
	if p == nil {
		if q == nil {
			return a, false
		}
		n := q.WaitingLines[j.Tenant]
		for _, c := range job.Classes() {
			if c.Rank() <= j.Class.Rank() {
				n += q.Waiting[c]
			}
		}
		a.jobs = max(0, n-1)
		a.tokens = float64(a.jobs) * mean
		return a, true
	}
	for rank, c := range job.Classes()[:max(0, j.Class.Rank())+1] {
		there := p.Classes[rank]
		of := mean // one job's tokens
		if there.Jobs > 0 {
			of = float64(there.Tokens) / float64(there.Jobs)
		}
		var n, tokens float64
		if c == j.Class {
			n, tokens = float64(p.Jobs), float64(p.Tokens)
		} else {
			n, tokens = float64(there.Jobs), float64(there.Tokens)
		}
		if q != nil && n > 0 { // without what workers have
			waits := max(0, n-float64(q.Delivered[c]))
			n, tokens = waits, tokens*waits/n
		}
		if q != nil && c != j.Class && float64(q.Waiting[c]) > n { // live calls are in no backlog
			tokens += (float64(q.Waiting[c]) - n) * of
			n = float64(q.Waiting[c])
		}
		a.jobs += int(n)
		a.tokens += tokens
	}
	return a, true
}

// eta is in how many seconds a job starts behind what goes before it; nil if nobody knows. rate is in tokens per second, 0 if unknown.
func eta(before ahead, mean float64, hasRoom bool, workers []cluster.Member, rate float64) *float64 {
	if hasRoom {
		var free job.Tokens
		for _, w := range workers {
			if w.Worker != nil && w.Worker.State == cluster.Ready {
				free += w.Worker.Free
			}
		}
		if before.tokens <= float64(free) { // it is on its way
			return new(float64)
		}
	}
	if rate <= 0 || before.jobs > 0 && before.tokens <= 0 {
		return nil
	}
	// Room comes each time that a job ends.
	t := math.Ceil((before.tokens+mean)/rate*10) / 10
	if t > maxETA.Seconds() {
		return nil // not a time that anybody should plan with
	}
	return &t
}

// maxETA is the longest time that is told: a job does not live longer.
const maxETA = 7 * 24 * time.Hour

// meanJob is the mean expectation of the model's jobs in tokens: of those that came in here, else of the backlog; 0 if there is none.
func (s *Server) meanJob(m job.Model, q *cluster.QueueInfo) float64 {
	if mean := s.pace.mean(m); mean > 0 {
		return mean
	}
	if q != nil && q.Total.Jobs > 0 {
		return float64(q.Total.Tokens) / float64(q.Total.Jobs)
	}
	return 0
}

// rate is how many expected tokens per second the model's workers get done, 0 if unknown.
func (s *Server) rate(m job.Model) float64 {
	var info *cluster.QueueInfo
	if q, ok := s.queueInfo(m); ok {
		info = &q
	}
	return s.pace.tokens(m, s.deps.Cluster.Workers(m), s.meanJob(m, info))
}

// locate finds out where the queued ones of some jobs stand. Best effort: without it positions are rougher.
func (s *Server) locate(ctx context.Context, views ...*view) {
	var jobs []*job.Job
	var waiting []*view
	for _, v := range views {
		if v != nil && v.state == job.Queued && v.place == nil && !v.job.Live() {
			jobs, waiting = append(jobs, &v.job), append(waiting, v)
		}
	}
	if len(jobs) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, placeTimeout)
	defer cancel()
	places, err := s.deps.Results.Places(ctx, jobs)
	if err != nil {
		s.log.Debug("reading the places of waiting jobs", "err", err)
		return
	}
	for i, v := range waiting {
		v.place = places[i]
	}
}

// placeTimeout bounds the look at the backlog, without which a job can be shown all the same.
const placeTimeout = 500 * time.Millisecond

// What keeps a job from starting.
const (
	reasonDispatching = "dispatching" // a worker has room, and places for those before it
	reasonSaturated   = "saturated"   // every ready one is full
	reasonLimit       = "limit"       // every ready one holds back, or has too few places for those before it, though its cache has room
	reasonRetryDelay  = "retry_delay"
	reasonQuota       = "quota" // as much of its tenant's work is with workers as may be
	reasonNoWorker    = "no_worker"
	reasonStarting    = "starting"          // a worker starts, or is about to be asked for
	reasonUnavailable = "model_unavailable" // no worker can be started, which is tried again
)

// couldRun tells whether a reason is no trouble of the workers': what else keeps a job waiting counts then.
func couldRun(reason string) bool {
	return reason == reasonDispatching || reason == reasonSaturated || reason == reasonLimit
}

// prospect is the first thing that blocks a job of a class, behind others, of a model with such workers, and how long that lasts.
func (s *Server) prospect(m job.Model, workers []cluster.Member, class job.Class, before int) prospect {
	if ok, _ := s.deps.Cluster.Connected(); !ok {
		return prospect{reason: "queue_unavailable"}
	}
	return prospectOf(blocking(workers, class, before), s.pools(m), time.Now())
}

// room tells whether a ready worker would start a job of a class now.
func room(w *cluster.WorkerInfo, class job.Class) bool {
	return w.Free > 0 && w.InHand == 0 && !limited(w, class)
}

// limited tells whether a worker holds jobs of a class back for another reason than its cache.
func limited(w *cluster.WorkerInfo, class job.Class) bool {
	return w.Brake != "" || placesLeft(w, class) == 0
}

// placesLeft is how many jobs of a class, of one sequence each, a worker would start more, whatever its cache has room for.
func placesLeft(w *cluster.WorkerInfo, class job.Class) int {
	limits := []int{w.Limit, w.PlaceLimit}
	if class == job.Batch {
		limits[1] = w.BatchLimit
	}
	left := math.MaxInt
	for _, n := range limits {
		if n > 0 {
			left = min(left, max(0, n-max(w.Running, w.Sequences))) // an older worker tells its jobs alone
		}
	}
	return left
}

// blocking names what keeps workers from starting a job of a class, behind others.
func blocking(workers []cluster.Member, class job.Class, before int) string {
	count := make(map[cluster.WorkerState]int)
	hasRoom, full := false, false
	places := 0
	for _, w := range workers {
		if w.Worker == nil {
			continue
		}
		count[w.Worker.State]++
		if w.Worker.State == cluster.Ready {
			if room(w.Worker, class) {
				hasRoom = true
				places += min(placesLeft(w.Worker, class), math.MaxInt32) // the sum of many is a number, too
			}
			full = full || !limited(w.Worker, class)
		}
	}
	switch {
	case hasRoom && before < places:
		return reasonDispatching
	case hasRoom: // for those before it
		return reasonLimit
	case count[cluster.Ready] > 0 && full:
		return reasonSaturated
	case count[cluster.Ready] > 0:
		return reasonLimit
	case count[cluster.Starting] > 0:
		return reasonStarting
	case count[cluster.Stalled] > 0:
		return "stalled"
	case count[cluster.Unready] > 0:
		return "unready"
	case count[cluster.Draining] > 0:
		return "draining"
	}
	return reasonNoWorker
}

// pressure is what is known of the load on a model's workers and of the interactive work that waits for them, for a call that comes now.
func (s *Server) pressure(m job.Model, now time.Time) admission.Pressure {
	workers := s.deps.Cluster.Workers(m)
	var p admission.Pressure
	for _, w := range workers {
		if w.Worker == nil || w.Worker.State != cluster.Ready {
			continue
		}
		p.Ready++
		if w.Worker.Load > admission.BusyAt {
			p.Busy++
		}
		if ttft := time.Duration(w.Worker.TTFT * float64(time.Second)); ttft > 0 && (p.TTFT == 0 || ttft < p.TTFT) {
			p.TTFT = ttft
		}
	}
	if p.Ready == 0 || p.Busy < p.Ready {
		return p
	}
	l, leads := s.leader()
	var info *cluster.QueueInfo
	if q, ok := s.queueInfo(m); ok {
		info = &q
	}
	p.Rate = s.pace.tokens(m, workers, s.meanJob(m, info))
	if !leads || info == nil { // what is held here is all that is known
		p.Ahead = s.held.waiting(m)
		return p
	}
	// What waited a moment ago, less what was done since, and what has come in here since.
	came, mean := s.pace.since(m, l.Heard)
	if mean == 0 {
		mean = s.meanJob(m, info)
	}
	ahead := float64(info.Waiting[job.Interactive])*mean + float64(came) - p.Rate*max(0, now.Sub(l.Heard).Seconds())
	p.Ahead = job.Tokens(max(0, ahead))
	return p
}

// waiting is the expected tokens of the held calls of a model that no worker has taken yet.
func (h *held) waiting(m job.Model) job.Tokens {
	var sum job.Tokens
	for _, c := range h.all() {
		if w, _, _ := c.seat.Holder(); w == "" && c.message.Job.Model == m {
			sum += c.message.Job.Expected()
		}
	}
	return sum
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

// waiting are the models for which work waits, by the dispatcher's last word.
func (s *Server) waiting() map[job.Model]bool {
	l, _ := s.leader()
	waiting := make(map[job.Model]bool, len(l.Queues))
	for _, q := range l.Queues {
		for _, n := range q.Waiting {
			if n > 0 {
				waiting[q.Model] = true
			}
		}
		for _, n := range q.BatchLines {
			if n > 0 {
				waiting[q.Model] = true
			}
		}
	}
	return waiting
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
			s.pace.observe(now, s.deps.Cluster.Workers(""), s.waiting())
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
