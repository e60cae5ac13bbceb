package testenv

import (
	"bufio"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/millrace/millrace/internal/embedded"
)

// apartDir tells a test's program to be a server whose store is in that folder.
const apartDir = "MILLRACE_TEST_NATS_APART"

// NATSApart starts a NATS server in a process of its own, for tests that watch the memory of theirs, and returns its URL. The package's TestMain must begin with ServeApart.
func NATSApart(t testing.TB) string {
	t.Helper()
	return Apart(t, apartDir+"="+t.TempDir())
}

// ServeApart is true in the process that NATSApart has started, once it was a server until its test ended.
func ServeApart() bool {
	dir := os.Getenv(apartDir)
	if dir == "" {
		return false
	}
	n, err := embedded.StartNATS(embedded.NATSConfig{Dir: dir, Listen: "127.0.0.1:0", Relaxed: true, StoreLimit: Ample, MemoryLimit: Ample, Log: slog.New(slog.NewTextHandler(os.Stderr, nil))})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	defer n.Shutdown()
	fmt.Fprintln(os.Stdout, n.URL()) //nolint:errcheck // NATSApart reads it, and fails without
	_, _ = io.Copy(io.Discard, os.Stdin)
	return true
}

// Apart starts this test's program again, with a variable in its environment that makes its TestMain be a server, until the test ends. It returns the first line that the server writes: its address. The server
// must end with its input.
func Apart(t testing.TB, variable string) string {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env, cmd.Stderr = append(os.Environ(), variable), os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = in.Close()
		_ = cmd.Wait() // how it ends is of no interest
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatalf("the server apart tells no address: %v", err)
	}
	return strings.TrimSpace(line)
}
