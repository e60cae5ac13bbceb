package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/millrace/millrace/internal/admission"
	"github.com/millrace/millrace/internal/batch"
	"github.com/millrace/millrace/internal/client"
	"github.com/millrace/millrace/internal/config"
	"github.com/millrace/millrace/internal/job"
)

// checkFlags are those of `millrace batch validate`.
type checkFlags struct {
	conn            clientFlags
	adminKey        string
	endpoint        string
	offline         bool
	maxLines        int64
	maxLine         size
	tokensPerSecond float64
}

func newBatchValidate(p *program) *cobra.Command {
	var (
		f   checkFlags
		out output
	)
	cmd := &cobra.Command{
		Use: "validate FILE", Short: "Check a file of requests and run nothing",
		Long: `Check a file of requests here, by the rules of the server: print every line that is
wrong, how many tokens the lines are expected to need, and, with what the server tells
of its workers, lines that fit none, and how long it will take on how many GPUs.

Nothing is sent. Without a server it checks what can be known without.
The exit code is 0 if the file is good, 3 if it has faults or no line, 2 for a wrong
command line, and 1 if it could not be checked.`,
		Example: "  millrace batch validate requests.jsonl\n  millrace batch validate requests.jsonl --offline --tokens-per-second 12000\n  millrace batch validate requests.jsonl -o json",
		Args:    args(1, 1, "FILE"),
		RunE: func(cmd *cobra.Command, given []string) error {
			if err := errors.Join((&createFlags{endpoint: f.endpoint, window: "24h"}).check(), config.AtLeast("max-batch-lines", f.maxLines, 1),
				config.AtLeast("max-body", int64(f.maxLine), 1), config.AtLeast("tokens-per-second", f.tokensPerSecond, 0)); err != nil {
				return usageError(cmd, err)
			}
			r, err := f.check(cmd, p, given[0])
			if err != nil {
				return err
			}
			if out.json() {
				err = printJSON(p.out, r)
			} else {
				err = r.print(p.out)
			}
			if err == nil && r.Bad > 0 {
				err = &exitError{exitJob, fmt.Errorf("%s has %s: nothing of it would run", r.File, plural(len(r.Errors), "error"))}
			} else if err == nil && len(r.TooLong) > 0 {
				err = &exitError{exitJob, fmt.Errorf("%s of %s fit no worker, and would fail", plural(len(r.TooLong), "line"), r.File)}
			}
			return err
		},
	}
	fs := cmd.Flags()
	fs.BoolVar(&f.offline, "offline", false, "ask no server")
	fs.StringVar(&f.endpoint, "endpoint", "", "`path` that every line's url names (default that of the first line)")
	fs.Float64Var(&f.tokensPerSecond, "tokens-per-second", 0, "how many `tokens` of prompts and answers all workers of a model get done a second (default what the server has measured)")
	fs.Int64Var(&f.maxLines, "max-batch-lines", 50_000, "most `lines` that the server takes")
	f.maxLine = 32 << 20
	fs.Var(&f.maxLine, "max-body", "most `bytes` of a line that the server takes")
	f.conn.add(fs)
	fs.StringVar(&f.adminKey, "admin-key", "", "`key` for what the server tells of its workers, where --api-key does not open that")
	out.add(fs)
	return cmd
}

// checkup is what was found in a file. Its JSON is read by machines: fields are only added.
type checkup struct {
	File     string       `json:"file"`
	Endpoint job.Endpoint `json:"endpoint"`
	Bytes    int64        `json:"bytes"`
	// Lines that are requests, Bad those that are wrong; Tokens that the good ones are expected to need.
	Lines  int64           `json:"lines"`
	Bad    int64           `json:"bad_lines"`
	Tokens job.Tokens      `json:"tokens"`
	Errors []job.LineError `json:"errors"`
	// TooLong are lines whose prompts fit no worker.
	TooLong []tooLong   `json:"too_long"`
	Models  []modelPart `json:"models"`
	// TokenBins and ByteBins count the good lines by the tokens that they are expected to need, and by their length.
	TokenBins []bin `json:"token_histogram"`
	ByteBins  []bin `json:"byte_histogram"`
	// Seconds until all have ended, with what waits already, and GPUSeconds that they take; null is unknown.
	Seconds    *float64 `json:"seconds"`
	GPUSeconds *float64 `json:"gpu_seconds"`
	// Unknown says what could not be known, and why.
	Unknown []string `json:"unknown"`
}

// tooLong is a line that has at least Tokens tokens, where the model's largest worker holds Largest.
type tooLong struct {
	Line     int64      `json:"line"`
	CustomID string     `json:"custom_id"`
	Model    job.Model  `json:"model"`
	Tokens   job.Tokens `json:"tokens"`
	Largest  job.Tokens `json:"largest"`
}

// modelPart is the lines of one model.
type modelPart struct {
	Model  job.Model  `json:"model"`
	Lines  int64      `json:"lines"`
	Tokens job.Tokens `json:"tokens"`
	// Workers that serve it and their GPUs, 0 if there are none or it is not known; TokensPerSecond of all of them.
	Workers         int      `json:"workers"`
	GPUs            int      `json:"gpus"`
	TokensPerSecond *float64 `json:"tokens_per_second"`
	// Seconds that its lines take, WaitSeconds until what waits before them is done, GPUSeconds.
	Seconds     *float64 `json:"seconds"`
	WaitSeconds *float64 `json:"wait_seconds"`
	GPUSeconds  *float64 `json:"gpu_seconds"`
}

// bin counts what is at most UpTo and more than the bin before.
type bin struct {
	UpTo  int64 `json:"up_to"`
	Lines int64 `json:"lines"`
}

// bins counts by powers of two and what lies halfway between them.
type bins [125]int64

// bound is the most that is in bin i: 1, 2, 3, 4, 6, 8, 12, …
func bound(i int) int64 {
	switch {
	case i == 0:
		return 1
	case i%2 == 0:
		return 3 << (i/2 - 1)
	default:
		return 2 << (i / 2)
	}
}

func (b *bins) add(n int64) {
	i, _ := slices.BinarySearch(bounds[:], n)
	b[min(i, len(b)-1)]++
}

// bounds are those of all bins.
var bounds = func() (all [len(bins{})]int64) {
	for i := range all {
		all[i] = bound(i)
	}
	return all
}()

// list is what lies between the first bin and the last that hold anything.
func (b *bins) list() []bin {
	all := []bin{}
	for i, n := range b {
		if n > 0 || len(all) > 0 {
			all = append(all, bin{bounds[i], n})
		}
	}
	for len(all) > 0 && all[len(all)-1].Lines == 0 {
		all = all[:len(all)-1]
	}
	return all
}

// server is what is known of a server, as far as it says.
type server struct {
	models  []job.Model // nil if it is not known
	workers []client.Worker
	queues  []client.ModelQueue
	unknown []string
}

// ask asks the server. What it does not say is no error.
func (f *checkFlags) ask(ctx context.Context) (*server, error) {
	s := &server{}
	if f.offline {
		s.unknown = []string{"models and times: no server was asked"}
		return s, nil
	}
	c, err := f.conn.open()
	if err != nil {
		return nil, err
	}
	defer c.CloseIdleConnections()
	if s.models, err = c.Models(ctx); err != nil {
		if ctx.Err() != nil {
			return nil, err
		}
		s.unknown = []string{"models and times: " + oneLine(explain(c, err).Error()) + "; --offline asks none"}
		return s, nil
	}
	if s.models == nil {
		s.models = []job.Model{}
	}
	if f.adminKey != "" {
		f.conn.key = f.adminKey
	}
	admin, err := f.conn.open()
	if err != nil {
		return nil, err
	}
	defer admin.CloseIdleConnections()
	if s.workers, err = admin.Workers(ctx); err == nil {
		s.queues, err = admin.Queues(ctx)
	}
	if err != nil {
		if ctx.Err() != nil {
			return nil, err
		}
		s.unknown = append(s.unknown, "what fits a worker, and times: "+oneLine(err.Error())+"; --admin-key or MILLRACE_ADMIN_KEY opens it")
	}
	return s, nil
}

// usable says why a model cannot be used, nil if it can.
func (s *server) usable(m job.Model) *job.Error {
	if s.models == nil || slices.Contains(s.models, m) {
		return nil
	}
	names := make([]string, 0, 5)
	for _, name := range s.models {
		if len(names) == 4 {
			names = append(names, "…")
			break
		}
		names = append(names, string(name))
	}
	there := "it serves none now"
	if len(names) > 0 {
		there = "it serves " + strings.Join(names, ", ")
	}
	return job.NewError(job.TypeInvalidRequest, job.CodeModelNotFound, fmt.Sprintf("The server has no model %q for this key: %s.", m, there))
}

// largest is the longest request that fits a worker of the model, 0 if that is not known.
func (s *server) largest(m job.Model) job.Tokens {
	var most job.Tokens
	for _, w := range s.workers {
		if slices.Contains(w.Models, m) {
			most = max(most, w.Largest)
		}
	}
	return most
}

func (f *checkFlags) check(cmd *cobra.Command, p *program, name string) (*checkup, error) {
	ctx := cmd.Context()
	in, err := openInput(ctx, p, name)
	if err != nil {
		return nil, err
	}
	defer in.close()
	endpoint, err := in.endpointOr(f.endpoint)
	if err != nil {
		if f.endpoint != "" {
			return nil, err
		}
		endpoint = job.ChatCompletions // every line that is not for it is then shown
	}
	known, err := f.ask(ctx)
	if err != nil {
		return nil, err
	}
	r := &checkup{File: in.name, Endpoint: endpoint, Unknown: known.unknown, TooLong: []tooLong{}}
	parts := make(map[job.Model]*modelPart)
	var tokens, lengths bins
	shown := newTeller(ctx, p.err).stage(in.size)
	// The number of lines is looked at below: beyond it Scan would not look at lines any more.
	sum, err := batch.Scan(ctx, in, batch.Rules{Endpoint: endpoint, MaxLine: int64(f.maxLine), Model: known.usable}, func(l *batch.Line) error {
		part := parts[l.Model]
		if part == nil {
			part = &modelPart{Model: l.Model}
			parts[l.Model] = part
		}
		part.Lines++
		part.Tokens += l.Tokens
		tokens.add(int64(l.Tokens))
		lengths.add(l.Length)
		if largest := known.largest(l.Model); largest > 0 && job.LeastPrompt(l.Length) > largest { // else it surely fits
			if o, err := job.ParseObject(l.Body); err == nil {
				if least := admission.LeastPrompt(endpoint, o); least > largest {
					r.TooLong = append(r.TooLong, tooLong{l.Number, l.CustomID, l.Model, least, largest})
				}
			}
		}
		if part.Lines%256 == 0 {
			shown.at(time.Now(), l.Offset, "checking", bytesOf(l.Offset, in.size))
		}
		return nil
	})
	shown.end()
	if err != nil {
		return nil, fmt.Errorf("checking %s: %w", in.name, err)
	}
	r.Bytes, r.Lines, r.Tokens, r.Errors = sum.Bytes, sum.Lines, sum.Tokens, sum.Errors
	if r.Errors == nil {
		r.Errors = []job.LineError{}
	}
	r.Bad = int64(len(r.Errors))
	if r.Lines > f.maxLines {
		r.Errors = slices.Insert(r.Errors, 0, job.LineError{
			Code: job.CodeTooManyTasks, Message: fmt.Sprintf("The file has %d requests, and a batch may have %d: put them into several batches, or give the server's own limit as --max-batch-lines.", r.Lines, f.maxLines),
		})
		r.Bad++
	}
	r.TokenBins, r.ByteBins = tokens.list(), lengths.list()
	for _, part := range parts {
		f.estimate(part, known)
		r.Models = append(r.Models, *part)
	}
	slices.SortFunc(r.Models, func(a, b modelPart) int {
		return cmp.Or(cmp.Compare(b.Tokens, a.Tokens), strings.Compare(string(a.Model), string(b.Model)))
	})
	r.total()
	return r, nil
}

// estimate fills in how long a model's lines take.
func (f *checkFlags) estimate(part *modelPart, known *server) {
	for _, w := range known.workers {
		if slices.Contains(w.Models, part.Model) && w.State != "draining" {
			part.Workers++
			part.GPUs += max(1, w.Shape.TensorParallel) * max(1, w.Shape.PipelineParallel) * max(1, w.Shape.DataParallel)
		}
	}
	wait := job.Tokens(0)
	for _, q := range known.queues {
		if q.Model == part.Model {
			part.TokensPerSecond, wait = q.TokensPerSecond, max(q.Backlog.Tokens, q.WaitingTokens)
		}
	}
	if f.tokensPerSecond > 0 {
		part.TokensPerSecond = &f.tokensPerSecond
	}
	if part.TokensPerSecond == nil || *part.TokensPerSecond <= 0 {
		part.TokensPerSecond = nil
		return
	}
	seconds, before := float64(part.Tokens) / *part.TokensPerSecond, float64(wait) / *part.TokensPerSecond
	gpus := seconds * float64(max(1, part.GPUs))
	part.Seconds, part.WaitSeconds, part.GPUSeconds = &seconds, &before, &gpus
}

// total sums up the models: they run beside each other, so that the longest counts.
func (r *checkup) total() {
	if len(r.Models) == 0 {
		return
	}
	seconds, gpus, all := 0.0, 0.0, true
	for i := range r.Models {
		m := &r.Models[i]
		if m.Seconds == nil {
			all = false
			continue
		}
		seconds, gpus = max(seconds, *m.Seconds+*m.WaitSeconds), gpus+*m.GPUSeconds
	}
	if all {
		r.Seconds, r.GPUSeconds = &seconds, &gpus
	} else if len(r.Unknown) == 0 {
		r.Unknown = append(r.Unknown, "times: the server knows its rate once its workers have been full; until then --tokens-per-second says it")
	}
}

func (r *checkup) print(w io.Writer) error {
	if len(r.Errors) > 0 {
		if err := errorTable(w, r.Errors); err != nil {
			return err
		}
		if _, err := fmt.Fprintln(w); err != nil {
			return err
		}
	}
	if len(r.TooLong) > 0 {
		rows := [][]string{{"LINE", "CUSTOM_ID", "MODEL", "TOKENS", "LARGEST WORKER HOLDS"}}
		for _, l := range r.TooLong {
			rows = append(rows, []string{fmt.Sprint(l.Line), l.CustomID, string(l.Model), "at least " + count(l.Tokens), count(l.Largest)})
		}
		if err := table(w, rows); err != nil {
			return err
		}
		if _, err := fmt.Fprintln(w); err != nil {
			return err
		}
	}
	verdict := "every line is good"
	if r.Bad > 0 {
		verdict = plural(len(r.Errors), "error")
	}
	all := []fact{
		{"file", r.File + ", " + weight(r.Bytes)},
		{"endpoint", string(r.Endpoint)},
		{"lines", count(r.Lines) + ", " + verdict},
		{"tokens", "about " + count(r.Tokens) + " expected, of prompts and answers"},
	}
	if r.Seconds != nil {
		all = append(all, fact{"time", "about " + roughTime(*r.Seconds) + r.waiting()}, fact{"GPUs", fmt.Sprintf("about %s GPU-seconds", count(int64(math.Ceil(*r.GPUSeconds))))})
	}
	for _, u := range r.Unknown {
		all = append(all, fact{"unknown", u})
	}
	if err := facts(w, all...); err != nil {
		return err
	}
	if err := r.printModels(w); err != nil {
		return err
	}
	for _, h := range []struct {
		head string
		bins []bin
	}{{"TOKENS A LINE", r.TokenBins}, {"BYTES A LINE", r.ByteBins}} {
		if err := printBins(w, h.head, h.bins); err != nil {
			return err
		}
	}
	return nil
}

// weight prints a length in bytes.
func weight(bytes int64) string {
	switch {
	case bytes < 1000:
		return plural(int(bytes), "byte")
	case bytes < 1_000_000:
		return fmt.Sprintf("%.1f kB", float64(bytes)/1e3)
	default:
		return fmt.Sprintf("%.1f MB", float64(bytes)/1e6)
	}
}

// waiting says how much of the time is that of others.
func (r *checkup) waiting() string {
	most := 0.0
	for _, m := range r.Models {
		most = max(most, *m.WaitSeconds)
	}
	if most < 1 {
		return ""
	}
	return ", of which " + roughTime(most) + " for what waits already"
}

func roughTime(seconds float64) string {
	return short(time.Duration(seconds * float64(time.Second)))
}

func (r *checkup) printModels(w io.Writer) error {
	if len(r.Models) == 0 {
		return nil
	}
	rows := [][]string{{"MODEL", "LINES", "TOKENS", "WORKERS", "GPUS", "TOKENS/S", "TIME", "GPU-SECONDS"}}
	for _, m := range r.Models {
		row := []string{string(m.Model), count(m.Lines), count(m.Tokens), "?", "?", "?", "?", "?"}
		if m.Workers > 0 {
			row[3], row[4] = count(m.Workers), count(m.GPUs)
		}
		if m.Seconds != nil {
			row[5], row[6], row[7] = count(int64(*m.TokensPerSecond)), roughTime(*m.Seconds), count(int64(math.Ceil(*m.GPUSeconds)))
		}
		rows = append(rows, row)
	}
	if _, err := fmt.Fprintln(w); err != nil {
		return err
	}
	return table(w, rows)
}

func printBins(w io.Writer, head string, all []bin) error {
	if len(all) == 0 {
		return nil
	}
	most := int64(1)
	for _, b := range all {
		most = max(most, b.Lines)
	}
	rows := [][]string{{head, "LINES"}}
	for _, b := range all {
		rows = append(rows, []string{"up to " + count(b.UpTo), count(b.Lines), strings.TrimRight(bar(float64(b.Lines)/float64(most), 30), "░")})
	}
	if _, err := fmt.Fprintln(w); err != nil {
		return err
	}
	return table(w, rows)
}
