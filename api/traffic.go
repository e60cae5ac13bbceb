package api

import (
	"cmp"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
)

// maxTraffic bounds how many models a heartbeat tells the traffic of.
const maxTraffic = 64

// traffic counts what is let in of each model: plain calls and durable jobs, each once. Counting takes no lock. Lines of batches are fed by the dispatcher and are not among them.
type traffic struct {
	models sync.Map // job.Model -> *modelTraffic, for each that anything was let in for: those are known models, so they are few
}

// modelTraffic is one model's, since the process began.
type modelTraffic struct {
	jobs, tokens atomic.Int64
	squares      atomic.Uint64 // the bits of a float64
	last         atomic.Int64  // when the latest came, unix ms
}

// came counts a job or call that was let in and is expected to need so many tokens.
func (t *traffic) came(now time.Time, m job.Model, expected job.Tokens) {
	mt := t.of(m)
	mt.jobs.Add(1)
	mt.tokens.Add(int64(expected))
	mt.last.Store(now.UnixMilli())
	for {
		old := mt.squares.Load()
		if mt.squares.CompareAndSwap(old, math.Float64bits(math.Float64frombits(old)+float64(expected)*float64(expected))) {
			return
		}
	}
}

func (t *traffic) of(m job.Model) *modelTraffic {
	mt, ok := t.models.Load(m)
	if !ok {
		mt, _ = t.models.LoadOrStore(m, &modelTraffic{})
	}
	return mt.(*modelTraffic)
}

// report is what a heartbeat tells, with the calls that are held now. Of too many models it tells those with held calls, the most tokens first, and then those for which something came last: a model that is left out has
// had nothing new for longer than all that are told.
func (t *traffic) report(calls []*call) []cluster.Traffic {
	all := make(map[job.Model]*cluster.Traffic)
	last := make(map[job.Model]int64)
	t.models.Range(func(k, v any) bool {
		m, mt := k.(job.Model), v.(*modelTraffic)
		all[m] = &cluster.Traffic{Model: m, Jobs: mt.jobs.Load(), Tokens: mt.tokens.Load(), Squares: math.Float64frombits(mt.squares.Load())}
		last[m] = mt.last.Load()
		return true
	})
	for _, c := range calls {
		j := &c.message.Job
		mt := all[j.Model]
		if mt == nil { // it is held, and on its way into the queue
			mt = &cluster.Traffic{Model: j.Model}
			all[j.Model] = mt
		}
		if worker, _, _ := c.seat.Holder(); worker == "" {
			mt.WaitingCalls++
			mt.WaitingTokens += j.Expected()
		} else {
			mt.RunningCalls++
			mt.RunningTokens += j.Expected()
		}
	}
	list := make([]cluster.Traffic, 0, len(all))
	for _, mt := range all {
		list = append(list, *mt)
	}
	held := func(t cluster.Traffic) job.Tokens { return t.WaitingTokens + t.RunningTokens }
	slices.SortFunc(list, func(a, b cluster.Traffic) int {
		return cmp.Or(cmp.Compare(held(b), held(a)), cmp.Compare(last[b.Model], last[a.Model]), cmp.Compare(b.Tokens, a.Tokens), cmp.Compare(a.Model, b.Model))
	})
	return list[:min(len(list), maxTraffic)]
}
