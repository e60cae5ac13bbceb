// Package bench measures what Millrace costs: the time and the memory that it adds to an engine's own.
//
// What is compared is measured in one run, in turns, on one machine: absolute numbers say more about the machine than about the code.
package bench

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"runtime"
	"time"
)

// Config of the dispatch benchmark. Zero fields get the defaults named.
type Config struct {
	// Dir is where the queues' stores are made, and removed: on the disk that is to be measured. Default the folder for temporary files.
	Dir string
	// InFlight is how many durable jobs are kept in flight. Default 64.
	InFlight int
	// Body is the size of a request in bytes. Default 1,024.
	Body int
	// Scale stretches or shortens each measurement. Default 1, which takes half a minute in all.
	Scale float64
	// RedisServer is the program that is a real Redis; "" leaves that part out. FindRedis finds one.
	RedisServer string
	// Say gets a line for people at each step; nil is nobody.
	Say func(string)
	Log *slog.Logger
	// Version of this build.
	Version string
}

// FindRedis returns the redis-server on the PATH, "" if there is none.
func FindRedis() string {
	path, err := exec.LookPath("redis-server")
	if err != nil {
		return ""
	}
	return path
}

// Report is what the dispatch benchmark found. Its JSON is read by machines: fields are only added.
type Report struct {
	Version string    `json:"version"`
	Go      string    `json:"go"`
	OS      string    `json:"os"`
	CPUs    int       `json:"cpus"`
	Begun   time.Time `json:"begun"`
	// Seconds is how long the whole run took.
	Seconds  float64 `json:"seconds"`
	InFlight int     `json:"in_flight"`
	Body     int     `json:"body_bytes"`
	// DurableRatio is Embedded.Durable.Ratio.
	DurableRatio float64 `json:"durable_ratio"`
	// Embedded is measured with the embedded Redis-compatible store, Redis with a real server; nil where none was found.
	Embedded *Variant `json:"embedded"`
	Redis    *Variant `json:"redis"`
	// Relaxed is the throughput with a queue that syncs each 100 ms.
	Relaxed Throughput `json:"relaxed"`
	TTFT    TTFT       `json:"ttft"`
	// Limits says of each measurement what limits it.
	Limits map[string]string `json:"limits"`
}

// Variant is what is measured with one kind of Redis, on a queue that syncs always.
type Variant struct {
	Redis string `json:"redis"`
	// Interactive calls wait on their connection; Submitted ones are durable jobs. Both are sent one at a time to an idle platform: from the client's send
	// to the arrival of the request at the engine. Accepted is from the send of a durable job to its 202. BarePublish is one synced publish and nothing else, in turns with them.
	Interactive Latency    `json:"interactive"`
	Submitted   Latency    `json:"submitted"`
	Accepted    Latency    `json:"accepted"`
	BarePublish Latency    `json:"bare_publish"`
	Durable     Throughput `json:"durable"`
	Memory      Memory     `json:"memory"`
}

// Latency of N samples in milliseconds.
type Latency struct {
	N   int     `json:"n"`
	P50 float64 `json:"p50_ms"`
	P99 float64 `json:"p99_ms"`
}

// LatencyOf sums up the times.
func LatencyOf(d []time.Duration) Latency {
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
	return Latency{N: len(d), P50: ms(Quantile(d, 0.50)), P99: ms(Quantile(d, 0.99))}
}

// Throughput of whole jobs, in jobs per second: Millrace's, and the bare JetStream pipeline's on the same server, in turns.
type Throughput struct {
	Jobs      int     `json:"jobs"`
	PerSecond float64 `json:"jobs_per_second"`
	Bare      float64 `json:"bare_per_second"`
	// Ratio is PerSecond / Bare.
	Ratio float64 `json:"ratio"`
}

// Memory of waiting jobs, in bytes for each. Process counts the heap of the one process that holds API, dispatcher, worker, queue and, in the embedded
// variant, the store. Redis is the real server's.
type Memory struct {
	Jobs    int   `json:"jobs"`
	Process int64 `json:"process_bytes_per_job"`
	Redis   int64 `json:"redis_bytes_per_job,omitempty"`
}

// TTFT compares the time to the first token of a stream: from an emulated h100-8b, direct and through Millrace, in turns.
type TTFT struct {
	Direct  Latency `json:"direct"`
	Through Latency `json:"through"`
	// Added is the difference of the medians in milliseconds.
	Added float64 `json:"added_ms"`
}

// errTime: the run may not take longer.
var errTime = errors.New("the benchmark did not end in time: is the machine busy?")

// timeLimit bounds the whole run.
const timeLimit = 50 * time.Second

// Dispatch runs the benchmark. It ends within 50 seconds, times Scale where that is above 1.
func Dispatch(ctx context.Context, cfg Config) (*Report, error) {
	if cfg.InFlight == 0 {
		cfg.InFlight = 64
	}
	if cfg.Body == 0 {
		cfg.Body = 1024
	}
	if cfg.Scale == 0 {
		cfg.Scale = 1
	}
	if cfg.Say == nil {
		cfg.Say = func(string) {}
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	dir, err := os.MkdirTemp(cfg.Dir, "millrace-bench-")
	if err != nil {
		return nil, fmt.Errorf("making a folder for the queues: %w", err)
	}
	defer os.RemoveAll(dir) //nolint:errcheck // it is temporary
	cfg.Dir = dir
	ctx, cancel := context.WithTimeoutCause(ctx, time.Duration(float64(timeLimit)*max(cfg.Scale, 1)), errTime)
	defer cancel()

	r := &Report{
		Version: cfg.Version, Go: runtime.Version(), OS: runtime.GOOS + "/" + runtime.GOARCH, CPUs: runtime.NumCPU(), Begun: time.Now().UTC(),
		InFlight: cfg.InFlight, Body: cfg.Body, Limits: limits,
	}
	if err := dispatch(ctx, cfg, r); err != nil {
		if cause := context.Cause(ctx); cause != nil {
			return nil, fmt.Errorf("%w (%w)", cause, err)
		}
		return nil, err
	}
	r.DurableRatio = r.Embedded.Durable.Ratio
	r.Seconds = time.Since(r.Begun).Seconds()
	return r, nil
}

// step is a part of the run and how long it takes on an idle machine, at scale 1.
type step struct {
	name  string
	usual time.Duration
	run   func(ctx context.Context, cfg Config) error
}

// dispatch runs all steps. When one took longer than usual, those that follow are shortened: the run ends in time with fewer samples, not without an answer.
func dispatch(ctx context.Context, cfg Config, r *Report) error {
	steps := []step{{"embedded parts", 13 * time.Second, func(ctx context.Context, cfg Config) (err error) {
		r.Embedded, err = measureVariant(ctx, cfg, nil)
		return err
	}}}
	if cfg.RedisServer != "" {
		server, err := startRedis(ctx, cfg.RedisServer, cfg.Dir)
		if err != nil {
			return err
		}
		defer server.close()
		steps = append(steps, step{"redis-server " + server.version, 13 * time.Second, func(ctx context.Context, cfg Config) (err error) {
			r.Redis, err = measureVariant(ctx, cfg, server)
			return err
		}})
	}
	steps = append(steps,
		step{"relaxed durability", 7 * time.Second, func(ctx context.Context, cfg Config) (err error) {
			r.Relaxed, err = measureRelaxed(ctx, cfg)
			return err
		}},
		step{"time to first token", 4 * time.Second, func(ctx context.Context, cfg Config) (err error) {
			r.TTFT, err = measureTTFT(ctx, cfg)
			return err
		}})
	for i, s := range steps {
		cfg.Say(s.name)
		if err := s.run(ctx, cfg.within(ctx, steps[i:])); err != nil {
			return fmt.Errorf("measuring %s: %w", s.name, err)
		}
	}
	return nil
}

// within is cfg at a scale at which the steps end before ctx does.
func (c Config) within(ctx context.Context, steps []step) Config {
	var usual time.Duration
	for _, s := range steps {
		usual += c.scaled(s.usual)
	}
	const spare = 5 * time.Second
	if end, ok := ctx.Deadline(); ok && time.Until(end)-spare < usual {
		c.Scale *= max(0.1, (time.Until(end)-spare).Seconds()/usual.Seconds())
	}
	return c
}

// limits says of each field of a report what limits it.
var limits = map[string]string{
	"interactive":  "Two HTTP calls, a message through a memory stream and a claim asked of the API over core NATS; no disk and no Redis. What remains is scheduling between goroutines.",
	"submitted":    "One sync of the queue's file (bare_publish), a round trip to Redis before it and a claim after it.",
	"accepted":     "Two writes to Redis and one sync of the queue's file.",
	"bare_publish": "The disk.",
	"durable":      "Syncs of two files, shared by the jobs that wait at the same moment, and then the processors: a job costs an HTTP call from the client, one to the engine, and six round trips to Redis.",
	"relaxed":      "The processors: no sync is waited for any more.",
	"ttft":         "The way of the request as in interactive, and for each chunk one message over core NATS.",
	"memory":       "The message as the queue's index and cache hold it, and the record with its body in the store. The embedded store holds it in this process, by structures made for tests and not for size.",
}

// scaled is a length of time at the configured scale.
func (c Config) scaled(d time.Duration) time.Duration { return time.Duration(float64(d) * c.Scale) }

// times is a count at the configured scale, at least 1.
func (c Config) times(n int) int { return max(1, int(float64(n)*c.Scale)) }
