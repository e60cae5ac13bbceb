package e2e_test

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"
)

// resumed reads a job's events in two parts: k events from one API, which is then cut off, and the rest from another.
func resumed(from, on *client, id string, k int, between func()) ([]event, error) {
	s, err := from.events(id, 0)
	if err != nil {
		return nil, err
	}
	var all []event
	for len(all) < k {
		e, err := s.next()
		if err != nil {
			s.close()
			return nil, err
		}
		all = append(all, e)
	}
	s.close()
	between()
	after := int64(0)
	if k > 0 {
		if all[k-1].kind == "done" {
			return all, nil
		}
		after = all[k-1].id
	}
	s, err = on.events(id, after)
	if err != nil {
		return nil, err
	}
	defer s.close()
	rest, err := s.rest()
	return append(all, rest...), err
}

func rawOf(events []event) string {
	var b strings.Builder
	for _, e := range events {
		b.WriteString(e.raw)
	}
	return b.String()
}

// TestCutStreamResumesByteForByte cuts a job's event stream after every event, while the job runs and when it has ended, and resumes it on an API that was restarted.
func TestCutStreamResumesByteForByte(t *testing.T) {
	t.Parallel()
	d := deploy(t, 8)
	other := d.cluster.api("other")
	other.start()

	// While it runs: one reader that is never cut, and one for each k that goes on at another API.
	const tokens = 12
	id := d.api.submit(fmt.Sprintf("[[emulator:tokens=%d,token-delay=150ms]] tell me", tokens), "")
	uncut := d.api.mustEvents(id, 0)
	defer uncut.close()
	var parts [tokens + 2][]event
	var errs [tokens + 2]error
	var readers sync.WaitGroup
	for k := range parts {
		readers.Go(func() { parts[k], errs[k] = resumed(other.client, d.api.client, id, k, func() {}) })
	}
	whole, err := uncut.rest()
	if err != nil {
		t.Fatal(err)
	}
	readers.Wait()
	if kinds := kindsOf(whole); kinds["token"] < 2 || kinds["done"] != 1 || kinds["reset"] != 0 || kinds["gap"] != 0 {
		t.Errorf("the uncut stream has %v", kinds)
	}
	rising(t, id, whole)
	if j := d.api.ended(patience, id)[id]; told(whole) != j.text() || j.text() == "" {
		t.Errorf("the stream tells %q, the answer is %q", told(whole), j.text())
	}
	for k := range parts {
		if errs[k] != nil && !errors.Is(errs[k], io.EOF) { // one that wants more events than there are is cut by the end
			t.Errorf("cut after %d while it ran: %v", k, errs[k])
		} else if errs[k] == nil && rawOf(parts[k]) != rawOf(whole) {
			t.Errorf("cut after %d while it ran: got\n%s\nwant\n%s", k, rawOf(parts[k]), rawOf(whole))
		}
	}

	// When it has ended, over an API that is killed and started again each time.
	for k := range whole {
		between := func() {}
		if k == 3 || k == len(whole)-1 {
			between = d.api.restart
		}
		got, err := resumed(other.client, d.api.client, id, k, between)
		if err != nil {
			t.Errorf("cut after %d of the ended job: %v", k, err)
		} else if rawOf(got) != rawOf(whole) {
			t.Errorf("cut after %d of the ended job: got\n%s\nwant\n%s", k, rawOf(got), rawOf(whole))
		}
	}
	// One who has seen all is told not to come again, and the same number gives the same bytes twice.
	last := whole[len(whole)-1].id
	a := d.api.must(http.StatusNoContent, "GET", "/v1/jobs/"+id+"/events", nil, "Last-Event-ID", fmt.Sprint(last))
	if len(a.body) > 0 {
		t.Errorf("a 204 with %s", a.body)
	}
	first, second := d.api.must(http.StatusOK, "GET", "/v1/jobs/"+id+"/events?last_event_id=4", nil), other.must(http.StatusOK, "GET", "/v1/jobs/"+id+"/events?last_event_id=4", nil)
	if string(first.body) != string(second.body) || len(first.body) == 0 {
		t.Errorf("the same number gives\n%s\nand then\n%s", first.body, second.body)
	}
}

func kindsOf(events []event) map[string]int {
	kinds := map[string]int{}
	for _, e := range events {
		kinds[e.kind]++
	}
	return kinds
}

// TestReaderResumesOverKilledAPI: the API that a reader is connected to is killed while the job runs, and comes back.
func TestReaderResumesOverKilledAPI(t *testing.T) {
	t.Parallel()
	d := deploy(t, 8)
	id := d.api.submit("[[emulator:tokens=60,token-delay=100ms]] a long tale", "")
	var all []event
	s := d.api.mustEvents(id, 0)
	for len(all) < 8 {
		e, err := s.next()
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, e)
	}
	d.api.kill()
	for {
		e, err := s.next() // what was on the way still counts
		if err != nil {
			if errors.Is(err, io.EOF) {
				t.Error("a stream that was cut ends as if it were whole")
			}
			break
		}
		all = append(all, e)
	}
	s.close()
	d.api.start()
	s = d.api.mustEvents(id, all[len(all)-1].id)
	defer s.close()
	rest, err := s.rest()
	if err != nil {
		t.Fatal(err)
	}
	all = append(all, rest...)
	rising(t, id, all)
	for _, e := range all {
		if e.kind == "reset" || e.kind == "gap" {
			t.Errorf("the reader got a %s: %s", e.kind, e.data)
		}
	}
	if j := d.api.ended(patience, id)[id]; told(all) != j.text() || len(j.Attempts) != 1 {
		t.Errorf("the reader was told %q, the answer is %q after %+v", told(all), j.text(), j.Attempts)
	}
	// The same bytes as one who comes later gets in one piece, but for what is shared out among events otherwise.
	later := d.api.mustEvents(id, 0)
	defer later.close()
	whole, err := later.rest()
	if err != nil {
		t.Fatal(err)
	}
	if rawOf(whole) != rawOf(all) {
		t.Errorf("a later reader gets\n%s\nthe cut one got\n%s", rawOf(whole), rawOf(all))
	}
	d.engine.once(t, id)
}

// TestStreamBeginsWithoutAnyWorker: a client that streams gets its first bytes within the keep-alive interval of 15 s, though nobody can answer yet.
func TestStreamBeginsWithoutAnyWorker(t *testing.T) {
	t.Parallel()
	d := deploy(t, 4)
	d.worker.kill()
	id := d.api.submit("[[emulator:tokens=5]] wait", "")
	events := d.api.mustEvents(id, 0)
	defer events.close()
	begun := time.Now()
	s, err := d.api.open("POST", "/v1/chat/completions", chat("[[emulator:tokens=8]] wait too", `"stream":true`))
	if err != nil {
		t.Fatal(err)
	}
	defer s.close()
	if took := time.Since(begun); took > 15*time.Second {
		t.Errorf("the stream began after %v", took)
	}
	if _, err := s.in.Peek(1); err != nil || time.Since(begun) > 15*time.Second {
		t.Errorf("the first byte came after %v: %v", time.Since(begun), err)
	}
	d.worker.start()
	rest, err := s.rest()
	if err != nil || len(rest) == 0 || rest[len(rest)-1].data != "[DONE]" {
		t.Errorf("the stream ends with %v after %v", err, rest)
	}
	if s.comments == 0 {
		t.Error("the stream had no comment while nobody could answer")
	}
	all, err := events.rest()
	if err != nil {
		t.Error(err)
	}
	rising(t, id, all)
}

// TestFailureInMidStreamIsToldInTheStream: after the 200 a failure is an event of its own, and nothing says [DONE].
func TestFailureInMidStreamIsToldInTheStream(t *testing.T) {
	t.Parallel()
	d := deploy(t, 4, "--max-attempts", "1")
	for _, markers := range []string{"tokens=20,reset-after=5", "tokens=20,error-after=5"} {
		s, err := d.api.open("POST", "/v1/chat/completions", chat("[[emulator:"+markers+"]] fail", `"stream":true`))
		if err != nil {
			t.Fatal(err)
		}
		got, err := s.rest()
		s.close()
		if err != nil || len(got) < 2 {
			t.Fatalf("%s: the stream ends with %v after %v", markers, err, got)
		}
		if last := got[len(got)-1]; !strings.HasPrefix(last.data, `{"error":{`) || last.kind != "" {
			t.Errorf("%s: the stream ends with %q", markers, last.raw)
		}
		if strings.Contains(rawOf(got), "[DONE]") {
			t.Errorf("%s: the stream says [DONE]", markers)
		}
		// The same as a durable job.
		id := d.api.submit("[[emulator:"+markers+"]] fail", "")
		j := d.api.ended(patience, id)[id]
		if j.Status != "failed" || j.Error.code() == "" {
			t.Errorf("%s: the job is %s with %+v", markers, j.Status, j.Error)
		}
		events := d.api.mustEvents(id, 0)
		all, err := events.rest()
		events.close()
		if err != nil {
			t.Errorf("%s: the job's events: %v", markers, err)
		}
		rising(t, id, all)
	}
}
