package main

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/millrace/millrace/api"
	"github.com/millrace/millrace/internal/blob"
	"github.com/millrace/millrace/internal/config"
	"github.com/millrace/millrace/internal/engine"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
	"github.com/millrace/millrace/internal/platform"
	"github.com/millrace/millrace/internal/results"
	"github.com/millrace/millrace/internal/schedule"
	"github.com/millrace/millrace/internal/telemetry"
	"github.com/millrace/millrace/worker"
)

// off is what switches a listener off: an empty variable counts as not set.
const off = "off"

// processFlags are those of every process that runs for long.
type processFlags struct {
	log     telemetry.LogConfig
	metrics string
	pprof   bool
}

func (c *processFlags) add(fs *pflag.FlagSet, level string) {
	fs.StringVar(&c.log.Level, "log-level", level, "debug, info, warn or error")
	fs.StringVar(&c.log.Format, "log-format", "", "text or json (default text on a terminal, else json)")
	fs.StringVar(&c.metrics, "metrics-listen", "127.0.0.1:9464", "`address` of /metrics, /healthz and /readyz; off for none")
	fs.BoolVar(&c.pprof, "pprof", false, "serve /debug/pprof/ there too")
}

func (c *processFlags) logger(p *program) (*slog.Logger, error) {
	log, err := telemetry.NewLogger(p.err, c.log)
	if err != nil {
		return nil, &exitError{exitUsage, err}
	}
	return log, nil
}

// backboneFlags say where the servers are, and how much they may hold. They are the same for every process of a platform.
type backboneFlags struct{ platform.BackboneConfig }

// add adds the flags; nats and redis are the defaults of the servers' URLs.
func (c *backboneFlags) add(fs *pflag.FlagSet, nats, redis string) {
	where := ""
	if nats == "" {
		where = " (default one inside this process)"
	}
	fs.StringVar(&c.NATSURL, "nats-url", nats, "`URL` of NATS, or several with commas"+where)
	fs.StringVar(&c.RedisURL, "redis-url", redis, "`URL` of Redis"+where)
	c.addBlobs(fs, nats == "")
	fs.IntVar(&c.Queue.Replicas, "replicas", 1, "copies of each stream: 1, or 3 on a NATS cluster")
	fs.DurationVar(&c.Queue.Retention, "retention", 7*24*time.Hour, "how long a job's answer is kept after its deadline")
	fs.Var((*size)(&c.Queue.WorkMaxBytes), "work-max-bytes", "most `bytes` of one model's waiting jobs (default 8GiB; 2GiB in an embedded NATS)")
	fs.Var((*size)(&c.Queue.DoneMaxBytes), "done-max-bytes", "most `bytes` of kept answers (default 16GiB; 4GiB in an embedded NATS)")
	fs.Var((*size)(&c.Queue.LiveMaxBytes), "live-max-bytes", "most `bytes` of one model's requests that wait on their connections, in NATS's memory (default 256MiB; 64MiB embedded)")
}

// addBlobs adds where files and other large bytes are kept.
func (c *backboneFlags) addBlobs(fs *pflag.FlagSet, embedded bool) {
	where := "in NATS"
	if embedded {
		where = "the folder of --data, or in NATS with --nats-url"
	}
	fs.StringVar(&c.BlobURL, "blob-url", "", "`URL` of the store for files: dir:/path on a disk that all processes share, or s3://bucket/prefix?endpoint=https://…&region=…, with AWS_ACCESS_KEY_ID and so on in the environment (default "+where+")")
}

func (c *backboneFlags) check() error {
	c.Results.Retention = c.Queue.Retention
	c.Version = buildVersion()
	return errors.Join(
		config.OneOf("replicas", strconv.Itoa(c.Queue.Replicas), "1", "3", "5"),
		config.AtLeast("retention", c.Queue.Retention, time.Minute), blob.CheckURL(c.BlobURL),
	)
}

// databaseFlags say where the database is. A worker needs none.
type databaseFlags struct{ url string }

func (c *databaseFlags) add(fs *pflag.FlagSet, or string) {
	fs.StringVar(&c.url, "database-url", "", "`URL` of the database: postgres://user:password@host:5432/name, better set in MILLRACE_DATABASE_URL, where ps does not show it; or sqlite:/path, a file for the processes of one machine ("+or+")")
}

// check is nil if a database is named, or need not be.
func (c *databaseFlags) check(needed bool) error {
	switch {
	case c.url == "" && needed:
		return errors.New("the database is missing: name it with --database-url or in MILLRACE_DATABASE_URL")
	case c.url == "":
		return nil
	}
	return ledger.CheckURL(c.url)
}

// apiFlags are those of the API's role.
type apiFlags struct{ api.Config }

func (c *apiFlags) add(fs *pflag.FlagSet) {
	fs.StringVar(&c.Listen, "listen", "127.0.0.1:8080", "`address` of the API")
	fs.StringVar(&c.APIKey, "api-key", "", "`key` that clients must send; better set in MILLRACE_API_KEY, where ps does not show it")
	fs.StringVar(&c.AdminKey, "admin-key", "", "`key` for /admin, which opens all else too; without one, /admin is closed to holders of --api-key")
	fs.BoolVar(&c.Insecure, "insecure", false, "listen beyond this machine without any key")
	c.MaxBody, c.MaxBodies, c.MaxFile = 32<<20, 512<<20, 200<<20
	fs.Var((*size)(&c.MaxBody), "max-body", "most `bytes` of one request")
	fs.Var((*size)(&c.MaxBodies), "max-bodies", "most `bytes` of all large requests that are being read")
	fs.Var((*size)(&c.MaxFile), "max-file", "most `bytes` of one uploaded file")
	fs.IntVar(&c.MaxHeld, "max-held", 10_000, "most calls that wait on their connections")
	fs.DurationVar(&c.DefaultDeadline, "default-deadline", 24*time.Hour, "total time of a job that asks for none")
	fs.DurationVar(&c.MaxDeadline, "max-deadline", 7*24*time.Hour, "most total time that a job may ask for")
	fs.DurationVar(&c.DefaultRunTimeout, "default-run-timeout", time.Hour, "most time of one attempt, of a job that asks for none")
	fs.DurationVar(&c.DrainTimeout, "drain-timeout", 30*time.Second, "how long open calls may go on after the order to stop")
	c.addLimits(fs)
	fs.DurationVar(&c.MaxInteractiveWait, "max-interactive-wait", 30*time.Second, "longest expected wait of a plain call when all workers are busy: beyond it 429; 0 for no bound")
	fs.BoolVar(&c.SessionFromBody, "session-from-body", false, "take a call's session from its prompt_cache_key or user")
}

// addLimits adds the limits on what is accepted and has not ended: --max-queued-jobs is one tenant's in one model, …-tenant one tenant's in all, …-model all tenants' in one.
func (c *apiFlags) addLimits(fs *pflag.FlagSet) {
	for _, l := range []struct {
		suffix, whose string
		jobs          int64
		amount        *results.Amount
	}{
		{"", "of one tenant and model", 1_000_000, &c.Limits.Queue},
		{"-tenant", "of one tenant, all models together", 0, &c.Limits.Tenant},
		{"-model", "of one model, all tenants together", 0, &c.Limits.Model},
	} {
		fs.Int64Var(&l.amount.Jobs, "max-queued-jobs"+l.suffix, l.jobs, "most accepted jobs "+l.whose+" that have not ended; 0 for no limit")
		fs.Var((*size)(&l.amount.Bytes), "max-queued-bytes"+l.suffix, "most `bytes` of their requests "+l.whose+" (default no limit)")
		fs.Int64Var((*int64)(&l.amount.Tokens), "max-queued-tokens"+l.suffix, 0, "most `tokens` that they are expected to need, "+l.whose+"; 0 for no limit")
	}
}

func (c *apiFlags) check() error {
	var errs []error
	for suffix, a := range map[string]results.Amount{"": c.Limits.Queue, "-tenant": c.Limits.Tenant, "-model": c.Limits.Model} {
		errs = append(errs, config.AtLeast("max-queued-jobs"+suffix, a.Jobs, 0), config.AtLeast("max-queued-tokens"+suffix, a.Tokens, 0))
	}
	return errors.Join(append(
		errs, config.AtLeast("max-interactive-wait", c.MaxInteractiveWait, 0), config.AtLeast("max-held", c.MaxHeld, 1), config.AtLeast("max-body", c.MaxBody, 1), config.AtLeast("max-file", c.MaxFile, 1),
		config.AtLeast("max-bodies", c.MaxBodies, 1), config.AtLeast("default-deadline", c.DefaultDeadline, time.Second), config.AtLeast("max-deadline", c.MaxDeadline, time.Second),
		config.AtLeast("default-run-timeout", c.DefaultRunTimeout, time.Second), config.AtLeast("drain-timeout", c.DrainTimeout, time.Millisecond),
	)...)
}

// engineFlags say which engine a worker sits beside.
type engineFlags struct{ engine.Config }

func (c *engineFlags) add(fs *pflag.FlagSet) {
	fs.StringVar(&c.URL, "engine", "", "`URL` of an OpenAI-compatible engine, as http://127.0.0.1:11434")
	fs.StringVar((*string)(&c.Kind), "engine-kind", "", strings.Join(engineKinds(), ", ")+" (default what it looks like)")
	fs.StringVar(&c.MetricsURL, "engine-metrics", "", "`URL` of the engine's metrics, where they are not at the place usual for its kind")
	fs.StringVar(&c.APIKey, "engine-api-key", "", "`key` for the engine; better set in MILLRACE_ENGINE_API_KEY")
	fs.Int64Var((*int64)(&c.KVTokens), "kv-tokens", 32768, "`tokens` that the engine's KV cache holds, where it does not tell")
	fs.IntVar(&c.MaxConcurrency, "max-concurrency", 8, "most running requests, where the engine does not tell")
}

func (c *engineFlags) check() error {
	c.URL = strings.TrimSuffix(strings.TrimRight(c.URL, "/"), "/v1")
	var kind error
	if c.Kind != "" {
		kind = config.OneOf("engine-kind", string(c.Kind), engineKinds()...)
	}
	return errors.Join(kind, config.AtLeast("kv-tokens", c.KVTokens, 1), config.AtLeast("max-concurrency", c.MaxConcurrency, 1))
}

func engineKinds() []string {
	var names []string
	for _, k := range engine.Kinds() {
		names = append(names, string(k))
	}
	return names
}

// workerFlags are those of a worker, its engine aside.
type workerFlags struct {
	worker.Config
	serve     []string
	cacheSalt bool
}

func (c *workerFlags) add(fs *pflag.FlagSet) {
	fs.StringSliceVar(&c.serve, "serve", nil, "`models` to serve, of those that the engine has (default all)")
	fs.DurationVar(&c.Drain, "drain", 30*time.Second, "how long running jobs may go on after the order to stop")
	fs.DurationVar(&c.StallTimeout, "stall-timeout", time.Minute, "after how long without progress an engine counts as stalled")
	fs.DurationVar(&c.ProbeTimeout, "probe-timeout", 30*time.Second, "most time for the one token that proves an engine ready")
	fs.IntVar(&c.FailuresInRow, "max-failures", 3, "jobs in a row whose calls fail before an engine gets no more work until a probe passes")
	fs.DurationVar(&c.SessionTTL, "session-ttl", 30*time.Minute, "how long after its last turn a session's calls go to the worker that has it in its KV cache")
	fs.DurationVar(&c.PrefixTTL, "prefix-ttl", 10*time.Minute, "the same for prompts without a session that begin alike")
	fs.BoolVar(&c.cacheSalt, "cache-salt", true, "keep tenants' prompts apart in the KV cache of an engine that knows cache_salt (vLLM)")
	fs.IntVar(&c.MaxAttempts, "max-attempts", 5, "how often a job is tried whose engine fails")
	c.Schedule = schedule.Defaults()
	fs.StringVar((*string)(&c.Schedule.Order), "order", string(c.Schedule.Order), "which job of a class starts first: oldest, or shortest (the predicted time, less the time waited)")
	fs.Float64Var(&c.Schedule.Reserve, "kv-reserve", c.Schedule.Reserve, "`share` of the KV cache that is never granted")
	fs.Float64Var(&c.Schedule.Trickle, "batch-trickle", c.Schedule.Trickle, "`share` of what starts, in tokens, that the batch class gets while higher classes wait")
	fs.Int64Var((*int64)(&c.Schedule.TokenBudget), "token-budget", int64(c.Schedule.TokenBudget), "most prompt `tokens` that are started and not yet computed")
	fs.Int64Var((*int64)(&c.Schedule.DefaultOutput), "default-output", int64(c.Schedule.DefaultOutput), "`tokens` expected of an answer before any was seen")
	fs.Var((*degree)(&c.TensorParallel), "tensor-parallel", "`GPUs` that share each layer of the engine's model (default what the engine tells)")
	fs.Var((*degree)(&c.PipelineParallel), "pipeline-parallel", "`stages` of the engine's model on GPUs in a row (default what the engine tells)")
	fs.Var((*degree)(&c.DataParallel), "data-parallel", "`ranks` of the engine, each with a KV cache of its own (default what the engine tells)")
	fs.StringSliceVar(&c.GPUs, "gpus", nil, "`GPUs` of the engine by index or UUID, or all, or none; a failed one stops the worker (default CUDA_VISIBLE_DEVICES, else all of this machine if the shape takes as many)")
}

func (c *workerFlags) check() error {
	c.NoCacheSalt = !c.cacheSalt
	for _, m := range c.serve {
		c.Models = append(c.Models, job.Model(m))
	}
	return errors.Join(
		config.AtLeast("drain", c.Drain, time.Millisecond), config.AtLeast("stall-timeout", c.StallTimeout, time.Second),
		config.AtLeast("probe-timeout", c.ProbeTimeout, time.Second), config.Between("max-attempts", c.MaxAttempts, 1, 100),
		config.AtLeast("session-ttl", c.SessionTTL, time.Second), config.AtLeast("prefix-ttl", c.PrefixTTL, time.Second),
		config.Between("max-failures", c.FailuresInRow, 1, 1000),
		config.OneOf("order", string(c.Schedule.Order), string(schedule.Oldest), string(schedule.Shortest)),
		c.checkShares(),
		config.AtLeast("token-budget", c.Schedule.TokenBudget, 1), config.AtLeast("default-output", c.Schedule.DefaultOutput, 1), c.checkGPUs(),
	)
}

// checkShares checks the parts of a whole. A trickle of 0 is none, which the scheduler calls negative: its own 0 is the default.
func (c *workerFlags) checkShares() error {
	var errs []error
	if v := c.Schedule.Reserve; !(v > 0 && v < 1) {
		errs = append(errs, fmt.Errorf("kv-reserve is %v: it must be above 0 and below 1", v))
	}
	if v := c.Schedule.Trickle; !(v >= 0 && v <= 1) {
		errs = append(errs, fmt.Errorf("batch-trickle is %v: it must be between 0 and 1", v))
	}
	if c.Schedule.Trickle == 0 {
		c.Schedule.Trickle = -1
	}
	return errors.Join(errs...)
}

// checkGPUs takes the GPUs from CUDA_VISIBLE_DEVICES where none were named.
func (c *workerFlags) checkGPUs() error {
	if len(c.GPUs) == 0 {
		c.GPUs = visibleToCUDA(os.Getenv("CUDA_VISIBLE_DEVICES"))
		return nil
	}
	for i, name := range c.GPUs {
		c.GPUs[i] = strings.TrimSpace(name)
		if strings.HasPrefix(c.GPUs[i], "-") {
			return fmt.Errorf("gpus holds %q: it must be an index from 0 on, a UUID, %s or %s", name, worker.AllGPUs, worker.NoGPUs)
		}
	}
	return nil
}

// visibleToCUDA reads a value of CUDA_VISIBLE_DEVICES: CUDA sees nothing from a negative index on, and everything if the variable is not set.
func visibleToCUDA(list string) []string {
	if list == "" {
		return nil
	}
	names := strings.Split(list, ",")
	for i := range names {
		if names[i] = strings.TrimSpace(names[i]); names[i] == "" || names[i][0] == '-' {
			names = names[:i]
			break
		}
	}
	if len(names) == 0 {
		return []string{worker.NoGPUs}
	}
	return names
}

// degree is a flag of how many GPUs share something: not set, or at least 1.
type degree int

func (d *degree) Set(text string) error {
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 || n > 1024 {
		return fmt.Errorf("%q is no whole number between 1 and 1024", text)
	}
	*d = degree(n)
	return nil
}

func (d *degree) String() string {
	if *d == 0 {
		return ""
	}
	return strconv.Itoa(int(*d))
}

func (d *degree) Type() string { return "count" }

// size is a flag in bytes, which may be written with a unit.
type size int64

var units = []struct {
	name  string
	bytes int64
}{{"TiB", 1 << 40}, {"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}, {"TB", 1e12}, {"GB", 1e9}, {"MB", 1e6}, {"kB", 1e3}, {"B", 1}, {"", 1}}

func (s *size) Set(text string) error {
	for _, u := range units {
		number, ok := strings.CutSuffix(text, u.name)
		if !ok {
			continue
		}
		n, err := strconv.ParseFloat(strings.TrimSpace(number), 64)
		if err != nil || n < 0 || math.IsNaN(n) || n*float64(u.bytes) > math.MaxInt64/2 {
			return fmt.Errorf("%q is not a size like 8GiB", text)
		}
		*s = size(n * float64(u.bytes))
		return nil
	}
	return nil // not reached: the last unit fits everything
}

func (s *size) String() string {
	if *s == 0 {
		return ""
	}
	for _, u := range units {
		if u.bytes > 0 && int64(*s)%u.bytes == 0 {
			return fmt.Sprint(int64(*s)/u.bytes) + u.name
		}
	}
	return fmt.Sprint(int64(*s))
}

func (s *size) Type() string { return "bytes" }
