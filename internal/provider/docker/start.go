package docker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/client"

	"github.com/millrace/millrace/internal/provider"
	"github.com/millrace/millrace/internal/scale"
)

const (
	// enginePort is free for the engine in every container: each has a network of its own.
	enginePort = "8000"
	// program is where an image has the millrace binary, if it is ours.
	program = "/millrace"
	// defaultDrain is a pool's that says nothing.
	defaultDrain = 10 * time.Minute
)

// Start makes what is missing of the containers, and starts those that have never run. If this process dies in between, the next Start of that name goes on with what there is.
func (p *Provider) Start(ctx context.Context, pool *scale.Pool, name string, _ int) error {
	err := p.start(ctx, pool, name)
	return p.explain(pool, "starting worker "+name, err)
}

func (p *Provider) start(ctx context.Context, pool *scale.Pool, name string) error {
	d, at, err := p.daemon(ctx, pool)
	if err != nil {
		return err
	}
	if err := p.check(pool, at); err != nil {
		return err
	}
	all, err := d.find(ctx, at, pool, name)
	if err != nil {
		return err
	}
	i := cmp.Or(all[name], &instance{})
	if i.stopping() || slices.ContainsFunc(i.parts(), ended) {
		return nil // it exists, and is listed as what it is
	}
	if i.worker == nil && i.engine != nil { // its network went with the worker's container
		if err := d.remove(ctx, i.engine.ID); err != nil {
			return err
		}
		i.engine = nil
	}
	var missing []spec
	worker, engine := p.describe(pool, name, at)
	if i.worker == nil {
		missing = append(missing, worker)
	}
	made := worker.Config.Labels
	if i.worker != nil {
		made = i.worker.Labels
	}
	switch {
	case made[labelEngine] == "":
		engine.Name = ""
	case i.engine == nil:
		missing = append(missing, engine)
	}
	for _, s := range missing {
		if err := d.image(ctx, s.Config.Image); err != nil {
			return err
		}
	}
	if err := d.begin(ctx, pool, worker, engine, missing); err != nil {
		return p.undo(ctx, d, at, pool, name, err)
	}
	return nil
}

// begin makes the missing containers of an instance, and starts all that it has; an engine without a name has none.
func (d *daemon) begin(ctx context.Context, pool *scale.Pool, worker, engine spec, missing []spec) error {
	for _, s := range missing {
		if err := d.create(ctx, pool, s); err != nil {
			return err
		}
	}
	// By name: one that somebody else has made in the meantime is as good.
	if err := d.run(ctx, worker.Name); err != nil || engine.Name == "" {
		return err
	}
	return d.run(ctx, engine.Name)
}

// undo returns err, and takes the instance away if there is no room for it or it cannot work: its worker may have begun, and was asked nothing. After another error it may run.
func (p *Provider) undo(ctx context.Context, d *daemon, at *place, pool *scale.Pool, name string, err error) error {
	err = p.explain(pool, "making its containers", err)
	if !errors.Is(err, provider.ErrCapacity) && !errors.Is(err, provider.ErrInvalid) {
		return err
	}
	all, gone := d.find(ctx, at, pool, name)
	if gone == nil && all[name] != nil {
		gone = d.end(ctx, all[name], 0)
	}
	if gone != nil { // it is listed as pending or failed until it is stopped
		p.log.Warn("what is left of a worker that could not be started is not gone", "pool", pool.Name, "worker", name, "err", p.explain(pool, "removing it", gone))
	}
	return err
}

// run starts a container, which is no error if it runs already.
func (d *daemon) run(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(ctx, answer)
	defer cancel()
	_, err := d.ContainerStart(ctx, name, client.ContainerStartOptions{})
	return err
}

// check says why a pool cannot work here, as far as that can be told without trying.
func (p *Provider) check(pool *scale.Pool, at *place) error {
	s := settings(pool)
	switch {
	case s.Network == "host" || s.Network == "none" || strings.HasPrefix(s.Network, "container:"):
		return fmt.Errorf("%w: docker.network is %q: name a network that reaches NATS and Redis, in which each worker has an address of its own", provider.ErrInvalid, s.Network)
	case s.Network == "" && len(at.networks) > 1:
		return fmt.Errorf("%w: the autoscaler's container is in several networks (%s): say which one reaches NATS and Redis in docker.network", provider.ErrInvalid, strings.Join(at.networks, ", "))
	case pool.Engine.Image == "" && len(pool.Engine.Command) == 0 && pool.Engine.URL == "":
		return fmt.Errorf("%w: nothing says what the engine is: give engine.image, engine.command or engine.url", provider.ErrInvalid)
	case len(s.GPUs) > 0 && len(s.GPUs) < pool.Shape.GPUs:
		return fmt.Errorf("%w: shape.gpus is %d, and docker.gpus names %d", provider.ErrInvalid, pool.Shape.GPUs, len(s.GPUs))
	}
	for name := range pool.Engine.Env {
		if name == "" || strings.ContainsAny(name, "=\x00") {
			return fmt.Errorf("%w: engine.env has %q, which is no name of a variable", provider.ErrInvalid, name)
		}
	}
	for _, name := range []string{"MILLRACE_NATS_URL", "MILLRACE_REDIS_URL"} {
		for part := range strings.SplitSeq(p.join[name], ",") {
			if u, err := url.Parse(part); err == nil && ownMachine(u.Hostname()) {
				return fmt.Errorf("%w: %s is an address of the autoscaler's own machine, which a container does not reach: say where containers find NATS and Redis with --join-nats-url and --join-redis-url", provider.ErrInvalid, name)
			}
		}
	}
	return nil
}

// ownMachine tells whether a host is the machine that asks for it.
func ownMachine(host string) bool {
	addr, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && addr.IsLoopback()
}

// spec is a container to be.
type spec struct {
	client.ContainerCreateOptions
	gpus int // of its own
}

// describe says what the containers of an instance are. Without an image for the engine the second one counts for nothing.
func (p *Provider) describe(pool *scale.Pool, name string, at *place) (worker, engine spec) {
	s := settings(pool)
	network := s.Network
	if network == "" && len(at.networks) == 1 {
		network = at.networks[0]
	}
	network = cmp.Or(network, "bridge")
	labels := func(part string) map[string]string {
		l := map[string]string{labelPool: pool.Name, labelWorker: name, labelPart: part}
		if at.project != "" {
			l[labelProject], l[labelService], l[labelOneOff], l[labelHash] = at.project, "pool-"+pool.Name, "False", "pool-"+pool.Name
		}
		return l
	}
	indices := make([]string, pool.Shape.GPUs) // as the container counts those that it was given
	for i := range indices {
		indices[i] = strconv.Itoa(i)
	}
	inside := provider.Place{Port: enginePort, GPUs: strings.Join(indices, ","), Millrace: program}
	command := inside.EngineCommand(pool)

	outside := inside
	if pool.Engine.Image != "" {
		outside.GPUs = "" // the worker's container has none
	}
	drain := cmp.Or(time.Duration(pool.Drain), defaultDrain)
	kill := seconds(drain + p.grace)
	worker = spec{ContainerCreateOptions: client.ContainerCreateOptions{
		Name: at.name(name),
		Config: &container.Config{
			Image: s.WorkerImage, Labels: labels("worker"), Env: environment(p.join), StopTimeout: &kill,
			Cmd: outside.WorkerArgs(pool, name),
		},
		HostConfig: &container.HostConfig{
			NetworkMode: container.NetworkMode(network), RestartPolicy: container.RestartPolicy{Name: container.RestartPolicyDisabled},
			ReadonlyRootfs: true, CapDrop: []string{"ALL"}, SecurityOpt: []string{"no-new-privileges:true"},
		},
	}}
	worker.Config.Labels[labelDrain] = drain.String()
	if pool.Engine.Image == "" {
		worker.Config.Env = environment(pool.Engine.Env, p.join)
		worker.HostConfig.Binds, worker.HostConfig.ShmSize, worker.gpus = s.Volumes, s.ShmSize, pool.Shape.GPUs
		if len(command) > 0 {
			worker.Config.Cmd = append(append(worker.Config.Cmd, "--"), command...)
			worker.HostConfig.Tmpfs = map[string]string{"/tmp": ""}
		}
		return worker, engine
	}
	worker.Config.Labels[labelEngine] = pool.Engine.Image
	soon := seconds(p.grace)
	engine = spec{gpus: pool.Shape.GPUs, ContainerCreateOptions: client.ContainerCreateOptions{
		Name:   at.name(name) + engineSuffix,
		Config: &container.Config{Image: pool.Engine.Image, Labels: labels("engine"), Env: environment(pool.Engine.Env), StopTimeout: &soon, Cmd: command},
		HostConfig: &container.HostConfig{
			NetworkMode: container.NetworkMode("container:" + worker.Name), RestartPolicy: container.RestartPolicy{Name: container.RestartPolicyDisabled},
			Binds: s.Volumes, ShmSize: s.ShmSize, SecurityOpt: []string{"no-new-privileges:true"},
		},
	}}
	return worker, engine
}

// environment of a container. Of several values of a name the last counts.
func environment(all ...map[string]string) []string {
	merged := make(map[string]string)
	for _, variables := range all {
		maps.Copy(merged, variables)
	}
	var list []string
	for _, name := range slices.Sorted(maps.Keys(merged)) {
		list = append(list, name+"="+merged[name])
	}
	return list
}

// create makes a container. That it exists already is no error, if it is the pool's.
func (d *daemon) create(ctx context.Context, pool *scale.Pool, s spec) error {
	ctx, cancel := context.WithTimeout(ctx, answer)
	defer cancel()
	if s.gpus > 0 {
		// What is free stays so until the container has it: two of this process ask one after the other, and of two processes one alone acts.
		d.choosing.Lock()
		defer d.choosing.Unlock()
		ids, err := d.freeGPUs(ctx, settings(pool).GPUs, s.gpus)
		if err != nil {
			return err
		}
		s.Config.Labels[labelGPUs] = strings.Join(ids, ",")
		s.HostConfig.DeviceRequests = []container.DeviceRequest{{Driver: "nvidia", DeviceIDs: ids, Capabilities: [][]string{{"gpu"}}}}
	}
	for {
		_, err := d.ContainerCreate(ctx, s.ContainerCreateOptions)
		if !errdefs.IsConflict(err) {
			return err
		}
		other, err := d.ContainerInspect(ctx, s.Name, client.ContainerInspectOptions{})
		switch {
		case errdefs.IsNotFound(err): // another one is making it, and has no more than the name yet; or has given up
		case err != nil:
			return err
		default:
			if c := other.Container.Config; c == nil || c.Labels[labelPool] != pool.Name || c.Labels[labelWorker] != s.Config.Labels[labelWorker] {
				return fmt.Errorf("docker has a container %s that is none of this pool: remove it, or name the pool otherwise", s.Name)
			}
			return nil
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// freeGPUs chooses n GPUs that no worker's container has: of those named, or of all from 0 on, of which Docker says how many there are.
func (d *daemon) freeGPUs(ctx context.Context, named []string, n int) ([]string, error) {
	found, err := d.ContainerList(ctx, client.ContainerListOptions{All: true, Filters: make(client.Filters).Add("label", labelGPUs)})
	if err != nil {
		return nil, err
	}
	taken := make(map[string]bool)
	for _, c := range found.Items {
		if ended(&c) {
			continue
		}
		for id := range strings.SplitSeq(c.Labels[labelGPUs], ",") {
			taken[id] = true
		}
	}
	candidates := named
	for i := 0; len(named) == 0 && i < n+len(taken); i++ {
		candidates = append(candidates, strconv.Itoa(i))
	}
	free := slices.DeleteFunc(slices.Clone(candidates), func(id string) bool { return taken[id] })
	if len(free) < n {
		return nil, fmt.Errorf("%w: a worker takes %d GPUs, and %d of the pool's %d are free", provider.ErrCapacity, n, len(free), len(named))
	}
	return free[:n], nil
}

// seconds of a time, rounded up.
func seconds(d time.Duration) int { return int((d + time.Second - 1) / time.Second) }
