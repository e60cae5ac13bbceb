package sdk_test

import (
	"bytes"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"slices"
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

// exchange is a request that reached a front, and the server's answer: its status is 0 before there is one.
type exchange struct {
	method, path string
	header       http.Header
	body         []byte
	status       int
	answer       http.Header
}

// retry is the number that the clients give to their own retries; 0 is the first try.
func (e exchange) retry() int {
	n, err := strconv.Atoi(e.header.Get("X-Stainless-Retry-Count"))
	if err != nil {
		return -1
	}
	return n
}

// front stands between a client and the server, as a proxy does: it keeps what passes, and may spoil answers that the server gave.
type front struct {
	url string
	// fate, if not nil, decides once the server has answered. No answer is streamed then.
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
		f.mu.Lock()
		f.seen = append(f.seen, e)
		f.mu.Unlock()
		if f.fate == nil {
			proxy.ServeHTTP(&witness{w, f, e}, r)
			return
		}
		answer := httptest.NewRecorder()
		proxy.ServeHTTP(&witness{answer, f, e}, r)
		switch f.fate(e) {
		case lost:
			panic(http.ErrAbortHandler)
		case fails:
			http.Error(w, "an error in its place", http.StatusInternalServerError)
		default:
			maps.Copy(w.Header(), answer.Header())
			w.WriteHeader(answer.Code)
			_, _ = w.Write(answer.Body.Bytes()) // a client that left is the test's to notice
		}
	}))
	t.Cleanup(s.Close)
	f.url = s.URL
	return f
}

// exchanges returns what reached the front so far.
func (f *front) exchanges() []exchange {
	f.mu.Lock()
	defer f.mu.Unlock()
	all := make([]exchange, len(f.seen))
	for i, e := range f.seen {
		all[i] = *e
	}
	return all
}

// served leaves out what the platform refused for now, as one may do that gets too little of its machine, and what has no answer.
func served(all []exchange) []exchange {
	return slices.DeleteFunc(all, func(e exchange) bool { return e.status == http.StatusServiceUnavailable || e.status == 0 })
}

// witness notes an answer's head before the client can see it.
type witness struct {
	http.ResponseWriter
	front    *front
	exchange *exchange
}

func (w *witness) WriteHeader(status int) {
	w.front.mu.Lock()
	w.exchange.status, w.exchange.answer = status, w.Header().Clone()
	w.front.mu.Unlock()
	w.ResponseWriter.WriteHeader(status)
}

// Unwrap lets the proxy flush.
func (w *witness) Unwrap() http.ResponseWriter { return w.ResponseWriter }
