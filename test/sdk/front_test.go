package sdk_test

import (
	"bytes"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strconv"
	"sync"
	"testing"
)

// fate is what becomes of an answer on its way to the client.
type fate string

const (
	arrives fate = ""
	lost    fate = "lost" // the connection breaks in its place
	fails   fate = "500"  // an error comes in its place
)

// exchange is a request that passed a front, and the server's answer.
type exchange struct {
	method, path string
	header       http.Header
	body         []byte
	status       int
	answer       http.Header
}

// retry is the number that the clients give to their own retries; 0 is the first try.
func (e *exchange) retry() int {
	n, err := strconv.Atoi(e.header.Get("X-Stainless-Retry-Count"))
	if err != nil {
		return -1
	}
	return n
}

// front stands between a client and the server, as a proxy does: it keeps what passes, and may spoil answers that the server gave.
type front struct {
	url  string
	fate func(*exchange) fate

	mu   sync.Mutex
	seen []*exchange
}

// newFront starts a front of the server at to.
func newFront(t *testing.T, to string, decide func(*exchange) fate) *front {
	t.Helper()
	target, err := url.Parse(to)
	if err != nil {
		t.Fatal(err)
	}
	f := &front{fate: decide}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	t.Cleanup(transport.CloseIdleConnections)
	proxy := &httputil.ReverseProxy{Transport: transport, FlushInterval: -1, Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(target) }}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		e := &exchange{method: r.Method, path: r.URL.Path, header: r.Header.Clone(), body: body}
		what := arrives
		if f.fate != nil {
			what = f.fate(e)
		}
		if what == arrives {
			watched := &statusWriter{ResponseWriter: w, status: http.StatusOK}
			defer func() { f.keep(e, watched.status, w.Header().Clone()) }()
			proxy.ServeHTTP(watched, r)
			return
		}
		answer := httptest.NewRecorder()
		proxy.ServeHTTP(answer, r)
		f.keep(e, answer.Code, answer.Header())
		if what == lost {
			panic(http.ErrAbortHandler)
		}
		http.Error(w, "an error in its place", http.StatusInternalServerError)
	}))
	t.Cleanup(s.Close)
	f.url = s.URL
	return f
}

// keep notes an exchange that is over.
func (f *front) keep(e *exchange, status int, answer http.Header) {
	e.status, e.answer = status, answer
	f.mu.Lock()
	defer f.mu.Unlock()
	f.seen = append(f.seen, e)
}

// exchanges returns those that are over.
func (f *front) exchanges() []*exchange {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]*exchange(nil), f.seen...)
}

// statusWriter remembers the status.
type statusWriter struct {
	http.ResponseWriter
	status int
}

func (w *statusWriter) WriteHeader(status int) {
	w.status = status
	w.ResponseWriter.WriteHeader(status)
}

// Unwrap lets the proxy flush.
func (w *statusWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }
