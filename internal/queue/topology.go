package queue

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/millrace/millrace/internal/job"
)

const (
	doneStream   = "DONE"
	doneSubjects = "done.*.*.*"
	longestJob   = 7 * 24 * time.Hour // the longest deadline of a job
	metaModel    = "millrace-model"   // the stream metadata key of the model's real name

	priorityGroup = "workers"
	// maxAckPending is per consumer and shared by all workers: far above what they hold together, for at the limit nothing moves.
	maxAckPending = 100_000
	// maxWaiting pulls per consumer: one per worker. It cannot be changed later.
	maxWaiting = 16_384
	// maxConsumers per stream: three and one per worker, also of those gone for less than laneThreshold. It cannot be changed later.
	maxConsumers = 100_000
	// laneThreshold is how long a worker's consumer stays without a pull.
	laneThreshold = 15 * time.Minute
	// deletionPause is what a server is given to finish the deletion of a stream.
	deletionPause = 300 * time.Millisecond
)

// model is what this process knows of one model's streams. Its names are computed once.
type model struct {
	name     job.Model
	streams  [2]string     // by kind
	prefixes [2]string     // of subjects, by kind, with the last dot
	ensuring chan struct{} // holds one element while somebody makes sure of the streams
	epoch    atomic.Uint64 // counts the times that this was done
	ok       atomic.Bool   // and nothing has happened since that could have taken them away
}

func kindIndex(k Kind) int {
	if k == Live {
		return 1
	}
	return 0
}

func (m *model) stream(k Kind) string { return m.streams[kindIndex(k)] }

func (m *model) prefix(k Kind) string { return m.prefixes[kindIndex(k)] }

func (q *Queue) model(name job.Model) *model {
	if v, ok := q.models.Load(name); ok {
		return v.(*model)
	}
	t := token(string(name))
	v, _ := q.models.LoadOrStore(name, &model{
		name:     name,
		streams:  [2]string{"WORK_" + t, "LIVE_" + t},
		prefixes: [2]string{"work." + t + ".", "live." + t + "."},
		ensuring: make(chan struct{}, 1),
	})
	return v.(*model)
}

func (q *Queue) doneConfig() jetstream.StreamConfig {
	return jetstream.StreamConfig{
		Name: doneStream, Subjects: []string{doneSubjects},
		Retention: jetstream.LimitsPolicy, Storage: jetstream.FileStorage, Replicas: q.cfg.Replicas,
		// DiscardOld, the default, would lose outcomes silently.
		Discard: jetstream.DiscardNew, MaxBytes: q.cfg.DoneMaxBytes, MaxMsgs: -1, MaxMsgSize: -1,
		MaxMsgsPerSubject: 1, MaxAge: longestJob + q.cfg.Retention + 24*time.Hour,
		MaxConsumers: maxConsumers, AllowDirect: true, AllowAtomicPublish: true,
	}
}

func (q *Queue) streamConfig(k Kind, m *model) jetstream.StreamConfig {
	c := jetstream.StreamConfig{
		Name: m.stream(k), Subjects: []string{m.prefix(k) + "*.*.*"},
		Retention: jetstream.WorkQueuePolicy, Storage: jetstream.FileStorage, Replicas: q.cfg.Replicas,
		// One limit and no second: servers have acknowledged what they did not keep where two met.
		Discard: jetstream.DiscardNew, MaxBytes: q.cfg.WorkMaxBytes, MaxMsgs: -1, MaxMsgSize: -1, MaxMsgsPerSubject: -1,
		MaxConsumers: maxConsumers, AllowDirect: true, AllowAtomicPublish: true,
		Metadata: map[string]string{metaModel: string(m.name)},
	}
	if k == Live {
		c.Storage, c.MaxBytes, c.AllowAtomicPublish = jetstream.MemoryStorage, q.cfg.LiveMaxBytes, false
	}
	return c
}

func (q *Queue) ackWait(k Kind) time.Duration {
	if k == Live {
		return q.cfg.LiveAckWait
	}
	return q.cfg.WorkAckWait
}

// consumerConfig is that of a class's shared consumer, or of worker w's own if w is not "".
func (q *Queue) consumerConfig(k Kind, m *model, c job.Class, w job.Worker) jetstream.ConsumerConfig {
	cfg := jetstream.ConsumerConfig{
		Durable: string(c), FilterSubject: m.prefix(k) + string(c) + "." + string(AnyLane) + ".*",
		DeliverPolicy: jetstream.DeliverAllPolicy, AckPolicy: jetstream.AckExplicitPolicy, ReplayPolicy: jetstream.ReplayInstantPolicy,
		AckWait: q.ackWait(k), MaxDeliver: -1, MaxAckPending: maxAckPending, MaxWaiting: maxWaiting,
		PriorityPolicy: jetstream.PriorityPolicyPrioritized, PriorityGroups: []string{priorityGroup},
	}
	if w != "" {
		lane := WorkerLane(w).token()
		cfg.Durable, cfg.FilterSubject = lane, m.prefix(k)+"*."+lane+".*"
		cfg.InactiveThreshold, cfg.MaxWaiting = laneThreshold, 16
		cfg.PriorityPolicy, cfg.PriorityGroups = jetstream.PriorityPolicyNone, nil
	}
	return cfg
}

// EnsureModel creates or repairs the model's two streams and their shared consumers. Cheap when all is there and known to this process.
func (q *Queue) EnsureModel(ctx context.Context, name job.Model) error {
	m := q.model(name)
	if m.ok.Load() {
		return nil
	}
	return q.ensure(ctx, m, m.epoch.Load())
}

// ensure makes sure of the model's streams and consumers, unless somebody has since the caller read seen from m.epoch.
// It gives up after defaultTimeout: a cluster that elects a leader answers nothing that it was asked meanwhile.
func (q *Queue) ensure(ctx context.Context, m *model, seen uint64) error {
	ctx, cancel := q.brief(ctx)
	defer cancel()
	select {
	case m.ensuring <- struct{}{}:
	case <-ctx.Done():
		return fmt.Errorf("ensuring model %s: %w", m.name, transport(ctx.Err()))
	}
	defer func() { <-m.ensuring }()
	if m.ok.Load() && m.epoch.Load() != seen {
		return nil
	}
	for _, k := range []Kind{Work, Live} {
		if err := q.ensureStream(ctx, q.streamConfig(k, m), m.epoch.Load() > 0); err != nil {
			return fmt.Errorf("ensuring model %s: %w", m.name, err)
		}
		for _, c := range job.Classes() {
			if err := q.ensureConsumer(ctx, m.stream(k), q.consumerConfig(k, m, c, "")); err != nil {
				return fmt.Errorf("ensuring model %s: %w", m.name, err)
			}
		}
	}
	m.ok.Store(true)
	m.epoch.Add(1)
	return nil
}

// ensureStream creates a stream, or changes what an existing one has otherwise. What cannot be changed is ErrSettings.
// known says that this process has seen the stream: if it is missing it has been deleted just now. Then its folder may still be in deletion, and would take
// the new stream's files along.
func (q *Queue) ensureStream(ctx context.Context, want jetstream.StreamConfig, known bool) error {
	for try := 0; ; try++ {
		s, err := q.js.Stream(ctx, want.Name)
		switch {
		case err == nil:
			return q.migrateStream(ctx, s.CachedInfo().Config, want)
		case want.Storage == jetstream.MemoryStorage && hasCode(err, codeStreamOffline, codeStreamOfflineFor):
			// The node that held it is gone, and its messages with it: their APIs publish them again.
			q.log.Warn("a memory stream is offline: making it anew", "stream", want.Name)
			if err := q.js.DeleteStream(ctx, want.Name); err != nil && !hasCode(err, codeNoStream) {
				return fmt.Errorf("deleting the offline stream %s: %w", want.Name, outward(classify(err)))
			}
		case !hasCode(err, codeNoStream):
			return fmt.Errorf("reading stream %s: %w", want.Name, outward(classify(err)))
		}
		if known && want.Storage == jetstream.FileStorage {
			q.log.Error("a stream is gone: making it anew", "stream", want.Name)
			select {
			case <-time.After(deletionPause):
			case <-ctx.Done():
				return fmt.Errorf("creating stream %s: %w", want.Name, transport(ctx.Err()))
			}
		}
		if _, err = q.js.CreateStream(ctx, want); err == nil {
			return nil
		}
		if try > 0 || !hasCode(err, codeNameInUse) { // another process, with other settings, was quicker
			return fmt.Errorf("creating stream %s: %w", want.Name, outward(classify(err)))
		}
	}
}

// setting is one way in which what exists differs from what is wanted.
type setting struct {
	field      string
	have, want any
}

func differing(all []setting) []setting {
	return slices.DeleteFunc(all, func(s setting) bool { return reflect.DeepEqual(s.have, s.want) })
}

func settingsError(what string, diff []setting, cause error) error {
	parts := make([]string, len(diff))
	for i, s := range diff {
		parts[i] = fmt.Sprintf("%s is %v, must be %v", s.field, s.have, s.want)
	}
	return fmt.Errorf("%w: %s: %s: %w", ErrSettings, what, strings.Join(parts, "; "), cause)
}

func (q *Queue) migrateStream(ctx context.Context, have, want jetstream.StreamConfig) error {
	diff := differing([]setting{
		{"subjects", have.Subjects, want.Subjects},
		{"retention", have.Retention, want.Retention},
		{"storage", have.Storage, want.Storage},
		{"replicas", have.Replicas, want.Replicas},
		{"discard", have.Discard, want.Discard},
		{"discard_new_per_subject", have.DiscardNewPerSubject, want.DiscardNewPerSubject},
		{"max_bytes", have.MaxBytes, want.MaxBytes},
		{"max_msgs", have.MaxMsgs, want.MaxMsgs},
		{"max_msg_size", have.MaxMsgSize, want.MaxMsgSize},
		{"max_msgs_per_subject", have.MaxMsgsPerSubject, want.MaxMsgsPerSubject},
		{"max_age", have.MaxAge, want.MaxAge},
		{"max_consumers", have.MaxConsumers, want.MaxConsumers},
		{"no_ack", have.NoAck, want.NoAck},
		{"sealed", have.Sealed, want.Sealed},
		{"deny_delete", have.DenyDelete, want.DenyDelete},
		{"deny_purge", have.DenyPurge, want.DenyPurge},
		{"allow_direct", have.AllowDirect, want.AllowDirect},
		{"allow_atomic", have.AllowAtomicPublish, want.AllowAtomicPublish},
		{"model", have.Metadata[metaModel], want.Metadata[metaModel]},
	})
	if len(diff) == 0 {
		return nil
	}
	if have.Metadata[metaModel] != "" && have.Metadata[metaModel] != want.Metadata[metaModel] {
		return settingsError("stream "+want.Name, diff, errors.New("it belongs to another model"))
	}
	next := have // and what we have no opinion of stays
	next.Subjects, next.Retention, next.Storage, next.Replicas = want.Subjects, want.Retention, want.Storage, want.Replicas
	next.Discard, next.DiscardNewPerSubject, next.MaxBytes, next.MaxMsgs = want.Discard, want.DiscardNewPerSubject, want.MaxBytes, want.MaxMsgs
	next.MaxMsgSize, next.MaxMsgsPerSubject, next.MaxAge, next.MaxConsumers = want.MaxMsgSize, want.MaxMsgsPerSubject, want.MaxAge, want.MaxConsumers
	next.NoAck, next.Sealed, next.DenyDelete, next.DenyPurge = want.NoAck, want.Sealed, want.DenyDelete, want.DenyPurge
	next.AllowDirect, next.AllowAtomicPublish = want.AllowDirect, want.AllowAtomicPublish
	if next.MaxAge > 0 && next.Duplicates > next.MaxAge {
		next.Duplicates = 0
	}
	if m := want.Metadata[metaModel]; m != "" {
		next.Metadata = map[string]string{metaModel: m}
	}
	_, err := q.js.UpdateStream(ctx, next)
	if err == nil {
		q.log.Info("stream settings changed", "stream", want.Name, "settings", fmt.Sprint(diff))
		return nil
	}
	if transient(err) {
		return fmt.Errorf("updating stream %s: %w", want.Name, outward(classify(err)))
	}
	return settingsError("stream "+want.Name, diff, err)
}

func (q *Queue) ensureConsumer(ctx context.Context, stream string, want jetstream.ConsumerConfig) error {
	_, err := q.js.CreateOrUpdateConsumer(ctx, stream, want)
	if err == nil {
		return nil
	}
	what := "consumer " + want.Durable + " of stream " + stream
	if hasCode(err, codeFilterTaken) { // another consumer is in the way
		return fmt.Errorf("%w: %s: %w", ErrSettings, what, err)
	}
	if transient(err) {
		return fmt.Errorf("ensuring %s: %w", what, outward(classify(err)))
	}
	c, infoErr := q.js.Consumer(ctx, stream, want.Durable)
	if infoErr != nil {
		return fmt.Errorf("ensuring %s: %w", what, outward(classify(err)))
	}
	have := c.CachedInfo().Config
	diff := differing([]setting{
		{"filter_subject", have.FilterSubject, want.FilterSubject},
		{"deliver_policy", have.DeliverPolicy, want.DeliverPolicy},
		{"ack_policy", have.AckPolicy, want.AckPolicy},
		{"ack_wait", have.AckWait, want.AckWait},
		{"replay_policy", have.ReplayPolicy, want.ReplayPolicy},
		{"max_deliver", have.MaxDeliver, want.MaxDeliver},
		{"max_ack_pending", have.MaxAckPending, want.MaxAckPending},
		{"max_waiting", have.MaxWaiting, want.MaxWaiting},
		{"inactive_threshold", have.InactiveThreshold, want.InactiveThreshold},
		{"priority_policy", have.PriorityPolicy, want.PriorityPolicy},
		{"priority_groups", have.PriorityGroups, want.PriorityGroups},
	})
	if len(diff) == 0 {
		return fmt.Errorf("ensuring %s: %w", what, outward(classify(err)))
	}
	return settingsError(what, diff, err)
}

// Models lists the models that have a WORK stream, by their real names (kept in the streams' metadata).
func (q *Queue) Models(ctx context.Context) ([]job.Model, error) {
	ctx, cancel := q.bound(ctx)
	defer cancel()
	var models []job.Model
	list := q.js.ListStreams(ctx, jetstream.WithStreamListSubject("work.>"))
	for info := range list.Info() {
		if m := info.Config.Metadata[metaModel]; m != "" {
			models = append(models, job.Model(m))
		}
	}
	if err := list.Err(); err != nil {
		return nil, fmt.Errorf("listing the models: %w", outward(classify(err)))
	}
	slices.Sort(models)
	return models, nil
}

// DeleteLane deletes the consumers of a worker that is gone, and moves nothing.
func (q *Queue) DeleteLane(ctx context.Context, name job.Model, w job.Worker) error {
	ctx, cancel := q.bound(ctx)
	defer cancel()
	m := q.model(name)
	for _, k := range []Kind{Work, Live} {
		err := q.js.DeleteConsumer(ctx, m.stream(k), WorkerLane(w).token())
		if err != nil && !hasCode(err, codeNoConsumer, codeNoStream) {
			return fmt.Errorf("deleting the %s lane of worker %s: %w", k, w, outward(classify(err)))
		}
	}
	return nil
}
