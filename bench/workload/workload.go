// Package workload draws the prompts and answers of the benchmarks.
package workload

import (
	"math"
	"math/rand/v2"
)

// Shape is how long prompts and answers are.
type Shape string

// The shapes. SeedLike has short prompts and answers and few very long prompts; it reproduces the published table of the reference routers. ChatLike is conversation.
const (
	SeedLike Shape = "seed-like"
	ChatLike Shape = "chat-like"
)

// Shapes returns all of them.
func Shapes() []Shape { return []Shape{SeedLike, ChatLike} }

// Of SeedLike's prompts.
const (
	longPrompts   = 0.01
	longPromptMin = 1500
	longPromptMax = 4000
)

// Lengths draws those of a prompt and an answer, in tokens.
func (s Shape) Lengths(r *rand.Rand) (prompt, output int) {
	if s == ChatLike {
		// A log-normal's mean is median * exp(sigma^2/2): means of 330 and 230 before the caps.
		return logNormal(r, 160, math.Sqrt(2*math.Log(330.0/160)), 2048), logNormal(r, 140, math.Sqrt(2*math.Log(230.0/140)), 512)
	}
	prompt = logNormal(r, 60, 0.8, longPromptMax)
	output = logNormal(r, 9, 0.5, 64)
	if r.Float64() < longPrompts {
		prompt = longPromptMin + r.IntN(longPromptMax-longPromptMin+1)
	}
	return prompt, output
}

// logNormal draws a length of at least 1 and at most most.
func logNormal(r *rand.Rand, median, sigma float64, most int) int {
	return min(most, max(1, int(math.Round(median*math.Exp(sigma*r.NormFloat64())))))
}
