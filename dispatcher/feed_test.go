package dispatcher_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/millrace/millrace/dispatcher"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/relay"
	"github.com/millrace/millrace/internal/results"
)

// sized gives a job to a tenant, with so many tokens that it is expected to need.
func sized(t job.Tenant, tokens job.Tokens) func(*job.Job) {
	return func(j *job.Job) {
		j.Tenant = t
		j.Cost = job.Cost{Prompt: tokens / 2, Output: tokens - tokens/2, Answers: 1}
	}
}

// queueLine puts n jobs into their tenant's waiting line, in an order that is theirs.
func (e *env) queueLine(n int, change ...func(*job.Job)) []*job.Job {
	e.Helper()
	all := make([]*queue.Message, n)
	for i := range all {
		all[i] = e.job(change...)
	}
	var g errgroup.Group
	g.SetLimit(16)
	jobs := make([]*job.Job, n)
	for i, m := range all {
		g.Go(func() error {
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			if _, err := e.results.Accept(ctx, &m.Job, m.Body, results.Limits{}); err != nil {
				return err
			}
			if err := e.queue.Enqueue(ctx, queue.Work, queue.TenantLane(m.Job.Tenant), m); err != nil {
				return err
			}
			jobs[i] = &m.Job
			return e.results.Queued(ctx, &m.Job, m.Body)
		})
	}
	e.ok(g.Wait())
	return jobs
}

// shallow keeps a few jobs before the workers, and no more however fast they are.
var shallow = dispatcher.Config{Sweep: 100 * time.Millisecond, FeedAhead: time.Millisecond, FeedLeast: 4}

// TestWaitingLinesAreFedInOrder: as much as is to wait before the workers, and more when jobs end.
func TestWaitingLinesAreFedInOrder(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	place := map[job.ID]int{}
	for i := range 20 {
		place[e.submit(queue.TenantLane("t"), e.job(sized("t", 100))).ID] = i
	}
	e.lead(shallow)
	w := e.worker("w")
	const most = 4 + 1 // the last one may go beyond the mark
	for n := range 20 {
		depth, err := e.queue.Depth(t.Context(), queue.Work, model)
		e.ok(err)
		if waiting := depth.Waiting[job.Standard]; waiting > most {
			t.Errorf("%d wait in the lane of all", waiting)
		}
		d, c := e.claim(w, job.Standard)
		if at := place[d.Job.ID]; at < n-32 || at > n+32 { // what is moved side by side may change places
			t.Errorf("number %d came as number %d", at, n)
		}
		e.finish(w, d, c)
	}
}

// TestOneJobIsNotBehindALongLine: a tenant queues two thousand jobs, then another one. That one is among the next that are started.
func TestOneJobIsNotBehindALongLine(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.queueLine(2000, sized("a", 300))
	e.lead(shallow)
	w := e.worker("w")
	for range 20 {
		d, c := e.claim(w, job.Standard)
		e.finish(w, d, c)
	}
	one := e.submit(queue.TenantLane("b"), e.job(sized("b", 300)))
	e.relay.Lined(relay.Lined{Model: model, Tenant: "b", Class: job.Standard})
	const k = 24
	line := queue.Line{Class: job.Standard, Lane: queue.TenantLane("b")}
	moved := false // out of its line, which the dispatcher is told of in its own time
	for n, after := 0, 0; n < 1000 && after <= k; n++ {
		d, c := e.claim(w, job.Standard)
		e.finish(w, d, c)
		if d.Job.ID == one.ID {
			return
		}
		if !moved {
			depth, err := e.queue.Depth(t.Context(), queue.Work, model)
			e.ok(err)
			moved = depth.Lines[line] == 0
		} else {
			after++
		}
	}
	t.Errorf("it is neither among the next 1000 nor among the %d that are started after it left its line", k)
}

// TestSharesAreInTokens: of two tenants of one weight, and of a third with twice that, whose jobs differ in size, each gets its part of the tokens.
func TestSharesAreInTokens(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	for _, tenant := range []ledger.Tenant{{ID: "large", Weight: 100}, {ID: "small", Weight: 100}, {ID: "heavy", Weight: 200}} {
		_, err := e.ledger.CreateTenant(t.Context(), tenant)
		e.ok(err)
	}
	e.queueLine(40, sized("large", 8000))
	e.queueLine(1500, sized("small", 100))
	e.queueLine(400, sized("heavy", 1000))
	e.lead(shallow)
	w := e.worker("w")
	got := map[job.Tenant]job.Tokens{}
	total := job.Tokens(0)
	for total < 400_000 { // a tenth and a quarter of each one's line is left
		d, c := e.claim(w, job.Standard)
		e.finish(w, d, c)
		got[d.Job.Tenant] += d.Job.Expected()
		total += d.Job.Expected()
	}
	for tenant, due := range map[job.Tenant]float64{"large": 0.25, "small": 0.25, "heavy": 0.5} {
		if share := float64(got[tenant]) / float64(total); share < due*0.8 || share > due*1.2 {
			t.Errorf("%s got %.3f of the tokens, want %.2f", tenant, share, due)
		}
	}
}

// TestSharesOfBatchesAreInTokens: the same of two tenants' batches, from files.
func TestSharesOfBatchesAreInTokens(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	lines := func(n, tokens int) []string {
		var all []string
		for i := range n {
			all = append(all, fmt.Sprintf(`{"custom_id":"c%d","method":"POST","url":"/v1/chat/completions","body":{"model":%q,"messages":[{"role":"user","content":"prompt"}],"max_tokens":%d}}`, i+1, model, tokens))
		}
		return all
	}
	due := map[job.Tenant]float64{"large": 1. / 3, "small": 2. / 3}
	for tenant, text := range map[job.Tenant][]string{"large": lines(30, 8000), "small": lines(2500, 100)} {
		_, err := e.ledger.CreateTenant(t.Context(), ledger.Tenant{ID: tenant, Weight: int(300 * due[tenant])})
		e.ok(err)
		e.batch(e.uploadFor(tenant, text), func(b *ledger.Batch) { b.Tenant = tenant })
	}
	e.lead(shallow)
	e.until("both are in progress", func() bool {
		all, err := e.ledger.LiveBatches(t.Context())
		e.ok(err)
		return len(all) == 2 && all[0].Status == ledger.InProgress && all[1].Status == ledger.InProgress
	})
	w := e.worker("w")
	for range 8 { // what was queued before both had lines to give
		d, c := e.claim(w, job.Batch)
		e.finish(w, d, c)
	}
	got := map[job.Tenant]job.Tokens{}
	total := job.Tokens(0)
	for total < 240_000 {
		d, c := e.claim(w, job.Batch)
		e.finish(w, d, c)
		got[d.Job.Tenant] += d.Job.Expected()
		total += d.Job.Expected()
	}
	for tenant, due := range due {
		if share := float64(got[tenant]) / float64(total); share < due*0.8 || share > due*1.2 {
			t.Errorf("%s got %.3f of the tokens, want %.2f", tenant, share, due)
		}
	}
}

// TestRunningLimitHoldsAndHoldsUpNobody: a tenant at its limit waits, without a place in the lane of all; the others do not. When one of its jobs ends, the next is fed.
func TestRunningLimitHoldsAndHoldsUpNobody(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	_, err := e.ledger.CreateTenant(t.Context(), ledger.Tenant{ID: "held", Weight: 1000, Limits: ledger.Limits{Running: 2}})
	e.ok(err)
	_, err = e.ledger.CreateTenant(t.Context(), ledger.Tenant{ID: "sized", Weight: 1000, Limits: ledger.Limits{RunningTokens: 1000}})
	e.ok(err)
	e.queueLine(12, sized("held", 100))
	e.queueLine(6, sized("sized", 600)) // one at a time
	e.queueLine(20, sized("free", 100))
	cfg := shallow
	cfg.FeedLeast = 50
	l := e.lead(cfg)
	e.until("those at their limit are told", func() bool {
		q := l.Queues()
		return len(q) == 1 && fmt.Sprint(q[0].Quota) == "[held sized]" && q[0].Lines[job.Standard] == 10+5
	})
	w := e.worker("w")
	e.drain(w, 38, func(running map[job.Tenant]int) {
		if running["held"] > 2 || running["sized"] > 1 {
			t.Fatalf("running: %v", running)
		}
	})
}

// drain runs jobs of the standard class, several at once, until so many have ended. check is told what runs of whom.
func (e *env) drain(w *fake, n int, check func(map[job.Tenant]int)) {
	e.Helper()
	p, err := w.queue.Puller(e.Context(), queue.PullerConfig{Kind: queue.Work, Model: model, Class: job.Standard})
	e.ok(err)
	defer p.Close()
	type held struct {
		d *queue.Delivery
		c *results.Claim
	}
	var open []held
	running := map[job.Tenant]int{}
	deadline := time.Now().Add(patience)
	for ended := 0; ended < n; {
		if time.Now().After(deadline) {
			e.Fatalf("timed out: %d of %d have ended, running: %v", ended, n, running)
		}
		var d *queue.Delivery
		if ended+len(open) < n {
			out, err := p.Pull(e.Context(), queue.PullRequest{Batch: 1, Expires: 100 * time.Millisecond})
			e.ok(err)
			d = <-out
		}
		if d != nil {
			r := claimOf(&d.Job, w.id)
			r.AckSubject, r.Body = d.AckSubject, d.Body
			c, err := w.results.Claim(e.Context(), r)
			e.ok(err)
			if c.Verdict != results.Taken {
				e.Fatalf("the claim of %s says %s", d.Job.ID, c.Verdict)
			}
			open = append(open, held{d, c})
			running[d.Job.Tenant]++
			check(running)
		}
		if len(open) > 8 || d == nil && len(open) > 0 { // no more comes before one ends
			running[open[0].d.Job.Tenant]--
			e.finish(w, open[0].d, open[0].c)
			open = open[1:]
			ended++
		}
	}
}

// TestLimitsHoldOverAChangeOfLeaders: the next one counts what its tenants have given to workers, and goes on. Each job runs once.
func TestLimitsHoldOverAChangeOfLeaders(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	_, err := e.ledger.CreateTenant(t.Context(), ledger.Tenant{ID: "held", Weight: 100, Limits: ledger.Limits{Running: 3}})
	e.ok(err)
	jobs := append(e.queueLine(9, sized("held", 100)), e.queueLine(60, sized("free", 100))...)
	first := e.lead(shallow)
	w := e.worker("w")
	check := func(running map[job.Tenant]int) {
		if running["held"] > 3 {
			t.Fatalf("running: %v", running)
		}
	}
	e.drain(w, 20, check)
	first.stop()
	e.lead(shallow)
	e.drain(w, len(jobs)-20, check)
	for _, j := range jobs {
		if rec := e.get(j); rec.State != job.Completed || len(rec.Attempts) != 1 {
			t.Errorf("a job is %s after %d attempts", rec.State, len(rec.Attempts))
		}
	}
}

// TestModelsDoNotWaitForEachOther: what feeds one of them hangs.
func TestModelsDoNotWaitForEachOther(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	const hangs job.Model = "hangs"
	jobs := e.queueLine(100, sized("a", 1000))
	l := e.dispatcher(shallow)
	e.background(func(ctx context.Context) error {
		l.FeedBeside(ctx, hangs)
		return nil
	})
	w := e.worker("w")
	e.relay.Lined(relay.Lined{Model: model, Tenant: "a", Class: job.Standard})
	e.drain(w, len(jobs), func(map[job.Tenant]int) {})
}
