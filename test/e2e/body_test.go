package e2e_test

import (
	"bytes"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/millrace/millrace/internal/job"
)

// awkward holds all that a proxy which decodes and encodes anew would change.
const awkward = `{"seed":9007199254740993, "x_vendor" : {"z":1,"a":[1.0,1e400,-0,1E+2],"deep":null},"model":"` + model + `",` +
	`"temperature":0.70,"messages":[{"content":"<b>&</b> caf\u00e9 \/ \ud83d\ude80","role":"user"}],"x_twice":1,"x_twice":2,"x_null":null,` + "\n\t" +
	`"user":"a\u0000b","max_tokens":6 , "stop":null}`

// TestBodyReachesTheEngineByteForByte sends what is easily mangled in every way that there is.
func TestBodyReachesTheEngineByteForByte(t *testing.T) {
	t.Parallel()
	d := deploy(t, 8)
	body := []byte(awkward)

	// On the client's connection, in one piece.
	a := d.api.must(http.StatusOK, "POST", "/v1/chat/completions", body)
	d.arrived(t, a.header.Get("X-Millrace-Job"), body)
	// The answer comes back byte for byte: the engine says the same when asked itself, but for its id and time.
	if got, want := strip(a.body), strip(d.engine.direct(t, body)); got != want {
		t.Errorf("the answer is\n%s\nthe engine's own\n%s", got, want)
	}

	// As a durable job that keeps no events.
	sub := append(append([]byte(`{ "stream":false, "body": `), body...), " }"...)
	id := idOf(t, d.api.must(http.StatusAccepted, "POST", "/v1/jobs", sub))
	d.api.ended(patience, id)
	d.arrived(t, id, body)

	// By the OpenAI route, asynchronously.
	id = idOf(t, d.api.must(http.StatusAccepted, "POST", "/v1/chat/completions", body, "Prefer", "respond-async"))
	d.api.ended(patience, id)
	d.arrived(t, id, body)

	// Streamed: only the fields that we own are added.
	want, _, err := job.SetStreaming(body)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.HasPrefix(want, body[:len(body)-2]) && !bytes.Contains(want, []byte("9007199254740993")) {
		t.Fatalf("the edited body is %s", want)
	}
	id = idOf(t, d.api.must(http.StatusAccepted, "POST", "/v1/jobs", submission(body, "")))
	d.api.ended(patience, id)
	d.arrived(t, id, want)

	streaming := []byte(strings.Replace(awkward, `"max_tokens":6`, `"stream" : true,"max_tokens":6`, 1))
	s, err := d.api.open("POST", "/v1/chat/completions", streaming)
	if err != nil {
		t.Fatal(err)
	}
	defer s.close()
	if _, err := s.rest(); err != nil {
		t.Fatal(err)
	}
	want, _, err = job.SetStreaming(streaming)
	if err != nil {
		t.Fatal(err)
	}
	d.arrived(t, s.resp.Header.Get("X-Millrace-Job"), want)
	for _, part := range []string{`9007199254740993`, `"z":1,"a":[1.0,1e400,-0,1E+2],"deep":null`, `<b>&</b> caf\u00e9 \/ \ud83d\ude80`, `"x_twice":1,"x_twice":2,"x_null":null,` + "\n\t"} {
		if !bytes.Contains(want, []byte(part)) {
			t.Errorf("the edit has changed %s: %s", part, want)
		}
	}
}

// arrived asserts that the engine was called once for the job, with just these bytes.
func (d *deployment) arrived(t *testing.T, id string, want []byte) {
	t.Helper()
	calls := d.engine.of(id)
	if len(calls) != 1 {
		t.Fatalf("the engine was called %d times for %s", len(calls), id)
	}
	if got := calls[0].body; !bytes.Equal(got, want) {
		at := 0
		for at < min(len(got), len(want)) && got[at] == want[at] {
			at++
		}
		t.Errorf("job %s: the engine got %d bytes, not %d; from byte %d on it got %.200q, not %.200q", id, len(got), len(want), at, got[at:], want[at:])
	}
}

func idOf(t *testing.T, a *answer) string {
	t.Helper()
	at := strings.TrimPrefix(a.header.Get("Location"), "/v1/jobs/")
	if !strings.HasPrefix(at, "job_") {
		t.Fatalf("no Location in %v: %s", a.header, a.body)
	}
	return at
}

// strip removes what differs between two answers to one body.
func strip(body []byte) string {
	text := string(body)
	for _, field := range []string{`"id":"`, `"created":`} {
		at := strings.Index(text, field)
		if at < 0 {
			continue
		}
		end := strings.IndexByte(text[at:], ',')
		text = text[:at] + text[at+end+1:]
	}
	return text
}

// TestBodiesOfEverySizeArrive: what is larger than a message goes apart, and nobody sees the difference.
func TestBodiesOfEverySizeArrive(t *testing.T) {
	t.Parallel()
	d := deploy(t, 4)
	const kib, mib = 1 << 10, 1 << 20
	for i, size := range []int{256*kib - 1, 256 * kib, 256*kib + 1, mib - 1, mib, mib + 1, 8 * mib} {
		content := fmt.Sprintf("[[emulator:tokens=4]] size %d", i)
		empty := len(chat(content, `"x_padding":""`))
		body := chat(content, `"x_padding":"`+strings.Repeat("x", size-empty)+`"`)
		if len(body) != size {
			t.Fatalf("the body has %d bytes", len(body))
		}
		a := d.api.must(http.StatusOK, "POST", "/v1/chat/completions", body)
		d.arrived(t, a.header.Get("X-Millrace-Job"), body)
		id := idOf(t, d.api.must(http.StatusAccepted, "POST", "/v1/jobs", append(append([]byte(`{"stream":false,"body":`), body...), '}')))
		if j := d.api.ended(patience, id)[id]; j.Status != "completed" || j.text() == "" {
			t.Errorf("the job with %d bytes is %s: %+v", size, j.Status, j.Error)
		}
		d.arrived(t, id, body)
	}
	// Over the limit: refused with both numbers, and nothing is stored.
	big := chat("too much", `"x_padding":"`+strings.Repeat("x", 33*mib)+`"`)
	calls := len(d.engine.all())
	for _, path := range []string{"/v1/chat/completions", "/v1/jobs"} {
		a, err := d.api.send("POST", path, big)
		if err != nil { // the server may cut a client that goes on writing
			t.Logf("%s: %v", path, err)
			continue
		}
		if a.status != http.StatusRequestEntityTooLarge || a.code() == "" || !strings.Contains(string(a.body), fmt.Sprint(32*mib)) {
			t.Errorf("%s answers %d: %s", path, a.status, a.body)
		}
	}
	// A large answer, of large events.
	id := d.api.submit(fmt.Sprintf("[[emulator:tokens=3,pad=%d]] much", 2*mib), "")
	if j := d.api.ended(patience, id)[id]; j.Status != "completed" || len(j.Result.Body) < 2*mib {
		t.Errorf("the job with a large answer is %s: %+v", j.Status, j.Error)
	}
	if n := len(d.engine.all()) - calls; n != 1 {
		t.Errorf("the engine got %d calls for what was refused", n-1)
	}
}
