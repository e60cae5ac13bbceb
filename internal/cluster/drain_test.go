package cluster_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/millrace/millrace/internal/cluster"
)

func TestAnOrderToDrainReachesOneWorker(t *testing.T) {
	t.Parallel()
	n := newServer(t)
	far, here := open(t, connect(t, n), quick), open(t, connect(t, n), quick)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	told, limits := make(chan string, 4), make(chan time.Duration, 4)
	for _, id := range []string{"w.1 *", "w2"} {
		if err := far.OnDrain(ctx, id, func(limit time.Duration) { limits <- limit; told <- id }); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 { // an order may be repeated
		if err := here.OrderDrain(t.Context(), "w.1 *"); err != nil {
			t.Fatal(err)
		}
		if got, limit := <-told, <-limits; got != "w.1 *" || limit != 0 {
			t.Errorf("%s was told, with the limit %s", got, limit)
		}
	}
	if err := here.OrderDrainWithin(t.Context(), "w2", 90*time.Second); err != nil {
		t.Fatal(err)
	}
	if got, limit := <-told, <-limits; got != "w2" || limit != 90*time.Second {
		t.Errorf("%s was told, with the limit %s", got, limit)
	}
	if err := here.OrderDrain(t.Context(), "w3"); !errors.Is(err, cluster.ErrNobody) {
		t.Errorf("one that is not there: %v", err)
	}
	stop()
	eventually(t, "the worker listens no more", func() bool { return errors.Is(here.OrderDrain(t.Context(), "w2"), cluster.ErrNobody) })
}

// TestAnOrderThatNobodyAnswersInTimeIsAnError: the worker's machine may have frozen.
func TestAnOrderThatNobodyAnswersInTimeIsAnError(t *testing.T) {
	t.Parallel()
	n := newServer(t)
	line := &gate{server: n}
	far, here := open(t, connect(t, line), quick), open(t, connect(t, n), quick)
	if err := far.OnDrain(t.Context(), "w", func(time.Duration) {}); err != nil {
		t.Fatal(err)
	}
	line.hang()
	defer line.open()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := here.OrderDrain(ctx, "w"); !errors.Is(err, cluster.ErrNobody) {
		t.Errorf("%v", err)
	}
}
