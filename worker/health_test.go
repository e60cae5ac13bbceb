package worker_test

import (
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/engine"
	"github.com/millrace/millrace/internal/engine/emulator"
	"github.com/millrace/millrace/internal/job"
)

// front is an engine's address behind which the engine can be stopped as by SIGSTOP (the kernel takes connections, and nothing answers), and exchanged.
type front struct {
	listener net.Listener

	mu     sync.Mutex
	target string
	conns  map[net.Conn]struct{}
	thawed chan struct{}
	ended  sync.WaitGroup
}

func newFront(t testing.TB, url string) *front {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	f := &front{listener: l, target: strings.TrimPrefix(url, "http://"), conns: map[net.Conn]struct{}{}, thawed: make(chan struct{})}
	close(f.thawed)
	f.ended.Go(f.accept)
	t.Cleanup(func() {
		f.thaw()
		_ = l.Close()
		f.cut()
		f.ended.Wait()
	})
	return f
}

func (f *front) url() string { return "http://" + f.listener.Addr().String() }

func (f *front) accept() {
	for {
		from, err := f.listener.Accept()
		if err != nil {
			return
		}
		f.mu.Lock()
		target := f.target
		f.conns[from] = struct{}{}
		f.mu.Unlock()
		f.ended.Go(func() {
			defer from.Close()
			to, err := net.Dial("tcp", target)
			if err != nil {
				return
			}
			f.mu.Lock()
			f.conns[to] = struct{}{}
			f.mu.Unlock()
			f.ended.Go(func() { f.copy(from, to) })
			f.copy(to, from)
		})
	}
}

func (f *front) copy(to, from net.Conn) {
	defer to.Close()
	defer from.Close()
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		f.mu.Lock()
		thawed := f.thawed
		f.mu.Unlock()
		<-thawed
		if n > 0 {
			if _, err := to.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

func (f *front) freeze() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.thawed = make(chan struct{})
}

func (f *front) thaw() {
	f.mu.Lock()
	defer f.mu.Unlock()
	select {
	case <-f.thawed:
	default:
		close(f.thawed)
	}
}

func (f *front) cut() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for c := range f.conns {
		_ = c.Close()
	}
	clear(f.conns)
}

// exchange puts another engine in the place of the one that was there, whose connections break.
func (f *front) exchange(url string) {
	f.mu.Lock()
	f.target = strings.TrimPrefix(url, "http://")
	f.mu.Unlock()
	f.cut()
}

// hasty finds what is wrong soon.
func hasty(c *workerConfig) { c.StallTimeout, c.ProbeTimeout = time.Second, time.Second }

// gaveUp waits until the worker has given back jobs uncharged and takes no more.
func (e *env) gaveUp(p *process, jobs ...*job.Job) {
	e.Helper()
	e.until("the worker says so", func() bool { return p.Ready() != nil })
	e.until("its work goes back", func() bool {
		for _, j := range jobs {
			if rec := e.get(j); rec.Uncharged == 0 && rec.Charged == 0 {
				return false
			}
		}
		return true
	})
	for _, j := range jobs {
		if rec := e.get(j); rec.Charged != 0 {
			e.Errorf("record %+v", rec)
		}
	}
	e.idle(p)
}

// TestFrozenEngineIsFound: whether calls stream or not. It takes work again when it goes on.
func TestFrozenEngineIsFound(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 5*time.Second)
	eng, _ := emulate(t, emulator.Config{})
	f := newFront(t, eng.URL)
	p := e.work(f.url(), hasty)
	before := e.member(p)
	if before.FallBacks != 0 || before.StateSince == 0 || before.ProbeSeconds <= 0 {
		t.Errorf("it says of itself %+v", before)
	}
	f.freeze()
	streamed, plain := e.submit(e.job(chat("a", ""), withEvents)), e.submit(e.job(chat("b", "")))
	e.gaveUp(p, streamed, plain)
	w := e.member(p)
	if w.State == cluster.Ready || w.Reason == "" || w.FallBacks == 0 || w.StateSince < before.StateSince {
		t.Errorf("it says of itself %+v", w)
	}
	f.thaw()
	e.completed(streamed)
	e.completed(plain)
	e.until("it is ready", func() bool { return p.Ready() == nil })
}

// TestEngineThatNeverAnswersIsFound: it tells nothing of itself, and all its calls are unstreamed; also when it is full of them, so that a probe would have to wait.
func TestEngineThatNeverAnswersIsFound(t *testing.T) {
	t.Parallel()
	for name, places := range map[string]int{"with room": 8, "full": 1} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newEnv(t, 5*time.Second)
			eng := play(t, reply(200, `{"choices":[]}`))
			p := e.work(eng.URL, generic, hasty, func(c *workerConfig) { c.engine.MaxConcurrency = places })
			hang := func(_ http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, r.Body) // else it is not seen that the caller leaves
				<-r.Context().Done()
			}
			eng.then(hang)
			eng.thenProbes(hang)
			j := e.submit(e.job(chat("x", "")))
			e.gaveUp(p, j)
			if w := e.member(p); w.State != cluster.Stalled || !strings.Contains(w.Reason, "engine_stalled") {
				t.Errorf("it says that it is %s: %s", w.State, w.Reason)
			}
			eng.then(reply(200, `{"choices":[]}`))
			eng.thenProbes(nil)
			e.completed(j)
		})
	}
}

// TestStreamsThatNeverBeginAreFound, on an engine that completes probes.
func TestStreamsThatNeverBeginAreFound(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 5*time.Second)
	eng := play(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	})
	p := e.work(eng.URL, generic, hasty)
	j := e.submit(e.job(chat("x", ""), withEvents))
	e.until("it goes back", func() bool { return e.get(j).Uncharged > 0 })
	eng.then(stream(`{"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"stop"}]}`))
	e.completed(j)
	if rec := e.get(j); rec.Charged != 0 || rec.Outcome.Attempts[0].Outcome != "engine_stalled" {
		t.Errorf("record %+v", rec)
	}
	e.until("it is ready", func() bool { return p.Ready() == nil })
}

// TestMetricsThatHangStopNothing.
func TestMetricsThatHangStopNothing(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 5*time.Second)
	eng, _ := emulate(t, emulator.Config{})
	p := e.work(eng.URL, hasty)
	e.ok(eng.SetFaults(emulator.Faults{Metrics: emulator.MetricsSlow}))
	for range 2 {
		scrapes := gauge(e, p, "millrace_worker_engine_scrape_errors_total")
		e.until("a look fails", func() bool { return gauge(e, p, "millrace_worker_engine_scrape_errors_total") > scrapes })
		for _, change := range []func(*job.Job){withEvents, func(*job.Job) {}} {
			e.completed(e.submit(e.job(chat("x", ""), change)))
		}
	}
	if w := e.member(p); w.State != cluster.Ready || w.FallBacks != 0 {
		t.Errorf("it says of itself %+v", w)
	}
}

// TestJobsThatFailInARowEndTheTrust, until a probe passes: which it does here.
func TestJobsThatFailInARowEndTheTrust(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 5*time.Second)
	eng := play(t, reply(500, ""))
	p := e.work(eng.URL, generic)
	first := e.submit(e.job(chat("0", "")))
	if rec := e.await(first); len(rec.Outcome.Attempts) != 5 {
		t.Errorf("record %+v", rec)
	}
	if w := e.member(p); w.FallBacks != 0 {
		t.Errorf("one job alone made it fall back: %+v", w)
	}
	for range 2 {
		e.await(e.submit(e.job(chat("x", ""))))
	}
	e.until("it has fallen back and is ready again", func() bool { return p.Ready() == nil && e.member(p).FallBacks == 1 })
	if n := gauge(e, p, "millrace_worker_unready_total"); n != 1 {
		t.Errorf("%v told", n)
	}
	eng.then(reply(200, `{"choices":[]}`))
	e.completed(e.submit(e.job(chat("y", ""))))
}

// ticking is a stream that goes on until end is closed.
func ticking(end <-chan struct{}) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		for {
			send(w, `{"choices":[{"index":0,"delta":{"content":"a"}}]}`)
			select {
			case <-end:
				send(w, "[DONE]")
				return
			case <-r.Context().Done():
				return
			case <-time.After(5 * time.Millisecond):
			}
		}
	}
}

// TestBusyEngineIsWell: a probe that has to wait for its turn proves nothing while tokens come.
func TestBusyEngineIsWell(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 5*time.Second)
	end := make(chan struct{})
	eng := play(t, ticking(end))
	p := e.work(eng.URL, generic, hasty)
	long := e.submit(e.job(chat("long", ""), withEvents))
	e.until("tokens come", func() bool { return len(e.events(long)) > 3 })
	var asked sync.Once
	waiting := make(chan struct{})
	eng.thenProbes(func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		asked.Do(func() { close(waiting) })
		<-r.Context().Done()
	})
	eng.then(reply(503, "")) // a reason to probe
	e.submit(e.job(chat("x", "")))
	<-waiting
	probes := eng.probed()
	e.until("more probes have waited in vain", func() bool { return eng.probed() >= probes+2 })
	if err := p.Ready(); err != nil {
		t.Error(err)
	}
	close(end)
	eng.thenProbes(nil)
	eng.then(reply(200, `{"choices":[]}`))
	e.completed(long)
}

// TestEngineThatComesBackAsAnotherIsDetectedAnew.
func TestEngineThatComesBackAsAnotherIsDetectedAnew(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 5*time.Second)
	eng, _ := emulate(t, emulator.Config{})
	f := newFront(t, eng.URL)
	p := e.work(f.url(), hasty)
	if w := e.member(p); w.Engine != string(engine.VLLM) {
		t.Fatalf("it is %s", w.Engine)
	}
	other := play(t, reply(200, `{"choices":[]}`))
	f.exchange("http://127.0.0.1:1") // nothing is there for a while
	e.until("the worker says so", func() bool { return p.Ready() != nil })
	f.exchange(other.URL)
	e.completed(e.submit(e.job(chat("x", ""))))
	e.until("it is known as what it is", func() bool { return e.member(p).Engine == string(engine.Generic) })
}
