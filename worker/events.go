package worker

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/relay"
	"github.com/millrace/millrace/internal/results"
)

// maxKept bounds the bytes of an attempt's events that are kept to restore a wiped stream.
const maxKept = 16 << 20

// eventLog writes one attempt's events into the store in order, as fast as the store takes them: what comes while a write is under way goes with the next.
// It keeps what it wrote (bounded), and puts it back if the stream is found gone. It never blocks the reading of the engine.
type eventLog struct {
	store *results.Store
	bells *relay.Relay
	job   *job.Job
	token job.Token
	log   *slog.Logger

	mu      sync.Mutex
	kept    []job.Event
	bytes   int
	unsent  int // index in kept of the first event not yet written
	n       int64
	failed  error // ErrFenced: nothing more is written
	wake    chan struct{}
	settled chan struct{} // replaced; closed when a write has ended
}

func newEventLog(store *results.Store, bells *relay.Relay, j *job.Job, token job.Token, n int64, log *slog.Logger) *eventLog {
	return &eventLog{store: store, bells: bells, job: j, token: token, n: n, log: log, wake: make(chan struct{}, 1), settled: make(chan struct{})}
}

// add appends a token event with its own copy of data.
func (l *eventLog) add(data []byte) {
	l.mu.Lock()
	l.n++
	l.kept = append(l.kept, job.Event{N: l.n, Token: l.token, Kind: job.EventToken, Data: append([]byte(nil), data...)})
	l.bytes += len(data)
	for l.bytes > maxKept && len(l.kept) > 1 { // the oldest are given up: who resumes there gets a gap
		l.bytes -= len(l.kept[0].Data)
		l.kept[0] = job.Event{}
		l.kept = l.kept[1:]
		l.unsent = max(0, l.unsent-1)
	}
	l.mu.Unlock()
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
	for {
		select {
		case <-ctx.Done():
			return
		case <-l.wake:
		}
		for {
			l.mu.Lock()
			batch := l.kept[l.unsent:]
			l.mu.Unlock()
			if len(batch) == 0 {
				break
			}
			err := l.write(ctx, batch)
			if errors.Is(err, results.ErrFenced) {
				l.mu.Lock()
				l.failed = err
				l.mu.Unlock()
				fenced()
				l.announce()
				return
			}
			if err != nil { // the store is away: the events wait here, bounded
				select {
				case <-ctx.Done():
					return
				case <-time.After(200 * time.Millisecond):
				}
				continue
			}
			l.mu.Lock()
			sent := batch[len(batch)-1].N
			for l.unsent < len(l.kept) && l.kept[l.unsent].N <= sent {
				l.unsent++
			}
			l.mu.Unlock()
			l.announce()
			l.bells.Bell(l.job.ID)
		}
	}
}

// announce tells those who flush that a write has ended.
func (l *eventLog) announce() {
	l.mu.Lock()
	defer l.mu.Unlock()
	close(l.settled)
	l.settled = make(chan struct{})
}

func (l *eventLog) write(ctx context.Context, batch []job.Event) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	err := l.store.Append(ctx, l.job, batch)
	if errors.Is(err, results.ErrGone) {
		l.log.Warn("the event stream is gone: putting the attempt's events back")
		err = l.restore(ctx)
	}
	return err
}

// restore puts all kept events into a stream that is gone.
func (l *eventLog) restore(ctx context.Context) error {
	l.mu.Lock()
	kept := l.kept
	l.mu.Unlock()
	return l.store.Restore(ctx, l.job, kept)
}

// flush returns when all events are written, a newer attempt has the job, or limit has passed.
func (l *eventLog) flush(ctx context.Context, limit time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		l.mu.Lock()
		done, settled := l.unsent == len(l.kept) || l.failed != nil, l.settled
		l.mu.Unlock()
		if done {
			return
		}
		select {
		case <-settled:
		case <-ctx.Done():
			return
		}
	}
}
