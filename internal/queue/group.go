package queue

import (
	"context"
	"errors"
	"fmt"
	"iter"

	"github.com/millrace/millrace/internal/job"
)

// groupFilter is the subject of all outcomes of a group.
func groupFilter(t job.Tenant, group string) string {
	return "done." + token(string(t)) + "." + token(group) + ".*"
}

// What GroupOutcomes asks for at a time: by the size of what came before, so many records that they have some groupBytes in all.
const (
	groupBytes = 4 << 20
	groupLeast = 16 // an answer in a record has up to 256 KiB
)

// GroupOutcomes calls fn with the outcomes of a tenant's group from sequence seq on, with their answers, in DONE's order, and returns the sequence from which to go on. Some 4 MiB of them are held at a time. A record
// that cannot be read is logged and left out. Any replica answers, so what was stored a moment ago may be missing: whoever needs all of them counts, or looks a missing one up by Outcome.
// What fn returns ends the reading.
func (q *Queue) GroupOutcomes(ctx context.Context, t job.Tenant, group string, seq uint64, fn func(*Record) error) (next uint64, err error) {
	next = max(seq, 1)
	c, err := q.openReader(ctx, next, groupFilter(t, group), true)
	if err != nil {
		return next, fmt.Errorf("reading the outcomes of group %s: %w", group, err)
	}
	defer q.deleteReader(c)
	most := groupLeast
	for left, number := c.CachedInfo().NumPending, uint64(1); left > 0; {
		var page []*Record
		if page, left, number, err = q.outcomesPage(ctx, c, left, number, most); err != nil {
			return next, fmt.Errorf("reading the outcomes of group %s: %w", group, err)
		}
		size := 1
		for i, r := range page {
			page[i] = nil // fn may take its time, and what it has had need not be kept
			size += len(r.Result) + 2048
			if err := fn(r); err != nil {
				return next, err
			}
			next = r.Seq + 1
		}
		most = max(groupLeast, min(outcomesPage, 2*most, groupBytes*len(page)/size))
	}
	return next, nil
}

// GroupHeaders yields the outcomes of a tenant's group, headers only, up to the last one there is when it gets there.
func (q *Queue) GroupHeaders(ctx context.Context, t job.Tenant, group string) iter.Seq2[*Record, error] {
	return func(yield func(*Record, error) bool) {
		if err := q.outcomes(ctx, 1, groupFilter(t, group), func(r *Record) bool { return yield(r, nil) }); err != nil {
			yield(nil, fmt.Errorf("listing the outcomes of group %s: %w", group, err))
		}
	}
}

// PurgeGroup removes all outcomes of a tenant's group from DONE; none is no error. A job of the group that is delivered after that runs again: nothing may be left of it in WORK.
func (q *Queue) PurgeGroup(ctx context.Context, t job.Tenant, group string) error {
	ctx, cancel := q.bound(ctx)
	defer cancel()
	err := q.call(ctx, "STREAM.PURGE."+doneStream, map[string]string{"filter": groupFilter(t, group)}, nil)
	if errors.Is(err, errNoStream) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("removing the outcomes of group %s: %w", group, outward(err))
	}
	return nil
}
