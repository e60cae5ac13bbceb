package client

import (
	"context"
	"net/http"

	"github.com/millrace/millrace/internal/job"
)

// Worker is a live worker as the API sees it.
type Worker struct {
	ID       job.Worker  `json:"id"`
	Name     string      `json:"name"`
	State    string      `json:"state"`
	Reason   string      `json:"reason,omitempty"`
	Models   []job.Model `json:"models"`
	Engine   string      `json:"engine"`
	Capacity job.Tokens  `json:"kv_capacity"`
	Free     job.Tokens  `json:"kv_free"`
	// Source of Capacity: engine or estimated.
	Source          string  `json:"capacity_source"`
	Running         int     `json:"running"`
	InHand          int     `json:"in_hand"`
	TokensPerSecond float64 `json:"tokens_per_second"`
	Completed       int64   `json:"completed"`
	Failed          int64   `json:"failed"`
	Version         string  `json:"version,omitempty"`
	Host            string  `json:"host,omitempty"`
}

// Workers lists the live workers. It needs the admin key where one is configured.
func (c *Client) Workers(ctx context.Context) ([]Worker, error) {
	var list struct {
		Data []Worker `json:"data"`
	}
	err := c.do(ctx, request{method: http.MethodGet, path: "/admin/v1/workers"}, &list)
	return list.Data, err
}

// ModelQueue is what waits and runs of one model.
type ModelQueue struct {
	Model job.Model `json:"model"`
	// Waiting counts the jobs that any worker may take, by class; WaitingLines those in each tenant's line; Running those that workers have.
	Waiting      map[job.Class]int  `json:"waiting"`
	WaitingLines map[job.Tenant]int `json:"waiting_lines"`
	Running      int                `json:"running"`
	// RunningTokens of CapacityTokens are held by running jobs.
	RunningTokens  job.Tokens `json:"running_tokens"`
	CapacityTokens job.Tokens `json:"capacity_tokens"`
	// WorkFill is the share of the stream's limit in use, 0 to 1.
	WorkFill      float64 `json:"work_fill"`
	JobsPerSecond float64 `json:"jobs_per_second"`
	// Workers counts them by state.
	Workers map[string]int `json:"workers"`
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
