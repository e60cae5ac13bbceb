package cluster

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// bucket describes a KV bucket of one revision per key, kept in files.
type bucket struct {
	name string
	// ttl is how long an entry lives after it was written.
	ttl      time.Duration
	replicas int
	// direct lets any replica answer reads, which may then be stale.
	direct bool
	// rising makes revisions rise even if the bucket was lost and is made again: they begin at the time in milliseconds, and are written much more slowly than time passes.
	rising bool
}

// open creates the bucket, or changes an existing one's settings to these. The stream below is made directly, for a KV bucket's own settings do not say where revisions begin.
func (b bucket) open(ctx context.Context, js jetstream.JetStream) (jetstream.KeyValue, error) {
	name := "KV_" + b.name
	stream, err := js.Stream(ctx, name)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		cfg := jetstream.StreamConfig{
			Name: name, Subjects: []string{"$KV." + b.name + ".>"}, Storage: jetstream.FileStorage, Discard: jetstream.DiscardNew,
			MaxMsgsPerSubject: 1, MaxMsgs: -1, MaxBytes: -1, MaxMsgSize: -1, MaxConsumers: -1,
			MaxAge: b.ttl, Duplicates: min(b.ttl, 2*time.Minute), Replicas: b.replicas,
			AllowRollup: true, DenyDelete: true, AllowDirect: b.direct,
		}
		if b.rising {
			cfg.FirstSeq = uint64(time.Now().UnixMilli())
		}
		// Another process may create it at the same time: then it is there, with ours or its settings.
		if stream, err = js.CreateStream(ctx, cfg); errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) {
			stream, err = js.Stream(ctx, name)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("cluster: opening the bucket %s: %w", b.name, err)
	}
	if err := b.migrate(ctx, js, stream.CachedInfo().Config); err != nil {
		return nil, err
	}
	kv, err := js.KeyValue(ctx, b.name)
	if err != nil {
		return nil, fmt.Errorf("cluster: opening the bucket %s: %w", b.name, err)
	}
	return kv, nil
}

// migrate brings an existing bucket's settings to b's.
func (b bucket) migrate(ctx context.Context, js jetstream.JetStream, cfg jetstream.StreamConfig) error {
	if cfg.Storage != jetstream.FileStorage {
		return fmt.Errorf("cluster: the bucket %s exists with storage %s and needs %s, which cannot be changed: delete the stream %s", b.name, cfg.Storage, jetstream.FileStorage, cfg.Name)
	}
	var diff []string
	change := func(what string, differs bool, has, needs any, apply func()) {
		if differs {
			diff = append(diff, fmt.Sprintf("%s %v instead of %v", what, has, needs))
			apply()
		}
	}
	change("max age", cfg.MaxAge != b.ttl, cfg.MaxAge, b.ttl, func() { cfg.MaxAge, cfg.Duplicates = b.ttl, min(b.ttl, 2*time.Minute) })
	change("replicas", cfg.Replicas != b.replicas, cfg.Replicas, b.replicas, func() { cfg.Replicas = b.replicas })
	change("history", cfg.MaxMsgsPerSubject != 1, cfg.MaxMsgsPerSubject, 1, func() { cfg.MaxMsgsPerSubject = 1 })
	change("direct reads", cfg.AllowDirect != b.direct, cfg.AllowDirect, b.direct, func() { cfg.AllowDirect = b.direct })
	if len(diff) == 0 {
		return nil
	}
	if _, err := js.UpdateStream(ctx, cfg); err != nil {
		return fmt.Errorf("cluster: the bucket %s exists with %s, and changing it: %w", b.name, strings.Join(diff, ", "), err)
	}
	return nil
}
