package docker

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/moby/moby/client"

	"github.com/millrace/millrace/internal/provider"
)

// pull is the loading of an image from its registry. It goes on when who asked for it waits no more: an engine's takes minutes, and the next start finds more of it done.
type pull struct {
	cancel context.CancelFunc
	done   chan struct{}
	err    error // once done is closed

	mu     sync.Mutex
	layers map[string][2]int64 // bytes loaded, and in all
}

// image returns once the engine has the image.
func (d *daemon) image(ctx context.Context, name string) error {
	look, cancel := context.WithTimeout(ctx, answer)
	defer cancel()
	_, err := d.ImageInspect(look, name)
	switch {
	case err == nil:
		return nil
	case errdefs.IsInvalidArgument(err):
		return fmt.Errorf("%w: the image %s: %w", provider.ErrInvalid, name, short(err))
	case !errdefs.IsNotFound(err):
		return fmt.Errorf("looking for the image %s: %w", name, err)
	}
	l, err := d.pull(ctx, name)
	if err != nil {
		return err
	}
	select {
	case <-l.done:
		return l.err
	case <-ctx.Done():
		return fmt.Errorf("loading the image %s, of which %.0f %% are here: %w", name, 100*l.share(), ctx.Err())
	}
}

// pull begins to load an image, or joins who does already.
func (d *daemon) pull(ctx context.Context, name string) (*pull, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.ended {
		return nil, errors.New("loading an image: the provider is closed")
	}
	if l := d.pulls[name]; l != nil {
		return l, nil
	}
	own, cancel := context.WithCancel(context.WithoutCancel(ctx)) // until the provider is closed
	l := &pull{cancel: cancel, done: make(chan struct{}), layers: make(map[string][2]int64)}
	d.pulls[name] = l
	d.wg.Go(func() {
		defer cancel()
		begun := time.Now()
		d.log.Info("loading an image", "image", name)
		if l.err = d.load(own, name, l); l.err == nil {
			d.log.Info("an image is loaded", "image", name, "took", time.Since(begun))
		}
		d.mu.Lock()
		delete(d.pulls, name)
		d.mu.Unlock()
		close(l.done)
	})
	return l, nil
}

func (d *daemon) load(ctx context.Context, name string, l *pull) error {
	stream, err := d.ImagePull(ctx, name, client.ImagePullOptions{})
	if err != nil {
		return refused(name, err)
	}
	for m, err := range stream.JSONMessages(ctx) {
		switch {
		case err != nil:
			return fmt.Errorf("loading the image %s: %w", name, err)
		case m.Error != nil:
			return refused(name, m.Error)
		case m.Progress == nil:
			d.log.Debug("loading an image", "image", name, "layer", m.ID, "status", m.Status)
		case m.Status == "Downloading":
			l.mu.Lock()
			l.layers[m.ID] = [2]int64{m.Progress.Current, m.Progress.Total}
			l.mu.Unlock()
		}
	}
	return nil
}

// refused says what a failed load means. A registry that does not know the image, or does not give it, will not do so the next time either; one that cannot be reached may.
func refused(name string, err error) error {
	text := strings.ToLower(err.Error())
	for _, s := range []string{"not found", "manifest unknown", "name unknown", "does not exist", "access denied", "denied:", "unauthorized", "no matching manifest", "invalid reference"} {
		if strings.Contains(text, s) && !strings.Contains(text, "dial tcp") {
			return fmt.Errorf("%w: docker has no image %s, and its registry does not give it: build it, or pull it by hand, on the machine of that docker engine: %s", provider.ErrInvalid, name, oneLine(short(err).Error()))
		}
	}
	return fmt.Errorf("loading the image %s: %w", name, short(err))
}

// share of the bytes that are known to be needed, 0..1.
func (l *pull) share() float64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	var here, all int64
	for _, b := range l.layers {
		here, all = here+b[0], all+b[1]
	}
	if all == 0 {
		return 0
	}
	return float64(here) / float64(all)
}

func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }
