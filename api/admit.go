package api

import (
	"context"
	"net/http"
	"time"

	"github.com/millrace/millrace/internal/admission"
	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
)

// settleTime is for how long after its start, or after its connection came back, a process may not yet have heard of every model: an unknown one is looked for again until then.
const settleTime = 1500 * time.Millisecond

// admit decides whether a new job may enter, and in which lane it waits.
func (s *Server) admit(ctx context.Context, t job.Tenant, r *request, live bool) (queue.Lane, error) {
	if err := s.queueAnswers(ctx); err != nil {
		return "", err
	}
	known, ok, err := s.known(ctx, r.model)
	if err != nil {
		return "", err
	}
	v := admission.View{Known: ok, Largest: known.Largest, DoneFill: s.fills.doneFill(ctx), JobsPerSecond: s.pace.of(r.model)}
	if ok && !live {
		s.outlook(ctx, t, r.model, &v)
	}
	d := admission.Decide(admission.Request{
		Tenant: t, Model: r.model, Endpoint: r.endpoint, Body: r.object, Size: int64(len(r.body)), Live: live,
	}, v)
	if d.Refuse != nil {
		status := http.StatusBadRequest
		switch d.Refuse.CodeOf() {
		case job.CodeModelNotFound:
			status = http.StatusNotFound
		case job.CodeQueueFull, job.CodeRateLimit:
			status = http.StatusTooManyRequests
		}
		return "", &failure{status: status, body: d.Refuse}
	}
	if d.Lane == admission.TenantLine {
		return queue.TenantLane(t), nil
	}
	return queue.AnyLane, nil
}

// outlook fills in what is known of a model's durable stream: by the leading dispatcher's word, or, without one, by an own look.
func (s *Server) outlook(ctx context.Context, t job.Tenant, m job.Model, v *admission.View) {
	_, v.Leader = s.leader()
	if q, ok := s.queueInfo(m); ok {
		v.WorkFill, v.TenantWaiting = q.WorkFill, q.WaitingLines[t]
		for _, n := range q.Waiting {
			v.Shared += n
		}
		return
	}
	d := s.fills.depthOf(ctx, m)
	if d.MaxBytes > 0 {
		v.WorkFill = float64(d.Bytes) / float64(d.MaxBytes)
	}
	v.TenantWaiting = d.TenantLanes[queue.TenantLane(t)]
	for _, n := range d.Waiting {
		v.Shared += n
	}
}

// known tells whether the model exists: a worker serves it or did within the last day, or its queue holds work.
func (s *Server) known(ctx context.Context, m job.Model) (cluster.KnownModel, bool, error) {
	for {
		for _, k := range s.deps.Cluster.Known() {
			if k.Model == m {
				return k, true, nil
			}
		}
		held, err := s.fills.holds(ctx, m)
		if held || err != nil {
			return cluster.KnownModel{Model: m}, held, err
		}
		_, since := s.deps.Cluster.Connected()
		if since.Before(s.started) {
			since = s.started
		}
		if time.Since(since) > settleTime {
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
