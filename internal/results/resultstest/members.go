package resultstest

import (
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/results"
)

// backlogMembers: a tenant's own jobs of one model, each with what it is expected to need, until it has ended.
func backlogMembers(e *env) {
	mine, other, elsewhere := e.sized(of("acme", "m", job.Batch)), e.sized(of("other", "m", job.Batch)), e.sized(of("acme", "n", job.Batch))
	e.admit(results.Limits{}, mine, other, elsewhere)
	members := func() map[job.ID]job.Tokens {
		e.Helper()
		m, err := e.InBacklog(e.ctx, "acme", "m")
		e.ok(err)
		return m
	}
	e.same("members", members(), map[job.ID]job.Tokens{mine.ID: mine.Expected()})
	e.ok(e.Finish(e.ctx, mine, &job.Outcome{State: job.Cancelled, Finished: e.Now()}, nil, nil, nil))
	e.same("members", len(members()), 0)
}
