package scale_test

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
	var m scale.Memory
	m.Arrive(midday, cameIn(1, 10), 100)
	m.Arrive(midday.Add(4*time.Second), cameIn(2, 30), 500)
	want := []scale.Arrivals{
		{Start: midday, Amount: cameIn(3, 40), Squares: 600, Spread: 1.6}, {Start: midday.Add(5 * time.Second)}, {Start: midday.Add(10 * time.Second)},
	}
	if diff := cmp.Diff(want, m.History(midday.Add(15*time.Second), nil).Recent); diff != "" {
		t.Error(diff)
	}
	m.Arrive(midday.Add(16*time.Second), cameIn(1, 5), 25)
	last := m.History(midday.Add(18*time.Second), nil).Recent // the last entry ends now, whenever that is
	if diff := cmp.Diff(scale.Arrivals{Start: midday.Add(13 * time.Second), Amount: cameIn(1, 5), Squares: 25, Spread: 1}, last[len(last)-1]); diff != "" {
		t.Error(diff)
	}
}

func TestRecentArrivalsReachBackTenMinutes(t *testing.T) {
	t.Parallel()
	var m scale.Memory
	for i := range 1000 {
		m.Arrive(midday.Add(time.Duration(i)*time.Second), cameIn(1, 1), 1)
	}
	recent := m.History(midday.Add(1000*time.Second), nil).Recent
	if len(recent) != 120 || !recent[0].Start.Equal(midday.Add(400*time.Second)) || recent[119].Jobs != 5 {
		t.Errorf("%d entries from %s, the last %+v", len(recent), recent[0].Start, recent[len(recent)-1])
	}
}

func TestABucketSeenInPartIsNotTakenForAQuietOne(t *testing.T) {
	t.Parallel()
	var m scale.Memory
	begun := midday.Add(3 * time.Second)
	m.Arrive(begun, cameIn(1, 1), 1)
	if h := m.History(midday.Add(12*time.Second), nil); len(h.Recent) != 1 || !h.Recent[0].Start.Equal(midday.Add(7*time.Second)) {
		t.Errorf("recent is %+v", h.Recent)
	}
	for at := begun; at.Before(midday.Add(11 * time.Minute)); at = at.Add(time.Second) {
		m.Advance(at)
	}
	if taken := m.TakeSeason(); len(taken) != 1 || !taken[0].Start.Equal(midday.Add(5*time.Minute)) {
		t.Errorf("season is %+v", taken)
	}
}

func TestASilenceIsNotTakenForQuiet(t *testing.T) {
	t.Parallel()
	var m scale.Memory
	m.Arrive(midday, cameIn(1, 1), 1)
	m.Advance(midday.Add(10 * time.Second))
	again := midday.Add(20 * time.Minute)
	m.Advance(again)
	m.Advance(again.Add(5 * time.Second))
	if h := m.History(again.Add(5*time.Second), nil); len(h.Recent) != 1 || !h.Recent[0].Start.Equal(again) {
		t.Errorf("recent is %+v", h.Recent)
	}
	if taken := m.TakeSeason(); len(taken) != 0 {
		t.Errorf("season is %+v", taken)
	}
}

func TestSeasonIsTakenOnce(t *testing.T) {
	t.Parallel()
	var m scale.Memory
	for at := midday; !at.After(midday.Add(10 * time.Minute)); at = at.Add(30 * time.Second) {
		m.Arrive(at, cameIn(1, 2), 4)
	}
	want := []scale.Arrivals{{Start: midday, Amount: cameIn(10, 20), Squares: 40}, {Start: midday.Add(5 * time.Minute), Amount: cameIn(10, 20), Squares: 40}}
	if diff := cmp.Diff(want, m.TakeSeason()); diff != "" {
		t.Error(diff)
	}
	if again := m.TakeSeason(); len(again) != 0 {
		t.Errorf("taken again: %+v", again)
	}
}

func TestWantedReachesBackAsFarAsAsked(t *testing.T) {
	t.Parallel()
	var m scale.Memory
	for i := range 100 {
		m.Decided(midday.Add(time.Duration(i)*time.Second), i, 0, 10*time.Second)
	}
	wanted := m.History(midday.Add(99*time.Second), nil).Wanted
	if first := wanted[0]; first.N != 89 || len(wanted) != 11 {
		t.Errorf("%d from %d", len(wanted), first.N)
	}
}
