package e2e_test

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/millrace/millrace/internal/engine/emulator"
	"github.com/millrace/millrace/internal/testenv"
)

// TestWorkersKilledEverySecondLoseNoJob: 64 jobs, four workers, a kill -9 each second, until all has ended or each was killed four times: on a slow machine a worker hardly lives for a second.
func TestWorkersKilledEverySecondLoseNoJob(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := startEngine(t)
	api, dispatcher := c.api("api"), c.dispatcher("dispatcher")
	workers := make([]*process, 4)
	for i := range workers {
		workers[i] = c.worker(fmt.Sprint("worker-", i), e.URL, plain(2)...)
	}
	c.startAll(slices.Concat(workers, []*process{api.process, dispatcher})...)
	c.served()
	ids := api.submitMany(64, "", func(i int) string { return marked("tokens=12,token-delay=50ms", i) })
	stop := make(chan struct{})
	var killer sync.WaitGroup
	end := sync.OnceFunc(func() { close(stop); killer.Wait() })
	defer end()
	killer.Go(func() {
		tick := time.NewTicker(time.Second)
		defer tick.Stop()
		for i := range 4 * len(workers) {
			select {
			case <-tick.C:
				p := workers[i%len(workers)]
				p.kill()
				p.begin()
			case <-stop:
				return
			}
		}
	})
	jobs := api.ended(2*patience, ids...)
	end()
	nc := connect(t, c.natsURL())
	exactlyOnce(t, nc, api.client, patience, ids...)
	if n := len(outcomes(t, nc)); n != len(ids) {
		t.Errorf("there are %d records for %d jobs", n, len(ids))
	}
	deaths := 0
	for _, j := range jobs {
		deaths += len(j.Attempts) - 1
		if j.Status == "completed" || j.Error.code() == "worker_crashed" && len(j.Attempts) >= 3 { // thrice unlucky
			continue
		}
		t.Errorf("job %s is %s after %+v: %+v", j.ID, j.Status, j.Attempts, j.Error)
	}
	if deaths == 0 {
		t.Error("no job was hit")
	}
	workEmpty(t, nc)
}

// TestChurnOfWorkersLeavesNoJobBehind: workers come and go, some in order and some not, under a mixed load.
func TestChurnOfWorkersLeavesNoJobBehind(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := startEngine(t)
	api, dispatcher := c.api("api"), c.dispatcher("dispatcher")
	steady := c.worker("steady", e.URL, plain(2)...)
	churning := make([]*process, 3)
	for i := range churning {
		churning[i] = c.worker(fmt.Sprint("churning-", i), e.URL, append(plain(4), "--drain", "500ms")...)
	}
	c.startAll(slices.Concat(churning, []*process{api.process, dispatcher, steady})...)

	var load sync.WaitGroup
	var ids []string
	var answers [60]*answer
	load.Go(func() {
		for range 5 {
			ids = append(ids, api.submitMany(40, "", func(i int) string { return marked("tokens=6,token-delay=40ms", len(ids)+i) })...)
		}
	})
	load.Go(func() {
		var calls sync.WaitGroup
		slots := make(chan struct{}, 4)
		for i := range answers {
			slots <- struct{}{}
			calls.Go(func() {
				defer func() { <-slots }()
				a, err := api.send("POST", "/v1/chat/completions", chat(marked("tokens=6,token-delay=40ms", 9000+i), ""))
				if err != nil {
					t.Errorf("a call got no answer: %v", err)
				}
				answers[i] = a
			})
		}
		calls.Wait()
	})
	random := rand.New(rand.NewPCG(1, 2))
	for i := range 12 {
		p := churning[i%len(churning)]
		if random.IntN(2) == 0 {
			p.kill()
		} else {
			p.terminate(patience)
		}
		p.start()
	}
	load.Wait()
	jobs := exactlyOnce(t, connect(t, c.natsURL()), api.client, 2*patience, ids...)
	for _, j := range jobs {
		if j.Status != "completed" && j.Error.code() != "worker_crashed" {
			t.Errorf("job %s is %s after %+v: %+v", j.ID, j.Status, j.Attempts, j.Error)
		}
	}
	for i, a := range answers {
		if a != nil && a.status != http.StatusOK && a.code() == "" {
			t.Errorf("call %d was answered %d: %s", i, a.status, a.body)
		}
	}
	workEmpty(t, connect(t, c.natsURL()))
}

// TestReaderGoesOnAfterItsWorkerDied: the only worker is killed after some tokens. Who reads gets a reset or what follows, and in the end the answer, once.
func TestReaderGoesOnAfterItsWorkerDied(t *testing.T) {
	t.Parallel()
	d := deploy(t, 4)
	const content = "[[emulator:tokens=20,token-delay=150ms]] count"
	id := d.api.submit(content, "")
	s := d.api.mustEvents(id, 0)
	defer s.close()
	live, liveID := d.chatStream(t, content)
	defer live.close()
	var got, liveGot []event
	for tokens := 0; tokens < 5; {
		e, err := s.next()
		if err != nil {
			t.Fatal(err)
		}
		if got = append(got, e); e.kind == "token" {
			tokens++
		}
	}
	for len(liveGot) < 5 {
		e, err := live.next()
		if err != nil {
			t.Fatal(err)
		}
		liveGot = append(liveGot, e)
	}
	died := time.Now()
	d.worker.restart()

	// The client on its own connection has seen a part, which no other attempt can go on with: it is told so, soon.
	rest, err := live.rest()
	if liveGot = append(liveGot, rest...); err != nil || !strings.HasPrefix(liveGot[len(liveGot)-1].data, `{"error":{`) || strings.Contains(rawOf(liveGot), "[DONE]") {
		t.Errorf("the live stream ends with %v and %q", err, liveGot[len(liveGot)-1].raw)
	}
	if took := time.Since(died); took > 20*time.Second {
		t.Errorf("the live client waited %v for its end", took)
	}
	rest, err = s.rest()
	if err != nil {
		t.Fatal(err)
	}
	got = append(got, rest...)
	if took := time.Since(died); took > 30*time.Second {
		t.Errorf("the reader waited %v for the end", took)
	}
	rising(t, id, got)
	j := d.api.ended(patience, id)[id]
	want := answerText(d.engine.direct(t, chat(content, "")))
	if j.Status != "completed" || j.text() != want || told(got) != want {
		t.Errorf("the job is %s, its answer %q, the reader was told %q, the engine says %q", j.Status, j.text(), told(got), want)
	}
	if j.Usage == nil || j.Usage.Completion != 20 {
		t.Errorf("the usage is %+v, not 20 tokens", j.Usage)
	}
	if kinds := kindsOf(got); kinds["reset"] != 1 {
		t.Errorf("the reader got %v: an engine that begins anew is told by one reset", kinds)
	}
	if len(j.Attempts) != 2 {
		t.Errorf("there were %+v", j.Attempts)
	}
	if n := len(d.engine.of(liveID)); n != 1 {
		t.Errorf("the engine was called %d times for the live stream", n)
	}
	nc := connect(t, d.natsURL())
	workEmpty(t, nc)
	outcomes(t, nc)
}

// TestCancelReachesTheRightCall: one slot and two jobs. Cancelling the one that waits leaves the other alone; cancelling that one ends its call in the engine.
func TestCancelReachesTheRightCall(t *testing.T) {
	t.Parallel()
	d := deploy(t, 1)
	active := d.api.submit("[[emulator:tokens=400,token-delay=100ms]] long", "")
	call := d.engine.called(t, active, 1)
	waiting := d.api.submit("[[emulator:tokens=5]] waits", "")
	d.api.must(http.StatusOK, "POST", "/v1/jobs/"+waiting+"/cancel", nil)
	if j := d.api.ended(patience, waiting)[waiting]; j.Status != "cancelled" {
		t.Errorf("the waiting job is %s", j.Status)
	}
	if j, err := d.api.job(active, ""); err != nil || j.Status != "running" {
		t.Fatalf("the active job: %v %+v", err, j)
	}
	select {
	case <-call.ended:
		t.Fatal("the other job's call has ended")
	default:
	}
	begun := time.Now()
	d.api.must(http.StatusOK, "POST", "/v1/jobs/"+active+"/cancel", nil)
	select {
	case <-call.ended:
	case <-time.After(patience):
	}
	if took := time.Since(begun); !call.gone || took > 2*time.Second {
		t.Errorf("the call in the engine ended %v after the cancel, its caller gone: %v", took, call.gone)
	}
	if j := d.api.ended(patience, active)[active]; j.Status != "cancelled" {
		t.Errorf("the active job is %s", j.Status)
	}
	d.api.must(http.StatusOK, "POST", "/v1/jobs/"+active+"/cancel", nil)
	// The slot is free: the next one runs. A cancel then comes too late.
	next := d.api.submit("[[emulator:tokens=5]] next", "")
	if j := d.api.ended(patience, next)[next]; j.Status != "completed" {
		t.Errorf("the next job is %s", j.Status)
	}
	d.api.must(http.StatusConflict, "POST", "/v1/jobs/"+next+"/cancel", nil)
	if n := len(d.engine.of(waiting)); n != 0 {
		t.Errorf("the engine was called %d times for a job cancelled while it waited", n)
	}
	exactlyOnce(t, connect(t, d.natsURL()), d.api.client, patience, active, waiting, next)
}

// TestClientThatLeavesCancelsOnlyItsOwnCall: a disconnect ends a call on its connection, and no job.
func TestClientThatLeavesCancelsOnlyItsOwnCall(t *testing.T) {
	t.Parallel()
	d := deploy(t, 8)
	const content = "[[emulator:tokens=30,token-delay=100ms]] who listens"
	job := d.api.submit(content, "")
	reader := d.api.mustEvents(job, 0)
	live, liveID := d.chatStream(t, content)
	keyed, err := d.api.open("POST", "/v1/chat/completions", chat(content, `"stream":true`), "Idempotency-Key", "left")
	if err != nil {
		t.Fatal(err)
	}
	keyedID := keyed.resp.Header.Get("X-Millrace-Job")
	for _, s := range []*stream{reader, live, keyed} {
		for range 2 {
			if _, err := s.next(); err != nil {
				t.Fatal(err)
			}
		}
	}
	call := d.engine.called(t, liveID, 1)
	for _, s := range []*stream{reader, live, keyed} {
		s.close()
	}
	begun := time.Now()
	select {
	case <-call.ended:
	case <-time.After(patience):
	}
	if took := time.Since(begun); !call.gone || took > 2*time.Second {
		t.Errorf("the live call ended %v after its client left, its caller gone: %v", took, call.gone)
	}
	// Whoever asked for a job, or gave a key to ask again with, gets the answer later.
	for _, id := range []string{job, keyedID} {
		if j := d.api.ended(patience, id)[id]; j.Status != "completed" || len(j.Attempts) != 1 {
			t.Errorf("job %s is %s after %+v", id, j.Status, j.Attempts)
		}
	}
	again, err := d.api.open("POST", "/v1/chat/completions", chat(content, `"stream":true`), "Idempotency-Key", "left")
	if err != nil {
		t.Fatal(err)
	}
	defer again.close()
	all, err := again.rest()
	if err != nil {
		t.Fatal(err)
	}
	if want := answerText(d.engine.direct(t, chat(content, ""))); contents(all) != want {
		t.Errorf("the same call again says %q, not %q", contents(all), want)
	}
	d.engine.once(t, job, keyedID, liveID)
	nc := connect(t, d.natsURL())
	workEmpty(t, nc)
	if o := outcomes(t, nc)[liveID]; o.State != "cancelled" {
		t.Errorf("the live call's outcome is %s", o.State)
	}
}

// TestJobThatKillsItsWorkerThriceFails: a worker that dies each time that one job starts. That job fails, and the others do not.
func TestJobThatKillsItsWorkerThriceFails(t *testing.T) {
	t.Parallel()
	d := deploy(t, 4)
	poison := d.api.submit("[[emulator:tokens=400,token-delay=100ms]] poison", "")
	d.engine.called(t, poison, 1)
	others := d.api.submitMany(12, "", func(i int) string { return marked("tokens=5,token-delay=100ms", i) })
	for n := 1; n <= 3; n++ {
		d.engine.called(t, poison, n)
		d.api.status(poison, "running")
		d.worker.restart()
	}
	jobs := exactlyOnce(t, connect(t, d.natsURL()), d.api.client, patience, append(others, poison)...)
	if j := jobs[poison]; j.Status != "failed" || j.Error.code() != "worker_crashed" || len(j.Attempts) != 3 {
		t.Errorf("the poison is %s with %+v after %+v", j.Status, j.Error, j.Attempts)
	}
	if n := len(d.engine.of(poison)); n != 3 {
		t.Errorf("the engine was called %d times for the poison", n)
	}
	for _, id := range others {
		if j := jobs[id]; j.Status != "completed" {
			t.Errorf("job %s is %s after %+v: %+v", id, j.Status, j.Attempts, j.Error)
		}
	}
	workEmpty(t, connect(t, d.natsURL()))
}

// TestJobThatCrashesTheEngineFails: the worker starts the engine itself, and one prompt brings the engine down each time. Those beside it do not fail with it.
func TestJobThatCrashesTheEngineFails(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	api, dispatcher := c.api("api"), c.dispatcher("dispatcher")
	addr := testenv.FreeAddr(t)
	worker := c.role("worker", "worker", "--name", "worker", "--engine", "http://"+addr, "--max-attempts", "3", "--",
		program, "emulator", "--listen", addr, "--profile", "test", "--model", model)
	c.startAll(api.process, dispatcher, worker)
	poison := api.submit("[[emulator:crash-after=2,tokens=10,token-delay=50ms]] poison", "")
	others := api.submitMany(20, "", func(i int) string { return marked("tokens=5,token-delay=50ms", i) })
	nc := connect(t, c.natsURL())
	jobs := exactlyOnce(t, nc, api.client, 2*patience, append(others, poison)...)
	if j := jobs[poison]; j.Status != "failed" || len(j.Attempts) < 3 || j.Error.code() == "" { // more if it met an engine that was not there yet
		t.Errorf("the poison is %s with %+v after %+v", j.Status, j.Error, j.Attempts)
	}
	for _, id := range others {
		if j := jobs[id]; j.Status != "completed" {
			t.Errorf("job %s is %s after %+v: %+v", id, j.Status, j.Attempts, j.Error)
		}
	}
	// The engine is there again, and serves.
	after := api.submit("[[emulator:tokens=5]] after", "")
	if j := api.ended(patience, after)[after]; j.Status != "completed" {
		t.Errorf("the job after is %s", j.Status)
	}
	workEmpty(t, nc)
	worker.terminate(patience)
	eventually(t, patience, "the engine has ended with its worker", func() error {
		if err := c.get200("http://" + addr + "/health"); err == nil {
			return fmt.Errorf("it still answers")
		}
		return nil
	})
}

// TestTerminatedWorkerFinishesWhatRuns: SIGTERM lets streams end as they are, and gives at once back what has not started.
func TestTerminatedWorkerFinishesWhatRuns(t *testing.T) {
	t.Parallel()
	d := deploy(t, 3)
	content := func(i int) string { return marked("tokens=30,token-delay=100ms", i) }
	running := d.api.submitMany(2, "", content)
	live, liveID := d.chatStream(t, content(9))
	defer live.close()
	for _, id := range running {
		d.engine.called(t, id, 1)
	}
	d.engine.called(t, liveID, 1)
	waiting := d.api.submitMany(9, "", func(i int) string { return marked("tokens=5", 100+i) })
	second := d.cluster.worker("second", d.engine.URL, plain(8)...)
	begun := time.Now()
	terminated := make(chan time.Duration, 1)
	go func() {
		d.worker.terminate(patience)
		terminated <- time.Since(begun)
	}()
	second.start()
	d.api.ended(10*time.Second, waiting...) // and not after their ack wait of 15 s
	all, err := live.rest()
	if err != nil || all[len(all)-1].data != "[DONE]" {
		t.Errorf("the live stream ends with %v", err)
	}
	if want := answerText(d.engine.direct(t, chat(content(9), ""))); contents(all) != want {
		t.Errorf("the live stream says %q, not %q", contents(all), want)
	}
	if took := <-terminated; took > 30*time.Second {
		t.Errorf("the worker ended after %v", took)
	}
	jobs := exactlyOnce(t, connect(t, d.natsURL()), d.api.client, patience, append(running, waiting...)...)
	for id, j := range jobs {
		if j.Status != "completed" || len(j.Attempts) != 1 {
			t.Errorf("job %s is %s after %+v", id, j.Status, j.Attempts)
		}
	}
	d.engine.once(t, append(append(running, waiting...), liveID)...)
}

// TestTerminatedRolesEndWell: each role ends with code 0 after SIGTERM, in any order, and the next start goes on.
func TestTerminatedRolesEndWell(t *testing.T) {
	t.Parallel()
	d := deploy(t, 4)
	id := d.api.submit("[[emulator:tokens=5]] a", "")
	d.api.ended(patience, id)
	d.dispatcher.terminate(patience)
	d.api.terminate(patience)
	d.worker.terminate(patience)
	d.startAll(d.api.process, d.dispatcher, d.worker)
	next := d.api.submit("[[emulator:tokens=5]] b", "")
	exactlyOnce(t, connect(t, d.natsURL()), d.api.client, patience, id, next)
	d.api.terminate(patience)
	d.worker.terminate(patience)
	d.dispatcher.terminate(patience)
}

// TestWorkerThatWasFrozenWritesNothingLater: a worker that hangs past its lease loses its job to another, and what it says when it wakes counts for nothing.
func TestWorkerThatWasFrozenWritesNothingLater(t *testing.T) {
	t.Parallel()
	d := deploy(t, 4)
	const content = "[[emulator:tokens=12,token-delay=100ms]] who wins"
	d.engine.shut()
	id := d.api.submit(content, "")
	d.engine.called(t, id, 1)
	d.api.status(id, "running")
	reader := d.api.mustEvents(id, 0)
	defer reader.close()
	d.worker.pause()
	second := d.cluster.worker("second", d.engine.URL, plain(4)...)
	second.start()
	d.engine.called(t, id, 2)
	d.engine.open() // both calls are answered, the first to one that sleeps
	j := d.api.ended(patience, id)[id]
	d.worker.unpause()
	// It lives on, and works.
	d.worker.await()
	next := d.api.submitMany(20, "", func(i int) string { return marked("tokens=5", i) })
	nc := connect(t, d.natsURL())
	jobs := exactlyOnce(t, nc, d.api.client, patience, append(next, id)...)
	workEmpty(t, nc)
	if again := jobs[id]; again.text() != j.text() || j.Status != "completed" || again.Status != "completed" || len(again.Attempts) != 2 || !strings.HasPrefix(again.Attempts[1].Worker, "second-") {
		t.Errorf("the job was %s with %q, and is %s with %q after %+v", j.Status, j.text(), again.Status, again.text(), again.Attempts)
	}
	all, err := reader.rest()
	if err != nil {
		t.Fatal(err)
	}
	rising(t, id, all)
	if told(all) != j.text() {
		t.Errorf("the reader was told %q, the answer is %q", told(all), j.text())
	}
}

// TestStalledEngineLosesItsWork: an engine takes calls, says that it is well, and gives no token. Its work goes back, uncharged, and ends elsewhere.
func TestStalledEngineLosesItsWork(t *testing.T) {
	t.Parallel()
	d := deploy(t, 8, "--stall-timeout", "2s", "--probe-timeout", "1s")
	if err := d.engine.emu.SetFaults(emulator.Faults{Stall: true}); err != nil {
		t.Fatal(err)
	}
	ids := d.api.submitMany(6, "", func(i int) string { return marked("tokens=5", i) })
	live := make(chan *answer, 1)
	go func() {
		a, err := d.api.send("POST", "/v1/chat/completions", chat(marked("tokens=5", 100), ""))
		if err != nil {
			t.Errorf("the live call: %v", err)
		}
		live <- a
	}()
	eventually(t, patience, "the engine has all calls, or has lost those that it had", func() error {
		if n := len(d.engine.all()); n < len(ids)+1 && (n == 0 || d.worker.ready() == nil) {
			return fmt.Errorf("it has %d", n)
		}
		return nil
	})
	healthy := startEngine(t)
	second := d.cluster.worker("second", healthy.URL, plain(8)...)
	second.start()
	jobs := exactlyOnce(t, connect(t, d.natsURL()), d.api.client, patience, ids...)
	for id, j := range jobs {
		if j.Status != "completed" {
			t.Errorf("job %s is %s after %+v: %+v", id, j.Status, j.Attempts, j.Error)
		}
	}
	if a := <-live; a != nil && a.status != http.StatusOK {
		t.Errorf("the live call was answered %d: %s", a.status, a.body)
	}
	if d.worker.ready() == nil {
		t.Error("a worker beside a stalled engine says that it is ready")
	}
	if err := d.engine.emu.SetFaults(emulator.Faults{}); err != nil {
		t.Fatal(err)
	}
	d.worker.await() // it notices when the engine works again
}
