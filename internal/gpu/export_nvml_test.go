//go:build linux && cgo

package gpu

import (
	"log/slog"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// Watch returns a watcher of what lib shows, which looks for lost GPUs at each reading.
func Watch(lib nvml.Interface, every time.Duration, log *slog.Logger) *Watcher {
	w := newWatcher(&library{nvml: lib}, Config{Every: every}, log)
	w.reopen = every
	return w
}
