package scaling

import (
	"cmp"
	"context"
	"fmt"
	"runtime"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/millrace/millrace/internal/scale"
)

// Study is what Simulate runs. Zero fields get the defaults named.
type Study struct {
	// Traces and Policies; default all.
	Traces   []TraceName
	Policies []PolicyName
	// Seeds is how many recordings of each trace every policy gets. Default 15, and one of the week.
	Seeds int
	// Seed is the first one's.
	Seed uint64
	// Pool that Millrace scales; default DefaultPool.
	Pool *scale.Pool
}

// DefaultPool is the pool of all traces: at most 30 workers, four of them spare, and a cool-down of little more than a cold start.
const DefaultPool = `pools:
- name: a10
  models: [chat]
  provider: command
  command: {start: ["true"], stop: ["true"], list: ["true"]}
  max: 30
  spare: 4
  headroom: 0.2
  cooldown: 50s
  cold_start: 45s
`

const defaultSeeds = 15

// tokensPerSecond is what one full worker gets done, in expected tokens.
const tokensPerSecond = fullRate * (meanPrompt + meanOutput)

func defaultPool() (*scale.Pool, error) {
	pools, err := scale.ParsePools([]byte(DefaultPool))
	if err != nil {
		return nil, fmt.Errorf("reading the benchmark's own pool: %w", err)
	}
	pools[0].TokensPerSecond = tokensPerSecond
	return &pools[0], nil
}

// Simulate runs each policy on each trace in virtual time, on every processor. The report has the medians over the seeds. Equal Studies give equal figures. The error is that of a bad Study, or ctx's.
func Simulate(ctx context.Context, s Study) (*Report, error) {
	begun := time.Now()
	if len(s.Traces) == 0 {
		s.Traces = Traces()
	}
	if len(s.Policies) == 0 {
		s.Policies = Policies()
	}
	seeds := cmp.Or(s.Seeds, defaultSeeds)
	if seeds < 1 {
		return nil, fmt.Errorf("seeds is %d, it must be at least 1", s.Seeds)
	}
	for _, t := range s.Traces {
		if !slices.Contains(Traces(), t) {
			return nil, fmt.Errorf("trace %q is unknown", t)
		}
	}
	for _, p := range s.Policies {
		if !slices.Contains(Policies(), p) {
			return nil, fmt.Errorf("policy %q is unknown", p)
		}
	}
	pool := s.Pool
	if pool == nil {
		var err error
		if pool, err = defaultPool(); err != nil {
			return nil, err
		}
	}
	r := &Report{}
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(runtime.GOMAXPROCS(0))
	outcomes := make([][][]*outcome, len(s.Traces))
	for i, name := range s.Traces {
		t := newTrace(name)
		n := seeds
		if t.days {
			n = cmp.Or(s.Seeds, 1)
		}
		outcomes[i] = make([][]*outcome, len(s.Policies))
		for k := range s.Policies {
			outcomes[i][k] = make([]*outcome, n)
		}
		for seed := range n {
			seed := s.Seed + uint64(seed)
			requests := t.requests(seed)
			for k, policy := range s.Policies {
				g.Go(func() error {
					o, err := judge(ctx, t, requests, pool, policy, seed, seed == s.Seed && !t.days)
					if err != nil {
						return fmt.Errorf("simulating %s on %s with seed %d: %w", policy, t.name, seed, err)
					}
					outcomes[i][k][seed-s.Seed] = o
					return nil
				})
			}
		}
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	for i, name := range s.Traces {
		t := TraceReport{Trace: name, Runs: len(outcomes[i][0]), Requests: outcomes[i][0][0].requests, Seconds: newTrace(name).end().Seconds()}
		for k, policy := range s.Policies {
			t.Arms = append(t.Arms, medianArm(policy, outcomes[i][k]))
		}
		r.Traces = append(r.Traces, t)
	}
	r.Bars = bars(r)
	r.Seconds = time.Since(begun).Seconds()
	return r, nil
}

// judge runs one policy on one recording.
func judge(ctx context.Context, t *trace, requests []request, pool *scale.Pool, name PolicyName, seed uint64, keep bool) (*outcome, error) {
	try := func(t *trace, p policy) (*run, error) { return simulate(ctx, t, requests, pool, p, seed, keep) }
	fresh := func() policy { return newPolicy(name, t) }
	r, err := try(t, fresh())
	if err != nil {
		return nil, err
	}
	if name == Clairvoyant {
		// The least margin with which nobody waits.
		for margin := 1.0; slices.Max(r.wait) > 0; {
			margin *= 1.04
			fresh = func() policy { return &clairvoyant{trace: t, margin: margin} }
			if r, err = try(t, fresh()); err != nil {
				return nil, err
			}
		}
	}
	o := r.outcome(t)
	if t.lines > 0 {
		// How many more workers there were than without the batch.
		without := *t
		without.lines = 0
		alone, err := try(&without, fresh())
		if err != nil {
			return nil, err
		}
		o.Added = float64(max(0, r.most-alone.most))
	}
	return o, nil
}
