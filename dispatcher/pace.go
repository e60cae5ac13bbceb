package dispatcher

import (
	"math"
	"time"

	"github.com/millrace/millrace/internal/job"
)

const (
	paceWindow = time.Second      // the least time that is measured over
	paceMemory = 10 * time.Second // of the average
	paceIdle   = 10 * time.Second // without an end, and without work that waits: what comes then is measured from there
)

// pace measures how many expected tokens a model's jobs that end are worth per second, while its workers have all they can take. While they have not, it tells what they do, not what they could: then it only rises.
type pace struct {
	rate   float64 // tokens per second, 0 is unknown
	since  time.Time
	tokens job.Tokens
	full   bool // work has waited at every look since then
}

func (p *pace) ended(tokens job.Tokens) { p.tokens += tokens }

// sample closes the window if it is long enough and something has ended in it. full tells whether work waits now.
func (p *pace) sample(now time.Time, full bool) {
	elapsed := now.Sub(p.since)
	if p.since.IsZero() || p.tokens == 0 && elapsed >= paceIdle && !full {
		p.since, p.tokens, p.full = now, 0, full
		return
	}
	p.full = p.full && full
	if elapsed < paceWindow || p.tokens == 0 {
		return
	}
	rate := float64(p.tokens) / elapsed.Seconds()
	if p.rate == 0 {
		p.rate = rate
	} else if p.full || rate > p.rate {
		p.rate += (rate - p.rate) * (1 - math.Exp(-elapsed.Seconds()/paceMemory.Seconds()))
	}
	p.since, p.tokens, p.full = now, 0, full
}

// sizes are what the jobs that were fed last are expected to need: those that wait are the last ones.
type sizes struct {
	last []job.Tokens // a ring
	at   int
	sum  job.Tokens
}

const mostSizes = 1024

func (s *sizes) add(n job.Tokens) {
	s.sum += n
	if len(s.last) < mostSizes {
		s.last = append(s.last, n)
		return
	}
	s.sum -= s.last[s.at]
	s.last[s.at] = n
	s.at = (s.at + 1) % mostSizes
}

// of is what n waiting jobs are expected to need.
func (s *sizes) of(n int) (sum job.Tokens) {
	have := len(s.last)
	switch {
	case n <= 0:
		return 0
	case have == 0:
		return job.Tokens(n) * firstGuess
	case n >= have:
		return s.sum + job.Tokens(n-have)*(s.sum/job.Tokens(have))
	}
	for i := range n {
		sum += s.last[(s.at-1-i+2*have)%have]
	}
	return sum
}
