package routing_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/bench/routing"
)

// picks is which nodes n requests get that never end.
func picks(r *routing.Router, n int) (nodes []int) {
	for range n {
		node, ok := r.Pick()
		if !ok {
			node = -1
		}
		nodes = append(nodes, node)
	}
	return nodes
}

func TestRoundRobinTakesTurns(t *testing.T) {
	t.Parallel()
	r := routing.NewRouter(routing.RoundRobin, 3, 0)
	if d := cmp.Diff([]int{0, 1, 2, 0, 1}, picks(r, 5)); d != "" {
		t.Error(d)
	}
	r.Health(2, false)
	if d := cmp.Diff([]int{0, 1, 0}, picks(r, 3)); d != "" {
		t.Errorf("with one unhealthy: %s", d)
	}
}

func TestLeastLoadTakesTheNodeWithTheFewestInFlight(t *testing.T) {
	t.Parallel()
	r := routing.NewRouter(routing.LeastLoad, 3, 0)
	if d := cmp.Diff([]int{0, 1, 2, 0}, picks(r, 4)); d != "" {
		t.Error(d)
	}
	r.Done(2)
	r.Done(1)
	r.Done(0)
	r.Done(0)
	if d := cmp.Diff([]int{0, 1, 2}, picks(r, 3)); d != "" {
		t.Errorf("after some have ended: %s", d)
	}
	r.Done(1)
	if d := cmp.Diff([]int{1}, picks(r, 1)); d != "" {
		t.Errorf("after one has ended: %s", d)
	}
}

func TestLeastLoadRandomChoosesAmongTheLeastLoaded(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ nodes, among int }{{1, 1}, {2, 2}, {3, 2}, {6, 2}, {9, 3}, {12, 4}} {
		chosen := map[int]bool{}
		for seed := range uint64(200) {
			r := routing.NewRouter(routing.LeastLoadRandom, c.nodes, seed)
			// Node i has i in flight.
			for node := range c.nodes {
				for other := range c.nodes {
					r.Health(other, other == node)
				}
				picks(r, node)
			}
			for node := range c.nodes {
				r.Health(node, true)
			}
			node, _ := r.Pick()
			chosen[node] = true
		}
		if len(chosen) != c.among {
			t.Errorf("of %d nodes it chose %v, want the first %d", c.nodes, chosen, c.among)
		}
		for node := range chosen {
			if node >= c.among {
				t.Errorf("of %d nodes it chose number %d by load", c.nodes, node)
			}
		}
	}
}

func TestAFailedRequestIsTriedElsewhere(t *testing.T) {
	t.Parallel()
	for _, p := range routing.Policies()[:3] {
		r := routing.NewRouter(p, 3, 1)
		var tried []int
		for range routing.Tries {
			node, ok := r.Pick(tried...)
			if !ok {
				t.Fatalf("%s: no node beside %v", p, tried)
			}
			for _, before := range tried {
				if node == before {
					t.Errorf("%s: node %d again after %v", p, node, tried)
				}
			}
			r.Done(node)
			tried = append(tried, node)
		}
		if node, ok := r.Pick(tried...); ok {
			t.Errorf("%s: node %d after all have been tried", p, node)
		}
	}
}

func TestUnhealthyNodesGetNothingUntilTheyAnswer(t *testing.T) {
	t.Parallel()
	for _, p := range routing.Policies()[:3] {
		r := routing.NewRouter(p, 2, 1)
		r.Health(0, false)
		if d := cmp.Diff([]int{1, 1, 1}, picks(r, 3)); d != "" {
			t.Errorf("%s: %s", p, d)
		}
		r.Health(1, false)
		if d := cmp.Diff([]int{-1}, picks(r, 1)); d != "" {
			t.Errorf("%s: %s", p, d)
		}
		r.Health(0, true)
		if d := cmp.Diff([]int{0}, picks(r, 1)); d != "" {
			t.Errorf("%s, one is back: %s", p, d)
		}
	}
}
