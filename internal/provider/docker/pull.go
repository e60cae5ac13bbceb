package docker

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/jsonstream"
	"github.com/moby/moby/client"

	"github.com/millrace/millrace/internal/provider"
)

// pull is the loading of an image from its registry. It goes on when who asked for it waits no more: an engine's takes many minutes, and all who start a worker of it meanwhile wait for the same. If this process ends, Docker keeps the layers that
// are whole.
type pull struct {
	cancel context.CancelCauseFunc
	done   chan struct{}
	// Once done is closed: how it ended, and when.
	err   error
	ended time.Time

	mu     sync.Mutex
	layers map[string]layer
}

// layer is what Docker last said of a layer.
type layer struct {
	status      string
	here, whole int64 // bytes of it, 0 while nothing is known
	step        int64 // of what the status says
}

// errStall is the end of a pull that makes no progress.
var errStall = errors.New("nothing more of it came")

// image returns once the engine has the image, or says that it will be later.
func (d *daemon) image(ctx context.Context, name string) error {
	if there, err := d.hasImage(ctx, name); there || err != nil {
		return err
	}
	l, err := d.pull(ctx, name)
	if err != nil {
		return err
	}
	patience := time.NewTimer(d.patience)
	defer patience.Stop()
	select {
	case <-l.done:
		d.forget(name, l)
		return l.err
	case <-patience.C:
		return &provider.LaterError{For: "pulling the image " + name + l.progress()}
	case <-ctx.Done():
		return fmt.Errorf("pulling the image %s%s: %w", name, l.progress(), ctx.Err())
	}
}

func (d *daemon) hasImage(ctx context.Context, name string) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, answer)
	defer cancel()
	_, err := d.ImageInspect(ctx, name)
	switch {
	case err == nil:
		return true, nil
	case errdefs.IsInvalidArgument(err):
		return false, fmt.Errorf("%w: the image %s: %w", provider.ErrInvalid, name, short(err))
	case !errdefs.IsNotFound(err):
		return false, fmt.Errorf("looking for the image %s: %w", name, err)
	}
	return false, nil
}

// pull begins to load an image, or joins who does already.
func (d *daemon) pull(ctx context.Context, name string) (*pull, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.ended {
		return nil, errors.New("pulling an image: the provider is closed")
	}
	if l := d.pulls[name]; l != nil && !l.old() {
		return l, nil
	}
	own, cancel := context.WithCancelCause(context.WithoutCancel(ctx)) // until the provider is closed
	l := &pull{cancel: cancel, done: make(chan struct{}), layers: make(map[string]layer)}
	d.pulls[name] = l
	d.wg.Go(func() {
		defer cancel(nil)
		l.err = d.load(own, name, l)
		l.ended = time.Now()
		close(l.done)
		if l.err == nil {
			d.forget(name, l)
		}
	})
	return l, nil
}

// forget makes the next who needs the image look anew. A pull that failed is kept until somebody has heard of it: whoever waits for it asks now and then.
func (d *daemon) forget(name string, l *pull) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.pulls[name] == l {
		delete(d.pulls, name)
	}
}

// old tells whether a pull has failed so long ago that nobody waits for it.
func (l *pull) old() bool {
	select {
	case <-l.done:
		return time.Since(l.ended) > answer
	default:
		return false
	}
}

// load loads an image, unless another one has done so since it was looked for.
func (d *daemon) load(ctx context.Context, name string, l *pull) error {
	if there, err := d.hasImage(ctx, name); there || err != nil {
		return err
	}
	begun := time.Now()
	d.log.Info("pulling an image", "image", name)
	watch := time.AfterFunc(d.stall, func() { l.cancel(errStall) })
	defer watch.Stop()
	stream, err := d.ImagePull(ctx, name, client.ImagePullOptions{})
	if err != nil {
		return l.refused(ctx, name, err)
	}
	for m, err := range stream.JSONMessages(ctx) {
		switch {
		case err != nil:
			return l.refused(ctx, name, err)
		case m.Error != nil:
			return l.refused(ctx, name, m.Error)
		}
		if moved, unpacking := l.hear(m); moved && unpacking {
			watch.Reset(d.unpacking)
		} else if moved {
			watch.Reset(d.stall)
		}
	}
	if ctx.Err() != nil {
		return l.refused(ctx, name, ctx.Err())
	}
	d.log.Info("an image is pulled", "image", name, "took", time.Since(begun))
	return nil
}

// refused says what a failed load means. A registry that does not know the image, or does not give it, will not do so the next time either; one that cannot be reached may.
func (l *pull) refused(ctx context.Context, name string, err error) error {
	if errors.Is(context.Cause(ctx), errStall) {
		return fmt.Errorf("pulling the image %s%s: nothing more of it came for long, so it was given up: see to the registry, and to the disk, of that docker engine", name, l.progress())
	}
	text := strings.ToLower(err.Error())
	for _, s := range []string{"not found", "manifest unknown", "name unknown", "does not exist", "access denied", "denied:", "unauthorized", "no matching manifest", "invalid reference"} {
		if strings.Contains(text, s) && !strings.Contains(text, "dial tcp") {
			return fmt.Errorf("%w: docker has no image %s, and its registry does not give it: build it, or pull it by hand, on the machine of that docker engine: %s", provider.ErrInvalid, name, oneLine(short(err).Error()))
		}
	}
	return fmt.Errorf("pulling the image %s: %w", name, short(err))
}

// hear takes in what Docker says. moved: that is news. unpacking: all bytes are here.
func (l *pull) hear(m jsonstream.Message) (moved, unpacking bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	was, known := l.layers[m.ID]
	now := was
	now.status = m.Status
	if p := m.Progress; p != nil {
		now.step = p.Current
		if m.Status == "Downloading" && p.Total > 0 {
			now.here, now.whole = p.Current, p.Total
		}
	}
	if !now.loads() {
		now.here = now.whole
	}
	l.layers[m.ID] = now
	loading := false
	for _, one := range l.layers {
		loading = loading || one.loads()
		unpacking = unpacking || slices.Contains([]string{"Verifying Checksum", "Download complete", "Extracting", "Pull complete"}, one.status)
	}
	return now != was || !known, unpacking && !loading
}

// loads tells whether bytes of the layer are missing.
func (l layer) loads() bool {
	return slices.Contains([]string{"Pulling fs layer", "Waiting", "Downloading"}, l.status) || strings.HasPrefix(l.status, "Retrying in")
}

// progress says how far it is, to be put behind what it is of: "" while that is not known.
func (l *pull) progress() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var here, whole int64
	least := ""
	for _, one := range l.layers {
		here, whole = here+one.here, whole+one.whole
		if one.whole == 0 && one.loads() {
			least = "at least "
		}
	}
	if whole == 0 {
		return ""
	}
	return fmt.Sprintf(", %s of %s%s", size(here), least, size(whole))
}

// size of bytes for people.
func size(bytes int64) string {
	if bytes < 1e9 {
		return fmt.Sprintf("%.0f MB", float64(bytes)/1e6)
	}
	return fmt.Sprintf("%.1f GB", float64(bytes)/1e9)
}

func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }
