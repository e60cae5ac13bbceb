package autoscaler_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/millrace/millrace/autoscaler"
	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
	"github.com/millrace/millrace/internal/provider"
	"github.com/millrace/millrace/internal/scale"
)

const onePool = `
pools:
  - name: p
    models: [m]
    provider: process
    engine: {command: [engine]}
    max: 4
    min: %MIN%
    cooldown: 300ms
    idle: 300ms
`

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path+".new", []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
}

func withMin(n string) string { return strings.ReplaceAll(onePool, "%MIN%", n) }

func TestPoolsFileIsReadAgain(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	path := filepath.Join(t.TempDir(), "pools.yaml")
	write(t, path, withMin("1"))
	r := e.run(autoscaler.Config{PoolsFile: path})
	e.eventually("one is ready", e.ready(1))
	first := e.cloud.names()[0]
	write(t, path, withMin("2"))
	e.eventually("two are ready", e.ready(2))
	if e.cloud.names()[0] != first && e.cloud.names()[1] != first {
		t.Error("a change of the pool has cost it its worker")
	}

	// A file that cannot be used, and one that is gone, leave the pools as they are.
	for name, spoil := range map[string]func(){
		"no YAML":       func() { write(t, path, "pools: [") },
		"unknown field": func() { write(t, path, withMin("2")+"    maximum: 3\n") },
		"empty":         func() { write(t, path, " \n") },
		"gone":          func() { e.ok(os.Remove(path)) },
	} {
		spoil()
		e.eventually(name+": the metric tells", func() bool { return r.metric(t, "millrace_autoscaler_pools_file_invalid") == 1 })
		e.always(name+": the pool stays", r, 10, func() bool { return e.cloud.count() == 2 })
		write(t, path, withMin("2")+"    max: 4\n"[:0])
		e.eventually(name+": the file is well again", func() bool { return r.metric(t, "millrace_autoscaler_pools_file_invalid") == 0 })
	}

	// A pool that is not in it any more is removed, with its workers.
	write(t, path, "pools: []\n")
	e.eventually("nothing is left", func() bool {
		states, err := e.ledger.PoolStates(t.Context())
		return err == nil && len(states) == 0 && e.cloud.count() == 0 && len(e.launches()) == 0 && e.info("p").Name == ""
	})
	e.cloud.rules()
}

func TestModelOfAnotherPoolSpoilsTheFile(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.pool(func(p *scale.Pool) { p.Name = "q" })
	path := filepath.Join(t.TempDir(), "pools.yaml")
	write(t, path, withMin("1"))
	r := e.run(autoscaler.Config{PoolsFile: path})
	e.eventually("the metric tells", func() bool {
		return r.metric(t, "millrace_autoscaler_pools_file_invalid") == 1 && e.info("q").Name != ""
	})
	if e.info("p").Name != "" || e.cloud.count() != 0 {
		t.Error("the pool is there")
	}
	e.ok(e.ledger.DeletePool(t.Context(), "q"))
	e.eventually("it is once the other one is gone", func() bool { return e.ready(1)() && r.metric(t, "millrace_autoscaler_pools_file_invalid") == 0 })
}

// A removed pool's busy workers finish first, and the next leader goes on with it: it knows the pool's description from what was kept.
func TestRemovedPoolIsDrained(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.pool(func(p *scale.Pool) { p.Min = 2 })
	first := e.run(autoscaler.Config{})
	e.eventually("two are ready", e.ready(2))
	busy := e.cloud.names()[0]
	e.cloud.set(busy, func(i *instance) { i.beat.Running = 1 })
	e.ok(e.ledger.DeletePool(t.Context(), "p"))
	e.eventually("the idle one is gone, and the busy one drains", func() bool {
		drains := false
		e.cloud.do(func() { i := e.cloud.instances[busy]; drains = i != nil && !i.drained.IsZero() })
		return e.cloud.count() == 1 && drains
	})
	first.stop()
	r := e.run(autoscaler.Config{})
	e.always("it finishes first", r, 40, func() bool { return e.cloud.count() == 1 })
	e.cloud.set(busy, func(i *instance) { i.beat.Running = 0 })
	e.eventually("nothing is left", func() bool {
		states, err := e.ledger.PoolStates(t.Context())
		return err == nil && len(states) == 0 && e.cloud.count() == 0 && len(e.launches()) == 0
	})
	e.cloud.rules()
}

// Drain bounds how long a worker may take.
func TestWorkerThatDoesNotFinishIsStoppedAfterItsDrain(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.cloud.rough = true
	e.pool(func(p *scale.Pool) { p.Min, p.Drain = 1, scale.Duration(300*time.Millisecond) })
	e.run(autoscaler.Config{})
	e.eventually("one is ready", e.ready(1))
	e.cloud.each(func(i *instance) { i.beat.Running = 1 })
	limits := make(chan time.Duration, 1)
	e.cloud.onStop = func(name string) (bool, error) {
		e.cloud.do(func() {
			select {
			case limits <- e.cloud.instances[name].limit:
			default:
			}
		})
		return true, nil
	}
	begun := time.Now()
	e.ok(e.ledger.DeletePool(t.Context(), "p"))
	e.eventually("it is stopped", func() bool { return e.cloud.count() == 0 && len(e.launches()) == 0 })
	if took := time.Since(begun); took < 300*time.Millisecond {
		t.Errorf("after %s", took)
	}
	// All of that time counts: told to stop, it does not begin anew.
	if limit := <-limits; limit <= 0 || limit > 300*time.Millisecond {
		t.Errorf("it was told to drain within %s", limit)
	}
}

// A pool that moves to another provider leaves the old one first.
func TestPoolThatMovesLeavesNothingBehind(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	p := e.pool(func(p *scale.Pool) { p.Min = 1 })
	e.run(autoscaler.Config{})
	e.eventually("one is ready", e.ready(1))
	p.Provider, p.Engine.Command = "command", nil
	p.Command = &scale.Command{Start: []string{"x"}, Stop: []string{"x"}, List: []string{"x"}, Timeout: scale.Duration(2 * time.Minute)}
	e.update(p)
	e.eventually("it has moved", func() bool {
		i := e.info("p")
		return e.cloud.count() == 0 && e.cloud.elsewhere.count() == 1 && i.Ready == 1
	})
	e.cloud.rules()
}

func TestPoolWithoutItsProviderSaysSo(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.pool(func(p *scale.Pool) {
		p.Provider, p.Engine.Command, p.Min = "kubernetes", nil, 1
		p.Kubernetes = &scale.Kubernetes{Kind: "Deployment", Name: "x"}
	})
	e.run(autoscaler.Config{})
	e.eventually("it says so", func() bool {
		p := e.info("p")
		return strings.Contains(p.Unavailable, "kubernetes") && p.Action == string(scale.Unknown)
	})
	if len(e.launches()) != 0 {
		t.Error("something was asked for")
	}
	e.ok(e.ledger.DeletePool(t.Context(), "p"))
	e.eventually("it is gone", func() bool { return e.info("p").Name == "" })
}

// The platform ends, and its workers with it; what was learned stays.
func TestWorkersEndWithThePlatform(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.pool(func(p *scale.Pool) { p.Min = 2 })
	r := e.run(autoscaler.Config{StopWorkers: true})
	e.eventually("two are ready", e.ready(2))
	busy := e.cloud.names()[0]
	e.cloud.set(busy, func(i *instance) { i.beat.Running = 1 })
	r.cancel()
	e.eventually("the busy one drains", func() bool {
		drains := false
		e.cloud.do(func() { i := e.cloud.instances[busy]; drains = i != nil && !i.drained.IsZero() })
		return drains && e.cloud.count() == 1
	})
	e.cloud.set(busy, func(i *instance) { i.beat.Running = 0 })
	<-r.done
	if e.cloud.count() != 0 || len(e.launches()) != 0 {
		t.Error(e.state())
	}
	e.cloud.rules()
	states, err := e.ledger.PoolStates(t.Context())
	var s struct {
		ColdStarts []float64 `json:"cold_starts"`
	}
	if err != nil || json.Unmarshal(states["p"], &s) != nil || len(s.ColdStarts) != 2 {
		t.Errorf("%s, %v", states["p"], err)
	}
}

// A provider that fails does not keep the platform from ending.
func TestPlatformEndsThoughItsWorkersCannotBeStopped(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.pool(func(p *scale.Pool) { p.Min = 1 })
	r := e.run(autoscaler.Config{StopWorkers: true})
	e.eventually("one is ready", e.ready(1))
	e.cloud.do(func() { e.cloud.onStop = func(string) (bool, error) { return false, errAway } })
	r.stop()
	if l := e.launches(); len(l) != 1 || l[0].Stopping == 0 {
		t.Errorf("%+v", l)
	}
	e.cloud.do(func() { e.cloud.onStop = nil })
	e.run(autoscaler.Config{})
	e.eventually("the next one stops it, and starts another one", func() bool { return len(e.cloud.stopped()) == 1 && e.ready(1)() })
}

func TestWorkersOutliveAnAutoscaler(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.pool(func(p *scale.Pool) { p.Min = 2 })
	r := e.run(autoscaler.Config{})
	e.eventually("two are ready", e.ready(2))
	r.stop()
	if e.cloud.count() != 2 || len(e.launches()) != 2 {
		t.Error(e.state())
	}
	e.run(autoscaler.Config{})
	e.eventually("the next one has them", e.ready(2))
	e.unique(2)
}

func TestNewRefusesWhatIsNonsense(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	deps := func() autoscaler.Deps {
		return autoscaler.Deps{Cluster: e.seen, Ledger: e.ledger, Providers: map[string]provider.Provider{}, Registerer: prometheus.NewRegistry(), Log: e.log()}
	}
	bad := filepath.Join(t.TempDir(), "bad.yaml")
	write(t, bad, withMin("5"))
	hidden := filepath.Join(t.TempDir(), "hidden.yaml")
	write(t, hidden, strings.Replace(withMin("1"), "{command: [engine]}", "{command: [engine], env: {HF_TOKEN: \"***\"}}", 1))
	for want, cfg := range map[string]autoscaler.Config{
		`pool "p": engine.env.HF_TOKEN is ***`: {PoolsFile: hidden},
		"Tick":                                 {Tick: -1},
		"no/such":                              {PoolsFile: "no/such"},
		"min is 5":                             {PoolsFile: bad},
		"pools file":                           {PoolsFile: bad},
	} {
		if _, err := autoscaler.New(cfg, deps()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
	if _, err := autoscaler.New(autoscaler.Config{}, autoscaler.Deps{}); err == nil {
		t.Error("without dependencies")
	}
	a, err := autoscaler.New(autoscaler.Config{}, deps())
	if err != nil || a.Ready() != nil {
		t.Error(err)
	}
}

// The pools' models are known while no worker serves them.
func TestModelsOfPoolsAreKnown(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.pool(func(p *scale.Pool) { p.Models = []job.Model{"m", "rare"} })
	e.run(autoscaler.Config{})
	e.eventually("both are known", func() bool {
		n := 0
		for _, k := range e.seen.Known() {
			if k.Model == "m" || k.Model == "rare" {
				n++
			}
		}
		return n == 2
	})
}

// A model that no pool names any more is forgotten soon, however the pool went, unless a worker has served it.
func TestModelsOfRemovedPoolsAreForgotten(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.ok(e.cluster().Remember(t.Context(), cluster.KnownModel{Model: "served"}))
	p := e.pool(func(p *scale.Pool) { p.Models = []job.Model{"served", "dropped", "never"} })
	e.run(autoscaler.Config{})
	known := func(want ...job.Model) func() bool {
		return func() bool {
			var got []job.Model
			for _, k := range e.seen.Known() {
				if k.Model != model {
					got = append(got, k.Model)
				}
			}
			return slices.Equal(got, want)
		}
	}
	e.eventually("all are known", known("dropped", "never", "served"))
	p.Models = []job.Model{"served", "never"}
	e.update(p)
	e.eventually("what the pool names no more is forgotten", known("never", "served"))
	e.ok(e.ledger.DeletePool(t.Context(), "p"))
	e.eventually("what was never served is forgotten", known("served"))
}

func TestTheRemovalOfAPoolIsADecision(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.pool(func(p *scale.Pool) { p.Min = 2 })
	e.run(autoscaler.Config{})
	e.eventually("two are ready", e.ready(2))
	names := e.cloud.names()
	e.ok(e.ledger.DeletePool(t.Context(), "p"))
	e.eventually("nothing is left", func() bool {
		states, err := e.ledger.PoolStates(t.Context())
		return err == nil && len(states) == 0 && e.cloud.count() == 0
	})
	all := e.decisions()
	last := all[len(all)-1]
	if last.Action != scale.ScaleDown || last.Want != 0 || !slices.Equal(last.Stop, names) || last.Reason != "the pool was removed: its 2 workers are drained and stopped" {
		t.Errorf("%+v", last)
	}
	if before := all[len(all)-2]; strings.Contains(before.Reason, "removed") {
		t.Errorf("it is there twice: %+v", before)
	}
}

// AS-4: each kind of work on an idle model starts a worker.
func TestEachKindOfWorkStartsAWorker(t *testing.T) {
	t.Parallel()
	class := func(c job.Class, jobs, delivered int) func(*env) {
		return func(e *env) {
			e.mu.Lock()
			e.queues = []cluster.QueueInfo{{
				Model: model, ByClass: map[job.Class]cluster.Backlog{c: {Jobs: jobs, Tokens: job.Tokens(jobs) * 10}}, Delivered: map[job.Class]int{c: delivered},
			}}
			e.mu.Unlock()
		}
	}
	for name, put := range map[string]func(*env){
		"interactive job": class(job.Interactive, 1, 0),
		"standard job":    class(job.Standard, 1, 0),
		"batch line":      class(job.Batch, 1, 0),
		"retry":           class(job.Standard, 1, 1),
		"held call": func(e *env) {
			e.mu.Lock()
			e.traffic = []cluster.Traffic{{Model: model, WaitingCalls: 1, WaitingTokens: 10}}
			e.mu.Unlock()
		},
		"line of a batch that is not queued": func(e *env) {
			ctx := t.Context()
			e.ok(e.ledger.InsertFile(ctx, ledger.File{ID: "file-1", Tenant: job.DefaultTenant, Purpose: "batch", Created: 1}, 0))
			e.ok(e.ledger.CreateBatch(ctx, ledger.Batch{ID: "batch_1", Tenant: job.DefaultTenant, InputFile: "file-1", Created: 1, Expires: job.MillisOf(time.Now().Add(time.Hour))}))
			e.ok(e.ledger.Lead(ctx, 1))
			_, err := e.ledger.StartBatch(ctx, 1, "batch_1", 2, model, []ledger.Portion{{Model: model, Lines: 1, Tokens: 10}})
			e.ok(err)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newEnv(t)
			e.pool(slow)
			e.run(autoscaler.Config{})
			e.eventually("the pool holds", func() bool { p := e.info("p"); return p.Action == string(scale.Hold) })
			put(e)
			e.eventually("one is ready", e.ready(1))
		})
	}
}

// DE-5: each decision that changes something or declines is kept with what it was made of.
func TestDecisionsAreKeptWithTheirReasons(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.pool(func(p *scale.Pool) { p.Max = 2; slow(p) })
	e.run(autoscaler.Config{}, func(t *autoscaler.Timing) { t.Repeat(100 * time.Millisecond) })
	e.wait(5, 100, 0)
	e.eventually("max is reached", func() bool { p := e.info("p"); return p.Action == string(scale.AtMax) })
	n := len(e.decisions())
	e.eventually("it is told again and again", func() bool { return len(e.decisions()) >= n+3 })
	seen := map[scale.Action]bool{}
	for _, d := range e.decisions() {
		seen[d.Action] = true
		if d.Reason == "" || d.Pool != "p" || d.At.IsZero() || d.Sample.Now.IsZero() {
			t.Errorf("%+v", d)
		}
	}
	if !seen[scale.ScaleUp] || !seen[scale.AtMax] {
		t.Errorf("%v", seen)
	}
}

// What was learned outlives its leader.
func TestNextLeaderKnowsWhatWasLearned(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.pool(func(p *scale.Pool) { p.Min, p.ColdStart = 1, scale.Duration(time.Hour) })
	r := e.run(autoscaler.Config{})
	e.eventually("one is ready", e.ready(1))
	e.eventually("it is kept", func() bool {
		states, err := e.ledger.PoolStates(t.Context())
		return err == nil && strings.Contains(string(states["p"]), "cold_starts")
	})
	r.stop()
	samples := make(chan scale.Sample, 100)
	e.runOn(e.cluster(), e.ledger, autoscaler.Config{}, func(a *autoscaler.Autoscaler) {
		a.DecideBy(func(s scale.Sample, h scale.History, p *scale.Pool) scale.Decision {
			select {
			case samples <- s:
			default:
			}
			return scale.Decide(s, h, p)
		})
	})
	if s := <-samples; s.ColdStart.Samples != 1 || s.ColdStart.P50 > time.Minute {
		t.Errorf("%+v", s.ColdStart)
	}
}

// TestAPoolWaitsForTheOneThatLeavesItsWorkload: a pool is removed, and another one made of the same Kubernetes workload while the first one's workers are still there. They are not taken for the second one's, nor its own for the first one's.
func TestAPoolWaitsForTheOneThatLeavesItsWorkload(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.cloud.shared = true
	e.providers["kubernetes"] = e.cloud
	of := func(name string) func(*scale.Pool) {
		return func(p *scale.Pool) {
			p.Name, p.Provider, p.Kubernetes, p.Engine, p.Min = name, "kubernetes", &scale.Kubernetes{Kind: "Deployment", Name: "w"}, scale.Engine{}, 2
		}
	}
	e.pool(of("p"))
	e.run(autoscaler.Config{})
	e.eventually("the first one's workers are there", e.ready(2))
	e.cloud.each(func(i *instance) { i.beat.Running = 1 })
	e.ok(e.ledger.DeletePool(t.Context(), "p"))
	e.pool(of("q"))
	e.eventually("the second one waits", func() bool {
		return strings.Contains(e.info("q").Reason, "still that of the pool p") && e.info("p").Draining == 2
	})
	if n := e.cloud.count(); n != 2 {
		t.Errorf("there are %d workers, want those that drain", n)
	}
	e.cloud.each(func(i *instance) { i.beat.Running = 0 })
	e.eventually("the second one has its own workers", func() bool { return e.info("q").Ready == 2 && e.cloud.count() == 2 })
	for _, name := range e.cloud.names() {
		if !strings.HasPrefix(name, "q-") {
			t.Errorf("%s is still there", name)
		}
	}
}
