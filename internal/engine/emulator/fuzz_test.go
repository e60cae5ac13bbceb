package emulator_test

import (
	"testing"

	"github.com/millrace/millrace/internal/engine/emulator"
	"github.com/millrace/millrace/internal/job"
)

// Whatever the body, it is refused or answered in valid JSON.
func FuzzBody(f *testing.F) {
	for i, seed := range []string{
		`{"messages":[{"role":"user","content":"x"}],"n":2,"stop":["a","e"],"logprobs":true,"top_logprobs":2}`,
		`{"messages":[{"role":"user","content":[{"type":"text","text":"x"},{"type":"image_url"}]},{"role":"assistant","content":"Y"}],"continue_final_message":true}`,
		`{"messages":[{"role":"user","content":null}],"tools":[{"function":{"name":"f","parameters":{"properties":{"a":{"type":["string"]},"b":{"enum":[1]}}}}}],"tool_choice":"required"}`,
		`{"prompt":["a",[1,2]],"max_tokens":3,"echo":true,"logprobs":2,"stream":true,"stream_options":{"continuous_usage_stats":true}}`,
		`{"input":"a","encoding_format":"base64","dimensions":3}`,
		`{"messages":[{"role":"user","content":"x"}],"response_format":{"type":"json_schema","json_schema":{"schema":{"type":"array","items":{"const":{}}}}},"max_tokens":2}`,
		`{"instructions":"Be brief.","input":[{"role":"user","content":[{"type":"input_text","text":"x"}]},{"type":"function_call_output","output":"1"}],"max_output_tokens":3,"n":2}`,
	} {
		f.Add(uint8(i), []byte(seed))
		f.Add(uint8(0), []byte(seed))
		f.Add(uint8(1), []byte(seed))
		f.Add(uint8(3), []byte(seed))
	}
	f.Fuzz(func(_ *testing.T, which uint8, raw []byte) {
		endpoints := job.Endpoints()
		emulator.ParseBody(endpoints[int(which)%len(endpoints)], raw)
	})
}
