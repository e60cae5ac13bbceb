package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/millrace/millrace/api"
	"github.com/millrace/millrace/internal/engine"
	"github.com/millrace/millrace/internal/platform"
	"github.com/millrace/millrace/worker"
)

// rig is a platform under measurement, and a client of it.
type rig struct {
	platform *platform.Platform
	nc       *nats.Conn
	http     *http.Client
	dir      string
	stop     context.CancelFunc
	ended    chan error
	serial   atomic.Uint64
}

// rigConfig of a rig.
type rigConfig struct {
	engine  engine.Config
	redis   string // URL; "" is the embedded store
	relaxed bool
}

func openRig(ctx context.Context, cfg Config, rc rigConfig) (*rig, error) {
	dir, err := os.MkdirTemp(cfg.Dir, "queue-")
	if err != nil {
		return nil, fmt.Errorf("making a folder for the queue: %w", err)
	}
	p, err := platform.New(ctx, platform.Config{
		Dir: dir, Relaxed: rc.relaxed, RedisURL: rc.redis, Engine: rc.engine, Version: cfg.Version,
		API: api.Config{Listen: "127.0.0.1:0", DrainTimeout: time.Second}, Worker: worker.Config{Drain: time.Millisecond},
	}, prometheus.NewRegistry(), cfg.Log)
	if err != nil {
		return nil, err
	}
	running, stop := context.WithCancel(context.WithoutCancel(ctx))
	r := &rig{
		platform: p, dir: dir, stop: stop, ended: make(chan error, 1),
		http: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 256, DisableCompression: true}},
	}
	go func() { r.ended <- p.Run(running) }()
	if r.nc, err = nats.Connect("", nats.InProcessServer(p.NATS())); err != nil {
		return nil, errors.Join(fmt.Errorf("connecting to the queue: %w", err), r.close())
	}
	if err := r.ready(ctx); err != nil {
		return nil, errors.Join(err, r.close())
	}
	return r, nil
}

// ready waits until the model is served.
func (r *rig) ready(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	for {
		var problem error
		for name, check := range r.platform.Ready() {
			if err := check(); err != nil {
				problem = fmt.Errorf("%s: %w", name, err)
			}
		}
		if problem == nil {
			return nil
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("waiting for the platform: %w", problem)
		}
	}
}

func (r *rig) close() error {
	if r.nc != nil {
		r.nc.Close()
	}
	r.http.CloseIdleConnections()
	r.stop()
	err := <-r.ended
	_ = os.RemoveAll(r.dir)
	if err != nil {
		return fmt.Errorf("ending the platform: %w", err)
	}
	return nil
}

// post sends a body and checks the status; the answer is read to its end. A refusal for now is tried again soon: on a busy disk the time-outs of the platform
// end before a sync does.
func (r *rig) post(ctx context.Context, path string, body []byte, want int) error {
	for {
		status, text, err := r.once(ctx, path, body)
		switch {
		case err != nil:
			return fmt.Errorf("calling %s: %w", path, err)
		case status == want:
			return nil
		case status != http.StatusServiceUnavailable && status != http.StatusTooManyRequests:
			return fmt.Errorf("calling %s: status %d: %.1000s", path, status, text)
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("calling %s: %w", path, context.Cause(ctx))
		}
	}
}

func (r *rig) once(ctx context.Context, path string, body []byte) (status int, text []byte, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, r.platform.URL()+path, bytes.NewReader(body))
	if err != nil {
		return 0, nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := r.http.Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close() //nolint:errcheck // read to its end
	text, err = io.ReadAll(resp.Body)
	return resp.StatusCode, text, err
}

// durable is a job around an engine's request.
func durable(body []byte) []byte {
	return fmt.Appendf(nil, `{"body":%s,"stream":false}`, json.RawMessage(body))
}

// outcomes counts the records in DONE.
func (r *rig) outcomes(ctx context.Context) (uint64, error) {
	js, err := jetstream.New(r.nc)
	if err != nil {
		return 0, fmt.Errorf("opening JetStream: %w", err)
	}
	s, err := js.Stream(ctx, "DONE") // reads its state
	if err != nil {
		return 0, fmt.Errorf("reading DONE: %w", err)
	}
	return s.CachedInfo().State.Msgs, nil
}

// stubEngine is the stub as a worker sees it. It takes more at once than is ever in flight, so that only the platform limits.
func stubEngine(s *stub, cfg Config) engine.Config {
	return engine.Config{URL: s.url(), Kind: engine.Generic, KVTokens: 1 << 24, MaxConcurrency: 2 * cfg.InFlight}
}

// measureVariant measures on a queue that syncs always, with a real Redis or, without server, the embedded store.
func measureVariant(ctx context.Context, cfg Config, server *redisServer) (*Variant, error) {
	v := &Variant{Redis: "embedded"}
	url := ""
	if server != nil {
		v.Redis, url = "redis-server "+server.version, server.url
	}
	engineStub, err := startStub()
	if err != nil {
		return nil, err
	}
	defer engineStub.close()
	r, err := openRig(ctx, cfg, rigConfig{engine: stubEngine(engineStub, cfg), redis: url})
	if err != nil {
		return nil, err
	}
	err = func() (err error) {
		if err := r.warm(ctx, cfg); err != nil {
			return err
		}
		if v.Interactive, err = r.interactive(ctx, cfg, engineStub); err != nil {
			return fmt.Errorf("interactive calls at low load: %w", err)
		}
		b, err := openBare(ctx, r.nc)
		if err != nil {
			return err
		}
		if err := r.submitted(ctx, cfg, engineStub, b, v); err != nil {
			return fmt.Errorf("durable jobs at low load: %w", err)
		}
		if v.Durable, err = r.throughput(ctx, cfg, b); err != nil {
			return fmt.Errorf("durable jobs in flight: %w", err)
		}
		if err := b.close(ctx); err != nil {
			return err
		}
		engineStub.hold.Store(true)
		if v.Memory, err = r.memory(ctx, cfg, server); err != nil {
			return fmt.Errorf("waiting jobs: %w", err)
		}
		return nil
	}()
	engineStub.close() // lets go what it holds, so that the drain need not wait
	return v, errors.Join(err, r.close())
}

func measureRelaxed(ctx context.Context, cfg Config) (Throughput, error) {
	engineStub, err := startStub()
	if err != nil {
		return Throughput{}, err
	}
	defer engineStub.close()
	r, err := openRig(ctx, cfg, rigConfig{engine: stubEngine(engineStub, cfg), relaxed: true})
	if err != nil {
		return Throughput{}, err
	}
	var t Throughput
	b, err := openBare(ctx, r.nc)
	if err == nil {
		err = r.warm(ctx, cfg)
	}
	if err == nil {
		t, err = r.throughput(ctx, cfg, b)
	}
	return t, errors.Join(err, r.close())
}

// warm sends some of each kind, unmeasured: connections, streams and code are then there.
func (r *rig) warm(ctx context.Context, cfg Config) error {
	for range cfg.times(50) {
		if err := r.post(ctx, "/v1/chat/completions", request(r.serial.Add(1), cfg.Body), http.StatusOK); err != nil {
			return err
		}
		if err := r.post(ctx, "/v1/jobs", durable(request(r.serial.Add(1), cfg.Body)), http.StatusAccepted); err != nil {
			return err
		}
	}
	return nil
}

// pause is what lies between two requests at low load.
const pause = 4 * time.Millisecond

func (r *rig) interactive(ctx context.Context, cfg Config, s *stub) (Latency, error) {
	var all []time.Duration
	for begun := time.Now(); time.Since(begun) < cfg.scaled(1500*time.Millisecond); time.Sleep(pause) {
		n := r.serial.Add(1)
		body, arrived := request(n, cfg.Body), s.expect(n)
		sent := time.Now()
		if err := r.post(ctx, "/v1/chat/completions", body, http.StatusOK); err != nil {
			return Latency{}, err
		}
		at, err := await(ctx, arrived)
		if err != nil {
			return Latency{}, err
		}
		all = append(all, at.Sub(sent))
	}
	return LatencyOf(all), nil
}

// submitted measures durable jobs and, in turns with them, what the sync alone takes.
func (r *rig) submitted(ctx context.Context, cfg Config, s *stub, b *bare, v *Variant) error {
	var toEngine, to202, syncs []time.Duration
	for begun := time.Now(); time.Since(begun) < cfg.scaled(2*time.Second); time.Sleep(pause) {
		n := r.serial.Add(1)
		body, arrived := durable(request(n, cfg.Body)), s.expect(n)
		sent := time.Now()
		if err := r.post(ctx, "/v1/jobs", body, http.StatusAccepted); err != nil {
			return err
		}
		to202 = append(to202, time.Since(sent))
		at, err := await(ctx, arrived)
		if err != nil {
			return err
		}
		toEngine = append(toEngine, at.Sub(sent))
		time.Sleep(pause) // the job's outcome is synced meanwhile
		took, err := b.store(ctx, body)
		if err != nil {
			return err
		}
		syncs = append(syncs, took)
	}
	v.Submitted, v.Accepted, v.BarePublish = LatencyOf(toEngine), LatencyOf(to202), LatencyOf(syncs)
	return nil
}

// throughput measures rounds of Millrace and of the bare pipeline in turns.
func (r *rig) throughput(ctx context.Context, cfg Config, b *bare) (Throughput, error) {
	const round = 1400 * time.Millisecond // of which the last jobs' end, after the last submit, is a small part
	var jobs, bareJobs int
	var took, bareTook time.Duration
	for range 2 {
		n, d, err := b.run(ctx, cfg.InFlight, cfg.Body, cfg.scaled(round))
		if err != nil {
			return Throughput{}, err
		}
		bareJobs, bareTook = bareJobs+n, bareTook+d
		if n, d, err = r.flood(ctx, cfg, cfg.scaled(round)); err != nil {
			return Throughput{}, err
		}
		jobs, took = jobs+n, took+d
	}
	t := Throughput{Jobs: jobs, PerSecond: float64(jobs) / took.Seconds(), Bare: float64(bareJobs) / bareTook.Seconds()}
	if t.Bare > 0 {
		t.Ratio = t.PerSecond / t.Bare
	}
	return t, nil
}

// flood keeps jobs in flight for the duration: each slot submits the next job when the engine has answered its last one. The time counts until the last
// outcome is synced.
func (r *rig) flood(ctx context.Context, cfg Config, length time.Duration) (int, time.Duration, error) {
	before, err := r.settled(ctx)
	if err != nil {
		return 0, 0, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	// In flight are the jobs without an outcome, as DONE counts them every few milliseconds: no client polls its job.
	room := make(chan struct{}, cfg.InFlight)
	var submitted atomic.Int64
	var wg sync.WaitGroup
	begun := time.Now()
	wg.Go(func() {
		var released int64
		for ctx.Err() == nil {
			n, err := r.outcomes(ctx)
			if err != nil {
				cancel(err)
				return
			}
			ended := min(int64(n-before), submitted.Load()) // of a call that was made again there may be two jobs
			for ; released < ended; released++ {
				<-room
			}
			if time.Since(begun) >= length && ended >= submitted.Load() && len(room) == 0 {
				return
			}
			time.Sleep(4 * time.Millisecond) // asking takes the server's time
		}
	})
	for range cfg.InFlight {
		wg.Go(func() {
			for time.Since(begun) < length {
				select {
				case room <- struct{}{}:
				case <-ctx.Done():
					return
				}
				submitted.Add(1)
				if err := r.post(ctx, "/v1/jobs", durable(request(r.serial.Add(1), cfg.Body)), http.StatusAccepted); err != nil {
					cancel(err)
					return
				}
			}
		})
	}
	wg.Wait()
	took := time.Since(begun)
	if err := context.Cause(ctx); err != nil {
		return 0, 0, err
	}
	return int(submitted.Load()), took, nil
}

// settled waits until no outcome is added any more, and returns their number.
func (r *rig) settled(ctx context.Context) (uint64, error) {
	last, err := r.outcomes(ctx)
	for same := 0; err == nil && same < 5; {
		time.Sleep(20 * time.Millisecond)
		n, e := r.outcomes(ctx)
		if same++; n != last {
			same = 0
		}
		last, err = n, e
	}
	return last, err
}

// memory counts what a waiting job takes. The engine holds what it gets, so that the rest waits.
func (r *rig) memory(ctx context.Context, cfg Config, server *redisServer) (m Memory, err error) {
	// First more than the engine and the worker take at once, so that what follows only waits.
	if _, err := r.submit(ctx, cfg, 3*cfg.InFlight, time.Minute); err != nil {
		return m, err
	}
	heap, redis, err := r.held(ctx, server)
	if err != nil {
		return m, err
	}
	if m.Jobs, err = r.submit(ctx, cfg, cfg.times(2000), cfg.scaled(2*time.Second)); err != nil {
		return m, err
	}
	heapAfter, redisAfter, err := r.held(ctx, server)
	m.Process, m.Redis = (heapAfter-heap)/int64(m.Jobs), (redisAfter-redis)/int64(m.Jobs)
	return m, err
}

// submit submits n durable jobs, or as many as it can in the time, and returns how many.
func (r *rig) submit(ctx context.Context, cfg Config, n int, length time.Duration) (int, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	begun := time.Now()
	var taken, done atomic.Int64
	var wg sync.WaitGroup
	for range cfg.InFlight {
		wg.Go(func() {
			for time.Since(begun) < length && taken.Add(1) <= int64(n) {
				if err := r.post(ctx, "/v1/jobs", durable(request(r.serial.Add(1), cfg.Body)), http.StatusAccepted); err != nil {
					cancel(err)
					return
				}
				done.Add(1)
			}
		})
	}
	wg.Wait()
	if err := context.Cause(ctx); err != nil {
		return 0, err
	}
	return int(done.Load()), nil
}

// held is what this process's heap and the real Redis hold now, in bytes.
func (r *rig) held(ctx context.Context, server *redisServer) (heap, redis int64, err error) {
	time.Sleep(200 * time.Millisecond) // what is on its way settles
	runtime.GC()
	runtime.GC() // what has finalizers goes in the second round
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	if server != nil {
		redis, err = server.memory(ctx)
	}
	return int64(m.HeapAlloc), redis, err
}
