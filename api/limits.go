package api

import (
	"fmt"
	"math"
	"net/http"
	"time"

	"github.com/millrace/millrace/internal/admission"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/results"
)

// checkLimits refuses negative limits. 0 is none.
func (c Config) checkLimits() error {
	for _, l := range []struct {
		suffix string
		amount results.Amount
	}{{"", c.Limits.Queue}, {"-tenant", c.Limits.Tenant}, {"-model", c.Limits.Model}} {
		for _, f := range []struct {
			name  string
			value int64
		}{{"max-queued-jobs", l.amount.Jobs}, {"max-queued-bytes", l.amount.Bytes}, {"max-queued-tokens", int64(l.amount.Tokens)}} {
			if f.value < 0 {
				return fmt.Errorf("%s%s is %d: it must be at least 0, which is no limit", f.name, l.suffix, f.value)
			}
		}
	}
	if c.MaxInteractiveWait < 0 {
		return fmt.Errorf("max-interactive-wait is %v: it must be at least 0, which is no bound", c.MaxInteractiveWait)
	}
	return nil
}

// limitCodes name the limits by scope and unit.
var limitCodes = map[results.Scope]map[results.Unit]job.Code{
	results.OfQueue:  {results.Jobs: job.CodeQueuedJobs, results.Bytes: job.CodeQueuedBytes, results.Tokens: job.CodeQueuedTokens},
	results.OfTenant: {results.Jobs: job.CodeTenantQueuedJobs, results.Bytes: job.CodeTenantQueuedBytes, results.Tokens: job.CodeTenantQueuedTokens},
	results.OfModel:  {results.Jobs: job.CodeModelQueuedJobs, results.Bytes: job.CodeModelQueuedBytes, results.Tokens: job.CodeModelQueuedTokens},
}

// overLimit is what the client of a job is told that would have passed a limit. batched are the tokens that the tenant's batches need, by which its limit was reduced.
func (s *Server) overLimit(j *job.Job, e *results.LimitError, batched job.Tokens) *failure {
	if e.Scope == results.OfTenant && e.Unit == results.Tokens {
		e.Limit += int64(batched)
		e.Used += int64(batched)
	}
	whose := fmt.Sprintf("your jobs of %q", clip(string(j.Model)))
	switch e.Scope {
	case results.OfTenant:
		whose = fmt.Sprintf("the jobs of your tenant %s, all models together,", j.Tenant)
	case results.OfModel:
		whose = fmt.Sprintf("all jobs of %q", clip(string(j.Model)))
	case results.OfQueue:
	}
	code := limitCodes[e.Scope][e.Unit]
	s.metrics.refuse(code)
	if e.Asked > e.Limit {
		f := fail(http.StatusTooManyRequests, code, "The job alone needs %d %s, and the limit is %d for %s that wait or run.", e.Asked, e.Unit, e.Limit, whose)
		f.final = true
		return f
	}
	f := fail(http.StatusTooManyRequests, code, "The limit of %d %s for %s that wait or run is reached: %d are in use, and this job needs %d. Try again later.",
		e.Limit, e.Unit, whose, e.Used, e.Asked)
	f.after = untilRoom(e, s.rate(j.Model))
	return f
}

// untilRoom is how long it takes until so much has ended that the job is under the limit, at rate tokens per second; 0 if the rate is unknown.
func untilRoom(e *results.LimitError, rate float64) time.Duration {
	if rate <= 0 {
		return 0
	}
	var jobs, tokens float64
	for _, c := range e.Place.Classes {
		jobs += float64(c.Jobs)
		tokens += float64(c.Tokens)
	}
	over := float64(e.Used + e.Asked - e.Limit)
	switch e.Unit {
	case results.Tokens:
		tokens = over
	case results.Jobs:
		tokens *= over / max(1, jobs)
	case results.Bytes:
		tokens *= over / float64(max(1, e.Used))
	}
	return max(time.Second, admission.Drain(job.Tokens(math.Ceil(tokens)), rate))
}

// limitsObject shows the limits that are in force; those that are not are null.
type limitsObject struct {
	Queue  amountLimits `json:"per_tenant_and_model"`
	Tenant amountLimits `json:"per_tenant"`
	Model  amountLimits `json:"per_model"`
}

type amountLimits struct {
	Jobs   *int64 `json:"jobs"`
	Bytes  *int64 `json:"bytes"`
	Tokens *int64 `json:"tokens"`
}

func newLimitsObject(l results.Limits) limitsObject {
	of := func(a results.Amount) amountLimits {
		orNull := func(n int64) *int64 {
			if n == 0 {
				return nil
			}
			return &n
		}
		return amountLimits{orNull(a.Jobs), orNull(a.Bytes), orNull(int64(a.Tokens))}
	}
	return limitsObject{of(l.Queue), of(l.Tenant), of(l.Model)}
}

// fullest is the largest share of a limit that is in use in a model, and which: for operators. "" if there are no limits.
func fullest(l results.Limits, total results.Amount, tenants map[job.Tenant]results.Amount) (share float64, which string) {
	look := func(scope string, limit, used results.Amount) {
		for _, f := range []struct {
			unit        results.Unit
			limit, used int64
		}{
			{results.Jobs, limit.Jobs, used.Jobs},
			{results.Bytes, limit.Bytes, used.Bytes},
			{results.Tokens, int64(limit.Tokens), int64(used.Tokens)},
		} {
			if f.limit > 0 && (which == "" || float64(f.used)/float64(f.limit) > share) {
				share, which = float64(f.used)/float64(f.limit), scope+string(f.unit)
			}
		}
	}
	look("model ", l.Model, total)
	for _, used := range tenants {
		look("tenant ", l.Queue, used)
	}
	return share, which
}
