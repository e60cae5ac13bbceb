package worker

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/relay"
	"github.com/millrace/millrace/internal/results"
)

const (
	// maxKept bounds the bytes of an attempt's events that are kept to restore a wiped stream.
	maxKept = 16 << 20
	// writeEvents and writeBytes bound one write.
	writeEvents = 512
	writeBytes  = 1 << 20
	// eventsAgain is the pause after a write that failed.
	eventsAgain = 200 * time.Millisecond
)

// eventLog writes one attempt's events into the store in order, as fast as the store takes them: what comes while a write is under way goes with the next.
// It keeps what it wrote (bounded), and puts it back if the stream is found gone. It never blocks the reading of the engine.
type eventLog struct {
	store *results.Store
	bells *relay.Relay
	job   *job.Job
	token job.Token
	log   *slog.Logger
	wake  chan struct{}

	mu      sync.Mutex // guards what follows
	kept    []job.Event
	bytes   int
	unsent  int // index in kept of the first event not yet written
	n       int64
	fenced  bool          // a newer attempt has the job: nothing more is written
	written chan struct{} // closed, and another put in its place, when a write has ended
}

// newEventLog begins with the event that the claim has written.
func newEventLog(store *results.Store, bells *relay.Relay, j *job.Job, c *results.Claim, log *slog.Logger) *eventLog {
	first := job.Event{N: c.N, Token: c.Token, Kind: job.EventStatus, Data: fmt.Appendf(nil, `{"status":"running","attempt":%d}`, c.Charged+c.Uncharged+1)}
	if c.Restarted {
		first.Kind, first.Data = job.EventReset, fmt.Appendf(nil, `{"text":"","attempt":%d}`, c.Charged+c.Uncharged+1)
	}
	return &eventLog{
		store: store, bells: bells, job: j, token: c.Token, log: log, wake: make(chan struct{}, 1),
		kept: []job.Event{first}, bytes: len(first.Data), unsent: 1, n: c.N, written: make(chan struct{}),
	}
}

// prepend puts the events of earlier attempts that this one goes on with before its own, to be put back with them under its token.
func (l *eventLog) prepend(earlier []job.Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range earlier {
		earlier[i].Token = l.token
		l.bytes += len(earlier[i].Data)
	}
	l.kept = append(earlier, l.kept...)
	l.unsent += len(earlier)
}

// add appends a token event with its own copy of data.
func (l *eventLog) add(data []byte) { l.append(job.EventToken, bytes.Clone(data)) }

// reset tells readers that what came before this event does not count.
func (l *eventLog) reset(attempt int) {
	l.append(job.EventReset, fmt.Appendf(nil, `{"text":"","attempt":%d}`, attempt))
}

func (l *eventLog) append(kind job.EventKind, data []byte) {
	l.mu.Lock()
	l.n++
	l.kept = append(l.kept, job.Event{N: l.n, Token: l.token, Kind: kind, Data: data})
	l.bytes += len(data)
	for l.bytes > maxKept && len(l.kept) > 1 { // the oldest are given up: who resumes there gets a gap
		l.bytes -= len(l.kept[0].Data)
		l.kept[0] = job.Event{}
		l.kept = l.kept[1:]
		l.unsent = max(0, l.unsent-1)
	}
	l.mu.Unlock()
	l.signal()
}

// check has the last event written once more. That changes nothing, unless the stream is gone: then all is put back.
func (l *eventLog) check() {
	l.mu.Lock()
	if l.unsent == len(l.kept) {
		l.unsent--
	}
	l.mu.Unlock()
	l.signal()
}

func (l *eventLog) signal() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// last is the number of the attempt's last event.
func (l *eventLog) last() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.n
}

// run writes until ctx ends. fenced is called once if a newer attempt has the job.
func (l *eventLog) run(ctx context.Context, fenced func()) {
	gone := false // the stream has to be made anew
	for {
		batch := l.next()
		if len(batch) == 0 {
			select {
			case <-ctx.Done():
				return
			case <-l.wake:
				continue
			}
		}
		err := l.write(ctx, batch, gone)
		switch {
		case err == nil:
			gone = false
			l.sent(batch[len(batch)-1].N)
			l.bells.Bell(l.job.ID)
		case errors.Is(err, results.ErrGone):
			l.log.Warn("the event stream is gone: putting the attempt's events back")
			gone = true
			l.again()
		case errors.Is(err, results.ErrFenced):
			l.end()
			fenced()
			return
		default: // the store is away: the events wait here, bounded
			select {
			case <-ctx.Done():
				return
			case <-time.After(eventsAgain):
			}
		}
	}
}

// next is what is written next, in a slice of its own.
func (l *eventLog) next() []job.Event {
	l.mu.Lock()
	defer l.mu.Unlock()
	n, size := 0, 0
	rest := l.kept[l.unsent:]
	for n < len(rest) && n < writeEvents && (n == 0 || size+len(rest[n].Data) <= writeBytes) {
		size += len(rest[n].Data)
		n++
	}
	return slices.Clone(rest[:n])
}

func (l *eventLog) write(ctx context.Context, batch []job.Event, gone bool) error {
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	if gone {
		return l.store.Restore(ctx, l.job, batch)
	}
	return l.store.Append(ctx, l.job, batch)
}

// sent notes that all events up to number n are written.
func (l *eventLog) sent(n int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.unsent < len(l.kept) && l.kept[l.unsent].N <= n {
		l.unsent++
	}
	l.tellLocked()
}

// again has all that is kept written again.
func (l *eventLog) again() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.unsent = 0
}

func (l *eventLog) end() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.fenced = true
	l.tellLocked()
}

// tellLocked tells those who flush that a write has ended.
func (l *eventLog) tellLocked() {
	close(l.written)
	l.written = make(chan struct{})
}

// flush returns when all events are written, a newer attempt has the job, or limit has passed: then it is false.
func (l *eventLog) flush(ctx context.Context, limit time.Duration) bool {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		l.mu.Lock()
		done, written := l.unsent == len(l.kept) || l.fenced, l.written
		l.mu.Unlock()
		if done {
			return true
		}
		select {
		case <-written:
		case <-ctx.Done():
			return false
		}
	}
}
