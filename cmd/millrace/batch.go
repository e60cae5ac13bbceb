package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/millrace/millrace/internal/batch"
	"github.com/millrace/millrace/internal/client"
	"github.com/millrace/millrace/internal/config"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
)

func newBatch(p *program) *cobra.Command {
	cmd := &cobra.Command{
		Use: "batch", Short: "Run files of requests, one a line",
		Long: `Run batches: files with one request a line, as the OpenAI batch API has them:

  {"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{"model":…}}

A batch goes on without this program. Every line ends exactly once, in the results or
in the errors, under its custom_id.`,
		Example: "  millrace batch run requests.jsonl\n  millrace batch validate requests.jsonl\n  millrace batch list",
	}
	group(cmd)
	cmd.AddCommand(
		newBatchRun(p), newBatchValidate(p), newBatchCreate(p), newBatchList(p), newBatchGet(p), newBatchResults(p), newBatchCancel(p), newBatchRetry(p),
	)
	return cmd
}

// createFlags say what a batch is to be.
type createFlags struct {
	endpoint, window string
	metadata         map[string]string
}

func (c *createFlags) add(fs *pflag.FlagSet) {
	fs.StringVar(&c.window, "window", "24h", "`time` within which it is to be done, in whole minutes or hours: what has not ended then is expired")
	fs.StringVar(&c.endpoint, "endpoint", "", "`path` that every line's url names (default that of the first line)")
	fs.StringToStringVar(&c.metadata, "metadata", nil, "up to 16 `name=value` pairs that the batch carries")
}

func (c *createFlags) check() error {
	if c.endpoint != "" {
		if _, err := job.ParseEndpoint(c.endpoint); err != nil {
			return fmt.Errorf("endpoint: %w", err)
		}
	}
	if _, ok := batch.ParseWindow(c.window); !ok { // the server would refuse it too, but after the upload
		return fmt.Errorf("window is %q: it must be a whole number of minutes or hours up to 7 days, as 24h, 90m or 168h", c.window)
	}
	return nil
}

func newBatchCreate(p *program) *cobra.Command {
	var (
		conn clientFlags
		out  output
		what createFlags
	)
	cmd := &cobra.Command{
		Use: "create FILE", Short: "Start a batch and do not wait",
		Long: `Start a batch and print its id. FILE is a file here, "-" for the standard input,
or the id of one that is stored at the server.`,
		Example: "  millrace batch create requests.jsonl\n  millrace batch create file-06f2… --endpoint /v1/embeddings --window 48h",
		Args:    args(1, 1, "FILE"),
		RunE: func(cmd *cobra.Command, given []string) error {
			if err := what.check(); err != nil {
				return usageError(cmd, err)
			}
			c, err := conn.open()
			if err != nil {
				return err
			}
			b, err := createBatch(cmd, p, c, given[0], what)
			if err != nil {
				return explain(c, err)
			}
			if out.json() {
				return printJSON(p.out, b)
			}
			_, err = fmt.Fprintln(p.out, b.ID)
			return err
		},
	}
	what.add(cmd.Flags())
	conn.add(cmd.Flags())
	out.add(cmd.Flags())
	return cmd
}

func createBatch(cmd *cobra.Command, p *program, c *client.Client, name string, what createFlags) (*client.Batch, error) {
	ctx := cmd.Context()
	if _, err := os.Stat(name); err != nil && strings.HasPrefix(name, ledger.FilePrefix) {
		if what.endpoint == "" {
			what.endpoint = string(job.ChatCompletions)
		}
		return c.CreateBatch(ctx, client.NewBatch{InputFileID: name, Endpoint: job.Endpoint(what.endpoint), CompletionWindow: what.window, Metadata: what.metadata})
	}
	in, err := openRequests(ctx, p, name)
	if err != nil {
		return nil, err
	}
	defer in.close()
	endpoint, err := in.endpointOr(what.endpoint)
	if err != nil {
		return nil, err
	}
	f, err := in.upload(ctx, c, newTeller(ctx, p.err))
	if err != nil {
		return nil, err
	}
	return c.CreateBatch(ctx, client.NewBatch{InputFileID: f.ID, Endpoint: endpoint, CompletionWindow: what.window, Metadata: what.metadata})
}

func newBatchList(p *program) *cobra.Command {
	var (
		conn  clientFlags
		out   output
		limit int
		all   bool
	)
	cmd := &cobra.Command{
		Use: "list", Short: "List batches, newest first", Long: "List batches, newest first: where they stand, and how many of their lines have ended.",
		Example: "  millrace batch list\n  millrace batch list --all -o json", Args: args(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := config.Between("limit", limit, 1, 100); err != nil {
				return usageError(cmd, err)
			}
			c, err := conn.open()
			if err != nil {
				return err
			}
			batches, after := []client.Batch{}, ""
			for {
				page, err := c.Batches(cmd.Context(), after, limit)
				if err != nil {
					return explain(c, err)
				}
				batches = append(batches, page.Data...)
				if !all || !page.HasMore {
					return printBatches(p.out, batches, page.HasMore, out)
				}
				after = page.LastID
			}
		},
	}
	cmd.Flags().IntVar(&limit, "limit", 20, "how many")
	cmd.Flags().BoolVar(&all, "all", false, "all of them, --limit at a time")
	conn.add(cmd.Flags())
	out.add(cmd.Flags())
	return cmd
}

func printBatches(w io.Writer, batches []client.Batch, more bool, out output) error {
	if out.json() {
		return printJSON(w, batches)
	}
	if len(batches) == 0 {
		_, err := fmt.Fprintln(w, "no batches")
		return err
	}
	now := time.Now()
	rows := [][]string{{"ID", "STATUS", "", "LINES", "DONE", "FAILED", "AGE", "TOOK", "MODEL"}}
	for i := range batches {
		b := &batches[i]
		n, took := b.RequestCounts, ""
		if b.Ended() {
			took = tookOf(b)
		}
		rows = append(rows, []string{
			b.ID, b.Status, bar(share(n), 8), count(n.Total), count(n.Completed), count(n.Failed), short(now.Sub(time.Unix(b.CreatedAt, 0))), took, batchModel(b),
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

// share of a batch's lines that have ended.
func share(n client.RequestCounts) float64 {
	return float64(n.Completed+n.Failed) / float64(max(n.Total, 1))
}

// tookOf is how long an ended batch took, which the API tells in whole seconds.
func tookOf(b *client.Batch) string {
	if b.EndedAt() <= b.CreatedAt {
		return "under 1s"
	}
	return seconds(time.Duration(b.EndedAt()-b.CreatedAt) * time.Second)
}

// batchModel is the batch's model, or its endpoint while that is not known.
func batchModel(b *client.Batch) string {
	if b.Model != "" {
		return string(b.Model)
	}
	return string(b.Endpoint)
}

func newBatchGet(p *program) *cobra.Command {
	var (
		conn clientFlags
		out  output
		wait bool
	)
	cmd := &cobra.Command{
		Use: "get ID", Short: "Show one batch", Long: "Show one batch: where it stands, how many of its lines have ended, and its files.",
		Example: "  millrace batch get batch_06f2…\n  millrace batch get batch_06f2… --wait -o json", Args: args(1, 1, "ID"),
		RunE: func(cmd *cobra.Command, given []string) error {
			c, err := conn.open()
			if err != nil {
				return err
			}
			ctx := cmd.Context()
			b, err := c.Batch(ctx, given[0])
			if err == nil && wait {
				b, err = waitBatch(ctx, c, b, newTeller(ctx, p.err), 0)
			}
			if err != nil {
				return explain(c, err)
			}
			if out.json() {
				return printJSON(p.out, b)
			}
			return printBatch(p.out, b, time.Now())
		},
	}
	cmd.Flags().BoolVar(&wait, "wait", false, "wait until it has ended")
	conn.add(cmd.Flags())
	out.add(cmd.Flags())
	return cmd
}

func printBatch(w io.Writer, b *client.Batch, now time.Time) error {
	at := func(seconds int64) string {
		if seconds == 0 {
			return ""
		}
		t := time.Unix(seconds, 0)
		if d := now.Sub(t); d >= 0 {
			return t.Format(time.DateTime) + ", " + short(d) + " ago"
		}
		return t.Format(time.DateTime) + ", in " + short(t.Sub(now))
	}
	n := b.RequestCounts
	all := []fact{
		{"batch", b.ID},
		{"status", b.Status},
		{"model", string(b.Model)},
		{"endpoint", string(b.Endpoint)},
		{"lines", fmt.Sprintf("%s  %s of %s ended", bar(share(n), 20), count(n.Completed+n.Failed), count(n.Total))},
		{"completed", count(n.Completed)},
		{"failed", count(n.Failed)},
		{"created", at(b.CreatedAt)},
	}
	if b.Ended() {
		all = append(all, fact{"ended", at(b.EndedAt()) + ", after " + tookOf(b)})
	} else {
		all = append(all, fact{"window", b.CompletionWindow + ", closes " + at(b.ExpiresAt)})
	}
	if b.Usage != nil {
		all = append(all, fact{"tokens", tokensOf(b)})
	}
	all = append(all, fact{"input", b.InputFileID}, fact{"results", b.OutputFileID}, fact{"errors", b.ErrorFileID})
	for _, name := range slices.Sorted(maps.Keys(b.Metadata)) {
		if name != inputDigest {
			all = append(all, fact{"  " + name, b.Metadata[name]})
		}
	}
	if err := facts(w, all...); err != nil {
		return err
	}
	return printLineErrors(w, b, len(lineErrors(b)))
}

func tokensOf(b *client.Batch) string {
	text := count(b.Usage.InputTokens) + " in"
	if c := b.Usage.InputTokensDetails.CachedTokens; c > 0 {
		text += fmt.Sprintf(" (%s from the cache)", count(c))
	}
	return text + ", " + count(b.Usage.OutputTokens) + " out"
}

func lineErrors(b *client.Batch) []job.LineError {
	if b.Errors == nil {
		return nil
	}
	return b.Errors.Data
}

// printLineErrors prints up to most of what is wrong with a batch's file.
func printLineErrors(w io.Writer, b *client.Batch, most int) error {
	errs := lineErrors(b)
	if len(errs) == 0 {
		return nil
	}
	if _, err := fmt.Fprintln(w); err != nil {
		return err
	}
	return errorTable(w, errs[:min(most, len(errs))])
}

func errorTable(w io.Writer, errs []job.LineError) error {
	rows := [][]string{{"LINE", "CODE", "FIELD", "WHAT IS WRONG"}}
	for _, e := range errs {
		line, param := "all", ""
		if e.Line != nil {
			line = fmt.Sprint(*e.Line)
		}
		if e.Param != nil {
			param = *e.Param
		}
		rows = append(rows, []string{line, string(e.Code), param, oneLine(e.Message)})
	}
	return table(w, rows)
}

func newBatchResults(p *program) *cobra.Command {
	var (
		conn clientFlags
		name string
	)
	cmd := &cobra.Command{
		Use: "results ID", Short: "Print the lines that have ended so far",
		Long: `Print the lines of a batch that have ended so far, completed or not, as JSON lines in
no order; also while the batch still runs. A file of requests is never replaced by them.`,
		Example: "  millrace batch results batch_06f2…\n  millrace batch results batch_06f2… -o so-far.jsonl", Args: args(1, 1, "ID"),
		RunE: func(cmd *cobra.Command, given []string) error {
			if err := fileName("out", name); err != nil {
				return usageError(cmd, err)
			}
			c, err := conn.open()
			if err != nil {
				return err
			}
			to := outFlags{out: name}.streams(p)
			if err := to.claim(p, "", to); err != nil {
				return err
			}
			n, err := writeFile(p, name, func(w io.Writer) (int64, error) { return c.Results(cmd.Context(), given[0], w) })
			if err != nil {
				return explain(c, err)
			}
			if to.out != "-" {
				_, err = fmt.Fprintf(p.err, "%s in %s\n", plural(int(n), "line"), name)
			}
			return err
		},
	}
	cmd.Flags().StringVarP(&name, "out", "o", "-", "`file` for the lines; - is the standard output")
	conn.add(cmd.Flags())
	return cmd
}

func newBatchCancel(p *program) *cobra.Command {
	var (
		conn     clientFlags
		adminKey string
		out      output
	)
	cmd := &cobra.Command{
		Use: "cancel ID…", Short: "End batches before all their lines have ended",
		Long: `Cancel batches. What has ended stays, what runs is stopped, and the rest never starts.

With an admin key (--admin-key or MILLRACE_ADMIN_KEY) they may be any tenant's. They stay
the tenant's own, and so do their results.`,
		Example: "  millrace batch cancel batch_06f2…\n  MILLRACE_ADMIN_KEY=… millrace batch cancel batch_06f2…", Args: args(1, 1000, "ID"),
		RunE: func(cmd *cobra.Command, given []string) error {
			if adminKey != "" {
				conn.key = adminKey
			}
			c, err := conn.open()
			if err != nil {
				return err
			}
			cancel, why := c.CancelBatch, func(err error) error { return explain(c, err) }
			if adminKey != "" {
				cancel, why = c.CancelAnyBatch, func(err error) error { return explainAdmin(c, err, "") }
			}
			return why(each(p.out, out, given, func(id string) (*client.Batch, string, error) {
				b, err := cancel(cmd.Context(), id)
				if err != nil {
					return nil, "", err
				}
				return b, b.ID + " " + b.Status, nil
			}))
		},
	}
	conn.add(cmd.Flags())
	cmd.Flags().StringVar(&adminKey, "admin-key", "", "`key` that opens /admin, for a batch of any tenant's")
	out.add(cmd.Flags())
	return cmd
}

func newBatchRetry(p *program) *cobra.Command {
	var (
		conn  clientFlags
		out   output
		files outFlags
		wait  bool
	)
	cmd := &cobra.Command{
		Use: "retry ID", Short: "Run the lines again that did not complete",
		Long: `Start a new batch of the lines of an ended one that failed, expired or were cancelled,
and print its id. With --wait wait for it and fetch its results, as run does. A file of
requests is never replaced by results.`,
		Example: "  millrace batch retry batch_06f2…\n  millrace batch retry batch_06f2… --wait -o more.jsonl", Args: args(1, 1, "ID"),
		RunE: func(cmd *cobra.Command, given []string) error {
			files = files.streams(p)
			if err := files.check(out); err != nil {
				return usageError(cmd, err)
			}
			if !wait && (files.out != "" || files.errors != "") {
				return usageError(cmd, errors.New("there are no results to write without --wait"))
			}
			c, err := conn.open()
			if err != nil {
				return err
			}
			if wait {
				if err := files.of("batch_new").claim(p, "", files); err != nil { // its default names are of an id that nobody knows yet
					return err
				}
			}
			b, err := c.RetryBatch(cmd.Context(), given[0], "")
			if err != nil {
				return explain(c, err)
			}
			if wait {
				r := &batchRun{p: p, c: c, files: files.of(b.ID), given: files, flags: conn.given(p), out: out, tell: newTeller(cmd.Context(), p.err)}
				r.tell.say("%s: what did not complete of %s", b.ID, given[0])
				return explain(c, r.finish(cmd.Context(), b))
			}
			if out.json() {
				return printJSON(p.out, b)
			}
			_, err = fmt.Fprintln(p.out, b.ID)
			return err
		},
	}
	cmd.Flags().BoolVar(&wait, "wait", false, "wait for its end and fetch its results")
	files.add(cmd.Flags(), "ID.output.jsonl, of the new batch's id")
	conn.add(cmd.Flags())
	out.addLong(cmd.Flags())
	return cmd
}

// given are the flags that another command needs to reach the same server, with a space before them; what the environment says needs none.
func (c *clientFlags) given(p *program) string {
	if c.url == client.DefaultURL {
		return ""
	}
	for _, name := range []string{"MILLRACE_URL", "OPENAI_BASE_URL"} {
		if v, ok := p.lookup(name); ok && v == c.url {
			return ""
		}
	}
	return " --url " + quote(c.url)
}

// quote writes a word for a shell.
func quote(s string) string {
	if s != "" && !strings.ContainsFunc(s, func(r rune) bool {
		return !strings.ContainsRune("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./:@%+=,", r)
	}) {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

// interrupted tells whether err is of the end that was asked for.
func interrupted(ctx context.Context, err error) bool {
	return ctx.Err() != nil && errors.Is(err, context.Canceled)
}
