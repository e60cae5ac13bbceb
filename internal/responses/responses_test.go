package responses_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/responses"
)

var update = flag.Bool("update", false, "write the golden files anew")

// golden compares got with a file of testdata.
func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, got, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("%s (-want +got):\n%s", name, diff)
	}
}

const (
	jobID = job.ID("job_0123456789abcdefghijklmnopqrstuv0000")
	now   = 1_700_000_009
)

func frame(t *testing.T, request string) responses.Frame {
	t.Helper()
	o, err := job.ParseObject([]byte(request))
	if err != nil {
		t.Fatal(err)
	}
	return responses.FrameOf(&job.Job{ID: jobID, Created: 1_700_000_000_500}, o)
}

func TestIDsOfResponsesAreThoseOfJobs(t *testing.T) {
	t.Parallel()
	id := responses.ID(jobID)
	if id != "resp_0123456789abcdefghijklmnopqrstuv0000" {
		t.Errorf("the id is %s", id)
	}
	if back, err := responses.JobID(id); err != nil || back != jobID {
		t.Errorf("back it is %s, %v", back, err)
	}
	for _, wrong := range []string{"", "resp_", "resp_x", string(jobID), "resp_" + string(jobID), id + "0", "resp_0123456789ABCDEFghijklmnopqrstuv0000"} {
		if back, err := responses.JobID(wrong); err == nil {
			t.Errorf("%q is the job %s", wrong, back)
		}
	}
}

func TestRequestsBecomeChats(t *testing.T) {
	t.Parallel()
	for reason, c := range map[string]struct{ request, want string }{
		"a text": {`{"model":"m","input":"Hi"}`, `{"model":"m","messages":[{"role":"user","content":"Hi"}]}`},
		"instructions go first": {
			`{"model":"m","input":"<b>&amp;","instructions":"Be brief."}`, `{"model":"m","messages":[{"role":"system","content":"Be brief."},{"role":"user","content":"<b>&amp;"}]}`,
		},
		"messages, with and without a type": {
			`{"model":"m","input":[{"role":"user","content":"Hi"},{"type":"message","role":"assistant","id":"msg_1","status":"completed","content":[{"type":"output_text","text":"Hello","annotations":[]}]},{"role":"user","content":[{"type":"input_text","text":"a"},{"type":"input_text","text":"b"}]}]}`,
			`{"model":"m","messages":[{"role":"user","content":"Hi"},{"role":"assistant","content":"Hello"},{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}]}`,
		},
		"one system message, as templates want it": {
			`{"model":"m","instructions":"A","input":[{"role":"developer","content":"B"},{"role":"user","content":"C"},{"role":"system","content":"D"}]}`,
			`{"model":"m","messages":[{"role":"system","content":"A\n\nB"},{"role":"user","content":"C"},{"role":"system","content":"D"}]}`,
		},
		"reasoning of earlier answers is left out": {
			`{"model":"m","input":[{"role":"user","content":"A"},{"type":"reasoning","id":"rs_1","summary":[]},{"role":"user","content":"B"}]}`,
			`{"model":"m","messages":[{"role":"user","content":"A"},{"role":"user","content":"B"}]}`,
		},
		"limits, sampling and what only engines know": {
			`{"model":"m","input":"Hi","max_output_tokens":7,"temperature":0.5,"top_p":1,"user":"u","seed":9007199254740993,"top_k":2,"stop":["x"],"stream":true,"stream_options":{"include_obfuscation":false},"background":true,"store":true,"metadata":{"a":"b"}}`,
			`{"model":"m","messages":[{"role":"user","content":"Hi"}],"max_tokens":7,"temperature":0.5,"top_p":1,"user":"u","seed":9007199254740993,"top_k":2,"stop":["x"]}`,
		},
		"a schema": {
			`{"model":"m","input":"Hi","text":{"verbosity":"medium","format":{"type":"json_schema","name":"n","strict":true,"schema":{"type":"object"}}}}`,
			`{"model":"m","messages":[{"role":"user","content":"Hi"}],"response_format":{"type":"json_schema","json_schema":{"name":"n","strict":true,"schema":{"type":"object"}}}}`,
		},
		"JSON":                       {`{"model":"m","input":"Hi","text":{"format":{"type":"json_object"}}}`, `{"model":"m","messages":[{"role":"user","content":"Hi"}],"response_format":{"type":"json_object"}}`},
		"plain text":                 {`{"model":"m","input":"Hi","text":{"format":{"type":"text"}}}`, `{"model":"m","messages":[{"role":"user","content":"Hi"}]}`},
		"effort":                     {`{"model":"m","input":"Hi","reasoning":{"effort":"low","summary":null}}`, `{"model":"m","messages":[{"role":"user","content":"Hi"}],"reasoning_effort":"low"}`},
		"nothing asked":              {`{"model":"m","input":"Hi","tools":[ ],"tool_choice":"auto","parallel_tool_calls":false,"include":[],"truncation":"disabled","service_tier":"auto","top_logprobs":0,"previous_response_id":null,"prompt":null}`, `{"model":"m","messages":[{"role":"user","content":"Hi"}]}`},
		"the last of a repeated key": {`{"model":"m","input":"Hi","temperature":1,"temperature":0}`, `{"model":"m","messages":[{"role":"user","content":"Hi"}],"temperature":0}`},
	} {
		r, e := responses.Parse([]byte(c.request))
		if e != nil {
			t.Errorf("%s: %v", reason, e)
			continue
		}
		if diff := cmp.Diff(c.want, string(r.Chat())); diff != "" {
			t.Errorf("%s (-want +got):\n%s", reason, diff)
		}
	}
}

func TestWhatNoChatCanDoIsRefusedByName(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		body  string
		code  job.Code
		param string
	}{
		{`[]`, job.CodeInvalidType, ""},
		{`{"input":`, job.CodeInvalidJSON, ""},
		{`{"model":"m"}`, job.CodeMissingParameter, "input"},
		{`{"input":null}`, job.CodeMissingParameter, "input"},
		{`{"input":{}}`, job.CodeInvalidType, "input"},
		{`{"input":[]}`, job.CodeInvalidValue, "input"},
		{`{"input":[{"type":"reasoning"}]}`, job.CodeInvalidValue, "input"},
		{`{"input":["Hi"]}`, job.CodeInvalidType, "input[0]"},
		{`{"input":[{"content":"Hi"}]}`, job.CodeMissingParameter, "input[0].role"},
		{`{"input":[{"role":"tool","content":"Hi"}]}`, job.CodeInvalidValue, "input[0].role"},
		{`{"input":[{"role":"user"}]}`, job.CodeMissingParameter, "input[0].content"},
		{`{"input":[{"role":"user","content":1}]}`, job.CodeInvalidType, "input[0].content"},
		{`{"input":[{"role":"user","content":[]}]}`, job.CodeInvalidValue, "input[0].content"},
		{`{"input":[{"role":"user","content":["Hi"]}]}`, job.CodeInvalidType, "input[0].content[0]"},
		{`{"input":[{"role":"user","content":[{"type":"input_text"}]}]}`, job.CodeMissingParameter, "input[0].content[0].text"},
		{`{"input":[{"role":"user","content":[{"type":"input_text","text":"Hi"},{"type":"input_image","image_url":"data:"}]}]}`, job.CodeUnsupportedParameter, "input[0].content[1].type"},
		{`{"input":[{"role":"user","content":[{"type":"input_file","file_id":"f"}]}]}`, job.CodeUnsupportedParameter, "input[0].content[0].type"},
		{`{"input":[{"type":"function_call_output","call_id":"c","output":"1"}]}`, job.CodeUnsupportedParameter, "input[0].type"},
		{`{"input":[{"type":"item_reference","id":"msg_1"}]}`, job.CodeUnsupportedParameter, "input[0].type"},
		{`{"input":"Hi","previous_response_id":"resp_1"}`, job.CodeUnsupportedParameter, "previous_response_id"},
		{`{"input":"Hi","conversation":"conv_1"}`, job.CodeUnsupportedParameter, "conversation"},
		{`{"input":"Hi","prompt":{"id":"p"}}`, job.CodeUnsupportedParameter, "prompt"},
		{`{"input":"Hi","tools":[{"type":"web_search"}]}`, job.CodeUnsupportedParameter, "tools"},
		{`{"input":"Hi","tool_choice":"required"}`, job.CodeUnsupportedParameter, "tool_choice"},
		{`{"input":"Hi","include":["message.output_text.logprobs"]}`, job.CodeUnsupportedParameter, "include"},
		{`{"input":"Hi","top_logprobs":2}`, job.CodeUnsupportedParameter, "top_logprobs"},
		{`{"input":"Hi","truncation":"auto"}`, job.CodeUnsupportedParameter, "truncation"},
		{`{"input":"Hi","service_tier":"flex"}`, job.CodeUnsupportedParameter, "service_tier"},
		{`{"input":"Hi","max_tool_calls":1}`, job.CodeUnsupportedParameter, "max_tool_calls"},
		{`{"input":"Hi","n":2}`, job.CodeUnsupportedParameter, "n"},
		{`{"input":"Hi","reasoning":{"summary":"auto"}}`, job.CodeUnsupportedParameter, "reasoning.summary"},
		{`{"input":"Hi","reasoning":{"effort":1}}`, job.CodeInvalidType, "reasoning.effort"},
		{`{"input":"Hi","reasoning":"low"}`, job.CodeInvalidType, "reasoning"},
		{`{"input":"Hi","text":{"verbosity":"low"}}`, job.CodeUnsupportedParameter, "text.verbosity"},
		{`{"input":"Hi","text":{"format":{"type":"grammar"}}}`, job.CodeUnsupportedParameter, "text.format.type"},
		{`{"input":"Hi","text":{"format":{"type":"json_schema","name":"n"}}}`, job.CodeMissingParameter, "text.format.schema"},
		{`{"input":"Hi","text":{"format":"json"}}`, job.CodeInvalidType, "text.format"},
		{`{"input":"Hi","text":[]}`, job.CodeInvalidType, "text"},
		{`{"input":"Hi","instructions":["Be brief."]}`, job.CodeInvalidType, "instructions"},
		{`{"input":"Hi","max_output_tokens":"7"}`, job.CodeInvalidType, "max_output_tokens"},
		{`{"input":"Hi","max_output_tokens":0}`, job.CodeInvalidValue, "max_output_tokens"},
		{`{"input":"Hi","temperature":"hot"}`, job.CodeInvalidType, "temperature"},
		{`{"input":"Hi","background":"yes"}`, job.CodeInvalidType, "background"},
		{`{"input":"Hi","stream":1}`, job.CodeInvalidType, "stream"},
		{`{"input":"Hi","background":true,"store":false}`, job.CodeInvalidValue, "store"},
	} {
		_, e := responses.Parse([]byte(c.body))
		if e == nil {
			t.Errorf("%s is taken", c.body)
			continue
		}
		param := ""
		if e.Param != nil {
			param = *e.Param
		}
		if e.CodeOf() != c.code || param != c.param || e.Type != job.TypeInvalidRequest || e.Message == "" {
			t.Errorf("%s: code %s, param %q, %q", c.body, e.CodeOf(), param, e.Message)
		}
	}
}

func TestNativeRequestsLoseOnlyWhatMillraceOwns(t *testing.T) {
	t.Parallel()
	got, err := responses.Native([]byte(`{"model":"m", "background":true,"input":"<Hi>","tools":[{"type":"x"}],"stream_options":{"include_obfuscation":true},"stream":true,"seed":9007199254740993}`), false)
	if err != nil {
		t.Fatal(err)
	}
	if want := `{"model":"m", "input":"<Hi>","tools":[{"type":"x"}],"stream":false,"seed":9007199254740993,"store":false}`; string(got) != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

const asking = `{"model":"m","input":"Hi","instructions":"Be brief.","max_output_tokens":9,"metadata":{"a":"<b>"},"background":true,"text":{"format":{"type":"json_object"}},"user":"u"}`

func TestAnswersBecomeResponses(t *testing.T) {
	t.Parallel()
	r, e := responses.Parse([]byte(asking))
	if e != nil {
		t.Fatal(e)
	}
	usage := &job.Usage{PromptTokens: 5, CompletionTokens: 7, TotalTokens: 12, CachedTokens: 4, ReasoningTokens: 2}
	for name, chat := range map[string]string{
		"answer.json":           `{"choices":[{"index":0,"message":{"role":"assistant","content":"A <mill> & a race.","refusal":null,"tool_calls":[]},"finish_reason":"stop"}]}`,
		"answer-cut.json":       `{"choices":[{"index":0,"message":{"role":"assistant","content":"A mill"},"finish_reason":"length"}]}`,
		"answer-reasoning.json": `{"choices":[{"index":0,"message":{"role":"assistant","content":"42","reasoning_content":"Let me think.","reasoning":"Let me think."},"finish_reason":"stop"}]}`,
		"answer-empty.json":     `{"choices":[{"index":0,"message":{"role":"assistant","content":null},"finish_reason":"stop"}]}`,
	} {
		o, err := r.Answer(frame(t, asking), []byte(chat), usage, now)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		golden(t, name, append(responses.Encode(o), '\n'))
	}
	for _, wrong := range []string{`{}`, `{"choices":[]}`, `{"choices":{}}`, `{"choices":[{"message":{"content":7}}]}`} {
		if o, err := r.Answer(frame(t, asking), []byte(wrong), nil, now); err == nil {
			t.Errorf("%s is the response %s", wrong, responses.Encode(o))
		}
	}
}

func TestChunksBecomeEvents(t *testing.T) {
	t.Parallel()
	r, e := responses.Parse([]byte(asking))
	if e != nil {
		t.Fatal(e)
	}
	usage := &job.Usage{PromptTokens: 5, CompletionTokens: 2, TotalTokens: 7}
	for name, chunks := range map[string][]string{
		"stream.txt": {
			`{"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}`, `{"choices":[{"index":0,"delta":{"content":"A <mill>"}}]}`,
			`{"choices":[{"index":0,"delta":{"content":" & a race."},"finish_reason":"stop"}]}`, `{"choices":[],"usage":{}}`,
		},
		"stream-reasoning.txt": {
			`{"choices":[{"index":0,"delta":{"reasoning_content":"Let me"}}]}`, `{"choices":[{"index":0,"delta":{"reasoning_content":" think."}}]}`, `{"choices":[{"index":0,"delta":{"content":"42"}}]}`,
			`{"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}`,
		},
		"stream-empty.txt": {`{"choices":[{"index":0,"delta":{"role":"assistant"},"finish_reason":"stop"}]}`},
	} {
		s := r.Stream(frame(t, asking))
		var out bytes.Buffer
		write := func(events []responses.Event) {
			for _, e := range events {
				if kind := responses.TypeOf(e.Data); kind != e.Type {
					t.Errorf("%s: the event %s says that it is %s", name, e.Type, kind)
				}
				out.WriteString(e.Type + " ")
				out.Write(e.Data)
				out.WriteByte('\n')
			}
		}
		for _, chunk := range chunks {
			events, err := s.Add([]byte(chunk))
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			write(events)
		}
		events, object := s.End(usage, now)
		write(events)
		golden(t, name, out.Bytes())
		sum, err := responses.Summarize(object)
		if err != nil || sum.Usage == nil || *sum.Usage != *usage {
			t.Errorf("%s: the object is %s, %v", name, object, err)
		}
	}
}

// A response looks the same however it came.
func TestStreamedAndWholeAnswersAreAlike(t *testing.T) {
	t.Parallel()
	r, e := responses.Parse([]byte(asking))
	if e != nil {
		t.Fatal(e)
	}
	for _, finish := range []string{"stop", "length", "content_filter"} {
		whole, err := r.Answer(frame(t, asking), []byte(`{"choices":[{"message":{"content":"ab","reasoning":"r"},"finish_reason":"`+finish+`"}]}`), nil, now)
		if err != nil {
			t.Fatal(err)
		}
		s := r.Stream(frame(t, asking))
		for _, chunk := range []string{`{"reasoning":"r"}`, `{"content":"a"}`, `{"content":"b"}`} {
			if _, err := s.Add([]byte(`{"choices":[{"delta":` + chunk + `}]}`)); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := s.Add([]byte(`{"choices":[{"delta":{},"finish_reason":"` + finish + `"}]}`)); err != nil {
			t.Fatal(err)
		}
		_, streamed := s.End(nil, now)
		if diff := cmp.Diff(string(responses.Encode(whole)), string(streamed)); diff != "" {
			t.Errorf("%s (-whole +streamed):\n%s", finish, diff)
		}
	}
}

func TestNativeEventsAreOwned(t *testing.T) {
	t.Parallel()
	f := frame(t, asking)
	s := f.NativeStream()
	step, err := s.Add([]byte(`{"type":"response.created","response":{"object":"response","id":"resp_x","created_at":1,"background":false,"metadata":null,"vendor":[1.0]},"sequence_number":0}`))
	want := `{"type":"response.created","response":{"object":"response","id":"` + f.ID + `","created_at":1700000000,"background":true,"metadata":{"a":"<b>"},"vendor":[1.0],"store":true},"sequence_number":0}`
	if err != nil || string(step.Event.Data) != want || step.Event.Type != responses.EventCreated || step.Object != nil || step.Token {
		t.Errorf("created: %v\n%s\nwant\n%s", err, step.Event.Data, want)
	}
	delta := `{"type":"response.output_text.delta","delta":"x"}`
	if step, err = s.Add([]byte(delta)); err != nil || !step.Token || string(step.Event.Data) != delta {
		t.Errorf("delta: %v %+v", err, step)
	}
	step, err = s.Add([]byte(`{"type":"response.incomplete","response":{"object":"response","id":"resp_x","status":"incomplete","usage":{"input_tokens":1,"output_tokens":2,"total_tokens":3}}}`))
	if err != nil || step.Object == nil || step.Error != nil || !strings.Contains(string(step.Object), f.ID) {
		t.Errorf("incomplete: %v %+v", err, step)
	}
	for _, failing := range []string{
		`{"type":"error","code":"server_error","message":"out of memory"}`,
		`{"type":"response.failed","response":{"object":"response","status":"failed","error":{"code":"server_error","message":"out of memory"}}}`,
	} {
		if step, err = s.Add([]byte(failing)); err != nil || step.Error == nil || step.Error.Message != "out of memory" {
			t.Errorf("%s: %v %+v", failing, err, step)
		}
	}
	for _, wrong := range []string{`[]`, `{`, `{}`, `{"type":1}`, `{"type":"a\nb"}`, `{"type":"response.completed","response":[]}`, `{"type":"response.completed","response":{"object":"chat"}}`} {
		if step, err := s.Add([]byte(wrong)); err == nil {
			t.Errorf("%s is %+v", wrong, step)
		}
	}
}

func TestObjectsOfWhatHasNotEndedRepeatTheRequest(t *testing.T) {
	t.Parallel()
	o, err := job.ParseObject([]byte(asking))
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "queued.json", append(responses.Encode(responses.NewObject(frame(t, asking), responses.Queued, o)), '\n'))
	bare := responses.NewObject(responses.Frame{ID: "resp_1"}, responses.Failed, nil)
	if !json.Valid(responses.Encode(bare)) {
		t.Error("without a request it is no JSON")
	}
}

func TestAnAnswerInOnePieceHasABeginningAndAnEnd(t *testing.T) {
	t.Parallel()
	events, err := responses.Whole([]byte(`{"id":"resp_1","object":"response","status":"completed","output":[{"type":"message"}],"usage":{"input_tokens":1}}`), responses.Completed)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		`{"type":"response.created","sequence_number":0,"response":{"id":"resp_1","object":"response","status":"in_progress","output":[],"usage":null,"completed_at":null,"incomplete_details":null}}`,
		`{"type":"response.completed","sequence_number":1,"response":{"id":"resp_1","object":"response","status":"completed","output":[{"type":"message"}],"usage":{"input_tokens":1}}}`,
	}
	for i, e := range events {
		if string(e.Data) != want[i] {
			t.Errorf("event %d is\n%s\nwant\n%s", i, e.Data, want[i])
		}
	}
}

// Whatever the request, it is refused with a reason, or becomes a chat that is JSON.
func FuzzParse(f *testing.F) {
	for _, seed := range []string{
		asking,
		`{"model":"m","input":[{"role":"user","content":[{"type":"input_text","text":"a"},{"type":"input_image"}]},{"type":"reasoning"},{"role":"developer","content":"x"}],"reasoning":{"effort":"low"}}`,
		`{"input":"Hi","tools":[{}],"text":{"format":{"type":"json_schema","schema":{},"type":"json_schema"}},"input":null}`,
		`{"input":[ {"role":"system","content":"\ud800"} , null ],"temperature":1e400}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		r, e := responses.Parse(body)
		if e != nil {
			if e.Message == "" || e.CodeOf() == "" {
				t.Errorf("refused without a reason: %+v", e)
			}
			return
		}
		o, err := job.ParseObject(body)
		if err != nil {
			t.Fatal(err)
		}
		if o.Get("model") == nil { // which the caller has checked
			return
		}
		if chat := r.Chat(); !json.Valid(chat) {
			t.Errorf("the chat is %s", chat)
		}
		if object := responses.Encode(responses.NewObject(responses.FrameOf(&job.Job{ID: jobID}, o), responses.Queued, o)); !json.Valid(object) {
			t.Errorf("the object is %s", object)
		}
	})
}
