package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/millrace/millrace/dispatcher"
	"github.com/millrace/millrace/internal/client"
	"github.com/millrace/millrace/internal/config"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/platform"
	"github.com/millrace/millrace/internal/provider"
	"github.com/millrace/millrace/internal/scale"
	"github.com/millrace/millrace/internal/telemetry"
)

// upFlags are those of `millrace up`.
type upFlags struct {
	proc       processFlags
	back       backboneFlags
	database   databaseFlags
	api        apiFlags
	dispatcher dispatcher.Config
	eng        engineFlags
	worker     workerFlags
	emu        emulatorFlags
	data       string
	durability string
	natsListen string
	poolsFile  string
	workers    int
	// settings are what the pools' workers are given beside what they need to join.
	settings provider.Join
	pools    []scale.Pool
	// anyMetrics: nobody said where metrics are to be, so that any port will do.
	anyMetrics bool
}

func newUp(p *program) *cobra.Command {
	var f upFlags
	cmd := &cobra.Command{
		Use: "up", Short: "The whole platform in this one process",
		Long: `Run every role in this process, with the queue, the store and an engine inside it.

Without --engine the engine is the built-in emulator: it behaves like a GPU server in
time and in its API, and its text is made up. With --engine it is yours. With --pool
workers are processes of their own, which come and go with the load, each beside the
engine that the pool's file describes.
Jobs are kept in --data: what was accepted before a stop goes on at the next start.`,
		Example: `  millrace up
  millrace up --engine http://127.0.0.1:11434
  millrace up --workers 4 --profile a10-7b --speed 2
  millrace up --pool examples/pools.yaml
  millrace up --nats-url nats://127.0.0.1:4222 --redis-url redis://127.0.0.1:6379`,
		Args: args(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := f.check(); err != nil {
				return usageError(cmd, err)
			}
			f.anyMetrics = !cmd.Flags().Changed("metrics-listen")
			if f.poolsFile != "" {
				if err := f.readPools(); err != nil {
					return &exitError{exitUsage, err}
				}
				if !cmd.Flags().Changed("workers") && f.eng.URL == "" {
					f.workers = 0
				}
				var err error
				if f.settings, err = workerSettings(cmd, p); err != nil {
					return err
				}
			}
			return up(cmd.Context(), p, &f)
		},
	}
	fs := cmd.Flags()
	f.api.add(fs)
	fs.StringVar(&f.data, "data", "", "`folder` for accepted jobs and answers (default ~/.local/share/millrace)")
	fs.StringVar(&f.durability, "durability", "always", "always syncs each job to disk before its 202; relaxed each 100 ms")
	f.eng.add(fs)
	fs.IntVar(&f.workers, "workers", 1, "how many workers, each with an emulator of its own unless --engine is given")
	fs.StringVar(&f.poolsFile, "pool", "", "YAML `file` of pools, whose workers are started and stopped as the load asks; then there are no others, unless --workers or --engine is given")
	f.worker.add(fs)
	addPrefixAffinity(fs, &f.api.NoPrefixAffinity, &f.worker.NoPrefixAffinity)
	addFeed(fs, &f.dispatcher)
	f.emu.add(fs)
	f.back.add(fs, "", "")
	f.database.add(fs, "default SQLite in --data, whose schema is kept up to date")
	fs.StringVar(&f.natsListen, "nats-listen", "", "`address` at which the embedded NATS takes workers from elsewhere (default none)")
	f.proc.add(fs, "warn")
	return cmd
}

func (f *upFlags) check() error {
	if f.data == "" {
		home, err := dataHome()
		if err != nil && f.back.NATSURL == "" {
			return err
		}
		f.data = home
	}
	return errors.Join(
		f.back.check(), f.database.check(false), f.api.check(), checkFeed(&f.dispatcher), f.eng.check(), f.worker.check(), f.emu.check(),
		config.OneOf("durability", f.durability, "always", "relaxed"), config.Between("workers", f.workers, 1, 64),
	)
}

// readPools reads the pools for the start-up text, and to refuse what cannot be: the autoscaler reads them again whenever they change.
func (f *upFlags) readPools() error {
	raw, err := os.ReadFile(f.poolsFile)
	if err != nil {
		return fmt.Errorf("reading the pools: %w", err)
	}
	if f.pools, err = scale.ParsePools(raw); err != nil {
		return fmt.Errorf("reading the pools in %s: %w", f.poolsFile, err)
	}
	for _, pool := range f.pools {
		if err := pool.Unhide(nil); err != nil {
			return fmt.Errorf("reading the pools in %s: pool %q: %w", f.poolsFile, pool.Name, err)
		}
		if pool.Provider != "process" {
			return fmt.Errorf("pool %s in %s has the provider %s, and `millrace up` runs workers as processes alone: use `millrace autoscaler`", pool.Name, f.poolsFile, pool.Provider)
		}
	}
	return nil
}

// platform is the configuration of the whole.
func (f *upFlags) platform() platform.Config {
	f.api.Retention, f.dispatcher.BatchMaxLine = f.back.Queue.Retention, f.api.MaxBody
	return platform.Config{
		Dir: f.data, Relaxed: f.durability == "relaxed", NATSListen: f.natsListen, NATSURL: f.back.NATSURL, RedisURL: f.back.RedisURL, BlobURL: f.back.BlobURL, DatabaseURL: f.database.url,
		PoolsFile: f.poolsFile, WorkerJoin: f.settings, Workers: f.workers, Engine: f.eng.Config, Emulator: f.emu.Config,
		API: f.api.Config, Dispatcher: f.dispatcher, Worker: f.worker.Config, Queue: f.back.Queue, Results: f.back.Results, Version: buildVersion(),
	}
}

func up(ctx context.Context, p *program, f *upFlags) error {
	log, err := f.proc.logger(p)
	if err != nil {
		return err
	}
	var engines []found
	if f.eng.URL == "" {
		engines = findEngines(ctx)
	}
	reg := telemetry.NewRegistry(buildVersion())
	pf, err := platform.New(ctx, f.platform(), reg, log)
	if err != nil {
		return ended(ctx, portInUse(err))
	}
	metrics, stop, err := f.proc.serve(ctx, reg, log, pf.Ready())
	if errors.Is(err, syscall.EADDRINUSE) && f.anyMetrics {
		f.proc.metrics = "127.0.0.1:0"
		metrics, stop, err = f.proc.serve(ctx, reg, log, pf.Ready())
	}
	if err != nil {
		pf.Close()
		return err
	}
	defer stop()

	// The start-up text waits for the platform, which runs meanwhile.
	told := make(chan struct{})
	running, cancel := context.WithCancel(ctx)
	go func() {
		defer close(told)
		f.greet(running, p.out, pf, metrics, engines)
	}()
	context.AfterFunc(ctx, func() {
		fmt.Fprintln(p.out, "\nstopping: what runs may finish, the rest stays queued on disk; Ctrl-C again ends it at once") //nolint:errcheck // nowhere else to say it
	})
	err = ended(ctx, pf.Run(ctx))
	cancel()
	<-told
	return err
}

// greetAfter is for how long the start-up text waits for an engine that is not ready.
const greetAfter = 10 * time.Second

// greet says what runs, once it runs.
func (f *upFlags) greet(ctx context.Context, w io.Writer, pf *platform.Platform, metrics string, engines []found) {
	waited, cancel := context.WithTimeout(ctx, greetAfter)
	defer cancel()
	problem := awaitReady(waited, pf)
	if ctx.Err() != nil {
		return
	}
	var models []job.Model
	if c, err := client.New(client.Config{URL: pf.URL(), APIKey: f.api.APIKey}); err == nil {
		models, _ = servedModels(ctx, c) // the text then shows how a model's name is written
		c.CloseIdleConnections()
	}
	fmt.Fprint(w, f.greeting(pf.URL(), metrics, models, engines, problem)) //nolint:errcheck // the platform runs all the same
}

// awaitReady waits until every part is ready, and returns what is not when ctx ends.
func awaitReady(ctx context.Context, pf *platform.Platform) error {
	checks := pf.Ready()
	for {
		var problem error
		for name, check := range checks {
			if err := check(); err != nil {
				problem = fmt.Errorf("%s: %w", name, err)
			}
		}
		if problem == nil {
			return nil
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			return problem
		}
	}
}

func (f *upFlags) greeting(url, metrics string, models []job.Model, engines []found, problem error) string {
	var b strings.Builder
	say := func(format string, v ...any) { fmt.Fprintf(&b, format, v...) }
	say("Millrace %s is up at %s\n\n", buildVersion(), url)
	switch {
	case f.workers == 0:
	case f.eng.URL == "":
		say("  engine    %s: no model runs, its text is made up; behaves like %s at %gx speed\n", plural(f.workers, "built-in emulator"), f.emu.Profile, f.emu.Speed)
	default:
		say("  engine    %s, %s beside it\n", f.eng.URL, plural(f.workers, "worker"))
	}
	for _, pool := range f.pools {
		served := make([]string, len(pool.Models))
		for i, m := range pool.Models {
			served[i] = string(m)
		}
		say("  pool      %s: %d to %d workers for %s, as the load asks\n", pool.Name, pool.Min, pool.Max, strings.Join(served, ", "))
		models = append(models, pool.Models...)
	}
	slices.Sort(models)
	models = slices.Compact(models) // a pool's may be served already
	switch {
	case f.back.NATSURL != "":
		say("  queue     %s\n", f.back.NATSURL)
	case f.durability == "relaxed":
		say("  queue     embedded, in %s; synced each 100 ms: a power cut loses what came in that time\n", f.data)
	default:
		say("  queue     embedded, in %s; each job is synced before its 202\n", f.data)
	}
	if metrics != "" {
		say("  metrics   http://%s/metrics\n", metrics)
	}
	for _, e := range engines {
		say("  found     %s at %s: `millrace up --engine %s` uses it\n", e.name, e.url, e.url)
	}
	if problem != nil {
		say("  waiting   %v\n", problem)
	}
	key, flag, model := "", "", job.Model("MODEL")
	if len(models) > 0 {
		model = models[0]
	}
	if f.api.APIKey != "" {
		key = ` -H "Authorization: Bearer $MILLRACE_API_KEY"`
	}
	if url != client.DefaultURL {
		flag = " --url " + url
	}
	if len(models) != 1 {
		flag += " -m " + string(model)
	}
	say("\nTry it:\n")
	say("  curl %s/v1/chat/completions%s -H 'Content-Type: application/json' -d '{\"model\":\"%s\",\"messages\":[{\"role\":\"user\",\"content\":\"Hello\"}]}'\n", url, key, model)
	say("  millrace submit%s --stream \"Why is the sky blue?\"\n", flag)
	say("\nCtrl-C stops it; accepted jobs go on at the next start.\n")
	return b.String()
}
