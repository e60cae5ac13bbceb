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
	// StallTimeout: if work runs and the engine gives no token for so long, its work is handed back and it gets no more until a probe passes. Default 60 s.
	StallTimeout time.Duration
	// ProbeTimeout bounds one probe. Default 30 s.
	ProbeTimeout time.Duration
	// RetryDelay is the pause after a durable job's first charged attempt; it doubles with each one, up to a minute. Default 1 s.
	RetryDelay time.Duration
	// MaxAttempts is how many charged attempts a durable job has; default 5. MaxDeaths is how many deaths of its worker end it; default 3.
	MaxAttempts, MaxDeaths int
	// Schedule is how work is pulled and started.
	Schedule schedule.Config
}

var defaults = Config{
	Drain:        30 * time.Second,
	StallTimeout: time.Minute,
	ProbeTimeout: 30 * time.Second,
	RetryDelay:   time.Second,
	MaxAttempts:  5,
	MaxDeaths:    3,
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
	}{{"MaxAttempts", &c.MaxAttempts, defaults.MaxAttempts}, {"MaxDeaths", &c.MaxDeaths, defaults.MaxDeaths}} {
		if *d.value < 0 {
			return fmt.Errorf("worker: %s is %d, which must not be negative", d.name, *d.value)
		}
		if *d.value == 0 {
			*d.value = d.def
		}
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

// Deps are what a Worker works with. All fields are required.
type Deps struct {
	Queue      *queue.Queue
	Blobs      blob.Store
	Results    *results.Store
	Cluster    *cluster.Cluster
	Relay      *relay.Relay
	Engine     *engine.Engine
	Registerer prometheus.Registerer
	Log        *slog.Logger
	// Version and Process go into heartbeats: roles of one process share Process.
	Version, Process string
}

func (d *Deps) check() error {
	if d.Queue == nil || d.Blobs == nil || d.Results == nil || d.Cluster == nil || d.Relay == nil || d.Engine == nil || d.Registerer == nil || d.Log == nil {
		return errors.New("worker: a dependency is missing")
	}
	return nil
}
