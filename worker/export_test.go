package worker

import (
	"time"

	"github.com/millrace/millrace/internal/job"
)

// StartAlone has a suspect keep others from starting for so long. It is for before Run.
func (w *Worker) StartAlone(d time.Duration) { w.alone = d }

// Preempt stops the attempt at a job as the scheduler does for one of a higher class.
func (w *Worker) Preempt(id job.ID) { w.stop(id, errPreempted) }

// Preemptible tells whether the scheduler may stop a job that runs.
func (w *Worker) Preemptible(id job.ID) bool {
	w.gate.mu.Lock()
	defer w.gate.mu.Unlock()
	for t, running := range w.gate.running {
		if running == id {
			return t.Preemptible
		}
	}
	return false
}

// Reserved is what a worker holds of its engine, and for whom.
type Reserved struct {
	Tokens, Pending                      job.Tokens
	Sequences, Running, InHand, Attempts int
}

// Reserved is zero while nothing runs.
func (w *Worker) Reserved() (r Reserved) {
	w.mu.Lock()
	r.Attempts = len(w.attempts)
	w.mu.Unlock()
	w.gate.mu.Lock()
	defer w.gate.mu.Unlock()
	r.Tokens, r.Pending, r.Sequences = w.gate.sched.Reserved()
	r.Running, r.InHand = len(w.gate.running), len(w.gate.hand)
	return r
}
