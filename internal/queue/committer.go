package queue

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/synadia-io/orbit.go/jetstreamext"
)

const (
	// batchFrom publishes waiting at once are worth a batch: each plain one costs the server a sync of its own, a batch costs a few whatever its size.
	batchFrom     = 16
	maxBatch      = 256
	maxBatchBytes = 4 << 20
	// batchTimeout leaves time for publishing the members singly within the default deadline.
	batchTimeout = 2 * time.Second
)

// committer publishes into synced streams: plainly and at once while few publishes wait, in atomic batches, one at a time per stream, when many do.
type committer struct {
	q     *Queue
	js    jetstream.JetStream
	mu    sync.Mutex
	lines map[string]*line // by stream
	// under mu
	closed bool
	ended  sync.WaitGroup
}

// line is what waits for one stream. Its fields are under the committer's mu.
type line struct {
	plain    int // publishes on their way by themselves
	waiting  []*commit
	batching bool // a goroutine empties waiting
}

// commit is one publish in a line.
type commit struct {
	ctx  context.Context
	e    *envelope
	seq  uint64
	err  error
	done chan struct{}
}

// publish returns once e is stored, or was refused, or ctx has ended.
func (c *committer) publish(ctx context.Context, e *envelope) (uint64, error) {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return 0, fmt.Errorf("%w: the queue is closed", ErrUnavailable)
	}
	c.ended.Add(1)
	defer c.ended.Done()
	l := c.lines[e.stream]
	if l == nil {
		l = &line{}
		c.lines[e.stream] = l
	}
	if !l.batching && l.plain < batchFrom {
		l.plain++
		c.mu.Unlock()
		seq, err := c.single(ctx, e)
		c.mu.Lock()
		l.plain--
		c.mu.Unlock()
		return seq, err
	}
	w := &commit{ctx: ctx, e: e, done: make(chan struct{})}
	l.waiting = append(l.waiting, w)
	if !l.batching {
		l.batching = true
		c.ended.Go(func() { c.empty(l) }) // ends once nothing waits
	}
	c.mu.Unlock()
	select {
	case <-w.done:
		return w.seq, w.err
	case <-ctx.Done(): // it may be in a batch under way
		return 0, transport(ctx.Err())
	}
}

// empty publishes what waits in l, all that came while the last round was under way at once.
func (c *committer) empty(l *line) {
	for {
		c.mu.Lock()
		n, bytes := 0, 0
		for n < len(l.waiting) && n < maxBatch && (n == 0 || bytes+l.waiting[n].e.size() <= maxBatchBytes) {
			bytes += l.waiting[n].e.size()
			n++
		}
		if n == 0 {
			l.batching, l.waiting = false, nil
			c.mu.Unlock()
			return
		}
		round := l.waiting[:n:n]
		l.waiting = l.waiting[n:]
		c.mu.Unlock()
		// Whose caller has gone has been reported as unanswered: to store it now would surprise.
		round = slices.DeleteFunc(round, func(w *commit) bool { return w.ctx.Err() != nil })
		if len(round) < batchFrom || !c.batch(round) {
			c.singly(round)
		}
	}
}

// batch publishes the round as one, and tells whether that worked. If it did not, its members may nevertheless be stored: the answer may be lost.
func (c *committer) batch(round []*commit) bool {
	ctx, cancel := context.WithTimeout(c.q.life, batchTimeout)
	defer cancel()
	msgs := make([]*nats.Msg, len(round))
	for i, w := range round {
		msgs[i] = w.e.msg()
	}
	ack, err := jetstreamext.PublishMsgBatch(ctx, c.js, msgs, jetstreamext.BatchFlowControl{AckFirst: false, AckTimeout: batchTimeout})
	if err != nil {
		return false
	}
	for i, w := range round {
		w.seq = ack.Sequence - uint64(len(round)-1-i)
		close(w.done)
	}
	return true
}

// singly publishes the round's members by themselves and side by side; none whose context has ended.
func (c *committer) singly(round []*commit) {
	var wg sync.WaitGroup
	for _, w := range round {
		wg.Go(func() {
			defer close(w.done)
			w.seq, w.err = c.single(w.ctx, w.e)
		})
	}
	wg.Wait()
}

// single publishes e by itself. While another message on its subject is on its way into a replicated stream the server can say neither yes nor no:
// it is asked again until it can.
func (c *committer) single(ctx context.Context, e *envelope) (uint64, error) {
	for wait := 5 * time.Millisecond; ; wait *= 2 {
		seq, err := c.q.publish(ctx, e.msg())
		if !errors.Is(err, errPending) {
			return seq, err
		}
		if wait > 300*time.Millisecond {
			return 0, fmt.Errorf("%w: %w", ErrUnavailable, err)
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return 0, transport(ctx.Err())
		}
	}
}

// close waits until all that was taken is stored or refused.
func (c *committer) close() {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.ended.Wait()
}
