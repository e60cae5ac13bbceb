package resultstest

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/results"
)

// sized makes a job whose body and expectation are known: 100 bytes, 10 + 2 x 20 tokens.
func (e *env) sized(change ...func(*job.Job)) *job.Job {
	return e.job(append([]func(*job.Job){func(j *job.Job) {
		j.BodySize, j.Cost = 100, job.Cost{Prompt: 10, Output: 20, Answers: 2}
	}}, change...)...)
}

func of(t job.Tenant, m job.Model, c job.Class) func(*job.Job) {
	return func(j *job.Job) { j.Tenant, j.Model, j.Class = t, m, c }
}

// admit accepts jobs within limits.
func (e *env) admit(l results.Limits, jobs ...*job.Job) {
	e.Helper()
	for _, j := range jobs {
		if _, err := e.Accept(e.ctx, j, body, l); err != nil {
			e.Fatal(err)
		}
	}
}

func (e *env) backlogs() map[job.Model]*results.Backlog {
	e.Helper()
	all, err := e.Backlogs(e.ctx)
	e.ok(err)
	return all
}

func (e *env) end(jobs ...*job.Job) {
	e.Helper()
	for _, j := range jobs {
		e.ok(e.Finish(e.ctx, j, &job.Outcome{State: job.Cancelled, Finished: e.Now()}, nil, nil, nil))
	}
}

func backlogCounts(e *env) {
	a, b := e.sized(of("acme", "m", job.Standard)), e.sized(of("acme", "m", job.Batch))
	c, d := e.sized(of("a:b c", "m", job.Standard)), e.sized(of("acme", "org/other:7b *", job.Interactive))
	e.admit(results.Limits{}, a, b, c, d, a, d) // repeats count once
	one := results.Amount{Jobs: 1, Bytes: 100, Tokens: 50}
	two := results.Amount{Jobs: 2, Bytes: 200, Tokens: 100}
	e.same("backlog", e.backlogs(), map[job.Model]*results.Backlog{
		"m":              {Tenants: map[job.Tenant]results.Amount{"acme": two, "a:b c": one}, Classes: map[job.Class]results.Amount{job.Standard: two, job.Batch: one}},
		"org/other:7b *": {Tenants: map[job.Tenant]results.Amount{"acme": one}, Classes: map[job.Class]results.Amount{job.Interactive: one}},
	})
	e.same("sum", e.backlogs()["m"].Sum(), results.Amount{Jobs: 3, Bytes: 300, Tokens: 150})
	e.ok(e.Queued(e.ctx, a, body))
	claim := e.claim(request(a, "w"), results.Taken)
	e.ok(e.GiveBack(e.ctx, a.ID, claim.Token, 0, false, "preempted")) // what runs or ran still counts
	e.same("given back", e.backlogs()["m"].Tenants["acme"], two)
	e.end(a, a)
	gone, err := e.Discard(e.ctx, b, e.get(b).Since)
	e.ok(err)
	e.same("discarded", gone, true)
	e.end(d)
	e.admit(results.Limits{}, a) // it has ended: a late repeat does not bring it back
	e.same("what is left", e.backlogs(), map[job.Model]*results.Backlog{
		"m": {Tenants: map[job.Tenant]results.Amount{"a:b c": one}, Classes: map[job.Class]results.Amount{job.Standard: one}},
	})
	e.end(c)
	e.same("nothing", e.backlogs(), map[job.Model]*results.Backlog{})
}

// refused checks that a job is over a limit, and is nowhere once it is discarded.
func (e *env) refused(l results.Limits, j *job.Job, scope results.Scope, unit results.Unit, used int64) {
	e.Helper()
	a, err := e.Accept(e.ctx, j, body, l)
	var over *results.LimitError
	if !errors.As(err, &over) || errors.Is(err, results.ErrUnavailable) {
		e.Fatalf("got %v, want the %s's limit of %s", err, scope, unit)
	}
	if over.Scope != scope || over.Unit != unit || over.Used != used {
		e.Fatalf("got %+v, want %d used of the %s's limit of %s", over, used, scope, unit)
	}
	if a != nil {
		_, err := e.Discard(e.ctx, j, a.Since)
		e.ok(err)
	}
	_, err = e.Get(e.ctx, j.ID)
	e.is(err, results.ErrNotFound)
}

func backlogLimits(e *env) {
	for name, test := range map[string]struct {
		limits results.Limits
		scope  results.Scope
		unit   results.Unit
		used   int64
	}{
		"jobs":          {results.Limits{Queue: results.Amount{Jobs: 2}}, results.OfQueue, results.Jobs, 2},
		"bytes":         {results.Limits{Queue: results.Amount{Bytes: 250}}, results.OfQueue, results.Bytes, 200},
		"tokens":        {results.Limits{Queue: results.Amount{Tokens: 149}}, results.OfQueue, results.Tokens, 100},
		"tenant jobs":   {results.Limits{Tenant: results.Amount{Jobs: 3}}, results.OfTenant, results.Jobs, 3},
		"tenant bytes":  {results.Limits{Tenant: results.Amount{Bytes: 399}}, results.OfTenant, results.Bytes, 300},
		"tenant tokens": {results.Limits{Tenant: results.Amount{Tokens: 151}}, results.OfTenant, results.Tokens, 150},
		"model jobs":    {results.Limits{Model: results.Amount{Jobs: 3}}, results.OfModel, results.Jobs, 3},
		"model bytes":   {results.Limits{Model: results.Amount{Bytes: 301}}, results.OfModel, results.Bytes, 300},
		"model tokens":  {results.Limits{Model: results.Amount{Tokens: 199}}, results.OfModel, results.Tokens, 150},
	} {
		m, other, tenant, stranger := job.Model(name), job.Model(name+" other"), job.Tenant(name), job.Tenant(name+" stranger")
		first := e.sized(of(tenant, m, job.Standard))
		e.admit(test.limits, first, e.sized(of(tenant, m, job.Batch)))
		if test.scope == results.OfTenant {
			e.admit(test.limits, e.sized(of(tenant, other, job.Standard)))
		}
		if test.scope == results.OfModel {
			e.admit(test.limits, e.sized(of(stranger, m, job.Interactive)))
		}
		for range 2 { // before and after the store knows that it is full
			e.refused(test.limits, e.sized(of(tenant, m, job.Standard)), test.scope, test.unit, test.used)
		}
		e.admit(test.limits, first)                                      // what was accepted is not refused
		e.admit(test.limits, e.sized(of(stranger, other, job.Standard))) // nor who has nothing to do with it
		e.end(first)
		e.admit(test.limits, e.sized(of(tenant, m, job.Standard)))
	}
}

func backlogRace(e *env) {
	limits := results.Limits{Queue: results.Amount{Jobs: 10}, Model: results.Amount{Jobs: 100}}
	other := newEnv(e.TB, e.url, func(c *results.Config) { c.Prefix = e.prefix }) // another process
	var stored, refused atomic.Int32
	var wg sync.WaitGroup
	for tenant := range 15 {
		for i := range 12 {
			wg.Go(func() {
				s := e
				if i%2 == 1 {
					s = other
				}
				_, err := s.Accept(e.ctx, e.sized(of(job.Tenant(fmt.Sprint(tenant)), "m", job.Standard)), body, limits)
				switch {
				case err == nil:
					stored.Add(1)
				case errors.As(err, new(*results.LimitError)):
					refused.Add(1)
				default:
					e.Error(err)
				}
			})
		}
	}
	wg.Wait()
	b := e.backlogs()["m"]
	if stored.Load() != 100 || refused.Load() != 80 || b.Sum().Jobs != 100 {
		e.Errorf("%d stored and %d refused; the backlog has %d jobs", stored.Load(), refused.Load(), b.Sum().Jobs)
	}
	for t, a := range b.Tenants {
		if a.Jobs > 10 {
			e.Errorf("tenant %s has %d jobs", t, a.Jobs)
		}
	}
}

func backlogPlaces(e *env) {
	var jobs []*job.Job
	for range 4 {
		jobs = append(jobs, e.sized(of("acme", "m", job.Standard)))
	}
	e.admit(results.Limits{}, jobs...)
	high := e.sized(of("other", "m", job.Interactive))
	a, err := e.Accept(e.ctx, high, body, results.Limits{})
	e.ok(err)
	classes := [3]results.ClassAmount{{Jobs: 1, Tokens: 50}, {Jobs: 4, Tokens: 200}}
	e.same("accepted", a.Place, results.Place{Classes: classes})
	again, err := e.Accept(e.ctx, jobs[3], body, results.Limits{})
	e.ok(err)
	third := results.Place{Jobs: 3, Tokens: 150, Classes: classes}
	e.same("accepted again", again.Place, third)
	places := func(jobs ...*job.Job) []*results.Place {
		list, err := e.Places(e.ctx, jobs)
		e.ok(err)
		return list
	}
	e.same("places", places(jobs[3], high, e.job()), []*results.Place{&third, {Classes: classes}, nil})
	e.end(jobs[0])
	e.admit(results.Limits{}, e.sized(of("acme", "m", job.Standard))) // who comes later does not matter
	classes[1] = results.ClassAmount{Jobs: 4, Tokens: 200}
	e.same("one has ended", places(jobs[3], jobs[0]), []*results.Place{{Jobs: 2, Tokens: 100, Classes: classes}, nil})
	e.end(jobs[1], jobs[2], high)
	e.same("first", places(jobs[3]), []*results.Place{{Classes: [3]results.ClassAmount{{}, {Jobs: 2, Tokens: 100}}}})
	var over *results.LimitError
	if _, err := e.Accept(e.ctx, e.sized(of("acme", "m", job.Standard)), body, results.Limits{Queue: results.Amount{Jobs: 2}}); !errors.As(err, &over) {
		e.Fatal(err)
	}
	e.same("behind all", over.Place, results.Place{Jobs: 2, Tokens: 100, Classes: [3]results.ClassAmount{{}, {Jobs: 2, Tokens: 100}}})
}

func backlogRebuilt(e *env) {
	waiting, running, ended := e.sized(), e.sized(), e.sized()
	e.admit(results.Limits{}, waiting, running, ended)
	c := e.claim(request(running, "w"), results.Taken)
	want := results.Amount{Jobs: 2, Bytes: 200, Tokens: 100}
	e.wipe()
	e.same("wiped", e.backlogs(), map[job.Model]*results.Backlog{})
	_, err := e.Renew(e.ctx, renewal(running, "w", c))
	e.ok(err)
	e.ok(e.RestoreEnded(e.ctx, []results.EndedJob{{Job: *ended, Outcome: job.Outcome{State: job.Completed}}}))
	for range 2 {
		e.ok(e.RestoreQueued(e.ctx, []results.QueuedJob{{Job: *waiting, Body: body}, {Job: *running, Body: body}, {Job: *ended, Body: body}}))
		e.same("rebuilt", e.backlogs()["m"].Sum(), want)
	}
	e.end(waiting, running)
	e.wipe()
	e.end(waiting) // an outcome that writes the record anew
	e.ok(e.Queued(e.ctx, running, body))
	e.same("in the end", e.backlogs()["m"].Sum(), results.Amount{Jobs: 1, Bytes: 100, Tokens: 50})
}

func backlogRepaired(e *env) {
	right, lost, ended, young := e.sized(), e.sized(of("acme", "m", job.Batch)), e.sized(of("other", "n", job.Standard)), e.sized()
	e.admit(results.Limits{}, right, lost, ended, young)
	forget := func(j *job.Job) { e.ok(e.raw.Del(e.ctx, e.prefix+"{"+string(j.ID)+"}:r").Err()) }
	repair := func(dropped, added int) {
		e.Helper()
		live := map[job.ID]bool{}
		for _, id := range e.living() {
			live[id] = true
		}
		d, a, err := e.RepairBacklog(e.ctx, live, func(id job.ID) bool { return id != young.ID })
		e.ok(err)
		if d != dropped || a != added {
			e.Fatalf("dropped %d and added %d, want %d and %d", d, a, dropped, added)
		}
	}
	repair(0, 0)
	// A crash between two steps: records that are gone or have ended, and their members stay.
	for _, j := range []*job.Job{lost, young} {
		forget(j)
		e.ok(e.Forget(e.ctx, j.ID))
	}
	e.ok(e.raw.HSet(e.ctx, e.prefix+"{"+string(ended.ID)+"}:r", "s", string(job.Completed)).Err())
	e.same("before", e.backlogs()["m"].Sum().Jobs, int64(3))
	repair(2, 0) // the young one may be on its way
	repair(0, 0)
	e.same("repaired", e.backlogs(), map[job.Model]*results.Backlog{
		"m": {Tenants: map[job.Tenant]results.Amount{"acme": {Jobs: 2, Bytes: 200, Tokens: 100}}, Classes: map[job.Class]results.Amount{job.Standard: {Jobs: 2, Bytes: 200, Tokens: 100}}},
	})
	// Members, or sums, that were lost within the store: what lives is counted anew, in its order.
	last := e.sized(func(j *job.Job) { j.ID = job.NewID(e.Now().Time().Add(time.Second)) })
	e.admit(results.Limits{}, last)
	for _, key := range []string{"{backlog}:in:acme:m", "{backlog}:sums"} {
		e.ok(e.raw.Del(e.ctx, e.prefix+key).Err())
		repair(0, 2)
		repair(0, 0)
		e.same("counted anew", e.backlogs()["m"].Sum(), results.Amount{Jobs: 2, Bytes: 200, Tokens: 100})
		places, err := e.Places(e.ctx, []*job.Job{right, last})
		e.ok(err)
		e.same("in order", []int64{places[0].Jobs, places[1].Jobs}, []int64{0, 1})
	}
	e.ok(e.raw.HSet(e.ctx, e.prefix+"{backlog}:sums", "acme:/t", "350").Err())
	repair(0, 2)
	e.admit(results.Limits{Tenant: results.Amount{Jobs: 3}}, e.sized())
	e.refused(results.Limits{Tenant: results.Amount{Jobs: 3}}, e.sized(), results.OfTenant, results.Jobs, 3)
}

// backlogLines: lines of batches are shown with their tenant's jobs, and are asked for no limits of theirs.
func backlogLines(e *env) {
	inBatch := func(j *job.Job) { j.Group, j.Line, j.Class = "batch_x", 1, job.Batch }
	a, b, c := e.sized(), e.sized(inBatch), e.sized(inBatch)
	e.admit(results.Limits{}, a)
	e.ok(e.AcceptLines(e.ctx, []*job.Job{b, c}))
	l := results.Limits{Queue: results.Amount{Jobs: 2}, Tenant: results.Amount{Jobs: 2, Tokens: 100}}
	d := e.sized()
	e.admit(l, d)
	e.refused(l, e.sized(), results.OfQueue, results.Jobs, 2)
	e.same("shown", e.backlogs()["m"].Tenants, map[job.Tenant]results.Amount{"acme": {Jobs: 4, Bytes: 400, Tokens: 200}})
	beside, err := e.TokensBesideLines(e.ctx, "acme")
	e.ok(err)
	e.same("beside the lines", beside, job.Tokens(100))
	members, err := e.InBacklog(e.ctx, "acme", "m")
	e.ok(err)
	e.same("members", members, map[job.ID]job.Tokens{a.ID: 50, b.ID: 50, c.ID: 50, d.ID: 50})
	places, err := e.Places(e.ctx, []*job.Job{b, c})
	e.ok(err)
	if places[0] == nil || places[1] == nil || places[0].Jobs+places[1].Jobs != 1 {
		e.Errorf("they stand at %+v and %+v", places[0], places[1])
	}
	dropped, added, err := e.RepairBacklog(e.ctx, map[job.ID]bool{a.ID: true, b.ID: true, c.ID: true, d.ID: true}, func(job.ID) bool { return true })
	e.ok(err)
	if dropped+added != 0 {
		e.Errorf("a repair dropped %d and added %d", dropped, added)
	}
	e.end(a, d)
	beside, err = e.TokensBesideLines(e.ctx, "acme")
	e.ok(err)
	e.same("beside the lines", beside, job.Tokens(0))
	e.end(b, c)
	e.same("nothing", e.backlogs(), map[job.Model]*results.Backlog{})
}
