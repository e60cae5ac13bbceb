//go:build engine

// Package engine_test runs `millrace up` beside the real engine at ENGINE_URL and uses it as a client would: answers, streams, cancels.
package engine_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"

	"github.com/millrace/millrace/internal/client"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/testenv"
)

// platform is `millrace up` in a process of its own.
type platform struct {
	url    string
	client *client.Client
	openai openai.Client
	model  job.Model
}

// engineURL is the address of the engine under test.
func engineURL(t *testing.T) string {
	t.Helper()
	engine := os.Getenv("ENGINE_URL")
	if engine == "" {
		t.Fatal("ENGINE_URL is not set: make engine-test ENGINE_URL=http://127.0.0.1:11434")
	}
	return engine
}

// start builds and starts the platform beside an engine, and stops it as a terminal would when the test ends.
func start(t *testing.T, engine string, args ...string) *platform {
	t.Helper()
	dir := t.TempDir()
	program := filepath.Join(dir, "millrace")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", program, "../../cmd/millrace").CombinedOutput(); err != nil {
		t.Fatalf("building millrace: %v\n%s", err, out)
	}
	addr := testenv.FreeAddr(t)
	cmd := exec.Command(program, append([]string{"up", "--engine", engine, "--listen", addr, "--data", filepath.Join(dir, "data"), "--metrics-listen", "off", "--drain", "1s"}, args...)...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		err := cmd.Wait()
		if err != nil || t.Failed() {
			t.Errorf("millrace up ended: %v, and wrote:\n%s", err, out.Bytes())
		}
	})

	p := &platform{url: "http://" + addr}
	p.openai = openai.NewClient(option.WithBaseURL(p.url+"/v1"), option.WithAPIKey("any"))
	var err error
	if p.client, err = client.New(client.Config{URL: p.url, Patience: 10 * time.Second}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.client.CloseIdleConnections)
	p.model = p.awaitModel(t)
	return p
}

// base is an engine's address without its API.
func base(engine string) string {
	return strings.TrimSuffix(strings.TrimRight(engine, "/"), "/v1")
}

// awaitModel waits until the engine has proven itself and its first model is served.
func (p *platform) awaitModel(t *testing.T) job.Model {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	for {
		models, err := p.client.Models(ctx)
		if err == nil && len(models) > 0 {
			return models[0]
		}
		select {
		case <-time.After(100 * time.Millisecond): // a process tells nobody when it is ready
		case <-ctx.Done():
			t.Fatalf("no model is served after two minutes: %v", err)
		}
	}
}

func (p *platform) question(tokens int64) openai.ChatCompletionNewParams {
	return openai.ChatCompletionNewParams{
		Model:     string(p.model),
		Messages:  []openai.ChatCompletionMessageParamUnion{openai.UserMessage("Why is the sky blue?")},
		MaxTokens: openai.Int(tokens),
	}
}

// long is the body of a request that runs until it is stopped.
func (p *platform) long() json.RawMessage {
	return json.RawMessage(fmt.Sprintf(`{"model":%q,"messages":[{"role":"user","content":"Count upwards and never stop."}],"max_tokens":100000,"ignore_eos":true}`, p.model))
}

func TestRealEngine(t *testing.T) {
	p := start(t, engineURL(t))
	direct := openai.NewClient(option.WithBaseURL(base(engineURL(t))+"/v1"), option.WithAPIKey("any"), option.WithMaxRetries(0))

	t.Run("serves the engine's models", func(t *testing.T) {
		list := func(c openai.Client) []string {
			t.Helper()
			page, err := c.Models.List(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			var ids []string
			for _, m := range page.Data {
				ids = append(ids, m.ID)
			}
			return ids
		}
		served := list(p.openai)
		for _, id := range list(direct) {
			if !slices.Contains(served, id) {
				t.Errorf("the engine's %s is not served: %v", id, served)
			}
			if m, err := p.openai.Models.Get(t.Context(), id); err != nil || m.ID != id {
				t.Errorf("looking at %s: %v", id, err)
			}
		}
	})

	t.Run("answers", func(t *testing.T) {
		answer, err := p.openai.Chat.Completions.New(t.Context(), p.question(16))
		if err != nil {
			t.Fatal(err)
		}
		if len(answer.Choices) != 1 || answer.Choices[0].Message.Content == "" {
			t.Errorf("the answer has no text: %s", answer.RawJSON())
		}
		if answer.Usage.CompletionTokens < 1 || answer.Usage.PromptTokens < 1 {
			t.Errorf("the answer counts no tokens: %s", answer.RawJSON())
		}
	})

	t.Run("streams", func(t *testing.T) {
		stream := p.openai.Chat.Completions.NewStreaming(t.Context(), p.question(16))
		var chunks int
		var text strings.Builder
		for stream.Next() {
			for _, c := range stream.Current().Choices {
				text.WriteString(c.Delta.Content)
			}
			chunks++
		}
		if err := stream.Err(); err != nil {
			t.Fatal(err)
		}
		if chunks < 3 || text.Len() == 0 {
			t.Errorf("the stream has %d chunks and the text %q", chunks, text.String())
		}
	})

	t.Run("embeds as the engine does", func(t *testing.T) {
		question := openai.EmbeddingNewParams{Model: string(p.model), Input: openai.EmbeddingNewParamsInputUnion{OfArrayOfStrings: []string{"a mill", "a race"}}}
		want, err := direct.Embeddings.New(t.Context(), question)
		if err != nil {
			same(t, err, func(c openai.Client) error { _, err := c.Embeddings.New(t.Context(), question); return err }, p.openai)
			return
		}
		got, err := p.openai.Embeddings.New(t.Context(), question)
		if err != nil {
			t.Fatal(err)
		}
		if len(got.Data) != len(want.Data) || len(got.Data[1].Embedding) != len(want.Data[1].Embedding) {
			t.Errorf("%d vectors, the engine gives %d", len(got.Data), len(want.Data))
		}
	})

	t.Run("passes the engine's refusal on", func(t *testing.T) {
		for _, field := range []string{`"temperature":"hot"`, `"messages":[{"role":5}]`} {
			ask := func(c openai.Client) error {
				body := []byte(`{"model":"` + string(p.model) + `","messages":[{"role":"user","content":"Hello"}],"max_tokens":1,` + field + `}`)
				return c.Post(t.Context(), "chat/completions", nil, nil, option.WithRequestBody("application/json", body))
			}
			if err := ask(direct); err != nil { // some engines refuse nothing
				same(t, err, ask, p.openai)
			}
		}
	})

	t.Run("runs a durable job whose events and result agree", func(t *testing.T) {
		body := json.RawMessage(fmt.Sprintf(`{"model":%q,"messages":[{"role":"user","content":"Why is the sky blue?"}],"max_tokens":16}`, p.model))
		j, err := p.client.Submit(t.Context(), client.Submission{Body: body})
		if err != nil {
			t.Fatal(err)
		}
		var text strings.Builder
		for e, err := range p.client.Events(t.Context(), j.ID, 0) {
			if err != nil {
				t.Fatal(err)
			}
			if e.Kind == job.EventToken {
				text.WriteString(deltas(t, e.Data))
			}
		}
		if j, err = p.client.Wait(t.Context(), j.ID); err != nil {
			t.Fatal(err)
		}
		if j.Status != job.Completed || j.Result == nil {
			t.Fatalf("the job ended %s, error %v", j.Status, j.Error)
		}
		if want := job.AnswerText(j.Result.Body); want == "" || text.String() != want {
			t.Errorf("events have the text %q, the result has %q", text.String(), want)
		}
	})

	t.Run("stops the engine when a job is cancelled", func(t *testing.T) {
		j, err := p.client.Submit(t.Context(), client.Submission{Body: p.long()})
		if err != nil {
			t.Fatal(err)
		}
		for e, err := range p.client.Events(t.Context(), j.ID, 0) {
			if err != nil {
				t.Fatal(err)
			}
			if e.Kind == job.EventToken {
				break
			}
		}
		p.busy(t)
		if _, err := p.client.Cancel(t.Context(), j.ID); err != nil {
			t.Fatal(err)
		}
		if j, err = p.client.Wait(t.Context(), j.ID); err != nil {
			t.Fatal(err)
		}
		if j.Status != job.Cancelled {
			t.Errorf("the job ended %s, want cancelled", j.Status)
		}
		p.idle(t)
	})

	t.Run("stops the engine when a client goes away", func(t *testing.T) {
		ctx, leave := context.WithCancel(t.Context())
		defer leave()
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, p.url+"/v1/chat/completions", bytes.NewReader(bytes.Replace(p.long(), []byte("{"), []byte(`{"stream":true,`), 1)))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if _, err := resp.Body.Read(make([]byte, 1)); err != nil || resp.StatusCode != http.StatusOK {
			t.Fatalf("status %d, reading the first byte: %v", resp.StatusCode, err)
		}
		p.busy(t)
		leave()
		p.idle(t)
	})

	// More than most engines run at once: were their work not stopped, the question after them would wait for it.
	t.Run("has room at once when many clients have gone away", func(t *testing.T) {
		ctx, leave := context.WithCancel(t.Context())
		defer leave()
		var clients sync.WaitGroup
		for range 16 {
			clients.Go(func() {
				_, err := p.openai.Chat.Completions.New(ctx, openai.ChatCompletionNewParams{}, option.WithRequestBody("application/json", []byte(p.long())))
				if err == nil || ctx.Err() == nil {
					t.Errorf("a client that left: %v", err)
				}
			})
		}
		p.busy(t)
		leave()
		clients.Wait()
		soon, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		if _, err := p.openai.Chat.Completions.New(soon, p.question(1), option.WithMaxRetries(0)); err != nil {
			t.Errorf("asking after they left: %v", err)
		}
	})
}

// same checks that Millrace tells what the engine told: the status and the message.
func same(t *testing.T, engine error, ask func(openai.Client) error, millrace openai.Client) {
	t.Helper()
	var want, got *openai.Error
	if !errors.As(engine, &want) {
		t.Fatalf("asking the engine: %v", engine)
	}
	if err := ask(millrace); !errors.As(err, &got) {
		t.Fatalf("the engine answered %d %s, here the error is %v", want.StatusCode, want.RawJSON(), err)
	}
	if got.StatusCode != want.StatusCode || got.Message != want.Message {
		t.Errorf("got %d %s, the engine answered %d %s", got.StatusCode, got.RawJSON(), want.StatusCode, want.RawJSON())
	}
}

// deltas joins the text of the chunks in one event.
func deltas(t *testing.T, data []byte) string {
	t.Helper()
	var text strings.Builder
	for line := range bytes.Lines(data) {
		var chunk openai.ChatCompletionChunk
		if err := json.Unmarshal(line, &chunk); err != nil {
			t.Fatalf("reading the chunk %s: %v", line, err)
		}
		for _, c := range chunk.Choices {
			text.WriteString(c.Delta.Content)
		}
	}
	return text.String()
}

// busy waits until a worker says that it runs something, which it does by the second.
func (p *platform) busy(t *testing.T) { p.await(t, func(running int) bool { return running > 0 }) }

// idle waits until no worker runs anything, and fails the test if that takes longer than a stopped engine needs.
func (p *platform) idle(t *testing.T) { p.await(t, func(running int) bool { return running == 0 }) }

func (p *platform) await(t *testing.T, right func(running int) bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for {
		n, err := p.running(ctx)
		if err == nil && right(n) {
			return
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			t.Fatalf("after ten seconds the workers say that they run %d jobs (%v)", n, err)
		}
	}
}

// running counts the jobs that the workers say they run.
func (p *platform) running(ctx context.Context) (int, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, p.url+"/admin/v1/workers", nil)
	if err != nil {
		return 0, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	var page struct {
		Data []struct {
			Running int `json:"running"`
		} `json:"data"`
	}
	if err := json.NewDecoder(resp.Body).Decode(&page); err != nil {
		return 0, fmt.Errorf("reading the workers' page: %w", err)
	}
	if len(page.Data) == 0 {
		return 0, fmt.Errorf("the workers' page names none")
	}
	n := 0
	for _, w := range page.Data {
		n += w.Running
	}
	return n, nil
}
