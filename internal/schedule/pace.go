package schedule

import "math"

// pace learns how fast an engine is: how long a first token takes, as a line over the prompt tokens that stand before it, and how long each further one. Old samples fade.
type pace struct {
	// Sums of the weighted least squares over samples (x prompt tokens, y seconds).
	w, x, y, xx, xy float64
	// token is the time between two tokens of one sequence in seconds, smoothed; 0 is unknown.
	token float64
	// fastest is the highest rate of prompt tokens per second seen lately.
	fastest float64
}

// fade is what a sample's weight keeps at each newer one: about the last fifty count.
const fade = 0.98

// What is believed of an engine before it was seen: a first token after 50 ms, and 5,000 prompt tokens a second.
const (
	firstGuess = 0.050
	tokenGuess = 0.0002
	guessAt    = 1000.0
)

func newPace() pace {
	var p pace
	p.sample(0, firstGuess)
	p.sample(guessAt, firstGuess+guessAt*tokenGuess)
	return p
}

// sample takes in that a first token came y seconds after its job's start, at which x prompt tokens stood before it, its own included.
func (p *pace) sample(x, y float64) {
	p.w, p.x, p.y, p.xx, p.xy = fade*p.w+1, fade*p.x+x, fade*p.y+y, fade*p.xx+x*x, fade*p.xy+x*y
}

// line is the fit: base seconds, and seconds for each prompt token. Neither is ever negative; where the samples say so, the other one explains them alone.
func (p *pace) line() (base, each float64) {
	if d := p.w*p.xx - p.x*p.x; d > 1e-6*p.xx {
		each = (p.w*p.xy - p.x*p.y) / d
	}
	const least = 0.0005
	if (p.y-each*p.x)/p.w < least {
		each = (p.y - least*p.w) / p.x
	}
	each = min(max(each, 1e-7), 0.02)
	if p.fastest > 0 {
		each = min(each, 1/p.fastest)
	}
	return max((p.y-each*p.x)/p.w, least), each
}

// first is the expected time to the first token in seconds with x prompt tokens before it.
func (p *pace) first(x float64) float64 {
	base, each := p.line()
	return base + each*x
}

// prefilled takes in that the engine has computed n prompt tokens within so many seconds, perhaps idling in between.
func (p *pace) prefilled(n, seconds float64) {
	if seconds > 0 {
		p.fastest = max(0.99*p.fastest, n/seconds)
	}
}

// tick takes in the time between two tokens of one sequence, in seconds.
func (p *pace) tick(seconds float64) {
	switch {
	case seconds <= 0 || math.IsInf(seconds, 0) || math.IsNaN(seconds):
	case p.token == 0:
		p.token = seconds
	default:
		p.token += (min(seconds, 4*p.token) - p.token) / 16
	}
}
