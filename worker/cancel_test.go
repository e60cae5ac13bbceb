package worker_test

import (
	"net/http"
	"testing"
	"time"

	"github.com/millrace/millrace/internal/engine/emulator"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
)

// cancel does what the API does for a client that cancels: the wish is stored, then said, and a job that waits is ended.
func (e *env) cancel(j *job.Job) {
	e.Helper()
	rec, err := e.results.AskCancel(e.Context(), j.ID)
	e.ok(err)
	e.relay.Cancel(j.ID)
	if rec.State != job.Running {
		_, err := e.settler.End(e.Context(), j, rec, job.Outcome{State: job.Cancelled, Error: job.NewError(job.TypeInvalidRequest, job.CodeCancelled, "The job was cancelled.")})
		e.ok(err)
	}
}

func (e *env) cancelled(j *job.Job) {
	e.Helper()
	if rec := e.await(j); rec.State != job.Cancelled || rec.Outcome.Error.CodeOf() != job.CodeCancelled {
		e.Errorf("outcome %+v", rec.Outcome)
	}
}

// TestCancelReachesTheEngineAndNobodyElse: of two jobs on one slot the one in hand is cancelled first, then the one that runs; both leave the third alone.
func TestCancelReachesTheEngineAndNobodyElse(t *testing.T) {
	t.Parallel()
	e := newEnv(t, time.Minute) // no renewal learns of it
	eng, calls := emulate(t, emulator.Config{Faults: emulator.Faults{MaxNumSeqs: 1}})
	p := e.work(eng.URL, generic, func(c *workerConfig) { c.engine.MaxConcurrency = 1 })
	running := e.submit(e.job(chat("runs [[emulator:hang-after=2]]", ""), withEvents))
	e.running(running, 1)
	e.until("the engine runs it", func() bool { return eng.Stats().Running == 1 })
	inHand, waiting := e.submit(e.job(chat("in hand", ""))), e.submit(e.job(chat("waits", "")))

	e.cancel(inHand)
	e.cancelled(inHand)
	if rec := e.get(running); rec.State != job.Running || eng.Counts().Disconnects != 0 {
		t.Errorf("the running job was touched: %+v", rec)
	}
	asked := time.Now()
	e.cancel(running)
	e.until("the engine is told", func() bool {
		return eng.Counts().Disconnects == 1 && eng.Stats().Running == 0 || eng.Counts().Completed > 0
	})
	if took := time.Since(asked); took > 2*time.Second {
		t.Errorf("the engine heard after %s", took)
	}
	e.cancelled(running)
	e.completed(waiting)
	if n := calls.of(string(inHand.ID)); n != 0 {
		t.Errorf("a job that was cancelled in hand was called %d times", n)
	}
	e.idle(p)
}

// TestCancelThatNobodyHeardIsLearntByRenewal: the wish is stored, and its message was lost.
func TestCancelThatNobodyHeardIsLearntByRenewal(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 500*time.Millisecond)
	eng, _ := emulate(t, emulator.Config{})
	e.work(eng.URL)
	j := e.submit(e.job(chat("x [[emulator:hang-after=2]]", ""), withEvents))
	e.running(j, 1)
	_, err := e.results.AskCancel(t.Context(), j.ID)
	e.ok(err)
	e.cancelled(j)
	e.until("the engine is told", func() bool { return eng.Counts().Disconnects == 1 })
}

// TestCancelBeforeTheClaimMakesNoCall: the wish is there when the job is claimed.
func TestCancelBeforeTheClaimMakesNoCall(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 5*time.Second)
	eng, calls := emulate(t, emulator.Config{})
	j := e.submit(e.job(chat("x", ""), withEvents))
	_, err := e.results.AskCancel(t.Context(), j.ID)
	e.ok(err)
	e.work(eng.URL)
	e.cancelled(j)
	if n := len(calls.list()); n != 0 {
		t.Errorf("%d calls", n)
	}
}

// TestLimitsStopTheCall: the job ends, and the engine is told.
func TestLimitsStopTheCall(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 5*time.Second)
	eng, _ := emulate(t, emulator.Config{})
	p := e.work(eng.URL)
	for name, c := range map[string]struct {
		change func(*job.Job)
		state  job.State
		code   job.Code
	}{
		"run_timeout": {func(j *job.Job) { j.RunTimeout = 300 }, job.Failed, job.CodeRunTimeout},
		"deadline":    {func(j *job.Job) { j.Expires = j.Created + 500 }, job.Expired, job.CodeExpired},
	} {
		t.Run(name, func(t *testing.T) {
			before := eng.Counts().Disconnects
			rec := e.await(e.submit(e.job(chat("x [[emulator:hang-after=2]]", ""), withEvents, c.change)))
			if rec.State != c.state || rec.Outcome.Error.CodeOf() != c.code {
				t.Errorf("outcome %+v", rec.Outcome)
			}
			e.until("the engine is told", func() bool { return eng.Counts().Disconnects > before })
		})
	}
	e.idle(p)
}

// TestDeadWorkIsNotRun: what is late when its turn comes ends without a call, and a job that has run once is not late for having waited.
func TestDeadWorkIsNotRun(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 5*time.Second)
	release := make(chan struct{})
	eng := play(t, func(w http.ResponseWriter, r *http.Request) {
		<-release
		reply(200, `{"choices":[]}`)(w, r)
	})
	e.work(eng.URL, generic, func(c *workerConfig) { c.engine.MaxConcurrency = 1 })
	first := e.submit(e.job(chat("holds the one slot", "")))
	e.running(first, 1)
	deadline := e.submit(e.job(chat("x", ""), func(j *job.Job) { j.Expires = j.Created + 200 }))
	queueTimeout := e.submit(e.job(chat("x", ""), func(j *job.Job) { j.QueueTimeout = 200 }))
	patient := e.submit(e.job(chat("x", ""), func(j *job.Job) { j.RunTimeout = 400 })) // its run time does not count while it waits
	e.until("they are late", func() bool { return e.results.Now() > queueTimeout.Created+500 })
	close(release)
	for _, j := range []*job.Job{deadline, queueTimeout} {
		if rec := e.await(j); rec.State != job.Expired || rec.Outcome.Error.CodeOf() != job.CodeExpired {
			t.Errorf("outcome %+v", rec.Outcome)
		}
		if n := eng.of(string(j.ID)); n != 0 {
			t.Errorf("%d calls for a late job", n)
		}
	}
	e.completed(patient)
	e.completed(first)

	const timeout = 2000
	var again *job.Job
	submitted := make(chan struct{})
	eng.then(func(w http.ResponseWriter, r *http.Request) {
		<-submitted
		for e.results.Now() <= again.Created+timeout {
			time.Sleep(10 * time.Millisecond)
		}
		reply(500, "")(w, r)
	})
	again = e.submit(e.job(chat("x", ""), func(j *job.Job) { j.QueueTimeout = timeout }))
	close(submitted)
	rec := e.await(again)
	if rec.State != job.Failed || len(rec.Outcome.Attempts) != 5 {
		t.Errorf("outcome %+v", rec.Outcome)
	}
}

// TestLongJobRunsOnce: of five times the ack wait, and one that waits in hand as long.
func TestLongJobRunsOnce(t *testing.T) {
	t.Parallel()
	const ackWait = 300 * time.Millisecond
	e := newEnv(t, ackWait)
	eng := play(t, func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-time.After(5 * ackWait):
		case <-r.Context().Done():
		}
		reply(200, `{"choices":[]}`)(w, r)
	})
	e.work(eng.URL, generic, func(c *workerConfig) { c.engine.MaxConcurrency = 1 })
	jobs := []*job.Job{e.submit(e.job(chat("a", ""))), e.submit(e.job(chat("b", "")))}
	for _, j := range jobs {
		e.completed(j)
		if n := eng.of(string(j.ID)); n != 1 {
			t.Errorf("%d calls", n)
		}
		if rec := e.get(j); len(rec.Attempts) != 1 || rec.Charged+rec.Uncharged != 0 {
			t.Errorf("record %+v", rec)
		}
	}
}

// TestTwoCopiesOfAJobEndItOnce: as a move leaves them that was cut in half.
func TestTwoCopiesOfAJobEndItOnce(t *testing.T) {
	t.Parallel()
	e := newEnv(t, time.Second)
	eng, calls := emulate(t, emulator.Config{})
	m := e.job(chat("x [[emulator:tokens=20,token-delay=20ms]]", ""), withEvents)
	e.submit(m)
	p := e.work(eng.URL)
	e.running(&m.Job, 1)
	e.ok(e.queue.Enqueue(t.Context(), queue.Work, queue.WorkerLane(p.ID()), m))
	e.completed(&m.Job)
	if n := calls.of(string(m.Job.ID)); n != 1 {
		t.Errorf("%d calls", n)
	}
}
