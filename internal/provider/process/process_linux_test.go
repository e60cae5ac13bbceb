package process_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/millrace/millrace/internal/provider"
	"github.com/millrace/millrace/internal/provider/process"
	"github.com/millrace/millrace/internal/scale"
)

// edit changes an instance's file, as a crash would have left it.
func (w *world) edit(pool, name string, change func(map[string]any)) {
	w.t.Helper()
	path := filepath.Join(w.dir, pool, name+".json")
	raw, err := os.ReadFile(path)
	if err != nil {
		w.t.Fatal(err)
	}
	r := map[string]any{}
	if err := json.Unmarshal(raw, &r); err != nil {
		w.t.Fatal(err)
	}
	change(r)
	if raw, err = json.Marshal(r); err != nil {
		w.t.Fatal(err)
	}
	if err := os.WriteFile(path, raw, 0o600); err != nil {
		w.t.Fatal(err)
	}
}

func TestAWorkerWhoseIdWasNotWrittenIsFound(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p, pool := w.open(), w.pool("p", "engine")
	if err := p.Start(t.Context(), pool, "a", 1); err != nil {
		t.Fatal(err)
	}
	defer stopAll(t, p)
	w.engine(pool.Name, "a")
	pid := w.pid("p", "a")
	w.edit("p", "a", func(r map[string]any) { r["pid"] = 0 })
	all, err := w.open().List(t.Context(), pool)
	if err != nil || len(all) != 1 || all[0].State != provider.Running {
		t.Errorf("%+v %v", all, err)
	}
	if got := w.pid("p", "a"); got != pid {
		t.Errorf("process %d was found, want %d", got, pid)
	}
}

// cutOff has another process start a worker of the pool, and kills it once it has written the worker's file and not started the worker: there it waits for somebody to read the log.
func (w *world) cutOff(pool *scale.Pool, name string) {
	w.t.Helper()
	log := filepath.Join(w.dir, pool.Name, name+".log")
	if err := errors.Join(os.MkdirAll(filepath.Dir(log), 0o700), syscall.Mkfifo(log, 0o600)); err != nil {
		w.t.Fatal(err)
	}
	raw, err := json.Marshal(pool)
	if err != nil {
		w.t.Fatal(err)
	}
	starter := exec.Command(os.Args[0])
	starter.Env = append(os.Environ(), behaviour+"=starter", "DIR="+w.dir, "POOL="+string(raw), "NAME="+name)
	if err := starter.Start(); err != nil {
		w.t.Fatal(err)
	}
	eventually(w.t, func() error {
		_, err := os.Stat(filepath.Join(w.dir, pool.Name, name+".json"))
		return err
	})
	if err := starter.Process.Kill(); err != nil {
		w.t.Error(err)
	}
	_ = starter.Wait() // it was killed
	if err := os.Remove(log); err != nil {
		w.t.Error(err)
	}
}

// It is no failure of the pool's that whoever started a worker died: the next start of that name starts it, with a port and GPUs of its own.
func TestAStartThatACrashCutOffIsMadeAnew(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.gpus = 1
	p, pool := w.open(), w.pool("p", "plain")
	pool.Shape.GPUs = 1
	w.cutOff(pool, "a")
	for range 2 {
		all, err := p.List(t.Context(), pool)
		if err != nil || len(all) != 1 || all[0].State != provider.Pending || !strings.Contains(all[0].Reason, "the autoscaler ended while it started") {
			t.Fatalf("%+v %v", all, err)
		}
	}
	if err := p.Start(t.Context(), pool, "b", 2); !errors.Is(err, provider.ErrCapacity) {
		t.Errorf("what it was to have was given to another one: %v", err)
	}
	defer stopAll(t, p)
	for range 2 { // the second changes nothing
		if err := p.Start(t.Context(), pool, "a", 1); err != nil {
			t.Fatal(err)
		}
	}
	if all, err := p.List(t.Context(), pool); err != nil || len(all) != 1 || all[0].State != provider.Running || all[0].Reason != "" {
		t.Errorf("%+v %v", all, err)
	}
	w.facts(pool, "a")
}

func TestAStartThatACrashCutOffIsTidiedAwayIfItIsNotWanted(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p, pool := w.open(), w.pool("p", "plain")
	w.cutOff(pool, "a")
	if err := p.Stop(t.Context(), pool, "a"); err != nil {
		t.Error(err)
	}
	if all, err := p.List(t.Context(), pool); err != nil || len(all) != 0 {
		t.Errorf("after it was stopped: %+v %v", all, err)
	}
}

func TestAProcessThatGotTheIdOfAWorkerIsLeftAlone(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p, pool := w.open(), w.pool("p", "plain")
	for _, name := range []string{"a", "b"} {
		if err := p.Start(t.Context(), pool, name, 1); err != nil {
			t.Fatal(err)
		}
	}
	defer stopAll(t, p)
	other := w.pid("p", "b")
	own := w.pid("p", "a")
	w.edit("p", "a", func(r map[string]any) { r["pid"], r["token"] = other, "an earlier one" })
	if err := p.Stop(t.Context(), pool, "a"); err != nil {
		t.Error(err)
	}
	all, err := p.List(t.Context(), pool)
	if err != nil || len(all) != 1 || all[0].Name != "b" || all[0].State != provider.Running {
		t.Errorf("%+v %v", all, err)
	}
	if err := syscall.Kill(own, syscall.SIGKILL); err != nil {
		t.Error(err)
	}
}

// engine is the id of the process that the worker started.
func (w *world) engine(pool, name string) int {
	w.t.Helper()
	pid := 0
	eventually(w.t, func() error {
		raw, err := os.ReadFile(filepath.Join(w.dir, pool, name+".log"))
		if err != nil {
			return err
		}
		_, after, found := strings.Cut(string(raw), "engine=")
		text, _, whole := strings.Cut(after, "\n")
		if !found || !whole {
			return fmt.Errorf("it has said %q", raw)
		}
		pid, err = strconv.Atoi(text)
		return err
	})
	return pid
}

func TestTheGPUsOfAnEngineThatOutlivesItsWorkerAreTaken(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.gpus = 1
	p, pool := w.open(), w.pool("p", "engine")
	pool.Shape.GPUs = 1
	if err := p.Start(t.Context(), pool, "a", 1); err != nil {
		t.Fatal(err)
	}
	defer stopAll(t, p)
	w.engine("p", "a")
	if err := syscall.Kill(w.pid("p", "a"), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() error {
		all, err := p.List(t.Context(), pool)
		if err == nil && (len(all) != 1 || all[0].State != provider.Failed) {
			err = fmt.Errorf("listed: %+v", all)
		}
		return err
	})
	if err := p.Start(t.Context(), pool, "b", 2); !errors.Is(err, provider.ErrCapacity) {
		t.Errorf("a second worker beside the first one's engine: %v", err)
	}
	if err := p.Stop(t.Context(), pool, "a"); err != nil {
		t.Error(err)
	}
	if err := p.Start(t.Context(), pool, "b", 1); err != nil {
		t.Errorf("once nothing is left of the first: %v", err)
	}
}

func TestAProcessThatCannotBeLookedAtIsNotTakenForDead(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := func(name, env string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(env), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	for _, test := range []struct {
		name, path    string
		there, failed bool
	}{
		{name: "the worker's", path: file("ours", "A=b\x00MILLRACE_INSTANCE=token\x00"), there: true},
		{name: "another one's", path: file("other", "A=b\x00MILLRACE_INSTANCE=tokens\x00")},
		{name: "one that has ended", path: file("empty", "")},
		{name: "none", path: filepath.Join(dir, "none")},
		{name: "an error", path: dir, failed: true},
	} {
		if there, err := process.Marked(test.path, "token"); there != test.there || (err != nil) != test.failed {
			t.Errorf("%s: %v, %v", test.name, there, err)
		}
	}
}

func TestNothingOfAnEngineIsLeft(t *testing.T) {
	t.Parallel()
	for name, kill := range map[string]bool{"stopped": false, "failed": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			p, pool := w.open(), w.pool("p", "engine")
			if err := p.Start(t.Context(), pool, "a", 1); err != nil {
				t.Fatal(err)
			}
			engine := w.engine("p", "a")
			if kill {
				if err := syscall.Kill(w.pid("p", "a"), syscall.SIGKILL); err != nil {
					t.Error(err)
				}
			}
			if err := p.Stop(t.Context(), pool, "a"); err != nil {
				t.Error(err)
			}
			if env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", engine)); err == nil && len(env) > 0 || err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, os.ErrPermission) && !errors.Is(err, syscall.ESRCH) { // the last two are what some kernels say of one that nobody has waited for
				t.Errorf("the engine's process %d is left: %v", engine, err)
			}
		})
	}
}
