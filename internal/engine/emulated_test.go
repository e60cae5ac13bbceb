package engine_test

import (
	"bytes"
	"context"
	"encoding/json"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/engine"
	"github.com/millrace/millrace/internal/engine/emulator"
	"github.com/millrace/millrace/internal/engine/emulator/emulatortest"
	"github.com/millrace/millrace/internal/job"
)

func TestTheEmulatorIsAVLLM(t *testing.T) {
	t.Parallel()
	server := emulatortest.Start(t, emulator.Config{Models: []string{"m"}})
	e := client(t, engine.Config{URL: server.URL})
	if kind, err := e.Detect(t.Context()); err != nil || kind != engine.VLLM {
		t.Fatalf("kind %q, %v", kind, err)
	}
	if err := e.Healthy(t.Context()); err != nil {
		t.Error(err)
	}
	if err := e.Probe(t.Context(), "m"); err != nil {
		t.Error(err)
	}
	if err := e.Probe(t.Context(), "another"); err == nil {
		t.Error("a model that it does not serve is ready")
	}
	models, err := e.Models(t.Context())
	if err != nil || len(models) != 1 || models[0].Model != "m" || models[0].ContextLength == 0 {
		t.Errorf("models %+v, %v", models, err)
	}
	load, err := e.Load(t.Context())
	if err != nil || load.Source != engine.SourceEngine || load.Capacity() == 0 || load.GeneratedTokens != 1 || load.Preemptions != 0 {
		t.Errorf("load %+v, %v", load, err)
	}
}

// vLLM writes nulls and empty lists into a whole answer that its chunks do not have: what is compared is all else.
func TestTheEmulatorsStreamsAssembleToItsAnswers(t *testing.T) {
	t.Parallel()
	server := emulatortest.Start(t, emulator.Config{Models: []string{"m"}})
	e := client(t, engine.Config{URL: server.URL})
	for name, tc := range map[string]struct {
		endpoint job.Endpoint
		body     string
	}{
		"two answers":           {job.ChatCompletions, `"messages":[{"role":"user","content":"hello"}],"n":2,"max_tokens":30`},
		"logprobs":              {job.ChatCompletions, `"messages":[{"role":"user","content":"hello"}],"logprobs":true,"top_logprobs":2,"max_tokens":5`},
		"a tool call":           {job.ChatCompletions, `"messages":[{"role":"user","content":"hello"}],"tool_choice":"required","tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{"a":{"type":"string"}}}}}]`},
		"completions":           {job.Completions, `"prompt":["a","b"],"n":2,"max_tokens":9`},
		"completions' logprobs": {job.Completions, `"prompt":"hello","logprobs":2,"max_tokens":9`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			post := func(rest string) *engine.Response {
				body := []byte(`{"model":"m",` + tc.body + rest)
				r, err := e.Call(t.Context(), engine.Request{Endpoint: tc.endpoint, Body: bytes.NewReader(body), Size: int64(len(body)), ID: "job_1"})
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { _ = r.Body.Close() })
				return r
			}
			want, err := post("}").ReadAll()
			if err != nil {
				t.Fatal(err)
			}
			a := engine.NewAssembler(tc.endpoint, true)
			for event, err := range post(`,"stream":true,"stream_options":{"include_usage":true}}`).Events() {
				if err != nil {
					t.Fatal(err)
				}
				if event.Data != nil && !event.Done {
					add(t, a, event.Data)
				}
			}
			got, err := a.Body()
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(meaning(t, want), meaning(t, got)); diff != "" {
				t.Errorf("answer (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(engine.UsageOf(want), a.Usage()); diff != "" {
				t.Errorf("usage (-want +got):\n%s", diff)
			}
		})
	}
}

// meaning is an answer without its time, nulls and empty lists.
func meaning(t *testing.T, answer []byte) any {
	t.Helper()
	var v map[string]any
	if err := json.Unmarshal(answer, &v); err != nil {
		t.Fatalf("%v: %s", err, answer)
	}
	delete(v, "created")
	return bare(v)
}

func bare(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for key, member := range v {
			if list, ok := member.([]any); member == nil || ok && len(list) == 0 {
				delete(v, key)
			} else {
				bare(member)
			}
		}
	case []any:
		for _, element := range v {
			bare(element)
		}
	}
	return v
}

func TestClosingFreesTheEngine(t *testing.T) {
	t.Parallel()
	// A model that needs 28 ms for a token: the answer does not end by itself while this test runs.
	server := emulatortest.Start(t, emulator.Config{Models: []string{"m"}, Profile: "a10-7b"})
	e := client(t, engine.Config{URL: server.URL})
	r, err := call(t.Context(), e, `{"model":"m","messages":[{"role":"user","content":"hello"}],"max_tokens":4000,"ignore_eos":true,"stream":true}`)
	if err != nil {
		t.Fatal(err)
	}
	for _, err := range r.Events() {
		if err != nil {
			t.Error(err)
		}
		break
	}
	if load, err := e.Load(t.Context()); err != nil || load.Running != 1 || load.Used() == 0 {
		t.Errorf("while it runs: %+v, %v", load, err)
	}
	_ = r.Body.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for {
		load, err := e.Load(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if load.Running == 0 && server.Counts().Disconnects == 1 {
			return
		}
	}
}
