package cluster_test

import (
	"context"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	natsserver "github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/testenv"
)

// threeServers starts a cluster of three and returns it once it has a leader.
func threeServers(t *testing.T) []*natsserver.Server {
	t.Helper()
	var routes []*url.URL // all must be known to each from the start
	for range 3 {
		routes = append(routes, &url.URL{Scheme: "nats", Host: testenv.FreeAddr(t)})
	}
	var servers []*natsserver.Server
	for i, route := range routes {
		port, err := strconv.Atoi(route.Port())
		if err != nil {
			t.Fatal(err)
		}
		s, err := natsserver.NewServer(&natsserver.Options{
			ServerName: fmt.Sprintf("n%d", i), Host: "127.0.0.1", Port: natsserver.RANDOM_PORT, JetStream: true, JetStreamMaxStore: testenv.Ample, JetStreamMaxMemory: testenv.Ample, StoreDir: t.TempDir(), SyncAlways: true, NoSigs: true, NoLog: true,
			Cluster: natsserver.ClusterOpts{Name: "three", Host: "127.0.0.1", Port: port}, Routes: routes,
		})
		if err != nil {
			t.Fatal(err)
		}
		go s.Start() // ends with Shutdown
		t.Cleanup(func() { s.Shutdown(); s.WaitForShutdown() })
		servers = append(servers, s)
	}
	for _, s := range servers {
		if !s.ReadyForConnections(20 * time.Second) {
			t.Fatal("a server is not ready")
		}
	}
	eventually(t, "the cluster has a leader and knows all three", func() bool {
		for _, s := range servers {
			if s.JetStreamIsLeader() {
				return len(s.JetStreamClusterPeers()) == 3
			}
		}
		return false
	})
	return servers
}

func TestLeaseAndModelsOutliveTheLossOfOneOfThreeServers(t *testing.T) {
	t.Parallel()
	servers := threeServers(t)
	var urls []string
	for _, s := range servers {
		urls = append(urls, s.ClientURL())
	}
	nc, err := nats.Connect(strings.Join(urls, ","), nats.ReconnectBufSize(-1), nats.MaxReconnects(-1), nats.ReconnectWait(20*time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	start := time.Now()
	var c *cluster.Cluster
	eventually(t, "the buckets are made", func() bool { // servers that elect a leader answer nothing that they were asked meanwhile
		short, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		c, err = cluster.Open(short, nc, cluster.Config{Replicas: 3}, testenv.Log(t))
		return err == nil
	})
	t.Cleanup(c.Close)
	eventually(t, "the bucket takes writes", func() bool { // its first leader may still be elected
		return c.Remember(t.Context(), cluster.KnownModel{Model: "m", Largest: 7}) == nil
	})
	reigns, leads := make(chan reign, 10), make(chan int, 10)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { contender{c: c, reigns: reigns, leads: leads}.run(t, ctx) })
	defer func() { cancel(); wg.Wait() }()
	<-leads

	// The one that this process is connected to goes.
	for _, s := range servers {
		if s.ClientURL() == nc.ConnectedUrl() {
			s.Shutdown()
			s.WaitForShutdown()
			break
		}
	}
	eventually(t, "the bucket takes writes again", func() bool {
		short, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		return c.Remember(short, cluster.KnownModel{Model: "n", Largest: 7}) == nil
	})
	var last reign
	select {
	case last = <-reigns: // the lease could not be renewed in time; it is taken again
		<-leads
	case <-time.After(3 * time.Second):
	}
	cancel()
	now := <-reigns
	if now.epoch <= last.epoch || now.epoch < uint64(start.UnixMilli()) {
		t.Errorf("epoch %d follows %d", now.epoch, last.epoch)
	}
	eventually(t, "both models are known", func() bool { return len(c.Known()) == 2 })
}
