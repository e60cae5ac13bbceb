package scale

import "time"

// recentFor is how much of the arrivals History.Recent holds. silent is how long nobody may have called a Memory for what it holds to be still without gaps: a process that stood still that long knows nothing of the time.
const (
	recentFor = 10 * time.Minute
	silent    = time.Minute
)

// Memory keeps what becomes the History of one pool's decisions. The zero value remembers nothing yet. It is not safe for concurrent use. What comes with an earlier time than a call before counts into the bucket that is open.
type Memory struct {
	recent, season series     // by second, and by SeasonBucket
	buckets        []Arrivals // made of recent
	last           time.Time  // of the last Advance
	wanted         []Wanted
	asked          time.Time
}

// series is arrivals in buckets.
type series struct {
	open   Arrivals
	cut    bool // the open one was not seen from its start
	closed []Arrivals
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
		s.open, s.cut = Arrivals{Start: end}, false
	}
}

func (s *series) add(a Amount, squares float64) {
	s.open.Jobs += a.Jobs
	s.open.Tokens += a.Tokens
	s.open.Squares += squares
}

// Advance closes the buckets that have ended by now, empty ones among them. A bucket that was not seen in whole is left out, so that it is not taken for a quiet one. After a minute without a call, what is recent begins anew.
func (m *Memory) Advance(now time.Time) {
	if !m.last.IsZero() && now.Sub(m.last) > silent {
		m.recent, m.season.open = series{}, Arrivals{}
	}
	m.recent.advance(now, time.Second)
	if over := len(m.recent.closed) - int(recentFor/time.Second); over > 0 {
		m.recent.closed = m.recent.closed[over:]
	}
	m.season.advance(now, SeasonBucket)
	m.last = now
}

// Arrive adds what came in at a time: one job, or all that did since the last call, the squares of whose tokens add up to squares.
func (m *Memory) Arrive(at time.Time, a Amount, squares float64) {
	m.Advance(at)
	m.recent.add(a, squares)
	m.season.add(a, squares)
}

// Asked notes that there was demand at a time.
func (m *Memory) Asked(at time.Time) { m.asked = at }

// Decided notes how many were needed and which trend was seen, and forgets what is older than keep, but for the last one before: it says what was wanted when that time began.
func (m *Memory) Decided(at time.Time, needed int, trend float64, keep time.Duration) {
	if n := len(m.wanted); n == 0 || at.Sub(m.wanted[n-1].At) > silent { // what was before is not known, and no time in which nothing was asked
		m.wanted = nil
		if m.asked.Before(at) {
			m.asked = at
		}
	}
	m.wanted = append(m.wanted, Wanted{At: at, N: needed, Trend: trend})
	for len(m.wanted) > 1 && at.Sub(m.wanted[1].At) >= keep {
		m.wanted = m.wanted[1:]
	}
}

// TakeSeason returns the arrivals of each SeasonBucket that has ended since the last call, to be recorded for Learn.
func (m *Memory) TakeSeason() []Arrivals {
	taken := m.season.closed
	m.season.closed = nil
	return taken
}

// History is what is remembered now, beside what was learned of hours and weekdays. Its slices are the Memory's own: they are good until the next call of one of its methods.
func (m *Memory) History(now time.Time, season *Season) History {
	m.Advance(now)
	h := m.Past(season)
	h.Recent = m.bucketed()
	return h
}

// Past is the same without what is recent, for whoever knows of arrivals from elsewhere and calls neither Arrive nor Advance.
func (m *Memory) Past(season *Season) History {
	return History{Season: season, Wanted: m.wanted, LastDemand: m.asked}
}

// bucketed is what is recent in buckets.
func (m *Memory) bucketed() []Arrivals {
	m.buckets = Buckets(m.buckets[:0], m.recent.closed)
	return m.buckets
}

// Buckets appends to list what came in each [Bucket] of some seconds, which have no gaps. The last one ends with the last second: so a change is seen as soon as it has lasted a bucket, whenever it begins. What does not fill a
// bucket at the beginning is left out.
func Buckets(list, seconds []Arrivals) []Arrivals {
	const long = int(Bucket / time.Second)
	for seconds = seconds[len(seconds)%long:]; len(seconds) > 0; seconds = seconds[long:] {
		b := Arrivals{Start: seconds[0].Start}
		var squares float64 // of the seconds' tokens
		for _, s := range seconds[:long] {
			b.Jobs += s.Jobs
			b.Tokens += s.Tokens
			b.Squares += s.Squares
			squares += float64(s.Tokens) * float64(s.Tokens)
		}
		if squares > 0 {
			b.Spread = float64(b.Tokens) * float64(b.Tokens) / squares
		}
		list = append(list, b)
	}
	return list
}
