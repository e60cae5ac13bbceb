package docker

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/moby/moby/api/pkg/stdcopy"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/client"

	"github.com/millrace/millrace/internal/provider"
	"github.com/millrace/millrace/internal/scale"
)

// List asks Docker for the containers that have the pool's label.
func (p *Provider) List(ctx context.Context, pool *scale.Pool) ([]provider.Instance, error) {
	list, err := p.list(ctx, pool)
	return list, p.explain(pool, "listing the workers of "+pool.Name, err)
}

func (p *Provider) list(ctx context.Context, pool *scale.Pool) ([]provider.Instance, error) {
	d, at, err := p.daemon(ctx, pool)
	if err != nil {
		return nil, err
	}
	all, err := d.find(ctx, at, pool, "")
	if err != nil {
		return nil, err
	}
	var list []provider.Instance
	for _, name := range slices.Sorted(maps.Keys(all)) {
		i := provider.Instance{Name: name}
		var reason string
		if i.State, reason, err = d.state(ctx, all[name]); err != nil {
			return nil, err
		}
		i.Reason = provider.Clean(reason, pool, p.join)
		for _, c := range all[name].parts() {
			i.Created = time.Unix(c.Created, 0) // the worker's, if there is one
		}
		list = append(list, i)
	}
	return list, nil
}

// state of an instance, and why it is not running.
func (d *daemon) state(ctx context.Context, i *instance) (provider.State, string, error) {
	switch {
	case i.stopping():
		return provider.Stopping, "", nil
	case i.worker == nil:
		return provider.Failed, "the worker's container is gone", nil
	}
	state, reason := provider.Running, ""
	if i.engine == nil && i.worker.Labels[labelEngine] != "" {
		state, reason = provider.Pending, "the engine's container is not made yet"
	}
	for _, c := range i.parts() {
		switch {
		case c.State == container.StateCreated || ended(c):
			why, failed, err := d.why(ctx, c)
			if err != nil {
				return "", "", err
			}
			if why != "" && i.worker.Labels[labelEngine] != "" {
				why = "the " + c.Labels[labelPart] + "'s container: " + why
			}
			if failed {
				return provider.Failed, why, nil
			}
			state, reason = provider.Pending, why
		}
	}
	return state, reason, nil
}

// why a container does not run. One that could never be started has failed too.
func (d *daemon) why(ctx context.Context, c *container.Summary) (reason string, failed bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, answer)
	defer cancel()
	found, err := d.ContainerInspect(ctx, c.ID, client.ContainerInspectOptions{})
	switch {
	case errdefs.IsNotFound(err):
		return "it is gone", true, nil
	case err != nil:
		return "", false, err
	case found.Container.State == nil:
		return "it does not run", ended(c), nil
	}
	s := found.Container.State
	switch {
	case s.Status == container.StateCreated && s.Error == "":
		return "it is made and not started yet", false, nil
	case s.Error != "":
		return "docker says: " + s.Error, true, nil
	case !ended(c) && s.Running:
		return "", false, nil // it was started a moment ago
	}
	reason = fmt.Sprintf("it ended by itself with exit code %d", s.ExitCode)
	if s.OOMKilled {
		reason = fmt.Sprintf("it was killed because its memory is used up (OOMKilled, exit code %d)", s.ExitCode)
	}
	if line := d.lastLine(ctx, c.ID); line != "" {
		reason += ": " + line
	}
	return reason, true, nil
}

// lastLine is the last one that a container wrote, as far as that can be read: it is there to explain, and nothing depends on it.
func (d *daemon) lastLine(ctx context.Context, id string) string {
	logs, err := d.ContainerLogs(ctx, id, client.ContainerLogsOptions{ShowStdout: true, ShowStderr: true, Tail: "10"})
	if err != nil {
		return ""
	}
	defer logs.Close() //nolint:errcheck // it was read
	var text bytes.Buffer
	if _, err := stdcopy.StdCopy(&text, &text, logs); err != nil {
		return ""
	}
	lines := strings.FieldsFunc(text.String(), func(r rune) bool { return r == '\n' || r == '\r' })
	for _, line := range slices.Backward(lines) {
		if line = oneLine(line); line != "" {
			return line
		}
	}
	return ""
}
