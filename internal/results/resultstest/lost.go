package resultstest

import (
	"net/url"
	"testing"
	"time"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/results"
)

// write is a write that a test lets fail after it was applied.
type write struct {
	name string
	// prepare brings a job to where the write starts, and returns the write and a check of what it must have done, once.
	prepare func(e *env) (do func() error, check func())
}

var writes = []write{
	{"reserve key", func(e *env) (func() error, func()) {
		entry := results.KeyEntry{ID: "job_a", Hash: "h"}
		var mine bool
		return func() (err error) { _, mine, err = e.ReserveKey(e.ctx, "t", "k", entry, 0); return err },
			func() { e.same("mine", mine, true) }
	}},
	{"bind key", func(e *env) (func() error, func()) {
		_, _, err := e.ReserveKey(e.ctx, "t", "k", results.KeyEntry{ID: "job_a"}, 0)
		e.ok(err)
		b := results.KeyEntry{ID: "job_b"}
		return func() error { return e.BindKey(e.ctx, "t", "k", b.ID) }, func() {
			held, _, err := e.ReserveKey(e.ctx, "t", "k", results.KeyEntry{ID: "job_c"}, 0)
			e.ok(err)
			e.same("held", held, b)
		}
	}},
	{"release key", func(e *env) (func() error, func()) {
		_, _, err := e.ReserveKey(e.ctx, "t", "k", results.KeyEntry{ID: "job_a"}, 0)
		e.ok(err)
		return func() error { return e.ReleaseKey(e.ctx, "t", "k", "job_a") }, func() {
			_, mine, err := e.ReserveKey(e.ctx, "t", "k", results.KeyEntry{ID: "job_b"}, 0)
			e.ok(err)
			e.same("free", mine, true)
		}
	}},
	{"bind", func(e *env) (func() error, func()) {
		e.bind(session("s", "old"))
		var owners [][]job.Worker
		return func() (err error) { owners, err = e.Bind(e.ctx, session("s", "new", "old")); return err },
			func() { e.same("owners", owners, [][]job.Worker{{"new"}}) }
	}},
	{"accept", func(e *env) (func() error, func()) {
		j := e.job()
		var since job.Millis
		return func() (err error) { _, since, err = e.accept(j, body); return err }, func() {
			e.same("since", e.state(j, job.Accepting).Since, since)
			e.same("live", e.living(), []job.ID{j.ID})
			e.same("backlog", e.backlogs()["m"].Sum().Jobs, int64(1))
		}
	}},
	{"accept fresh", func(e *env) (func() error, func()) {
		j := e.job(func(j *job.Job) { j.Key = "k" })
		_, _, err := e.ReserveKey(e.ctx, j.Tenant, j.Key, results.KeyEntry{ID: "job_a"}, 0)
		e.ok(err)
		return func() error { _, err := e.AcceptFresh(e.ctx, j, body, results.Limits{}); return err }, func() {
			held, _, err := e.ReserveKey(e.ctx, j.Tenant, j.Key, results.KeyEntry{ID: "job_c"}, 0)
			e.ok(err)
			e.same("held", held, results.KeyEntry{ID: j.ID})
			e.state(j, job.Accepting)
			e.same("live", e.living(), []job.ID{j.ID})
		}
	}},
	{"accept lines", func(e *env) (func() error, func()) {
		lines := []*job.Job{e.line(1), e.line(2)}
		return func() error { return e.AcceptLines(e.ctx, lines) }, func() {
			e.state(lines[0], job.Queued)
			e.state(lines[1], job.Queued)
			e.same("live", len(e.living()), 2)
			e.same("backlog", e.backlogs()["m"].Sum().Jobs, int64(2))
		}
	}},
	{"queued", func(e *env) (func() error, func()) {
		j := e.job()
		_, err := e.Accept(e.ctx, j, body, results.Limits{})
		e.ok(err)
		return func() error { return e.Queued(e.ctx, j, body) }, func() { e.state(j, job.Queued) }
	}},
	{"discard", func(e *env) (func() error, func()) {
		j := e.job()
		_, since, err := e.accept(j, body)
		e.ok(err)
		var gone bool
		return func() (err error) { gone, err = e.Discard(e.ctx, j, since); return err }, func() {
			e.same("gone", gone, true)
			e.same("live", e.living(), []job.ID(nil))
			e.same("backlog", len(e.backlogs()), 0)
		}
	}},
	{"claim", func(e *env) (func() error, func()) {
		j := e.queued()
		var c *results.Claim
		return func() (err error) { c, err = e.Claim(e.ctx, request(j, "w")); return err }, func() {
			r := e.state(j, job.Running)
			if c.Verdict != results.Taken || c.Token != r.Token || c.N != 1 || len(r.Attempts) != 1 || len(e.all(j)) != 1 {
				e.Fatalf("claim %+v, record %+v", c, r)
			}
		}
	}},
	{"claim of a lost record", func(e *env) (func() error, func()) {
		j := e.job()
		r := again(j, "w", 1)
		r.Whole, r.Body = true, body
		var c *results.Claim
		return func() (err error) { c, err = e.Claim(e.ctx, r); return err }, func() {
			r := e.state(j, job.Running)
			if c.Verdict != results.Taken || c.Token != r.Token || len(r.Attempts) != 1 || len(e.all(j)) != 1 {
				e.Fatalf("claim %+v, record %+v", c, r)
			}
		}
	}},
	{"renew", func(e *env) (func() error, func()) {
		j := e.queued()
		c := e.claim(request(j, "w"), results.Taken)
		return func() error { _, err := e.Renew(e.ctx, renewal(j, "w", c)); return err }, func() {
			e.same("attempts", len(e.state(j, job.Running).Attempts), 1)
		}
	}},
	{"renew of a lost record", func(e *env) (func() error, func()) {
		j := e.job()
		c := &results.Claim{Token: 7, N: 3, Now: e.Now()}
		return func() error { _, err := e.Renew(e.ctx, renewal(j, "w", c)); return err }, func() {
			r := e.state(j, job.Running)
			if r.Token != 7 || r.N != 3 || len(r.Attempts) != 1 {
				e.Fatalf("record %+v", r)
			}
		}
	}},
	{"append", func(e *env) (func() error, func()) {
		j := e.queued()
		c := e.claim(request(j, "w"), results.Taken)
		return func() error { return e.Append(e.ctx, j, tokens(c, 2, "a", "b")) }, func() {
			e.same("events", show(e.all(j))[1:], []string{"2:token:a", "3:token:b"})
		}
	}},
	{"restore", func(e *env) (func() error, func()) {
		j := e.job()
		return func() error { return e.Restore(e.ctx, j, tokens(&results.Claim{Token: 7}, 2, "a", "b")) }, func() {
			e.same("events", show(e.all(j)), []string{"2:token:a", "3:token:b"})
		}
	}},
	{"give back", func(e *env) (func() error, func()) {
		j := e.queued()
		c := e.claim(request(j, "w"), results.Taken)
		return func() error { return e.GiveBack(e.ctx, j.ID, c.Token, time.Second, true, "x") }, func() {
			e.same("charged", e.state(j, job.Queued).Charged, 1)
		}
	}},
	{"end lease", func(e *env) (func() error, func()) {
		j := e.queued()
		e.claim(request(j, "w"), results.Taken)
		return func() error { _, err := e.EndLease(e.ctx, j.ID, "w", true); return err }, func() {
			r := e.state(j, job.Queued)
			if r.Charged != 1 || r.Deaths != 1 {
				e.Fatalf("record %+v", r)
			}
		}
	}},
	{"let go", func(e *env) (func() error, func()) {
		j := e.queued()
		e.claim(request(j, "w"), results.Taken)
		return func() error { return e.LetGo(e.ctx, "w", j.ID) }, func() {
			held, err := e.Held(e.ctx, "w")
			e.ok(err)
			e.same("held", held, []job.ID{})
		}
	}},
	{"finish", func(e *env) (func() error, func()) {
		j := e.queued()
		c := e.claim(request(j, "w"), results.Taken)
		o := completed(c, e, 3)
		return func() error { return e.Finish(e.ctx, j, o, []byte("x"), []byte("r"), []byte("d")) }, func() {
			e.same("outcome", e.state(j, job.Completed).Outcome, o)
			e.same("events", show(e.all(j))[1:], []string{"2:reset:r", "3:done:d"})
			e.same("live", e.living(), []job.ID(nil))
			e.same("backlog", len(e.backlogs()), 0)
		}
	}},
	{"finish of a lost record", func(e *env) (func() error, func()) {
		j := e.job()
		o := completed(&results.Claim{Token: 7}, e, 3)
		return func() error { return e.Finish(e.ctx, j, o, []byte("x"), nil, []byte("d")) }, func() {
			e.same("outcome", e.state(j, job.Completed).Outcome, o)
			e.same("events", show(e.all(j)), []string{"3:done:d"})
			e.same("live", e.living(), []job.ID(nil))
			e.same("backlog", len(e.backlogs()), 0)
		}
	}},
	{"cancel", func(e *env) (func() error, func()) {
		j := e.queued()
		return func() error { _, err := e.AskCancel(e.ctx, j.ID); return err }, func() { e.same("asked", e.get(j).CancelAsked, true) }
	}},
	{"delete", func(e *env) (func() error, func()) {
		j := e.queued()
		e.ok(e.Finish(e.ctx, j, completed(&results.Claim{}, e, 0), []byte("x"), nil, nil))
		return func() error { return e.Delete(e.ctx, j.Tenant, j.ID) }, func() {
			list, _, err := e.List(e.ctx, j.Tenant, results.Filter{}, "", 1)
			e.ok(err)
			e.same("listed", len(list), 0)
		}
	}},
	{"forget", func(e *env) (func() error, func()) {
		j := e.queued()
		return func() error { return e.Forget(e.ctx, j.ID) }, func() { e.same("live", e.living(), []job.ID(nil)) }
	}},
	{"rebuild", func(e *env) (func() error, func()) {
		j, k := e.job(func(j *job.Job) { j.Key = "k" }), e.job()
		return func() error {
				if err := e.RestoreQueued(e.ctx, []results.QueuedJob{{Job: *j, Body: body}}); err != nil {
					return err
				}
				return e.RestoreEnded(e.ctx, []results.EndedJob{{Job: *k, Outcome: job.Outcome{State: job.Failed}}})
			}, func() {
				e.state(j, job.Queued)
				e.state(k, job.Failed)
			}
	}},
	{"sentinel", func(e *env) (func() error, func()) {
		return func() error { return e.SetSentinel(e.ctx) }, func() {
			wiped, err := e.Wiped(e.ctx)
			e.ok(err)
			e.same("wiped", wiped, false)
		}
	}},
}

// RunLost runs every write with its reply lost: once, so that the client repeats it by itself, and again and again, so that the caller is told that it failed and repeats it.
func RunLost(t *testing.T, server string) {
	u, err := url.Parse(server)
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range writes {
		t.Run(w.name, func(t *testing.T) {
			t.Parallel()
			for _, reported := range []bool{false, true} {
				proxy := NewProxy(t, u.Host)
				through := *u
				through.Host = proxy.Addr()
				e := newEnv(t, through.String())
				do, check := w.prepare(e)
				if reported {
					proxy.Lose(1 << 40)
					e.is(do(), results.ErrUnavailable)
					proxy.Lose(0)
				} else {
					proxy.Lose(1)
				}
				e.ok(do())
				check()
			}
		})
	}
}
