package engine_test

import (
	"context"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/millrace/millrace/internal/engine"
)

const (
	responsesRoute = "POST /v1/responses"
	oneResponse    = `{"object":"response","status":"incomplete","output":[{"type":"message"}]}`
)

// answers answers every call with a status and a body.
func answers(status int, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(status)
		_, _ = io.WriteString(w, body)
	}
}

// Only what answers counts: many an engine has the route, and says there that it cannot.
func TestEnginesThatServeResponses(t *testing.T) {
	t.Parallel()
	for reason, c := range map[string]struct {
		answer     http.HandlerFunc
		does, sure bool
	}{
		"it does":                    {answers(200, oneResponse), true, true},
		"there is no such route":     {answers(404, `{"detail":"Not Found"}`), false, true},
		"the model cannot":           {answers(400, `{"error":{"message":"The model does not support Responses API"}}`), false, true},
		"it is not implemented":      {answers(501, ``), false, true},
		"another kind of answer":     {answers(200, oneToken), false, true},
		"a page":                     {answers(200, `<html>`), false, true},
		"the response failed":        {answers(200, `{"object":"response","status":"failed","output":[]}`), false, true},
		"no output":                  {answers(200, `{"object":"response","status":"completed"}`), false, true},
		"it is loading":              {answers(503, ``), false, false},
		"it is full":                 {answers(429, ``), false, false},
		"it breaks off (no answer)":  {func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, false, false},
		"it fails with such a probe": {answers(500, `{"error":{"message":"x"}}`), false, false},
	} {
		e := start(t, engine.Config{Kind: engine.VLLM}, routes{responsesRoute: c.answer})
		if does, sure := e.KnownResponses("m"); does || sure {
			t.Errorf("%s: before it is asked, it is known: %t", reason, does)
		}
		if does, sure := e.ServesResponses(t.Context(), "m"); does != c.does || sure != c.sure {
			t.Errorf("%s: it does %t, sure %t", reason, does, sure)
		}
		if does, sure := e.KnownResponses("m"); does != c.does || sure != c.sure {
			t.Errorf("%s: it is known to do so %t, sure %t", reason, does, sure)
		}
	}
	if does, sure := client(t, engine.Config{URL: "http://127.0.0.1:1"}).ServesResponses(t.Context(), "m"); does || sure {
		t.Error("an engine that is not there does")
	}
}

func TestResponsesAreProbedOnce(t *testing.T) {
	t.Parallel()
	var probes atomic.Int64
	e := start(t, engine.Config{Kind: engine.VLLM}, routes{responsesRoute: func(w http.ResponseWriter, r *http.Request) {
		probes.Add(1)
		if body, _ := io.ReadAll(r.Body); !strings.HasPrefix(string(body), `{"model":"m","input":`) {
			t.Errorf("the probe is %s", body)
		}
		_, _ = io.WriteString(w, oneResponse)
	}})
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			if does, sure := e.ServesResponses(t.Context(), "m"); !does || !sure {
				t.Errorf("it does %t, sure %t", does, sure)
			}
		})
	}
	wg.Wait()
	if n := probes.Load(); n != 1 {
		t.Errorf("%d probes", n)
	}
	e.Reset()
	if does, sure := e.KnownResponses("m"); does || sure {
		t.Error("what another engine did is known still")
	}
}

func TestACallerThatLeavesDecidesNothingAboutResponses(t *testing.T) {
	t.Parallel()
	var block atomic.Bool
	block.Store(true)
	ctx, cancel := context.WithCancel(t.Context())
	e := start(t, engine.Config{Kind: engine.VLLM}, routes{responsesRoute: func(w http.ResponseWriter, r *http.Request) {
		if block.Load() {
			cancel()
			_, _ = io.Copy(io.Discard, r.Body) // so that the server sees who leaves
			<-r.Context().Done()
			return
		}
		_, _ = io.WriteString(w, oneResponse)
	}})
	if does, sure := e.ServesResponses(ctx, "m"); does || sure {
		t.Errorf("it does %t, sure %t", does, sure)
	}
	block.Store(false)
	if does, sure := e.ServesResponses(t.Context(), "m"); !does || !sure {
		t.Errorf("it does %t, sure %t", does, sure)
	}
}
