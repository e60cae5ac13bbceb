package schedule

import (
	"math"
	"time"
)

// supply learns how many jobs are on their way at once where the way is long: what the queue delivers in the time of a round trip would wait there if each pull brought one job.
type supply struct {
	rate float64   // deliveries a second, over about the last second
	at   time.Time // of the last one
	// trip is the least time in seconds from a pull to its first delivery: of the last window of pulls, and of the one at hand, of which so many have been seen. Longer ones waited for a job.
	trip, least float64
	seen        int
}

// tripWindow is how many pulls are looked at for the least time.
const tripWindow = 16

// shortTrip is a round trip in seconds that bounds nothing.
const shortTrip = 0.005

func (u *supply) delivered(now time.Time) {
	u.rate = u.perSecond(now) + 1
	u.at = now
}

func (u *supply) perSecond(now time.Time) float64 {
	if u.at.IsZero() {
		return 0
	}
	return u.rate * math.Exp(-now.Sub(u.at).Seconds())
}

func (u *supply) took(d time.Duration) {
	if s := d.Seconds(); u.seen == 0 || s < u.least {
		u.least = s
	}
	if u.seen++; u.seen == tripWindow {
		u.trip, u.seen = u.least, 0
	}
}

// onTheWay is how many jobs a pull must bring so that as many come as now, and a third more.
func (u *supply) onTheWay(now time.Time) int {
	if u.trip < shortTrip {
		return 1
	}
	return int(math.Ceil(4.0 / 3 * u.perSecond(now) * u.trip))
}
