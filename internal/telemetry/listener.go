package telemetry

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// ListenerConfig of a Listener.
type ListenerConfig struct {
	// Addr is host:port; port 0 is any free one.
	Addr string
	// Registry is what /metrics shows.
	Registry *prometheus.Registry
	// Ready holds one check for each part of the process, by the part's name: nil when it is ready. /readyz is 200 when all are. A check must answer at once.
	Ready map[string]func() error
	// Pprof adds /debug/pprof/: it shows memory, so only to whoever may see that.
	Pprof bool
	Log   *slog.Logger
}

// Listener serves /metrics, /healthz, /readyz and, if asked, /debug/pprof/.
type Listener struct {
	net net.Listener
	srv *http.Server
}

// Listen opens the port. Nothing is answered before Run.
func Listen(cfg ListenerConfig) (*Listener, error) {
	l, err := net.Listen("tcp", cfg.Addr)
	if err != nil {
		return nil, fmt.Errorf("listening for metrics: %w: choose another address with --metrics-listen", err)
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(cfg.Registry, promhttp.HandlerOpts{Registry: cfg.Registry, ErrorLog: promLog{cfg.Log}}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		answer(w, http.StatusOK, health{Status: "ok"})
	})
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		h, code := health{Status: "ready", Parts: make(map[string]string)}, http.StatusOK
		for name, check := range cfg.Ready {
			h.Parts[name] = "ready"
			if err := check(); err != nil {
				h.Parts[name] = err.Error()
				h.Status, code = "not ready", http.StatusServiceUnavailable
			}
		}
		answer(w, code, h)
	})
	if cfg.Pprof {
		mux.HandleFunc("GET /debug/pprof/", pprof.Index)
		mux.HandleFunc("GET /debug/pprof/cmdline", pprof.Cmdline)
		mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
		mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
		mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	}
	return &Listener{net: l, srv: &http.Server{
		Handler: mux, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute,
		ErrorLog: slog.NewLogLogger(cfg.Log.Handler(), slog.LevelDebug),
	}}, nil
}

// Addr is the address that is open.
func (l *Listener) Addr() string { return l.net.Addr().String() }

// Close closes the port of a listener that never ran.
func (l *Listener) Close() error { return l.net.Close() }

// Run serves until ctx ends, then closes the port: whoever scrapes comes again.
func (l *Listener) Run(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { _ = l.srv.Close() })
	defer stop()
	if err := l.srv.Serve(l.net); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serving metrics on %s: %w", l.Addr(), err)
	}
	return nil
}

// health is the JSON of /healthz and /readyz.
type health struct {
	Status string            `json:"status"`
	Parts  map[string]string `json:"parts,omitempty"`
}

func answer(w http.ResponseWriter, code int, h health) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(h) // the client is gone: nobody is left to tell
}

type promLog struct{ log *slog.Logger }

func (l promLog) Println(v ...any) { l.log.Warn("serving metrics", "err", fmt.Sprint(v...)) }
