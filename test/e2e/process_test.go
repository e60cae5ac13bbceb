package e2e_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// patience is how long a test waits for what must come: far more than it takes, for the machine may be busy.
const patience = 60 * time.Second

// process is a program under a name, which can be started, broken, and started again.
type process struct {
	t    *testing.T
	name string
	args []string
	env  []string
	// ready is nil once the process does its work.
	ready func() error
	// log is the file that gets all it writes, of all its runs.
	log string
	// metrics is the address of its metrics, "" if it has none.
	metrics string

	mu     sync.Mutex // guards what follows
	cmd    *exec.Cmd
	stdin  io.Closer
	exited chan struct{} // closed when cmd has ended
	state  *os.ProcessState
}

// newProcess describes a process. It starts nothing, and ends what was started when the test ends.
func newProcess(t *testing.T, dir, name string, args, env []string, ready func() error) *process {
	t.Helper()
	p := &process{t: t, name: name, args: args, env: env, ready: ready, log: filepath.Join(dir, name+".log")}
	t.Cleanup(func() {
		p.kill()
		p.examine()
	})
	return p
}

// begin starts the process and does not wait for it.
func (p *process) begin() {
	p.t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	out, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		p.t.Fatal(err)
	}
	defer out.Close()
	fmt.Fprintf(out, "--- %s starts\n", p.name)
	cmd := exec.Command(p.args[0], p.args[1:]...)
	cmd.Env = p.env
	cmd.Stdout, cmd.Stderr = out, out
	cmd.SysProcAttr = dieWithParent()
	if p.stdin, err = cmd.StdinPipe(); err != nil {
		p.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		p.t.Fatalf("starting %s: %v", p.name, err)
	}
	ended := make(chan struct{})
	p.cmd, p.exited = cmd, ended
	go func() { // ends with the process, which the test's end kills
		defer close(ended)
		_ = cmd.Wait() // how it ended stands in its state
		p.mu.Lock()
		p.state = cmd.ProcessState
		p.mu.Unlock()
	}()
}

// start starts the process and returns once it does its work.
func (p *process) start() {
	p.t.Helper()
	p.begin()
	p.await()
}

// await waits until the process does its work. One that ends before fails the test.
func (p *process) await() {
	p.t.Helper()
	p.mu.Lock()
	ended := p.exited
	p.mu.Unlock()
	eventually(p.t, patience, p.name+" works", func() error {
		select {
		case <-ended:
			return fatalError{fmt.Errorf("%s has ended: %s", p.name, p.tail(5))}
		default:
			return p.ready()
		}
	})
}

func (p *process) signal(s os.Signal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cmd != nil {
		_ = p.cmd.Process.Signal(s) // one that has ended needs none
	}
}

// kill is kill -9, also of one that is paused.
func (p *process) kill() {
	p.signal(os.Kill)
	p.wait()
}

// restart is kill -9 and a new start.
func (p *process) restart() {
	p.t.Helper()
	p.kill()
	p.start()
}

// terminate asks the process to end, and fails the test unless it ends well.
func (p *process) terminate(within time.Duration) {
	p.t.Helper()
	p.signal(syscall.SIGTERM)
	p.mu.Lock()
	ended := p.exited
	p.mu.Unlock()
	select {
	case <-ended:
	case <-time.After(within):
		p.t.Errorf("%s has not ended %v after SIGTERM", p.name, within)
		p.kill()
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if code := p.state.ExitCode(); code != 0 {
		p.t.Errorf("%s ended with code %d after SIGTERM: %s", p.name, code, p.tail(5))
	}
}

// pause stops the process as it stands: its connections stay, and it answers nothing.
func (p *process) pause() { p.signal(syscall.SIGSTOP) }

// unpause lets it go on.
func (p *process) unpause() { p.signal(syscall.SIGCONT) }

// wait returns when the process has ended.
func (p *process) wait() {
	p.mu.Lock()
	ended := p.exited
	p.mu.Unlock()
	if ended != nil {
		<-ended
	}
}

func (p *process) output() []byte {
	raw, err := os.ReadFile(p.log)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		p.t.Errorf("reading what %s wrote: %v", p.name, err)
	}
	return raw
}

// tail is the last lines that the process wrote.
func (p *process) tail(lines int) string {
	all := strings.Split(strings.TrimSpace(string(p.output())), "\n")
	all = all[max(0, len(all)-lines):]
	for i, line := range all {
		all[i] = line[:min(len(line), 400)]
	}
	return strings.Join(all, "\n")
}

// examine fails the test if the process panicked or raced, and shows its last lines if the test failed.
func (p *process) examine() {
	out := p.output()
	for _, bad := range []string{"panic: ", "fatal error: ", "a handler panicked", "WARNING: DATA RACE"} {
		if i := bytes.Index(out, []byte(bad)); i >= 0 {
			p.t.Errorf("%s: %s", p.name, out[max(0, i-200):min(len(out), i+4000)])
		}
	}
	if p.t.Failed() {
		p.t.Logf("the last lines of %s:\n%s", p.name, p.tail(30))
	}
}

// fatalError is one that waiting does not cure.
type fatalError struct{ error }

// eventually tries f until it returns nil. Nobody tells when other processes are ready, so it looks again and again.
func eventually(t testing.TB, within time.Duration, what string, f func() error) {
	t.Helper()
	for deadline := time.Now().Add(within); ; {
		err := f()
		if err == nil {
			return
		}
		var fatal fatalError
		if errors.As(err, &fatal) || time.Now().After(deadline) {
			t.Fatalf("waiting at most %v until %s: %v", within, what, err)
		}
		time.Sleep(10 * time.Millisecond)
	}
}
