package autoscaler

import (
	"slices"
	"time"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/scale"
)

const (
	keptStarts = 50 // cold starts
	keptRates  = 15 // measurements of what one worker gets done
	// A measurement lasts this long at least, and until this many jobs have ended in it or it has become long.
	leastWindow, longWindow = 10 * time.Second, time.Minute
	enoughEnds              = 8
	fullLoad                = 0.8
)

// learned is what is known of a pool by experience. Its JSON is kept for the next leader: fields are only added.
type learned struct {
	// Spec is the pool as its workers were started: what stops them must be known also once the pool is gone.
	Spec *scale.Pool `json:"spec"`
	// ColdStarts are the last ones, in seconds, Rates the last measurements of a full worker's tokens per second.
	ColdStarts []float64 `json:"cold_starts,omitempty"`
	Rates      []float64 `json:"rates,omitempty"`
	// Failures are starts that failed in a row, Waves how often it was tried meanwhile, RetryAt when it is next, Failure what the last one said.
	Failures int       `json:"failures,omitempty"`
	Waves    int       `json:"waves,omitempty"`
	RetryAt  time.Time `json:"retry_at,omitzero"`
	Failure  string    `json:"failure,omitempty"`
	// Fragile counts workers in a row that died soon after they were ready.
	Fragile int `json:"fragile,omitempty"`
	// Refusals counts how often in a row the provider had no room, RoomAt is when it is asked again, Limit how many workers there were.
	Refusals int       `json:"refusals,omitempty"`
	RoomAt   time.Time `json:"room_at,omitzero"`
	Limit    int       `json:"limit,omitempty"`
	Refusal  string    `json:"refusal,omitempty"`
	// Changed is when the pool was last written, as far as that has been heeded, unix ms.
	Changed job.Millis `json:"changed,omitempty"`
	// LastDemand is when anything was asked of the pool.
	LastDemand time.Time `json:"last_demand,omitzero"`
}

func keep(list []float64, v float64, most int) []float64 {
	list = append(list, v)
	return slices.Clone(list[max(0, len(list)-most):])
}

// quantile of a list that is not empty.
func quantile(list []float64, q float64) float64 {
	sorted := slices.Sorted(slices.Values(list))
	return sorted[min(len(sorted)-1, int(q*float64(len(sorted))))]
}

// coldStart is how long a start takes.
func (l *learned) coldStart(p *scale.Pool) scale.ColdStart {
	if len(l.ColdStarts) == 0 {
		return scale.ColdStart{P50: time.Duration(p.ColdStart), P90: time.Duration(p.ColdStart)}
	}
	seconds := func(q float64) time.Duration {
		return time.Duration(quantile(l.ColdStarts, q) * float64(time.Second))
	}
	return scale.ColdStart{P50: seconds(0.5), P90: seconds(0.9), Samples: len(l.ColdStarts)}
}

// throughput is what one full worker gets done, in tokens per second; 0 is unknown. The middle of the last measurements is not moved by single ones that went wrong.
func (l *learned) throughput(p *scale.Pool) float64 {
	if len(l.Rates) == 0 {
		return p.TokensPerSecond
	}
	return quantile(l.Rates, 0.5)
}

// pause is the n-th of pauses that double.
func pause(n int, first, last time.Duration) time.Duration {
	d := first
	for i := 1; i < n && d < last; i++ {
		d *= 2
	}
	return min(d, last)
}

// failStart notes a start that failed. Those of one wave count each, but lengthen the pause once.
func (l *learned) failStart(now time.Time, why string, t timing) {
	l.Failures++
	l.Failure = why
	if !now.Before(l.RetryAt) {
		l.Waves++
		l.RetryAt = now.Add(pause(l.Waves, t.firstRetry, t.lastRetry))
	}
}

// refuse notes that the provider has no room for more than there are.
func (l *learned) refuse(now time.Time, there int, why string, t timing) {
	l.Limit, l.Refusal = there, why
	if !now.Before(l.RoomAt) {
		l.Refusals++
		l.RoomAt = now.Add(pause(l.Refusals, t.firstRoom, t.lastRoom))
	}
}

// clamp makes what another process has written wait no longer than from now on: that one's clock may have been ahead.
func (l *learned) clamp(now time.Time, t timing) {
	if latest := now.Add(t.lastRetry); l.RetryAt.After(latest) {
		l.RetryAt = latest
	}
	if latest := now.Add(t.lastRoom); l.RoomAt.After(latest) {
		l.RoomAt = latest
	}
}

// retry lets what failed be tried again now. It has not succeeded yet: what fails again waits for as long as it would have.
func (l *learned) retry(now time.Time) {
	if now.Before(l.RetryAt) {
		l.RetryAt = now
	}
	if now.Before(l.RoomAt) {
		l.RoomAt = now
	}
}

// works: starts succeed again.
func (l *learned) works() { l.Failures, l.Waves, l.RetryAt, l.Failure = 0, 0, time.Time{}, "" }

func (l *learned) room() { l.Refusals, l.RoomAt, l.Limit, l.Refusal = 0, time.Time{}, 0, "" }

// meter measures what one worker gets done while it is full: between two moments at which jobs ended, so that it does not matter how long they take.
type meter struct {
	id     string
	heard  time.Time
	served int64
	ended  int64
	// open: it was full at each heartbeat since begin, at which something ended. last is when something ended last.
	open        bool
	begin, last mark
}

type mark struct {
	at            time.Time
	served, ended int64
}

// hear takes a heartbeat in. It returns a rate if one is measured, in tokens per second.
func (m *meter) hear(b *cluster.Member, waits bool) (rate float64, ok bool) {
	w := b.Worker
	now := mark{b.Heard, w.Served, w.Completed + w.Failed}
	if m.id != b.ID || now.served < m.served || now.ended < m.ended {
		*m = meter{id: b.ID, heard: b.Heard, served: now.served, ended: now.ended}
		return 0, false
	}
	if !b.Heard.After(m.heard) {
		return 0, false
	}
	some := now.ended > m.ended
	m.heard, m.served, m.ended = b.Heard, now.served, now.ended
	if !full(w, waits) {
		if m.open {
			rate, ok = m.close()
		}
		m.open = false
		return rate, ok
	}
	if !some {
		return 0, false
	}
	if !m.open {
		m.open, m.begin, m.last = true, now, now
		return 0, false
	}
	m.last = now
	if rate, ok = m.close(); ok {
		m.begin = now
	}
	return rate, ok
}

// close returns the rate between begin and last, if that was long enough.
func (m *meter) close() (float64, bool) {
	elapsed, ends := m.last.at.Sub(m.begin.at), m.last.ended-m.begin.ended
	tokens := m.last.served - m.begin.served
	if elapsed < leastWindow || ends < enoughEnds && (elapsed < longWindow || ends < 2) || tokens <= 0 {
		return 0, false
	}
	return float64(tokens) / elapsed.Seconds(), true
}

// full tells whether a worker has all that it can take; waits, whether work waits for its models.
func full(w *cluster.WorkerInfo, waits bool) bool {
	if w.State != cluster.Ready || w.Running == 0 {
		return false
	}
	noRoom := w.InHand > 0 || w.Free <= 0 || w.Limit > 0 && w.Running >= w.Limit || w.Brake != "" || w.EngineWaiting > 0
	return w.Load >= fullLoad || waits && noRoom
}
