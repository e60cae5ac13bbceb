package sdk_test

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"

	"github.com/millrace/millrace/internal/client"
	"github.com/millrace/millrace/internal/embedded"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/testenv"
)

// firstTry spoils the answer to each request's first try, unless it was refused for now.
func firstTry(f fate) func(*exchange) fate {
	var seen sync.Map
	return func(e *exchange) fate {
		if e.status == http.StatusServiceUnavailable {
			return arrives
		}
		if _, again := seen.LoadOrStore(e.path+string(e.body), true); again {
			return arrives
		}
		return f
	}
}

// TestRetriesOfTheClientsMakeNoSecondJob has the clients repeat by themselves what was stored though they heard nothing of it, or an error.
func TestRetriesOfTheClientsMakeNoSecondJob(t *testing.T) {
	t.Parallel()
	s := start(t)
	for _, what := range []fate{lost, fails} {
		fromGo, fromNode := newFront(t, s.url, firstTry(what)), newFront(t, s.url, firstTry(what))
		node := startNode(t, "retries", fromNode.url, s.key)
		c := newClient(t, fromGo.url, s.key)
		question := chat("Once only, from Go: "+string(what), 2)
		var ids []job.ID
		submit := func(path string, body any, opts ...option.RequestOption) {
			t.Helper()
			var j client.Job
			if err := c.Post(soon(t), path, body, &j, opts...); err != nil {
				t.Fatalf("%s: %v", what, err)
			}
			ids = append(ids, j.ID)
		}
		submit("chat/completions", question, option.WithHeader("Prefer", "respond-async"))
		submit("jobs", map[string]any{"body": question, "priority": "batch"})
		submit("jobs", map[string]any{"body": question}, option.WithHeader("Idempotency-Key", "go-"+string(what)))

		// A job's answer under a key on a plain call: the retry gets the same answer, and the engine is asked once.
		keyed := chat("Once only, keyed, from Go: "+string(what), 2)
		if _, err := c.Chat.Completions.New(soon(t), keyed, option.WithHeader("Idempotency-Key", "plain-go-"+string(what))); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		for name, f := range map[string]*front{"openai-go": fromGo, "openai-node": fromNode} {
			if name == "openai-node" {
				for _, id := range node.wait(t).value(t, "retries")["ids"].([]any) {
					ids = append(ids, job.ID(id.(string)))
				}
			}
			checkRetried(t, name, f.exchanges())
		}
		if len(ids) != 6 {
			t.Fatalf("%s: the jobs are %v", what, ids)
		}
		direct := s.client(t)
		for _, id := range ids {
			eventually(t, "the job has ended", func() error {
				if j := getJob(t, &direct, string(id), "1s"); j.Status != job.Completed {
					return fmt.Errorf("it is %s", j.Status)
				}
				return nil
			})
		}
		for text, want := range map[string]int{"Once only, from Go: ": 3, "Once only, keyed, from Go: ": 1} {
			if got := len(s.calls(text + string(what))); got != want {
				t.Errorf("%s: the engine was called %d times with %q, want %d", what, got, text, want)
			}
		}
	}
	// Node's requests are the same in both rounds but for their keys: what is no retry is a new job.
	for text, want := range map[string]int{"Once only, from Node.": 6, "Once only, keyed, from Node.": 2} {
		if got := len(s.calls(text)); got != want {
			t.Errorf("the engine was called %d times with %q, want %d", got, text, want)
		}
	}
}

// checkRetried checks that each of four requests was made twice, the second time as a retry that got the same job.
func checkRetried(t *testing.T, name string, all []exchange) {
	t.Helper()
	seen := served(all)
	if len(seen) != 8 {
		t.Fatalf("%s made %d requests, want 8", name, len(seen))
	}
	for i := 0; i < len(seen); i += 2 {
		first, second := seen[i], seen[i+1]
		// Go's HTTP client itself repeats what has a key after a broken connection: that is no retry of the SDK's.
		byTransport := second.header.Get("Idempotency-Key") != ""
		if second.retry() <= first.retry() && !byTransport || string(first.body) != string(second.body) {
			t.Errorf("%s: after the try %d of %s came the try %d of %s", name, first.retry(), first.body, second.retry(), second.body)
		}
		if a, b := jobOf(first), jobOf(second); a == "" || a != b {
			t.Errorf("%s: %s gave the job %q, and %q when it was repeated", name, first.path, a, b)
		}
	}
}

// jobOf is the id of the job that an exchange's answer names.
func jobOf(e exchange) string {
	if id := e.answer.Get("X-Millrace-Job"); id != "" {
		return id
	}
	return strings.TrimPrefix(e.answer.Get("Location"), "/v1/jobs/")
}

// TestClientsDoNotRepeatWhatCannotSucceed uses a key for another request: 409 is a status that clients repeat by themselves, unless they are told not to.
func TestClientsDoNotRepeatWhatCannotSucceed(t *testing.T) {
	t.Parallel()
	s := start(t)
	fromGo, fromNode := newFront(t, s.url, nil), newFront(t, s.url, nil)
	node := startNode(t, "conflict", fromNode.url, s.key)
	c := newClient(t, fromGo.url, s.key)
	ask := func(text string) error {
		_, err := c.Chat.Completions.New(soon(t), chat(text, 1), option.WithHeader("Idempotency-Key", "one"))
		return err
	}
	if err := ask("The first."); err != nil {
		t.Fatal(err)
	}
	checkRefusal(t, "another body", ask("Another."), refusal{status: 409, kind: "invalid_request_error", code: "idempotency_key_reused", param: "Idempotency-Key"})
	node.wait(t).wantError(t, "conflict", "ConflictError", refusal{status: 409, kind: "invalid_request_error", code: "idempotency_key_reused", param: "Idempotency-Key"})
	for name, f := range map[string]*front{"openai-go": fromGo, "openai-node": fromNode} {
		if seen := served(f.exchanges()); len(seen) != 2 {
			t.Errorf("%s made %d requests", name, len(seen))
		}
	}
}

// TestClientsRideOutARestartOfTheQueue stops NATS under the platform: clients are told to come back, do so by themselves, and get their answer when it is there again.
func TestClientsRideOutARestartOfTheQueue(t *testing.T) {
	t.Parallel()
	dir, addr := t.TempDir(), testenv.FreeAddr(t)
	listen := func(c *embedded.NATSConfig) { c.Dir, c.Listen, c.Relaxed = dir, addr, true }
	nats := testenv.NATS(t, listen)
	s := start(t, func(c *setup) { c.platform.NATSURL = "nats://" + addr })
	nats.Shutdown()

	f := newFront(t, s.url, nil)
	impatient := newClient(t, f.url, s.key, option.WithMaxRetries(0))
	_, err := impatient.Chat.Completions.New(soon(t), chat("Is anybody there?", 1))
	var told *openai.Error
	if !errors.As(err, &told) || told.StatusCode != http.StatusServiceUnavailable || told.Type != "server_error" || told.Code == "" || told.Message == "" {
		t.Errorf("while the queue is away the error is %v", err)
	}
	checkRetryAfter(t, f.exchanges())

	fromGo, fromNode := newFront(t, s.url, nil), newFront(t, s.url, nil)
	patient := newClient(t, fromGo.url, s.key)
	ended := make(chan error, 1)
	go func() {
		_, err := patient.Chat.Completions.New(soon(t), chat("I come back.", 1), option.WithMaxRetries(10))
		ended <- err
	}()
	node := startNode(t, "returns", fromNode.url, s.key)
	for _, f := range []*front{fromGo, fromNode} {
		eventually(t, "the client was refused", func() error { return refusedOnce(f) })
	}
	testenv.NATS(t, listen)
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if a := node.wait(t).value(t, "returns"); a["content"] == "" {
		t.Errorf("openai-node got %v", a)
	}
	for _, f := range []*front{fromGo, fromNode} {
		checkRetryAfter(t, f.exchanges())
	}
	if n := len(s.calls("Is anybody there?")); n != 0 {
		t.Errorf("what was refused reached the engine %d times", n)
	}
}
