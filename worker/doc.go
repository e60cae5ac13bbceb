// Package worker is the role that sits beside an inference engine: it pulls the work that fits, runs it, streams what the engine says, and settles it.
//
// # Delivery
//
// A delivery is handed to one goroutine, which waits in the [gate] for room in the engine's KV cache, claims the job, calls the engine, and answers the delivery
// once, by an ack or a nak, or leaves it to the attempt that has the job. Execution is at least once; the outcome is exactly one, because the first record in DONE wins.
//
// # Order of side effects
//
// A durable job: reserve -> claim -> call -> events -> outcome to DONE -> Redis record with the done event -> bell -> ack -> release. A job on a client's connection:
// reserve -> claim at its API -> call -> parts to the API -> its acknowledgement of the last -> usage to DONE -> ack -> release. What a crash between any two leaves behind
// is repaired by the next delivery: before DONE the job runs again, after DONE the outcome stands and only the steps behind it are taken again, with no engine call.
//
// # Concurrency
//
// Run owns all goroutines: one that watches whether the engine is ready, one whether it gets on, one per consumer that pulls, one per delivery, and for each running job that keeps events one
// that writes them, for each on a connection one that watches its API. Deliveries are renewed by timers. The gate's mutex guards the ledger of the KV cache and the order of starting.
//
// # Failure
//
// What is the job's own fault or cannot be told from it (engine 5xx, a broken connection) is charged and retried with a growing delay; what is not (drain, stall, an engine that is not
// ready) is given back uncharged. Jobs whose engine or worker has broken down under them start one by one, since all that ran beside the one that did it come back together.
// While NATS or Redis is away running calls go on, and their outcomes are written when it is back.
package worker
