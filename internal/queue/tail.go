package queue

import (
	"context"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// Mark is a place in DONE: what stands up to Seq in that incarnation of the stream is behind it. Stream is the time of its making, so that a DONE made anew, whose sequences begin again, is not taken for
// the old one; "" is before everything.
type Mark struct {
	Stream string
	Seq    uint64
}

// OutcomePage is a part of DONE: what stands between two marks, headers only.
type OutcomePage struct {
	Records  []*Record
	From, To Mark
	// Behind counts the records that come after it.
	Behind uint64
}

// Tail follows DONE from a mark on, in its order and without a gap: each record is in a page, but for those that are replaced or removed before they are read. It is not safe for concurrent use.
type Tail struct {
	q        *Queue
	at       Mark
	consumer jetstream.Consumer // nil: to be made
	next     uint64             // the consumer's number of the delivery to come
	pending  uint64             // what the server had behind the last one
}

// tailIdle is how long the server is asked to wait for the next record. After that the consumer is looked at: one that has gone without a word would never bring anything.
const tailIdle = 2 * time.Second

// Tail returns a reader of DONE from what is behind `from` on. Close it.
func (q *Queue) Tail(from Mark) *Tail { return &Tail{q: q, at: from} }

// Next returns the next page, of up to 500 records, as soon as there is one. A page without records only moves the mark: DONE is a new one, which is then read from its beginning, or has lost its end.
// After an error, which is ErrUnavailable but when ctx ends, the next call goes on from the same mark.
func (t *Tail) Next(ctx context.Context) (*OutcomePage, error) {
	for {
		page, err := t.read(ctx)
		if err != nil {
			t.Close()
			return nil, fmt.Errorf("following the outcomes: %w", err)
		}
		if page != nil {
			t.at = page.To
			return page, nil
		}
	}
}

// Close ends the reading. A later Next begins it again.
func (t *Tail) Close() {
	if t.consumer == nil {
		return
	}
	t.q.deleteReader(t.consumer)
	t.consumer = nil
}

// read returns the next page, nil if nothing came.
func (t *Tail) read(ctx context.Context) (*OutcomePage, error) {
	if t.consumer == nil {
		if moved, err := t.open(ctx); moved != nil || err != nil {
			return moved, err
		}
	}
	page := &OutcomePage{From: t.at, To: t.at}
	if t.pending == 0 {
		ctx, cancel := t.q.bound(ctx)
		defer cancel()
		idle, stop := context.WithTimeout(ctx, tailIdle)
		defer stop()
		one, err := t.consumer.Fetch(1, jetstream.FetchContext(idle))
		if err == nil {
			err = t.take(one, page)
		}
		if err != nil && (idle.Err() == nil || ctx.Err() != nil) {
			return nil, outward(classify(err))
		}
		if page.To == t.at {
			return nil, t.look(ctx)
		}
	}
	if t.pending > 0 {
		more, err := t.consumer.FetchNoWait(outcomesPage - 1)
		if err == nil {
			err = t.take(more, page)
		}
		if err != nil {
			return nil, outward(classify(err))
		}
		if page.To == t.at { // what was pending was removed before it came, or was never sent
			return nil, t.look(ctx)
		}
	}
	page.Behind = t.pending
	return page, nil
}

// take adds what was fetched to the page.
func (t *Tail) take(fetched jetstream.MessageBatch, page *OutcomePage) error {
	var failed error
	for m := range fetched.Messages() { // to its end in any case: it is a goroutine's
		if failed != nil {
			continue
		}
		meta, err := m.Metadata()
		if err != nil {
			failed = fmt.Errorf("%w: %w", ErrUnavailable, err)
			continue
		}
		if meta.Sequence.Consumer != t.next { // without acknowledgements nobody sends a lost one again
			failed = fmt.Errorf("%w: a record was lost on the way", ErrUnavailable)
			continue
		}
		t.next++
		t.pending = meta.NumPending
		page.To.Seq = meta.Sequence.Stream
		r, err := decodeRecord(&raw{subject: m.Subject(), seq: meta.Sequence.Stream, time: meta.Timestamp, header: m.Headers()})
		if err != nil {
			t.q.log.Error("an outcome cannot be read", "err", err)
			continue
		}
		page.Records = append(page.Records, r)
	}
	if failed == nil {
		failed = fetched.Error()
	}
	return failed
}

// look asks the server whether the consumer is there and has delivered nothing but what has come.
func (t *Tail) look(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return transport(err)
	}
	ctx, cancel := t.q.bound(ctx)
	defer cancel()
	info, err := t.consumer.Info(ctx)
	if err != nil {
		return outward(classify(err))
	}
	if info.Delivered.Consumer+1 != t.next {
		return fmt.Errorf("%w: a record was lost on the way", ErrUnavailable)
	}
	t.pending = info.NumPending
	return nil
}

// open makes the consumer behind the mark. It returns a page without records if the mark is of another DONE, or behind this one's end. The stream is read after the consumer was made: one that was replaced
// between the two has taken the consumer with it, so that what is read here is the stream that the consumer reads.
func (t *Tail) open(ctx context.Context) (moved *OutcomePage, err error) {
	ctx, cancel := t.q.bound(ctx)
	defer cancel()
	c, err := t.q.reader(ctx, t.at.Seq+1, doneSubjects, false)
	if hasCode(err, codeNoStream) {
		// It was deleted: made anew it will tell by its time that it is another.
		if err := t.q.ensureStream(ctx, t.q.doneConfig(), true); err != nil {
			return nil, err
		}
		c, err = t.q.reader(ctx, t.at.Seq+1, doneSubjects, false)
	}
	if err != nil {
		return nil, outward(classify(err))
	}
	at, err := t.q.doneEnd(ctx)
	if err != nil {
		t.q.deleteReader(c)
		return nil, err
	}
	switch {
	case at.Stream != t.at.Stream:
		t.q.deleteReader(c)
		if t.at.Stream != "" {
			t.q.log.Error("DONE is another one than before: reading it from its beginning", "made", at.Stream, "before", t.at.Stream)
		}
		return &OutcomePage{From: t.at, To: Mark{Stream: at.Stream}}, nil
	case at.Seq < t.at.Seq: // an unsynced end was lost with the machine: other records will get those sequences
		t.q.deleteReader(c)
		t.q.log.Error("DONE has lost its end", "last", at.Seq, "before", t.at.Seq)
		return &OutcomePage{From: t.at, To: at}, nil
	}
	t.consumer, t.next, t.pending = c, 1, c.CachedInfo().NumPending
	return nil, nil
}

// DoneEnd is DONE's end now: behind all that it has.
func (q *Queue) DoneEnd(ctx context.Context) (Mark, error) {
	ctx, cancel := q.bound(ctx)
	defer cancel()
	at, err := q.doneEnd(ctx)
	if err != nil {
		return Mark{}, fmt.Errorf("reading DONE's end: %w", err)
	}
	return at, nil
}

func (q *Queue) doneEnd(ctx context.Context) (Mark, error) {
	var info struct {
		Created time.Time `json:"created"`
		State   struct {
			Last uint64 `json:"last_seq"`
		} `json:"state"`
	}
	if err := q.call(ctx, "STREAM.INFO."+doneStream, struct{}{}, &info); err != nil {
		return Mark{}, outward(err)
	}
	return Mark{Stream: info.Created.UTC().Format(time.RFC3339Nano), Seq: info.State.Last}, nil
}
