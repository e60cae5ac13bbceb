//go:build compose

package compose_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/millrace/millrace/internal/client"
	"github.com/millrace/millrace/internal/job"
)

// burst is a pool of up to four emulated engines that need five seconds to be ready. What one gets done is told as little, so that much waiting work needs all four.
const burst = `{"name":"burst","models":["` + model + `"],"provider":"docker","max":4,"idle":"3s","cooldown":"3s","drain":"1m","cold_start":"8s","tokens_per_second":150,
	"engine":{"command":["{millrace}","emulator","--listen","127.0.0.1:{port}","--profile","a10-7b","--cold-start","5s"]}}`

// narrow is a pool whose engines have room for one job, so that four jobs are on four workers.
const narrow = `{"name":"narrow","models":["narrow"],"provider":"docker","max":4,"idle":"5s","cooldown":"5s","drain":"1m","cold_start":"3s","tokens_per_second":60,"target_wait":{"standard":"1s"},
	"engine":{"command":["{millrace}","emulator","--listen","127.0.0.1:{port}","--profile","a10-7b","--model","narrow","--kv-tokens","1200","--cold-start","1s"]}}`

// scaling is a platform whose workers an autoscaler starts.
type scaling struct {
	*stack
	client, admin *client.Client
}

// workers are the names of a pool's workers that Docker has, in whatever state.
func (s *scaling) workers(t *testing.T, pool string) []string {
	t.Helper()
	out := run(t, "", "ps", "--all", "--filter", "label=com.docker.compose.project="+s.project, "--filter", "label=dev.millrace.pool="+pool, "--format", `{{.Label "dev.millrace.worker"}}`)
	names := strings.Fields(out)
	slices.Sort(names)
	return slices.Compact(names)
}

// await waits until Docker has n workers of the pool, and returns all names that were there meanwhile.
func (s *scaling) await(t *testing.T, pool string, n int) map[string]bool {
	t.Helper()
	seen := make(map[string]bool)
	for deadline := time.Now().Add(90 * time.Second); ; time.Sleep(200 * time.Millisecond) {
		names := s.workers(t, pool)
		for _, name := range names {
			seen[name] = true
		}
		if len(names) == n {
			return seen
		}
		if time.Now().After(deadline) {
			t.Fatalf("docker has the workers %q of %s, want %d", names, pool, n)
		}
	}
}

// ups are the decisions that started workers of the pool, the newest first.
func (s *scaling) ups(t *testing.T, pool string) []client.ScalingDecision {
	t.Helper()
	all, _, err := s.admin.Scaling(t.Context(), pool, "", 100)
	if err != nil {
		t.Fatal(err)
	}
	return slices.DeleteFunc(all, func(d client.ScalingDecision) bool { return d.Start == 0 })
}

// once fails the test unless each job ended well at its first attempt.
func (s *scaling) once(t *testing.T, ids []job.ID) {
	t.Helper()
	finish(t, s.client, ids)
	for _, id := range ids {
		j, err := s.client.Job(t.Context(), id, 0)
		if err != nil {
			t.Fatal(err)
		}
		if len(j.Attempts) != 1 {
			t.Errorf("job %s took %d attempts: %+v", id, len(j.Attempts), j.Attempts)
		}
	}
}

func TestComposeScalesWorkersWithTheLoad(t *testing.T) {
	t.Parallel()
	var project *stack
	t.Cleanup(func() { // after the project was taken down, with a worker in it
		if project == nil || t.Failed() {
			return
		}
		if left := run(t, "", "ps", "--all", "--quiet", "--filter", "label=com.docker.compose.project="+project.project); left != "" {
			t.Errorf("containers are left: %s", left)
		}
	})
	stack, c := start(t, "autoscaler")
	project = stack
	admin, err := client.New(client.Config{URL: c.URL(), APIKey: adminKey, Patience: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(admin.CloseIdleConnections)
	s := &scaling{stack, c, admin}
	for _, pool := range []string{burst, narrow} {
		if _, err := admin.CreatePool(t.Context(), json.RawMessage(pool)); err != nil {
			t.Fatal(err)
		}
	}
	if all, err := admin.Pools(t.Context()); err != nil || len(all) != 3 { // and that of deploy/pools.yaml
		t.Fatalf("the pools are %+v, %v", all, err)
	}
	for _, m := range []job.Model{model, "narrow"} { // a model is known from when the autoscaler has read of it on
		for deadline := time.Now().Add(time.Minute); ; time.Sleep(200 * time.Millisecond) {
			known, err := c.Models(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if slices.Contains(known, m) {
				break
			}
			if time.Now().After(deadline) {
				t.Fatalf("the models are %q, without %s", known, m)
			}
		}
	}
	accepted := 0

	t.Run("all that the work needs start at once, and go when it is done", func(t *testing.T) {
		s.compose(t, "stop", "autoscaler") // so that it sees all jobs in one look
		ids := submit(t, c, 200, 200, "burst")
		accepted += len(ids)
		s.compose(t, "start", "autoscaler")
		seen := s.await(t, "burst", 4)
		s.once(t, ids)
		maps.Copy(seen, s.await(t, "burst", 0))
		if ups := s.ups(t, "burst"); len(ups) != 1 || ups[0].From != 0 || ups[0].Want != 4 || ups[0].Start != 4 || len(seen) != 4 {
			t.Errorf("the workers %q came of %+v", slices.Sorted(maps.Keys(seen)), ups)
		}
		settled(t, stack, accepted)
	})

	t.Run("an autoscaler that is killed while workers start changes nothing", func(t *testing.T) {
		before := len(s.ups(t, "burst"))
		ids := submit(t, c, 120, 200, "killed")
		accepted += len(ids)
		for len(s.workers(t, "burst")) == 0 {
			time.Sleep(50 * time.Millisecond)
		}
		s.compose(t, "kill", "autoscaler")
		s.compose(t, "start", "autoscaler")
		s.once(t, ids)
		seen := s.await(t, "burst", 0)
		started := 0
		for _, d := range s.ups(t, "burst")[:len(s.ups(t, "burst"))-before] {
			started += d.Start
		}
		if started > 4 || len(seen) > started {
			t.Errorf("%d workers were asked for, and there were %q", started, slices.Sorted(maps.Keys(seen)))
		}
		settled(t, stack, accepted)
	})

	t.Run("from nothing to one and back, again and again, loses nothing", func(t *testing.T) {
		cycles := 1 // MILLRACE_CYCLES=20 makes it a soak
		if n, err := strconv.Atoi(os.Getenv("MILLRACE_CYCLES")); err == nil {
			cycles = n
		}
		for i := range cycles {
			ids := submit(t, c, 1, 30, fmt.Sprint("cycle-", i))
			accepted++
			s.once(t, ids)
			s.await(t, "burst", 0)
		}
		settled(t, stack, accepted)
	})

	t.Run("a worker that runs something is not removed", func(t *testing.T) {
		const long, short = 700, 100 // about 20 s, and 3 s
		ids := slices.Concat(submitTo(t, c, "narrow", 2, long, "long"), submitTo(t, c, "narrow", 2, short, "short"))
		accepted += len(ids)
		s.await(t, "narrow", 4)
		s.once(t, ids)
		if len(s.workers(t, "narrow")) == 4 {
			t.Error("none of the idle ones went while the others ran")
		}
		s.await(t, "narrow", 0)
		settled(t, stack, accepted)
	})

	submit(t, c, 1, 30, "last")
	s.await(t, "burst", 1)
}
