package scaling

import (
	"math"

	"github.com/millrace/millrace/internal/scale"
)

// What one worker is: an A10 with a 7B model under chat-like load. A pool of three does 6.8 requests a second.
const (
	// slots is how many requests it runs at once: what its KV cache has room for.
	slots = 27
	// fullRate is how many requests of mean length it does a second when all slots are taken.
	fullRate = 6.8 / 3
	// promptCost and outputCost share out a request's work between its prompt's tokens and its answer's: 0.185 and 1.66 ms each on a full engine.
	promptCost, outputCost = 0.185, 1.66
	// sequential is the part of a step's time that does not grow with the number of requests in it, over the part that does, in a full step.
	sequential = 1.5
	// firstToken is what the first token takes from the start: a step, and the prompt's tokens at the engine's speed.
	firstStep, prefillRate = 0.045, 4000.0
)

// Means of the load, with its caps. They are measured once of many draws.
const (
	meanPrompt = 305
	meanOutput = 192
)

// work of a request in seconds of a full worker.
func (r *request) work() float64 {
	return (promptCost*float64(r.prompt) + outputCost*float64(r.output)) / (promptCost*meanPrompt + outputCost*meanOutput) / fullRate
}

// running is a request that a worker runs.
type running struct {
	until  float64 // the worker's done at which it ends
	tokens int64   // expected
	index  int32   // of the request; below 0: a line of the batch
}

// worker is one of the pool. Its requests share it evenly: done is how much of each of them was done since the worker's start, had it been there from the beginning.
type worker struct {
	name  string
	state scale.WorkerState
	// ordered, ready and since are times in seconds; since is when it became what it is.
	ordered, ready, since float64
	done, at              float64
	jobs                  []running // a heap by until
	lines                 int       // of the batch, among them
	tokens                int64     // expected, of all
	next                  float64   // when it is ready, or its next request ends
	idleSince             float64   // if it has none
	last                  float64   // when it last took one
	yields                bool      // it takes only what the others have no room for
}

// before tells whether w takes a request rather than o.
func (w *worker) before(o *worker) bool {
	if w.yields != o.yields {
		return o.yields
	}
	return len(w.jobs) < len(o.jobs) || len(w.jobs) == len(o.jobs) && w.last < o.last
}

// speed is how much of each of n requests a worker does a second.
func speed(n int) float64 {
	if n == 0 {
		return 0
	}
	return (sequential + 1) / (sequential + float64(n)/slots) / slots
}

// catchUp brings done up to now.
func (w *worker) catchUp(now float64) {
	w.done += (now - w.at) * speed(len(w.jobs))
	w.at = now
}

// plan sets when the next request ends.
func (w *worker) plan() {
	w.next = math.Inf(1)
	if n := len(w.jobs); n > 0 {
		w.next = w.at + max(0, w.jobs[0].until-w.done)/speed(n)
	}
}

func (w *worker) push(r running) {
	w.tokens += r.tokens
	w.jobs = append(w.jobs, r)
	h := w.jobs
	for i := len(h) - 1; i > 0; {
		up := (i - 1) / 2
		if h[up].until <= h[i].until {
			break
		}
		h[up], h[i] = h[i], h[up]
		i = up
	}
}

func (w *worker) pop() running {
	h := w.jobs
	top := h[0]
	n := len(h) - 1
	h[0] = h[n]
	h = h[:n]
	for i := 0; ; {
		down := 2*i + 1
		if down >= n {
			break
		}
		if down+1 < n && h[down+1].until < h[down].until {
			down++
		}
		if h[i].until <= h[down].until {
			break
		}
		h[i], h[down] = h[down], h[i]
		i = down
	}
	w.jobs = h
	w.tokens -= top.tokens
	return top
}
