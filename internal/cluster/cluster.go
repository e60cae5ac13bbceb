package cluster

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/millrace/millrace/internal/job"
)

// The subjects of core NATS: each member's heartbeats under beatSubject, and the question to all who they are.
const (
	beatSubject  = "millrace.beat."
	helloSubject = "millrace.hello"
)

// timeout bounds a call of NATS for which the caller gave no deadline.
const timeout = 5 * time.Second

// Config of a Cluster.
type Config struct {
	// Replicas of the KV buckets. Default 1.
	Replicas int
	// Beat is the heartbeat's period, Silence after how long without one a process counts as dead: at least three beats. Defaults 1 s and 3 s.
	// Where a fault may be everybody's, ten beats more pass.
	Beat, Silence time.Duration
}

func (c Config) withDefaults() (Config, error) {
	if c.Replicas == 0 {
		c.Replicas = 1
	}
	if c.Beat == 0 {
		c.Beat = time.Second
	}
	if c.Silence == 0 {
		c.Silence = 3 * c.Beat
	}
	switch {
	case c.Replicas < 1 || c.Replicas > 5:
		return c, fmt.Errorf("cluster: replicas is %d: use 1 to 5", c.Replicas)
	case c.Beat < 10*time.Millisecond:
		return c, fmt.Errorf("cluster: beat is %s: use at least 10ms", c.Beat)
	case c.Silence < 3*c.Beat:
		return c, fmt.Errorf("cluster: silence is %s: use at least three times the beat of %s", c.Silence, c.Beat)
	}
	return c, nil
}

// Cluster is one process's view. Safe for concurrent use.
type Cluster struct {
	nc   *nats.Conn
	js   jetstream.JetStream
	cfg  Config
	log  *slog.Logger
	subs []*nats.Subscription

	inbox  string // where members answer this process's hello
	opened time.Time
	stop   context.CancelFunc
	closed <-chan struct{}
	wg     sync.WaitGroup
	// reload tells the follower of the known models to begin anew.
	reload chan struct{}

	mu         sync.Mutex // guards what follows
	registry   *registry
	observed   time.Time     // when the tick looked last
	reconnects uint64        // as the connection counted them then
	changed    chan struct{} // closed, and another put in its place, when somebody went
	announcers map[*announcer]struct{}
	models     map[job.Model]KnownModel // what the bucket holds
}

// Open subscribes to heartbeats, asks all members to say who they are at once, and opens the KV buckets. An existing bucket's settings are changed to ours; where that
// is impossible the error names the difference.
func Open(ctx context.Context, nc *nats.Conn, cfg Config, log *slog.Logger) (*Cluster, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, fmt.Errorf("cluster: opening JetStream: %w", err)
	}
	start, cancel := withTimeout(ctx, timeout)
	defer cancel()

	now := time.Now()
	run, stop := context.WithCancel(context.WithoutCancel(ctx)) // lives until Close
	c := &Cluster{
		nc: nc, js: js, cfg: cfg, log: log, inbox: nc.NewInbox(), opened: now, stop: stop, closed: run.Done(), reload: make(chan struct{}, 1),
		registry: newRegistry(rules{beat: cfg.Beat, silence: cfg.Silence, grace: graceBeats * cfg.Beat}, now),
		observed: now, reconnects: nc.Stats().Reconnects, changed: make(chan struct{}), announcers: make(map[*announcer]struct{}),
		models: make(map[job.Model]KnownModel),
	}
	if err := c.start(start, run); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

func (c *Cluster) start(ctx, run context.Context) error {
	for _, s := range []struct {
		subject string
		handle  nats.MsgHandler
	}{{beatSubject + ">", c.heard}, {c.inbox, c.heard}, {helloSubject, c.asked}} {
		sub, err := c.nc.Subscribe(s.subject, s.handle)
		if err != nil {
			return fmt.Errorf("cluster: subscribing to %s: %w", s.subject, err)
		}
		c.subs = append(c.subs, sub)
	}
	c.hello()
	if _, err := c.openLeases(ctx); err != nil {
		return err
	}
	if _, err := c.openModels(ctx); err != nil {
		return err
	}
	first := make(chan struct{})
	c.wg.Go(func() { c.followModels(run, first) })
	c.wg.Go(func() { c.tick(run) })
	select {
	case <-first:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("cluster: reading the known models: %w", ctx.Err())
	}
}

// Close unsubscribes, and ends the channels of Deaths.
func (c *Cluster) Close() {
	c.stop()
	for _, s := range c.subs {
		_ = s.Unsubscribe() // fails only on a connection that is closed, which ended it
	}
	c.wg.Wait()
}

// tick looks after the connection and judges who is dead, until ctx ends.
func (c *Cluster) tick(ctx context.Context) {
	ticker := time.NewTicker(c.cfg.Beat / 10)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		// The status is read before the count: if it says connected, a cut that came in between shows in the count.
		connected, reconnects := c.nc.IsConnected(), c.nc.Stats().Reconnects
		now := time.Now()
		c.mu.Lock()
		back := connected && (reconnects != c.reconnects || !c.registry.connected)
		// A tick that comes this late means that the process or its machine stood still, and with it everything that it should have heard.
		stood := now.Sub(c.observed) > (c.cfg.Silence-c.cfg.Beat)/2
		c.observed = now
		if connected {
			c.reconnects = reconnects
		}
		c.registry.link(now, connected, back || stood)
		if c.registry.judge(now) {
			c.wakeWatchers()
		}
		c.mu.Unlock()
		if back {
			c.hello()
			c.Nudge()
			signal(c.reload)
		}
	}
}

// wakeWatchers tells the watchers of deaths that somebody went. c.mu is held.
func (c *Cluster) wakeWatchers() {
	close(c.changed)
	c.changed = make(chan struct{})
}

// hello asks all members to answer this process at once. If the message is lost they are heard within a beat.
func (c *Cluster) hello() { _ = c.nc.PublishRequest(helloSubject, c.inbox, nil) }

// heard takes a heartbeat in.
func (c *Cluster) heard(m *nats.Msg) {
	var b beatMessage
	if err := json.Unmarshal(m.Data, &b); err != nil || b.ID == "" {
		c.log.Debug("heartbeat that cannot be read", "subject", m.Subject, "err", err)
		return
	}
	b.Epoch = processOf(b.Heartbeat)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.registry.hear(time.Now(), b) {
		c.wakeWatchers()
	}
}

// Connected tells whether NATS is connected now, and since when: a time when this process itself had stood still counts as not connected.
func (c *Cluster) Connected() (bool, time.Time) {
	connected := c.nc.IsConnected()
	c.mu.Lock()
	defer c.mu.Unlock()
	return connected, c.registry.since
}

// Listening is for how long without a break this process has heard heartbeats: since its connection came back, but no longer than since begun.
func (c *Cluster) Listening(begun time.Time) time.Duration {
	_, since := c.Connected()
	if since.Before(begun) {
		since = begun
	}
	return time.Since(since)
}

// Members lists who is alive as Alive has it, by id.
func (c *Cluster) Members() []Member {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.registry.alive()
}

// Workers lists the live workers that serve m ("" = all), whatever their state, by id.
func (c *Cluster) Workers(m job.Model) []Member {
	var list []Member
	for _, member := range c.Members() {
		if serves(member, m) {
			list = append(list, member)
		}
	}
	return list
}

func serves(m Member, model job.Model) bool {
	if m.Role != RoleWorker || m.Worker == nil {
		return false
	}
	if model == "" {
		return true
	}
	return slices.Contains(m.Worker.Models, model)
}

// withTimeout gives ctx a deadline if it has none.
func withTimeout(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, d)
}

// signal puts a value into ch, which holds one, unless one is there.
func signal(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// token makes one subject or key token of any name.
func token(name string) string { return base64.RawURLEncoding.EncodeToString([]byte(name)) }
