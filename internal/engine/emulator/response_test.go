package emulator_test

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"github.com/millrace/millrace/internal/engine/emulator"
	"github.com/millrace/millrace/internal/engine/emulator/emulatortest"
)

const response = "/v1/responses"

// object is what tests look at in a response.
type object struct {
	Object, Status string
	Output         []struct {
		Type, Status string
		Content      []struct{ Type, Text string }
	}
	Usage struct {
		Input  int `json:"input_tokens"`
		Output int `json:"output_tokens"`
		Total  int `json:"total_tokens"`
	}
}

func TestAResponseStreamedIsTheWholeOne(t *testing.T) {
	t.Parallel()
	s := emulatortest.Start(t, emulator.Config{Responses: true})
	for _, c := range []struct{ body, status string }{
		{`{"input":"Why? [[emulator:tokens=7]]","instructions":"Be brief.","store":false}`, "completed"},
		{`{"input":[{"role":"user","content":[{"type":"input_text","text":"Why? [[emulator:tokens=7]]"}]},{"type":"function_call_output","output":"1"}],"max_output_tokens":3}`, "incomplete"},
	} {
		status, body := ask(t, s, response, c.body)
		var whole object
		if err := json.Unmarshal([]byte(body), &whole); err != nil || status != 200 {
			t.Fatalf("%d %s: %v", status, body, err)
		}
		if whole.Object != "response" || whole.Status != c.status || len(whole.Output) != 1 || len(whole.Output[0].Content) != 1 || whole.Output[0].Content[0].Text == "" ||
			whole.Usage.Total != whole.Usage.Input+whole.Usage.Output || whole.Usage.Input == 0 {
			t.Errorf("%s is %s", c.body, body)
		}
		_, stream := ask(t, s, response, withField(c.body, `"stream":true`))
		var text, last string
		number := 0
		for _, event := range strings.Split(strings.TrimSuffix(stream, "\n\n"), "\n\n") {
			name, data, _ := strings.Cut(event, "\n")
			var e struct {
				Type, Delta string
				Sequence    int `json:"sequence_number"`
				Response    json.RawMessage
			}
			if err := json.Unmarshal([]byte(strings.TrimPrefix(data, "data: ")), &e); err != nil || "event: "+e.Type != name || e.Sequence != number {
				t.Fatalf("event %d is %s: %v", number, event, err)
			}
			number++
			text += e.Delta
			last = e.Type
			if e.Type == "response."+c.status {
				var streamed object
				if err := json.Unmarshal(e.Response, &streamed); err != nil || streamed.Usage != whole.Usage || streamed.Output[0].Content[0].Text != whole.Output[0].Content[0].Text {
					t.Errorf("streamed %s: %v", e.Response, err)
				}
			}
		}
		if text != whole.Output[0].Content[0].Text || last != "response."+c.status {
			t.Errorf("the deltas say %q, the last event is %s", text, last)
		}
	}
}

func TestResponsesThatFail(t *testing.T) {
	t.Parallel()
	s := emulatortest.Start(t, emulator.Config{Responses: true})
	for body, want := range map[string]int{`{}`: 400, `{"input":[]}`: 400, `{"input":7}`: 400, `{"input":"x","max_output_tokens":0}`: 400, `{"input":"x","previous_response_id":"resp_1"}`: 404} {
		if status, answer := ask(t, s, response, body); status != want || !bytes.Contains([]byte(answer), []byte(`"error"`)) {
			t.Errorf("%s: %d %s", body, status, answer)
		}
	}
	if _, stream := ask(t, s, response, `{"input":"[[emulator:error-after=2]]","stream":true}`); !strings.Contains(stream, "event: error\ndata: {\"type\":\"error\"") || strings.Contains(stream, "completed") {
		t.Errorf("the stream that fails is %s", stream)
	}
	if status, _ := ask(t, emulatortest.Start(t, emulator.Config{}), response, `{"input":"x"}`); status != 404 {
		t.Errorf("without the route: %d", status)
	}
}
