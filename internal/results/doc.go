// Package results keeps what clients ask for often in Redis: job records, token events, idempotency keys. All of it is a view: it can be rebuilt from the streams, and the
// store may be wiped at any moment.
//
// # Keys
//
// With the default prefix; all but the last three expire by themselves.
//
//	mr:{job_…}:r            record, a hash (its fields: lua/prelude.lua); deadline + retention
//	mr:{job_…}:e            events, a stream with ids <token>-<n>
//	mr:{job_…}:b  :o        the request's body until the job ends; the engine's answer
//	mr:key:<tenant>:<key>   idempotency key -> job id and hash of the request
//	mr:list:<tenant>        all jobs of a tenant by time of creation
//	mr:held:<worker>        jobs that a worker has claimed
//	mr:cache:<key>          workers whose KV cache holds a session or a beginning of prompts
//	mr:{backlog}:sums       what is accepted and has not ended: lua/enter.lua
//	mr:{backlog}:in:<tenant>:<model>  the jobs that these sums count
//	mr:{0}:ping …{15}       a write that shows that writes are taken
//	mr:{0}:live …{15}       jobs that have not ended, by their next deadline; Due, Live, Finish, Discard and Forget keep it clean
//	mr:{0}:whole …{15}      sentinels: a missing one tells that the store, or a part of a cluster, is new or was wiped
//	mr:holders              workers that hold jobs, by when they last claimed; Holders keeps it clean
//
// The keys of one job share a slot, so that one script decides about a job. Indexes live in other slots: they are written before the record that they lead to, and cleaned
// after it has gone, so that a crash in between leaves an entry that leads nowhere, never a job that nobody finds.
//
// # Repeats
//
// The Redis client sends a command again when it does not know whether it ran, and so do callers. Every write may therefore run twice: the scripts compare before they set,
// and entries of streams have ids of ours.
//
// # Failure
//
// Every method returns within about three seconds. A store that cannot be reached, is paused, loading, read-only or out of memory is [ErrUnavailable], never [ErrNotFound].
package results
