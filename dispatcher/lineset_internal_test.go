package dispatcher

import "testing"

func TestLineSetHoldsWhatIsAdded(t *testing.T) {
	t.Parallel()
	var s lineSet
	lines := []int64{1, 63, 64, 65, linePage - 1, linePage, linePage + 1, 200_000_000}
	for _, l := range lines {
		if s.has(l) || !s.add(l) || s.add(l) || !s.has(l) {
			t.Errorf("line %d is not held once", l)
		}
	}
	if s.n != int64(len(lines)) || len(s.pages) != 3 || s.has(2) || s.has(0) {
		t.Errorf("%d lines on %d pages", s.n, len(s.pages))
	}
}
