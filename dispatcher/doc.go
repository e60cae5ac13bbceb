// Package dispatcher is the role that keeps waiting work moving. Any number may run; the one that holds the lease acts.
//
// # Duties of the leader
//
//   - feed: keeps about three seconds of work in the lane that workers pull, from the tenants' waiting lines and the batches, by whose turn it is: see internal/fairshare. Each model has a feeder of its own.
//   - deaths: ends the leases of a worker that fell silent, hands its deliveries back at once, moves its lane, and ends a job that took down its worker too often.
//   - deadlines: expires what is late, waiting or running.
//   - reconcile: compares Redis with the streams, and repairs what a crash or a loss left: jobs that were being accepted, messages or records that are missing, outcomes not yet recorded.
//   - rebuild: fills a wiped Redis from DONE and WORK.
//   - batches: validates their files, offers their lines to the feeder, ends those that cannot run any more, writes their output and error files, and ends them.
//   - tally: counts each outcome in DONE once in the ledger, for usage and for batches, and tells who waits for it.
//   - purge: removes the outcomes of lines whose batch has ended long ago, for its files have them.
//   - sweeps: what a death left that nobody here saw, what waits in workers' lanes for no good, workers' held sets, and objects that belong to no job.
//
// # Failure
//
// Every duty is a repeatable step from what the streams and Redis say, so a leader may die anywhere: the next one begins anew. Two leaders for a moment do no harm: outcomes are first-wins,
// moves keep a copy at every moment, and leases end once. In the ledger the later one's epoch fences the earlier one.
package dispatcher
