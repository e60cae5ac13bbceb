package docker_test

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/jsonstream"
	"github.com/moby/moby/api/types/network"
	"go.uber.org/goleak"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/provider"
	"github.com/millrace/millrace/internal/provider/docker"
	"github.com/millrace/millrace/internal/provider/providertest"
	"github.com/millrace/millrace/internal/scale"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	secret = "s3cret-of-the-platform"
	token  = "t0ken-of-the-engine"
)

var join = provider.Join{"MILLRACE_NATS_URL": "nats://user:" + secret + "@nats:4222", "MILLRACE_REDIS_URL": "redis://redis:6379"}

func open(t *testing.T) provider.Provider {
	p := docker.New(join, slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug})))
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return p
}

// pool is one whose workers do what mode says; changes are made to it.
func (e *engine) pool(name, mode string, changes ...func(*scale.Pool)) *scale.Pool {
	p := &scale.Pool{
		Name: name, Models: []job.Model{"m"}, Provider: "docker", Max: 8, Drain: scale.Duration(10 * time.Millisecond),
		Engine: scale.Engine{Command: []string{mode}, Env: map[string]string{"HF_TOKEN": token}},
		Docker: &scale.Docker{Host: e.url, WorkerImage: "worker:test"},
	}
	for _, change := range changes {
		change(p)
	}
	return p
}

// beside gives the engine a container of its own.
func beside(p *scale.Pool) { p.Engine.Image = "engine:test" }

func gpus(n int) func(*scale.Pool) { return func(p *scale.Pool) { p.Shape.GPUs = n } }

func TestProvider(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*scale.Pool){"OneContainer": func(*scale.Pool) {}, "EngineInItsOwn": beside} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			providertest.Run(t, func(t *testing.T) providertest.Fixture {
				e := newEngine(t)
				acts := ""
				if e.pool("x", "", change).Engine.Image != "" {
					acts = ".engine" // what its command does is done there
				}
				return providertest.Fixture{
					Open:    open,
					Secrets: []string{secret, join["MILLRACE_NATS_URL"], join["MILLRACE_REDIS_URL"], token},
					Plain:   e.pool("plain", "plain", change), Other: e.pool("other", "plain", change),
					Broken: e.pool("broken", "broken", change), Reason: "exit code 3: no such model, says",
					Fail: func(t *testing.T, name string) { e.end(t, "millrace-"+name+acts, 137, true, "") },
					// A worker drains, whatever its engine does: here it is the worker that has a mind of its own.
					Busy: e.pool("busy", "busy", func(p *scale.Pool) { p.Drain = scale.Duration(time.Minute) }),
					Release: func(t *testing.T, name string) {
						e.end(t, "millrace-"+name+".stopping", 0, false, "")
					},
					Stubborn: e.pool("stubborn", "stubborn"),
					Full:     e.pool("full", "plain", change, gpus(1)), Room: 2,
					Invalid: map[string]*scale.Pool{
						"no such image":    e.pool("i1", "plain", change, func(p *scale.Pool) { p.Docker.WorkerImage = "none:test" }),
						"no such network":  e.pool("i2", "plain", change, func(p *scale.Pool) { p.Docker.Network = "nowhere" }),
						"the host's":       e.pool("i3", "plain", change, func(p *scale.Pool) { p.Docker.Network = "host" }),
						"no such program":  e.pool("i4", "missing", change),
						"no such volume":   e.pool("i5", "plain", change, func(p *scale.Pool) { p.Docker.Volumes = []string{"models"} }),
						"no engine":        e.pool("i6", "plain", func(p *scale.Pool) { p.Engine.Command = nil }),
						"fewer GPUs named": e.pool("i7", "plain", change, gpus(2), func(p *scale.Pool) { p.Docker.GPUs = []string{"1"} }),
						"no such host":     e.pool("i8", "plain", change, func(p *scale.Pool) { p.Docker.Host = "somewhere" }),
						"a bad variable":   e.pool("i9", "plain", change, func(p *scale.Pool) { p.Engine.Env = map[string]string{"A=B": token} }),
					},
					Gone: func(t *testing.T, p *scale.Pool, name string) {
						e.mu.Lock()
						defer e.mu.Unlock()
						for _, c := range e.containers {
							if c.config.Labels["dev.millrace.worker"] == name && c.config.Labels["dev.millrace.pool"] == p.Name {
								t.Errorf("%s is left", c.name)
							}
						}
					},
				}
			})
		})
	}
}

func TestTheContainersAreAsThePoolSays(t *testing.T) {
	t.Parallel()
	e := newEngine(t)
	p := open(t)
	change := func(p *scale.Pool) {
		p.Shape = scale.Shape{GPUs: 2, TensorParallel: 2}
		p.Engine.Command = []string{"serve", "--port={port}", "--tp={tensor_parallel}", "--gpus={gpus}", "plain"}
		p.Docker.Volumes, p.Docker.ShmSize, p.Drain = []string{"models:/models"}, 1<<30, scale.Duration(90*time.Second)
	}
	e.gpus = 4
	if err := p.Start(t.Context(), e.pool("one", "", change), "w1", 1); err != nil {
		t.Fatal(err)
	}
	if err := p.Start(t.Context(), e.pool("two", "", change, beside), "w2", 1); err != nil {
		t.Fatal(err)
	}
	type facts struct {
		Image    string
		Cmd      []string
		Env      []string
		Labels   map[string]string
		Network  string
		GPUs     []string
		Binds    []string
		Shm      int64
		Hardened bool
		Restarts bool
		Stop     int
	}
	look := func(name string) facts {
		c := e.get(t, name)
		f := facts{
			Image: c.config.Image, Cmd: c.config.Cmd, Env: c.config.Env, Labels: c.config.Labels, Network: string(c.host.NetworkMode), Binds: c.host.Binds, Shm: c.host.ShmSize,
			Hardened: c.host.ReadonlyRootfs && slices.Contains(c.host.CapDrop, "ALL") && slices.Contains(c.host.SecurityOpt, "no-new-privileges:true"),
			Restarts: !c.host.RestartPolicy.IsNone(), Stop: *c.config.StopTimeout,
		}
		for _, d := range c.host.DeviceRequests {
			if d.Driver != "nvidia" || d.Count != 0 || !cmp.Equal(d.Capabilities, [][]string{{"gpu"}}) {
				t.Errorf("%s asks for %+v", name, d)
			}
			f.GPUs = append(f.GPUs, d.DeviceIDs...)
		}
		return f
	}
	nats, redis, hf := "MILLRACE_NATS_URL="+join["MILLRACE_NATS_URL"], "MILLRACE_REDIS_URL="+join["MILLRACE_REDIS_URL"], "HF_TOKEN="+token
	args := []string{"worker", "--name", "w1", "--engine", "http://127.0.0.1:8000", "--serve", "m", "--drain", "1m30s", "--tensor-parallel", "2"}
	command := []string{"serve", "--port=8000", "--tp=2", "--gpus=0,1", "plain"}
	for name, want := range map[string]facts{
		"millrace-w1": {
			Image: "worker:test", Cmd: slices.Concat(args, []string{"--gpus", "0,1", "--"}, command), Env: []string{hf, nats, redis},
			Labels:  map[string]string{"dev.millrace.pool": "one", "dev.millrace.worker": "w1", "dev.millrace.part": "worker", "dev.millrace.gpus": "0,1", "dev.millrace.drain": "1m30s"},
			Network: "bridge", GPUs: []string{"0", "1"}, Binds: []string{"models:/models"}, Shm: 1 << 30, Hardened: true, Stop: 100,
		},
		"millrace-w2": {
			Image: "worker:test", Cmd: slices.Concat(args[:2], []string{"w2"}, args[3:]), Env: []string{nats, redis},
			Labels:  map[string]string{"dev.millrace.pool": "two", "dev.millrace.worker": "w2", "dev.millrace.part": "worker", "dev.millrace.engine": "engine:test", "dev.millrace.drain": "1m30s"},
			Network: "bridge", Hardened: true, Stop: 100,
		},
		"millrace-w2.engine": {
			Image: "engine:test", Cmd: command, Env: []string{hf},
			Labels:  map[string]string{"dev.millrace.pool": "two", "dev.millrace.worker": "w2", "dev.millrace.part": "engine", "dev.millrace.gpus": "2,3"},
			Network: "container:millrace-w2", GPUs: []string{"2", "3"}, Binds: []string{"models:/models"}, Shm: 1 << 30, Stop: 10,
		},
	} {
		if d := cmp.Diff(want, look(name)); d != "" {
			t.Errorf("%s (-want +got):\n%s", name, d)
		}
	}
}

// ours makes the engine believe that the test runs in a container of its own.
func (e *engine) ours(t *testing.T, labels map[string]string, networks ...string) {
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	c := e.add(&fakeContainer{id: host + strings.Repeat("0", 52), name: "ours", config: &container.Config{Labels: labels}, host: &container.HostConfig{}, networks: make(map[string]*network.EndpointSettings)})
	for _, n := range networks {
		c.networks[n], e.networks[n] = &network.EndpointSettings{}, true
	}
}

func TestWorkersJoinTheNetworkAndTheProjectOfTheAutoscaler(t *testing.T) {
	t.Parallel()
	e := newEngine(t)
	e.ours(t, map[string]string{"com.docker.compose.project": "shop"}, "shop_default")
	p, pool := open(t), e.pool("chat", "plain")
	if err := p.Start(t.Context(), pool, "w1", 1); err != nil {
		t.Fatal(err)
	}
	c := e.get(t, "shop-w1")
	if got := string(c.host.NetworkMode); got != "shop_default" {
		t.Errorf("its network is %s", got)
	}
	for name, want := range map[string]string{"project": "shop", "service": "pool-chat", "oneoff": "False", "config-hash": "pool-chat"} {
		if got := c.config.Labels["com.docker.compose."+name]; got != want {
			t.Errorf("its %s is %q, want %q", name, got, want)
		}
	}
	// Another project's pool of the same name is another pool.
	other := newEngine(t)
	other.containers = e.containers[1:]
	other.ours(t, map[string]string{"com.docker.compose.project": "bank"}, "bank_default")
	pool = other.pool("chat", "plain")
	if all, err := open(t).List(t.Context(), pool); err != nil || len(all) != 0 {
		t.Errorf("the other project lists %v, %v", all, err)
	}
	other.mu.Lock()
	other.containers = nil
	other.mu.Unlock()
}

func TestOneNetworkOfSeveralMustBeNamed(t *testing.T) {
	t.Parallel()
	e := newEngine(t)
	e.ours(t, nil, "back", "front")
	p, pool := open(t), e.pool("chat", "plain")
	if err := p.Start(t.Context(), pool, "w1", 1); !errors.Is(err, provider.ErrInvalid) || !strings.Contains(err.Error(), "back, front") {
		t.Errorf("without a name: %v", err)
	}
	pool.Docker.Network = "back"
	if err := p.Start(t.Context(), pool, "w1", 1); err != nil {
		t.Error(err)
	}
}

func TestAnAddressOfTheOwnMachineIsOfNoUseToAContainer(t *testing.T) {
	t.Parallel()
	e := newEngine(t)
	for _, url := range []string{"nats://a:" + secret + "@127.0.0.1:4222", "nats://nats:4222,nats://localhost:4223", "nats://[::1]:4222"} {
		p := docker.New(provider.Join{"MILLRACE_NATS_URL": url}, slog.New(slog.DiscardHandler))
		err := p.Start(t.Context(), e.pool("chat", "plain"), "w1", 1)
		if !errors.Is(err, provider.ErrInvalid) || !strings.Contains(err.Error(), "MILLRACE_NATS_URL") || strings.Contains(err.Error(), secret) {
			t.Errorf("%v", err)
		}
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	}
}

// one lists the pool, which has one instance.
func one(t *testing.T, p provider.Provider, pool *scale.Pool) provider.Instance {
	t.Helper()
	all, err := p.List(t.Context(), pool)
	if err != nil || len(all) != 1 {
		t.Fatalf("listed: %+v, %v", all, err)
	}
	return all[0]
}

// Whatever call goes wrong, applied or not, the next start of the same name completes the instance, and there is one.
func TestAHalfMadeInstanceIsCompletedByTheNextStart(t *testing.T) {
	t.Parallel()
	for _, call := range []string{"create", "start"} {
		for nth := range 2 {
			for _, applied := range []bool{false, true} {
				t.Run(call+" "+[]string{"of the worker", "of the engine"}[nth]+map[bool]string{false: " is not applied", true: " is applied"}[applied], func(t *testing.T) {
					t.Parallel()
					e := newEngine(t)
					pool := e.pool("chat", "plain", beside, gpus(1))
					p := open(t)
					if nth == 1 {
						e.fail(call, fault{}) // the worker's goes well
					}
					e.fail(call, fault{applied: applied, status: http.StatusInternalServerError, message: "it went wrong, with " + secret})
					err := p.Start(t.Context(), pool, "w1", 1)
					if err == nil || errors.Is(err, provider.ErrCapacity) || errors.Is(err, provider.ErrInvalid) || strings.Contains(err.Error(), secret) {
						t.Fatalf("the first start: %v", err)
					}
					if all, err := p.List(t.Context(), pool); err != nil || len(all) > 1 || len(all) == 1 && all[0].State == provider.Failed {
						t.Fatalf("listed: %+v, %v", all, err)
					}
					again := open(t)
					if err := again.Start(t.Context(), pool, "w1", 1); err != nil {
						t.Fatal(err)
					}
					if i := one(t, again, pool); i.State != provider.Running {
						t.Errorf("it is %+v", i)
					}
					if got := e.get(t, "millrace-w1.engine").host.DeviceRequests[0].DeviceIDs; !slices.Equal(got, []string{"0"}) {
						t.Errorf("its GPUs are %v", got)
					}
					if err := again.Stop(t.Context(), pool, "w1"); err != nil {
						t.Fatal(err)
					}
					if len(e.containers) > 0 {
						t.Errorf("%d containers are left", len(e.containers))
					}
				})
			}
		}
	}
}

// The same for the end: the worker is told once, and stays listed until nothing is left.
func TestAHalfRemovedInstanceIsRemovedByTheNextStop(t *testing.T) {
	t.Parallel()
	for _, call := range []string{"rename", "stop", "remove"} {
		for _, applied := range []bool{false, true} {
			t.Run(call+map[bool]string{false: " is not applied", true: " is applied"}[applied], func(t *testing.T) {
				t.Parallel()
				e := newEngine(t)
				pool := e.pool("chat", "plain", beside)
				p := open(t)
				if err := p.Start(t.Context(), pool, "w1", 1); err != nil {
					t.Fatal(err)
				}
				worker := e.get(t, "millrace-w1")
				e.fail(call, fault{applied: applied, status: http.StatusInternalServerError, message: "it went wrong"})
				if err := p.Stop(t.Context(), pool, "w1"); err == nil {
					t.Fatal("the first stop says that all went well")
				}
				if i := one(t, p, pool); i.State == provider.Pending || i.State == provider.Running && !(call == "rename" && !applied) {
					t.Errorf("it is %+v", i)
				}
				// One that was renamed may have been told, and has a drain's time before it is told again.
				again := docker.New(join, slog.New(slog.DiscardHandler))
				defer again.Close()
				again.SetGrace(20 * time.Millisecond)
				if err := again.Stop(t.Context(), pool, "w1"); err != nil {
					t.Fatal(err)
				}
				if len(e.containers) > 0 {
					t.Errorf("%d containers are left", len(e.containers))
				}
				if worker.signals != 1 {
					t.Errorf("it was told %d times", worker.signals)
				}
			})
		}
	}
}

func TestAWorkerHasTheDrainThatItWasStartedWith(t *testing.T) {
	t.Parallel()
	e := newEngine(t)
	p, pool := open(t), e.pool("chat", "stubborn")
	pool.Drain = scale.Duration(20 * time.Second) // of ten milliseconds each, as the ten of grace
	if err := p.Start(t.Context(), pool, "w1", 1); err != nil {
		t.Fatal(err)
	}
	pool.Drain = scale.Duration(time.Millisecond)
	begun := time.Now()
	if err := p.Stop(t.Context(), pool, "w1"); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(begun); took < 300*time.Millisecond {
		t.Errorf("it was killed after %v", took)
	}
}

func TestWhatCannotRunLeavesNothingBehind(t *testing.T) {
	t.Parallel()
	e := newEngine(t)
	p, pool := open(t), e.pool("big", "plain", beside, gpus(3))
	if err := p.Start(t.Context(), pool, "w1", 1); !errors.Is(err, provider.ErrCapacity) || !strings.Contains(err.Error(), "unknown device") {
		t.Errorf("three of two GPUs: %v", err)
	}
	if len(e.containers) > 0 {
		t.Errorf("%d containers are left", len(e.containers))
	}
	if e.count("stop") == 0 {
		t.Error("its worker was not told to end")
	}
}

func TestNoTwoWorkersHaveTheSameGPU(t *testing.T) {
	t.Parallel()
	e := newEngine(t)
	e.gpus = 8
	p := open(t)
	named := func(p *scale.Pool) { p.Docker.GPUs = []string{"1", "3", "5"} }
	a, b := e.pool("a", "plain", gpus(1), named), e.pool("b", "plain", gpus(2))
	atOnce := func(pool *scale.Pool, names ...string) {
		var starts sync.WaitGroup
		for _, name := range names {
			starts.Go(func() {
				if err := p.Start(t.Context(), pool, name, 1); err != nil {
					t.Errorf("%s: %v", name, err)
				}
			})
		}
		starts.Wait()
	}
	atOnce(a, "a1", "a2")
	atOnce(b, "b1", "b2")
	taken := make(map[string]string)
	for _, name := range []string{"a1", "a2", "b1", "b2"} {
		for _, id := range e.get(t, "millrace-"+name).host.DeviceRequests[0].DeviceIDs {
			if other := taken[id]; other != "" {
				t.Errorf("GPU %s is given to %s and %s", id, other, name)
			}
			taken[id] = name
		}
	}
	// A worker that failed has none any more.
	e.end(t, "millrace-b1", 1, false, "")
	freed := e.get(t, "millrace-b1").host.DeviceRequests[0].DeviceIDs
	if err := p.Start(t.Context(), b, "b3", 3); err != nil {
		t.Fatal(err)
	}
	if got := e.get(t, "millrace-b3").host.DeviceRequests[0].DeviceIDs; !slices.ContainsFunc(got, func(id string) bool { return slices.Contains(freed, id) }) {
		t.Errorf("it got %v, and %v were freed", got, freed)
	}
	for _, name := range []string{"a3", "a4"} { // of three there are two
		if err := p.Start(t.Context(), a, name, 4); err != nil && !errors.Is(err, provider.ErrCapacity) {
			t.Fatal(err)
		} else if err == nil && name == "a4" {
			t.Error("there was room for a fourth of three")
		}
	}
}

func TestAFailureSaysWhy(t *testing.T) {
	t.Parallel()
	e := newEngine(t)
	p := open(t)
	both, alone := e.pool("both", "plain", beside), e.pool("alone", "plain")
	for pool, name := range map[*scale.Pool]string{both: "w1", alone: "w2"} {
		if err := p.Start(t.Context(), pool, name, 1); err != nil {
			t.Fatal(err)
		}
	}
	e.end(t, "millrace-w1.engine", 137, true, "loading\nthe key is "+token+"\r\n \n")
	e.end(t, "millrace-w2", 2, false, "")
	if got, want := one(t, p, both).Reason, "the engine's container: it was killed because its memory is used up (OOMKilled, exit code 137): the key is ***"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if got, want := one(t, p, alone).Reason, "it ended by itself with exit code 2"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestAMissingImageIsLoaded(t *testing.T) {
	t.Parallel()
	e := newEngine(t)
	pool := e.pool("chat", "plain", func(p *scale.Pool) { p.Docker.WorkerImage = "far:test" })
	half, begun, more := &jsonstream.Progress{Current: 30, Total: 120}, make(chan struct{}), make(chan struct{})
	loads := 0
	e.load = func(w http.ResponseWriter, r *http.Request) {
		e.mu.Lock()
		loads++
		e.mu.Unlock()
		loading(jsonstream.Message{Status: "Pulling from test", ID: "test"}, jsonstream.Message{Status: "Downloading", ID: "1", Progress: half})(w, r)
		_ = http.NewResponseController(w).Flush()
		close(begun)
		<-more
		e.mu.Lock()
		e.images["far:test"] = true
		e.mu.Unlock()
	}
	p := open(t)
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-begun; cancel() }()
	// Who waits no more has not lost what is loaded: it goes on.
	if err := p.Start(ctx, pool, "w1", 1); !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "pulling the image far:test") {
		t.Fatalf("a start that is given up: %v", err)
	}
	var starts sync.WaitGroup
	for _, name := range []string{"w1", "w2"} {
		starts.Go(func() {
			if err := p.Start(t.Context(), pool, name, 2); err != nil {
				t.Errorf("starting %s: %v", name, err)
			}
		})
	}
	close(more)
	starts.Wait()
	if all, err := p.List(t.Context(), pool); err != nil || len(all) != 2 || loads != 1 {
		t.Errorf("%d loads made %v, %v", loads, all, err)
	}
}

// impatient is a provider that waits for nothing, or not for long.
func impatient(t *testing.T, patience, stall time.Duration) provider.Provider {
	p := docker.New(join, slog.New(slog.DiscardHandler))
	p.SetPatience(patience, stall, time.Hour)
	t.Cleanup(func() { _ = p.Close() })
	return p
}

// A pull of many minutes is no failure: each start says how far it is, and one pull is there for all.
func TestALongPullMakesAStartLater(t *testing.T) {
	t.Parallel()
	e := newEngine(t)
	p, pool := impatient(t, time.Millisecond, time.Hour), e.pool("chat", "plain", func(p *scale.Pool) { p.Docker.WorkerImage = "far:test" })
	more := make(chan struct{})
	loads := 0
	e.load = func(w http.ResponseWriter, r *http.Request) {
		loads++
		loading(jsonstream.Message{Status: "Pulling fs layer", ID: "2"}, jsonstream.Message{Status: "Downloading", ID: "1", Progress: &jsonstream.Progress{Current: 3_000_000_000, Total: 8_500_000_000}})(w, r)
		_ = http.NewResponseController(w).Flush()
		<-more
		e.mu.Lock()
		e.images["far:test"] = true
		e.mu.Unlock()
	}
	for {
		err := p.Start(t.Context(), pool, "w1", 1)
		later, ok := errors.AsType[*provider.LaterError](err)
		if !ok {
			t.Fatalf("while it is pulled: %v", err)
		}
		if later.For == "pulling the image far:test, 3.0 GB of at least 8.5 GB" {
			break
		}
		if later.For != "pulling the image far:test" { // nothing has come yet
			t.Fatal(later.For)
		}
	}
	if err, ok := errors.AsType[*provider.LaterError](p.Start(t.Context(), pool, "w2", 2)); !ok {
		t.Fatalf("of another worker: %v", err)
	}
	if all, err := p.List(t.Context(), pool); err != nil || len(all) != 0 {
		t.Errorf("listed: %v, %v", all, err)
	}
	close(more)
	for _, name := range []string{"w1", "w2"} {
		for later := true; later; {
			err := p.Start(t.Context(), pool, name, 2)
			if _, later = errors.AsType[*provider.LaterError](err); !later && err != nil {
				t.Fatal(err)
			}
		}
	}
	if all, err := p.List(t.Context(), pool); err != nil || len(all) != 2 || loads != 1 {
		t.Errorf("%d pulls made %v, %v", loads, all, err)
	}
}

// A pull that fails while nobody waits for it is told to who asks next, and then begun anew.
func TestAPullThatFailsBetweenTwoStartsIsTold(t *testing.T) {
	t.Parallel()
	e := newEngine(t)
	p, pool := impatient(t, time.Millisecond, time.Hour), e.pool("chat", "plain", func(p *scale.Pool) { p.Docker.WorkerImage = "far:test" })
	fails, failed := make(chan struct{}), make(chan struct{}, 1)
	e.load = func(w http.ResponseWriter, r *http.Request) {
		<-fails
		loading(jsonstream.Message{Error: &jsonstream.Error{Message: "unexpected EOF"}})(w, r)
		select {
		case failed <- struct{}{}:
		default:
		}
	}
	later := func() error {
		err := p.Start(t.Context(), pool, "w1", 1)
		if _, ok := errors.AsType[*provider.LaterError](err); ok {
			return nil
		}
		return err
	}
	if err := later(); err != nil {
		t.Fatal(err)
	}
	close(fails)
	<-failed
	var err error
	for err == nil { // that it has failed may not have come through yet
		err = later()
	}
	if !strings.Contains(err.Error(), "unexpected EOF") || e.count("create") != 1 {
		t.Errorf("%v, after %d pulls", err, e.count("create"))
	}
	for e.count("create") < 2 { // it is tried again
		if err := later(); err != nil && !strings.Contains(err.Error(), "unexpected EOF") {
			t.Fatal(err)
		}
	}
}

func TestAPullThatDoesNotGoOnIsGivenUp(t *testing.T) {
	t.Parallel()
	e := newEngine(t)
	p, pool := impatient(t, time.Hour, 100*time.Millisecond), e.pool("chat", "plain", func(p *scale.Pool) { p.Docker.WorkerImage = "far:test" })
	loads := 0
	e.load = func(w http.ResponseWriter, r *http.Request) {
		loads++
		for r.Context().Err() == nil { // it says the same again and again
			loading(jsonstream.Message{Status: "Downloading", ID: "1", Progress: &jsonstream.Progress{Current: 3_000_000, Total: 9_000_000}})(w, r)
			_ = http.NewResponseController(w).Flush()
			select {
			case <-time.After(5 * time.Millisecond):
			case <-r.Context().Done():
			}
		}
	}
	for n := range 2 {
		err := p.Start(t.Context(), pool, "w1", 1)
		if _, later := errors.AsType[*provider.LaterError](err); err == nil || later || errors.Is(err, provider.ErrInvalid) || !strings.Contains(err.Error(), "far:test, 3 MB of 9 MB: nothing more of it came") {
			t.Errorf("%v", err)
		}
		if loads != n+1 {
			t.Errorf("it was tried %d times", loads)
		}
	}
}

func TestWhatDockerSaysOfAPullIsUnderstood(t *testing.T) {
	t.Parallel()
	of := func(id, status string, current, total int64) jsonstream.Message {
		m := jsonstream.Message{ID: id, Status: status}
		if total > 0 {
			m.Progress = &jsonstream.Progress{Current: current, Total: total}
		}
		return m
	}
	p := docker.NewPull()
	for _, step := range []struct {
		says             jsonstream.Message
		progress         string
		moved, unpacking bool
	}{
		{of("latest", "Pulling from library/x", 0, 0), "", true, false},
		{of("0", "Already exists", 0, 0), "", true, false},
		{of("1", "Pulling fs layer", 0, 0), "", true, false},
		{of("2", "Waiting", 0, 0), "", true, false},
		{of("1", "Downloading", 10e6, 50e6), ", 10 MB of at least 50 MB", true, false},
		{of("1", "Downloading", 10e6, 50e6), ", 10 MB of at least 50 MB", false, false},
		{of("2", "Downloading", 1e6, 2e9), ", 11 MB of 2.0 GB", true, false},
		{of("1", "Download complete", 0, 0), ", 51 MB of 2.0 GB", true, false},
		{of("1", "Extracting", 5, 50e6), ", 51 MB of 2.0 GB", true, false},
		{of("2", "Verifying Checksum", 0, 0), ", 2.0 GB of 2.0 GB", true, true},
		{of("1", "Extracting", 6, 50e6), ", 2.0 GB of 2.0 GB", true, true},
		{of("1", "Extracting", 6, 50e6), ", 2.0 GB of 2.0 GB", false, true},
		{of("2", "Pull complete", 0, 0), ", 2.0 GB of 2.0 GB", true, true},
	} {
		if moved, unpacking := p.Hear(step.says); moved != step.moved || unpacking != step.unpacking || p.Progress() != step.progress {
			t.Errorf("%+v: moved %t, unpacking %t, %q", step.says, moved, unpacking, p.Progress())
		}
	}
}

func TestAnImageThatIsNotGivenIsTheOperatorsToChange(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		answer  func(http.ResponseWriter, *http.Request)
		invalid bool
	}{
		"unknown":     {nil, true},
		"unknown tag": {loading(jsonstream.Message{Error: &jsonstream.Error{Message: "manifest for far:test not found: manifest unknown"}}), true},
		"the registry is not reached": {func(w http.ResponseWriter, _ *http.Request) {
			refuse(w, 500, "Get \"https://registry/v2/\": dial tcp: lookup registry: not found")
		}, false},
		"the registry is not well":      {func(w http.ResponseWriter, _ *http.Request) { refuse(w, 500, "received unexpected HTTP status: 503") }, false},
		"the connection breaks halfway": {loading(jsonstream.Message{Error: &jsonstream.Error{Message: "unexpected EOF"}}), false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newEngine(t)
			e.load = c.answer
			err := open(t).Start(t.Context(), e.pool("chat", "plain", func(p *scale.Pool) { p.Docker.WorkerImage = "far:test" }), "w1", 1)
			if err == nil || errors.Is(err, provider.ErrInvalid) != c.invalid || !strings.Contains(err.Error(), "far:test") {
				t.Errorf("%v", err)
			}
		})
	}
}

func TestAContainerOfSomebodyElsesIsNotTaken(t *testing.T) {
	t.Parallel()
	e := newEngine(t)
	e.add(&fakeContainer{name: "millrace-w1", config: &container.Config{}, host: &container.HostConfig{}})
	p, pool := open(t), e.pool("chat", "plain")
	if err := p.Start(t.Context(), pool, "w1", 1); err == nil || !strings.Contains(err.Error(), "millrace-w1") {
		t.Errorf("%v", err)
	}
	if err := p.Stop(t.Context(), pool, "w1"); err != nil || len(e.containers) != 1 {
		t.Errorf("it was stopped: %v", err)
	}
}
