package scaling

import (
	"time"

	"github.com/millrace/millrace/internal/scale"
)

// silent is how long nobody may have called a recorder for what it holds to be still without gaps: a process that stood still that long knows nothing of the time.
const silent = time.Minute

// recorder keeps what came in, by the second and by scale.SeasonBucket. The zero value has heard nothing yet. What comes with an earlier time than a call before counts into the bucket that is open.
type recorder struct {
	recent, season series
	buckets        []scale.Arrivals // made of recent
	last           time.Time        // of the last advance
}

// series is arrivals in buckets.
type series struct {
	open   scale.Arrivals
	cut    bool // the open one was not seen from its start
	closed []scale.Arrivals
}

func (s *series) advance(now time.Time, long time.Duration) {
	if s.open.Start.IsZero() {
		s.open.Start = now.Truncate(long)
		s.cut = !s.open.Start.Equal(now)
	}
	for end := s.open.Start.Add(long); !now.Before(end); end = end.Add(long) {
		if !s.cut {
			s.closed = append(s.closed, s.open)
		}
		s.open, s.cut = scale.Arrivals{Start: end}, false
	}
}

func (s *series) add(a scale.Amount, squares float64) {
	s.open.Jobs += a.Jobs
	s.open.Tokens += a.Tokens
	s.open.Squares += squares
}

// advance closes the buckets that have ended by now, empty ones among them. A bucket that was not seen in whole is left out, so that it is not taken for a quiet one. After a minute without a call, what is recent begins anew.
func (r *recorder) advance(now time.Time) {
	if !r.last.IsZero() && now.Sub(r.last) > silent {
		r.recent, r.season.open = series{}, scale.Arrivals{}
	}
	r.recent.advance(now, time.Second)
	if over := len(r.recent.closed) - int(scale.RecentFor/time.Second); over > 0 {
		r.recent.closed = r.recent.closed[over:]
	}
	r.season.advance(now, scale.SeasonBucket)
	r.last = now
}

// arrive adds what came in at a time: one job, or all that did since the last call, the squares of whose tokens add up to squares.
func (r *recorder) arrive(at time.Time, a scale.Amount, squares float64) {
	r.advance(at)
	r.recent.add(a, squares)
	r.season.add(a, squares)
}

// takeSeason returns the arrivals of each scale.SeasonBucket that has ended since the last call, to be recorded for Learn.
func (r *recorder) takeSeason() []scale.Arrivals {
	taken := r.season.closed
	r.season.closed = nil
	return taken
}

// bucketed is what is recent by now, as scale.History.Recent is. It is good until the next call.
func (r *recorder) bucketed(now time.Time) []scale.Arrivals {
	r.advance(now)
	r.buckets = scale.Buckets(r.buckets[:0], r.recent.closed)
	return r.buckets
}
