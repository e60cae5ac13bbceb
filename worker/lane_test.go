package worker_test

import (
	"context"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/affinity"
	"github.com/millrace/millrace/internal/engine/emulator"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/results"
)

// submitTo is submit into a worker's own lane.
func (e *env) submitTo(p *process, m *queue.Message) *job.Job {
	e.Helper()
	_, err := e.results.Accept(e.Context(), &m.Job, m.Body, results.Limits{})
	e.ok(err)
	e.ok(e.queue.Enqueue(e.Context(), queue.Work, queue.WorkerLane(p.ID()), m))
	e.ok(e.results.Queued(e.Context(), &m.Job, m.Body))
	return &m.Job
}

// ready waits until each worker knows that all are ready.
func (e *env) ready(all ...*process) {
	e.Helper()
	for _, p := range all {
		e.until("all are known", func() bool { return len(affinity.Workers(p.cluster.Members(), model)) == len(all) })
	}
}

// TestJobThatFailsInTheOwnLaneIsTriedElsewhere: handed back as it was it would come to the same engine for ever.
func TestJobThatFailsInTheOwnLaneIsTriedElsewhere(t *testing.T) {
	t.Parallel()
	e := newEnv(t, time.Hour)
	bad := play(t, reply(http.StatusInternalServerError, `{"error":{"message":"broken"}}`))
	p := e.work(bad.URL, generic, func(c *workerConfig) { c.RetryDelay = time.Minute })
	j := e.submitTo(p, e.job(chat("x", "")))
	e.until("it has failed once", func() bool { return e.get(j).Charged == 1 })
	e.until("everybody may try it", func() bool { return cmp.Equal(e.lanes(j), []queue.Lane{queue.AnyLane}) })
}

// lanes are where a job's messages wait.
func (e *env) lanes(j *job.Job) []queue.Lane {
	e.Helper()
	var all []queue.Lane
	for s, err := range e.queue.Waiting(e.Context(), queue.Work, j.Model, "", false) {
		e.ok(err)
		if s.Job.ID == j.ID {
			all = append(all, s.Lane)
		}
	}
	return all
}

// overfull starts a worker that runs one job and has another of its own lane in hand, which does not fit beside it, until release is called.
func (e *env) overfull() (p *process, running, inHand *job.Job, release func()) {
	e.Helper()
	wait := make(chan struct{})
	release = sync.OnceFunc(func() { close(wait) })
	e.Cleanup(release)
	slow := play(e, func(w http.ResponseWriter, r *http.Request) {
		<-wait
		reply(http.StatusOK, `{"choices":[]}`)(w, r)
	})
	p = e.work(slow.URL, generic, func(c *workerConfig) { c.engine.KVTokens, c.engine.MaxConcurrency, c.Drain = 2000, 8, patience })
	running = e.submit(e.job(chat("runs", ""), func(j *job.Job) { j.Cost.Prompt = 300 }))
	e.running(running, 1)
	inHand = e.submitTo(p, e.job(chat("in hand", ""), func(j *job.Job) { j.Cost.Prompt = 1800 }))
	e.until("it is in hand", func() bool {
		for _, err := range e.queue.Undelivered(e.Context(), queue.Work, model, queue.WorkerLane(p.ID())) {
			e.ok(err)
			return false
		}
		return true
	})
	return p, running, inHand, release
}

// TestDrainingWorkerHandsItsLaneToOthers: what it has in hand of its own lane does not wait for its end.
func TestDrainingWorkerHandsItsLaneToOthers(t *testing.T) {
	t.Parallel()
	e := newEnv(t, time.Hour)
	p, running, inHand, release := e.overfull()
	ended := make(chan struct{})
	go func() { e.ends(p); close(ended) }()
	fast, _ := emulate(t, emulator.Config{})
	other := e.work(fast.URL)
	if d := cmp.Diff([]job.Worker{other.ID()}, e.ranOn(inHand)); d != "" {
		t.Errorf("it ran on (-want +got):\n%s", d)
	}
	if rec := e.get(inHand); rec.Charged+rec.Uncharged != 0 {
		t.Errorf("record %+v", rec)
	}
	release()
	<-ended
	e.completed(running)
}

// TestJobInHandOfAFullWorkerGoesToOneWithRoom: what is in the cache here is worth a short wait only.
func TestJobInHandOfAFullWorkerGoesToOneWithRoom(t *testing.T) {
	t.Parallel()
	e := newEnv(t, time.Hour)
	_, running, inHand, release := e.overfull()
	fast, _ := emulate(t, emulator.Config{})
	other := e.work(fast.URL)
	if d := cmp.Diff([]job.Worker{other.ID()}, e.ranOn(inHand)); d != "" {
		t.Errorf("it ran on (-want +got):\n%s", d)
	}
	release()
	e.completed(running)
}

// owners are the workers bound to a key.
func (e *env) owners(key string) []job.Worker {
	e.Helper()
	owners, err := e.results.Owners(e.Context(), key)
	e.ok(err)
	return owners[0]
}

// ranOn is the worker that completed a job.
func (e *env) ranOn(j *job.Job) []job.Worker {
	e.Helper()
	e.completed(j)
	attempts := e.get(j).Attempts
	return []job.Worker{attempts[len(attempts)-1].Worker}
}

// bound waits until a key has these owners.
func (e *env) bound(key string, want []job.Worker) {
	e.Helper()
	e.until("it is bound", func() bool { return cmp.Equal(e.owners(key), want) })
}

func ofSession(s job.Session) func(*job.Job) { return func(j *job.Job) { j.Session = s } }

func (e *env) bindTo(key string, w job.Worker) {
	e.Helper()
	_, err := e.results.Bind(e.Context(), results.Binding{Key: key, Worker: w, TTL: time.Minute, Most: 1})
	e.ok(err)
}

func TestSuccessBindsTheSession(t *testing.T) {
	t.Parallel()
	e := newEnv(t, time.Hour)
	eng, _ := emulate(t, emulator.Config{})
	a, b := e.work(eng.URL), e.work(eng.URL)
	e.ready(a, b)
	key := func(s job.Session) string { return affinity.SessionKey(job.DefaultTenant, model, s) }

	e.bound(key("new"), e.ranOn(e.submit(e.job(chat("x", ""), ofSession("new")))))

	e.bindTo(key("lost"), "a-worker-that-is-gone")
	e.bound(key("lost"), e.ranOn(e.submit(e.job(chat("x", ""), ofSession("lost")))))

	// A turn that ran elsewhere moves nothing away from an owner that has room: its cache is warm.
	e.bindTo(key("stays"), b.ID())
	e.ranOn(e.submitTo(a, e.job(chat("x", ""), ofSession("stays"))))
	e.bound(key("after it"), e.ranOn(e.submitTo(a, e.job(chat("x", ""), ofSession("after it")))))
	if d := cmp.Diff([]job.Worker{b.ID()}, e.owners(key("stays"))); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}

	d := e.desk()
	m := e.job(chat("x", ""), live, ofSession("live"))
	_, _, end := e.collect(e.call(d, m))
	if end.State != job.Completed {
		t.Fatalf("the live call ends with %+v", end)
	}
	e.bound(key("live"), []job.Worker{e.settledLive(&m.Job).Attempts[0].Worker})

	// What fails binds nothing.
	failed := e.submit(e.job(chat("x [[emulator:status=400]]", ""), ofSession("fails")))
	if rec := e.await(failed); rec.State != job.Failed {
		t.Fatalf("the job is %s", rec.State)
	}
	e.bound(key("after that"), e.ranOn(e.submit(e.job(chat("x", ""), ofSession("after that")))))
	if owners := e.owners(key("fails")); owners != nil {
		t.Errorf("a failure bound %v", owners)
	}

	brief := e.work(eng.URL, func(c *workerConfig) { c.SessionTTL = 300 * time.Millisecond })
	e.ready(a, b, brief)
	on := e.ranOn(e.submitTo(brief, e.job(chat("x", ""), ofSession("brief"))))
	if d := cmp.Diff([]job.Worker{brief.ID()}, on); d != "" {
		t.Errorf("a job of its lane ran on (-want +got):\n%s", d)
	}
	e.until("the binding ends", func() bool { return e.owners(key("brief")) == nil })
}

func TestSuccessBindsTheBeginningOfThePrompt(t *testing.T) {
	t.Parallel()
	e := newEnv(t, time.Hour)
	eng, _ := emulate(t, emulator.Config{})
	long := strings.Repeat("You are helpful. ", 60) // 1,020 bytes
	chain := func(m *queue.Message) []string {
		body, err := job.ParseObject(m.Body)
		e.ok(err)
		return affinity.Chain(m.Job.Tenant, m.Job.Model, m.Job.Endpoint, body)
	}
	alone := e.work(eng.URL)
	m := e.job(chat("1"+long, ""))
	e.ranOn(e.submit(m))
	second := e.work(eng.URL)
	e.ready(alone, second)
	m2 := e.job(chat("2"+long, ""))
	on := e.ranOn(e.submit(m2))
	if n := len(chain(m2)); n != 3 {
		t.Fatalf("the prompt has %d keys", n)
	}
	for _, key := range chain(m2) {
		e.bound(key, on)
	}
	if owners := e.owners(chain(m)[0]); owners != nil {
		t.Errorf("a worker without others bound itself: %v", owners)
	}
	// The same beginning elsewhere has two owners then.
	other := alone
	if on[0] == alone.ID() {
		other = second
	}
	m3 := e.job(chat("2"+long+"and more", ""))
	e.ranOn(e.submitTo(other, m3))
	e.bound(chain(m3)[0], []job.Worker{other.ID(), on[0]})

	off := e.work(eng.URL, func(c *workerConfig) { c.NoPrefixAffinity = true })
	e.ready(alone, second, off)
	m4 := e.job(chat("4"+long, ""))
	e.ranOn(e.submitTo(off, m4))
	e.bound(affinity.SessionKey(job.DefaultTenant, model, "s"), e.ranOn(e.submitTo(off, e.job(chat("x", ""), ofSession("s")))))
	if owners := e.owners(chain(m4)[0]); owners != nil {
		t.Errorf("bound though it is switched off: %v", owners)
	}
	blob := e.job(chat("5"+long, ""), func(j *job.Job) { j.Blob = job.RequestBlob(j.ID) })
	blobChain := func() []string {
		body, err := job.ParseObject([]byte(chat("5"+long, "")))
		e.ok(err)
		return affinity.Chain(blob.Job.Tenant, model, job.ChatCompletions, body)
	}()
	e.bound(blobChain[2], e.ranOn(e.submitTo(second, blob)))
}

// TestBindingsWithoutTheStoreAreLetGo: jobs do not wait for them, and later ones are written.
func TestBindingsWithoutTheStoreAreLetGo(t *testing.T) {
	t.Parallel()
	e := newEnv(t, time.Hour)
	eng, _ := emulate(t, emulator.Config{})
	a, b := e.work(eng.URL), e.work(eng.URL)
	e.ready(a, b)
	d := e.desk()
	call := func(s job.Session) {
		m := e.job(chat("x", ""), live, ofSession(s))
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		seat := d.Expect(m.Job.ID)
		defer seat.Close()
		e.ok(e.queue.Enqueue(ctx, queue.Live, queue.WorkerLane(a.ID()), m))
		if _, _, end := e.collect(seat); end.State != job.Completed {
			t.Errorf("a live call ends with %+v", end)
		}
	}
	a.wire.freeze()
	for range 20 {
		call("s")
	}
	a.wire.thaw()
	e.until("it binds again", func() bool {
		call("s")
		return len(e.owners(affinity.SessionKey(job.DefaultTenant, model, "s"))) > 0
	})
}
