package main

import (
	"context"
	"encoding/csv"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/millrace/millrace/autoscaler"
	"github.com/millrace/millrace/internal/config"
	"github.com/millrace/millrace/internal/platform"
	"github.com/millrace/millrace/internal/provider"
	"github.com/millrace/millrace/internal/provider/command"
	"github.com/millrace/millrace/internal/provider/docker"
	"github.com/millrace/millrace/internal/provider/kubernetes"
	"github.com/millrace/millrace/internal/scale"
)

func newAutoscaler(p *program) *cobra.Command {
	var (
		proc      processFlags
		back      backboneFlags
		db        databaseFlags
		role      autoscaler.Config
		nats      string
		redis     string
		data      string
		providers map[string]provider.Provider
	)
	cmd := &cobra.Command{
		Use: "autoscaler", Short: "Starts and stops workers ahead of the load",
		Long: `Run the autoscaler alone. Any number may run: one leads, the others stand by and
take over within seconds. Workers live on when it ends, and the next one finds them.

Its pools come from --pools, which is read again whenever it changes, and from
/admin/v1/pools. Workers run as processes of this machine, in Docker, in Kubernetes or
wherever your own commands start them; they reach NATS and Redis as --join-nats-url and
--join-redis-url say, and get the other settings of workers from here: those of the
environment and of --config.`,
		Example: "  MILLRACE_DATABASE_URL=postgres://millrace:secret@db/millrace millrace autoscaler --pools pools.yaml --nats-url nats://nats:4222 --redis-url redis://redis:6379",
		Args:    args(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := errors.Join(back.check(), db.check(true)); err != nil {
				return usageError(cmd, err)
			}
			if data == "" {
				base, err := dataHome()
				if err != nil {
					return err
				}
				data = filepath.Join(base, "autoscaler")
			}
			join, err := workerSettings(cmd, p)
			if err != nil {
				return err
			}
			reach := back.BackboneConfig
			for _, u := range []struct {
				url  *string
				join string
			}{{&reach.NATSURL, nats}, {&reach.RedisURL, redis}} {
				if u.join != "" {
					*u.url = u.join
				}
			}
			maps.Copy(join, reach.Join())
			back.DatabaseURL = db.url
			defer func() {
				for _, one := range providers {
					_ = one.Close() // workers run on
				}
			}()
			return runRole(cmd, p, "autoscaler", &proc, &back, func(b *platform.Backbone, reg prometheus.Registerer, log *slog.Logger) (service, error) {
				providers = allProviders(data, join, log)
				return b.Autoscaler(role, providers, reg, log)
			})
		},
	}
	fs := cmd.Flags()
	fs.StringVar(&role.PoolsFile, "pools", "", "YAML `file` of pools (default none: pools come from the API alone)")
	fs.StringVar(&nats, "join-nats-url", "", "`URL` at which workers reach NATS (default --nats-url)")
	fs.StringVar(&redis, "join-redis-url", "", "`URL` at which workers reach Redis (default --redis-url)")
	fs.StringVar(&data, "data", "", "`folder` for the state and the logs of workers that are processes of this machine (default ~/.local/share/millrace/autoscaler)")
	back.add(fs, defaultNATS, defaultRedis)
	db.add(fs, "required")
	proc.add(fs, "info")
	return cmd
}

// allProviders are those that pools may name.
func allProviders(data string, join provider.Join, log *slog.Logger) map[string]provider.Provider {
	return map[string]provider.Provider{
		"process":    &lazy{open: func() (provider.Provider, error) { return platform.ProcessProvider(data, join, false, log) }},
		"docker":     docker.New(join, log.With("provider", "docker")),
		"kubernetes": kubernetes.New(kubernetes.Config{}),
		"command":    command.New(command.Config{Join: join}, log.With("provider", "command")),
	}
}

// lazy is a provider that is made when it is first used: a machine that lacks what it needs can use the others.
type lazy struct {
	open func() (provider.Provider, error)

	mu   sync.Mutex        // guards made
	made provider.Provider // nil before
}

func (l *lazy) get() (provider.Provider, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.made != nil {
		return l.made, nil
	}
	made, err := l.open()
	if err != nil {
		return nil, err
	}
	l.made = made
	return made, nil
}

func (l *lazy) List(ctx context.Context, p *scale.Pool) ([]provider.Instance, error) {
	made, err := l.get()
	if err != nil {
		return nil, err
	}
	return made.List(ctx, p)
}

func (l *lazy) Start(ctx context.Context, p *scale.Pool, name string, total int) error {
	made, err := l.get()
	if err != nil {
		return err
	}
	return made.Start(ctx, p, name, total)
}

func (l *lazy) Stop(ctx context.Context, p *scale.Pool, name string) error {
	made, err := l.get()
	if err != nil {
		return err
	}
	return made.Stop(ctx, p, name)
}

func (l *lazy) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.made == nil {
		return nil
	}
	return l.made.Close()
}

// perWorker are the settings of a worker that its provider gives it, or that are another process's own.
var perWorker = []string{"help", "name", "engine", "engine-metrics", "serve", "gpus", "tensor-parallel", "pipeline-parallel", "metrics-listen", "pprof", "nats-url", "redis-url", "database-url"}

// workerSettings are the variables for the workers that this command starts: all settings of a worker that are set here, by a flag of cmd, in the environment or in the file, but for those that differ from worker to worker.
func workerSettings(cmd *cobra.Command, p *program) (provider.Join, error) {
	root := cmd.Root()
	file, err := root.PersistentFlags().GetString("config")
	if err != nil {
		return nil, err
	}
	if v, ok := p.lookup(config.Prefix + "CONFIG"); ok && file == "" {
		file = v
	}
	fs := newWorker(p).Flags()
	if err := config.Load(fs, config.Sources{File: file, Known: settings(root), Lookup: p.lookup}); err != nil {
		return nil, &exitError{exitUsage, err}
	}
	// One whose engine crashes again and again is to fail, so that its provider sees it.
	join := provider.Join{config.Prefix + "MAX_ENGINE_EXITS": "3"}
	add := func(f *pflag.Flag) {
		if f.Changed && !slices.Contains(perWorker, f.Name) {
			join[config.Variables(f)[0]] = flagText(f)
		}
	}
	fs.VisitAll(add)
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if fs.Lookup(f.Name) != nil {
			add(f)
		}
	})
	if blobs := join[config.Prefix+"BLOB_URL"]; strings.HasPrefix(blobs, "s3:") {
		for _, v := range os.Environ() {
			if name, value, _ := strings.Cut(v, "="); strings.HasPrefix(name, "AWS_") {
				join[name] = value
			}
		}
	}
	return join, nil
}

// flagText is a flag's value as it is written in the environment.
func flagText(f *pflag.Flag) string {
	list, ok := f.Value.(pflag.SliceValue)
	if !ok {
		return f.Value.String()
	}
	var text strings.Builder
	w := csv.NewWriter(&text)
	_ = w.Write(list.GetSlice()) // a strings.Builder takes everything
	w.Flush()
	return strings.TrimSpace(text.String())
}

// dataHome is the folder for what is kept on this machine.
func dataHome() (string, error) {
	base := os.Getenv("XDG_DATA_HOME")
	if base == "" {
		home, err := os.UserHomeDir()
		if err != nil {
			return "", fmt.Errorf("finding a folder for the data: %w: name one with --data", err)
		}
		base = filepath.Join(home, ".local", "share")
	}
	return filepath.Join(base, "millrace"), nil
}
