package client_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/millrace/millrace/internal/client"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/testenv"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fake serves h and returns a client of it.
func fake(t *testing.T, h http.HandlerFunc, change ...func(*client.Config)) *client.Client {
	t.Helper()
	srv := httptest.NewServer(h)
	t.Cleanup(srv.Close)
	cfg := client.Config{URL: srv.URL, APIKey: "secret", Patience: 10 * time.Second, HTTP: srv.Client()}
	for _, f := range change {
		f(&cfg)
	}
	c, err := client.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestURLMayEndInV1(t *testing.T) {
	t.Parallel()
	for _, u := range []string{"http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"} {
		c, err := client.New(client.Config{URL: u})
		if err != nil {
			t.Fatal(err)
		}
		if c.URL() != "http://h:1" {
			t.Errorf("%s became %s", u, c.URL())
		}
	}
	if _, err := client.New(client.Config{URL: "localhost:8080"}); err == nil {
		t.Error("a URL without a scheme was taken")
	}
}

func TestSubmitSendsTheBodyAndOneKeyOverAllTries(t *testing.T) {
	t.Parallel()
	var tries atomic.Int32
	var first string
	c := fake(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodPost || r.URL.Path != "/v1/jobs" || r.Header.Get("Authorization") != "Bearer secret" {
			t.Errorf("got %s %s %q", r.Method, r.URL, r.Header)
		}
		key := r.Header.Get("Idempotency-Key")
		switch tries.Add(1) {
		case 1:
			first = key
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		case 2: // stored, and the answer lost
			conn, _, _ := w.(http.Hijacker).Hijack()
			_ = conn.Close()
			return
		}
		if key == "" || key != first {
			t.Errorf("the key was %q and then %q", first, key)
		}
		body, _ := io.ReadAll(r.Body)
		var got struct {
			Body     json.RawMessage
			Priority string
		}
		if err := json.Unmarshal(body, &got); err != nil {
			t.Error(err)
		}
		if string(got.Body) != `{"model":"m","seed":9007199254740993}` || got.Priority != "batch" {
			t.Errorf("got %s", body)
		}
		w.WriteHeader(http.StatusAccepted)
		_, _ = io.WriteString(w, `{"id":"job_1","status":"queued"}`)
	})
	j, err := c.Submit(t.Context(), client.Submission{Body: json.RawMessage(`{"model":"m","seed":9007199254740993}`), Priority: job.Batch})
	if err != nil {
		t.Fatal(err)
	}
	if j.ID != "job_1" || j.Status != job.Queued || tries.Load() != 3 {
		t.Errorf("got %+v after %d tries", j, tries.Load())
	}
}

func TestErrorCarriesCodeAndParam(t *testing.T) {
	t.Parallel()
	c := fake(t, func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusNotFound)
		_, _ = io.WriteString(w, `{"error":{"message":"there is no model x","type":"invalid_request_error","param":"model","code":"model_not_found"}}`)
	})
	_, err := c.Job(t.Context(), "job_1", 0)
	var got *client.Error
	if !errors.As(err, &got) {
		t.Fatalf("got %v", err)
	}
	want := client.Error{Status: 404, Code: job.CodeModelNotFound, Message: "there is no model x", Param: "model"}
	if diff := cmp.Diff(want, *got); diff != "" {
		t.Error(diff)
	}
}

func TestAnAnswerThatIsNoErrorObjectIsStillAnError(t *testing.T) {
	t.Parallel()
	c := fake(t, func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusForbidden)
		_, _ = io.WriteString(w, "<html>no</html>")
	})
	_, err := c.Models(t.Context())
	if err == nil || !strings.Contains(err.Error(), "Forbidden (403)") {
		t.Errorf("got %v", err)
	}
}

func TestAServerThatIsNotThereIsAnErrorAtOnce(t *testing.T) {
	t.Parallel()
	c, err := client.New(client.Config{URL: "http://" + testenv.FreeAddr(t), Patience: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Models(t.Context()); !errors.Is(err, client.ErrUnreachable) {
		t.Errorf("got %v, want ErrUnreachable", err)
	}
}

func TestPatienceEnds(t *testing.T) {
	t.Parallel()
	c := fake(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Retry-After", "30")
		w.WriteHeader(http.StatusTooManyRequests)
	})
	_, err := c.Models(t.Context())
	var got *client.Error
	if !errors.As(err, &got) || got.RetryAfter != 30*time.Second {
		t.Errorf("got %v, want the refusal", err)
	}
}

func TestWaitPollsUntilTheJobEnds(t *testing.T) {
	t.Parallel()
	var n atomic.Int32
	c := fake(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("wait") == "" {
			t.Error("it does not wait at the server")
		}
		status := "running"
		if n.Add(1) == 3 {
			status = "completed"
		}
		_, _ = fmt.Fprintf(w, `{"id":"job_1","status":%q,"result":{"status_code":200,"body":{"a":1}}}`, status)
	})
	j, err := c.Wait(t.Context(), "job_1")
	if err != nil {
		t.Fatal(err)
	}
	if j.Status != job.Completed || string(j.Result.Body) != `{"a":1}` {
		t.Errorf("got %+v", j)
	}
}

func TestListCarriesItsFilter(t *testing.T) {
	t.Parallel()
	c := fake(t, func(w http.ResponseWriter, r *http.Request) {
		if got := r.URL.RawQuery; got != "after=job_0&limit=2&model=m&status=queued" {
			t.Errorf("query %s", got)
		}
		_, _ = io.WriteString(w, `{"object":"list","data":[{"id":"job_2"},{"id":"job_1"}],"first_id":"job_2","last_id":"job_1","has_more":true}`)
	})
	p, err := c.Jobs(t.Context(), client.Filter{Status: job.Queued, Model: "m", Limit: 2, After: "job_0"})
	if err != nil {
		t.Fatal(err)
	}
	if len(p.Data) != 2 || p.LastID != "job_1" || !p.HasMore {
		t.Errorf("got %+v", p)
	}
}

func TestAJobKeepsTheFieldsThatTheClientDoesNotKnow(t *testing.T) {
	t.Parallel()
	c := fake(t, func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"id":"job_1","new":{"b":1,"a":9007199254740993},"error":null}`)
	})
	j, err := c.Job(t.Context(), "job_1", 0)
	if err != nil {
		t.Fatal(err)
	}
	got, err := json.Marshal(j)
	if err != nil {
		t.Fatal(err)
	}
	if want := `{"id":"job_1","new":{"b":1,"a":9007199254740993},"error":null}`; string(got) != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func TestCancelAndDelete(t *testing.T) {
	t.Parallel()
	var got []string
	c := fake(t, func(w http.ResponseWriter, r *http.Request) {
		got = append(got, r.Method+" "+r.URL.Path)
		_, _ = io.WriteString(w, `{"id":"job_1","status":"cancelled"}`)
	})
	if j, err := c.Cancel(t.Context(), "job_1"); err != nil || j.Status != job.Cancelled {
		t.Errorf("got %v %v", j, err)
	}
	if err := c.Delete(t.Context(), "job_1"); err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff([]string{"POST /v1/jobs/job_1/cancel", "DELETE /v1/jobs/job_1"}, got); diff != "" {
		t.Error(diff)
	}
}

func TestACancelledCallSaysSo(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	c := fake(t, func(_ http.ResponseWriter, r *http.Request) {
		cancel()
		<-r.Context().Done()
	})
	if _, err := c.Models(ctx); !errors.Is(err, context.Canceled) || errors.Is(err, client.ErrUnreachable) {
		t.Errorf("got %v, want that it was cancelled", err)
	}
}

// TestListsOfOperatorsAreReadToTheirEnd: page by page, each with what was asked of the first.
func TestListsOfOperatorsAreReadToTheirEnd(t *testing.T) {
	t.Parallel()
	var asked []string
	c := fake(t, func(w http.ResponseWriter, r *http.Request) {
		asked = append(asked, r.URL.String())
		switch r.URL.Query().Get("after") {
		case "":
			_, _ = io.WriteString(w, `{"object":"list","data":[{"id":"a"},{"id":"b"}],"first_id":"a","last_id":"b","has_more":true}`)
		case "b":
			_, _ = io.WriteString(w, `{"object":"list","data":[{"id":"c"}],"first_id":"c","last_id":"c","has_more":true}`)
		default:
			_, _ = io.WriteString(w, `{"object":"list","data":[{"id":"d"}],"first_id":"d","last_id":"d","has_more":false}`)
		}
	})
	keys, err := c.Keys(t.Context(), "acme")
	if err != nil || len(keys) != 4 || keys[3].ID != "d" {
		t.Errorf("%v: %+v", err, keys)
	}
	tenants, err := c.Tenants(t.Context())
	if err != nil || len(tenants) != 4 || tenants[3].ID != "d" {
		t.Errorf("%v: %+v", err, tenants)
	}
	want := []string{
		"/admin/v1/keys?tenant=acme", "/admin/v1/keys?after=b&tenant=acme", "/admin/v1/keys?after=c&tenant=acme",
		"/admin/v1/tenants", "/admin/v1/tenants?after=b", "/admin/v1/tenants?after=c",
	}
	if diff := cmp.Diff(want, asked); diff != "" {
		t.Error(diff)
	}
}
