package dispatcher

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
	"github.com/millrace/millrace/internal/results"
	"github.com/millrace/millrace/internal/testenv"
)

// limitsOf opens a ledger and a store of results, and a quota on them that tells whom it has freed.
func limitsOf(t *testing.T) (*quota, <-chan job.Tenant) {
	t.Helper()
	store, err := results.Open(t.Context(), results.Config{URL: testenv.MiniRedis(t).URL()}, testenv.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = store.Close() })
	l := testenv.Ledger(t)
	freed := make(chan job.Tenant, 100)
	return newQuota(&Dispatcher{ledger: l, deps: Deps{Ledger: l, Results: store}}, func(t job.Tenant) { freed <- t }), freed
}

// tenant makes one, or gives it other limits.
func (q *quota) tenant(t *testing.T, id job.Tenant, l ledger.Limits) {
	t.Helper()
	if _, err := q.d.deps.Ledger.UpdateTenant(t.Context(), id, func(t *ledger.Tenant) error { t.Limits = l; return nil }); err == nil {
		return
	}
	if _, err := q.d.deps.Ledger.CreateTenant(t.Context(), ledger.Tenant{ID: id, Limits: l}); err != nil {
		t.Fatal(err)
	}
}

func (q *quota) mustRead(t *testing.T) {
	t.Helper()
	if err := q.read(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// TestLeasesAreGivenBackWhateverBecomesOfTheLimit: one that goes or comes while jobs are fed leaves nothing reserved.
func TestLeasesAreGivenBackWhateverBecomesOfTheLimit(t *testing.T) {
	t.Parallel()
	limits, none := ledger.Limits{Running: 2, RunningTokens: 1000}, ledger.Limits{}
	for name, c := range map[string]struct {
		before ledger.Limits
		change func(*quota)
	}{
		"goes":  {limits, func(q *quota) { q.tenant(t, "a", none) }},
		"comes": {none, func(q *quota) { q.tenant(t, "a", limits) }},
	} {
		t.Run(name, func(t *testing.T) {
			q, _ := limitsOf(t)
			q.tenant(t, "a", c.before)
			q.mustRead(t)
			most, upTo, ok := q.lease("a", 100, 5000)
			if !ok || c.before.Running > 0 && (most != 2 || upTo != 1000) {
				t.Fatalf("leased %d of %d tokens, %v", most, upTo, ok)
			}
			c.change(q)
			q.mustRead(t)
			q.settle("a", most, 100, upTo, nil)
			q.tenant(t, "a", limits)
			q.mustRead(t)
			if most, upTo, ok := q.lease("a", 100, 5000); most != 2 || upTo != 1000 || !ok {
				t.Errorf("leased %d of %d tokens, %v, once the first lease was given back", most, upTo, ok)
			}
		})
	}
}

// TestNewTenantWaitsForItsLimits: who is made after the tenants were read gets nothing before they are read again.
func TestNewTenantWaitsForItsLimits(t *testing.T) {
	t.Parallel()
	q, _ := limitsOf(t)
	q.mustRead(t)
	q.tenant(t, "new", ledger.Limits{Running: 1})
	if q.room("new", 100) || q.room("nobody", 100) {
		t.Fatal("a tenant of which nothing is known has room")
	}
	if _, _, ok := q.lease("new", 100, 100); ok {
		t.Fatal("a tenant of which nothing is known has a lease")
	}
	q.mustRead(t)
	if most, _, ok := q.lease("new", 100, 100); !ok || most != 1 {
		t.Errorf("leased %d, %v, of one", most, ok)
	}
	if most, _, ok := q.lease("nobody", 100, 100); !ok || most != maxGrant {
		t.Errorf("leased %d, %v, to a tenant that the ledger does not have", most, ok)
	}
}

// TestNewTenantIsAskedForAtOnce: not only when the tenants' next turn is due.
func TestNewTenantIsAskedForAtOnce(t *testing.T) {
	t.Parallel()
	q, freed := limitsOf(t)
	q.mustRead(t)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- q.watch(ctx, time.Hour) }()
	for _, id := range []job.Tenant{"first", "second"} { // the turn's own read may tell of the first; one that was asked for tells of the second
		q.tenant(t, id, ledger.Limits{Running: 1})
		for !q.room(id, 100) {
			select {
			case <-freed:
			case err := <-done:
				t.Fatalf("the watch has ended: %v", err)
			}
		}
	}
	cancel()
	<-done
}

// TestQueuedLinesCountOnceInTheQuota: a batch's lines are of its batch's tokens, whether this leader knows already which of them are queued or not.
func TestQueuedLinesCountOnceInTheQuota(t *testing.T) {
	t.Parallel()
	q, _ := limitsOf(t)
	ctx, l, store := t.Context(), q.d.deps.Ledger, q.d.deps.Results
	ok := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	q.tenant(t, "a", ledger.Limits{QueuedTokens: 1000})
	now := store.Now()
	b := ledger.Batch{ID: job.NewName("batch_", now.Time()), Tenant: "a", Endpoint: job.ChatCompletions, InputFile: "file-1", Window: "24h", Status: ledger.Validating, Created: now, Expires: now + 1e8}
	ok(l.InsertFile(ctx, ledger.File{ID: "file-1", Tenant: "a", Purpose: "batch", Blob: "file-1", Created: now}, 0))
	ok(l.CreateBatch(ctx, b))
	ok(l.Lead(ctx, 1))
	_, err := l.StartBatch(ctx, 1, b.ID, now, "m", []ledger.Portion{{Model: "m", Lines: 4, Tokens: 400}})
	ok(err)
	of := func(id job.ID, group string, line int64) *job.Job {
		return &job.Job{ID: id, Tenant: "a", Model: "m", Class: job.Batch, Group: group, Line: line, Created: now, Expires: now + 1e8, Cost: job.Cost{Prompt: 100}}
	}
	var lines []*job.Job
	for n := int64(1); n <= 4; n++ {
		lines = append(lines, of(job.LineID(b.ID, n), b.ID, n))
	}
	ok(store.AcceptLines(ctx, lines))
	_, err = store.Accept(ctx, of(job.NewID(now.Time()), job.NoGroup, 0), nil, results.Limits{})
	ok(err)
	r := &running{v: &driver{d: q.d, batches: map[string]*running{}}} // of a leader that has loaded no other
	row := &ledger.Batch{Tenant: "a"}
	for tokens, over := range map[job.Tokens]bool{500: false, 501: true} { // the batch has 400, the job 100
		why, err := r.overQuota(ctx, row, tokens)
		ok(err)
		if (why != "") != over || over && !strings.Contains(why, "1000 queued tokens 500 are in use") {
			t.Errorf("%d tokens: %q", tokens, why)
		}
	}
}
