// Package cluster tells who is alive, who leads, and which models are known.
//
// # Heartbeats
//
// Each process says every second, on core NATS, what it is: millrace.beat.<role>.<id>. Nothing of it is stored: each process keeps in memory whom it heard
// and when, by its own monotonic clock. A new one asks all others on millrace.hello to answer it at once.
//
// # Death
//
// A member that is silent for 3 s is dead, if it is certain that it is its own fault. So silence counts only while this process itself is connected, from
// the latest of the last heartbeat and the own (re)connection, and another process must have been heard all the while. Without such a witness, or if the
// member has not come back after a cut, 10 s more pass and the death is charged to nobody. A restart of NATS, a server that hangs, and a stop of this process itself
// thus kill nobody and charge nobody.
//
// # Leadership
//
// A lease is a key in a JetStream KV bucket whose entries live for 3 s. It is taken by creating the key, renewed each second by its revision, and deleted
// when its holder stops. Its holder acts until 2 s after the start of the last renewal that succeeded, so at least 1 s of silence lies between two leaders as long as the server's clock
// does not jump. Where that is not enough, writes carry the epoch, which rises from leader to leader, and stores refuse the lower one.
//
// # Orders
//
// A worker listens on millrace.drain.<id> and answers once it drains. Nothing of an order is stored: whoever gave it sees from heartbeats what came of it, and repeats it if need be.
//
// # Concurrency
//
// A Cluster is safe for concurrent use. Open starts two goroutines that end with Close: one ticks, one follows the bucket of known models.
//
// # Failure
//
// While NATS is away nothing here fails: the last view stands, nobody dies, Lead ends its leadership in time and tries again.
package cluster
