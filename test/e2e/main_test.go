// Package e2e_test runs Millrace as it is deployed, every role a process of its own, and breaks the processes: kill -9, SIGSTOP, restarts, wiped stores. What it
// asserts are the promises: every accepted job ends once, nothing is lost, bytes stay as they are.
package e2e_test

import (
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"go.uber.org/goleak"

	"github.com/millrace/millrace/internal/embedded"
)

// natsVariables, if set, make this binary a NATS server and no test: the address that it listens on and the folder of its store.
const (
	natsListen = "E2E_NATS_LISTEN"
	natsStore  = "E2E_NATS_STORE"
)

// program is the path of the millrace binary under test.
var program string

// atOnce is how many tests run at once: most wait for processes and hardly compute. Under the race detector everything takes several times the memory.
func atOnce() string {
	if raceEnabled {
		return "3"
	}
	return "8"
}

func TestMain(m *testing.M) {
	if addr := os.Getenv(natsListen); addr != "" {
		serveNATS(addr, os.Getenv(natsStore))
		return
	}
	flag.Parse()
	parallel := false
	flag.Visit(func(f *flag.Flag) { parallel = parallel || f.Name == "test.parallel" })
	if !parallel {
		if err := flag.Set("test.parallel", atOnce()); err != nil {
			fatal(err)
		}
	}
	dir, err := os.MkdirTemp("", "millrace-e2e-")
	if err != nil {
		fatal(err)
	}
	program = filepath.Join(dir, "millrace")
	args := []string{"build", "-ldflags=-s -w", "-o", program}
	if raceEnabled {
		args = append(args, "-race")
	}
	if out, err := exec.Command("go", append(args, "../../cmd/millrace")...).CombinedOutput(); err != nil {
		fatal(fmt.Errorf("building millrace: %w\n%s", err, out))
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		if err := os.RemoveAll(dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
		os.Exit(code)
	}))
}

func fatal(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// serveNATS is a NATS server that others can pause and kill. It ends with its standard input, so that it never outlives the tests.
func serveNATS(addr, dir string) {
	n, err := embedded.StartNATS(embedded.NATSConfig{Listen: addr, Dir: dir, StoreLimit: 1 << 40, MemoryLimit: 1 << 40, Log: slog.New(slog.NewTextHandler(os.Stderr, nil))})
	if err != nil {
		fatal(err)
	}
	_, _ = io.Copy(io.Discard, os.Stdin)
	n.Shutdown()
}
