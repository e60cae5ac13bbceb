package scale

import "time"

// silent is for how long no decision may have been noted until nobody knows what was needed meanwhile.
const silent = time.Minute

// Memory keeps what becomes the History of one pool's decisions. The zero value remembers nothing yet. It is not safe for concurrent use.
type Memory struct {
	wanted []Wanted
	asked  time.Time
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

// History is what is remembered, beside the arrivals of late and what was learned of hours and weekdays. What it has of wanted workers is good until the next decision is noted.
func (m *Memory) History(recent []Arrivals, season *Season) History {
	return History{Recent: recent, Season: season, Wanted: m.wanted, LastDemand: m.asked}
}

// Buckets appends to list what came in each [Bucket] of some seconds, which have no gaps. The last one ends with the last second: so a change is seen as soon as it has lasted a bucket, whenever it begins. What does not fill a
// bucket at the beginning is left out.
func Buckets(list, seconds []Arrivals) []Arrivals {
	const long = int(Bucket / time.Second)
	heaped := heaps(seconds)
	for i := len(seconds) % long; i < len(seconds); i += long {
		b := Arrivals{Start: seconds[i].Start}
		for k := i; k < i+long; k++ {
			b.Jobs += seconds[k].Jobs
			b.Tokens += seconds[k].Tokens
			b.Squares += seconds[k].Squares
			b.Heaped += heaped[k]
		}
		list = append(list, b)
	}
	return list
}
