package relay_test

import (
	"testing"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/relay"
)

func TestWaitingLinesAreHeard(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	from, to := newRelay(t, s), newRelay(t, s)
	heard := make(chan relay.Lined, 10)
	if err := to.OnLined(t.Context(), func(l relay.Lined) { heard <- l }); err != nil {
		t.Fatal(err)
	}
	want := relay.Lined{Model: "org/Model 7B:latest", Tenant: "a.b > c", Class: job.Batch}
	from.Lined(want)
	if got := within(t, "the line", heard); got != want {
		t.Errorf("heard %+v", got)
	}
}
