package api

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/relay"
)

func TestWhatAModelWithoutAReadyWorkerHasToExpect(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_700_000_000, 0)
	at := func(in float64) float64 { return 1_700_000_000 + in }
	in := func(s float64) *float64 { return &s }
	idle := cluster.PoolInfo{Max: 2}
	broken := cluster.PoolInfo{Max: 2, Unavailable: "no image", RetryAt: at(40)}
	first := cluster.PoolInfo{Max: 2, Starting: 1, ReadyAt: at(31.94), WorkerRate: 100}
	for _, row := range []struct {
		name    string
		workers string // what keeps them from taking more
		pools   []cluster.PoolInfo
		want    prospect
	}{
		{"there are no pools", reasonNoWorker, nil, prospect{reason: reasonNoWorker}},
		{"its pool may have no workers", reasonNoWorker, []cluster.PoolInfo{{}}, prospect{reason: reasonNoWorker}},
		{"the autoscaler has yet to look", reasonNoWorker, []cluster.PoolInfo{idle}, prospect{reason: reasonStarting}},
		{"a start is about to begin", reasonNoWorker, []cluster.PoolInfo{{Max: 2, ColdStart: 45, WorkerRate: 7, Action: "hold"}, {Max: 2, ColdStart: 60}}, prospect{reason: reasonStarting, in: in(45), rate: 7}},
		{"the provider has no room for it", reasonNoWorker, []cluster.PoolInfo{{Max: 2, ColdStart: 45, Action: "at_capacity"}}, prospect{reason: reasonStarting}},
		{"a worker was asked for and is not heard yet", reasonNoWorker, []cluster.PoolInfo{first}, prospect{reason: reasonStarting, in: in(32), rate: 100}},
		{"it is heard", reasonStarting, []cluster.PoolInfo{first}, prospect{reason: reasonStarting, in: in(32), rate: 100}},
		{"the first of several, each with its rate", reasonNoWorker, []cluster.PoolInfo{first, {Max: 5, Starting: 3, ReadyAt: at(20), WorkerRate: 10}}, prospect{reason: reasonStarting, in: in(20), rate: 130}},
		{"it is late", reasonStarting, []cluster.PoolInfo{{Max: 1, Starting: 1, ReadyAt: at(-1)}}, prospect{reason: reasonStarting}},
		{"one is stalled and another starts", "stalled", []cluster.PoolInfo{first}, prospect{reason: reasonStarting, in: in(32), rate: 100}},
		{"one is stalled and none was asked for", "stalled", []cluster.PoolInfo{idle}, prospect{reason: "stalled"}},
		{"one drains and another is not asked for yet", "draining", []cluster.PoolInfo{idle}, prospect{reason: "draining"}},
		{"one starts that no pool has started", reasonStarting, []cluster.PoolInfo{idle}, prospect{reason: reasonStarting}},
		{"starts fail", reasonNoWorker, []cluster.PoolInfo{broken}, prospect{reason: reasonUnavailable, in: in(40), failure: "no image"}},
		{"the next try is under way", reasonStarting, []cluster.PoolInfo{{Max: 1, Starting: 1, Unavailable: "exit code 1", RetryAt: at(-5), ReadyAt: at(25)}}, prospect{reason: reasonUnavailable, in: in(25), failure: "exit code 1"}},
		{"nobody says when it is tried again", "unready", []cluster.PoolInfo{{Max: 1, Unavailable: "x"}}, prospect{reason: reasonUnavailable, failure: "x"}},
		{"the next try is due", reasonNoWorker, []cluster.PoolInfo{{Max: 1, Unavailable: "x", RetryAt: at(-1)}}, prospect{reason: reasonUnavailable, failure: "x", due: true}},
		{"another pool may start one", reasonNoWorker, []cluster.PoolInfo{broken, idle}, prospect{reason: reasonStarting}},
		{"another pool starts one", reasonNoWorker, []cluster.PoolInfo{broken, first}, prospect{reason: reasonStarting, in: in(32), rate: 100}},
		{"a worker is ready all the same", reasonSaturated, []cluster.PoolInfo{broken}, prospect{reason: reasonSaturated}},
		{"a worker has room", reasonDispatching, []cluster.PoolInfo{first}, prospect{reason: reasonDispatching}},
	} {
		if diff := cmp.Diff(row.want, prospectOf(row.workers, row.pools, now), cmp.AllowUnexported(prospect{})); diff != "" {
			t.Errorf("%s: %s", row.name, diff)
		}
	}
}

func TestTheTimeToAColdStartCountsWhatGoesBefore(t *testing.T) {
	t.Parallel()
	in := 32.0
	for _, row := range []struct {
		name   string
		p      prospect
		before ahead
		want   float64 // less than 0: unknown
	}{
		{"it is the first", prospect{in: &in, rate: 100}, ahead{}, 32},
		{"250 tokens go before it", prospect{in: &in, rate: 100}, ahead{jobs: 2, tokens: 250}, 34.5},
		{"the rate is not known", prospect{in: &in}, ahead{jobs: 2, tokens: 250}, 32},
		{"the start is not known", prospect{rate: 100}, ahead{jobs: 2, tokens: 250}, -1},
		{"it is no time to plan with", prospect{in: &in, rate: 1e-6}, ahead{jobs: 2, tokens: 250}, -1},
	} {
		got := -1.0
		if s := row.p.start(row.before); s != nil {
			got = *s
		}
		if got != row.want {
			t.Errorf("%s: %v, want %v", row.name, got, row.want)
		}
	}
}

func TestStrangersReadNoSecretsOfWhatFails(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"image registry.example/engine:1 not found.":                     "image registry.example/engine:1 not found",
		"exit code 1:\n  dial nats://user:pa55@10.0.0.1:4222\trefused":   "exit code 1: dial nats://10.0.0.1:4222 refused",
		"MILLRACE_API_KEY=sk-abc, HF_TOKEN: 'hf_x', port=80":             "MILLRACE_API_KEY=…, HF_TOKEN: '…', port=80",
		`{"password": "p@ss", "Authorization-Token":"Bearer abc"} broke`: `{"password": "…", "Authorization-Token":"Bearer …"} broke`,
		"": "",
	} {
		if got := forStrangers(text); got != want {
			t.Errorf("%q became %q, want %q", text, got, want)
		}
	}
	if got := forStrangers(strings.Repeat("ä", 400)); len(got) > maxFailure+len("…") || !strings.HasSuffix(got, "ä…") {
		t.Errorf("a long text became %q", got)
	}
}

// TestHeldCallOfACrashLoopIsEndedAfterATry: the tries that fail one after the other do not begin its time anew.
func TestHeldCallOfACrashLoopIsEndedAfterATry(t *testing.T) {
	t.Parallel()
	c, now := &call{}, time.Unix(1000, 0)
	for at := range 30 {
		// A try of 3 s, and 5 s until the next.
		now, ended := now.Add(time.Duration(at)*time.Second), false
		if at%8 < 3 {
			c.doubt(now)
		} else {
			ended = c.despair(true, now, 10*time.Second)
		}
		if want := at >= 11 && at%8 >= 3; ended != want {
			t.Errorf("after %d s it is ended: %t", at, ended)
		}
	}
}

func TestTrafficOfTooManyModelsTellsThoseThatAreAlive(t *testing.T) {
	t.Parallel()
	var tr traffic
	start := time.Unix(1_700_000_000, 0)
	name := func(i int) job.Model { return job.Model(strings.Repeat("m", i+1)) }
	for i := range maxTraffic + 2 {
		tr.came(start.Add(time.Duration(i)*time.Second), name(i), job.Tokens(1000-i))
	}
	old := &call{message: &queue.Message{Job: job.Job{Model: name(0), Cost: job.Cost{Prompt: 7}}}, seat: &relay.Seat{}}
	got := tr.report([]*call{old, old})
	want := cluster.Traffic{Model: name(0), Jobs: 1, Tokens: 1000, Squares: 1e6, WaitingCalls: 2, WaitingTokens: 14}
	if diff := cmp.Diff(want, got[0]); diff != "" {
		t.Errorf("the model with calls that wait: %s", diff)
	}
	if len(got) != maxTraffic || got[1].Model != name(maxTraffic+1) || got[maxTraffic-1].Model != name(3) {
		t.Errorf("%d models, then from %d to %d", len(got), len(got[1].Model), len(got[len(got)-1].Model))
	}
}

// Hopeless tells whether held calls of a model are without hope now.
func (s *Server) Hopeless(m job.Model) bool { return s.hopeless(m, time.Now()) != nil }

// TestHeldCallIsEndedOnlyAfterItHasBeenHopelessForLong: what passes ends no call.
func TestHeldCallIsEndedOnlyAfterItHasBeenHopelessForLong(t *testing.T) {
	t.Parallel()
	c, now := &call{}, time.Unix(1000, 0)
	for at := range 30 {
		hopeless := at >= 4 && at != 13 // when a worker is there for a moment
		if got, want := c.despair(hopeless, now.Add(time.Duration(at)*time.Second), 10*time.Second), at >= 24; got != want {
			t.Errorf("after %d s it is ended: %t", at, got)
		}
	}
}
