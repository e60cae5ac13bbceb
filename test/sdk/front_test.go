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
		f.mu.Lock()
		f.seen = append(f.seen, e)
		f.mu.Unlock()
		what := arrives
		if f.fate != nil {
			what = f.fate(e)
		}
		if what == arrives {
			proxy.ServeHTTP(&witness{w, f, e}, r)
			return
		}
		proxy.ServeHTTP(&witness{httptest.NewRecorder(), f, e}, r)
		if what == lost {
			panic(http.ErrAbortHandler)
		}
		http.Error(w, "an error in its place", http.StatusInternalServerError)
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
