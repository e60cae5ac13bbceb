package results

import (
	"context"
	"errors"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/millrace/millrace/internal/job"
)

// Filter of a listing; zero fields match all.
type Filter struct {
	State   job.State
	Model   job.Model
	Session job.Session
}

func (f Filter) matches(r *Record) bool {
	return (f.State == "" || r.State.Public() == f.State.Public()) && (f.Model == "" || r.Job.Model == f.Model) && (f.Session == "" || r.Job.Session == f.Session)
}

const (
	listPage = 256
	// settledIn is the age at which an entry of a list that leads nowhere is not a job that is just being accepted.
	settledIn = time.Hour
)

// List returns up to limit of tenant's records that match, newest first by (created, id), after the job `after` ("" = from the newest), and whether more follow.
// An `after` that tenant does not have is ErrNotFound. A filter that matches little makes it read far: ctx bounds that.
func (s *Store) List(ctx context.Context, t job.Tenant, f Filter, after job.ID, limit int) ([]*Record, bool, error) {
	if limit <= 0 {
		return nil, false, nil
	}
	var found []*Record
	var dead []any
	defer func() { s.drop(ctx, s.listKey(t), dead) }() // at the end: the pages are read by rank
	created := ""
	for {
		page, err := s.listPage(ctx, t, after, created)
		if err != nil {
			return nil, false, wrap(err, "listing jobs")
		}
		for _, entry := range page {
			switch r := entry.record; {
			case r == nil:
				if entry.created < s.Now()-job.Millis(settledIn.Milliseconds()) {
					dead = append(dead, string(entry.id))
				}
			case !f.matches(r):
			case len(found) == limit:
				return found, true, nil
			default:
				found = append(found, r)
			}
		}
		if len(page) < listPage {
			return found, false, nil
		}
		end := page[len(page)-1]
		after, created = end.id, strconv.FormatInt(int64(end.created), 10)
	}
}

type listed struct {
	id      job.ID
	created job.Millis
	record  *Record // nil: the entry leads nowhere
}

// listPage reads a page of a list and its records.
func (s *Store) listPage(ctx context.Context, t job.Tenant, after job.ID, created string) ([]listed, error) {
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	ids, err := pageScript.Run(ctx, s.db, []string{s.listKey(t)}, listPage, string(after), created).StringSlice()
	if errors.Is(err, redis.Nil) {
		return nil, ErrNotFound
	}
	if err != nil || len(ids) == 0 {
		return nil, err
	}
	page := make([]listed, 0, len(ids)/2)
	gets := make([]*redis.MapStringStringCmd, 0, len(ids)/2)
	_, err = s.db.Pipelined(ctx, func(p redis.Pipeliner) error {
		for i := 0; i+1 < len(ids); i += 2 {
			ms, _ := strconv.ParseFloat(ids[i+1], 64) // a score
			page = append(page, listed{id: job.ID(ids[i]), created: job.Millis(ms)})
			gets = append(gets, p.HGetAll(ctx, s.recordKey(job.ID(ids[i]))))
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	for i, get := range gets {
		if m := get.Val(); len(m) > 0 {
			if page[i].record, err = decode(m); err != nil {
				return nil, err
			}
		}
	}
	return page, nil
}

// drop removes members of an index that lead nowhere. Best effort: whoever meets them next drops them.
func (s *Store) drop(ctx context.Context, index string, members []any) {
	if len(members) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	_ = s.db.ZRem(ctx, index, members...).Err()
}
