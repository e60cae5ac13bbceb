package scaling

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/scale"
)

var midday = time.Date(2026, 3, 2, 12, 0, 0, 0, time.UTC)

func cameIn(n int, tokens job.Tokens) scale.Amount { return scale.Amount{Jobs: n, Tokens: tokens} }

func TestRecentArrivalsHaveNoGaps(t *testing.T) {
	t.Parallel()
	var r recorder
	r.arrive(midday, cameIn(1, 10), 100)
	r.arrive(midday.Add(4*time.Second), cameIn(2, 30), 500)
	want := []scale.Arrivals{
		{Start: midday, Amount: cameIn(3, 40), Squares: 600}, {Start: midday.Add(5 * time.Second)}, {Start: midday.Add(10 * time.Second)},
	}
	if diff := cmp.Diff(want, r.bucketed(midday.Add(15*time.Second))); diff != "" {
		t.Error(diff)
	}
	r.arrive(midday.Add(16*time.Second), cameIn(1, 5), 25)
	last := r.bucketed(midday.Add(18 * time.Second)) // the last entry ends now, whenever that is
	if diff := cmp.Diff(scale.Arrivals{Start: midday.Add(13 * time.Second), Amount: cameIn(1, 5), Squares: 25}, last[len(last)-1]); diff != "" {
		t.Error(diff)
	}
}

func TestRecentArrivalsReachBackTenMinutes(t *testing.T) {
	t.Parallel()
	var r recorder
	for i := range 1000 {
		r.arrive(midday.Add(time.Duration(i)*time.Second), cameIn(1, 1), 1)
	}
	recent := r.bucketed(midday.Add(1000 * time.Second))
	if len(recent) != 120 || !recent[0].Start.Equal(midday.Add(400*time.Second)) || recent[119].Jobs != 5 {
		t.Errorf("%d entries from %s, the last %+v", len(recent), recent[0].Start, recent[len(recent)-1])
	}
}

func TestABucketSeenInPartIsNotTakenForAQuietOne(t *testing.T) {
	t.Parallel()
	var r recorder
	begun := midday.Add(3 * time.Second)
	r.arrive(begun, cameIn(1, 1), 1)
	if recent := r.bucketed(midday.Add(12 * time.Second)); len(recent) != 1 || !recent[0].Start.Equal(midday.Add(7*time.Second)) {
		t.Errorf("recent is %+v", recent)
	}
	for at := begun; at.Before(midday.Add(11 * time.Minute)); at = at.Add(time.Second) {
		r.advance(at)
	}
	if taken := r.takeSeason(); len(taken) != 1 || !taken[0].Start.Equal(midday.Add(5*time.Minute)) {
		t.Errorf("season is %+v", taken)
	}
}

func TestASilenceIsNotTakenForQuiet(t *testing.T) {
	t.Parallel()
	var r recorder
	r.arrive(midday, cameIn(1, 1), 1)
	r.advance(midday.Add(10 * time.Second))
	again := midday.Add(20 * time.Minute)
	r.advance(again)
	r.advance(again.Add(5 * time.Second))
	if recent := r.bucketed(again.Add(5 * time.Second)); len(recent) != 1 || !recent[0].Start.Equal(again) {
		t.Errorf("recent is %+v", recent)
	}
	if taken := r.takeSeason(); len(taken) != 0 {
		t.Errorf("season is %+v", taken)
	}
}

func TestSeasonIsTakenOnce(t *testing.T) {
	t.Parallel()
	var r recorder
	for at := midday; !at.After(midday.Add(10 * time.Minute)); at = at.Add(30 * time.Second) {
		r.arrive(at, cameIn(1, 2), 4)
	}
	want := []scale.Arrivals{{Start: midday, Amount: cameIn(10, 20), Squares: 40}, {Start: midday.Add(5 * time.Minute), Amount: cameIn(10, 20), Squares: 40}}
	if diff := cmp.Diff(want, r.takeSeason()); diff != "" {
		t.Error(diff)
	}
	if again := r.takeSeason(); len(again) != 0 {
		t.Errorf("taken again: %+v", again)
	}
}
