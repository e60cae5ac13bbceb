package platform

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"strconv"
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/millrace/millrace/api"
	"github.com/millrace/millrace/autoscaler"
	"github.com/millrace/millrace/dispatcher"
	"github.com/millrace/millrace/internal/embedded"
	"github.com/millrace/millrace/internal/engine"
	"github.com/millrace/millrace/internal/engine/emulator"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
	"github.com/millrace/millrace/internal/provider"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/results"
	"github.com/millrace/millrace/worker"
)

// Config of a Platform. Zero fields get the defaults named.
type Config struct {
	// Dir holds the embedded queue's store and database. Only one process may use it at a time.
	Dir string
	// Relaxed lets the embedded queue sync each 100 ms in place of before each 202: a power cut then loses what came in that time.
	Relaxed bool
	// NATSListen is an address at which the embedded queue takes connections from other processes; "" is none.
	NATSListen string
	// NATSURL and RedisURL name servers to use in place of the embedded ones.
	NATSURL, RedisURL string
	// BlobURL says where objects are kept, as blob.Config.URL does; "" is the queue's server, and beside an embedded one the folder "files" in Dir for files and what belongs to batches.
	BlobURL string
	// DatabaseURL names a database to use in place of the SQLite file in Dir, as ledger.Config.URL does. Its schema must be there; that of the file in Dir is made.
	DatabaseURL string
	// PoolsFile names pools whose workers are processes of this machine, which an autoscaler in this process starts and stops; "" is none. WorkerJoin is what these workers get beside what they need to join.
	PoolsFile  string
	WorkerJoin provider.Join
	// Workers is how many are in this process, each beside an engine of its own; default one for each of Engines, or 1 if there are none and no pools.
	Workers int
	// Engine is the engine of all workers in this process but those that Engines names. Without a URL each has an emulator in this process, as Emulator describes it.
	Engine   engine.Config
	Engines  []engine.Config
	Emulator emulator.Config

	API        api.Config
	Dispatcher dispatcher.Config
	Worker     worker.Config
	Queue      queue.Config
	Results    results.Config
	Version    string
}

// The embedded queue's limits on what it holds, in bytes: what a laptop's disk has to spare. They bound what is accepted and take no room before.
const (
	embeddedWork  = 2 << 30
	embeddedDone  = 4 << 30
	embeddedLive  = 64 << 20
	embeddedStore = 1 << 40 // above the sum of all streams' limits: a stream that does not fit below would be refused
)

// Platform is all roles in one process.
type Platform struct {
	api        *API
	dispatcher *dispatcher.Dispatcher
	workers    []*worker.Worker
	autoscaler *autoscaler.Autoscaler // nil without pools
	backbone   *Backbone
	nats       *embedded.NATS
	// stages end one after the other: who takes work before who does it.
	stages  [][]part
	closers []func()
}

// part is something that runs.
type part struct {
	name string
	run  func(context.Context) error
}

// New starts the embedded servers, connects, and makes all roles. It opens the API's port, and answers nothing before Run. A Platform that does not Run must be closed.
func New(ctx context.Context, cfg Config, reg prometheus.Registerer, log *slog.Logger) (_ *Platform, err error) {
	p := &Platform{}
	defer func() {
		if err != nil {
			p.Close()
		}
	}()
	bc := BackboneConfig{
		Name: "millrace", NATSURL: cfg.NATSURL, RedisURL: cfg.RedisURL, BlobURL: cfg.BlobURL, DatabaseURL: cfg.DatabaseURL, Queue: cfg.Queue, Results: cfg.Results, Version: cfg.Version,
	}
	if cfg.NATSURL == "" || cfg.PoolsFile != "" {
		unlock, err := lock(cfg.Dir)
		if err != nil {
			return nil, err
		}
		p.onClose(unlock)
	}
	if cfg.NATSURL == "" {
		nc := embedded.NATSConfig{
			Dir: filepath.Join(cfg.Dir, "nats"), Relaxed: cfg.Relaxed, Listen: cfg.NATSListen, StoreLimit: embeddedStore, MemoryLimit: embeddedStore, Log: log.With("part", "nats"),
		}
		if cfg.PoolsFile != "" && cfg.NATSListen == "" {
			nc.Listen, nc.User, nc.Password = "127.0.0.1:0", "millrace", rand.Text() // for the workers alone, which get the password in their environment
		}
		server, err := embedded.StartNATS(nc)
		if err != nil {
			return nil, err
		}
		p.nats = server
		p.onClose(server.Shutdown)
		bc.NATSURL = server.URL()
		bc.InProcess, bc.FilesDir = server, filepath.Join(cfg.Dir, "files")
		setDefault(&bc.Queue.WorkMaxBytes, embeddedWork)
		setDefault(&bc.Queue.DoneMaxBytes, embeddedDone)
		setDefault(&bc.Queue.LiveMaxBytes, embeddedLive)
	}
	if cfg.RedisURL == "" {
		store, err := embedded.StartRedis()
		if err != nil {
			return nil, err
		}
		p.onClose(store.Close)
		bc.RedisURL = store.URL()
	}
	if cfg.DatabaseURL == "" {
		if bc.DatabaseURL, err = ownDatabase(ctx, cfg.Dir, log); err != nil {
			return nil, err
		}
	}
	if p.backbone, err = OpenBackbone(ctx, bc, log); err != nil {
		return nil, err
	}
	p.onClose(p.backbone.Close)
	if err := p.addRoles(cfg, reg, log); err != nil {
		return nil, err
	}
	if cfg.PoolsFile != "" {
		if err := p.addAutoscaler(ctx, cfg, bc.Join(), reg, log); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// ownDatabase is the URL of the database in dir, with the newest schema.
func ownDatabase(ctx context.Context, dir string, log *slog.Logger) (string, error) {
	if dir == "" {
		return "", errors.New("no folder for the database is given: name one with --data, or a database with --database-url")
	}
	url := "sqlite:" + filepath.Join(dir, "millrace.db")
	if _, _, err := ledger.Migrate(ctx, ledger.Config{URL: url}, log); err != nil {
		return "", fmt.Errorf("preparing the database in %s: %w", dir, err)
	}
	return url, nil
}

func (p *Platform) addRoles(cfg Config, reg prometheus.Registerer, log *slog.Logger) (err error) {
	if p.api, err = p.backbone.API(cfg.API, reg, log); err != nil {
		return fmt.Errorf("making the API: %w", err)
	}
	if p.dispatcher, err = p.backbone.Dispatcher(cfg.Dispatcher, reg, log); err != nil {
		return fmt.Errorf("making the dispatcher: %w", err)
	}
	var workers, emulators []part
	n := max(cfg.Workers, len(cfg.Engines))
	if n == 0 && cfg.PoolsFile == "" {
		n = 1
	}
	for i := range n {
		wc, ec, name := cfg.Worker, cfg.Engine, "worker-"+strconv.Itoa(i+1)
		if i < len(cfg.Engines) {
			ec = cfg.Engines[i]
		}
		if wc.Name == "" {
			wc.Name = name
		}
		if ec.URL == "" {
			e, err := emulator.New(cfg.Emulator, log.With("part", "emulator", "name", name))
			if err != nil {
				return fmt.Errorf("making the emulator: %w", err)
			}
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				return fmt.Errorf("listening for the emulator: %w", err)
			}
			p.onClose(func() { _ = l.Close() }) // closed already if it ran
			emulators = append(emulators, part{"emulator of " + name, func(ctx context.Context) error { return e.Serve(ctx, l) }})
			ec.URL = "http://" + l.Addr().String()
			wc.GPUs = []string{worker.NoGPUs} // it uses none
			// They are told before it is ready.
			if len(wc.Models) == 0 {
				for _, m := range e.Models() {
					wc.Models = append(wc.Models, job.Model(m))
				}
			}
		}
		w, err := p.backbone.Worker(wc, ec, reg, log)
		if err != nil {
			return fmt.Errorf("making %s: %w", name, err)
		}
		p.workers = append(p.workers, w)
		workers = append(workers, part{name, w.Run})
	}
	p.stages = [][]part{{{"api", p.api.Run}}, workers, {{"dispatcher", p.dispatcher.Run}}, emulators}
	return nil
}

func setDefault[T comparable](v *T, def T) {
	var zero T
	if *v == zero {
		*v = def
	}
}

func (p *Platform) onClose(f func()) { p.closers = append(p.closers, f) }

// Close ends what New started, and what Run has left.
func (p *Platform) Close() {
	for i := len(p.closers) - 1; i >= 0; i-- {
		p.closers[i]()
	}
	p.closers = nil
}

// URL is the API's base, as this machine reaches it.
func (p *Platform) URL() string {
	host, port, err := net.SplitHostPort(p.api.Addr())
	if ip := net.ParseIP(host); err == nil && ip != nil && ip.IsUnspecified() {
		return "http://" + net.JoinHostPort("127.0.0.1", port)
	}
	return "http://" + p.api.Addr()
}

// NATS is the embedded server; nil if another one is used.
func (p *Platform) NATS() *embedded.NATS { return p.nats }

// Ready holds a check for each part: nil when it can do its work.
func (p *Platform) Ready() map[string]func() error {
	checks := map[string]func() error{"api": p.api.Ready, "dispatcher": p.dispatcher.Ready}
	if p.autoscaler != nil {
		checks["autoscaler"] = p.autoscaler.Ready
	}
	for i, w := range p.workers {
		checks["worker-"+strconv.Itoa(i+1)] = w.Ready
	}
	return checks
}

// Run runs all roles until ctx ends, or one of them fails. It then ends them in order, so that each still finds what it needs: the API first, which finishes
// the answers that clients wait for, then the autoscaler, whose workers drain and end, then the workers, which drain, then the rest; and closes the platform.
func (p *Platform) Run(ctx context.Context) error {
	defer p.Close()
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	type stage struct {
		stop  context.CancelFunc
		ended sync.WaitGroup
	}
	stages := make([]stage, len(p.stages))
	var mu sync.Mutex
	var errs []error
	for i, parts := range p.stages {
		// Each stage outlives ctx until it is its turn to end.
		own, stop := context.WithCancel(context.WithoutCancel(ctx))
		defer stop()
		stages[i].stop = stop
		for _, part := range parts {
			stages[i].ended.Go(func() {
				err := part.run(own)
				if own.Err() == nil && err == nil {
					err = errors.New("ended by itself")
				}
				if err == nil || errors.Is(err, context.Canceled) {
					return
				}
				err = fmt.Errorf("running the %s: %w", part.name, err)
				mu.Lock()
				errs = append(errs, err)
				mu.Unlock()
				fail(err)
			})
		}
	}
	<-ctx.Done()
	for i := range stages {
		stages[i].stop()
		stages[i].ended.Wait()
	}
	return errors.Join(errs...)
}
