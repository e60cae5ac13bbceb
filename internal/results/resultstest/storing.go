package resultstest

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/results"
)

func z(score float64, member string) redis.Z { return redis.Z{Score: score, Member: member} }

func ids(list []*results.Record) []job.ID {
	var out []job.ID
	for _, r := range list {
		out = append(out, r.Job.ID)
	}
	return out
}

// living lists the live jobs in order of their ids.
func (e *env) living() []job.ID {
	e.Helper()
	var all []job.ID
	e.ok(e.Live(e.ctx, func(page []job.ID) error {
		all = append(all, page...)
		return nil
	}))
	slices.Sort(all)
	return all
}

func keys(e *env) {
	a, b := results.KeyEntry{ID: "job_a", Hash: "h1"}, results.KeyEntry{ID: "job_b", Hash: "h2"}
	reserve := func(t job.Tenant, key string, entry, want results.KeyEntry, wantMine bool) {
		e.Helper()
		held, mine, err := e.ReserveKey(e.ctx, t, key, entry, 0)
		e.ok(err)
		if held != want || mine != wantMine {
			e.Fatalf("held %+v, mine %v", held, mine)
		}
	}
	reserve("t", "k", a, a, true)
	reserve("t", "k", a, a, true) // a repeat
	reserve("t", "k", b, a, false)
	reserve("u", "k", b, b, true) // another tenant's
	reserve("t:k", "", b, b, true)
	reserve("t", "k:", b, b, true)
	e.ok(e.ReleaseKey(e.ctx, "t", "k", "job_b")) // not its
	e.ok(e.ReleaseKey(e.ctx, "t", "k", "job_"))
	reserve("t", "k", b, a, false)
	e.ok(e.ReleaseKey(e.ctx, "t", "k", "job_a"))
	e.ok(e.ReleaseKey(e.ctx, "t", "k", "job_a"))
	reserve("t", "k", b, b, true)
	_, _, err := e.ReserveKey(e.ctx, "t", "short", a, 300*time.Millisecond)
	e.ok(err)
	e.until("the key expires", func() bool {
		_, mine, err := e.ReserveKey(e.ctx, "t", "short", b, time.Hour)
		e.ok(err)
		return mine
	})
}

func keysConcurrent(e *env) {
	var wg sync.WaitGroup
	var winners atomic.Int32
	held := make([]results.KeyEntry, 50)
	for i := range held {
		wg.Go(func() {
			entry, mine, err := e.ReserveKey(e.ctx, "t", "k", results.KeyEntry{ID: job.NewID(time.Now()), Hash: "h"}, 0)
			if err != nil {
				e.Error(err)
			}
			if mine {
				winners.Add(1)
			}
			held[i] = entry
		})
	}
	wg.Wait()
	if winners.Load() != 1 || len(slices.Compact(held)) != 1 {
		e.Fatalf("%d winners; %v", winners.Load(), held)
	}
}

func submit(e *env) {
	j := e.job()
	state, since, err := e.accept(j, body)
	e.ok(err)
	e.same("state", state, job.Accepting)
	r := e.state(j, job.Accepting)
	e.same("since", r.Since, since)
	e.same("live", e.living(), []job.ID{j.ID})
	// A retry of the client.
	_, renewed, err := e.accept(j, body)
	e.ok(err)
	if renewed <= since {
		e.Fatalf("since %d is not after %d", renewed, since)
	}
	gone, err := e.Discard(e.ctx, j, since)
	e.ok(err)
	if gone {
		e.Fatal("a renewed record was discarded")
	}
	e.ok(e.Queued(e.ctx, j, body))
	e.ok(e.Queued(e.ctx, j, body))
	e.state(j, job.Queued)
	if gone, err = e.Discard(e.ctx, j, renewed); err != nil || gone {
		e.Fatalf("a queued record was discarded: %v", err)
	}

	j = e.job()
	_, since, err = e.accept(j, body)
	e.ok(err)
	for range 2 { // a repeat says the same
		gone, err := e.Discard(e.ctx, j, since)
		e.ok(err)
		if !gone {
			e.Fatal("not discarded")
		}
	}
	_, err = e.Get(e.ctx, j.ID)
	e.is(err, results.ErrNotFound)
	_, err = e.Body(e.ctx, j.ID)
	e.is(err, results.ErrNotFound)
	list, _, err := e.List(e.ctx, j.Tenant, results.Filter{}, "", 10)
	e.ok(err)
	e.same("listed", len(list), 1)
	// Removed while its message was being published: the record is written whole.
	e.ok(e.Queued(e.ctx, j, body))
	e.state(j, job.Queued)
	b, err := e.Body(e.ctx, j.ID)
	e.ok(err)
	e.same("body", b, body)
	e.same("live", len(e.living()), 2)
	// A large body is elsewhere.
	j = e.job()
	_, err = e.Accept(e.ctx, j, nil, results.Limits{})
	e.ok(err)
	_, err = e.Body(e.ctx, j.ID)
	e.is(err, results.ErrNotFound)
}

func acceptRacesDiscard(e *env) {
	for range 20 {
		j := e.job()
		_, since, err := e.accept(j, body)
		e.ok(err)
		var gone atomic.Bool
		var wg sync.WaitGroup
		wg.Go(func() {
			g, err := e.Discard(e.ctx, j, since)
			if err != nil {
				e.Error(err)
			}
			gone.Store(g)
		})
		wg.Go(func() {
			if err := e.Queued(e.ctx, j, body); err != nil {
				e.Error(err)
			}
		})
		wg.Wait()
		// Whichever was first: the job is queued, for its message may be there.
		e.state(j, job.Queued)
	}
}

func listPages(e *env) {
	now := e.Now()
	var want []job.ID
	for i := range 99 {
		j := e.queued(func(j *job.Job) {
			j.Created = now
			if i%33 == 0 {
				j.Created = now - job.Millis(i)
			}
		})
		want = append(want, j.ID)
		e.queued(func(j *job.Job) { j.Tenant = "other" })
	}
	created := map[job.ID]job.Millis{}
	for _, id := range want {
		r, err := e.Get(e.ctx, id)
		e.ok(err)
		created[id] = r.Job.Created
	}
	slices.SortFunc(want, func(a, b job.ID) int {
		return cmp.Or(cmp.Compare(created[b], created[a]), cmp.Compare(b, a))
	})
	for _, limit := range []int{1, 10, 33, 98, 99, 100, 1000} {
		var got []job.ID
		after := job.ID("")
		for {
			page, more, err := e.List(e.ctx, "acme", results.Filter{}, after, limit)
			e.ok(err)
			got = append(got, ids(page)...)
			if len(page) > limit || len(page) == 0 {
				e.Fatalf("a page of %d has %d", limit, len(page))
			}
			if !more {
				break
			}
			after = got[len(got)-1]
		}
		e.same(fmt.Sprintf("pages of %d", limit), got, want)
	}
	for _, limit := range []int{0, -1} {
		page, more, err := e.List(e.ctx, "acme", results.Filter{}, "", limit)
		e.ok(err)
		if page != nil || more {
			e.Fatalf("limit %d: %v %v", limit, page, more)
		}
	}
	_, _, err := e.List(e.ctx, "acme", results.Filter{}, job.NewID(time.Now()), 10)
	e.is(err, results.ErrNotFound)
	_, _, err = e.List(e.ctx, "other", results.Filter{}, want[0], 10) // not that tenant's
	e.is(err, results.ErrNotFound)
	page, more, err := e.List(e.ctx, "nobody", results.Filter{}, "", 10)
	e.ok(err)
	if page != nil || more {
		e.Fatalf("nobody has %v", page)
	}
}

func listFilters(e *env) {
	var running, session, model []job.ID
	for i := range 40 {
		j := e.queued(func(j *job.Job) {
			if i%5 == 0 {
				j.Session = "s"
			}
			if i%7 == 0 {
				j.Model = "m2"
			}
		})
		if i%10 == 0 {
			e.claim(request(j, "w"), results.Taken)
			running = append(running, j.ID)
		}
		if i%5 == 0 {
			session = append(session, j.ID)
		}
		if i%7 == 0 {
			model = append(model, j.ID)
		}
	}
	accepting := e.job()
	_, err := e.Accept(e.ctx, accepting, body, results.Limits{})
	e.ok(err)
	for _, c := range []struct {
		f    results.Filter
		want []job.ID
	}{
		{results.Filter{State: job.Running}, running},
		{results.Filter{Session: "s"}, session},
		{results.Filter{Model: "m2"}, model},
		{results.Filter{Model: "m2", Session: "s"}, intersect(model, session)},
		{results.Filter{State: job.Failed}, nil},
	} {
		got := map[job.ID]bool{}
		after := job.ID("")
		for {
			page, more, err := e.List(e.ctx, "acme", c.f, after, 3)
			e.ok(err)
			for _, r := range page {
				got[r.Job.ID] = true
				after = r.Job.ID
			}
			if !more {
				break
			}
			if len(page) != 3 {
				e.Fatalf("more follow, yet the page has %d", len(page))
			}
		}
		want := map[job.ID]bool{}
		for _, id := range c.want {
			want[id] = true
		}
		e.same(fmt.Sprintf("%+v", c.f), got, want)
	}
	// What clients see as queued.
	page, _, err := e.List(e.ctx, "acme", results.Filter{State: job.Queued}, "", 100)
	e.ok(err)
	e.same("queued", len(page), 41-len(running))
}

func intersect(a, b []job.ID) []job.ID {
	return slices.DeleteFunc(slices.Clone(a), func(id job.ID) bool { return !slices.Contains(b, id) })
}

func listRemovals(e *env) {
	var all []job.ID
	for range 5 {
		all = append(all, e.queued().ID)
	}
	record := func(id job.ID) string { return e.prefix + "{" + string(id) + "}:r" }
	e.ok(e.raw.Del(e.ctx, record(all[1])).Err())
	e.ok(e.raw.Del(e.ctx, record(all[3])).Err())
	// Old entries that lead nowhere, more than a page of them.
	for i := range 600 {
		e.ok(e.raw.ZAdd(e.ctx, e.prefix+"list:acme", z(float64(e.Now()-7_200_000-job.Millis(i)), fmt.Sprintf("job_dead%d", i))).Err())
	}
	page, more, err := e.List(e.ctx, "acme", results.Filter{}, "", 10)
	e.ok(err)
	if len(page) != 3 || more {
		e.Fatalf("%d listed, more %v", len(page), more)
	}
	// The young ones stay: they may be about to be written.
	n, err := e.raw.ZCard(e.ctx, e.prefix+"list:acme").Result()
	e.ok(err)
	e.same("entries", n, int64(5))
	page, more, err = e.List(e.ctx, "acme", results.Filter{}, "", 3)
	e.ok(err)
	if len(page) != 3 || more {
		e.Fatalf("%d listed, more %v", len(page), more)
	}
}

func due(e *env) {
	hour := job.Millis(time.Hour.Milliseconds())
	now := e.Now()
	expired := e.queued(func(j *job.Job) { j.Expires = now - 10 })
	waited := e.queued(func(j *job.Job) { j.Created, j.QueueTimeout = now-2000, 1000 })
	started := e.queued(func(j *job.Job) { j.Created, j.QueueTimeout = now-2000, 1000 })
	e.claim(request(started, "w"), results.Taken)
	finished := e.queued(func(j *job.Job) { j.Expires = now - 5 })
	later := e.queued(func(j *job.Job) { j.QueueTimeout = hour / 2 })
	accepting := e.job(func(j *job.Job) { j.Expires = now - 1 })
	_, err := e.Accept(e.ctx, accepting, body, results.Limits{})
	e.ok(err)
	e.ok(e.Finish(e.ctx, finished, &job.Outcome{State: job.Expired, Finished: now}, nil, nil, nil))

	check := func(at job.Millis, limit int, want ...job.ID) {
		e.Helper()
		got, err := e.Due(e.ctx, at, limit)
		e.ok(err)
		e.same("due", got, want)
	}
	check(now, 10, waited.ID, expired.ID, accepting.ID)
	check(now, 2, waited.ID, expired.ID)
	check(now+hour/2+5000, 10, waited.ID, expired.ID, accepting.ID, later.ID)
	e.claim(request(later, "w"), results.Taken)
	check(now+hour/2+5000, 10, waited.ID, expired.ID, accepting.ID)
	got, err := e.Due(e.ctx, now+2*hour, 10)
	e.ok(err)
	e.same("due in the end", len(got), 5)
	e.ok(e.Finish(e.ctx, waited, &job.Outcome{State: job.Expired, Finished: now}, nil, nil, nil))
	check(now, 10, expired.ID, accepting.ID)

	// An id without a record is told until it is forgotten; a very old one is dropped.
	e.ok(e.raw.Del(e.ctx, e.prefix+"{"+string(expired.ID)+"}:r").Err())
	check(now, 10, expired.ID, accepting.ID)
	e.ok(e.Forget(e.ctx, expired.ID))
	check(now, 10, accepting.ID)
	e.ok(e.raw.ZAdd(e.ctx, e.prefix+"{3}:live", z(1000, "job_x")).Err())
	check(now, 10, accepting.ID)

	// A rebuilt record may belong to a job that runs: its queue timeout waits for the worker to say so.
	e.wipe()
	e.ok(e.RestoreQueued(e.ctx, []results.QueuedJob{{Job: *waited}}))
	check(now, 10)
	check(now+5*60_000, 10, waited.ID)
}

func live(e *env) {
	var want []job.ID
	for i := range 60 {
		j := e.queued()
		switch i % 3 {
		case 0:
			want = append(want, j.ID)
		case 1:
			e.claim(request(j, "w"), results.Taken)
			want = append(want, j.ID)
		case 2:
			e.ok(e.Finish(e.ctx, j, &job.Outcome{State: job.Failed, Finished: e.Now()}, nil, nil, nil))
			// As if the process had crashed before it could clean the index.
			e.ok(e.RestoreQueued(e.ctx, []results.QueuedJob{{Job: *j}}))
		}
	}
	slices.Sort(want)
	e.same("live", e.living(), want)
	entries := 0
	for i := range 16 {
		n, err := e.raw.ZCard(e.ctx, fmt.Sprintf("%s{%d}:live", e.prefix, i)).Result()
		e.ok(err)
		entries += int(n)
	}
	e.same("entries", entries, 40)
	stop := fmt.Errorf("stop")
	e.is(e.Live(e.ctx, func([]job.ID) error { return stop }), stop)
	// A job whose record is gone is told: it may be in the streams.
	e.ok(e.raw.Del(e.ctx, e.prefix+"{"+string(want[0])+"}:r").Err())
	e.same("live", e.living(), want)
	e.ok(e.Forget(e.ctx, want...))
	e.ok(e.Forget(e.ctx))
	e.same("live", e.living(), []job.ID(nil))
}

func cancel(e *env) {
	j := e.queued()
	for range 2 {
		r, err := e.AskCancel(e.ctx, j.ID)
		e.ok(err)
		if !r.CancelAsked || r.State != job.Queued || r.Job.Tenant != j.Tenant {
			e.Fatalf("record: %+v", r)
		}
	}
	e.ok(e.Finish(e.ctx, j, &job.Outcome{State: job.Cancelled, Finished: e.Now()}, nil, nil, nil))
	r, err := e.AskCancel(e.ctx, j.ID)
	e.ok(err)
	e.same("state", r.State, job.Cancelled)
	_, err = e.AskCancel(e.ctx, job.NewID(time.Now()))
	e.is(err, results.ErrNotFound)
}

func remove(e *env) {
	j := e.queued()
	if err := e.Delete(e.ctx, j.Tenant, j.ID); err == nil {
		e.Fatal("a job that has not ended was deleted")
	}
	c := e.claim(request(j, "w"), results.Taken)
	e.ok(e.Finish(e.ctx, j, completed(c, e, 2), []byte("x"), nil, nil))
	e.is(e.Delete(e.ctx, "other", j.ID), results.ErrNotFound)
	e.state(j, job.Completed)
	for range 2 {
		e.ok(e.Delete(e.ctx, j.Tenant, j.ID))
	}
	for _, k := range e.keys() {
		if strings.Contains(k, string(j.ID)) {
			e.Errorf("%s is left", k)
		}
	}
	// A late delivery finds the tombstone: the record does not rise from it.
	tomb := completed(c, e, 2)
	tomb.Erased = true
	e.ok(e.Finish(e.ctx, j, tomb, nil, nil, nil))
	e.ok(e.RestoreEnded(e.ctx, []results.EndedJob{{Job: *j, Outcome: *tomb}}))
	_, err := e.Get(e.ctx, j.ID)
	e.is(err, results.ErrNotFound)
	list, _, err := e.List(e.ctx, j.Tenant, results.Filter{}, "", 10)
	e.ok(err)
	e.same("listed", len(list), 0)
	// A record that does not know of its end yet, does then.
	j = e.queued()
	e.ok(e.Finish(e.ctx, j, tomb, nil, nil, nil))
	e.state(j, job.Completed)
}

func sentinel(e *env) {
	check := func(want bool) {
		e.Helper()
		got, err := e.Wiped(e.ctx)
		e.ok(err)
		e.same("wiped", got, want)
	}
	check(true)
	e.ok(e.SetSentinel(e.ctx))
	check(false)
	e.queued()
	check(false)
	e.ok(e.raw.Del(e.ctx, e.prefix+"{7}:whole").Err()) // a part of a cluster
	check(true)
	e.ok(e.SetSentinel(e.ctx))
	e.wipe()
	check(true)
	e.ok(e.Ping(e.ctx))
}

func rebuild(e *env) {
	var waiting []results.QueuedJob
	var ended []results.EndedJob
	for i := range 250 { // more than one round trip takes
		j := e.job(func(j *job.Job) { j.Key, j.BodyHash = fmt.Sprint("key", i), "hash" })
		if i%2 == 0 {
			waiting = append(waiting, results.QueuedJob{Job: *j, Body: body})
		} else {
			ended = append(ended, results.EndedJob{Job: *j, Outcome: job.Outcome{
				State: job.Completed, Token: 5, Finished: j.Created + 1, FirstToken: j.Created, LastEvent: 9, ResultSize: 3, Attempts: []job.Attempt{{Worker: "w", Started: 1, Ended: 2, Outcome: "completed"}},
			}})
		}
	}
	ended[0].Job.Expires, ended[0].Job.Created = 2000, 1000 // past its retention
	for range 2 {
		e.ok(e.RestoreQueued(e.ctx, waiting))
		e.ok(e.RestoreEnded(e.ctx, ended))
	}
	r := e.state(&waiting[0].Job, job.Queued)
	e.same("job", r.Job, waiting[0].Job)
	b, err := e.Body(e.ctx, waiting[124].Job.ID)
	e.ok(err)
	e.same("body", b, body)
	r = e.state(&ended[124].Job, job.Completed)
	e.same("outcome", *r.Outcome, ended[124].Outcome)
	if r.HasResult || r.N != 9 || r.Token != 5 || len(r.Attempts) != 1 {
		e.Fatalf("record: %+v", r)
	}
	_, err = e.Get(e.ctx, ended[0].Job.ID)
	e.is(err, results.ErrNotFound)
	e.same("live", len(e.living()), len(waiting))
	for _, j := range []job.Job{waiting[3].Job, ended[3].Job} {
		held, mine, err := e.ReserveKey(e.ctx, j.Tenant, j.Key, results.KeyEntry{ID: "job_new", Hash: "hash"}, 0)
		e.ok(err)
		if mine || held.ID != j.ID || held.Hash != "hash" {
			e.Fatalf("the key of a rebuilt job: %+v %v", held, mine)
		}
	}
	list, more, err := e.List(e.ctx, "acme", results.Filter{}, "", 1000)
	e.ok(err)
	if len(list) != 249 || more {
		e.Fatalf("%d listed", len(list))
	}
	// Never over what is there.
	j := e.queued()
	c := e.claim(request(j, "w"), results.Taken)
	before := e.get(j)
	e.ok(e.RestoreQueued(e.ctx, []results.QueuedJob{{Job: *j, Body: []byte("other")}}))
	e.ok(e.RestoreEnded(e.ctx, []results.EndedJob{{Job: *j, Outcome: *completed(c, e, 3)}}))
	e.same("record", e.get(j), before)
	b, err = e.Body(e.ctx, j.ID)
	e.ok(err)
	e.same("body", b, body)
	e.ok(e.RestoreQueued(e.ctx, nil))
	// A key that stands for the request alone is not bound for long.
	young, old := e.job(func(j *job.Job) { j.Key = "young" }), e.job(func(j *job.Job) { j.Key = "old" })
	old.Created -= job.Millis(results.ImpliedKeyTTL.Milliseconds())
	e.ok(e.RestoreQueued(e.ctx, []results.QueuedJob{{Job: *young, Body: body}, {Job: *old, Body: body}}))
	for key, bound := range map[string]bool{"young": true, "old": false} {
		_, mine, err := e.ReserveKey(e.ctx, young.Tenant, key, results.KeyEntry{ID: "job_new"}, 0)
		e.ok(err)
		e.same(key+" is bound", !mine, bound)
	}
}

// wipedInEveryState wipes the store under a job in each state and lets those who know the job go on.
func wipedInEveryState(e *env) {
	accepting := e.job()
	_, err := e.Accept(e.ctx, accepting, body, results.Limits{})
	e.ok(err)
	queued := e.queued()
	running := e.queued()
	run := e.claim(request(running, "w1"), results.Taken)
	e.ok(e.Append(e.ctx, running, tokens(run, 2, "a")))
	given := e.queued()
	e.giveBackOnce(given)
	done := e.queued()
	end := e.claim(request(done, "w1"), results.Taken)
	o := completed(end, e, 2)
	e.ok(e.Finish(e.ctx, done, o, []byte("x"), nil, nil))
	e.wipe()

	for _, j := range []*job.Job{accepting, queued, running, given, done} {
		_, err := e.Get(e.ctx, j.ID)
		e.is(err, results.ErrNotFound)
		_, err = e.AskCancel(e.ctx, j.ID)
		e.is(err, results.ErrNotFound)
		_, err = e.EndLease(e.ctx, j.ID, "w1", true)
		e.is(err, results.ErrNotFound)
		e.claim(request(j, "w2"), results.CheckDone)
	}
	e.ok(e.Queued(e.ctx, accepting, body)) // its publish has come through
	e.state(accepting, job.Queued)
	r := again(queued, "w2", 1)
	r.Whole, r.Body = true, body
	e.claim(r, results.Taken)
	e.ok(e.Owns(e.ctx, running.ID, run.Token))
	_, err = e.Renew(e.ctx, renewal(running, "w1", run))
	e.ok(err)
	e.ok(e.Restore(e.ctx, running, tokens(run, 2, "a")))
	e.ok(e.Finish(e.ctx, running, completed(run, e, 3), []byte("y"), nil, nil))
	e.state(running, job.Completed)
	r = again(given, "w2", 2)
	r.Whole, r.Body = true, body
	e.claim(r, results.Taken)
	e.ok(e.Finish(e.ctx, done, o, []byte("x"), nil, nil))
	e.state(done, job.Completed)
	e.same("live", len(e.living()), 3)
}

func scriptsFlushed(e *env) {
	flush := func() { e.Helper(); e.ok(e.raw.ScriptFlush(e.ctx).Err()) }
	flush()
	j := e.job()
	_, err := e.Accept(e.ctx, j, body, results.Limits{})
	e.ok(err)
	flush()
	e.ok(e.Queued(e.ctx, j, body))
	flush()
	c := e.claim(request(j, "w"), results.Taken)
	flush()
	e.ok(e.Append(e.ctx, j, tokens(c, 2, "a")))
	flush()
	e.ok(e.RestoreQueued(e.ctx, []results.QueuedJob{{Job: *e.job()}, {Job: *e.job()}}))
	flush()
	e.ok(e.Finish(e.ctx, j, completed(c, e, 3), []byte("x"), nil, nil))
	e.same("events", len(e.all(j)), 3)
	flush()
	e.same("bound", e.bind(session("s", "w")), []job.Worker{"w"})
}

func everyKeyExpires(e *env) {
	e.ok(e.Ping(e.ctx))
	e.ok(e.SetSentinel(e.ctx))
	for i := range 30 {
		_, _, err := e.ReserveKey(e.ctx, "acme", fmt.Sprint(i), results.KeyEntry{ID: "job_x"}, 0)
		e.ok(err)
		j := e.queued()
		c := e.claim(request(j, "w"), results.Taken)
		e.ok(e.Append(e.ctx, j, tokens(c, 2, "a")))
		switch i % 5 {
		case 0:
			e.ok(e.Finish(e.ctx, j, completed(c, e, 3), []byte("x"), nil, nil))
		case 1:
			e.ok(e.GiveBack(e.ctx, j.ID, c.Token, 0, true, "x"))
		case 2:
			_, err := e.EndLease(e.ctx, j.ID, "w", true)
			e.ok(err)
		case 3:
			e.ok(e.raw.Del(e.ctx, e.prefix+"{"+string(j.ID)+"}:r", e.prefix+"{"+string(j.ID)+"}:e").Err())
			_, err := e.Renew(e.ctx, renewal(j, "w", c))
			e.ok(err)
			e.ok(e.Restore(e.ctx, j, tokens(c, 2, "a")))
		}
	}
	for range 5 { // records that come and go under every write
		j := e.job()
		c := &results.Claim{Token: 5, Now: e.Now()}
		_ = e.Append(e.ctx, j, tokens(c, 2, "a"))
		_ = e.GiveBack(e.ctx, j.ID, 5, 0, true, "x")
		_, _ = e.EndLease(e.ctx, j.ID, "w", true)
		_, _ = e.AskCancel(e.ctx, j.ID)
		e.claim(request(j, "w"), results.CheckDone)
		e.ok(e.Restore(e.ctx, j, tokens(c, 2, "a")))
		e.ok(e.Append(e.ctx, j, tokens(c, 3, "a")))
		e.ok(e.Finish(e.ctx, j, completed(c, e, 4), []byte("x"), nil, nil))
	}
	e.ok(e.RestoreEnded(e.ctx, []results.EndedJob{{Job: *e.job(func(j *job.Job) { j.Key = "k" }), Outcome: job.Outcome{State: job.Failed}}}))
	e.bind(session("s", "w"))
	allowed := func(key string) bool {
		return key == "holders" || strings.HasSuffix(key, "}:live") || strings.HasSuffix(key, "}:whole")
	}
	all := e.keys()
	if len(all) < 100 {
		e.Fatalf("only %d keys", len(all))
	}
	for _, k := range all {
		ttl, err := e.raw.PTTL(e.ctx, k).Result()
		e.ok(err)
		if ttl < 0 && !allowed(strings.TrimPrefix(k, e.prefix)) {
			e.Errorf("%s never expires", k)
		}
	}
}

func clock(e *env) {
	t, err := e.raw.Time(e.ctx).Result()
	e.ok(err)
	if d := e.Now() - job.MillisOf(t); d < -1000 || d > 1000 {
		e.Fatalf("the clock is %d ms off", d)
	}
}
