package api_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/millrace/millrace/api"
	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/results"
)

// known makes the model one that jobs may wait for, though no worker serves it.
func (e *env) known() {
	e.t.Helper()
	if err := e.queue.EnsureModel(e.t.Context(), model); err != nil {
		e.t.Fatal(err)
	}
}

// announce sends heartbeats of members that a test makes up, and sends them anew after each change. Workers do what their TokensPerSecond says, in jobs of 100 tokens.
func (e *env) announce() (set func(...cluster.Heartbeat)) {
	e.t.Helper()
	type source struct {
		now  atomic.Pointer[cluster.Heartbeat]
		stop context.CancelFunc
	}
	var wg sync.WaitGroup
	sources := map[string]*source{}
	e.t.Cleanup(func() {
		for _, s := range sources {
			s.stop()
		}
		wg.Wait()
	})
	return func(all ...cluster.Heartbeat) {
		for _, h := range all {
			s := sources[h.ID]
			if s == nil {
				ctx, cancel := context.WithCancel(context.WithoutCancel(e.t.Context()))
				s = &source{stop: cancel}
				sources[h.ID] = s
				s.now.Store(&h)
				begun := time.Now()
				wg.Go(func() {
					_ = e.cluster.Announce(ctx, func() cluster.Heartbeat {
						h := *s.now.Load()
						if h.Worker != nil {
							w := *h.Worker
							w.Generated = int64(w.TokensPerSecond * time.Since(begun).Seconds())
							w.Completed = w.Generated / 100
							h.Worker = &w
						}
						return h
					})
				})
			}
			s.now.Store(&h)
		}
		e.cluster.Nudge()
	}
}

func workerBeat(id string, w cluster.WorkerInfo) cluster.Heartbeat {
	w.Name, w.Models, w.Largest = id, []job.Model{model}, 100_000
	return cluster.Heartbeat{ID: id, Role: cluster.RoleWorker, Epoch: id, Worker: &w}
}

func leaderBeat(q cluster.QueueInfo) cluster.Heartbeat {
	q.Model = model
	return cluster.Heartbeat{ID: "d", Role: cluster.RoleDispatcher, Epoch: "d", Leader: true, Queues: []cluster.QueueInfo{q}}
}

func (a answer) errorOf(t testing.TB) *job.Error {
	t.Helper()
	var e job.Error
	m := a.object(t)["error"].(map[string]any)
	e.Message, _ = m["message"].(string)
	e.Type, _ = m["type"].(string)
	return &e
}

func TestQueuedJobsAreLimited(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{Limits: results.Limits{Queue: results.Amount{Jobs: 10}}})
	e.known()
	var stored []answer
	var refused []answer
	var mu sync.Mutex
	var wg sync.WaitGroup
	for i := range 12 {
		wg.Go(func() {
			a := e.send("POST", "/v1/jobs", jobBody(chat(1, ""), ""), fmt.Sprintf("Idempotency-Key: k%d", i))
			mu.Lock()
			defer mu.Unlock()
			if a.status == http.StatusAccepted {
				stored = append(stored, a)
			} else {
				refused = append(refused, a)
			}
		})
	}
	wg.Wait()
	if len(stored) != 10 || len(refused) != 2 {
		t.Fatalf("%d stored, %d refused", len(stored), len(refused))
	}
	for _, a := range refused {
		a.wantError(t, http.StatusTooManyRequests, job.CodeQueuedJobs, "")
		if err := a.errorOf(t); err.Type != job.TypeRateLimit || !strings.Contains(err.Message, "limit of 10 jobs") || !strings.Contains(err.Message, "10 are in use") {
			t.Errorf("%+v", err)
		}
	}
	list := e.send("GET", "/v1/jobs?limit=100", "").object(t)["data"].([]any)
	if len(list) != 10 {
		t.Errorf("%d jobs are listed", len(list))
	}
	// A retry of what was accepted finds its job; of what was not it is refused again, until there is room.
	var again int
	for i := range 12 {
		if a := e.send("POST", "/v1/jobs", jobBody(chat(1, ""), ""), fmt.Sprintf("Idempotency-Key: k%d", i)); a.status == http.StatusAccepted {
			again++
		}
	}
	if again != 10 {
		t.Errorf("%d retries of 10 jobs found them", again)
	}
	id := stored[0].object(t)["id"].(string)
	if a := e.send("POST", "/v1/jobs/"+id+"/cancel", ""); a.status != http.StatusOK {
		t.Fatalf("%d %s", a.status, a.body)
	}
	e.submit(jobBody(chat(1, ""), ""))
	e.send("POST", "/v1/jobs", jobBody(chat(1, ""), "")).wantError(t, http.StatusTooManyRequests, job.CodeQueuedJobs, "")
	a := e.send("POST", "/v1/chat/completions", chat(1, ""), "Prefer: respond-async")
	a.wantError(t, http.StatusTooManyRequests, job.CodeQueuedJobs, "")
	// What is accepted runs, comes back, and runs again, however full the queue is.
	second := job.ID(stored[1].object(t)["id"].(string))
	rec, err := e.results.Get(t.Context(), second)
	if err != nil {
		t.Fatal(err)
	}
	for n := 1; n <= 2; n++ {
		c, err := e.results.Claim(t.Context(), results.ClaimRequest{Job: &rec.Job, Worker: "w", Lease: time.Minute, AckSubject: "a" + strconv.Itoa(n), Delivered: n, Checked: true})
		if err != nil || c.Verdict != results.Taken {
			t.Fatalf("attempt %d: %+v, %v", n, c, err)
		}
		if err := e.results.GiveBack(t.Context(), second, c.Token, 0, false, "preempted"); err != nil {
			t.Fatal(err)
		}
	}
}

func TestEachLimitHasItsCode(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	e.known()
	other := job.Job{Tenant: "other", Model: model, Endpoint: job.ChatCompletions, Class: job.Standard, Group: job.NoGroup, BodySize: 100, Cost: job.Cost{Prompt: 100, Output: 10, Answers: 1}}
	for range 3 { // of another tenant
		j := other
		now := e.results.Now()
		j.ID, j.Created, j.Expires = job.NewID(now.Time()), now, now+3_600_000
		if _, err := e.results.Accept(t.Context(), &j, []byte("{}"), results.Limits{}); err != nil {
			t.Fatal(err)
		}
	}
	e.submit(jobBody(chat(1, ""), ""))
	size := int64(len(chat(1, "")))
	for code, limits := range map[job.Code]results.Limits{
		job.CodeQueuedJobs:         {Queue: results.Amount{Jobs: 1}},
		job.CodeQueuedBytes:        {Queue: results.Amount{Bytes: 2*size - 1}},
		job.CodeQueuedTokens:       {Queue: results.Amount{Tokens: 43}},
		job.CodeTenantQueuedJobs:   {Tenant: results.Amount{Jobs: 1}},
		job.CodeTenantQueuedBytes:  {Tenant: results.Amount{Bytes: 2*size - 1}},
		job.CodeTenantQueuedTokens: {Tenant: results.Amount{Tokens: 43}},
		job.CodeModelQueuedJobs:    {Model: results.Amount{Jobs: 4}},
		job.CodeModelQueuedBytes:   {Model: results.Amount{Bytes: 300 + 2*size - 1}},
		job.CodeModelQueuedTokens:  {Model: results.Amount{Tokens: 330 + 43}},
	} {
		e.stopAPI()
		e.startAPI(api.Config{Limits: limits})
		a := e.send("POST", "/v1/jobs", jobBody(chat(1, ""), ""))
		a.wantError(t, http.StatusTooManyRequests, code, "")
	}
	// One that is over the limit by itself need not come again.
	e.stopAPI()
	e.startAPI(api.Config{Limits: results.Limits{Queue: results.Amount{Tokens: 5000}}})
	a := e.send("POST", "/v1/jobs", jobBody(chat(9000, ""), ""))
	a.wantError(t, http.StatusTooManyRequests, job.CodeQueuedTokens, "")
	if a.header.Get("X-Should-Retry") != "false" || !strings.Contains(a.errorOf(t).Message, "alone needs 90") {
		t.Errorf("%v %s", a.header, a.body)
	}
	e.submit(jobBody(chat(4000, ""), ""))
}

func TestLimitsBelowZeroAreRefused(t *testing.T) {
	t.Parallel()
	for name, cfg := range map[string]api.Config{
		"max-queued-jobs is -1":          {Limits: results.Limits{Queue: results.Amount{Jobs: -1}}},
		"max-queued-bytes-tenant is -2":  {Limits: results.Limits{Tenant: results.Amount{Bytes: -2}}},
		"max-queued-tokens-model is -3":  {Limits: results.Limits{Model: results.Amount{Tokens: -3}}},
		"max-interactive-wait is -1s":    {MaxInteractiveWait: -time.Second},
		"at least 0, which is no limit":  {Limits: results.Limits{Model: results.Amount{Jobs: -1}}},
		"at least 0, which is no bound":  {MaxInteractiveWait: -1},
		"max-queued-jobs-tenant is -100": {Limits: results.Limits{Tenant: results.Amount{Jobs: -100}}},
	} {
		if _, err := api.New(cfg, api.Deps{}); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%v does not say %q", err, name)
		}
	}
}

func TestInteractiveCallsAreRefusedWhenAllWorkersAreBusy(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{MaxInteractiveWait: 5 * time.Second})
	e.known()
	set := e.announce()
	full := cluster.WorkerInfo{State: cluster.Ready, Load: 0.95, Free: 10, Capacity: 1000, TokensPerSecond: 50, TTFT: 1.5}
	waiting := cluster.QueueInfo{Waiting: map[job.Class]int{job.Interactive: 20}}
	set(workerBeat("w1", full), workerBeat("w2", full), leaderBeat(waiting))
	// call tries a plain call, and tells its answer, or that it was let in.
	call := func() (a answer, in bool) {
		t.Helper()
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		before := e.server.Held()
		done := make(chan error, 1)
		go func() {
			resp, err := e.tryOpen(ctx, "POST", "/v1/chat/completions", chat(90, ""))
			if err == nil {
				a = answer{status: resp.StatusCode, header: resp.Header}
				a.body = make([]byte, 4096)
				n, _ := resp.Body.Read(a.body)
				a.body = a.body[:n]
				_ = resp.Body.Close()
			}
			done <- err
		}()
		eventually(t, "the call is refused or let in", func() bool {
			select {
			case err := <-done:
				if err != nil {
					t.Fatal(err)
				}
				done <- nil
				return true
			default:
				in = e.server.Held() > before
				return in
			}
		})
		cancel()
		if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		eventually(t, "the call has ended", func() bool { return e.server.Held() == before })
		return a, in
	}
	// 20 calls of about 110 tokens at 100 per second wait 22 s.
	var a answer
	eventually(t, "the rate is measured, and the call refused", func() bool {
		var in bool
		a, in = call()
		return !in
	})
	a.wantError(t, http.StatusTooManyRequests, job.CodeRateLimit, "")
	after, _ := strconv.Atoi(a.header.Get("Retry-After"))
	if after < 10 || !strings.Contains(a.errorOf(t).Message, "All 2 ready workers") {
		t.Errorf("Retry-After %d: %s", after, a.body)
	}
	for name, beats := range map[string][]cluster.Heartbeat{
		"one worker has room":             {workerBeat("w2", cluster.WorkerInfo{State: cluster.Ready, Load: 0.5, Free: 500, Capacity: 1000})},
		"little waits":                    {leaderBeat(cluster.QueueInfo{Waiting: map[job.Class]int{job.Interactive: 1}})},
		"none is ready, one starts":       {workerBeat("w1", cluster.WorkerInfo{State: cluster.Stalled, Load: 1}), workerBeat("w2", cluster.WorkerInfo{State: cluster.Starting})},
		"only durable work of others is ": {leaderBeat(cluster.QueueInfo{Waiting: map[job.Class]int{job.Standard: 1000, job.Batch: 9000}})},
	} {
		set(beats...)
		eventually(t, "let in: "+name, func() bool { _, in := call(); return in })
		set(workerBeat("w1", full), workerBeat("w2", full), leaderBeat(waiting))
		eventually(t, "refused again after: "+name, func() bool { _, in := call(); return !in })
	}
	// Durable work waits instead.
	e.submit(jobBody(chat(1, ""), ""))
}

func TestEachReasonWhyAJobWaits(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	e.known()
	set := e.announce()
	id := e.submit(jobBody(chat(1, ""), ""))
	queue := func() map[string]any {
		return e.send("GET", "/v1/jobs/"+string(id), "").object(t)["queue"].(map[string]any)
	}
	if q := queue(); q["reason"] != "no_worker" || q["position"] != 1.0 || q["eta_seconds"] != nil {
		t.Errorf("%v", q)
	}
	for _, tt := range []struct {
		reason string
		info   cluster.WorkerInfo
	}{
		{"starting", cluster.WorkerInfo{State: cluster.Starting}},
		{"stalled", cluster.WorkerInfo{State: cluster.Stalled}},
		{"unready", cluster.WorkerInfo{State: cluster.Unready}},
		{"draining", cluster.WorkerInfo{State: cluster.Draining}},
		{"saturated", cluster.WorkerInfo{State: cluster.Ready, Capacity: 100}},
		{"saturated", cluster.WorkerInfo{State: cluster.Ready, Capacity: 100, Free: 10, InHand: 1}},
		{"limit", cluster.WorkerInfo{State: cluster.Ready, Capacity: 100, Free: 90, Running: 4, Limit: 4}},
		{"limit", cluster.WorkerInfo{State: cluster.Ready, Capacity: 100, Free: 90, Brake: "the engine has requests waiting"}},
		{"dispatching", cluster.WorkerInfo{State: cluster.Ready, Capacity: 100, Free: 90}},
	} {
		set(workerBeat("w", tt.info))
		eventually(t, "the reason is "+tt.reason, func() bool { return queue()["reason"] == tt.reason })
		q := queue()
		if known := q["eta_seconds"] != nil; q["position"] != 1.0 || known != (tt.reason == "dispatching") {
			t.Errorf("%v", q)
		}
	}
	rec, err := e.results.Get(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	c, err := e.results.Claim(t.Context(), results.ClaimRequest{Job: &rec.Job, Worker: "w", Lease: time.Minute, AckSubject: "a", Delivered: 1})
	if err != nil {
		t.Fatal(err)
	}
	if err := e.results.GiveBack(t.Context(), id, c.Token, 40*time.Second, true, "engine_error"); err != nil {
		t.Fatal(err)
	}
	if q := queue(); q["reason"] != "retry_delay" || q["eta_seconds"].(float64) < 20 || q["eta_seconds"].(float64) > 40 {
		t.Errorf("%v", q)
	}
}

func TestPositionsFallAndTimesFollow(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{KeepAlive: 300 * time.Millisecond, Limits: results.Limits{Model: results.Amount{Jobs: 1000}}})
	e.known()
	set := e.announce()
	full := cluster.WorkerInfo{State: cluster.Ready, Load: 1, Capacity: 1000, TokensPerSecond: 100}
	set(workerBeat("w", full), leaderBeat(cluster.QueueInfo{Waiting: map[job.Class]int{job.Standard: 5}}))
	var ids []job.ID
	for range 5 { // of 100 tokens and a little
		ids = append(ids, e.submit(jobBody(chat(100, ""), "")))
	}
	type place struct{ position, eta float64 }
	at := func(id job.ID) place {
		t.Helper()
		q := e.send("GET", "/v1/jobs/"+string(id), "").object(t)["queue"].(map[string]any)
		eta, _ := q["eta_seconds"].(float64)
		return place{q["position"].(float64), eta}
	}
	eventually(t, "the rate is measured", func() bool { return at(ids[4]).eta > 0 })
	var last place
	for i, id := range ids {
		now := at(id)
		if now.position != float64(i+1) || now.eta <= last.eta || now.eta > 30 {
			t.Errorf("job %d: %+v after %+v", i, now, last)
		}
		last = now
	}
	// The page of all of them tells the same.
	positions := map[string]float64{}
	for _, o := range e.send("GET", "/v1/jobs", "").object(t)["data"].([]any) {
		j := o.(map[string]any)
		positions[j["id"].(string)] = j["queue"].(map[string]any)["position"].(float64)
	}
	for i, id := range ids {
		if positions[string(id)] != float64(i+1) {
			t.Errorf("on the page job %d has position %v", i, positions[string(id)])
		}
	}
	// Who comes later, or is in a lower class, changes nothing; who is in a higher one does.
	e.submit(jobBody(chat(100, ""), ""))
	e.submit(jobBody(chat(100, ""), `,"priority":"batch"`))
	if now := at(ids[4]); now != last {
		t.Errorf("%+v became %+v", last, now)
	}
	high := e.submit(jobBody(chat(100, ""), `,"priority":"interactive"`))
	if now := at(ids[4]); now.position != 6 || now.eta <= last.eta {
		t.Errorf("%+v became %+v", last, now)
	}
	e.send("POST", "/v1/jobs/"+string(high)+"/cancel", "")
	// Those that workers have are not waited for, and those that have ended neither.
	set(leaderBeat(cluster.QueueInfo{Waiting: map[job.Class]int{job.Standard: 4}, Delivered: map[job.Class]int{job.Standard: 2}}))
	eventually(t, "two are delivered", func() bool { return at(ids[4]).position == 3 })
	if now := at(ids[0]); now.position != 1 {
		t.Errorf("%+v", now)
	}
	e.send("POST", "/v1/jobs/"+string(ids[0])+"/cancel", "")
	if now := at(ids[4]); now.position != 2 {
		t.Errorf("%+v", now)
	}
	// The keep-alives of its events tell it, too.
	resp := e.open(t.Context(), "GET", "/v1/jobs/"+string(ids[4])+"/events", "")
	defer resp.Body.Close()
	var text strings.Builder
	for buf := make([]byte, 4096); !strings.Contains(text.String(), "reason=saturated position=2 eta="); {
		n, err := resp.Body.Read(buf)
		if err != nil {
			t.Fatalf("%v after %q", err, text.String())
		}
		text.Write(buf[:n])
	}
	q := e.send("GET", "/admin/v1/queues", "").object(t)["data"].([]any)[0].(map[string]any)
	if q["backlog"].(map[string]any)["jobs"] != 6.0 || q["waiting_tokens"].(float64) < 400 || q["tokens_per_second"].(float64) <= 0 || q["eta_seconds"].(float64) <= 0 ||
		q["limit_fill"] != 0.006 || q["limit_name"] != "model jobs" || q["limits"].(map[string]any)["per_model"].(map[string]any)["jobs"] != 1000.0 {
		t.Errorf("%v", q)
	}
}

func TestAhead(t *testing.T) {
	t.Parallel()
	classes := [3]results.ClassAmount{{Jobs: 2, Tokens: 100}, {Jobs: 10, Tokens: 5000}, {Jobs: 100, Tokens: 100_000}}
	standard := &job.Job{Tenant: "t", Class: job.Standard}
	tests := map[string]struct {
		job    *job.Job
		place  *results.Place
		queue  *cluster.QueueInfo
		jobs   int
		tokens float64
		known  bool
	}{
		"nothing is known": {job: standard},
		"without a place all of its class count, and its line": {
			job: standard, queue: &cluster.QueueInfo{Waiting: map[job.Class]int{job.Interactive: 2, job.Standard: 3, job.Batch: 50}, WaitingLines: map[job.Tenant]int{"t": 4, "u": 9}},
			jobs: 8, tokens: 8 * 200, known: true,
		},
		"an empty queue holds nothing before it": {job: standard, queue: &cluster.QueueInfo{}, known: true},
		"without a dispatcher what runs counts":  {job: standard, place: &results.Place{Jobs: 4, Tokens: 2000, Classes: classes}, jobs: 6, tokens: 2100, known: true},
		"what workers have does not wait": {
			job: standard, place: &results.Place{Jobs: 4, Tokens: 2000, Classes: classes}, queue: &cluster.QueueInfo{Delivered: map[job.Class]int{job.Interactive: 1, job.Standard: 3}},
			jobs: 2, tokens: 50 + 500, known: true,
		},
		"more than there are are delivered": {
			job: standard, place: &results.Place{Jobs: 4, Tokens: 2000, Classes: classes}, queue: &cluster.QueueInfo{Delivered: map[job.Class]int{job.Interactive: 3, job.Standard: 9}},
			known: true,
		},
		"live calls are in no backlog": {
			job: standard, place: &results.Place{Classes: classes}, queue: &cluster.QueueInfo{Waiting: map[job.Class]int{job.Interactive: 7}},
			jobs: 7, tokens: 7 * 50, known: true,
		},
		"lower classes do not matter": {job: &job.Job{Class: job.Interactive}, place: &results.Place{Jobs: 1, Tokens: 50, Classes: classes}, jobs: 1, tokens: 50, known: true},
	}
	for name, tt := range tests {
		jobs, tokens, known := api.Ahead(tt.job, tt.place, tt.queue, 200)
		if jobs != tt.jobs || tokens != tt.tokens || known != tt.known {
			t.Errorf("%s: %d jobs and %v tokens, %v; want %d, %v, %v", name, jobs, tokens, known, tt.jobs, tt.tokens, tt.known)
		}
	}
}

func TestRetryAfterIsUntilThereIsRoom(t *testing.T) {
	t.Parallel()
	place := results.Place{Classes: [3]results.ClassAmount{{}, {Jobs: 10, Tokens: 5000}, {Jobs: 10, Tokens: 15_000}}}
	for name, tt := range map[string]struct {
		over results.LimitError
		rate float64
		want time.Duration
	}{
		"unknown":                        {over: results.LimitError{Unit: results.Jobs, Limit: 20, Used: 20, Asked: 1}},
		"one job has to end":             {results.LimitError{Unit: results.Jobs, Limit: 20, Used: 20, Asked: 1}, 100, 10 * time.Second},
		"more than one after a wipe":     {results.LimitError{Unit: results.Jobs, Limit: 10, Used: 20, Asked: 1}, 100, 110 * time.Second},
		"so many tokens have to be done": {results.LimitError{Unit: results.Tokens, Limit: 20_000, Used: 19_500, Asked: 4500}, 1000, 4 * time.Second},
		"so many bytes have to go":       {results.LimitError{Unit: results.Bytes, Limit: 1000, Used: 1000, Asked: 100}, 1000, 2 * time.Second},
		"never less than a second":       {results.LimitError{Unit: results.Tokens, Limit: 10, Used: 10, Asked: 1}, 1e6, time.Second},
	} {
		tt.over.Place = place
		if got := api.UntilRoom(&tt.over, tt.rate); got != tt.want {
			t.Errorf("%s: %v, want %v", name, got, tt.want)
		}
	}
}

func TestRateIsMeasuredInExpectedTokensWhileWorkersAreFull(t *testing.T) {
	t.Parallel()
	const m = job.Model("m")
	p := api.NewPace()
	start := time.Now()
	var heard time.Time
	generated := map[string]int64{}
	beat := func(id string, load float64, perSecond, ended int64) cluster.Member {
		generated[id] += perSecond
		return cluster.Member{Heartbeat: cluster.Heartbeat{ID: id, Worker: &cluster.WorkerInfo{
			State: cluster.Ready, Models: []job.Model{m}, Load: load, Free: 10, Generated: generated[id], Completed: ended,
		}}, Heard: heard}
	}
	near := func(what string, got, want float64) {
		t.Helper()
		if got < want*0.97 || got > want*1.03 {
			t.Errorf("%s: %v tokens/s, want %v", what, got, want)
		}
	}
	var now []cluster.Member
	second, waits := 0, true
	run := func(seconds int, beats func(i int64) []cluster.Member) {
		for range seconds {
			second++
			heard = start.Add(time.Duration(second) * time.Second)
			now = beats(int64(second))
			p.Observe(heard, now, waits)
		}
	}
	for range 200 { // jobs may write 1,000 tokens
		p.Came(start, m, 1000, false)
	}
	run(30, func(i int64) []cluster.Member { return []cluster.Member{beat("a", 0.2, 40, i)} })
	if got := p.Tokens(m, now, 0); got != 0 {
		t.Errorf("a worker with room says it does %v tokens/s", got)
	}
	waits = false
	run(5, func(i int64) []cluster.Member { return []cluster.Member{beat("a", 1, 40, i)} })
	if got := p.Tokens(m, now, 0); got != 0 {
		t.Errorf("a worker for which nothing waits says it does %v tokens/s", got)
	}
	waits = true
	// They write 200, two a second.
	run(60, func(i int64) []cluster.Member { return []cluster.Member{beat("a", 1, 400, 2*i)} })
	got := p.Tokens(m, now, 0)
	if got < 1700 || got > 2600 { // the minute still remembers jobs of 40 tokens
		t.Errorf("%v tokens/s, want about 2000", got)
	}
	run(400, func(i int64) []cluster.Member { return []cluster.Member{beat("a", 1, 400, 2*i)} })
	near("one worker", p.Tokens(m, now, 0), 2000)
	// A second one that was never full is taken for like the first; then it shows that it is slower.
	run(5, func(i int64) []cluster.Member { return []cluster.Member{beat("a", 1, 400, 2*i), beat("b", 0.1, 0, 0)} })
	near("one more", p.Tokens(m, now, 0), 4000)
	run(400, func(i int64) []cluster.Member { return []cluster.Member{beat("a", 1, 400, 2*i), beat("b", 1, 200, i)} })
	near("a slower one", p.Tokens(m, now, 0), 3000)
	// Idle, they are still known to be as fast.
	ended := int64(second)
	run(100, func(int64) []cluster.Member {
		return []cluster.Member{beat("a", 0, 0, 2*ended), beat("b", 0, 0, ended)}
	})
	near("idle", p.Tokens(m, now, 0), 3000)
	run(1, func(int64) []cluster.Member { return []cluster.Member{beat("b", 0, 0, ended)} })
	near("the fast one is gone", p.Tokens(m, now, 0), 1000)
	if got := p.Tokens(m, nil, 0); got != 0 {
		t.Errorf("nobody does %v tokens/s", got)
	}
	// What generates nothing is measured by its jobs.
	q := api.NewPace()
	for i := range 300 {
		heard = start.Add(time.Duration(i) * time.Second)
		now = []cluster.Member{beat("e", 1, 0, 5*int64(i))}
		q.Observe(heard, now, true)
	}
	if got := q.Tokens(m, now, 0); got != 0 {
		t.Errorf("of jobs of unknown size %v tokens/s", got)
	}
	near("embeddings", q.Tokens(m, now, 30), 150)
}

func TestCallsSinceAHeartbeatAreCounted(t *testing.T) {
	t.Parallel()
	p := api.NewPace()
	start := time.Now()
	if sum, mean := p.Since("m", start); sum != 0 || mean != 0 {
		t.Errorf("%d tokens, mean %v", sum, mean)
	}
	for i := range 100_000 { // 1,000 a second
		p.Came(start.Add(time.Duration(i)*time.Millisecond), "m", 10, true)
	}
	p.Came(start.Add(100*time.Second), "m", 10, false) // durable
	for _, tt := range []struct {
		at   time.Duration
		want job.Tokens
	}{{99 * time.Second, 10_000}, {97*time.Second + 500*time.Millisecond, 25_000}, {100 * time.Second, 0}} {
		if sum, mean := p.Since("m", start.Add(tt.at)); sum != tt.want || mean != 10 {
			t.Errorf("since %v: %d tokens, mean %v; want %d", tt.at, sum, mean, tt.want)
		}
	}
}
