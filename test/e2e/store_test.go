package e2e_test

import (
	"encoding/json"
	"net/http"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestWipedStoreLosesNoJobAndNoResult: FLUSHALL while jobs wait, run with clients reading, and have ended.
func TestWipedStoreLosesNoJobAndNoResult(t *testing.T) {
	t.Parallel()
	const slots = 12
	d := deploy(t, slots)
	keyed := d.api.submit("[[emulator:tokens=5]] once", "", "Idempotency-Key", "wiped-ended")
	d.api.ended(patience, keyed)
	ids := populate(t, d.api.client, d.engine, slots)
	waitingKey := d.api.submit("[[emulator:tokens=5]] later", "", "Idempotency-Key", "wiped-waiting")
	d.engine.open()
	d.api.ended(patience, flatten(ids)...)
	d.api.ended(patience, waitingKey)

	// Now with work that takes its time, and readers.
	slow := d.api.submitMany(8, "", func(i int) string { return marked("tokens=40,token-delay=100ms", i) })
	readers := make([]*stream, len(slow))
	events := make([][]event, len(slow))
	for i, id := range slow {
		readers[i] = d.api.mustEvents(id, 0)
		defer readers[i].close()
		for range 5 {
			e, err := readers[i].next()
			if err != nil {
				t.Fatal(err)
			}
			events[i] = append(events[i], e)
		}
	}
	d.engine.shut()
	// More than the worker has room for: some run, held by the engine, the rest waits.
	behind := d.api.submitMany(20, "", func(i int) string { return marked("tokens=5", 7000+i) })
	late := d.api.submit("[[emulator:tokens=5]] much later", "", "Idempotency-Key", "wiped-late")

	d.do("FLUSHALL")

	// What has ended is told from the other store at once, with its answer.
	for _, id := range append([]string{keyed}, ids["completed"]...) {
		j, err := d.api.job(id, "")
		if err != nil || j.Status != "completed" || j.text() == "" {
			t.Fatalf("job %s after the wipe: %v %+v", id, err, j)
		}
	}
	// A key stands for its job again as soon as it is restored, and never for another before.
	for _, key := range []struct{ name, content, id string }{
		{"wiped-ended", "[[emulator:tokens=5]] once", keyed}, {"wiped-waiting", "[[emulator:tokens=5]] later", waitingKey}, {"wiped-late", "[[emulator:tokens=5]] much later", late},
	} {
		eventually(t, patience, "the key "+key.name+" is known again", func() error {
			a, err := d.api.send("POST", "/v1/jobs", submission(chat(key.content, ""), ""), "Idempotency-Key", key.name)
			if err != nil {
				return err
			}
			if a.status == http.StatusServiceUnavailable {
				return errNotYet
			}
			var j jobView
			if err := json.Unmarshal(a.body, &j); err != nil || a.status != http.StatusAccepted || j.ID != key.id {
				t.Fatalf("the key %s gives %d %s, not job %s", key.name, a.status, a.body, key.id)
			}
			return nil
		})
	}
	d.engine.open()

	nc := connect(t, d.natsURL())
	all := append(append(append(flatten(ids), slow...), behind...), keyed, waitingKey, late)
	jobs := exactlyOnce(t, nc, d.api.client, 2*patience, all...)
	settled(t, jobs, ids)
	for i, id := range slow {
		rest, err := readers[i].rest()
		if err != nil {
			t.Errorf("the reader of %s: %v", id, err)
			continue
		}
		events[i] = append(events[i], rest...)
		if got, want := told(events[i]), jobs[id].text(); got != want || want == "" {
			t.Errorf("the reader of %s was told %q, the answer is %q", id, got, want)
		}
		rising(t, id, events[i])
	}
	d.engine.once(t, slow...)
	d.engine.once(t, behind...)
	d.engine.once(t, late, keyed)
	for _, id := range append(append([]string(nil), slow...), behind...) {
		if j := jobs[id]; j.Status != "completed" || len(j.Attempts) != 1 {
			t.Errorf("job %s is %s after %+v", id, j.Status, j.Attempts)
		}
	}
	workEmpty(t, nc)
}

// told is the text that a reader of events has in the end: a reset begins it anew from the text that it carries.
func told(events []event) string {
	var b strings.Builder
	for _, e := range events {
		switch e.kind {
		case "token":
			b.WriteString(contents([]event{e}))
		case "reset":
			var r struct {
				Text string `json:"text"`
			}
			if json.Unmarshal([]byte(e.data), &r) == nil {
				b.Reset()
				b.WriteString(r.Text)
			}
		}
	}
	return b.String()
}

// rising asserts that the events' numbers rise, and that the last one is done.
func rising(t testing.TB, id string, events []event) {
	t.Helper()
	last := int64(0)
	for _, e := range events {
		if e.id <= last {
			t.Errorf("the events of %s go from %d to %d", id, last, e.id)
		}
		last = e.id
	}
	if n := len(events); n == 0 || events[n-1].kind != "done" {
		t.Errorf("the events of %s do not end with done", id)
	}
}

// TestStoreThatIsAwayIsUnavailableAndNeverNotFound: Redis hangs, then dies.
func TestStoreThatIsAwayIsUnavailableAndNeverNotFound(t *testing.T) {
	t.Parallel()
	d := deploy(t, 8)
	done := d.api.submit("[[emulator:tokens=5]] before", "")
	d.api.ended(patience, done)
	running := d.api.submit("[[emulator:tokens=30,token-delay=100ms]] across", "")
	d.engine.called(t, running, 1)
	d.api.status(running, "running")
	for _, away := range []struct {
		name        string
		begin, over func()
	}{
		{"paused", func() { d.signalRedis(syscall.SIGSTOP) }, func() { d.signalRedis(syscall.SIGCONT) }},
		{"dead", d.redis.Kill, func() { d.redis.Start(t) }},
	} {
		away.begin()
		calls := len(d.engine.all())
		for _, r := range []struct{ method, path, body string }{
			{"GET", "/v1/jobs/" + done, ""},
			{"GET", "/v1/jobs/" + running, ""},
			{"GET", "/v1/jobs", ""},
			{"POST", "/v1/jobs", string(submission(chat("[[emulator:tokens=5]] while it is "+away.name, ""), ""))},
		} {
			a, err := d.api.send(r.method, r.path, []byte(r.body), "Idempotency-Key", "while-"+away.name)
			if err != nil || a.status != http.StatusServiceUnavailable || a.header.Get("Retry-After") == "" || a.code() == "" {
				t.Errorf("%s %s while Redis is %s: %v %+v", r.method, r.path, away.name, err, a)
				continue
			}
			if a.took > 5*time.Second {
				t.Errorf("%s %s while Redis is %s took %v", r.method, r.path, away.name, a.took)
			}
		}
		away.over()
		eventually(t, patience, "the API is ready again", d.api.ready)
		if n := len(d.engine.all()); n != calls {
			t.Errorf("the engine got %d calls for requests that were refused", n-calls)
		}
		// The same request again is one job.
		var id string
		eventually(t, patience, "a submit is taken again", func() error {
			a, err := d.api.send("POST", "/v1/jobs", submission(chat("[[emulator:tokens=5]] while it is "+away.name, ""), ""), "Idempotency-Key", "while-"+away.name)
			if err != nil || a.status == http.StatusServiceUnavailable {
				return errNotYet
			}
			var j jobView
			if err := json.Unmarshal(a.body, &j); err != nil || a.status != http.StatusAccepted {
				t.Fatalf("it answers %d %s", a.status, a.body)
			}
			id = j.ID
			return nil
		})
		if j := d.api.ended(patience, id)[id]; j.Status != "completed" {
			t.Errorf("the job after Redis was %s is %s", away.name, j.Status)
		}
		d.engine.once(t, id)
		if j := d.api.ended(patience, done)[done]; j.Status != "completed" || j.text() == "" {
			t.Errorf("the ended job is %s with %q after Redis was %s", j.Status, j.text(), away.name)
		}
	}
	if j := d.api.ended(patience, running)[running]; j.Status != "completed" || len(j.Attempts) != 1 {
		t.Errorf("the job that ran meanwhile is %s after %+v", j.Status, j.Attempts)
	}
	d.engine.once(t, running)
	exactlyOnce(t, connect(t, d.natsURL()), d.api.client, patience, done, running)
}

func (c *cluster) signalRedis(s syscall.Signal) {
	if err := c.redis.Process().Signal(s); err != nil {
		c.t.Error(err)
	}
}

// TestEveryKeyInTheStoreExpires: whatever a run leaves in Redis goes by itself, but for a few keys of the platform's own.
func TestEveryKeyInTheStoreExpires(t *testing.T) {
	t.Parallel()
	const slots = 12
	d := deploy(t, slots)
	ids := populate(t, d.api.client, d.engine, slots)
	d.submitKeyed()
	d.checkExpiry(t)
	d.engine.open()
	d.api.ended(patience, flatten(ids)...)
	d.checkExpiry(t)
}

func (d *deployment) submitKeyed() {
	d.t.Helper()
	d.api.submit("[[emulator:tokens=5]] a key", `"session":"someone","metadata":{"k":"v"}`, "Idempotency-Key", "expires")
}

// checkExpiry fails the test if a key has no expiry and is not one of those that need none.
func (d *deployment) checkExpiry(t *testing.T) {
	t.Helper()
	keys := d.keys(t)
	if len(keys) < 100 {
		t.Errorf("there are only %d keys", len(keys))
	}
	for _, k := range keys {
		switch ttl := d.do("PTTL", k).(int64); {
		case ttl == -2: // gone meanwhile
		case ttl == -1 && !lasting.MatchString(k):
			t.Errorf("key %s (%v) never expires", k, d.do("TYPE", k))
		}
	}
}

// lasting are the keys that may stay for ever: their number does not grow with the jobs.
var lasting = regexp.MustCompile(`^mr:(holders|\{\d+\}:(live|whole))$`)
