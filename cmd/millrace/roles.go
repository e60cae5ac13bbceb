package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync/atomic"
	"syscall"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"

	"github.com/millrace/millrace/dispatcher"
	"github.com/millrace/millrace/internal/config"
	"github.com/millrace/millrace/internal/engine"
	"github.com/millrace/millrace/internal/platform"
	"github.com/millrace/millrace/internal/telemetry"
)

const (
	defaultNATS  = "nats://127.0.0.1:4222"
	defaultRedis = "redis://127.0.0.1:6379"
)

func newAPI(p *program) *cobra.Command {
	var (
		proc processFlags
		back backboneFlags
		db   databaseFlags
		role apiFlags
	)
	cmd := &cobra.Command{
		Use: "api", Short: "The HTTP face: OpenAI routes, jobs, event streams",
		Long: `Run the API alone. Any number may run; they share nothing but NATS, Redis and the
database, whose schema ` + "`millrace migrate`" + ` makes.

Without a key it listens on this machine only, unless --insecure is given.
On SIGTERM it takes no new connections and finishes the open answers.`,
		Example: "  MILLRACE_DATABASE_URL=postgres://millrace:secret@db/millrace millrace api --listen 0.0.0.0:8080 --nats-url nats://nats:4222 --redis-url redis://redis:6379",
		Args:    args(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := errors.Join(role.check(), back.check(), db.check(true)); err != nil {
				return usageError(cmd, err)
			}
			role.Retention, back.DatabaseURL = back.Queue.Retention, db.url
			return runRole(cmd, p, "api", &proc, &back, func(b *platform.Backbone, reg prometheus.Registerer, log *slog.Logger) (service, error) {
				s, err := b.API(role.Config, reg, log)
				if err != nil {
					return nil, portInUse(err)
				}
				log.Info("listening", "addr", s.Addr())
				return s, nil
			})
		},
	}
	role.add(cmd.Flags())
	addPrefixAffinity(cmd.Flags(), &role.NoPrefixAffinity)
	back.add(cmd.Flags(), defaultNATS, defaultRedis)
	db.add(cmd.Flags(), "required")
	proc.add(cmd.Flags(), "info")
	return cmd
}

func newDispatcher(p *program) *cobra.Command {
	var (
		proc processFlags
		back backboneFlags
		db   databaseFlags
		role dispatcher.Config
	)
	cmd := &cobra.Command{
		Use: "dispatcher", Short: "Keeps waiting work moving: deadlines, dead workers, recovery",
		Long: `Run the dispatcher alone. Any number may run: one leads, the others stand by and
take over within seconds.`,
		Example: "  MILLRACE_DATABASE_URL=postgres://millrace:secret@db/millrace millrace dispatcher --nats-url nats://nats:4222 --redis-url redis://redis:6379",
		Args:    args(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := errors.Join(back.check(), checkFeed(&role), db.check(true), config.AtLeast("max-body", role.BatchMaxLine, 1)); err != nil {
				return usageError(cmd, err)
			}
			back.DatabaseURL = db.url
			return runRole(cmd, p, "dispatcher", &proc, &back, func(b *platform.Backbone, reg prometheus.Registerer, log *slog.Logger) (service, error) {
				return b.Dispatcher(role, reg, log)
			})
		},
	}
	role.BatchMaxLine = 32 << 20
	cmd.Flags().Var((*size)(&role.BatchMaxLine), "max-body", "most `bytes` of one line of a batch, as the API's of one request")
	addFeed(cmd.Flags(), &role)
	back.add(cmd.Flags(), defaultNATS, defaultRedis)
	db.add(cmd.Flags(), "required")
	proc.add(cmd.Flags(), "info")
	return cmd
}

func newWorker(p *program) *cobra.Command {
	var (
		proc processFlags
		back backboneFlags
		eng  engineFlags
		role workerFlags
		// exits bounds how often the engine ends in a row.
		exits int
	)
	cmd := &cobra.Command{
		Use: "worker --engine URL [-- CMD ARGS…]", Short: "Sits beside an engine: pulls what fits, runs it, streams it back",
		Long: `Run a worker beside an inference engine. It needs outbound connections only.

With a command behind "--" it starts the engine itself, watches it, and starts it
again when it ends. On SIGTERM it stops pulling, finishes what runs within --drain,
and gives the rest back to the queue.`,
		Example: `  millrace worker --engine http://127.0.0.1:8000
  millrace worker --engine http://127.0.0.1:8000 -- vllm serve Qwen/Qwen2.5-7B-Instruct --port 8000`,
		Args: func(cmd *cobra.Command, given []string) error {
			if n := cmd.ArgsLenAtDash(); n > 0 || n < 0 && len(given) > 0 {
				return usageError(cmd, fmt.Errorf("%q is not a flag: put -- before the engine's command", given[0]))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, command []string) error {
			if eng.URL == "" {
				return usageError(cmd, errors.New("the engine is missing: name it with --engine http://host:port"))
			}
			if err := errors.Join(eng.check(), role.check(), config.AtLeast("max-engine-exits", exits, 0)); err != nil {
				return usageError(cmd, err)
			}
			return runRole(cmd, p, "worker", &proc, &back, func(b *platform.Backbone, reg prometheus.Registerer, log *slog.Logger) (service, error) {
				w, err := b.Worker(role.Config, eng.Config, reg, log)
				if err != nil || len(command) == 0 {
					return w, err
				}
				child, err := engine.NewProcess(engine.ProcessConfig{Command: command, Stdout: os.Stdout, Stderr: os.Stderr, MaxExits: exits}, log)
				if err != nil {
					return nil, err
				}
				return &withEngine{service: w, engine: child}, nil
			})
		},
	}
	cmd.Flags().StringVar(&role.Name, "name", "", "the worker's `name` (default the host's)")
	cmd.Flags().IntVar(&exits, "max-engine-exits", 0, "how often in a row an engine behind \"--\" may end within a minute until the worker gives up; 0 for any number")
	role.add(cmd.Flags())
	addPrefixAffinity(cmd.Flags(), &role.NoPrefixAffinity)
	eng.add(cmd.Flags())
	back.add(cmd.Flags(), defaultNATS, defaultRedis)
	proc.add(cmd.Flags(), "info")
	return cmd
}

// withEngine is a worker and the engine that it started.
type withEngine struct {
	service
	engine *engine.Process
}

// Run ends the engine after the worker has drained, and the worker when the engine is given up.
func (w *withEngine) Run(ctx context.Context) error {
	own, stop := context.WithCancel(context.WithoutCancel(ctx)) // the engine outlives the order to stop, until the worker has ended
	defer stop()
	ctx, giveUp := context.WithCancel(ctx)
	defer giveUp()
	ended := make(chan error, 1)
	go func() {
		err := w.engine.Run(own)
		giveUp()
		ended <- err
	}()
	err := w.service.Run(ctx)
	stop()
	return errors.Join(err, <-ended)
}

// service is what the roles have in common.
type service interface {
	Run(context.Context) error
	// Ready is nil while the role can do its work.
	Ready() error
}

// runRole runs one role until the command's context ends. Health and metrics are served from the beginning, also while the servers are waited for.
func runRole(cmd *cobra.Command, p *program, name string, proc *processFlags, back *backboneFlags,
	open func(*platform.Backbone, prometheus.Registerer, *slog.Logger) (service, error),
) error {
	if err := back.check(); err != nil {
		return usageError(cmd, err)
	}
	log, err := proc.logger(p)
	if err != nil {
		return err
	}
	ctx := cmd.Context()
	reg := telemetry.NewRegistry(buildVersion())
	var ready atomic.Pointer[func() error]
	_, stop, err := proc.serve(ctx, reg, log, map[string]func() error{name: func() error {
		if f := ready.Load(); f != nil {
			return (*f)()
		}
		return errors.New("it waits for NATS, Redis or the database")
	}})
	if err != nil {
		return err
	}
	defer stop()

	back.Name = "millrace-" + name
	log.Info("starting", "role", name, "version", buildVersion())
	b, err := platform.OpenBackbone(ctx, back.BackboneConfig, log)
	if err != nil {
		return ended(ctx, err)
	}
	defer b.Close()
	role, err := open(b, reg, log)
	if err != nil {
		return err
	}
	check := role.Ready
	ready.Store(&check)
	context.AfterFunc(ctx, func() { log.Info("stopping: finishing what runs; a second signal ends it at once") })
	if err := ended(ctx, role.Run(ctx)); err != nil {
		return err
	}
	log.Info("stopped")
	return nil
}

// portInUse adds to such an error of the API what to do.
func portInUse(err error) error {
	if errors.Is(err, syscall.EADDRINUSE) {
		return fmt.Errorf("%w: choose another address with --listen", err)
	}
	return err
}

// ended is err, or nil for the end that was asked for.
func ended(ctx context.Context, err error) error {
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// serve serves metrics and health at addr until stop is called, which waits for the end. The listener outlives ctx: a draining process still tells how it is.
func (c *processFlags) serve(ctx context.Context, reg *prometheus.Registry, log *slog.Logger, ready map[string]func() error) (addr string, stop func(), err error) {
	if c.metrics == off {
		return "", func() {}, nil
	}
	l, err := telemetry.Listen(telemetry.ListenerConfig{Addr: c.metrics, Registry: reg, Ready: ready, Pprof: c.pprof, Log: log})
	if err != nil {
		return "", nil, err
	}
	own, cancel := context.WithCancel(context.WithoutCancel(ctx))
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := l.Run(own); err != nil { // the role is worth more than its metrics
			log.Error("metrics are not served any more", "err", err)
		}
	}()
	return l.Addr(), func() { cancel(); <-done }, nil
}
