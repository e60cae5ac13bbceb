// Package telemetry is what every process shows of itself: its log, its metrics, and a listener for them and for health checks.
package telemetry

import (
	"fmt"
	"io"
	"log/slog"
	"os"
	"runtime"

	"github.com/mattn/go-isatty"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
)

// LogConfig of a process's log. Zero works.
type LogConfig struct {
	// Level is debug, info, warn or error; "" is info.
	Level string
	// Format is text or json; "" is text on a terminal, json elsewhere.
	Format string
}

// NewLogger returns a logger that writes to w.
func NewLogger(w io.Writer, cfg LogConfig) (*slog.Logger, error) {
	var level slog.Level
	if cfg.Level != "" {
		if err := level.UnmarshalText([]byte(cfg.Level)); err != nil {
			return nil, fmt.Errorf("log-level is %q: it must be one of debug, info, warn, error", cfg.Level)
		}
	}
	format := cfg.Format
	if format == "" {
		if format = "json"; Terminal(w) {
			format = "text"
		}
	}
	o := &slog.HandlerOptions{Level: level}
	switch format {
	case "text":
		return slog.New(slog.NewTextHandler(w, o)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(w, o)), nil
	default:
		return nil, fmt.Errorf("log-format is %q: it must be one of text, json", cfg.Format)
	}
}

// Terminal tells whether w is a terminal.
func Terminal(w any) bool {
	f, ok := w.(*os.File)
	return ok && isatty.IsTerminal(f.Fd())
}

// NewRegistry returns a registry with the metrics of the Go runtime and the process, and the build's version.
func NewRegistry(version string) *prometheus.Registry {
	r := prometheus.NewRegistry()
	build := prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "millrace_build_info", Help: "Always 1; the labels say which build this is.",
	}, []string{"version", "goversion"})
	build.WithLabelValues(version, runtime.Version()).Set(1)
	r.MustRegister(build, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return r
}
