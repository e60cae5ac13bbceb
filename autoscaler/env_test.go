package autoscaler_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/millrace/millrace/autoscaler"
	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/embedded"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
	"github.com/millrace/millrace/internal/provider"
	"github.com/millrace/millrace/internal/scale"
	"github.com/millrace/millrace/internal/testenv"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, testenv.NATSLeaves()...) }

const (
	model job.Model = "m"
	// patience bounds what a test waits for. Machines that are busy make it long; nothing takes it when all is well.
	patience = 60 * time.Second
)

// env is a platform without its roles: NATS, a database, what a dispatcher and an API would say, and a cloud of workers.
type env struct {
	testing.TB
	nats   *embedded.NATS
	url    string
	ledger *ledger.Store
	seen   *cluster.Cluster // of a process that is none of the roles
	cloud  *cloud
	// providers of all autoscalers of the test.
	providers map[string]provider.Provider

	deposed atomic.Bool // no dispatcher leads

	mu      sync.Mutex // guards what follows
	queues  []cluster.QueueInfo
	age     float64 // of queues
	traffic []cluster.Traffic
}

func newEnv(t testing.TB) *env {
	t.Helper()
	e := &env{TB: t, nats: testenv.NATS(t, func(c *embedded.NATSConfig) { c.Relaxed = true }), url: "sqlite:" + filepath.Join(t.TempDir(), "ledger.db")}
	e.ledger = testenv.OpenLedger(t, e.url)
	e.seen = e.cluster()
	e.cloud = newCloud(e)
	e.providers = map[string]provider.Provider{"process": e.cloud, "command": e.cloud.elsewhere}
	e.queues = []cluster.QueueInfo{{Model: model}}
	e.announce(func() cluster.Heartbeat {
		e.mu.Lock()
		defer e.mu.Unlock()
		return cluster.Heartbeat{ID: "d", Role: cluster.RoleDispatcher, Epoch: "d", Leader: !e.deposed.Load(), Started: 1, Queues: slices.Clone(e.queues), QueuesAge: e.age}
	})
	e.announce(func() cluster.Heartbeat {
		e.mu.Lock()
		defer e.mu.Unlock()
		return cluster.Heartbeat{ID: "a", Role: cluster.RoleAPI, Epoch: "a", Started: 1, Traffic: slices.Clone(e.traffic)}
	})
	return e
}

func (e *env) ok(err error) {
	e.Helper()
	if err != nil {
		e.Fatal(err)
	}
}

// cluster opens a process's own access.
func (e *env) cluster() *cluster.Cluster {
	e.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, err := cluster.Open(ctx, testenv.Connect(e, e.nats), cluster.Config{Beat: 50 * time.Millisecond, Silence: 20 * time.Second}, testenv.Log(e))
	e.ok(err)
	e.Cleanup(c.Close)
	return c
}

// announce sends heartbeats until the test ends, or the returned function says farewell.
func (e *env) announce(beat func() cluster.Heartbeat) (farewell func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- e.seen.Announce(ctx, beat) }()
	farewell = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			e.Error(err)
		}
	})
	e.Cleanup(farewell)
	return farewell
}

// wait puts so much work into the queue of the model: jobs that wait, of so many tokens each, and jobs that workers have.
func (e *env) wait(jobs int, each job.Tokens, delivered int) {
	e.mu.Lock()
	e.queues = []cluster.QueueInfo{{
		Model: model, ByClass: map[job.Class]cluster.Backlog{job.Standard: {Jobs: jobs + delivered, Tokens: job.Tokens(jobs+delivered) * each}},
		Delivered: map[job.Class]int{job.Standard: delivered},
	}}
	e.mu.Unlock()
	e.seen.Nudge()
}

// both puts work of so many jobs of 100 tokens into two models' queues.
func (e *env) both(jobs int) {
	e.mu.Lock()
	e.queues = nil
	for _, m := range []job.Model{model, "n"} {
		e.queues = append(e.queues, cluster.QueueInfo{Model: m, ByClass: map[job.Class]cluster.Backlog{job.Standard: {Jobs: jobs, Tokens: job.Tokens(jobs) * 100}}})
	}
	e.mu.Unlock()
	e.seen.Nudge()
}

// describe is a pool's description: the usual one, changed.
func (e *env) describe(change func(*scale.Pool)) *scale.Pool {
	e.Helper()
	p := &scale.Pool{
		Name: "p", Models: []job.Model{model}, Provider: "process", Engine: scale.Engine{Command: []string{"engine"}}, Max: 8, TokensPerSecond: 100,
		ColdStart: scale.Duration(time.Second), Idle: scale.Duration(300 * time.Millisecond), Cooldown: scale.Duration(300 * time.Millisecond),
		Headroom: 0.2, Drain: scale.Duration(10 * time.Minute), TargetWait: map[job.Class]scale.Duration{job.Standard: scale.Duration(time.Second)},
	}
	if change != nil {
		change(p)
	}
	raw, err := json.Marshal(p)
	e.ok(err)
	p, err = scale.ParsePool(raw)
	e.ok(err)
	return p
}

// pool makes one by the API.
func (e *env) pool(change func(*scale.Pool)) *scale.Pool {
	e.Helper()
	p := e.describe(change)
	raw, err := json.Marshal(p)
	e.ok(err)
	_, err = e.ledger.CreatePool(context.Background(), ledger.Pool{Name: p.Name, Spec: raw})
	e.ok(err)
	return p
}

// update changes one by the API.
func (e *env) update(p *scale.Pool) {
	e.Helper()
	raw, err := json.Marshal(p)
	e.ok(err)
	_, err = e.ledger.UpdatePool(context.Background(), ledger.Pool{Name: p.Name, Spec: raw})
	e.ok(err)
}

// running is an autoscaler that runs.
type running struct {
	*autoscaler.Autoscaler
	registry *prometheus.Registry
	cancel   context.CancelFunc
	done     chan struct{}
}

// stop ends it as a process ends that is told to.
func (r *running) stop() {
	r.cancel()
	<-r.done
}

// run starts an autoscaler of its own process.
func (e *env) run(cfg autoscaler.Config, change ...func(*autoscaler.Timing)) *running {
	e.Helper()
	return e.runOn(e.cluster(), e.ledger, cfg, nil, change...)
}

func (e *env) runOn(c *cluster.Cluster, l *ledger.Store, cfg autoscaler.Config, prepare func(*autoscaler.Autoscaler), change ...func(*autoscaler.Timing)) *running {
	e.Helper()
	r := &running{registry: prometheus.NewRegistry(), done: make(chan struct{})}
	if cfg.Tick == 0 {
		cfg.Tick = 20 * time.Millisecond
	}
	var err error
	r.Autoscaler, err = autoscaler.New(cfg, autoscaler.Deps{
		Cluster: c, Ledger: l, Providers: e.providers, Registerer: r.registry, Log: e.log(), Process: fmt.Sprintf("as-%p", r),
	})
	e.ok(err)
	r.Hurry(change...)
	if prepare != nil {
		prepare(r.Autoscaler)
	}
	ctx, cancel := context.WithCancel(context.Background())
	r.cancel = cancel
	go func() {
		defer close(r.done)
		if err := r.Run(ctx); err != nil {
			e.Error(err)
		}
	}()
	e.Cleanup(r.stop)
	return r
}

func (e *env) log() *slog.Logger {
	level := slog.LevelError + 1 // tests make much fail
	if os.Getenv("MILLRACE_TEST_LOG") != "" {
		level = slog.LevelDebug
	}
	return slog.New(slog.NewTextHandler(e.Output(), &slog.HandlerOptions{Level: level}))
}

// metric is a metric's value, summed over its labels.
func (r *running) metric(t testing.TB, name string) float64 {
	t.Helper()
	families, err := r.registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	sum := 0.0
	for _, f := range families {
		if f.GetName() == name {
			for _, m := range f.GetMetric() {
				sum += m.GetGauge().GetValue() + m.GetCounter().GetValue()
			}
		}
	}
	return sum
}

// eventually waits until ok, asking again and again.
func (e *env) eventually(what string, ok func() bool) {
	e.Helper()
	deadline := time.Now().Add(patience)
	for !ok() {
		if time.Now().After(deadline) {
			e.Fatalf("%s: not within %s; %s", what, patience, e.state())
		}
		time.Sleep(5 * time.Millisecond) // between two looks at what other processes say
	}
}

// always fails if ok is ever false for a number of decisions of the pool.
func (e *env) always(what string, r *running, looks int, ok func() bool) {
	e.Helper()
	for range looks {
		if !ok() {
			e.Fatalf("%s: not so; %s", what, e.state())
		}
		time.Sleep(20 * time.Millisecond) // a tick
	}
}

func (e *env) state() string {
	launches, err := e.ledger.Launches(context.Background())
	decisions, _, _ := e.ledger.Scalings(context.Background(), "", 0, 5)
	text := ""
	for _, d := range decisions {
		text += "\n  " + string(d.Decision)
	}
	return fmt.Sprintf("launches %+v (%v); cloud %v; decisions:%s", launches, err, e.cloud.states(), text)
}

func (e *env) launches() []ledger.Launch {
	e.Helper()
	all, err := e.ledger.Launches(context.Background())
	e.ok(err)
	return all
}

// decisions of all pools, the oldest first.
func (e *env) decisions() []scale.Decision {
	e.Helper()
	rows, _, err := e.ledger.Scalings(context.Background(), "", 0, 1000)
	e.ok(err)
	var all []scale.Decision
	for _, r := range slices.Backward(rows) {
		var d scale.Decision
		e.ok(json.Unmarshal(r.Decision, &d))
		all = append(all, d)
	}
	return all
}

// info is what the leader's heartbeat says of a pool, without a name if it says nothing.
func (e *env) info(name string) cluster.PoolInfo {
	for _, m := range e.seen.Members() {
		for _, p := range m.Pools {
			if m.Role == cluster.RoleAutoscaler && m.Leader && p.Name == name {
				return p
			}
		}
	}
	return cluster.PoolInfo{}
}

// cloud is a provider whose workers are heartbeats. It enforces the rules: a worker that has jobs is not stopped, nor one that was not drained.
type cloud struct {
	e *env
	// shared: it does not know which pool an instance is of, as with a workload of Kubernetes.
	shared bool
	// elsewhere is another provider, with workers of its own.
	elsewhere *cloud
	making    sync.Mutex // held while an instance is made

	mu        sync.Mutex // guards what follows
	instances map[string]*instance
	asked     []string // the names of all calls of Start
	stops     []string // and of Stop, that were carried out
	peak      int
	broken    []string // rules that were broken
	// What it does to those who call. Each may be nil.
	onStart func(name string) (applied bool, err error)
	onStop  func(name string) (applied bool, err error)
	onList  func(ctx context.Context) error
	// room is how many it has room for, 0 for any number.
	room int
	// held: workers stay starting until they are told to be ready. crash: they fail instead of starting.
	held, crash bool
	// own: it names its instances itself. ordered: only the last one can be stopped.
	own, ordered bool
	// rough: busy workers may be stopped.
	rough bool
	n     int
}

type instance struct {
	pool, name string
	state      provider.State
	reason     string
	created    time.Time
	beat       cluster.WorkerInfo
	silence    func()
	drained    time.Time
	limit      time.Duration // of the last order to drain
}

func newCloud(e *env) *cloud {
	c := &cloud{e: e, instances: map[string]*instance{}}
	c.elsewhere = &cloud{e: e, instances: map[string]*instance{}}
	return c
}

func (c *cloud) List(ctx context.Context, p *scale.Pool) ([]provider.Instance, error) {
	c.mu.Lock()
	hook := c.onList
	c.mu.Unlock()
	if hook != nil {
		if err := hook(ctx); err != nil {
			return nil, err
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	var all []provider.Instance
	for _, name := range slices.Sorted(maps.Keys(c.instances)) {
		if i := c.instances[name]; c.shared || i.pool == p.Name {
			if n := len(all); n > 0 && c.ordered {
				all[n-1].After = name
			}
			all = append(all, provider.Instance{Name: i.name, State: i.state, Created: i.created, Reason: i.reason})
		}
	}
	return all, nil
}

func (c *cloud) Start(ctx context.Context, p *scale.Pool, name string, total int) error {
	c.mu.Lock()
	hook := c.onStart
	c.asked = append(c.asked, name)
	c.mu.Unlock()
	applied, err := true, error(nil)
	if hook != nil {
		applied, err = hook(name)
	}
	if !applied {
		return err
	}
	c.making.Lock()
	defer c.making.Unlock()
	c.mu.Lock()
	there := 0
	for _, i := range c.instances {
		if c.shared || i.pool == p.Name {
			there++
		}
	}
	switch {
	case c.own && there >= total, c.instances[name] != nil:
		c.mu.Unlock()
		return err
	case c.room > 0 && there >= c.room:
		c.mu.Unlock()
		return fmt.Errorf("no GPU is free: %w", provider.ErrCapacity)
	}
	if c.own {
		c.n++
		name = fmt.Sprintf("%s-pod-%d", p.Name, c.n)
	}
	c.mu.Unlock()
	c.create(p, name)
	return err
}

// create makes an instance, with a worker that beats unless it crashes.
func (c *cloud) create(p *scale.Pool, name string) {
	c.mu.Lock()
	i := &instance{pool: p.Name, name: name, state: provider.Running, created: time.Now(), silence: func() {}}
	i.beat = cluster.WorkerInfo{Name: name, State: cluster.Ready, Models: p.Models, Free: 1000, StateSince: float64(time.Now().UnixMilli()) / 1000}
	if c.held {
		i.beat.State = cluster.Starting
	}
	if c.crash {
		i.state, i.reason = provider.Failed, "exit status 1"
	}
	c.instances[name] = i
	there := 0
	for _, other := range c.instances {
		if other.pool == p.Name {
			there++
		}
	}
	c.peak = max(c.peak, there)
	fails := c.crash
	c.mu.Unlock()
	if fails {
		return
	}
	id := "w-" + name
	ctx, cancel := context.WithCancel(context.Background())
	if err := c.e.seen.OnDrain(ctx, id, func(limit time.Duration) {
		c.set(name, func(i *instance) {
			i.limit = limit
			if i.drained.IsZero() {
				i.drained, i.beat.State = time.Now(), cluster.Draining
			}
		})
	}); err != nil {
		c.e.Error(err)
	}
	if err := c.e.seen.OnYield(ctx, id, func(yield bool) { c.set(name, func(i *instance) { i.beat.Yields = yield }) }); err != nil {
		c.e.Error(err)
	}
	silence := c.e.announce(func() cluster.Heartbeat {
		c.mu.Lock()
		defer c.mu.Unlock()
		info := i.beat
		return cluster.Heartbeat{ID: id, Role: cluster.RoleWorker, Epoch: id, Started: i.created.UnixMilli(), Worker: &info}
	})
	c.mu.Lock()
	i.silence = func() { cancel(); silence() }
	c.mu.Unlock()
	c.e.Cleanup(cancel)
}

// set changes an instance, and has its heartbeat say so.
func (c *cloud) set(name string, change func(*instance)) {
	c.mu.Lock()
	if i := c.instances[name]; i != nil {
		change(i)
	}
	c.mu.Unlock()
	c.e.seen.Nudge()
}

// each changes all instances.
func (c *cloud) each(change func(*instance)) {
	c.mu.Lock()
	for _, name := range slices.Sorted(maps.Keys(c.instances)) {
		change(c.instances[name])
	}
	c.mu.Unlock()
	c.e.seen.Nudge()
}

func (c *cloud) Stop(ctx context.Context, p *scale.Pool, name string) error {
	c.mu.Lock()
	hook := c.onStop
	c.mu.Unlock()
	applied, err := true, error(nil)
	if hook != nil {
		applied, err = hook(name)
	}
	if !applied {
		return err
	}
	c.mu.Lock()
	i := c.instances[name]
	if i == nil {
		c.mu.Unlock()
		return err
	}
	if i.pool != p.Name {
		c.broken = append(c.broken, name+" is stopped as one of "+p.Name)
	}
	if i.state == provider.Running && !c.rough {
		if n := i.beat.Running + i.beat.InHand; n > 0 {
			c.broken = append(c.broken, fmt.Sprintf("%s is stopped with %d jobs", name, n))
		}
		if i.beat.State == cluster.Ready {
			c.broken = append(c.broken, name+" is stopped without having been drained")
		}
	}
	for other := range c.instances {
		if c.ordered && other > name {
			c.broken = append(c.broken, fmt.Sprintf("%s is stopped before %s", name, other))
		}
	}
	c.stops = append(c.stops, name)
	delete(c.instances, name)
	silence := i.silence
	c.mu.Unlock()
	silence()
	return err
}

func (c *cloud) Close() error { return nil }

// fail makes a running instance end by itself.
func (c *cloud) fail(name, reason string) {
	c.mu.Lock()
	i := c.instances[name]
	i.state, i.reason = provider.Failed, reason
	silence := i.silence
	i.silence = func() {}
	c.mu.Unlock()
	silence()
}

// vanish removes an instance as somebody would who knows nothing of the platform.
func (c *cloud) vanish(name string) {
	c.mu.Lock()
	silence := c.instances[name].silence
	delete(c.instances, name)
	c.mu.Unlock()
	silence()
}

// highest is the number of the last instance that it named itself.
func (c *cloud) highest() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.n
}

func (c *cloud) names() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Sorted(maps.Keys(c.instances))
}

func (c *cloud) count() int { return len(c.names()) }

func (c *cloud) calls() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.asked)
}

func (c *cloud) stopped() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.stops)
}

func (c *cloud) states() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var all []string
	for _, name := range slices.Sorted(maps.Keys(c.instances)) {
		i := c.instances[name]
		all = append(all, fmt.Sprintf("%s %s %s %d", name, i.state, i.beat.State, i.beat.Running))
	}
	return all
}

func (c *cloud) do(f func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f()
}

// rules fails the test if one was broken.
func (c *cloud) rules() {
	c.e.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, b := range c.broken {
		c.e.Error(b)
	}
}

// ready is how many workers the leader says are ready.
func (e *env) ready(n int) func() bool {
	return func() bool {
		p := e.info("p")
		return p.Ready == n && p.Starting == 0 && p.Draining == 0 && e.cloud.count() == n
	}
}

var errAway = errors.New("the provider is away")
