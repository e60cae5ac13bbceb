// Package engine speaks to inference engines over HTTP: what an engine is, what it serves, how full it is, and the calls that do the work. It also starts and
// supervises an engine's process.
//
// # Kinds
//
// Each kind of engine is a file of its own, a driver in the table of kind.go: how it is recognized, where its health is, how its load and shape are read, and what it can
// do. A new kind is one file, one line of the table, its pages in testdata, and a row of the conformance test.
//
// # Bytes
//
// A request body is sent as it is, and every event of a stream keeps its raw bytes. An [Assembler] builds the answer that the engine would have given without
// streaming from pieces of the chunks' own JSON text, so numbers and escapes survive it too.
//
// # Cancelling
//
// Every call has its own connection while it lasts. Ending the call's context, or closing the answer's body before its end, closes that connection, which is how an
// engine is told to stop.
//
// # Failure
//
// A call that broke before its answer was whole is [ErrUnreachable]; one that the caller ended carries the context's error. What cannot be parsed is an error,
// never skipped. What an engine does not tell about its load is said to be estimated, never taken for "nothing used".
package engine
