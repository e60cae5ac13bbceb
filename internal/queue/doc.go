// Package queue keeps accepted jobs and their outcomes in JetStream.
//
// # Streams
//
// Each model has two work-queue streams: WORK_<model>, synced files for jobs that were promised, and LIVE_<model>, memory for jobs that are
// answered on their own connection. DONE holds one record per ended job. Subjects are
//
//	work.<model>.<class>.<lane>.<job>
//	live.<model>.<class>.<lane>.<job>
//	done.<tenant>.<group>.<job>
//
// A message's header holds the whole job as JSON, a record's the outcome as well; data is the client's body or the engine's answer, byte for byte.
//
// # Delivery
//
// At least once. A publish expects that its subject is empty, so two waiting copies on one subject cannot be; two copies in different lanes can
// (a move that was cut in half), and a job can be delivered again after its end. Whoever takes a delivery decides by the job's claim and by DONE,
// where the first outcome wins.
//
// # Concurrency
//
// A Queue may be used by any number of goroutines. It runs two of its own, one that watches the connection and one that repairs models after a
// reconnection, and one per stream while more publishes wait than the server can sync one by one. A Puller has none; its deliveries are handed on by
// its subscription.
//
// # Failure
//
// A publish that was not answered may have been stored: [ErrUnavailable]. To publish again is always safe: [ErrExists] says that the first was stored.
// Streams and consumers that are gone are made again by whoever misses them, and after each reconnection.
package queue
