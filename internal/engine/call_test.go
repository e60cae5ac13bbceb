package engine_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/engine"
	"github.com/millrace/millrace/internal/job"
)

func call(ctx context.Context, e *engine.Engine, body string) (*engine.Response, error) {
	return e.Call(ctx, engine.Request{Endpoint: job.ChatCompletions, Body: strings.NewReader(body), Size: int64(len(body)), ID: "job_1"})
}

// answer posts a small body to the engine of handler; the test closes the answer.
func answer(t *testing.T, cfg engine.Config, handler http.HandlerFunc) *engine.Response {
	t.Helper()
	cfg.Kind = engine.Generic
	r, err := call(t.Context(), start(t, cfg, routes{"POST /v1/chat/completions": handler}), "{}")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Body.Close() })
	return r
}

func TestTheEngineGetsTheBodyByteForByte(t *testing.T) {
	t.Parallel()
	type seen struct {
		Body, Path, Type, ID, Encoding, Auth string
		Length                               int64
	}
	got := make(chan seen, 1)
	e := start(t, engine.Config{APIKey: "k"}, routes{"POST /": func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		got <- seen{
			string(body), r.URL.Path, r.Header.Get("Content-Type"), r.Header.Get("X-Request-Id"), r.Header.Get("Accept-Encoding"), r.Header.Get("Authorization"), r.ContentLength,
		}
	}})
	for _, body := range []string{
		`{ "seed":9007199254740993,"messages" : [{"content":"<b>&</b>","role":"user"}], "z":1e400,"a":null,"z":[ ],"x_vendor":{"b":1,"a":2}}` + "\n",
		"\"no object\" \u2028 and \xff no UTF-8",
		strings.Repeat("x", 5<<20),
	} {
		// Read by a reader of no known type, as one of a stored body is.
		r, err := e.Call(t.Context(), engine.Request{Endpoint: job.Embeddings, Body: io.MultiReader(strings.NewReader(body)), Size: int64(len(body)), ID: "job_1"})
		if err != nil {
			t.Fatal(err)
		}
		_ = r.Body.Close()
		if diff := cmp.Diff(seen{body, "/v1/embeddings", "application/json", "job_1", "", "Bearer k", int64(len(body))}, <-got); diff != "" {
			t.Errorf("request (-want +got):\n%.500s", diff)
		}
	}
}

func TestTheAnswerIsReadWhole(t *testing.T) {
	t.Parallel()
	text := strings.Repeat(`{"id":9007199254740993,"t":"<é>"}`, 100_000)
	for name, handler := range map[string]http.HandlerFunc{
		"with a length": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", strconv.Itoa(len(text)))
			_, _ = io.WriteString(w, text)
		},
		"in chunks": func(w http.ResponseWriter, _ *http.Request) {
			for part := range bytes.SplitSeq([]byte(text), []byte("}")) {
				_, _ = w.Write(part)
				if len(part) > 0 {
					_, _ = io.WriteString(w, "}")
				}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := answer(t, engine.Config{}, handler).ReadAll()
			if err != nil || string(got) != text {
				t.Errorf("%d bytes, %v; want the %d that were sent", len(got), err, len(text))
			}
		})
	}
}

func TestTheHeadOfAnAnswer(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		header   string
		from, to time.Duration
	}{
		"none":     {"", 0, 0},
		"seconds":  {"7", 7 * time.Second, 7 * time.Second},
		"a date":   {time.Now().Add(time.Hour).UTC().Format(http.TimeFormat), 59 * time.Minute, time.Hour},
		"the past": {"Mon, 02 Jan 2006 15:04:05 GMT", 0, 0},
		"negative": {"-3", 0, 0},
		"garbage":  {"soon", 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := answer(t, engine.Config{}, func(w http.ResponseWriter, _ *http.Request) {
				if tc.header != "" {
					w.Header().Set("Retry-After", tc.header)
				}
				w.Header().Set("Content-Type", "application/problem")
				w.WriteHeader(http.StatusTooManyRequests)
			})
			if r.StatusCode != http.StatusTooManyRequests || r.ContentType != "application/problem" || r.RetryAfter < tc.from || r.RetryAfter > tc.to {
				t.Errorf("%d %q, retry after %s; want 429 application/problem and %s to %s", r.StatusCode, r.ContentType, r.RetryAfter, tc.from, tc.to)
			}
		})
	}
}

func TestARedirectIsAnAnswerNotFollowed(t *testing.T) {
	t.Parallel()
	r := answer(t, engine.Config{}, func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, "http://192.0.2.1/", http.StatusTemporaryRedirect)
	})
	if r.StatusCode != http.StatusTemporaryRedirect {
		t.Errorf("status %d", r.StatusCode)
	}
}

func TestAnAnswerOverTheLimitIsTooLarge(t *testing.T) {
	t.Parallel()
	for name, declare := range map[string]bool{"by its length": true, "by its bytes": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for size, want := range map[int]error{1000: nil, 1001: engine.ErrTooLarge} {
				r := answer(t, engine.Config{MaxAnswer: 1000}, func(w http.ResponseWriter, _ *http.Request) {
					if declare {
						w.Header().Set("Content-Length", strconv.Itoa(size))
					} else {
						w.(http.Flusher).Flush()
					}
					_, _ = w.Write(make([]byte, size))
				})
				if got, err := r.ReadAll(); !errors.Is(err, want) || err == nil && len(got) != size {
					t.Errorf("%d bytes: got %d, %v; want %v", size, len(got), err, want)
				}
			}
		})
	}
}

func TestACutAnswerIsUnreachable(t *testing.T) {
	t.Parallel()
	cut := func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "data: {}\n\n")
		w.(http.Flusher).Flush()
		abort(t, w)
	}
	if got, err := answer(t, engine.Config{}, cut).ReadAll(); !errors.Is(err, engine.ErrUnreachable) {
		t.Errorf("read whole: %q, %v; want ErrUnreachable", got, err)
	}
	events, err := collect(answer(t, engine.Config{}, cut))
	if len(events) != 1 || !errors.Is(err, engine.ErrUnreachable) {
		t.Errorf("events: %v, %v; want one, then ErrUnreachable", events, err)
	}
	short := func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "100")
		_, _ = io.WriteString(w, "{}")
	}
	if got, err := answer(t, engine.Config{}, short).ReadAll(); !errors.Is(err, engine.ErrUnreachable) {
		t.Errorf("shorter than it said: %q, %v; want ErrUnreachable", got, err)
	}
}

func TestEndingACallTellsTheEngineAtOnce(t *testing.T) {
	t.Parallel()
	errStalled := errors.New("no token came")
	for name, tc := range map[string]struct {
		end  func(cancel context.CancelCauseFunc, r *engine.Response)
		want []error
	}{
		"closing":              {func(_ context.CancelCauseFunc, r *engine.Response) { _ = r.Body.Close() }, nil},
		"cancelling":           {func(cancel context.CancelCauseFunc, _ *engine.Response) { cancel(nil) }, []error{context.Canceled}},
		"cancelling for cause": {func(cancel context.CancelCauseFunc, _ *engine.Response) { cancel(errStalled) }, []error{context.Canceled, errStalled}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			gone := make(chan struct{})
			e := start(t, engine.Config{Kind: engine.Generic}, routes{"POST /": func(w http.ResponseWriter, r *http.Request) {
				_, _ = io.WriteString(w, "data: {}\n\n")
				w.(http.Flusher).Flush()
				<-r.Context().Done() // the test's own deadline bounds this
				close(gone)
			}})
			ctx, cancel := context.WithCancelCause(t.Context())
			defer cancel(nil)
			r, err := call(ctx, e, "{}")
			if err != nil {
				t.Fatal(err)
			}
			defer r.Body.Close()
			var last error
			for event, err := range r.Events() {
				if last = err; err == nil {
					if string(event.Data) != "{}" {
						t.Errorf("event %q", event.Raw)
					}
					tc.end(cancel, r)
				}
			}
			if last == nil {
				t.Error("the stream ended as if it were whole")
			}
			for _, want := range tc.want {
				if !errors.Is(last, want) || errors.Is(last, engine.ErrUnreachable) {
					t.Errorf("%v; want %v, and not unreachable", last, want)
				}
			}
			<-gone
		})
	}
}

func TestADeadlineBeforeTheHeadIsTheContextsError(t *testing.T) {
	t.Parallel()
	gone := make(chan struct{})
	e := start(t, engine.Config{Kind: engine.Generic}, routes{"POST /": func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body) // the server sees a closed connection only behind the body
		<-r.Context().Done()
		close(gone)
	}})
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := call(ctx, e, "{}"); !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, engine.ErrUnreachable) {
		t.Errorf("%v; want the deadline, and not unreachable", err)
	}
	<-gone
}

func TestAConnectionServesTheNextCallAfterDone(t *testing.T) {
	t.Parallel()
	var opened atomic.Int32
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "data: {}\n\ndata: [DONE]\n\n")
		w.(http.Flusher).Flush()
	}))
	server.Config.ConnState = func(_ net.Conn, s http.ConnState) {
		if s == http.StateNew {
			opened.Add(1)
		}
	}
	server.Start()
	t.Cleanup(server.Close)
	e := client(t, engine.Config{URL: server.URL, Kind: engine.Generic})
	for range 5 {
		r, err := call(t.Context(), e, "{}")
		if err != nil {
			t.Fatal(err)
		}
		if events, err := collect(r); err != nil || len(events) != 2 {
			t.Fatal(events, err)
		}
		_ = r.Body.Close()
	}
	if n := opened.Load(); n != 1 {
		t.Errorf("%d connections for 5 calls one after the other, want 1", n)
	}
}

func TestAnEngineThatHangsAfterDoneHoldsNobodyUp(t *testing.T) {
	t.Parallel()
	gone := make(chan struct{})
	r := answer(t, engine.Config{}, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, "data: [DONE]\n\n")
		w.(http.Flusher).Flush()
		<-r.Context().Done()
		close(gone)
	})
	if events, err := collect(r); err != nil || len(events) != 1 || !events[0].Done {
		t.Fatal(events, err)
	}
	_ = r.Body.Close()
	<-gone
}
