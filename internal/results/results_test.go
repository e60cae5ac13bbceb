package results_test

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/redis/go-redis/v9"
	"go.uber.org/goleak"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/results"
	"github.com/millrace/millrace/internal/results/resultstest"
	"github.com/millrace/millrace/internal/testenv"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestConformance(t *testing.T) {
	t.Parallel()
	t.Run("redis", func(t *testing.T) { resultstest.Run(t, testenv.Redis(t).URL()) })
	t.Run("embedded", func(t *testing.T) { resultstest.Run(t, testenv.MiniRedis(t).URL()) })
	t.Run("cluster", func(t *testing.T) { resultstest.Run(t, cluster(t)) })
}

func TestWritesMayRunTwice(t *testing.T) {
	t.Parallel()
	t.Run("redis", func(t *testing.T) { resultstest.RunLost(t, testenv.Redis(t).URL()) })
	t.Run("embedded", func(t *testing.T) { resultstest.RunLost(t, testenv.MiniRedis(t).URL()) })
}

// What old versions wrote must still be read: records live on through a deploy.
func TestOldRecordsAreRead(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	s, db := open(t, server.URL()), raw(t, server.Addr)
	const id = job.ID("job_old")
	ok(t, db.HSet(t.Context(), "mr:{job_old}:r", map[string]string{
		"j": `{"id":"job_old","tenant":"acme","model":"m","endpoint":"/v1/embeddings","class":"batch","group":"-","created":1000,"expires":2000,"cost":{"prompt":3},"body_size":5,"unknown":1}`,
		"s": "failed", "a": "1001", "v": "1002", "k": "1003", "w": "w2", "l": "0", "q": "$JS.ACK.x", "nb": "1004", "c": "1", "n": "7", "cn": "5", "rs": "1",
		"d": "1", "ch": "2", "un": "3", "at": "+1000 w 1\n-1001 worker_lost\n+1003 w2\n", "f": "1005", "h": "1", "fr": "1", "x": "1000",
		"o": `{"state":"failed","token":1003,"finished":1006,"last_event":7}`,
	}).Err())
	ok(t, db.XAdd(t.Context(), &redis.XAddArgs{Stream: "mr:{job_old}:e", ID: "1003-7", Values: []string{"done", "{}"}}).Err())
	got, err := s.Get(t.Context(), id)
	ok(t, err)
	want := &results.Record{
		Job: job.Job{
			ID: id, Tenant: "acme", Model: "m", Endpoint: job.Embeddings, Class: job.Batch, Group: job.NoGroup, Created: 1000, Expires: 2000,
			Cost: job.Cost{Prompt: 3}, BodySize: 5,
		},
		State: job.Failed, Since: 1001, Version: 1002, Token: 1003, Worker: "w2", AckSubject: "$JS.ACK.x", NotBefore: 1004, CancelAsked: true,
		N: 7, Deaths: 1, Charged: 2, Uncharged: 3, FirstToken: 1005, HasResult: true,
		Attempts: []job.Attempt{{Worker: "w 1", Started: 1000, Ended: 1001, Outcome: "worker_lost"}, {Worker: "w2", Started: 1003}},
		Outcome:  &job.Outcome{State: job.Failed, Token: 1003, Finished: 1006, LastEvent: 7},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("record (-want +got):\n%s", d)
	}
	events, span, err := s.Events(t.Context(), id, 0, 10)
	ok(t, err)
	if d := cmp.Diff([]job.Event{{N: 7, Token: 1003, Kind: job.EventDone, Data: []byte("{}")}}, events); d != "" || span != (results.Span{First: 7, Last: 7}) {
		t.Errorf("events %+v (-want +got):\n%s", span, d)
	}
}

func BenchmarkRedis(b *testing.B)    { resultstest.Bench(b, testenv.Redis(b).URL()) }
func BenchmarkEmbedded(b *testing.B) { resultstest.Bench(b, testenv.MiniRedis(b).URL()) }

// cluster starts a cluster of one node, which refuses scripts that reach over slots as any cluster does.
func cluster(t testing.TB) string {
	t.Helper()
	_, port, _ := net.SplitHostPort(testenv.FreeAddr(t))
	server := testenv.Redis(t, "--cluster-enabled", "yes", "--cluster-port", port)
	c := redis.NewClient(&redis.Options{Addr: server.Addr})
	defer c.Close() // nothing was written that could be lost
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if err := c.ClusterAddSlotsRange(ctx, 0, 16383).Err(); err != nil {
		t.Fatal(err)
	}
	for c.Set(ctx, "ready", 1, time.Second).Err() != nil {
		if ctx.Err() != nil {
			t.Fatal("the cluster does not become ready")
		}
		time.Sleep(10 * time.Millisecond) // it tells nobody when it is ready
	}
	return server.Addr + "," + server.Addr
}
