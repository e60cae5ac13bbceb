// Package emulatortest starts emulated engines for tests.
package emulatortest

import (
	"context"
	"log/slog"
	"net"
	"testing"

	"github.com/millrace/millrace/internal/engine/emulator"
)

// Server is an emulated engine on a loopback port.
type Server struct {
	*emulator.Emulator
	// URL is its base, without /v1.
	URL string

	cancel context.CancelFunc
	done   chan error
}

// Start runs an engine until the test ends. A cfg without a profile gets "test", whose steps take a fraction of a millisecond; one without
// Crash fails the test if it crashes.
func Start(t testing.TB, cfg emulator.Config) *Server {
	t.Helper()
	if cfg.Profile == "" {
		cfg.Profile = "test"
	}
	if cfg.Crash == nil {
		cfg.Crash = func() { t.Error("the emulated engine crashed") }
	}
	e, err := emulator.New(cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	// Not t.Context: that one ends before the clean-ups that still talk to the engine.
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	s := &Server{Emulator: e, URL: "http://" + l.Addr().String(), cancel: cancel, done: make(chan error, 1)}
	go func() { s.done <- e.Serve(ctx, l) }()
	t.Cleanup(func() {
		if err := s.Stop(); err != nil {
			t.Errorf("stopping the emulated engine: %v", err)
		}
	})
	return s
}

// Stop kills the engine: its connections break. Later calls do nothing.
func (s *Server) Stop() error {
	s.cancel()
	err := <-s.done
	s.done <- nil
	return err
}
