package sdk_test

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"

	"github.com/millrace/millrace/api"
)

// strictKey is the key of the server that refuses much.
const strictKey = "sk-strict"

// startStrict starts a server with a key, a small limit on bodies, and room for one call at a time.
func startStrict(t *testing.T) *server {
	t.Helper()
	return start(t, func(c *setup) {
		c.platform.API = api.Config{Listen: "127.0.0.1:0", APIKey: strictKey, MaxBody: 64 << 10, MaxHeld: 1, DrainTimeout: time.Second, KeepAlive: keepAlive}
	})
}

// hold takes the server's one place for a call, until release is called.
func hold(t *testing.T, s *server) (release func()) {
	t.Helper()
	client := s.client(t)
	ctx, release := context.WithCancel(t.Context())
	t.Cleanup(release)
	stream := client.Chat.Completions.NewStreaming(ctx, chat("[[emulator:hang-after=2]] I stay.", 100))
	t.Cleanup(func() { _ = stream.Close() })
	if !stream.Next() {
		t.Fatal(stream.Err())
	}
	return release
}

// refusal is what a typed error has to say.
type refusal struct {
	status            int
	kind, code, param string
	requests          int // that the client makes by itself before it gives up
}

func TestGoClientGetsTypedErrors(t *testing.T) {
	t.Parallel()
	s := startStrict(t)
	f := newFront(t, s.url, nil)
	ask := func(p openai.ChatCompletionNewParams) func(context.Context, *openai.Client) error {
		return func(ctx context.Context, c *openai.Client) error {
			_, err := c.Chat.Completions.New(ctx, p)
			return err
		}
	}
	raw := func(method, path, body string, opts ...option.RequestOption) func(context.Context, *openai.Client) error {
		return func(ctx context.Context, c *openai.Client) error {
			return c.Execute(ctx, method, path, nil, nil, append(opts, option.WithRequestBody("application/json", []byte(body)))...)
		}
	}
	stranger := chat("Hello?", 1)
	stranger.Model = "no-such-model"
	empty := chat("Hello?", 1)
	empty.Messages = []openai.ChatCompletionMessageParamUnion{}
	const invalid, server = "invalid_request_error", "server_error"
	for _, row := range []struct {
		reason string
		call   func(context.Context, *openai.Client) error
		key    string
		want   refusal
	}{
		{"wrong key", ask(chat("Hello?", 1)), "sk-wrong", refusal{401, invalid, "invalid_api_key", "", 1}},
		{"no such model", ask(stranger), strictKey, refusal{404, invalid, "model_not_found", "model", 1}},
		{"no such model to look at", func(ctx context.Context, c *openai.Client) error { _, err := c.Models.Get(ctx, "no/such"); return err }, strictKey, refusal{404, invalid, "model_not_found", "model", 1}},
		{"no such route", func(ctx context.Context, c *openai.Client) error {
			_, err := c.Images.Generate(ctx, openai.ImageGenerateParams{Prompt: "A mill"})
			return err
		}, strictKey, refusal{404, invalid, "unknown_url", "", 1}},
		{"no such job", raw("GET", "jobs/job_0", ""), strictKey, refusal{404, invalid, "job_not_found", "id", 1}},
		{"wrong method", raw("PUT", "chat/completions", "{}"), strictKey, refusal{405, invalid, "method_not_allowed", "", 1}},
		{"not JSON", raw("POST", "chat/completions", `{"model":`), strictKey, refusal{400, invalid, "invalid_json", "", 1}},
		{"no messages", raw("POST", "chat/completions", `{"model":"other"}`), strictKey, refusal{400, invalid, "missing_required_parameter", "messages", 1}},
		{"a field of the wrong type", raw("POST", "chat/completions", `{"model":"other","messages":[],"stream":"yes"}`), strictKey, refusal{400, invalid, "invalid_type", "stream", 1}},
		{"refused by the engine", ask(empty), strictKey, refusal{400, "BadRequestError", "400", "messages", 1}},
		{"too large", ask(chat(strings.Repeat("word ", 20_000), 1)), strictKey, refusal{413, invalid, "request_too_large", "", 1}},
		{"broken off by the engine", ask(chat("[[emulator:reset-after=0]]", 1)), strictKey, refusal{502, server, "engine_error", "", 1}},
	} {
		opts := []option.RequestOption(nil)
		if row.want.status >= 500 { // the client's own tries are another test's
			opts = append(opts, option.WithMaxRetries(0))
		}
		client := newClient(t, f.url, row.key, opts...)
		before := len(served(f.exchanges()))
		err := row.call(soon(t), &client)
		checkRefusal(t, row.reason, err, row.want)
		seen := served(f.exchanges())[before:]
		if len(seen) != row.want.requests {
			t.Errorf("%s: the client made %d requests", row.reason, len(seen))
		}
		for _, e := range seen {
			if e.answer.Get("X-Request-Id") == "" {
				t.Errorf("%s: no x-request-id", row.reason)
			}
		}
	}
}

// checkRefusal checks that err is the client's typed error with all that the API told.
func checkRefusal(t *testing.T, reason string, err error, want refusal) {
	t.Helper()
	var told *openai.Error
	if !errors.As(err, &told) {
		t.Errorf("%s: the error is %v", reason, err)
		return
	}
	if told.StatusCode != want.status || told.Type != want.kind || told.Code != want.code || told.Param != want.param || told.Message == "" {
		t.Errorf("%s: got %d %s, want %+v", reason, told.StatusCode, told.RawJSON(), want)
	}
}

// TestClientsComeBackWhenThereIsRoom asks a server that is full: it says when to come back, the clients do so by themselves, and get their answer.
func TestClientsComeBackWhenThereIsRoom(t *testing.T) {
	t.Parallel()
	s := startStrict(t)
	release := hold(t, s)
	f := newFront(t, s.url, nil)
	impatient := newClient(t, f.url, s.key, option.WithMaxRetries(0))
	_, err := impatient.Chat.Completions.New(soon(t), chat("Is there room?", 1))
	checkRefusal(t, "full", err, refusal{status: 429, kind: "rate_limit_exceeded", code: "rate_limit_exceeded"})
	checkRetryAfter(t, f.exchanges())

	fromGo, fromNode := newFront(t, s.url, nil), newFront(t, s.url, nil)
	client := newClient(t, fromGo.url, s.key)
	ended := make(chan error, 1)
	go func() {
		_, err := client.Chat.Completions.New(soon(t), chat("I come back.", 1), option.WithMaxRetries(10)) // both may come at once, and there is room for one
		ended <- err
	}()
	node := startNode(t, "returns", fromNode.url, s.key)
	for _, f := range []*front{fromGo, fromNode} {
		eventually(t, "the client was refused", func() error { return refusedOnce(f) })
	}
	release()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	got := node.wait(t)
	if a := got.value(t, "returns"); a["content"] == "" {
		t.Errorf("openai-node got %v", a)
	}
	for name, f := range map[string]*front{"openai-go": fromGo, "openai-node": fromNode} {
		checkRetryAfter(t, f.exchanges())
		if seen := f.exchanges(); seen[len(seen)-1].status != http.StatusOK {
			t.Errorf("%s's last answer is %d", name, seen[len(seen)-1].status)
		}
	}
}

// refusedOnce returns nil once an answer to come back later has passed.
func refusedOnce(f *front) error {
	if !slices.ContainsFunc(f.exchanges(), func(e exchange) bool {
		return e.status == http.StatusTooManyRequests || e.status == http.StatusServiceUnavailable
	}) {
		return errors.New("not refused yet")
	}
	return nil
}

// checkRetryAfter checks that each refusal for now says for how long: whole seconds that every client obeys.
func checkRetryAfter(t *testing.T, seen []exchange) {
	t.Helper()
	for _, e := range seen {
		if e.status != http.StatusTooManyRequests && e.status != http.StatusServiceUnavailable {
			continue
		}
		if n, err := strconv.Atoi(e.answer.Get("Retry-After")); err != nil || n < 1 || n > 60 {
			t.Errorf("%d with the Retry-After %q", e.status, e.answer.Get("Retry-After"))
		}
	}
}

// TestStreamWaitsInTheQueue streams while another request has all of the engine's cache: comments say that it waits, and then it runs.
func TestStreamWaitsInTheQueue(t *testing.T) {
	t.Parallel()
	s := start(t, func(c *setup) {
		c.platform.API.KeepAlive = keepAlive
		c.engine.KVTokens = 1024
	})
	long := strings.Repeat("word ", 700) // 875 tokens
	client := s.client(t)
	ctx, leave := context.WithCancel(soon(t))
	defer leave()
	first := client.Chat.Completions.NewStreaming(ctx, chat("[[emulator:hang-after=2]] I take all. "+long, 100))
	if !first.Next() {
		t.Fatal(first.Err())
	}
	second, seen := watched(t, s)
	stream := second.Chat.Completions.NewStreaming(soon(t), chat("I wait. "+long, 3))
	timer := time.AfterFunc(5*keepAlive, leave) // by time, for that is what the comments go by
	defer timer.Stop()
	got := collect(t, stream)
	if got.whole.Choices[0].Message.Content == "" {
		t.Errorf("no text came: %s", seen.seen.Bytes())
	}
	checkComments(t, seen.seen.String(), 3)
	if !strings.Contains(seen.seen.String(), ": queued") {
		t.Errorf("no comment says that it is queued:\n%s", seen.seen.String())
	}
	if err := first.Err(); err != nil && !errors.Is(err, context.Canceled) {
		t.Errorf("the first one ends with %v", err)
	}
	if n := len(s.calls("I wait.")); n != 1 {
		t.Errorf("the engine was called %d times", n)
	}
}
