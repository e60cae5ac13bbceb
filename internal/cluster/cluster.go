// Package cluster tells who is alive, who leads, and which models are known.
package cluster

import (
	"context"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/millrace/millrace/internal/job"
)

// Role of a process.
type Role string

// The roles that send heartbeats.
const (
	RoleAPI        Role = "api"
	RoleWorker     Role = "worker"
	RoleDispatcher Role = "dispatcher"
)

// WorkerState is what a worker's heartbeat says of it.
type WorkerState string

// The states of a worker.
const (
	Starting WorkerState = "starting" // its engine has not yet completed a probe
	Ready    WorkerState = "ready"
	Draining WorkerState = "draining"
	Stalled  WorkerState = "stalled" // its engine accepted work and makes no progress
	Unready  WorkerState = "unready" // its engine was ready and fails its probe now
)

// Heartbeat is what a process says of itself each second. Its JSON is shared by versions that run side by side: fields are only added.
type Heartbeat struct {
	ID      string      `json:"id"` // job.Worker or job.API
	Role    Role        `json:"role"`
	Version string      `json:"version,omitempty"`
	Host    string      `json:"host,omitempty"`
	Started int64       `json:"started"` // unix ms
	Epoch   string      `json:"process"` // one per process: roles of one process share it
	Worker  *WorkerInfo `json:"worker,omitempty"`
	Leader  bool        `json:"leader,omitempty"`
	// Queues is what the leading dispatcher last saw of each model.
	Queues []QueueInfo `json:"queues,omitempty"`
}

// WorkerInfo is the worker's part of a heartbeat.
type WorkerInfo struct {
	Name     string      `json:"name"`
	State    WorkerState `json:"state"`
	Reason   string      `json:"reason,omitempty"`
	Models   []job.Model `json:"models"`
	Engine   string      `json:"engine"` // kind
	Capacity job.Tokens  `json:"kv_capacity"`
	Free     job.Tokens  `json:"kv_free"`
	// Source of Capacity: "engine" or "estimated".
	Source string `json:"capacity_source"`
	// Largest is the longest request in tokens that fits: the smaller of the context length and one rank's capacity.
	Largest         job.Tokens `json:"largest"`
	Level           int        `json:"level"`
	Running         int        `json:"running"`
	InHand          int        `json:"in_hand"`
	TokensPerSecond float64    `json:"tokens_per_second"`
	Completed       int64      `json:"completed"`
	Failed          int64      `json:"failed"`
}

// QueueInfo is one model's queue as the dispatcher sees it.
type QueueInfo struct {
	Model job.Model `json:"model"`
	// Waiting jobs in the lane `any` of WORK and LIVE together by class; WaitingLines counts each tenant's waiting line; Running the delivered ones.
	Waiting      map[job.Class]int  `json:"waiting"`
	WaitingLines map[job.Tenant]int `json:"waiting_lines,omitempty"`
	Running      int                `json:"running"`
	// WorkFill is the share of the WORK stream's limit in use, 0..1.
	WorkFill float64 `json:"work_fill"`
}

// Member is a process and when it was last heard.
type Member struct {
	Heartbeat
	// Heard is when the last heartbeat arrived, by this process's monotonic clock.
	Heard time.Time
}

// Cluster is one process's view. Safe for concurrent use.
type Cluster struct{ impl }

// Config of a Cluster.
type Config struct {
	// Replicas of the KV buckets. Default 1.
	Replicas int
	// Beat is the heartbeat's period, Silence after how long without one a process counts as dead. Defaults 1 s and 3 s.
	Beat, Silence time.Duration
}

// Open subscribes to heartbeats, asks all members to say who they are at once, and opens the KV buckets.
func Open(ctx context.Context, nc *nats.Conn, cfg Config, log *slog.Logger) (*Cluster, error) {
	panic("cluster")
}

// Close unsubscribes.
func (c *Cluster) Close() { panic("cluster") }

// Announce sends beat() each Beat, at once when asked or when Nudge is called, until ctx ends; then one farewell, after which nobody waits for its silence.
func (c *Cluster) Announce(ctx context.Context, beat func() Heartbeat) error { panic("cluster") }

// Nudge makes this process's announcers beat now.
func (c *Cluster) Nudge() { panic("cluster") }

// Members lists who is alive: heard within Silence. Workers lists the live workers of m ("" = all).
func (c *Cluster) Members() []Member            { panic("cluster") }
func (c *Cluster) Workers(m job.Model) []Member { panic("cluster") }

// Alive tells whether the member id was heard within Silence. While this process is cut off from NATS, and for Silence after it is back or was opened, everybody counts as alive, unless it said farewell.
func (c *Cluster) Alive(id string) bool { panic("cluster") }

// Death is a member that fell silent or said farewell.
type Death struct {
	Heartbeat
	// Farewell: it said so. Charged: heartbeats of other processes kept arriving meanwhile, so that the fault was its own.
	Farewell, Charged bool
}

// Deaths returns a channel of deaths as they are found, until ctx ends. Silence counts from the latest of: last heartbeat heard, this process's own (re)connection, the call of Deaths.
// While cut off nobody dies; if all fall silent at once, 10 s more pass first.
func (c *Cluster) Deaths(ctx context.Context) <-chan Death { panic("cluster") }

// SilentSince tells for an id that may never have been heard whether it counts as dead, `since` being when the observer began to watch (its election).
func (c *Cluster) SilentSince(id string, since time.Time) bool { panic("cluster") }

// Lead calls fn whenever this process holds the lease `name`, with a context that ends when the lease can no longer be trusted: 2 s after the start of its last successful renewal, by the monotonic
// clock. epoch rises from leader to leader. When ctx ends fn's context ends, fn is waited for, and the lease is released. It returns when ctx ends.
func (c *Cluster) Lead(ctx context.Context, name string, fn func(ctx context.Context, epoch uint64)) error {
	panic("cluster")
}

// KnownModel is what is remembered of a model for 24 h after a worker last served it.
type KnownModel struct {
	Model job.Model `json:"model"`
	// Largest is the longest request in tokens that fits its largest worker.
	Largest job.Tokens `json:"largest"`
	// Seen is when a worker last said that it serves it, unix ms.
	Seen   int64  `json:"seen"`
	Engine string `json:"engine,omitempty"`
}

// Remember stores that the model is served now. Call it when a worker becomes ready and then about once a minute.
func (c *Cluster) Remember(ctx context.Context, m KnownModel) error { panic("cluster") }

// Known lists what is remembered and what live workers serve, Largest the largest of both, by name. The KV bucket is watched, so this does no I/O.
func (c *Cluster) Known() []KnownModel { panic("cluster") }

// Connected tells whether NATS is connected now, and since when.
func (c *Cluster) Connected() (bool, time.Time) { panic("cluster") }

type impl struct{}
