//go:build !linux || !cgo

package gpu

import (
	"context"
	"fmt"
	"time"
)

// none is the driver of a program that was built without a way to the library.
type none struct{}

func newDriver() driver { return none{} }

// Open implements driver.
func (none) Open() error { return fmt.Errorf("%w: this program was built without NVML", errNone) }

// Wait implements driver.
func (none) Wait(ctx context.Context, d time.Duration) []xidError {
	sleep(ctx, d)
	return nil
}

// Read implements driver.
func (none) Read() []GPU { return nil }

// Close implements driver.
func (none) Close() {}
