// Package api is the role that clients talk to: the OpenAI routes, Millrace's own jobs and their event streams, and what operators ask.
//
// # Delivery
//
// A plain call of an OpenAI route is answered on its own connection: its job waits in the model's memory stream and lives as long as the connection does.
// Every other job is durable: the 202 is sent once JetStream has it on disk and its record exists. The order of those writes, and what each crash between
// them leaves behind, is told in submit.go.
//
// # Concurrency
//
// The role keeps no state but the connections that it holds, so any number of processes may run. Beside the handlers it runs one goroutine that looks after
// held calls (dead workers, lost streams), one that measures how fast jobs end, and one that sends heartbeats; Run waits for all.
//
// # Failure
//
// A store that does not answer is a 503 with Retry-After, never a 404 or an empty list. Every failure on every path is an error object of four keys.
package api
