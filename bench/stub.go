package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// stubModel is what the stub serves.
const stubModel = "stub"

// stub is an engine that answers at once, and notes when each request arrived: what is left is the platform's own time.
type stub struct {
	listener net.Listener
	srv      *http.Server
	ended    chan struct{}

	// hold, while set, keeps every request until its client leaves.
	hold atomic.Bool

	mu       sync.Mutex
	arrivals map[uint64]chan time.Time // of requests that somebody waits for, by their number
}

func startStub() (*stub, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("listening for the engine stub: %w", err)
	}
	s := &stub{listener: l, ended: make(chan struct{}), arrivals: make(map[uint64]chan time.Time)}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) {
		answerJSON(w, `{"object":"list","data":[{"id":"`+stubModel+`","object":"model"}]}`)
	})
	mux.HandleFunc("POST /v1/chat/completions", s.complete)
	s.srv = &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	go func() {
		defer close(s.ended)
		_ = s.srv.Serve(l) // ends with close
	}()
	return s, nil
}

func (s *stub) url() string { return "http://" + s.listener.Addr().String() }

func (s *stub) close() {
	_ = s.srv.Close()
	<-s.ended
}

// request is the body of request n, of about size bytes.
func request(n uint64, size int) []byte {
	b := fmt.Appendf(nil, `{"model":"%s","user":"n%d;","max_tokens":8,"messages":[{"role":"user","content":"`, stubModel, n)
	for len(b) < size {
		b = append(b, 'x')
	}
	return append(b, `"}]}`...)
}

// expect returns a channel that gets the time at which request n arrives.
func (s *stub) expect(n uint64) <-chan time.Time {
	c := make(chan time.Time, 1)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.arrivals[n] = c
	return c
}

func (s *stub) complete(w http.ResponseWriter, r *http.Request) {
	now := time.Now()
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return // the client is gone
	}
	if n, ok := number(body); ok {
		s.mu.Lock()
		if c := s.arrivals[n]; c != nil {
			delete(s.arrivals, n)
			c <- now
		}
		s.mu.Unlock()
		if s.hold.Load() {
			<-r.Context().Done()
			return
		}
	}
	answerJSON(w, `{"id":"x","object":"chat.completion","created":1,"model":"`+stubModel+
		`","choices":[{"index":0,"message":{"role":"assistant","content":"ok"},"finish_reason":"stop"}],"usage":{"prompt_tokens":8,"completion_tokens":1,"total_tokens":9}}`)
}

// number finds the request's number; the worker's probes have none.
func number(body []byte) (uint64, bool) {
	_, rest, found := bytes.Cut(body, []byte(`"user":"n`))
	digits, _, whole := bytes.Cut(rest, []byte(";"))
	if !found || !whole {
		return 0, false
	}
	n, err := strconv.ParseUint(string(digits), 10, 64)
	return n, err == nil
}

func answerJSON(w http.ResponseWriter, text string) {
	w.Header().Set("Content-Type", "application/json")
	_, _ = io.WriteString(w, text) // the client is gone: nobody is left to tell
}

// await waits for a time on c.
func await(ctx context.Context, c <-chan time.Time) (time.Time, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	select {
	case t := <-c:
		return t, nil
	case <-ctx.Done():
		return time.Time{}, errors.New("the request did not reach the engine within 10 s")
	}
}
