package e2e_test

import (
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"
)

var (
	jobIDs  = regexp.MustCompile(`job_[0-9a-z]+`)
	created = regexp.MustCompile(`"created":\d+`)
)

// alike is a stream without what differs from one run to the next: the job's id and the time.
func alike(events []event) string {
	return created.ReplaceAllString(jobIDs.ReplaceAllString(rawOf(events), "job_X"), `"created":0`)
}

// TestStreamsOfAKilledWorkerGoOn: kill -9 in mid-stream. Whoever streams from a client's connection, from a durable job, or from its events gets exactly what an undisturbed run gives, as one stream.
func TestStreamsOfAKilledWorkerGoOn(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := startEngine(t)
	api, dispatcher := c.api("api"), c.dispatcher("dispatcher")
	first, second := c.worker("first", e.URL), c.worker("second", e.URL)
	c.startAll(api.process, dispatcher, first)
	c.whole()

	chatBody := chat("[[emulator:tokens=24,token-delay=150ms]] tell me", `"stream":true,"stream_options":{"include_usage":true}`)
	completion := fmt.Appendf(nil, `{"model":%q,"prompt":"[[emulator:tokens=24,token-delay=150ms]] once upon","max_tokens":40,"stream":true,"stream_options":{"include_usage":true}}`, model)
	type call struct {
		path    string
		body    []byte
		headers []string
		s       *stream
		got     []event
	}
	calls := []*call{
		{path: "/v1/chat/completions", body: chatBody},
		{path: "/v1/completions", body: completion},
		{path: "/v1/chat/completions", body: chatBody, headers: []string{"Idempotency-Key", "killed"}},
	}
	begun := time.Now()
	for _, call := range calls {
		var err error
		if call.s, err = api.open("POST", call.path, call.body, call.headers...); err != nil {
			t.Fatal(err)
		}
		defer call.s.close()
	}
	id := api.submit("[[emulator:tokens=24,token-delay=150ms]] a job", "")
	events := api.mustEvents(id, 0)
	defer events.close()
	for _, call := range calls {
		for len(call.got) < 6 {
			ev, err := call.s.next()
			if err != nil {
				t.Fatal(err)
			}
			call.got = append(call.got, ev)
		}
	}
	var got []event
	for len(got) < 6 {
		ev, err := events.next()
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, ev)
	}
	first.kill()
	if took := time.Since(begun); took > 24*150*time.Millisecond {
		t.Logf("the worker was killed after %v only: some streams may have ended", took)
	}
	second.start()

	for i, call := range calls {
		rest, err := call.s.rest()
		if err != nil {
			t.Errorf("call %d: %v", i, err)
		}
		call.got = append(call.got, rest...)
		again, err := api.open("POST", call.path, call.body) // which nothing disturbs
		if err != nil {
			t.Fatal(err)
		}
		whole, err := again.rest()
		again.close()
		if err != nil {
			t.Fatal(err)
		}
		if have, want := alike(call.got), alike(whole); have != want {
			t.Errorf("call %d got\n%s\nan undisturbed one gets\n%s", i, have, want)
		}
		if call.path == "/v1/chat/completions" {
			if want := answerText(e.direct(t, chat("[[emulator:tokens=24,token-delay=150ms]] tell me", ""))); contents(call.got) != want {
				t.Errorf("call %d says %q, the engine %q", i, contents(call.got), want)
			}
		}
	}
	rest, err := events.rest()
	if err != nil {
		t.Fatal(err)
	}
	got = append(got, rest...)
	rising(t, id, got)
	j := api.ended(patience, id)[id]
	want := answerText(e.direct(t, chat("[[emulator:tokens=24,token-delay=150ms]] a job", "")))
	if j.Status != "completed" || j.text() != want || told(got) != want {
		t.Errorf("the job is %s, its answer %q, the reader was told %q, the engine says %q", j.Status, j.text(), told(got), want)
	}
	if j.Usage == nil || j.Usage.Completion != 24 {
		t.Errorf("the usage is %+v, not 24 tokens", j.Usage)
	}
	if kinds := kindsOf(got); kinds["reset"] != 0 {
		t.Errorf("the reader got %v", kinds)
	}
	nc := connect(t, c.natsURL())
	workEmpty(t, nc)
	outcomes(t, nc)
}

// TestLiveStreamWithoutAnyWorkerLeftEnds: the only worker is killed in mid-stream and none comes. The client is told so in the time that a stream waits for its rest.
func TestLiveStreamWithoutAnyWorkerLeftEnds(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := startEngine(t)
	api, dispatcher, worker := c.api("api"), c.dispatcher("dispatcher"), c.worker("worker", e.URL)
	c.startAll(api.process, dispatcher, worker)
	c.whole()
	s, err := api.open("POST", "/v1/chat/completions", chat("[[emulator:tokens=40,token-delay=150ms]] tell me", `"stream":true`))
	if err != nil {
		t.Fatal(err)
	}
	defer s.close()
	for range 5 {
		if _, err := s.next(); err != nil {
			t.Fatal(err)
		}
	}
	worker.kill()
	died := time.Now()
	rest, err := s.rest()
	if err != nil || len(rest) == 0 || !strings.HasPrefix(rest[len(rest)-1].data, `{"error":{`) || strings.Contains(rawOf(rest), "[DONE]") {
		t.Errorf("the stream ends with %v and %v", err, rest)
	}
	if took := time.Since(died); took > 45*time.Second {
		t.Errorf("the client waited %v for its end", took)
	}
	worker.start()
	api.must(http.StatusOK, "POST", "/v1/chat/completions", chat("[[emulator:tokens=3]] on", ""))
	workEmpty(t, connect(t, c.natsURL()))
}
