package dispatcher

import (
	"math"
	"testing"
	"time"

	"github.com/millrace/millrace/internal/job"
)

// TestPaceIsMeasuredWhileWorkWaits: what a model does with room to spare is the least that it could do.
func TestPaceIsMeasuredWhileWorkWaits(t *testing.T) {
	t.Parallel()
	var p pace
	now := time.Unix(1_800_000_000, 0)
	run := func(d time.Duration, rate job.Tokens, full bool) {
		for end := now.Add(d); now.Before(end); {
			now = now.Add(100 * time.Millisecond)
			p.ended(rate / 10)
			p.sample(now, full)
		}
	}
	near := func(want float64) {
		t.Helper()
		if math.Abs(p.rate-want) > 0.05*want {
			t.Errorf("the rate is %.0f, want %.0f", p.rate, want)
		}
	}
	p.sample(now, false)
	run(5*time.Second, 1000, true)
	near(1000)
	run(time.Minute, 4000, true)
	near(4000)
	run(time.Minute, 500, false)
	near(4000)
	run(time.Minute, 6000, false)
	near(6000)
	run(time.Minute, 2000, true)
	near(2000)
	// Nothing ends while it hangs, and then what was missed does not count as fast work.
	now = now.Add(20 * time.Second)
	p.sample(now, true)
	p.ended(2000)
	p.sample(now, true)
	if p.rate > 2000 {
		t.Errorf("the rate is %.0f", p.rate)
	}
}

// TestWhatWaitsIsWhatWasFedLast: large jobs that are fed behind small ones, and more than are remembered.
func TestWhatWaitsIsWhatWasFedLast(t *testing.T) {
	t.Parallel()
	var s sizes
	if got := s.of(3); got != 3*firstGuess {
		t.Errorf("three unknown jobs are %d tokens", got)
	}
	for range 10 {
		s.add(100)
	}
	s.add(8000)
	for n, want := range map[int]job.Tokens{-1: 0, 0: 0, 1: 8000, 3: 8200, 11: 9000, 13: 9000 + 2*(9000/11)} {
		if got := s.of(n); got != want {
			t.Errorf("%d jobs are %d tokens, want %d", n, got, want)
		}
	}
	for range mostSizes {
		s.add(10)
	}
	s.add(500)
	if got := s.of(2); got != 510 || len(s.last) != mostSizes || s.sum != 500+10*(mostSizes-1) {
		t.Errorf("two jobs are %d tokens, of %d that are %d", got, len(s.last), s.sum)
	}
}
