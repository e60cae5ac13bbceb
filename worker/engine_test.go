package worker_test

import (
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"

	"github.com/millrace/millrace/internal/engine"
	"github.com/millrace/millrace/internal/engine/emulator"
	"github.com/millrace/millrace/internal/engine/emulator/emulatortest"
)

// seen is a request that an engine got for a job.
type seen struct {
	path, id string
	body     string
}

// log of the requests that an engine got for jobs: probes are not among them.
type calls struct {
	mu  sync.Mutex
	all []seen
}

func (c *calls) add(path string, header http.Header, body []byte) {
	if header.Get("X-Request-Id") == "" {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.all = append(c.all, seen{path, header.Get("X-Request-Id"), string(body)})
}

func (c *calls) list() []seen {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]seen(nil), c.all...)
}

// of counts the calls for one job.
func (c *calls) of(id string) int {
	n := 0
	for _, s := range c.list() {
		if s.id == id {
			n++
		}
	}
	return n
}

// emulate starts an emulated engine whose calls are logged.
func emulate(t testing.TB, cfg emulator.Config) (*emulatortest.Server, *calls) {
	t.Helper()
	c := &calls{}
	cfg.OnRequest = func(_, path string, header http.Header, body []byte) { c.add(path, header, body) }
	return emulatortest.Start(t, cfg), c
}

// script is an engine that tells nothing of its load and answers jobs by a function of the test's own. Probes pass unless unready.
type script struct {
	*httptest.Server
	calls
	mu      sync.Mutex
	answer  http.HandlerFunc
	unready bool
	probes  int
	metrics string           // the page, "" if there is none
	probe   http.HandlerFunc // nil: they pass
	// responds answers the probe of /v1/responses; nil: there is no such route. It is set before a worker starts.
	responds http.HandlerFunc
}

func play(t testing.TB, answer http.HandlerFunc) *script {
	t.Helper()
	s := &script{answer: answer}
	s.Server = httptest.NewServer(s)
	t.Cleanup(s.Close)
	return s
}

// generic tells a worker that the engine is a script.
func generic(c *workerConfig) { c.engine.Kind = engine.Generic }

// then changes the answers from here on.
func (s *script) then(answer http.HandlerFunc) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.answer = answer
}

// thenProbes changes the answers to probes from here on; nil lets them pass.
func (s *script) thenProbes(answer http.HandlerFunc) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.probe = answer
}

func (s *script) setUnready(unready bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.unready = unready
}

// probed counts the probes.
func (s *script) probed() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.probes
}

func (s *script) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/v1/models" {
		_, _ = io.WriteString(w, `{"object":"list","data":[{"id":"`+string(model)+`"}]}`)
		return
	}
	if r.URL.Path == "/v1/responses" && r.Header.Get("X-Request-Id") == "" {
		if s.responds == nil {
			http.NotFound(w, r)
			return
		}
		s.responds(w, r)
		return
	}
	s.mu.Lock()
	answer, unready, probed := s.answer, s.unready, s.probe
	metrics := s.metrics
	probe := r.Header.Get("X-Request-Id") == ""
	if probe {
		s.probes++
	}
	s.mu.Unlock()
	if r.URL.Path == "/metrics" && metrics != "" {
		_, _ = io.WriteString(w, metrics)
		return
	}
	if probe {
		if unready {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		if answer = probed; answer == nil {
			answer = reply(200, `{"choices":[{"message":{"content":"H"}}]}`)
		}
	} else {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		s.add(r.URL.Path, r.Header, body)
	}
	answer(w, r)
}

// reply answers in one piece.
func reply(status int, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		_, _ = io.WriteString(w, body)
	}
}

// stream sends events, and [DONE] after the last.
func stream(chunks ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		send(w, append(chunks, "[DONE]")...)
	}
}

// send sends events of a stream.
func send(w http.ResponseWriter, chunks ...string) {
	w.Header().Set("Content-Type", "text/event-stream")
	for _, c := range chunks {
		_, _ = io.WriteString(w, "data: "+c+"\n\n")
		w.(http.Flusher).Flush()
	}
}
