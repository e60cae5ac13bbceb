package sdk_test

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// nodeClient is the folder of the Node client, in the version of its lock file.
const nodeClient = "../../examples/openai-node"

// nodeReady is nil once the Node client is installed. `make test` has done that before.
var nodeReady = sync.OnceValue(func() error {
	if _, err := exec.LookPath("node"); err != nil {
		return fmt.Errorf("this test needs Node.js (%w): `make test` installs it", err)
	}
	if _, err := os.Stat(filepath.Join(nodeClient, "node_modules", ".package-lock.json")); err == nil { // npm leaves it behind when an installation is whole
		return nil
	}
	if out, err := exec.Command("npm", "ci", "--prefix", nodeClient, "--no-audit", "--no-fund", "--prefer-offline", "--loglevel=error").CombinedOutput(); err != nil {
		return fmt.Errorf("installing the Node client (by hand: npm ci --prefix examples/openai-node): %w\n%s", err, out)
	}
	return nil
})

// program is main.mjs at work. All tests of this process share one: loading the client takes longer than most of what they ask of it.
type program struct {
	once sync.Once
	err  error // why there is none
	cmd  *exec.Cmd
	said bytes.Buffer  // its errors, to be read once it has ended
	over chan struct{} // closed when it has ended

	mu    sync.Mutex // for writing to in, and for tasks
	in    io.WriteCloser
	tasks []*node // by their ids
}

var theNode program

// node is a task of the program's. got may be read once done is closed.
type node struct {
	left int // steps
	got  steps
	done chan struct{}
}

// step is one line of main.mjs.
type step struct {
	ID    int             `json:"id"`
	Step  string          `json:"step"`
	Value json.RawMessage `json:"value"`
	Error *nodeError      `json:"error"`
}

func (p *program) start() error {
	if err := nodeReady(); err != nil {
		return err
	}
	p.cmd, p.over = exec.Command("node", "node/main.mjs"), make(chan struct{})
	p.cmd.Stderr = &p.said
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return err
	}
	in, err := p.cmd.StdinPipe()
	if err != nil {
		return err
	}
	if err := p.cmd.Start(); err != nil {
		return err
	}
	p.in = in
	go func() { // ends with the program
		defer close(p.over)
		for lines := json.NewDecoder(out); ; {
			var s step
			if lines.Decode(&s) != nil {
				break
			}
			p.mu.Lock()
			n := p.tasks[s.ID]
			p.mu.Unlock()
			n.got[s.Step] = s
			if n.left--; n.left == 0 {
				close(n.done)
			}
		}
		_ = p.cmd.Process.Kill() // if it wrote what is no step
		_ = p.cmd.Wait()         // how it ended is of no interest: whoever still waits for it says that it has
	}()
	return nil
}

// stop ends the program, if there is one.
func (p *program) stop() {
	p.once.Do(func() {})
	if p.in != nil {
		_ = p.in.Close()
		<-p.over
	}
}

// startNode starts steps, separated by spaces, against url.
func startNode(t *testing.T, names, url, key string) *node {
	t.Helper()
	p := &theNode
	p.once.Do(func() { p.err = p.start() })
	if p.err != nil {
		t.Fatalf("starting node: %v", p.err)
	}
	all := strings.Fields(names)
	n := &node{left: len(all), got: steps{}, done: make(chan struct{})}
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := json.NewEncoder(p.in).Encode(map[string]any{"id": len(p.tasks), "url": url, "key": key, "steps": all}); err != nil {
		t.Fatalf("node takes no task: %v", err)
	}
	p.tasks = append(p.tasks, n)
	return n
}

// wait returns what the steps gave.
func (n *node) wait(t *testing.T) steps {
	t.Helper()
	ctx := soon(t)
	select {
	case <-n.done:
	case <-theNode.over:
		t.Fatalf("node has ended:\n%s", theNode.said.Bytes())
	case <-ctx.Done():
		_ = theNode.cmd.Process.Kill() // what it still asks would keep the servers from ending
		t.Fatal("node does not come to an end")
	}
	return n.got
}

type nodeError struct {
	Name    string  `json:"name"`
	Status  int     `json:"status"`
	Code    *string `json:"code"`
	Param   *string `json:"param"`
	Type    *string `json:"type"`
	Message string  `json:"message"`
}

type steps map[string]step

// into decodes what a step gave.
func (s steps) into(t *testing.T, name string, v any) {
	t.Helper()
	got, ok := s[name]
	if !ok || got.Error != nil {
		t.Fatalf("the step %s: there %t, error %+v", name, ok, got.Error)
	}
	if err := json.Unmarshal(got.Value, v); err != nil {
		t.Fatalf("the step %s: %v in %s", name, err, got.Value)
	}
}

// value is what a step gave, as an object.
func (s steps) value(t *testing.T, name string) map[string]any {
	t.Helper()
	var v map[string]any
	s.into(t, name, &v)
	return v
}

// wantError checks that a step ended with the client's class of error and all that the API told.
func (s steps) wantError(t *testing.T, name, class string, want refusal) {
	t.Helper()
	e := s[name].Error
	if e == nil {
		t.Errorf("%s: no error, but %s", name, s[name].Value)
		return
	}
	str := func(p *string) string {
		if p == nil {
			return ""
		}
		return *p
	}
	if e.Name != class || e.Status != want.status || str(e.Type) != want.kind || str(e.Code) != want.code || str(e.Param) != want.param || e.Message == "" {
		t.Errorf("%s: got %s %d type %q code %q param %q %q, want %s %+v", name, e.Name, e.Status, str(e.Type), str(e.Code), str(e.Param), e.Message, class, want)
	}
}

func TestNodeClient(t *testing.T) {
	t.Parallel()
	s := start(t, func(c *setup) { c.platform.API.KeepAlive = keepAlive })
	got := startNode(t, "models chat helper choices tools completion embeddings unknown silence broken cut abort async", s.url, s.key).wait(t)

	var models struct {
		IDs []string `json:"ids"`
		One struct {
			ID, Object string
			Created    int64
		} `json:"one"`
	}
	got.into(t, "models", &models)
	if diff := cmp.Diff([]string{"other", model}, models.IDs); diff != "" {
		t.Errorf("the models (-want +got):\n%s", diff)
	}
	if models.One.ID != model || models.One.Object != "model" || models.One.Created == 0 {
		t.Errorf("the model is %+v", models.One)
	}

	type collected struct {
		Text          []string
		Chunks, Empty int
		Usage         *struct {
			Completion int `json:"completion_tokens"`
		}
	}
	var chat struct {
		Whole struct {
			Choices []struct {
				Message struct{ Content string }
			}
		}
		Plain, Tailed collected
	}
	got.into(t, "chat", &chat)
	want := chat.Whole.Choices[0].Message.Content
	if want == "" {
		t.Error("the chat says nothing")
	}
	for name, c := range map[string]collected{"plain": chat.Plain, "tailed": chat.Tailed} {
		if diff := cmp.Diff([]string{want}, c.Text); diff != "" {
			t.Errorf("the %s stream (-want +got):\n%s", name, diff)
		}
	}
	if chat.Plain.Empty != 0 || chat.Plain.Usage != nil {
		t.Errorf("usage that nobody asked for: %+v", chat.Plain)
	}
	if chat.Tailed.Empty != 1 || chat.Tailed.Usage == nil || chat.Tailed.Usage.Completion != 12 {
		t.Errorf("the usage at the end: %+v", chat.Tailed)
	}
	if v := got.value(t, "helper"); v["content"] != want {
		t.Errorf("the stream helper says %q, want %q", v["content"], want)
	}

	var choices struct{ Whole, Streamed []string }
	got.into(t, "choices", &choices)
	if diff := cmp.Diff(choices.Whole, choices.Streamed); diff != "" || len(choices.Whole) != 2 {
		t.Errorf("%d choices (-whole +streamed):\n%s", len(choices.Whole), diff)
	}

	var tools struct {
		Call struct {
			ID, Type string
			Function struct{ Name, Arguments string }
		}
		Finish, Streamed string
	}
	got.into(t, "tools", &tools)
	if tools.Call.Function.Name != "weather" || tools.Call.ID == "" || tools.Finish != "tool_calls" || tools.Streamed != tools.Call.Function.Arguments {
		t.Errorf("the call is %+v", tools)
	}

	var completion struct{ Whole, Streamed string }
	got.into(t, "completion", &completion)
	if completion.Whole == "" || completion.Whole != completion.Streamed {
		t.Errorf("the completion is %+v", completion)
	}

	checkNodeEmbeddings(t, got)

	if v := got.value(t, "unknown"); v["content"] == "" {
		t.Errorf("with unknown fields: %v", v)
	}
	if calls := s.calls("Unknown fields."); len(calls) != 1 || !bytes.Contains(calls[0], []byte(`"vendor":{"html":"<b>&</b>","none":null},"top_k":3}`)) {
		t.Errorf("the engine got %s", calls)
	}
	var silence collected
	if got.into(t, "silence", &silence); len(silence.Text) != 1 || silence.Text[0] == "" {
		t.Errorf("after a silence: %+v", silence)
	}
	for _, name := range []string{"broken", "cut"} {
		e := got[name].Error
		if e == nil || e.Name != "APIError" || e.Code == nil || *e.Code != "engine_error" || e.Message == "" {
			t.Errorf("%s: the error is %+v, the value %s", name, e, got[name].Value)
		}
	}
	if v := got.value(t, "abort"); v["name"] != "APIUserAbortError" {
		t.Errorf("the aborted call ends with %v", v)
	}
	eventually(t, "the engine has lost what was aborted, and runs nothing", func() error {
		// On a busy machine the second call is given up before it reaches the engine.
		reached := len(s.calls("I leave the stream.")) + len(s.calls("I leave the call."))
		if n, running := s.engine.Counts().Disconnects, s.running(); reached == 0 || int(n) != reached || running != 0 {
			return fmt.Errorf("%d reached the engine, %d disconnects, %d running", reached, n, running)
		}
		return nil
	})
	v := got.value(t, "async")
	if v["status"] != 202.0 || v["location"] != "/v1/jobs/"+v["id"].(string) || v["job"] != "completed" || v["content"] == "" || v["content"] != v["direct"] {
		t.Errorf("the job is %v", v)
	}
}

// checkNodeEmbeddings checks that the three ways to ask give the same numbers.
func checkNodeEmbeddings(t *testing.T, got steps) {
	t.Helper()
	var v struct {
		ByDefault, Floats [][]float64
		Base64            []string
	}
	got.into(t, "embeddings", &v)
	if len(v.ByDefault) != 2 || len(v.Floats) != 2 || len(v.Base64) != 2 || len(v.Floats[1]) == 0 || len(v.ByDefault[1]) != len(v.Floats[1]) {
		t.Fatalf("%d, %d and %d vectors", len(v.ByDefault), len(v.Floats), len(v.Base64))
	}
	raw, err := base64.StdEncoding.DecodeString(v.Base64[1])
	if err != nil || len(raw) != 4*len(v.Floats[1]) {
		t.Fatalf("%d bytes for %d numbers: %v", len(raw), len(v.Floats[1]), err)
	}
	for i, want := range v.Floats[1] {
		coded := float64(math.Float32frombits(binary.LittleEndian.Uint32(raw[4*i:])))
		if math.Abs(v.ByDefault[1][i]-want) > 1e-6 || math.Abs(coded-want) > 1e-6 {
			t.Fatalf("number %d is %v by default, %v as float, %v in base64", i, v.ByDefault[1][i], want, coded)
		}
	}
}

func TestNodeClientGetsTypedErrors(t *testing.T) {
	t.Parallel()
	s := startStrict(t)
	f := newFront(t, s.url, nil)
	got := startNode(t, "key model route body engine large reset", f.url, s.key).wait(t)
	const invalid, server = "invalid_request_error", "server_error"
	for name, want := range map[string]struct {
		class string
		refusal
	}{
		"key":    {"AuthenticationError", refusal{status: 401, kind: invalid, code: "invalid_api_key"}},
		"model":  {"NotFoundError", refusal{status: 404, kind: invalid, code: "model_not_found", param: "model"}},
		"route":  {"NotFoundError", refusal{status: 404, kind: invalid, code: "unknown_url"}},
		"body":   {"BadRequestError", refusal{status: 400, kind: invalid, code: "missing_required_parameter", param: "messages"}},
		"engine": {"BadRequestError", refusal{status: 400, kind: "BadRequestError", code: "400", param: "messages"}},
		"large":  {"APIError", refusal{status: 413, kind: invalid, code: "request_too_large"}},
		"reset":  {"InternalServerError", refusal{status: 502, kind: server, code: "engine_error"}},
	} {
		got.wantError(t, name, want.class, want.refusal)
	}
	if n := len(served(f.exchanges())); n != 7 {
		t.Errorf("the client made %d requests for 7 calls", n)
	}
	hold(t, s)
	got = startNode(t, "full", s.url, s.key).wait(t)
	got.wantError(t, "full", "RateLimitError", refusal{status: 429, kind: "rate_limit_exceeded", code: "rate_limit_exceeded"})
}
