// Package docker runs workers in containers of a Docker engine.
//
// # Instances
//
// An instance is one container, in which the worker runs its engine's command, or two where the pool names an image for the engine: the worker's, and the engine's in the worker's network, so that 127.0.0.1 reaches it. The
// worker's is the first to start and the last to go: an engine that dies takes no connection from the worker, which gives its jobs back. All that is known of an instance stands at its containers: labels say
// whose they are, and a container that was told to end has another name. So any process sees the same, and may go on where another one stopped.
//
// # GPUs
//
// Docker gives a GPU to whoever asks. Which ones are taken the labels say: a worker gets some that no other worker has, of this pool or another, and that the pool names.
package docker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/client"

	"github.com/millrace/millrace/internal/provider"
	"github.com/millrace/millrace/internal/scale"
)

// The labels of containers.
const (
	labelPool   = "dev.millrace.pool"
	labelWorker = "dev.millrace.worker"
	labelPart   = "dev.millrace.part"   // worker or engine
	labelEngine = "dev.millrace.engine" // at the worker's: the image of the engine's container, if there is to be one
	labelGPUs   = "dev.millrace.gpus"   // which ones it has, with commas
	labelDrain  = "dev.millrace.drain"  // at the worker's: how long it drains
	// Compose's own, so that what it takes away includes the workers that its autoscaler started.
	labelProject = "com.docker.compose.project"
	labelService = "com.docker.compose.service"
	labelOneOff  = "com.docker.compose.oneoff"
	labelHash    = "com.docker.compose.config-hash" // Compose sees no container without one
)

// answer is how long Docker may take for one call that only looks or makes something. Starts of containers with GPUs take seconds.
const answer = time.Minute

// Provider runs workers in containers.
type Provider struct {
	join provider.Join
	log  *slog.Logger
	times

	mu      sync.Mutex
	daemons map[string]*daemon // by the host that pools name
}

// times are how long things may take.
type times struct {
	// grace is what a worker has to end once its drain is over, and an engine.
	grace time.Duration
	// patience is how long a start waits for an image until it says that it will be later.
	patience time.Duration
	// stall is after how long without any progress the loading of an image is given up, unpacking the same once all of it is here: not every Docker tells how that goes on.
	stall, unpacking time.Duration
}

// daemon is one Docker engine.
type daemon struct {
	*client.Client
	log *slog.Logger
	times

	// choosing is held from looking which GPUs are free until a container has them.
	choosing sync.Mutex

	mu    sync.Mutex
	place *place           // nil until it was asked for
	pulls map[string]*pull // that go on, or have failed and nobody knows, by image
	wg    sync.WaitGroup   // of the pulls
	ended bool
}

// place is where this process is, as a Docker engine sees it.
type place struct {
	// networks of the own container; none outside of one.
	networks []string
	// project of Compose that the own container belongs to, or "".
	project string
}

// New connects to nothing yet. join goes into the environment of each worker.
func New(join provider.Join, log *slog.Logger) *Provider {
	return &Provider{join: join, log: log, times: times{grace: 10 * time.Second, patience: 5 * time.Second, stall: 2 * time.Minute, unpacking: 15 * time.Minute}, daemons: make(map[string]*daemon)}
}

// Close ends the loading of images that nobody waits for. Containers run on.
func (p *Provider) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	var errs []error
	for _, d := range p.daemons {
		errs = append(errs, d.close())
	}
	clear(p.daemons)
	return errors.Join(errs...)
}

// settings are the pool's own, with their defaults.
func settings(pool *scale.Pool) scale.Docker {
	var s scale.Docker
	if pool.Docker != nil {
		s = *pool.Docker
	}
	s.WorkerImage = cmp.Or(s.WorkerImage, "millrace:local")
	return s
}

// daemon is the one that the pool's containers run in, with the place of this process.
func (p *Provider) daemon(ctx context.Context, pool *scale.Pool) (*daemon, *place, error) {
	d, err := p.connect(settings(pool).Host)
	if err != nil {
		return nil, nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.place == nil {
		own, err := d.look(ctx)
		if err != nil {
			return nil, nil, fmt.Errorf("asking docker for the own container: %w", short(err))
		}
		d.place = own
	}
	return d, d.place, nil
}

// connect is the daemon at a host. It does not call it.
func (p *Provider) connect(host string) (*daemon, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if d := p.daemons[host]; d != nil {
		return d, nil
	}
	options := []client.Opt{client.FromEnv}
	if host != "" {
		options = append(options, client.WithHost(host))
	}
	c, err := client.New(options...)
	if err != nil {
		return nil, fmt.Errorf("%w: the docker host %q: %w", provider.ErrInvalid, cmp.Or(host, os.Getenv(client.EnvOverrideHost)), err)
	}
	d := &daemon{Client: c, log: p.log, times: p.times, pulls: make(map[string]*pull)}
	p.daemons[host] = d
	return d, nil
}

// look finds out where this process is. A container's hostname is the beginning of its id, unless it was given another one.
func (d *daemon) look(ctx context.Context) (*place, error) {
	ctx, cancel := context.WithTimeout(ctx, answer)
	defer cancel()
	host, err := os.Hostname()
	if err != nil {
		return nil, err
	}
	own, err := d.ContainerInspect(ctx, host, client.ContainerInspectOptions{})
	if errdefs.IsNotFound(err) || err == nil && !strings.HasPrefix(own.Container.ID, host) { // a container may be named as this machine is
		return &place{}, nil
	}
	if err != nil {
		return nil, err
	}
	at := &place{}
	if c := own.Container.Config; c != nil {
		at.project = c.Labels[labelProject]
	}
	if h := own.Container.HostConfig; h != nil && (h.NetworkMode.IsHost() || h.NetworkMode.IsNone()) {
		return at, nil
	}
	if n := own.Container.NetworkSettings; n != nil {
		for name := range n.Networks {
			at.networks = append(at.networks, name)
		}
		slices.Sort(at.networks)
	}
	return at, nil
}

func (d *daemon) close() error {
	d.mu.Lock()
	d.ended = true
	for _, l := range d.pulls {
		l.cancel(context.Canceled)
	}
	d.mu.Unlock()
	d.wg.Wait()
	return d.Client.Close()
}

// name of the container of a worker; its engine's has "engine" behind a dot. No other worker's can be the same: their names have no dots.
func (at *place) name(worker string) string { return cmp.Or(at.project, "millrace") + "-" + worker }

const (
	engineSuffix = ".engine"
	// A worker's container that was told to end is renamed, which works once: who finds it so tells it nothing more.
	stoppingSuffix = ".stopping"
)

// instance is what there is of one.
type instance struct {
	worker, engine *container.Summary // nil if there is none
}

// find looks up the pool's instances, by name; name "" is all of them.
func (d *daemon) find(ctx context.Context, at *place, pool *scale.Pool, name string) (map[string]*instance, error) {
	ctx, cancel := context.WithTimeout(ctx, answer)
	defer cancel()
	labels := []string{labelPool + "=" + pool.Name}
	if name != "" {
		labels = append(labels, labelWorker+"="+name)
	}
	if at.project != "" { // another project on this engine may have a pool of that name
		labels = append(labels, labelProject+"="+at.project)
	}
	found, err := d.ContainerList(ctx, client.ContainerListOptions{All: true, Filters: make(client.Filters).Add("label", labels...)})
	if err != nil {
		return nil, err
	}
	all := make(map[string]*instance)
	for _, c := range found.Items {
		i := all[c.Labels[labelWorker]]
		if i == nil {
			i = &instance{}
			all[c.Labels[labelWorker]] = i
		}
		if c.Labels[labelPart] == "engine" {
			i.engine = &c
		} else {
			i.worker = &c
		}
	}
	return all, nil
}

// parts of the instance that exist, the engine's first: where both have failed, it is the likelier cause.
func (i *instance) parts() []*container.Summary {
	return slices.DeleteFunc([]*container.Summary{i.engine, i.worker}, func(c *container.Summary) bool { return c == nil })
}

// stopping tells whether the instance was told to end.
func (i *instance) stopping() bool {
	return i.worker != nil && slices.ContainsFunc(i.worker.Names, func(name string) bool { return strings.HasSuffix(name, stoppingSuffix) })
}

// ended tells whether a container has run and does not any more.
func ended(c *container.Summary) bool {
	return c.State == container.StateExited || c.State == container.StateDead || c.State == container.StateRemoving
}

// short is an error of Docker's without the words that each has.
func short(err error) error {
	if text, found := strings.CutPrefix(err.Error(), "Error response from daemon: "); found && !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded) {
		return errors.New(text)
	}
	return err
}

// full are what Docker says when there is no room for another container now.
var full = []string{
	"could not select device driver", // no GPU, or none of that driver's
	"unknown device",                 // fewer GPUs than asked for
	"no space left on device", "cannot allocate memory", "not enough memory", "insufficient memory",
	"no available ipv4 addresses", "non-overlapping ipv4 address pool",
}

// wrong are what Docker says of what cannot work, where its status does not tell.
var wrong = []string{"invalid volume specification", "invalid mount config", "executable file not found", "exec format error"}

// explain says what an error of Docker's means to the caller, without the values of the environment.
func (p *Provider) explain(pool *scale.Pool, doing string, err error) error {
	if _, later := errors.AsType[*provider.LaterError](err); err == nil || later {
		return err
	}
	switch {
	case errors.Is(err, provider.ErrCapacity), errors.Is(err, provider.ErrInvalid), errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("%s: %w", doing, err)
	}
	text := provider.Clean(short(err).Error(), pool, p.join)
	lower := strings.ToLower(text)
	says := func(s string) bool { return strings.Contains(lower, s) }
	switch {
	case slices.ContainsFunc(full, says):
		return fmt.Errorf("%s: %w: %s", doing, provider.ErrCapacity, text)
	case errdefs.IsInvalidArgument(err), errdefs.IsNotFound(err) && says("network"), slices.ContainsFunc(wrong, says):
		return fmt.Errorf("%s: %w: %s", doing, provider.ErrInvalid, text)
	}
	return fmt.Errorf("%s: %s", doing, text)
}
