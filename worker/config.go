package worker

import (
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/millrace/millrace/internal/blob"
	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/engine"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/relay"
	"github.com/millrace/millrace/internal/results"
	"github.com/millrace/millrace/internal/schedule"
)

// Config of a Worker. Zero fields get the defaults named.
type Config struct {
	// Name is shown to people; default: the host's name. The worker's id is the name and a random suffix, new at each start.
	Name string
	// Models to serve, of those that the engine has. Default: all.
	Models []job.Model
	// Drain is how long running jobs may go on after the order to stop; what still runs then is handed back. Default 30 s.
	Drain time.Duration
	// StallTimeout: if work runs and the engine shows no progress for so long (no token, no prompt computed, no growth of its cache), its work is handed back and it gets no more until a
	// probe passes. An engine that is full and shows nothing while it works gets three times as long. Default 60 s, which no engine in use takes between two tokens: what is slow is
	// a long prompt on an engine that does not count.
	StallTimeout time.Duration
	// ProbeTimeout bounds one probe. Default 30 s.
	ProbeTimeout time.Duration
	// FailuresInRow is of how many jobs in a row the calls must fail by the engine's fault for it to lose its work. Default 3.
	FailuresInRow int
	// TensorParallel, PipelineParallel and DataParallel are how the engine is spread over GPUs, 0 if it shall be asked. A job must fit in one data-parallel rank.
	TensorParallel, PipelineParallel, DataParallel int
	// GPUs are those that the engine uses, by index or UUID, or AllGPUs or NoGPUs alone: if one of them fails, the worker takes no work. Default: all of the machine, if it has as many as
	// the shape takes; else they are not known.
	GPUs []string
	// SessionTTL is how long after its last turn it is remembered that a session's KV cache is here; default 30 min. PrefixTTL is the same for the beginnings of prompts without a session;
	// default 10 min. NoPrefixAffinity remembers none of those.
	SessionTTL, PrefixTTL time.Duration
	NoPrefixAffinity      bool
	// NoCacheSalt lets engines share their KV caches between tenants: a client's own cache_salt is then left as it is.
	NoCacheSalt bool
	// RetryDelay is the pause after a durable job's first charged attempt; it doubles with each one, up to a minute. Default 1 s.
	RetryDelay time.Duration
	// MaxAttempts is how many charged attempts a durable job has; default 5. MaxDeaths is how many deaths of its worker end it; default 3.
	MaxAttempts, MaxDeaths int
	// Schedule is how work is pulled and started.
	Schedule schedule.Config
}

var defaults = Config{
	Drain:         30 * time.Second,
	StallTimeout:  time.Minute,
	ProbeTimeout:  30 * time.Second,
	FailuresInRow: 3,
	SessionTTL:    30 * time.Minute,
	PrefixTTL:     10 * time.Minute,
	RetryDelay:    time.Second,
	MaxAttempts:   5,
	MaxDeaths:     3,
}

// complete fills in the defaults; host is the machine's name, "" if it has none.
func (c *Config) complete(host string) error {
	for _, d := range []struct {
		name  string
		value *time.Duration
		def   time.Duration
	}{
		{"Drain", &c.Drain, defaults.Drain},
		{"StallTimeout", &c.StallTimeout, defaults.StallTimeout},
		{"ProbeTimeout", &c.ProbeTimeout, defaults.ProbeTimeout},
		{"SessionTTL", &c.SessionTTL, defaults.SessionTTL},
		{"PrefixTTL", &c.PrefixTTL, defaults.PrefixTTL},
		{"RetryDelay", &c.RetryDelay, defaults.RetryDelay},
	} {
		if *d.value < 0 {
			return fmt.Errorf("worker: %s is %s, which must not be negative", d.name, *d.value)
		}
		if *d.value == 0 {
			*d.value = d.def
		}
	}
	for _, d := range []struct {
		name  string
		value *int
		def   int
	}{
		{"FailuresInRow", &c.FailuresInRow, defaults.FailuresInRow},
		{"MaxAttempts", &c.MaxAttempts, defaults.MaxAttempts},
		{"MaxDeaths", &c.MaxDeaths, defaults.MaxDeaths},
	} {
		if *d.value < 0 {
			return fmt.Errorf("worker: %s is %d, which must not be negative", d.name, *d.value)
		}
		if *d.value == 0 {
			*d.value = d.def
		}
	}
	if err := c.checkShape(); err != nil {
		return err
	}
	if c.Name == "" {
		c.Name = host
	}
	if c.Name == "" {
		return errors.New("worker: this machine has no name: set Name")
	}
	if len(c.Name) > 64 {
		return fmt.Errorf("worker: Name has %d characters, at most 64 are allowed", len(c.Name))
	}
	return nil
}

// Deps are what a Worker works with. All fields but GPUs are required.
type Deps struct {
	Queue      *queue.Queue
	Blobs      blob.Store
	Results    *results.Store
	Cluster    *cluster.Cluster
	Relay      *relay.Relay
	Engine     *engine.Engine
	Registerer prometheus.Registerer
	Log        *slog.Logger
	// GPUs tells of the machine's; nil if they do not concern the worker.
	GPUs GPUs
	// Version and Process go into heartbeats: roles of one process share Process.
	Version, Process string
}

func (d *Deps) check() error {
	if d.Queue == nil || d.Blobs == nil || d.Results == nil || d.Cluster == nil || d.Relay == nil || d.Engine == nil || d.Registerer == nil || d.Log == nil {
		return errors.New("worker: a dependency is missing")
	}
	return nil
}
