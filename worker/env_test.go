package worker_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/millrace/millrace/internal/blob"
	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/embedded"
	"github.com/millrace/millrace/internal/engine"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/relay"
	"github.com/millrace/millrace/internal/results"
	"github.com/millrace/millrace/internal/settle"
	"github.com/millrace/millrace/internal/testenv"
	"github.com/millrace/millrace/worker"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, testenv.NATSLeaves()...) }

const (
	model job.Model = "emulator-test"
	api   job.API   = "api-of-the-test"
	// patience bounds what a test waits for. Machines that are busy make it long; nothing takes it when all is well.
	patience = 60 * time.Second
)

// env is a platform without workers: a NATS server that can be stopped and started, a result store, and what an API and a dispatcher do with them.
type env struct {
	testing.TB
	dir     string
	server  atomic.Pointer[embedded.NATS]
	redis   string // its URL
	wipe    func()
	ackWait time.Duration
	parts
	settler *settle.Settler
}

// parts are one process's access to the platform.
type parts struct {
	nc      *nats.Conn
	queue   *queue.Queue
	results *results.Store
	cluster *cluster.Cluster
	relay   *relay.Relay
	blobs   blob.Store
}

// newEnv starts a platform on an embedded store, whose work is delivered again after ackWait.
func newEnv(t testing.TB, ackWait time.Duration) *env {
	r := testenv.MiniRedis(t)
	return newEnvOn(t, ackWait, r.URL(), r.Wipe)
}

func newEnvOn(t testing.TB, ackWait time.Duration, redis string, wipe func()) *env {
	t.Helper()
	e := &env{TB: t, dir: t.TempDir(), redis: redis, wipe: wipe, ackWait: ackWait}
	e.startNATS()
	t.Cleanup(e.stopNATS)
	e.parts = e.open(newLink(e), redis)
	e.settler = &settle.Settler{Queue: e.queue, Results: e.results, Relay: e.relay, Blobs: e.blobs, Log: testenv.Log(t)}
	e.ok(e.results.SetSentinel(context.Background()))
	e.ok(e.queue.EnsureModel(context.Background(), model))
	e.background(func(ctx context.Context) error {
		return e.cluster.Announce(ctx, func() cluster.Heartbeat { return cluster.Heartbeat{ID: string(api), Role: cluster.RoleAPI} })
	})
	return e
}

func (e *env) ok(err error) {
	e.Helper()
	if err != nil {
		e.Fatal(err)
	}
}

// background runs f until the test ends.
func (e *env) background(f func(context.Context) error) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- f(ctx) }()
	e.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			e.Error(err)
		}
	})
}

func (e *env) startNATS() {
	e.Helper()
	n, err := embedded.StartNATS(embedded.NATSConfig{Dir: filepath.Join(e.dir, "nats"), StoreLimit: testenv.Ample, MemoryLimit: testenv.Ample, Log: testenv.Log(e), Relaxed: true})
	e.ok(err)
	e.server.Store(n)
}

func (e *env) stopNATS() {
	if n := e.server.Swap(nil); n != nil {
		n.Shutdown()
	}
}

// open opens a process's access, over a link of its own to NATS, with the store at that URL.
func (e *env) open(l *link, redis string) parts {
	e.Helper()
	log := testenv.Log(e)
	nc, err := nats.Connect("", nats.InProcessServer(l), nats.ReconnectBufSize(-1), nats.MaxReconnects(-1), nats.ReconnectWait(20*time.Millisecond),
		nats.ReconnectJitter(0, 0), nats.Timeout(patience), nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
	e.ok(err)
	e.Cleanup(nc.Close)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	p := parts{nc: nc, relay: relay.New(nc, log)}
	p.queue, err = queue.Open(ctx, nc, queue.Config{WorkAckWait: e.ackWait, LiveAckWait: e.ackWait}, log)
	e.ok(err)
	e.Cleanup(p.queue.Close)
	p.cluster, err = cluster.Open(ctx, nc, cluster.Config{}, log)
	e.ok(err)
	e.Cleanup(p.cluster.Close)
	p.results, err = results.Open(ctx, results.Config{URL: redis}, log)
	e.ok(err)
	e.Cleanup(func() { e.ok(p.results.Close()) })
	p.blobs, err = blob.OpenDir(filepath.Join(e.dir, "blobs"))
	e.ok(err)
	return p
}

// link is one process's way to NATS, which can be cut, frozen, and cut when something certain is sent.
type link struct {
	env *env

	mu     sync.Mutex
	conns  map[net.Conn]struct{}
	down   bool
	thawed chan struct{} // closed unless frozen
	trap   func(data []byte) (cutBefore, cutBehind bool)
}

func newLink(e *env) *link {
	l := &link{env: e, conns: map[net.Conn]struct{}{}, thawed: make(chan struct{})}
	close(l.thawed)
	return l
}

// InProcessConn makes link a nats.InProcessConnProvider.
func (l *link) InProcessConn() (net.Conn, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := l.env.server.Load()
	if n == nil || l.down {
		return nil, errors.New("the server is away")
	}
	c, err := n.InProcessConn()
	if err != nil {
		return nil, err
	}
	lc := &linkConn{Conn: c, link: l}
	l.conns[lc] = struct{}{}
	return lc, nil
}

// cut breaks the connection, and lets no other be made before mend.
func (l *link) cut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cutLocked()
}

func (l *link) cutLocked() {
	l.down = true
	for c := range l.conns {
		_ = c.(*linkConn).Conn.Close()
	}
	clear(l.conns)
}

func (l *link) mend() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.down, l.trap = false, nil
}

// freeze holds all that is said in both directions, until thaw.
func (l *link) freeze() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.thawed = make(chan struct{})
}

func (l *link) thaw() {
	l.mu.Lock()
	defer l.mu.Unlock()
	close(l.thawed)
}

// cutOn cuts the link once text is about to be sent, or has just been.
func (l *link) cutOn(text string, behind bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.trap = func(data []byte) (bool, bool) {
		hit := bytes.Contains(data, []byte(text))
		return hit && !behind, hit && behind
	}
}

type linkConn struct {
	net.Conn
	link *link
}

func (c *linkConn) Write(b []byte) (int, error) {
	c.link.mu.Lock()
	thawed := c.link.thawed
	before, behind := false, false
	if c.link.trap != nil {
		if before, behind = c.link.trap(b); before {
			c.link.cutLocked()
		}
	}
	c.link.mu.Unlock()
	if before {
		return 0, net.ErrClosed
	}
	<-thawed
	n, err := c.Conn.Write(b)
	if behind {
		c.link.cut()
	}
	return n, err
}

func (c *linkConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.link.mu.Lock()
	thawed := c.link.thawed
	c.link.mu.Unlock()
	<-thawed
	return n, err
}

// wire is one process's way to the result store, which can be cut, frozen, and cut when something certain is sent.
type wire struct {
	listener net.Listener
	target   string

	mu     sync.Mutex
	conns  map[net.Conn]struct{}
	down   bool
	thawed chan struct{}
	trap   string // cut before this is sent
	ended  sync.WaitGroup
}

func newWire(t testing.TB, target string) *wire {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	w := &wire{listener: l, target: target, conns: map[net.Conn]struct{}{}, thawed: make(chan struct{})}
	close(w.thawed)
	w.ended.Go(w.accept)
	t.Cleanup(func() {
		w.cut()
		_ = l.Close()
		w.ended.Wait()
	})
	return w
}

func (w *wire) accept() {
	for {
		from, err := w.listener.Accept()
		if err != nil {
			return
		}
		to, err := net.Dial("tcp", w.target)
		w.mu.Lock()
		if err != nil || w.down {
			_ = from.Close()
			if err == nil {
				_ = to.Close()
			}
			w.mu.Unlock()
			continue
		}
		w.conns[from], w.conns[to] = struct{}{}, struct{}{}
		w.mu.Unlock()
		w.ended.Go(func() { w.copy(to, from, true) })
		w.ended.Go(func() { w.copy(from, to, false) })
	}
}

func (w *wire) copy(to, from net.Conn, forth bool) {
	defer to.Close()   // the other side sees the end in any case
	defer from.Close() // likewise
	buf := make([]byte, 64<<10)
	for {
		n, err := from.Read(buf)
		if err != nil {
			return
		}
		w.mu.Lock()
		if forth && w.trap != "" && bytes.Contains(buf[:n], []byte(w.trap)) {
			w.cutLocked()
		}
		down, thawed := w.down, w.thawed
		w.mu.Unlock()
		if down {
			return
		}
		<-thawed
		if _, err := to.Write(buf[:n]); err != nil {
			return
		}
	}
}

func (w *wire) cut() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.cutLocked()
}

func (w *wire) cutLocked() {
	w.down = true
	for c := range w.conns {
		_ = c.Close()
	}
	clear(w.conns)
}

func (w *wire) mend() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.down, w.trap = false, ""
}

func (w *wire) freeze() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.thawed = make(chan struct{})
}

func (w *wire) thaw() {
	w.mu.Lock()
	defer w.mu.Unlock()
	close(w.thawed)
}

func (w *wire) cutOn(text string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.trap = text
}

// process is a worker with its own ways to the stores.
type process struct {
	*worker.Worker
	parts
	link   *link
	wire   *wire
	reg    *prometheus.Registry
	stop   context.CancelFunc
	ended  chan error
	engine *engine.Engine
}

type workerConfig struct {
	worker.Config
	engine engine.Config
	gpus   worker.GPUs
	alone  time.Duration // that a suspect starts alone, if not the usual
	log    *slog.Logger
}

// work starts a worker beside the engine at url, and returns once it is ready.
func (e *env) work(url string, change ...func(*workerConfig)) *process {
	e.Helper()
	p := e.start(url, change...)
	e.until("the worker is ready", func() bool { return p.Ready() == nil })
	return p
}

// start starts a worker beside the engine at url.
func (e *env) start(url string, change ...func(*workerConfig)) *process {
	e.Helper()
	c := workerConfig{Config: worker.Config{Name: "w", Drain: time.Second, RetryDelay: 10 * time.Millisecond}, engine: engine.Config{URL: url}, log: testenv.Log(e)}
	for _, f := range change {
		f(&c)
	}
	p := &process{link: newLink(e), reg: prometheus.NewRegistry(), ended: make(chan error, 1)}
	target, password := hostOf(e.redis)
	p.wire = newWire(e, target)
	p.parts = e.open(p.link, "redis://"+password+p.wire.listener.Addr().String())
	var err error
	p.engine, err = engine.New(c.engine, c.log)
	e.ok(err)
	p.Worker, err = worker.New(c.Config, worker.Deps{
		Queue: p.queue, Blobs: p.blobs, Results: p.results, Cluster: p.cluster, Relay: p.relay, Engine: p.engine, Registerer: p.reg, Log: c.log, GPUs: c.gpus,
	})
	e.ok(err)
	if c.alone > 0 {
		p.StartAlone(c.alone)
	}
	ctx, stop := context.WithCancel(context.Background())
	p.stop = stop
	go func() { p.ended <- p.Run(ctx) }()
	e.Cleanup(func() {
		p.link.mend()
		p.wire.mend()
		p.stop()
		if err := <-p.ended; err != nil {
			e.Errorf("the worker ended with %v", err)
		}
		p.ended <- nil
		p.engine.Close()
	})
	return p
}

// hostOf parts a URL redis://[:password@]host:port.
func hostOf(url string) (host, password string) {
	rest := url[len("redis://"):]
	if i := bytes.LastIndexByte([]byte(rest), '@'); i >= 0 {
		return rest[i+1:], rest[:i+1]
	}
	return rest, ""
}

// die cuts all ways to the stores: what the worker does from here on nobody hears of.
func (p *process) die() {
	p.link.cut()
	p.wire.cut()
}

// until repeats check until it returns true.
func (e *env) until(what string, check func() bool) {
	e.Helper()
	for deadline := time.Now().Add(patience); !check(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			e.Fatalf("timed out: %s", what)
		}
	}
}

// job is a standard durable job on the chat endpoint; change alters it.
func (e *env) job(body string, change ...func(*job.Job)) *queue.Message {
	now := e.results.Now()
	m := &queue.Message{Job: job.Job{
		ID: job.NewID(now.Time()), Tenant: job.DefaultTenant, Model: model, Endpoint: job.ChatCompletions, Class: job.Standard, Group: job.NoGroup,
		Created: now, Expires: now + job.Millis(time.Hour.Milliseconds()), Cost: job.Cost{Prompt: 10, Answers: 1}, BodySize: int64(len(body)),
	}, Body: []byte(body)}
	for _, f := range change {
		f(&m.Job)
	}
	if m.Job.Blob != "" {
		_, err := e.blobs.Put(context.Background(), m.Job.Blob, bytes.NewReader(m.Body))
		e.ok(err)
		m.Body = nil
	}
	return m
}

func withEvents(j *job.Job) { j.Events = true }

// chat is a chat request whose only message is text, with more members before it.
func chat(text, more string) string {
	return fmt.Sprintf(`{"model":%q,%s"messages":[{"role":"user","content":%q}]}`, model, more, text)
}

// submit accepts a durable job as the API does.
func (e *env) submit(m *queue.Message) *job.Job {
	e.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	_, err := e.results.Accept(ctx, &m.Job, m.Body, results.Limits{})
	e.ok(err)
	e.whileAway(func() error { return e.queue.Enqueue(ctx, queue.Work, queue.AnyLane, m) })
	e.ok(e.results.Queued(ctx, &m.Job, m.Body))
	return &m.Job
}

func (e *env) get(j *job.Job) *results.Record {
	e.Helper()
	rec, err := e.results.Get(context.Background(), j.ID)
	e.ok(err)
	return rec
}

// running waits until the job's attempt number n (from 1) runs.
func (e *env) running(j *job.Job, n int) *results.Record {
	e.Helper()
	var rec *results.Record
	e.until("the job runs", func() bool {
		rec = e.get(j)
		return rec.State == job.Running && len(rec.Attempts) >= n
	})
	return rec
}

// await waits for the job's end, checks that all stores agree on it and that its message is gone, and returns the record.
func (e *env) await(j *job.Job) *results.Record {
	e.Helper()
	var rec *results.Record
	e.until("the job ends", func() bool {
		var err error
		rec, err = e.results.Get(context.Background(), j.ID)
		return err == nil && rec.State.Ended()
	})
	done := e.outcome(j)
	if done.Outcome.State != rec.State || done.Outcome.Token != rec.Outcome.Token {
		e.Fatalf("DONE has %+v, the record %+v", done.Outcome, rec.Outcome)
	}
	e.until("the message is gone", func() bool { return !e.queued(j) })
	return rec
}

func (e *env) outcome(j *job.Job) *queue.Record {
	e.Helper()
	var r *queue.Record
	e.whileAway(func() (err error) {
		r, err = e.queue.Outcome(context.Background(), j.Tenant, j.Group, j.ID)
		return err
	})
	return r
}

// queued tells whether the job has a message.
func (e *env) queued(j *job.Job) bool {
	e.Helper()
	var there bool
	e.whileAway(func() error {
		present, err := e.queue.Present(context.Background(), j.Model)
		_, there = present[j.ID]
		return err
	})
	return there
}

// whileAway repeats ask while NATS is away.
func (e *env) whileAway(ask func() error) {
	e.Helper()
	var err error
	e.until("NATS answers", func() bool {
		err = ask()
		return !errors.Is(err, queue.ErrUnavailable)
	})
	e.ok(err)
}

// completed waits for the job's end, which must be good, and returns the answer.
func (e *env) completed(j *job.Job) []byte {
	e.Helper()
	rec := e.await(j)
	if rec.State != job.Completed {
		e.Fatalf("the job is %s: %v, attempts %+v", rec.State, rec.Outcome.Error, rec.Attempts)
	}
	return e.outcome(j).Result
}

// events are all events of a job.
func (e *env) events(j *job.Job) []job.Event {
	e.Helper()
	events, _, err := e.results.Events(context.Background(), j.ID, 0, 100_000)
	e.ok(err)
	return events
}

// kinds are the kinds of events, those that repeat told once.
func kinds(events []job.Event) []job.EventKind {
	var all []job.EventKind
	for _, ev := range events {
		if len(all) == 0 || all[len(all)-1] != ev.Kind {
			all = append(all, ev.Kind)
		}
	}
	return all
}

// object reads an object.
func (e *env) object(name string) string {
	e.Helper()
	r, err := e.blobs.Get(context.Background(), name)
	e.ok(err)
	defer r.Close() // read only
	raw, err := io.ReadAll(r)
	e.ok(err)
	return string(raw)
}

// settleAs writes a good outcome of another attempt into DONE, and nothing else.
func (e *env) settleAs(j *job.Job, token job.Token, result []byte) {
	e.Helper()
	o := job.Outcome{State: job.Completed, Token: token, StatusCode: 200, ContentType: "application/json", Started: j.Created, Finished: e.results.Now(), ResultSize: int64(len(result))}
	if len(result) > blob.Threshold {
		o.Blob = job.ResultBlob(j.ID, token)
		_, err := e.blobs.Put(context.Background(), o.Blob, bytes.NewReader(result))
		e.ok(err)
		result = nil
	}
	_, err := e.queue.Settle(context.Background(), &queue.Record{Job: *j, Outcome: o, Result: result})
	e.ok(err)
}

// flushAll wipes a Redis server.
func flushAll(t testing.TB, addr string) {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close() // the answer is read
	_, err = io.WriteString(c, "FLUSHALL\r\n")
	answer := make([]byte, 5)
	if err == nil {
		_, err = io.ReadFull(c, answer)
	}
	if err != nil || string(answer) != "+OK\r\n" {
		t.Fatalf("wiping the store: %s %v", answer, err)
	}
}
