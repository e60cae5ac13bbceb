package resultstest

import (
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/results"
)

func rates(e *env) {
	small, large := results.Rate{Name: "requests of key_1", PerMinute: 2, Asked: 1}, results.Rate{Name: "tokens of acme", PerMinute: 1000, Asked: 400}
	take := func(refused int, all ...results.Rate) []results.RateLeft {
		e.Helper()
		left, which, err := e.TakeRates(e.ctx, all)
		e.ok(err)
		if which != refused {
			e.Fatalf("rate %d refused, want %d: %+v", which, refused, left)
		}
		return left
	}
	left := take(-1, small, large)
	if left[0].Remaining != 1 || left[1].Remaining < 600 || left[1].Remaining > 610 || left[0].Reset <= 0 || left[0].Reset > 30*time.Second {
		e.Errorf("after the first: %+v", left)
	}
	take(-1, small, large)
	// The first rate is the one that is told, and the second is not touched.
	left = take(0, small, large)
	if len(left) != 1 || left[0].Remaining != 0 || left[0].Retry <= 0 || left[0].Retry > 30*time.Second {
		e.Errorf("after the third: %+v", left)
	}
	// A refusal by the second gives back what was taken of the first.
	untouched := results.Rate{Name: "requests of key_3", PerMinute: 1, Asked: 1}
	take(1, untouched, large)
	take(-1, untouched)
	other := results.Rate{Name: "requests of key_2", PerMinute: 10, Asked: 1}
	take(-1, other)
	take(-1, other)
	take(1, other, large)
	left = take(-1, results.Rate{Name: other.Name, PerMinute: other.PerMinute})
	if left[0].Remaining != 8 {
		e.Errorf("what a refusal gave back: %+v", left)
	}
	large.Asked = 100
	if left = take(-1, large); left[0].Remaining > 110 || left[0].Remaining < 100 {
		e.Errorf("of the tokens: %+v", left)
	}
	// All of it at once, once.
	all := results.Rate{Name: "burst", PerMinute: 100_000, Asked: 100_000}
	take(-1, all)
	take(0, all)
	for _, k := range e.keys() {
		if ttl, err := e.raw.PTTL(e.ctx, k).Result(); err != nil || ttl <= 0 || ttl > 61*time.Second {
			e.Errorf("key %s lives for %v: %v", k, ttl, err)
		}
	}
}

func ratesConcurrent(e *env) {
	var wg sync.WaitGroup
	var passed atomic.Int64
	for range 20 {
		wg.Go(func() {
			_, refused, err := e.TakeRates(e.ctx, []results.Rate{{Name: "k", PerMinute: 7, Asked: 1}})
			if err != nil {
				e.Error(err)
			} else if refused < 0 {
				passed.Add(1)
			}
		})
	}
	wg.Wait()
	if n := passed.Load(); n < 7 || n > 8 { // an eighth only where the machine took nine seconds
		e.Errorf("%d of 20 passed a limit of 7", n)
	}
}

func occupancy(e *env) {
	const lease = time.Minute
	id := func() job.ID { return job.NewID(time.Now()) }
	a, b, c := id(), id(), id()
	o := results.Occupancy{Name: "tenant acme/1", Calls: 2, Tokens: 1000}
	occupy := func(i job.ID, n job.Tokens, want results.OccupancyLeft) {
		e.Helper()
		left, err := e.Occupy(e.ctx, o, results.RunningCall{ID: i, Tokens: n}, lease)
		e.ok(err)
		if left != want {
			e.Errorf("%+v, want %+v", left, want)
		}
	}
	occupy(a, 700, results.OccupancyLeft{Calls: 1, Tokens: 700})
	occupy(a, 700, results.OccupancyLeft{Calls: 1, Tokens: 700}) // a repeat
	occupy(b, 400, results.OccupancyLeft{Full: results.Tokens, Tokens: 700})
	occupy(b, 300, results.OccupancyLeft{Calls: 2, Tokens: 1000})
	occupy(c, 0, results.OccupancyLeft{Full: results.Jobs, Calls: 2})
	e.ok(e.Vacate(e.ctx, o.Name, a))
	e.ok(e.Vacate(e.ctx, o.Name, a))
	occupy(c, 700, results.OccupancyLeft{Calls: 2, Tokens: 1000})
	// A wiped store counts again what is renewed.
	e.wipe()
	e.ok(e.KeepOccupied(e.ctx, o.Name, []results.RunningCall{{ID: b, Tokens: 300}, {ID: c, Tokens: 700}}, lease))
	occupy(a, 0, results.OccupancyLeft{Full: results.Jobs, Calls: 2})
	for _, k := range e.keys() {
		if ttl, err := e.raw.PTTL(e.ctx, k).Result(); err != nil || ttl <= 0 || !strings.Contains(k, "run:{") {
			e.Errorf("key %s lives for %v: %v", k, ttl, err)
		}
	}
	e.ok(e.Vacate(e.ctx, o.Name, b))
	e.ok(e.Vacate(e.ctx, o.Name, c))
	occupy(a, 1000, results.OccupancyLeft{Calls: 1, Tokens: 1000})
}

// occupancyHeals: what a dead process held is free when its leases have ended.
func occupancyHeals(e *env) {
	o := results.Occupancy{Name: "k", Calls: 2, Tokens: 1000}
	dead, lives := job.NewID(time.Now()), job.NewID(time.Now())
	_, err := e.Occupy(e.ctx, o, results.RunningCall{ID: lives, Tokens: 100}, time.Minute)
	e.ok(err)
	_, err = e.Occupy(e.ctx, o, results.RunningCall{ID: dead, Tokens: 900}, 50*time.Millisecond)
	e.ok(err)
	e.until("the dead call is forgotten", func() bool {
		left, err := e.Occupy(e.ctx, o, results.RunningCall{ID: job.NewID(time.Now()), Tokens: 900}, time.Minute)
		e.ok(err)
		return left == results.OccupancyLeft{Calls: 2, Tokens: 1000}
	})
}
