package api

import (
	"context"
	"net/http"
	"time"

	"github.com/millrace/millrace/internal/admission"
	"github.com/millrace/millrace/internal/affinity"
	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
)

// settleTime is for how long after its start, or after its connection came back, a process may not yet have heard of every model: an unknown one is looked for again until then.
const settleTime = 1500 * time.Millisecond

// learnTime is in how long it is worth asking again for a model that a worker which starts may serve.
const learnTime = 5 * time.Second

// admit decides whether a new job may enter, and where it waits. j is the job but for its id and times, r its request.
func (s *Server) admit(ctx context.Context, j *job.Job, r *request, live bool) (place, error) {
	if c := callerOf(ctx); c != nil && !mayUse(c.identity, r.model) {
		return place{}, noModel(r.model)
	}
	if err := s.queueAnswers(ctx); err != nil {
		return place{}, err
	}
	known, ok, err := s.known(ctx, r.model)
	if err != nil {
		return place{}, err
	}
	now := time.Now()
	v := admission.View{Known: ok, Largest: known.Largest, DoneFill: s.fills.doneFill(ctx), JobsPerSecond: s.pace.of(r.model), MaxWait: s.cfg.MaxInteractiveWait}
	switch {
	case ok && !live:
		s.outlook(ctx, j, &v)
	case ok:
		v.Unavailable, v.NextTry = s.unavailable(r.model, now)
		if v.MaxWait > 0 {
			v.Pressure = s.pressure(r.model, now)
		}
	}
	var at place
	warmth := affinity.Off
	if ok {
		v.Warm, at.left, warmth = s.warmth.find(ctx, s.deps.Cluster.Members(), j, r.object, live)
	}
	d := admission.Decide(admission.Request{
		Tenant: j.Tenant, Model: r.model, Endpoint: r.endpoint, Body: r.object, Size: int64(len(r.body)), Live: live,
	}, v)
	if d.Refuse != nil {
		at.leave()
		status := http.StatusBadRequest
		switch d.Refuse.CodeOf() {
		case job.CodeModelNotFound:
			status = http.StatusNotFound
		case job.CodeQueueFull, job.CodeRateLimit:
			status = http.StatusTooManyRequests
			s.metrics.refuse(d.Refuse.CodeOf())
			if live {
				s.metrics.submit("live", "refused")
			}
		case job.CodeModelUnavailable:
			status = http.StatusServiceUnavailable
			s.metrics.submit("live", "unavailable")
		}
		return place{}, &failure{status: status, body: d.Refuse, after: d.After}
	}
	s.metrics.affinity.WithLabelValues(string(warmth)).Inc()
	if live {
		s.pace.came(now, r.model, j.Expected(), true)
	}
	switch d.Lane {
	case admission.WorkerLane:
		at.lane = queue.WorkerLane(d.Worker)
	case admission.TenantLine:
		at.lane = queue.TenantLane(j.Tenant)
	default:
		at.lane = queue.AnyLane
	}
	return at, nil
}

// outlook fills in what is known of a model's durable stream: by the leading dispatcher's word, or, without one, by an own look.
func (s *Server) outlook(ctx context.Context, j *job.Job, v *admission.View) {
	if c := callerOf(ctx); c != nil {
		l := c.identity.Tenant.Limits
		v.Limited = l.Running > 0 || l.RunningTokens > 0
	}
	_, v.Leader = s.leader()
	var waiting map[job.Class]int
	if q, ok := s.queueInfo(j.Model); ok {
		v.WorkFill, v.TenantWaiting, v.Lined = q.WorkFill, q.WaitingLines[j.Tenant], q.Lines[j.Class]
		waiting = q.Waiting
	} else {
		d := s.fills.depthOf(ctx, j.Model)
		if d.MaxBytes > 0 {
			v.WorkFill = float64(d.Bytes) / float64(d.MaxBytes)
		}
		v.TenantWaiting = d.TenantLanes[queue.TenantLane(j.Tenant)]
		for l, n := range d.Lines {
			if l.Class == j.Class {
				v.Lined += n
			}
		}
		waiting = d.Waiting
	}
	for c, n := range waiting {
		if c.Rank() <= j.Class.Rank() {
			v.Shared += n
		}
	}
}

// knownNow is what the workers tell of the model, or told within the last day.
func (s *Server) knownNow(m job.Model) (cluster.KnownModel, bool) {
	for _, k := range s.deps.Cluster.Known() {
		if k.Model == m {
			return k, true
		}
	}
	return cluster.KnownModel{}, false
}

// known tells whether the model exists: a worker serves it or did within the last day, or its queue holds work. While a worker starts that may come to serve it, nobody can tell: that is an error.
func (s *Server) known(ctx context.Context, m job.Model) (cluster.KnownModel, bool, error) {
	for {
		if k, ok := s.knownNow(m); ok {
			return k, true, nil
		}
		learning := s.deps.Cluster.Learning()
		if k, ok := s.knownNow(m); ok { // it has learned meanwhile
			return k, true, nil
		}
		held, err := s.fills.holds(ctx, m)
		if held || err != nil {
			return cluster.KnownModel{Model: m}, held, err
		}
		switch settled := s.deps.Cluster.Listening(s.started) > settleTime; {
		case settled && learning:
			f := fail(http.StatusServiceUnavailable, job.CodeModelUnavailable, "The model %.100q is not known yet: a worker starts whose engine has not told what it serves. Try again later.", string(m)).at("model")
			f.after = learnTime
			return cluster.KnownModel{}, false, f
		case settled:
			return cluster.KnownModel{}, false, nil
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return cluster.KnownModel{}, false, ctx.Err()
		}
	}
}

// silence is after how long without a heartbeat from anybody, this process included, the queue is asked whether it is there before anything is published: what is written to a server that hangs would be
// delivered when it wakes, long after its client was told 503.
const silence = 1500 * time.Millisecond

// queueAnswers returns nil if the queue is there now, as far as can be told without waiting for it each time.
func (s *Server) queueAnswers(ctx context.Context) error {
	if ok, _ := s.deps.Cluster.Connected(); !ok {
		return unavailable(nil, "The queue is not connected: try again later.")
	}
	for _, m := range s.deps.Cluster.Members() {
		if time.Since(m.Heard) < silence {
			return nil
		}
	}
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	if err := s.deps.Queue.Healthy(ctx); err != nil {
		return unavailable(err, "The queue does not answer: try again later.")
	}
	return nil
}
