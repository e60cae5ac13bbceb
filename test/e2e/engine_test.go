package e2e_test

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/millrace/millrace/internal/engine/emulator"
	"github.com/millrace/millrace/internal/engine/emulator/emulatortest"
)

// model is what the tests' engines serve.
const model = "emulator-test"

// engine is an emulator behind a door: it notes each job's call with its exact bytes, and can keep calls waiting.
type engine struct {
	URL string
	emu *emulatortest.Server

	mu    sync.Mutex // guards what follows
	calls []*engineCall
	door  chan struct{} // closed once calls may pass; nil: they may
}

// engineCall is one call for a job.
type engineCall struct {
	job  string
	path string
	body []byte
	// ended is closed at its end; gone says then whether the caller left before it was answered whole.
	ended chan struct{}
	gone  bool
}

// wholeWriter notes the end of what is answered. A caller that has read all may break the connection before the call has ended.
type wholeWriter struct {
	http.ResponseWriter
	end []byte
}

func (w *wholeWriter) Write(p []byte) (int, error) {
	n, err := w.ResponseWriter.Write(p)
	const enough = 64
	w.end = append(w.end[max(0, len(w.end)-enough):], p[max(0, n-enough):n]...)
	return n, err
}

func (w *wholeWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// whole: a stream has said that it is done, and an answer in one piece is written at once.
func (w *wholeWriter) whole() bool {
	if strings.HasPrefix(w.Header().Get("Content-Type"), "text/event-stream") {
		return bytes.HasSuffix(w.end, []byte("data: [DONE]\n\n"))
	}
	return len(w.end) > 0
}

// startEngine runs an engine until the test ends.
func startEngine(t testing.TB) *engine {
	t.Helper()
	e := &engine{emu: emulatortest.Start(t, emulator.Config{Models: []string{model}})}
	srv := httptest.NewServer(http.HandlerFunc(e.serve))
	t.Cleanup(func() {
		e.open()
		srv.CloseClientConnections()
		srv.Close()
	})
	e.URL = srv.URL
	return e
}

func (e *engine) serve(w http.ResponseWriter, r *http.Request) {
	id := r.Header.Get("X-Request-Id")
	if r.Method != http.MethodPost || !strings.HasPrefix(id, "job_") { // a look at its health, or a probe
		e.emu.Handler().ServeHTTP(w, r)
		return
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return // the caller left before it had said all
	}
	c := &engineCall{job: id, path: r.URL.Path, body: body, ended: make(chan struct{})}
	e.mu.Lock()
	e.calls = append(e.calls, c)
	door := e.door
	e.mu.Unlock()
	answered := &wholeWriter{ResponseWriter: w}
	defer func() {
		c.gone = r.Context().Err() != nil && !answered.whole()
		close(c.ended)
	}()
	if door != nil {
		select {
		case <-door:
		case <-r.Context().Done():
			return
		}
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	e.emu.Handler().ServeHTTP(answered, r)
}

// shut keeps the calls that come from now on waiting.
func (e *engine) shut() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.door == nil {
		e.door = make(chan struct{})
	}
}

// open lets calls pass, also those that wait.
func (e *engine) open() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.door != nil {
		close(e.door)
		e.door = nil
	}
}

// all are the calls so far.
func (e *engine) all() []*engineCall {
	e.mu.Lock()
	defer e.mu.Unlock()
	return append([]*engineCall(nil), e.calls...)
}

// of are the calls for one job so far.
func (e *engine) of(job string) []*engineCall {
	var of []*engineCall
	for _, c := range e.all() {
		if c.job == job {
			of = append(of, c)
		}
	}
	return of
}

// called waits until the engine has been called for the job, and returns the n-th call (from 1).
func (e *engine) called(t testing.TB, job string, n int) *engineCall {
	t.Helper()
	var c *engineCall
	eventually(t, patience, fmt.Sprintf("the engine gets call %d for %s", n, job), func() error {
		calls := e.of(job)
		if len(calls) < n {
			return fmt.Errorf("there are %d", len(calls))
		}
		c = calls[n-1]
		return nil
	})
	return c
}

// once fails the test unless the engine was called exactly once for each job.
func (e *engine) once(t testing.TB, jobs ...string) {
	t.Helper()
	for _, id := range jobs {
		if n := len(e.of(id)); n != 1 {
			t.Errorf("the engine was called %d times for %s", n, id)
		}
	}
}

// never fails the test if the engine was called for one of the jobs.
func (e *engine) never(t testing.TB, jobs ...string) {
	t.Helper()
	for _, id := range jobs {
		if n := len(e.of(id)); n != 0 {
			t.Errorf("the engine was called %d times for %s, which had ended", n, id)
		}
	}
}
