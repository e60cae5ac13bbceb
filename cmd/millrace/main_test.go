package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/millrace/millrace/internal/testenv"
)

// TestMain makes the test's program a millrace where it is started as one: by a command that has its roles in processes of their own.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && !strings.HasPrefix(os.Args[1], "-") {
		main()
	}
	goleak.VerifyTestMain(m, append(
		testenv.NATSLeaves(),
		// Both are of cleaners that some library starts once for a whole process.
		goleak.IgnoreAnyFunction("net/http.(*persistConn).readLoop"), goleak.IgnoreAnyFunction("net/http.(*persistConn).writeLoop"),
	)...)
}

// screen collects what a command prints; it may be read meanwhile.
type screen struct {
	mu   sync.Mutex
	text bytes.Buffer
	more chan struct{} // signalled at each write
}

func newScreen() *screen { return &screen{more: make(chan struct{}, 1)} }

func (s *screen) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	select {
	case s.more <- struct{}{}:
	default:
	}
	return s.text.Write(p)
}

func (s *screen) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.String()
}

// wait waits until the text has what is wanted, and returns it.
func (s *screen) wait(ctx context.Context, t *testing.T, want string) string {
	t.Helper()
	for {
		if text := s.String(); strings.Contains(text, want) {
			return text
		}
		select {
		case <-s.more:
		case <-ctx.Done():
			t.Fatalf("waiting for %q: %v; so far:\n%s", want, ctx.Err(), s)
		}
	}
}

// result of a command line.
type result struct {
	code     int
	out, err string
}

// millrace runs a command line to its end, in an environment of its own.
func millrace(t *testing.T, env map[string]string, stdin string, args ...string) result {
	t.Helper()
	out, errs := newScreen(), newScreen()
	p := &program{in: strings.NewReader(stdin), out: out, err: errs, lookup: lookup(env)}
	code := run(t.Context(), p, args)
	return result{code, out.String(), errs.String()}
}

func lookup(env map[string]string) func(string) (string, bool) {
	return func(name string) (string, bool) { v, ok := env[name]; return v, ok }
}

func TestEveryCommandHelps(t *testing.T) {
	t.Parallel()
	for _, cmd := range descendants(newRoot(&program{lookup: lookup(nil)})) {
		path := strings.Fields(cmd.CommandPath())[1:]
		t.Run(strings.Join(path, " "), func(t *testing.T) {
			t.Parallel()
			r := millrace(t, nil, "", append(path, "--help")...)
			if r.code != 0 || r.err != "" {
				t.Fatalf("code %d, %s", r.code, r.err)
			}
			if cmd.Example == "" || !strings.Contains(r.out, cmd.Example) {
				t.Error("its help shows no example")
			}
			for example := range strings.Lines(cmd.Example) {
				if !strings.Contains(example, cmd.CommandPath()) {
					t.Errorf("the example %q is of another command", strings.TrimSpace(example))
				}
			}
			if cmd.Short == "" || cmd.Long == "" || strings.HasSuffix(cmd.Short, ".") {
				t.Error("it needs a short and a long description")
			}
			for line := range strings.Lines(cmd.Long) {
				if len(line) > 90 {
					t.Errorf("a line of its description is %d characters long: %s", len(line), line)
				}
			}
			if !strings.Contains(r.out, "MILLRACE_NATS_URL") {
				t.Error("its help does not tell of the environment")
			}
		})
	}
}

func TestErrorsAreOneLineThatSaysWhatToDo(t *testing.T) {
	t.Parallel()
	bad := filepath.Join(t.TempDir(), "bad.yaml")
	if err := os.WriteFile(bad, []byte("nats_url: x\nredis-urll: y\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name string
		args []string
		env  map[string]string
		code int
		want []string
	}{
		{name: "an unknown command", args: []string{"pu"}, code: exitUsage, want: []string{`"pu"`, "did you mean", "`millrace --help`"}},
		{name: "an unknown command below", args: []string{"jobs", "ls"}, code: exitUsage, want: []string{`"ls"`, "`millrace jobs --help`"}},
		{name: "an unknown flag", args: []string{"up", "--listn", "x"}, code: exitUsage, want: []string{"--listn", "`millrace up --help`"}},
		{name: "an argument too many", args: []string{"up", "now"}, code: exitUsage, want: []string{`"now"`, "--help"}},
		{name: "no id", args: []string{"jobs", "get"}, code: exitUsage, want: []string{"ID is missing"}},
		{name: "a prompt in pieces", args: []string{"submit", "why", "not"}, code: exitUsage, want: []string{`"not"`, "quotes"}},
		{name: "no prompt", args: []string{"submit", ""}, code: exitUsage, want: []string{"PROMPT"}},
		{name: "an unknown format", args: []string{"version", "-o", "xml"}, code: exitUsage, want: []string{"xml", "text, json"}},
		{name: "an unknown priority", args: []string{"submit", "--priority", "high", "x"}, code: exitUsage, want: []string{"high", "interactive, standard or batch"}},
		{name: "flags that exclude each other", args: []string{"submit", "--async", "--stream", "x"}, code: exitUsage, want: []string{"async", "stream"}},
		{name: "a worker without an engine", args: []string{"worker"}, code: exitUsage, want: []string{"--engine http://"}},
		{name: "a command without dashes", args: []string{"worker", "--engine", "http://x", "vllm", "serve"}, code: exitUsage, want: []string{`"vllm"`, "--"}},
		{name: "a bound", args: []string{"up", "--workers", "0"}, code: exitUsage, want: []string{"workers is 0", "between 1 and 64"}},
		{name: "no GPUs per layer", args: []string{"worker", "--tensor-parallel", "0"}, code: exitUsage, want: []string{"--tensor-parallel", `"0"`, "between 1 and 1024"}},
		{name: "fewer than no stages", args: []string{"worker", "--pipeline-parallel=-2"}, code: exitUsage, want: []string{"--pipeline-parallel", `"-2"`}},
		{name: "no ranks in a variable", args: []string{"worker"}, env: map[string]string{"MILLRACE_DATA_PARALLEL": "0"}, code: exitUsage, want: []string{"data-parallel", "MILLRACE_DATA_PARALLEL", `"0"`}},
		{name: "a GPU below none", args: []string{"worker", "--engine", "http://x", "--gpus", "0,-1"}, code: exitUsage, want: []string{`gpus holds "-1"`}},
		{name: "no capacity", args: []string{"worker", "--engine", "http://x", "--kv-tokens", "0"}, code: exitUsage, want: []string{"kv-tokens is 0"}},
		{name: "no concurrency", args: []string{"worker", "--engine", "http://x", "--max-concurrency=-1"}, code: exitUsage, want: []string{"max-concurrency is -1"}},
		{name: "a negative reserve", args: []string{"worker", "--engine", "http://x", "--kv-reserve=-0.1"}, code: exitUsage, want: []string{"kv-reserve is -0.1", "above 0 and below 1"}},
		{name: "all in reserve", args: []string{"up", "--kv-reserve", "1"}, code: exitUsage, want: []string{"kv-reserve is 1"}},
		{name: "a reserve that is no number", args: []string{"up", "--kv-reserve", "NaN"}, code: exitUsage, want: []string{"kv-reserve is NaN"}},
		{name: "more than all for batches", args: []string{"up", "--batch-trickle", "1.5"}, code: exitUsage, want: []string{"batch-trickle is 1.5"}},
		{name: "an order", args: []string{"up", "--order", "random"}, code: exitUsage, want: []string{`order is "random"`, "oldest, shortest"}},
		{name: "no token budget", args: []string{"up", "--token-budget", "0"}, code: exitUsage, want: []string{"token-budget is 0"}},
		{name: "no output", args: []string{"up", "--default-output=-5"}, code: exitUsage, want: []string{"default-output is -5"}},
		{name: "no failures", args: []string{"up", "--max-failures", "0"}, code: exitUsage, want: []string{"max-failures is 0"}},
		{name: "no stall time", args: []string{"up", "--stall-timeout", "0s"}, code: exitUsage, want: []string{"stall-timeout is 0s"}},
		{name: "a choice", args: []string{"up", "--durability", "maybe"}, code: exitUsage, want: []string{`durability is "maybe"`, "always, relaxed"}},
		{name: "a profile", args: []string{"up", "--profile", "b200"}, code: exitUsage, want: []string{"b200", "a10-7b"}},
		{name: "a size", args: []string{"api", "--max-body", "big"}, code: exitUsage, want: []string{"big", "8GiB"}},
		{name: "a bad variable", args: []string{"api"}, env: map[string]string{"MILLRACE_REPLICAS": "two"}, code: exitUsage, want: []string{"replicas", "MILLRACE_REPLICAS", "two"}},
		{name: "unknown names in the file", args: []string{"api", "--config", bad}, code: exitUsage, want: []string{"nats_url", "did you mean nats-url?", "redis-urll", "bad.yaml"}},
		{name: "no file", args: []string{"api"}, env: map[string]string{"MILLRACE_CONFIG": "/nowhere/x.yaml"}, code: exitUsage, want: []string{"/nowhere/x.yaml"}},
		{name: "a bad URL", args: []string{"status", "--url", "localhost"}, code: exitUsage, want: []string{"localhost", "http://127.0.0.1:8080"}},
		{name: "nobody there", args: []string{"status", "--url", "http://127.0.0.1:1"}, code: exitFailed, want: []string{"millrace up", "MILLRACE_URL"}},
		{name: "not ready", args: []string{"health", "--url", "http://127.0.0.1:1/readyz"}, code: exitFailed, want: []string{"not ready"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			r := millrace(t, tt.env, "", tt.args...)
			if r.code != tt.code {
				t.Errorf("exit code %d, want %d", r.code, tt.code)
			}
			if r.out != "" || strings.Count(r.err, "\n") != 1 || !strings.HasPrefix(r.err, "millrace: ") {
				t.Errorf("it printed %q, and %q as its error", r.out, r.err)
			}
			for _, want := range tt.want {
				if !strings.Contains(r.err, want) {
					t.Errorf("the error does not say %q: %s", want, r.err)
				}
			}
		})
	}
}

// TestOneFileServesAllCommands: settings of one role are no error for another.
func TestOneFileServesAllCommands(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "millrace.yaml")
	if err := os.WriteFile(file, []byte("engine: http://127.0.0.1:8000\nlisten: 127.0.0.1:9999\noutput: json\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	r := millrace(t, map[string]string{"MILLRACE_VERSION": "v9", "MILLRACE_CONFIG": file}, "", "version")
	if r.code != 0 || !json.Valid([]byte(r.out)) {
		t.Errorf("code %d, printed %s%s, want JSON as the file says", r.code, r.out, r.err)
	}
}

func TestVersion(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"version"}, {"--version"}} {
		if r := millrace(t, nil, "", args...); r.code != 0 || !strings.HasPrefix(r.out, "millrace ") {
			t.Errorf("%v: code %d, printed %q", args, r.code, r.out)
		}
	}
}

func TestTheHelpGroupsAllCommands(t *testing.T) {
	t.Parallel()
	out := millrace(t, nil, "").out
	for _, want := range []string{"Run the platform:", "Use it:", "  up ", "  demo ", "  submit ", "  bench ", "  completion "} {
		if !strings.Contains(out, want) {
			t.Errorf("the help has no %q:\n%s", want, out)
		}
	}
	if slices.Contains(strings.Fields(out), "Additional") {
		t.Errorf("a command is in no group:\n%s", out)
	}
}
