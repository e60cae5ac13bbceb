package sdk_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestExamplesRun runs the programs that people copy from.
func TestExamplesRun(t *testing.T) {
	t.Parallel()
	if err := nodeReady(); err != nil {
		t.Fatal(err)
	}
	goClient := filepath.Join(t.TempDir(), "openai-go")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-ldflags=-s -w", "-o", goClient, "../../examples/openai-go").CombinedOutput(); err != nil {
		t.Fatalf("building the Go client: %v\n%s", err, out)
	}
	s := start(t, func(c *setup) { c.platform.API.APIKey = "sk-examples" })
	for _, row := range []struct {
		command []string
		want    []string
	}{
		{[]string{goClient}, []string{"model:  other", "answer: ", "stream: ", "vectors: 2 of ", "error:  404 model_not_found"}},
		{[]string{"node", "../../examples/openai-node/main.mjs"}, []string{"model:  other", "answer: ", "stream: ", "vectors: 2 of ", "error:  model_not_found"}},
		{[]string{"bash", "../../examples/curl.sh"}, []string{`"chat.completion"`, "data: [DONE]", `"status":"queued"`, "event: token", "event: done", `"status":"completed"`, `"from":"curl.sh"`}},
	} {
		cmd := exec.CommandContext(soon(t), row.command[0], row.command[1:]...)
		cmd.Env = append(os.Environ(), "OPENAI_BASE_URL="+s.url+"/v1", "OPENAI_API_KEY="+s.key, "MILLRACE_URL="+s.url, "MILLRACE_API_KEY="+s.key)
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Errorf("%v: %v\n%s", row.command, err, out)
			continue
		}
		for _, want := range row.want {
			if !strings.Contains(string(out), want) {
				t.Errorf("%v does not print %q:\n%s", row.command, want, out)
			}
		}
	}
}
