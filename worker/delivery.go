package worker

import (
	"log/slog"
	"sync"
	"time"

	"github.com/millrace/millrace/internal/queue"
)

// holding is a delivery that this worker has. Until it is answered, once, it is kept from being delivered again, and what it is used for is renewed with it.
type holding struct {
	*queue.Delivery
	log   *slog.Logger
	beats *repeat
	// move puts the message into the lane where it belongs; nil if it is there.
	move func() error

	mu       sync.Mutex // guards what follows, and keeps the answer behind the last word that it is in progress
	answered bool
	renew    func()
}

// hold begins to keep d, until close.
func hold(d *queue.Delivery, log *slog.Logger) *holding {
	h := &holding{Delivery: d, log: log}
	h.beats = every(d.AckWait/3, h.beat)
	return h
}

// close ends the beats and waits for one under way. A delivery that was not answered comes again after its ack wait.
func (h *holding) close() { h.beats.stop() }

func (h *holding) beat() {
	h.mu.Lock()
	answered, renew := h.answered, h.renew
	if !answered {
		// A lost one is healed by the next; while NATS is away the lease still holds the job.
		_ = h.InProgress()
	}
	h.mu.Unlock()
	if !answered && renew != nil {
		renew()
	}
}

// renewWith has f called with each beat.
func (h *holding) renewWith(f func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.renew = f
}

// ack removes the message; if that fails it is delivered again, found ended, and acked then. Only the first answer counts.
func (h *holding) ack() {
	if err := h.answer(h.Ack); err != nil {
		h.log.Warn("acknowledging a delivery: it comes once more and is then found ended", "err", err)
	}
}

// nak hands the delivery back; if even that fails its ack wait runs out. One that belongs into another lane goes there, and without the delay: what the others have to wait for stands in
// the job's record.
func (h *holding) nak(delay time.Duration) {
	if err := h.answer(func() error {
		if h.move != nil {
			err := h.move()
			if err == nil {
				return h.Ack() // of what is moved nothing is left
			}
			h.log.Warn("moving a job out of the worker's own lane: it comes here again", "err", err)
		}
		return h.Nak(delay)
	}); err != nil {
		h.log.Warn("handing a delivery back: it comes again after its ack wait", "err", err)
	}
}

// drop leaves the delivery to the attempt that has the job now.
func (h *holding) drop() { _ = h.answer(func() error { return nil }) } // cannot fail

func (h *holding) answer(send func() error) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.answered {
		return nil
	}
	h.answered = true
	return send()
}

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
