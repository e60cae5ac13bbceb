package worker

import (
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/millrace/millrace/internal/queue"
)

// repeat calls a function again and again. It costs no goroutine between the calls.
type repeat struct {
	mu      sync.Mutex
	timer   *time.Timer
	stopped bool
}

// every calls fn each period until stop.
func every(period time.Duration, fn func()) *repeat {
	r := &repeat{}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.timer = time.AfterFunc(period, func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.stopped {
			return
		}
		fn()
		r.timer.Reset(period)
	})
	return r
}

// stop waits for a call under way; there is none afterwards. fn must not call it.
func (r *repeat) stop() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stopped = true
	r.timer.Stop()
}

// pulse keeps a delivery this worker's: every third of its AckWait it says that it is in progress and, once the job is claimed, renews the claim.
type pulse struct {
	*repeat
	renew atomic.Pointer[func()]
}

func newPulse(d *queue.Delivery) *pulse {
	p := &pulse{}
	p.repeat = every(d.AckWait/3, func() {
		// A lost one is healed by the next; while NATS is away the lease still holds the job.
		_ = d.InProgress()
		if f := p.renew.Load(); f != nil {
			(*f)()
		}
	})
	return p
}

// nak hands d back; if even that fails its AckWait runs out.
func (w *Worker) nak(log *slog.Logger, d *queue.Delivery, delay time.Duration) {
	if err := d.Nak(delay); err != nil {
		log.Warn("handing a delivery back: it comes again after its ack wait", "err", err)
	}
}

// ack removes d; if that fails it is delivered again, found ended, and acked then.
func (w *Worker) ack(log *slog.Logger, d *queue.Delivery) {
	if err := d.Ack(); err != nil {
		log.Warn("acknowledging a delivery: it comes once more and is then found ended", "err", err)
	}
}
