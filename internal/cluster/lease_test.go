package cluster_test

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/millrace/millrace/internal/cluster"
)

// reign is one call of a leader's function: from its start until its context ended.
type reign struct {
	who        int
	epoch      uint64
	start, end time.Time
}

// contender seeks a lease and keeps the reigns it had.
type contender struct {
	who    int
	c      *cluster.Cluster
	reigns chan<- reign // what ended
	leads  chan<- int   // who begins to lead
}

// run contends until ctx ends.
func (c contender) run(t *testing.T, ctx context.Context) {
	t.Helper()
	if err := c.c.Lead(ctx, "boss", func(ctx context.Context, epoch uint64) {
		r := reign{who: c.who, epoch: epoch, start: time.Now()}
		c.leads <- c.who
		<-ctx.Done()
		r.end = time.Now()
		c.reigns <- r
	}); err != nil {
		t.Error(err)
	}
}

func TestTwoLeadersNeverOverlap(t *testing.T) {
	t.Parallel()
	const contenders = 5
	n := newServer(t)
	reigns, leads := make(chan reign, 1000), make(chan int, 1000)
	gates := make([]*gate, contenders)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for i := range contenders {
		gates[i] = &gate{server: n}
		c := contender{who: i, c: open(t, connect(t, gates[i]), cluster.Config{}), reigns: reigns, leads: leads}
		wg.Go(func() { c.run(t, ctx) })
	}
	next := func() int {
		select {
		case who := <-leads:
			return who
		case <-time.After(30 * time.Second):
			t.Error("nobody leads")
			cancel()
			return 0
		}
	}
	// A leader whose line hangs loses its trust, and another follows.
	for range 2 {
		who := next()
		gates[who].hang()
		defer gates[who].open()
	}
	// A server that is away for longer than a lease ends the reign; whoever follows, follows.
	next()
	n.stop()
	<-time.After(3500 * time.Millisecond)
	n.start(t)
	next()
	// A short restart need not end it; the lease itself survives it.
	n.stop()
	n.start(t)
	<-time.After(1500 * time.Millisecond)
	for _, g := range gates {
		g.open()
	}
	cancel()
	wg.Wait()
	close(reigns)

	var all []reign
	for r := range reigns {
		all = append(all, r)
	}
	slices.SortFunc(all, func(a, b reign) int { return a.start.Compare(b.start) })
	for i := 1; i < len(all); i++ {
		before, after := all[i-1], all[i]
		if after.start.Before(before.end) {
			t.Errorf("%d began to lead %s before the end of %d", after.who, before.end.Sub(after.start), before.who)
		}
		if cmp.Compare(after.epoch, before.epoch) <= 0 {
			t.Errorf("epoch %d follows %d", after.epoch, before.epoch)
		}
	}
	if len(all) < 4 {
		t.Errorf("only %d reigns", len(all))
	}
}

func TestARenewalThatHangsDoesNotProlongTheReign(t *testing.T) {
	t.Parallel()
	g := &gate{server: newServer(t)}
	reigns, leads := make(chan reign, 10), make(chan int, 10)
	c := contender{c: open(t, connect(t, g), cluster.Config{}), reigns: reigns, leads: leads}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { c.run(t, ctx) })
	defer func() { cancel(); wg.Wait() }()

	<-leads
	// Several renewals succeed: the reign outlasts one trust.
	select {
	case r := <-reigns:
		t.Fatalf("it ended after %s", r.end.Sub(r.start))
	case <-time.After(2500 * time.Millisecond):
	}
	hung := time.Now()
	g.hang()
	first := <-reigns
	if d := first.end.Sub(hung); d > 2500*time.Millisecond {
		t.Errorf("it went on for %s after the last answer", d)
	}
	g.open()
	<-leads
	cancel()
	if second := <-reigns; second.epoch <= first.epoch {
		t.Errorf("epoch %d follows %d", second.epoch, first.epoch)
	}
}

func TestALeaderThatStopsHandsOverAtOnce(t *testing.T) {
	t.Parallel()
	n := newServer(t)
	reigns, leads := make(chan reign, 10), make(chan int, 10)
	var wg sync.WaitGroup
	a, stopA := context.WithCancel(t.Context())
	b, stopB := context.WithCancel(t.Context())
	defer func() { stopA(); stopB(); wg.Wait() }()

	first := open(t, connect(t, n), cluster.Config{})
	tidied := make(chan time.Time, 1)
	wg.Go(func() {
		_ = first.Lead(a, "boss", func(ctx context.Context, _ uint64) {
			leads <- 0
			<-ctx.Done()
			<-time.After(2500 * time.Millisecond) // longer than an unrenewed lease is trusted
			tidied <- time.Now()
		})
	})
	<-leads
	second := contender{who: 1, c: open(t, connect(t, n), cluster.Config{}), reigns: reigns, leads: leads}
	wg.Go(func() { second.run(t, b) })
	stopA()
	<-leads
	began := time.Now()
	select {
	case end := <-tidied:
		if d := began.Sub(end); d > 2*time.Second {
			t.Errorf("the successor began %s after the release: it waited for the lease to be forgotten", d)
		}
	default:
		t.Error("the successor began while the leader before was tidying up")
	}
}

func TestEpochsRiseAcrossTheLossOfTheBucket(t *testing.T) {
	t.Parallel()
	n := newServer(t)
	nc := connect(t, n)
	reigns, leads := make(chan reign, 10), make(chan int, 10)
	c := contender{c: open(t, nc, cluster.Config{}), reigns: reigns, leads: leads}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { c.run(t, ctx) })
	defer func() { cancel(); wg.Wait() }()
	<-leads
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	if err := js.DeleteKeyValue(t.Context(), "leases"); err != nil {
		t.Fatal(err)
	}
	first := <-reigns
	<-leads
	cancel()
	if second := <-reigns; second.epoch <= first.epoch {
		t.Errorf("epoch %d follows %d", second.epoch, first.epoch)
	}
}

func TestALeaseNeedsAPlainName(t *testing.T) {
	t.Parallel()
	c := open(t, connect(t, newServer(t)), cluster.Config{})
	for _, name := range []string{"", "a.b", "a b", "é"} {
		if err := c.Lead(t.Context(), name, nil); err == nil {
			t.Errorf("%q is accepted", name)
		}
	}
}
