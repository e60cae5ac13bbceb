package cluster

import (
	"context"
	"time"
)

// Death is a member that fell silent or said farewell.
type Death struct {
	// Heartbeat is the last one heard.
	Heartbeat
	// Farewell: it said so. Charged: heartbeats of other processes kept arriving meanwhile, so that the fault was its own.
	Farewell, Charged bool
}

// Alive tells whether the member id was heard within Silence. While this process is cut off from NATS, and for Silence after it is back or was opened, everybody counts as alive, unless it said farewell
// or was dead before. As with Deaths, ten beats more pass where all fell silent at once or id has not come back after a cut.
func (c *Cluster) Alive(id string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return !c.registry.counts(time.Now(), id, c.opened)
}

// SilentSince tells for an id that may never have been heard whether it counts as dead, `since` being when the observer began to watch (its election).
func (c *Cluster) SilentSince(id string, since time.Time) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.registry.counts(time.Now(), id, since)
}

// Deaths returns a channel of deaths as they are found, until ctx ends, when it is closed. Silence counts from the latest of: last heartbeat heard, this process's own (re)connection, the call of Deaths.
// While cut off nobody dies; if all fall silent at once, or after a cut, ten beats (10 s) more pass first. Who went up to 15 minutes before the call is told too: the observer before may not have
// done what follows from it. Who comes back and falls silent again is told again.
func (c *Cluster) Deaths(ctx context.Context) <-chan Death {
	ch := make(chan Death)
	from := time.Now()
	c.wg.Go(func() {
		defer close(ch)
		told := make(map[string]time.Time)
		for {
			now := time.Now()
			c.mu.Lock()
			list, later := c.registry.deaths(now, from, told)
			changed := c.changed
			c.mu.Unlock()
			for _, d := range list {
				select {
				case ch <- d:
				case <-ctx.Done():
					return
				case <-c.closed:
					return
				}
			}
			var timer <-chan time.Time
			if !later.IsZero() {
				timer = time.After(later.Sub(now))
			}
			select {
			case <-changed:
			case <-timer:
			case <-ctx.Done():
				return
			case <-c.closed:
				return
			}
		}
	})
	return ch
}
