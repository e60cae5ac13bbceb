//go:build unix

package engine_test

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/engine"
)

func shell(script string) []string { return []string{"/bin/sh", "-c", script} }

// run starts p and returns a function that stops it and waits for its end.
func run(t *testing.T, p *engine.Process) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	var once sync.Once
	stop = func() {
		once.Do(func() {
			cancel()
			if err := <-done; err != nil {
				t.Errorf("running: %v", err)
			}
		})
	}
	t.Cleanup(stop)
	return stop
}

func newProcess(t *testing.T, cfg engine.ProcessConfig) *engine.Process {
	t.Helper()
	p, err := engine.NewProcess(cfg, discard())
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// lines gives a writer and what is written to it, line by line.
func lines(t *testing.T) (io.Writer, <-chan string) {
	t.Helper()
	r, w := io.Pipe()
	out := make(chan string, 100)
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer close(out)
		for s := bufio.NewScanner(r); s.Scan(); {
			out <- s.Text()
		}
	}()
	t.Cleanup(func() {
		_ = w.Close()
		<-done
	})
	return w, out
}

// gone waits until no process has the id.
func gone(t *testing.T, pid string) {
	t.Helper()
	id, err := strconv.Atoi(pid)
	if err != nil {
		t.Fatal(err)
	}
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.After(10 * time.Second); ; {
		if stat, err := os.ReadFile("/proc/" + pid + "/stat"); err == nil && bytes.Contains(stat, []byte(") Z ")) {
			return // dead, and waits for its parent, which is not us
		}
		if syscall.Kill(id, 0) != nil {
			return
		}
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("process %s lives on", pid)
		}
	}
}

func TestAProcessThatEndsIsStartedAgain(t *testing.T) {
	t.Parallel()
	out, said := lines(t)
	p := newProcess(t, engine.ProcessConfig{
		Command: shell(`echo run; exit 3`), Stdout: out, MinRestart: time.Millisecond, MaxRestart: 2 * time.Millisecond,
	})
	stop := run(t, p)
	for range 4 {
		if got := <-said; got != "run" {
			t.Fatalf("it said %q", got)
		}
	}
	stop()
	if n := p.Exits(); n < 3 {
		t.Errorf("%d exits after the fourth start", n)
	}
	if err := p.LastExit(); err == nil || err.Error() != "exit status 3" {
		t.Errorf("last exit: %v", err)
	}
}

func TestTheWaitBeforeARestartGrowsAndBeginsAnewAfterASteadyRun(t *testing.T) {
	t.Parallel()
	const long = time.Hour
	// Every run counts as steady, so the wait never grows to what would outlast the test.
	p := newProcess(t, engine.ProcessConfig{Command: shell(`exit 0`), MinRestart: time.Millisecond, MaxRestart: long, Steady: time.Nanosecond})
	stop := run(t, p)
	waitExits(t, p, 30) // doubling 30 times from a millisecond is twelve days
	stop()
	if err := p.LastExit(); err == nil || err.Error() != "exit status 0" {
		t.Errorf("last exit: %v; an engine is not to end", err)
	}
}

func waitExits(t *testing.T, p *engine.Process, n int) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for deadline := time.After(10 * time.Second); p.Exits() < n; {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("%d exits, want %d", p.Exits(), n)
		}
	}
}

func TestStopEndsTheWholeGroup(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		script string
		grace  time.Duration
		says   string // on SIGTERM
	}{
		"that obeys":                  {`trap 'echo bye; exit 0' TERM; sleep 1000 & echo $!; wait`, time.Minute, "bye"},
		"that does not":               {`trap '' TERM; sleep 1000 & echo $!; wait; wait; sleep 1000`, 50 * time.Millisecond, ""},
		"whose child does not":        {`(trap '' TERM; sleep 1000; sleep 1000) & echo $!; wait`, time.Minute, ""},
		"that closed its own outputs": {`sleep 1000 & echo $!; exec >/dev/null 2>&1; wait`, time.Minute, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			out, said := lines(t)
			p := newProcess(t, engine.ProcessConfig{Command: shell(tc.script), Stdout: out, Grace: tc.grace})
			stop := run(t, p)
			child := <-said
			stop()
			gone(t, child)
			if tc.says != "" {
				if got := <-said; got != tc.says {
					t.Errorf("it said %q, want %q", got, tc.says)
				}
			}
			if p.Exits() != 0 || p.LastExit() != nil {
				t.Errorf("%d exits, last %v: being stopped is none", p.Exits(), p.LastExit())
			}
		})
	}
}

func TestWhatACrashedProcessLeavesIsKilledBeforeTheNext(t *testing.T) {
	t.Parallel()
	out, said := lines(t)
	p := newProcess(t, engine.ProcessConfig{
		Command: shell(`sleep 1000 & echo $!; kill -9 $$`), Stdout: out, MinRestart: time.Millisecond, MaxRestart: time.Millisecond,
	})
	stop := run(t, p)
	first := <-said
	<-said // the next has started
	gone(t, first)
	stop()
	if err := p.LastExit(); err == nil || err.Error() != "signal: killed" {
		t.Errorf("last exit: %v", err)
	}
}

func TestAProcessHasItsOutputsEnvironmentAndFolder(t *testing.T) {
	t.Parallel()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	file, err := os.Create(filepath.Join(dir, "err"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	out, said := lines(t)
	p := newProcess(t, engine.ProcessConfig{
		Command: shell(`echo oops >&2; echo "$0 $PWD $ENGINE_TEST"; sleep 1000`), Dir: dir, Env: []string{"ENGINE_TEST=a b"}, Stdout: out, Stderr: file,
	})
	stop := run(t, p)
	if diff := cmp.Diff(fmt.Sprintf("/bin/sh %s a b", dir), <-said); diff != "" {
		t.Errorf("stdout (-want +got):\n%s", diff)
	}
	stop()
	if got, err := os.ReadFile(file.Name()); err != nil || string(got) != "oops\n" {
		t.Errorf("stderr %q, %v", got, err)
	}
}

func TestAnEngineDoesNotGetWhatIsThePlatforms(t *testing.T) {
	for _, name := range []string{"MILLRACE_NATS_URL", "MILLRACE_REDIS_URL", "MILLRACE_DATABASE_URL", "MILLRACE_API_KEY", "MILLRACE_ADMIN_KEY", "MILLRACE_ENGINE_API_KEY", "MILLRACE_DRAIN", "AWS_SECRET_ACCESS_KEY"} {
		t.Setenv(name, "secret")
	}
	t.Setenv("MILLRACE_INSTANCE", "a token")
	t.Setenv("HF_TOKEN", "the engine's own")
	for blobs, want := range map[string]string{
		"s3://bucket/prefix": "HF_TOKEN=the engine's own,MILLRACE_INSTANCE=a token,MILLRACE_OF_THE_ENGINE=given,",
		"dir:/files":         "AWS_SECRET_ACCESS_KEY=secret,HF_TOKEN=the engine's own,MILLRACE_INSTANCE=a token,MILLRACE_OF_THE_ENGINE=given,",
	} {
		t.Setenv("MILLRACE_BLOB_URL", blobs)
		out, said := lines(t)
		stop := run(t, newProcess(t, engine.ProcessConfig{
			Command: shell(`env | grep -E '^(MILLRACE_|AWS_SECRET|HF_TOKEN)' | sort | tr '\n' ','; echo; sleep 1000`), Env: []string{"MILLRACE_OF_THE_ENGINE=given"}, Stdout: out,
		}))
		if diff := cmp.Diff(want, <-said); diff != "" {
			t.Errorf("with files in %s (-want +got):\n%s", blobs, diff)
		}
		stop()
	}
}

func TestAWriterThatFailsDoesNotBlockTheEngine(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "done")
	p := newProcess(t, engine.ProcessConfig{
		Command: shell(`head -c 1000000 /dev/zero; : > "` + path + `"; exit 5`), Stdout: brokenWriter{}, MinRestart: time.Hour, MaxRestart: time.Hour,
	})
	stop := run(t, p)
	waitExits(t, p, 1)
	stop()
	if _, err := os.Stat(path); err != nil {
		t.Error(err)
	}
}

type brokenWriter struct{}

func (brokenWriter) Write([]byte) (int, error) { return 0, io.ErrClosedPipe }

func TestAProgramThatVanishesIsTriedAgain(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "engine")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	p := newProcess(t, engine.ProcessConfig{Command: []string{path}, MinRestart: time.Millisecond, MaxRestart: time.Millisecond})
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	stop := run(t, p)
	waitExits(t, p, 2)
	stop()
	if err := p.LastExit(); err == nil || !strings.Contains(err.Error(), "starting the engine") {
		t.Errorf("last exit: %v", err)
	}
}

func TestNewProcessRefusesWhatCannotWork(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		cfg  engine.ProcessConfig
		says string
	}{
		"no command":       {engine.ProcessConfig{}, "empty"},
		"unknown command":  {engine.ProcessConfig{Command: []string{"no-such-engine"}}, "no-such-engine"},
		"negative grace":   {engine.ProcessConfig{Command: shell(""), Grace: -1}, "Grace is -1ns"},
		"bounds crossed":   {engine.ProcessConfig{Command: shell(""), MinRestart: 2 * time.Minute}, "over MaxRestart 1m0s"},
		"no such a folder": {engine.ProcessConfig{Command: []string{"/no/such/engine"}}, "/no/such/engine"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if _, err := engine.NewProcess(tc.cfg, discard()); err == nil || !strings.Contains(err.Error(), tc.says) {
				t.Errorf("%v; want an error that says %q", err, tc.says)
			}
		})
	}
}

func TestAnEngineThatEndsAgainAndAgainIsGivenUp(t *testing.T) {
	t.Parallel()
	p := newProcess(t, engine.ProcessConfig{Command: shell("exit 3"), MinRestart: time.Millisecond, MaxRestart: time.Millisecond, MaxExits: 3})
	if err := p.Run(t.Context()); err == nil || err.Error() != "the engine has ended 3 times in a row: exit status 3" || p.Exits() != 3 {
		t.Errorf("after %d exits: %v", p.Exits(), err)
	}
	// Those that ran for long enough do not count.
	steady := newProcess(t, engine.ProcessConfig{Command: shell("exit 3"), MinRestart: time.Millisecond, MaxRestart: time.Millisecond, Steady: time.Nanosecond, MaxExits: 2})
	stop := run(t, steady)
	for steady.Exits() < 5 {
		time.Sleep(time.Millisecond)
	}
	stop()
}
