package api_test

import (
	"bufio"
	"context"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/millrace/millrace/api"
	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
)

// poolBeat is the leading autoscaler's word of the model's pool.
func poolBeat(p cluster.PoolInfo) cluster.Heartbeat {
	p.Name, p.Models, p.Max = "gpus", []job.Model{model}, 4
	return cluster.Heartbeat{ID: "as", Role: cluster.RoleAutoscaler, Epoch: "as", Leader: true, Pools: []cluster.PoolInfo{p}}
}

// in is a time in unix seconds.
func in(d time.Duration) float64 { return float64(time.Now().Add(d).UnixMilli()) / 1000 }

// poolOf makes the model known as an autoscaler does, though no worker ever served it, and tells of its pool.
func (e *env) poolOf(p cluster.PoolInfo) (set func(...cluster.Heartbeat)) {
	e.t.Helper()
	if err := e.cluster.Name(e.t.Context(), model); err != nil {
		e.t.Fatal(err)
	}
	set = e.announce()
	set(poolBeat(p))
	eventually(e.t, "the autoscaler is heard, and the model known", func() bool {
		for _, m := range e.cluster.Members() {
			if len(m.Pools) > 0 {
				return len(e.cluster.Known()) > 0
			}
		}
		return false
	})
	return set
}

func (e *env) placeOf(id job.ID) map[string]any {
	e.t.Helper()
	return e.send("GET", "/v1/jobs/"+string(id), "").object(e.t)["queue"].(map[string]any)
}

// TestCallsAreHeldWhileAPoolStartsAWorker: the model was never served. Both kinds of calls wait for as long as it takes, and who streams hears all the while what for.
func TestCallsAreHeldWhileAPoolStartsAWorker(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{KeepAlive: 90 * time.Millisecond, MaxInteractiveWait: time.Millisecond})
	set := e.poolOf(cluster.PoolInfo{})
	plain := make(chan answer, 1)
	go func() { plain <- e.send("POST", "/v1/chat/completions", chat(2, "")) }()
	resp := e.open(t.Context(), "POST", "/v1/chat/completions", chat(2, `,"stream":true`))
	defer resp.Body.Close()
	stream := bufio.NewReader(resp.Body)
	until := func(want string) {
		t.Helper()
		for {
			line, err := stream.ReadString('\n')
			if err != nil || !strings.HasPrefix(line, ": queued ") {
				t.Fatalf("%q, %v", line, err)
			}
			if strings.Contains(line, want) {
				return
			}
		}
	}
	until("reason=starting\n") // nobody has been asked for yet
	set(poolBeat(cluster.PoolInfo{Wanted: 1, Starting: 1, ReadyAt: in(time.Hour)}))
	until("reason=starting eta=35") // the worker itself is not heard yet
	set(workerBeat("cold", cluster.WorkerInfo{State: cluster.Starting}))
	until("reason=starting eta=35")
	until("reason=starting eta=35")
	if len(plain) > 0 {
		t.Fatalf("a plain call was answered before a worker was there: %+v", <-plain)
	}
	e.startWorker(repeat)
	if a := <-plain; a.status != http.StatusOK || !strings.Contains(string(a.body), "t1 ") {
		t.Errorf("the plain call got %d %s", a.status, a.body)
	}
	rest, err := io.ReadAll(stream)
	if err != nil || !strings.HasSuffix(string(rest), "data: [DONE]\n\n") {
		t.Errorf("the stream ends with %q, %v", rest, err)
	}
}

// TestJobsOfAModelThatStartsSayWhen: the job, the list of queues, and when to ask again.
func TestJobsOfAModelThatStartsSayWhen(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	set := e.poolOf(cluster.PoolInfo{Wanted: 2, Starting: 2, ReadyAt: in(50 * time.Second), WorkerRate: 1})
	set(leaderBeat(cluster.QueueInfo{Waiting: map[job.Class]int{job.Standard: 2}}))
	first, second := e.submit(jobBody(chat(40, ""), "")), e.submit(jobBody(chat(40, ""), ""))
	q := e.placeOf(first)
	eta, _ := q["eta_seconds"].(float64)
	if q["reason"] != "starting" || q["position"] != 1.0 || eta < 20 || eta > 50 {
		t.Errorf("the first: %v", q)
	}
	q = e.placeOf(second)
	later, _ := q["eta_seconds"].(float64)
	if q["reason"] != "starting" || q["position"] != 2.0 || later < eta+15 { // 40 tokens and more at two a second
		t.Errorf("the second, behind %v s: %v", eta, q)
	}
	a := e.send("GET", "/v1/jobs/"+string(first), "")
	if after, _ := strconv.Atoi(a.header.Get("Retry-After")); after < 19 || after > 50 {
		t.Errorf("Retry-After %q", a.header.Get("Retry-After"))
	}
	eventually(t, "the dispatcher is heard", func() bool {
		o := e.send("GET", "/admin/v1/queues", "").object(t)["data"].([]any)[0].(map[string]any)
		if o["reason"] == nil {
			return false
		}
		pools := o["pools"].([]any)
		eta, _ := o["eta_seconds"].(float64)
		if o["reason"] != "starting" || eta < 30 || len(pools) != 1 || pools[0].(map[string]any)["name"] != "gpus" || pools[0].(map[string]any)["starting"] != 2.0 {
			t.Errorf("%v", o)
		}
		return true
	})
	// A pool that starts nothing any more says so with its next word.
	set(poolBeat(cluster.PoolInfo{Ready: 1}), workerBeat("w", cluster.WorkerInfo{State: cluster.Ready, Capacity: 100, Free: 90}))
	eventually(t, "a worker is ready", func() bool { return e.placeOf(first)["reason"] == "dispatching" })
}

// TestCallsOfAModelThatCannotStartAreRefusedAndJobsWait: who waits on a connection is told at once, and when to come again.
func TestCallsOfAModelThatCannotStartAreRefusedAndJobsWait(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	failing := cluster.PoolInfo{Wanted: 1, Unavailable: "worker gpus-1 ended: NATS at nats://u:secret@nats:4222 refused it.", RetryAt: in(40 * time.Second)}
	set := e.poolOf(failing)
	for _, more := range []string{"", `,"stream":true`} {
		a := e.send("POST", "/v1/chat/completions", chat(2, more))
		a.wantError(t, http.StatusServiceUnavailable, job.CodeModelUnavailable, "")
		if after, _ := strconv.Atoi(a.header.Get("Retry-After")); after < 20 || after > 60 {
			t.Errorf("Retry-After %q", a.header.Get("Retry-After"))
		}
		if m := a.errorOf(t).Message; !strings.Contains(m, "worker gpus-1 ended") || strings.Contains(m, "secret") || strings.Contains(m, "..") {
			t.Errorf("it is told: %s", m)
		}
	}
	id := e.submit(jobBody(chat(2, ""), ""))
	q := e.placeOf(id)
	if eta, _ := q["eta_seconds"].(float64); q["reason"] != "model_unavailable" || eta < 20 || eta > 40 {
		t.Errorf("%v", q)
	}
	a := e.send("POST", "/v1/chat/completions", chat(2, ""), "Prefer: respond-async")
	if a.status != http.StatusAccepted {
		t.Errorf("a call that need not be answered at once: %d %s", a.status, a.body)
	}
	o := e.send("GET", "/admin/v1/queues", "").object(t)["data"].([]any)[0].(map[string]any)
	if o["reason"] != "model_unavailable" || o["eta_seconds"] == nil {
		t.Errorf("%v", o)
	}
	// A ready worker of another origin is enough, and so is a pool that can start one again, or may try.
	held := func(what string) {
		t.Helper()
		eventually(t, "a call is held: "+what, func() bool {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			refused := make(chan bool, 1)
			go func() {
				resp, err := e.tryOpen(ctx, "POST", "/v1/chat/completions", chat(2, ""))
				if err == nil {
					_ = resp.Body.Close()
				}
				refused <- err == nil && resp.StatusCode == http.StatusServiceUnavailable
			}()
			for e.server.Held() == 0 {
				select {
				case no := <-refused:
					return !no
				case <-time.After(time.Millisecond):
				}
			}
			cancel()
			return !<-refused
		})
		eventually(t, "it has ended", func() bool { return e.server.Held() == 0 })
	}
	set(workerBeat("w", cluster.WorkerInfo{State: cluster.Ready, Capacity: 100, Free: 90}))
	held("a worker is ready")
	set(workerBeat("w", cluster.WorkerInfo{State: cluster.Stalled}))
	eventually(t, "it is refused again", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		if e.placeOf(id)["reason"] != "model_unavailable" {
			return false
		}
		resp, err := e.tryOpen(ctx, "POST", "/v1/chat/completions", chat(2, ""))
		if err != nil {
			return false
		}
		_ = resp.Body.Close()
		return resp.StatusCode == http.StatusServiceUnavailable
	})
	failing.RetryAt = in(-time.Second)
	set(poolBeat(failing))
	held("the next try is due, and somebody must want it")
	set(poolBeat(cluster.PoolInfo{Wanted: 1, Starting: 1}))
	held("a start is tried that may work")
	e.startWorker(repeat)
	if o := e.wait(id); o["status"] != "completed" {
		t.Errorf("the job that waited: %v", o)
	}
}

// TestHeldCallsAreToldOnceNoWorkerCanBeStarted: those that came before the pool's starts were known to fail end as those do that come after, and nothing of them is left. Who began the try that is under way waits for its end; jobs stay.
func TestHeldCallsAreToldOnceNoWorkerCanBeStarted(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{KeepAlive: 90 * time.Millisecond, HopelessFor: time.Millisecond})
	failing := cluster.PoolInfo{Wanted: 1, Starting: 1, Unavailable: "sh ended with 1", RetryAt: in(-time.Second)}
	set := e.poolOf(cluster.PoolInfo{Wanted: 1, Starting: 1})
	id := e.submit(jobBody(chat(2, ""), ""))
	plain := make(chan answer, 1)
	go func() { plain <- e.send("POST", "/v1/chat/completions", chat(2, "")) }()
	streams := make(map[string]*bufio.Reader)
	for path, body := range map[string]string{
		"/v1/chat/completions": chat(2, `,"stream":true`), "/v1/responses": `{"model":"` + string(model) + `","input":"hi","stream":true}`,
	} {
		resp := e.open(t.Context(), "POST", path, body)
		defer resp.Body.Close()
		streams[path] = bufio.NewReader(resp.Body)
	}
	heard := func(path, what string) {
		t.Helper()
		for {
			line, err := streams[path].ReadString('\n')
			if err != nil || !strings.HasPrefix(line, ": queued ") {
				t.Fatalf("%s: %q, %v", path, line, err)
			}
			if strings.Contains(line, what) {
				return
			}
		}
	}
	heard("/v1/chat/completions", "reason=starting")
	heard("/v1/responses", "reason=starting")
	set(poolBeat(failing)) // the third try, which they began
	heard("/v1/chat/completions", "reason=model_unavailable")
	eventually(t, "calls without hope would have been ended", func() bool { return e.cluster.Listening(time.Time{}) > api.HopelessFrom })
	heard("/v1/chat/completions", "reason=model_unavailable")
	if n := e.server.Held(); n != 3 {
		t.Fatalf("%d calls are held while a start is tried", n)
	}
	failing.Starting, failing.RetryAt = 0, in(40*time.Second)
	set(poolBeat(failing))
	a := <-plain
	a.wantError(t, http.StatusServiceUnavailable, job.CodeModelUnavailable, "")
	if after, _ := strconv.Atoi(a.header.Get("Retry-After")); after < 20 || after > 60 || !strings.Contains(a.errorOf(t).Message, "sh ended with 1") {
		t.Errorf("Retry-After %q: %s", a.header.Get("Retry-After"), a.body)
	}
	for path, stream := range streams {
		rest, err := io.ReadAll(stream)
		if err != nil || !strings.Contains(string(rest), "\ndata: {") || !strings.Contains(string(rest), `"code":"model_unavailable"`) {
			t.Errorf("the stream of %s ends with %q, %v", path, rest, err)
		}
	}
	eventually(t, "nothing of them is left", func() bool {
		depth, err := e.queue.Depth(t.Context(), queue.Live, model)
		return err == nil && depth.Bytes == 0 && e.server.Held() == 0
	})
	if o := e.send("GET", "/v1/jobs/"+string(id), "").object(t); o["status"] != "queued" {
		t.Errorf("the job is %v", o["status"])
	}
}

// TestHeldCallsWaitForWhateverWorkerThereIs: it may come to be ready again, or end what it has. New ones are refused meanwhile.
func TestHeldCallsWaitForWhateverWorkerThereIs(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	set := e.poolOf(cluster.PoolInfo{Max: 2, Wanted: 2, Unavailable: "no image", RetryAt: in(60 * time.Second)})
	eventually(t, "without a worker there is no hope", func() bool { return e.server.Hopeless(model) })
	for _, state := range []cluster.WorkerState{cluster.Ready, cluster.Unready, cluster.Stalled, cluster.Draining, cluster.Starting} {
		set(workerBeat("w", cluster.WorkerInfo{State: state}))
		eventually(t, "it is heard", func() bool {
			workers := e.cluster.Workers(model)
			return len(workers) == 1 && workers[0].Worker.State == state
		})
		if e.server.Hopeless(model) {
			t.Errorf("a worker is %s, and the held calls are told that there can be none", state)
		}
		if state == cluster.Unready {
			e.send("POST", "/v1/chat/completions", chat(2, "")).wantError(t, http.StatusServiceUnavailable, job.CodeModelUnavailable, "")
		}
	}
}

// TestAStandbyAutoscalerIsNotBelieved: only the leader knows what its pools do.
func TestAStandbyAutoscalerIsNotBelieved(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	old := poolBeat(cluster.PoolInfo{Unavailable: "x"})
	old.ID, old.Epoch, old.Leader = "standby", "standby", false
	set := e.poolOf(cluster.PoolInfo{})
	set(old)
	eventually(t, "both are heard", func() bool {
		n := 0
		for _, m := range e.cluster.Members() {
			n += len(m.Pools)
		}
		return n == 2
	})
	if q := e.placeOf(e.submit(jobBody(chat(1, ""), ""))); q["reason"] != "starting" {
		t.Errorf("%v", q)
	}
}

// TestAModelThatAPoolNamesIsKnownWithoutASize: nothing is too long for it as long as nobody knows.
func TestAModelThatAPoolNamesIsKnownWithoutASize(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	e.poolOf(cluster.PoolInfo{})
	long := `{"model":"` + string(model) + `","messages":[{"role":"user","content":"` + strings.Repeat("word ", 100_000) + `"}]}`
	e.submit(jobBody(long, ""))
	if a := e.send("GET", "/v1/models/"+string(model), ""); a.status != http.StatusOK {
		t.Errorf("%d %s", a.status, a.body)
	}
}

func TestAnOperatorDrainsAWorker(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	set := e.announce()
	set(workerBeat("gpu 1", cluster.WorkerInfo{State: cluster.Ready, Running: 2}))
	twin := workerBeat("twin-a", cluster.WorkerInfo{State: cluster.Ready})
	other := workerBeat("twin-b", cluster.WorkerInfo{State: cluster.Ready})
	twin.Worker.Name, other.Worker.Name = "twin", "twin"
	set(twin, other)
	eventually(t, "they are heard", func() bool { return len(e.cluster.Workers(model)) == 3 })
	told := make(chan string, 8)
	for _, id := range []string{"gpu 1", "twin-b"} {
		if err := e.cluster.OnDrain(t.Context(), id, func(time.Duration) { told <- id }); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 { // an order may be repeated
		a := e.send("POST", "/admin/v1/workers/gpu%201/drain", "")
		o := a.object(t)
		if a.status != http.StatusAccepted || o["object"] != "worker" || o["id"] != "gpu 1" || o["state"] != "draining" || o["running"] != 2.0 {
			t.Errorf("%d %s", a.status, a.body)
		}
		if got := <-told; got != "gpu 1" {
			t.Errorf("%s was told", got)
		}
	}
	e.send("POST", "/admin/v1/workers/twin/drain", "").wantError(t, http.StatusConflict, job.CodeInvalidValue, "id")
	if a := e.send("POST", "/admin/v1/workers/twin-b/drain", ""); a.status != http.StatusAccepted || <-told != "twin-b" {
		t.Errorf("by its id: %d %s", a.status, a.body)
	}
	e.send("POST", "/admin/v1/workers/nobody/drain", "").wantError(t, http.StatusNotFound, job.CodeWorkerNotFound, "id")
	e.send("POST", "/admin/v1/workers/twin-a/drain", "").wantError(t, http.StatusServiceUnavailable, job.CodeUnavailable, "")
}
