// Package batch measures what a whole batch costs: how near the engines come to what they can do, what each role takes of memory, and what interactive calls beside it notice.
//
// # Processes
//
// Every role, every engine and the stores are processes of their own, as they are in earnest, so that the memory that is measured is the role's. The engines are emulators: their steps take the time of a GPU, and
// no model runs.
//
// # Ideal
//
// An emulated engine has a step model, from which follows how long the same lines take on engines that are never short of work: all lines, with the lengths that they turned out to have, are put into the same
// cores in virtual time, with the interactive calls that ran beside them. The busy share is that time over the measured one. The emulators are also driven directly, without Millrace, with a sample of the lines:
// where this machine's processors cannot keep up with the step model, that shows there.
package batch

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"runtime"
	"time"

	"github.com/millrace/millrace/bench"
	"github.com/millrace/millrace/internal/client"
	"github.com/millrace/millrace/internal/engine/emulator"
	"github.com/millrace/millrace/internal/job"
)

// Config of a run. Zero fields get the defaults named.
type Config struct {
	// Lines of the batch. Default 50,000.
	Lines int
	// Workers, each with an engine of its own. Default 2.
	Workers int
	// Profile and Speed of the emulated engines. Default l40s-8b at 1.
	Profile string
	Speed   float64
	// Prompt is the length of a line's prompt, Tokens the mean of the answers', in tokens; single answers have between half and half as much again. Default 64 and 32.
	Prompt, Tokens int
	// Rate of the interactive calls that run beside it, a second. Default 4. Negative is none.
	Rate float64
	// NATSURL, RedisURL and DatabaseURL of servers to use, which must be empty; "" is one that is started for the run: the embedded NATS, RedisServer or the embedded store, SQLite.
	NATSURL, RedisURL, DatabaseURL string
	// RedisServer is the program that is a real Redis; "" is the embedded store.
	RedisServer string
	// Dir is where the stores are made, and removed. Default the folder for temporary files.
	Dir string
	// Program is a command that runs Millrace when its arguments follow. Default this program.
	Program []string
	// Within bounds the whole run. Default 5 minutes, and 30 ms for each line.
	Within time.Duration
	// Say gets a line for people at each step; nil is nobody.
	Say func(string)
	// Log of what goes wrong; nil is none.
	Log *slog.Logger
	// Version of this build.
	Version string
}

// model is what the engines serve.
const model = job.Model("bench")

func (c *Config) complete() error {
	for _, d := range []struct {
		name          string
		value         *int
		def, min, max int
	}{
		{"lines", &c.Lines, 50_000, 1, 10_000_000}, {"workers", &c.Workers, 2, 1, 32}, {"prompt", &c.Prompt, 64, 24, 100_000}, {"tokens", &c.Tokens, 32, 2, 10_000},
	} {
		if *d.value == 0 {
			*d.value = d.def
		}
		if *d.value < d.min || *d.value > d.max {
			return fmt.Errorf("%s is %d: it must be between %d and %d", d.name, *d.value, d.min, d.max)
		}
	}
	if c.Profile == "" {
		c.Profile = "l40s-8b"
	}
	if c.Speed == 0 {
		c.Speed = 1
	}
	if c.Rate == 0 {
		c.Rate = 4
	}
	if c.Within == 0 {
		c.Within = 5*time.Minute + time.Duration(c.Lines)*30*time.Millisecond
	}
	if len(c.Program) == 0 {
		program, err := os.Executable()
		if err != nil {
			return fmt.Errorf("finding this program, which runs the roles: %w", err)
		}
		c.Program = []string{program}
	}
	if c.Say == nil {
		c.Say = func(string) {}
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return nil
}

// Report is what was found. Its JSON is read by machines: fields are only added.
type Report struct {
	Version string    `json:"version"`
	Go      string    `json:"go"`
	OS      string    `json:"os"`
	CPUs    int       `json:"cpus"`
	Begun   time.Time `json:"begun"`
	// Seconds is how long the whole run took.
	Seconds float64 `json:"seconds"`

	Lines    int     `json:"lines"`
	Workers  int     `json:"workers"`
	Profile  string  `json:"profile"`
	Speed    float64 `json:"speed"`
	Redis    string  `json:"redis"`
	Database string  `json:"database"`

	Phases Phases `json:"phases"`
	// LinesPerSecond and TokensPerSecond (of prompts and answers) while it ran.
	LinesPerSecond  float64 `json:"lines_per_second"`
	TokensPerSecond float64 `json:"tokens_per_second"`
	// Running is how many requests the engines had on average while it ran, of RunningMost that they can have.
	Running     float64 `json:"running"`
	RunningMost int     `json:"running_most"`
	// BusyShare is Ideal.Seconds over Phases.Run; DirectShare is LinesPerSecond over Direct.LinesPerSecond.
	BusyShare   float64 `json:"busy_share"`
	DirectShare float64 `json:"direct_share"`
	// Ideal is what the engines' step model takes for the same work, Direct what the emulators on this machine did with a sample of it, without Millrace.
	Ideal  Ideal  `json:"ideal"`
	Direct Direct `json:"direct"`

	Counts      Counts       `json:"counts"`
	Roles       []Role       `json:"roles"`
	Interactive *Interactive `json:"interactive"`
	// Notes explain the figures.
	Notes map[string]string `json:"notes"`
}

// Phases of a batch, in seconds. Run is from the end of the validation to the end of the last line.
type Phases struct {
	Upload   float64 `json:"upload"`
	Validate float64 `json:"validate"`
	Run      float64 `json:"run"`
	Finalize float64 `json:"finalize"`
	Download float64 `json:"download"`
}

// Ideal is engines that are never short of work.
type Ideal struct {
	Seconds        float64 `json:"seconds"`
	LinesPerSecond float64 `json:"lines_per_second"`
}

// Direct is the emulators without Millrace.
type Direct struct {
	Lines          int     `json:"lines"`
	Concurrency    int     `json:"concurrency"`
	LinesPerSecond float64 `json:"lines_per_second"`
	// BusyShare is the ideal time of the sample over the measured one: what this machine's processors let the emulators reach.
	BusyShare float64 `json:"busy_share"`
}

// Counts of custom_ids. Once is those that ended exactly once; the other two must be 0.
type Counts struct {
	Completed int `json:"completed"`
	Failed    int `json:"failed"`
	Once      int `json:"once"`
	Missing   int `json:"missing"`
	Twice     int `json:"more_than_once"`
}

// Role is the memory of one kind of process, in bytes: of each kind's largest. 0 is unknown.
type Role struct {
	Name      string `json:"name"`
	Processes int    `json:"processes"`
	// Idle is its resident memory before the batch, Peak the most of the whole run.
	Idle int64 `json:"idle_bytes"`
	Peak int64 `json:"peak_bytes"`
}

// Interactive is what chat calls at a steady rate had as time to the first token, before the batch and beside it.
type Interactive struct {
	Rate   float64       `json:"rate"`
	Alone  bench.Latency `json:"alone"`
	Beside bench.Latency `json:"beside"`
	// Ratio is Beside.P99 over Alone.P99.
	Ratio float64 `json:"p99_ratio"`
	// Failed counts the calls that were not answered.
	Failed int `json:"failed"`
}

var notes = map[string]string{
	"ideal":       "The engines' step model in virtual time: the same lines with the lengths that they had, and the interactive calls beside them, on the same number of engines that are never short of work.",
	"busy_share":  "The ideal time over the measured one, from the end of the validation to the end of the last line: with the first and the last seconds, in which engines fill and empty.",
	"direct":      "A sample of the lines sent to the emulators without Millrace, at the concurrency that fills them. Below the ideal where this machine's processors do not keep up with the emulated GPUs.",
	"interactive": "Streamed chat calls at a steady rate through the same API, from the send to the first token: before the batch, and from its creation to its last line.",
	"memory":      "The most resident memory of each process since its start (VmHWM). Stores that the run did not start itself are not seen.",
}

// errTime: the run may not take longer.
var errTime = errors.New("the benchmark did not end in time: is the machine busy?")

// Run measures one batch on a platform of its own.
func Run(ctx context.Context, cfg Config) (_ *Report, err error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp(cfg.Dir, "millrace-bench-")
	if err != nil {
		return nil, fmt.Errorf("making a folder for the stores: %w", err)
	}
	defer os.RemoveAll(dir) //nolint:errcheck // it is temporary
	cfg.Dir = dir
	ctx, cancel := context.WithTimeoutCause(ctx, cfg.Within, errTime)
	defer cancel()
	r := &Report{
		Version: cfg.Version, Go: runtime.Version(), OS: runtime.GOOS + "/" + runtime.GOARCH, CPUs: runtime.NumCPU(), Begun: time.Now().UTC(),
		Lines: cfg.Lines, Workers: cfg.Workers, Profile: cfg.Profile, Speed: cfg.Speed, Notes: notes,
	}
	cfg.Say("starting the roles, each in a process of its own")
	p, err := start(ctx, cfg)
	if err != nil {
		return nil, because(ctx, err)
	}
	defer func() { err = errors.Join(err, p.close()) }()
	if err := measure(ctx, cfg, p, r); err != nil {
		return nil, because(ctx, err)
	}
	r.Seconds = time.Since(r.Begun).Seconds()
	return r, nil
}

func because(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil && !errors.Is(err, cause) {
		return fmt.Errorf("%w (%w)", cause, err)
	}
	return err
}

func measure(ctx context.Context, cfg Config, p *platform, r *Report) error {
	r.Redis, r.Database = p.redis, p.database
	c, err := client.New(client.Config{URL: p.url, Patience: time.Minute, Timeout: 5 * time.Minute})
	if err != nil {
		return err
	}
	defer c.CloseIdleConnections()

	var sample []size
	if r.Direct, sample, err = direct(ctx, cfg, p); err != nil {
		return fmt.Errorf("driving the engines directly: %w", err)
	}
	profile, err := profileOf(cfg.Profile)
	if err != nil {
		return err
	}
	wanted := ideal(profile, cfg.Workers, sample, nil)
	r.Direct.BusyShare = wanted.Seconds() / cfg.Speed * r.Direct.LinesPerSecond / float64(len(sample))
	cfg.Say(fmt.Sprintf("engines without Millrace: %.0f lines a second", r.Direct.LinesPerSecond))

	calls := newCalls(cfg, p.url)
	defer calls.close()
	if cfg.Rate > 0 {
		cfg.Say("interactive calls alone")
		if err := calls.run(ctx, quiet(cfg)); err != nil {
			return err
		}
		r.Interactive = &Interactive{Rate: cfg.Rate, Alone: calls.take()}
	}
	p.idle()

	watched := watchEngines(ctx, p.engines)
	b, beside, err := runBatch(ctx, cfg, c, calls, watched, r)
	r.Running, r.RunningMost = watched.end(), len(p.engines)*emulator.MaxRunning
	if err != nil {
		return err
	}
	if r.Interactive != nil {
		r.Interactive.Beside, r.Interactive.Failed = calls.take(), int(calls.failed.Load())
		if r.Interactive.Alone.P99 > 0 {
			r.Interactive.Ratio = r.Interactive.Beside.P99 / r.Interactive.Alone.P99
		}
	}
	cfg.Say("fetching the results and counting every line")
	t := newTally(cfg.Lines)
	begun := time.Now()
	for _, f := range []struct {
		id string
		ok bool
	}{{b.OutputFileID, true}, {b.ErrorFileID, false}} {
		if f.id == "" {
			continue
		}
		if err := t.read(ctx, c, f.id, f.ok); err != nil {
			return err
		}
	}
	r.Phases.Download = time.Since(begun).Seconds()
	r.Counts = t.counts()
	r.Roles = p.roles()

	took := ideal(profile, cfg.Workers, t.sizes, beside).Seconds() / cfg.Speed
	r.Ideal = Ideal{Seconds: took, LinesPerSecond: float64(cfg.Lines) / took}
	r.LinesPerSecond = float64(cfg.Lines) / r.Phases.Run
	r.TokensPerSecond = float64(t.tokens()) / r.Phases.Run
	r.BusyShare = took / r.Phases.Run
	if r.Direct.LinesPerSecond > 0 {
		r.DirectShare = r.LinesPerSecond / r.Direct.LinesPerSecond
	}
	return r.check(b)
}

// check returns an error where the batch did not end as it must.
func (r *Report) check(b *client.Batch) error {
	n := b.RequestCounts
	switch {
	case b.Status != client.BatchCompleted:
		return fmt.Errorf("the batch ended as %s", b.Status)
	case r.Counts.Missing > 0 || r.Counts.Twice > 0:
		return fmt.Errorf("of %d lines %d are in no file and %d are there more than once", r.Lines, r.Counts.Missing, r.Counts.Twice)
	case n.Total != int64(r.Lines) || n.Completed != int64(r.Counts.Completed) || n.Failed != int64(r.Counts.Failed):
		return fmt.Errorf("the batch counts %d lines, %d completed, %d failed; its files have %d and %d of %d", n.Total, n.Completed, n.Failed, r.Counts.Completed, r.Counts.Failed, r.Lines)
	}
	return nil
}

// quiet is how long interactive calls are measured alone.
func quiet(cfg Config) time.Duration {
	return min(max(time.Duration(cfg.Lines)*time.Millisecond/2, 2*time.Second), 25*time.Second)
}

// runBatch sends the lines and waits for their end, with interactive calls beside them. It returns the sizes of those calls.
func runBatch(ctx context.Context, cfg Config, c *client.Client, calls *calls, watched *engineWatch, r *Report) (*client.Batch, []size, error) {
	begun := time.Now()
	lap := func(to *float64) {
		now := time.Now()
		*to = now.Sub(begun).Seconds()
		begun = now
	}
	in := newInput(cfg)
	f, err := c.Upload(ctx, client.Upload{Content: in, Size: in.Size(), Name: "bench.jsonl"})
	if err != nil {
		return nil, nil, fmt.Errorf("sending the lines: %w", err)
	}
	lap(&r.Phases.Upload)
	cfg.Say(fmt.Sprintf("%d lines, %.1f MB, sent in %.1f s", cfg.Lines, float64(f.Bytes)/1e6, r.Phases.Upload))

	running, stop := context.WithCancel(ctx)
	defer stop()
	called := make(chan error, 1)
	go func() {
		if cfg.Rate <= 0 {
			called <- nil
			return
		}
		called <- calls.run(running, 0)
	}()
	end := func() error { stop(); return <-called }

	begun = time.Now()
	b, err := c.CreateBatch(ctx, client.NewBatch{InputFileID: f.ID, Endpoint: job.ChatCompletions, CompletionWindow: "24h"})
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("starting the batch: %w", err), end())
	}
	told, status := time.Now(), client.BatchValidating
	for !b.Ended() || b.Status != status {
		if b.Status != status {
			switch status { // that has ended
			case client.BatchValidating:
				lap(&r.Phases.Validate)
				watched.count.Store(true)
			case client.BatchInProgress:
				lap(&r.Phases.Run)
				watched.count.Store(false)
				err = end()
			case client.BatchFinalizing:
				lap(&r.Phases.Finalize)
			}
			status = b.Status
			continue
		}
		if now := time.Now(); now.Sub(told) > 5*time.Second {
			told = now
			cfg.Say(fmt.Sprintf("%s: %d of %d lines", b.Status, b.RequestCounts.Completed+b.RequestCounts.Failed, cfg.Lines))
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			return nil, nil, errors.Join(ctx.Err(), end())
		}
		next, err := c.Batch(ctx, b.ID)
		if err != nil {
			return nil, nil, errors.Join(fmt.Errorf("following the batch: %w", err), end())
		}
		b = next
	}
	if r.Phases.Run == 0 { // it was over before anybody saw it finalize
		r.Phases.Run = r.Phases.Validate + r.Phases.Finalize
	}
	if b.Status == client.BatchFailed {
		raw, _ := json.Marshal(b.Errors) // only to say more
		return nil, nil, errors.Join(fmt.Errorf("the batch was refused: %.1000s", raw), end())
	}
	return b, calls.sizes(), err
}

// tally counts the lines of the files by their custom_ids.
type tally struct {
	seen              []uint8 // how often, up to 255
	completed, failed int
	strange           int
	sizes             []size
}

func newTally(lines int) *tally { return &tally{seen: make([]uint8, lines)} }

// read counts a file.
func (t *tally) read(ctx context.Context, c *client.Client, id string, ok bool) error {
	r, w := io.Pipe()
	done := make(chan error, 1)
	go func() {
		_, err := c.Download(ctx, id, w, nil)
		w.CloseWithError(err)
		done <- err
	}()
	err := t.lines(r, ok)
	_ = r.CloseWithError(errors.New("given up"))
	if got := <-done; got != nil && err == nil {
		err = got
	}
	if err != nil {
		return fmt.Errorf("reading %s: %w", id, err)
	}
	return nil
}

func (t *tally) lines(r io.Reader, ok bool) error {
	for dec := json.NewDecoder(r); ; {
		var line struct {
			CustomID string `json:"custom_id"`
			Response *struct {
				Body struct {
					Usage job.Usage `json:"usage"`
				} `json:"body"`
			} `json:"response"`
		}
		switch err := dec.Decode(&line); {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		}
		n, known := numberOf(line.CustomID)
		if !known || n >= len(t.seen) {
			t.strange++
			continue
		}
		if t.seen[n] < 255 {
			t.seen[n]++
		}
		if !ok {
			t.failed++
			continue
		}
		t.completed++
		if line.Response != nil {
			t.sizes = append(t.sizes, size{int(line.Response.Body.Usage.PromptTokens), int(line.Response.Body.Usage.CompletionTokens)})
		}
	}
}

func (t *tally) counts() Counts {
	n := Counts{Completed: t.completed, Failed: t.failed, Twice: t.strange}
	for _, times := range t.seen {
		switch times {
		case 0:
			n.Missing++
		case 1:
			n.Once++
		default:
			n.Twice++
		}
	}
	return n
}

func (t *tally) tokens() int {
	n := 0
	for _, s := range t.sizes {
		n += s.prompt + s.output
	}
	return n
}

// size of a request and its answer in tokens.
type size struct{ prompt, output int }

// ideal is how long the step model takes for the lines on so many engines, with the calls beside them: at speed 1.
func ideal(p emulator.Profile, engines int, lines, calls []size) time.Duration {
	var longest time.Duration
	for e := range engines {
		core := emulator.NewCore(p)
		core.SetQuiet()
		for _, all := range [][]size{lines, calls} {
			for i := e; i < len(all); i += engines {
				_, _ = core.Add(emulator.Request{Prompt: max(1, all[i].prompt), Output: all[i].output}) // what never fits was refused in earnest too
			}
		}
		var took time.Duration
		for {
			s, more := core.Step()
			if !more {
				break
			}
			took += s.Duration
		}
		longest = max(longest, took)
	}
	return longest
}

func profileOf(name string) (emulator.Profile, error) {
	for _, p := range emulator.Profiles() {
		if p.Name == name {
			return p, nil
		}
	}
	return emulator.Profile{}, fmt.Errorf("there is no profile %q", name)
}

// lastLine is the end of a text, for an error.
func lastLine(text []byte) []byte {
	text = bytes.TrimSpace(text)
	return text[bytes.LastIndexByte(text, '\n')+1:]
}
