package routing

import (
	"context"

	"github.com/millrace/millrace/internal/schedule"
)

// Observed is a simulated run and what its engines did.
type Observed struct {
	Run *Run
	// Tokens and Ends of each request.
	Tokens, Ends []int
	// Left is how many sequences the engines have at the end, Reserved what Millrace's ledgers hold once all is settled.
	Left, Reserved int
}

// Observe simulates one arm, and counts.
func Observe(ctx context.Context, w *Workload, p Policy) (*Observed, error) {
	o := &Observed{Tokens: make([]int, len(w.Arrivals)), Ends: make([]int, len(w.Arrivals))}
	s, err := newSimulation(w, p, schedule.Oldest)
	if err != nil {
		return nil, err
	}
	inner := s.front
	s.front = &counting{front: inner, o: o}
	if o.Run, err = s.run(ctx); err != nil {
		return nil, err
	}
	for end := s.now + settleWay; len(s.events.heap) > 0 && s.events.heap[0].at <= end; { // the last are settled
		e := s.events.pop()
		s.now = e.at
		e.do()
	}
	for _, n := range s.nodes {
		o.Left += n.core.Stats().Running + n.core.Stats().Waiting
	}
	if f, ok := inner.(*pullFront); ok {
		for _, w := range f.workers {
			tokens, pending, sequences := w.scheduler.Reserved()
			o.Reserved += int(tokens+pending) + sequences
		}
	}
	return o, nil
}

type counting struct {
	front
	o *Observed
}

func (c *counting) token(n *node, r *request, first, done bool) {
	if first {
		c.o.Tokens[r.index] = 0 // an earlier attempt's do not count
	}
	c.o.Tokens[r.index]++
	if done {
		c.o.Ends[r.index]++
	}
	c.front.token(n, r, first, done)
}
