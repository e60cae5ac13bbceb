// Package autoscaler is the role that keeps as many workers as a moment needs, ahead of the time that one takes to start.
//
// # Deciding
//
// For each pool it takes a sample once a second: what waits and runs, from the heartbeats of the leading dispatcher and the APIs; what batches have not queued yet, from the database; which workers there are, from the launches in the
// database, the provider's list and the workers' heartbeats. [scale.Decide] makes a decision of it. What cannot be read is unknown, which is neither nothing nor much: the last plan stands.
//
// # Acting
//
// Any number of autoscalers may run; one leads. Every act of its is preceded by a write to the database that names its epoch and is refused once another one has begun to lead. A launch is written before the provider is asked for it, so that
// whoever leads next asks under the same name and starts it once.
//
// # Concurrency
//
// Each pool has a keeper, a goroutine that owns all that is known of it. Calls of its provider run beside it, a few at a time, and hand their results back to it; a provider that hangs or fails holds up no other pool, and no decision.
package autoscaler
