package cluster

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nuid"
)

// The times of a lease. The bucket forgets it leaseTTL after the write; its holder trusts it until leaseTrust after it began the last write that succeeded.
const (
	leaseTTL   = 3 * time.Second
	leaseTrust = 2 * time.Second
	leaseRenew = time.Second
	// leaseRetry is how often one who does not hold it tries to take it, leaseAgain how soon a renewal that failed is tried again.
	leaseRetry = 500 * time.Millisecond
	leaseAgain = 100 * time.Millisecond
)

// leaseBucket is in files, since a lease must outlive a restart of the server: from a bucket in memory it would be gone at once, while its holder still trusts it. For
// the same reason epochs must rise across the loss of the bucket. Reads are answered by the leader alone.
func (c *Cluster) leaseBucket() bucket {
	return bucket{name: "leases", ttl: leaseTTL, replicas: c.cfg.Replicas, rising: true}
}

func (c *Cluster) openLeases(ctx context.Context) (jetstream.KeyValue, error) {
	return c.leaseBucket().open(ctx, c.js)
}

// lease is a lease that this process holds.
type lease struct {
	kv    jetstream.KeyValue
	key   string
	value string // tells our entry from those of other holders
	rev   uint64
	// start is when the last write that succeeded began.
	start time.Time
}

// Lead calls fn whenever this process holds the lease `name` (letters, digits and dashes), with a context that ends when the lease can no longer be trusted: 2 s after the start of its last successful renewal, by the monotonic
// clock. epoch rises from leader to leader. When ctx ends fn's context ends, fn is waited for, and the lease is released. It returns nil when ctx ends, and an error only for a bad name.
// If fn returns early the lease is released, and sought again. The lease is renewed while fn still runs after its context ended, so that a successor does not
// meet a leader that is tidying up.
func (c *Cluster) Lead(ctx context.Context, name string, fn func(ctx context.Context, epoch uint64)) error {
	if name == "" || strings.ContainsFunc(name, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '-'
	}) {
		return fmt.Errorf("cluster: the lease's name %q has other characters than letters, digits and dashes", name)
	}
	var kv jetstream.KeyValue
	failing := false
	for {
		l, err := c.acquire(ctx, &kv, name)
		switch {
		case ctx.Err() != nil:
			if l != nil {
				c.release(ctx, l)
			}
			return nil
		case err != nil:
			// Whatever it was (NATS away, a bucket that was lost), trying again is all that can be done; once is enough to tell.
			if !failing {
				c.log.Warn("lease cannot be sought", "lease", name, "err", err)
			}
			failing = true
		case l != nil:
			c.reign(ctx, l, fn)
			fallthrough
		default:
			failing = false
		}
		// Contenders are spread a little, so that they do not write at the same moment.
		retry := time.NewTimer(leaseRetry*9/10 + rand.N(leaseRetry/5))
		select {
		case <-retry.C:
		case <-ctx.Done():
			retry.Stop()
			return nil
		}
	}
}

// acquire tries to take the lease once. It returns nil without an error if another holds it.
func (c *Cluster) acquire(ctx context.Context, kv *jetstream.KeyValue, key string) (*lease, error) {
	ctx, cancel := context.WithTimeout(ctx, leaseTrust)
	defer cancel()
	if *kv == nil {
		opened, err := c.openLeases(ctx)
		if err != nil {
			return nil, err
		}
		*kv = opened
	}
	l := &lease{kv: *kv, key: key, value: nuid.Next(), start: time.Now()}
	var err error
	// If the server takes it and its answer is lost, nobody holds the lease until it is forgotten.
	if l.rev, err = l.kv.Create(ctx, key, []byte(l.value)); errors.Is(err, jetstream.ErrKeyExists) {
		return nil, nil
	} else if err != nil {
		*kv = nil // it may have been lost: open it again
		return nil, fmt.Errorf("taking the lease %s: %w", key, err)
	}
	return l, nil
}

// reign calls fn with a context that the lease keeps alive, and returns once fn has and the lease is released.
func (c *Cluster) reign(ctx context.Context, l *lease, fn func(ctx context.Context, epoch uint64)) {
	epoch := l.rev
	reign, end := context.WithCancel(ctx)
	defer end()
	// The timer, and not the answer to a renewal, ends the trust: a renewal may hang.
	trust := time.AfterFunc(time.Until(l.start.Add(leaseTrust)), end)
	defer trust.Stop()

	c.log.Info("this process leads", "lease", l.key, "epoch", epoch)
	done := make(chan struct{})
	go func() { // ends with fn, which is waited for below
		defer close(done)
		fn(reign, epoch)
	}()
	next := time.NewTimer(time.Until(l.start.Add(leaseRenew)))
	defer next.Stop()
	for held := true; held; {
		select {
		case <-done:
			held = false
			continue
		case <-next.C:
		}
		// Its own deadline, and no end of ctx: fn may still be tidying up.
		deadline := l.start.Add(leaseTrust)
		call, cancel := context.WithDeadline(context.WithoutCancel(ctx), deadline)
		err := l.renew(call)
		cancel()
		switch {
		case err == nil && time.Now().Before(deadline):
			// If the timer has run out just now, reign has ended and setting it again changes nothing.
			trust.Reset(time.Until(l.start.Add(leaseTrust)))
			next.Reset(time.Until(l.start.Add(leaseRenew)))
		case errors.Is(err, jetstream.ErrKeyRevisionMismatch) || !time.Now().Before(deadline):
			c.log.Warn("lease lost", "lease", l.key, "epoch", epoch, "err", err)
			end()
			held = false
		default:
			next.Reset(leaseAgain)
		}
	}
	end()
	<-done
	c.release(ctx, l)
	c.log.Info("this process no longer leads", "lease", l.key, "epoch", epoch)
}

// renew writes the lease again. jetstream.ErrKeyRevisionMismatch says that it is lost.
func (l *lease) renew(ctx context.Context) error {
	start := time.Now()
	rev, err := l.kv.Update(ctx, l.key, []byte(l.value), l.rev)
	if errors.Is(err, jetstream.ErrKeyRevisionMismatch) {
		// It may be our own earlier renewal whose answer was lost.
		entry, found := l.kv.Get(ctx, l.key)
		if found != nil || string(entry.Value()) != l.value {
			return fmt.Errorf("renewing the lease %s: %w", l.key, err)
		}
		rev, err = l.kv.Update(ctx, l.key, []byte(l.value), entry.Revision())
	}
	if err != nil {
		return fmt.Errorf("renewing the lease %s: %w", l.key, err)
	}
	l.rev, l.start = rev, start
	return nil
}

// release gives the lease up. If it is another's by now, or NATS is away, nothing happens: it is forgotten by itself.
func (c *Cluster) release(ctx context.Context, l *lease) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second) // a release matters most when ctx has ended
	defer cancel()
	if err := l.kv.Delete(ctx, l.key, jetstream.LastRevision(l.rev)); err != nil {
		c.log.Debug("lease not released", "lease", l.key, "err", err)
	}
}
