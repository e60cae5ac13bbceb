package api_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/millrace/millrace/api"
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

func TestMain(m *testing.M) {
	if testenv.ServeApart() {
		return
	}
	goleak.VerifyTestMain(
		m, append(
			testenv.NATSLeaves(),
			// Connections of clients that a test has cut end a moment later.
			goleak.IgnoreTopFunction("net/http.(*persistConn).readLoop"), goleak.IgnoreTopFunction("net/http.(*persistConn).writeLoop"),
		)...,
	)
}

const (
	model job.Model = "test/model-8b"
	// patience bounds what a test waits for while its platform starts.
	patience = 60 * time.Second
)

// natsServer is a server that can be stopped and started again on its store, and that can hang. Connections follow it.
type natsServer struct {
	dir string
	now atomic.Pointer[embedded.NATS]

	mu     sync.Mutex
	paused chan struct{} // not nil while it hangs; closed when it wakes
}

func (s *natsServer) InProcessConn() (net.Conn, error) {
	if n := s.now.Load(); n != nil {
		c, err := n.InProcessConn()
		if err != nil {
			return nil, err
		}
		return &pausable{Conn: c, server: s}, nil
	}
	return nil, errors.New("the server is down")
}

// pause makes the server hang: nothing comes from it, and what is sent waits. resume wakes it.
func (s *natsServer) pause() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.paused = make(chan struct{})
}

func (s *natsServer) resume() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.paused)
	s.paused = nil
}

func (s *natsServer) awake() chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.paused
}

// pausable is a connection whose server may hang: then writes succeed, as into a socket's buffer, and arrive when it wakes.
type pausable struct {
	net.Conn
	server *natsServer

	mu   sync.Mutex
	late []byte
}

func (c *pausable) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if ch := c.server.awake(); ch != nil {
		<-ch
	}
	return n, err
}

func (c *pausable) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if ch := c.server.awake(); ch != nil {
		if c.late == nil {
			go func() {
				<-ch
				c.mu.Lock()
				defer c.mu.Unlock()
				_, _ = c.Conn.Write(c.late) // the test sees what came of it
				c.late = nil
			}()
		}
		c.late = append(c.late, p...)
		return len(p), nil
	}
	return c.Conn.Write(p)
}

func (s *natsServer) start(t testing.TB) {
	t.Helper()
	n, err := embedded.StartNATS(embedded.NATSConfig{Dir: s.dir, Relaxed: true, StoreLimit: testenv.Ample, MemoryLimit: testenv.Ample, Log: testenv.Log(t)})
	if err != nil {
		t.Fatal(err)
	}
	s.now.Store(n)
}

func (s *natsServer) stop() {
	if n := s.now.Swap(nil); n != nil {
		n.Shutdown()
	}
}

// env is a platform without workers and dispatcher: servers, stores, and one API.
type env struct {
	t       testing.TB
	nats    *natsServer
	redis   *embedded.Redis
	nc      *nats.Conn
	queue   *queue.Queue
	results *results.Store
	cluster *cluster.Cluster
	relay   *relay.Relay
	ledger  *ledger.Store
	blobs   blob.Store
	qc      queue.Config
	deps    api.Deps
	url     string
	server  *api.Server
	stopAPI func()
}

// newEnv starts all. With a URL, the store is a server of the caller's.
func newEnv(t testing.TB, cfg api.Config, redisURL ...string) *env {
	t.Helper()
	return newEnvOn(t, cfg, queue.Config{}, redisURL...)
}

func newEnvOn(t testing.TB, cfg api.Config, qc queue.Config, redisURL ...string) *env {
	t.Helper()
	e := &env{t: t, qc: qc, nats: &natsServer{dir: t.TempDir()}}
	e.nats.start(t)
	t.Cleanup(e.nats.stop)
	var url string
	if len(redisURL) > 0 {
		url = redisURL[0]
	} else {
		e.redis = testenv.MiniRedis(t)
		url = e.redis.URL()
	}
	log := testenv.Log(t)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var err error
	if e.blobs, err = blob.OpenDir(t.TempDir()); err != nil {
		t.Fatal(err)
	}
	e.nc = e.connect()
	if e.queue, err = queue.Open(ctx, e.nc, qc, log); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.queue.Close)
	if e.results, err = results.Open(ctx, results.Config{URL: url}, log); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = e.results.Close() })
	if err := e.results.SetSentinel(ctx); err != nil {
		t.Fatal(err)
	}
	if e.cluster, err = cluster.Open(ctx, e.nc, cluster.Config{}, log); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.cluster.Close)
	e.relay = relay.New(e.nc, log)
	e.ledger = testenv.Ledger(t)
	e.deps = api.Deps{
		Queue: e.queue, Blobs: e.blobs, Results: e.results, Cluster: e.cluster, Relay: e.relay, Ledger: e.ledger, Registerer: prometheus.NewRegistry(), Log: log, Version: "test", Process: t.Name(),
	}
	e.startAPI(cfg)
	return e
}

func (e *env) connect() *nats.Conn {
	e.t.Helper()
	nc, err := nats.Connect("", nats.InProcessServer(e.nats), nats.ReconnectBufSize(-1), nats.MaxReconnects(-1), nats.ReconnectWait(20*time.Millisecond), nats.ReconnectJitter(0, 0))
	if err != nil {
		e.t.Fatal(err)
	}
	e.t.Cleanup(nc.Close)
	return nc
}

// remember makes the model known as if a worker had served it before.
func (e *env) remember() {
	e.t.Helper()
	if err := e.cluster.Remember(e.t.Context(), cluster.KnownModel{Model: model, Largest: 100_000}); err != nil {
		e.t.Fatal(err)
	}
	eventually(e.t, "the model is known", func() bool { return len(e.cluster.Known()) > 0 })
}

// startAPI starts an API process, in place of one that was stopped.
func (e *env) startAPI(cfg api.Config) {
	e.t.Helper()
	if cfg.Listen == "" {
		cfg.Listen = "127.0.0.1:0"
	}
	if cfg.DrainTimeout == 0 {
		cfg.DrainTimeout = 2 * time.Second
	}
	deps := e.deps
	deps.Registerer = prometheus.NewRegistry()
	s, err := api.New(cfg, deps)
	if err != nil {
		e.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(e.t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	var once sync.Once
	e.server, e.url = s, "http://"+s.Addr()
	e.stopAPI = func() {
		once.Do(func() {
			cancel()
			if err := <-ended; err != nil {
				e.t.Errorf("the API ended: %v", err)
			}
		})
	}
	e.t.Cleanup(e.stopAPI)
}

// answer is what came back for one request.
type answer struct {
	status int
	header http.Header
	body   []byte
}

// client has no idle connections that a test would leak, and no time-out but that of its contexts.
func client() *http.Client {
	return &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
}

// send makes a request. Headers are "Name: value".
func (e *env) send(method, path, body string, headers ...string) answer {
	e.t.Helper()
	resp := e.open(e.t.Context(), method, path, body, headers...)
	return answerOf(e.t, resp)
}

// answerOf reads an answer to its end.
func answerOf(t testing.TB, resp *http.Response) answer {
	t.Helper()
	raw, err := io.ReadAll(resp.Body)
	_ = resp.Body.Close() // read only
	if err != nil {
		t.Fatalf("reading the answer: %v", err)
	}
	return answer{resp.StatusCode, resp.Header, raw}
}

// dial opens a connection, for what no HTTP client sends. It is closed when the test ends.
func (e *env) dial(t testing.TB) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(e.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() }) // the server may have closed it
	return conn
}

func (e *env) open(ctx context.Context, method, path, body string, headers ...string) *http.Response {
	e.t.Helper()
	resp, err := e.tryOpen(ctx, method, path, body, headers...)
	if err != nil {
		e.t.Fatal(err)
	}
	return resp
}

func (e *env) tryOpen(ctx context.Context, method, path, body string, headers ...string) (*http.Response, error) {
	var in io.Reader
	if body != "" {
		in = strings.NewReader(body)
	}
	req, err := http.NewRequestWithContext(ctx, method, e.url+path, in)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	for _, h := range headers {
		name, value, _ := strings.Cut(h, ": ")
		req.Header.Set(name, value)
	}
	return client().Do(req)
}

// object decodes an answer's JSON.
func (a answer) object(t testing.TB) map[string]any {
	t.Helper()
	var m map[string]any
	if err := json.Unmarshal(a.body, &m); err != nil {
		t.Fatalf("status %d: %v in %q", a.status, err, a.body)
	}
	return m
}

// wantError checks that an answer is an error object of four keys.
func (a answer) wantError(t testing.TB, status int, code job.Code, param string) {
	t.Helper()
	if got := a.header.Get("Content-Type"); got != "application/json" {
		t.Errorf("content type %q", got)
	}
	if a.header.Get("X-Request-Id") == "" {
		t.Error("no x-request-id")
	}
	var body struct {
		Error map[string]any `json:"error"`
	}
	if err := json.Unmarshal(a.body, &body); err != nil {
		t.Fatalf("status %d, want %d: %v in %q", a.status, status, err, a.body)
	}
	for _, key := range []string{"message", "type", "param", "code"} {
		if _, ok := body.Error[key]; !ok {
			t.Errorf("no %q in %s", key, a.body)
		}
	}
	gotParam, _ := body.Error["param"].(string)
	gotCode, _ := body.Error["code"].(string)
	if a.status != status || gotCode != string(code) || gotParam != param {
		t.Errorf("got %d %q param %q, want %d %q param %q: %s", a.status, gotCode, gotParam, status, code, param, a.body)
	}
	if status == http.StatusTooManyRequests || status == http.StatusServiceUnavailable {
		if s := a.header.Get("Retry-After"); s < "1" || len(s) > 2 {
			t.Errorf("Retry-After is %q", s)
		}
	}
}

// chat is a body for the model whose engine writes n tokens.
func chat(n int, more string) string {
	return fmt.Sprintf(`{"model":%q,"messages":[{"role":"user","content":"hi"}],"max_tokens":%d%s}`, model, n, more)
}

func jobBody(inner, more string) string { return `{"body":` + inner + more + `}` }

// submit creates a job and returns its id.
func (e *env) submit(body string, headers ...string) job.ID {
	e.t.Helper()
	a := e.send("POST", "/v1/jobs", body, headers...)
	if a.status != http.StatusAccepted {
		e.t.Fatalf("submit: %d %s", a.status, a.body)
	}
	return job.ID(a.object(e.t)["id"].(string))
}

// wait long-polls until the job has ended.
func (e *env) wait(id job.ID) map[string]any {
	e.t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for {
		a := e.send("GET", "/v1/jobs/"+string(id)+"?wait=5s", "")
		if a.status != http.StatusOK {
			e.t.Fatalf("get: %d %s", a.status, a.body)
		}
		o := a.object(e.t)
		if job.State(o["status"].(string)).Ended() {
			return o
		}
		if time.Now().After(deadline) {
			e.t.Fatalf("the job does not end: %s", a.body)
		}
	}
}

// eventually polls until ok.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(15 * time.Second); !ok(); {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// --- a worker ---

// reply is what a fake engine answers.
type reply struct {
	status      int
	contentType string
	// chunks are the data of stream events; body is the answer in one piece.
	chunks []string
	body   string
	// before and each are waited for before the answer, and before each chunk, if not nil.
	before, each <-chan struct{}
	// err ends the job as failed after the chunks.
	err *job.Error
}

// worker pulls, claims, answers and settles as the worker role does.
type worker struct {
	e     *env
	id    job.Worker
	nc    *nats.Conn
	relay *relay.Relay
	queue *queue.Queue
	info  cluster.WorkerInfo
	reply func(j *job.Job, body []byte) reply
	stop  context.CancelFunc
	wg    sync.WaitGroup

	mu    sync.Mutex
	calls map[job.ID][][]byte
}

// repeat is a reply of n tokens, n being the body's max_tokens.
func repeat(j *job.Job, body []byte) reply {
	var b struct {
		MaxTokens int `json:"max_tokens"`
	}
	_ = json.Unmarshal(body, &b)
	r := reply{status: 200, contentType: "application/json"}
	var text strings.Builder
	for i := range b.MaxTokens {
		token := fmt.Sprintf("t%d ", i)
		text.WriteString(token)
		r.chunks = append(r.chunks, fmt.Sprintf(`{"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":%q}}]}`, token))
	}
	r.body = fmt.Sprintf(`{"id":"c", "object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":%q},"finish_reason":"stop"}],"usage":{"prompt_tokens":3,"completion_tokens":%d,"total_tokens":%d}, "big":9007199254740993}`,
		text.String(), b.MaxTokens, b.MaxTokens+3)
	return r
}

// startWorker starts a worker beside the env's API, on a connection of its own, and returns once the API knows the model.
func (e *env) startWorker(answer func(j *job.Job, body []byte) reply) *worker {
	e.t.Helper()
	nc := e.connect()
	log := testenv.Log(e.t)
	start, started := context.WithTimeout(e.t.Context(), patience)
	defer started()
	q, err := queue.Open(start, nc, e.qc, log)
	if err != nil {
		e.t.Fatal(err)
	}
	w := &worker{
		e: e, id: job.Worker(job.NewName("w_", time.Now())), nc: nc, relay: relay.New(nc, log), queue: q, reply: answer, calls: make(map[job.ID][][]byte),
		info: cluster.WorkerInfo{Name: "w", State: cluster.Ready, Models: []job.Model{model}, Largest: 100_000, Capacity: 100_000, Free: 100_000},
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(e.t.Context()))
	w.stop = cancel
	members, err := cluster.Open(start, nc, cluster.Config{}, log)
	if err != nil {
		e.t.Fatal(err)
	}
	w.wg.Go(func() {
		_ = members.Announce(ctx, func() cluster.Heartbeat {
			return cluster.Heartbeat{ID: string(w.id), Role: cluster.RoleWorker, Started: time.Now().UnixMilli(), Epoch: string(w.id), Worker: &w.info}
		})
	})
	for _, kind := range []queue.Kind{queue.Work, queue.Live} {
		for _, class := range job.Classes() {
			w.wg.Go(func() { w.pull(ctx, kind, class) })
		}
	}
	e.t.Cleanup(func() {
		cancel()
		w.wg.Wait()
		members.Close()
		q.Close()
	})
	eventually(e.t, "the model is known", func() bool { return len(e.cluster.Workers(model)) > 0 })
	return w
}

func (w *worker) pull(ctx context.Context, kind queue.Kind, class job.Class) {
	var p *queue.Puller
	for p == nil {
		var err error
		if p, err = w.queue.Puller(ctx, queue.PullerConfig{Kind: kind, Model: model, Class: class}); err != nil {
			if ctx.Err() != nil {
				return
			}
			time.Sleep(50 * time.Millisecond)
		}
	}
	defer p.Close()
	for ctx.Err() == nil {
		ch, err := p.Pull(ctx, queue.PullRequest{Batch: 8, Expires: 250 * time.Millisecond})
		if err != nil {
			select {
			case <-time.After(50 * time.Millisecond):
			case <-ctx.Done():
			}
			continue
		}
		for d := range ch {
			w.wg.Go(func() {
				if kind == queue.Live {
					w.runLive(ctx, d)
				} else {
					w.runWork(ctx, d)
				}
			})
		}
	}
}

func (w *worker) note(d *queue.Delivery) reply {
	body := d.Body
	if d.Job.Blob != "" {
		body = w.e.object(d.Job.Blob)
	}
	w.mu.Lock()
	w.calls[d.Job.ID] = append(w.calls[d.Job.ID], body)
	w.mu.Unlock()
	return w.reply(&d.Job, body)
}

// calledWith returns the bodies with which the engine was called for id.
func (w *worker) calledWith(id job.ID) [][]byte {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.calls[id]
}

func await(ctx context.Context, ch <-chan struct{}) bool {
	if ch == nil {
		return true
	}
	select {
	case <-ch:
		return true
	case <-ctx.Done():
		return false
	}
}

func (w *worker) runLive(ctx context.Context, d *queue.Delivery) {
	j := &d.Job
	claimed, err := w.relay.Claim(ctx, j.API, relay.ClaimRequest{ID: j.ID, Worker: w.id, AckSubject: d.AckSubject})
	if errors.Is(err, relay.ErrGone) {
		_ = d.Ack()
		return
	}
	if err != nil {
		_ = d.Nak(100 * time.Millisecond)
		return
	}
	a, err := w.relay.Answer(j.API, j.ID, claimed.Token)
	if err != nil {
		return
	}
	defer a.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-a.Cancelled():
			cancel()
		case <-ctx.Done():
		}
	}()
	r := w.note(d)
	end := relay.End{State: job.Completed}
	switch {
	case !await(ctx, r.before):
		end = relay.End{State: job.Cancelled, Error: job.NewError(job.TypeServer, job.CodeClientGone, "gone")}
	case j.Stream && r.status == 200:
		shown := bytes.Count(claimed.Shown, []byte("\n\n"))
		_ = a.Send(relay.Part{Head: &relay.Head{StatusCode: 200, ContentType: "text/event-stream", Continues: shown > 0}})
		for _, c := range r.chunks[shown:] {
			if !await(ctx, r.each) {
				break
			}
			_ = a.Send(relay.Part{Data: []byte("data: " + c + "\n\n")})
		}
		if r.err != nil {
			end = relay.End{State: job.Failed, Error: r.err}
		} else {
			_ = a.Send(relay.Part{Data: []byte("data: [DONE]\n\n")})
		}
	case r.err != nil:
		end = relay.End{State: job.Failed, Error: r.err}
	default:
		_ = a.Send(relay.Part{Head: &relay.Head{StatusCode: r.status, ContentType: r.contentType}})
		_ = a.Send(relay.Part{Data: []byte(r.body)})
		if r.status >= 400 {
			end.State = job.Failed
		}
	}
	finish, done := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer done()
	if err := a.Finish(finish, end); err != nil && end.State == job.Completed {
		end.State = job.Cancelled
	}
	_, _ = w.queue.Settle(finish, &queue.Record{Job: *j, Outcome: job.Outcome{State: end.State, Token: claimed.Token, Error: end.Error, Finished: w.e.results.Now()}})
	_ = d.Ack()
}

func (w *worker) runWork(ctx context.Context, d *queue.Delivery) {
	j := &d.Job
	req := results.ClaimRequest{Job: j, Worker: w.id, Lease: d.AckWait, AckSubject: d.AckSubject, Delivered: d.Delivered}
	var claim *results.Claim
	for claim == nil {
		c, err := w.e.results.Claim(ctx, req)
		if err != nil {
			_ = d.Nak(200 * time.Millisecond)
			return
		}
		switch c.Verdict {
		case results.Taken:
			claim = c
		case results.CheckDone:
			rec, err := w.queue.Outcome(ctx, j.Tenant, j.Group, j.ID)
			if err == nil {
				_ = w.e.results.Finish(ctx, &rec.Job, &rec.Outcome, rec.Result, nil, nil)
				_ = d.Ack()
				return
			}
			req.Checked = true
		case results.Unrecorded:
			req.Whole, req.Body = true, d.Body
		case results.Ended:
			_ = d.Ack()
			return
		default:
			_ = d.Nak(c.Wait)
			return
		}
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	_ = w.relay.OnCancel(ctx, func(id job.ID) {
		if id == j.ID {
			cancel()
		}
	})
	w.relay.Bell(j.ID)
	o := job.Outcome{State: job.Completed, Token: claim.Token, Started: claim.Now}
	r := w.note(d)
	n := claim.N
	var first job.Millis
	cancelled := !await(ctx, r.before)
	if j.Events && r.status == 200 && !cancelled {
		for _, c := range r.chunks {
			if !await(ctx, r.each) {
				cancelled = true
				break
			}
			n++
			if first == 0 {
				first = w.e.results.Now()
			}
			if err := w.e.results.Append(ctx, j, []job.Event{{N: n, Token: claim.Token, Kind: job.EventToken, Data: []byte(c)}}); err != nil && !errors.Is(err, context.Canceled) {
				w.e.t.Errorf("append: %v", err)
			}
			w.relay.Bell(j.ID)
		}
	}
	result := []byte(r.body)
	switch {
	case cancelled:
		o.State, o.Error, result = job.Cancelled, job.NewError(job.TypeInvalidRequest, job.CodeCancelled, "cancelled"), nil
	case r.err != nil:
		o.State, o.Error, result = job.Failed, r.err, nil
	default:
		o.StatusCode, o.ContentType, o.ResultSize = r.status, r.contentType, int64(len(result))
		if r.status >= 400 {
			o.State = job.Failed
		}
	}
	bg, done := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer done()
	o.FirstToken, o.Finished = first, w.e.results.Now()
	o.Attempts = []job.Attempt{{Worker: w.id, Started: claim.Now, Ended: o.Finished, Outcome: string(o.State)}}
	if j.Events {
		o.LastEvent = n + 1
	}
	rec := &queue.Record{Job: *j, Outcome: o, Result: result}
	if len(result) > blob.Threshold {
		rec.Outcome.Blob, rec.Result = job.ResultBlob(j.ID, claim.Token), nil
		_, _ = w.e.blobs.Put(bg, rec.Outcome.Blob, bytes.NewReader(result))
	}
	stored, err := w.queue.Settle(bg, rec)
	if err != nil && !errors.Is(err, queue.ErrSettled) {
		w.e.t.Errorf("settle: %v", err)
		return
	}
	if err := w.e.results.Finish(bg, j, &stored.Outcome, stored.Result, nil, nil); errors.Is(err, results.ErrUnavailable) {
		return // the test has taken the store away: the next delivery finds the outcome
	} else if err != nil {
		w.e.t.Errorf("finish: %v", err)
	}
	w.relay.Bell(j.ID)
	_ = d.Ack()
}

// object reads an object whole; nil if there is none.
func (e *env) object(name string) []byte {
	e.t.Helper()
	r, err := e.blobs.Get(context.WithoutCancel(e.t.Context()), name)
	if errors.Is(err, blob.ErrNotFound) {
		return nil
	}
	if err != nil {
		e.t.Errorf("object %s: %v", name, err)
		return nil
	}
	defer r.Close()
	raw, err := io.ReadAll(r)
	if err != nil {
		e.t.Errorf("object %s: %v", name, err)
	}
	return raw
}

// objects lists the names of all objects.
func (e *env) objects() []string {
	e.t.Helper()
	var names []string
	if err := e.blobs.List(e.t.Context(), func(i blob.Info) error { names = append(names, i.Name); return nil }); err != nil {
		e.t.Errorf("listing objects: %v", err)
	}
	return names
}
