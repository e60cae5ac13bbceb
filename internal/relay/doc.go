// Package relay carries, over core NATS, what is worth saying only now: that a job changed, that one is cancelled, and the answers of jobs whose client waits on its connection.
//
// # Delivery
//
// Bells, cancels and ends are best effort: whoever needs them also looks by itself now and then.
//
// An answer is not. Its worker numbers the parts of an attempt from 1 and keeps each until the API has acknowledged it. The API takes them in order; where one is missing it drops
// what follows and asks for all from there. Since the last part, an acknowledgement or the question itself may be lost too, the worker says now and then how far it has got, and the API answers what it
// has. So an answer is whole and in order or ends with an error, whatever NATS lost meanwhile.
//
// # Attempts
//
// The API's Desk gives a job to one worker at a time, by a claim: each attempt has a token, which rises. What comes from another attempt than the current one is ignored, and its sender told to
// stop. A claim whose answer is not opened within 3 s is void, since the yes may never have arrived.
//
// A Seat keeps what its reader took of a stream, and gives it to the next attempt with the claim. What counts is what was read there and not what a worker has sent: so the reader gets no byte
// twice and misses none, wherever an attempt ends.
//
// # Subjects
//
//	millrace.bell.<job>           the job changed
//	millrace.cancel               stop this job
//	millrace.ended.<model>        a job of this model ended
//	millrace.live.<api>.claim     a worker asks an API for a job
//	millrace.live.<api>.part      a piece of an answer, for that API
//	millrace.answer.<relay>       an API to the workers of one process: acknowledged, send again, stop
//
// # Concurrency
//
// A Relay starts no goroutine but those of its subscriptions, which end with their context, with the last watcher, or, for millrace.answer, with the connection.
// All that arrives at a Desk is handled by one goroutine, which never waits.
//
// # Failure
//
// While NATS is away, parts are kept for later, up to MaxBuffered bytes for each answer. Whether the other side lives is not this package's to know: package cluster tells.
package relay
