package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/millrace/millrace/internal/client"
	"github.com/millrace/millrace/internal/job"
)

func newStatus(p *program) *cobra.Command {
	var (
		conn operatorFlags
		out  output
	)
	cmd := &cobra.Command{
		Use: "status", Short: "One page: what waits, what runs, and why anything does not move",
		Long: `Show, for each model, how many jobs wait and run and what keeps the next one from
starting; each pool with how many workers it wants, and when the next is ready; and each
worker with how full its engine's KV cache is, how soon it would begin a job (and the
level at which it pulls: the lowest gets work first), and its GPUs.`,
		Example: "  millrace status\n  millrace status -o json\n  watch millrace status", Args: args(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return conn.do(cmd, func(ctx context.Context, c *client.Client) error { return status(ctx, p.out, c, out) })
		},
	}
	conn.add(cmd.Flags())
	out.add(cmd.Flags())
	return cmd
}

// partLimit bounds how long each part of a status may take: what comes is shown, whatever else does not.
const partLimit = 5 * time.Second

// overview is what a status shows; nil is a part that did not come.
type overview struct {
	Queues  []client.ModelQueue `json:"queues"`
	Workers []client.Worker     `json:"workers"`
	Pools   []client.Pool       `json:"pools"`
}

// look asks for all parts at once. The error names those that did not come.
func look(ctx context.Context, c *client.Client, limit time.Duration) (overview, error) {
	var (
		o    overview
		errs [3]error
		all  sync.WaitGroup
	)
	all.Go(func() { o.Queues, errs[0] = part(ctx, limit, "the queues", c.Queues) })
	all.Go(func() { o.Workers, errs[1] = part(ctx, limit, "the workers", c.Workers) })
	all.Go(func() { o.Pools, errs[2] = part(ctx, limit, "the pools", c.Pools) })
	all.Wait()
	for _, err := range errs { // the others will say the same
		var refused *client.Error
		if errors.As(err, &refused) && refused.Status < 500 {
			return o, errors.Unwrap(err)
		}
	}
	if o.Queues == nil && o.Workers == nil && o.Pools == nil {
		return o, cmp.Or(errs[:]...)
	}
	return o, errors.Join(errs[:]...)
}

// part asks for one, which is no nil if it came.
func part[T any](ctx context.Context, limit time.Duration, what string, ask func(context.Context) ([]T, error)) ([]T, error) {
	bound, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	list, err := ask(bound)
	switch {
	case err == nil:
		return append([]T{}, list...), nil
	case bound.Err() != nil && ctx.Err() == nil:
		return nil, fmt.Errorf("%s are not known: there is no answer within %s", what, short(limit))
	}
	return nil, fmt.Errorf("%s are not known: %w", what, err)
}

func status(ctx context.Context, w io.Writer, c *client.Client, out output) error {
	o, err := look(ctx, c, partLimit)
	if o.Queues == nil && o.Workers == nil && o.Pools == nil {
		return err
	}
	if out.json() {
		return errors.Join(printJSON(w, o), err)
	}
	return errors.Join(printStatus(w, time.Now(), &o), err)
}

// unled are the models whose pools nobody leads, and led tells whether an autoscaler leads others.
func (o *overview) unled() (models map[job.Model]bool, led bool) {
	models = make(map[job.Model]bool)
	for i := range o.Pools {
		p := &o.Pools[i]
		if p.State != nil {
			led = true
			continue
		}
		if spec, err := specOf(p); err == nil { // of a newer server, whose models are shown without this
			for _, m := range spec.Models {
				models[m] = true
			}
		}
	}
	return models, led
}

func printStatus(w io.Writer, now time.Time, o *overview) error {
	queues, workers := o.Queues, o.Workers
	unled, led := o.unled()
	if o.Queues != nil && o.Workers != nil && len(queues) == 0 && len(workers) == 0 && len(o.Pools) == 0 {
		_, err := fmt.Fprintln(w, "no model is known and no worker is here: start one with `millrace worker --engine URL`")
		return err
	}
	rows := [][]string{{"MODEL", "WAITING", "TOKENS", "RUNNING", "JOBS/S", "TOKENS/S", "LAST STARTS", "LIMIT", "WORKERS", "WHY JOBS WAIT"}}
	for _, q := range queues {
		why := ""
		if q.Reason != nil {
			why = because(*q.Reason)
			if *q.Reason == "no_worker" && unled[q.Model] && !led {
				why += ", and no autoscaler runs to start one"
			}
		}
		rows = append(rows, []string{
			string(q.Model), waiting(q), count(q.WaitingTokens), runs(q), fmt.Sprintf("%.1f", q.JobsPerSecond), rate(q), last(q), limit(q), states(q.Workers), why,
		})
	}
	if len(rows) > 1 {
		if err := table(w, rows); err != nil {
			return err
		}
	}
	if err := printPoolStates(w, now, queues, o.Pools...); err != nil {
		return err
	}
	if o.Workers == nil {
		return nil
	}
	if len(workers) == 0 {
		_, err := fmt.Fprintln(w, "\nno workers")
		return err
	}
	if _, err := fmt.Fprintln(w); err != nil {
		return err
	}
	if err := printWorkers(w, now, workers); err != nil {
		return err
	}
	return printGPUs(w, workers)
}

// printPoolStates prints a line for each pool that starts workers for a model, and for those of all that nobody leads.
func printPoolStates(w io.Writer, now time.Time, queues []client.ModelQueue, all ...client.Pool) error {
	rows := [][]string{{"POOL", "WANTED", "READY", "STARTING", "DRAINING", "MAX", "NOW"}}
	told := make(map[string]bool)
	for _, q := range queues {
		for _, p := range q.Pools {
			if told[p.Name] { // it serves several models
				continue
			}
			told[p.Name] = true
			rows = append(rows, []string{p.Name, count(p.Wanted), count(p.Ready), count(p.Starting), count(p.Draining), count(p.Max), does(now, p)})
		}
	}
	led := len(told) > 0
	for i := range all {
		led = led || all[i].State != nil
	}
	for i := range all {
		p := &all[i]
		if told[p.Name] {
			continue
		}
		if p.State != nil {
			rows = append(rows, []string{p.Name, count(p.State.Wanted), count(p.State.Ready), count(p.State.Starting), count(p.State.Draining), count(p.State.Max), does(now, *p.State)})
			continue
		}
		spec, err := specOf(p)
		if err != nil {
			return err
		}
		text := noAutoscaler
		if led {
			text = "the autoscaler has not decided about it yet"
		}
		rows = append(rows, []string{p.Name, "?", "?", "?", "?", count(spec.Max), text})
	}
	if len(rows) == 1 {
		return nil
	}
	if _, err := fmt.Fprintln(w); err != nil {
		return err
	}
	return table(w, rows)
}

// noAutoscaler is said of a pool that nobody leads.
const noAutoscaler = "nobody starts or stops its workers: no autoscaler runs: start `millrace autoscaler` (one that has just begun leads within seconds)"

// does tells what a pool does now: why it starts no worker, when one that starts is ready, or what was decided last.
func does(now time.Time, p client.PoolState) string {
	switch {
	case p.Unavailable != "":
		text := "no worker can be started: " + strings.TrimRight(oneLine(p.Unavailable), ".")
		switch ahead := unixTime(p.RetryAt).Sub(now); {
		case p.RetryAt > 0 && ahead > 0:
			return text + "; the next try is " + about(ahead)
		case p.Starting > 0:
			return text + "; the next try is under way"
		case p.RetryAt > 0:
			return text + "; the next try is due, once there is work"
		}
		return text
	case p.ReadyAt > 0:
		ahead := unixTime(p.ReadyAt).Sub(now)
		if ahead <= 0 {
			return "first ready late: it was expected " + short(-ahead) + " ago"
		}
		return "first ready " + about(ahead)
	case p.Starting > 0:
		if p.Reason != "" {
			return "first ready: not known yet: " + oneLine(p.Reason)
		}
		return "first ready: not known yet"
	}
	return oneLine(p.Reason)
}

// about is a rough time from now.
func about(d time.Duration) string {
	if d < time.Minute {
		return fmt.Sprintf("in ~%d s", int(math.Ceil(d.Seconds())))
	}
	return "in ~" + short(d)
}

// printWorkers prints a table that fits 120 columns, and a line for each that a person should look at.
func printWorkers(w io.Writer, now time.Time, workers []client.Worker) error {
	head := []string{"WORKER", "STATE", "SINCE", "KV CACHE", "", "LOAD", "TTFT", "RUNNING", "TOK/S", "DONE", "FAILED", "ENGINE"}
	differ := slices.ContainsFunc(workers, func(wk client.Worker) bool { return !slices.Equal(wk.Models, workers[0].Models) })
	if differ { // else the models stand above
		head = append(head, "MODELS")
	}
	rows := [][]string{head}
	var notes []string
	for _, wk := range workers {
		share := 0.0
		if wk.Capacity > 0 {
			share = float64(wk.Used) / float64(wk.Capacity)
		}
		row := []string{
			wk.Name, wk.State, since(now, wk.StateSince), bar(share, 8), fmt.Sprintf("%.0f%% of %s", 100*share, rough(wk.Capacity)), fmt.Sprintf("%.0f%%", 100*wk.Load),
			expected(wk), runningJobs(wk), fmt.Sprintf("%.0f", wk.TokensPerSecond), count(wk.Completed), count(wk.Failed), strings.TrimSpace(wk.Engine + " " + shape(wk.Shape)),
		}
		if differ {
			row = append(row, models(wk))
		}
		rows = append(rows, row)
		if n := note(wk); n != "" {
			notes = append(notes, wk.Name+": "+n)
		}
	}
	if err := table(w, rows); err != nil {
		return err
	}
	if len(notes) == 0 {
		return nil
	}
	_, err := fmt.Fprintln(w, "\n"+strings.Join(notes, "\n"))
	return err
}

// rough prints a number of tokens short.
func rough(n job.Tokens) string {
	switch {
	case n < 100_000:
		return count(n)
	case n < 1_000_000:
		return fmt.Sprintf("%dk", n/1000)
	default:
		return fmt.Sprintf("%.1fM", float64(n)/1e6)
	}
}

// since is for how long a state lasts.
func since(now time.Time, began float64) string {
	if began == 0 { // an older worker, which does not tell
		return ""
	}
	d := max(0, now.Sub(unixTime(began))).Round(time.Second)
	if d < time.Minute {
		return fmt.Sprintf("%ds", int(d.Seconds()))
	}
	return short(d)
}

// expected is the expected time to a first token, and the level at which the worker pulls.
func expected(wk client.Worker) string {
	if wk.TTFT == 0 {
		return fmt.Sprintf("- (%d)", wk.Level)
	}
	return fmt.Sprintf("%s (%d)", short(time.Duration(wk.TTFT*float64(time.Second))), wk.Level)
}

// runningJobs tells how many jobs run, of how many that may, and how many are in hand.
func runningJobs(wk client.Worker) string {
	s := count(wk.Running)
	if wk.Limit > 0 {
		s += "/" + count(wk.Limit)
	}
	if wk.InHand > 0 {
		s += " +" + count(wk.InHand)
	}
	return s
}

// shape names what an engine has more than one of.
func shape(s client.Shape) string {
	var parts []string
	for _, p := range []struct {
		name string
		n    int
	}{{"tp", s.TensorParallel}, {"pp", s.PipelineParallel}, {"dp", s.DataParallel}} {
		if p.n > 1 {
			parts = append(parts, p.name+fmt.Sprint(p.n))
		}
	}
	return strings.Join(parts, " ")
}

// note is what a person should know of a worker, "" if all is well.
func note(wk client.Worker) string {
	var parts []string
	if wk.Reason != "" {
		parts = append(parts, oneLine(wk.Reason))
	}
	if wk.Brake != "" {
		parts = append(parts, "pulls nothing: "+oneLine(wk.Brake))
	}
	if wk.BatchLimit > 0 && wk.Sequences >= wk.BatchLimit {
		parts = append(parts, fmt.Sprintf("its places for batch work are taken: %d sequences run, and %d may for one of it to start", wk.Sequences, wk.BatchLimit))
	}
	if wk.EngineWaiting > 0 {
		parts = append(parts, plural(wk.EngineWaiting, "request")+" waiting inside the engine")
	}
	if wk.FallBacks > 0 {
		parts = append(parts, fmt.Sprintf("fell back %s, the last probe took %s", plural(int(wk.FallBacks), "time"), short(time.Duration(wk.ProbeSeconds*float64(time.Second)))))
	}
	if wk.Source == "estimated" {
		parts = append(parts, "its engine does not tell its cache: the size is the configured one")
	}
	return strings.Join(parts, "; ")
}

func printGPUs(w io.Writer, workers []client.Worker) error {
	rows := [][]string{{"WORKER", "GPU", "MODEL", "MEMORY", "BUSY", "TEMP", "FAULT"}}
	for _, wk := range workers {
		for _, g := range wk.GPUs {
			fault := g.Fault
			if g.Stale {
				fault = strings.TrimPrefix(fault+"; the driver does not answer", "; ")
			}
			rows = append(rows, []string{
				wk.Name, fmt.Sprint(g.Index), g.Model, fmt.Sprintf("%.1f of %.1f GiB", gib(g.MemoryUsed), gib(g.MemoryTotal)), fmt.Sprintf("%.0f%%", 100*g.Utilization),
				fmt.Sprintf("%d °C", g.Temperature), fault,
			})
		}
	}
	if len(rows) == 1 {
		return nil
	}
	if _, err := fmt.Fprintln(w); err != nil {
		return err
	}
	return table(w, rows)
}

func gib(bytes uint64) float64 { return float64(bytes) / (1 << 30) }

// waiting tells how much waits, how many jobs of it in their tenants' lines, and how many lines of batches are not queued yet.
func waiting(q client.ModelQueue) string {
	open, lines, batches := 0, 0, 0
	for _, n := range q.Waiting {
		open += n
	}
	for _, n := range q.WaitingLines {
		lines += n
	}
	for _, n := range q.BatchLines {
		batches += n
	}
	var parts []string
	if lines > 0 {
		parts = append(parts, count(lines)+" in line")
	}
	if batches > 0 {
		parts = append(parts, count(batches)+" in batches")
	}
	all := count(open + lines + batches)
	if len(parts) > 0 {
		return all + " (" + strings.Join(parts, ", ") + ")"
	}
	return all
}

// runs tells how many jobs run, and what they hold of the caches.
func runs(q client.ModelQueue) string {
	if q.Running == 0 {
		return "0"
	}
	return fmt.Sprintf("%s (%s tokens)", count(q.Running), count(q.RunningTokens))
}

// rate is how fast full workers work, as far as that was measured.
func rate(q client.ModelQueue) string {
	if q.TokensPerSecond == nil {
		return "?"
	}
	return fmt.Sprintf("%.0f", *q.TokensPerSecond)
}

// last tells when the last of what waits now starts.
func last(q client.ModelQueue) string {
	switch {
	case q.Reason == nil: // nothing waits
		return ""
	case q.ETASeconds == nil:
		return "?"
	}
	return "in " + short(time.Duration(*q.ETASeconds*float64(time.Second)))
}

// limit tells how much of the fullest limit is in use.
func limit(q client.ModelQueue) string {
	if q.LimitFill == nil || q.LimitName == nil {
		return "none"
	}
	return fmt.Sprintf("%.0f%% of %s", 100**q.LimitFill, *q.LimitName)
}

// states tells how many workers are in each state.
func states(workers map[string]int) string {
	var some []string
	for _, state := range slices.Sorted(maps.Keys(workers)) {
		if n := workers[state]; n > 0 {
			some = append(some, fmt.Sprintf("%d %s", n, state))
		}
	}
	if len(some) == 0 {
		return "none"
	}
	return strings.Join(some, ", ")
}

func models(w client.Worker) string {
	names := make([]string, len(w.Models))
	for i, m := range w.Models {
		names[i] = string(m)
	}
	return strings.Join(names, ", ")
}

// reasons explain the codes of what keeps a job from starting.
var reasons = map[string]string{
	"dispatching":       "a worker has room",
	"saturated":         "every worker is full",
	"limit":             "every worker holds back, though its cache has room",
	"starting":          "a worker is starting",
	"model_unavailable": "no worker can be started",
	"stalled":           "the workers' engines make no progress",
	"unready":           "the workers' engines do not answer",
	"draining":          "the workers are stopping",
	"no_worker":         "no worker serves this model",
	"queue_unavailable": "the queue does not answer",
	"retry_delay":       "it waits before another try",
	"quota":             "the tenant's limit on running work is reached",
}

// because is a code of what keeps a job from starting, in words.
func because(code string) string {
	if text, ok := reasons[code]; ok {
		return text
	}
	return code
}
