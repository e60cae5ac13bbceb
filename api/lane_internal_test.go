package api

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/affinity"
	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
)

// workersHeard are ready workers of model m, all heard at one time.
func workersHeard(at time.Time, ids ...string) []cluster.Member {
	var members []cluster.Member
	for _, id := range ids {
		members = append(members, cluster.Member{
			Heartbeat: cluster.Heartbeat{ID: id, Worker: &cluster.WorkerInfo{State: cluster.Ready, Models: []job.Model{"m"}, Capacity: 10_000}}, Heard: at,
		})
	}
	return members
}

var turn = &job.Job{Tenant: "t", Model: "m", Session: "s", Endpoint: job.ChatCompletions, Cost: job.Cost{Prompt: 100}}

func ownedBy(w job.Worker) func(context.Context, ...string) ([][]job.Worker, error) {
	return func(_ context.Context, keys ...string) ([][]job.Worker, error) {
		owners := make([][]job.Worker, len(keys))
		owners[len(keys)-1] = []job.Worker{w}
		return owners, nil
	}
}

// TestLooksThatCannotHelpAreNotTaken: nothing asks the store where there is no choice or nothing to look by.
func TestLooksThatCannotHelpAreNotTaken(t *testing.T) {
	t.Parallel()
	w := &warmth{prefixes: true, sent: map[job.Worker]*sent{}, look: func(context.Context, ...string) ([][]job.Worker, error) {
		t.Error("the store was asked")
		return nil, nil
	}}
	now := time.Now()
	object := func(text string) *job.Object {
		o, err := job.ParseObject([]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		return o
	}
	with := func(change func(*job.Job)) *job.Job {
		j := *turn
		change(&j)
		return &j
	}
	two := workersHeard(now, "a", "b")
	draining := workersHeard(now, "a", "b")
	draining[1].Worker.State = cluster.Draining
	for name, c := range map[string]struct {
		members []cluster.Member
		job     *job.Job
	}{
		"no worker":             {nil, turn},
		"one worker":            {two[:1], turn},
		"one that is ready":     {draining, turn},
		"workers of another":    {two, with(func(j *job.Job) { j.Model = "n" })},
		"embeddings":            {two, with(func(j *job.Job) { j.Endpoint = job.Embeddings })},
		"short, and no session": {two, with(func(j *job.Job) { j.Session = "" })},
	} {
		if to, left, result := w.find(t.Context(), c.members, c.job, object(`{"messages":[{"role":"user","content":"hi"}]}`), true); to != "" || left != nil || result != affinity.Off {
			t.Errorf("%s: %q, %s", name, to, result)
		}
	}
}

// TestSentJobsCountUntilTheNextHeartbeat: nobody tells this process when a durable job ends.
func TestSentJobsCountUntilTheNextHeartbeat(t *testing.T) {
	t.Parallel()
	w := &warmth{sent: map[job.Worker]*sent{}, look: ownedBy("a")}
	beat := time.Now()
	find := func() (func(), affinity.Result) {
		to, left, result := w.find(t.Context(), workersHeard(beat, "a", "b", "c", "d"), turn, nil, false)
		if (to == "a") != (result == affinity.Hit) {
			t.Fatalf("%q by %s", to, result)
		}
		return left, result
	}
	var lefts []func()
	for range affinity.Few {
		left, result := find()
		if result != affinity.Hit {
			t.Fatalf("the owner got none but %d", len(lefts))
		}
		lefts = append(lefts, left)
	}
	if _, result := find(); result != affinity.Spill {
		t.Errorf("one more is a %s", result)
	}
	lefts[0]() // was refused
	lefts[0]() // does nothing more
	if _, result := find(); result != affinity.Hit {
		t.Errorf("after one was refused: %s", result)
	}
	if _, result := find(); result != affinity.Spill {
		t.Errorf("after another one: %s", result)
	}
	beat = beat.Add(time.Second) // in which the worker says that it has none
	for range affinity.Few {
		if _, result := find(); result != affinity.Hit {
			t.Errorf("after the next heartbeat: %s", result)
		}
	}
	lefts[1]() // of the last heartbeat's, which count no more
	if _, result := find(); result != affinity.Spill {
		t.Errorf("after too many again: %s", result)
	}
}

// TestHeldCallsCountUntilTheyEnd: with those that the worker tells of in its heartbeat, each once.
func TestHeldCallsCountUntilTheyEnd(t *testing.T) {
	t.Parallel()
	w := &warmth{sent: map[job.Worker]*sent{}, look: ownedBy("a")}
	beat, running := time.Now(), 0
	find := func() (func(), affinity.Result) {
		members := workersHeard(beat, "a", "b", "c", "d")
		members[0].Worker.Running = running
		_, left, result := w.find(t.Context(), members, turn, nil, true)
		return left, result
	}
	var lefts []func()
	for range affinity.Few {
		left, _ := find()
		lefts = append(lefts, left)
	}
	beat, running = beat.Add(time.Second), affinity.Few // all of them run
	if _, result := find(); result != affinity.Spill {
		t.Errorf("when all run: %s", result)
	}
	lefts[0]()
	lefts[0]()
	if _, result := find(); result != affinity.Hit {
		t.Errorf("after one of those has ended: %s", result)
	}
	if _, result := find(); result != affinity.Spill {
		t.Errorf("after another one: %s", result)
	}
	for _, left := range lefts[1:] {
		left()
	}
	beat, running = beat.Add(time.Second), 1
	for range affinity.Few - 1 {
		if _, result := find(); result != affinity.Hit {
			t.Errorf("when all but one have ended: %s", result)
		}
	}
	if _, result := find(); result != affinity.Spill {
		t.Errorf("in the end: %s", result)
	}
}

// TestManyAtOnceAreBounded: a thousand turns of one session in one moment.
func TestManyAtOnceAreBounded(t *testing.T) {
	t.Parallel()
	w := &warmth{sent: map[job.Worker]*sent{}, look: ownedBy("a")}
	members := workersHeard(time.Now(), "a", "b", "c", "d")
	var mu sync.Mutex
	count := map[affinity.Result]int{}
	var running sync.WaitGroup
	for range 1000 {
		running.Go(func() {
			_, _, result := w.find(t.Context(), members, turn, nil, true)
			mu.Lock()
			defer mu.Unlock()
			count[result]++
		})
	}
	running.Wait()
	if d := cmp.Diff(map[affinity.Result]int{affinity.Hit: affinity.Few, affinity.Spill: 1000 - affinity.Few}, count); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

// TestGoneWorkersAreForgotten: what was sent to them takes no memory.
func TestGoneWorkersAreForgotten(t *testing.T) {
	t.Parallel()
	var owner job.Worker
	w := &warmth{sent: map[job.Worker]*sent{}, look: func(ctx context.Context, keys ...string) ([][]job.Worker, error) { return ownedBy(owner)(ctx, keys...) }}
	for i := range 100 {
		owner = job.Worker(fmt.Sprint("w", i))
		if to, _, _ := w.find(t.Context(), workersHeard(time.Now(), string(owner), "other"), turn, nil, true); to != owner {
			t.Fatalf("it goes to %q", to)
		}
	}
	if len(w.sent) != 1 {
		t.Errorf("%d workers are remembered", len(w.sent))
	}
}

// TestOutageOfTheStoreCostsATimeOutASecond: and its end is found.
func TestOutageOfTheStoreCostsATimeOutASecond(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		away, looks := true, 0
		w := &warmth{sent: map[job.Worker]*sent{}, look: func(ctx context.Context, keys ...string) ([][]job.Worker, error) {
			looks++
			if away {
				<-ctx.Done()
				return nil, ctx.Err()
			}
			return ownedBy("a")(ctx, keys...)
		}}
		find := func() affinity.Result {
			_, _, result := w.find(t.Context(), workersHeard(time.Now(), "a", "b"), turn, nil, true)
			return result
		}
		begin := time.Now()
		for time.Since(begin) < 10*time.Second {
			if result := find(); result != affinity.Off {
				t.Fatalf("without the store: %s", result)
			}
			time.Sleep(time.Millisecond)
		}
		if looks < 10 || looks > lookFailures+10 {
			t.Errorf("%d looks in ten seconds", looks)
		}
		away = false
		time.Sleep(lookAgain)
		if result := find(); result != affinity.Hit {
			t.Errorf("when the store is back: %s", result)
		}
		if result := find(); result != affinity.Hit {
			t.Errorf("and then: %s", result)
		}
	})
}

// TestClientThatLeavesIsNoOutage: the look that it cut says nothing of the store.
func TestClientThatLeavesIsNoOutage(t *testing.T) {
	t.Parallel()
	w := &warmth{sent: map[job.Worker]*sent{}, look: func(ctx context.Context, keys ...string) ([][]job.Worker, error) {
		if ctx.Err() != nil {
			return nil, errors.New("cut off")
		}
		return ownedBy("a")(ctx, keys...)
	}}
	gone, leave := context.WithCancel(t.Context())
	leave()
	members := workersHeard(time.Now(), "a", "b")
	for range 2 * lookFailures {
		w.find(gone, members, turn, nil, true)
	}
	if _, _, result := w.find(t.Context(), members, turn, nil, true); result != affinity.Hit {
		t.Errorf("the next one's look is a %s", result)
	}
}
