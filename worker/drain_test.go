package worker_test

import (
	"net/http"
	"testing"
	"time"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/engine/emulator"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/results"
)

// ends tells the worker to stop, and returns how long it took.
func (e *env) ends(p *process) time.Duration {
	e.Helper()
	begin := time.Now()
	p.stop()
	select {
	case err := <-p.ended:
		p.ended <- nil
		e.ok(err)
	case <-time.After(patience):
		e.Fatal("the worker does not end")
	}
	return time.Since(begin)
}

// TestIdleWorkerEndsAtOnce: and not when its pulls do, which last for seconds.
func TestIdleWorkerEndsAtOnce(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 5*time.Second)
	eng, _ := emulate(t, emulator.Config{})
	p := e.work(eng.URL)
	j := e.submit(e.job(chat("x", "")))
	e.completed(j)
	if took := e.ends(p); took > 2*time.Second {
		t.Errorf("it took %s", took)
	}
	e.until("others know", func() bool { return !e.cluster.Alive(string(p.ID())) })
}

// TestDrainFinishesWorkInFlightAndHandsTheRestBackAtOnce: the ack wait is long, so that only what is handed back can run elsewhere.
func TestDrainFinishesWorkInFlightAndHandsTheRestBackAtOnce(t *testing.T) {
	t.Parallel()
	e := newEnv(t, time.Hour)
	release := make(chan struct{})
	slow := play(t, func(w http.ResponseWriter, r *http.Request) {
		send(w, `{"choices":[{"index":0,"delta":{"content":"a"}}]}`)
		<-release
		send(w, `{"choices":[{"index":0,"delta":{"content":"b"}}]}`, "[DONE]")
	})
	p := e.work(slow.URL, generic, func(c *workerConfig) { c.engine.MaxConcurrency = 1; c.Drain = patience })
	running := e.submit(e.job(chat("runs", ""), withEvents))
	e.running(running, 1)
	inHand := e.submit(e.job(chat("in hand", ""), func(j *job.Job) { j.Class = job.Interactive }))
	ownLane := e.job(chat("its own lane", ""))
	_, err := e.results.Accept(t.Context(), &ownLane.Job, ownLane.Body, results.Limits{})
	e.ok(err)
	e.ok(e.queue.Enqueue(t.Context(), queue.Work, queue.WorkerLane(p.ID()), ownLane))
	ended := make(chan time.Duration, 1)
	go func() { ended <- e.ends(p) }()
	e.until("the worker drains", func() bool { return p.Ready() != nil })

	fast, _ := emulate(t, emulator.Config{})
	other := e.work(fast.URL)
	e.completed(inHand)
	if rec := e.get(inHand); rec.Outcome.Attempts[0].Worker != other.ID() || rec.Charged+rec.Uncharged != 0 {
		t.Errorf("record %+v", rec)
	}
	select {
	case took := <-ended:
		t.Fatalf("the worker ended after %s with work in flight", took)
	default:
	}
	close(release)
	<-ended
	if rec := e.get(running); rec.State != job.Completed || len(rec.Attempts) != 1 || len(e.events(running)) != 4 {
		t.Errorf("record %+v", rec)
	}
	if slow.of(string(ownLane.Job.ID)) != 0 {
		t.Error("the worker began new work while it drained")
	}
}

// TestDrainLimitHandsBackWhatRuns: uncharged, at once.
func TestDrainLimitHandsBackWhatRuns(t *testing.T) {
	t.Parallel()
	e := newEnv(t, time.Hour)
	eng, _ := emulate(t, emulator.Config{})
	p := e.work(eng.URL, func(c *workerConfig) { c.Drain = 200 * time.Millisecond })
	j := e.submit(e.job(chat("x [[emulator:hang-after=2,times=1]]", ""), withEvents))
	e.until("it streams", func() bool { return len(e.events(j)) > 1 })
	e.ends(p)
	if rec := e.get(j); rec.State != job.Queued || rec.Charged != 0 || rec.Uncharged != 1 || rec.Attempts[0].Outcome != "drained" {
		t.Errorf("record %+v", rec)
	}
	e.work(eng.URL)
	e.completed(j)
}

// TestWorkerEndsWhileTheStoresAreAway: what it runs is found by its lease.
func TestWorkerEndsWhileTheStoresAreAway(t *testing.T) {
	t.Parallel()
	e := newEnv(t, time.Second)
	eng, calls := emulate(t, emulator.Config{})
	p := e.work(eng.URL, func(c *workerConfig) { c.Drain = 100 * time.Millisecond })
	j := e.submit(e.job(chat("x [[emulator:tokens=20,token-delay=20ms]]", ""), withEvents))
	e.until("the engine has it", func() bool { return calls.of(string(j.ID)) == 1 })
	p.die()
	e.until("the engine is through with it", func() bool { return eng.Counts().Completed+eng.Counts().Disconnects > 1 })
	if took := e.ends(p); took > 20*time.Second {
		t.Errorf("it took %s", took)
	}
	e.work(eng.URL)
	e.completed(j)
}

// heard is what heartbeats last said of a worker.
func (e *env) heard(p *process) cluster.WorkerInfo {
	for _, m := range e.cluster.Workers("") {
		if m.ID == string(p.ID()) {
			return *m.Worker
		}
	}
	return cluster.WorkerInfo{}
}

// TestOrderedWorkerFinishesWhatRunsAndStaysEmptyUntilItIsStopped: whoever ordered it sees from its heartbeats when it may be stopped, however long that takes.
func TestOrderedWorkerFinishesWhatRunsAndStaysEmptyUntilItIsStopped(t *testing.T) {
	t.Parallel()
	e := newEnv(t, time.Hour)
	release := make(chan struct{})
	slow := play(t, func(w http.ResponseWriter, r *http.Request) {
		send(w, `{"choices":[{"index":0,"delta":{"content":"a"}}]}`)
		<-release
		send(w, `{"choices":[{"index":0,"delta":{"content":"b"}}]}`, "[DONE]")
	})
	// The limit of a drain counts from the order to stop, not from that to drain.
	p := e.work(slow.URL, generic, func(c *workerConfig) { c.engine.MaxConcurrency = 1; c.Drain = time.Millisecond })
	running := e.submit(e.job(chat("runs", ""), withEvents))
	e.running(running, 1)
	inHand := e.submit(e.job(chat("in hand", ""), func(j *job.Job) { j.Class = job.Interactive }))
	for range 2 {
		e.ok(e.cluster.OrderDrain(t.Context(), string(p.ID())))
	}
	e.until("it says that it drains", func() bool {
		info := e.heard(p)
		return info.State == cluster.Draining && info.Reason == "it was told to" && info.Running == 1
	})
	fast, _ := emulate(t, emulator.Config{})
	other := e.work(fast.URL)
	e.completed(inHand)
	if rec := e.get(inHand); rec.Outcome.Attempts[0].Worker != other.ID() || rec.Charged+rec.Uncharged != 0 {
		t.Errorf("record %+v", rec)
	}
	close(release)
	if rec := e.await(running); rec.State != job.Completed || len(rec.Attempts) != 1 {
		t.Errorf("record %+v", rec)
	}
	e.until("it is empty", func() bool { return e.heard(p).Running == 0 })
	later := e.submit(e.job(chat("later", "")))
	e.completed(later)
	if rec := e.get(later); rec.Outcome.Attempts[0].Worker != other.ID() {
		t.Errorf("the worker began new work while it drained: %+v", rec)
	}
	if info := e.heard(p); info.State != cluster.Draining || info.Served != int64(running.Expected()) {
		t.Errorf("heartbeat %+v", info)
	}
	select {
	case err := <-p.ended:
		t.Fatalf("the worker ended by itself: %v", err)
	default:
	}
	if took := e.ends(p); took > 2*time.Second {
		t.Errorf("an empty worker took %s to end", took)
	}
	if err := e.cluster.OrderDrain(t.Context(), string(p.ID())); err == nil {
		t.Error("a worker that has ended was told to drain")
	}
}

// TestOrderedWorkerWhoseEngineStartsTakesNothing: it was asked for in vain, and is not needed any more.
func TestOrderedWorkerWhoseEngineStartsTakesNothing(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 5*time.Second)
	eng, calls := emulate(t, emulator.Config{})
	slow := play(t, reply(200, `{"choices":[]}`))
	slow.setUnready(true)
	p := e.start(slow.URL, generic)
	e.until("it is heard", func() bool { return e.heard(p).State == cluster.Starting })
	e.ok(e.cluster.OrderDrain(t.Context(), string(p.ID())))
	slow.setUnready(false)
	e.until("its engine has started", func() bool { info := e.heard(p); return info.State == cluster.Draining && len(info.Models) > 0 })
	j := e.submit(e.job(chat("x", "")))
	other := e.work(eng.URL)
	e.completed(j)
	if rec := e.get(j); rec.Outcome.Attempts[0].Worker != other.ID() || calls.of(string(j.ID)) != 1 {
		t.Errorf("record %+v", rec)
	}
	if took := e.ends(p); took > 2*time.Second {
		t.Errorf("it took %s", took)
	}
}
