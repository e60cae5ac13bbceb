package emulator

import (
	"fmt"
	"strings"
	"time"
)

// BlockTokens is the number of tokens in one block of the KV cache.
const BlockTokens = 16

// Profile is one model on one kind of hardware. The times follow a roofline: the batch reads the weights once, or computes, whichever takes
// longer, and each decoding sequence reads its cache.
type Profile struct {
	Name string
	// Floor is what reading the weights once takes: W/(BW*u).
	Floor time.Duration
	// AllReduce is what the tensor-parallel group's exchange adds to each step.
	AllReduce time.Duration
	// PerToken is the computation of one batched token: 2N/(F*mfu).
	PerToken time.Duration
	// PerCached is reading one cached token, in nanoseconds: kvb/(BW*u).
	PerCached float64
	// Overhead is spent once per step, PerSequence for each decoding sequence.
	Overhead, PerSequence time.Duration
	// KVTokens is the capacity of the KV cache, rounded down to whole blocks by Blocks.
	KVTokens int
	// MaxModelLen bounds prompt + answer of one sequence, in tokens.
	MaxModelLen int
	// ColdStart is what this engine usually takes to load. It is advice: an Emulator waits for Config.ColdStart.
	ColdStart time.Duration
}

// Profiles returns the built-in profiles. The last one, test, is no hardware: its steps take a fraction of a millisecond.
func Profiles() []Profile {
	return []Profile{
		{
			Name: "a10-7b", Floor: 28100 * time.Microsecond, PerToken: 250 * time.Microsecond, PerCached: 1090,
			Overhead: 3 * time.Millisecond, PerSequence: 20 * time.Microsecond, KVTokens: 12_800, MaxModelLen: 4096, ColdStart: 45 * time.Second,
		},
		{
			Name: "l40s-8b", Floor: 23200 * time.Microsecond, PerToken: 89 * time.Microsecond, PerCached: 190,
			Overhead: 2 * time.Millisecond, PerSequence: 20 * time.Microsecond, KVTokens: 192_500, MaxModelLen: 32_768, ColdStart: 45 * time.Second,
		},
		{
			Name: "h100-8b", Floor: 5640 * time.Microsecond, PerToken: 32500 * time.Nanosecond, PerCached: 46,
			Overhead: 800 * time.Microsecond, PerSequence: 15 * time.Microsecond, KVTokens: 444_000, MaxModelLen: 131_072, ColdStart: 45 * time.Second,
		},
		{
			Name: "h100x8-70b", Floor: 6600 * time.Microsecond, AllReduce: 2800 * time.Microsecond, PerToken: 44600 * time.Nanosecond, PerCached: 15.3,
			Overhead: 2 * time.Millisecond, PerSequence: 20 * time.Microsecond, KVTokens: 1_357_000, MaxModelLen: 131_072, ColdStart: 120 * time.Second,
		},
		{
			Name: "test", Floor: 100 * time.Microsecond, PerToken: 200 * time.Nanosecond, PerCached: 0.1,
			Overhead: 20 * time.Microsecond, PerSequence: 500 * time.Nanosecond, KVTokens: 65_536, MaxModelLen: 8192,
		},
	}
}

// ProfileByName returns the built-in profile of that name; the error names them all.
func ProfileByName(name string) (Profile, error) {
	var names []string
	for _, p := range Profiles() {
		if p.Name == name {
			return p, nil
		}
		names = append(names, p.Name)
	}
	return Profile{}, fmt.Errorf("unknown profile %q: use %s", name, strings.Join(names, ", "))
}

// StepTime is how long a step takes that prefills so many tokens and decodes one token for each of decoding sequences, which together have
// cached tokens in the KV cache.
func (p Profile) StepTime(prefill, decoding, cached int) time.Duration {
	return p.Overhead + p.AllReduce +
		max(p.Floor, time.Duration(prefill+decoding)*p.PerToken) +
		time.Duration(float64(cached)*p.PerCached) +
		time.Duration(decoding)*p.PerSequence
}

// Blocks is the capacity of the KV cache in blocks.
func (p Profile) Blocks() int { return p.KVTokens / BlockTokens }
