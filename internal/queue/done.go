package queue

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"strconv"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/millrace/millrace/internal/job"
)

// commitDone publishes a record. A DONE stream that is gone is made again, once.
func (q *Queue) commitDone(ctx context.Context, e *envelope) (uint64, error) {
	for try := 0; ; try++ {
		seq, err := q.commit.publish(ctx, e)
		if !errors.Is(err, errNoStream) || try > 0 {
			return seq, outward(err)
		}
		if err := q.ensureStream(ctx, q.doneConfig(), true); err != nil {
			return 0, err
		}
	}
}

// Settle writes the job's outcome to DONE and returns once it is synced. The first outcome wins: if another is stored, Settle returns it and ErrSettled
// (with the same Token: a repeat of our own write, returned with a nil error). Outcomes without a token are the same if their states are.
// A LIVE job's Result is not stored. Errors: ErrSettled, ErrFull, ErrRefused, ErrUnavailable.
func (q *Queue) Settle(ctx context.Context, r *Record) (*Record, error) {
	ctx, cancel := q.bound(ctx)
	defer cancel()
	stored, err := q.settle(ctx, r)
	if err != nil {
		return stored, fmt.Errorf("settling job %s: %w", r.Job.ID, err)
	}
	return stored, nil
}

func (q *Queue) settle(ctx context.Context, r *Record) (*Record, error) {
	e := &envelope{stream: doneStream, subject: doneSubject(r.Job.Tenant, r.Job.Group, r.Job.ID), expect: "0"}
	var err error
	if e.job, err = encodeJob(&r.Job); err != nil {
		return nil, err
	}
	if e.outcome, err = encodeOutcome(r.Outcome); err != nil {
		return nil, err
	}
	if !r.Job.Live() && r.Outcome.Blob == "" {
		e.data = r.Result
	}
	seq, err := q.commitDone(ctx, e)
	if err == nil {
		own := *r
		own.Result, own.Seq = e.data, seq
		return &own, nil
	}
	if !errors.Is(err, ErrExists) {
		return nil, err
	}
	first, err := q.leaderGet(ctx, doneStream, getRequest{Last: e.subject})
	if err != nil { // also when it was not found: then it has just gone, and a repeat will tell
		return nil, fmt.Errorf("%w: reading the outcome that was first: %w", ErrUnavailable, err)
	}
	stored, err := decodeRecord(first)
	if err != nil {
		return nil, err
	}
	if stored.Outcome.Token == r.Outcome.Token && (r.Outcome.Token != 0 || stored.Outcome.State == r.Outcome.State) {
		return stored, nil
	}
	return stored, ErrSettled
}

// Outcome reads the outcome of a job of tenant in group (job.NoGroup, or a batch), with its answer. A miss of a direct read is confirmed by the leader. ErrNotFound, ErrUnavailable.
func (q *Queue) Outcome(ctx context.Context, t job.Tenant, group string, id job.ID) (*Record, error) {
	return q.outcome(ctx, doneSubject(t, group, id), id)
}

// FindOutcome is Outcome without a known tenant and group.
func (q *Queue) FindOutcome(ctx context.Context, id job.ID) (*Record, error) {
	return q.outcome(ctx, "done.*.*."+token(string(id)), id)
}

func (q *Queue) outcome(ctx context.Context, subject string, id job.ID) (*Record, error) {
	ctx, cancel := q.bound(ctx)
	defer cancel()
	m, err := q.directLast(ctx, doneStream, subject)
	if errors.Is(err, ErrNotFound) || errors.Is(err, errNoStream) {
		m, err = q.leaderGet(ctx, doneStream, getRequest{Last: subject})
	}
	if err != nil {
		return nil, fmt.Errorf("reading the outcome of job %s: %w", id, outward(err))
	}
	return decodeRecord(m)
}

// Erase replaces the outcome of an ended job by a tombstone without body, metadata and error text, keeping state, times and usage, and the hashes by
// which a repeated request is known. A tombstone that is there already is no error. ErrNotFound: the job has not ended.
func (q *Queue) Erase(ctx context.Context, t job.Tenant, group string, id job.ID) error {
	ctx, cancel := q.bound(ctx)
	defer cancel()
	if err := q.erase(ctx, doneSubject(t, group, id)); err != nil {
		return fmt.Errorf("erasing job %s: %w", id, err)
	}
	return nil
}

func (q *Queue) erase(ctx context.Context, subject string) error {
	for {
		m, err := q.leaderGet(ctx, doneStream, getRequest{Last: subject})
		if err != nil {
			return outward(err)
		}
		r, err := decodeRecord(m)
		if err != nil {
			return err
		}
		if r.Outcome.Erased {
			return nil
		}
		j, o := r.Job, r.Outcome
		j.Metadata, j.Session, j.Blob = nil, "", ""
		o.Erased, o.Blob = true, ""
		if o.Error != nil {
			blank := *o.Error
			blank.Message, blank.Param = "", nil
			o.Error = &blank
		}
		e := &envelope{stream: doneStream, subject: subject, expect: strconv.FormatUint(m.seq, 10)}
		if e.job, err = encodeJob(&j); err != nil {
			return err
		}
		if e.outcome, err = encodeOutcome(o); err != nil {
			return err
		}
		if _, err := q.commitDone(ctx, e); !errors.Is(err, ErrExists) { // ErrExists: somebody has just erased it
			return err
		}
	}
}

// outcomesPage is how many records Outcomes asks for at a time.
const outcomesPage = 500

// Outcomes yields DONE's records from sequence seq on, headers only, up to the last one there is when it gets there.
// A record that cannot be read is logged and left out.
func (q *Queue) Outcomes(ctx context.Context, seq uint64) iter.Seq2[*Record, error] {
	return func(yield func(*Record, error) bool) {
		if err := q.outcomes(ctx, max(seq, 1), doneSubjects, func(r *Record) bool { return yield(r, nil) }); err != nil {
			yield(nil, fmt.Errorf("listing the outcomes: %w", err))
		}
	}
}

// outcomes reads by a consumer of its own, for only a consumer can leave the answers out.
func (q *Queue) outcomes(ctx context.Context, seq uint64, filter string, yield func(*Record) bool) error {
	c, err := q.openReader(ctx, seq, filter, false)
	if err != nil {
		return err
	}
	defer q.deleteReader(c)
	left, next := c.CachedInfo().NumPending, uint64(1)
	for left > 0 {
		var page []*Record
		if page, left, next, err = q.outcomesPage(ctx, c, left, next, outcomesPage); err != nil {
			return err
		}
		for _, r := range page {
			if !yield(r) {
				return nil
			}
		}
	}
	return nil
}

// outcomesPage reads the next page of a reader, of at most so many records. left counts what is behind it, next is the number of the delivery to come.
func (q *Queue) outcomesPage(ctx context.Context, c jetstream.Consumer, left, next uint64, most int) ([]*Record, uint64, uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, defaultTimeout)
	defer cancel()
	fetched, err := c.Fetch(int(min(left, uint64(most))), jetstream.FetchContext(ctx))
	if err != nil {
		return nil, 0, 0, outward(classify(err))
	}
	first := next
	var page []*Record
	for m := range fetched.Messages() {
		meta, err := m.Metadata()
		if err != nil {
			return nil, 0, 0, fmt.Errorf("%w: %w", ErrUnavailable, err)
		}
		if meta.Sequence.Consumer != next { // without acknowledgements nobody sends a lost one again
			return nil, 0, 0, fmt.Errorf("%w: a record was lost on the way", ErrUnavailable)
		}
		next++
		left = meta.NumPending
		r, err := decodeRecord(&raw{subject: m.Subject(), seq: meta.Sequence.Stream, time: meta.Timestamp, header: m.Headers(), data: m.Data()})
		if err != nil {
			q.log.Error("an outcome cannot be read", "err", err)
			continue
		}
		page = append(page, r)
	}
	if err := fetched.Error(); err != nil {
		return nil, 0, 0, outward(classify(err))
	}
	if next > first {
		return page, left, next, nil
	}
	// What was there when the reader was made may have been removed since.
	ctx, cancel = q.bound(context.WithoutCancel(ctx)) // the fetch has used its own time up
	defer cancel()
	info, err := c.Info(ctx)
	switch {
	case err != nil:
		return nil, 0, 0, outward(classify(err))
	case info.NumPending > 0 || info.Delivered.Consumer+1 != next:
		return nil, 0, 0, fmt.Errorf("%w: no records came", ErrUnavailable)
	}
	return nil, 0, next, nil
}

func (q *Queue) openReader(ctx context.Context, seq uint64, filter string, answers bool) (jetstream.Consumer, error) {
	ctx, cancel := q.bound(ctx)
	defer cancel()
	c, err := q.reader(ctx, seq, filter, answers)
	if err != nil {
		return nil, outward(classify(err))
	}
	return c, nil
}

// reader makes a consumer of DONE from a sequence on, with the answers or the headers only.
func (q *Queue) reader(ctx context.Context, seq uint64, filter string, answers bool) (jetstream.Consumer, error) {
	c := jetstream.ConsumerConfig{
		DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: seq,
		AckPolicy: jetstream.AckNonePolicy, HeadersOnly: !answers, MemoryStorage: true, Replicas: 1,
		InactiveThreshold: 5 * time.Minute,
	}
	if filter != doneSubjects {
		c.FilterSubject = filter
	}
	return q.js.CreateConsumer(ctx, doneStream, c)
}

// deleteReader removes such a consumer. Its reader's context may be over. It would go by itself in minutes.
func (q *Queue) deleteReader(c jetstream.Consumer) {
	ctx, cancel := context.WithTimeout(q.life, time.Second)
	defer cancel()
	_ = q.js.DeleteConsumer(ctx, doneStream, c.CachedInfo().Name)
}

type doneState struct {
	Config struct {
		MaxBytes int64 `json:"max_bytes"`
	} `json:"config"`
	State struct {
		Messages uint64 `json:"messages"`
		Bytes    int64  `json:"bytes"`
		Last     uint64 `json:"last_seq"`
	} `json:"state"`
}

// Healthy returns nil if JetStream answers and DONE can be read.
func (q *Queue) Healthy(ctx context.Context) error {
	ctx, cancel := q.bound(ctx)
	defer cancel()
	var s doneState
	err := q.call(ctx, "STREAM.INFO."+doneStream, struct{}{}, &s)
	if err == nil && s.State.Messages > 0 {
		_, err = q.leaderGet(ctx, doneStream, getRequest{Seq: s.State.Last})
		if errors.Is(err, ErrNotFound) { // replaced or aged meanwhile
			err = nil
		}
	}
	if err != nil {
		return fmt.Errorf("reading DONE: %w", outward(err))
	}
	return nil
}

// DoneFill is the share of DONE's limit in use, 0..1.
func (q *Queue) DoneFill(ctx context.Context) (float64, error) {
	var s doneState
	if err := q.call(ctx, "STREAM.INFO."+doneStream, struct{}{}, &s); err != nil {
		return 0, fmt.Errorf("reading DONE: %w", outward(err))
	}
	if s.Config.MaxBytes <= 0 {
		return 0, nil
	}
	return float64(s.State.Bytes) / float64(s.Config.MaxBytes), nil
}
