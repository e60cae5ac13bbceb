package queue_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"go.uber.org/goleak"

	"github.com/millrace/millrace/internal/embedded"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/testenv"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, testenv.NATSLeaves()...) }

const model job.Model = "meta-llama/Llama 3.1:8b"

// server is a NATS server that can be stopped and started again on its store. Connections follow it.
type server struct {
	dir string
	now atomic.Pointer[embedded.NATS]
}

func (s *server) InProcessConn() (net.Conn, error) {
	if n := s.now.Load(); n != nil {
		return n.InProcessConn()
	}
	return nil, errors.New("the server is down")
}

func (s *server) start(t testing.TB) {
	t.Helper()
	n, err := embedded.StartNATS(embedded.NATSConfig{Dir: s.dir, StoreLimit: testenv.Ample, MemoryLimit: testenv.Ample, Log: testenv.Log(t)})
	if err != nil {
		t.Fatal(err)
	}
	s.now.Store(n)
}

func (s *server) shutdown() {
	if n := s.now.Swap(nil); n != nil {
		n.Shutdown()
	}
}

func newServer(t testing.TB) *server {
	t.Helper()
	s := &server{dir: t.TempDir()}
	s.start(t)
	t.Cleanup(s.shutdown)
	return s
}

// connect makes a connection that comes back quickly.
func connect(t testing.TB, s nats.InProcessConnProvider) *nats.Conn {
	t.Helper()
	nc, err := nats.Connect("", nats.InProcessServer(s), nats.ReconnectBufSize(-1), nats.MaxReconnects(-1),
		nats.ReconnectWait(20*time.Millisecond), nats.ReconnectJitter(0, 0),
		nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {})) // the default one prints
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	return nc
}

// connectLike returns another connection to the server of nc.
func connectLike(t testing.TB, nc *nats.Conn) *nats.Conn {
	t.Helper()
	return connect(t, nc.Opts.InProcessServer)
}

func open(t testing.TB, nc *nats.Conn, cfg queue.Config) *queue.Queue {
	t.Helper()
	q, err := queue.Open(context.Background(), nc, cfg, testenv.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(q.Close)
	return q
}

// fresh returns a queue on a server of its own.
func fresh(t testing.TB, cfg queue.Config) (*queue.Queue, *nats.Conn) {
	t.Helper()
	nc := connect(t, newServer(t))
	return open(t, nc, cfg), nc
}

var ids atomic.Int64

func newMessage(class job.Class) *queue.Message {
	now := time.Now()
	id := job.NewID(now)
	body := fmt.Appendf(nil, `{"model":"m","n":%d}`, ids.Add(1))
	return &queue.Message{
		Job: job.Job{
			ID: id, Tenant: "default", Model: model, Endpoint: job.ChatCompletions, Class: class, Group: job.NoGroup,
			Created: job.MillisOf(now), Expires: job.MillisOf(now.Add(time.Hour)), BodySize: int64(len(body)),
		},
		Body: body,
	}
}

func enqueue(t testing.TB, q *queue.Queue, k queue.Kind, l queue.Lane, m *queue.Message) {
	t.Helper()
	if err := q.Enqueue(t.Context(), k, l, m); err != nil {
		t.Fatal(err)
	}
}

func newPuller(t testing.TB, q *queue.Queue, cfg queue.PullerConfig) *queue.Puller {
	t.Helper()
	p, err := q.Puller(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p
}

// pull returns what one pull brings.
func pull(t testing.TB, p *queue.Puller, batch int, expires time.Duration) []*queue.Delivery {
	t.Helper()
	out, err := p.Pull(t.Context(), queue.PullRequest{Batch: batch, Expires: expires})
	if err != nil {
		t.Fatal(err)
	}
	var got []*queue.Delivery
	for d := range out {
		got = append(got, d)
	}
	return got
}

// pullOne returns the delivery that comes within five seconds.
func pullOne(t testing.TB, p *queue.Puller) *queue.Delivery {
	t.Helper()
	got := pull(t, p, 1, 5*time.Second)
	if len(got) != 1 {
		t.Fatalf("%d deliveries, want 1", len(got))
	}
	return got[0]
}

func outcomeOf(m *queue.Message, token job.Token) *queue.Record {
	return &queue.Record{
		Job:     m.Job,
		Outcome: job.Outcome{State: job.Completed, Token: token, StatusCode: 200, Finished: job.MillisOf(time.Now())},
		Result:  fmt.Appendf(nil, `{"by":%d}`, token),
	}
}

// until repeats check until it returns true.
func until(t testing.TB, what string, check func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !check(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("timed out: %s", what)
		}
	}
}
