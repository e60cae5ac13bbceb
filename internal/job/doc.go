// Package job has the nouns that every part of Millrace shares: a job, its class, its states, its outcome, what it costs, and the
// codes of what may go wrong. It imports the standard library alone and does no I/O.
//
// # Life
//
// A job is accepted once, runs at least once, and ends in exactly one [Outcome]: completed, failed, cancelled or expired. An outcome never changes.
//
// # Bytes
//
// A request body reaches the engine byte for byte but for the few top-level fields that Millrace owns ([Fields]), which [SetField] and
// [RemoveField] edit in place in the raw text: key order, big integers, escapes and unknown fields survive.
package job
