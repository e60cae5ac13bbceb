package emulator_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/millrace/millrace/internal/engine/emulator/emulatortest"
)

// The kernel accepts calls for a stopped process. Those whose clients have gone by the time that it goes on must not stay.
func TestAProcessThatWasStoppedDropsTheCallsOfClientsThatLeft(t *testing.T) {
	t.Parallel()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), asProcess+"=1")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // it is killed
	})
	addr, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	s := &emulatortest.Server{URL: "http://" + strings.TrimSpace(addr)}
	idle := func() bool {
		families := scrape(t, s)
		return families["vllm:num_requests_running"].GetMetric()[0].GetGauge().GetValue()+families["vllm:num_requests_waiting"].GetMetric()[0].GetGauge().GetValue() == 0
	}
	running, leave := context.WithCancel(t.Context())
	defer leave()
	if _, err := post(running, t, s, chat, long("[[emulator:hang]]", streaming)); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the call to run", func() bool { return !idle() })

	if err := cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the process to stand still", func() bool {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", cmd.Process.Pid))
		return err == nil && bytes.Contains(stat, []byte(") T "))
	})
	leave()
	for range 3 {
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		if _, err := post(ctx, t, s, chat, long("[[emulator:hang]]", streaming)); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a stopped process answered: %v", err)
		}
		cancel()
	}
	if err := cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	if status, text := ask(t, s, chat, say("x")); status != http.StatusOK { // it stands behind them in the line of connections
		t.Errorf("a call afterwards: %d %s", status, text)
	}
	waitFor(t, "all calls to be dropped", idle)
}
