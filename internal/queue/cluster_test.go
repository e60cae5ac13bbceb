package queue_test

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"sync"
	"testing"
	"time"

	natsserver "github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/testenv"
)

// startCluster runs three servers in this process.
func startCluster(t *testing.T) []*natsserver.Server {
	t.Helper()
	var routes []*url.URL
	var ports []int
	for range 3 {
		route := &url.URL{Scheme: "nats", Host: testenv.FreeAddr(t)}
		port, err := strconv.Atoi(route.Port())
		if err != nil {
			t.Fatal(err)
		}
		ports, routes = append(ports, port), append(routes, route)
	}
	servers := make([]*natsserver.Server, 3)
	for i := range servers {
		s, err := natsserver.NewServer(&natsserver.Options{
			ServerName: fmt.Sprintf("n%d", i), Host: "127.0.0.1", Port: natsserver.RANDOM_PORT, NoSigs: true, NoLog: true,
			JetStream: true, JetStreamMaxStore: testenv.Ample, JetStreamMaxMemory: testenv.Ample, StoreDir: t.TempDir(), SyncAlways: true, MaxPayload: 8 << 20,
			Cluster: natsserver.ClusterOpts{Name: "test", Host: "127.0.0.1", Port: ports[i]}, Routes: routes,
		})
		if err != nil {
			t.Fatal(err)
		}
		go s.Start() // ends with Shutdown
		t.Cleanup(func() { s.Shutdown(); s.WaitForShutdown() })
		servers[i] = s
	}
	for _, s := range servers {
		if !s.ReadyForConnections(10 * time.Second) {
			t.Fatal("a node does not start")
		}
	}
	until(t, "the cluster has a leader", func() bool {
		for _, s := range servers {
			if s.JetStreamIsLeader() {
				return true
			}
		}
		return false
	})
	return servers
}

func TestThreeNodesWorkAsOne(t *testing.T) {
	t.Parallel()
	servers := startCluster(t)
	urls := ""
	for _, s := range servers {
		urls += s.ClientURL() + ","
	}
	dial := func() *nats.Conn {
		nc, err := queue.Connect(urls[:len(urls)-1], "test", nil, testenv.Log(t))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(nc.Close)
		return nc
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	nc := dial()
	q, err := queue.Open(ctx, nc, queue.Config{Replicas: 3}, testenv.Log(t)) // nodes take a moment to know each other's stores
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(q.Close)
	for err = q.EnsureModel(ctx, model); err != nil; err = q.EnsureModel(ctx, model) {
		if ctx.Err() != nil {
			t.Fatal(err)
		}
		time.Sleep(5 * time.Millisecond)
	}

	work := newPuller(t, q, queue.PullerConfig{Kind: queue.Work, Model: model, Class: job.Standard})
	for _, kind := range []queue.Kind{queue.Work, queue.Live} {
		m := newMessage(job.Standard)
		enqueue(t, q, kind, queue.AnyLane, m)
		if err := q.Enqueue(ctx, kind, queue.AnyLane, m); !errors.Is(err, queue.ErrExists) {
			t.Errorf("%s: %v, want ErrExists", kind, err)
		}
		p := work
		if kind == queue.Live {
			p = newPuller(t, q, queue.PullerConfig{Kind: kind, Model: model, Class: job.Standard})
		}
		d := pullOne(t, p)
		if _, err := q.Settle(ctx, outcomeOf(&d.Message, 1)); err != nil {
			t.Fatal(err)
		}
		if err := d.Ack(); err != nil {
			t.Fatal(err)
		}
		if r, err := q.Outcome(ctx, "default", job.NoGroup, m.Job.ID); err != nil || r.Outcome.Token != 1 {
			t.Errorf("%+v, %v", r, err)
		}
		if r, err := q.Settle(ctx, outcomeOf(&d.Message, 2)); !errors.Is(err, queue.ErrSettled) || r.Outcome.Token != 1 {
			t.Errorf("%+v, %v", r, err)
		}
	}

	// Racing settlers: while one copy is on its way the leader can say neither yes nor no to the others.
	m := newMessage(job.Standard)
	var wg sync.WaitGroup
	for i := range 40 {
		wg.Go(func() {
			if _, err := q.Settle(ctx, outcomeOf(m, job.Token(i+1))); err != nil && !errors.Is(err, queue.ErrSettled) {
				t.Error(err)
			}
		})
	}
	wg.Wait()

	line := queue.TenantLane("default")
	moved := newMessage(job.Standard)
	enqueue(t, q, queue.Work, line, moved)
	s, err := q.Find(ctx, "", moved.Job.ID)
	if err != nil {
		t.Fatal(err)
	}
	if err := q.Move(ctx, s, queue.AnyLane); err != nil {
		t.Fatal(err)
	}

	// The node of the streams' leader dies: another takes over, nothing is lost, and the pullers go on.
	stream, err := admin(t, nc).Stream(ctx, workStream)
	if err != nil {
		t.Fatal(err)
	}
	leader := stream.CachedInfo().Cluster.Leader
	for _, s := range servers {
		if s.Name() == leader {
			s.Shutdown()
			s.WaitForShutdown()
		}
	}
	later := newMessage(job.Standard)
	until(t, "a job is stored without the node", func() bool { return persist(t, q, queue.Work, later) })
	want := map[job.ID]bool{moved.Job.ID: true, later.Job.ID: true}
	until(t, "both jobs are delivered", func() bool {
		out, err := work.Pull(ctx, queue.PullRequest{Batch: 2, Expires: time.Second})
		if err != nil {
			return false
		}
		for d := range out {
			delete(want, d.Job.ID)
			_ = d.Ack()
		}
		return len(want) == 0
	})
}
