package routing_test

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"syscall"
	"testing"

	"go.uber.org/goleak"

	"github.com/millrace/millrace/internal/engine/emulator"
)

// TestMain makes the test's program an emulated engine where it is started as one.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "emulator" {
		if err := emulate(os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	goleak.VerifyTestMain(m)
}

func emulate(args []string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	var cfg emulator.Config
	var listen, name, ignored string
	f := flag.NewFlagSet("emulator", flag.ContinueOnError)
	f.StringVar(&listen, "listen", "", "")
	f.StringVar(&name, "model", "", "")
	f.StringVar(&cfg.Profile, "profile", "", "")
	f.Float64Var(&cfg.Speed, "speed", 1, "")
	f.StringVar(&ignored, "log-format", "", "")
	f.StringVar(&ignored, "log-level", "", "")
	if err := f.Parse(args); err != nil {
		return err
	}
	cfg.Models = []string{name}
	log := slog.New(slog.NewJSONHandler(os.Stderr, nil))
	e, err := emulator.New(cfg, log)
	if err != nil {
		return err
	}
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", listen)
	if err != nil {
		return err
	}
	log.Info("listening", "addr", l.Addr().String())
	return e.Serve(ctx, l)
}
