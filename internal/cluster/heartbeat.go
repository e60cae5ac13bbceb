package cluster

import (
	"time"

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

// Member is a process and when it was last heard. What its Heartbeat points to is shared and must not be changed.
type Member struct {
	Heartbeat
	// Heard is when the last heartbeat arrived, by this process's monotonic clock.
	Heard time.Time
}

// beatMessage is a heartbeat as sent.
type beatMessage struct {
	Heartbeat
	// Farewell: the member's last one.
	Farewell bool `json:"farewell,omitempty"`
}
