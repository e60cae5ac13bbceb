package routing

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/millrace/millrace/internal/engine"
)

// model is what all engines serve.
const model = "bench"

// liveFleet is the processes of all engines.
type liveFleet struct {
	program []string
	running context.Context //nolint:containedctx // the engines', ended by close
	stop    context.CancelFunc
	g       errgroup.Group

	mu      sync.Mutex // guards what follows
	engines []*liveEngine
}

func newFleet(ctx context.Context, program []string) *liveFleet {
	f := &liveFleet{program: program}
	f.running, f.stop = context.WithCancel(context.WithoutCancel(ctx)) // they outlive the order to stop, until what is before them has ended
	return f
}

// close ends all engines and waits for their processes.
func (f *liveFleet) close() error {
	f.stop()
	if err := f.g.Wait(); err != nil {
		return fmt.Errorf("ending the engines: %w", err)
	}
	return nil
}

// check returns an error if an engine ended by itself: what was measured then counts for nothing.
func (f *liveFleet) check() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, e := range f.engines {
		if e.process.Exits() > 0 {
			return fmt.Errorf("an emulated engine ended: %w: %s", e.process.LastExit(), e.output.last())
		}
	}
	return nil
}

// liveEngine is an emulated engine in a process of its own.
type liveEngine struct {
	process *engine.Process
	client  *engine.Engine
	output  *output
	url     string
	// preemptions since its start, as it told last.
	preemptions atomic.Int64
}

// start starts an engine and returns when it listens.
func (f *liveFleet) start(ctx context.Context, e Engine) (*liveEngine, error) {
	live := &liveEngine{output: &output{listens: make(chan string, 1)}}
	command := append(append([]string(nil), f.program...), "emulator", "--listen", "127.0.0.1:0", "--model", model, "--profile", e.Profile.Name,
		"--speed", strconv.FormatFloat(1/e.Slowdown, 'g', -1, 64), "--log-format", "json", "--log-level", "info")
	var err error
	live.process, err = engine.NewProcess(engine.ProcessConfig{
		// One processor is more than it needs, and the less often it collects the better.
		Command: command, Env: []string{"GOMAXPROCS=1", "GOGC=400"}, Stderr: live.output, Grace: 2 * time.Second,
	}, slog.New(slog.DiscardHandler))
	if err != nil {
		return nil, fmt.Errorf("starting an emulated engine: %w", err)
	}
	f.mu.Lock()
	f.engines = append(f.engines, live)
	f.mu.Unlock()
	f.g.Go(func() error { return live.process.Run(f.running) })
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	for live.url == "" {
		select {
		case addr := <-live.output.listens:
			live.url = "http://" + addr
		case <-time.After(20 * time.Millisecond):
			if live.process.Exits() > 0 {
				return nil, fmt.Errorf("starting an emulated engine: %w: %s", live.process.LastExit(), live.output.last())
			}
		case <-ctx.Done():
			return nil, fmt.Errorf("waiting for an emulated engine: %w: %s", context.Cause(ctx), live.output.last())
		}
	}
	if live.client, err = engine.New(engine.Config{URL: live.url, Kind: engine.VLLM}, slog.New(slog.DiscardHandler)); err != nil {
		return nil, fmt.Errorf("starting an emulated engine: %w", err)
	}
	return live, nil
}

// freeze has the engine stand still.
func (e *liveEngine) freeze(ctx context.Context, d time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, d+10*time.Second) // it may still stand still
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, e.url+"/emulator/freeze?for="+d.String(), nil)
	if err != nil {
		return fmt.Errorf("stalling an engine: %w", err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return fmt.Errorf("stalling an engine: %w", err)
	}
	defer resp.Body.Close() //nolint:errcheck // it has none
	if resp.StatusCode != http.StatusNoContent {
		return fmt.Errorf("stalling an engine: status %d", resp.StatusCode)
	}
	return nil
}

// readyWithin is how soon an engine that is ready shows its load.
const readyWithin = 500 * time.Millisecond

// loads are what the arm's engines tell now; nil for one that does not answer in time.
func (a *arm) loads(ctx context.Context, within time.Duration) []*engine.Load {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	loads := make([]*engine.Load, len(a.engines))
	var wg sync.WaitGroup
	for i, e := range a.engines {
		wg.Go(func() {
			if l, err := e.client.Load(ctx); err == nil && l.Source == engine.SourceEngine {
				loads[i] = &l
				e.preemptions.Store(l.Preemptions)
			}
		})
	}
	wg.Wait()
	return loads
}

// preemptions are those of the arm's engines since they started, as they told last.
func (a *arm) preemptions() int {
	n := 0
	for _, e := range a.engines {
		n += int(max(0, e.preemptions.Load()))
	}
	return n
}

// output finds in an engine's log where it listens, and keeps the end of it.
type output struct {
	listens chan string

	mu   sync.Mutex // guards what follows
	rest []byte
	tail string
}

// Write takes a part of the log.
func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.rest = append(o.rest, p...)
	for {
		line, rest, whole := bytes.Cut(o.rest, []byte("\n"))
		if !whole {
			return len(p), nil
		}
		var entry struct{ Msg, Addr string }
		if json.Unmarshal(line, &entry) == nil && entry.Msg == "listening" {
			select {
			case o.listens <- entry.Addr:
			default: // it was started again, which check finds
			}
		}
		o.tail = string(line)
		o.rest = append(o.rest[:0], rest...)
	}
}

// last is the last line.
func (o *output) last() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.tail
}
