package api_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/millrace/millrace/api"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/testenv"
)

func TestNATSAwayIs503WithinFiveSecondsAndNothingIsStored(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	w := e.startWorker(repeat)
	e.nats.stop()
	start := time.Now()
	e.send("POST", "/v1/jobs", jobBody(chat(1, ""), ""), "Idempotency-Key: k").wantError(t, 503, job.CodeUnavailable, "")
	e.send("POST", "/v1/chat/completions", chat(1, "")).wantError(t, 503, job.CodeUnavailable, "")
	e.send("GET", "/readyz", "").wantError(t, 503, job.CodeUnavailable, "")
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("three refusals took %v", took)
	}
	// No visible job, and the same key works once the queue is back.
	if n := len(e.send("GET", "/v1/jobs", "").object(t)["data"].([]any)); n != 0 {
		t.Errorf("%d jobs are seen", n)
	}
	e.nats.start(t)
	eventually(t, "the queue is back", func() bool { return e.send("GET", "/readyz", "").status == 200 })
	var id job.ID
	eventually(t, "the same key is accepted", func() bool {
		a := e.send("POST", "/v1/jobs", jobBody(chat(1, ""), ""), "Idempotency-Key: k")
		if a.status == http.StatusAccepted {
			id = job.ID(a.object(t)["id"].(string))
		}
		return id != ""
	})
	e.wait(id)
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.calls) != 1 {
		t.Errorf("the engine was called for %d jobs", len(w.calls))
	}
}

func TestNATSThatHangsIs503AndNothingIsPublishedLater(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	w := e.startWorker(repeat)
	e.nats.pause()
	time.Sleep(2 * time.Second) // in which nothing is heard: what is asked before that is cut in mid-publish
	start := time.Now()
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			e.send("POST", "/v1/jobs", jobBody(chat(1, ""), ""), "Idempotency-Key: k").wantError(t, 503, job.CodeUnavailable, "")
		})
		wg.Go(func() { e.send("POST", "/v1/chat/completions", chat(1, "")).wantError(t, 503, job.CodeUnavailable, "") })
	}
	for range 8 { // one does not wait for another
		wg.Go(func() { e.send("GET", "/v1/models", "").wantError(t, 503, job.CodeUnavailable, "") })
	}
	wg.Wait()
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("it took %v", took)
	}
	e.nats.resume()
	eventually(t, "the queue is back", func() bool { return e.send("GET", "/readyz", "").status == 200 })
	if n := len(e.send("GET", "/v1/jobs", "").object(t)["data"].([]any)); n != 0 {
		t.Errorf("%d jobs are seen", n)
	}
	id := e.submit(jobBody(chat(1, ""), ""), "Idempotency-Key: k")
	e.wait(id)
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.calls) != 1 {
		t.Errorf("the engine was called for %d jobs", len(w.calls))
	}
}

func TestFullQueueRefusesAndLosesNothing(t *testing.T) {
	t.Parallel()
	e := newEnvOn(t, api.Config{}, queue.Config{WorkMaxBytes: 1 << 20})
	if err := e.queue.EnsureModel(t.Context(), model); err != nil {
		t.Fatal(err)
	}
	body := jobBody(chat(1, `,"pad":"`+strings.Repeat("p", 100<<10)+`"`), "")
	accepted := make(map[job.ID]bool)
	for range 15 {
		a := e.send("POST", "/v1/jobs", body)
		if a.status == http.StatusAccepted {
			accepted[job.ID(a.object(t)["id"].(string))] = true
			continue
		}
		a.wantError(t, 429, job.CodeQueueFull, "")
	}
	if n := len(accepted); n < 5 || n > 10 {
		t.Fatalf("%d jobs were accepted", n)
	}
	if n := len(e.send("GET", "/v1/jobs", "").object(t)["data"].([]any)); n != len(accepted) {
		t.Errorf("%d jobs are seen, %d were accepted", n, len(accepted))
	}
	e.startWorker(repeat)
	for id := range accepted {
		if o := e.wait(id); o["status"] != "completed" {
			t.Errorf("%v", o)
		}
	}
}

func TestRedisAwayIs503NeverA404(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	e := newEnv(t, api.Config{}, server.URL())
	e.startWorker(repeat)
	id := e.submit(jobBody(chat(1, ""), ""))
	e.wait(id)
	check := func(how string) {
		t.Helper()
		start := time.Now()
		var wg sync.WaitGroup
		for _, path := range []string{"/v1/jobs/" + string(id), "/v1/jobs", "/v1/jobs/" + string(job.NewID(time.Now())), "/v1/jobs/" + string(id) + "/events", "/readyz"} {
			wg.Go(func() { e.send("GET", path, "").wantError(t, 503, job.CodeUnavailable, "") })
		}
		for _, verb := range []string{"POST /cancel", "DELETE "} {
			method, path, _ := strings.Cut(verb, " ")
			wg.Go(func() { e.send(method, "/v1/jobs/"+string(id)+path, "").wantError(t, 503, job.CodeUnavailable, "") })
		}
		for _, key := range []string{"X: y", "Idempotency-Key: k"} {
			wg.Go(func() {
				e.send("POST", "/v1/jobs", jobBody(chat(1, ""), ""), key).wantError(t, 503, job.CodeUnavailable, "")
			})
		}
		wg.Wait()
		if took := time.Since(start); took > 6*time.Second {
			t.Errorf("%s: it took %v", how, took)
		}
		// What needs no Redis works on.
		if a := e.send("POST", "/v1/chat/completions", chat(1, "")); a.status != 200 {
			t.Errorf("%s: a live call: %d %s", how, a.status, a.body)
		}
	}
	if err := server.Process().Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	check("paused")
	if err := server.Process().Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the store is back", func() bool { return e.send("GET", "/v1/jobs/"+string(id), "").status == 200 })
	server.Kill()
	check("killed")
	server.Start(t) // empty: the answer comes from the queue
	eventually(t, "the store is back", func() bool { return e.send("GET", "/v1/jobs/"+string(id), "").status == 200 })
}

func TestPublishThatFailsBeforeOrAfterStoring(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		stored bool
		err    error
		status int
		code   job.Code
		// kept: the record stays, for whether the message is stored is not known.
		kept bool
	}{
		"full":                             {false, queue.ErrFull, 429, job.CodeQueueFull, false},
		"refused":                          {false, queue.ErrRefused, 503, job.CodeUnavailable, false},
		"no answer, and it was not stored": {false, queue.ErrUnavailable, 503, job.CodeUnavailable, true},
		"no answer, and it was stored":     {true, queue.ErrUnavailable, 503, job.CodeUnavailable, true},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newEnv(t, api.Config{})
			w := e.startWorker(repeat)
			var failed atomic.Pointer[job.ID]
			e.server.SetPublisher(func(p api.Publisher) api.Publisher {
				return api.PublisherFunc(func(ctx context.Context, kind queue.Kind, lane queue.Lane, m *queue.Message) error {
					if failed.CompareAndSwap(nil, &m.Job.ID) {
						if tt.stored {
							if err := p.Enqueue(ctx, kind, lane, m); err != nil {
								t.Errorf("enqueue: %v", err)
							}
						}
						return fmt.Errorf("scripted: %w", tt.err)
					}
					return p.Enqueue(ctx, kind, lane, m)
				})
			})
			e.send("POST", "/v1/jobs", jobBody(chat(1, ""), ""), "Idempotency-Key: k").wantError(t, tt.status, tt.code, "")
			first := *failed.Load()
			rec, err := e.results.Get(t.Context(), first)
			if kept := err == nil; kept != tt.kept {
				t.Errorf("the record is kept: %v (%v, %v)", kept, rec, err)
			}
			// The client comes again with the same key: one job in the end, and one call of the engine.
			id := e.submit(jobBody(chat(1, ""), ""), "Idempotency-Key: k")
			if tt.kept != (id == first) {
				t.Errorf("the retry got %s, the first try was %s", id, first)
			}
			if o := e.wait(id); o["status"] != "completed" {
				t.Errorf("%v", o)
			}
			w.mu.Lock()
			defer w.mu.Unlock()
			if len(w.calls) != 1 || len(w.calls[id]) != 1 {
				t.Errorf("the engine was called for %d jobs, %d times for this", len(w.calls), len(w.calls[id]))
			}
		})
	}
}

func TestAcceptedThoughRedisLeavesAfterThePublish(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	e := newEnv(t, api.Config{}, server.URL())
	if err := e.queue.EnsureModel(t.Context(), model); err != nil {
		t.Fatal(err)
	}
	e.server.SetPublisher(func(p api.Publisher) api.Publisher {
		return api.PublisherFunc(func(ctx context.Context, kind queue.Kind, lane queue.Lane, m *queue.Message) error {
			err := p.Enqueue(ctx, kind, lane, m)
			server.Kill()
			return err
		})
	})
	id := e.submit(jobBody(chat(1, ""), ""))
	server.Start(t)
	eventually(t, "the job is found by its message", func() bool {
		a := e.send("GET", "/v1/jobs/"+string(id), "")
		return a.status == 200 && a.object(t)["status"] == "queued"
	})
}

func TestKeysWaitUntilAWipedStoreIsRebuilt(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	e.startWorker(repeat)
	e.redis.Wipe()
	e.send("POST", "/v1/jobs", jobBody(chat(1, ""), ""), "Idempotency-Key: k").wantError(t, 503, job.CodeUnavailable, "")
	e.submit(jobBody(chat(1, ""), "")) // without a key nothing can be repeated
	if err := e.results.SetSentinel(t.Context()); err != nil {
		t.Fatal(err)
	}
	e.submit(jobBody(chat(1, ""), ""), "Idempotency-Key: k")
}

func TestDrainLetsCallsFinish(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{DrainTimeout: 10 * time.Second})
	gate := make(chan struct{})
	started := make(chan struct{}, 2)
	e.startWorker(func(j *job.Job, body []byte) reply {
		r := repeat(j, body)
		r.before = gate
		started <- struct{}{}
		return r
	})
	answered := make(chan answer, 1)
	go func() { answered <- e.send("POST", "/v1/chat/completions", chat(1, "")) }()
	<-started
	id := e.submit(jobBody(chat(1, ""), ""))
	<-started
	stream := e.open(t.Context(), "GET", "/v1/jobs/"+string(id)+"/events", "")
	defer stream.Body.Close()
	stopped := make(chan struct{})
	go func() { e.stopAPI(); close(stopped) }()
	// The event stream ends, for it can be resumed elsewhere; the call goes on.
	buf := make([]byte, 1<<16)
	for {
		if _, err := stream.Body.Read(buf); err != nil {
			break
		}
	}
	if _, err := e.tryOpen(t.Context(), "GET", "/healthz", ""); err == nil {
		t.Error("new connections are still taken")
	}
	close(gate)
	if a := <-answered; a.status != 200 {
		t.Errorf("%d %s", a.status, a.body)
	}
	<-stopped
}

// To a client a stream that just ends looks whole.
func TestDrainTellsAKeyedStreamThatItBreaksOff(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	gate := make(chan struct{}, 1)
	gate <- struct{}{}
	e.startWorker(func(j *job.Job, body []byte) reply {
		r := repeat(j, body)
		r.each = gate
		return r
	})
	resp := e.open(t.Context(), "POST", "/v1/chat/completions", chat(2, `,"stream":true`), "Idempotency-Key: k")
	defer resp.Body.Close()
	in := bufio.NewReader(resp.Body)
	if line, err := in.ReadString('\n'); err != nil || !strings.HasPrefix(line, "data: {") {
		t.Fatalf("%q, %v", line, err)
	}
	stopped := make(chan struct{})
	go func() { e.stopAPI(); close(stopped) }()
	rest, err := io.ReadAll(in)
	if err != nil || !strings.Contains(string(rest), "\ndata: {\"error\":{") || strings.Contains(string(rest), "[DONE]") {
		t.Errorf("%q, %v", rest, err)
	}
	<-stopped
}

func TestDrainTimeoutEndsWhatIsLeft(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{DrainTimeout: 200 * time.Millisecond})
	started := make(chan struct{}, 1)
	never := make(chan struct{})
	e.startWorker(func(j *job.Job, body []byte) reply {
		r := repeat(j, body)
		r.before = never
		started <- struct{}{}
		return r
	})
	answered := make(chan error, 1)
	go func() {
		resp, err := e.tryOpen(t.Context(), "POST", "/v1/chat/completions", chat(1, ""))
		if err == nil {
			resp.Body.Close()
			if resp.StatusCode != 503 {
				err = fmt.Errorf("status %d", resp.StatusCode)
			}
		}
		answered <- err
	}()
	<-started
	e.stopAPI()
	if err := <-answered; err != nil && !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}
