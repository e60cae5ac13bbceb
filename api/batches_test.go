package api_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/api"
	"github.com/millrace/millrace/internal/batch"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
	"github.com/millrace/millrace/internal/queue"
)

// createBody asks for a batch; more are further members.
func createBody(file, more string) string {
	return `{"input_file_id":"` + file + `","endpoint":"/v1/chat/completions","completion_window":"24h"` + more + `}`
}

// create makes a batch and returns its object.
func (e *env) create(body string, headers ...string) map[string]any {
	e.t.Helper()
	a := e.send("POST", "/v1/batches", body, headers...)
	if a.status != http.StatusOK {
		e.t.Fatalf("create: %d %s", a.status, a.body)
	}
	return a.object(e.t)
}

// putFile stores a file of a tenant and returns its id.
func (e *env) putFile(t job.Tenant, purpose, content string) string {
	e.t.Helper()
	id := job.NewName("file-", time.Now())
	n, err := e.blobs.Put(e.t.Context(), id, strings.NewReader(content))
	if err != nil {
		e.t.Fatal(err)
	}
	sum := sha256.Sum256([]byte(content))
	f := ledger.File{ID: id, Tenant: t, Purpose: purpose, Filename: "in.jsonl", Bytes: n, SHA256: hex.EncodeToString(sum[:]), Blob: id, Created: e.results.Now()}
	if err := e.ledger.InsertFile(e.t.Context(), f, 0); err != nil {
		e.t.Fatal(err)
	}
	return id
}

// tenantKey makes a tenant and a key of it, and returns the header that sends it.
func (e *env) tenantKey(t job.Tenant, k ledger.Key, l ledger.Limits) []string {
	e.t.Helper()
	if _, err := e.ledger.CreateTenant(e.t.Context(), ledger.Tenant{ID: t, Weight: 100, Limits: l, Created: e.results.Now()}); err != nil {
		e.t.Fatal(err)
	}
	k.Tenant, k.Created = t, e.results.Now()
	secret, _, err := e.ledger.CreateKey(e.t.Context(), k)
	if err != nil {
		e.t.Fatal(err)
	}
	return []string{"Authorization: Bearer " + secret}
}

// epoch is that of the tests, which do what the leading dispatcher does.
const epoch = 1

// start makes a batch run with so many lines.
func (e *env) start(id string, lines int64) {
	e.t.Helper()
	if err := e.ledger.Lead(e.t.Context(), epoch); err != nil {
		e.t.Fatal(err)
	}
	if _, err := e.ledger.StartBatch(e.t.Context(), epoch, id, e.results.Now(), model, []ledger.Portion{{Model: model, Lines: lines, Tokens: 100}}); err != nil {
		e.t.Fatal(err)
	}
}

// endLine writes the outcome of a batch's line.
func (e *env) endLine(id string, line int64, customID string, o job.Outcome, body string) {
	e.t.Helper()
	o.Finished, o.ResultSize = e.results.Now(), int64(len(body))
	r := &queue.Record{
		Job: job.Job{ID: job.LineID(id, line), Tenant: job.DefaultTenant, Model: model, Endpoint: job.ChatCompletions, Class: job.Batch, Group: id, Line: line, CustomID: customID, Created: e.results.Now(), Expires: e.results.Now() + 1e6}, Outcome: o,
	}
	if o.Blob == "" {
		r.Result = []byte(body)
	} else if _, err := e.blobs.Put(e.t.Context(), o.Blob, strings.NewReader(body)); err != nil {
		e.t.Fatal(err)
	}
	if _, err := e.queue.Settle(e.t.Context(), r); err != nil {
		e.t.Fatal(err)
	}
}

// end ends a running batch with these files; "" is none.
func (e *env) end(id, output, errors string, late bool) {
	e.t.Helper()
	if _, err := e.ledger.FinalizeBatch(e.t.Context(), epoch, id, e.results.Now(), late); err != nil {
		e.t.Fatal(err)
	}
	var files [2]*ledger.File
	var counts [2]int64
	for i, content := range []string{output, errors} {
		if content == "" {
			continue
		}
		name := fmt.Sprintf("file-%s%d", strings.TrimPrefix(id, "batch_"), i)
		n, err := e.blobs.Put(e.t.Context(), name, strings.NewReader(content))
		if err != nil {
			e.t.Fatal(err)
		}
		files[i] = &ledger.File{ID: name, Tenant: job.DefaultTenant, Purpose: "batch_output", Filename: "out.jsonl", Bytes: n, Blob: name, Batch: id, Created: e.results.Now()}
		counts[i] = int64(strings.Count(content, "\n"))
	}
	if _, err := e.ledger.EndBatch(e.t.Context(), epoch, id, e.results.Now(), counts[0], counts[1], files[0], files[1]); err != nil {
		e.t.Fatal(err)
	}
}

// line is one of a file for chat.
func line(customID, body string) string {
	return `{"custom_id":"` + customID + `","method":"POST","url":"/v1/chat/completions","body":` + body + "}\n"
}

func outputs(t testing.TB, body []byte) map[string]json.RawMessage {
	t.Helper()
	all := map[string]json.RawMessage{}
	for l := range bytes.Lines(body) {
		var o struct {
			ID       string          `json:"id"`
			CustomID string          `json:"custom_id"`
			Response json.RawMessage `json:"response"`
			Error    json.RawMessage `json:"error"`
		}
		if err := json.Unmarshal(l, &o); err != nil || o.ID == "" || all[o.CustomID] != nil {
			t.Fatalf("%q: %v", l, err)
		}
		all[o.CustomID] = slices.Concat(o.Response, []byte(" "), o.Error)
	}
	return all
}

func TestBatchObject(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	before := time.Now().Unix()
	o := e.create(createBody("file-x", `,"metadata":{"k":"v"},"output_expires_after":{"anchor":"created_at","seconds":3600}`))
	created := int64(o["created_at"].(float64))
	if created < before-1 || created > time.Now().Unix()+1 {
		t.Errorf("created at %d", created)
	}
	id := o["id"].(string)
	if !strings.HasPrefix(id, "batch_") {
		t.Errorf("id %q", id)
	}
	want := map[string]any{
		"id": id, "object": "batch", "endpoint": "/v1/chat/completions", "model": nil, "errors": nil, "input_file_id": "file-x", "completion_window": "24h", "status": "validating",
		"output_file_id": nil, "error_file_id": nil, "created_at": float64(created), "in_progress_at": nil, "expires_at": float64(created + 86400), "finalizing_at": nil, "completed_at": nil, "failed_at": nil,
		"expired_at": nil, "cancelling_at": nil, "cancelled_at": nil, "request_counts": map[string]any{"total": 0., "completed": 0., "failed": 0.},
		"usage": map[string]any{
			"input_tokens": 0., "input_tokens_details": map[string]any{"cached_tokens": 0.}, "output_tokens": 0., "output_tokens_details": map[string]any{"reasoning_tokens": 0.}, "total_tokens": 0.,
		},
		"metadata": map[string]any{"k": "v"},
	}
	if diff := cmp.Diff(want, o); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(want, e.send("GET", "/v1/batches/"+id, "").object(t)); diff != "" {
		t.Error(diff)
	}
	row, err := e.ledger.Batch(t.Context(), job.DefaultTenant, id)
	if err != nil || row.OutputExpires != 3600 || row.Expires-row.Created != 86_400_000 {
		t.Errorf("row %+v, %v", row, err)
	}

	// As it runs, and when it has ended.
	e.start(id, 3)
	pos, err := e.ledger.Tallied(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ended := []ledger.Ended{
		{Tenant: job.DefaultTenant, Model: model, Group: id, At: e.results.Now(), OK: true, Tokens: 10, Usage: job.Usage{PromptTokens: 7, CompletionTokens: 5, TotalTokens: 12, CachedTokens: 3, ReasoningTokens: 2}},
		{Tenant: job.DefaultTenant, Model: model, Group: id, At: e.results.Now(), Tokens: 10},
	}
	if err := e.ledger.Tally(t.Context(), epoch, pos, ledger.Position{Stream: "x", Seq: 2}, ended); err != nil {
		t.Fatal(err)
	}
	o = e.send("GET", "/v1/batches/"+id, "").object(t)
	want["status"], want["model"], want["in_progress_at"] = "in_progress", string(model), o["in_progress_at"]
	want["request_counts"] = map[string]any{"total": 3., "completed": 1., "failed": 1.}
	want["usage"] = map[string]any{
		"input_tokens": 7., "input_tokens_details": map[string]any{"cached_tokens": 3.}, "output_tokens": 5., "output_tokens_details": map[string]any{"reasoning_tokens": 2.}, "total_tokens": 12.,
	}
	if diff := cmp.Diff(want, o); diff != "" || o["in_progress_at"] == nil {
		t.Error(diff)
	}
	e.end(id, "a\n", "b\nc\n", true)
	o = e.send("GET", "/v1/batches/"+id, "").object(t)
	if o["status"] != "expired" || o["output_file_id"] == nil || o["error_file_id"] == nil || o["finalizing_at"] == nil || o["expired_at"] == nil || o["completed_at"] != nil || o["errors"] != nil {
		t.Errorf("%v", o)
	}
	if diff := cmp.Diff(map[string]any{"total": 3., "completed": 1., "failed": 2.}, o["request_counts"]); diff != "" {
		t.Error(diff)
	}
}

func TestBatchThatWasRefusedShowsWhy(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	id := e.create(createBody("file-x", ""))["id"].(string)
	n, param := int64(7), "custom_id"
	if err := e.ledger.Lead(t.Context(), epoch); err != nil {
		t.Fatal(err)
	}
	if _, err := e.ledger.RejectBatch(t.Context(), epoch, id, e.results.Now(), []job.LineError{
		{Code: job.CodeDuplicateCustomID, Message: "twice", Param: &param, Line: &n}, {Code: job.CodeInvalidRequest, Message: "more"},
	}); err != nil {
		t.Fatal(err)
	}
	o := e.send("GET", "/v1/batches/"+id, "").object(t)
	want := map[string]any{"object": "list", "data": []any{
		map[string]any{"code": "duplicate_custom_id", "message": "twice", "param": "custom_id", "line": 7.}, map[string]any{"code": "invalid_request", "message": "more", "param": nil, "line": nil},
	}}
	if diff := cmp.Diff(want, o["errors"]); diff != "" || o["status"] != "failed" || o["failed_at"] == nil {
		t.Error(diff, o)
	}
}

func TestCreateBatchRefusesByName(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	pairs := func(n int) string {
		m := map[string]string{}
		for i := range n {
			m[fmt.Sprint(i)] = "v"
		}
		raw, _ := json.Marshal(m)
		return `,"metadata":` + string(raw)
	}
	for name, c := range map[string]struct {
		body  string
		code  job.Code
		param string
		says  string
	}{
		"no body":                 {"", job.CodeInvalidJSON, "", ""},
		"a list":                  {"[]", job.CodeInvalidType, "", ""},
		"no file":                 {`{"endpoint":"/v1/chat/completions","completion_window":"24h"}`, job.CodeMissingParameter, "input_file_id", ""},
		"file null":               {`{"input_file_id":null,"endpoint":"/v1/chat/completions","completion_window":"24h"}`, job.CodeMissingParameter, "input_file_id", ""},
		"file a number":           {`{"input_file_id":7,"endpoint":"/v1/chat/completions","completion_window":"24h"}`, job.CodeInvalidType, "input_file_id", ""},
		"file empty":              {createBody("", ""), job.CodeInvalidValue, "input_file_id", ""},
		"file of control bytes":   {createBody(`a\u0000`, ""), job.CodeInvalidValue, "input_file_id", ""},
		"no endpoint":             {`{"input_file_id":"f","completion_window":"24h"}`, job.CodeMissingParameter, "endpoint", ""},
		"endpoint a number":       {`{"input_file_id":"f","endpoint":1,"completion_window":"24h"}`, job.CodeInvalidType, "endpoint", ""},
		"another endpoint":        {`{"input_file_id":"f","endpoint":"/v1/images","completion_window":"24h"}`, job.CodeInvalidValue, "endpoint", "/v1/chat/completions, /v1/completions, /v1/embeddings, /v1/responses"},
		"no window":               {`{"input_file_id":"f","endpoint":"/v1/embeddings"}`, job.CodeMissingParameter, "completion_window", ""},
		"window a number":         {`{"input_file_id":"f","endpoint":"/v1/embeddings","completion_window":24}`, job.CodeInvalidType, "completion_window", ""},
		"unknown field":           {createBody("f", `,"priority":1`), job.CodeUnsupportedParameter, "priority", ""},
		"metadata a list":         {createBody("f", `,"metadata":[]`), job.CodeInvalidType, "metadata", ""},
		"metadata of numbers":     {createBody("f", `,"metadata":{"a":1}`), job.CodeInvalidType, "metadata", ""},
		"17 pairs":                {createBody("f", pairs(17)), job.CodeInvalidValue, "metadata", "16"},
		"a key of 65":             {createBody("f", `,"metadata":{"`+strings.Repeat("k", 65)+`":""}`), job.CodeInvalidValue, "metadata", "64"},
		"a value of 513":          {createBody("f", `,"metadata":{"k":"`+strings.Repeat("v", 513)+`"}`), job.CodeInvalidValue, "metadata", "512"},
		"expiry a number":         {createBody("f", `,"output_expires_after":3600`), job.CodeInvalidType, "output_expires_after", ""},
		"expiry without anchor":   {createBody("f", `,"output_expires_after":{"seconds":3600}`), job.CodeMissingParameter, "output_expires_after.anchor", ""},
		"another anchor":          {createBody("f", `,"output_expires_after":{"anchor":"now","seconds":3600}`), job.CodeInvalidValue, "output_expires_after.anchor", "created_at"},
		"anchor a number":         {createBody("f", `,"output_expires_after":{"anchor":1,"seconds":3600}`), job.CodeInvalidType, "output_expires_after.anchor", ""},
		"expiry without seconds":  {createBody("f", `,"output_expires_after":{"anchor":"created_at"}`), job.CodeMissingParameter, "output_expires_after.seconds", ""},
		"seconds a string":        {createBody("f", `,"output_expires_after":{"anchor":"created_at","seconds":"3600"}`), job.CodeInvalidType, "output_expires_after.seconds", ""},
		"seconds too few":         {createBody("f", `,"output_expires_after":{"anchor":"created_at","seconds":3599}`), job.CodeInvalidValue, "output_expires_after.seconds", "3600"},
		"seconds too many":        {createBody("f", `,"output_expires_after":{"anchor":"created_at","seconds":2592001}`), job.CodeInvalidValue, "output_expires_after.seconds", "2592000"},
		"expiry of something new": {createBody("f", `,"output_expires_after":{"anchor":"created_at","seconds":3600,"x":1}`), job.CodeUnsupportedParameter, "output_expires_after.x", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := e.send("POST", "/v1/batches", c.body)
			a.wantError(t, http.StatusBadRequest, c.code, c.param)
			if !strings.Contains(string(a.body), c.says) {
				t.Errorf("%s does not say %q", a.body, c.says)
			}
		})
	}
	for _, window := range []string{"", "0h", "0m", "24", "24H", "1d", "-1h", "+1h", "01h", "1.5h", " 24h", "1h30m", "169h", "10081m", "99999999999999999999h", "90s"} {
		e.send("POST", "/v1/batches", strings.Replace(createBody("f", ""), "24h", window, 1)).wantError(t, http.StatusBadRequest, job.CodeInvalidValue, "completion_window")
	}
	for window, want := range map[string]int64{"24h": 86400, "1m": 60, "90m": 5400, "48h": 172800, "168h": 604800, "10080m": 604800} {
		o := e.create(strings.Replace(createBody("f", pairs(16)), "24h", window, 1))
		if got := int64(o["expires_at"].(float64) - o["created_at"].(float64)); got != want || o["completion_window"] != window {
			t.Errorf("%s lasts %d s: %v", window, got, o)
		}
	}
}

func TestCreateBatchOnce(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	one, other := createBody("file-a", ""), createBody("file-b", "")
	swapped := `{"completion_window":"24h", "endpoint":"/v1/chat/completions","input_file_id":"file-a"}`
	id := func(o map[string]any) string { return o["id"].(string) }
	key := []string{"Idempotency-Key: k"}
	first := id(e.create(one, key...))
	if again := id(e.create(swapped, key...)); again != first {
		t.Errorf("%s and %s", first, again)
	}
	a := e.send("POST", "/v1/batches", other, key...)
	a.wantError(t, http.StatusConflict, job.CodeIdempotencyConflict, "Idempotency-Key")
	if a.header.Get("X-Should-Retry") != "false" {
		t.Error("it may be retried")
	}
	// Without a key: a create that says that it is the first is always a new one, and its retries are that one.
	count := func(n string) []string { return []string{"X-Stainless-Retry-Count: " + n} }
	plain := id(e.create(one, count("0")...))
	if retried := id(e.create(one, count("1")...)); retried != plain || plain == first {
		t.Errorf("%s, %s and %s", first, plain, retried)
	}
	second := id(e.create(one, count("0")...))
	if retried := id(e.create(one, count("2")...)); second == plain || retried != second {
		t.Errorf("%s, %s and %s", plain, second, retried)
	}
	before, silent := id(e.create(one)), id(e.create(one))
	if before == silent {
		t.Error("two creates without any word are one")
	}
	if retried := id(e.create(one, count("1")...)); retried != silent {
		t.Errorf("the retry of a create without any word is %s, want %s", retried, silent)
	}
	// Many at a time are one.
	ids := make([]string, 20)
	var wg sync.WaitGroup
	for i := range ids {
		wg.Go(func() { ids[i] = id(e.create(one, "Idempotency-Key: many")) })
	}
	wg.Wait()
	if slices.Sort(ids); len(slices.Compact(ids)) != 1 {
		t.Errorf("%v", ids)
	}
	// A key whose create went no further is taken over.
	const lost = "batch_lost"
	hash, err := api.HashBody("/v1/batches", []byte(one))
	if err != nil {
		t.Fatal(err)
	}
	if _, mine, err := e.ledger.Remember(t.Context(), job.DefaultTenant, "/v1/batches", api.HashKey("client", "crashed"), hash, lost, e.results.Now(), time.Hour); !mine || err != nil {
		t.Fatal(mine, err)
	}
	if got := id(e.create(one, "Idempotency-Key: crashed")); got != lost {
		t.Errorf("%s instead of %s", got, lost)
	}
}

func TestCreateAndCancelWakeTheDriver(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	woken := make(chan struct{}, 10)
	if err := e.relay.OnNudge(t.Context(), func() { woken <- struct{}{} }); err != nil {
		t.Fatal(err)
	}
	wait := func(what string) {
		select {
		case <-woken:
		case <-time.After(10 * time.Second):
			t.Fatalf("%s wakes nobody", what)
		}
	}
	id := e.create(createBody("f", ""))["id"].(string)
	wait("a create")
	e.send("POST", "/v1/batches/"+id+"/cancel", "")
	wait("a cancel")
}

func TestListBatches(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	empty := e.send("GET", "/v1/batches", "").object(t)
	if diff := cmp.Diff(map[string]any{"object": "list", "data": []any{}, "first_id": nil, "last_id": nil, "has_more": false}, empty); diff != "" {
		t.Error(diff)
	}
	var made []string
	for range 25 {
		made = append(made, e.create(createBody("f", ""))["id"].(string))
	}
	slices.Reverse(made)
	type page struct {
		Object  string
		Data    []struct{ ID string }
		FirstID string `json:"first_id"`
		LastID  string `json:"last_id"`
		HasMore *bool  `json:"has_more"`
	}
	for _, limit := range []string{"", "limit=10&", "limit=25&", "limit=1&", "limit=100&"} {
		var seen []string
		for after := ""; ; {
			var p page
			if err := json.Unmarshal(e.send("GET", "/v1/batches?"+limit+after, "").body, &p); err != nil {
				t.Fatal(err)
			}
			for _, b := range p.Data {
				seen = append(seen, b.ID)
			}
			if p.Object != "list" || len(p.Data) == 0 || p.FirstID != p.Data[0].ID || p.LastID != p.Data[len(p.Data)-1].ID || p.HasMore == nil {
				t.Fatalf("%+v", p)
			}
			if after = "after=" + p.LastID; !*p.HasMore {
				break
			}
		}
		// Of one millisecond any order will do, as long as it is one.
		if slices.Sort(seen); !slices.Equal(seen, slices.Sorted(slices.Values(made))) {
			t.Errorf("%q visits %d of %d", limit, len(slices.Compact(seen)), len(made))
		}
	}
	for _, limit := range []string{"-1", "0", "101", "abc", ""} {
		e.send("GET", "/v1/batches?limit="+limit, "").wantError(t, http.StatusBadRequest, job.CodeInvalidValue, "limit")
	}
	for _, after := range []string{"batch_x", "x", "batch_%00", "%20"} {
		e.send("GET", "/v1/batches?after="+after, "").wantError(t, http.StatusBadRequest, job.CodeInvalidValue, "after")
	}
}

func TestBatchesOfOthersAreNotThere(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{APIKey: "root"})
	a := e.tenantKey("a", ledger.Key{Models: []job.Model{"m1", "m2"}}, ledger.Limits{})
	b := e.tenantKey("b", ledger.Key{}, ledger.Limits{})
	inference := e.tenantKey("c", ledger.Key{Scopes: []ledger.Scope{ledger.Inference}}, ledger.Limits{})
	file := e.putFile("a", "batch", line("x", "{}"))
	id := e.create(createBody(file, ""), a...)["id"].(string)
	row, err := e.ledger.Batch(t.Context(), "a", id)
	if err != nil || row.Key == "" || !slices.Equal(row.Models, []job.Model{"m1", "m2"}) {
		t.Errorf("row %+v, %v", row, err)
	}
	for _, r := range [][2]string{{"GET", ""}, {"POST", "/cancel"}, {"GET", "/results"}, {"POST", "/retry"}} {
		e.send(r[0], "/v1/batches/"+id+r[1], "", b...).wantError(t, http.StatusNotFound, job.CodeBatchNotFound, "batch_id")
		for _, other := range []string{"batch_none", "x", "batch_%00", "file-1"} {
			e.send(r[0], "/v1/batches/"+other+r[1], "", a...).wantError(t, http.StatusNotFound, job.CodeBatchNotFound, "batch_id")
		}
		e.send(r[0], "/v1/batches/"+id+r[1], "", inference...).wantError(t, http.StatusForbidden, job.CodePermissionDenied, "")
	}
	if got := e.send("GET", "/v1/batches", "", b...).object(t); len(got["data"].([]any)) != 0 {
		t.Errorf("%v", got)
	}
	e.send("GET", "/v1/batches?after="+id, "", b...).wantError(t, http.StatusBadRequest, job.CodeInvalidValue, "after")
	// A file of another tenant is one that is not there: that shows when the batch is validated. It stays its owner's to delete.
	if o := e.create(createBody(file, ""), b...); o["status"] != "validating" || o["input_file_id"] != file {
		t.Errorf("%v", o)
	}
	e.send("POST", "/v1/batches/"+id+"/cancel", "", a...)
	if _, err := e.ledger.EndBatch(t.Context(), epoch, id, e.results.Now(), 0, 0, nil, nil); err != nil {
		t.Fatal(err)
	}
	if del := e.send("DELETE", "/v1/files/"+file, "", a...); del.status != http.StatusOK {
		t.Errorf("%d %s", del.status, del.body)
	}
}

func TestCreatesOfBatchesAreLimited(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{APIKey: "root"})
	key := e.tenantKey("a", ledger.Key{}, ledger.Limits{RequestsPerMinute: 2})
	e.create(createBody("f", ""), key...)
	e.create(createBody("f", ""), key...)
	e.send("POST", "/v1/batches", createBody("f", ""), key...).wantError(t, http.StatusTooManyRequests, job.CodeRequestsPerMinute, "")
}

func TestCancelBatch(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	cancel := func(id string) answer { return e.send("POST", "/v1/batches/"+id+"/cancel", "") }
	// live -> cancelling, again the same, then cancelled and again the same.
	for _, running := range []bool{false, true} {
		id := e.create(createBody("f", ""))["id"].(string)
		if running {
			e.start(id, 1)
		}
		first := cancel(id).object(t)
		if first["status"] != "cancelling" || first["cancelling_at"] == nil || first["cancelled_at"] != nil {
			t.Fatalf("%v", first)
		}
		if diff := cmp.Diff(first, cancel(id).object(t)); diff != "" {
			t.Error(diff)
		}
		if err := e.ledger.Lead(t.Context(), epoch); err != nil {
			t.Fatal(err)
		}
		if _, err := e.ledger.EndBatch(t.Context(), epoch, id, e.results.Now(), 0, 0, nil, nil); err != nil {
			t.Fatal(err)
		}
		ended := cancel(id).object(t)
		if ended["status"] != "cancelled" || ended["cancelled_at"] == nil {
			t.Fatalf("%v", ended)
		}
	}
	completed, expired, failed := e.create(createBody("f", ""))["id"].(string), e.create(createBody("f", ""))["id"].(string), e.create(createBody("f", ""))["id"].(string)
	e.start(completed, 1)
	e.end(completed, "x\n", "", false)
	e.start(expired, 1)
	e.end(expired, "", "x\n", true)
	if _, err := e.ledger.RejectBatch(t.Context(), epoch, failed, e.results.Now(), nil); err != nil {
		t.Fatal(err)
	}
	for _, id := range []string{completed, expired, failed} {
		a := cancel(id)
		a.wantError(t, http.StatusConflict, job.CodeBatchEnded, "")
		if a.header.Get("X-Should-Retry") != "false" {
			t.Error("it may be retried")
		}
	}
	if o := e.send("GET", "/v1/batches/"+failed, "").object(t); o["errors"] == nil {
		t.Errorf("%v", o)
	}
}

func TestBatchResults(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	id := e.create(createBody("f", ""))["id"].(string)
	results := func() answer {
		t.Helper()
		a := e.send("GET", "/v1/batches/"+id+"/results", "")
		if a.status != http.StatusOK || a.header.Get("Content-Type") != "application/jsonl" {
			t.Fatalf("%d %q %s", a.status, a.header.Get("Content-Type"), a.body)
		}
		return a
	}
	if a := results(); len(a.body) != 0 {
		t.Errorf("before it runs: %s", a.body)
	}
	e.start(id, 5)
	e.endLine(id, 1, "good", job.Outcome{State: job.Completed, StatusCode: 200, Token: 1}, `{"n":9007199254740993}`)
	e.endLine(id, 2, "refused", job.Outcome{State: job.Failed, StatusCode: 400, Token: 1}, `{"error":{"message":"no"}}`)
	e.endLine(id, 3, "large", job.Outcome{State: job.Completed, StatusCode: 200, Token: 1, Blob: "result/x/1"}, `{"large":"`+strings.Repeat("x", 400_000)+`"}`)
	e.endLine(id, 4, "lost", job.Outcome{State: job.Failed, Error: job.NewError(job.TypeServer, job.CodeMaxAttempts, "five times")}, "")
	e.endLine("batch_other", 1, "other", job.Outcome{State: job.Completed, StatusCode: 200, Token: 1}, `{}`)
	got := outputs(t, results().body)
	if diff := cmp.Diff([]string{"good", "large", "lost", "refused"}, slices.Sorted(maps.Keys(got))); diff != "" {
		t.Fatal(diff)
	}
	for customID, part := range map[string]string{
		"good": `"body":{"n":9007199254740993}} null`, "refused": `"status_code":400,`, "large": strings.Repeat("x", 400_000), "lost": `null {"code":"max_attempts","message":"five times"}`,
	} {
		if !strings.Contains(string(got[customID]), part) {
			t.Errorf("%s: %.300s", customID, got[customID])
		}
	}
	if a := e.send("HEAD", "/v1/batches/"+id+"/results", ""); a.status != http.StatusOK || len(a.body) != 0 {
		t.Errorf("HEAD: %d %s", a.status, a.body)
	}
	// After its end they come from its files.
	output, errors := "{\"from\":\"output\"}\n", "{\"from\":\"errors\"}\n"
	e.end(id, output, errors, false)
	if got := string(results().body); got != output+errors {
		t.Errorf("%q", got)
	}
	o := e.send("GET", "/v1/batches/"+id, "").object(t)
	if del := e.send("DELETE", "/v1/files/"+o["error_file_id"].(string), ""); del.status != http.StatusOK {
		t.Fatalf("%d %s", del.status, del.body)
	}
	e.send("GET", "/v1/batches/"+id+"/results", "").wantError(t, http.StatusGone, job.CodeResultExpired, "")
}

func TestResultsNeverLookWholeWithoutAnAnswer(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	id := e.create(createBody("f", ""))["id"].(string)
	e.start(id, 2)
	e.endLine(id, 1, "lost", job.Outcome{State: job.Completed, StatusCode: 200, Token: 1, Blob: "result/lost/1"}, "{}")
	if err := e.blobs.Delete(t.Context(), "result/lost/1"); err != nil {
		t.Fatal(err)
	}
	e.send("GET", "/v1/batches/"+id+"/results", "").wantError(t, http.StatusServiceUnavailable, job.CodeUnavailable, "")
	// Once lines were sent it is too late to say so: the connection breaks.
	other := e.create(createBody("f", ""))["id"].(string)
	e.start(other, 2)
	e.endLine(other, 1, "good", job.Outcome{State: job.Completed, StatusCode: 200, Token: 1}, "{}")
	e.endLine(other, 2, "lost", job.Outcome{State: job.Completed, StatusCode: 200, Token: 1, Blob: "result/lost/1"}, "{}")
	if err := e.blobs.Delete(t.Context(), "result/lost/1"); err != nil {
		t.Fatal(err)
	}
	resp, err := e.tryOpen(t.Context(), "GET", "/v1/batches/"+other+"/results", "")
	if err != nil { // so few lines that not even the answer's head was sent
		return
	}
	defer resp.Body.Close()
	if raw, err := io.ReadAll(resp.Body); err == nil {
		t.Errorf("it looks whole: %q", raw)
	}
}

func TestBatchWithoutLinesToShow(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	id := e.create(createBody("f", ""))["id"].(string)
	e.send("POST", "/v1/batches/"+id+"/cancel", "")
	if err := e.ledger.Lead(t.Context(), epoch); err != nil {
		t.Fatal(err)
	}
	if _, err := e.ledger.EndBatch(t.Context(), epoch, id, e.results.Now(), 0, 0, nil, nil); err != nil {
		t.Fatal(err)
	}
	if a := e.send("GET", "/v1/batches/"+id+"/results", ""); a.status != http.StatusOK || len(a.body) != 0 {
		t.Errorf("%d %s", a.status, a.body)
	}
}

func TestRetryBatch(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	odd := line(`b\u0041`, `{"seed":9007199254740993, "x":1,"x":2,"model":"m"}`)
	input := e.putFile(job.DefaultTenant, "batch", "\ufeff"+line("a", "{}")+"\r\n"+odd+line("c", "{}"))
	id := e.create(createBody(input, `,"metadata":{"k":"v"},"output_expires_after":{"anchor":"created_at","seconds":7200}`))["id"].(string)
	retry := func(headers ...string) answer { return e.send("POST", "/v1/batches/"+id+"/retry", "", headers...) }
	a := retry()
	a.wantError(t, http.StatusConflict, job.CodeBatchNotEnded, "")
	if a.header.Get("X-Should-Retry") != "false" {
		t.Error("it may be retried")
	}
	e.start(id, 3)
	failure := func(customID string) string {
		return string(batch.AppendOutput(nil, &batch.Output{ID: "batch_req_1", CustomID: customID, StatusCode: 500, Body: json.RawMessage("{}")}))
	}
	e.end(id, "{}\n", failure("bA")+failure("c"), false)
	o := retry("Idempotency-Key: r").object(t)
	if o["status"] != "validating" || o["id"] == id || o["input_file_id"] == input || o["completion_window"] != "24h" || o["endpoint"] != "/v1/chat/completions" {
		t.Fatalf("%v", o)
	}
	if diff := cmp.Diff(map[string]any{"k": "v", "millrace_retry_of": id}, o["metadata"]); diff != "" {
		t.Error(diff)
	}
	row, err := e.ledger.Batch(t.Context(), job.DefaultTenant, o["id"].(string))
	if err != nil || row.RetryOf != id || row.OutputExpires != 7200 {
		t.Errorf("%+v, %v", row, err)
	}
	file := o["input_file_id"].(string)
	content := e.send("GET", "/v1/files/"+file+"/content", "")
	if want := odd + line("c", "{}"); string(content.body) != want {
		t.Errorf("%q, want %q", content.body, want)
	}
	f := e.send("GET", "/v1/files/"+file, "").object(t)
	if f["purpose"] != "batch" || f["bytes"] != float64(len(content.body)) || f["filename"] != id+"_retry.jsonl" {
		t.Errorf("%v", f)
	}
	if again := retry("Idempotency-Key: r").object(t); again["id"] != o["id"] {
		t.Errorf("another batch: %v", again)
	}
	if other := retry().object(t); other["id"] == o["id"] {
		t.Errorf("the same batch: %v", other)
	}
	// Without its files it cannot be made.
	if del := e.send("DELETE", "/v1/files/"+input, ""); del.status != http.StatusOK {
		t.Fatalf("%d %s", del.status, del.body)
	}
	before := e.objects()
	retry("Idempotency-Key: s").wantError(t, http.StatusGone, job.CodeResultExpired, "")
	if diff := cmp.Diff(before, e.objects()); diff != "" {
		t.Error("something is left: " + diff)
	}
}

// TestRetryTakesWhatACreateDoes: a window, metadata and the lifetime of its files, and nothing else.
func TestRetryTakesWhatACreateDoes(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	input := e.putFile(job.DefaultTenant, "batch", line("a", "{}"))
	id := e.create(createBody(input, `,"metadata":{"k":"v"}`))["id"].(string)
	path := "/v1/batches/" + id + "/retry"
	e.send("POST", path, `{"foo":1}`).wantError(t, http.StatusBadRequest, job.CodeUnsupportedParameter, "foo") // whatever the batch is
	e.start(id, 1)
	e.end(id, "", string(batch.AppendOutput(nil, &batch.Output{CustomID: "a", StatusCode: 500})), false)
	before := e.objects()
	for body, want := range map[string]struct {
		code  job.Code
		param string
	}{
		`{"foo":1}`:                                                    {job.CodeUnsupportedParameter, "foo"},
		`{"input_file_id":"file-1"}`:                                   {job.CodeUnsupportedParameter, "input_file_id"},
		`{"endpoint":"/v1/embeddings"}`:                                {job.CodeUnsupportedParameter, "endpoint"},
		`{"completion_window":"8d"}`:                                   {job.CodeInvalidValue, "completion_window"},
		`{"completion_window":""}`:                                     {job.CodeInvalidValue, "completion_window"},
		`{"completion_window":48}`:                                     {job.CodeInvalidType, "completion_window"},
		`{"metadata":{"a":1}}`:                                         {job.CodeInvalidType, "metadata"},
		`{"metadata":{"a":"` + strings.Repeat("x", 513) + `"}}`:        {job.CodeInvalidValue, "metadata"},
		`{"output_expires_after":{"anchor":"created_at","seconds":1}}`: {job.CodeInvalidValue, "output_expires_after.seconds"},
		`[]`: {job.CodeInvalidType, ""},
		`{`:  {job.CodeInvalidJSON, ""},
	} {
		e.send("POST", path, body).wantError(t, http.StatusBadRequest, want.code, want.param)
	}
	if diff := cmp.Diff(before, e.objects()); diff != "" {
		t.Error("something is left: " + diff)
	}
	full := `{"completion_window":"48h","metadata":{"n":"1"},"output_expires_after":{"anchor":"created_at","seconds":7200}}`
	o := e.send("POST", path, full, "Idempotency-Key: r").object(t)
	if diff := cmp.Diff(map[string]any{"n": "1", "millrace_retry_of": id}, o["metadata"]); diff != "" || o["completion_window"] != "48h" || o["expires_at"].(float64)-o["created_at"].(float64) != 48*3600 {
		t.Errorf("%v\n%s", o, diff)
	}
	if row, err := e.ledger.Batch(t.Context(), job.DefaultTenant, o["id"].(string)); err != nil || row.OutputExpires != 7200 {
		t.Errorf("%+v, %v", row, err)
	}
	// A key stands for all that was asked with it.
	same := `{"output_expires_after":{"seconds":7200,"anchor":"created_at"},"metadata":{"n":"1"},"completion_window":"48h"}`
	if again := e.send("POST", path, same, "Idempotency-Key: r").object(t); again["id"] != o["id"] {
		t.Errorf("another batch: %v", again)
	}
	for _, other := range []string{"", `{}`, `{"completion_window":"24h"}`, strings.Replace(full, `"1"`, `"2"`, 1)} {
		a := e.send("POST", path, other, "Idempotency-Key: r")
		if a.wantError(t, http.StatusConflict, job.CodeIdempotencyConflict, "Idempotency-Key"); a.header.Get("X-Should-Retry") != "false" {
			t.Errorf("%s may be retried", other)
		}
	}
	// What says nothing is as no body.
	plain := e.send("POST", path, "", "Idempotency-Key: p").object(t)
	for _, nothing := range []string{`{}`, " \n", `{"metadata":null,"completion_window":null}`} {
		if again := e.send("POST", path, nothing, "Idempotency-Key: p").object(t); again["id"] != plain["id"] {
			t.Errorf("%q: %v", nothing, again)
		}
	}
	if diff := cmp.Diff(map[string]any{"k": "v", "millrace_retry_of": id}, plain["metadata"]); diff != "" || plain["completion_window"] != "24h" {
		t.Errorf("%v\n%s", plain, diff)
	}
}

// TestAnOperatorCancelsAnyTenantsBatch: its owner sees it cancelled, and nobody else sees it.
func TestAnOperatorCancelsAnyTenantsBatch(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{APIKey: "root", AdminKey: "sk-admin"})
	key := e.tenantKey("a", ledger.Key{}, ledger.Limits{})
	input := e.putFile("a", "batch", line("a", "{}"))
	id := e.create(createBody(input, ""), key...)["id"].(string)
	path := "/admin/v1/batches/" + id + "/cancel"
	e.send("POST", path, "", key...).wantError(t, http.StatusForbidden, job.CodePermissionDenied, "")
	e.send("POST", path, "", "Authorization: Bearer root").wantError(t, http.StatusForbidden, job.CodePermissionDenied, "")
	e.send("POST", path, "").wantError(t, http.StatusUnauthorized, job.CodeInvalidAPIKey, "")
	e.send("POST", "/v1/batches/"+id+"/cancel", "", adminHeader).wantError(t, http.StatusNotFound, job.CodeBatchNotFound, "batch_id")
	for _, none := range []string{"batch_none", "nope", "%00"} {
		e.send("POST", "/admin/v1/batches/"+none+"/cancel", "", adminHeader).wantError(t, http.StatusNotFound, job.CodeBatchNotFound, "batch_id")
	}
	cancelled := e.admin(http.StatusOK, "POST", path, "")
	if cancelled["status"] != "cancelling" || cancelled["id"] != id || cancelled["cancelling_at"] == nil {
		t.Errorf("%v", cancelled)
	}
	if again := e.admin(http.StatusOK, "POST", path, ""); !cmp.Equal(again, cancelled) {
		t.Errorf("again: %v", again)
	}
	if seen := e.send("GET", "/v1/batches/"+id, "", key...).object(t); !cmp.Equal(seen, cancelled) {
		t.Errorf("its owner sees %v", seen)
	}
	if again := e.send("POST", "/v1/batches/"+id+"/cancel", "", key...).object(t); !cmp.Equal(again, cancelled) {
		t.Errorf("its owner cancels it: %v", again)
	}
	ended := e.create(createBody(input, ""), key...)["id"].(string)
	if err := e.ledger.Lead(t.Context(), epoch); err != nil {
		t.Fatal(err)
	}
	if _, err := e.ledger.RejectBatch(t.Context(), epoch, ended, e.results.Now(), nil); err != nil {
		t.Fatal(err)
	}
	a := e.send("POST", "/admin/v1/batches/"+ended+"/cancel", "", adminHeader)
	if a.wantError(t, http.StatusConflict, job.CodeBatchEnded, ""); a.header.Get("X-Should-Retry") != "false" {
		t.Error("it may be retried")
	}
}

// TestRetryOfLinesWithoutANameLeavesThemOut: their input was lost before their names were read.
func TestRetryOfLinesWithoutANameLeavesThemOut(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	nameless := string(batch.AppendOutput(nil, &batch.Output{ID: "batch_req_1", Error: job.NewError(job.TypeServer, job.CodeBatchExpired, "Its window closed.")}))
	failed := string(batch.AppendOutput(nil, &batch.Output{ID: "batch_req_2", CustomID: "b", StatusCode: 500}))
	input := e.putFile(job.DefaultTenant, "batch", line("a", "{}")+line("b", "{}"))
	some, none := e.create(createBody(input, ""))["id"].(string), e.create(createBody(input, ""))["id"].(string)
	e.start(some, 2)
	e.end(some, "", nameless+failed, false)
	e.start(none, 2)
	e.end(none, "", nameless+nameless, false)
	o := e.send("POST", "/v1/batches/"+some+"/retry", "").object(t)
	if got := e.send("GET", "/v1/files/"+o["input_file_id"].(string)+"/content", ""); string(got.body) != line("b", "{}") {
		t.Errorf("the retry has %q", got.body)
	}
	before := e.objects()
	e.send("POST", "/v1/batches/"+none+"/retry", "").wantError(t, http.StatusGone, job.CodeResultExpired, "")
	if diff := cmp.Diff(before, e.objects()); diff != "" {
		t.Error("something is left: " + diff)
	}
}

func TestRetryOfWhatDidNotFail(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	good, refused := e.create(createBody("f", ""))["id"].(string), e.create(createBody("f", ""))["id"].(string)
	e.start(good, 1)
	e.end(good, "{}\n", "", false)
	if _, err := e.ledger.RejectBatch(t.Context(), epoch, refused, e.results.Now(), nil); err != nil {
		t.Fatal(err)
	}
	for _, id := range []string{good, refused} {
		e.send("POST", "/v1/batches/"+id+"/retry", "").wantError(t, http.StatusBadRequest, job.CodeInvalidValue, "batch_id")
	}
}

func TestRetryKeepsToTheQuotaAndTheMetadata(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{APIKey: "root"})
	key := e.tenantKey("a", ledger.Key{}, ledger.Limits{})
	input := e.putFile("a", "batch", line("a", "{}"))
	var pairs []string
	for i := range 16 {
		pairs = append(pairs, fmt.Sprintf(`"k%d":"v"`, i))
	}
	id := e.create(createBody(input, `,"metadata":{`+strings.Join(pairs, ",")+`}`), key...)["id"].(string)
	e.start(id, 1)
	if _, err := e.ledger.FinalizeBatch(t.Context(), epoch, id, e.results.Now(), false); err != nil {
		t.Fatal(err)
	}
	content := string(batch.AppendOutput(nil, &batch.Output{CustomID: "a", StatusCode: 500}))
	if _, err := e.blobs.Put(t.Context(), "file-err", strings.NewReader(content)); err != nil {
		t.Fatal(err)
	}
	errorFile := &ledger.File{ID: "file-err", Tenant: "a", Purpose: "batch_output", Filename: "x", Bytes: int64(len(content)), Blob: "file-err", Batch: id, Created: e.results.Now()}
	if _, err := e.ledger.EndBatch(t.Context(), epoch, id, e.results.Now(), 0, 1, nil, errorFile); err != nil {
		t.Fatal(err)
	}
	o := e.send("POST", "/v1/batches/"+id+"/retry", "", key...).object(t)
	if m := o["metadata"].(map[string]any); len(m) != 16 || m["millrace_retry_of"] != nil {
		t.Errorf("%v", m)
	}
	if _, err := e.ledger.UpdateTenant(t.Context(), "a", func(t *ledger.Tenant) error { t.Limits.FileBytes = 1; return nil }); err != nil {
		t.Fatal(err)
	}
	e.stopAPI() // another process has not heard of the old limit
	e.startAPI(api.Config{APIKey: "root"})
	before := e.objects()
	e.send("POST", "/v1/batches/"+id+"/retry", "", append(key, "Idempotency-Key: q")...).wantError(t, http.StatusTooManyRequests, job.CodeFileBytes, "")
	if diff := cmp.Diff(before, e.objects()); diff != "" {
		t.Error("something is left: " + diff)
	}
}
