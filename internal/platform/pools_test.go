package platform_test

import (
	"errors"
	"net/url"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/millrace/millrace/api"
	"github.com/millrace/millrace/internal/platform"
	"github.com/millrace/millrace/internal/provider"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/testenv"
)

func TestPoolsOpenAPortOfThisMachineToThoseWhoKnowThePassword(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "pools.yaml")
	if err := os.WriteFile(file, []byte(`pools: [{name: p, models: [m], provider: process, max: 1, engine: {command: ["true"]}}]`), 0o600); err != nil {
		t.Fatal(err)
	}
	p, err := platform.New(t.Context(), platform.Config{Dir: t.TempDir(), PoolsFile: file, API: api.Config{Listen: "127.0.0.1:0"}}, prometheus.NewRegistry(), testenv.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if _, there := p.Ready()["worker-1"]; there {
		t.Error("there is a worker in the process")
	}
	u, err := url.Parse(p.NATS().URL())
	if err != nil || u.Hostname() != "127.0.0.1" || u.User == nil {
		t.Fatalf("NATS is at %v, %v", u, err)
	}
	nc, err := nats.Connect(u.String(), nats.NoReconnect())
	if err != nil {
		t.Fatalf("with the password: %v", err)
	}
	nc.Close()
	u.User = nil
	if nc, err := nats.Connect(u.String(), nats.NoReconnect()); !errors.Is(err, nats.ErrAuthorization) {
		nc.Close()
		t.Errorf("without a password: %v", err)
	}
}

func TestJoinNamesWhatIsSet(t *testing.T) {
	t.Parallel()
	c := platform.BackboneConfig{NATSURL: "nats://n", RedisURL: "redis://r", DatabaseURL: "postgres://secret", Queue: queue.Config{Replicas: 3, Retention: 48 * time.Hour, WorkMaxBytes: 1 << 30}}
	want := provider.Join{"MILLRACE_NATS_URL": "nats://n", "MILLRACE_REDIS_URL": "redis://r", "MILLRACE_REPLICAS": "3", "MILLRACE_RETENTION": "48h0m0s", "MILLRACE_WORK_MAX_BYTES": "1073741824"}
	if d := cmp.Diff(want, c.Join()); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}
