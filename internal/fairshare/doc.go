// Package fairshare decides whose waiting work is fed next to the workers of one model, so that nobody is starved: by tenants' weights, in tokens, with classes and deadlines. It is pure: no clock, no lock, no
// I/O. The caller tells the time and what happened.
//
// # Classes
//
// A class may be fed while less waits before the workers, of it and of higher ones together, than the mark. So interactive work is fed before standard, and standard before batch; and a deep line of a lower class
// never keeps a higher one out. Batch work may always fill its floor, a part of the mark: the workers take that in turn.
//
// # Tenants
//
// Within a class tenants take turns by deficit round robin. Each round gives each tenant a quantum of tokens by its weight; a turn feeds jobs while the tenant has any left, and a job that is larger takes the rest from
// the rounds to come. So shares are in tokens, whatever the jobs' sizes. Credit and debt are bounded; who has nothing to feed, or may not be fed, gathers no credit. A tenant that comes back is the next, once in a round.
//
// What is counted when a job is fed is an estimate. When it has ended, [Share.Settle] corrects the tenant's account by what it took in truth.
//
// # Supplies
//
// A tenant has several supplies: its waiting lines, its batches. Within the tenant the one that has got the least is next.
//
// # Deadlines
//
// A supply of the batch class may need a share of the model's throughput to be done in time: its urgency. That raises its tenant's weight in the class. While it gets less than it needs, and time is short for the batches of
// the model as a whole, it is fed as standard work, up to what it lacks.
package fairshare
