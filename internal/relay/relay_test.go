package relay_test

import (
	"context"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"go.uber.org/goleak"

	"github.com/millrace/millrace/internal/embedded"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/relay"
	"github.com/millrace/millrace/internal/testenv"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, testenv.NATSLeaves()...) }

// server is a NATS server that can be stopped and started again, and that connections find again.
type server struct {
	dir string
	mu  sync.Mutex
	n   *embedded.NATS
}

func newServer(t testing.TB) *server {
	t.Helper()
	s := &server{dir: t.TempDir()}
	s.start(t)
	t.Cleanup(s.stop)
	return s
}

func (s *server) start(t testing.TB) {
	t.Helper()
	n, err := embedded.StartNATS(embedded.NATSConfig{Dir: s.dir, StoreLimit: testenv.Ample, MemoryLimit: testenv.Ample, Log: testenv.Log(t)})
	if err != nil {
		t.Fatal(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.n = n
}

func (s *server) stop() {
	s.mu.Lock()
	n := s.n
	s.n = nil
	s.mu.Unlock()
	if n != nil {
		n.Shutdown()
	}
}

func (s *server) InProcessConn() (net.Conn, error) {
	s.mu.Lock()
	n := s.n
	s.mu.Unlock()
	if n == nil {
		return nil, net.ErrClosed
	}
	return n.InProcessConn()
}

func connect(t testing.TB, s *server) *nats.Conn {
	t.Helper()
	nc, err := nats.Connect("", nats.InProcessServer(s), nats.ReconnectBufSize(-1), nats.MaxReconnects(-1), nats.ReconnectWait(10*time.Millisecond), nats.Timeout(20*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	return nc
}

func newRelay(t testing.TB, s *server) *relay.Relay {
	t.Helper()
	return relay.New(connect(t, s), testenv.Log(t))
}

// within fails the test if nothing comes from ch for long.
func within[T any](t testing.TB, what string, ch <-chan T) (v T) {
	t.Helper()
	select {
	case v = <-ch:
	case <-time.After(20 * time.Second):
		t.Fatalf("in vain waited for %s", what)
	}
	return v
}

func TestABellReachesEveryWatcherOfItsJobAlone(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	ringer, watcher := newRelay(t, s), newRelay(t, s)
	id, other := job.NewID(time.Now()), job.NewID(time.Now())
	for range 3 { // also after all watchers of a job have gone
		a, endA := watcher.Watch(id)
		b, endB := watcher.Watch(id)
		c, endC := watcher.Watch(other)
		ringer.Bell(id)
		within(t, "the first watcher's bell", a)
		within(t, "the second watcher's bell", b)
		endA()
		endA()
		ringer.Bell(id)
		within(t, "the bell of the watcher that is left", b)
		ringer.Bell(other)
		within(t, "the other job's bell", c)
		select {
		case <-a:
			t.Error("a watch that has ended was rung")
		case <-b:
			t.Error("rung by another job's bell, or twice")
		default:
		}
		endB()
		endC()
	}
}

func TestWatchesOutliveARestartOfNATS(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	ringer, watcher := newRelay(t, s), newRelay(t, s)
	id := job.NewID(time.Now())
	bell, end := watcher.Watch(id)
	defer end()
	s.stop()
	ringer.Bell(id) // lost, which is allowed
	late, endLate := watcher.Watch("job_late")
	defer endLate()
	s.start(t)
	for _, w := range []struct {
		id job.ID
		ch <-chan struct{}
	}{{id, bell}, {"job_late", late}} {
		for deadline := time.Now().Add(20 * time.Second); ; {
			ringer.Bell(w.id)
			select {
			case <-w.ch:
			case <-time.After(10 * time.Millisecond):
				if time.Now().After(deadline) {
					t.Fatalf("no bell of %s after the restart", w.id)
				}
				continue
			}
			break
		}
	}
}

func TestCancelsAndEndsAreHeardUntilTheContextEnds(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	from, to := newRelay(t, s), newRelay(t, s)
	ctx, cancel := context.WithCancel(t.Context())
	cancelled, ended := make(chan job.ID, 10), make(chan job.Model, 10)
	if err := to.OnCancel(ctx, func(id job.ID) { cancelled <- id }); err != nil {
		t.Fatal(err)
	}
	if err := to.OnEnded(ctx, func(m job.Model) { ended <- m }); err != nil {
		t.Fatal(err)
	}
	nudged := make(chan bool, 10)
	if err := to.OnNudge(ctx, func() { nudged <- true }); err != nil {
		t.Fatal(err)
	}
	from.Cancel("job_1")
	from.Nudge()
	within(t, "the nudge", nudged)
	from.Ended("org/Model 7B:latest")
	if id := within(t, "the cancel", cancelled); id != "job_1" {
		t.Errorf("cancelled %q", id)
	}
	if m := within(t, "the end", ended); m != "org/Model 7B:latest" {
		t.Errorf("ended %q", m)
	}
	cancel()
	from.Cancel("job_2")
	other := make(chan job.ID, 10)
	if err := to.OnCancel(t.Context(), func(id job.ID) { other <- id }); err != nil {
		t.Fatal(err)
	}
	from.Cancel("job_3")
	within(t, "the later cancel", other)
	if len(cancelled) != 0 {
		t.Error("heard after the context's end")
	}
}

func BenchmarkBell(b *testing.B) {
	s := newServer(b)
	ringer, watcher := newRelay(b, s), newRelay(b, s)
	id := job.NewID(time.Now())
	bell, end := watcher.Watch(id)
	defer end()
	for b.Loop() {
		ringer.Bell(id)
		<-bell
	}
}

func BenchmarkBellThatNobodyWatches(b *testing.B) {
	r := newRelay(b, newServer(b))
	ids := make([]job.ID, 1000)
	for i := range ids {
		ids[i] = job.ID(fmt.Sprintf("job_%036d", i))
	}
	n := 0
	for b.Loop() {
		r.Bell(ids[n%len(ids)])
		n++
	}
}
