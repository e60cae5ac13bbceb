package cluster

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/millrace/millrace/internal/job"
)

const (
	// rememberFor is how long a model is known after it was last served.
	rememberFor = 24 * time.Hour
	// learnsWithin is after how long a worker that starts, and still does not know its models, is not waited for any more: no engine takes so long to load. It is, too, for how long workers are waited for that start again and again;
	// learnsGap without one ends that.
	learnsWithin = time.Hour
	learnsGap    = time.Minute
	// rereadEvery is how often the bucket is read anew while it is followed: that drops what it forgot, and bounds how long a follower is blind that lost the bucket unnoticed.
	rereadEvery = time.Minute
)

// KnownModel is what is remembered of a model for 24 h after a worker last served it, and while a pool names it.
type KnownModel struct {
	Model job.Model `json:"model"`
	// Largest is the longest request in tokens that fits its largest worker; 0 is unknown, and keeps what is remembered.
	Largest job.Tokens `json:"largest"`
	// Seen is when a worker last said that it serves it, unix ms; 0 if none has.
	Seen int64 `json:"seen"`
	// Named is when it was last said that a pool names it, unix ms; 0 if none does.
	Named int64 `json:"named,omitempty"`
	// First is since when it is known without a break: the start of the first worker, or when a pool first named it, unix ms. In Remember 0 is Seen.
	First  int64  `json:"first,omitempty"`
	Engine string `json:"engine,omitempty"`
}

// modelEntry is a KnownModel as stored.
type modelEntry struct {
	KnownModel
	// LargestSeen is when a worker last said that it takes Largest, unix ms.
	LargestSeen int64 `json:"largest_seen"`
}

// merge is what is remembered once m has been heard, given what was remembered before: the largest worker of the last 24 h counts, whichever spoke last.
func (e modelEntry) merge(m KnownModel) modelEntry {
	merged := modelEntry{KnownModel: m, LargestSeen: m.Seen}
	merged.Engine = cmp.Or(m.Engine, e.Engine)
	if e.Largest > m.Largest && m.Seen-e.LargestSeen < rememberFor.Milliseconds() {
		merged.Largest, merged.LargestSeen = e.Largest, e.LargestSeen
	}
	merged.Seen, merged.Named = max(e.Seen, m.Seen), e.Named
	merged.First = cmp.Or(m.First, m.Seen)
	if before := cmp.Or(e.First, e.Seen); before > 0 {
		merged.First = min(before, merged.First)
	}
	return merged
}

// knownAt tells whether the model is known: a worker served it lately, or a pool names it. That it does is said again and again; when nobody says so for as long, nobody was there to say that it does not.
func (m *KnownModel) knownAt(now time.Time) bool {
	return now.Sub(time.UnixMilli(max(m.Seen, m.Named))) < rememberFor
}

func (c *Cluster) modelBucket() bucket {
	return bucket{name: "models", ttl: rememberFor, replicas: c.cfg.Replicas, direct: true}
}

func (c *Cluster) openModels(ctx context.Context) (jetstream.KeyValue, error) {
	return c.modelBucket().open(ctx, c.js)
}

// Remember stores that the model is served now. Call it when a worker becomes ready and then about once a minute.
func (c *Cluster) Remember(ctx context.Context, m KnownModel) error {
	if m.Seen == 0 {
		m.Seen = time.Now().UnixMilli()
	}
	return c.changeModel(ctx, m.Model, func(old modelEntry) modelEntry { return old.merge(m) })
}

// Name stores that a pool names the model, whether or not a worker ever serves it. Call it when the pool is made and then about once a minute.
func (c *Cluster) Name(ctx context.Context, m job.Model) error {
	now := time.Now().UnixMilli()
	return c.changeModel(ctx, m, func(e modelEntry) modelEntry {
		if !e.knownAt(time.UnixMilli(now)) {
			e.First = now
		}
		e.Model, e.Named, e.First = m, now, cmp.Or(e.First, now)
		return e
	})
}

// Unname stores that no pool names the model any more: it is forgotten, unless a worker served it lately.
func (c *Cluster) Unname(ctx context.Context, m job.Model) error {
	now := time.Now()
	return c.changeModel(ctx, m, func(e modelEntry) modelEntry {
		if e.Named = 0; !e.knownAt(now) {
			return modelEntry{}
		}
		return e
	})
}

// changeModel makes of what is stored of a model, which may be nothing, what change returns; the zero value removes it.
func (c *Cluster) changeModel(ctx context.Context, m job.Model, change func(modelEntry) modelEntry) error {
	ctx, cancel := withTimeout(ctx, timeout)
	defer cancel()
	var err error
	for range 5 { // others may write of the model at the same time
		if err = c.tryChangeModel(ctx, m, change); !errors.Is(err, jetstream.ErrKeyExists) && !errors.Is(err, jetstream.ErrKeyRevisionMismatch) {
			break
		}
	}
	if err != nil {
		return fmt.Errorf("remembering the model %s: %w", m, err)
	}
	return nil
}

func (c *Cluster) tryChangeModel(ctx context.Context, m job.Model, change func(modelEntry) modelEntry) error {
	kv, err := c.openModels(ctx) // makes it again if it was lost
	if err != nil {
		return err
	}
	key := token(string(m))
	entry, err := kv.Get(ctx, key)
	if err != nil && !errors.Is(err, jetstream.ErrKeyNotFound) {
		return err
	}
	var old modelEntry
	if err == nil {
		// What cannot be read is not worth keeping.
		_ = json.Unmarshal(entry.Value(), &old)
	}
	changed := change(old)
	data, failed := json.Marshal(changed)
	if failed != nil {
		return failed
	}
	gone := changed == modelEntry{}
	switch {
	case gone && err != nil: // there was none
		err = nil
	case gone:
		err = kv.Delete(ctx, key, jetstream.LastRevision(entry.Revision()))
	case err != nil:
		_, err = kv.Create(ctx, key, data)
	default:
		_, err = kv.Update(ctx, key, data, entry.Revision())
	}
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch { // here from now on, and elsewhere once the entry is heard of
	case c.models == nil:
	case gone:
		delete(c.models, m)
	default:
		c.models[m] = changed.KnownModel
	}
	return nil
}

// Known lists what is remembered and what live workers serve, Largest the largest of both, by name. The KV bucket is watched, so this does no I/O.
func (c *Cluster) Known() []KnownModel {
	now := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	known := make(map[job.Model]KnownModel, len(c.models))
	for name, m := range c.models {
		if m.knownAt(now) {
			known[name] = m
		}
	}
	for _, member := range c.registry.alive() {
		if !serves(member, "") {
			continue
		}
		// By the wall clock, as Seen is.
		seen := now.Add(-now.Sub(member.Heard)).UnixMilli()
		for _, name := range member.Worker.Models {
			m, begun := known[name], cmp.Or(member.Started, seen)
			known[name] = KnownModel{
				Model: name, Largest: max(m.Largest, member.Worker.Largest), Seen: max(m.Seen, seen), Named: m.Named, First: min(cmp.Or(m.First, begun), begun), Engine: cmp.Or(member.Worker.Engine, m.Engine),
			}
		}
	}
	list := make([]KnownModel, 0, len(known))
	for _, m := range known {
		list = append(list, m)
	}
	slices.SortFunc(list, func(a, b KnownModel) int { return cmp.Compare(a.Model, b.Model) })
	return list
}

// Learning tells whether a live worker starts that does not know yet which models it will serve: one that nobody knows may come to be known. It tells so for an hour at most: of each worker, and as long as there is always one, since this process first heard of one.
func (c *Cluster) Learning() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.registry.learning(time.Now())
}

func (r *registry) learning(now time.Time) bool {
	if now.Sub(r.learns) >= learnsWithin {
		return false
	}
	return slices.ContainsFunc(r.alive(), func(m Member) bool { return learns(m.Heartbeat, now) })
}

// learns tells whether a heartbeat is that of a worker that may come to know its models.
func learns(b Heartbeat, now time.Time) bool {
	w := b.Worker
	return b.Role == RoleWorker && w != nil && w.State == Starting && len(w.Models) == 0 && !w.NoneWanted && now.Sub(time.UnixMilli(int64(w.StateSince*1000))) < learnsWithin
}

// followModels keeps c.models as the bucket has it, until ctx ends. It closes first once it was read for the first time.
func (c *Cluster) followModels(ctx context.Context, first chan<- struct{}) {
	failing := false
	for ctx.Err() == nil {
		err := c.followOnce(ctx, func() {
			failing = false
			if first != nil {
				close(first)
				first = nil
			}
		})
		if err == nil {
			continue
		}
		// What was known stays known. NATS may be away, or the bucket lost; once is enough to tell.
		if ctx.Err() == nil && !failing {
			c.log.Warn("known models cannot be followed", "err", err)
		}
		failing = true
		select {
		case <-time.After(time.Second):
		case <-c.reload:
		case <-ctx.Done():
		}
	}
}

// followOnce reads the bucket, calls read, and follows what changes until it is time to read it anew.
func (c *Cluster) followOnce(ctx context.Context, read func()) error {
	// The watch lives as long as its context, so that has no deadline: it is cancelled unless all was read in time.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	late := time.AfterFunc(timeout, cancel)
	defer late.Stop()
	kv, err := c.openModels(ctx)
	if err != nil {
		return err
	}
	watch, err := kv.WatchAll(ctx)
	if err != nil {
		return fmt.Errorf("watching the bucket %s: %w", kv.Bucket(), err)
	}
	defer func() {
		_ = watch.Stop() // fails only if it has ended by itself
		for range watch.Updates() {
			// Its callback may be waiting to hand an update over, and would hold the watch open.
		}
	}()
	again := time.NewTimer(rereadEvery)
	defer again.Stop()
	models := make(map[job.Model]KnownModel)
	for {
		select {
		case <-again.C:
			return nil
		case <-c.reload:
			return nil
		case entry, ok := <-watch.Updates():
			switch {
			case !ok:
				return fmt.Errorf("watching the bucket %s: it ended", kv.Bucket())
			case entry == nil:
				late.Stop()
				c.mu.Lock()
				c.models = models
				c.mu.Unlock()
				read()
			default:
				c.mu.Lock()
				apply(models, entry)
				c.mu.Unlock()
			}
		}
	}
}

// apply puts an entry of the bucket into models.
func apply(models map[job.Model]KnownModel, entry jetstream.KeyValueEntry) {
	var e modelEntry
	switch {
	case entry.Operation() != jetstream.KeyValuePut:
		maps.DeleteFunc(models, func(m job.Model, _ KnownModel) bool { return token(string(m)) == entry.Key() })
	case json.Unmarshal(entry.Value(), &e) == nil:
		e.First = cmp.Or(e.First, e.Seen)
		models[e.Model] = e.KnownModel
	}
}
