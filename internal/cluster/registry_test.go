package cluster_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
)

// TestWhoDiesWhenAndAtWhoseCharge steps through 60 s of heartbeats, a tick each 100 ms. Each member beats once a second at its own phase, while its row says so.
func TestWhoDiesWhenAndAtWhoseCharge(t *testing.T) {
	t.Parallel()
	type span struct{ from, to float64 } // seconds
	always := []span{{0, 60}}
	type process struct {
		id, process string
		beats       []span
		farewell    float64 // when, 0 for never
	}
	for _, row := range []struct {
		name    string
		members []process // "me" is the observer's process
		cut     span      // while this process is not connected
		paused  span      // while this process stands still
		elected float64   // when the observer began to watch
		want    []string  // id@second, in order, with ! if charged and ~ for a farewell
	}{
		{
			name:    "nobody falls silent",
			members: []process{{id: "d", process: "me", beats: always}, {id: "w1", process: "1", beats: always}},
		},
		{
			name: "a worker dies while another is heard",
			members: []process{
				{id: "d", process: "me", beats: always}, {id: "w1", process: "1", beats: []span{{0, 10}}}, {id: "w2", process: "2", beats: always},
			},
			want: []string{"w1@12!"},
		},
		{
			name:    "the only other process dies: this one hears itself, and there is no witness to charge it",
			members: []process{{id: "d", process: "me", beats: always}, {id: "w1", process: "1", beats: []span{{0, 10}}}},
			want:    []string{"w1@12"},
		},
		{
			name: "a role of the dead one's own process is no witness",
			members: []process{
				{id: "d", process: "me", beats: always}, {id: "w1", process: "1", beats: []span{{0, 10}}}, {id: "a1", process: "1", beats: []span{{0, 10}}},
			},
			want: []string{"w1@12", "a1@12"},
		},
		{
			name: "all others fall silent at once: ten seconds more, and no charge",
			members: []process{
				{id: "d", process: "me", beats: always}, {id: "w1", process: "1", beats: []span{{0, 10}}}, {id: "w2", process: "2", beats: []span{{0, 10}}},
			},
			want: []string{"w1@22", "w2@22"},
		},
		{
			name: "the server hangs for nine seconds",
			members: []process{
				{id: "d", process: "me", beats: []span{{0, 10}, {19, 60}}},
				{id: "w1", process: "1", beats: []span{{0, 10}, {19, 60}}},
				{id: "w2", process: "2", beats: []span{{0, 10}, {19, 60}}},
			},
		},
		{
			name: "one resumes late after the server hung: its silence began with everybody's",
			members: []process{
				{id: "w1", process: "1", beats: []span{{0, 10}, {19, 60}}}, {id: "w2", process: "2", beats: []span{{0, 10}, {14, 60}}},
			},
		},
		{
			name: "a restart of NATS, after which one comes back after eight seconds",
			cut:  span{10, 15},
			members: []process{
				{id: "d", process: "me", beats: []span{{0, 10}, {15, 60}}},
				{id: "w1", process: "1", beats: []span{{0, 10}, {15, 60}}},
				{id: "w2", process: "2", beats: []span{{0, 10}, {23, 60}}},
			},
		},
		{
			name: "one does not come back after a restart of NATS: dead, and not charged",
			cut:  span{10, 15},
			members: []process{
				{id: "d", process: "me", beats: []span{{0, 10}, {15, 60}}},
				{id: "w1", process: "1", beats: []span{{0, 10}, {15, 60}}},
				{id: "w2", process: "2", beats: []span{{0, 10}}},
			},
			want: []string{"w2@28"},
		},
		{
			name: "this process is cut off for long: nobody dies",
			cut:  span{10, 50},
			members: []process{
				{id: "d", process: "me", beats: []span{{0, 10}, {50, 60}}},
				{id: "w1", process: "1", beats: []span{{0, 10}, {50, 60}}},
				{id: "w2", process: "2", beats: []span{{0, 10}, {50, 60}}},
			},
		},
		{
			name:   "this process stands still for long: nobody dies",
			paused: span{10, 30},
			members: []process{
				{id: "d", process: "me", beats: []span{{0, 10}, {30, 60}}},
				{id: "w1", process: "1", beats: []span{{0, 10}, {30, 60}}},
				{id: "w2", process: "2", beats: []span{{0, 10}, {30, 60}}},
			},
		},
		{
			name: "a cut after a death revives nobody",
			cut:  span{20, 25},
			members: []process{
				{id: "w1", process: "1", beats: []span{{0, 10}}}, {id: "w2", process: "2", beats: []span{{0, 20}, {25, 60}}},
			},
			want: []string{"w1@12!"},
		},
		{
			name: "a farewell is told at once",
			members: []process{
				{id: "w1", process: "1", beats: []span{{0, 10}}, farewell: 10}, {id: "w2", process: "2", beats: always},
			},
			want: []string{"w1@10~"},
		},
		{
			name: "one who comes back and falls silent again is told twice",
			members: []process{
				{id: "w1", process: "1", beats: []span{{0, 10}, {20, 30}}}, {id: "w2", process: "2", beats: always},
			},
			want: []string{"w1@12!", "w1@32!"},
		},
		{
			name:    "an observer who is elected later is told three seconds after",
			elected: 40,
			members: []process{
				{id: "w1", process: "1", beats: []span{{0, 10}}}, {id: "w2", process: "2", beats: always},
			},
			want: []string{"w1@43!"},
		},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			start := time.Now()
			r := cluster.NewRegistry(start, "me")
			at := func(s float64) time.Time { return start.Add(time.Duration(s * float64(time.Second))) }
			var got []string
			paused := false
			for ms := 0; ms < 60_000; ms += 100 {
				s := float64(ms) / 1000
				now := at(s)
				if s >= row.paused.from && s < row.paused.to {
					paused = true
					continue
				}
				r.Link(now, s < row.cut.from || s >= row.cut.to, paused)
				paused = false
				for i, m := range row.members {
					if m.farewell > 0 && s == m.farewell {
						r.Hear(now, cluster.Heartbeat{ID: m.id, Epoch: m.process}, true)
					}
					for _, b := range m.beats {
						if s >= b.from && s < b.to && ms%1000 == 100*(i%3) {
							r.Hear(now, cluster.Heartbeat{ID: m.id, Epoch: m.process}, false)
						}
					}
				}
				if s < row.elected {
					r.Judge(now, now)
					continue
				}
				deaths := r.Judge(now, at(row.elected))
				slices.SortFunc(deaths, func(a, b cluster.Death) int { return strings.Compare(a.ID, b.ID) }) // those of one moment have no order
				for _, d := range deaths {
					mark := ""
					if d.Charged {
						mark += "!"
					}
					if d.Farewell {
						mark += "~"
					}
					got = append(got, fmt.Sprintf("%s@%d%s", d.ID, int(s), mark))
				}
			}
			if d := cmp.Diff(row.want, got); d != "" {
				t.Error(d)
			}
		})
	}
}

func TestAnIDThatWasNeverHeardCountsAsDeadOnceWatchedForTheSilence(t *testing.T) {
	t.Parallel()
	start := time.Now()
	r := cluster.NewRegistry(start, "me")
	for s := range 20 {
		now := start.Add(time.Duration(s) * time.Second)
		r.Hear(now, cluster.Heartbeat{ID: "d", Epoch: "me"}, false)
		r.Hear(now, cluster.Heartbeat{ID: "w", Epoch: "1"}, false)
		r.Judge(now, start)
		elected := start.Add(10 * time.Second)
		if got, want := r.Counts(now, "ghost", elected), s >= 13; got != want {
			t.Errorf("after %d s: ghost counts as dead: %v, want %v", s, got, want)
		}
		if r.Counts(now, "w", elected) {
			t.Errorf("after %d s: w counts as dead", s)
		}
	}
	r.Link(start.Add(20*time.Second), false, false)
	if r.Counts(start.Add(time.Hour), "ghost", start) {
		t.Error("while this process is cut off somebody counts as dead who was never heard")
	}
}

func TestTheDeadAreForgotten(t *testing.T) {
	t.Parallel()
	now := time.Now()
	r := cluster.NewRegistry(now, "me")
	for i := range 100 {
		r.Hear(now, cluster.Heartbeat{ID: fmt.Sprint(i)}, true)
	}
	r.Judge(now.Add(16*time.Minute), now)
	if n := r.Size(); n != 0 {
		t.Errorf("%d members are kept", n)
	}
}

func TestTheLargestWorkerOfADayIsRemembered(t *testing.T) {
	t.Parallel()
	const hour = int64(time.Hour / time.Millisecond)
	large := cluster.KnownModel{Model: "m", Largest: 100, Seen: 50 * hour, Engine: "vllm"}
	for _, row := range []struct {
		name        string
		m           cluster.KnownModel
		want        cluster.KnownModel
		largestSeen int64
	}{
		{"a smaller one speaks later", cluster.KnownModel{Model: "m", Largest: 10, Seen: 60 * hour}, cluster.KnownModel{Model: "m", Largest: 100, Seen: 60 * hour, Engine: "vllm"}, 50 * hour},
		{"a larger one speaks", cluster.KnownModel{Model: "m", Largest: 200, Seen: 60 * hour}, cluster.KnownModel{Model: "m", Largest: 200, Seen: 60 * hour, Engine: "vllm"}, 60 * hour},
		{"the larger one is long gone", cluster.KnownModel{Model: "m", Largest: 10, Seen: 75 * hour}, cluster.KnownModel{Model: "m", Largest: 10, Seen: 75 * hour, Engine: "vllm"}, 75 * hour},
		{"a pool names it, which knows no size", cluster.KnownModel{Model: "m", Seen: 60 * hour}, cluster.KnownModel{Model: "m", Largest: 100, Seen: 60 * hour, Engine: "vllm"}, 50 * hour},
		{"a pool alone has named it for a day", cluster.KnownModel{Model: "m", Seen: 75 * hour}, cluster.KnownModel{Model: "m", Seen: 75 * hour, Engine: "vllm"}, 75 * hour},
	} {
		row.want.First = large.Seen // the first word counts
		got, seen := cluster.Merge(large, 50*hour, row.m)
		if d := cmp.Diff(row.want, got); d != "" || seen != row.largestSeen {
			t.Errorf("%s: largest seen %d, want %d\n%s", row.name, seen, row.largestSeen, d)
		}
	}
}

// TestWorkersThatNeverLearnTheirModelsAreWaitedForAnHour, in all: also where one dies each minute, and the next comes. A minute without any begins anew.
func TestWorkersThatNeverLearnTheirModelsAreWaitedForAnHour(t *testing.T) {
	t.Parallel()
	start := time.Unix(1_000_000, 0)
	r := cluster.NewRegistry(start, "me")
	beat := func(at time.Duration, id string, since time.Duration, w cluster.WorkerInfo) {
		w.State, w.StateSince = cluster.Starting, float64(start.Add(since).Unix())
		r.Hear(start.Add(at), cluster.Heartbeat{ID: id, Role: cluster.RoleWorker, Epoch: id, Worker: &w}, false)
	}
	check := func(at time.Duration, want bool) {
		t.Helper()
		if got := r.Learning(start.Add(at)); got != want {
			t.Errorf("after %s a worker is waited for: %t", at, got)
		}
	}
	beat(0, "known", 0, cluster.WorkerInfo{Models: []job.Model{"m"}})
	beat(0, "others", 0, cluster.WorkerInfo{NoneWanted: true})
	beat(0, "old", -2*time.Hour, cluster.WorkerInfo{})
	check(0, false)
	for at := time.Duration(0); at < 90*time.Minute; at += 30 * time.Second {
		id := fmt.Sprint("w", at/time.Minute)
		beat(at, id, at.Truncate(time.Minute), cluster.WorkerInfo{})
		check(at, at < time.Hour)
		if at%time.Minute != 0 {
			r.Hear(start.Add(at), cluster.Heartbeat{ID: id, Role: cluster.RoleWorker, Epoch: id}, true)
			check(at, false)
		}
	}
	beat(95*time.Minute, "new", 95*time.Minute, cluster.WorkerInfo{})
	check(95*time.Minute, true)
}
