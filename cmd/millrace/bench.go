package main

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/millrace/millrace/bench"
	"github.com/millrace/millrace/internal/config"
	"github.com/millrace/millrace/internal/telemetry"
)

func newBench(p *program) *cobra.Command {
	cmd := &cobra.Command{
		Use: "bench", Short: "Measure what Millrace itself costs", Long: "Benchmarks of Millrace on this machine.",
		Example: "  millrace bench dispatch",
	}
	group(cmd)
	cmd.AddCommand(newBenchDispatch(p))
	return cmd
}

func newBenchDispatch(p *program) *cobra.Command {
	var (
		out output
		cfg bench.Config
		log telemetry.LogConfig
	)
	cmd := &cobra.Command{
		Use: "dispatch", Short: "Latency, throughput and memory of the way to the engine",
		Long: `Measure, within 50 seconds, what lies between a client and an engine: the time until
a request reaches the engine, whole durable jobs a second beside what bare JetStream
does at the same moment, what is added to the first token, and the memory of a waiting
job. On the embedded store, and on a real Redis where redis-server is found.`,
		Example: "  millrace bench dispatch\n  millrace bench dispatch -o json > report.json\n  millrace bench dispatch --dir /mnt/nvme",
		Args:    args(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := errors.Join(
				config.Between("in-flight", cfg.InFlight, 1, 512), config.Between("body", cfg.Body, 128, 128<<10), config.Between("scale", cfg.Scale, 0.05, 100),
			); err != nil {
				return usageError(cmd, err)
			}
			logger, err := telemetry.NewLogger(p.err, log)
			if err != nil {
				return usageError(cmd, err)
			}
			cfg.Log, cfg.Version = logger, buildVersion()
			if cfg.RedisServer == off {
				cfg.RedisServer = ""
			} else if cfg.RedisServer == "" {
				cfg.RedisServer = bench.FindRedis()
			}
			begun := time.Now()
			cfg.Say = func(step string) {
				fmt.Fprintf(p.err, "%5.1fs  %s\n", time.Since(begun).Seconds(), step) //nolint:errcheck // shown to people only
			}
			r, err := bench.Dispatch(cmd.Context(), cfg)
			if err != nil {
				return err
			}
			if out.json() {
				return printJSON(p.out, r)
			}
			return printReport(p.out, r)
		},
	}
	f := cmd.Flags()
	f.IntVar(&cfg.InFlight, "in-flight", 64, "how many durable jobs are kept in flight")
	f.IntVar(&cfg.Body, "body", 1024, "size of a request in `bytes`")
	f.StringVar(&cfg.Dir, "dir", "", "`folder` on the disk to measure (default the one for temporary files)")
	f.StringVar(&cfg.RedisServer, "redis-server", "", "`program` that is a real Redis; off for none (default the one on the PATH)")
	f.Float64Var(&cfg.Scale, "scale", 1, "stretches or shortens each measurement by this `factor`")
	f.StringVar(&log.Level, "log-level", "error", "debug, info, warn or error")
	out.add(f)
	return cmd
}

func printReport(w io.Writer, r *bench.Report) error {
	heads, variants := []string{"", "EMBEDDED"}, []*bench.Variant{r.Embedded}
	if r.Redis != nil {
		heads, variants = append(heads, r.Redis.Redis), append(variants, r.Redis)
	}
	row := func(name string, cell func(*bench.Variant) string) []string {
		cells := []string{name}
		for _, v := range variants {
			cells = append(cells, cell(v))
		}
		return cells
	}
	spread := func(l bench.Latency) string { return fmt.Sprintf("p50 %.2f ms, p99 %.2f ms", l.P50, l.P99) }
	rate := func(t bench.Throughput) string {
		return fmt.Sprintf("%.0f a second, bare %.0f, ratio %.2f", t.PerSecond, t.Bare, t.Ratio)
	}
	rows := [][]string{
		heads,
		row("interactive call to engine", func(v *bench.Variant) string { return spread(v.Interactive) }),
		row("durable job to engine", func(v *bench.Variant) string { return spread(v.Submitted) }),
		row("durable job to its 202", func(v *bench.Variant) string { return spread(v.Accepted) }),
		row("one synced publish alone", func(v *bench.Variant) string { return spread(v.BarePublish) }),
		row("durable jobs, each synced", func(v *bench.Variant) string { return rate(v.Durable) }),
		row("memory of a waiting job", func(v *bench.Variant) string {
			if v.Memory.Redis > 0 {
				return fmt.Sprintf("%s bytes and %s in Redis", count(v.Memory.Process), count(v.Memory.Redis))
			}
			return count(v.Memory.Process) + " bytes"
		}),
	}
	if _, err := fmt.Fprintf(w, "millrace %s, %s, %s, %s; %s in flight, bodies of %s bytes; took %.0f s\n\n",
		r.Version, r.Go, r.OS, plural(r.CPUs, "processor"), plural(r.InFlight, "job"), count(r.Body), r.Seconds); err != nil {
		return err
	}
	if err := table(w, rows); err != nil {
		return err
	}
	if _, err := fmt.Fprintf(w, "\nrelaxed (synced each 100 ms)   %s\nfirst token, engine direct     %s\nfirst token, through Millrace  %s, %.2f ms added\n\nWhat limits them:\n",
		rate(r.Relaxed), spread(r.TTFT.Direct), spread(r.TTFT.Through), r.TTFT.Added); err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(r.Limits)) {
		if _, err := fmt.Fprintf(w, "  %s: %s\n", name, r.Limits[name]); err != nil {
			return err
		}
	}
	return nil
}
