package resultstest

import (
	"bytes"
	"fmt"
	"strings"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/results"
)

func eventsOverAttempts(e *env) {
	j := e.queued()
	list, span, err := e.Events(e.ctx, j.ID, 0, 10)
	e.ok(err)
	if list != nil || span != (results.Span{}) {
		e.Fatalf("a stream that is not there: %v %+v", list, span)
	}
	c := e.claim(request(j, "w1"), results.Taken)
	e.ok(e.Append(e.ctx, j, tokens(c, 2, "a", "b", "c")))
	e.ok(e.GiveBack(e.ctx, j.ID, c.Token, 0, false, "drained"))
	c = e.claim(again(j, "w2", 2), results.Taken)
	e.ok(e.GiveBack(e.ctx, j.ID, c.Token, 0, false, "drained"))
	c = e.claim(again(j, "w3", 3), results.Taken)
	// Several chunks in one event: its number is the last one's.
	e.ok(e.Append(e.ctx, j, []job.Event{{N: 9, Token: c.Token, Kind: job.EventToken, Data: []byte("A\nB\nC")}}))
	e.ok(e.Finish(e.ctx, j, completed(c, e, 10), []byte("x"), nil, []byte(`{"id":1}`)))
	all := []string{
		`1:status:{"status":"running","attempt":1}`, "2:token:a", "3:token:b", "4:token:c", `5:reset:{"text":"","attempt":2}`,
		`6:reset:{"text":"","attempt":3}`, "9:token:A\nB\nC", `10:done:{"id":1}`,
	}
	e.same("events", show(e.all(j)), all)
	numbers := []int64{1, 2, 3, 4, 5, 6, 9, 10}
	// Cut after every number, and read in pages of every size.
	for after := range int64(12) {
		var want []string
		for i, n := range numbers {
			if n > after {
				want = append(want, all[i])
			}
		}
		for limit := 1; limit <= 9; limit++ {
			var got []string
			for at := after; ; {
				page, span, err := e.Events(e.ctx, j.ID, at, limit)
				e.ok(err)
				e.same("span", span, results.Span{First: 1, Last: 10})
				if len(page) > limit {
					e.Fatalf("%d events in a page of %d", len(page), limit)
				}
				if len(page) == 0 {
					break
				}
				got = append(got, show(page)...)
				at = page[len(page)-1].N
			}
			e.same(fmt.Sprintf("after %d by %d", after, limit), got, want)
		}
	}
	if list, span, err := e.Events(e.ctx, j.ID, 0, 0); err != nil || list != nil || span.Last != 10 {
		e.Fatalf("the span alone: %v %v %v", list, span, err)
	}
	list, _, err = e.Events(e.ctx, j.ID, -5, 1)
	e.ok(err)
	e.same("from before the start", show(list), all[:1])
}

func eventsAreBytes(e *env) {
	j := e.queued()
	c := e.claim(request(j, "w1"), results.Taken)
	data := "{\"a\":\"\x00\xff\\u0041<b>&\r\n\"}" + strings.Repeat("é", 40_000)
	e.ok(e.Append(e.ctx, j, tokens(c, 2, data, "")))
	list := e.all(j)
	if len(list) != 3 || !bytes.Equal(list[1].Data, []byte(data)) || len(list[2].Data) != 0 || list[1].Token != c.Token {
		e.Fatalf("%d events", len(list))
	}
}

func appendRepeats(e *env) {
	j := e.queued()
	c := e.claim(request(j, "w1"), results.Taken)
	batch := tokens(c, 2, "a", "b")
	for range 3 {
		e.ok(e.Append(e.ctx, j, batch))
	}
	e.ok(e.Append(e.ctx, j, tokens(c, 2, "a", "b", "c"))) // with one more
	e.ok(e.Append(e.ctx, j, nil))
	e.same("events", show(e.all(j))[1:], []string{"2:token:a", "3:token:b", "4:token:c"})
	e.same("n", e.get(j).N, int64(4))
}

func restoreStream(e *env) {
	j := e.queued()
	c := e.claim(request(j, "w1"), results.Taken)
	kept := tokens(c, 2, "a", "b", "c")
	e.ok(e.Append(e.ctx, j, kept[:2]))
	e.wipe()
	e.is(e.Append(e.ctx, j, kept[2:]), results.ErrGone)
	for range 2 {
		e.ok(e.Restore(e.ctx, j, kept))
	}
	want := []string{"2:token:a", "3:token:b", "4:token:c"}
	e.same("events", show(e.all(j)), want)
	// The record is not there yet: events go on all the same, and make no record that never expires.
	e.ok(e.Append(e.ctx, j, tokens(c, 5, "d")))
	_, err := e.Get(e.ctx, j.ID)
	e.is(err, results.ErrNotFound)
	// What a newer attempt then makes of it.
	r := again(j, "w2", 2)
	r.Whole = true
	c2 := e.claim(r, results.Taken)
	if !c2.Restarted || c2.N != 6 || c2.Token <= c.Token {
		e.Fatalf("claim: %+v", c2)
	}
	e.is(e.Append(e.ctx, j, tokens(c, 6, "e")), results.ErrFenced)
}

func streamBounded(e *env) {
	e = newEnv(e.TB, e.url, func(c *results.Config) { c.MaxEvents = 200 })
	j := e.queued()
	c := e.claim(request(j, "w1"), results.Taken)
	var batch []job.Event
	for n := range int64(1000) {
		batch = append(batch, tokens(c, n+2, "x")...)
	}
	e.ok(e.Append(e.ctx, j, batch))
	list, span, err := e.Events(e.ctx, j.ID, 0, 5000)
	e.ok(err)
	if len(list) > 400 || len(list) < 200 || span.Last != 1001 || span.First != list[0].N || span.First == 1 {
		e.Fatalf("%d events, %+v", len(list), span)
	}
}

func finish(e *env) {
	j := e.queued()
	c := e.claim(request(j, "w1"), results.Taken)
	e.ok(e.Append(e.ctx, j, tokens(c, 2, "a")))
	o := completed(c, e, 3)
	o.Usage = &job.Usage{PromptTokens: 1, CompletionTokens: 2, TotalTokens: 3}
	for range 2 {
		e.ok(e.Finish(e.ctx, j, o, body, nil, []byte(`{"id":1}`)))
	}
	r := e.state(j, job.Completed)
	e.same("outcome", r.Outcome, o)
	if !r.HasResult || r.Lease != 0 || r.N != 3 {
		e.Fatalf("record: %+v", r)
	}
	e.same("attempts", r.Attempts, []job.Attempt{{Worker: "w1", Started: c.Now, Ended: o.Finished, Outcome: "completed"}})
	b, err := e.Result(e.ctx, j.ID)
	e.ok(err)
	e.same("answer", b, body)
	_, err = e.Body(e.ctx, j.ID)
	e.is(err, results.ErrNotFound)
	e.same("live", e.living(), []job.ID(nil))
	e.same("events", show(e.all(j))[1:], []string{"2:token:a", `3:done:{"id":1}`})

	// No answer is kept; an empty one is.
	j = e.queued()
	c = e.claim(request(j, "w1"), results.Taken)
	e.ok(e.Finish(e.ctx, j, completed(c, e, 0), nil, nil, nil))
	if e.get(j).HasResult {
		e.Fatal("an answer that was not given")
	}
	j = e.queued()
	c = e.claim(request(j, "w1"), results.Taken)
	e.ok(e.Finish(e.ctx, j, completed(c, e, 0), []byte{}, nil, nil))
	b, err = e.Result(e.ctx, j.ID)
	e.ok(err)
	e.same("answer", len(b), 0)
}

func finishAfterEvents(e *env) {
	j := e.queued()
	c := e.claim(request(j, "w1"), results.Taken)
	e.ok(e.Append(e.ctx, j, tokens(c, 2, "a", "b", "c")))
	// Written by a process that had seen two events.
	e.ok(e.Finish(e.ctx, j, &job.Outcome{State: job.Expired, Finished: e.Now(), LastEvent: 3}, nil, nil, []byte("x")))
	e.same("events", show(e.all(j))[3:], []string{"4:token:c", "5:done:x"})
	e.same("n", e.get(j).N, int64(5))
}

func finishReset(e *env) {
	j := e.queued()
	c := e.claim(request(j, "w1"), results.Taken)
	e.ok(e.Append(e.ctx, j, tokens(c, 2, "a")))
	// The stored outcome is another attempt's.
	o := completed(c, e, 4)
	o.Token--
	for range 2 {
		e.ok(e.Finish(e.ctx, j, o, []byte("x"), []byte(`{"text":"A"}`), []byte("d")))
	}
	e.same("events", show(e.all(j))[1:], []string{"2:token:a", `3:reset:{"text":"A"}`, "4:done:d"})
}

func finishUnstarted(e *env) {
	j := e.queued()
	e.ok(e.Finish(e.ctx, j, &job.Outcome{State: job.Cancelled, Finished: e.Now()}, nil, nil, []byte("x")))
	e.same("events", show(e.all(j)), []string{"1:done:x"})
	// Where attempts may be forgotten the number is above any that they can have had.
	j = e.queued()
	e.wipe()
	e.ok(e.RestoreQueued(e.ctx, []results.QueuedJob{{Job: *j}}))
	e.ok(e.Finish(e.ctx, j, &job.Outcome{State: job.Cancelled, Finished: e.Now()}, nil, nil, []byte("x")))
	if list := e.all(j); len(list) != 1 || list[0].N < int64(j.Created)-1000 {
		e.Fatalf("events: %v", show(list))
	}
}

func finishLost(e *env) {
	j := e.queued()
	c := e.claim(request(j, "w1"), results.Taken)
	e.wipe()
	o := completed(c, e, 7)
	o.Attempts = []job.Attempt{{Worker: "w1", Started: c.Now, Ended: o.Finished, Outcome: "completed"}}
	e.ok(e.Finish(e.ctx, j, o, []byte("answer"), nil, []byte("d")))
	r := e.state(j, job.Completed)
	e.same("attempts", r.Attempts, o.Attempts)
	e.same("events", show(e.all(j)), []string{"7:done:d"})
	b, err := e.Result(e.ctx, j.ID)
	e.ok(err)
	e.same("answer", string(b), "answer")
	list, _, err := e.List(e.ctx, j.Tenant, results.Filter{State: job.Completed}, "", 5)
	e.ok(err)
	e.same("listed", ids(list), []job.ID{j.ID})
	e.same("live", e.living(), []job.ID(nil))

	// A job that is too old to be kept.
	old := e.job(func(j *job.Job) { j.Created, j.Expires = 1000, 2000 })
	e.ok(e.Finish(e.ctx, old, o, []byte("answer"), nil, nil))
	_, err = e.Get(e.ctx, old.ID)
	e.is(err, results.ErrNotFound)
}

func firstToken(e *env) {
	j := e.queued()
	c := e.claim(request(j, "w1"), results.Taken)
	before := e.get(j)
	e.ok(e.Append(e.ctx, j, tokens(c, 2, "a")))
	r := e.get(j)
	if r.FirstToken < c.Now || r.Version <= before.Version {
		e.Fatalf("record: %+v", r)
	}
	e.ok(e.Append(e.ctx, j, tokens(c, 3, "b")))
	next := e.get(j)
	if next.FirstToken != r.FirstToken || next.Version != r.Version || next.N != 3 {
		e.Fatalf("record: %+v", next)
	}
}

func versionRises(e *env) {
	j := e.job()
	last := int64(0)
	rises := func(what string, err error) {
		e.Helper()
		e.ok(err)
		v := e.get(j).Version
		if v <= last {
			e.Fatalf("after %s the version is %d, before it was %d", what, v, last)
		}
		last = v
	}
	stays := func(what string, err error) {
		e.Helper()
		e.ok(err)
		if v := e.get(j).Version; v != last {
			e.Fatalf("after %s the version is %d, before it was %d", what, v, last)
		}
	}
	_, err := e.Accept(e.ctx, j, body, results.Limits{})
	rises("accept", err)
	stays("queued", e.Queued(e.ctx, j, body))
	c := e.claim(request(j, "w1"), results.Taken)
	rises("claim", nil)
	_, err = e.Renew(e.ctx, renewal(j, "w1", c))
	stays("renew", err)
	rises("first token", e.Append(e.ctx, j, tokens(c, 2, "a")))
	stays("second token", e.Append(e.ctx, j, tokens(c, 3, "a")))
	rises("give back", e.GiveBack(e.ctx, j.ID, c.Token, 0, true, "x"))
	c = e.claim(again(j, "w1", 2), results.Taken)
	rises("claim", nil)
	_, err = e.EndLease(e.ctx, j.ID, "w1", true)
	rises("end lease", err)
	e.until("the clock is past the version, which it is in the time that a rebuild takes", func() bool { return int64(e.Now()) > last })
	e.wipe()
	rises("rebuild", e.RestoreQueued(e.ctx, []results.QueuedJob{{Job: *j, Body: body}}))
	_, err = e.Renew(e.ctx, renewal(j, "w1", c))
	rises("renewal", err)
	rises("finish", e.Finish(e.ctx, j, completed(c, e, 9), []byte("x"), nil, nil))
	stays("finish again", e.Finish(e.ctx, j, completed(c, e, 9), []byte("x"), nil, nil))
}
