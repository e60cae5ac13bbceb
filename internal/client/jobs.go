package client

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/millrace/millrace/internal/job"
)

// Job is the API's job object. Times are unix seconds with milliseconds as fraction, 0 for not yet.
type Job struct {
	ID           job.ID            `json:"id"`
	Object       string            `json:"object"`
	Status       job.State         `json:"status"`
	Endpoint     job.Endpoint      `json:"endpoint"`
	Model        job.Model         `json:"model"`
	Priority     job.Class         `json:"priority"`
	Session      job.Session       `json:"session,omitempty"`
	CreatedAt    float64           `json:"created_at"`
	StartedAt    float64           `json:"started_at,omitempty"`
	FirstTokenAt float64           `json:"first_token_at,omitempty"`
	FinishedAt   float64           `json:"finished_at,omitempty"`
	ExpiresAt    float64           `json:"expires_at"`
	Attempts     []Attempt         `json:"attempts,omitempty"`
	Queue        *Queue            `json:"queue,omitempty"`
	Result       *Result           `json:"result,omitempty"`
	Error        *job.Error        `json:"error"`
	Usage        *job.Usage        `json:"usage,omitempty"`
	Metadata     map[string]string `json:"metadata,omitempty"`

	raw json.RawMessage
}

// UnmarshalJSON reads a job object.
func (j *Job) UnmarshalJSON(b []byte) error {
	type plain Job // without the methods
	if err := json.Unmarshal(b, (*plain)(j)); err != nil {
		return err
	}
	j.raw = bytes.Clone(b)
	return nil
}

// MarshalJSON returns the job object as the server wrote it, with the fields that this client does not know.
func (j Job) MarshalJSON() ([]byte, error) {
	if j.raw != nil {
		return j.raw, nil
	}
	type plain Job
	return json.Marshal(plain(j))
}

// Attempt is one try at a job.
type Attempt struct {
	Worker    string  `json:"worker"`
	StartedAt float64 `json:"started_at"`
	EndedAt   float64 `json:"ended_at,omitempty"`
	Outcome   string  `json:"outcome,omitempty"`
}

// Queue says why a job waits.
type Queue struct {
	Position   int     `json:"position"`
	ETASeconds float64 `json:"eta_seconds"`
	Reason     string  `json:"reason"`
}

// Result is the engine's answer.
type Result struct {
	StatusCode int             `json:"status_code"`
	Body       json.RawMessage `json:"body"`
}

// Submission is a new job. Body is the engine's request, with its model.
type Submission struct {
	Endpoint job.Endpoint      `json:"endpoint,omitempty"`
	Body     json.RawMessage   `json:"body"`
	Priority job.Class         `json:"priority,omitempty"`
	Session  job.Session       `json:"session,omitempty"`
	Stream   *bool             `json:"stream,omitempty"`
	Deadline string            `json:"deadline,omitempty"`
	Metadata map[string]string `json:"metadata,omitempty"`
	// Key makes repeated submissions one job; "" is a fresh one.
	Key string `json:"-"`
}

// Submit stores a job. When it returns, the job is durable.
func (c *Client) Submit(ctx context.Context, s Submission) (*Job, error) {
	if s.Key == "" {
		s.Key = rand.Text()
	}
	var j Job
	err := c.do(ctx, request{
		method: http.MethodPost, path: "/v1/jobs", body: s, header: map[string]string{"Idempotency-Key": s.Key},
	}, &j)
	return &j, err
}

// Job reads a job. With wait the answer comes when the status changes or wait (at most 60 s) is over.
func (c *Client) Job(ctx context.Context, id job.ID, wait time.Duration) (*Job, error) {
	r := request{method: http.MethodGet, path: "/v1/jobs/" + url.PathEscape(string(id)), timeout: c.cfg.Timeout + wait}
	if wait > 0 {
		r.query = url.Values{"wait": {wait.String()}}
	}
	var j Job
	err := c.do(ctx, r, &j)
	return &j, err
}

// Wait reads a job until it has ended.
func (c *Client) Wait(ctx context.Context, id job.ID) (*Job, error) {
	for {
		j, err := c.Job(ctx, id, 30*time.Second)
		if err != nil || j.Status.Ended() {
			return j, err
		}
	}
}

// Filter of a listing; zero fields match all. After is the last id of the page before; Limit 0 is the server's.
type Filter struct {
	Status  job.State
	Model   job.Model
	Session job.Session
	Limit   int
	After   job.ID
}

// Page of a listing, newest first.
type Page struct {
	Object  string `json:"object"`
	Data    []Job  `json:"data"`
	FirstID job.ID `json:"first_id"`
	LastID  job.ID `json:"last_id"`
	HasMore bool   `json:"has_more"`
}

// Jobs lists jobs.
func (c *Client) Jobs(ctx context.Context, f Filter) (*Page, error) {
	q := make(url.Values)
	for name, v := range map[string]string{"status": string(f.Status), "model": string(f.Model), "session": string(f.Session), "after": string(f.After)} {
		if v != "" {
			q.Set(name, v)
		}
	}
	if f.Limit > 0 {
		q.Set("limit", strconv.Itoa(f.Limit))
	}
	var p Page
	err := c.do(ctx, request{method: http.MethodGet, path: "/v1/jobs", query: q}, &p)
	return &p, err
}

// Cancel asks that a job ends without an answer. A job that ended otherwise is an Error with status 409.
func (c *Client) Cancel(ctx context.Context, id job.ID) (*Job, error) {
	var j Job
	err := c.do(ctx, request{method: http.MethodPost, path: "/v1/jobs/" + url.PathEscape(string(id)) + "/cancel"}, &j)
	return &j, err
}

// Delete erases a job, its answer and its record; one that has not ended is cancelled first.
func (c *Client) Delete(ctx context.Context, id job.ID) error {
	return c.do(ctx, request{method: http.MethodDelete, path: "/v1/jobs/" + url.PathEscape(string(id))}, nil)
}

// Models lists the models that can be asked for.
func (c *Client) Models(ctx context.Context) ([]job.Model, error) {
	var list struct {
		Data []struct {
			ID job.Model `json:"id"`
		} `json:"data"`
	}
	if err := c.do(ctx, request{method: http.MethodGet, path: "/v1/models"}, &list); err != nil {
		return nil, err
	}
	models := make([]job.Model, len(list.Data))
	for i, m := range list.Data {
		models[i] = m.ID
	}
	return models, nil
}
