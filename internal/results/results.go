package results

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-redis/redis_rate/v10"
	"github.com/redis/go-redis/v9"

	"github.com/millrace/millrace/internal/job"
)

// Config of a Store. Zero fields get the defaults named.
type Config struct {
	// URL is redis://, rediss:// or unix://, or several comma-separated host:port of a cluster, the first of which may be written as a URL to give
	// user, password and TLS for all.
	URL string
	// Prefix of every key. Default "mr:".
	Prefix string
	// Retention is how long a record is kept past the job's deadline. Default 7 days.
	Retention time.Duration
	// KeyTTL is how long an idempotency key is kept. Default 24 h.
	KeyTTL time.Duration
	// MaxEvents bounds a job's event stream in entries, roughly: Redis trims whole blocks. Default 20,000.
	MaxEvents int
}

const (
	// opTimeout bounds one method, retries included, so that a store that hangs is noticed well before the callers' five seconds.
	opTimeout = 3 * time.Second
	// beginTimeout bounds opening, which may send all scripts.
	beginTimeout = 10 * time.Second
	// longestDeadline of any job. Lists forget what is older than that and the retention.
	longestDeadline = 7 * 24 * time.Hour
	// heldTTL is longer than any attempt may run.
	heldTTL = 24 * time.Hour
)

// Store is safe for concurrent use.
type Store struct {
	db        redis.UniversalClient
	limiter   *redis_rate.Limiter
	cfg       Config
	log       *slog.Logger
	isCluster bool
	clock     clock
	refused   atomic.Int64 // when a limit last refused a job, unix ms of this machine
	stop      context.CancelFunc
	running   sync.WaitGroup
}

// Open connects, loads the scripts, and reads maxmemory-policy: other than noeviction is refused with a message that says what to set
// (a server that hides its settings gets one warning). A server that does not answer is ErrUnavailable.
func Open(ctx context.Context, cfg Config, log *slog.Logger) (*Store, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	db, isCluster, err := connect(cfg.URL)
	if err != nil {
		return nil, err
	}
	s := &Store{db: db, limiter: redis_rate.NewLimiter(prefixed{db, cfg.Prefix}), cfg: cfg, log: log, isCluster: isCluster}
	if err := s.begin(ctx); err != nil {
		_ = db.Close() // the error that counts is the first one
		return nil, fmt.Errorf("opening the result store: %w", err)
	}
	running, stop := context.WithCancel(context.WithoutCancel(ctx)) // the clock runs until Close, not until ctx ends
	s.stop = stop
	s.running.Go(func() { s.keepTime(running) })
	return s, nil
}

func (c Config) withDefaults() (Config, error) {
	switch {
	case c.Retention < 0:
		return c, fmt.Errorf("result store: Retention %s is below 0", c.Retention)
	case c.KeyTTL < 0:
		return c, fmt.Errorf("result store: KeyTTL %s is below 0", c.KeyTTL)
	case c.MaxEvents < 0:
		return c, fmt.Errorf("result store: MaxEvents %d is below 0", c.MaxEvents)
	}
	if c.Prefix == "" {
		c.Prefix = "mr:"
	}
	if c.Retention == 0 {
		c.Retention = 7 * 24 * time.Hour
	}
	if c.KeyTTL == 0 {
		c.KeyTTL = 24 * time.Hour
	}
	if c.MaxEvents == 0 {
		c.MaxEvents = 20_000
	}
	return c, nil
}

// begin does what must succeed before the store is used.
func (s *Store) begin(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, beginTimeout)
	defer cancel()
	if err := s.readTime(ctx); err != nil {
		return wrap(err, "reading its clock")
	}
	if err := s.checkPolicy(ctx); err != nil {
		return err
	}
	if err := s.loadScripts(ctx); err != nil {
		return wrap(err, "loading the scripts")
	}
	return nil
}

// loadScripts loads the scripts that a node does not know.
func (s *Store) loadScripts(ctx context.Context) error {
	hashes := make([]string, len(scripts))
	for i, sc := range scripts {
		hashes[i] = sc.Hash()
	}
	known, err := s.db.ScriptExists(ctx, hashes...).Result()
	if err != nil {
		return err
	}
	for i, sc := range scripts {
		if !known[i] {
			if err := s.db.ScriptLoad(ctx, sc.text).Err(); err != nil {
				return err
			}
		}
	}
	return nil
}

// checkPolicy refuses servers that may drop keys when memory runs out: a record that vanishes silently is worse than a write that is refused.
// INFO tells the policy also where CONFIG is forbidden.
func (s *Store) checkPolicy(ctx context.Context) error {
	check := func(ctx context.Context, node *redis.Client) error {
		info, err := node.Info(ctx, "memory").Result()
		switch {
		case redis.HasErrorPrefix(err, "section"): // the embedded store has no such section, and evicts nothing
			return nil
		case redis.IsPermissionError(err) || redis.HasErrorPrefix(err, "unknown command"):
			s.log.Warn("the result store hides its settings: make sure that its maxmemory-policy is noeviction", "err", err)
			return nil
		case err != nil:
			return wrap(err, "reading maxmemory-policy")
		}
		_, policy, _ := strings.Cut(info, "\nmaxmemory_policy:")
		policy, _, _ = strings.Cut(policy, "\r")
		if policy != "noeviction" {
			return fmt.Errorf("its maxmemory-policy is %q, so it would drop job records when its memory is full: set `maxmemory-policy noeviction` (CONFIG SET, and in redis.conf)", policy)
		}
		return nil
	}
	switch db := s.db.(type) {
	case *redis.ClusterClient:
		return db.ForEachMaster(ctx, check)
	case *redis.Client:
		return check(ctx, db)
	default:
		return fmt.Errorf("unknown kind of Redis client %T", db)
	}
}

// Close closes all connections.
func (s *Store) Close() error {
	s.stop()
	s.running.Wait()
	if err := s.db.Close(); err != nil {
		return fmt.Errorf("closing the result store: %w", err)
	}
	return nil
}

// Ping returns nil if the store takes writes, else ErrUnavailable. On a cluster it writes to sixteen slots.
func (s *Store) Ping(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	_, err := s.db.Pipelined(ctx, func(p redis.Pipeliner) error {
		for i := range shards {
			p.Set(ctx, s.shardKey(i, "ping"), 1, time.Minute)
		}
		return nil
	})
	if err != nil {
		return wrap(err, "writing to the result store")
	}
	return nil
}

// Now is the store's clock: this machine's monotonic clock corrected by Redis TIME, which is read at Open and every ten seconds. It does no I/O.
func (s *Store) Now() job.Millis { return s.clock.now() }

// call is one run of a script.
type call struct {
	script *script
	keys   []string
	args   []any
}

// inOrder runs the commands that first adds, then the calls, and returns the calls' answers. A single server gets all of it in one round trip and runs it in order. The
// nodes of a cluster do not wait for each other, so there the calls are sent once the rest is answered. A call counts as failed if a command before it failed.
func (s *Store) inOrder(ctx context.Context, first func(redis.Pipeliner), calls ...call) ([]any, error) {
	pipe := s.db.Pipeline()
	first(pipe)
	if s.isCluster && pipe.Len() > 0 {
		if _, err := pipe.Exec(ctx); err != nil {
			return nil, err
		}
	}
	return s.run(ctx, pipe, calls...)
}

// run runs the calls behind the commands of pipe, all in one round trip to each node, and returns the calls' answers.
func (s *Store) run(ctx context.Context, pipe redis.Pipeliner, calls ...call) ([]any, error) {
	begin := pipe.Len()
	for _, c := range calls {
		c.script.EvalSha(ctx, pipe, c.keys, c.args...)
	}
	cmds, execErr := pipe.Exec(ctx)
	answers := make([]any, 0, len(calls))
	for i, cmd := range cmds {
		err := cmd.Err()
		if i < begin {
			if err != nil {
				return nil, err
			}
			continue
		}
		answer, _ := cmd.(*redis.Cmd)
		if c := calls[i-begin]; redis.HasErrorPrefix(err, "NOSCRIPT") { // the server was restarted, or its scripts flushed
			answer = c.script.Run(ctx, s.db, c.keys, c.args...)
		}
		v, err := answer.Result()
		if err == nil && v == nil { // never sent
			err = execErr
		}
		if err != nil {
			return nil, err
		}
		answers = append(answers, v)
	}
	return answers, nil
}
