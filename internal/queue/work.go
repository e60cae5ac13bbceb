package queue

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"strings"
	"time"

	"github.com/millrace/millrace/internal/job"
)

const (
	pageMessages = 256     // messages of one page of a listing
	pageBytes    = 4 << 20 // and its bytes: the last message may go beyond
)

// hearsay is how long a message whose stream is missing waits before each further try: the nodes of a cluster hear of a new stream, or of its new leader, one
// after the other.
var hearsay = []time.Duration{0, 20 * time.Millisecond, 100 * time.Millisecond, 500 * time.Millisecond}

// store publishes a job's message: WORK by the committer, LIVE at once, for memory needs no sync. Missing streams are made.
func (q *Queue) store(ctx context.Context, k Kind, m *model, e *envelope) error {
	ctx, cancel := q.bound(ctx)
	defer cancel()
	for try := 0; ; try++ {
		seen := m.epoch.Load()
		var err error
		if k == Live {
			_, err = q.commit.single(ctx, e)
		} else {
			_, err = q.commit.publish(ctx, e)
		}
		if !errors.Is(err, errNoStream) || try == len(hearsay) {
			return outward(err)
		}
		select {
		case <-time.After(hearsay[try]):
		case <-ctx.Done():
			return outward(err)
		}
		if err := q.ensure(ctx, m, seen); err != nil {
			return err
		}
	}
}

// Enqueue stores m in lane and returns once it is synced (WORK) or in memory (LIVE). Errors: ErrExists, ErrFull, ErrRefused, ErrUnavailable.
// A model's missing streams are created first.
func (q *Queue) Enqueue(ctx context.Context, kind Kind, lane Lane, m *Message) error {
	header, err := encodeJob(&m.Job)
	if err != nil {
		return err
	}
	model := q.model(m.Job.Model)
	// "No responders" tells of a missing stream only while nobody else listens to its subjects, as somebody who watches all of them does.
	if err := q.EnsureModel(ctx, m.Job.Model); err != nil {
		return fmt.Errorf("enqueueing job %s: %w", m.Job.ID, err)
	}
	e := &envelope{
		stream:  model.stream(kind),
		subject: model.prefix(kind) + string(m.Job.Class) + "." + lane.token() + "." + token(string(m.Job.ID)),
		job:     header, expect: "0",
	}
	if m.Job.Blob == "" {
		e.data = m.Body
	}
	if err := q.store(ctx, kind, model, e); err != nil {
		return fmt.Errorf("enqueueing job %s: %w", m.Job.ID, err)
	}
	return nil
}

// copies is the filter of all messages of one job in a model's stream.
func (m *model) copies(k Kind, id job.ID) string { return m.prefix(k) + "*.*." + token(string(id)) }

// Find looks for the job's message in a WORK stream: in model's if it is not "", else in all. The leader answers. Several copies: the one in AnyLane.
func (q *Queue) Find(ctx context.Context, name job.Model, id job.ID) (*Stored, error) {
	ctx, cancel := q.bound(ctx)
	defer cancel()
	names := []job.Model{name}
	if name == "" {
		var err error
		if names, err = q.Models(ctx); err != nil {
			return nil, fmt.Errorf("finding job %s: %w", id, err)
		}
	}
	for _, n := range names {
		s, err := q.findIn(ctx, q.model(n), id)
		if err == nil {
			return s, nil
		}
		if !errors.Is(err, ErrNotFound) && !errors.Is(err, errNoStream) { // without its stream a model has no jobs
			return nil, fmt.Errorf("finding job %s: %w", id, err)
		}
	}
	return nil, fmt.Errorf("finding job %s: %w", id, ErrNotFound)
}

func (q *Queue) findIn(ctx context.Context, m *model, id job.ID) (*Stored, error) {
	found, err := q.leaderGet(ctx, m.stream(Work), getRequest{Last: m.copies(Work, id)})
	if err != nil {
		return nil, err
	}
	s, err := decodeStored(found, Work, true)
	if err != nil || s.Lane == AnyLane {
		return s, err
	}
	inAny := m.prefix(Work) + string(s.Job.Class) + "." + string(AnyLane) + "." + token(string(id))
	found, err = q.leaderGet(ctx, m.stream(Work), getRequest{Last: inAny})
	if errors.Is(err, ErrNotFound) {
		return s, nil
	}
	if err != nil {
		return nil, err
	}
	return decodeStored(found, Work, true)
}

// Remove deletes every copy of the job's message from the model's stream of that kind; none is no error.
func (q *Queue) Remove(ctx context.Context, kind Kind, name job.Model, id job.ID) error {
	ctx, cancel := q.bound(ctx)
	defer cancel()
	m := q.model(name)
	for {
		found, err := q.leaderGet(ctx, m.stream(kind), getRequest{Last: m.copies(kind, id)})
		if errors.Is(err, ErrNotFound) || errors.Is(err, errNoStream) {
			return nil
		}
		if err == nil {
			err = q.remove(ctx, m.stream(kind), found.seq)
		}
		if err != nil {
			return fmt.Errorf("removing job %s: %w", id, outward(err))
		}
	}
}

// Move publishes s again in lane `to` of its own stream, then deletes the old sequence: at no moment is the job without a copy. ErrExists from the
// publish counts as published. Any other failure leaves the old copy. A message that is no longer there (acknowledged, moved or removed since it was
// listed) is ErrNotFound, and nothing is published.
func (q *Queue) Move(ctx context.Context, s *Stored, to Lane) error {
	if s.Lane == to {
		return nil
	}
	ctx, cancel := q.bound(ctx)
	defer cancel()
	if err := q.move(ctx, s, to); err != nil {
		return fmt.Errorf("moving job %s to lane %s: %w", s.Job.ID, to, err)
	}
	return nil
}

func (q *Queue) move(ctx context.Context, s *Stored, to Lane) error {
	m := q.model(s.Job.Model)
	stream := m.stream(s.Kind)
	// s may come from a stale replica, and its job lacks the fields that a newer version wrote: what is moved is what the leader has.
	old, err := q.leaderGet(ctx, stream, getRequest{Seq: s.Seq})
	if err != nil {
		return outward(err)
	}
	id := token(string(s.Job.ID))
	if !strings.HasSuffix(old.subject, "."+id) { // the stream was made anew since
		return ErrNotFound
	}
	err = q.store(ctx, s.Kind, m, &envelope{
		stream: stream, subject: m.prefix(s.Kind) + string(s.Job.Class) + "." + to.token() + "." + id,
		job: old.header.Get(headerJob), expect: "0", data: old.data,
	})
	if err != nil && !errors.Is(err, ErrExists) {
		return err
	}
	// If we crash here, the job has two copies: the next move finds this one published and deletes the old one.
	return outward(q.remove(ctx, stream, s.Seq))
}

// Waiting yields the messages of one lane ("" = every lane) of a model's stream in stream order, headers only (Body nil) unless bodies. It includes delivered, unacknowledged ones.
// Any replica answers, so what was stored or removed a moment ago may be missing or still there. A message that cannot be read is logged and left out.
func (q *Queue) Waiting(ctx context.Context, kind Kind, name job.Model, lane Lane, bodies bool) iter.Seq2[*Stored, error] {
	return q.waitingFrom(ctx, kind, name, lane, bodies, 1)
}

// waitingFrom is Waiting from a sequence on.
func (q *Queue) waitingFrom(ctx context.Context, kind Kind, name job.Model, lane Lane, bodies bool, from uint64) iter.Seq2[*Stored, error] {
	m := q.model(name)
	in := "*"
	if lane != "" {
		in = lane.token()
	}
	filter := m.prefix(kind) + "*." + in + ".*"
	return func(yield func(*Stored, error) bool) {
		for seq, last := from, false; !last; {
			var page []*raw
			var err error
			page, last, err = q.directPage(ctx, m.stream(kind), filter, seq, pageMessages, pageBytes)
			if errors.Is(err, errNoStream) {
				// Nobody answers for the stream. That it is not there is for JetStream to say.
				err = q.call(ctx, "STREAM.INFO."+m.stream(kind), struct{}{}, nil)
				if errors.Is(err, errNoStream) {
					return
				}
				if err == nil {
					err = ErrUnavailable
				}
			}
			if err != nil {
				yield(nil, fmt.Errorf("listing the %s stream of model %s: %w", kind, name, err))
				return
			}
			for _, r := range page {
				seq = r.seq + 1
				s, err := decodeStored(r, kind, bodies)
				if err != nil {
					q.log.Error("a queued message cannot be read", "stream", m.stream(kind), "err", err)
					continue
				}
				if !yield(s, nil) {
					return
				}
			}
		}
	}
}

// Present returns the ids of the jobs that have a message in the model's WORK stream, by one listing of its subjects, with each one's lane.
// Of several copies it is AnyLane. The leader answers.
//
// A message whose acknowledgement meets the end of its server can stay for ever: its consumer has it as acknowledged and delivers it no more, the stream
// still holds it (nats-server 2.15.3, about one restart in five under load). Its job has ended, for nothing is acknowledged before: whoever compares this listing with the
// outcomes is to Remove what has ended.
func (q *Queue) Present(ctx context.Context, name job.Model) (map[job.ID]Lane, error) {
	m := q.model(name)
	present := map[job.ID]Lane{}
	err := q.subjects(ctx, m.stream(Work), m.prefix(Work)+"*.*.*", func(subject string, _ int) error {
		p, err := parsePlace(subject)
		if err != nil {
			q.log.Error("a queued message's subject cannot be read", "stream", m.stream(Work), "err", err)
			return nil
		}
		if present[p.id] != AnyLane {
			present[p.id] = p.lane
		}
		return nil
	})
	if err != nil && !errors.Is(err, errNoStream) {
		return nil, fmt.Errorf("listing the jobs of model %s: %w", name, err)
	}
	return present, nil
}

// Depth counts what one stream holds.
type Depth struct {
	// Waiting and Delivered (unacknowledged) messages in AnyLane by class.
	Waiting, Delivered map[job.Class]int
	// WorkerLanes and TenantLanes count the messages in such lanes, by lane. For worker lanes delivered ones are included.
	WorkerLanes, TenantLanes map[Lane]int
	// Lines are the tenants' lanes by class.
	Lines map[Line]int
	// Bytes held and the stream's limit.
	Bytes, MaxBytes int64
}

// Depth reads the counts of a model's stream. Its numbers are read one after the other, so a job on its way may be counted twice or not at all.
// While nothing waits in worker and tenant lanes it costs four short requests; else the stream's subjects are listed too.
func (q *Queue) Depth(ctx context.Context, kind Kind, name job.Model) (Depth, error) {
	ctx, cancel := q.bound(ctx)
	defer cancel()
	m := q.model(name)
	d := Depth{
		Waiting: map[job.Class]int{}, Delivered: map[job.Class]int{},
		WorkerLanes: map[Lane]int{}, TenantLanes: map[Lane]int{}, Lines: map[Line]int{},
	}
	err := q.depth(ctx, kind, m, &d)
	if err != nil && !errors.Is(err, errNoStream) { // no stream: nothing waits
		return d, fmt.Errorf("counting the %s stream of model %s: %w", kind, name, err)
	}
	return d, nil
}

func (q *Queue) depth(ctx context.Context, kind Kind, m *model, d *Depth) error {
	stream := m.stream(kind)
	// Where a consumer is missing the listing below counts its messages as waiting.
	if err := q.shared(ctx, stream, d.Waiting, d.Delivered); err != nil {
		return err
	}
	shared := 0
	for c, n := range d.Waiting {
		shared += n + d.Delivered[c]
	}
	var info struct {
		Config struct {
			MaxBytes int64 `json:"max_bytes"`
		} `json:"config"`
		State struct {
			Messages int   `json:"messages"`
			Bytes    int64 `json:"bytes"`
		} `json:"state"`
	}
	if err := q.call(ctx, "STREAM.INFO."+stream, struct{}{}, &info); err != nil {
		return err
	}
	d.Bytes, d.MaxBytes = info.State.Bytes, info.Config.MaxBytes
	if info.State.Messages <= shared {
		return nil
	}
	inAny := map[job.Class]int{}
	err := q.subjects(ctx, stream, m.prefix(kind)+"*.*.*", func(subject string, n int) error {
		p, err := parsePlace(subject)
		switch {
		case err != nil:
			q.log.Error("a queued message's subject cannot be read", "stream", stream, "err", err)
		case p.lane == AnyLane:
			inAny[p.class] += n
		case strings.HasPrefix(string(p.lane), "w-"):
			d.WorkerLanes[p.lane] += n
		case strings.HasPrefix(string(p.lane), "t-"):
			d.TenantLanes[p.lane] += n
			d.Lines[Line{p.class, p.lane}] += n
		}
		return nil
	})
	for c, n := range inAny {
		if _, counted := d.Waiting[c]; !counted {
			d.Waiting[c] = n
		}
	}
	return err
}

// ackPrefix begins every subject by which deliveries are answered.
const ackPrefix = "$JS.ACK."

// NakSubject hands back the delivery that has this ack subject, after delay: for another process's deliveries, when that process is dead.
// It returns once the server has it.
func (q *Queue) NakSubject(ctx context.Context, ackSubject string, delay time.Duration) error {
	if !strings.HasPrefix(ackSubject, ackPrefix) {
		return fmt.Errorf("handing back a delivery: %q is not an ack subject", ackSubject)
	}
	ctx, cancel := q.bound(ctx)
	defer cancel()
	err := q.nc.Publish(ackSubject, nakText(delay))
	if err == nil {
		err = q.nc.FlushWithContext(ctx)
	}
	if err != nil {
		return fmt.Errorf("handing back a delivery: %w", outward(transport(err)))
	}
	return nil
}
