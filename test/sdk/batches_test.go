package sdk_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/shared"
)

// batchLine is one line of a batch's file: a chat of at most tokens tokens.
func batchLine(customID, text string, tokens int) string {
	return fmt.Sprintf(`{"custom_id":%q,"method":"POST","url":"/v1/chat/completions","body":%s}`+"\n", customID, batchBody(text, tokens))
}

func batchBody(text string, tokens int) string {
	return fmt.Sprintf(`{"model":%q,"messages":[{"role":"user","content":%q}],"max_tokens":%d}`, model, text, tokens)
}

// upload stores a batch's file.
func upload(t *testing.T, client openai.Client, content string) string {
	t.Helper()
	f, err := client.Files.New(soon(t), openai.FileNewParams{File: strings.NewReader(content), Purpose: openai.FilePurposeBatch})
	if err != nil {
		t.Fatal(err)
	}
	return f.ID
}

func newBatch(file string) openai.BatchNewParams {
	return openai.BatchNewParams{InputFileID: file, Endpoint: openai.BatchNewParamsEndpointV1ChatCompletions, CompletionWindow: openai.BatchNewParamsCompletionWindow24h}
}

// runBatch creates a batch of these lines and waits for its end. On the way its counts only grow.
func runBatch(t *testing.T, client openai.Client, content string) *openai.Batch {
	t.Helper()
	b, err := client.Batches.New(soon(t), newBatch(upload(t, client, content)))
	if err != nil {
		t.Fatal(err)
	}
	return endOf(t, client, b)
}

// ended tells whether a status is a batch's last.
func ended(s openai.BatchStatus) bool {
	return slices.Contains([]openai.BatchStatus{openai.BatchStatusCompleted, openai.BatchStatusFailed, openai.BatchStatusExpired, openai.BatchStatusCancelled}, s)
}

// endOf waits for a batch's end.
func endOf(t *testing.T, client openai.Client, b *openai.Batch) *openai.Batch {
	t.Helper()
	last := b
	eventually(t, "the batch ends", func() error {
		next, err := client.Batches.Get(soon(t), b.ID)
		if err != nil {
			return err
		}
		was, now := last.RequestCounts, next.RequestCounts
		if now.Total < was.Total || now.Completed < was.Completed || now.Failed < was.Failed || now.Completed+now.Failed > now.Total {
			t.Fatalf("the counts go from %s to %s", was.RawJSON(), now.RawJSON())
		}
		if last = next; !ended(next.Status) {
			return fmt.Errorf("it is %s, %s", next.Status, next.RequestCounts.RawJSON())
		}
		return nil
	})
	return last
}

// output is one line of an output or error file.
type output struct {
	ID       string `json:"id"`
	CustomID string `json:"custom_id"`
	Response *struct {
		StatusCode int             `json:"status_code"`
		RequestID  string          `json:"request_id"`
		Body       json.RawMessage `json:"body"`
	} `json:"response"`
	Error *struct {
		Code, Message string
	} `json:"error"`
}

// content reads a file's bytes.
func content(t *testing.T, client openai.Client, id string) []byte {
	t.Helper()
	resp, err := client.Files.Content(soon(t), id)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

// outputs reads a file of results by custom_id; "" is no file.
func outputs(t *testing.T, client openai.Client, id string) map[string]output {
	t.Helper()
	if id == "" {
		return nil
	}
	return outputsOf(t, content(t, client, id))
}

func outputsOf(t *testing.T, raw []byte) map[string]output {
	t.Helper()
	all := map[string]output{}
	for line := range bytes.Lines(raw) {
		o := decode[output](t, line)
		if _, twice := all[o.CustomID]; twice || !strings.HasPrefix(o.ID, "batch_req_") || (o.Response == nil) == (o.Error == nil) {
			t.Fatalf("the line %s", line)
		}
		all[o.CustomID] = o
	}
	return all
}

// maxLine bounds a line of a batch's file, in bytes.
const maxLine = 1 << 20

func TestFilesAndBatches(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, s *server) {
		for name, test := range map[string]func(*testing.T, *server){
			"files come, go and are listed":      goFiles,
			"a batch answers each line":          goBatch,
			"a batch of other endpoints":         goBatchEndpoints,
			"two batches of the same file":       goBatchTwice,
			"lines that fail":                    goBatchFailures,
			"a batch that fails in every line":   goBatchAllFail,
			"a file that is wrong in every way":  goBatchInvalid,
			"a file that is not there":           goBatchNoFile,
			"a cancelled batch":                  goBatchCancel,
			"creates that are refused":           goBatchRefused,
			"results while it runs, and a retry": goBatchRetry,
			"lines as odd as they come are kept": goBatchBytes,
			"files and batches by openai-node":   nodeBatches,
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				test(t, s)
			})
		}
	}, func(c *setup) { c.platform.Dispatcher.BatchMaxLine = maxLine })
}

func goFiles(t *testing.T, s *server) {
	client := s.client(t)
	lines := batchLine("a", "<b>&é</b>", 1) + "\r\n" + batchLine("b", "hi", 1)
	f, err := client.Files.New(soon(t), openai.FileNewParams{
		File: openai.File(strings.NewReader(lines), "my file.jsonl", "application/jsonl"), Purpose: openai.FilePurposeBatch, ExpiresAfter: openai.FileNewParamsExpiresAfter{Seconds: 3600},
	})
	if err != nil {
		t.Fatal(err)
	}
	if f.Bytes != int64(len(lines)) || f.Filename != "my file.jsonl" || f.Purpose != "batch" || f.Object != "file" || !strings.Contains(f.RawJSON(), `"status":"processed"`) || f.ExpiresAt-f.CreatedAt != 3600 || time.Since(time.Unix(f.CreatedAt, 0)).Abs() > time.Hour {
		t.Errorf("the file is %s", f.RawJSON())
	}
	got, err := client.Files.Get(soon(t), f.ID)
	if err != nil || got.RawJSON() != f.RawJSON() {
		t.Errorf("%v, %v", got, err)
	}
	if raw := content(t, client, f.ID); string(raw) != lines {
		t.Errorf("the content is %q", raw)
	}
	want := []string{f.ID}
	for i := range 24 {
		want = append(want, upload(t, client, batchLine(strconv.Itoa(i), "hi", 1)))
	}
	seen := map[string]bool{}
	pager := client.Files.ListAutoPaging(soon(t), openai.FileListParams{Purpose: openai.String("batch"), Limit: openai.Int(10)})
	for pager.Next() {
		if seen[pager.Current().ID] {
			t.Fatalf("%s comes twice", pager.Current().ID)
		}
		seen[pager.Current().ID] = true
	}
	if err := pager.Err(); err != nil {
		t.Fatal(err)
	}
	for _, id := range want {
		if !seen[id] {
			t.Errorf("%s is not in the list", id)
		}
	}
	gone, err := client.Files.Delete(soon(t), f.ID)
	if err != nil || !gone.Deleted || gone.ID != f.ID {
		t.Errorf("%v, %v", gone, err)
	}
	_, err = client.Files.Get(soon(t), f.ID)
	wantRefusal(t, err, http.StatusNotFound, "file_not_found")
	_, err = client.Files.Content(soon(t), f.ID)
	wantRefusal(t, err, http.StatusNotFound, "file_not_found")
}

// wantRefusal checks that err is the client's with this status and code.
func wantRefusal(t *testing.T, err error, status int, code string) {
	t.Helper()
	var e *openai.Error
	if !errors.As(err, &e) || e.StatusCode != status || e.Code != code || e.Message == "" {
		t.Errorf("got %v, want %d %s", err, status, code)
	}
}

func goBatch(t *testing.T, s *server) {
	client := s.client(t)
	var file strings.Builder
	prompts := map[string]string{}
	for i := range 20 { // the first take longest
		id, text := fmt.Sprintf("request %d", i), fmt.Sprintf("[[emulator:delay=%dms]] What is %d?", (20-i)*5, i)
		prompts[id] = text
		file.WriteString(batchLine(id, text, 6))
	}
	p := newBatch(upload(t, client, file.String()))
	p.Metadata = shared.Metadata{"from": "a test"}
	p.OutputExpiresAfter = openai.BatchNewParamsOutputExpiresAfter{Seconds: 7200}
	b, err := client.Batches.New(soon(t), p)
	if err != nil {
		t.Fatal(err)
	}
	if b.Object != "batch" || b.Status != openai.BatchStatusValidating || b.InputFileID != p.InputFileID || b.Metadata["from"] != "a test" || b.ExpiresAt-b.CreatedAt != 86400 || b.CompletionWindow != "24h" {
		t.Errorf("created: %s", b.RawJSON())
	}
	b = endOf(t, client, b)
	if b.Status != openai.BatchStatusCompleted || b.RequestCounts.Total != 20 || b.RequestCounts.Completed != 20 || b.RequestCounts.Failed != 0 || b.ErrorFileID != "" || b.Model != model {
		t.Fatalf("ended: %s", b.RawJSON())
	}
	for name, at := range map[string]int64{"in progress": b.InProgressAt, "finalizing": b.FinalizingAt, "completed": b.CompletedAt} {
		if time.Since(time.Unix(at, 0)).Abs() > time.Hour {
			t.Errorf("%s at %d", name, at)
		}
	}
	if b.FailedAt != 0 || b.ExpiredAt != 0 || b.CancelledAt != 0 || b.CancellingAt != 0 || b.JSON.Errors.Raw() != "null" {
		t.Errorf("ended: %s", b.RawJSON())
	}
	if b.Usage.OutputTokens != 20*6 || b.Usage.InputTokens == 0 || b.Usage.TotalTokens != b.Usage.InputTokens+b.Usage.OutputTokens {
		t.Errorf("used: %s", b.Usage.RawJSON())
	}
	got := outputs(t, client, b.OutputFileID)
	if len(got) != 20 {
		t.Fatalf("%d lines", len(got))
	}
	for id, text := range prompts {
		var whole openai.ChatCompletion
		if err := client.Post(soon(t), "chat/completions", json.RawMessage(batchBody(text, 6)), &whole); err != nil {
			t.Fatal(err)
		}
		o := got[id]
		if o.Response == nil || o.Response.StatusCode != 200 || o.Response.RequestID == "" {
			t.Fatalf("%s: %+v", id, o)
		}
		if answer := decode[openai.ChatCompletion](t, o.Response.Body); answer.Choices[0].Message.Content != whole.Choices[0].Message.Content {
			t.Errorf("%s: %q, and its prompt alone gives %q", id, answer.Choices[0].Message.Content, whole.Choices[0].Message.Content)
		}
	}
	out, err := client.Files.Get(soon(t), b.OutputFileID)
	if err != nil || out.Purpose != openai.FileObjectPurposeBatchOutput || out.ExpiresAt-out.CreatedAt != 7200 || out.Bytes != int64(len(content(t, client, b.OutputFileID))) {
		t.Errorf("the output file: %v, %v", out, err)
	}
	listed := false
	pager := client.Files.ListAutoPaging(soon(t), openai.FileListParams{Purpose: openai.String("batch_output"), Limit: openai.Int(2)})
	for pager.Next() {
		listed = listed || pager.Current().ID == b.OutputFileID
	}
	if err := pager.Err(); err != nil || !listed {
		t.Errorf("the output file is listed: %t, %v", listed, err)
	}
	if _, err := client.Files.Delete(soon(t), b.OutputFileID); err != nil {
		t.Error(err)
	}
	_, err = client.Batches.Cancel(soon(t), b.ID)
	wantRefusal(t, err, http.StatusConflict, "batch_already_ended")
}

func goBatchEndpoints(t *testing.T, s *server) {
	client := s.client(t)
	for endpoint, body := range map[openai.BatchNewParamsEndpoint]string{
		openai.BatchNewParamsEndpointV1Completions: `{"model":"other","prompt":"Once","max_tokens":3}`,
		openai.BatchNewParamsEndpointV1Embeddings:  `{"model":"other","input":["a","b"]}`,
		openai.BatchNewParamsEndpointV1Responses:   `{"model":"other","input":"What is a mill?","max_output_tokens":3}`,
	} {
		file := fmt.Sprintf(`{"custom_id":"only","method":"POST","url":%q,"body":%s}`, endpoint, body)
		p := newBatch(upload(t, client, file))
		p.Endpoint = endpoint
		b, err := client.Batches.New(soon(t), p)
		if err != nil {
			t.Fatal(err)
		}
		b = endOf(t, client, b)
		if b.Status != openai.BatchStatusCompleted || b.RequestCounts.Completed != 1 || b.Model != "other" {
			t.Errorf("%s: %s %v", endpoint, b.RawJSON(), outputs(t, client, b.ErrorFileID))
		}
	}
}

func goBatchTwice(t *testing.T, s *server) {
	client := s.client(t)
	var lines strings.Builder
	for i := range 10 {
		lines.WriteString(batchLine(strconv.Itoa(i), fmt.Sprintf("The same %d.", i), 3))
	}
	file := upload(t, client, lines.String())
	var both [2]*openai.Batch
	for i := range both {
		b, err := client.Batches.New(soon(t), newBatch(file))
		if err != nil {
			t.Fatal(err)
		}
		both[i] = b
	}
	third := func() *openai.Batch {
		b, err := client.Batches.New(soon(t), newBatch(file))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	ids := map[string]bool{}
	for i, b := range append(both[:], nil) {
		if b == nil { // once more, after both have ended
			b = third()
		}
		b = endOf(t, client, b)
		got := outputs(t, client, b.OutputFileID)
		if b.Status != openai.BatchStatusCompleted || len(got) != 10 {
			t.Errorf("batch %d: %s", i, b.RawJSON())
		}
		for _, o := range got {
			ids[o.ID] = true
		}
	}
	if len(ids) != 30 {
		t.Errorf("%d ids of 30 lines", len(ids))
	}
}

func goBatchFailures(t *testing.T, s *server) {
	client := s.client(t)
	b := runBatch(t, client, batchLine("good", "Hello.", 3)+batchLine("refused", "[[emulator:status=400]] Hello.", 3)+batchLine("good too", "Hello again.", 3))
	if b.Status != openai.BatchStatusCompleted || b.RequestCounts.Total != 3 || b.RequestCounts.Completed != 2 || b.RequestCounts.Failed != 1 {
		t.Fatalf("ended: %s", b.RawJSON())
	}
	good, bad := outputs(t, client, b.OutputFileID), outputs(t, client, b.ErrorFileID)
	if diff := cmp.Diff([]string{"good", "good too"}, slices.Sorted(maps.Keys(good))); diff != "" {
		t.Error(diff)
	}
	o := bad["refused"]
	if len(bad) != 1 || o.Response == nil || o.Response.StatusCode != 400 || decode[map[string]map[string]any](t, o.Response.Body)["error"]["message"] == "" {
		t.Errorf("%+v", bad)
	}
	f, err := client.Files.Get(soon(t), b.ErrorFileID)
	if err != nil || f.Bytes == 0 {
		t.Errorf("the error file: %v, %v", f, err)
	}
}

func goBatchAllFail(t *testing.T, s *server) {
	client := s.client(t)
	var lines strings.Builder
	for i := range 9 {
		lines.WriteString(batchLine(strconv.Itoa(i), "[[emulator:status=422]] Hello.", 3))
	}
	b := runBatch(t, client, lines.String())
	if b.Status != openai.BatchStatusCompleted || b.JSON.OutputFileID.Raw() != "null" || b.RequestCounts.Total != 9 || b.RequestCounts.Completed != 0 || b.RequestCounts.Failed != 9 {
		t.Fatalf("ended: %s", b.RawJSON())
	}
	if bad := outputs(t, client, b.ErrorFileID); len(bad) != 9 || bad["8"].Response.StatusCode != 422 {
		t.Errorf("%+v", bad)
	}
}

// goBatchInvalid has each mistake that a line can have, in one file.
func goBatchInvalid(t *testing.T, s *server) {
	client := s.client(t)
	good := strings.TrimSuffix(batchLine("%s", "hi", 1), "\n")
	line := func(id string) string { return fmt.Sprintf(good, id) }
	with := func(id, old, replaced string) string { return strings.Replace(line(id), old, replaced, 1) }
	lines := [][2]string{
		{line("first"), ""},
		{"not JSON", "invalid_json_line "},
		{"", ""},
		{`["an array"]`, "invalid_json_line "},
		{with("x", `"custom_id":"x",`, ""), "missing_required_parameter custom_id"},
		{with("a1", `"method":"POST",`, ""), "missing_required_parameter method"},
		{with("a2", `"url":"/v1/chat/completions",`, ""), "missing_required_parameter url"},
		{`{"custom_id":"a3","method":"POST","url":"/v1/chat/completions"}`, "missing_required_parameter body"},
		{line(""), "invalid_value custom_id"},
		{line("  "), "invalid_value custom_id"},
		{with("x", `"x"`, "42"), "invalid_value custom_id"},
		{line(strings.Repeat("x", 513)), "invalid_value custom_id"},
		{`{"custom_id":"a4","method":"POST","url":"/v1/chat/completions","body":[]}`, "invalid_value body"},
		{line("first"), "duplicate_custom_id custom_id"},
		{line("first"), "duplicate_custom_id custom_id"},
		{with("a5", "/v1/chat/completions", "/v1/embeddings"), "invalid_url url"},
		{with("a6", "/v1/chat/completions", "http://169.254.169.254/latest/meta-data"), "invalid_url url"},
		{with("a7", "POST", "GET"), "invalid_method method"},
		{with("a8", `"max_tokens"`, `"stream":true,"max_tokens"`), "streaming_unsupported body.stream"},
		{with("a9", `"model"`, `"no_model"`), "invalid_request body.model"},
		{with("a10", `"messages"`, `"no_messages"`), "invalid_request body.messages"},
		{with("a11", model, "no-such-model"), "model_not_found body.model"},
		{with("a12", `"hi"`, `"`+strings.Repeat("x", maxLine)+`"`), "request_too_large body"},
		{with("a13", `"hi"`, "\"\xff\""), "invalid_encoding "},
		{line("last"), ""},
	}
	var file strings.Builder
	var want []string
	for i, l := range lines {
		file.WriteString(l[0] + "\r\n")
		if l[1] != "" {
			want = append(want, fmt.Sprintf("%d %s", i+1, l[1]))
		}
	}
	calls := len(s.calls(""))
	b := runBatch(t, client, file.String())
	var got []string
	for _, e := range b.Errors.Data {
		if e.Message == "" {
			t.Errorf("no message: %s", e.RawJSON())
		}
		got = append(got, fmt.Sprintf("%d %s %s", e.Line, e.Code, e.Param))
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if b.Status != openai.BatchStatusFailed || b.FailedAt == 0 || b.InProgressAt != 0 || b.RequestCounts.Total != 0 || b.OutputFileID != "" || b.ErrorFileID != "" || b.Errors.Object != "list" {
		t.Errorf("ended: %.300s", b.RawJSON())
	}
	for _, body := range s.calls(`"hi"`) {
		t.Errorf("the engine was called (%d calls before): %.200s", calls, body)
	}
}

func goBatchNoFile(t *testing.T, s *server) {
	client := s.client(t)
	b, err := client.Batches.New(soon(t), newBatch("file-none"))
	if err != nil {
		t.Fatal(err)
	}
	b = endOf(t, client, b)
	if b.Status != openai.BatchStatusFailed || len(b.Errors.Data) != 1 {
		t.Fatalf("ended: %s", b.RawJSON())
	}
	if e := b.Errors.Data[0]; e.Code != "invalid_request" || e.Param != "file_id" || e.JSON.Line.Raw() != "null" || e.Message == "" {
		t.Errorf("the error is %s", e.RawJSON())
	}
}

func goBatchCancel(t *testing.T, s *server) {
	client := s.client(t)
	var lines strings.Builder
	lines.WriteString(batchLine("done", "Before the cancel.", 2))
	for i := range 5 {
		lines.WriteString(batchLine(strconv.Itoa(i), fmt.Sprintf("[[emulator:hang]] Line %d to be cancelled.", i), 50))
	}
	b, err := client.Batches.New(soon(t), newBatch(upload(t, client, lines.String())))
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "a line is done", func() error {
		if b, err = client.Batches.Get(soon(t), b.ID); err != nil || b.RequestCounts.Completed != 1 {
			return fmt.Errorf("%v, %w", b, err)
		}
		return nil
	})
	_, err = client.Files.Delete(soon(t), b.InputFileID)
	wantRefusal(t, err, http.StatusConflict, "file_in_use")
	for range 2 {
		if b, err = client.Batches.Cancel(soon(t), b.ID); err != nil || b.Status != openai.BatchStatusCancelling && b.Status != openai.BatchStatusCancelled {
			t.Fatalf("%v, %v", b, err)
		}
	}
	b = endOf(t, client, b)
	if b.Status != openai.BatchStatusCancelled || b.CancelledAt == 0 || b.CancellingAt == 0 || b.RequestCounts.Total != 6 || b.RequestCounts.Completed != 1 || b.RequestCounts.Failed != 5 {
		t.Fatalf("ended: %s", b.RawJSON())
	}
	bad := outputs(t, client, b.ErrorFileID)
	for id, o := range bad {
		if o.Error == nil || o.Error.Code != "batch_cancelled" || o.Error.Message == "" {
			t.Errorf("%s: %+v", id, o.Error)
		}
	}
	if good := outputs(t, client, b.OutputFileID); len(good) != 1 || len(bad) != 5 {
		t.Errorf("%d good, %d bad", len(good), len(bad))
	}
	if b, err = client.Batches.Cancel(soon(t), b.ID); err != nil || b.Status != openai.BatchStatusCancelled {
		t.Errorf("%v, %v", b, err)
	}
	if _, err := client.Files.Delete(soon(t), b.InputFileID); err != nil {
		t.Error(err)
	}
}

func goBatchRefused(t *testing.T, s *server) {
	client := s.client(t)
	p := newBatch("file-none")
	p.CompletionWindow = "0h"
	_, err := client.Batches.New(soon(t), p)
	wantRefusal(t, err, http.StatusBadRequest, "invalid_value")
	p = newBatch("file-none")
	p.Endpoint = openai.BatchNewParamsEndpointV1Moderations
	_, err = client.Batches.New(soon(t), p)
	wantRefusal(t, err, http.StatusBadRequest, "invalid_value")
	_, err = client.Batches.New(soon(t), openai.BatchNewParams{Endpoint: "/v1/embeddings", CompletionWindow: "24h"})
	wantRefusal(t, err, http.StatusBadRequest, "invalid_value") // the client sends an empty id
	_, err = client.Batches.Get(soon(t), "batch_none")
	wantRefusal(t, err, http.StatusNotFound, "batch_not_found")
	_, err = client.Batches.Cancel(soon(t), "batch_none")
	wantRefusal(t, err, http.StatusNotFound, "batch_not_found")
	_, err = client.Batches.List(soon(t), openai.BatchListParams{Limit: openai.Int(101)})
	wantRefusal(t, err, http.StatusBadRequest, "invalid_value")
}

func goBatchRetry(t *testing.T, s *server) {
	client := s.client(t)
	failing := "[[emulator:times=1,status=400]] Fails once."
	b, err := client.Batches.New(soon(t), newBatch(upload(t, client, batchLine("good", "Fine.", 2)+batchLine("fails", failing, 2)+batchLine("slow", "[[emulator:hang]] Never.", 2))))
	if err != nil {
		t.Fatal(err)
	}
	results := func() map[string]output {
		t.Helper()
		var raw []byte
		if err := client.Get(soon(t), "batches/"+b.ID+"/results", nil, &raw); err != nil {
			t.Fatal(err)
		}
		return outputsOf(t, raw)
	}
	eventually(t, "two lines are there", func() error {
		if got := results(); len(got) != 2 || got["good"].Response == nil || got["fails"].Response == nil {
			return fmt.Errorf("%v", got)
		}
		return nil
	})
	err = client.Post(soon(t), "batches/"+b.ID+"/retry", nil, nil)
	wantRefusal(t, err, http.StatusConflict, "batch_not_ended")
	if _, err := client.Batches.Cancel(soon(t), b.ID); err != nil {
		t.Fatal(err)
	}
	b = endOf(t, client, b)
	if got := results(); len(got) != 3 || got["slow"].Error == nil || got["slow"].Error.Code != "batch_cancelled" {
		t.Errorf("%v", got)
	}
	var again openai.Batch
	if err := client.Post(soon(t), "batches/"+b.ID+"/retry", nil, &again); err != nil {
		t.Fatal(err)
	}
	if again.Metadata["millrace_retry_of"] != b.ID || string(content(t, client, again.InputFileID)) != batchLine("fails", failing, 2)+batchLine("slow", "[[emulator:hang]] Never.", 2) {
		t.Errorf("the retry is %s", again.RawJSON())
	}
	eventually(t, "the line that failed is good", func() error {
		next, err := client.Batches.Get(soon(t), again.ID)
		if err != nil || next.RequestCounts.Completed != 1 {
			return fmt.Errorf("%v, %w", next, err)
		}
		return nil
	})
	if _, err := client.Batches.Cancel(soon(t), again.ID); err != nil {
		t.Fatal(err)
	}
	endOf(t, client, &again)
}

// goBatchBytes: what the engine gets of a line is what stands in it.
func goBatchBytes(t *testing.T, s *server) {
	client := s.client(t)
	body := `{"seed":9007199254740993, "model":"` + model + `","max_tokens":2,"messages":[{"role":"user","content":"<b>&\u00e9\ud83d\ude00 odd bytes</b>"}],"vendor":{"z":1,"a":[1e400,null]},"stream":false}`
	b := runBatch(t, client, "\ufeff\r\n"+` {"body":`+body+`,"custom\u005fid":"\u0061b","url":"\/v1\/chat\/completions","method":"POST","note":"ours"}`)
	if b.Status != openai.BatchStatusCompleted || b.RequestCounts.Completed != 1 {
		t.Fatalf("ended: %s %v", b.RawJSON(), outputs(t, client, b.ErrorFileID))
	}
	if _, there := outputs(t, client, b.OutputFileID)["ab"]; !there {
		t.Error("it has another name")
	}
	if calls := s.calls("odd bytes"); len(calls) != 1 || string(calls[0]) != body {
		t.Errorf("the engine got %s", calls)
	}
}

// TestBatchesAreListedPageByPage has its own servers, whose lists nobody else adds to.
func TestBatchesAreListedPageByPage(t *testing.T) {
	t.Parallel()
	onEach(t, batchPages)
}

func batchPages(t *testing.T, s *server) {
	client := s.client(t)
	const n = 99
	want := map[string]bool{}
	for range n {
		b, err := client.Batches.New(soon(t), newBatch("file-none"))
		if err != nil {
			t.Fatal(err)
		}
		want[b.ID] = true
	}
	var got []string
	pager := client.Batches.ListAutoPaging(soon(t), openai.BatchListParams{Limit: openai.Int(10)})
	for pager.Next() {
		got = append(got, pager.Current().ID)
	}
	if err := pager.Err(); err != nil {
		t.Fatal(err)
	}
	var byNode struct {
		IDs   []string `json:"ids"`
		Pages int      `json:"pages"`
	}
	startNode(t, "batchPages", s.url, s.key).wait(t).into(t, "batchPages", &byNode)
	for name, ids := range map[string][]string{"openai-go": got, "openai-node": byNode.IDs} {
		seen := map[string]bool{}
		for _, id := range ids {
			seen[id] = true
		}
		if len(ids) != n || !maps.Equal(seen, want) {
			t.Errorf("%s sees %d batches, %d different ones", name, len(ids), len(seen))
		}
	}
	if diff := cmp.Diff(got, byNode.IDs); diff != "" || byNode.Pages != 10 {
		t.Errorf("%d pages, another order: %s", byNode.Pages, diff)
	}
}

// TestRetriesOfTheClientsMakeNoSecondBatch has the clients repeat by themselves creates that were stored though they heard nothing of it, or an error.
func TestRetriesOfTheClientsMakeNoSecondBatch(t *testing.T) {
	t.Parallel()
	onEach(t, retriedBatches)
}

func retriedBatches(t *testing.T, s *server) {
	direct := s.client(t)
	made := map[string]int{}
	for round, what := range []fate{lost, fails} {
		fromGo, fromNode := newFront(t, s.url, firstTry(what)), newFront(t, s.url, firstTry(what))
		c := newClient(t, fromGo.url, s.key)
		file := upload(t, c, batchLine("a", "Once only: "+string(what), 1))
		b, err := c.Batches.New(soon(t), newBatch(file))
		if err != nil {
			t.Fatal(err)
		}
		made[b.ID]++
		made[startNode(t, "batchOnce", fromNode.url, s.key).wait(t).value(t, "batchOnce")["id"].(string)]++
		files, err := direct.Files.List(soon(t), openai.FileListParams{Purpose: openai.String("batch")})
		if err != nil || len(files.Data) != round+1 || files.Data[0].ID != file {
			t.Fatalf("%s: %v, %v", what, files, err)
		}
		for name, f := range map[string]*front{"openai-go": fromGo, "openai-node": fromNode} {
			want := 2
			if name == "openai-go" {
				want = 4
			}
			if n := len(served(f.exchanges())); n != want {
				t.Errorf("%s, %s: %d requests, want %d", what, name, n, want)
			}
		}
	}
	all, err := direct.Batches.List(soon(t), openai.BatchListParams{Limit: openai.Int(100)})
	if err != nil || len(all.Data) != 4 || len(made) != 4 {
		t.Fatalf("%d batches and %d ids for 4 creates, %v", len(all.Data), len(made), err)
	}
	for _, b := range all.Data {
		endOf(t, direct, &b)
	}
	for _, what := range []fate{lost, fails} {
		if n := len(s.calls("Once only: " + string(what))); n != 1 {
			t.Errorf("%s: the engine was called %d times for one line", what, n)
		}
	}
}

func nodeBatches(t *testing.T, s *server) {
	got := startNode(t, "files batch batchCancel batchRefused batchMissing batchLimit", s.url, s.key).wait(t)
	var files struct {
		File, Again openai.FileObject
		Content     string // a character for each byte
		Listed      bool
		Deleted     openai.FileDeleted
		Gone        int
	}
	got.into(t, "files", &files)
	if f := files.File; f.Filename != "in.jsonl" || f.Bytes != int64(utf8.RuneCountInString(files.Content)) || !strings.Contains(f.RawJSON(), `"status":"processed"`) || f.ExpiresAt-f.CreatedAt != 3600 || files.Again.ID != f.ID || !files.Listed || !files.Deleted.Deleted || files.Gone != 404 {
		t.Errorf("%s", got["files"].Value)
	}
	var batch struct {
		Created, Ended         openai.Batch
		Output, Errors, Direct string
	}
	got.into(t, "batch", &batch)
	if b := batch.Ended; b.Status != openai.BatchStatusCompleted || b.RequestCounts.Completed != 2 || b.RequestCounts.Failed != 1 || b.Metadata["from"] != "node" || batch.Created.Status != openai.BatchStatusValidating {
		t.Errorf("%s", got["batch"].Value)
	}
	if good, bad := outputsOf(t, []byte(batch.Output)), outputsOf(t, []byte(batch.Errors)); len(good) != 2 || len(bad) != 1 || bad["bad"].Response == nil || good["a"].Response == nil || batch.Direct == "" || decode[openai.ChatCompletion](t, good["a"].Response.Body).Choices[0].Message.Content != batch.Direct {
		t.Errorf("%s", got["batch"].Value)
	}
	var cancelled struct{ First, Second, Ended openai.Batch }
	got.into(t, "batchCancel", &cancelled)
	if cancelled.First.Status != openai.BatchStatusCancelling && cancelled.First.Status != openai.BatchStatusCancelled || cancelled.Second.ID != cancelled.First.ID || cancelled.Ended.Status != openai.BatchStatusCancelled {
		t.Errorf("%s", got["batchCancel"].Value)
	}
	const invalid = "invalid_request_error"
	got.wantError(t, "batchRefused", "BadRequestError", refusal{status: 400, kind: invalid, code: "invalid_value", param: "completion_window"})
	got.wantError(t, "batchMissing", "NotFoundError", refusal{status: 404, kind: invalid, code: "batch_not_found", param: "batch_id"})
	got.wantError(t, "batchLimit", "BadRequestError", refusal{status: 400, kind: invalid, code: "invalid_value", param: "limit"})
}
