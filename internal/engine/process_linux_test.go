package engine_test

import (
	"bufio"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/millrace/millrace/internal/engine"
)

// TestHelperSupervises is no test: it is what TestTheEngineStopsWhenItsParentIsKilled runs and kills.
func TestHelperSupervises(t *testing.T) {
	if os.Getenv("ENGINE_TEST_HELPER") == "" {
		return
	}
	p := newProcess(t, engine.ProcessConfig{Command: shell(`echo pid=$$; exec sleep 1000`), Stdout: os.Stdout})
	_ = p.Run(t.Context())
}

func TestTheEngineStopsWhenItsParentIsKilled(t *testing.T) {
	t.Parallel()
	parent := exec.Command(os.Args[0], "-test.run=^TestHelperSupervises$")
	parent.Env = append(os.Environ(), "ENGINE_TEST_HELPER=1")
	out, err := parent.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	var pid string
	for s := bufio.NewScanner(out); pid == "" && s.Scan(); {
		pid, _ = strings.CutPrefix(s.Text(), "pid=")
	}
	if err := parent.Process.Kill(); err != nil {
		t.Error(err)
	}
	_ = parent.Wait() // it was killed
	gone(t, pid)
}
