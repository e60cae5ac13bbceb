package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/millrace/millrace/dispatcher"
	"github.com/millrace/millrace/internal/client"
	"github.com/millrace/millrace/internal/config"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/platform"
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
	workers    int
	// anyMetrics: nobody said where metrics are to be, so that any port will do.
	anyMetrics bool
}

func newUp(p *program) *cobra.Command {
	var f upFlags
	cmd := &cobra.Command{
		Use: "up", Short: "The whole platform in this one process",
		Long: `Run every role in this process, with the queue, the store and an engine inside it.

Without --engine the engine is the built-in emulator: it behaves like a GPU server in
time and in its API, and its text is made up. With --engine it is yours.
Jobs are kept in --data: what was accepted before a stop goes on at the next start.`,
		Example: `  millrace up
  millrace up --engine http://127.0.0.1:11434
  millrace up --workers 4 --profile a10-7b --speed 2
  millrace up --nats-url nats://127.0.0.1:4222 --redis-url redis://127.0.0.1:6379`,
		Args: args(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := f.check(); err != nil {
				return usageError(cmd, err)
			}
			f.anyMetrics = !cmd.Flags().Changed("metrics-listen")
			return up(cmd.Context(), p, &f)
		},
	}
	fs := cmd.Flags()
	f.api.add(fs)
	fs.StringVar(&f.data, "data", "", "`folder` for accepted jobs and answers (default ~/.local/share/millrace)")
	fs.StringVar(&f.durability, "durability", "always", "always syncs each job to disk before its 202; relaxed each 100 ms")
	f.eng.add(fs)
	fs.IntVar(&f.workers, "workers", 1, "how many workers, each with an emulator of its own unless --engine is given")
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
		base := os.Getenv("XDG_DATA_HOME")
		if base == "" {
			home, err := os.UserHomeDir()
			if err != nil && f.back.NATSURL == "" {
				return fmt.Errorf("finding a folder for the data: %w: name one with --data", err)
			}
			base = filepath.Join(home, ".local", "share")
		}
		f.data = filepath.Join(base, "millrace")
	}
	return errors.Join(
		f.back.check(), f.database.check(false), f.api.check(), checkFeed(&f.dispatcher), f.eng.check(), f.worker.check(), f.emu.check(),
		config.OneOf("durability", f.durability, "always", "relaxed"), config.Between("workers", f.workers, 1, 64),
	)
}

// platform is the configuration of the whole.
func (f *upFlags) platform() platform.Config {
	f.api.Retention, f.dispatcher.BatchMaxLine = f.back.Queue.Retention, f.api.MaxBody
	return platform.Config{
		Dir: f.data, Relaxed: f.durability == "relaxed", NATSListen: f.natsListen, NATSURL: f.back.NATSURL, RedisURL: f.back.RedisURL, BlobURL: f.back.BlobURL, DatabaseURL: f.database.url,
		Workers: f.workers, Engine: f.eng.Config, Emulator: f.emu.Config,
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
	if f.eng.URL == "" {
		say("  engine    %s: no model runs, its text is made up; behaves like %s at %gx speed\n", plural(f.workers, "built-in emulator"), f.emu.Profile, f.emu.Speed)
	} else {
		say("  engine    %s, %s beside it\n", f.eng.URL, plural(f.workers, "worker"))
	}
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
