package client_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/client"
	"github.com/millrace/millrace/internal/job"
)

const liveBatch = `{"id":"batch_1","object":"batch","endpoint":"/v1/chat/completions","model":"m","input_file_id":"file-1","completion_window":"24h","status":"in_progress",` +
	`"output_file_id":null,"error_file_id":null,"errors":null,"created_at":1700000000,"in_progress_at":1700000001,"expires_at":1700086400,"completed_at":null,` +
	`"request_counts":{"total":10,"completed":4,"failed":1},"usage":{"input_tokens":7,"output_tokens":5,"total_tokens":12},"metadata":{"a":"b"},"new":9007199254740993}`

func TestCreateBatchSendsOneKeyOverAllTries(t *testing.T) {
	t.Parallel()
	var tries atomic.Int32
	var key atomic.Value
	c := fake(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodPost || r.URL.Path != "/v1/batches" {
			t.Errorf("%s %s", r.Method, r.URL)
		}
		body, _ := io.ReadAll(r.Body)
		if want := `{"input_file_id":"file-1","endpoint":"/v1/chat/completions","completion_window":"24h","metadata":{"a":"b"}}`; string(body) != want {
			t.Errorf("body %s", body)
		}
		if tries.Add(1) == 1 {
			key.Store(r.Header.Get("Idempotency-Key"))
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		if k := r.Header.Get("Idempotency-Key"); k == "" || k != key.Load() {
			t.Errorf("key %q after %q", k, key.Load())
		}
		_, _ = io.WriteString(w, liveBatch)
	})
	b, err := c.CreateBatch(t.Context(), client.NewBatch{InputFileID: "file-1", Endpoint: job.ChatCompletions, CompletionWindow: "24h", Metadata: map[string]string{"a": "b"}})
	if err != nil {
		t.Fatal(err)
	}
	if b.ID != "batch_1" || b.Ended() || b.EndedAt() != 0 || b.RequestCounts != (client.RequestCounts{Total: 10, Completed: 4, Failed: 1}) || b.Usage.TotalTokens != 12 || b.OutputFileID != "" {
		t.Errorf("got %+v", b)
	}
	raw, err := json.Marshal(b)
	if err != nil || string(raw) != liveBatch {
		t.Errorf("it is written as %s, %v", raw, err)
	}
}

func TestBatchRoutes(t *testing.T) {
	t.Parallel()
	var got []string
	c := fake(t, func(w http.ResponseWriter, r *http.Request) {
		got = append(got, r.Method+" "+r.URL.RequestURI())
		if r.Method == http.MethodGet && r.URL.Path == "/v1/batches" {
			_, _ = io.WriteString(w, `{"object":"list","data":[`+liveBatch+`],"first_id":"batch_1","last_id":"batch_1","has_more":true}`)
			return
		}
		_, _ = io.WriteString(w, `{"id":"batch_1","status":"cancelled","cancelling_at":5,"cancelled_at":7}`)
	})
	if p, err := c.Batches(t.Context(), "batch_0", 5); err != nil || len(p.Data) != 1 || !p.HasMore || p.LastID != "batch_1" {
		t.Errorf("got %+v, %v", p, err)
	}
	if b, err := c.Batch(t.Context(), "batch_1"); err != nil || !b.Ended() || b.EndedAt() != 7 {
		t.Errorf("got %+v, %v", b, err)
	}
	if _, err := c.CancelBatch(t.Context(), "batch_1"); err != nil {
		t.Error(err)
	}
	if _, err := c.RetryBatch(t.Context(), "batch/../1", ""); err != nil {
		t.Error(err)
	}
	want := []string{"GET /v1/batches?after=batch_0&limit=5", "GET /v1/batches/batch_1", "POST /v1/batches/batch_1/cancel", "POST /v1/batches/batch%2F..%2F1/retry"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestResultsAreWholeLines(t *testing.T) {
	t.Parallel()
	long := `{"custom_id":"a","x":"` + strings.Repeat("y", 200_000) + "\"}\n"
	var tries atomic.Int32
	c := fake(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/v1/batches/batch_1/results" {
			t.Errorf("path %s", r.URL.Path)
		}
		if tries.Add(1) == 1 {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		_, _ = io.WriteString(w, "{}\n"+long+"{}\n")
	})
	var out bytes.Buffer
	n, err := c.Results(t.Context(), "batch_1", &out)
	if err != nil || n != 3 || out.String() != "{}\n"+long+"{}\n" {
		t.Errorf("got %d lines, %d bytes, %v", n, out.Len(), err)
	}
}

func TestResultsThatBreakOffAreAnError(t *testing.T) {
	t.Parallel()
	c := fake(t, func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "{}\n{}\n{\"custom_id")
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	})
	var out bytes.Buffer
	n, err := c.Results(t.Context(), "batch_1", &out)
	if err == nil || !strings.Contains(err.Error(), "after 2 lines") || n != 2 || out.String() != "{}\n{}\n" {
		t.Errorf("got %d lines, %q, %v", n, out.String(), err)
	}
	if errors.Is(err, client.ErrUnreachable) {
		t.Error("it would be tried again")
	}
}
