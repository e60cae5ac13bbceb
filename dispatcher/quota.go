package dispatcher

import (
	"context"
	"fmt"
	"maps"
	"math"
	"sync"
	"time"

	"github.com/millrace/millrace/internal/fairshare"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
	"github.com/millrace/millrace/internal/queue"
)

const (
	// tenantsEvery is how often tenants' weights and limits are read, recountEvery how often what a limited tenant has out is counted anew: nothing but a crash, or a job that came by another way, makes it differ.
	// Who is refused room is counted sooner.
	tenantsEvery = 3 * time.Second
	recountEvery = 30 * time.Second
	recountFull  = 10 * time.Second
	// tenantsLeast is the least time between two reads, however many new tenants are met; forgetAfter is how long one that the ledger does not have is remembered.
	tenantsLeast = 200 * time.Millisecond
	forgetAfter  = time.Minute
	// patientFor is how long after its election, or after it has met a new tenant, a leader waits for the limits before it feeds without: a database that is away shall not stop everything.
	patientFor = 10 * time.Second
)

// quota knows the tenants' weights, and how much of each that has a limit is given to workers: waits in the lane `any` or in a worker's, or runs.
type quota struct {
	d       *Dispatcher
	elected time.Time
	// freed is called when a tenant that was at its limit may have room again.
	freed func(job.Tenant)
	// ask holds a value when a tenant was met of which no read has told.
	ask chan struct{}

	mu      sync.Mutex
	known   bool // the tenants have been read
	tenants map[job.Tenant]*account
}

// account is a tenant's.
type account struct {
	// heard: the ledger has told its weight and limits, or, in a read that began after the tenant was met, that it does not have it: then there are none. Till then it gets nothing.
	heard     bool
	met, seen time.Time // when it first and last asked for room; met is zero if a read told of it before
	weight    int
	limits    ledger.Limits
	// counted: out is what the tenant has given to workers. Till then it gets nothing.
	counted bool
	at      time.Time
	out     map[job.ID]outJob
	tokens  job.Tokens // of out
	// gone are those that ended lately: the backlog may still have them.
	gone map[job.ID]time.Time
	// reserved are those that are being fed just now, counted without a limit, too: one may come or go meanwhile.
	reserved       int
	reservedTokens job.Tokens
	full           bool // it was refused room
}

// outJob is a job that workers have or may take: what it is expected to need, and when it was fed; zero where it was counted.
type outJob struct {
	tokens job.Tokens
	fed    time.Time
}

func (a *account) limited() bool { return a.limits.Running > 0 || a.limits.RunningTokens > 0 }

// unlimited forgets what is kept for a limit alone.
func (a *account) unlimited() { a.counted, a.out, a.gone, a.tokens = false, nil, nil, 0 }

func newQuota(d *Dispatcher, freed func(job.Tenant)) *quota {
	return &quota{d: d, elected: time.Now(), freed: freed, ask: make(chan struct{}, 1), tenants: map[job.Tenant]*account{}}
}

// refresh is a turn of the duty.
func (q *quota) refresh(ctx context.Context) error { return q.watch(ctx, tenantsEvery) }

// watch reads the tenants, and until the period is over once more whenever it is asked.
func (q *quota) watch(ctx context.Context, period time.Duration) error {
	over := time.NewTimer(period)
	defer over.Stop()
	for {
		if err := q.read(ctx); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-over.C:
			return nil
		case <-time.After(tenantsLeast):
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-over.C:
			return nil
		case <-q.ask:
		}
	}
}

// read reads the tenants, and counts what those with limits have out where that is due.
func (q *quota) read(ctx context.Context) error {
	begin := time.Now()
	tenants, err := q.d.deps.Ledger.Tenants(ctx)
	if err != nil {
		return fmt.Errorf("reading the tenants' limits: %w", err)
	}
	now := time.Now()
	var due []job.Tenant
	q.mu.Lock()
	there := make(map[job.Tenant]bool, len(tenants))
	for i := range tenants {
		t := &tenants[i]
		there[t.ID] = true
		a := q.tenants[t.ID]
		if a == nil {
			a = &account{}
			q.tenants[t.ID] = a
		}
		a.heard, a.weight, a.limits = true, t.Weight, t.Limits
		switch {
		case !a.limited():
			a.unlimited()
		case !a.counted || a.full && now.Sub(a.at) >= recountFull || now.Sub(a.at) >= recountEvery:
			if a.out == nil {
				a.out, a.gone = map[job.ID]outJob{}, map[job.ID]time.Time{}
			}
			due = append(due, t.ID)
		}
	}
	maps.DeleteFunc(q.tenants, func(t job.Tenant, a *account) bool {
		if there[t] {
			return false
		}
		a.heard, a.weight, a.limits = a.met.Before(begin), 0, ledger.Limits{}
		a.unlimited()
		return a.reserved == 0 && begin.Sub(a.seen) > forgetAfter
	})
	q.known = true
	q.mu.Unlock()
	for _, t := range due {
		if err := q.recount(ctx, t); err != nil {
			return err
		}
	}
	q.mu.Lock()
	var full []job.Tenant
	for t, a := range q.tenants {
		if a.full { // its limit may be another by now
			a.full = false
			full = append(full, t)
		}
	}
	q.mu.Unlock()
	for _, t := range full {
		q.freed(t)
	}
	return nil
}

// recount counts what a tenant has out: its backlog without what waits in its lines. The lines are read first, so that a job that is moved meanwhile is counted. What is fed meanwhile is counted by fed.
func (q *quota) recount(ctx context.Context, t job.Tenant) error {
	begin := time.Now()
	backlogs, err := q.d.deps.Results.Backlogs(ctx)
	if err != nil {
		return fmt.Errorf("counting what tenant %s has given to workers: %w", t, err)
	}
	out := map[job.ID]outJob{}
	for m, b := range backlogs {
		if b.Tenants[t].Jobs == 0 {
			continue
		}
		waiting, err := q.d.deps.Queue.LineIDs(ctx, m, queue.TenantLane(t))
		if err != nil {
			return fmt.Errorf("counting what tenant %s has given to workers: %w", t, err)
		}
		members, err := q.d.deps.Results.InBacklog(ctx, t, m)
		if err != nil {
			return fmt.Errorf("counting what tenant %s has given to workers: %w", t, err)
		}
		// A job that came between the two reads counts as out for now, and no harm is done: the next count sets it right.
		for id, tokens := range members {
			if !waiting[id] {
				out[id] = outJob{tokens: tokens}
			}
		}
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	a := q.tenants[t]
	if a == nil || a.out == nil {
		return nil
	}
	for id, at := range a.gone {
		delete(out, id)
		if begin.Sub(at) > recountEvery { // its record has long been ended
			delete(a.gone, id)
		}
	}
	for id, o := range a.out {
		if !o.fed.Before(begin) { // fed while we read
			out[id] = o
		}
	}
	a.out, a.tokens, a.counted, a.at = out, 0, true, begin
	for _, o := range out {
		a.tokens += o.tokens
	}
	return nil
}

// ready tells whether the limits are known, or have been waited for.
func (q *quota) ready() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.known || time.Since(q.elected) >= patientFor
}

// weight is a tenant's.
func (q *quota) weight(t job.Tenant) int {
	q.mu.Lock()
	defer q.mu.Unlock()
	if a := q.tenants[t]; a != nil && a.weight > 0 {
		return a.weight
	}
	return fairshare.DefaultWeight
}

// room tells whether a tenant may be given a job that is expected to need so many tokens.
func (q *quota) room(t job.Tenant, head job.Tokens) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	_, _, ok := q.leftLocked(t, head)
	return ok
}

// leftLocked is how many jobs, and of how many tokens, a tenant may be given; false if not even one of head tokens. A job that is larger than the whole limit runs alone.
func (q *quota) leftLocked(t job.Tenant, head job.Tokens) (jobs int, tokens job.Tokens, ok bool) {
	jobs, tokens = math.MaxInt, math.MaxInt64
	now := time.Now()
	a := q.tenants[t]
	if a == nil {
		a = &account{met: now}
		q.tenants[t] = a
	}
	a.seen = now
	if !a.heard && now.Sub(a.met) < patientFor && q.known {
		a.full = true
		select {
		case q.ask <- struct{}{}:
		default:
		}
		return 0, 0, false
	}
	if !a.limited() {
		return jobs, tokens, true
	}
	out := len(a.out) + a.reserved
	if n := a.limits.Running; n > 0 {
		jobs = int(n) - out
	}
	if n := a.limits.RunningTokens; n > 0 {
		tokens = job.Tokens(n) - a.tokens - a.reservedTokens
	}
	ok = a.counted && jobs > 0 && (head <= tokens || out == 0)
	if !ok {
		a.full = true
	}
	return jobs, tokens, ok
}

// lease reserves room for jobs that are about to be fed. What was not used is given back by settle.
func (q *quota) lease(t job.Tenant, head, tokens job.Tokens) (most int, upTo job.Tokens, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	jobs, left, ok := q.leftLocked(t, head)
	if !ok {
		return 0, 0, false
	}
	most, upTo = min(jobs, maxGrant), max(1, min(tokens, left))
	a := q.tenants[t]
	a.reserved += most
	a.reservedTokens += max(upTo, head)
	return most, upTo, true
}

// settle gives back a lease of most jobs, and counts what was fed of it. The account is the one that the lease was taken of: it is kept while it has any.
func (q *quota) settle(t job.Tenant, most int, head, upTo job.Tokens, moved []fed) {
	q.mu.Lock()
	a := q.tenants[t]
	a.reserved -= most
	a.reservedTokens -= max(upTo, head)
	now := time.Now()
	for _, f := range moved {
		if _, ended := a.gone[f.id]; ended || a.out == nil {
			continue
		}
		a.tokens += f.tokens - a.out[f.id].tokens
		a.out[f.id] = outJob{f.tokens, now}
	}
	full := a.full && len(moved) < most // others have met the reservation
	if full {
		a.full = false
	}
	q.mu.Unlock()
	if full {
		q.freed(t)
	}
}

// ended takes the end of a durable job.
func (q *quota) ended(t job.Tenant, id job.ID) {
	q.mu.Lock()
	a := q.tenants[t]
	if a == nil || a.out == nil {
		q.mu.Unlock()
		return
	}
	a.gone[id] = time.Now()
	if o, ok := a.out[id]; ok {
		a.tokens -= o.tokens
		delete(a.out, id)
	}
	full := a.full
	a.full = false
	q.mu.Unlock()
	if full {
		q.freed(t)
	}
}
