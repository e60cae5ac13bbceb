package results

import (
	"context"
	"errors"

	"github.com/redis/go-redis/v9"

	"github.com/millrace/millrace/internal/job"
)

// InBacklog lists a tenant's jobs in a model, lines of batches among them, that are accepted and have not ended, with the tokens that each is expected to need. It is read in pages, so a job that comes or ends meanwhile may be among them or not.
func (s *Store) InBacklog(ctx context.Context, t job.Tenant, m job.Model) (map[job.ID]job.Tokens, error) {
	jobs := map[job.ID]job.Tokens{}
	for _, name := range []job.Tenant{t, t + asLines} {
		tenant, model := backlogNames(name, m)
		for cursor := uint64(0); ; {
			page, next, err := s.memberPage(ctx, s.membersKey(tenant, model), cursor)
			if err != nil {
				return nil, wrap(err, "listing what tenant %s has accepted of model %s", t, m)
			}
			for i := 0; i+1 < len(page); i += 2 {
				if v := numbers(page[i+1]); len(v) == 5 {
					jobs[idOfMember(page[i])] = job.Tokens(v[2])
				}
			}
			if cursor = next; cursor == 0 {
				break
			}
		}
	}
	return jobs, nil
}

// TokensBesideLines are what a tenant's jobs of all models that are accepted and have not ended are expected to need, without the lines of its batches.
func (s *Store) TokensBesideLines(ctx context.Context, t job.Tenant) (job.Tokens, error) {
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	tenant, _ := backlogNames(t, "")
	n, err := s.db.HGet(ctx, s.sumsKey(), tenant+":/t").Int64()
	if err != nil && !errors.Is(err, redis.Nil) { // a tenant without jobs has no sum
		return 0, wrap(err, "reading what tenant %s has accepted", t)
	}
	return job.Tokens(max(0, n)), nil
}
