// Package responses knows the requests, objects and events of OpenAI's /v1/responses, and how they are had from an engine that speaks /v1/chat/completions alone. It decides and rewrites, and
// does no I/O.
//
// # Two ways
//
// An engine that serves /v1/responses itself gets the client's own bytes, but for the fields that Millrace owns (Native), and its answer stays as it came, but for the same fields (Frame.Own,
// NativeStream). Any other gets a chat request (Parse, Request.Chat), and its answer is made a response (Request.Answer, Request.Stream). What cannot be said in a chat request is refused by name: nothing is
// left out silently.
//
// # Ids
//
// A response is a job: its id is "resp_" and what stands behind "job_" in the job's.
package responses
