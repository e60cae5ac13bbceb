package client

import (
	"context"
	"net/http"
	"net/url"

	"github.com/millrace/millrace/internal/job"
)

// Worker is a live worker as the API sees it.
type Worker struct {
	ID    job.Worker `json:"id"`
	Name  string     `json:"name"`
	State string     `json:"state"`
	// Reason of the state, StateSince when it began, in unix seconds by the worker's clock; FallBacks is how often the engine stopped being ready.
	Reason     string  `json:"reason,omitempty"`
	StateSince float64 `json:"state_since"`
	FallBacks  int64   `json:"fall_backs"`
	// ProbeSeconds is what the engine's last one-token completion took.
	ProbeSeconds float64     `json:"probe_seconds"`
	Models       []job.Model `json:"models"`
	Engine       string      `json:"engine"`
	Shape        Shape       `json:"shape"`
	GPUs         []GPU       `json:"gpus,omitempty"`
	Capacity     job.Tokens  `json:"kv_capacity"`
	Used         job.Tokens  `json:"kv_used"`
	Free         job.Tokens  `json:"kv_free"`
	// FreeRank is the largest free room in one data-parallel rank, Largest the longest request that fits.
	FreeRank job.Tokens `json:"kv_free_rank"`
	Largest  job.Tokens `json:"largest"`
	// Source of Capacity: engine or estimated.
	Source string `json:"capacity_source"`
	// Load is the share in use of what may be, 0 to 1 and more; Level, 0 to 9, is how late the worker comes to work, the lowest first; TTFT is the expected time to a first token in seconds.
	Load  float64 `json:"load"`
	Level int     `json:"level"`
	TTFT  float64 `json:"expected_ttft_seconds"`
	// Running jobs and their Sequences, Limit on these (0 is none), InHand the jobs pulled and not started, EngineWaiting what waits inside the engine. Brake is why nothing is pulled though there is room.
	Running   int `json:"running"`
	Sequences int `json:"sequences,omitempty"`
	Limit     int `json:"concurrency_limit,omitempty"`
	// PlaceLimit is how many sequences may run for one more to start while requests wait inside the engine, BatchLimit that for one of the batch class; 0 where only Limit bounds them.
	PlaceLimit      int     `json:"place_limit,omitempty"`
	BatchLimit      int     `json:"batch_limit,omitempty"`
	InHand          int     `json:"in_hand"`
	EngineWaiting   int     `json:"engine_waiting"`
	Brake           string  `json:"brake,omitempty"`
	TokensPerSecond float64 `json:"tokens_per_second"`
	Completed       int64   `json:"completed"`
	Failed          int64   `json:"failed"`
	Version         string  `json:"version,omitempty"`
	Host            string  `json:"host,omitempty"`
}

// Shape is how an engine is spread over GPUs.
type Shape struct {
	TensorParallel   int `json:"tensor_parallel"`
	PipelineParallel int `json:"pipeline_parallel"`
	DataParallel     int `json:"data_parallel"`
	// Devices by index or UUID, nil if they are not known.
	Devices []string `json:"devices,omitempty"`
}

// GPU is one of an engine's.
type GPU struct {
	Index int    `json:"index"`
	UUID  string `json:"uuid"`
	Model string `json:"model"`
	// MemoryTotal and MemoryUsed in bytes, Utilization 0 to 1, Temperature in degrees Celsius.
	MemoryTotal uint64  `json:"memory_total"`
	MemoryUsed  uint64  `json:"memory_used"`
	Utilization float64 `json:"utilization"`
	Temperature int     `json:"temperature"`
	// ECCUncorrected counts uncorrectable memory errors since the driver was loaded; Xid is the last Xid error.
	ECCUncorrected uint64 `json:"ecc_uncorrected"`
	Xid            uint64 `json:"xid,omitempty"`
	// Fault is why it must not be used, "" if it may. Stale: the driver has not answered for a while.
	Fault string `json:"fault,omitempty"`
	Stale bool   `json:"stale,omitempty"`
}

// Workers lists the live workers. It needs the admin key where one is configured.
func (c *Client) Workers(ctx context.Context) ([]Worker, error) {
	var list struct {
		Data []Worker `json:"data"`
	}
	err := c.do(ctx, request{method: http.MethodGet, path: "/admin/v1/workers"}, &list)
	return list.Data, err
}

// DrainWorker has a worker, by its id or its name, take no more work: it finishes what runs, and stays until its process is told to stop. It needs the admin key where one is configured.
func (c *Client) DrainWorker(ctx context.Context, worker string) (*Worker, error) {
	var w Worker
	if err := c.do(ctx, request{method: http.MethodPost, path: "/admin/v1/workers/" + url.PathEscape(worker) + "/drain"}, &w); err != nil {
		return nil, err
	}
	return &w, nil
}

// PoolState is what the leading autoscaler last said of a pool.
type PoolState struct {
	Name   string      `json:"name"`
	Models []job.Model `json:"models"`
	// Wanted workers, and those that there are; Max is the most that there may be.
	Wanted   int `json:"wanted"`
	Ready    int `json:"ready"`
	Starting int `json:"starting"`
	Draining int `json:"draining"`
	Max      int `json:"max"`
	// WorkerRate is how many expected tokens one worker gets done per second while it is full; 0 is unknown.
	WorkerRate float64 `json:"worker_tokens_per_second,omitempty"`
	// ColdStart is how long a start is expected to take, in seconds.
	ColdStart float64 `json:"cold_start_seconds,omitempty"`
	// ReadyAt is when the first of those that start is expected to be ready, in unix seconds; 0 if none starts.
	ReadyAt float64 `json:"ready_at,omitempty"`
	// Unavailable says why no worker can be started, "" while they can; RetryAt is when the next start is tried, in unix seconds.
	Unavailable string  `json:"unavailable,omitempty"`
	RetryAt     float64 `json:"retry_at,omitempty"`
	// Action and Reason of the last decision.
	Action string `json:"action"`
	Reason string `json:"reason"`
}

// ModelQueue is what waits and runs of one model.
type ModelQueue struct {
	Model job.Model `json:"model"`
	// Waiting counts the jobs that any worker may take, by class; WaitingLines those in each tenant's line; BatchLines each tenant's lines of batches that are not queued yet; Running the jobs that workers have.
	Waiting      map[job.Class]int  `json:"waiting"`
	WaitingLines map[job.Tenant]int `json:"waiting_lines"`
	BatchLines   map[job.Tenant]int `json:"batch_lines"`
	Running      int                `json:"running"`
	// RunningTokens of CapacityTokens are held by running jobs.
	RunningTokens  job.Tokens `json:"running_tokens"`
	CapacityTokens job.Tokens `json:"capacity_tokens"`
	// Backlog is the durable work that is accepted and has not ended.
	Backlog struct {
		Jobs   int64      `json:"jobs"`
		Bytes  int64      `json:"bytes"`
		Tokens job.Tokens `json:"tokens"`
	} `json:"backlog"`
	// WaitingTokens is what waiting jobs and lines are expected to need, TokensPerSecond how fast full workers get such tokens done, ETASeconds when the last that waits now starts; nil is unknown.
	WaitingTokens   job.Tokens `json:"waiting_tokens"`
	TokensPerSecond *float64   `json:"tokens_per_second"`
	ETASeconds      *float64   `json:"eta_seconds"`
	// LimitFill is the largest share of a limit that is in use, LimitName which; nil if there are none.
	LimitFill *float64 `json:"limit_fill"`
	LimitName *string  `json:"limit_name"`
	// WorkFill is the share of the stream's limit in use, 0 to 1.
	WorkFill      float64 `json:"work_fill"`
	JobsPerSecond float64 `json:"jobs_per_second"`
	// Workers counts them by state.
	Workers map[string]int `json:"workers"`
	// Pools are those that start workers for the model.
	Pools []PoolState `json:"pools"`
	// Reason is the first thing that keeps jobs waiting, nil if none wait.
	Reason *string `json:"reason"`
}

// Queues lists the known models' queues. It needs the admin key where one is configured.
func (c *Client) Queues(ctx context.Context) ([]ModelQueue, error) {
	var list struct {
		Data []ModelQueue `json:"data"`
	}
	err := c.do(ctx, request{method: http.MethodGet, path: "/admin/v1/queues"}, &list)
	return list.Data, err
}
