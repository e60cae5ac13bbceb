package dispatcher_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/millrace/millrace/dispatcher"
	"github.com/millrace/millrace/internal/blob"
	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/embedded"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/relay"
	"github.com/millrace/millrace/internal/results"
	"github.com/millrace/millrace/internal/testenv"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, testenv.NATSLeaves()...) }

const (
	model job.Model = "m"
	// patience bounds what a test waits for. Machines that are busy make it long; nothing takes it when all is well.
	patience = 60 * time.Second
)

// env is a platform: its servers, and a process that does what an API does.
type env struct {
	testing.TB
	dir    string
	server *embedded.NATS
	redis  string
	wipe   func()
	parts
	leaders []*leader
}

// parts are one process's access to the platform.
type parts struct {
	link    *link
	queue   *queue.Queue
	results *results.Store
	cluster *cluster.Cluster
	relay   *relay.Relay
	blobs   blob.Store
	ledger  *ledger.Store
}

// newEnv starts a platform on an embedded store. Deliveries that nobody answers stay away for an hour, so that only what is handed back comes again.
func newEnv(t testing.TB) *env {
	r := testenv.MiniRedis(t)
	return newEnvOn(t, r.URL(), r.Wipe)
}

func newEnvOn(t testing.TB, redis string, wipe func()) *env {
	t.Helper()
	e := &env{TB: t, dir: t.TempDir(), redis: redis, wipe: wipe}
	e.server = testenv.NATS(t, func(c *embedded.NATSConfig) { c.Relaxed = true })
	e.parts = e.open()
	e.ok(e.results.SetSentinel(context.Background()))
	e.ok(e.queue.EnsureModel(context.Background(), model))
	e.announce(e.parts, cluster.Heartbeat{ID: "api-1", Role: cluster.RoleAPI})
	return e
}

func (e *env) ok(err error) {
	e.Helper()
	if err != nil {
		e.Fatal(err)
	}
}

// open opens a process's access.
func (e *env) open() parts {
	e.Helper()
	log := testenv.Log(e)
	p := parts{link: &link{server: e.server, conns: map[net.Conn]struct{}{}}}
	nc, err := nats.Connect("", nats.InProcessServer(p.link), nats.ReconnectBufSize(-1), nats.MaxReconnects(-1), nats.ReconnectWait(20*time.Millisecond),
		nats.ReconnectJitter(0, 0), nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
	e.ok(err)
	e.Cleanup(nc.Close)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	p.relay = relay.New(nc, log)
	p.queue, err = queue.Open(ctx, nc, queue.Config{WorkAckWait: time.Hour, LiveAckWait: time.Hour, WorkMaxBytes: 256 << 20, LiveMaxBytes: 16 << 20, DoneMaxBytes: 256 << 20}, log)
	e.ok(err)
	e.Cleanup(p.queue.Close)
	p.cluster, err = cluster.Open(ctx, nc, cluster.Config{Beat: 200 * time.Millisecond, Silence: time.Second}, log)
	e.ok(err)
	e.Cleanup(p.cluster.Close)
	p.results, err = results.Open(ctx, results.Config{URL: e.redis}, log)
	e.ok(err)
	e.Cleanup(func() { e.ok(p.results.Close()) })
	p.blobs, err = blob.OpenDir(filepath.Join(e.dir, "blobs"))
	e.ok(err)
	p.ledger = testenv.OpenLedger(e, "sqlite:"+filepath.Join(e.dir, "ledger.db"))
	return p
}

// announce sends a process's heartbeats until the test ends or the returned function says farewell.
func (e *env) announce(p parts, h cluster.Heartbeat) (farewell func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var done sync.WaitGroup
	done.Go(func() {
		if err := p.cluster.Announce(ctx, func() cluster.Heartbeat { return h }); err != nil {
			e.Error(err)
		}
	})
	farewell = sync.OnceFunc(func() {
		cancel()
		done.Wait()
	})
	e.Cleanup(farewell)
	return farewell
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

// link is one process's way to NATS, which can be cut.
type link struct {
	server *embedded.NATS
	mu     sync.Mutex
	conns  map[net.Conn]struct{}
	down   bool
}

// InProcessConn makes link a nats.InProcessConnProvider.
func (l *link) InProcessConn() (net.Conn, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.down {
		return nil, errors.New("the link is cut")
	}
	c, err := l.server.InProcessConn()
	if err == nil {
		l.conns[c] = struct{}{}
	}
	return c, err
}

func (l *link) cut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.down = true
	for c := range l.conns {
		_ = c.Close()
	}
	clear(l.conns)
}

func (l *link) mend() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.down = false
}

// leader is a dispatcher that leads.
type leader struct {
	*dispatcher.Dispatcher
	parts
	reg  *prometheus.Registry
	stop func()
	cut  func() // as stop, without waiting
}

var quick = dispatcher.Config{Sweep: 100 * time.Millisecond, Deadlines: 20 * time.Millisecond, Reconcile: 200 * time.Millisecond, AcceptingAfter: 500 * time.Millisecond}

func (e *env) dispatcher(cfg dispatcher.Config) *leader {
	e.Helper()
	l := &leader{parts: e.open(), reg: prometheus.NewRegistry()}
	var err error
	l.Dispatcher, err = dispatcher.New(cfg, dispatcher.Deps{
		Queue: l.queue, Blobs: l.blobs, Results: l.results, Cluster: l.cluster, Relay: l.relay, Ledger: l.ledger, Registerer: l.reg, Log: testenv.Log(e),
	})
	e.ok(err)
	return l
}

// lead has a dispatcher lead, without a lease, until the test ends or stop is called.
func (e *env) lead(cfg dispatcher.Config) *leader {
	e.Helper()
	l := e.dispatcher(cfg)
	e.announce(l.parts, cluster.Heartbeat{ID: "dispatcher-" + string(job.NewID(time.Now())), Role: cluster.RoleDispatcher})
	ctx, cancel := context.WithCancel(context.Background())
	var done sync.WaitGroup
	done.Go(func() { l.Lead(ctx) })
	l.stop = sync.OnceFunc(func() {
		cancel()
		done.Wait()
	})
	e.Cleanup(l.stop)
	return l
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

// job is a standard durable job; change alters it.
func (e *env) job(change ...func(*job.Job)) *queue.Message {
	now := e.results.Now()
	m := &queue.Message{Job: job.Job{
		ID: job.NewID(now.Time()), Tenant: job.DefaultTenant, Model: model, Endpoint: job.ChatCompletions, Class: job.Standard, Group: job.NoGroup,
		Created: now, Expires: now + job.Millis(time.Hour.Milliseconds()), Cost: job.Cost{Prompt: 10, Answers: 1},
	}, Body: []byte(`{"model":"m"}`)}
	for _, f := range change {
		f(&m.Job)
	}
	return m
}

func withKey(key string) func(*job.Job) {
	return func(j *job.Job) { j.Key, j.BodyHash = key, "hash" }
}

// submit accepts a durable job as the API does.
func (e *env) submit(lane queue.Lane, m *queue.Message) *job.Job {
	e.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if m.Job.Key != "" {
		_, mine, err := e.results.ReserveKey(ctx, m.Job.Tenant, m.Job.Key, results.KeyEntry{ID: m.Job.ID, Hash: m.Job.BodyHash}, 0)
		e.ok(err)
		if !mine {
			e.Fatalf("key %q is taken", m.Job.Key)
		}
	}
	_, err := e.results.Accept(ctx, &m.Job, m.Body, results.Limits{})
	e.ok(err)
	e.ok(e.queue.Enqueue(ctx, queue.Work, lane, m))
	e.ok(e.results.Queued(ctx, &m.Job, m.Body))
	return &m.Job
}

func (e *env) get(j *job.Job) *results.Record {
	e.Helper()
	rec, err := e.results.Get(context.Background(), j.ID)
	e.ok(err)
	return rec
}

// lanes are where the job's messages wait.
func (e *env) lanes(j *job.Job) []queue.Lane {
	e.Helper()
	var all []queue.Lane
	for s, err := range e.queue.Waiting(context.Background(), queue.Work, j.Model, "", false) {
		e.ok(err)
		if s.Job.ID == j.ID {
			all = append(all, s.Lane)
		}
	}
	return all
}

// ended waits for the job's end, checks that both stores agree on it and that its message is gone, and returns the record.
func (e *env) ended(j *job.Job, want job.State, code job.Code) *results.Record {
	e.Helper()
	var rec *results.Record
	e.until("the job ends", func() bool {
		var err error
		rec, err = e.results.Get(context.Background(), j.ID)
		return err == nil && rec.State.Ended()
	})
	done, err := e.queue.Outcome(context.Background(), j.Tenant, j.Group, j.ID)
	e.ok(err)
	if rec.State != want || rec.Outcome == nil || rec.Outcome.Error.CodeOf() != code || done.Outcome.State != want {
		e.Errorf("the job is %s: %+v, in DONE %+v", rec.State, rec.Outcome, done.Outcome)
	}
	e.until("the message is gone", func() bool { return len(e.lanes(j)) == 0 })
	return rec
}

// fake is a worker that claims by hand.
type fake struct {
	parts
	id       job.Worker
	farewell func()
}

func (e *env) worker(name string) *fake {
	e.Helper()
	p := e.open()
	id := job.Worker(name)
	return &fake{parts: p, id: id, farewell: e.announce(p, cluster.Heartbeat{
		ID: name, Role: cluster.RoleWorker, Epoch: name, Worker: &cluster.WorkerInfo{Name: name, State: cluster.Ready, Models: []job.Model{model}},
	})}
}

// pull takes the next delivery of a class, or of the worker's own lane.
func (e *env) pull(w *fake, class job.Class) *queue.Delivery {
	e.Helper()
	cfg := queue.PullerConfig{Kind: queue.Work, Model: model, Class: class}
	if class == "" {
		cfg.Worker = w.id
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	p, err := w.queue.Puller(ctx, cfg)
	e.ok(err)
	defer p.Close()
	out, err := p.Pull(ctx, queue.PullRequest{Batch: 1, Expires: patience})
	e.ok(err)
	d, open := <-out
	if !open {
		e.Fatal("nothing was delivered")
	}
	return d
}

// claim pulls the next delivery and claims it.
func (e *env) claim(w *fake, class job.Class) (*queue.Delivery, *results.Claim) {
	e.Helper()
	d := e.pull(w, class)
	r := claimOf(&d.Job, w.id)
	r.AckSubject, r.Body = d.AckSubject, d.Body
	c, err := w.results.Claim(context.Background(), r)
	e.ok(err)
	if c.Verdict != results.Taken {
		e.Fatalf("the claim of %s says %s", d.Job.ID, c.Verdict)
	}
	return d, c
}

func claimOf(j *job.Job, w job.Worker) results.ClaimRequest {
	return results.ClaimRequest{Job: j, Worker: w, Lease: time.Hour, Checked: true, Whole: true}
}

// finish settles a claimed job well, as a worker does.
func (e *env) finish(w *fake, d *queue.Delivery, c *results.Claim) {
	e.Helper()
	o := job.Outcome{State: job.Completed, Token: c.Token, StatusCode: 200, Finished: w.results.Now()}
	_, err := w.queue.Settle(context.Background(), &queue.Record{Job: d.Job, Outcome: o, Result: []byte(`{}`)})
	e.ok(err)
	e.ok(w.results.Finish(context.Background(), &d.Job, &o, []byte(`{}`), nil, nil))
	e.ok(d.Ack())
	e.ok(w.results.LetGo(context.Background(), w.id, d.Job.ID))
	w.relay.Ended(d.Job.Model)
}

// realRedis starts a platform on a real server, and returns what sends it a command.
func realRedis(t testing.TB) (*env, func(command string)) {
	t.Helper()
	r := testenv.Redis(t)
	send := func(command string) {
		t.Helper()
		c, err := net.Dial("tcp", r.Addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close() // the answer is read
		if _, err := io.WriteString(c, command+"\r\n"); err != nil {
			t.Fatal(err)
		}
		answer := make([]byte, 64)
		n, err := c.Read(answer)
		if err != nil || bytes.HasPrefix(answer, []byte("-")) {
			t.Fatalf("%s: %s %v", command, strings.TrimSpace(string(answer[:n])), err)
		}
	}
	return newEnvOn(t, r.URL(), func() { send("FLUSHALL") }), send
}
