package emulator_test

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/millrace/millrace/internal/engine/emulator"
)

func TestMain(m *testing.M) {
	if os.Getenv(asProcess) != "" {
		fmt.Fprintln(os.Stderr, serveAsProcess())
		os.Exit(1)
	}
	goleak.VerifyTestMain(m)
}

// asProcess, in the environment, makes the test's program an engine that says its address on standard output and runs until it is killed.
const asProcess = "MILLRACE_TEST_EMULATOR"

func serveAsProcess() error {
	e, err := emulator.New(emulator.Config{Profile: "test"}, slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	l, err := new(net.ListenConfig).Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintln(os.Stdout, l.Addr()); err != nil { // who started this process waits for it
		return err
	}
	return e.Serve(context.Background(), l)
}
