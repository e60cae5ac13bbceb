package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/client"
	"github.com/millrace/millrace/internal/job"
)

// fakeBatches answers as the API does about files and batches. Each look at a batch moves it on by one step.
type fakeBatches struct {
	*httptest.Server
	t *testing.T

	mu      sync.Mutex // guards what follows
	asked   []string
	files   map[string]string
	batches []*fakeBatch
	// steps are what a new batch goes through; the last one stays. hold keeps it at the first.
	steps []string
	hold  bool
	admin bool // whether /admin is open
}

type fakeBatch struct {
	id      string
	at      int
	new     client.NewBatch
	created int64
}

func newFakeBatches(t *testing.T, steps ...string) *fakeBatches {
	t.Helper()
	f := &fakeBatches{t: t, files: map[string]string{}, steps: steps}
	if len(steps) == 0 {
		f.steps = []string{
			`"status":"validating"`,
			`"status":"in_progress","request_counts":{"total":3,"completed":1,"failed":0}`,
			`"status":"finalizing","request_counts":{"total":3,"completed":3,"failed":0}`,
			`"status":"completed","request_counts":{"total":3,"completed":3,"failed":0},"completed_at":CREATED+7,"output_file_id":"file-out",` +
				`"usage":{"input_tokens":1200,"input_tokens_details":{"cached_tokens":200},"output_tokens":300,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":1500}`,
		}
	}
	f.files["file-out"], f.files["file-err"] = "{\"custom_id\":\"a\"}\n{\"custom_id\":\"b\"}\n", ""
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/files", f.upload)
	mux.HandleFunc("GET /v1/files/{id}", func(w http.ResponseWriter, r *http.Request) {
		_, _ = fmt.Fprintf(w, `{"id":%q,"bytes":%d}`, r.PathValue("id"), len(f.files[r.PathValue("id")]))
	})
	mux.HandleFunc("GET /v1/files/{id}/content", func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, f.files[r.PathValue("id")])
	})
	mux.HandleFunc("POST /v1/batches", f.create)
	mux.HandleFunc("GET /v1/batches", func(w http.ResponseWriter, r *http.Request) {
		f.note("list " + r.URL.RawQuery)
		var all []string
		for i := len(f.batches) - 1; i >= 0; i-- {
			all = append(all, f.view(f.batches[i]))
		}
		_, _ = fmt.Fprintf(w, `{"object":"list","data":[%s],"has_more":false}`, strings.Join(all, ","))
	})
	one := func(w http.ResponseWriter, r *http.Request, act func(*fakeBatch)) {
		f.mu.Lock()
		defer f.mu.Unlock()
		for _, b := range f.batches {
			if b.id == r.PathValue("id") {
				act(b)
				_, _ = io.WriteString(w, f.view(b))
				return
			}
		}
		w.WriteHeader(http.StatusNotFound)
		_, _ = io.WriteString(w, `{"error":{"message":"There is no such batch.","type":"invalid_request_error","param":null,"code":"batch_not_found"}}`)
	}
	mux.HandleFunc("GET /v1/batches/{id}", func(w http.ResponseWriter, r *http.Request) {
		one(w, r, func(b *fakeBatch) {
			if !f.hold && b.at < len(f.steps)-1 {
				b.at++
			}
		})
	})
	mux.HandleFunc("POST /v1/batches/{id}/cancel", func(w http.ResponseWriter, r *http.Request) {
		f.note("cancel " + r.PathValue("id"))
		_, _ = fmt.Fprintf(w, `{"id":%q,"status":"cancelling"}`, r.PathValue("id"))
	})
	mux.HandleFunc("POST /admin/v1/batches/{id}/cancel", func(w http.ResponseWriter, r *http.Request) {
		f.note("operator cancels " + r.PathValue("id"))
		if r.Header.Get("Authorization") != "Bearer sk-admin" {
			w.WriteHeader(http.StatusForbidden)
			_, _ = io.WriteString(w, `{"error":{"message":"This key does not open it.","type":"invalid_request_error","param":null,"code":"permission_denied"}}`)
			return
		}
		_, _ = fmt.Fprintf(w, `{"id":%q,"status":"cancelling"}`, r.PathValue("id"))
	})
	mux.HandleFunc("POST /v1/batches/{id}/retry", func(w http.ResponseWriter, r *http.Request) {
		f.note("retry " + r.PathValue("id"))
		b := f.add(client.NewBatch{InputFileID: "file-retry", Endpoint: job.ChatCompletions})
		_, _ = io.WriteString(w, f.view(b))
	})
	mux.HandleFunc("GET /v1/batches/{id}/results", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "{\"custom_id\":\"a\"}\n")
	})
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"object":"list","data":[{"id":"m"},{"id":"small"}]}`)
	})
	admin := func(body string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			if !f.admin {
				w.WriteHeader(http.StatusForbidden)
				_, _ = io.WriteString(w, `{"error":{"message":"This key does not open it.","type":"invalid_request_error","param":null,"code":"permission_denied"}}`)
				return
			}
			_, _ = io.WriteString(w, body)
		}
	}
	mux.HandleFunc("GET /admin/v1/workers", admin(`{"data":[{"name":"w1","state":"ready","models":["m"],"largest":4096,"shape":{"tensor_parallel":2}},{"name":"w2","state":"ready","models":["small"],"largest":16}]}`))
	mux.HandleFunc("GET /admin/v1/queues", admin(`{"data":[{"model":"m","tokens_per_second":100,"backlog":{"tokens":500},"reason":"saturated"},{"model":"small","tokens_per_second":50,"backlog":{"tokens":0},"reason":null}]}`))
	f.Server = httptest.NewServer(mux)
	t.Cleanup(f.Close)
	return f
}

func (f *fakeBatches) note(text string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.asked = append(f.asked, text)
}

func (f *fakeBatches) view(b *fakeBatch) string {
	meta, _ := json.Marshal(b.new.Metadata)
	step := strings.ReplaceAll(f.steps[b.at], "CREATED+7", fmt.Sprint(b.created+7))
	return fmt.Sprintf(`{"id":%q,"object":"batch","endpoint":%q,"model":"m","input_file_id":%q,"completion_window":%q,"created_at":%d,"expires_at":%d,"metadata":%s,%s}`,
		b.id, b.new.Endpoint, b.new.InputFileID, b.new.CompletionWindow, b.created, b.created+86400, meta, step)
}

func (f *fakeBatches) add(n client.NewBatch) *fakeBatch {
	f.mu.Lock()
	defer f.mu.Unlock()
	b := &fakeBatch{id: fmt.Sprintf("batch_%d", len(f.batches)+1), new: n, created: time.Now().Unix()}
	f.batches = append(f.batches, b)
	return b
}

func (f *fakeBatches) create(w http.ResponseWriter, r *http.Request) {
	var n client.NewBatch
	if err := json.NewDecoder(r.Body).Decode(&n); err != nil {
		f.t.Error(err)
	}
	f.note(fmt.Sprintf("create %s %s %s", n.InputFileID, n.Endpoint, n.CompletionWindow))
	b := f.add(n)
	_, _ = io.WriteString(w, f.view(b))
}

func (f *fakeBatches) upload(w http.ResponseWriter, r *http.Request) {
	parts, err := r.MultipartReader()
	if err != nil {
		f.t.Error(err)
		return
	}
	for {
		p, err := parts.NextPart()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return // the client is gone
		}
		text, _ := io.ReadAll(p)
		if p.FormName() == "file" {
			f.mu.Lock()
			id := fmt.Sprintf("file-%d", len(f.files))
			f.files[id] = string(text)
			f.asked = append(f.asked, "upload "+p.FileName())
			f.mu.Unlock()
			defer fmt.Fprintf(w, `{"id":%q,"bytes":%d}`, id, len(text))
		}
	}
}

// ask runs a command against the fake.
func (f *fakeBatches) ask(t *testing.T, stdin string, args ...string) result {
	t.Helper()
	return millrace(t, map[string]string{"MILLRACE_URL": f.URL}, stdin, append([]string{"batch"}, args...)...)
}

func line(id, model, text string) string {
	return fmt.Sprintf(`{"custom_id":%q,"method":"POST","url":"/v1/chat/completions","body":{"model":%q,"max_tokens":10,"messages":[{"role":"user","content":%q}]}}`+"\n", id, model, text)
}

const threeLines = `{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{"model":"m","messages":[{"role":"user","content":"1"}]}}

{"custom_id":"b","method":"POST","url":"/v1/chat/completions","body":{"model":"m","messages":[{"role":"user","content":"2"}]}}
{"custom_id":"c","method":"POST","url":"/v1/chat/completions","body":{"model":"m","messages":[{"role":"user","content":"3"}]}}`

func writeInput(t *testing.T, text string) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "in.jsonl")
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

func contentOf(t *testing.T, name string) string {
	t.Helper()
	raw, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(raw)
}

func TestBatchRunWritesTheResultsAndSumsUp(t *testing.T) {
	t.Parallel()
	f := newFakeBatches(t)
	in := writeInput(t, threeLines)
	out := strings.TrimSuffix(in, ".jsonl") + ".output.jsonl"
	stale := strings.TrimSuffix(in, ".jsonl") + ".errors.jsonl"
	if err := os.WriteFile(stale, []byte(resultLine), 0o600); err != nil {
		t.Fatal(err)
	}
	r := f.ask(t, "", "run", in, "--window", "48h", "--metadata", "a=b,c=d")
	if r.code != 0 {
		t.Fatalf("%+v", r)
	}
	if got := contentOf(t, out); got != f.files["file-out"] {
		t.Errorf("the results are %q", got)
	}
	if _, err := os.Stat(stale); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the errors of an earlier run are still there: %v", err)
	}
	for _, want := range []string{"batch_1 completed after 7s", "3 completed, 0 failed", "1,200 in (200 from the cache), 300 out; 214 a second", out} {
		if !strings.Contains(r.out, want) {
			t.Errorf("the end does not say %q:\n%s", want, r.out)
		}
	}
	for _, want := range []string{"batch_1: 3 lines from " + in, "running: 1 of 3 lines", "writing the files: 3 of 3 lines"} {
		if !strings.Contains(r.err, want) {
			t.Errorf("meanwhile it does not say %q:\n%s", want, r.err)
		}
	}
	if strings.ContainsAny(r.err+r.out, "\x1b\r") {
		t.Error("it draws, off a terminal")
	}
	want := []string{"list limit=100", "upload in.jsonl", "create file-2 /v1/chat/completions 48h"}
	if diff := cmp.Diff(want, f.asked); diff != "" {
		t.Error(diff)
	}
	meta := f.batches[0].new.Metadata
	if len(meta) != 3 || meta["a"] != "b" || len(meta[inputDigest]) != 64 || f.files["file-2"] != threeLines {
		t.Errorf("metadata %v, sent %q", meta, f.files["file-2"])
	}
	if left, _ := filepath.Glob(filepath.Join(filepath.Dir(in), ".*")); len(left) > 0 {
		t.Errorf("it left %v", left)
	}
}

func TestBatchRunReadsAndWritesStandardStreams(t *testing.T) {
	f := newFakeBatches(t)
	t.Chdir(t.TempDir())
	r := f.ask(t, threeLines, "run", "-")
	if r.code != 0 || r.out != f.files["file-out"] || !strings.Contains(r.err, "3 completed") {
		t.Errorf("%+v", r)
	}
	r = f.ask(t, threeLines, "run", "-", "-o", "x.jsonl", "--output", "json")
	var b client.Batch
	if err := json.Unmarshal([]byte(r.out), &b); err != nil || r.code != 0 || b.Status != client.BatchCompleted || contentOf(t, "x.jsonl") != f.files["file-out"] {
		t.Errorf("%v: %+v", err, r)
	}
	if r := f.ask(t, threeLines, "run", "-", "--output", "json"); r.code != exitUsage || !strings.Contains(r.err, "-o") {
		t.Errorf("both to one stream: %+v", r)
	}
}

func TestBatchRunTellsWhatFailed(t *testing.T) {
	t.Parallel()
	f := newFakeBatches(t, `"status":"validating"`,
		`"status":"expired","request_counts":{"total":5,"completed":1,"failed":4},"expired_at":CREATED+7,"output_file_id":"file-out","error_file_id":"file-err"`)
	f.files["file-err"] = `{"custom_id":"c","response":{"status_code":400,"body":{}},"error":null}` + "\n" +
		strings.Repeat(`{"custom_id":"d","response":null,"error":{"code":"batch_expired","message":"Its window closed."}}`+"\n", 3)
	in := writeInput(t, threeLines)
	r := f.ask(t, "", "run", in, "-o", filepath.Join(filepath.Dir(in), "answers.jsonl"))
	errs := filepath.Join(filepath.Dir(in), "answers.errors.jsonl")
	if r.code != exitJob || contentOf(t, errs) != f.files["file-err"] {
		t.Errorf("%+v", r)
	}
	for _, want := range []string{"batch_1 expired after 7s", "1 completed, 4 failed", errs + ": 3 batch_expired, 1 status 400"} {
		if !strings.Contains(r.out, want) {
			t.Errorf("it does not say %q:\n%s", want, r.out)
		}
	}
	if want := "millrace: 4 of 5 lines did not complete: " + errs + " says why; `millrace batch retry batch_1 --wait` runs them again\n"; !strings.HasSuffix(r.err, want) {
		t.Errorf("the error is\n%s\nwant\n%s", r.err, want)
	}
}

func TestBatchRunShowsWhyAFileWasRefused(t *testing.T) {
	t.Parallel()
	var errs []string
	for i := range 12 {
		errs = append(errs, fmt.Sprintf(`{"code":"duplicate_custom_id","message":"It stands in line 1.","param":"custom_id","line":%d}`, i+2))
	}
	f := newFakeBatches(t, `"status":"validating"`,
		`"status":"failed","failed_at":CREATED+7,"request_counts":{"total":0,"completed":0,"failed":0},"errors":{"object":"list","data":[`+strings.Join(errs, ",")+`]}`)
	in := writeInput(t, threeLines)
	kept := strings.TrimSuffix(in, ".jsonl") + ".output.jsonl"
	if err := os.WriteFile(kept, []byte(resultLine), 0o600); err != nil {
		t.Fatal(err)
	}
	r := f.ask(t, "", "run", in)
	if r.code != exitJob || strings.Count(r.out, "duplicate_custom_id") != 10 || !strings.Contains(r.out, "and 2 more errors: `millrace batch get batch_1` shows them") ||
		!strings.Contains(r.err, "nothing ran") {
		t.Errorf("%+v", r)
	}
	if contentOf(t, kept) != resultLine {
		t.Error("the earlier results are gone, though nothing ran")
	}
}

func (f *fakeBatches) interrupt(t *testing.T, until string, args ...string) result {
	t.Helper()
	return interrupt(t, f.URL, until, args...)
}

// interrupt runs a command, and stops it as Ctrl-C does once it has said what is waited for.
func interrupt(t *testing.T, url, until string, args ...string) result {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	out, errs := newScreen(), newScreen()
	p := &program{in: strings.NewReader(""), out: out, err: errs, lookup: lookup(map[string]string{"MILLRACE_URL": url})}
	ended := make(chan int, 1)
	go func() { ended <- run(ctx, p, append([]string{"batch"}, args...)) }()
	errs.wait(soon(t), t, until)
	cancel()
	return result{<-ended, out.String(), errs.String()}
}

func TestCtrlCLeavesABatchRunningAndTellsHowToGoOn(t *testing.T) {
	t.Parallel()
	f := newFakeBatches(t)
	f.hold = true
	in := writeInput(t, threeLines)
	out := filepath.Join(filepath.Dir(in), "my answers.jsonl")
	r := f.interrupt(t, "validating", "run", in, "-o", out)
	goOn := "millrace batch run --resume batch_1 -o '" + out + "'"
	if r.code != exitInterrupted || r.out != "" || !strings.Contains(r.err, "batch_1 goes on") || !strings.Contains(r.err, goOn+"\n") || !strings.HasSuffix(r.err, "millrace batch cancel batch_1\n") {
		t.Fatalf("%+v", r)
	}
	// What it says works.
	f.mu.Lock()
	f.hold = false
	f.mu.Unlock()
	r = f.ask(t, "", "run", "--resume", "batch_1", "-o", out)
	if r.code != 0 || contentOf(t, out) != f.files["file-out"] || len(f.batches) != 1 {
		t.Errorf("%+v", r)
	}
	// Of another program it would be refused by name.
	if r := f.ask(t, "", "run", "--resume", "batch_9"); r.code != exitFailed || !strings.Contains(r.err, "batch_not_found") {
		t.Errorf("%+v", r)
	}
}

func TestTheSameCommandFindsItsBatch(t *testing.T) {
	t.Parallel()
	f := newFakeBatches(t)
	f.hold = true
	in := writeInput(t, threeLines)
	f.interrupt(t, "validating", "run", in)
	f.mu.Lock()
	f.hold, f.asked = false, nil
	f.mu.Unlock()
	r := f.ask(t, "", "run", in)
	if r.code != 0 || !strings.Contains(r.err, "batch_1 of the same file runs already") {
		t.Errorf("%+v", r)
	}
	if diff := cmp.Diff([]string{"list limit=100"}, f.asked); diff != "" {
		t.Errorf("it is sent again: %s", diff)
	}
	// One that has ended is not taken, nor is one of other settings, nor with --new.
	for _, args := range [][]string{{in}, {in, "--window", "1h"}, {in, "--metadata", "a=b"}} {
		f.interruptOrEnd(t, args)
	}
	if len(f.batches) != 4 {
		t.Errorf("there are %d batches, want 4", len(f.batches))
	}
	f.mu.Lock()
	f.hold = true
	f.mu.Unlock()
	f.interrupt(t, "validating", "run", in)
	f.interrupt(t, "validating", "run", in, "--new")
	if len(f.batches) != 6 {
		t.Errorf("there are %d batches, want 6", len(f.batches))
	}
}

func (f *fakeBatches) interruptOrEnd(t *testing.T, args []string) {
	t.Helper()
	if r := f.ask(t, "", append([]string{"run"}, args...)...); r.code != 0 {
		t.Errorf("%+v", r)
	}
}

func TestBatchCreateListGetCancelResultsRetry(t *testing.T) {
	t.Parallel()
	f := newFakeBatches(t)
	in := writeInput(t, threeLines)
	if r := f.ask(t, "", "create", in); r.code != 0 || r.out != "batch_1\n" || r.err != "" {
		t.Errorf("create: %+v", r)
	}
	if r := f.ask(t, "", "create", "file-77", "--endpoint", "/v1/embeddings", "-o", "json"); r.code != 0 || !json.Valid([]byte(r.out)) {
		t.Errorf("create of a stored file: %+v", r)
	}
	if r := f.ask(t, "", "list"); r.code != 0 || !strings.Contains(r.out, "batch_1") || !strings.Contains(r.out, "validating") {
		t.Errorf("list: %+v", r)
	}
	if r := f.ask(t, "", "list", "-o", "json"); r.code != 0 || !strings.HasPrefix(r.out, "[") {
		t.Errorf("list as JSON: %+v", r)
	}
	if r := f.ask(t, "", "get", "batch_1"); r.code != 0 || !strings.Contains(r.out, "1 of 3 ended") || !strings.Contains(r.out, "24h, closes") || strings.Contains(r.out, inputDigest) {
		t.Errorf("get: %+v", r)
	}
	if r := f.ask(t, "", "get", "batch_1", "--wait", "-o", "json"); r.code != 0 || !strings.Contains(r.out, `"completed"`) {
		t.Errorf("get --wait: %+v", r)
	}
	if r := f.ask(t, "", "results", "batch_1"); r.code != 0 || r.out != "{\"custom_id\":\"a\"}\n" {
		t.Errorf("results: %+v", r)
	}
	some := filepath.Join(filepath.Dir(in), "some.jsonl")
	if r := f.ask(t, "", "results", "batch_1", "-o", some); r.code != 0 || r.out != "" || contentOf(t, some) != "{\"custom_id\":\"a\"}\n" {
		t.Errorf("results to a file: %+v", r)
	}
	if r := f.ask(t, "", "cancel", "batch_1", "batch_2"); r.code != 0 || r.out != "batch_1 cancelling\nbatch_2 cancelling\n" {
		t.Errorf("cancel: %+v", r)
	}
	if r := f.ask(t, "", "retry", "batch_1"); r.code != 0 || r.out != "batch_3\n" {
		t.Errorf("retry: %+v", r)
	}
	if r := f.ask(t, "", "retry", "batch_1", "--wait", "-o", some); r.code != 0 || contentOf(t, some) != f.files["file-out"] || !strings.Contains(r.out, "batch_4 completed") {
		t.Errorf("retry --wait: %+v", r)
	}
	want := []string{
		"upload in.jsonl", "create file-2 /v1/chat/completions 24h", "create file-77 /v1/embeddings 24h", "list limit=20", "list limit=20", "cancel batch_1", "cancel batch_2", "retry batch_1", "retry batch_1",
	}
	if diff := cmp.Diff(want, f.asked); diff != "" {
		t.Error(diff)
	}
}

// TestBatchCancelByAnOperator: with an admin key it may be any tenant's.
func TestBatchCancelByAnOperator(t *testing.T) {
	t.Parallel()
	f := newFakeBatches(t)
	if r := f.ask(t, "", "cancel", "batch_1", "batch_2", "--admin-key", "sk-admin"); r.code != 0 || r.out != "batch_1 cancelling\nbatch_2 cancelling\n" {
		t.Errorf("%+v", r)
	}
	env := map[string]string{"MILLRACE_URL": f.URL, "MILLRACE_ADMIN_KEY": "sk-other", "MILLRACE_API_KEY": "sk-admin"}
	if r := millrace(t, env, "", "batch", "cancel", "batch_3"); r.code != exitFailed || !strings.Contains(r.err, "set MILLRACE_ADMIN_KEY") {
		t.Errorf("a key that does not open it: %+v", r)
	}
	if diff := cmp.Diff([]string{"operator cancels batch_1", "operator cancels batch_2", "operator cancels batch_3"}, f.asked); diff != "" {
		t.Error(diff)
	}
}

// TestValidateOfAnEmptyFile: that it holds nothing is a fault of the file, and told as any other.
func TestValidateOfAnEmptyFile(t *testing.T) {
	t.Parallel()
	f := newFakeBatches(t)
	for _, text := range []string{"", "\ufeff\r\n \n"} {
		if r := f.ask(t, text, "validate", "-", "--offline"); r.code != exitJob || !strings.Contains(r.out, "empty_file") || !strings.Contains(r.err, "1 error") {
			t.Errorf("%q: %+v", text, r)
		}
		r := f.ask(t, text, "validate", "-", "-o", "json")
		var got checkup
		if err := json.Unmarshal([]byte(r.out), &got); err != nil || r.code != exitJob || got.Lines != 0 || got.Bad != 1 || len(got.Errors) != 1 || got.Errors[0].Code != job.CodeEmptyFile {
			t.Errorf("%q: %v, %+v", text, err, r)
		}
	}
	if r := f.ask(t, "", "validate", "nowhere.jsonl"); r.code != exitFailed {
		t.Errorf("a file that is not there: %+v", r)
	}
}

func TestBatchErrorsSayWhatToDo(t *testing.T) {
	t.Parallel()
	f := newFakeBatches(t)
	good := writeInput(t, threeLines)
	for _, tt := range []struct {
		name  string
		args  []string
		stdin string
		code  int
		want  []string
	}{
		{"no file", []string{"run"}, "", exitUsage, []string{"FILE", "--resume"}},
		{"both", []string{"run", good, "--resume", "batch_1"}, "", exitUsage, []string{"FILE", "--resume"}},
		{"a file that is not there", []string{"run", "nowhere.jsonl"}, "", exitFailed, []string{"nowhere.jsonl", "no such file"}},
		{"a folder", []string{"run", filepath.Dir(good)}, "", exitFailed, []string{"directory"}},
		{"an empty file", []string{"run", "-"}, "\n \r\n", exitJob, []string{"no request", "millrace batch --help"}},
		{"an empty file to create of", []string{"create", "-"}, "", exitJob, []string{"no request", "millrace batch --help"}},
		{"no url", []string{"run", "-"}, `{"custom_id":"a"}`, exitJob, []string{"no url", "--endpoint", "millrace batch validate"}},
		{"another url", []string{"run", "-"}, `{"url":"/v1/images"}`, exitJob, []string{"/v1/images", "/v1/chat/completions"}},
		{"a window", []string{"run", good, "--window", "tomorrow"}, "", exitUsage, []string{"tomorrow", "24h"}},
		{"a short window", []string{"run", good, "--window", "5s"}, "", exitUsage, []string{`window is "5s"`}},
		{"a window of hours and minutes", []string{"create", good, "--window", "1h30m"}, "", exitUsage, []string{"1h30m", "whole number of minutes or hours"}},
		{"a window of broken minutes", []string{"create", good, "--window", "90.5m"}, "", exitUsage, []string{"90.5m", "whole number of minutes or hours"}},
		{"a window that is too long", []string{"run", good, "--window", "169h"}, "", exitUsage, []string{"169h", "7 days"}},
		{"an endpoint", []string{"run", good, "--endpoint", "/v1/x"}, "", exitUsage, []string{"/v1/x", "/v1/embeddings"}},
		{"a format for a file", []string{"run", good, "-o", "json"}, "", exitUsage, []string{"--output json", "./json"}},
		{"one file for both", []string{"run", good, "-o", "x", "--errors", "x"}, "", exitUsage, []string{"both", "x"}},
		{"errors to the standard output", []string{"run", good, "--errors", "-"}, "", exitUsage, []string{"errors"}},
		{"a folder that is not there", []string{"run", good, "-o", "/nowhere/out.jsonl"}, "", exitFailed, []string{"/nowhere/out.jsonl", "no such file or directory", "-o"}},
		{"nothing to write", []string{"retry", "batch_1", "-o", "x"}, "", exitUsage, []string{"--wait"}},
		{"no such batch", []string{"get", "batch_77"}, "", exitFailed, []string{"no such batch", "batch_not_found", "`millrace batch list`"}},
		{"a limit", []string{"list", "--limit", "0"}, "", exitUsage, []string{"limit is 0", "between 1 and 100"}},
		{"no lines allowed", []string{"validate", good, "--max-batch-lines", "0"}, "", exitUsage, []string{"max-batch-lines is 0"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := f.ask(t, tt.stdin, tt.args...)
			if r.code != tt.code || r.out != "" {
				t.Errorf("code %d, want %d; printed %q", r.code, tt.code, r.out)
			}
			for _, want := range tt.want {
				if !strings.Contains(r.err, want) {
					t.Errorf("the error does not say %q: %s", want, r.err)
				}
			}
		})
	}
	if r := millrace(t, map[string]string{"MILLRACE_URL": "http://127.0.0.1:1"}, "", "batch", "run", good); r.code != exitFailed || !strings.Contains(r.err, "millrace up") {
		t.Errorf("nobody there: %+v", r)
	}
}

// everyMistake is a file with every kind of bad line, one good line first.
var everyMistake = "\ufeff" + line("good", "m", "x") +
	"not json\n" +
	"[1]\n" +
	`{"method":"POST","url":"/v1/chat/completions","body":{}}` + "\n" +
	`{"custom_id":" ","method":"POST","url":"/v1/chat/completions","body":{}}` + "\n" +
	line("good", "m", "again") +
	strings.Replace(line("u", "m", "x"), "/chat", "", 1) +
	strings.Replace(line("g", "m", "x"), "POST", "GET", 1) +
	strings.Replace(line("s", "m", "x"), `"max_tokens"`, `"stream":true,"max_tokens"`, 1) +
	strings.Replace(line("n", "m", "x"), `"model":"m",`, "", 1) +
	strings.Replace(line("p", "m", "x"), `"messages"`, `"other"`, 1) +
	line("z", "nobody", "x") +
	line("l", "m", strings.Repeat("x", 2000)) +
	"{\"custom_id\":\"\xff\"}\n" +
	"\n" +
	line("long", "small", strings.Repeat("y", 900)) +
	line("last", "m", "x")

func TestBatchValidateFindsEveryBadLine(t *testing.T) {
	t.Parallel()
	f := newFakeBatches(t)
	f.admin = true
	in := writeInput(t, everyMistake)
	r := f.ask(t, "", "validate", in, "--max-body", "1500", "-o", "json")
	var got struct {
		Lines, Bad int64
		Errors     []job.LineError
		TooLong    []tooLong `json:"too_long"`
		Seconds    *float64
	}
	if err := json.Unmarshal([]byte(r.out), &got); err != nil || r.code != exitJob {
		t.Fatalf("%v: %+v", err, r)
	}
	want := map[int64]job.Code{
		2: job.CodeInvalidJSONLine, 3: job.CodeInvalidJSONLine, 4: job.CodeMissingParameter, 5: job.CodeInvalidValue, 6: job.CodeDuplicateCustomID, 7: job.CodeInvalidURL,
		8: job.CodeInvalidMethod, 9: job.CodeStreamingUnsupported, 10: job.CodeInvalidRequest, 11: job.CodeInvalidRequest, 12: job.CodeModelNotFound, 13: job.CodeRequestTooLarge, 14: job.CodeInvalidEncoding,
	}
	found := map[int64]job.Code{}
	for _, e := range got.Errors {
		found[*e.Line] = e.Code
	}
	if diff := cmp.Diff(want, found); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]tooLong{{16, "long", "small", 56, 16}}, got.TooLong); diff != "" || got.Lines != 16 {
		t.Errorf("%d lines; too long: %s", got.Lines, diff)
	}
	r = f.ask(t, "", "validate", in, "--max-body", "1500")
	for _, want := range []string{"LINE", "14", "invalid_encoding", "13 errors", "long", "small", "at least 56", "TOKENS A LINE", "█", "model_not_found", "m, small"} {
		if !strings.Contains(r.out, want) {
			t.Errorf("it does not show %q:\n%s", want, r.out)
		}
	}
	if r.code != exitJob || !strings.HasSuffix(r.err, "13 errors: nothing of it would run\n") {
		t.Errorf("code %d: %s", r.code, r.err)
	}
	if len(f.asked) > 0 {
		t.Errorf("it sent something: %v", f.asked)
	}
}

func TestBatchValidateEstimatesTimes(t *testing.T) {
	t.Parallel()
	f := newFakeBatches(t)
	f.admin = true
	in := writeInput(t, line("a", "m", "x")+line("b", "m", "x")+line("c", "small", "x"))
	r := f.ask(t, "", "validate", in, "-o", "json")
	var got checkup
	if err := json.Unmarshal([]byte(r.out), &got); err != nil || r.code != 0 {
		t.Fatalf("%v: %+v", err, r)
	}
	if len(got.Models) != 2 || got.Models[0].Model != "m" || got.Models[0].Lines != 2 || got.Models[0].GPUs != 2 || len(got.Unknown) != 0 {
		t.Fatalf("%+v", got)
	}
	m := got.Models[0]
	if s := float64(m.Tokens) / 100; *m.Seconds != s || *m.WaitSeconds != 5 || *m.GPUSeconds != 2*s || *got.Seconds != s+5 || *got.GPUSeconds != 2*s+*got.Models[1].GPUSeconds {
		t.Errorf("%s", r.out)
	}
	if r := f.ask(t, "", "validate", in); r.code != 0 || !strings.Contains(r.out, "5.0s for what waits already") || !strings.Contains(r.out, "every line is good") {
		t.Errorf("%+v", r)
	}
	if r := f.ask(t, "", "validate", in, "--max-batch-lines", "2"); r.code != exitJob || !strings.Contains(r.out, "too_many_tasks") {
		t.Errorf("%+v", r)
	}
}

func TestBatchValidateWorksWithWhatItKnows(t *testing.T) {
	t.Parallel()
	in := writeInput(t, line("a", "m", "x")+line("b", "nobody", "x"))
	closed := newFakeBatches(t)
	for _, tt := range []struct {
		name, url string
		args      []string
		code      int
		want      []string
	}{
		{"offline", "http://127.0.0.1:1", []string{"--offline"}, 0, []string{"no server was asked", "every line is good", "TOKENS A LINE"}},
		{"offline with a rate", "http://127.0.0.1:1", []string{"--offline", "--tokens-per-second", "10"}, 0, []string{"GPU-seconds", "no server was asked"}},
		{"no server", "http://127.0.0.1:1", nil, 0, []string{"no answer", "--offline", "every line is good"}},
		{"no admin", closed.URL, nil, exitJob, []string{"model_not_found", "MILLRACE_ADMIN_KEY"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := millrace(t, map[string]string{"MILLRACE_URL": tt.url}, "", append([]string{"batch", "validate", in}, tt.args...)...)
			if r.code != tt.code {
				t.Errorf("code %d: %+v", r.code, r)
			}
			for _, want := range tt.want {
				if !strings.Contains(r.out, want) {
					t.Errorf("it does not say %q:\n%s", want, r.out)
				}
			}
		})
	}
}

func TestPaceForgetsWhatIsLongAgo(t *testing.T) {
	t.Parallel()
	var p pace
	begin := time.Unix(1_700_000_000, 0)
	for i, tt := range []struct {
		after time.Duration
		done  int64
		want  float64
	}{{0, 100, 0}, {time.Second, 100, 0}, {10 * time.Second, 200, 10}, {30 * time.Second, 400, 10}, {40 * time.Second, 400, 200.0 / 30}, {80 * time.Second, 400, 0}, {90 * time.Second, 500, 10}} {
		if got := p.add(begin.Add(tt.after), tt.done); got != tt.want {
			t.Errorf("%d: got %v, want %v", i, got, tt.want)
		}
	}
}

func TestNamesOfResults(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		given outFlags
		input string
		want  outFlags
	}{
		{outFlags{}, "a/in.jsonl", outFlags{"a/in.output.jsonl", "a/in.errors.jsonl"}},
		{outFlags{}, "in.txt", outFlags{"in.txt.output.jsonl", "in.txt.errors.jsonl"}},
		{outFlags{out: "out.jsonl"}, "in.jsonl", outFlags{"out.jsonl", "out.errors.jsonl"}},
		{outFlags{out: "out"}, "-", outFlags{"out", "out.errors.jsonl"}},
		{outFlags{}, "-", outFlags{"-", "batch.errors.jsonl"}},
		{outFlags{out: "-"}, "in.jsonl", outFlags{"-", "in.errors.jsonl"}},
		{outFlags{errors: "e"}, "batch_1", outFlags{"batch_1.output.jsonl", "e"}},
	} {
		if got := tt.given.of(tt.input); got != tt.want {
			t.Errorf("%+v of %s: got %+v, want %+v", tt.given, tt.input, got, tt.want)
		}
	}
}

func TestBinsCountEverythingOnce(t *testing.T) {
	t.Parallel()
	var b bins
	for n := range int64(10) {
		b.add(n)
	}
	b.add(1 << 62)
	got := b.list()
	want := []bin{{1, 2}, {2, 1}, {3, 1}, {4, 1}, {6, 2}, {8, 2}, {12, 1}}
	if diff := cmp.Diff(want, got[:len(want)]); diff != "" || got[len(got)-1].Lines != 1 {
		t.Errorf("%s, and last %+v", diff, got[len(got)-1])
	}
	for i := 1; i < len(bounds); i++ {
		if bounds[i] <= bounds[i-1] {
			t.Fatalf("bin %d ends at %d, after %d", i, bounds[i], bounds[i-1])
		}
	}
}
