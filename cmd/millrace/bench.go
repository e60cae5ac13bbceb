package main

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/millrace/millrace/bench"
	"github.com/millrace/millrace/bench/routing"
	"github.com/millrace/millrace/internal/config"
	"github.com/millrace/millrace/internal/schedule"
	"github.com/millrace/millrace/internal/telemetry"
)

func newBench(p *program) *cobra.Command {
	cmd := &cobra.Command{
		Use: "bench", Short: "Measure what Millrace costs and what it gains", Long: "Benchmarks of Millrace on this machine.",
		Example: "  millrace bench dispatch\n  millrace bench routing --simulate\n  millrace bench batch\n  millrace bench scaling",
	}
	group(cmd)
	cmd.AddCommand(newBenchDispatch(p), newBenchRouting(p), newBenchBatch(p), newBenchScaling(p), newBenchStores(p))
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
			cfg.RedisServer, cfg.Say = redisServer(cfg.RedisServer), p.steps()
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

func newBenchRouting(p *program) *cobra.Command {
	var (
		out      output
		params   routing.Params
		simulate bool
		seeds    int
		order    string
		plot     string
		log      telemetry.LogConfig
	)
	cmd := &cobra.Command{
		Use: "routing", Short: "Pulling by free KV cache beside routers that push",
		Long: `Compare Millrace with the usual routers (round robin, least connections, least
connections with a random choice) on the same recorded arrivals and emulated engines.
With --simulate in virtual time, within a minute; without it at real speed, on engines in
processes of their own and Millrace's whole path, within four minutes.`,
		Example: "  millrace bench routing --simulate\n  millrace bench routing --simulate --variant stalls -o json\n  millrace bench routing --variant mixed --plot mixed.svg",
		Args:    args(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := errors.Join(
				params.Check(), config.Between("seeds", seeds, 0, 1000), config.OneOf("order", order, string(schedule.Oldest), string(schedule.Shortest)),
			); err != nil {
				return usageError(cmd, err)
			}
			var r *routing.Report
			var err error
			if simulate {
				r, err = routing.Simulate(cmd.Context(), routing.Study{Params: params, Seeds: seeds, Order: schedule.Order(order)})
			} else {
				var logger *slog.Logger
				if logger, err = telemetry.NewLogger(p.err, log); err != nil {
					return usageError(cmd, err)
				}
				begun := time.Now()
				r, err = routing.Measure(cmd.Context(), routing.Measurement{
					Params: params, Runs: seeds, Order: schedule.Order(order), Log: logger, Version: buildVersion(),
					Say: func(step string) {
						fmt.Fprintf(p.err, "%5.1fs  %s\n", time.Since(begun).Seconds(), step) //nolint:errcheck // shown to people only
					},
				})
			}
			if err != nil {
				return err
			}
			if err := writePlot(plot, r.Plot); err != nil {
				return err
			}
			if out.json() {
				return printJSON(p.out, r)
			}
			return printRouting(p.out, r)
		},
	}
	f := cmd.Flags()
	f.BoolVar(&simulate, "simulate", false, "run in virtual time")
	f.StringVar((*string)(&params.Shape), "workload", "", "lengths of prompts and answers: seed-like or chat-like (default seed-like, or the variant's own)")
	f.StringVar((*string)(&params.Variant), "variant", string(routing.Equal), "what differs: equal, slow, stalls, mixed, bursts or low")
	f.Float64Var(&params.Rate, "rate", 0, "requests a second (default the workload's own)")
	f.IntVar(&seeds, "seeds", 0, "how many recorded workloads each arm gets (default 15 in virtual time, else 1)")
	f.IntVar(&seeds, "runs", 0, "the same as --seeds")
	f.IntVar(&params.Requests, "requests", 0, "requests in each workload (default 8000 in virtual time, else what the time allows)")
	f.Uint64Var(&params.Seed, "seed", 0, "the first workload's seed")
	f.StringVar(&order, "order", string(schedule.Oldest), "what Millrace starts first: oldest, or shortest (predicted, with ageing)")
	f.StringVar(&plot, "plot", "", "`file` for a picture (SVG) of the times to the first token")
	f.StringVar(&log.Level, "log-level", "error", "debug, info, warn or error")
	out.add(f)
	return cmd
}

// writePlot has draw write a picture into a file; "" is no picture.
func writePlot(name string, draw func(w io.Writer) error) (err error) {
	if name == "" {
		return nil
	}
	f, err := os.Create(name)
	if err != nil {
		return fmt.Errorf("creating the plot: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	return draw(f)
}

func printRouting(w io.Writer, r *routing.Report) error {
	how := "measured at real speed, figures of all runs together"
	if r.Simulated {
		how = "simulated, medians over the runs"
	}
	if _, err := fmt.Fprintf(w, "%s, %s, %g requests a second; %s of %s requests; %s; took %.0f s\n\n",
		r.Workload, r.Variant, r.Rate, plural(r.Runs, "run"), count(r.Requests), how, r.Seconds); err != nil {
		return err
	}
	rows := [][]string{{"", "TTFT P50", "TTFT P99", "E2E P50", "E2E P99", "SPREAD OF LOAD", "PREEMPTIONS", "ERRORS"}}
	arms := r.Arms
	if r.LowerBound != nil {
		arms = append(slices.Clip(arms), *r.LowerBound)
	}
	for _, a := range arms {
		row := []string{string(a.Name)}
		for _, ms := range []float64{a.TTFTP50, a.TTFTP99, a.E2EP50, a.E2EP99} {
			row = append(row, fmt.Sprintf("%.0f ms", ms))
		}
		rows = append(rows, append(row, fmt.Sprintf("%.3f", a.LoadSpread), fmt.Sprintf("%.4g", a.Preemptions), fmt.Sprintf("%.4g", a.Errors)))
	}
	if err := table(w, rows); err != nil {
		return err
	}
	_, err := fmt.Fprintf(w, "\nMillrace's P99 over that of %s: TTFT %.2f, E2E %.2f\n", routing.LeastLoadRandom, r.RatioTTFTP99, r.RatioE2EP99)
	return err
}

// redisServer is the program that --redis-server means: the one on the PATH if none is named, "" for none.
func redisServer(named string) string {
	switch named {
	case off:
		return ""
	case "":
		return bench.FindRedis()
	}
	return named
}

// steps returns a function that tells people of each step of a benchmark, and when it began.
func (p *program) steps() func(step string) {
	begun := time.Now()
	return func(step string) {
		fmt.Fprintf(p.err, "%5.1fs  %s\n", time.Since(begun).Seconds(), step) //nolint:errcheck // shown to people only
	}
}
