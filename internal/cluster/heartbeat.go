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
	RoleAutoscaler Role = "autoscaler"
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
	// QueuesAge is how long ago it saw them, in seconds: a store that is away keeps it from looking.
	QueuesAge float64 `json:"queues_age_seconds,omitempty"`
	// Traffic is what came in at an API, by model.
	Traffic []Traffic `json:"traffic,omitempty"`
	// Pools is what the leading autoscaler does about each pool.
	Pools []PoolInfo `json:"pools,omitempty"`
}

// Traffic is what came in at one API for one model: jobs and calls that it let in, without lines of batches.
type Traffic struct {
	Model job.Model `json:"model"`
	// Jobs and Tokens (expected) since the API's start; Squares is the sum of the squares of each one's tokens.
	Jobs    int64   `json:"jobs"`
	Tokens  int64   `json:"tokens"`
	Squares float64 `json:"squares"`
	// Held calls, which are answered on their connections, by whether a worker has them: jobs and expected tokens. They are in no backlog.
	WaitingCalls  int        `json:"waiting_calls,omitempty"`
	WaitingTokens job.Tokens `json:"waiting_tokens,omitempty"`
	RunningCalls  int        `json:"running_calls,omitempty"`
	RunningTokens job.Tokens `json:"running_tokens,omitempty"`
}

// PoolInfo is what the leading autoscaler knows of a pool.
type PoolInfo struct {
	Name   string      `json:"name"`
	Models []job.Model `json:"models"`
	// Wanted workers, and those that there are.
	Wanted   int `json:"wanted"`
	Ready    int `json:"ready"`
	Starting int `json:"starting"`
	Draining int `json:"draining"`
	Max      int `json:"max"`
	// Desired is how many there are to be and still are until they have drained: for those who set the number by it.
	Desired int `json:"desired"`
	// WorkerRate is how many expected tokens one of its workers gets done per second while it is full; 0 is unknown.
	WorkerRate float64 `json:"worker_tokens_per_second,omitempty"`
	// ColdStart is how long a start is expected to take, in seconds.
	ColdStart float64 `json:"cold_start_seconds,omitempty"`
	// ReadyAt is when the first of those that start is expected to be ready, in unix seconds; 0 if none starts.
	ReadyAt float64 `json:"ready_at,omitempty"`
	// Unavailable says why starts fail, RetryAt when the next one is tried (unix seconds); "" while they do not.
	Unavailable string  `json:"unavailable,omitempty"`
	RetryAt     float64 `json:"retry_at,omitempty"`
	// Action and Reason of the last decision.
	Action string `json:"action"`
	Reason string `json:"reason"`
}

// WorkerInfo is the worker's part of a heartbeat.
type WorkerInfo struct {
	Name   string      `json:"name"`
	State  WorkerState `json:"state"`
	Reason string      `json:"reason,omitempty"`
	// Models that it serves; while it starts those that it is sure to, none if it does not know yet.
	Models []job.Model `json:"models"`
	// NoneWanted: it has none, and will hardly have any, as the engine serves others than those that it is to serve.
	NoneWanted bool       `json:"none_wanted,omitempty"`
	Engine     string     `json:"engine"` // kind
	Capacity   job.Tokens `json:"kv_capacity"`
	Used       job.Tokens `json:"kv_used"`
	// Free is what may still be granted: less than what is not used, by a reserve.
	Free job.Tokens `json:"kv_free"`
	// Source of Capacity: "engine" or "estimated".
	Source string `json:"capacity_source"`
	// Largest is the longest request in tokens that fits: the smaller of the context length and one rank's capacity.
	Largest         job.Tokens `json:"largest"`
	Level           int        `json:"level"`
	Running         int        `json:"running"`
	InHand          int        `json:"in_hand"`
	TokensPerSecond float64    `json:"tokens_per_second"`
	// Generated counts the tokens that jobs got here since the worker's start.
	Generated int64 `json:"generated_tokens"`
	Completed int64 `json:"completed"`
	Failed    int64 `json:"failed"`
	// Served counts the expected tokens of the jobs that ended here since the worker's start: the measure of backlogs.
	Served int64 `json:"served_tokens"`
	// FreeRank is the largest free room in one data-parallel rank: a job must fit in one.
	FreeRank job.Tokens `json:"kv_free_rank"`
	// Load is the share of what may be used that is, 0..1 and more: of the KV cache, or of the sequences or the engine's places where fewer of those are free. CacheLoad is that of the KV cache alone; an older worker does not tell.
	Load      float64 `json:"load"`
	CacheLoad float64 `json:"cache_load,omitempty"`
	// TTFT is the expected time to the first token of a typical job that would start now, in seconds; 0 is unknown.
	TTFT float64 `json:"expected_ttft_seconds"`
	// EngineWaiting is how many requests wait inside the engine, Limit how many sequences may run at once (0: no limit), Brake why nothing is pulled though there is room.
	EngineWaiting int    `json:"engine_waiting"`
	Limit         int    `json:"concurrency_limit,omitempty"`
	Brake         string `json:"brake,omitempty"`
	// Sequences are those of the running jobs; an older worker does not tell. PlaceLimit is how many may run for one more to start while requests wait inside the engine, BatchLimit that for one of the batch class, to which an
	// engine's last places are not given; 0 where only Limit bounds them.
	Sequences  int `json:"sequences,omitempty"`
	PlaceLimit int `json:"place_limit,omitempty"`
	BatchLimit int `json:"batch_limit,omitempty"`
	// Yields: it takes only what others have no room for.
	Yields bool `json:"yields,omitempty"`
	// ChatOnly are those of Models whose engine surely does not serve /v1/responses itself: such requests are made chats, which cannot do all.
	ChatOnly []job.Model `json:"chat_only,omitempty"`
	// StateSince is when State began, in unix seconds by the worker's clock; FallBacks how often the engine stopped being ready; ProbeSeconds what its last probe that was passed took.
	StateSince   float64 `json:"state_since"`
	FallBacks    int64   `json:"fall_backs"`
	ProbeSeconds float64 `json:"probe_seconds"`
	// Shape is how the engine spreads over GPUs, GPUs what is known of each.
	Shape Shape `json:"shape"`
	GPUs  []GPU `json:"gpus,omitempty"`
}

// Shape is how one engine spreads a model over GPUs. A request must fit in one data-parallel rank; a rank spans TensorParallel x PipelineParallel GPUs.
type Shape struct {
	TensorParallel   int `json:"tensor_parallel"`
	PipelineParallel int `json:"pipeline_parallel"`
	DataParallel     int `json:"data_parallel"`
	// Devices are the GPUs that the engine uses, by index or UUID; nil is unknown.
	Devices []string `json:"devices,omitempty"`
}

// GPU is what one GPU says of itself.
type GPU struct {
	Index int    `json:"index"`
	UUID  string `json:"uuid"`
	Model string `json:"model"`
	// MemoryTotal and MemoryUsed in bytes; Utilization 0..1; Temperature in degrees Celsius.
	MemoryTotal uint64  `json:"memory_total"`
	MemoryUsed  uint64  `json:"memory_used"`
	Utilization float64 `json:"utilization"`
	Temperature int     `json:"temperature"`
	// ECCUncorrected counts uncorrectable memory errors since the driver was loaded; Xid is the last Xid error's number, 0 if there was none.
	ECCUncorrected uint64 `json:"ecc_uncorrected"`
	Xid            uint64 `json:"xid,omitempty"`
	// Fault is why the GPU must not be used; "" if it may.
	Fault string `json:"fault,omitempty"`
	// Stale: the driver has not answered for a while, and the other fields are its last answer.
	Stale bool `json:"stale,omitempty"`
}

// QueueInfo is one model's queue as the dispatcher sees it.
type QueueInfo struct {
	Model job.Model `json:"model"`
	// Waiting jobs in the lane `any` of WORK and LIVE together by class; WaitingLines counts each tenant's waiting line; Running the delivered ones.
	Waiting      map[job.Class]int  `json:"waiting"`
	WaitingLines map[job.Tenant]int `json:"waiting_lines,omitempty"`
	Running      int                `json:"running"`
	// BatchLines counts each tenant's lines of batches that are not fed yet and so stand nowhere else here, BatchTokens is what they are expected to need.
	BatchLines  map[job.Tenant]int `json:"batch_lines,omitempty"`
	BatchTokens job.Tokens         `json:"batch_tokens,omitempty"`
	// Lines counts the jobs in all waiting lines by class; each batch that has lines to feed counts as one more. Quota are the tenants whose work waits for their own limit on running work.
	Lines map[job.Class]int `json:"lines,omitempty"`
	Quota []job.Tenant      `json:"quota,omitempty"`
	// Delivered counts the durable jobs that workers have, by class.
	Delivered map[job.Class]int `json:"delivered,omitempty"`
	// Backlog is what each tenant has accepted and not ended: of those who have the most, for a heartbeat is small. Total is that of all.
	Backlog map[job.Tenant]Backlog `json:"backlog,omitempty"`
	Total   Backlog                `json:"backlog_total"`
	// ByClass parts Total by class.
	ByClass map[job.Class]Backlog `json:"backlog_by_class,omitempty"`
	// WorkFill is the share of the WORK stream's limit in use, 0..1.
	WorkFill float64 `json:"work_fill"`
}

// Backlog is durable work that was accepted and has not ended.
type Backlog struct {
	Jobs   int        `json:"jobs"`
	Bytes  int64      `json:"bytes"`
	Tokens job.Tokens `json:"tokens"` // prompts and expected answers
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
