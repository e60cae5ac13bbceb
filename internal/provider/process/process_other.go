//go:build !unix

package process

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/millrace/millrace/internal/provider"
	"github.com/millrace/millrace/internal/scale"
)

// errNoUnix says what to do.
var errNoUnix = errors.New("workers cannot be run as processes on this system: use another provider")

// Provider runs workers as processes: not here.
type Provider struct{}

// New returns an error: processes that outlive us and are told to end gently need a Unix.
func New(Config, *slog.Logger) (*Provider, error) { return nil, errNoUnix }

// List returns an error.
func (*Provider) List(context.Context, *scale.Pool) ([]provider.Instance, error) {
	return nil, errNoUnix
}

// Start returns an error.
func (*Provider) Start(context.Context, *scale.Pool, string, int) error { return errNoUnix }

// Stop returns an error.
func (*Provider) Stop(context.Context, *scale.Pool, string) error { return errNoUnix }

// StopAll returns an error.
func (*Provider) StopAll(context.Context, time.Duration) error { return errNoUnix }

// Close does nothing.
func (*Provider) Close() error { return nil }
