package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/millrace/millrace/internal/client"
	"github.com/millrace/millrace/internal/job"
)

func newJobs(p *program) *cobra.Command {
	cmd := &cobra.Command{
		Use: "jobs", Short: "List, read, watch, cancel and delete jobs", Long: "See and change the jobs that were submitted.",
		Example: "  millrace jobs list --status running\n  millrace jobs watch job_06f2…",
	}
	group(cmd)
	cmd.AddCommand(newJobsList(p), newJobsGet(p), newJobsWatch(p), newJobsCancel(p), newJobsDelete(p))
	return cmd
}

func newJobsList(p *program) *cobra.Command {
	var (
		conn                   clientFlags
		out                    output
		status, model, session string
		limit                  int
		all                    bool
	)
	cmd := &cobra.Command{
		Use: "list", Short: "List jobs, newest first", Long: "List jobs, newest first: where they stand, how long they waited and ran.",
		Example: "  millrace jobs list\n  millrace jobs list --status failed --limit 100\n  millrace jobs list --all -o json",
		Args:    args(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := conn.open()
			if err != nil {
				return err
			}
			f := client.Filter{Status: job.State(status), Model: job.Model(model), Session: job.Session(session), Limit: limit}
			var jobs []client.Job
			for {
				page, err := c.Jobs(cmd.Context(), f)
				if err != nil {
					return explain(c, err)
				}
				jobs = append(jobs, page.Data...)
				if !all || !page.HasMore {
					return printJobs(p.out, jobs, page.HasMore, out)
				}
				f.After = page.LastID
			}
		},
	}
	f := cmd.Flags()
	f.StringVar(&status, "status", "", "only jobs in this `state`: queued, running, completed, failed, cancelled or expired")
	f.StringVarP(&model, "model", "m", "", "only jobs of this `model`")
	f.StringVar(&session, "session", "", "only jobs of this session `key`")
	f.IntVar(&limit, "limit", 20, "how many")
	f.BoolVar(&all, "all", false, "all of them, --limit at a time")
	conn.add(f)
	out.add(f)
	return cmd
}

func printJobs(w io.Writer, jobs []client.Job, more bool, out output) error {
	if out.json() {
		if jobs == nil {
			jobs = []client.Job{}
		}
		return printJSON(w, jobs)
	}
	if len(jobs) == 0 {
		_, err := fmt.Fprintln(w, "no jobs")
		return err
	}
	now := time.Now()
	rows := [][]string{{"ID", "STATUS", "MODEL", "PRIORITY", "AGE", "WAITED", "RAN", "TOKENS"}}
	for i := range jobs {
		j := &jobs[i]
		waited, ran := times(j, now)
		tokens := ""
		if j.Usage != nil {
			tokens = count(j.Usage.CompletionTokens)
		}
		rows = append(rows, []string{
			string(j.ID), string(j.Status), string(j.Model), string(j.Priority), short(now.Sub(unixTime(j.CreatedAt))), waited, ran, tokens,
		})
	}
	if err := table(w, rows); err != nil {
		return err
	}
	if more {
		_, err := fmt.Fprintln(w, "there are more: --limit or --all shows them")
		return err
	}
	return nil
}

// times tells how long a job has waited and run.
func times(j *client.Job, now time.Time) (waited, ran string) {
	created, started, finished := unixTime(j.CreatedAt), unixTime(j.StartedAt), unixTime(j.FinishedAt)
	if finished.IsZero() {
		finished = now
	}
	if started.IsZero() {
		return short(finished.Sub(created)), ""
	}
	return short(started.Sub(created)), short(finished.Sub(started))
}

func newJobsGet(p *program) *cobra.Command {
	var (
		conn clientFlags
		out  output
		wait bool
	)
	cmd := &cobra.Command{
		Use: "get ID", Short: "Show one job with its answer", Long: "Show one job: where it stands and why, its attempts, and its answer.",
		Example: "  millrace jobs get job_06f2…\n  millrace jobs get job_06f2… --wait -o json",
		Args:    args(1, 1, "ID"),
		RunE: func(cmd *cobra.Command, given []string) error {
			c, err := conn.open()
			if err != nil {
				return err
			}
			var j *client.Job
			if id := job.ID(given[0]); wait {
				j, err = c.Wait(cmd.Context(), id)
			} else {
				j, err = c.Job(cmd.Context(), id, 0)
			}
			if err != nil {
				return explain(c, err)
			}
			if out.json() {
				return printJSON(p.out, j)
			}
			return printJob(p.out, j, time.Now())
		},
	}
	cmd.Flags().BoolVar(&wait, "wait", false, "wait until it has ended")
	conn.add(cmd.Flags())
	out.add(cmd.Flags())
	return cmd
}

func printJob(w io.Writer, j *client.Job, now time.Time) error {
	created := unixTime(j.CreatedAt)
	waited, ran := times(j, now)
	if j.FirstTokenAt > 0 && j.StartedAt > 0 {
		ran += ", first token after " + short(unixTime(j.FirstTokenAt).Sub(unixTime(j.StartedAt)))
	}
	all := []fact{
		{"job", string(j.ID)},
		{"status", string(j.Status)},
		{"model", string(j.Model)},
		{"endpoint", string(j.Endpoint)},
		{"priority", string(j.Priority)},
		{"session", string(j.Session)},
		{"created", created.Format(time.DateTime) + ", " + short(now.Sub(created)) + " ago"},
		{"waited", waited},
		{"ran", ran},
	}
	if q := j.Queue; q != nil && !j.Status.Ended() {
		all = append(all, fact{"queue", place(q)})
	}
	for i, a := range j.Attempts {
		outcome := a.Outcome
		if outcome == "" {
			outcome = "running"
		}
		all = append(all, fact{fmt.Sprintf("attempt %d", i+1), a.Worker + ": " + outcome})
	}
	if u := j.Usage; u != nil {
		all = append(all, fact{"tokens", fmt.Sprintf("%s in, %s out", count(u.PromptTokens), count(u.CompletionTokens))})
	}
	if j.Error != nil {
		all = append(all, fact{"error", fmt.Sprintf("%s (%s)", j.Error.Message, j.Error.CodeOf())})
	}
	if err := facts(w, all...); err != nil {
		return err
	}
	if j.Result != nil {
		text := answerText(j.Result.Body)
		if text == "" {
			text = string(j.Result.Body)
		}
		if _, err := fmt.Fprintf(w, "\n%s\n", strings.TrimRight(text, "\n")); err != nil {
			return err
		}
	}
	return nil
}

// place says where a job stands in the queue, and why.
func place(q *client.Queue) string {
	text := because(q.Reason)
	if q.ETASeconds > 0 {
		text = fmt.Sprintf("about %s: %s", short(time.Duration(q.ETASeconds*float64(time.Second))), text)
	}
	if q.Position > 0 {
		text = fmt.Sprintf("position %s, %s", count(q.Position), text)
	}
	return text
}

func newJobsWatch(p *program) *cobra.Command {
	var conn clientFlags
	cmd := &cobra.Command{
		Use: "watch ID", Short: "Print a job's answer while it is written",
		Long: `Print a job's answer from its beginning while it is written.
Ctrl-C ends the watching and not the job.`,
		Example: "  millrace jobs watch job_06f2…", Args: args(1, 1, "ID"),
		RunE: func(cmd *cobra.Command, given []string) error {
			c, err := conn.open()
			if err != nil {
				return err
			}
			return explain(c, watch(cmd.Context(), p, c, job.ID(given[0])))
		},
	}
	conn.add(cmd.Flags())
	return cmd
}

func watch(ctx context.Context, p *program, c *client.Client, id job.ID) error {
	var written counter
	j, err := follow(ctx, c, id, io.MultiWriter(p.out, &written), p.err)
	if err != nil {
		return err
	}
	return printAnswer(p.out, j, "text", written > 0)
}

// counter counts the bytes written to it.
type counter int64

func (c *counter) Write(b []byte) (int, error) {
	*c += counter(len(b))
	return len(b), nil
}

func newJobsCancel(p *program) *cobra.Command {
	var (
		conn clientFlags
		out  output
	)
	cmd := &cobra.Command{
		Use: "cancel ID…", Short: "End jobs without an answer", Long: "Cancel jobs. One that runs is stopped in its engine.",
		Example: "  millrace jobs cancel job_06f2…", Args: args(1, 1000, "ID"),
		RunE: func(cmd *cobra.Command, given []string) error {
			c, err := conn.open()
			if err != nil {
				return err
			}
			return explain(c, each(p.out, out, given, func(id string) (*client.Job, string, error) {
				j, err := c.Cancel(cmd.Context(), job.ID(id))
				if err != nil {
					return nil, "", err
				}
				return j, string(j.ID) + " " + string(j.Status), nil
			}))
		},
	}
	conn.add(cmd.Flags())
	out.add(cmd.Flags())
	return cmd
}

func newJobsDelete(p *program) *cobra.Command {
	var (
		conn clientFlags
		out  output
	)
	cmd := &cobra.Command{
		Use: "delete ID…", Short: "Erase jobs and their answers",
		Long:    "Erase jobs, their answers and their records. One that has not ended is cancelled first.",
		Example: "  millrace jobs delete job_06f2…", Args: args(1, 1000, "ID"),
		RunE: func(cmd *cobra.Command, given []string) error {
			c, err := conn.open()
			if err != nil {
				return err
			}
			return explain(c, each(p.out, out, given, func(id string) (deleted, string, error) {
				return deleted{id, "job", true}, id + " deleted", c.Delete(cmd.Context(), job.ID(id))
			}))
		},
	}
	conn.add(cmd.Flags())
	out.add(cmd.Flags())
	return cmd
}
