package routing

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/millrace/millrace/api"
	"github.com/millrace/millrace/internal/engine"
	"github.com/millrace/millrace/internal/platform"
	"github.com/millrace/millrace/internal/schedule"
	"github.com/millrace/millrace/worker"
)

// proxy is a reference router over HTTP: Router decides, and the proxy passes on what the engines answer as it comes. It tries a request on another node where one could
// not be reached or answers 5xx, which it can only as long as nothing has been passed on.
type proxy struct {
	nodes     []*url.URL
	transport *http.Transport
	every     time.Duration // between two health checks of a node
	timeout   time.Duration // of one

	mu     sync.Mutex // guards router
	router *Router
}

func newProxy(p Policy, nodes []string, seed uint64) (*proxy, error) {
	x := &proxy{
		transport: &http.Transport{MaxIdleConnsPerHost: 1024, DisableCompression: true},
		every:     HealthEvery, timeout: HealthTimeout, router: NewRouter(p, len(nodes), seed),
	}
	for _, n := range nodes {
		u, err := url.Parse(n)
		if err != nil {
			return nil, fmt.Errorf("reading a node's URL: %w", err)
		}
		x.nodes = append(x.nodes, u)
	}
	return x, nil
}

func (x *proxy) handler() http.Handler {
	return &httputil.ReverseProxy{
		Rewrite: func(*httputil.ProxyRequest) {}, Transport: x, FlushInterval: -1,
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, err error) {
			status := http.StatusBadGateway
			if errors.Is(err, errNoNode) {
				status = http.StatusServiceUnavailable
			}
			http.Error(w, err.Error(), status)
		},
	}
}

var errNoNode = errors.New("no healthy node is left")

// RoundTrip sends a request to the node that the router picks, and to others if that one fails.
func (x *proxy) RoundTrip(req *http.Request) (*http.Response, error) {
	var body []byte
	if req.Body != nil {
		var err error
		if body, err = io.ReadAll(req.Body); err != nil {
			return nil, fmt.Errorf("reading the request: %w", err)
		}
	}
	var tried []int
	problem := errNoNode
	for len(tried) < Tries {
		x.mu.Lock()
		node, ok := x.router.Pick(tried...)
		x.mu.Unlock()
		if !ok {
			break
		}
		done := func() {
			x.mu.Lock()
			defer x.mu.Unlock()
			x.router.Done(node)
		}
		out := req.Clone(req.Context())
		out.URL.Scheme, out.URL.Host, out.Host = x.nodes[node].Scheme, x.nodes[node].Host, ""
		out.Body, out.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
		resp, err := x.transport.RoundTrip(out)
		if err == nil && resp.StatusCode < http.StatusInternalServerError {
			resp.Body = &watchedBody{ReadCloser: resp.Body, closed: sync.OnceFunc(done)}
			return resp, nil
		}
		done()
		if err == nil {
			_ = resp.Body.Close() // nobody reads it
			err = fmt.Errorf("status %d", resp.StatusCode)
		}
		if req.Context().Err() != nil { // the client is gone
			return nil, req.Context().Err()
		}
		tried, problem = append(tried, node), err
	}
	return nil, problem
}

// watchedBody tells when an answer has been passed on, or given up.
type watchedBody struct {
	io.ReadCloser
	closed func()
}

// Close ends the answer.
func (b *watchedBody) Close() error {
	b.closed()
	return b.ReadCloser.Close()
}

// run checks the nodes' health until ctx ends. They are not all checked at one moment.
func (x *proxy) run(ctx context.Context) {
	client := &http.Client{Transport: x.transport}
	var wg sync.WaitGroup
	for i := range x.nodes {
		wg.Go(func() {
			if !sleep(ctx, x.every*time.Duration(i)/time.Duration(len(x.nodes))) {
				return
			}
			for sleep(ctx, x.every) {
				healthy := x.check(ctx, client, i)
				x.mu.Lock()
				x.router.Health(i, healthy)
				x.mu.Unlock()
			}
		})
	}
	wg.Wait()
}

func (x *proxy) check(ctx context.Context, client *http.Client, node int) bool {
	ctx, cancel := context.WithTimeout(ctx, x.timeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, x.nodes[node].JoinPath("health").String(), nil)
	if err != nil {
		return false
	}
	resp, err := client.Do(req)
	if err != nil {
		return false
	}
	_ = resp.Body.Close() // the status is all
	return resp.StatusCode == http.StatusOK
}

// proxyFront is a proxy that serves.
type proxyFront struct {
	addr  string
	proxy *proxy
	srv   *http.Server
	stop  context.CancelFunc
	g     errgroup.Group
}

func newProxyFront(ctx context.Context, p Policy, engines []*liveEngine, seed uint64) (*proxyFront, error) {
	var nodes []string
	for _, e := range engines {
		nodes = append(nodes, e.url)
	}
	x, err := newProxy(p, nodes, seed)
	if err != nil {
		return nil, err
	}
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("listening for a router: %w", err)
	}
	f := &proxyFront{addr: l.Addr().String(), proxy: x, srv: &http.Server{Handler: x.handler(), ReadHeaderTimeout: 10 * time.Second}}
	running, stop := context.WithCancel(context.WithoutCancel(ctx))
	f.stop = stop
	f.g.Go(func() error { x.run(running); return nil })
	f.g.Go(func() error {
		if err := f.srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			return fmt.Errorf("serving a router: %w", err)
		}
		return nil
	})
	return f, nil
}

func (f *proxyFront) url() string  { return "http://" + f.addr }
func (f *proxyFront) ready() error { return nil }

func (f *proxyFront) close() error {
	f.stop()
	err := f.srv.Close()
	err = errors.Join(err, f.g.Wait())
	f.proxy.transport.CloseIdleConnections()
	return err
}

// millraceFront is all of Millrace in this process: API, queue, store, dispatcher, and a worker beside each engine.
type millraceFront struct {
	platform *platform.Platform
	dir      string
	stop     context.CancelFunc
	ended    chan error
}

func newMillraceFront(ctx context.Context, m *Measurement, engines []*liveEngine) (_ *millraceFront, err error) {
	dir, err := os.MkdirTemp("", "millrace-bench-")
	if err != nil {
		return nil, fmt.Errorf("making a folder for the queue: %w", err)
	}
	cfg := platform.Config{
		Dir: dir, Version: m.Version, API: api.Config{Listen: "127.0.0.1:0", DrainTimeout: time.Second},
		Worker: worker.Config{Drain: time.Millisecond, Schedule: schedule.Config{Order: m.Order}},
	}
	for _, e := range engines {
		cfg.Engines = append(cfg.Engines, engine.Config{URL: e.url})
	}
	p, err := platform.New(ctx, cfg, prometheus.NewRegistry(), m.Log)
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	running, stop := context.WithCancel(context.WithoutCancel(ctx))
	f := &millraceFront{platform: p, dir: dir, stop: stop, ended: make(chan error, 1)}
	go func() { f.ended <- p.Run(running) }() // ends with close
	return f, nil
}

func (f *millraceFront) url() string { return f.platform.URL() }

func (f *millraceFront) ready() error {
	var waiting []string
	for name, check := range f.platform.Ready() {
		if err := check(); err != nil {
			waiting = append(waiting, name+": "+err.Error())
		}
	}
	if len(waiting) > 0 {
		return errors.New(strings.Join(waiting, "; "))
	}
	return nil
}

func (f *millraceFront) close() error {
	f.stop()
	err := <-f.ended
	return errors.Join(err, os.RemoveAll(f.dir))
}
