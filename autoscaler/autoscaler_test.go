package autoscaler_test

import (
	"testing"
	"time"

	"github.com/millrace/millrace/autoscaler"
	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/scale"
)

// From nothing to what is needed in one decision, and no more while they start.
func TestBacklogIsMetInOneDecision(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.cloud.held = true
	e.pool(func(p *scale.Pool) { p.Cooldown = scale.Duration(5 * time.Minute) })
	r := e.run(autoscaler.Config{})
	e.eventually("the pool is seen", func() bool { return e.info("p").Name != "" && e.info("p").Action == string(scale.Hold) })
	e.wait(5, 100, 0) // 500 tokens within a second, by workers of 100 tokens a second
	e.eventually("five are asked for", func() bool { return e.cloud.count() == 5 })
	var up []scale.Decision
	for _, d := range e.decisions() {
		if d.Action == scale.ScaleUp {
			up = append(up, d)
		}
	}
	if len(up) != 1 || up[0].Start != 5 || up[0].Want != 5 || up[0].Reason == "" {
		t.Errorf("%+v", up)
	}
	e.always("no more while they start", r, 25, func() bool { return e.cloud.count() == 5 && len(e.launches()) == 5 })
	e.eventually("the heartbeat tells", func() bool {
		p := e.info("p")
		return p.Starting == 5 && p.Ready == 0 && p.ReadyAt > 0
	})
	e.cloud.each(func(i *instance) { i.beat.State = cluster.Ready })
	e.eventually("all are ready", e.ready(5))
	for _, l := range e.launches() {
		if l.Ready < l.At || l.Stopping != 0 {
			t.Errorf("%+v", l)
		}
	}
	if len(e.cloud.calls()) != 5 {
		t.Errorf("asked for %q", e.cloud.calls())
	}
	if n := r.metric(t, "millrace_autoscaler_starts_total"); n != 5 {
		t.Errorf("starts %v", n)
	}
	e.cloud.rules()
}

// AS-9, and down to zero: idle ones are drained and waited for before they are stopped.
func TestIdleWorkersAreDrainedBeforeTheyAreStopped(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.pool(most(3))
	e.run(autoscaler.Config{})
	e.wait(100, 100, 0)
	e.eventually("three are ready", e.ready(3))
	e.cloud.each(func(i *instance) { i.beat.Running = 1 })
	e.wait(0, 100, 3)
	e.always("busy ones stay", nil, 40, func() bool { return len(e.cloud.stopped()) == 0 })
	e.cloud.do(func() {
		for _, i := range e.cloud.instances {
			if !i.drained.IsZero() {
				t.Errorf("%s is drained while it is busy", i.name)
			}
		}
	})
	e.cloud.each(func(i *instance) { i.beat.Running = 0 })
	e.wait(0, 0, 0)
	e.eventually("all are gone", func() bool { return e.cloud.count() == 0 && len(e.launches()) == 0 })
	e.cloud.rules()
	last := e.decisions()
	if d := last[len(last)-1]; d.Want != 0 {
		t.Errorf("%+v", d)
	}
}

// A job that comes to a worker between the decision and its draining is finished first.
func TestDrainingWorkerMayFinishFirst(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.pool(nil)
	e.run(autoscaler.Config{})
	e.wait(1, 50, 0)
	e.eventually("one is ready", e.ready(1))
	name := e.cloud.names()[0]
	// It takes a job with the order to drain.
	e.cloud.do(func() {
		i := e.cloud.instances[name]
		i.beat.InHand = 0
	})
	e.wait(0, 0, 0)
	e.eventually("it drains", func() bool {
		drained := false
		e.cloud.set(name, func(i *instance) {
			if drained = !i.drained.IsZero(); drained && len(e.cloud.stops) == 0 {
				i.beat.Running = 1
			}
		})
		return drained || e.cloud.count() == 0
	})
	e.cloud.set(name, func(i *instance) { i.beat.Running = 0 })
	e.eventually("it is gone", func() bool { return e.cloud.count() == 0 && len(e.launches()) == 0 })
}
