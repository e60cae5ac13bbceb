package main

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/millrace/millrace/internal/client"
)

func newStatus(p *program) *cobra.Command {
	var (
		conn clientFlags
		out  output
	)
	cmd := &cobra.Command{
		Use: "status", Short: "One page: what waits, what runs, and why anything does not move",
		Long: `Show, for each model, how many jobs wait and run and what keeps the next one from
starting; and each worker with how full its engine's KV cache is.`,
		Example: "  millrace status\n  millrace status -o json\n  watch millrace status", Args: args(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := conn.open()
			if err != nil {
				return err
			}
			return explain(c, status(cmd.Context(), p.out, c, out))
		},
	}
	conn.add(cmd.Flags())
	variables(cmd.Flags(), "api-key", "MILLRACE_ADMIN_KEY", "MILLRACE_API_KEY", "OPENAI_API_KEY")
	out.add(cmd.Flags())
	return cmd
}

func status(ctx context.Context, w io.Writer, c *client.Client, out output) error {
	queues, err := c.Queues(ctx)
	if err != nil {
		return err
	}
	workers, err := c.Workers(ctx)
	if err != nil {
		return err
	}
	if out.json() {
		return printJSON(w, struct {
			Queues  []client.ModelQueue `json:"queues"`
			Workers []client.Worker     `json:"workers"`
		}{queues, workers})
	}
	return printStatus(w, queues, workers)
}

func printStatus(w io.Writer, queues []client.ModelQueue, workers []client.Worker) error {
	if len(queues) == 0 && len(workers) == 0 {
		_, err := fmt.Fprintln(w, "no model is known and no worker is here: start one with `millrace worker --engine URL`")
		return err
	}
	rows := [][]string{{"MODEL", "WAITING", "RUNNING", "JOBS/S", "WORKERS", "WHY JOBS WAIT"}}
	for _, q := range queues {
		why := ""
		if q.Reason != nil {
			why = because(*q.Reason)
		}
		rows = append(rows, []string{string(q.Model), waiting(q), count(q.Running), fmt.Sprintf("%.1f", q.JobsPerSecond), states(q.Workers), why})
	}
	if err := table(w, rows); err != nil {
		return err
	}
	if len(workers) == 0 {
		_, err := fmt.Fprintln(w, "\nno workers")
		return err
	}
	rows = [][]string{{"WORKER", "STATE", "KV CACHE", "", "RUNNING", "TOKENS/S", "DONE", "FAILED", "ENGINE"}}
	for _, wk := range workers {
		share := 0.0
		if wk.Capacity > 0 {
			share = 1 - float64(wk.Free)/float64(wk.Capacity)
		}
		used := fmt.Sprintf("%.0f%% of %s", 100*share, count(wk.Capacity))
		if wk.Source == "estimated" {
			used += " (estimated)"
		}
		state := wk.State
		if wk.Reason != "" {
			state += ": " + oneLine(wk.Reason)
		}
		rows = append(rows, []string{
			wk.Name, state, bar(share, 12), used, count(wk.Running), fmt.Sprintf("%.0f", wk.TokensPerSecond), count(wk.Completed), count(wk.Failed),
			wk.Engine + " " + models(wk),
		})
	}
	if _, err := fmt.Fprintln(w); err != nil {
		return err
	}
	return table(w, rows)
}

// waiting tells how many jobs wait, and how many of them in their tenants' lines.
func waiting(q client.ModelQueue) string {
	open, lines := 0, 0
	for _, n := range q.Waiting {
		open += n
	}
	for _, n := range q.WaitingLines {
		lines += n
	}
	if lines > 0 {
		return fmt.Sprintf("%s (%s in line)", count(open+lines), count(lines))
	}
	return count(open)
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
	"dispatching":       "it starts at once",
	"saturated":         "every worker is full",
	"starting":          "the workers' engines are starting",
	"stalled":           "the workers' engines make no progress",
	"unready":           "the workers' engines do not answer",
	"draining":          "the workers are stopping",
	"no_worker":         "no worker serves this model",
	"queue_unavailable": "the queue does not answer",
	"retry_delay":       "it waits before another try",
}

// because is a code of what keeps a job from starting, in words.
func because(code string) string {
	if text, ok := reasons[code]; ok {
		return text
	}
	return code
}
