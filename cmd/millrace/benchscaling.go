package main

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/millrace/millrace/bench/scaling"
	"github.com/millrace/millrace/internal/config"
)

func newBenchScaling(p *program) *cobra.Command {
	var (
		out              output
		study            scaling.Study
		traces, policies []string
		plot             string
	)
	cmd := &cobra.Command{
		Use: "scaling", Short: "Scaling ahead of cold starts beside scalers that react",
		Long: `Compare Millrace's autoscaler with the usual ones, in virtual time, within 50
seconds on two processors: bursts of twenty times the load that come at once or as a
ramp, load that comes and goes, a week with a burst each weekday's morning, and a batch
that has time. Workers take 45 s to start.`,
		Example: "  millrace bench scaling\n  millrace bench scaling --trace step,ramp120 --policy millrace,keda -o json\n  millrace bench scaling --trace step,ramp120 --plot scaling.svg",
		Args:    args(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			err := config.Between("seeds", study.Seeds, 0, 1000)
			for _, t := range traces {
				err = errors.Join(err, config.OneOf("trace", t, names(scaling.Traces())...))
				study.Traces = append(study.Traces, scaling.TraceName(t))
			}
			for _, n := range policies {
				err = errors.Join(err, config.OneOf("policy", n, names(scaling.Policies())...))
				study.Policies = append(study.Policies, scaling.PolicyName(n))
			}
			if err != nil {
				return usageError(cmd, err)
			}
			r, err := scaling.Simulate(cmd.Context(), study)
			if err != nil {
				return err
			}
			if err := writePlot(plot, r.Plot); err != nil {
				return err
			}
			if out.json() {
				return printJSON(p.out, r)
			}
			return printScalingStudy(p.out, r)
		},
	}
	f := cmd.Flags()
	f.StringSliceVar(&traces, "trace", nil, "which load: "+strings.Join(names(scaling.Traces()), ", ")+" (default all)")
	f.StringSliceVar(&policies, "policy", nil, "which policies: "+strings.Join(names(scaling.Policies()), ", ")+" (default all)")
	f.IntVar(&study.Seeds, "seeds", 0, "how many recordings of each trace every policy gets (default 15, and one of the week)")
	f.Uint64Var(&study.Seed, "seed", 0, "the first recording's seed")
	f.StringVar(&plot, "plot", "", "`file` for a picture (SVG) of workers and waiting requests")
	out.add(f)
	return cmd
}

func names[T ~string](all []T) []string {
	names := make([]string, len(all))
	for i, v := range all {
		names[i] = string(v)
	}
	return names
}

func printScalingStudy(w io.Writer, r *scaling.Report) error {
	for _, t := range r.Traces {
		if _, err := fmt.Fprintf(w, "%s: %s of some %s requests in %.0f minutes\n\n", t.Trace, plural(t.Runs, "recording"), count(t.Requests), t.Seconds/60); err != nil {
			return err
		}
		rows := [][]string{{"", "WAIT P50", "WAIT P99", "FIRST TOKEN < 5 S", "GPU-SECONDS", "CHANGES", "TURNS", "MOST"}}
		if t.Trace == scaling.Batch {
			rows[0] = append(rows[0], "ADDED", "BATCH DONE IN")
		}
		for _, a := range t.Arms {
			row := []string{
				string(a.Policy), fmt.Sprintf("%.1f s", a.WaitP50), fmt.Sprintf("%.1f s", a.WaitP99), fmt.Sprintf("%.1f %%", 100*a.Prompt), count(int64(a.GPUSeconds)),
				fmt.Sprintf("%.4g", a.Changes), fmt.Sprintf("%.4g", a.Turns), fmt.Sprintf("%.4g", a.Most),
			}
			if t.Trace == scaling.Batch {
				row = append(row, fmt.Sprintf("%.4g", a.Added), fmt.Sprintf("%.0f min", a.LinesIn/60))
			}
			rows = append(rows, row)
		}
		if err := table(w, rows); err != nil {
			return err
		}
		if len(t.Arms[0].Days) > 0 {
			rows := [][]string{{"P99 WAIT, 8:45 TO 9:45"}}
			for _, d := range t.Arms[0].Days {
				rows[0] = append(rows[0], strings.ToUpper(d.Day))
			}
			for _, a := range t.Arms {
				row := []string{string(a.Policy)}
				for _, d := range a.Days {
					row = append(row, fmt.Sprintf("%.1f s", d.MorningP99))
				}
				rows = append(rows, row)
			}
			if _, err := fmt.Fprintln(w); err != nil {
				return err
			}
			if err := table(w, rows); err != nil {
				return err
			}
		}
		if _, err := fmt.Fprintln(w); err != nil {
			return err
		}
	}
	for _, b := range r.Bars {
		met := "met"
		if !b.Met {
			met = "MISSED"
		}
		if _, err := fmt.Fprintf(w, "%-8s %-7s %s; the bar is %s\n", b.Name, met, b.Was, b.Bar); err != nil {
			return err
		}
		if b.Bound != "" {
			if _, err := fmt.Fprintf(w, "%-16s bound: %s\n", "", b.Bound); err != nil {
				return err
			}
		}
	}
	_, err := fmt.Fprintf(w, "took %.0f s\n", r.Seconds)
	return err
}
