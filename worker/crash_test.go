package worker_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/blob"
	"github.com/millrace/millrace/internal/engine/emulator"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/results"
	"github.com/millrace/millrace/internal/testenv"
)

// TestDeathBetweenTheStepsOfAnEnd: a worker dies at each border of the steps that end a job. The next delivery ends it, once, with no engine call once DONE has the outcome.
func TestDeathBetweenTheStepsOfAnEnd(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		dies  func(*process)
		calls int
	}{
		"before the outcome is sent":            {func(p *process) { p.link.cutOn("HPUB done.", false) }, 2},
		"behind the outcome, before its answer": {func(p *process) { p.link.cutOn("HPUB done.", true) }, 1},
		"behind the outcome, before the record": {func(p *process) { p.wire.cutOn(`"state":"completed"`) }, 1},
		"behind the record, before the ack":     {func(p *process) { p.link.cutOn("+ACK", false) }, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, change := range []func(*job.Job){withEvents, func(j *job.Job) { j.Blob = job.RequestBlob(j.ID) }} {
				e := newEnv(t, 500*time.Millisecond)
				eng, calls := emulate(t, emulator.Config{})
				first := e.work(eng.URL)
				c.dies(first)
				m := e.job(chat("hello [[emulator:tokens=5]]", ""), change)
				j := e.submit(m)
				e.until("the first worker is dead", func() bool { return first.link.isDown() || first.wire.isDown() })
				first.die()
				e.work(eng.URL)
				e.completed(j)
				want := c.calls
				if j.Events { // its readers have the whole answer: nothing is left to generate
					want = 1
				}
				if n := calls.of(string(j.ID)); n != want {
					t.Errorf("%d calls, want %d", n, want)
				}
				rec := e.get(j)
				if j.Events {
					if events := e.events(j); events[len(events)-1].Kind != job.EventDone || events[len(events)-1].N != rec.N {
						t.Errorf("the last event is %+v, the record's number %d", events[len(events)-1], rec.N)
					}
				}
				if j.Blob != "" {
					e.until("the request's object is gone", func() bool { _, err := e.blobs.Get(context.Background(), j.Blob); return err != nil })
				}
			}
		})
	}
}

func (l *link) isDown() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.down
}

func (w *wire) isDown() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.down
}

// TestLostAnswerOfDoneIsAskedAgain: the outcome was stored and nobody said so; the worker lives, and its repeat finds its own.
func TestLostAnswerOfDoneIsAskedAgain(t *testing.T) {
	t.Parallel()
	e := newEnv(t, time.Minute)
	eng, calls := emulate(t, emulator.Config{})
	p := e.work(eng.URL)
	p.link.cutOn("HPUB done.", true)
	j := e.submit(e.job(chat("hello", ""), withEvents))
	e.until("the link is cut", p.link.isDown)
	p.link.mend()
	e.completed(j)
	if n := calls.of(string(j.ID)); n != 1 || len(e.get(j).Attempts) != 1 {
		t.Errorf("%d calls, record %+v", n, e.get(j))
	}
}

// TestZombieIsFenced: a worker stands still past its lease while another one finishes its job; what it says late is refused.
func TestZombieIsFenced(t *testing.T) {
	t.Parallel()
	e := newEnv(t, time.Second)
	release := make(chan struct{})
	slow := play(t, func(w http.ResponseWriter, r *http.Request) {
		<-release
		stream(`{"choices":[{"index":0,"delta":{"content":"late"}}]}`)(w, r)
	})
	zombie := e.work(slow.URL, generic)
	j := e.submit(e.job(chat("hello", ""), withEvents))
	e.running(j, 1)
	e.until("the engine has it", func() bool { return slow.of(string(j.ID)) == 1 })
	zombie.link.freeze()
	zombie.wire.freeze()
	fast := play(t, stream(`{"choices":[{"index":0,"delta":{"content":"new"}}]}`))
	other := e.work(fast.URL, generic)
	first := e.completed(j)
	if !strings.Contains(string(first), "new") {
		t.Fatalf("the answer is %s", first)
	}
	close(release)
	zombie.link.thaw()
	zombie.wire.thaw()
	e.until("the zombie gives up", func() bool { return gauge(e, zombie, "millrace_worker_attempts_total") == 1 })
	if rec := e.get(j); rec.Outcome.Attempts[1].Worker != other.ID() || len(rec.Outcome.Attempts) != 2 || rec.Outcome.Token != rec.Token {
		t.Errorf("record %+v", rec)
	}
	if again := e.completed(j); string(again) != string(first) {
		t.Errorf("the answer became %s", again)
	}
	var all strings.Builder
	for _, ev := range e.events(j) {
		all.Write(ev.Data)
	}
	if strings.Contains(all.String(), "late") {
		t.Errorf("the events have the zombie's: %s", all.String())
	}
}

// TestSecondOutcomeYieldsToTheFirst: an older attempt was quicker with DONE while the newer one had shown its own events. Readers are told the text that counts.
func TestSecondOutcomeYieldsToTheFirst(t *testing.T) {
	t.Parallel()
	for name, size := range map[string]int{"in DONE": 10, "in the object store": blob.Threshold + 1} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newEnv(t, 5*time.Second)
			release := make(chan struct{})
			eng := play(t, func(w http.ResponseWriter, r *http.Request) {
				send(w, `{"choices":[{"index":0,"delta":{"content":"second"}}]}`)
				<-release
				send(w, "[DONE]")
			})
			e.work(eng.URL, generic)
			m := e.job(chat("x", ""), withEvents)
			j := e.submit(m)
			e.running(j, 1)
			e.until("it streams", func() bool { return len(e.events(j)) == 2 })
			text := strings.Repeat("f", size)
			first := fmt.Appendf(nil, `{"choices":[{"index":0,"message":{"content":%q}}]}`, text)
			e.settleAs(j, 1, first)
			close(release)
			e.completed(j)
			events := e.events(j)
			if diff := cmp.Diff([]job.EventKind{job.EventStatus, job.EventToken, job.EventReset, job.EventDone}, kinds(events)); diff != "" {
				t.Fatal(diff)
			}
			if got := string(events[2].Data); got != `{"text":"`+text+`"}` {
				t.Errorf("the reset has %d bytes", len(got))
			}
			if rec := e.get(j); rec.Outcome.Token != 1 {
				t.Errorf("the outcome of %d counts", rec.Outcome.Token)
			}
		})
	}
}

// TestPoisonEndsAndTakesNobodyAlong: a job whose workers die before its first token is not run for ever, and those that ran beside it when the first one died are not charged again, though all
// come back together.
func TestPoisonEndsAndTakesNobodyAlong(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 500*time.Millisecond)
	eng, calls := emulate(t, emulator.Config{})
	var bystanders []*job.Job
	for range 4 {
		bystanders = append(bystanders, e.submit(e.job(chat(fmt.Sprintf("bystander %d [[emulator:hang-after=1,times=1]]", len(bystanders)), ""), withEvents)))
	}
	poison := e.submit(e.job(chat("poison [[emulator:hang]]", ""), withEvents))
	alone := func(c *workerConfig) { c.alone = patience } // no suspect is slow because of the machine
	for n := range 3 {
		p := e.work(eng.URL, alone)
		e.until("the poison is called", func() bool { return calls.of(string(poison.ID)) == n+1 })
		for _, j := range bystanders {
			if n == 0 {
				e.running(j, 1)
			}
		}
		p.die()
		held, err := e.results.Held(t.Context(), p.ID())
		e.ok(err)
		for _, id := range held { // as the dispatcher does
			if _, err := e.results.EndLease(t.Context(), id, p.ID(), true); err != nil && !errors.Is(err, results.ErrFenced) {
				t.Error(err)
			}
		}
	}
	e.work(eng.URL, alone)
	if rec := e.await(poison); rec.State != job.Failed || rec.Outcome.Error.CodeOf() != job.CodeWorkerCrashed || rec.Deaths != 3 || len(rec.Outcome.Attempts) != 4 {
		t.Errorf("record %+v", rec)
	}
	if n := calls.of(string(poison.ID)); n != 3 {
		t.Errorf("%d calls", n)
	}
	for _, j := range bystanders {
		e.completed(j)
		if rec := e.get(j); rec.Charged != 1 {
			t.Errorf("a bystander was charged %d times: %+v", rec.Charged, rec.Attempts)
		}
	}
}

// TestRedisAwayWhileRunning: the outcome is in DONE, and the record follows when the store is back.
func TestRedisAwayWhileRunning(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 2*time.Second)
	release := make(chan struct{})
	eng := play(t, func(w http.ResponseWriter, r *http.Request) {
		send(w, `{"choices":[{"index":0,"delta":{"content":"a"}}]}`)
		<-release
		send(w, `{"choices":[{"index":0,"delta":{"content":"b"}}]}`, "[DONE]")
	})
	p := e.work(eng.URL, generic)
	j := e.submit(e.job(chat("x", ""), withEvents))
	e.until("it streams", func() bool { return len(e.events(j)) == 2 })
	p.wire.cut()
	close(release)
	e.until("DONE has it", func() bool {
		_, err := e.queue.Outcome(t.Context(), j.Tenant, j.Group, j.ID)
		return err == nil
	})
	if rec := e.get(j); rec.State != job.Running || !e.queued(j) {
		t.Errorf("the record is %s", rec.State)
	}
	p.wire.mend()
	e.completed(j)
	events := e.events(j)
	if diff := cmp.Diff([]job.EventKind{job.EventStatus, job.EventToken, job.EventDone}, kinds(events)); diff != "" || len(events) != 4 {
		t.Error(diff, len(events))
	}
	if rec := e.get(j); eng.of(string(j.ID)) != 1 || len(rec.Attempts) != 1 {
		t.Errorf("%d calls, record %+v", eng.of(string(j.ID)), rec)
	}
}

// TestRedisAwayBeforeTheClaim: nothing is run, nothing is charged, and it runs when the store is back.
func TestRedisAwayBeforeTheClaim(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 5*time.Second)
	eng, calls := emulate(t, emulator.Config{})
	p := e.work(eng.URL)
	p.wire.cut()
	j := e.submit(e.job(chat("x", "")))
	e.until("it was pulled", func() bool {
		d, err := e.queue.Depth(t.Context(), queue.Work, model)
		return err == nil && d.Delivered[job.Standard] == 1
	})
	p.wire.mend()
	e.completed(j)
	if rec := e.get(j); rec.Charged+rec.Uncharged != 0 || calls.of(string(j.ID)) != 1 {
		t.Errorf("record %+v after %d calls", rec, calls.of(string(j.ID)))
	}
}

// TestWipedRedisIsRestoredByTheWorker: on the real server and on the embedded one the store is wiped in the middle of a stream, and while the engine is silent. The record, the lease
// and all events of the attempt come back.
func TestWipedRedisIsRestoredByTheWorker(t *testing.T) {
	t.Parallel()
	for name, open := range map[string]func(t *testing.T) *env{
		"embedded": func(t *testing.T) *env { return newEnv(t, time.Second) },
		"real": func(t *testing.T) *env {
			r := testenv.Redis(t)
			return newEnvOn(t, time.Second, r.URL(), func() { flushAll(t, r.Addr) })
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := open(t)
			next := make(chan string)
			eng := play(t, func(w http.ResponseWriter, _ *http.Request) {
				for text := range next {
					send(w, fmt.Sprintf(`{"choices":[{"index":0,"delta":{"content":%q}}]}`, text))
				}
				send(w, "[DONE]")
			})
			e.work(eng.URL, generic)
			j := e.submit(e.job(chat("x", ""), withEvents))
			next <- "a"
			next <- "b"
			e.until("it streams", func() bool { return len(e.events(j)) == 3 })
			token := e.get(j).Token
			e.wipe()
			e.until("all is back while the engine is silent", func() bool {
				rec, err := e.results.Get(t.Context(), j.ID)
				return err == nil && rec.State == job.Running && rec.Token == token && rec.Lease > e.results.Now() && len(e.events(j)) == 3
			})
			e.wipe()
			next <- "c"
			close(next)
			e.completed(j)
			events := e.events(j)
			if diff := cmp.Diff([]job.EventKind{job.EventStatus, job.EventToken, job.EventDone}, kinds(events)); diff != "" || len(events) != 5 {
				t.Error(diff, len(events))
			}
			for i, ev := range events {
				if ev.N != int64(i)+1 {
					t.Errorf("event %d has number %d", i, ev.N)
				}
			}
			if n := eng.of(string(j.ID)); n != 1 {
				t.Errorf("%d calls", n)
			}
		})
	}
}

// TestNATSRestartChargesNobody: what runs goes on, and is settled when the server is back.
func TestNATSRestartChargesNobody(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 2*time.Second)
	release := make(chan struct{})
	eng := play(t, func(w http.ResponseWriter, r *http.Request) {
		<-release
		reply(200, `{"choices":[]}`)(w, r)
	})
	p := e.work(eng.URL, generic)
	jobs := []*job.Job{e.submit(e.job(chat("a", ""))), e.submit(e.job(chat("b", ""), withEvents))}
	for _, j := range jobs {
		e.running(j, 1)
		e.until("the engine has it", func() bool { return eng.of(string(j.ID)) == 1 })
	}
	e.stopNATS()
	close(release) // they end while it is away
	e.until("the worker has noticed", func() bool { return !p.nc.IsConnected() })
	e.startNATS()
	for _, j := range jobs {
		e.completed(j)
		if rec := e.get(j); len(rec.Attempts) != 1 || rec.Charged+rec.Uncharged != 0 || eng.of(string(j.ID)) != 1 {
			t.Errorf("record %+v after %d calls", rec, eng.of(string(j.ID)))
		}
	}
	later := e.submit(e.job(chat("c", ""))) // and the worker pulls again
	e.completed(later)
}
