package main

import (
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/millrace/millrace/bench/batch"
	"github.com/millrace/millrace/internal/config"
	"github.com/millrace/millrace/internal/telemetry"
)

func newBenchBatch(p *program) *cobra.Command {
	var (
		out output
		cfg batch.Config
		log telemetry.LogConfig
	)
	cmd := &cobra.Command{
		Use: "batch", Short: "A whole batch: engines kept busy, memory of each role, cost to interactive calls",
		Long: `Run a batch through every role, each in a process of its own beside emulated engines,
and measure how near the engines come to what they can do, that every line ends exactly
once, how much memory each role takes, and what interactive calls beside it notice.`,
		Example: "  millrace bench batch\n  millrace bench batch --lines 500\n  millrace bench batch --workers 4 --speed 2 -o json",
		Args:    args(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := errors.Join(
				config.Between("lines", cfg.Lines, 1, 10_000_000), config.Between("workers", cfg.Workers, 1, 32), config.Between("speed", cfg.Speed, 1e-3, 1e6),
				config.OneOf("profile", cfg.Profile, profiles()...), config.Between("prompt", cfg.Prompt, 24, 100_000), config.Between("tokens", cfg.Tokens, 2, 10_000),
				config.Between("rate", cfg.Rate, 0, 1000),
			); err != nil {
				return usageError(cmd, err)
			}
			logger, err := telemetry.NewLogger(p.err, log)
			if err != nil {
				return usageError(cmd, err)
			}
			cfg.Log, cfg.Version = logger, buildVersion()
			if cfg.Rate == 0 {
				cfg.Rate = -1
			}
			cfg.RedisServer, cfg.Say = redisServer(cfg.RedisServer), p.steps()
			r, err := batch.Run(cmd.Context(), cfg)
			if err != nil {
				return err
			}
			if out.json() {
				return printJSON(p.out, r)
			}
			return printBatchReport(p.out, r)
		},
	}
	f := cmd.Flags()
	f.IntVar(&cfg.Lines, "lines", 50_000, "how many lines")
	f.IntVar(&cfg.Workers, "workers", 2, "how many workers, each beside an emulated engine")
	f.StringVar(&cfg.Profile, "profile", "l40s-8b", "hardware and model that the engines behave like")
	f.Float64Var(&cfg.Speed, "speed", 1, "by how `much` faster than that hardware they are")
	f.IntVar(&cfg.Prompt, "prompt", 64, "`tokens` of a line's prompt")
	f.IntVar(&cfg.Tokens, "tokens", 32, "mean `tokens` of a line's answer")
	f.Float64Var(&cfg.Rate, "rate", 4, "interactive `calls` a second, before the batch and beside it; 0 for none")
	f.StringVar(&cfg.Dir, "dir", "", "`folder` for the stores (default the one for temporary files)")
	f.StringVar(&cfg.RedisServer, "redis-server", "", "`program` that is a real Redis; off for the embedded store (default the one on the PATH)")
	f.StringVar(&cfg.NATSURL, "nats-url", "", "`URL` of an empty NATS to use (default one started for the run)")
	f.StringVar(&cfg.RedisURL, "redis-url", "", "`URL` of an empty Redis to use (default one started for the run)")
	f.StringVar(&cfg.DatabaseURL, "database-url", "", "`URL` of an empty database to use (default SQLite)")
	f.StringVar(&log.Level, "log-level", "error", "debug, info, warn or error")
	out.add(f)
	return cmd
}

// newBenchStores is what `bench batch` starts for its stores.
func newBenchStores(p *program) *cobra.Command {
	var (
		dir   string
		redis bool
	)
	cmd := &cobra.Command{
		Use: "stores", Short: "The stores of a benchmark, in a process of their own", Hidden: true,
		Long:    "Run an embedded NATS, and a Redis-compatible store, on free ports, for a benchmark.",
		Example: "  millrace bench stores --dir /tmp/x --redis", Args: args(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if dir == "" {
				return usageError(cmd, errors.New("the folder is missing: name it with --dir"))
			}
			return batch.Stores(cmd.Context(), dir, redis, p.out)
		},
	}
	cmd.Flags().StringVar(&dir, "dir", "", "`folder` of the queue's store")
	cmd.Flags().BoolVar(&redis, "redis", false, "the Redis-compatible store too")
	return cmd
}

func printBatchReport(w io.Writer, r *batch.Report) error {
	if _, err := fmt.Fprintf(w, "millrace %s, %s, %s, %s; %s on %s of %s at %gx; Redis: %s, database: %s; took %.0f s\n\n",
		r.Version, r.Go, r.OS, plural(r.CPUs, "processor"), plural(r.Lines, "line"), plural(r.Workers, "engine"), r.Profile, r.Speed, r.Redis, r.Database, r.Seconds); err != nil {
		return err
	}
	all := []fact{
		{"time", fmt.Sprintf("sent in %.1f s, validated in %.1f s, run in %.1f s, files written in %.1f s, fetched in %.1f s",
			r.Phases.Upload, r.Phases.Validate, r.Phases.Run, r.Phases.Finalize, r.Phases.Download)},
		{"throughput", fmt.Sprintf("%.0f lines a second, %s tokens a second", r.LinesPerSecond, count(int64(r.TokensPerSecond)))},
		{"engines busy", fmt.Sprintf("%.1f %% of the ideal, which is %.1f s or %.0f lines a second", 100*r.BusyShare, r.Ideal.Seconds, r.Ideal.LinesPerSecond)},
		{"requests in them", fmt.Sprintf("%.0f on average, of %s that fit", r.Running, count(r.RunningMost))},
		{"engines alone", fmt.Sprintf("%.0f lines a second without Millrace, %.1f %% of the ideal, for a sample of %s", r.Direct.LinesPerSecond, 100*r.Direct.BusyShare, count(r.Direct.Lines))},
		{"lines", fmt.Sprintf("%s completed, %s failed; %s exactly once, %s missing, %s more than once",
			count(r.Counts.Completed), count(r.Counts.Failed), count(r.Counts.Once), count(r.Counts.Missing), count(r.Counts.Twice))},
	}
	if i := r.Interactive; i != nil {
		all = append(
			all, fact{"first token", fmt.Sprintf("alone p50 %.0f ms, p99 %.0f ms; beside the batch p50 %.0f ms, p99 %.0f ms", i.Alone.P50, i.Alone.P99, i.Beside.P50, i.Beside.P99)},
			fact{"", ""}, fact{"cost", fmt.Sprintf("p99 %.2f times as long, of %s and %s calls at %g a second; %s failed", i.Ratio, count(i.Alone.N), count(i.Beside.N), i.Rate, count(i.Failed))},
		)
	}
	if err := facts(w, all...); err != nil {
		return err
	}
	rows := [][]string{{"MEMORY", "PROCESSES", "BEFORE", "AT MOST"}}
	for _, role := range r.Roles {
		rows = append(rows, []string{role.Name, count(role.Processes), mib(role.Idle), mib(role.Peak)})
	}
	if _, err := fmt.Fprintln(w); err != nil {
		return err
	}
	if err := table(w, rows); err != nil {
		return err
	}
	_, err := fmt.Fprintf(w, "\nThe ideal: %s\n", r.Notes["ideal"])
	return err
}

func mib(bytes int64) string {
	if bytes == 0 {
		return "?"
	}
	return fmt.Sprintf("%.1f MiB", float64(bytes)/(1<<20))
}
