package batch_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/batch"
	"github.com/millrace/millrace/internal/job"
)

const chatBody = `{"model":"m","messages":[{"role":"user","content":"hi"}]}`

// chat is a good line of a chat batch.
func chat(id string) string { return chatWith(id, chatBody) }

func chatWith(id, body string) string {
	return `{"custom_id":"` + id + `","method":"POST","url":"/v1/chat/completions","body":` + body + `}`
}

func rules() batch.Rules {
	return batch.Rules{
		Endpoint: job.ChatCompletions, MaxLine: 4096, MaxLines: 100, MaxErrors: 1000,
		Model: func(m job.Model) *job.Error {
			if strings.HasPrefix(string(m), "no-") {
				return job.NewError(job.TypeInvalidRequest, job.CodeModelNotFound, fmt.Sprintf("The model %q does not exist.", m))
			}
			return nil
		},
	}
}

// scanned is what a scan gave; good lines by their numbers.
type scanned struct {
	*batch.Summary
	Good []batch.Line
}

func scanReader(t testing.TB, r io.Reader, rules batch.Rules) scanned {
	t.Helper()
	var good []batch.Line
	sum, err := batch.Scan(t.Context(), r, rules, func(l *batch.Line) error {
		one := *l
		one.Body = bytes.Clone(l.Body)
		good = append(good, one)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return scanned{sum, good}
}

func scan(t testing.TB, file string, rules batch.Rules) scanned {
	t.Helper()
	return scanReader(t, strings.NewReader(file), rules)
}

// brief is an error in short: line code param.
func brief(e job.LineError) string {
	line, param := "-", "-"
	if e.Line != nil {
		line = strconv.FormatInt(*e.Line, 10)
	}
	if e.Param != nil {
		param = *e.Param
	}
	return line + " " + string(e.Code) + " " + param
}

func briefs(s scanned) []string {
	all := []string{}
	for _, e := range s.Errors {
		all = append(all, brief(e))
	}
	return all
}

func TestEachMistakeHasItsCodeAndParam(t *testing.T) {
	t.Parallel()
	line := func(members ...string) string { return "{" + strings.Join(members, ",") + "}" }
	const (
		id     = `"custom_id":"a"`
		method = `"method":"POST"`
		url    = `"url":"/v1/chat/completions"`
		body   = `"body":` + chatBody
	)
	for name, c := range map[string]struct {
		line, want string
		says       []string
	}{
		"prose":                        {line: "hello there", want: "1 invalid_json_line -", says: []string{"not valid JSON", "byte 1"}},
		"cut JSON":                     {line: `{"custom_id":"a"`, want: "1 invalid_json_line -"},
		"two values":                   {line: chat("a") + chat("b"), want: "1 invalid_json_line -"},
		"an array":                     {line: `[` + chat("a") + `]`, want: "1 invalid_json_line -", says: []string{"not a JSON object"}},
		"a string":                     {line: `"x"`, want: "1 invalid_json_line -"},
		"null":                         {line: `null`, want: "1 invalid_json_line -"},
		"no custom_id":                 {line: line(method, url, body), want: "1 missing_required_parameter custom_id"},
		"no method":                    {line: line(id, url, body), want: "1 missing_required_parameter method"},
		"no url":                       {line: line(id, method, body), want: "1 missing_required_parameter url"},
		"no body":                      {line: line(id, method, url), want: "1 missing_required_parameter body"},
		"an empty object":              {line: "{}", want: "1 missing_required_parameter custom_id"},
		"empty custom_id":              {line: chat(""), want: "1 invalid_value custom_id"},
		"blank custom_id":              {line: chat(" \\t\u00a0"), want: "1 invalid_value custom_id"},
		"custom_id a number":           {line: line(`"custom_id":42`, method, url, body), want: "1 invalid_value custom_id"},
		"custom_id null":               {line: line(`"custom_id":null`, method, url, body), want: "1 invalid_value custom_id"},
		"custom_id too long":           {line: chat(strings.Repeat("x", 513)), want: "1 invalid_value custom_id", says: []string{"513", "512"}},
		"custom_id far too long":       {line: chat(strings.Repeat("\\u0041", 600)), want: "1 invalid_value custom_id", says: []string{"512"}},
		"half a surrogate pair":        {line: chat(`a\ud800`), want: "1 invalid_value custom_id"},
		"half a pair, a text beside":   {line: chat(`\\ufffd\ud800`), want: "1 invalid_value custom_id"},
		"body a string":                {line: line(id, method, url, `"body":"x"`), want: "1 invalid_value body"},
		"body null":                    {line: line(id, method, url, `"body":null`), want: "1 invalid_value body"},
		"another endpoint":             {line: strings.Replace(chat("a"), "/v1/chat/completions", "/v1/embeddings", 1), want: "1 invalid_url url", says: []string{"/v1/embeddings", "/v1/chat/completions"}},
		"an absolute url":              {line: strings.Replace(chat("a"), "/v1/chat/completions", "http://169.254.169.254/latest", 1), want: "1 invalid_url url"},
		"url a number":                 {line: line(id, method, `"url":7`, body), want: "1 invalid_url url"},
		"GET":                          {line: strings.Replace(chat("a"), "POST", "GET", 1), want: "1 invalid_method method", says: []string{`"GET"`}},
		"post in lower case":           {line: strings.Replace(chat("a"), "POST", "post", 1), want: "1 invalid_method method"},
		"stream":                       {line: chatWith("a", `{"stream":true,"model":"m","messages":[{}]}`), want: "1 streaming_unsupported body.stream"},
		"stream as an engine takes it": {line: chatWith("a", `{"stream":1,"model":"m","messages":[{}]}`), want: "1 streaming_unsupported body.stream"},
		"no model":                     {line: chatWith("a", `{"messages":[{}]}`), want: "1 invalid_request body.model"},
		"model empty":                  {line: chatWith("a", `{"model":"","messages":[{}]}`), want: "1 invalid_request body.model"},
		"model a number":               {line: chatWith("a", `{"model":1,"messages":[{}]}`), want: "1 invalid_request body.model"},
		"no messages":                  {line: chatWith("a", `{"model":"m"}`), want: "1 invalid_request body.messages"},
		"messages null":                {line: chatWith("a", `{"model":"m","messages":null}`), want: "1 invalid_request body.messages"},
		"messages empty":               {line: chatWith("a", `{"model":"m","messages":[ ]}`), want: "1 invalid_request body.messages"},
		"messages a string":            {line: chatWith("a", `{"model":"m","messages":"x"}`), want: "1 invalid_request body.messages"},
		"an unknown model":             {line: chatWith("a", `{"model":"no-such-model","messages":[{}]}`), want: "1 model_not_found body.model", says: []string{"no-such-model"}},
		"an unknown model by escapes":  {line: chatWith("a", `{"model":"no\u002dsuch-model","messages":[{}]}`), want: "1 model_not_found body.model", says: []string{"no-such-model"}},
		"too long":                     {line: chatWith("a", `{"model":"m","messages":["`+strings.Repeat("x", 5000)+`"]}`), want: "1 request_too_large body", says: []string{"5099", "4096"}},
		"not UTF-8 in a string":        {line: chatWith("a", "{\"model\":\"m\",\"messages\":[\"\xff\"]}"), want: "1 invalid_encoding -"},
		"not UTF-8 at all":             {line: "\xff\xfe{\x00}\x00", want: "1 invalid_encoding -"},
		"several: the first of them":   {line: line(`"custom_id":"a"`, `"method":"GET"`, `"url":"/x"`, `"body":{"stream":true}`), want: "1 invalid_url url"},
		"several, in the body":         {line: chatWith("a", `{"stream":true,"model":"no-such-model"}`), want: "1 streaming_unsupported body.stream"},
		"an unknown model, no prompt":  {line: chatWith("a", `{"model":"no-such-model"}`), want: "1 invalid_request body.messages"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := scan(t, c.line+"\n"+chat("good")+"\n", rules())
			if diff := cmp.Diff([]string{c.want}, briefs(got)); diff != "" {
				t.Fatal(diff)
			}
			for _, part := range c.says {
				if !strings.Contains(got.Errors[0].Message, part) {
					t.Errorf("the message %q does not say %q", got.Errors[0].Message, part)
				}
			}
			if got.Lines != 2 || len(got.Good) != 1 || got.Good[0].CustomID != "good" || got.Good[0].Number != 2 {
				t.Errorf("the good line is lost: %+v", got)
			}
		})
	}
}

func TestEachEndpointHasItsPrompt(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		endpoint   job.Endpoint
		body, want string
	}{
		"completions":               {job.Completions, `{"model":"m","prompt":"x"}`, ""},
		"completions of tokens":     {job.Completions, `{"model":"m","prompt":[1,2]}`, ""},
		"completions without":       {job.Completions, `{"model":"m","messages":[{}]}`, "1 invalid_request body.prompt"},
		"completions of a number":   {job.Completions, `{"model":"m","prompt":7}`, "1 invalid_request body.prompt"},
		"embeddings":                {job.Embeddings, `{"model":"m","input":["x","y"]}`, ""},
		"embeddings without":        {job.Embeddings, `{"model":"m","prompt":"x"}`, "1 invalid_request body.input"},
		"responses":                 {job.Responses, `{"model":"m","input":"x","background":false,"stream":null}`, ""},
		"responses without":         {job.Responses, `{"model":"m"}`, "1 invalid_request body.input"},
		"responses in background":   {job.Responses, `{"model":"m","input":"x","background":true}`, "1 invalid_request body.background"},
		"responses as a stream":     {job.Responses, `{"model":"m","input":"x","stream":true}`, "1 streaming_unsupported body.stream"},
		"background of other kinds": {job.Completions, `{"model":"m","prompt":"x","background":true}`, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := rules()
			r.Endpoint = c.endpoint
			got := scan(t, `{"custom_id":"a","method":"POST","url":"`+string(c.endpoint)+`","body":`+c.body+`}`, r)
			if diff := cmp.Diff(c.want, strings.Join(briefs(got), "; ")); diff != "" {
				t.Fatal(diff)
			}
		})
	}
}

func TestDuplicatesAreEachNamed(t *testing.T) {
	t.Parallel()
	file := strings.Join([]string{
		chat("a"), chat("b"), "", chat("a"), strings.Replace(chat("c"), "POST", "GET", 1), chat("a"),
		strings.Replace(chat("x"), `"x"`, `"\u0062"`, 1), chat("c"), // b by its escape, and the name of a line that is wrong
	}, "\n")
	got := scan(t, file, rules())
	want := []string{
		"4 duplicate_custom_id custom_id", "5 invalid_method method", "6 duplicate_custom_id custom_id", "7 duplicate_custom_id custom_id", "8 duplicate_custom_id custom_id",
	}
	if diff := cmp.Diff(want, briefs(got)); diff != "" {
		t.Fatal(diff)
	}
	for i, part := range []string{`"a" of line 4`, "", `"a" of line 6`, `"b" of line 7`, `"c" of line 8`} {
		if !strings.Contains(got.Errors[i].Message, part) {
			t.Errorf("the message %q does not say %s", got.Errors[i].Message, part)
		}
	}
	if len(got.Good) != 2 {
		t.Errorf("good lines: %+v", got.Good)
	}
}

func TestLineEndsAndBlankLines(t *testing.T) {
	t.Parallel()
	a, b := chat("a"), chat("b")
	for name, c := range map[string]struct {
		file  string
		lines [2]int64
	}{
		"no final newline":      {a + "\n" + b, [2]int64{1, 2}},
		"one":                   {a + "\n" + b + "\n", [2]int64{1, 2}},
		"two":                   {a + "\n" + b + "\n\n", [2]int64{1, 2}},
		"CRLF":                  {a + "\r\n" + b + "\r\n", [2]int64{1, 2}},
		"CRLF, then the end":    {a + "\r\n" + b + "\r", [2]int64{1, 2}},
		"a blank line between":  {a + "\n \t\n" + b, [2]int64{1, 3}},
		"blank lines before":    {"\n\r\n" + a + "\n" + b, [2]int64{3, 4}},
		"byte order mark":       {"\ufeff" + a + "\n" + b, [2]int64{1, 2}},
		"the mark, then a line": {"\ufeff\n" + a + "\n" + b, [2]int64{2, 3}},
		"space around":          {" " + a + " \n\t" + b + "\t\n", [2]int64{1, 2}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for how, r := range map[string]io.Reader{"whole": strings.NewReader(c.file), "in bytes": iotest.OneByteReader(strings.NewReader(c.file)), "the end with data": iotest.DataErrReader(strings.NewReader(c.file))} {
				got := scanReader(t, r, rules())
				if len(got.Errors) > 0 || got.Lines != 2 || len(got.Good) != 2 || got.Bytes != int64(len(c.file)) {
					t.Fatalf("%s: %+v %v", how, got, briefs(got))
				}
				for i, l := range got.Good {
					if l.Number != c.lines[i] || c.file[l.Offset:l.Offset+l.Length] != []string{a, b}[i] {
						t.Errorf("%s: line %d at %d, %q", how, l.Number, l.Offset, c.file[l.Offset:l.Offset+l.Length])
					}
				}
			}
		})
	}
	got := scan(t, a+"\n\ufeff"+b+"\n", rules())
	if diff := cmp.Diff([]string{"2 invalid_json_line -"}, briefs(got)); diff != "" {
		t.Error("a byte order mark elsewhere: " + diff)
	}
}

func TestNothingButBlanksIsAnEmptyFile(t *testing.T) {
	t.Parallel()
	for name, file := range map[string]string{
		"nothing": "", "newlines": "\n\n\r\n", "space": "  \t ", "the mark": "\ufeff", "the mark and lines": "\ufeff\n \n", "more space than a line may have": strings.Repeat(" ", 1<<20) + "\n" + strings.Repeat("\t", 5000),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := scan(t, file, rules())
			if diff := cmp.Diff([]string{"- empty_file -"}, briefs(got)); diff != "" || got.Lines != 0 {
				t.Fatal(diff, got)
			}
		})
	}
}

func TestLongLines(t *testing.T) {
	t.Parallel()
	long := func(n int) string {
		frame := chatWith("long", `{"model":"m","messages":[""]}`)
		return strings.Replace(frame, `[""]`, `["`+strings.Repeat("x", n-len(frame))+`"]`, 1)
	}
	for _, limit := range []int64{200, 64 << 10, 5 << 20} {
		r := rules()
		r.MaxLine = limit
		for name, c := range map[string]struct {
			size  int64
			end   string
			wrong bool
		}{
			"at the limit": {limit, "\n", false}, "at the limit, with CR": {limit, "\r\n", false}, "one over": {limit + 1, "\n", true}, "one over, with CR": {limit + 1, "\r\n", true},
			"twice": {2*limit + 3, "\r\n", true}, "far over": {3*limit + 1<<20, "\n", true},
		} {
			for _, mark := range []string{"", "\ufeff"} {
				file := mark + long(int(c.size)) + c.end + chat("after") + "\n"
				got := scan(t, file, r)
				wantErrors, wantGood := []string{}, 2
				if c.wrong {
					wantErrors, wantGood = []string{"1 request_too_large body"}, 1
				}
				if diff := cmp.Diff(wantErrors, briefs(got)); diff != "" || len(got.Good) != wantGood {
					t.Fatalf("limit %d, %s: %s, %d good", limit, name, diff, len(got.Good))
				}
				after := got.Good[wantGood-1]
				if after.Number != 2 || file[after.Offset:after.Offset+after.Length] != chat("after") {
					t.Errorf("limit %d, %s: the next line is %+v", limit, name, after)
				}
				for _, size := range []int64{c.size, limit} {
					if c.wrong && !strings.Contains(got.Errors[0].Message, strconv.FormatInt(size, 10)) {
						t.Errorf("limit %d, %s: %q does not name %d", limit, name, got.Errors[0].Message, size)
					}
				}
			}
		}
	}
}

func TestMoreLinesThanAllowed(t *testing.T) {
	t.Parallel()
	var file strings.Builder
	for i := range 101 {
		file.WriteString(chat(strconv.Itoa(i)) + "\n\n")
	}
	got := scan(t, file.String(), rules())
	if diff := cmp.Diff([]string{"- too_many_tasks -"}, briefs(got)); diff != "" || got.Lines != 101 || len(got.Good) != 100 {
		t.Fatal(diff, got.Lines, len(got.Good))
	}
	for _, part := range []string{"101", "100"} {
		if !strings.Contains(got.Errors[0].Message, part) {
			t.Errorf("%q does not name %s", got.Errors[0].Message, part)
		}
	}
	// One line fewer is allowed, and a mistake before the end is told beside the whole file's.
	if got := scan(t, strings.Join(strings.Split(file.String(), "\n\n")[:100], "\n"), rules()); len(got.Errors) != 0 || got.Lines != 100 {
		t.Fatal(got)
	}
	if got := briefs(scan(t, "x\n"+file.String(), rules())); !slices.Equal(got, []string{"- too_many_tasks -", "1 invalid_json_line -"}) {
		t.Fatal(got)
	}
}

func TestInputsOfEmbeddingsCountEach(t *testing.T) {
	t.Parallel()
	r := rules()
	r.Endpoint, r.MaxLines = job.Embeddings, 10
	line := func(id, input string) string {
		return `{"custom_id":"` + id + `","method":"POST","url":"/v1/embeddings","body":{"model":"m","input":` + input + "}}\n"
	}
	// One line, or as many as it has inputs where those are more: 1 + 3 + 1 + 2 + 1 = 8.
	file := line("a", `"one"`) + line("b", `["x", "y,]" ,"z"]`) + line("c", `[1,2,3,4,5]`) + line("d", `[[1,2],[3]]`) + line("e", `[]`)
	if got := scan(t, file+line("f", `["1","2"]`), r); len(got.Errors) != 0 || len(got.Good) != 6 {
		t.Fatal(briefs(got))
	}
	got := scan(t, file+line("f", `["1","2","3"]`), r)
	if diff := cmp.Diff([]string{"- too_many_tasks -"}, briefs(got)); diff != "" {
		t.Fatal(diff)
	}
}

func TestErrorsAreCapped(t *testing.T) {
	t.Parallel()
	r := rules()
	r.MaxErrors, r.MaxLines = 3, 0
	got := scan(t, strings.Repeat("x\n", 3), r)
	if diff := cmp.Diff([]string{"1 invalid_json_line -", "2 invalid_json_line -", "3 invalid_json_line -"}, briefs(got)); diff != "" {
		t.Fatal(diff)
	}
	got = scan(t, strings.Repeat("x\n", 10), r)
	if len(got.Errors) != 4 || got.Errors[3].Line != nil || !strings.Contains(got.Errors[3].Message, "7 more") {
		t.Fatal(got.Errors)
	}
	if got = scan(t, strings.Repeat("x\n", 4), r); got.Errors[3].Message != "1 more line is wrong." {
		t.Error(got.Errors[3].Message)
	}
	r.MaxLines = 5
	got = scan(t, strings.Repeat("x\n", 10), r)
	if diff := cmp.Diff([]string{"- too_many_tasks -", "1 invalid_json_line -", "2 invalid_json_line -", "- invalid_request -"}, briefs(got)); diff != "" || !strings.Contains(got.Errors[3].Message, "3 more") {
		t.Fatal(diff, got.Errors[3].Message)
	}
}

func TestBytesOfABodyAreKept(t *testing.T) {
	t.Parallel()
	body := `{ "model" : "m","seed":9007199254740993,"messages":[{"content":"<b>&\u00e9\ud83d\ude00</b>"}],"temperature":1e400,"x":null,"seed":1 , "stream":false,"z":{"b":1,"a":[ ]}}`
	line := `{ "url":"/v1/chat/completions" ,"body":` + body + `  , "extra":[1,{"custom_id":"no"}], "custom\u005fid":"a\u0041\n", "method":"POST"}`
	got := scan(t, line, rules())
	if len(got.Errors) > 0 || string(got.Good[0].Body) != body || got.Good[0].CustomID != "aA\n" {
		t.Fatalf("%v %+v", briefs(got), got.Good)
	}
	id, again, err := batch.Parse([]byte(line))
	if err != nil || id != "aA\n" || string(again) != body {
		t.Fatal(id, string(again), err)
	}
}

func TestCostsAreThoseOfTheCalls(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		endpoint job.Endpoint
		body     string
	}{
		{job.ChatCompletions, `{"model":"m","messages":[{}],"max_tokens":10,"n":3}`},
		{job.ChatCompletions, `{"model":"m","messages":[{}],"max_tokens":10,"max_completion_tokens":20}`},
		{job.ChatCompletions, `{"model":"m","messages":[{}],"max_tokens":1e3,"max_tokens":"x"}`},
		{job.Responses, `{"model":"m","input":"x","max_output_tokens":77}`},
		{job.Embeddings, `{"model":"m","input":"x"}`},
	} {
		r := rules()
		r.Endpoint = c.endpoint
		got := scan(t, `{"custom_id":"a","method":"POST","url":"`+string(c.endpoint)+`","body":`+c.body+`}`, r)
		o, err := job.ParseObject([]byte(c.body))
		if err != nil || len(got.Good) != 1 {
			t.Fatal(err, briefs(got))
		}
		want := job.EstimateCost(o, []byte(c.body))
		if l := got.Good[0]; l.Cost != want || l.Tokens != (&job.Job{Endpoint: c.endpoint, Cost: want}).Expected() || got.Tokens != l.Tokens {
			t.Errorf("%s: %+v, want %+v", c.body, l, want)
		}
		if c.endpoint == job.Responses && want.Output != 77 {
			t.Errorf("the limit of a response is %d", want.Output)
		}
	}
}

func TestModelsAreAskedOnce(t *testing.T) {
	t.Parallel()
	r, asked := rules(), map[job.Model]int{}
	r.Model = func(m job.Model) *job.Error {
		asked[m]++
		return nil
	}
	scan(t, chat("a")+"\n"+chat("b")+"\n"+strings.Replace(chat("c"), `"m"`, `"\u006d"`, 1)+"\n"+strings.Replace(chat("d"), `"m"`, `"n"`, 1), r)
	if diff := cmp.Diff(map[job.Model]int{"m": 1, "n": 1}, asked); diff != "" {
		t.Fatal(diff)
	}
}

func TestScanEndsWhereItMust(t *testing.T) {
	t.Parallel()
	broken := errors.New("broken")
	for name, r := range map[string]io.Reader{
		"at once": iotest.ErrReader(broken), "in a line": io.MultiReader(strings.NewReader(chat("a")+"\n{"), iotest.ErrReader(broken)), "in a long line": io.MultiReader(strings.NewReader(strings.Repeat("x", 1<<20)), iotest.ErrReader(broken)),
	} {
		if _, err := batch.Scan(t.Context(), r, rules(), func(*batch.Line) error { return nil }); !errors.Is(err, broken) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := batch.Scan(t.Context(), strings.NewReader(chat("a")), rules(), func(*batch.Line) error { return broken }); !errors.Is(err, broken) {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := batch.Scan(ctx, strings.NewReader(chat("a")), rules(), func(*batch.Line) error { return nil }); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestParseRefusesWhatScanDoes(t *testing.T) {
	t.Parallel()
	for _, raw := range []string{"", "x", "[]", "{}", `{"custom_id":"a"}`, `{"custom_id":"a","body":1}`, `{"custom_id":1,"body":{}}`, chat("a")[1:]} {
		if id, body, err := batch.Parse([]byte(raw)); err == nil {
			t.Errorf("%q gave %q and %q", raw, id, body)
		}
	}
}

func TestIDsKnowsWhatIsIn(t *testing.T) {
	t.Parallel()
	var s batch.IDs
	seen, r := map[string]bool{}, rand.New(rand.NewPCG(1, 2))
	for range 200_000 {
		id := strconv.Itoa(r.IntN(100_000))
		if s.Has(id) != seen[id] {
			t.Fatalf("%s: %v", id, seen[id])
		}
		if fresh := s.Add(id); fresh == seen[id] {
			t.Fatalf("%s was in: %v", id, seen[id])
		}
		seen[id] = true
	}
	if s.Len() != len(seen) || s.Has("other") {
		t.Fatal(s.Len(), len(seen))
	}
}

// FuzzScan compares with a plain reading of the same file.
func FuzzScan(f *testing.F) {
	for _, seed := range []string{
		"", "\n", chat("a") + "\n" + chat("a"), "\ufeff" + chat("a") + "\r\n\r\n" + chat("b"), chatWith("a", `{"stream":true}`), "\xff\n{}\n[1]", strings.Repeat(" ", 700) + "\n" + strings.Repeat("x", 700), `{"custom_id":"\ud800"}`,
		chatWith("a", `{"model":"\u006d","messages":[{"a":"}]"}],"n":2,"tools":[]}`), `{"a":{"b":[{},[]]},"custom_id":"x","method":"POST","url":"\/v1\/chat\/completions","body":{}}`,
	} {
		f.Add([]byte(seed), 7)
	}
	f.Fuzz(func(t *testing.T, file []byte, piece int) {
		r := rules()
		r.MaxLine, r.MaxLines = 600, 0
		var good []batch.Line
		sum, err := batch.Scan(t.Context(), &pieces{b: file, n: 1 + piece&1023}, r, func(l *batch.Line) error {
			one := *l
			one.Body = bytes.Clone(l.Body)
			good = append(good, one)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if sum.Bytes != int64(len(file)) {
			t.Fatalf("%d of %d bytes read", sum.Bytes, len(file))
		}
		wantLines, last := int64(0), int64(0)
		for i, l := range bytes.Split(file, []byte("\n")) {
			if i == 0 {
				l = bytes.TrimPrefix(l, []byte("\ufeff"))
			}
			if len(bytes.Trim(l, " \t\r")) > 0 {
				wantLines++
			}
		}
		if sum.Lines != wantLines {
			t.Fatalf("%d lines, want %d", sum.Lines, wantLines)
		}
		bad := int64(0)
		for _, e := range sum.Errors {
			if e.Line == nil {
				continue
			}
			if *e.Line <= last {
				t.Fatalf("line %d comes after line %d", *e.Line, last)
			}
			last = *e.Line
			bad++
		}
		if bad+int64(len(good)) != wantLines {
			t.Fatalf("%d bad and %d good of %d lines", bad, len(good), wantLines)
		}
		ids := map[string]bool{}
		for _, l := range good {
			raw := file[l.Offset : l.Offset+l.Length]
			id, body, err := batch.Parse(raw)
			if err != nil || id != l.CustomID || !bytes.Equal(body, l.Body) || ids[id] {
				t.Fatalf("line %d: %q %q %v, want %q %q", l.Number, id, body, err, l.CustomID, l.Body)
			}
			ids[id] = true
			var v struct {
				CustomID string `json:"custom_id"`
				Body     struct {
					Model string
				} `json:"body"`
			}
			var o *job.Object
			if err := json.Unmarshal(raw, &v); err != nil {
				t.Fatal(err)
			}
			if o, err = job.ParseObject(body); err != nil || l.Cost != job.EstimateCost(o, body) {
				t.Fatalf("line %d: %+v %v", l.Number, l.Cost, err)
			}
		}
	})
}

// FuzzParse never panics, and gives parts of what it was given.
func FuzzParse(f *testing.F) {
	f.Add([]byte(chat("a")))
	f.Add([]byte(` {"custom_id":"\u0061","body": { } } `))
	f.Fuzz(func(t *testing.T, raw []byte) {
		id, body, err := batch.Parse(raw)
		if err != nil {
			return
		}
		if id == "" || len(id) > batch.MaxCustomID || !json.Valid(body) || !bytes.Contains(raw, body) {
			t.Fatalf("%q gave %q and %q", raw, id, body)
		}
	})
}

// pieces reads n bytes at a time.
type pieces struct {
	b []byte
	n int
}

func (p *pieces) Read(b []byte) (int, error) {
	if len(p.b) == 0 {
		return 0, io.EOF
	}
	n := copy(b, p.b[:min(p.n, len(p.b))])
	p.b = p.b[n:]
	return n, nil
}

// benchmarkFile has n lines of about size bytes.
func benchmarkFile(n, size int) []byte {
	var b bytes.Buffer
	for i := range n {
		fmt.Fprintf(&b, `{"custom_id":"request-%d","method":"POST","url":"/v1/chat/completions","body":{"model":"llama-3.1-8b","messages":[{"role":"system","content":"You are helpful."},{"role":"user","content":"%s"}],"max_tokens":100}}`+"\n",
			i, strings.Repeat("lorem ipsum dolor ", size/18))
	}
	return b.Bytes()
}

func BenchmarkScan(b *testing.B) {
	for _, size := range []int{100, 1000, 20_000} {
		b.Run(strconv.Itoa(size), func(b *testing.B) {
			file := benchmarkFile(20_000_000/(size+200), size)
			lines := bytes.Count(file, []byte("\n"))
			r := batch.Rules{Endpoint: job.ChatCompletions, MaxLine: 32 << 20}
			b.SetBytes(int64(len(file)))
			b.ReportAllocs()
			for b.Loop() {
				x := batch.NewIndexer(0)
				sum, err := batch.Scan(b.Context(), bytes.NewReader(file), r, func(l *batch.Line) error { x.Add(l); return nil })
				if err != nil || sum.Lines != int64(lines) || len(sum.Errors) > 0 {
					b.Fatal(err, sum)
				}
			}
			b.ReportMetric(float64(lines)*float64(b.N)/b.Elapsed().Seconds(), "lines/s")
		})
	}
}

func BenchmarkParse(b *testing.B) {
	line := bytes.TrimSpace(benchmarkFile(1, 1000))
	b.SetBytes(int64(len(line)))
	b.ReportAllocs()
	for b.Loop() {
		if _, _, err := batch.Parse(line); err != nil {
			b.Fatal(err)
		}
	}
}
