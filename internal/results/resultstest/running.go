package resultstest

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/results"
)

func (e *env) is(err, want error) {
	e.Helper()
	if !errors.Is(err, want) {
		e.Fatalf("error is %v, want %v", err, want)
	}
}

func (e *env) same(what string, got, want any) {
	e.Helper()
	if d := cmp.Diff(want, got); d != "" {
		e.Fatalf("%s (-want +got):\n%s", what, d)
	}
}

func claimTakes(e *env) {
	j := e.queued()
	c := e.claim(request(j, "w1"), results.Taken)
	if c.N != 1 || c.Restarted || c.Charged != 0 || c.CancelAsked || int64(c.Token) != int64(c.Now) || c.Now < j.Created-1000 {
		e.Fatalf("claim: %+v", c)
	}
	r := e.state(j, job.Running)
	if r.Token != c.Token || r.Worker != "w1" || r.Lease != c.Now+15_000 || r.AckSubject != "$JS.ACK.w1.1" || r.N != 1 {
		e.Fatalf("record: %+v", r)
	}
	e.same("attempts", r.Attempts, []job.Attempt{{Worker: "w1", Started: c.Now}})
	e.same("job", r.Job, *j)
	e.same("events", show(e.all(j)), []string{`1:status:{"status":"running","attempt":1}`})
	b, err := e.Body(e.ctx, j.ID)
	e.ok(err)
	e.same("body", b, body)

	silent := e.queued(func(j *job.Job) { j.Events = false })
	if c := e.claim(request(silent, "w1"), results.Taken); c.N != 0 {
		e.Fatalf("a job without events got event %d", c.N)
	}
	if list := e.all(silent); list != nil {
		e.Fatalf("a job without events has %v", show(list))
	}
}

func claimTakesAccepting(e *env) {
	j := e.job()
	_, since, err := e.accept(j, body)
	e.ok(err)
	e.claim(request(j, "w1"), results.Taken)
	// The submitter is late: it leaves the claim alone, and so does the reconciler.
	e.ok(e.Queued(e.ctx, j, body))
	state, _, err := e.accept(j, body)
	e.ok(err)
	e.same("state", state, job.Running)
	gone, err := e.Discard(e.ctx, j, since)
	e.ok(err)
	if gone {
		e.Fatal("a running job was discarded")
	}
	e.state(j, job.Running)
}

func claimEnded(e *env) {
	j := e.queued()
	c := e.claim(request(j, "w1"), results.Taken)
	e.ok(e.Finish(e.ctx, j, completed(c, e, 2), []byte(`{}`), nil, nil))
	e.claim(request(j, "w2"), results.Ended)
	e.claim(again(j, "w1", 2), results.Ended)
	held, err := e.Held(e.ctx, "w2")
	e.ok(err)
	e.same("held", held, []job.ID{})
}

func claimHeld(e *env) {
	j := e.queued()
	e.claim(request(j, "w1"), results.Taken)
	c := e.claim(again(j, "w2", 2), results.Held)
	if c.Wait <= 14*time.Second || c.Wait > 15*time.Second {
		e.Fatalf("wait is %s", c.Wait)
	}
	e.claim(request(j, "w2"), results.Held) // before DONE is asked
	// A redelivery to the worker that runs it: the running attempt keeps it.
	e.claim(again(j, "w1", 2), results.Held)
	for w, want := range map[job.Worker][]job.ID{"w1": {j.ID}, "w2": {}} {
		held, err := e.Held(e.ctx, w)
		e.ok(err)
		e.same("held by "+string(w), held, want)
	}
}

func claimRepeated(e *env) {
	j := e.queued()
	first := e.claim(request(j, "w1"), results.Taken)
	repeat := e.claim(request(j, "w1"), results.Taken)
	repeat.Now = first.Now
	e.same("repeat", repeat, first)
	e.same("attempts", len(e.get(j).Attempts), 1)
	e.same("events", len(e.all(j)), 1)
	// Also once an event was added.
	e.ok(e.Append(e.ctx, j, tokens(first, 2, "a")))
	repeat = e.claim(request(j, "w1"), results.Taken)
	repeat.Now = first.Now
	e.same("repeat", repeat, first)
	// And a restart.
	e.ok(e.GiveBack(e.ctx, j.ID, first.Token, 0, true, "engine_500"))
	second := e.claim(again(j, "w1", 2), results.Taken)
	repeat = e.claim(again(j, "w1", 2), results.Taken)
	repeat.Now = second.Now
	e.same("repeat", repeat, second)
	if !repeat.Restarted || repeat.Charged != 1 {
		e.Fatalf("repeat: %+v", repeat)
	}
}

func claimTooEarly(e *env) {
	j := e.queued()
	c := e.claim(request(j, "w1"), results.Taken)
	e.ok(e.GiveBack(e.ctx, j.ID, c.Token, time.Hour, true, "engine_500"))
	if c := e.claim(again(j, "w2", 2), results.TooEarly); c.Wait <= 59*time.Minute || c.Wait > time.Hour {
		e.Fatalf("wait is %s", c.Wait)
	}
}

func claimChecks(e *env) {
	for reason, prepare := range map[string]func(j *job.Job, r *results.ClaimRequest){
		"no record":          func(j *job.Job, r *results.ClaimRequest) { e.wipe() },
		"an earlier attempt": func(j *job.Job, r *results.ClaimRequest) { e.giveBackOnce(j) },
		"a redelivery":       func(j *job.Job, r *results.ClaimRequest) { r.Delivered = 2 },
	} {
		j := e.queued()
		r := request(j, "w2")
		prepare(j, &r)
		if c, err := e.Claim(e.ctx, r); err != nil || c.Verdict != results.CheckDone {
			e.Fatalf("%s: claim is %+v, %v", reason, c, err)
		}
	}
}

func (e *env) giveBackOnce(j *job.Job) *results.Claim {
	e.Helper()
	c := e.claim(request(j, "w1"), results.Taken)
	e.ok(e.GiveBack(e.ctx, j.ID, c.Token, 0, false, "drained"))
	return c
}

func claimUnrecorded(e *env) {
	j := e.queued()
	e.wipe()
	r := again(j, "w1", 1)
	e.claim(r, results.Unrecorded)
	_, err := e.Get(e.ctx, j.ID)
	e.is(err, results.ErrNotFound)
	r.Whole, r.Body = true, body
	c := e.claim(r, results.Taken)
	if c.N < int64(c.Now) {
		e.Fatalf("after a wipe events start at %d, below the clock %d", c.N, c.Now)
	}
	b, err := e.Body(e.ctx, j.ID)
	e.ok(err)
	e.same("body", b, body)
	list, _, err := e.List(e.ctx, j.Tenant, results.Filter{}, "", 10)
	e.ok(err)
	e.same("listed", ids(list), []job.ID{j.ID})
	e.same("live", e.living(), []job.ID{j.ID})
	held, err := e.Held(e.ctx, "w1")
	e.ok(err)
	e.same("held", held, []job.ID{j.ID})
}

func claimLapsed(e *env) {
	j := e.queued()
	r := request(j, "w1")
	r.Lease = time.Millisecond
	first := e.claim(r, results.Taken)
	var c *results.Claim
	e.until("the lease runs out", func() bool {
		var err error
		c, err = e.Claim(e.ctx, again(j, "w2", 2))
		e.ok(err)
		return c.Verdict == results.Taken
	})
	if c.Token <= first.Token || c.Uncharged != 1 || c.Charged != 0 {
		e.Fatalf("claim: %+v after %+v", c, first)
	}
	got := e.get(j).Attempts
	e.same("attempts", got, []job.Attempt{
		{Worker: "w1", Started: first.Now, Ended: first.Now + 1, Outcome: "lease_lost"}, {Worker: "w2", Started: c.Now},
	})
}

// until polls: a lease's end tells nobody.
func (e *env) until(what string, cond func() bool) {
	e.Helper()
	for end := time.Now().Add(10 * time.Second); !cond(); {
		if time.Now().After(end) {
			e.Fatalf("waited in vain until %s", what)
		}
		time.Sleep(time.Millisecond)
	}
}

func claimAfterDeath(e *env) {
	j := e.queued()
	first := e.claim(request(j, "w1"), results.Taken)
	_, err := e.EndLease(e.ctx, j.ID, "w1", true)
	e.ok(err)
	c := e.claim(again(j, "w2", 2), results.Taken)
	if c.Token <= first.Token || c.Charged != 1 || c.Deaths != 1 || c.Uncharged != 0 || c.N != 2 || c.Restarted {
		e.Fatalf("claim: %+v", c)
	}
}

func claimCancelled(e *env) {
	j := e.queued()
	_, err := e.AskCancel(e.ctx, j.ID)
	e.ok(err)
	if c := e.claim(request(j, "w1"), results.Taken); !c.CancelAsked {
		e.Fatalf("claim: %+v", c)
	}
}

func claimNumbersLost(e *env) {
	j := e.queued()
	first := e.claim(request(j, "w1"), results.Taken)
	e.ok(e.Append(e.ctx, j, tokens(first, 2, "a", "b")))
	e.ok(e.GiveBack(e.ctx, j.ID, first.Token, 0, false, "drained"))
	e.ok(e.raw.Del(e.ctx, e.prefix+"{"+string(j.ID)+"}:e").Err()) // the stream alone
	c := e.claim(again(j, "w2", 2), results.Taken)
	if c.N < int64(c.Now) || !c.Restarted {
		e.Fatalf("claim: %+v", c)
	}
	e.same("events", show(e.all(j)), []string{fmt.Sprint(c.N, `:reset:{"text":"","attempt":2}`)})
	// Rebuilt from its message: earlier attempts may be forgotten.
	j = e.queued()
	e.wipe()
	e.ok(e.RestoreQueued(e.ctx, []results.QueuedJob{{Job: *j, Body: body}}))
	if c := e.claim(request(j, "w2"), results.Taken); c.N < int64(c.Now) || !c.Restarted {
		e.Fatalf("claim: %+v", c)
	}
}

// claimPartial: who can perhaps continue finds the tokens as they are, under a new token that fences the old one, and resets what it cannot continue.
func claimPartial(e *env) {
	resume := func(r results.ClaimRequest) results.ClaimRequest { r.Resume = true; return r }
	j := e.queued()
	first := e.claim(resume(request(j, "w1")), results.Taken)
	if first.Partial || first.Restarted || first.N != 1 {
		e.Fatalf("the first claim: %+v", first)
	}
	// An attempt that brought nothing leaves nothing to continue.
	e.ok(e.GiveBack(e.ctx, j.ID, first.Token, 0, false, "drained"))
	second := e.claim(resume(again(j, "w1", 2)), results.Taken)
	if second.Partial || second.Restarted {
		e.Fatalf("the second claim: %+v", second)
	}
	e.ok(e.Append(e.ctx, j, tokens(second, 3, "a", "b")))
	_, err := e.EndLease(e.ctx, j.ID, "w1", true)
	e.ok(err)
	third := e.claim(resume(again(j, "w2", 3)), results.Taken)
	if !third.Partial || third.Restarted || third.N != 5 {
		e.Fatalf("the third claim: %+v", third)
	}
	e.is(e.Append(e.ctx, j, tokens(second, 5, "late")), results.ErrFenced)
	repeat := e.claim(resume(again(j, "w2", 3)), results.Taken)
	repeat.Now = third.Now
	e.same("repeat", repeat, third)
	e.ok(e.Append(e.ctx, j, tokens(third, 6, "c")))
	e.ok(e.GiveBack(e.ctx, j.ID, third.Token, 0, false, "stalled"))
	// One that continues nothing resets what all of them brought.
	fourth := e.claim(again(j, "w3", 4), results.Taken)
	if fourth.Partial || !fourth.Restarted {
		e.Fatalf("the fourth claim: %+v", fourth)
	}
	e.same("events", show(e.all(j)), []string{
		`1:status:{"status":"running","attempt":1}`, `2:status:{"status":"running","attempt":2}`, "3:token:a", "4:token:b",
		`5:status:{"status":"running","attempt":3}`, "6:token:c", `7:reset:{"text":"","attempt":4}`,
	})
	// Without the stream there is nothing to continue, and readers may have had some.
	e.ok(e.GiveBack(e.ctx, j.ID, fourth.Token, 0, false, "drained"))
	e.ok(e.raw.Del(e.ctx, e.prefix+"{"+string(j.ID)+"}:e").Err())
	if c := e.claim(resume(again(j, "w4", 5)), results.Taken); c.Partial || !c.Restarted {
		e.Fatalf("the claim without a stream: %+v", c)
	}
}

func claimTrimsAttempts(e *env) {
	j := e.queued()
	w := job.Worker("worker-" + strings.Repeat("x", 60))
	c := e.claim(request(j, w), results.Taken)
	for i := range 80 {
		e.ok(e.GiveBack(e.ctx, j.ID, c.Token, 0, false, fmt.Sprintf("no_room\n+%d", i)))
		c = e.claim(again(j, w, i+2), results.Taken)
	}
	got := e.get(j)
	if n := len(got.Attempts); n < 15 || n > 60 || got.Uncharged != 80 {
		e.Fatalf("%d attempts of %d kept", n, got.Uncharged)
	}
	e.same("first", got.Attempts[0].Outcome, "no_room +0")
	e.same("last but one", got.Attempts[len(got.Attempts)-2].Outcome, "no_room +79")
	e.same("last", got.Attempts[len(got.Attempts)-1].Outcome, "")
}

func oldTokenFenced(e *env) {
	j := e.queued()
	old := e.claim(request(j, "w1"), results.Taken)
	e.ok(e.Append(e.ctx, j, tokens(old, 2, "a")))
	_, err := e.EndLease(e.ctx, j.ID, "w1", false)
	e.ok(err)
	e.ok(e.Owns(e.ctx, j.ID, old.Token)) // nobody else has it yet
	c := e.claim(again(j, "w2", 2), results.Taken)
	if !c.Restarted || c.N != 3 {
		e.Fatalf("claim: %+v", c)
	}
	before, stream := e.get(j), show(e.all(j))

	e.is(e.Append(e.ctx, j, tokens(old, 3, "b")), results.ErrFenced)
	e.is(e.Append(e.ctx, j, tokens(old, 1_000, "b")), results.ErrFenced)
	e.is(e.Restore(e.ctx, j, tokens(old, 2, "a", "b")), results.ErrFenced)
	_, err = e.Renew(e.ctx, renewal(j, "w1", old))
	e.is(err, results.ErrFenced)
	e.is(e.GiveBack(e.ctx, j.ID, old.Token, 0, true, "x"), results.ErrFenced)
	_, err = e.EndLease(e.ctx, j.ID, "w1", true)
	e.is(err, results.ErrFenced)
	e.is(e.Owns(e.ctx, j.ID, old.Token), results.ErrFenced)
	e.ok(e.Owns(e.ctx, j.ID, c.Token))

	e.same("record", e.get(j), before)
	e.same("events", show(e.all(j)), stream)
	e.ok(e.Append(e.ctx, j, tokens(c, 4, "A")))
}

func renewal(j *job.Job, w job.Worker, c *results.Claim) results.Renewal {
	return results.Renewal{Job: j, Body: body, Worker: w, Token: c.Token, N: c.N, Started: c.Now, Lease: 15 * time.Second, AckSubject: "$JS.ACK." + string(w) + ".1"}
}

func endedFenced(e *env) {
	j := e.queued()
	c := e.claim(request(j, "w1"), results.Taken)
	// Cancelled by another process, which does not know the attempt's events.
	o := &job.Outcome{State: job.Cancelled, Finished: e.Now(), LastEvent: 2, Error: job.NewError(job.TypeServer, job.CodeCancelled, "…")}
	e.ok(e.Finish(e.ctx, j, o, nil, nil, []byte(`{"status":"cancelled"}`)))
	before, stream := e.get(j), show(e.all(j))

	e.is(e.Append(e.ctx, j, tokens(c, 2, "late")), results.ErrFenced)
	e.is(e.Restore(e.ctx, j, tokens(c, 2, "late")), results.ErrFenced)
	_, err := e.Renew(e.ctx, renewal(j, "w1", c))
	e.is(err, results.ErrFenced)
	e.is(e.GiveBack(e.ctx, j.ID, c.Token, 0, true, "x"), results.ErrFenced)
	_, err = e.EndLease(e.ctx, j.ID, "w1", true)
	e.is(err, results.ErrFenced)
	e.is(e.Owns(e.ctx, j.ID, c.Token), results.ErrFenced)
	e.ok(e.Finish(e.ctx, j, completed(c, e, 9), []byte(`late`), nil, nil))
	e.ok(e.Queued(e.ctx, j, body))
	e.ok(e.RestoreQueued(e.ctx, []results.QueuedJob{{Job: *j, Body: body}}))
	state, _, err := e.accept(j, body)
	e.ok(err)
	e.same("state", state, job.Cancelled)

	e.same("record", e.get(j), before)
	e.same("events", show(e.all(j)), stream)
	_, err = e.Result(e.ctx, j.ID)
	e.is(err, results.ErrNotFound)
	_, err = e.Body(e.ctx, j.ID)
	e.is(err, results.ErrNotFound)
	e.same("live", e.living(), []job.ID(nil))
}

func renewExtends(e *env) {
	j := e.queued()
	r := request(j, "w1")
	r.Lease = time.Millisecond
	c := e.claim(r, results.Taken)
	before := e.get(j)
	// The lease may have run out by now: nobody has claimed the job, so the attempt goes on.
	asked, err := e.Renew(e.ctx, renewal(j, "w1", c))
	e.ok(err)
	after := e.get(j)
	if asked || after.Lease < before.Lease+10_000 || after.Version != before.Version || len(after.Attempts) != 1 {
		e.Fatalf("renewed (%v): %+v", asked, after)
	}
	e.claim(again(j, "w2", 2), results.Held)
	_, err = e.AskCancel(e.ctx, j.ID)
	e.ok(err)
	asked, err = e.Renew(e.ctx, renewal(j, "w1", c))
	e.ok(err)
	if !asked {
		e.Fatal("the wish to cancel was not told")
	}
	// A lease that was ended is over.
	_, err = e.EndLease(e.ctx, j.ID, "w1", true)
	e.ok(err)
	_, err = e.Renew(e.ctx, renewal(j, "w1", c))
	e.is(err, results.ErrFenced)
	e.same("lease", e.get(j).Lease, job.Millis(0))
}

func renewRebuilds(e *env) {
	for _, rebuilt := range []bool{false, true} {
		j := e.queued()
		c := e.claim(request(j, "w1"), results.Taken)
		e.ok(e.Append(e.ctx, j, tokens(c, 2, "a", "b")))
		e.wipe()
		if rebuilt {
			e.ok(e.RestoreQueued(e.ctx, []results.QueuedJob{{Job: *j, Body: body}}))
		}
		r := renewal(j, "w1", c)
		r.N = 3
		for range 2 {
			_, err := e.Renew(e.ctx, r)
			e.ok(err)
		}
		got := e.state(j, job.Running)
		if got.Token != c.Token || got.Worker != "w1" || got.N != 3 || got.AckSubject != r.AckSubject || got.Lease < c.Now+10_000 {
			e.Fatalf("record: %+v", got)
		}
		e.same("attempts", got.Attempts, []job.Attempt{{Worker: "w1", Started: c.Now}})
		b, err := e.Body(e.ctx, j.ID)
		e.ok(err)
		e.same("body", b, body)
		e.same("live", e.living(), []job.ID{j.ID})
		held, err := e.Held(e.ctx, "w1")
		e.ok(err)
		e.same("held", held, []job.ID{j.ID})
		// The events follow.
		e.is(e.Append(e.ctx, j, tokens(c, 4, "c")), results.ErrGone)
		e.ok(e.Restore(e.ctx, j, tokens(c, 2, "a", "b", "c")))
		e.same("events", show(e.all(j)), []string{"2:token:a", "3:token:b", "4:token:c"})
		e.wipe()
	}
}

func giveBack(e *env) {
	j := e.queued()
	c := e.claim(request(j, "w1"), results.Taken)
	for range 2 { // a repeat is not counted
		e.ok(e.GiveBack(e.ctx, j.ID, c.Token, 0, true, "engine_500"))
	}
	r := e.state(j, job.Queued)
	if r.Charged != 1 || r.Uncharged != 0 || r.Deaths != 0 || r.Lease != 0 || r.Token != c.Token || r.NotBefore < c.Now {
		e.Fatalf("record: %+v", r)
	}
	e.same("outcome", r.Attempts[0].Outcome, "engine_500")
	if r.Attempts[0].Ended < r.Attempts[0].Started {
		e.Fatalf("attempts: %+v", r.Attempts)
	}
	// The dead hand of a dispatcher that thinks that the worker died: it does not hold the job any more.
	_, err := e.EndLease(e.ctx, j.ID, "w1", true)
	e.is(err, results.ErrFenced)

	c = e.claim(again(j, "w2", 2), results.Taken)
	e.ok(e.GiveBack(e.ctx, j.ID, c.Token, time.Hour, false, "drained"))
	r = e.state(j, job.Queued)
	if r.Charged != 1 || r.Uncharged != 1 || r.NotBefore < c.Now+3_500_000 {
		e.Fatalf("record: %+v", r)
	}
	// A record that is gone, and one that was rebuilt and has no token.
	e.wipe()
	e.ok(e.GiveBack(e.ctx, j.ID, c.Token, 0, false, "drained"))
	e.ok(e.RestoreQueued(e.ctx, []results.QueuedJob{{Job: *j, Body: body}}))
	for range 2 {
		e.ok(e.GiveBack(e.ctx, j.ID, c.Token, time.Hour, true, "engine_500"))
	}
	if r = e.state(j, job.Queued); r.Charged != 1 || r.Token != c.Token {
		e.Fatalf("record: %+v", r)
	}
	e.claim(again(j, "w3", 1), results.TooEarly)
}

func endLease(e *env) {
	j := e.queued()
	_, err := e.EndLease(e.ctx, j.ID, "w1", true)
	e.is(err, results.ErrFenced)
	c := e.claim(request(j, "w1"), results.Taken)
	_, err = e.EndLease(e.ctx, j.ID, "w2", true)
	e.is(err, results.ErrFenced)
	for range 2 { // a repeat is not counted
		r, err := e.EndLease(e.ctx, j.ID, "w1", true)
		e.ok(err)
		if r.State != job.Queued || r.Lease != 0 || r.Token != c.Token || r.AckSubject != "$JS.ACK.w1.1" || r.Deaths != 1 || r.Charged != 1 || r.Job.ID != j.ID {
			e.Fatalf("record: %+v", r)
		}
		e.same("outcome", r.Attempts[0].Outcome, "worker_lost")
	}
	e.ok(e.GiveBack(e.ctx, j.ID, c.Token, 0, true, "x")) // a zombie's: not counted
	c = e.claim(again(j, "w1", 2), results.Taken)
	r, err := e.EndLease(e.ctx, j.ID, "w1", false)
	e.ok(err)
	if r.Deaths != 1 || r.Charged != 1 || r.Uncharged != 1 || r.Token != c.Token {
		e.Fatalf("record: %+v", r)
	}
	_, err = e.EndLease(e.ctx, job.NewID(time.Now()), "w1", true)
	e.is(err, results.ErrNotFound)
}

func heldSets(e *env) {
	a, b := e.queued(), e.queued()
	e.claim(request(a, "w 1:%"), results.Taken)
	e.claim(request(b, "w 1:%"), results.Taken)
	e.claim(request(e.queued(), "w2"), results.Taken)
	held, err := e.Held(e.ctx, "w 1:%")
	e.ok(err)
	slices.Sort(held)
	want := []job.ID{a.ID, b.ID}
	slices.Sort(want)
	e.same("held", held, want)
	holders, err := e.Holders(e.ctx)
	e.ok(err)
	slices.Sort(holders)
	e.same("holders", holders, []job.Worker{"w 1:%", "w2"})
	e.ok(e.LetGo(e.ctx, "w 1:%", a.ID, b.ID))
	e.ok(e.LetGo(e.ctx, "w 1:%", a.ID))
	e.ok(e.LetGo(e.ctx, "w2"))
	holders, err = e.Holders(e.ctx)
	e.ok(err)
	e.same("holders", holders, []job.Worker{"w2"})
	// Once a worker has long been idle it is forgotten.
	e.ok(e.raw.ZAdd(e.ctx, e.prefix+"holders", z(1, "w 1:%")).Err())
	_, err = e.Holders(e.ctx)
	e.ok(err)
	n, err := e.raw.ZCard(e.ctx, e.prefix+"holders").Result()
	e.ok(err)
	e.same("holders kept", n, int64(1))
}
