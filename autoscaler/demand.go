package autoscaler

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/scale"
)

const (
	// mostDues bounds how many heaps of unfed work a sample has.
	mostDues = 20
	// oldQueues is how old what a dispatcher saw of the queues may be, in times of timing.stale: looking at many takes a while.
	oldQueues = 2.5
)

// demand is what the heartbeats say of some models together.
type demand struct {
	waiting map[job.Class]scale.Amount
	// delivered is durable work that workers have or had, by class: among it are retries that are due later.
	delivered map[job.Class]scale.Amount
	// calls are held calls that run.
	calls scale.Amount
	// held is how many jobs all workers of these models say that they have.
	held int
}

// demandOf adds up the queues, what the APIs hold, and what workers have.
func demandOf(models []job.Model, dispatcher *cluster.Member, members []cluster.Member) demand {
	d := demand{waiting: map[job.Class]scale.Amount{}, delivered: map[job.Class]scale.Amount{}}
	add := func(to map[job.Class]scale.Amount, c job.Class, jobs int, tokens job.Tokens) {
		if jobs > 0 || tokens > 0 {
			a := to[c]
			to[c] = scale.Amount{Jobs: a.Jobs + max(0, jobs), Tokens: a.Tokens + max(0, tokens)}
		}
	}
	for _, q := range dispatcher.Queues {
		if !slices.Contains(models, q.Model) {
			continue
		}
		byClass := q.ByClass
		if len(byClass) == 0 { // a dispatcher of an older version does not tell classes apart
			byClass = map[job.Class]cluster.Backlog{job.Standard: q.Total}
			n := 0
			for _, jobs := range q.Delivered {
				n += jobs
			}
			q.Delivered = map[job.Class]int{job.Standard: n}
		}
		// What is accepted and has not ended is waiting or delivered. The two are counted at different moments, so that the difference may be out by a few.
		for _, c := range job.Classes() {
			all := byClass[c]
			have := min(q.Delivered[c], all.Jobs)
			var tokens job.Tokens
			if all.Jobs > 0 {
				tokens = job.Tokens(float64(all.Tokens) * float64(have) / float64(all.Jobs))
			}
			add(d.delivered, c, have, tokens)
			add(d.waiting, c, all.Jobs-have, all.Tokens-tokens)
		}
	}
	for _, m := range members {
		switch {
		case m.Role == cluster.RoleAPI:
			for _, t := range m.Traffic {
				if slices.Contains(models, t.Model) {
					add(d.waiting, job.Interactive, t.WaitingCalls, t.WaitingTokens)
					d.calls.Jobs += t.RunningCalls
					d.calls.Tokens += t.RunningTokens
				}
			}
		case m.Role == cluster.RoleWorker && m.Worker != nil:
			if slices.ContainsFunc(m.Worker.Models, func(m job.Model) bool { return slices.Contains(models, m) }) {
				d.held += m.Worker.Running + m.Worker.InHand
			}
		}
	}
	return d
}

// nowhere is how many delivered jobs no worker says to have.
func (d *demand) nowhere() int {
	n := d.calls.Jobs - d.held
	for _, a := range d.delivered {
		n += a.Jobs
	}
	return max(0, n)
}

// split parts the demand into what waits and what is in flight, n of the delivered jobs being at no worker.
func (d *demand) split(n int) (waiting map[job.Class]scale.Amount, inFlight scale.Amount) {
	waiting, inFlight = map[job.Class]scale.Amount{}, d.calls
	for c, a := range d.waiting {
		waiting[c] = a
	}
	total := 0
	for _, a := range d.delivered {
		total += a.Jobs
	}
	for c, a := range d.delivered {
		share := min(1, float64(n)/float64(max(1, total)))
		back := scale.Amount{Jobs: int(math.Round(float64(a.Jobs) * share)), Tokens: job.Tokens(float64(a.Tokens) * share)}
		if back.Jobs > 0 {
			w := waiting[c]
			waiting[c] = scale.Amount{Jobs: w.Jobs + back.Jobs, Tokens: w.Tokens + back.Tokens}
		} else {
			back = scale.Amount{}
		}
		inFlight.Jobs += a.Jobs - back.Jobs
		inFlight.Tokens += a.Tokens - back.Tokens
	}
	return waiting, inFlight
}

// absence finds how many delivered jobs are at no worker for longer than heartbeats differ.
type absence struct{ looks []look }

type look struct {
	at time.Time
	n  int
}

// add takes a look in and returns the least of those within the last while, 0 until there were as many.
func (a *absence) add(now time.Time, n int, within time.Duration) int {
	a.looks = append(a.looks, look{now, n})
	// One look from before the while stays, to show that it is covered.
	for len(a.looks) > 1 && now.Sub(a.looks[1].at) >= within {
		a.looks = a.looks[1:]
	}
	if now.Sub(a.looks[0].at) < within {
		return 0
	}
	least := n
	for _, l := range a.looks {
		least = min(least, l.n)
	}
	return least
}

// unknown says why the heartbeats do not tell the demand now; "" if they do.
func (a *Autoscaler) unknown(now time.Time, dispatcher *cluster.Member) string {
	connected, _ := a.deps.Cluster.Connected()
	a.mu.Lock()
	ledBy, ledSince := a.ledBy, a.ledSince
	a.mu.Unlock()
	switch listening := a.deps.Cluster.Listening(a.begun); {
	case !connected:
		return "NATS is not connected"
	case listening < a.timing.stale:
		return fmt.Sprintf("heartbeats are heard for %s only", listening.Round(100*time.Millisecond))
	case dispatcher == nil:
		return "no dispatcher leads"
	case now.Sub(dispatcher.Heard) > a.timing.stale:
		return fmt.Sprintf("the leading dispatcher was last heard %s ago", now.Sub(dispatcher.Heard).Round(100*time.Millisecond))
	case dispatcher.QueuesAge > oldQueues*a.timing.stale.Seconds():
		return fmt.Sprintf("the leading dispatcher last saw the queues %.0f s ago", dispatcher.QueuesAge)
	case len(dispatcher.Queues) == 0 && (dispatcher.ID != ledBy || now.Sub(ledSince) < a.timing.stale):
		return "the leading dispatcher has not looked at the queues yet"
	}
	return ""
}

// condense merges heaps of unfed work until there are few, the earlier time counting for both.
func condense(dues []scale.Due) []scale.Due {
	slices.SortFunc(dues, func(a, b scale.Due) int { return a.By.Compare(b.By) })
	for len(dues) > mostDues {
		// The two that lie closest.
		at := 0
		for i := range len(dues) - 1 {
			if cmp.Less(dues[i+1].By.Sub(dues[i].By), dues[at+1].By.Sub(dues[at].By)) {
				at = i
			}
		}
		dues[at].Jobs += dues[at+1].Jobs
		dues[at].Tokens += dues[at+1].Tokens
		dues = slices.Delete(dues, at+1, at+2)
	}
	return dues
}
