package worker

import "github.com/millrace/millrace/internal/job"

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
