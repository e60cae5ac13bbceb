package docker

import (
	"cmp"
	"context"
	"errors"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/client"

	"github.com/millrace/millrace/internal/scale"
)

// Stop sends SIGTERM to the worker, and SIGKILL once the pool's drain is over, or the longer one that it was started with; then its engine ends, and the containers are removed. Docker keeps to that also when nobody waits for it any more.
func (p *Provider) Stop(ctx context.Context, pool *scale.Pool, name string) error {
	err := p.stop(ctx, pool, name)
	return p.explain(pool, "stopping worker "+name, err)
}

func (p *Provider) stop(ctx context.Context, pool *scale.Pool, name string) error {
	d, at, err := p.daemon(ctx, pool)
	if err != nil {
		return err
	}
	all, err := d.find(ctx, at, pool, name)
	if err != nil || all[name] == nil {
		return err
	}
	return d.end(ctx, all[name], cmp.Or(time.Duration(pool.Drain), defaultDrain))
}

// end ends an instance and removes it. The worker's container is the last to go, so that it stays listed until nothing is left.
func (d *daemon) end(ctx context.Context, i *instance, drain time.Duration) error {
	if i.worker != nil && !ended(i.worker) {
		if own, err := time.ParseDuration(i.worker.Labels[labelDrain]); err == nil { // its pool's may have become shorter since it was started
			drain = max(drain, own)
		}
		if err := d.halt(ctx, i.worker, drain+d.grace); err != nil {
			return err
		}
	}
	if i.engine != nil {
		soon := seconds(d.grace)
		if _, err := d.ContainerStop(ctx, i.engine.ID, client.ContainerStopOptions{Timeout: &soon}); err != nil && !errdefs.IsNotFound(err) {
			return err
		}
		if err := d.remove(ctx, i.engine.ID); err != nil {
			return err
		}
	}
	if i.worker != nil {
		return d.remove(ctx, i.worker.ID)
	}
	return nil
}

// halt tells a worker to end, and returns once it has. A second signal would make it hurry: the new name says that it has had the first.
func (d *daemon) halt(ctx context.Context, c *container.Summary, patience time.Duration) error {
	timeout := seconds(patience)
	_, err := d.ContainerRename(ctx, c.ID, client.ContainerRenameOptions{NewName: strings.TrimSuffix(c.Names[0], stoppingSuffix) + stoppingSuffix})
	switch {
	case errdefs.IsNotFound(err):
		return nil
	case errdefs.IsInvalidArgument(err): // it has that name already: another one stops it, or did. If that one died before it could, the worker is told below, after a drain's time
		err := d.await(ctx, c.ID, container.WaitConditionNotRunning, patience)
		if err == nil || !errors.Is(err, errPatience) {
			return err
		}
		timeout = seconds(d.grace)
	case err != nil:
		return err
	}
	// If we crash here, it is told to end by the next Stop, which waits first.
	if _, err := d.ContainerStop(ctx, c.ID, client.ContainerStopOptions{Timeout: &timeout}); err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	return nil
}

// remove removes a container, with what was mounted for it alone, and returns once it is gone.
func (d *daemon) remove(ctx context.Context, id string) error {
	_, err := d.ContainerRemove(ctx, id, client.ContainerRemoveOptions{Force: true, RemoveVolumes: true})
	switch {
	case err == nil || errdefs.IsNotFound(err):
		return nil
	case errdefs.IsConflict(err): // another one removes it
		return d.await(ctx, id, container.WaitConditionRemoved, answer)
	}
	return err
}

// errPatience is the end of a wait.
var errPatience = errors.New("docker has not ended the container in time")

// await waits until a container is in a condition. One that is gone is in all of them.
func (d *daemon) await(ctx context.Context, id string, condition container.WaitCondition, patience time.Duration) error {
	own, cancel := context.WithTimeoutCause(ctx, patience, errPatience)
	defer cancel()
	wait := d.ContainerWait(own, id, client.ContainerWaitOptions{Condition: condition})
	select {
	case <-wait.Result:
		return nil
	case err := <-wait.Error:
		switch {
		case errdefs.IsNotFound(err):
			return nil
		case own.Err() != nil:
			return context.Cause(own)
		}
		return err
	}
}
