package api

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/labstack/echo/v4"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/semaphore"

	"github.com/millrace/millrace/internal/blob"
	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/relay"
	"github.com/millrace/millrace/internal/results"
	"github.com/millrace/millrace/internal/settle"
)

// Config of a Server. Zero fields get the defaults named.
type Config struct {
	// Listen is host:port; port 0 is any free one. Default 127.0.0.1:8080.
	Listen string
	// ID names this run of the process. Default a fresh one.
	ID job.API
	// APIKey is a key of the tenant "default" beside those of the ledger, AdminKey one of operators, which opens /v1 too. "" is no key. Without APIKey, and while the ledger has no keys, everybody who reaches the address
	// may do all, so New then refuses addresses that other machines reach, unless Insecure. Once there is any, the admin routes open to AdminKey and to the ledger's keys of scope admin alone.
	APIKey, AdminKey string
	Insecure         bool
	// MaxBody bounds a request's body in bytes. Default 32 MiB.
	MaxBody int64
	// MaxBodies bounds the bytes of all large bodies that are held at once while they are read and stored. Default 512 MiB, at least MaxBody.
	MaxBodies int64
	// MaxFile bounds an uploaded file in bytes. Default 200 MiB.
	MaxFile int64
	// MaxHeld bounds the calls answered on their own connection that are held at once. Default 10,000.
	MaxHeld int
	// KeepAlive is the longest silence on a stream; comments are sent after two thirds of it. Default 15 s.
	KeepAlive time.Duration
	// DefaultDeadline is a job's total time if it asks for none, MaxDeadline the longest that it may ask for. Defaults 24 h and 7 days.
	DefaultDeadline, MaxDeadline time.Duration
	// DefaultRunTimeout bounds one attempt of a job that asks for no bound; at most MaxRunTimeout. Default 1 h.
	DefaultRunTimeout time.Duration
	// Retention is how long results are kept past the deadline, as the stores are configured. Default 7 days.
	Retention time.Duration
	// DrainTimeout is how long calls in flight may go on once Run's context has ended. Default 30 s.
	DrainTimeout time.Duration
	// WriteTimeout cuts a client that does not read for so long. Default 60 s.
	WriteTimeout time.Duration
	// ContinueWithin is how long a stream that broke off waits for a worker that continues it, before its client is told that it ends. Default 15 s.
	ContinueWithin time.Duration
	// HopelessFor is for how long no worker can be started before the calls that wait for one are told. Default 10 s.
	HopelessFor time.Duration
	// Limits bound the durable work that is accepted; 0 is no limit. A job that was accepted is never refused later.
	Limits results.Limits
	// MaxInteractiveWait is the longest expected wait of a call answered on its connection, when all workers of its model are busy: beyond it the call is refused. 0 refuses none.
	MaxInteractiveWait time.Duration
	// NoPrefixAffinity looks for no worker that has the beginning of a prompt in its KV cache. Sessions are looked for all the same.
	NoPrefixAffinity bool
	// SessionFromBody takes a call's session from its body's prompt_cache_key or user where no header gives one.
	SessionFromBody bool
}

// MaxRunTimeout bounds what a job may ask for as run_timeout: outcomes of one group are kept for longer than that past its end.
const MaxRunTimeout = 12 * time.Hour

func (c Config) withDefaults() Config {
	d := Config{
		Listen: "127.0.0.1:8080", ID: job.API(job.NewName("api_", time.Now())),
		MaxBody: 32 << 20, MaxBodies: max(512<<20, c.MaxBody), MaxFile: 200 << 20, MaxHeld: 10_000, KeepAlive: 15 * time.Second,
		DefaultDeadline: 24 * time.Hour, MaxDeadline: 7 * 24 * time.Hour, DefaultRunTimeout: time.Hour, Retention: 7 * 24 * time.Hour,
		DrainTimeout: 30 * time.Second, WriteTimeout: time.Minute, ContinueWithin: 15 * time.Second, HopelessFor: 10 * time.Second,
	}
	d.Limits, d.MaxInteractiveWait = c.Limits, c.MaxInteractiveWait
	d.APIKey, d.AdminKey, d.Insecure, d.SessionFromBody, d.NoPrefixAffinity = c.APIKey, c.AdminKey, c.Insecure, c.SessionFromBody, c.NoPrefixAffinity
	orDefault(&d.Listen, c.Listen)
	orDefault(&d.ID, c.ID)
	orDefault(&d.MaxBody, c.MaxBody)
	orDefault(&d.MaxBodies, c.MaxBodies)
	orDefault(&d.MaxFile, c.MaxFile)
	orDefault(&d.MaxHeld, c.MaxHeld)
	orDefault(&d.KeepAlive, c.KeepAlive)
	orDefault(&d.DefaultDeadline, c.DefaultDeadline)
	orDefault(&d.MaxDeadline, c.MaxDeadline)
	orDefault(&d.DefaultRunTimeout, c.DefaultRunTimeout)
	orDefault(&d.Retention, c.Retention)
	orDefault(&d.DrainTimeout, c.DrainTimeout)
	orDefault(&d.WriteTimeout, c.WriteTimeout)
	orDefault(&d.ContinueWithin, c.ContinueWithin)
	orDefault(&d.HopelessFor, c.HopelessFor)
	return d
}

// orDefault puts v into *field unless v is zero.
func orDefault[T comparable](field *T, v T) {
	var zero T
	if v != zero {
		*field = v
	}
}

func (c Config) validate() error {
	for _, f := range []struct {
		name       string
		value, min time.Duration
	}{
		{"keep-alive", c.KeepAlive, time.Millisecond},
		{"default-deadline", c.DefaultDeadline, time.Second},
		{"max-deadline", c.MaxDeadline, time.Second},
		{"default-run-timeout", c.DefaultRunTimeout, time.Second},
		{"retention", c.Retention, time.Minute},
		{"drain-timeout", c.DrainTimeout, 0},
		{"write-timeout", c.WriteTimeout, time.Second},
		{"continue-within", c.ContinueWithin, 0},
		{"hopeless-for", c.HopelessFor, 0},
	} {
		if f.value < f.min {
			return fmt.Errorf("%s is %v: it must be at least %v", f.name, f.value, f.min)
		}
	}
	if err := c.checkLimits(); err != nil {
		return err
	}
	switch {
	case c.DefaultDeadline > c.MaxDeadline:
		return fmt.Errorf("default-deadline is %v: it must be at most max-deadline, %v", c.DefaultDeadline, c.MaxDeadline)
	case c.MaxDeadline > 7*24*time.Hour:
		return fmt.Errorf("max-deadline is %v: it must be at most 168h, for which outcomes are sure to be kept", c.MaxDeadline)
	case c.DefaultRunTimeout > MaxRunTimeout:
		return fmt.Errorf("default-run-timeout is %v: it must be at most %v", c.DefaultRunTimeout, MaxRunTimeout)
	case c.MaxBody < 1:
		return fmt.Errorf("max-body is %d: it must be at least 1", c.MaxBody)
	case c.MaxBodies < c.MaxBody:
		return fmt.Errorf("max-bodies is %d: it must be at least max-body, %d", c.MaxBodies, c.MaxBody)
	case c.MaxFile < 1:
		return fmt.Errorf("max-file is %d: it must be at least 1", c.MaxFile)
	case c.MaxHeld < 1:
		return fmt.Errorf("max-held is %d: it must be at least 1", c.MaxHeld)
	}
	return nil
}

// Deps are the parts that a Server works on. It closes none of them.
type Deps struct {
	Queue   *queue.Queue
	Blobs   blob.Store
	Results *results.Store
	Cluster *cluster.Cluster
	Relay   *relay.Relay
	Ledger  *ledger.Store
	// Registerer may be nil.
	Registerer prometheus.Registerer
	Log        *slog.Logger
	// Version and Process go into heartbeats: Process is one for all roles of a process.
	Version, Process string
}

// Server is the API role.
type Server struct {
	cfg       Config
	deps      Deps
	log       *slog.Logger
	listener  net.Listener
	echo      *echo.Echo
	keys      *keyring
	metrics   *metrics
	bodies    *semaphore.Weighted
	pace      *pace
	fills     *fills
	warmth    *warmth
	traffic   traffic
	held      held
	limiter   *patience // with the result store, about limits of keys and tenants
	occupied  occupied
	publisher publisher
	settler   *settle.Settler

	// desk and started are set by Run before the first request is served.
	desk    *relay.Desk
	started time.Time
	// wholeAt is when the result store was last found to have all its keys.
	wholeAt atomic.Pointer[time.Time]
	// closing is closed when the drain begins: long polls and event streams then end, so that their clients go elsewhere.
	closing chan struct{}
	// handlers counts requests being handled.
	handlers sync.WaitGroup
}

// publisher stores a job's message. Enqueue returns once the message is durable (or in memory for a live job); ErrExists means that a copy is there.
type publisher interface {
	Enqueue(ctx context.Context, kind queue.Kind, lane queue.Lane, m *queue.Message) error
}

// New checks cfg and opens the port. Nothing is answered before Run.
func New(cfg Config, deps Deps) (*Server, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	if deps.Log == nil {
		deps.Log = slog.New(slog.DiscardHandler)
	}
	s := &Server{
		cfg: cfg, deps: deps, log: deps.Log,
		bodies: semaphore.NewWeighted(cfg.MaxBodies), pace: newPace(), publisher: deps.Queue, closing: make(chan struct{}),
	}
	s.limiter = &patience{name: "result store", log: deps.Log}
	s.keys = newKeyring(deps.Ledger, cfg, deps.Results.Now, deps.Log)
	if err := s.checkExposure(); err != nil {
		return nil, err
	}
	s.fills = newFills(deps.Queue)
	s.warmth = &warmth{look: deps.Results.Owners, prefixes: !cfg.NoPrefixAffinity, sent: map[job.Worker]*sent{}}
	s.settler = &settle.Settler{Queue: deps.Queue, Results: deps.Results, Relay: deps.Relay, Blobs: deps.Blobs, Log: deps.Log}
	var err error
	if s.metrics, err = newMetrics(deps.Registerer, &s.held); err != nil {
		return nil, err
	}
	s.echo = s.routes()
	if s.listener, err = net.Listen("tcp", cfg.Listen); err != nil {
		return nil, fmt.Errorf("listening for the API: %w", err)
	}
	return s, nil
}

// Addr is the address that is open.
func (s *Server) Addr() string { return s.listener.Addr().String() }

// Close closes the port of a server that never ran.
func (s *Server) Close() error { return s.listener.Close() }

// Handler serves the routes. It works while Run runs.
func (s *Server) Handler() http.Handler { return headAsGet(s.echo) }

// errStopped is why a held call ends when the drain takes too long.
var errStopped = errors.New("the server stops")

// Run serves until ctx ends, then takes no new connections, ends long polls and event streams, and lets calls in flight finish within DrainTimeout.
func (s *Server) Run(ctx context.Context) error {
	// What serves requests outlives ctx by the drain, and ends with Run.
	serving, stop := context.WithCancelCause(context.WithoutCancel(ctx))
	defer stop(nil)
	defer s.listener.Close() //nolint:errcheck // closed already if it was served
	desk, err := s.deps.Relay.Desk(serving, s.cfg.ID, s.log)
	if err != nil {
		return fmt.Errorf("opening the desk for live answers: %w", err)
	}
	s.desk, s.started = desk, time.Now()

	var background sync.WaitGroup
	background.Go(func() { s.lookAfterHeld(serving) })
	background.Go(func() { s.measure(serving) })
	background.Go(func() { s.keepOccupied(serving) })
	background.Go(func() {
		if err := s.deps.Cluster.Announce(serving, s.heartbeat); err != nil && serving.Err() == nil {
			s.log.Error("sending heartbeats", "err", err)
		}
	})
	srv := &http.Server{
		Handler: s.Handler(), BaseContext: func(net.Listener) context.Context { return serving },
		ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 256 << 10,
		DisableGeneralOptionsHandler: true, // OPTIONS * is answered as any other route that is none
		ErrorLog:                     slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}
	served := make(chan error, 1)
	background.Go(func() { served <- srv.Serve(s.listener) })

	select {
	case err = <-served:
		err = fmt.Errorf("serving the API on %s: %w", s.Addr(), err)
	case <-ctx.Done():
		err = nil
	}
	close(s.closing)
	drain, cancel := context.WithTimeout(serving, s.cfg.DrainTimeout)
	if srv.Shutdown(drain) != nil {
		s.log.Warn("stopping with calls in flight: they took longer than the drain time-out", "held", s.held.len())
	}
	cancel()
	stop(errStopped) // held calls tell their clients and their workers
	ended := make(chan struct{})
	go func() { s.handlers.Wait(); close(ended) }() // ends when the last handler does, each of which is bounded by WriteTimeout
	select {
	case <-ended:
	case <-time.After(storeTimeout + time.Second):
	}
	_ = srv.Close()
	<-ended
	background.Wait()
	return err
}

func (s *Server) heartbeat() cluster.Heartbeat {
	return cluster.Heartbeat{ID: string(s.cfg.ID), Role: cluster.RoleAPI, Version: s.deps.Version, Host: hostname(), Started: s.started.UnixMilli(), Epoch: s.deps.Process, Traffic: s.traffic.report(s.held.all())}
}

// routes builds the router.
func (s *Server) routes() *echo.Echo {
	e := echo.New()
	e.HideBanner, e.HidePort = true, true
	e.HTTPErrorHandler = s.handleError
	e.Use(s.identify, s.observe, s.recoverPanic, s.authenticate, checkQuery)

	e.POST(string(job.ChatCompletions), s.complete(job.ChatCompletions))
	e.POST(string(job.Completions), s.complete(job.Completions))
	e.POST(string(job.Embeddings), s.complete(job.Embeddings))
	e.POST(string(job.Responses), s.complete(job.Responses))
	e.GET("/v1/responses/:id", s.getResponse)
	e.DELETE("/v1/responses/:id", s.deleteResponse)
	e.POST("/v1/responses/:id/cancel", s.cancelResponse)
	e.GET("/v1/models", s.listModels)
	e.GET("/v1/models/:model", s.getModel)
	e.GET("/v1/usage", s.ownUsage)

	e.POST("/v1/jobs", s.createJob)
	e.GET("/v1/jobs", s.listJobs)
	e.GET("/v1/jobs/:id", s.getJob)
	e.DELETE("/v1/jobs/:id", s.deleteJob)
	e.POST("/v1/jobs/:id/cancel", s.cancelJob)
	e.GET("/v1/jobs/:id/events", s.jobEvents)

	e.POST("/v1/batches", s.createBatch)
	e.GET("/v1/batches", s.listBatches)
	e.GET("/v1/batches/:id", s.getBatch)
	e.POST("/v1/batches/:id/cancel", s.cancelBatch)
	e.GET("/v1/batches/:id/results", s.batchResults)
	e.POST("/v1/batches/:id/retry", s.retryBatch)

	e.POST("/v1/files", s.createFile)
	e.GET("/v1/files", s.listFiles)
	e.GET("/v1/files/:id", s.getFile)
	e.DELETE("/v1/files/:id", s.deleteFile)
	e.GET("/v1/files/:id/content", s.fileContent)

	e.GET("/admin/v1/workers", s.adminWorkers)
	e.POST("/admin/v1/workers/:id/drain", s.drainWorker)
	e.GET("/admin/v1/queues", s.adminQueues)
	e.GET("/admin/v1/jobs", s.adminJobs)
	e.POST("/admin/v1/batches/:id/cancel", s.adminCancelBatch)
	e.GET("/admin/v1/tenants", s.listTenants)
	e.POST("/admin/v1/tenants", s.createTenant)
	e.GET("/admin/v1/tenants/:id", s.getTenant)
	e.PATCH("/admin/v1/tenants/:id", s.updateTenant)
	e.DELETE("/admin/v1/tenants/:id", s.deleteTenant)
	e.GET("/admin/v1/keys", s.listKeys)
	e.POST("/admin/v1/keys", s.createKey)
	e.GET("/admin/v1/keys/:id", s.getKey)
	e.DELETE("/admin/v1/keys/:id", s.revokeKey)
	e.POST("/admin/v1/keys/:id/rotate", s.rotateKey)
	e.POST("/admin/v1/keys/:id/revoke", s.revokeKey)
	e.GET("/admin/v1/usage", s.adminUsage)
	e.GET("/admin/v1/pools", s.listPools)
	e.POST("/admin/v1/pools", s.createPool)
	e.GET("/admin/v1/pools/:name", s.getPool)
	e.PUT("/admin/v1/pools/:name", s.replacePool)
	e.DELETE("/admin/v1/pools/:name", s.deletePool)
	e.GET("/admin/v1/pools/:name/desired", s.desiredWorkers)
	e.GET("/admin/v1/scaling", s.listScaling)

	e.GET("/healthz", s.healthz)
	e.GET("/readyz", s.readyz)
	e.GET("/openapi.json", s.openAPI)
	return e
}
