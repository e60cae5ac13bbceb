package scale

import (
	"math"
	"time"
)

// SeasonBucket is how long one entry of recorded arrivals lasts.
const SeasonBucket = 5 * time.Minute

const (
	perDay = int(24 * time.Hour / SeasonBucket)
	// seasonDays is how many of the latest days of a kind count, the newest most.
	seasonDays = 4
	// seasonMemory is the weight of a day against the one of the same kind before it.
	seasonMemory = 0.6
	// seasonTrust bounds how much more than usual a day may promise because it was busier than usual so far.
	seasonTrust = 1.5
)

// Season is what was learned of how arrivals go by hour and weekday: a rate in tokens per second for each five minutes of each weekday. A weekday of which nothing is known yet goes as the days of its kind (working day or
// weekend), and these as any day. It is not changed after it was learned.
type Season struct {
	zone *time.Location
	rate [7][perDay]float64 // by weekday; NaN is unknown
}

// Learn makes a Season of recorded arrivals, each SeasonBucket long, the oldest first; gaps are times of which nothing is known. Hours and weekdays are those of zone.
func Learn(recorded []Arrivals, now time.Time, zone *time.Location) *Season {
	s := &Season{zone: zone}
	// The latest days count most: walking back, each weight is what a day of that kind has left.
	var sums, weights [10][perDay]float64 // seven weekdays, working days, weekends, all
	var days [10][perDay]int
	for i := len(recorded) - 1; i >= 0; i-- {
		a := recorded[i]
		if a.Start.Add(SeasonBucket).After(now) {
			continue // not full yet
		}
		t := a.Start.In(zone)
		at, day := bucketOf(t), t.Weekday()
		rate := float64(a.Tokens) / SeasonBucket.Seconds()
		for _, kind := range []int{int(day), kindOf(day), anyDay} {
			if n := days[kind][at]; n < seasonDays {
				w := math.Pow(seasonMemory, float64(n))
				sums[kind][at] += w * rate
				weights[kind][at] += w
				days[kind][at]++
			}
		}
	}
	for day := range s.rate {
		for at := range s.rate[day] {
			s.rate[day][at] = math.NaN()
			for _, kind := range []int{day, kindOf(time.Weekday(day)), anyDay} {
				if weights[kind][at] > 0 {
					s.rate[day][at] = sums[kind][at] / weights[kind][at]
					break
				}
			}
		}
	}
	return s
}

// The kinds of days behind the seven weekdays.
const (
	workingDay = 7
	weekend    = 8
	anyDay     = 9
)

func kindOf(d time.Weekday) int {
	if d == time.Saturday || d == time.Sunday {
		return weekend
	}
	return workingDay
}

func bucketOf(t time.Time) int {
	return min((t.Hour()*60+t.Minute())/int(SeasonBucket/time.Minute), perDay-1)
}

// at is the usual rate at t in tokens per second; false if nothing is known of that time.
func (s *Season) at(t time.Time) (float64, bool) {
	t = t.In(s.zone)
	r := s.rate[t.Weekday()][bucketOf(t)]
	return r, !math.IsNaN(r)
}

// forecast is the highest rate that is usual from now until ahead, by how this day went so far: one that has stayed behind what is usual promises less. 0 if nothing is known.
func (s *Season) forecast(now time.Time, ahead time.Duration, recent []Arrivals) float64 {
	if s == nil {
		return 0
	}
	highest := 0.0
	for t := now; ; t = t.Add(SeasonBucket) {
		last := !t.Before(now.Add(ahead))
		if last {
			t = now.Add(ahead)
		}
		if r, ok := s.at(t); ok {
			highest = max(highest, r)
		}
		if last {
			break
		}
	}
	if highest == 0 {
		return 0
	}
	// What was usual while the recent arrivals came, against them.
	var usual, came float64
	for _, a := range recent {
		if r, ok := s.at(a.Start); ok {
			usual += r * Bucket.Seconds()
			came += float64(a.Tokens)
		}
	}
	prior := highest * 60 // a minute's worth of benefit of the doubt
	return highest * min((came+prior)/(usual+prior), seasonTrust)
}
