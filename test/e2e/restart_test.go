package e2e_test

import (
	"fmt"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"
)

// chatStream opens a chat's stream on its own connection, and returns it with the job's id.
func (d *deployment) chatStream(t *testing.T, content string) (*stream, string) {
	t.Helper()
	s, err := d.api.open("POST", "/v1/chat/completions", chat(content, `"stream":true`))
	if err != nil {
		t.Fatal(err)
	}
	return s, s.resp.Header.Get("X-Millrace-Job")
}

// direct is what the engine itself answers to a chat.
func (e *engine) direct(t *testing.T, body []byte) []byte {
	t.Helper()
	c := &client{t: t, url: e.URL, http: http.DefaultClient}
	defer http.DefaultClient.CloseIdleConnections()
	return c.must(http.StatusOK, "POST", "/v1/chat/completions", body).body
}

func TestKilledRoleEndsEveryAcceptedJobOnce(t *testing.T) {
	t.Parallel()
	for _, role := range []string{"worker", "api", "dispatcher"} {
		t.Run(role, func(t *testing.T) {
			t.Parallel()
			const slots = 12
			d := deploy(t, slots)
			ids := populate(t, d.api.client, d.engine, slots)
			broken := map[string]*process{"worker": d.worker, "api": d.api.process, "dispatcher": d.dispatcher}[role]
			broken.kill()
			d.engine.open()
			broken.start()
			nc := connect(t, d.natsURL())
			jobs := exactlyOnce(t, nc, d.api.client, 2*patience, flatten(ids)...)
			settled(t, jobs, ids)
			d.engine.once(t, ids["completed"]...)
			d.engine.once(t, ids["queued"]...)
			d.engine.never(t, append(ids["expired"], ids["cancelled"]...)...)
			if role != "worker" {
				d.engine.once(t, ids["running"]...)
			}
			for _, id := range ids["running"] {
				want := 1
				if role == "worker" { // the one that died, and the one after
					want = 2
				}
				if n := len(jobs[id].Attempts); n != want {
					t.Errorf("job %s ran while the %s was killed, and has %d attempts: %+v", id, role, n, jobs[id].Attempts)
				}
			}
			workEmpty(t, nc)
		})
	}
}

// TestKilledNATSChargesNoAttemptAndCancelsNoCall: NATS dies and comes back while jobs wait and run and a client reads a stream. Nobody but the queue notices.
func TestKilledNATSChargesNoAttemptAndCancelsNoCall(t *testing.T) {
	t.Parallel()
	const slots = 12
	d := deploy(t, slots)
	ids := populate(t, d.api.client, d.engine, slots)
	d.engine.open()
	d.api.ended(patience, flatten(ids)...)
	// What runs now takes some seconds; the stream's client is half through.
	running := d.api.submitMany(6, "", func(i int) string { return marked("tokens=40,token-delay=100ms", i) })
	whole := d.api.submitMany(3, `"stream":false`, func(i int) string { return marked("tokens=10,delay=4s", i) })
	for _, id := range append(running, whole...) {
		d.engine.called(t, id, 1)
	}
	const content = "[[emulator:tokens=50,token-delay=100ms]] read to me"
	live, id := d.chatStream(t, content)
	defer live.close()
	var calls sync.WaitGroup
	var unstreamed *answer
	var unstreamedErr error
	calls.Go(func() {
		unstreamed, unstreamedErr = d.api.send("POST", "/v1/chat/completions", chat("[[emulator:tokens=10,delay=4s]] wait for it", ""))
	})
	var got []event
	for len(got) < 6 {
		e, err := live.next()
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, e)
	}
	d.engine.shut()
	waiting := d.api.submitMany(40, "", func(i int) string { return marked("tokens=5", 5000+i) })
	d.nats.restart()
	d.engine.open()

	rest, err := live.rest()
	if err != nil {
		t.Fatalf("the stream broke off: %v", err)
	}
	got = append(got, rest...)
	if last := got[len(got)-1].data; last != "[DONE]" {
		t.Errorf("the stream ends with %s", last)
	}
	if want := answerText(d.engine.direct(t, chat(content, ""))); contents(got) != want {
		t.Errorf("the stream says %q, not %q", contents(got), want)
	}
	calls.Wait()
	if unstreamedErr != nil || unstreamed.status != http.StatusOK {
		t.Errorf("the call in one piece: %v %+v", unstreamedErr, unstreamed)
	}
	if n := len(d.engine.of(id)); n != 1 {
		t.Errorf("the engine was called %d times for the stream", n)
	}

	nc := connect(t, d.natsURL())
	all := append(append(append(flatten(ids), running...), whole...), waiting...)
	jobs := exactlyOnce(t, nc, d.api.client, 2*patience, all...)
	for _, id := range append(append(append([]string(nil), running...), whole...), waiting...) {
		j := jobs[id]
		if j.Status != "completed" || len(j.Attempts) != 1 || strings.TrimSpace(j.text()) == "" {
			t.Errorf("job %s is %s after %+v", id, j.Status, j.Attempts)
		}
	}
	d.engine.once(t, running...)
	d.engine.once(t, whole...)
	d.engine.once(t, waiting...)
	for _, c := range d.engine.all() {
		select {
		case <-c.ended:
			if c.gone {
				t.Errorf("the call for %s was cancelled", c.job)
			}
		default:
			t.Errorf("the call for %s still runs", c.job)
		}
	}
	workEmpty(t, nc)
}

// TestQueueRestartedOverAndOver: NATS is killed again and again under load, and nobody else is restarted.
func TestQueueRestartedOverAndOver(t *testing.T) {
	t.Parallel()
	d := deploy(t, 4)
	second := d.cluster.worker("second", d.engine.URL, plain(4)...)
	second.start()
	var ids []string
	for round := range 4 {
		ids = append(ids, d.api.submitMany(24, "", func(i int) string { return marked("tokens=8,token-delay=60ms", 100*round+i) })...)
		d.engine.called(t, ids[24*round], 1)
		d.nats.restart()
		eventually(t, patience, "the API is ready again", d.api.ready)
		// The work goes on within seconds.
		eventually(t, 15*time.Second, "a new job is run", func() error {
			a, err := d.api.send("POST", "/v1/chat/completions", chat(marked("tokens=2", 10_000+round), ""), "X-Millrace-Priority", "interactive")
			if err != nil || a.status != http.StatusOK {
				return fmt.Errorf("%w %+v", err, a)
			}
			return nil
		})
	}
	nc := connect(t, d.natsURL())
	jobs := exactlyOnce(t, nc, d.api.client, patience, ids...)
	for id, j := range jobs {
		stalled := 0 // a machine that stands still for a second looks to a worker as if its engine did, and another worker is there
		for _, a := range j.Attempts {
			if a.Outcome != nil && *a.Outcome == "engine_stalled" {
				stalled++
			}
		}
		if j.Status != "completed" || len(j.Attempts)-stalled != 1 {
			t.Errorf("job %s is %s after %+v: %+v", id, j.Status, j.Attempts, j.Error)
		}
		if n := len(d.engine.of(id)); n == 0 || n > len(j.Attempts) {
			t.Errorf("the engine was called %d times for %s, which had %d attempts", n, id, len(j.Attempts))
		}
	}
	workEmpty(t, nc)
}

// TestKilledAPIEndsTheCallsThatItHeld: nobody waits for them any more. What is durable goes on.
func TestKilledAPIEndsTheCallsThatItHeld(t *testing.T) {
	t.Parallel()
	d := deploy(t, 2)
	const content = "[[emulator:tokens=400,token-delay=100ms]] who listens"
	live, id := d.chatStream(t, content)
	defer live.close()
	call := d.engine.called(t, id, 1)
	durable := d.api.submit("[[emulator:tokens=60,token-delay=100ms]] goes on", "")
	d.engine.called(t, durable, 1)
	// This one waits behind the others.
	waiting := make(chan error, 1)
	go func() {
		_, err := d.api.send("POST", "/v1/chat/completions", chat(content+" and waits", ""))
		waiting <- err
	}()
	nc := connect(t, d.natsURL())
	eventually(t, patience, "both calls are queued", func() error {
		if n, err := held(nc, "LIVE_"+model); n != 2 {
			return fmt.Errorf("%d are: %w", n, err)
		}
		return nil
	})
	d.api.kill()
	begun := time.Now()
	select {
	case <-call.ended:
	case <-time.After(patience):
	}
	if took := time.Since(begun); !call.gone || took > 15*time.Second {
		t.Errorf("the held call ended %v after its API was killed, its caller gone: %v", took, call.gone)
	}
	if err := <-waiting; err == nil {
		t.Error("a call was answered by a dead API")
	}
	d.api.start()
	jobs := exactlyOnce(t, nc, d.api.client, patience, durable)
	if j := jobs[durable]; j.Status != "completed" || len(j.Attempts) != 1 {
		t.Errorf("the durable job is %s after %+v", j.Status, j.Attempts)
	}
	workEmpty(t, nc)
	states := map[string]int{}
	for _, o := range outcomes(t, nc) {
		states[o.State]++
	}
	if states["cancelled"] != 2 || states["completed"] != 1 {
		t.Errorf("the outcomes are %v, not two cancelled and one completed", states)
	}
	if n := len(d.engine.all()); n != 2 {
		t.Errorf("the engine got %d calls: also one that nobody waited for", n)
	}
}

// TestFrozenLeaderIsReplaced: a dispatcher that hangs loses the lead to another, and does no harm when it wakes.
func TestFrozenLeaderIsReplaced(t *testing.T) {
	t.Parallel()
	d := deploy(t, 4)
	second := d.cluster.dispatcher("second")
	second.start()
	d.dispatcher.pause()
	// What only a leader does: a deadline, a dead worker, a waiting line.
	d.engine.shut()
	ids := map[string][]string{"running": d.api.submitMany(4, "", func(i int) string { return marked("tokens=5", i) })}
	for _, id := range ids["running"] {
		d.engine.called(t, id, 1)
		d.api.status(id, "running")
	}
	ids["expired"] = d.api.submitMany(3, `"deadline":"1s"`, func(i int) string { return marked("tokens=5", 100+i) })
	for id, j := range d.api.ended(patience, ids["expired"]...) {
		if j.Status != "expired" {
			t.Errorf("job %s is %s", id, j.Status)
		}
	}
	d.worker.restart()
	for _, id := range ids["running"] {
		d.engine.called(t, id, 2)
	}
	d.dispatcher.unpause()
	d.dispatcher.await()
	ids["queued"] = d.api.submitMany(150, "", func(i int) string { return marked("tokens=3", 1000+i) })
	second.kill() // the first one leads again
	d.engine.open()
	nc := connect(t, d.natsURL())
	settled(t, exactlyOnce(t, nc, d.api.client, patience, flatten(ids)...), ids)
	d.engine.once(t, ids["queued"]...)
	d.engine.never(t, ids["expired"]...)
	workEmpty(t, nc)
}

// TestPowerCut kills everything at once, the servers too, and starts it again in no order.
func TestPowerCut(t *testing.T) {
	t.Parallel()
	const slots = 12
	d := deploy(t, slots)
	ids := populate(t, d.api.client, d.engine, slots)
	all := []*process{d.nats, d.api.process, d.dispatcher, d.worker}
	for _, p := range all {
		p.signal(os.Kill)
	}
	d.redis.Kill()
	for _, p := range all {
		p.wait()
	}
	d.engine.open()
	d.redis.Start(t)
	d.startAll(d.worker, d.dispatcher, d.api.process, d.nats)
	nc := connect(t, d.natsURL())
	settled(t, exactlyOnce(t, nc, d.api.client, 2*patience, flatten(ids)...), ids)
	d.engine.once(t, ids["completed"]...)
	d.engine.once(t, ids["queued"]...)
	d.engine.never(t, append(ids["expired"], ids["cancelled"]...)...)
	workEmpty(t, nc)
}
