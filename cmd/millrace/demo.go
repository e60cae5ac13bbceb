package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"
	"golang.org/x/sync/errgroup"

	"github.com/millrace/millrace/api"
	"github.com/millrace/millrace/bench"
	"github.com/millrace/millrace/examples"
	"github.com/millrace/millrace/internal/client"
	"github.com/millrace/millrace/internal/config"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/platform"
	"github.com/millrace/millrace/internal/telemetry"
)

// demoFlags are those of `millrace demo`.
type demoFlags struct {
	emu     emulatorFlags
	prompts string
	workers int
	timeout time.Duration
	log     telemetry.LogConfig
}

func newDemo(p *program) *cobra.Command {
	var f demoFlags
	cmd := &cobra.Command{
		Use: "demo", Short: "Watch a whole platform answer 200 prompts",
		Long: `Start a platform in this process, in a temporary folder and on a free port, with
emulated engines. Send the example prompts as durable jobs, print one answer while it
is written, and sum up. The exit code is 0 if all jobs completed.`,
		Example: "  millrace demo\n  millrace demo --workers 4 --speed 2\n  millrace demo --prompts my.jsonl",
		Args:    args(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := errors.Join(f.emu.check(), config.Between("workers", f.workers, 1, 64), config.AtLeast("timeout", f.timeout, time.Second)); err != nil {
				return usageError(cmd, err)
			}
			return demo(cmd.Context(), p, &f)
		},
	}
	fs := cmd.Flags()
	fs.StringVar(&f.prompts, "prompts", "", "`file` with one chat completion body a line, without its model (default 200 examples)")
	fs.IntVar(&f.workers, "workers", 2, "how many workers, each beside an emulated engine")
	f.emu.add(fs)
	f.emu.KVTokens = demoTokens
	_ = fs.Lookup("profile").Value.Set("a10-7b")
	fs.DurationVar(&f.timeout, "timeout", 3*time.Minute, "when to give up")
	fs.StringVar(&f.log.Level, "log-level", "error", "debug, info, warn or error")
	return cmd
}

// demoTokens is each emulated engine's KV cache in the demo, in tokens: an A10's would take all prompts at once, and nobody would see a queue.
const demoTokens = 1024

func demo(ctx context.Context, p *program, f *demoFlags) (err error) {
	log, err := telemetry.NewLogger(p.err, f.log)
	if err != nil {
		return &exitError{exitUsage, err}
	}
	bodies, err := readPrompts(f.prompts)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "millrace-demo-")
	if err != nil {
		return fmt.Errorf("making a temporary folder: %w", err)
	}
	defer os.RemoveAll(dir) //nolint:errcheck // it is temporary

	asked := ctx
	ctx, cancel := context.WithTimeoutCause(ctx, f.timeout, fmt.Errorf("not done after %v: give it longer with --timeout", f.timeout))
	defer cancel()
	if _, err := fmt.Fprintf(p.out, "Millrace %s: a queue, a store, an API, a dispatcher and %s in this process,\neach worker beside an emulated GPU server: no model runs, the text is made up.\n\n",
		buildVersion(), plural(f.workers, "worker")); err != nil {
		return err
	}
	pf, err := platform.New(ctx, platform.Config{
		Dir: dir, Workers: f.workers, Emulator: f.emu.Config, API: api.Config{Listen: "127.0.0.1:0"}, Version: buildVersion(),
	}, prometheus.NewRegistry(), log)
	if err != nil {
		return ended(asked, err)
	}
	// The platform goes on until the jobs are through, and then ends in its own order.
	running, stop := context.WithCancel(ctx)
	g, running := errgroup.WithContext(running)
	g.Go(func() error { return pf.Run(running) })
	g.Go(func() error {
		defer stop()
		return runDemo(running, p, pf, bodies)
	})
	err = g.Wait()
	switch {
	case asked.Err() != nil:
		return asked.Err()
	case ctx.Err() != nil && err != nil:
		return context.Cause(ctx)
	}
	return err
}

// readPrompts reads the bodies, one a line.
func readPrompts(path string) ([][]byte, error) {
	raw, name := examples.Prompts, "the example prompts"
	if path != "" {
		var err error
		if raw, err = os.ReadFile(path); err != nil {
			return nil, fmt.Errorf("reading the prompts: %w", err)
		}
		name = path
	}
	var bodies [][]byte
	n := 0
	for line := range bytes.Lines(raw) {
		n++
		if line = bytes.TrimSpace(line); len(line) == 0 {
			continue
		}
		if _, err := job.ParseObject(line); err != nil {
			return nil, fmt.Errorf("line %d of %s: %w", n, name, err)
		}
		bodies = append(bodies, line)
	}
	if len(bodies) == 0 {
		return nil, fmt.Errorf("%s holds no prompt", name)
	}
	return bodies, nil
}

// runDemo sends the bodies as jobs, shows one and the progress of all, and sums up.
func runDemo(ctx context.Context, p *program, pf *platform.Platform, bodies [][]byte) error {
	if err := awaitReady(ctx, pf); err != nil {
		return fmt.Errorf("waiting for the platform: %w", err)
	}
	c, err := client.New(client.Config{URL: pf.URL(), Patience: time.Minute})
	if err != nil {
		return err
	}
	defer c.CloseIdleConnections()
	model, err := onlyModel(ctx, c)
	if err != nil {
		return err
	}
	begun := time.Now()
	ids, err := submitAll(ctx, c, model, bodies)
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintf(p.out, "%s accepted in %s: each was on disk before its 202. The first one's answer, as it is written:\n\n",
		plural(len(ids), "job"), short(time.Since(begun))); err != nil {
		return err
	}
	if _, err := follow(ctx, c, ids[0], &indented{w: p.out}, io.Discard); err != nil {
		return err
	}
	if _, err := fmt.Fprintln(p.out); err != nil {
		return err
	}
	jobs, err := waitAll(ctx, c, ids, p.out)
	if err != nil {
		return err
	}
	s := sum(jobs, time.Since(begun))
	if err := s.print(p.out); err != nil {
		return err
	}
	if s.completed != len(jobs) {
		return &exitError{exitFailed, fmt.Errorf("%d of %d jobs did not complete", len(jobs)-s.completed, len(jobs))}
	}
	_, err = fmt.Fprintln(p.out, "\nNext: `millrace up` keeps such a platform running; `millrace up --engine URL` puts your own engine behind it.")
	return err
}

// submitters is how many jobs are submitted at a time.
const submitters = 32

func submitAll(ctx context.Context, c *client.Client, model job.Model, bodies [][]byte) ([]job.ID, error) {
	name, err := json.Marshal(model)
	if err != nil {
		return nil, fmt.Errorf("writing the model's name: %w", err)
	}
	ids := make([]job.ID, len(bodies))
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(submitters)
	for i, body := range bodies {
		g.Go(func() error {
			body, err := job.SetField(body, "model", name)
			if err != nil {
				return fmt.Errorf("naming the model of prompt %d: %w", i+1, err)
			}
			j, err := c.Submit(ctx, client.Submission{Body: body})
			if err != nil {
				return fmt.Errorf("submitting prompt %d: %w", i+1, err)
			}
			ids[i] = j.ID
			return nil
		})
	}
	return ids, g.Wait()
}

// waitAll waits for all jobs, and shows how many have ended: as a bar on a terminal, else as lines.
func waitAll(ctx context.Context, c *client.Client, ids []job.ID, out io.Writer) ([]*client.Job, error) {
	step := newProgress(ctx, out, len(ids))
	jobs := make([]*client.Job, len(ids))
	g, ctx := errgroup.WithContext(ctx)
	for i, id := range ids {
		g.Go(func() error {
			j, err := c.Wait(ctx, id)
			if err != nil {
				return err
			}
			jobs[i] = j
			step.one()
			return nil
		})
	}
	err := g.Wait()
	step.end()
	return jobs, err
}

// progress shows how much of something is done.
type progress struct {
	out   io.Writer
	total int
	bars  *mpb.Progress // nil off a terminal
	bar   *mpb.Bar

	mu         sync.Mutex
	done, told int
}

func newProgress(ctx context.Context, out io.Writer, total int) *progress {
	s := &progress{out: out, total: total}
	if telemetry.Terminal(out) {
		s.bars = mpb.NewWithContext(ctx, mpb.WithOutput(out), mpb.WithWidth(60))
		s.bar = s.bars.AddBar(int64(total),
			mpb.PrependDecorators(decor.CountersNoUnit("  %d of %d jobs ")),
			mpb.AppendDecorators(decor.Elapsed(decor.ET_STYLE_GO), decor.Name("  about "), decor.AverageETA(decor.ET_STYLE_GO), decor.Name(" left")))
	}
	return s
}

func (s *progress) one() {
	if s.bar != nil {
		s.bar.Increment()
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.done++
	if tenths := 10 * s.done / s.total; tenths > s.told {
		s.told = tenths
		fmt.Fprintf(s.out, "  %d of %d jobs\n", s.done, s.total) //nolint:errcheck // shown to people only
	}
}

func (s *progress) end() {
	if s.bars != nil {
		s.bar.Abort(false) // without effect on one that is full
		s.bars.Wait()
	}
}

// summary is what the demo tells at its end.
type summary struct {
	completed, failed int
	waiting, running  []time.Duration
	tokens            job.Tokens
	took              time.Duration
}

func sum(jobs []*client.Job, took time.Duration) summary {
	s := summary{took: took}
	for _, j := range jobs {
		if j.Status != job.Completed {
			s.failed++
			continue
		}
		s.completed++
		if j.Usage != nil {
			s.tokens += j.Usage.CompletionTokens
		}
		created, started, finished := unixTime(j.CreatedAt), unixTime(j.StartedAt), unixTime(j.FinishedAt)
		s.waiting = append(s.waiting, started.Sub(created))
		s.running = append(s.running, finished.Sub(started))
	}
	return s
}

func (s summary) print(w io.Writer) error {
	spread := func(d []time.Duration) string {
		return fmt.Sprintf("p50 %s, p99 %s", short(bench.Quantile(d, 0.50)), short(bench.Quantile(d, 0.99)))
	}
	if _, err := fmt.Fprintln(w); err != nil {
		return err
	}
	return facts(w,
		fact{"  completed", count(s.completed)}, fact{"  failed", count(s.failed)},
		fact{"  waiting", spread(s.waiting)}, fact{"  running", spread(s.running)},
		fact{"  tokens", fmt.Sprintf("%s written, %.0f a second", count(s.tokens), float64(s.tokens)/s.took.Seconds())},
		fact{"  took", short(s.took)},
	)
}

// indented writes text in lines of a width for reading, each behind a margin.
type indented struct {
	w      io.Writer
	column int
	word   strings.Builder
}

const textWidth = 78

func (t *indented) Write(p []byte) (int, error) {
	var b strings.Builder
	for _, r := range string(p) {
		switch {
		case r == '\n':
			t.flush(&b)
			b.WriteByte('\n')
			t.column = 0
		case r == ' ':
			t.flush(&b)
		default:
			t.word.WriteRune(r)
		}
	}
	_, err := io.WriteString(t.w, b.String())
	return len(p), err
}

// flush writes the word that is whole now.
func (t *indented) flush(b *strings.Builder) {
	word := t.word.String()
	if word == "" {
		return
	}
	t.word.Reset()
	n := len([]rune(word))
	switch {
	case t.column > 0 && t.column+1+n > textWidth:
		b.WriteString("\n  ")
		t.column = 0
	case t.column == 0:
		b.WriteString("  ")
	default:
		b.WriteByte(' ')
		t.column++
	}
	b.WriteString(word)
	t.column += n
}
