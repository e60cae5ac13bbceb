package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/nats-io/nats.go"
)

// announcer is one running Announce.
type announcer struct {
	nudged chan struct{}
	// asked has the inboxes of those who said hello. One who finds it full hears the next beat.
	asked chan string
}

// Announce sends beat() each Beat, at once when asked or when Nudge is called, until ctx ends; then one farewell, after which nobody waits for its silence, and it returns nil.
// beat is called by this goroutine alone; what it returns must not change afterwards. Heartbeats are not sent while NATS is away.
func (c *Cluster) Announce(ctx context.Context, beat func() Heartbeat) error {
	b := beat()
	if b.ID == "" || b.Role == "" {
		return errors.New("cluster: a heartbeat needs an id and a role")
	}
	a := &announcer{nudged: make(chan struct{}, 1), asked: make(chan string, 256)}
	c.mu.Lock()
	c.announcers[a] = struct{}{}
	c.registry.own[processOf(b)] = true
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		delete(c.announcers, a)
		c.mu.Unlock()
	}()
	subject := beatSubject + string(b.Role) + "." + token(b.ID)

	c.send(subject, beatMessage{Heartbeat: b})
	ticker := time.NewTicker(c.cfg.Beat)
	defer ticker.Stop()
	for {
		to := subject
		select {
		case <-ctx.Done():
			c.send(subject, beatMessage{Heartbeat: beat(), Farewell: true})
			// The connection is likely to be closed next. The farewell has a second to get out; if it does not, silence tells the same.
			flush, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
			defer cancel()
			if c.nc.IsConnected() {
				_ = c.nc.FlushWithContext(flush)
			}
			return nil
		case <-ticker.C:
		case <-a.nudged:
		case to = <-a.asked:
		}
		c.send(to, beatMessage{Heartbeat: beat()})
	}
}

// send publishes a heartbeat. A failure is not the announcer's to handle: the others judge by what they hear, and NATS being away is nobody's death.
func (c *Cluster) send(subject string, b beatMessage) {
	data, err := json.Marshal(b)
	if err == nil {
		err = c.nc.Publish(subject, data)
	}
	if err != nil {
		c.log.Debug("heartbeat not sent", "id", b.ID, "err", err)
	}
}

// Nudge makes this process's announcers beat now.
func (c *Cluster) Nudge() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for a := range c.announcers {
		signal(a.nudged)
	}
}

// asked has this process's announcers answer a hello: to its sender alone, lest a fleet that starts at once shout at itself.
func (c *Cluster) asked(m *nats.Msg) {
	if m.Reply == "" {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for a := range c.announcers {
		select {
		case a.asked <- m.Reply:
		default:
		}
	}
}

// processOf is the process that b comes from.
func processOf(b Heartbeat) string {
	if b.Epoch == "" {
		return b.ID
	}
	return b.Epoch
}
