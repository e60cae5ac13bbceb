package routing

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/millrace/millrace/bench/workload"
	"github.com/millrace/millrace/internal/engine/emulator"
)

// Shape is how long prompts and answers are.
type Shape = workload.Shape

// The shapes.
const (
	SeedLike = workload.SeedLike
	ChatLike = workload.ChatLike
)

// Shapes returns all of them.
func Shapes() []Shape { return workload.Shapes() }

// Variant is what differs from three equal, healthy engines and arrivals at random.
type Variant string

// The variants.
const (
	// Equal is three equal engines.
	Equal Variant = "equal"
	// Slow has one engine that takes 1.6 times as long for everything.
	Slow Variant = "slow"
	// Stalls has each engine stand still for three seconds about once a minute.
	Stalls Variant = "stalls"
	// Mixed has one L40S beside two A10.
	Mixed Variant = "mixed"
	// Bursts has arrivals whose gaps have a coefficient of variation of 3.
	Bursts Variant = "bursts"
	// Low is equal engines at a fraction of their capacity.
	Low Variant = "low"
)

// Variants returns all of them.
func Variants() []Variant { return []Variant{Equal, Slow, Stalls, Mixed, Bursts, Low} }

// Figures of the workloads.
const (
	slowdown   = 1.6
	stallFor   = 3 * time.Second
	stallEvery = time.Minute
	burstiness = 3.0 // coefficient of variation of the gaps between arrivals
)

// Params choose a workload. Zero fields get the defaults named.
type Params struct {
	// Shape; default SeedLike, but ChatLike for Mixed.
	Shape Shape
	// Variant; default Equal.
	Variant Variant
	// Rate is the mean of arrivals a second, above 0. Default 50 for SeedLike (15 for Low), 5.4 for ChatLike (10 for Mixed, 3 for Low).
	Rate float64
	// Requests is how many arrive, at least 1. Default 8,000.
	Requests int
	// Seed of everything random: equal Params give equal Workloads.
	Seed uint64
	// StallEvery is the mean time between the starts of an engine's stalls in the variant Stalls, over 3 s. Default one minute.
	StallEvery time.Duration
}

// Workload is recorded arrivals and the engines that they meet. All arms share one, and none changes it.
type Workload struct {
	// Params have their defaults filled in.
	Params
	Engines []Engine
	// Arrivals are in the order of time.
	Arrivals []Arrival
}

// Arrival is one request.
type Arrival struct {
	// At is the time since the start.
	At time.Duration
	// Prompt and Output are its lengths in tokens, both at least 1.
	Prompt, Output int
}

// Engine is one engine of a fleet.
type Engine struct {
	Profile emulator.Profile
	// Slowdown multiplies the time of each step; 1 is the profile's own speed.
	Slowdown float64
	// Stalls are when it stands still, in the order of time and without overlap.
	Stalls []Stall
}

// Stall is a time in which an engine computes nothing and answers nothing, and loses nothing.
type Stall struct{ From, To time.Duration }

// NewWorkload records the arrivals of p. The error names the field, its value and the bound.
func NewWorkload(p Params) (*Workload, error) {
	if err := p.complete(); err != nil {
		return nil, err
	}
	// Independent streams: lengths stay the same when the gaps change, and so do both when the stalls do.
	gaps, lengths, stalls := stream(p.Seed, 1), stream(p.Seed, 2), stream(p.Seed, 3)
	w := &Workload{Params: p, Arrivals: make([]Arrival, p.Requests)}
	var at float64 // seconds
	for i := range w.Arrivals {
		if p.Variant == Bursts {
			at += gamma(gaps, 1/(burstiness*burstiness)) * burstiness * burstiness / p.Rate
		} else {
			at += gaps.ExpFloat64() / p.Rate
		}
		prompt, output := p.Shape.Lengths(lengths)
		w.Arrivals[i] = Arrival{At: time.Duration(at * float64(time.Second)), Prompt: prompt, Output: output}
	}
	var err error
	w.Engines, err = fleet(p, stalls, w.Arrivals[len(w.Arrivals)-1].At)
	return w, err
}

func stream(seed, of uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, of)) }

// Check returns what is wrong with p, if anything.
func (p Params) Check() error { return p.complete() }

func (p *Params) complete() error {
	if p.Variant == "" {
		p.Variant = Equal
	}
	if p.Shape == "" {
		p.Shape = SeedLike
		if p.Variant == Mixed {
			p.Shape = ChatLike
		}
	}
	if !slices.Contains(Shapes(), p.Shape) {
		return fmt.Errorf("workload %q is unknown: use %s", p.Shape, list(Shapes()))
	}
	if !slices.Contains(Variants(), p.Variant) {
		return fmt.Errorf("variant %q is unknown: use %s", p.Variant, list(Variants()))
	}
	if p.Rate == 0 {
		p.Rate = defaultRate(p.Shape, p.Variant)
	}
	if !(p.Rate > 0) || p.Rate > 1e6 {
		return fmt.Errorf("rate is %g requests a second, it must be over 0 and at most 1000000", p.Rate)
	}
	if p.Requests == 0 {
		p.Requests = 8000
	}
	if p.Requests < 1 {
		return fmt.Errorf("requests is %d, it must be at least 1", p.Requests)
	}
	if p.StallEvery == 0 {
		p.StallEvery = stallEvery
	}
	if p.StallEvery <= stallFor {
		return fmt.Errorf("stalls come every %s, which must be more than the %s that each lasts", p.StallEvery, stallFor)
	}
	return nil
}

func list[T ~string](all []T) string {
	names := make([]string, len(all))
	for i, v := range all {
		names[i] = string(v)
	}
	return strings.Join(names, ", ")
}

func defaultRate(s Shape, v Variant) float64 {
	switch {
	case s == SeedLike && v == Low:
		return 15
	case s == SeedLike:
		return 50
	case v == Mixed:
		return 10
	case v == Low:
		return 3
	default:
		return 5.4
	}
}

// gamma draws from a gamma distribution of scale 1 and a shape below 1, after Marsaglia and Tsang, "A simple method for generating gamma variables" (2000).
func gamma(r *rand.Rand, shape float64) float64 {
	d := shape + 1 - 1.0/3
	c := 1 / math.Sqrt(9*d)
	for {
		x := r.NormFloat64()
		v := 1 + c*x
		if v <= 0 {
			continue
		}
		v = v * v * v
		if math.Log(1-r.Float64()) < x*x/2+d*(1-v+math.Log(v)) {
			return d * v * math.Pow(1-r.Float64(), 1/shape)
		}
	}
}

// fleet returns the engines of p, whose stalls go on for two minutes after the last arrival.
func fleet(p Params, r *rand.Rand, last time.Duration) ([]Engine, error) {
	profiles := []string{"a10-7b", "a10-7b", "a10-7b"}
	if p.Variant == Mixed {
		profiles[0] = "l40s-8b"
	}
	engines := make([]Engine, len(profiles))
	for i, name := range profiles {
		profile, err := emulator.ProfileByName(name)
		if err != nil {
			return nil, err
		}
		engines[i] = Engine{Profile: profile, Slowdown: 1}
		if p.Variant == Stalls {
			// The first comes at any time within one period, the next between half a period and one and a half after the one before.
			for at := between(r, 0, p.StallEvery); at < last+2*time.Minute; at += max(stallFor, between(r, p.StallEvery/2, p.StallEvery*3/2)) {
				engines[i].Stalls = append(engines[i].Stalls, Stall{From: at, To: at + stallFor})
			}
		}
	}
	if p.Variant == Slow {
		engines[0].Slowdown = slowdown
	}
	return engines, nil
}

func between(r *rand.Rand, from, to time.Duration) time.Duration {
	return from + time.Duration(r.Float64()*float64(to-from))
}
