package job

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Distinct types for what could be confused.
type (
	// Tenant owns jobs and sees only its own.
	Tenant string
	// Model is the name a client asks for and an engine serves.
	Model string
	// Worker is one run of one worker process: a restarted worker has a new one.
	Worker string
	// API is one run of one API process.
	API string
	// Session is the client's affinity key, scoped to its tenant.
	Session string
	// Tokens counts model tokens.
	Tokens int64
	// Token numbers the attempts at one job, rising: of two attempts the one with the higher token owns the job.
	// It is the store's clock in milliseconds, or the previous token + 1 where that is more.
	Token int64
	// Millis is a time as unix milliseconds; 0 is "not yet". As a length of time it is milliseconds.
	Millis int64
)

// DefaultTenant owns everything while no tenants are configured.
const DefaultTenant Tenant = "default"

// NoGroup is the group of a job that belongs to no batch.
const NoGroup = "-"

// MillisOf returns t as unix milliseconds, 0 for the zero time.
func MillisOf(t time.Time) Millis {
	if t.IsZero() {
		return 0
	}
	return Millis(t.UnixMilli())
}

// Time returns m as a time, the zero time for 0.
func (m Millis) Time() time.Time {
	if m == 0 {
		return time.Time{}
	}
	return time.UnixMilli(int64(m))
}

// Duration returns m as a length of time.
func (m Millis) Duration() time.Duration { return time.Duration(m) * time.Millisecond }

// Seconds returns m as seconds with the milliseconds as fraction.
func (m Millis) Seconds() float64 { return float64(m) / 1000 }

// Class orders work: a higher class is pulled and started first. It does not make work less durable.
type Class string

// The classes, highest first.
const (
	Interactive Class = "interactive"
	Standard    Class = "standard"
	Batch       Class = "batch"
)

// Classes lists all classes, highest first.
func Classes() []Class { return []Class{Interactive, Standard, Batch} }

// ParseClass reads a class; the error names the supported ones.
func ParseClass(s string) (Class, error) {
	if c := Class(s); slices.Contains(Classes(), c) {
		return c, nil
	}
	return "", fmt.Errorf("unknown priority %q: use interactive, standard or batch", s)
}

// Rank is the class's place, 0 the highest.
func (c Class) Rank() int { return slices.Index(Classes(), c) }

// Endpoint is the engine's HTTP path that a job calls.
type Endpoint string

// The supported endpoints.
const (
	ChatCompletions Endpoint = "/v1/chat/completions"
	Completions     Endpoint = "/v1/completions"
	Embeddings      Endpoint = "/v1/embeddings"
	Responses       Endpoint = "/v1/responses"
)

// Endpoints lists the supported endpoints.
func Endpoints() []Endpoint { return []Endpoint{ChatCompletions, Completions, Embeddings, Responses} }

// ParseEndpoint reads an endpoint; the error names the supported ones.
func ParseEndpoint(s string) (Endpoint, error) {
	if e := Endpoint(s); slices.Contains(Endpoints(), e) {
		return e, nil
	}
	names := make([]string, 0, 4)
	for _, e := range Endpoints() {
		names = append(names, string(e))
	}
	return "", fmt.Errorf("unsupported endpoint %q: use %s", s, strings.Join(names, ", "))
}

// Generates tells whether the endpoint produces tokens one after the other, and so can be streamed.
func (e Endpoint) Generates() bool { return e == ChatCompletions || e == Completions || e == Responses }

// Job is what was asked, fixed when it was accepted. It travels with the body but does not hold it. Its JSON outlives deploys: it stands in
// stream messages, outcome records and Redis, so fields are only ever added.
type Job struct {
	ID       ID       `json:"id"`
	Tenant   Tenant   `json:"tenant"`
	Model    Model    `json:"model"`
	Endpoint Endpoint `json:"endpoint"`
	Class    Class    `json:"class"`
	// Group is the id of the job's batch, or NoGroup.
	Group   string  `json:"group"`
	Session Session `json:"session,omitempty"`
	// Events asks to keep the token events: the engine is called streaming, and the answer's body is assembled from its chunks.
	Events bool `json:"events,omitempty"`
	// Stream is what the client's own body asked: its connection gets the engine's chunks.
	Stream bool `json:"stream,omitempty"`
	// Created and Expires are times by the store's clock. At Expires a job that has not ended is expired.
	Created Millis `json:"created"`
	Expires Millis `json:"expires"`
	// QueueTimeout bounds the wait from Created to the first start, RunTimeout each attempt; 0 is no bound of its own.
	QueueTimeout Millis            `json:"queue_timeout,omitempty"`
	RunTimeout   Millis            `json:"run_timeout,omitempty"`
	Metadata     map[string]string `json:"metadata,omitempty"`
	// Echo is an object of those fields of a kept response's request that the response repeats, as far as they are small: the request itself goes when the job ends.
	Echo json.RawMessage `json:"echo,omitempty"`
	// Key is the hash of the client's idempotency key, or of the request if it gave none; BodyHash that of the request which the client's key stands for, "" without one.
	Key      string `json:"key,omitempty"`
	BodyHash string `json:"body_hash,omitempty"`
	Cost     Cost   `json:"cost"`
	// BodySize is the body's length in bytes; Blob names the stored object that holds it where it is too large for a message.
	BodySize int64  `json:"body_size"`
	Blob     string `json:"blob,omitempty"`
	// API holds the connection that the answer goes to; "" for a durable job.
	API API `json:"api,omitempty"`
	// APIKey is the id of the key that asked for it, for accounts; "" where none is configured. It is no secret.
	APIKey string `json:"api_key,omitempty"`
	// Line is the physical line, from 1, of its batch's input file, CustomID the client's name for it. Set where Group is a batch.
	Line     int64  `json:"line,omitempty"`
	CustomID string `json:"custom_id,omitempty"`
}

// InBatch tells whether the job is a line of a batch.
func (j *Job) InBatch() bool { return j.Group != NoGroup && j.Group != "" }

// Live tells whether the job is answered on its submitting connection.
func (j *Job) Live() bool { return j.API != "" }

// Cost is a job's size as estimated when it was accepted.
type Cost struct {
	// Prompt is the estimated prompt length.
	Prompt Tokens `json:"prompt"`
	// Output is the client's limit on new tokens for one answer, 0 if it gave none.
	Output Tokens `json:"output,omitempty"`
	// Answers is how many answers are asked (n), at least 1.
	Answers int `json:"answers,omitempty"`
}
