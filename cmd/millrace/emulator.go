package main

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/millrace/millrace/internal/config"
	"github.com/millrace/millrace/internal/engine/emulator"
	"github.com/millrace/millrace/internal/telemetry"
)

// emulatorFlags are the knobs of an emulated engine that works.
type emulatorFlags struct{ emulator.Config }

func (c *emulatorFlags) add(fs *pflag.FlagSet) {
	fs.StringVar(&c.Profile, "profile", "l40s-8b", "hardware and model to behave like: "+strings.Join(profiles(), ", "))
	fs.Float64Var(&c.Speed, "speed", 1, "by how `much` faster than that hardware")
	fs.StringSliceVar(&c.Models, "model", nil, "`names` of the models that it serves (default emulator- and the profile)")
	fs.DurationVar(&c.ColdStart, "cold-start", 0, "how long it answers 503 before it is ready")
	fs.IntVar(&c.Faults.MaxNumSeqs, "max-num-seqs", 0, "most running sequences (default 256)")
}

func (c *emulatorFlags) check() error {
	return errors.Join(
		config.OneOf("profile", c.Profile, profiles()...), config.Between("speed", c.Speed, 1e-3, 1e6),
		config.AtLeast("cold-start", c.ColdStart, 0), config.AtLeast("max-num-seqs", c.Faults.MaxNumSeqs, 0),
	)
}

func profiles() []string {
	var names []string
	for _, p := range emulator.Profiles() {
		names = append(names, p.Name)
	}
	return names
}

func newEmulator(p *program) *cobra.Command {
	var (
		f      emulatorFlags
		listen string
		log    telemetry.LogConfig
	)
	cmd := &cobra.Command{
		Use: "emulator", Short: "A vLLM-compatible engine without a GPU, for tests and laptops",
		Long: `Serve what vLLM serves, with the timing of a GPU: continuous batching over a paged KV
cache, preemption, vLLM's metrics. No model runs, and the text is made up: the same
request always gets the same answer.

The fault flags make it fail in the ways in which engines fail.`,
		Example: `  millrace emulator --listen 127.0.0.1:8000 --profile a10-7b
  millrace emulator --speed 10 --cold-start 45s --reset-rate 0.01`,
		Args: args(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := f.check(); err != nil {
				return usageError(cmd, err)
			}
			logger, err := telemetry.NewLogger(p.err, log)
			if err != nil {
				return usageError(cmd, err)
			}
			e, err := emulator.New(f.Config, logger)
			if err != nil {
				return usageError(cmd, err)
			}
			l, err := net.Listen("tcp", listen)
			if err != nil {
				return fmt.Errorf("listening for the emulator: %w: choose another address with --listen", err)
			}
			logger.Info("listening", "addr", l.Addr().String(), "models", e.Models())
			return e.Serve(cmd.Context(), l)
		},
	}
	fs := cmd.Flags()
	fs.StringVar(&listen, "listen", "127.0.0.1:8000", "`address` of the engine")
	f.add(fs)
	fs.StringVar(&f.Workload, "workload", "", "distribution of the answers' natural lengths: "+strings.Join(workloads(), ", ")+" (default "+workloads()[0]+")")
	fs.Uint64Var(&f.Seed, "seed", 0, "changes all texts; emulators that stand in for each other need the same")
	fs.IntVar(&f.MaxModelLen, "max-model-len", 0, "most `tokens` of prompt and answer (default the profile's)")
	fs.IntVar(&f.KVTokens, "kv-tokens", 0, "`tokens` that the KV cache holds (default the profile's)")
	fs.IntVar(&f.DataParallel, "data-parallel", 1, "`ranks`, each with the whole KV cache and an engine core of its own")
	fs.BoolVar(&f.PriorityScheduling, "priority-scheduling", false, "start the lowest \"priority\" first; without it one that is not 0 is refused")
	fs.BoolVar(&f.NoContinuation, "no-continuation", false, "refuse continue_final_message, as engines do that do not know it")
	fs.BoolVar(&f.Responses, "responses", false, "serve /v1/responses, as newer engines do")
	fs.StringVar(&f.APIKey, "engine-api-key", "", "`key` that clients must send (default none)")
	fs.Float64Var(&f.Faults.ErrorRate, "error-rate", 0, "`share` of calls answered 500")
	fs.Float64Var(&f.Faults.HangRate, "hang-rate", 0, "`share` of calls that never give a token")
	fs.Float64Var(&f.Faults.ResetRate, "reset-rate", 0, "`share` of calls cut after a token or more")
	fs.IntVar(&f.Faults.Status, "status", 0, "answer all calls with this HTTP `status`")
	fs.StringVar(&f.Faults.RetryAfter, "retry-after", "", "Retry-After `header` beside --status")
	fs.BoolVar(&f.Faults.Stall, "stall", false, "accept calls, and give no token to any")
	fs.DurationVar(&f.Faults.StallEvery, "stall-every", 0, "freeze about so often, /health and /metrics too (default never)")
	fs.DurationVar(&f.Faults.StallFor, "stall-for", 3*time.Second, "how long each of those stalls lasts")
	fs.BoolVar(&f.Faults.HealthLies, "health-lies", false, "/health says 200 whatever is the case")
	fs.Float64Var(&f.Faults.PreemptionRate, "preemption-rate", 0, "`share` of steps that begin by preempting a sequence")
	fs.StringVar((*string)(&f.Faults.Metrics), "metrics-fault", "", "what is wrong with /metrics: missing, garbage, nan or slow")
	fs.StringVar(&log.Level, "log-level", "info", "debug, info, warn or error")
	fs.StringVar(&log.Format, "log-format", "", "text or json (default text on a terminal, else json)")
	return cmd
}

func workloads() []string {
	var names []string
	for _, w := range emulator.Workloads() {
		names = append(names, w.Name)
	}
	return names
}
