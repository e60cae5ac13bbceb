// Package platform puts the parts together: the backbone that the roles of every process meet at, and a whole platform in one process.
package platform

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/cenkalti/backoff/v5"
	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/millrace/millrace/api"
	"github.com/millrace/millrace/autoscaler"
	"github.com/millrace/millrace/dispatcher"
	"github.com/millrace/millrace/internal/batch"
	"github.com/millrace/millrace/internal/blob"
	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/engine"
	"github.com/millrace/millrace/internal/gpu"
	"github.com/millrace/millrace/internal/ledger"
	"github.com/millrace/millrace/internal/provider"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/relay"
	"github.com/millrace/millrace/internal/results"
	"github.com/millrace/millrace/worker"
)

// BackboneConfig of a Backbone.
type BackboneConfig struct {
	// Name of the process in the servers' listings.
	Name string
	// NATSURL and RedisURL of the servers. InProcess, if set, is a NATS server in this process, and of NATSURL the user and the password alone are used.
	NATSURL, RedisURL string
	InProcess         nats.InProcessConnProvider
	// BlobURL says where objects are kept, as blob.Config.URL does; "" is NATS. It is the same in every process of a platform.
	BlobURL string
	// FilesDir, without a BlobURL, is a folder for what the API and the dispatcher alone read and write: files, and what belongs to batches. It is for a process that has the only ones of these roles, and NATS inside it: there big files
	// would take much of its memory.
	FilesDir string
	// DatabaseURL names the database, as ledger.Config.URL does. Without one there is no ledger: enough for workers, not for an API or a dispatcher.
	DatabaseURL string
	// Queue and Results are the same in every process of a platform. Results.URL is not used.
	Queue   queue.Config
	Results results.Config
	// Version of this build.
	Version string
}

// Join is what a worker process needs to meet the same backbone: the variables that set these fields, for those that are set.
func (c *BackboneConfig) Join() provider.Join {
	join := provider.Join{}
	set := func(name, value string) {
		if value != "" && value != "0" && value != "0s" {
			join["MILLRACE_"+name] = value
		}
	}
	set("NATS_URL", c.NATSURL)
	set("REDIS_URL", c.RedisURL)
	set("BLOB_URL", c.BlobURL)
	set("REPLICAS", strconv.Itoa(c.Queue.Replicas))
	set("RETENTION", c.Queue.Retention.String())
	set("WORK_MAX_BYTES", strconv.FormatInt(c.Queue.WorkMaxBytes, 10))
	set("DONE_MAX_BYTES", strconv.FormatInt(c.Queue.DoneMaxBytes, 10))
	set("LIVE_MAX_BYTES", strconv.FormatInt(c.Queue.LiveMaxBytes, 10))
	return join
}

// Backbone is what all roles work with. One process has one, whatever roles it runs.
type Backbone struct {
	conn    *nats.Conn
	queue   *queue.Queue
	blobs   blob.Store
	results *results.Store
	ledger  *ledger.Store // nil without a database
	cluster *cluster.Cluster
	relay   *relay.Relay
	log     *slog.Logger
	version string
	process string
	closers []func()
}

// tryTimeout bounds one try to reach a server at start.
const tryTimeout = 10 * time.Second

// OpenBackbone connects to the database, NATS and Redis. It waits for servers that are not there yet, saying so in the log, until ctx ends; settings that cannot work are
// an error at once.
func OpenBackbone(ctx context.Context, cfg BackboneConfig, log *slog.Logger) (_ *Backbone, err error) {
	b := &Backbone{log: log, version: cfg.Version, process: rand.Text()}
	defer func() {
		if err != nil {
			b.Close()
		}
	}()
	nc, err := queue.Connect(cfg.NATSURL, cfg.Name, cfg.InProcess, log)
	if err != nil {
		return nil, err
	}
	b.conn = nc
	b.onClose(nc.Close)

	// The database is waited for first: one with another schema needs an operator, who should not have to wait for NATS to hear of it.
	if cfg.DatabaseURL != "" {
		if b.ledger, err = await(ctx, log, "database", cfg.DatabaseURL, func(ctx context.Context) (*ledger.Store, error) {
			s, err := ledger.Open(ctx, ledger.Config{URL: cfg.DatabaseURL}, log)
			return s, permanentUnless(err, ledger.ErrUnavailable)
		}); err != nil {
			return nil, fmt.Errorf("opening the database: %w", err)
		}
		b.onClose(func() { _ = b.ledger.Close() }) // what was written is committed
	}

	if b.queue, err = await(ctx, log, "NATS JetStream", cfg.NATSURL, func(ctx context.Context) (*queue.Queue, error) {
		q, err := queue.Open(ctx, nc, cfg.Queue, log)
		return q, permanentUnless(err, queue.ErrUnavailable, nats.ErrConnectionClosed, nats.ErrDisconnected)
	}); err != nil {
		return nil, fmt.Errorf("opening the queue: %w", err)
	}
	b.onClose(b.queue.Close)

	if b.blobs, err = await(ctx, log, "object store", cmp.Or(cfg.BlobURL, cfg.NATSURL), func(ctx context.Context) (blob.Store, error) {
		s, err := blob.Open(ctx, blob.Config{URL: cfg.BlobURL, NATS: nc, Replicas: max(cfg.Queue.Replicas, 1)})
		return s, permanentUnless(err, blob.ErrUnavailable)
	}); err != nil {
		return nil, fmt.Errorf("opening the object store: %w", err)
	}

	if cfg.FilesDir != "" && cfg.BlobURL == "" {
		files, err := blob.OpenDir(cfg.FilesDir)
		if err != nil {
			return nil, err
		}
		b.blobs = blob.Split(b.blobs, files, ledger.FilePrefix, batch.IndexPrefix)
	}

	if b.cluster, err = await(ctx, log, "NATS key-value store", cfg.NATSURL, func(ctx context.Context) (*cluster.Cluster, error) {
		return cluster.Open(ctx, nc, cluster.Config{Replicas: cfg.Queue.Replicas}, log)
	}); err != nil {
		return nil, fmt.Errorf("joining the cluster: %w", err)
	}
	b.onClose(b.cluster.Close)

	rc := cfg.Results
	rc.URL = cfg.RedisURL
	if b.results, err = await(ctx, log, "Redis", cfg.RedisURL, func(ctx context.Context) (*results.Store, error) {
		s, err := results.Open(ctx, rc, log)
		return s, permanentUnless(err, results.ErrUnavailable)
	}); err != nil {
		return nil, fmt.Errorf("opening the result store: %w", err)
	}
	b.onClose(func() { _ = b.results.Close() }) // nothing is buffered there

	b.relay = relay.New(nc, log)
	return b, nil
}

func (b *Backbone) onClose(f func()) { b.closers = append(b.closers, f) }

// Close ends the connections. The roles that use them must have ended.
func (b *Backbone) Close() {
	for i := len(b.closers) - 1; i >= 0; i-- {
		b.closers[i]()
	}
	b.closers = nil
}

// readyTimeout bounds a look at the servers.
const readyTimeout = 2 * time.Second

// Ready is nil while the queue and the result store answer.
func (b *Backbone) Ready() error {
	ctx, cancel := context.WithTimeout(context.Background(), readyTimeout) // whoever asks has no context of its own: the time-out is the bound
	defer cancel()
	if err := b.queue.Healthy(ctx); err != nil {
		return fmt.Errorf("the queue: %w", err)
	}
	if err := b.results.Ping(ctx); err != nil {
		return fmt.Errorf("the result store: %w", err)
	}
	return nil
}

// API is the API's role. It is ready while the servers that it needs answer.
type API struct {
	*api.Server
	backbone *Backbone
	// away is set while the database does not answer.
	away atomic.Bool
}

// Ready is nil while requests can be taken. Without the database inference goes on, for keys that are known already, while files and batches get 503: an API that was taken
// out of service for that would help nobody, so it is only said.
func (a *API) Ready() error {
	if err := a.backbone.Ready(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), readyTimeout) // as in Backbone.Ready
	defer cancel()
	err := a.backbone.ledger.Ping(ctx)
	if was := a.away.Swap(err != nil); err != nil && !was {
		a.backbone.log.Warn("the database does not answer: files, batches and keys that are new here are refused until it does", "err", err)
	} else if err == nil && was {
		a.backbone.log.Info("the database answers again")
	}
	return nil
}

// errNoDatabase says what to do.
var errNoDatabase = errors.New("the database is missing: name it with --database-url, as in postgres://user:password@host:5432/millrace")

// API makes the API's role on this backbone.
func (b *Backbone) API(cfg api.Config, reg prometheus.Registerer, log *slog.Logger) (*API, error) {
	if b.ledger == nil {
		return nil, errNoDatabase
	}
	s, err := api.New(cfg, api.Deps{
		Queue: b.queue, Blobs: b.blobs, Results: b.results, Cluster: b.cluster, Relay: b.relay, Ledger: b.ledger,
		Registerer: reg, Log: log.With("role", "api"), Version: b.version, Process: b.process,
	})
	if err != nil {
		return nil, err
	}
	return &API{Server: s, backbone: b}, nil
}

// Dispatcher makes the dispatcher role on this backbone.
func (b *Backbone) Dispatcher(cfg dispatcher.Config, reg prometheus.Registerer, log *slog.Logger) (*dispatcher.Dispatcher, error) {
	if b.ledger == nil {
		return nil, errNoDatabase
	}
	return dispatcher.New(cfg, dispatcher.Deps{
		Queue: b.queue, Blobs: b.blobs, Results: b.results, Cluster: b.cluster, Relay: b.relay, Ledger: b.ledger,
		Registerer: reg, Log: log.With("role", "dispatcher"), Version: b.version, Process: b.process,
	})
}

// Autoscaler makes the autoscaler's role on this backbone. providers are by the names that pools use.
func (b *Backbone) Autoscaler(cfg autoscaler.Config, providers map[string]provider.Provider, reg prometheus.Registerer, log *slog.Logger) (*autoscaler.Autoscaler, error) {
	if b.ledger == nil {
		return nil, errNoDatabase
	}
	return autoscaler.New(cfg, autoscaler.Deps{
		Cluster: b.cluster, Ledger: b.ledger, Providers: providers, Registerer: reg, Log: log.With("role", "autoscaler"), Version: b.version, Process: b.process,
	})
}

// Worker makes a worker on this backbone, beside the engine e.
func (b *Backbone) Worker(cfg worker.Config, e engine.Config, reg prometheus.Registerer, log *slog.Logger) (*worker.Worker, error) {
	log = log.With("role", "worker", "name", cfg.Name)
	eng, err := engine.New(e, log)
	if err != nil {
		return nil, fmt.Errorf("reaching the engine: %w", err)
	}
	if len(cfg.GPUs) == 0 && !here(e.URL) { // the GPUs of this machine are not the engine's
		cfg.GPUs = []string{worker.NoGPUs}
	}
	return worker.New(cfg, worker.Deps{
		Queue: b.queue, Blobs: b.blobs, Results: b.results, Cluster: b.cluster, Relay: b.relay, Engine: eng, GPUs: gpu.New(gpu.Config{}, log),
		Registerer: reg, Log: log, Version: b.version, Process: b.process,
	})
}

// here tells whether a URL is of this machine.
func here(rawURL string) bool {
	u, err := url.Parse(rawURL)
	if err != nil {
		return false
	}
	ip, err := netip.ParseAddr(u.Hostname())
	return u.Hostname() == "localhost" || err == nil && ip.IsLoopback()
}

// await calls open until it works, fails for good, or ctx ends.
func await[T any](ctx context.Context, log *slog.Logger, what, urls string, open func(context.Context) (T, error)) (T, error) {
	urls = redact(urls)
	// A first try may wait for long before it says anything.
	silent := time.AfterFunc(2*time.Second, func() { log.Warn("waiting for a server", "server", what, "url", urls) })
	defer silent.Stop()
	pause := backoff.NewExponentialBackOff()
	pause.InitialInterval, pause.MaxInterval = 250*time.Millisecond, 5*time.Second
	return backoff.Retry(ctx, func() (T, error) {
		ctx, cancel := context.WithTimeout(ctx, tryTimeout)
		defer cancel()
		return open(ctx)
	}, backoff.WithBackOff(pause), backoff.WithMaxElapsedTime(0), backoff.WithNotify(func(err error, next time.Duration) {
		log.Warn("waiting for a server", "server", what, "url", urls, "again_in", next.Round(time.Millisecond).String(), "err", err)
	}))
}

// redact hides the passwords of a list of URLs.
func redact(urls string) string {
	all := strings.Split(urls, ",")
	for i, s := range all {
		if u, err := url.Parse(s); err == nil {
			all[i] = u.Redacted()
		} else {
			all[i] = "(not a URL)" // it may hold a password all the same
		}
	}
	return strings.Join(all, ",")
}

// permanentUnless marks err as one that waiting does not cure, unless it is one of those that pass or a deadline's.
func permanentUnless(err error, passing ...error) error {
	for _, p := range append(passing, context.DeadlineExceeded) {
		if errors.Is(err, p) {
			return err
		}
	}
	if err != nil {
		return backoff.Permanent(err)
	}
	return nil
}
