package routing

import (
	"math/rand/v2"
	"slices"
	"time"
)

// Policy names an arm.
type Policy string

// The arms. The first three are the reference routers.
const (
	RoundRobin      Policy = "round-robin"
	LeastLoad       Policy = "least-load"
	LeastLoadRandom Policy = "least-load-random"
	Millrace        Policy = "millrace"
)

// Policies returns all of them, in the order in which they are shown.
func Policies() []Policy { return []Policy{RoundRobin, LeastLoad, LeastLoadRandom, Millrace} }

// What the reference routers share.
const (
	// HealthEvery is the time between a reference router's health checks of a node. One that does not answer within HealthTimeout gets nothing until it answers a later one.
	HealthEvery   = 5 * time.Second
	HealthTimeout = time.Second
	// leastChoice is of how many nodes least load + random chooses at least: a third of three nodes is one, which leaves nothing to chance, yet the published table of three
	// nodes tells the two policies apart. With two the published bounds are met as well: with one, 1 x L40S + 2 x A10 would have to do better than any placement that does
	// not know the answers' lengths. Least load is what it would be with one.
	leastChoice = 2
	// Tries is on how many nodes a request is tried before it fails.
	Tries = 3
)

// Router is a reference router: it pushes each request at once to a node that it chooses by what it has in flight there, and knows nothing else of them but what its
// health checks say. It makes no call itself. Not safe for concurrent use.
type Router struct {
	policy   Policy
	inFlight []int
	healthy  []bool
	next     int
	rand     *rand.Rand
	order    []int // scratch
}

// NewRouter returns a router for so many nodes, all of them healthy. Its random choices follow from seed.
func NewRouter(p Policy, nodes int, seed uint64) *Router {
	r := &Router{policy: p, inFlight: make([]int, nodes), healthy: make([]bool, nodes), rand: stream(seed, 4)}
	for i := range r.healthy {
		r.healthy[i] = true
	}
	return r
}

// Pick chooses the node for a request and counts it as in flight there, until Done. tried are the nodes that failed it already. It returns false if no healthy node is left.
func (r *Router) Pick(tried ...int) (node int, ok bool) {
	r.order = r.order[:0]
	n := len(r.inFlight)
	for i := range n {
		at := (r.next + i) % n
		if r.healthy[at] && !slices.Contains(tried, at) {
			r.order = append(r.order, at)
		}
	}
	if len(r.order) == 0 {
		return 0, false
	}
	switch r.policy {
	case RoundRobin:
		node = r.order[0]
		r.next = (node + 1) % n
	case LeastLoadRandom:
		r.rand.Shuffle(len(r.order), func(i, j int) { r.order[i], r.order[j] = r.order[j], r.order[i] })
		slices.SortStableFunc(r.order, func(a, b int) int { return r.inFlight[a] - r.inFlight[b] })
		node = r.order[r.rand.IntN(min(len(r.order), max(leastChoice, len(r.order)/3)))]
	default:
		node = slices.MinFunc(r.order, func(a, b int) int { return r.inFlight[a] - r.inFlight[b] })
	}
	r.inFlight[node]++
	return node, true
}

// Done notes that a request which Pick gave to node has ended there, well or not.
func (r *Router) Done(node int) { r.inFlight[node]-- }

// Health notes what a health check found.
func (r *Router) Health(node int, healthy bool) { r.healthy[node] = healthy }
