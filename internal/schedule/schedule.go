// Package schedule decides what one worker pulls and what it starts, so that its engine is full and never over-full. It has no clock, no lock and no I/O: callers
// tell it the time and what happened. The worker and the routing study run the same code.
package schedule

import (
	"time"

	"github.com/millrace/millrace/internal/job"
)

// Order is which job of a class starts first.
type Order string

// The orders. Shortest is the shortest predicted first, with ageing: a second of waiting counts as a second of work.
const (
	Oldest   Order = "oldest"
	Shortest Order = "shortest"
)

// Config of a Scheduler. Zero fields get those of Defaults.
type Config struct {
	// Order within a class.
	Order Order
	// Reserve is the share of the KV cache that is never granted, 0 to below 1. To reserve nothing cannot be asked for.
	Reserve float64
	// TokenBudget bounds the prompt tokens that are started and not yet computed; a longer prompt starts when none is. The default is less than engines compute in one step, so that
	// short prompts do not share a step with long ones. An engine that computes more within 25 ms gets as much as that.
	TokenBudget job.Tokens
	// Trickle is the share of what is started, in the tokens that it is expected to need, that the batch class gets while higher classes wait, 0 to 1. Negative is none.
	Trickle float64
	// DefaultOutput is the answer's length expected before any was seen, in tokens.
	DefaultOutput job.Tokens
}

// Defaults stand for the zero fields of a Config.
func Defaults() Config {
	return Config{Order: Oldest, Reserve: 0.03, TokenBudget: 768, Trickle: 0.1, DefaultOutput: 256}
}

// Rank is one data-parallel rank's KV cache in tokens. One job must fit in one rank.
type Rank struct{ Capacity, Used job.Tokens }

// Reading is what the engine said about itself at one moment.
type Reading struct {
	Ranks []Rank
	// Estimated: the engine tells no usage. Capacities are configured, and what is used is the scheduler's own ledger alone.
	Estimated        bool
	Running, Waiting int
	// MaxRunning is the limit on sequences that run at once, 0 if unknown.
	MaxRunning int
	// Preemptions, GeneratedTokens and PromptTokens are counters since the engine's start; -1 if unknown.
	Preemptions, GeneratedTokens, PromptTokens int64
}

// Ask is a job that wants to start.
type Ask struct {
	Tenant job.Tenant
	Model  job.Model
	Group  string
	Class  job.Class
	Cost   job.Cost
	// Created is when it was submitted: ageing counts from there.
	Created time.Time
	// Streams: its tokens are seen as they come.
	Streams bool
}

// Result is how a job that had started ended.
type Result struct {
	// Completed with a whole answer. Overloaded: the engine refused it as too much (429, 5xx).
	Completed, Overloaded bool
	// Prompt and Output are the engine's own count, 0 if it told none.
	Prompt, Output job.Tokens
}

// MaxLevel is the highest level: who pulls at it is served last.
const MaxLevel = 9

// Wish is what may be pulled now for a class.
type Wish struct {
	// Batch is how many at most; 0 is nothing.
	Batch int
	// Level is the pull's priority, 0 to MaxLevel, the lowest served first: ceil(log2(expected TTFT of a typical job here x (1 + 8 x load) / 25 ms)).
	Level int
	// Busy: something runs or is in hand, so that the level is soon old.
	Busy bool
}

// Status is what can be shown of a Scheduler.
type Status struct {
	// Capacity of the KV cache, what of it is Used, and what is Free to be granted: less than the rest by a reserve.
	Capacity, Used, Free job.Tokens
	// FreeRank is the largest that is free in one rank.
	FreeRank job.Tokens
	// Running jobs, their sequences, and jobs in hand.
	Running, Sequences, InHand int
	// Waiting is how many requests wait inside the engine, by its last word.
	Waiting int
	Level   int
	// TTFT is the expected time to the first token of a typical job.
	TTFT time.Duration
	// Limit on running sequences now, 0 if there is none. Brake says why nothing is pulled though there is room; "" if nothing brakes.
	Limit int
	Brake string
	// PlaceLimit is how many sequences may run for one more to start while requests wait inside the engine, BatchLimit that for one of the batch class, to which an engine's last places are not given; 0 where only Limit bounds them.
	PlaceLimit, BatchLimit int
	// Load is the share of what may be used that is, 0..1 and more: of the KV cache, or of the sequences where fewer of those are free, or of the engine's places where they are known and fewer of those are. CacheLoad is that of the KV cache alone.
	Load, CacheLoad float64
}
