package scale_test

import (
	"testing"
	"time"

	"github.com/millrace/millrace/internal/scale"
)

var midday = time.Date(2026, 3, 2, 12, 0, 0, 0, time.UTC)

func TestWantedReachesBackAsFarAsAsked(t *testing.T) {
	t.Parallel()
	var m scale.Memory
	for i := range 100 {
		m.Decided(midday.Add(time.Duration(i)*time.Second), i, 0, 10*time.Second)
	}
	wanted := m.History(nil, nil).Wanted
	if first := wanted[0]; first.N != 89 || len(wanted) != 11 {
		t.Errorf("%d from %d", len(wanted), first.N)
	}
}
