package cluster

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
)

// Where a worker hears its orders: behind it stands its id.
const (
	drainSubject = "millrace.drain."
	yieldSubject = "millrace.yield."
)

// listening bounds the wait for the server to know a subscription.
const listening = time.Second

// ErrNobody means that nobody of that id listens, or answered in time.
var ErrNobody = errors.New("nobody of that name answers: it may have ended, or be cut off from NATS")

// OrderDrain tells the worker of that id to drain: to take no more work, to hand back what has not started, and to finish what runs. It returns nil once the worker has said that it
// does; what it does is then in its heartbeats. An order may be repeated. ErrNobody: no such worker listens, or it did not answer before ctx ended, or within 5 s if ctx has no deadline.
func (c *Cluster) OrderDrain(ctx context.Context, worker string) error {
	return c.order(ctx, drainSubject, worker, nil, "to drain")
}

// OrderDrainWithin is OrderDrain, and says for how long what runs may go on: a worker that is told to stop later does not begin its own time anew. One that was ordered before keeps to what it was told first.
func (c *Cluster) OrderDrainWithin(ctx context.Context, worker string, limit time.Duration) error {
	return c.order(ctx, drainSubject, worker, []byte(limit.String()), "to drain")
}

// OrderYield tells the worker of that id whether to yield: to take only what others have no room for, so that it comes to be idle. Its heartbeats say whether it does. Errors as OrderDrain's.
func (c *Cluster) OrderYield(ctx context.Context, worker string, yield bool) error {
	return c.order(ctx, yieldSubject, worker, strconv.AppendBool(nil, yield), "to yield, or to yield no more")
}

func (c *Cluster) order(ctx context.Context, subject, worker string, order []byte, what string) error {
	ctx, cancel := withTimeout(ctx, timeout)
	defer cancel()
	_, err := c.nc.RequestWithContext(ctx, subject+token(worker), order)
	if errors.Is(err, nats.ErrNoResponders) || errors.Is(err, context.DeadlineExceeded) {
		err = ErrNobody
	}
	if err != nil {
		return fmt.Errorf("ordering worker %s %s: %w", worker, what, err)
	}
	return nil
}

// OnDrain calls fn for each order to drain that is meant for the worker of that id, until ctx ends, with the limit of OrderDrainWithin, or 0. It returns once it listens. The order is answered when fn returns, which must not block.
func (c *Cluster) OnDrain(ctx context.Context, worker string, fn func(limit time.Duration)) error {
	return c.onOrder(ctx, drainSubject, worker, func(order []byte) {
		limit, _ := time.ParseDuration(string(order)) // without one there is none
		fn(limit)
	})
}

// OnYield calls fn for each order to yield or to do so no more, as OnDrain does.
func (c *Cluster) OnYield(ctx context.Context, worker string, fn func(yield bool)) error {
	return c.onOrder(ctx, yieldSubject, worker, func(order []byte) { fn(string(order) == "true") })
}

func (c *Cluster) onOrder(ctx context.Context, subject, worker string, fn func([]byte)) error {
	sub, err := c.nc.Subscribe(subject+token(worker), func(m *nats.Msg) {
		if ctx.Err() != nil {
			return
		}
		fn(m.Data)
		_ = m.Respond(nil) // an answer that is lost is asked for again
	})
	if err != nil {
		return fmt.Errorf("listening for orders: %w", err)
	}
	context.AfterFunc(ctx, func() { _ = sub.Unsubscribe() }) // fails only if the connection has ended it
	if c.nc.IsConnected() {                                  // else the subscription begins with the next connection
		_ = c.nc.FlushTimeout(listening)
	}
	return nil
}
