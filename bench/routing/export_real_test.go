package routing

import (
	"context"
	"net/http"
	"time"
)

// Proxy is a reference router over HTTP, with its health checks as often as a test likes.
type Proxy struct{ *proxy }

// NewProxy returns a proxy in front of nodes.
func NewProxy(p Policy, nodes []string, every time.Duration) (*Proxy, error) {
	x, err := newProxy(p, nodes, 1)
	if err != nil {
		return nil, err
	}
	x.every = every
	return &Proxy{x}, nil
}

// Handler answers what the nodes answer.
func (x *Proxy) Handler() http.Handler { return x.handler() }

// Run checks the nodes' health until ctx ends.
func (x *Proxy) Run(ctx context.Context) {
	x.run(ctx)
	x.transport.CloseIdleConnections()
}

// InFlight is what each node has in flight.
func (x *Proxy) InFlight() []int {
	x.mu.Lock()
	defer x.mu.Unlock()
	return append([]int(nil), x.router.inFlight...)
}

// Healthy is which nodes are healthy.
func (x *Proxy) Healthy() []bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return append([]bool(nil), x.router.healthy...)
}

// Ask streams one answer.
func Ask(ctx context.Context, c *http.Client, url string, serial, prompt, output int) (Sample, error) {
	return ask(ctx, c, url, body(serial, prompt, output, 64), time.Now())
}

// Body is a request's.
func Body(serial, prompt, output, limit int) []byte { return body(serial, prompt, output, limit) }
