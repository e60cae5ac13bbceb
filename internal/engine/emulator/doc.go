// Package emulator is an inference engine without a GPU: an HTTP server that speaks what vLLM speaks, with a latency model, seeded text and
// faults on demand. It serves laptops, tests and benchmarks.
//
// # Layers
//
// [Core] is the engine itself: continuous batching over a block-managed KV cache with prefix reuse, chunked prefill and preemption by
// recompute. It has no clock and no goroutine: each [Core.Step] says how long the step takes on the profile's hardware, so that a study runs
// hours in seconds. [Emulator] drives a Core in real time (scaled by Config.Speed) behind HTTP.
//
// # Text
//
// An answer is a function of the body: its text, its length and its finish reason are seeded by the fields that a model would see. What only
// says how the answer is delivered or where it is cut (stream, max_tokens, stop, n, priority, ...) does not change the text: a smaller
// max_tokens gives a prefix of the same text. Continuing a partial answer (continue_final_message, or a completion's prompt followed by what
// was generated) gives the rest of that text. Ids are fresh, unless X-Request-Id names one, as in vLLM.
//
// A prompt has one token for each 4 bytes of its rendered text, the last one possibly shorter; a token of an answer is a word with the space
// before it. The end of an answer is a token of its own, without text. An answer's tokens differ from the tokens of the same text in a later
// prompt, so a conversation's next turn finds the previous prompt in the prefix cache and not the previous answer.
//
// # Ranks
//
// With Config.DataParallel it has several cores, each with a KV cache and metrics of its own, behind one address. A sequence goes to the least loaded one and stays there.
//
// # Faults
//
// [Faults] sets rates and states for the whole engine. POST /emulator/freeze?for=3s, and Faults.StallEvery, make it stand still: it computes nothing, and no HTTP request
// is answered until it goes on. A marker inside the prompt's text asks for a fault of that call alone:
//
//	[[emulator:status=500]]                  answer with that status
//	[[emulator:status=429,retry-after=2]]    with a Retry-After in seconds; retry-date=2 gives it as a date that far ahead
//	[[emulator:hang]]  [[emulator:hang-after=5]]      run, and give no (further) token
//	[[emulator:reset-after=5]]               reset the connection after so many tokens; 0 before the answer's head
//	[[emulator:crash]] [[emulator:crash-after=5]]     call Config.Crash
//	[[emulator:error-after=5]]               send an error object in the stream, then [DONE]
//	[[emulator:broken-chunk-after=3]]        put one broken data line into the stream, and go on
//	[[emulator:slow-disconnect=5s]]          notice that the client left only so much later
//	[[emulator:delay=1s]] [[emulator:token-delay=1s]] wait before the answer, before each token
//	[[emulator:pad=2097152]]                 an unknown field of so many bytes in the first token's chunk
//	[[emulator:tokens=20]]                   the natural length of the answer, its end token included
//	[[emulator:times=2,status=500]]          the marker counts for the first two calls with that body only
//
// Options may be combined by commas. Waits given as a duration are wall time and are not scaled. An unknown option is a 400, so that a
// misspelt test fails.
package emulator
