//go:build unix

package process_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/provider"
	"github.com/millrace/millrace/internal/provider/process"
	"github.com/millrace/millrace/internal/provider/providertest"
	"github.com/millrace/millrace/internal/scale"
)

// behaviour in its environment makes this binary a worker that behaves so, and no test.
const behaviour = "PROCESS_TEST_WORKER"

func TestMain(m *testing.M) {
	if b := os.Getenv(behaviour); b != "" {
		work(b)
	}
	goleak.VerifyTestMain(m)
}

// work is what a worker does here.
func work(behaviour string) {
	if behaviour == "starter" {
		startOne()
		return
	}
	told := make(chan os.Signal, 2)
	signal.Notify(told, syscall.SIGTERM)
	if behaviour == "stubborn" {
		signal.Ignore(syscall.SIGTERM)
	}
	facts, err := json.Marshal(map[string]any{"args": os.Args[1:], "env": os.Environ()})
	if err != nil {
		panic(err)
	}
	fmt.Fprintf(os.Stdout, "{\"time\":0} %s\n", facts) // as the worker's own log begins
	switch behaviour {
	case "broken":
		fmt.Fprintln(os.Stdout, "secret: "+os.Getenv("MILLRACE_NATS_URL")+" "+os.Getenv("TOKEN"))
		fmt.Fprintln(os.Stdout, "CUDA error: out of memory")
		os.Exit(3)
	case "busy":
		<-told
		for {
			if _, err := os.Stat(os.Getenv("RELEASE")); err == nil {
				os.Exit(0)
			}
			select {
			case <-told:
				os.Exit(4) // a second signal: what ran is lost
			case <-time.After(5 * time.Millisecond):
			}
		}
	case "stubborn":
		select {}
	case "engine":
		// An engine in a group of its own, that does not end with its worker.
		engine := exec.Command("/bin/sh", "-c", "trap '' TERM; while :; do sleep 0.05; done")
		engine.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		if err := engine.Start(); err != nil {
			panic(err)
		}
		fmt.Fprintf(os.Stdout, "engine=%d\n", engine.Process.Pid)
	}
	<-told
	os.Exit(0)
}

// startOne starts a worker as an autoscaler does.
func startOne() {
	var pool scale.Pool
	if err := json.Unmarshal([]byte(os.Getenv("POOL")), &pool); err != nil {
		panic(err)
	}
	p, err := process.New(process.Config{Dir: os.Getenv("DIR"), Binary: os.Args[0]}, slog.New(slog.DiscardHandler))
	if err != nil {
		panic(err)
	}
	if err := p.Start(context.Background(), &pool, os.Getenv("NAME"), 1); err != nil {
		panic(err)
	}
	os.Exit(0)
}

const (
	natsSecret  = "hunter2hunter2"
	tokenSecret = "hf_sesame_open"
)

// world is a folder for the state of instances.
type world struct {
	t    *testing.T
	dir  string
	gpus int
}

func (w *world) open() *process.Provider {
	w.t.Helper()
	p, err := process.New(process.Config{
		Dir: w.dir, Binary: os.Args[0], GPUs: w.gpus, Grace: 50 * time.Millisecond, Args: []string{"--metrics-listen", "127.0.0.1:0"},
		Join: provider.Join{"MILLRACE_NATS_URL": "nats://worker:" + natsSecret + "@127.0.0.1:4222"},
	}, slog.New(slog.DiscardHandler))
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = p.Close() })
	return p
}

func (w *world) pool(name, behaviour string) *scale.Pool {
	return &scale.Pool{
		Name: name, Provider: "process", Models: []job.Model{"m"}, Max: 5, Drain: scale.Duration(time.Minute),
		Engine: scale.Engine{Command: []string{"/bin/true", "--port", "{port}"}, Env: map[string]string{behaviourVariable: behaviour, "TOKEN": tokenSecret, "RELEASE": filepath.Join(w.dir, name+".release")}},
	}
}

const behaviourVariable = behaviour

// log is what an instance wrote.
func (w *world) log(p *scale.Pool, name string) string {
	raw, err := os.ReadFile(filepath.Join(w.dir, p.Name, name+".log"))
	if err != nil {
		w.t.Error(err)
	}
	return string(raw)
}

// pid is the id of an instance's process.
func (w *world) pid(pool, name string) int {
	w.t.Helper()
	raw, err := os.ReadFile(filepath.Join(w.dir, pool, name+".json"))
	if err != nil {
		w.t.Fatal(err)
	}
	var r struct {
		PID int `json:"pid"`
	}
	if err := json.Unmarshal(raw, &r); err != nil || r.PID == 0 {
		w.t.Fatalf("%s: %v", raw, err)
	}
	return r.PID
}

// facts are the arguments and the environment that an instance says that it got.
func (w *world) facts(pool *scale.Pool, name string) (args, env []string) {
	w.t.Helper()
	var f struct{ Args, Env []string }
	eventually(w.t, func() error {
		line, _, whole := strings.Cut(w.log(pool, name), "\n")
		if !whole {
			return fmt.Errorf("it has said %q", line)
		}
		return json.Unmarshal([]byte(strings.TrimPrefix(line, `{"time":0}`)), &f)
	})
	return f.Args, f.Env
}

// eventually tries f until it returns nil: nobody tells what other processes do.
func eventually(t *testing.T, f func() error) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
}

func newWorld(t *testing.T) *world { return &world{t: t, dir: t.TempDir()} }

func TestConformance(t *testing.T) {
	t.Parallel()
	providertest.Run(t, func(t *testing.T) providertest.Fixture {
		w := newWorld(t)
		w.gpus = 4
		full := w.pool("full", "plain")
		full.Shape.GPUs = 2
		stubborn := w.pool("stubborn", "stubborn")
		stubborn.Drain = scale.Duration(20 * time.Millisecond)
		missing, idle, large, path := w.pool("missing", "plain"), w.pool("idle", "plain"), w.pool("large", "plain"), w.pool("../path", "plain")
		missing.Engine.Command, idle.Engine.Command, large.Shape.GPUs = []string{"/no/such/engine"}, nil, 5
		return providertest.Fixture{
			Open:    func(t *testing.T) provider.Provider { return w.open() },
			Secrets: []string{natsSecret, tokenSecret, "nats://worker"},
			Plain:   w.pool("plain", "plain"), Other: w.pool("other", "plain"),
			Broken: w.pool("broken", "broken"), Reason: "ended with code 3: secret: *** ***; CUDA error: out of memory",
			Fail: func(t *testing.T, name string) {
				if err := syscall.Kill(w.pid("plain", name), syscall.SIGKILL); err != nil {
					t.Error(err)
				}
			},
			Busy: w.pool("busy", "busy"),
			Release: func(t *testing.T, _ string) {
				if err := os.WriteFile(filepath.Join(w.dir, "busy.release"), nil, 0o600); err != nil {
					t.Error(err)
				}
			},
			Up:       func(_ *testing.T, p *scale.Pool, name string) { w.facts(p, name) }, // it has said them once it heeds signals
			Stubborn: stubborn, Full: full, Room: 2,
			Invalid: map[string]*scale.Pool{"an engine that is not there": missing, "no engine": idle, "more GPUs than there are": large, "a name with a path": path},
			Gone: func(t *testing.T, p *scale.Pool, name string) {
				if _, err := os.Stat(filepath.Join(w.dir, p.Name, name+".json")); !os.IsNotExist(err) {
					t.Errorf("its file is there: %v", err)
				}
			},
		}
	})
}

func TestAWorkerGetsItsPlaceAndNoMoreOfOurEnvironmentThanItNeeds(t *testing.T) {
	t.Setenv("AUTOSCALERS_OWN", "secret")
	t.Setenv("MILLRACE_DATABASE_URL", "secret")
	w := newWorld(t)
	p, pool := w.open(), w.pool("p", "plain")
	pool.Models = []job.Model{"a/b", "c"}
	pool.Shape = scale.Shape{GPUs: 2, TensorParallel: 2}
	pool.Engine.Command = append(pool.Engine.Command, "--tp={tensor_parallel}", "--pp={pipeline_parallel}", "--devices", "{gpus}", "{millrace}")
	for _, name := range []string{"a", "b"} {
		if err := p.Start(t.Context(), pool, name, 1); err != nil {
			t.Fatal(err)
		}
	}
	defer stopAll(t, p)
	args, env := w.facts(pool, "b")
	port, err := strconv.Atoi(args[slices.Index(args, "--port")+1])
	if err != nil {
		t.Fatal(err)
	}
	if l, err := net.Listen("tcp", ":"+strconv.Itoa(port)); err != nil {
		t.Errorf("the port is not free: %v", err)
	} else {
		_ = l.Close()
	}
	want := fmt.Sprintf("worker --name b --engine http://127.0.0.1:%d --serve a/b,c --drain 1m0s --tensor-parallel 2 --gpus 2,3 --metrics-listen 127.0.0.1:0 -- /bin/true --port %d --tp=2 --pp=1 --devices 2,3 %s", port, port, os.Args[0])
	if got := strings.Join(args, " "); got != want {
		t.Errorf("its arguments:\n%s, want\n%s", got, want)
	}
	all := strings.Join(env, "\n")
	for _, want := range []string{"CUDA_VISIBLE_DEVICES=2,3", "TOKEN=" + tokenSecret, "MILLRACE_NATS_URL=nats://worker:" + natsSecret, "PATH="} {
		if !strings.Contains(all, want) {
			t.Errorf("its environment lacks %s:\n%s", want, all)
		}
	}
	if strings.Contains(all, "AUTOSCALERS_OWN") || strings.Contains(all, "MILLRACE_DATABASE_URL") {
		t.Errorf("its environment holds our own:\n%s", all)
	}
}

func stopAll(t *testing.T, p *process.Provider) {
	t.Helper()
	if err := p.StopAll(t.Context(), time.Minute); err != nil {
		t.Error(err)
	}
}

func TestAWorkerIsDetachedFromTheAutoscalersSession(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p, pool := w.open(), w.pool("p", "plain")
	if err := p.Start(t.Context(), pool, "a", 1); err != nil {
		t.Fatal(err)
	}
	defer stopAll(t, p)
	pid := w.pid("p", "a")
	if group, err := syscall.Getpgid(pid); err != nil || group != pid {
		t.Errorf("process %d is of the group %d: %v", pid, group, err)
	}
}

func TestAWorkerHasTheDrainThatItWasStartedWith(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p, pool := w.open(), w.pool("p", "stubborn")
	pool.Drain = scale.Duration(300 * time.Millisecond)
	if err := p.Start(t.Context(), pool, "a", 1); err != nil {
		t.Fatal(err)
	}
	w.facts(pool, "a") // it heeds no signal any more
	pool.Drain = scale.Duration(time.Millisecond)
	begun := time.Now()
	if err := w.open().Stop(t.Context(), pool, "a"); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(begun); took < 300*time.Millisecond {
		t.Errorf("it was killed after %v", took)
	}
}

func TestAStartThatFailsLeavesNothingBehind(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p, err := process.New(process.Config{Dir: w.dir, Binary: filepath.Join(w.dir, "none")}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if err := p.Start(t.Context(), w.pool("p", "plain"), "a", 1); err == nil {
		t.Error("a program that is not there was started")
	}
	if left, err := os.ReadDir(filepath.Join(w.dir, "p")); err != nil || len(left) > 0 {
		t.Errorf("there are %v, %v", left, err)
	}
}

func TestALongLogIsCutDownToItsEnd(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p, pool := w.open(), w.pool("p", "plain")
	if err := p.Start(t.Context(), pool, "a", 1); err != nil {
		t.Fatal(err)
	}
	defer stopAll(t, p)
	w.facts(pool, "a") // it says no more
	path := filepath.Join(w.dir, "p", "a.log")
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := io.CopyN(f, zeros{}, 17<<20); err != nil {
		t.Fatal(err)
	}
	if _, err := p.List(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteString("the end"); err != nil {
		t.Fatal(err)
	}
	if got := w.log(pool, "a"); len(got) != 1<<20+len("the end") || !strings.HasSuffix(got, "0the end") {
		t.Errorf("the log has %d bytes, and ends with %q", len(got), got[max(0, len(got)-20):])
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = '0'
	}
	return len(p), nil
}
