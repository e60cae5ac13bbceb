package results

import (
	"context"
	"fmt"
	"net/url"
	"time"

	"github.com/millrace/millrace/internal/job"
)

// Occupancy is how many calls run at once for whoever has its name, in all processes. 0 is no limit.
type Occupancy struct {
	Name   string
	Calls  int64
	Tokens job.Tokens
}

// RunningCall is a call that is answered on its connection, and what it is expected to need.
type RunningCall struct {
	ID     job.ID
	Tokens job.Tokens
}

// OccupancyLeft is what is in use of an occupancy. Full is the limit that refused, "" if none did.
type OccupancyLeft struct {
	Full   Unit
	Calls  int64
	Tokens job.Tokens
}

// The keys of an occupancy share a slot.
func (s *Store) occupancyKeys(name string) []string {
	k := s.cfg.Prefix + "run:{" + url.QueryEscape(name) + "}"
	return []string{k, k + ":n"}
}

// Occupy counts c for lease, unless a limit of o would be passed by it.
func (s *Store) Occupy(ctx context.Context, o Occupancy, c RunningCall, lease time.Duration) (OccupancyLeft, error) {
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	left, err := s.occupy(ctx, o, lease, c)
	if err != nil {
		return left, wrap(err, "counting the running call %s", c.ID)
	}
	return left, nil
}

// KeepOccupied renews the leases of calls, and counts those again that were lost with the store: limits are not asked.
func (s *Store) KeepOccupied(ctx context.Context, name string, calls []RunningCall, lease time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	if _, err := s.occupy(ctx, Occupancy{Name: name}, lease, calls...); err != nil {
		return wrap(err, "renewing %d running calls", len(calls))
	}
	return nil
}

func (s *Store) occupy(ctx context.Context, o Occupancy, lease time.Duration, calls ...RunningCall) (left OccupancyLeft, err error) {
	args := []any{lease.Milliseconds(), o.Calls, int64(o.Tokens)}
	for _, c := range calls {
		args = append(args, memberOf(c.ID), int64(c.Tokens))
	}
	a, err := occupyScript.Run(ctx, s.db, s.occupancyKeys(o.Name), args...).Slice()
	if err != nil {
		return left, err
	}
	switch {
	case len(a) == 3 && text(a[0]) == "in":
		left.Calls, left.Tokens = number(a[1]), job.Tokens(number(a[2]))
	case len(a) == 3 && text(a[0]) == "full" && text(a[1]) == "calls":
		left.Full, left.Calls = Jobs, number(a[2])
	case len(a) == 3 && text(a[0]) == "full":
		left.Full, left.Tokens = Tokens, job.Tokens(number(a[2]))
	default:
		return left, fmt.Errorf("%w: %v", errAnswer, a)
	}
	return left, nil
}

// Vacate drops a call. One that is not counted is no error.
func (s *Store) Vacate(ctx context.Context, name string, id job.ID) error {
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	if err := vacateScript.Run(ctx, s.db, s.occupancyKeys(name), memberOf(id)).Err(); err != nil {
		return wrap(err, "dropping the running call %s", id)
	}
	return nil
}
