package batch_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/batch"
	"github.com/millrace/millrace/internal/job"
)

const batchID = "batch_0000000000000000000000000000000000aa"

func TestGoldenOutput(t *testing.T) {
	t.Parallel()
	var all []byte
	for i, o := range []batch.Output{
		{CustomID: "good", RequestID: "req_1", StatusCode: 200, Body: json.RawMessage(`{"id":"x","n":9007199254740993,"t":"<b>&é\u00e9</b>","z":1,"a":{"n":1e400}}`)},
		{CustomID: "in lines", RequestID: "req_2", StatusCode: 200, Body: json.RawMessage("{\r\n  \"a\": [\n    1\n  ],\n  \"b\": \"\\n\"\n}\n")},
		{CustomID: "refused \"quoted\" <é>\u2028", RequestID: "req_3", StatusCode: 400, Body: json.RawMessage(`{"error":{"message":"no"}}`), Error: job.NewError(job.TypeServer, job.CodeInternal, "not shown")},
		{CustomID: "a page", RequestID: "req_4", StatusCode: 502, Body: json.RawMessage("<html>\n\"no\"</html>\n")},
		{CustomID: "not UTF-8", StatusCode: 500, Body: json.RawMessage("\"a\xffb\"")},
		{CustomID: "no text", StatusCode: 500, Body: json.RawMessage("\xff\x00")},
		{CustomID: "no body", StatusCode: 204},
		{CustomID: "expired", RequestID: "req_8", Error: job.NewError(job.TypeInvalidRequest, job.CodeBatchExpired, "The window closed\nbefore its turn.")},
		{CustomID: "no code", Error: &job.Error{Message: "x"}},
		{CustomID: "nothing"},
	} {
		o.ID = batch.OutputID(batchID, int64(i+1))
		from := len(all)
		all = batch.AppendOutput(all, &o)
		line := all[from:]
		if !json.Valid(line) || !utf8.Valid(line) || bytes.Count(line, []byte("\n")) != 1 || line[len(line)-1] != '\n' {
			t.Errorf("not one line of JSON: %q", line)
		}
		if want := o.StatusCode == 200 || o.StatusCode == 204; o.Good() != want {
			t.Errorf("%s: %v", o.CustomID, o.Good())
		}
	}
	golden(t, "output.jsonl", all)
	var ids []string
	err := batch.OutputIDs(t.Context(), bytes.NewReader(all), func(id string) error {
		ids = append(ids, id)
		return nil
	})
	if err != nil || len(ids) != 10 || ids[2] != "refused \"quoted\" <é>\u2028" {
		t.Fatal(ids, err)
	}
}

func TestOutputOfAnEnd(t *testing.T) {
	t.Parallel()
	failed := job.NewError(job.TypeServer, job.CodeRunTimeout, "It took too long.")
	stopped := job.NewError(job.TypeServer, job.CodeCancelled, "It was stopped.")
	j := &job.Job{ID: "job_1", Group: batchID, Line: 7, CustomID: "c"}
	for name, c := range map[string]struct {
		o         job.Outcome
		cancelled bool
		want      batch.Output
	}{
		"good":                       {job.Outcome{State: job.Completed, StatusCode: 200}, false, batch.Output{StatusCode: 200, Body: json.RawMessage("{}")}},
		"refused by the engine":      {job.Outcome{State: job.Failed, StatusCode: 400, Error: failed}, true, batch.Output{StatusCode: 400, Body: json.RawMessage("{}")}},
		"no answer":                  {job.Outcome{State: job.Failed, Error: failed}, true, batch.Output{Error: failed}},
		"an answer that does not do": {job.Outcome{State: job.Failed, StatusCode: 200, Error: failed}, false, batch.Output{Error: failed}},
		"expired":                    {job.Outcome{State: job.Expired, StatusCode: 500, Error: stopped}, false, batch.Output{Error: job.NewError(job.TypeServer, job.CodeBatchExpired, "It was stopped.")}},
		"cancelled with its batch":   {job.Outcome{State: job.Cancelled, Error: stopped}, true, batch.Output{Error: job.NewError(job.TypeServer, job.CodeBatchCancelled, "It was stopped.")}},
		"cancelled alone":            {job.Outcome{State: job.Cancelled, Error: stopped}, false, batch.Output{Error: stopped}},
		"without a reason":           {job.Outcome{State: job.Failed}, false, batch.Output{Error: job.NewError(job.TypeServer, job.CodeInternal, "The request ended as failed.")}},
	} {
		body := json.RawMessage("{}")
		if c.o.StatusCode == 0 {
			body = nil
		}
		c.want.ID, c.want.CustomID, c.want.RequestID = batch.OutputID(batchID, 7), "c", "job_1"
		if diff := cmp.Diff(c.want, batch.OutputOf(j, &c.o, body, c.cancelled)); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}

func TestIDsOfOutputs(t *testing.T) {
	t.Parallel()
	a, b, c := batch.OutputID(batchID, 1), batch.OutputID(batchID, 2), batch.OutputID(strings.Replace(batchID, "aa", "ab", 1), 1)
	if a == b || a == c || a != batch.OutputID(batchID, 1) || !strings.HasPrefix(a, "batch_req_") || len(a) != len("batch_req_")+36 {
		t.Fatal(a, b, c)
	}
}

// An output whose input was lost has no name, and is none to retry.
func TestOutputsWithoutANameAreSkipped(t *testing.T) {
	t.Parallel()
	var file []byte
	for _, id := range []string{"", "a", "", "b"} {
		file = batch.AppendOutput(file, &batch.Output{CustomID: id, StatusCode: 500})
	}
	var ids []string
	err := batch.OutputIDs(t.Context(), bytes.NewReader(file), func(id string) error {
		ids = append(ids, id)
		return nil
	})
	if diff := cmp.Diff([]string{"a", "b"}, ids); err != nil || diff != "" {
		t.Fatal(err, diff)
	}
}

func FuzzOutput(f *testing.F) {
	f.Add("a", "r", 200, []byte("{\n}"))
	f.Add("\xff", "", 500, []byte("\xff"))
	f.Fuzz(func(t *testing.T, id, request string, status int, body []byte) {
		line := batch.AppendOutput(nil, &batch.Output{ID: "x", CustomID: id, RequestID: request, StatusCode: status, Body: body})
		if !json.Valid(line) || !utf8.Valid(line) || bytes.Count(line, []byte("\n")) != 1 || bytes.ContainsRune(line, '\r') {
			t.Fatalf("not one line of JSON: %q", line)
		}
		if status == 0 || !json.Valid(body) || !utf8.Valid(body) {
			return
		}
		var o struct {
			Response struct {
				Body json.RawMessage
			}
		}
		if err := json.Unmarshal(line, &o); err != nil {
			t.Fatal(err)
		}
		want := bytes.Map(func(r rune) rune {
			if r == '\n' || r == '\r' {
				return ' '
			}
			return r
		}, bytes.TrimSpace(body))
		if !bytes.Equal(o.Response.Body, want) {
			t.Fatalf("%q became %q", body, o.Response.Body)
		}
	})
}

func TestSelectKeepsTheBytes(t *testing.T) {
	t.Parallel()
	odd := ` {"body":{"seed":9007199254740993,"x":1,"x":2}, "custom_id":"\u0062","method":"POST"} `
	file := "\ufeff" + chat("a") + "\r\n\n" + odd + "\nnot JSON\n{}\n" + strings.Repeat("x", 5000) + "\n" + chat("c")
	var out bytes.Buffer
	n, err := batch.Select(t.Context(), &out, strings.NewReader(file), 4096, func(id string) bool { return slices.Contains([]string{"a", "b"}, id) })
	if diff := cmp.Diff(chat("a")+"\n"+strings.TrimSpace(odd)+"\n", out.String()); n != 2 || err != nil || diff != "" {
		t.Fatal(n, err, diff)
	}
	broken := errors.New("broken")
	if _, err := batch.Select(t.Context(), failing{broken}, strings.NewReader(file), 4096, func(string) bool { return true }); !errors.Is(err, broken) {
		t.Fatal(err)
	}
	for _, bad := range []string{"x", "{}", `{"custom_id":1}`, `{"custom_id":" "}`} {
		if err := batch.OutputIDs(t.Context(), strings.NewReader(bad), func(string) error { return nil }); err == nil {
			t.Errorf("%q has an id", bad)
		}
	}
}

type failing struct{ err error }

func (f failing) Write([]byte) (int, error) { return 0, f.err }

func BenchmarkAppendOutput(b *testing.B) {
	o := &batch.Output{ID: batch.OutputID(batchID, 1), CustomID: "request-1", RequestID: "req_1", StatusCode: 200, Body: json.RawMessage(`{"choices":[{"message":{"content":"` + strings.Repeat("lorem ipsum ", 80) + `"}}]}`)}
	var line []byte
	b.ReportAllocs()
	for b.Loop() {
		line = batch.AppendOutput(line[:0], o)
	}
	b.SetBytes(int64(len(line)))
}
