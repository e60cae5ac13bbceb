package cluster_test

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/embedded"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/testenv"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, testenv.NATSLeaves()...) }

// quick has short periods that a loaded machine still keeps.
var quick = cluster.Config{Beat: 100 * time.Millisecond, Silence: time.Second}

// server is a NATS server that can be stopped and started again on its store, and that connections find again.
type server struct {
	dir string
	mu  sync.Mutex
	n   *embedded.NATS
}

func newServer(t *testing.T) *server {
	t.Helper()
	s := &server{dir: t.TempDir()}
	s.start(t)
	t.Cleanup(s.stop)
	return s
}

func (s *server) start(t *testing.T) {
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

// gate is a line to a server that can hang: what the server says is then held back, while what it hears gets through.
type gate struct {
	*server
	mu   sync.Mutex
	hung chan struct{} // nil while open
}

func (g *gate) hang() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.hung = make(chan struct{})
}

func (g *gate) open() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.hung != nil {
		close(g.hung)
		g.hung = nil
	}
}

func (g *gate) InProcessConn() (net.Conn, error) {
	c, err := g.server.InProcessConn()
	if err != nil {
		return nil, err
	}
	return &gateConn{Conn: c, gate: g, closed: make(chan struct{})}, nil
}

type gateConn struct {
	net.Conn
	gate   *gate
	once   sync.Once
	closed chan struct{}
}

func (c *gateConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.gate.mu.Lock()
	hung := c.gate.hung
	c.gate.mu.Unlock()
	if hung != nil {
		select {
		case <-hung:
		case <-c.closed:
		}
	}
	return n, err
}

func (c *gateConn) Close() error {
	c.once.Do(func() { close(c.closed) })
	return c.Conn.Close()
}

func connect(t testing.TB, line nats.InProcessConnProvider) *nats.Conn {
	t.Helper()
	nc, err := nats.Connect("", nats.InProcessServer(line), nats.ReconnectBufSize(-1), nats.MaxReconnects(-1), nats.ReconnectWait(20*time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	return nc
}

func open(t testing.TB, nc *nats.Conn, cfg cluster.Config) *cluster.Cluster {
	t.Helper()
	c, err := cluster.Open(t.Context(), nc, cfg, testenv.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// announce has c say that it is id, of the process `process`, until the returned function is called or the test ends.
func announce(t testing.TB, c *cluster.Cluster, id, process string) (farewell func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := c.Announce(ctx, func() cluster.Heartbeat {
			return cluster.Heartbeat{ID: id, Role: cluster.RoleWorker, Epoch: process, Worker: &cluster.WorkerInfo{Models: []job.Model{"m"}, Largest: 100}}
		}); err != nil {
			t.Error(err)
		}
	})
	stop := func() { cancel(); wg.Wait() }
	t.Cleanup(stop)
	return stop
}

// eventually waits until what holds. Heartbeats are heard by a goroutine that tells nobody.
func eventually(t testing.TB, what string, holds func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !holds(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("in vain waited until %s", what)
		}
	}
}

func ids(members []cluster.Member) []string {
	var list []string
	for _, m := range members {
		list = append(list, m.ID)
	}
	return list
}

func TestANewcomerHearsEverybodyAtOnce(t *testing.T) {
	t.Parallel()
	n := newServer(t)
	slow := cluster.Config{Beat: time.Hour} // so that nothing but hello makes anybody speak
	a := open(t, connect(t, n), slow)
	announce(t, a, "w1", "p1")
	announce(t, a, "w2", "p1")
	eventually(t, "they hear themselves", func() bool { return len(a.Members()) == 2 })
	b := open(t, connect(t, n), slow)
	eventually(t, "the newcomer hears both", func() bool { return slices.Equal(ids(b.Workers("m")), []string{"w1", "w2"}) })
	if got := b.Workers("other"); got != nil {
		t.Errorf("workers of a model that nobody serves: %v", ids(got))
	}
}

func TestANudgeBeatsNow(t *testing.T) {
	t.Parallel()
	n := newServer(t)
	a := open(t, connect(t, n), cluster.Config{Beat: time.Hour})
	announce(t, a, "w1", "p1")
	eventually(t, "it is heard", func() bool { return len(a.Members()) == 1 })
	before := a.Members()[0].Heard
	a.Nudge()
	eventually(t, "it is heard again", func() bool { return a.Members()[0].Heard.After(before) })
}

func TestAFarewellIsNoCharge(t *testing.T) {
	t.Parallel()
	n := newServer(t)
	a, b := open(t, connect(t, n), quick), open(t, connect(t, n), quick)
	leave := announce(t, a, "w1", "p1")
	eventually(t, "it is heard", func() bool { return b.Alive("w1") && len(b.Members()) == 1 })
	ctx, cancel := context.WithCancel(t.Context())
	deaths := b.Deaths(ctx)
	leave()
	got := <-deaths
	if d := cmp.Diff(cluster.Death{Heartbeat: cluster.Heartbeat{ID: "w1", Role: cluster.RoleWorker, Epoch: "p1"}, Farewell: true}, got,
		cmpopts.IgnoreFields(cluster.Heartbeat{}, "Worker")); d != "" {
		t.Error(d)
	}
	if b.Alive("w1") || !b.SilentSince("w1", time.Now()) {
		t.Error("it still counts as alive")
	}
	cancel()
	if _, open := <-deaths; open {
		t.Error("deaths are told after the end of the context")
	}
}

func TestOneThatHangsIsDeadAndCharged(t *testing.T) {
	t.Parallel()
	n := newServer(t)
	observer := open(t, connect(t, n), quick)
	announce(t, open(t, connect(t, n), quick), "w2", "p2")
	ctx, cancel := context.WithCancel(t.Context())
	hang, beats := make(chan struct{}), 0
	var wg sync.WaitGroup
	hung := open(t, connect(t, n), quick)
	wg.Go(func() {
		_ = hung.Announce(ctx, func() cluster.Heartbeat {
			if beats++; beats > 3 {
				<-hang // as if the process were stopped
			}
			return cluster.Heartbeat{ID: "w1", Role: cluster.RoleWorker, Epoch: "p1"}
		})
	})
	defer func() { cancel(); close(hang); wg.Wait() }()
	d := <-observer.Deaths(t.Context())
	if d.ID != "w1" || !d.Charged || d.Farewell {
		t.Errorf("got %+v", d)
	}
	if observer.Alive("w1") || !observer.Alive("w2") {
		t.Errorf("alive: w1 %v, w2 %v", observer.Alive("w1"), observer.Alive("w2"))
	}
}

func TestARestartOfNATSKillsNobody(t *testing.T) {
	t.Parallel()
	n := newServer(t)
	observer := open(t, connect(t, n), quick)
	for i := range 3 {
		announce(t, open(t, connect(t, n), quick), fmt.Sprintf("w%d", i), fmt.Sprintf("p%d", i))
	}
	eventually(t, "all are heard", func() bool { return len(observer.Members()) == 3 })
	deaths := observer.Deaths(t.Context())
	for range 2 {
		n.stop()
		select {
		case d := <-deaths:
			t.Fatalf("died while NATS was away: %+v", d)
		case <-time.After(2 * quick.Silence):
		}
		if connected, _ := observer.Connected(); connected || !observer.Alive("w0") || !observer.Alive("never heard") || len(observer.Members()) != 3 {
			t.Errorf("while cut off: connected %v, alive %v", connected, ids(observer.Members()))
		}
		n.start(t)
		back := time.Now()
		eventually(t, "all are heard again", func() bool {
			return !slices.ContainsFunc(observer.Members(), func(m cluster.Member) bool { return m.Heard.Before(back) })
		})
		if connected, since := observer.Connected(); !connected || since.Before(back.Add(-time.Second)) {
			t.Errorf("connected %v since %v before the restart", connected, back.Sub(since))
		}
	}
	select {
	case d := <-deaths:
		t.Errorf("died: %+v", d)
	case <-time.After(2 * quick.Silence):
	}
}

// TestAModelIsKnownWhileAPoolNamesIt: and as long as ever if a worker served it.
func TestAModelIsKnownWhileAPoolNamesIt(t *testing.T) {
	t.Parallel()
	n := newServer(t)
	a, b := open(t, connect(t, n), quick), open(t, connect(t, n), quick)
	known := func(c *cluster.Cluster, want ...job.Model) {
		t.Helper()
		eventually(t, "the right models are known", func() bool {
			var got []job.Model
			for _, k := range c.Known() {
				got = append(got, k.Model)
			}
			return slices.Equal(got, want)
		})
	}
	ok := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	ok(a.Name(t.Context(), "never served"))
	ok(a.Name(t.Context(), "served"))
	ok(a.Remember(t.Context(), cluster.KnownModel{Model: "served", Largest: 7}))
	ok(a.Name(t.Context(), "served"))
	known(b, "never served", "served")
	eventually(t, "both are told of the one that was served", func() bool {
		k := b.Known()[1]
		return k.Largest == 7 && k.Seen > 0 && k.Named >= k.Seen && k.First > 0 && k.First <= k.Seen
	})
	for _, m := range []job.Model{"never served", "served", "never heard of"} {
		ok(a.Unname(t.Context(), m))
	}
	known(a, "served")
	known(b, "served")
	eventually(t, "it is as it was before it was named", func() bool { k := b.Known()[0]; return k.Largest == 7 && k.Named == 0 })
	ok(b.Name(t.Context(), "never served"))
	known(a, "never served", "served")
}

func TestKnownModelsOutliveARestart(t *testing.T) {
	t.Parallel()
	n := newServer(t)
	a := open(t, connect(t, n), quick)
	b := open(t, connect(t, n), quick)
	seen := time.Now().UnixMilli()
	for i, name := range []job.Model{"org/Model 7B:latest", "m", "m"} {
		if err := a.Remember(t.Context(), cluster.KnownModel{Model: name, Largest: job.Tokens(1000 - i), Seen: seen, Engine: "vllm"}); err != nil {
			t.Fatal(err)
		}
	}
	want := []cluster.KnownModel{{Model: "m", Largest: 999, Seen: seen, First: seen, Engine: "vllm"}, {Model: "org/Model 7B:latest", Largest: 1000, Seen: seen, First: seen, Engine: "vllm"}}
	same := func(c *cluster.Cluster) func() bool { return func() bool { return cmp.Equal(want, c.Known()) } }
	eventually(t, "another process knows them", same(b))

	n.stop()
	if !same(b)() {
		t.Error("forgotten while NATS is away")
	}
	n.start(t)
	c := open(t, connect(t, n), quick)
	if d := cmp.Diff(want, c.Known()); d != "" {
		t.Errorf("after the restart, as soon as it is open: %s", d)
	}
	// Those who watched before still do.
	if err := c.Remember(t.Context(), cluster.KnownModel{Model: "new", Largest: 5, Seen: seen}); err != nil {
		t.Fatal(err)
	}
	want = append(want[:1:1], cluster.KnownModel{Model: "new", Largest: 5, Seen: seen, First: seen}, want[1])
	eventually(t, "who watched before the restart sees what is new", same(b))

	// What live workers serve is known too.
	announce(t, a, "w1", "p1")
	eventually(t, "a live worker's model is known", func() bool { return b.Known()[0].Seen > seen })
	if got := b.Known()[0]; got.Model != "m" || got.Largest != 999 || got.Engine != "vllm" {
		t.Errorf("merged with a live worker: %+v", got)
	}
}

func TestALostBucketIsMadeAgain(t *testing.T) {
	t.Parallel()
	n := newServer(t)
	nc := connect(t, n)
	c := open(t, nc, quick)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	if err := js.DeleteKeyValue(t.Context(), "models"); err != nil {
		t.Fatal(err)
	}
	if err := c.Remember(t.Context(), cluster.KnownModel{Model: "m", Largest: 1}); err != nil {
		t.Fatal(err)
	}
	if got := open(t, nc, quick).Known(); len(got) != 1 {
		t.Errorf("known: %v", got)
	}
}

func TestBucketsWithOtherSettings(t *testing.T) {
	t.Parallel()
	n := newServer(t)
	nc := connect(t, n)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateKeyValue(t.Context(), jetstream.KeyValueConfig{Bucket: "models", TTL: time.Hour, History: 5}); err != nil {
		t.Fatal(err)
	}
	open(t, nc, quick)
	kv, err := js.KeyValue(t.Context(), "models")
	if err != nil {
		t.Fatal(err)
	}
	status, err := kv.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if status.TTL() != 24*time.Hour || status.History() != 1 {
		t.Errorf("not migrated: TTL %s, history %d", status.TTL(), status.History())
	}

	if err := js.DeleteKeyValue(t.Context(), "leases"); err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateKeyValue(t.Context(), jetstream.KeyValueConfig{Bucket: "leases", Storage: jetstream.MemoryStorage}); err != nil {
		t.Fatal(err)
	}
	_, err = cluster.Open(t.Context(), nc, quick, testenv.Log(t))
	if err == nil || !strings.Contains(err.Error(), "storage Memory") {
		t.Errorf("a lease bucket in memory: %v", err)
	}
}

func TestAConfigThatCannotWorkIsRefused(t *testing.T) {
	t.Parallel()
	for _, cfg := range []cluster.Config{{Replicas: -1}, {Beat: time.Millisecond}, {Beat: time.Second, Silence: 2 * time.Second}} {
		if _, err := cluster.Open(t.Context(), nil, cfg, testenv.Log(t)); err == nil {
			t.Errorf("%+v is accepted", cfg)
		}
	}
}
