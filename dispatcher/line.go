package dispatcher

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
)

const (
	lineAhead  = 64 // jobs of a line that are read ahead
	feedAtOnce = 32 // messages of a model that are moved side by side
)

// line is a tenant's waiting line of one class at a model. Its messages are read in pages as they are needed, and go to the lane `any` in their order, but for those that are moved side by side.
type line struct {
	d     *Dispatcher
	model job.Model
	of    queue.Line
	slots chan struct{} // one for each message that is moved, of all lines of the model
	// stirred: there may be more than was read. listed: the queue counts messages in it.
	stirred, listed atomic.Bool

	owner job.Tenant
	ahead []*queue.Stored // read, and not moved
	next  uint64          // the sequence to read from
}

func newLine(d *Dispatcher, m job.Model, of queue.Line, slots chan struct{}) *line {
	l := &line{d: d, model: m, of: of, slots: slots, owner: job.Tenant(strings.TrimPrefix(string(of.Lane), "t-"))}
	l.stirred.Store(true)
	return l
}

// tenant is right once head has found a job: a long name cannot be read from its lane.
func (l *line) tenant() job.Tenant        { return l.owner }
func (l *line) class() job.Class          { return l.of.Class }
func (l *line) name() string              { return "line " + string(l.of.Class) + " " + string(l.of.Lane) }
func (l *line) urgency(_ float64) float64 { return 0 } // each job has a deadline of its own, and none is the line's
func (l *line) exhausted() bool           { return len(l.ahead) == 0 && !l.stirred.Load() }

// head reads a page if none is at hand and there may be one.
func (l *line) head(ctx context.Context) (job.Tokens, bool, error) {
	if err := l.read(ctx); err != nil || len(l.ahead) == 0 {
		return 0, false, err
	}
	return max(1, l.ahead[0].Job.Expected()), true, nil
}

func (l *line) read(ctx context.Context) error {
	if len(l.ahead) > 0 || !l.stirred.Swap(false) { // what is stirred from here on is read later
		return nil
	}
	page, next, err := l.d.deps.Queue.LinePage(ctx, l.model, l.of, l.next, lineAhead)
	if err != nil {
		l.stirred.Store(true)
		return err
	}
	l.ahead, l.next = page, next
	if len(page) > 0 {
		l.owner = page[0].Job.Tenant
		l.stirred.Store(true) // there may be more behind
	}
	return nil
}

// again has the line read from its beginning, for there are messages in it that were passed over: held by an attempt elsewhere, not yet known to a replica, or of a stream that was made anew.
func (l *line) again() {
	if l.exhausted() {
		l.next = 0
		l.stirred.Store(true)
	}
}

// feed moves jobs until some have been moved or the line is at its end: what was removed or must stay is passed over.
func (l *line) feed(ctx context.Context, _ job.Class, most int, tokens job.Tokens) ([]fed, error) {
	for {
		some, err := l.take(ctx, most, tokens)
		if len(some) == 0 || err != nil {
			return nil, err
		}
		moved, err := l.moveAll(ctx, some)
		if len(moved) > 0 || err != nil {
			return moved, err
		}
	}
}

// take takes jobs from the beginning of what is read.
func (l *line) take(ctx context.Context, most int, tokens job.Tokens) (some []*queue.Stored, err error) {
	left := tokens
	for len(some) < most {
		if err := l.read(ctx); err != nil {
			if len(some) > 0 { // the next turn meets it again
				return some, nil
			}
			return nil, err
		}
		if len(l.ahead) == 0 {
			break
		}
		n := l.ahead[0].Job.Expected()
		if len(some) > 0 && n > left {
			break
		}
		left -= n
		some, l.ahead = append(some, l.ahead[0]), l.ahead[1:]
	}
	return some, nil
}

// moveAll moves jobs side by side. After a failure the line is read again from the first that failed.
func (l *line) moveAll(ctx context.Context, some []*queue.Stored) (moved []fed, err error) {
	var all sync.WaitGroup
	gone, errs := make([]bool, len(some)), make([]error, len(some))
	for i, s := range some {
		l.slots <- struct{}{}
		all.Go(func() {
			defer func() { <-l.slots }()
			gone[i], errs[i] = l.d.move(ctx, s)
		})
	}
	all.Wait()
	first := uint64(math.MaxUint64)
	for i, s := range some {
		if gone[i] {
			moved = append(moved, fed{s.Job.ID, max(1, s.Job.Expected())})
		}
		if errs[i] != nil {
			first = min(first, s.Seq)
		}
	}
	if first < math.MaxUint64 {
		l.ahead, l.next = nil, first
		l.stirred.Store(true)
		return moved, fmt.Errorf("feeding lane %s of model %s: %w", l.of.Lane, l.model, errors.Join(errs...))
	}
	return moved, nil
}
