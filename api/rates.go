package api

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
	"github.com/millrace/millrace/internal/results"
)

// rateTimeout bounds what asking the limits of keys and tenants may add to a request.
const rateTimeout = time.Second

// rate is a limit per minute of a key or a tenant.
type rate struct {
	results.Rate
	code  job.Code
	unit  string
	whose string
}

// ratesOf are the limits per minute that a request meets which is expected to need so many tokens.
func ratesOf(id *ledger.Identity, tokens job.Tokens) []rate {
	key, tenant := "your API key "+id.Key.ID, "your tenant "+string(id.Tenant.ID)
	var all []rate
	for _, r := range []rate{
		{results.Rate{Name: "r:k:" + id.Key.ID, PerMinute: id.Key.Limits.RequestsPerMinute, Asked: 1}, job.CodeRequestsPerMinute, "requests", key},
		{results.Rate{Name: "r:t:" + string(id.Tenant.ID), PerMinute: id.Tenant.Limits.RequestsPerMinute, Asked: 1}, job.CodeRequestsPerMinute, "requests", tenant},
		{results.Rate{Name: "t:k:" + id.Key.ID, PerMinute: id.Key.Limits.TokensPerMinute, Asked: int64(tokens)}, job.CodeTokensPerMinute, "tokens", key},
		{results.Rate{Name: "t:t:" + string(id.Tenant.ID), PerMinute: id.Tenant.Limits.TokensPerMinute, Asked: int64(tokens)}, job.CodeTokensPerMinute, "tokens", tenant},
	} {
		if r.PerMinute > 0 && r.Asked > 0 {
			all = append(all, r)
		}
	}
	return all
}

// allow takes a request and the tokens that it is expected to need from the limits per minute of its key and tenant, or says which has not enough. The answer's headers tell what is left, of the limit that refuses alone if one does. What has no such limit costs nothing. While the
// result store does not answer nothing is counted: calls answered on their connections go on without it, and durable work is refused for that reason anyway.
func (s *Server) allow(ctx context.Context, id *ledger.Identity, tokens job.Tokens) error {
	limits := ratesOf(id, tokens)
	if len(limits) == 0 {
		return nil
	}
	rates := make([]results.Rate, len(limits))
	for i, r := range limits {
		if r.Asked > r.PerMinute {
			s.metrics.refuse(r.code)
			f := fail(http.StatusTooManyRequests, r.code, "The request alone is expected to need %d %s, and the limit is %d per minute for %s: make it smaller.", r.Asked, r.unit, r.PerMinute, r.whose)
			f.final = true
			return f
		}
		rates[i] = r.Rate
	}
	if !s.limiter.ask(time.Now()) {
		return nil
	}
	short, cancel := context.WithTimeout(context.WithoutCancel(ctx), rateTimeout) // a client that leaves is no failure of the store
	defer cancel()
	left, refused, err := s.deps.Results.TakeRates(short, rates)
	if s.limiter.answered(err == nil, err); err != nil {
		return nil // said above: nothing is counted then
	}
	told := 0
	if refused >= 0 {
		told = refused // what was taken of those before it is given back
	}
	if c := callerOf(ctx); c != nil {
		tellRates(c.header, limits[told:], left[told:])
	}
	if refused < 0 {
		return nil
	}
	r := limits[refused]
	s.metrics.refuse(r.code)
	f := fail(http.StatusTooManyRequests, r.code, "The limit of %d %s per minute for %s is reached: try again in %v.", r.PerMinute, r.unit, r.whose, max(time.Second, left[refused].Retry.Round(time.Second)))
	f.after = max(time.Second, left[refused].Retry)
	return f
}

// tellRates writes of each unit the limit of which least is left.
func tellRates(h http.Header, limits []rate, left []results.RateLeft) {
	least := make(map[string]int)
	for i := range left {
		if j, ok := least[limits[i].unit]; !ok || left[i].Remaining < left[j].Remaining {
			least[limits[i].unit] = i
		}
	}
	for unit, i := range least {
		h.Set("X-Ratelimit-Limit-"+unit, strconv.FormatInt(limits[i].PerMinute, 10))
		h.Set("X-Ratelimit-Remaining-"+unit, strconv.FormatInt(left[i].Remaining, 10))
		h.Set("X-Ratelimit-Reset-"+unit, left[i].Reset.Round(time.Millisecond).String())
	}
}

// acceptLimits are the limits on what the caller's tenant has accepted and not ended: its own where it has any, else the server's. batched is what its batches' lines are expected to need, by which the limit on tokens is reduced.
func (s *Server) acceptLimits(ctx context.Context) (l results.Limits, batched job.Tokens) {
	l = s.cfg.Limits
	c := callerOf(ctx)
	if c == nil {
		return l, 0
	}
	t := &c.identity.Tenant
	l.Tenant.Jobs = cmp.Or(t.Limits.Queued, l.Tenant.Jobs)
	l.Tenant.Tokens = cmp.Or(job.Tokens(t.Limits.QueuedTokens), l.Tenant.Tokens)
	if l.Tenant.Tokens == 0 {
		return l, 0
	}
	batched = s.keys.batchTokens(ctx, t.ID)
	batched = min(batched, l.Tenant.Tokens-1) // 0 would be no limit
	l.Tenant.Tokens -= batched
	return l, batched
}

// --- running calls ---

// Leases of running calls: so long after an API process has died they are free again.
const (
	occupyLease = 30 * time.Second
	occupyBeat  = 10 * time.Second
	// most calls that one message to the store renews.
	maxRenewed = 500
)

// occupied are the running calls of this process that count against a limit on those.
type occupied struct {
	mu    sync.Mutex
	names map[string]map[job.ID]job.Tokens // by the name of the limit
}

func (o *occupied) add(name string, c results.RunningCall) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.names == nil {
		o.names = make(map[string]map[job.ID]job.Tokens)
	}
	if o.names[name] == nil {
		o.names[name] = make(map[job.ID]job.Tokens)
	}
	o.names[name][c.ID] = c.Tokens
}

func (o *occupied) remove(name string, id job.ID) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.names[name], id)
	if len(o.names[name]) == 0 {
		delete(o.names, name)
	}
}

func (o *occupied) has(name string, id job.ID) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	_, ok := o.names[name][id]
	return ok
}

// all lists the calls by limit, in parts that one message can renew.
func (o *occupied) all() map[string][][]results.RunningCall {
	o.mu.Lock()
	defer o.mu.Unlock()
	all := make(map[string][][]results.RunningCall)
	for name, calls := range o.names {
		part := make([]results.RunningCall, 0, min(len(calls), maxRenewed))
		for id, n := range calls {
			if part = append(part, results.RunningCall{ID: id, Tokens: n}); len(part) == maxRenewed {
				all[name], part = append(all[name], part), nil
			}
		}
		if len(part) > 0 {
			all[name] = append(all[name], part)
		}
	}
	return all
}

// occupy counts a call that is answered on its connection among those that run for its key and tenant, in all API processes, or says which limit it would pass. leave is to be called when it has ended. As long as the store does not
// answer calls are let in, and are counted when it does.
func (s *Server) occupy(ctx context.Context, id *ledger.Identity, j *job.Job) (leave func(), err error) {
	c := results.RunningCall{ID: j.ID, Tokens: j.Expected()}
	var entered []string
	leave = func() { s.vacate(ctx, entered, j.ID) }
	for _, l := range []struct {
		name, whose string
		limits      ledger.Limits
	}{
		{"k:" + id.Key.ID, "your API key " + id.Key.ID, id.Key.Limits},
		{"t:" + string(id.Tenant.ID), "your tenant " + string(id.Tenant.ID), id.Tenant.Limits},
	} {
		if l.limits.Running == 0 && l.limits.RunningTokens == 0 {
			continue
		}
		if most := l.limits.RunningTokens; most > 0 && int64(c.Tokens) > most {
			s.metrics.refuse(job.CodeRunningTokens)
			f := fail(http.StatusTooManyRequests, job.CodeRunningTokens, "The call alone is expected to need %d tokens, and the limit is %d running tokens for %s: make it smaller.", c.Tokens, most, l.whose)
			f.final = true
			leave()
			return nil, f
		}
		left := s.enter(ctx, results.Occupancy{Name: l.name, Calls: l.limits.Running, Tokens: job.Tokens(l.limits.RunningTokens)}, c)
		if left.Full == "" {
			s.occupied.add(l.name, c) // also one that could not be counted now: the next renewal does
			entered = append(entered, l.name)
			continue
		}
		leave()
		code, limit, used, what, asked := job.CodeRunning, l.limits.Running, left.Calls, "calls", int64(1)
		if left.Full == results.Tokens {
			code, limit, used, what, asked = job.CodeRunningTokens, l.limits.RunningTokens, int64(left.Tokens), "tokens", int64(c.Tokens)
		}
		s.metrics.refuse(code)
		return nil, fail(http.StatusTooManyRequests, code, "The limit of %d running %s for %s is reached: %d are in use, and this call needs %d. Try again when others have ended.", limit, what, l.whose, used, asked)
	}
	return leave, nil
}

// enter asks the store; a store that does not answer refuses nothing.
func (s *Server) enter(ctx context.Context, o results.Occupancy, c results.RunningCall) results.OccupancyLeft {
	if !s.limiter.ask(time.Now()) {
		return results.OccupancyLeft{}
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rateTimeout)
	defer cancel()
	left, err := s.deps.Results.Occupy(ctx, o, c, occupyLease)
	if s.limiter.answered(err == nil, err); err != nil {
		return results.OccupancyLeft{}
	}
	return left
}

// vacate takes a call off. What a store that does not answer still counts is forgotten with its lease.
func (s *Server) vacate(ctx context.Context, names []string, id job.ID) {
	for _, name := range names {
		s.occupied.remove(name, id)
		if !s.limiter.ask(time.Now()) {
			continue
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rateTimeout)
		err := s.deps.Results.Vacate(ctx, name, id)
		s.limiter.answered(err == nil, err)
		cancel()
	}
}

// keepOccupied renews the leases of running calls until ctx ends.
func (s *Server) keepOccupied(ctx context.Context) {
	t := time.NewTicker(occupyBeat)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		if err := s.renewOccupied(ctx); err != nil && ctx.Err() == nil {
			s.log.Warn("renewing the leases of running calls", "err", err) // the next turn counts again what was lost
		}
	}
}

func (s *Server) renewOccupied(ctx context.Context) error {
	for name, parts := range s.occupied.all() {
		for _, calls := range parts {
			if err := s.deps.Results.KeepOccupied(ctx, name, calls, occupyLease); err != nil {
				return fmt.Errorf("renewing running calls: %w", err)
			}
			for _, c := range calls { // one that ended meanwhile may have been counted again
				if s.occupied.has(name, c.ID) {
					continue
				}
				if err := s.deps.Results.Vacate(ctx, name, c.ID); err != nil {
					return fmt.Errorf("dropping an ended call: %w", err)
				}
			}
		}
	}
	return nil
}
