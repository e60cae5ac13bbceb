package gpu

import (
	"context"
	"log/slog"
	"time"
)

// Blocked returns a watcher whose driver answers once, and then not before release is closed.
func Blocked(log *slog.Logger, every time.Duration, release <-chan struct{}) *Watcher {
	return newWatcher(&blocked{release: release}, Config{Every: every}, log)
}

type blocked struct {
	release <-chan struct{}
}

func (*blocked) Open() error { return nil }

func (b *blocked) Wait(context.Context, time.Duration) []xidError {
	<-b.release
	return nil
}

func (*blocked) Read() []GPU { return []GPU{{UUID: "GPU-a", Model: "M"}} }

func (*blocked) Close() {}
