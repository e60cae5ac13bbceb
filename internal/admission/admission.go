// Package admission decides whether a new job may enter, and in which lane it waits. Its decisions are pure: the caller gathers what is known into a
// [View] and acts on the [Decision].
package admission

import (
	"fmt"
	"math"
	"time"

	"github.com/millrace/millrace/internal/job"
)

// FullAt is the share of a stream's limit, 0..1, at which new jobs are refused: the rest is kept for moves, retries and outcomes.
const FullAt = 0.8

// Request is a job that wants to enter.
type Request struct {
	Tenant   job.Tenant
	Model    job.Model
	Endpoint job.Endpoint
	// Body is the engine's request as parsed, Size its length in bytes.
	Body *job.Object
	Size int64
	// Live: the job is answered on its own connection, and does not go to the durable stream.
	Live bool
}

// View is what the caller knows of the platform. Zero is an empty platform without a dispatcher.
type View struct {
	// Known: a worker serves the model, served it lately, or the queue holds work for it.
	Known bool
	// Largest is the longest request in tokens that fits the model's largest worker of late; 0 is unknown.
	Largest job.Tokens
	// WorkFill and DoneFill are the shares in use, 0..1, of the limits of the model's durable stream and of the outcomes' stream.
	WorkFill, DoneFill float64
	// Leader: a dispatcher leads and moves waiting lines on. Without one nobody would.
	Leader bool
	// Shared counts the jobs that wait in the model's shared lane and go before the job or stand in its class: those of lower classes keep nobody waiting. TenantWaiting are those in the tenant's own waiting line, Lined those of the job's
	// class in all waiting lines and batches.
	Shared, TenantWaiting, Lined int
	// Limited: the tenant has a limit on how much of its work workers get at once. Whoever feeds its line holds to that.
	Limited bool
	// JobsPerSecond is how fast the model's jobs end lately; 0 is unknown.
	JobsPerSecond float64
	// Warm is the worker that has the job's prompt in its KV cache and is not overloaded; "" if there is none.
	Warm job.Worker
	// Pressure on the model's workers, and the longest wait for a first token that is let in; 0 lets all in. They count for live jobs alone.
	Pressure Pressure
	MaxWait  time.Duration
	// Unavailable is why no worker of the model can be started though none is ready, "" if one is or may be; NextTry is when it is tried again, 0 if that is unknown. They count for live jobs alone: durable ones wait.
	Unavailable string
	NextTry     time.Duration
}

// Decision is Lane, or a refusal.
type Decision struct {
	Lane Lane
	// Worker is the one whose lane a WorkerLane is.
	Worker job.Worker
	Refuse *job.Error
	// After is when it is worth coming again after a refusal; 0 is unknown.
	After time.Duration
}

// Decide tells what becomes of r. The reasons to refuse are tried from the client's own mistakes to the platform's troubles, so that a request which can
// never work is not told to come again.
func Decide(r Request, v View) Decision {
	if !v.Known {
		return Decision{Refuse: refusal(job.TypeInvalidRequest, job.CodeModelNotFound, "model",
			fmt.Sprintf("The model %.100q does not exist: no worker serves it.", r.Model))}
	}
	if d, ok := tooLong(r, v.Largest); ok {
		return d
	}
	switch {
	case v.DoneFill >= FullAt:
		return Decision{Refuse: refusal(job.TypeRateLimit, job.CodeQueueFull, "",
			fmt.Sprintf("The store of results is %.0f %% full: try again later.", v.DoneFill*100))}
	case !r.Live && v.WorkFill >= FullAt:
		return Decision{Refuse: refusal(job.TypeRateLimit, job.CodeQueueFull, "",
			fmt.Sprintf("The queue of %q is %.0f %% full: try again later.", r.Model, v.WorkFill*100))}
	}
	if r.Live {
		if v.Unavailable != "" {
			return Unavailable(r.Model, v)
		}
		if d, ok := overload(r.Model, v.Pressure, v.MaxWait); ok {
			return d
		}
	}
	var d Decision
	d.Lane, d.Worker = lane(r, v)
	return d
}

// tooLong refuses what surely fits no worker. The body's length is looked at first, because it is at hand: only one that seems too long is measured.
func tooLong(r Request, largest job.Tokens) (Decision, bool) {
	if largest <= 0 || job.LeastPrompt(r.Size) <= largest {
		return Decision{}, false
	}
	least := LeastPrompt(r.Endpoint, r.Body)
	if least <= largest {
		return Decision{}, false
	}
	param := "messages"
	switch r.Endpoint {
	case job.Completions:
		param = "prompt"
	case job.Embeddings, job.Responses:
		param = "input"
	}
	return Decision{Refuse: refusal(job.TypeInvalidRequest, job.CodeContextLength, param, fmt.Sprintf(
		"The prompt has at least %d tokens, and the largest worker of %q holds %d: shorten it.", least, r.Model, largest))}, true
}

// Unavailable refuses a call that no worker would answer for as long as none can be started, as v tells.
func Unavailable(m job.Model, v View) Decision {
	next := "It is tried again"
	if v.NextTry > 0 {
		next = fmt.Sprintf("The next try is in about %.0f s", math.Ceil(v.NextTry.Seconds()))
	}
	return Decision{After: v.NextTry, Refuse: refusal(job.TypeServer, job.CodeModelUnavailable, "", fmt.Sprintf(
		"No worker of %.100q can be started now: %s. %s: try again later, or send it as a job, which may wait.", m, v.Unavailable, next,
	))}
}

func refusal(typ string, code job.Code, param, message string) *job.Error {
	e := job.NewError(typ, code, message)
	if param != "" {
		e.Param = &param
	}
	return e
}
