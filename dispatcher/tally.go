package dispatcher

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
	"github.com/millrace/millrace/internal/queue"
)

// tally reads DONE from where the ledger stands, and counts each outcome there once: usage, and the counts of batches. Then it tells those who wait for ends. The order is
//
//	page of DONE -> usage, counts and position in one transaction (the point of no return) -> the driver and the feeder are told
//
// If we crash before the transaction, the page is read again; if behind it, nobody need be told: the next leader reads for itself what has ended. Another leader's transaction moves the position, so that ours fails
// and begins anew from there; one of a higher epoch ends ours for good.
//
// # Another DONE
//
// A stream that was lost and made anew is read from its beginning. Its outcomes are new ones: of lines whose outcome was lost with the old one, and that had to run again, among others. Those are counted already. How many
// they are can be seen at any time: a batch's counts, less its outcomes in DONE up to the position, are those that were lost. So many of its next outcomes count as usage alone. That the ones that ran again may end
// otherwise than before is set right when the batch ends: then its counts are those of its files.
type tally struct {
	d      *Dispatcher
	epoch  uint64
	driver *driver
	// ended is told of each outcome that has been counted. It must not block.
	ended func(*queue.Record)
	// doubt is a page of which it is not known whether it was counted.
	doubt *queue.OutcomePage
	// lost is how many outcomes of a batch are not to be counted, because they are.
	lost map[string]int64

	mu    sync.Mutex // guards what follows
	at    queue.Mark
	moved chan struct{} // closed and replaced when at changes
}

func newTally(d *Dispatcher, epoch uint64, driver *driver, ended func(*queue.Record)) *tally {
	return &tally{d: d, epoch: epoch, driver: driver, ended: ended, moved: make(chan struct{})}
}

const (
	tallyPause = 250 * time.Millisecond // after an error
	tallyBeat  = 10 * time.Millisecond  // from one transaction to the next, while there is no more than fits one
)

// run counts until ctx ends. What fails is repeated from where the ledger stands.
func (t *tally) run(ctx context.Context) {
	for failing := false; ctx.Err() == nil; {
		err := guard(func() error { return t.follow(ctx, func() { failing = false }) })
		if ctx.Err() != nil {
			return
		}
		t.d.metrics.failures.WithLabelValues("tally").Inc()
		if !failing {
			t.d.log.Warn("a duty failed: repeating it", "duty", "tally", "err", err)
		}
		failing = true
		select {
		case <-time.After(tallyPause):
		case <-ctx.Done():
		}
	}
}

// follow counts from where the ledger stands until something fails.
func (t *tally) follow(ctx context.Context, works func()) error {
	from, err := t.d.ledger.Tallied(ctx)
	if err != nil {
		return fmt.Errorf("reading how far outcomes are counted: %w", err)
	}
	at := queue.Mark{Stream: from.Stream, Seq: from.Seq}
	if t.lost, err = t.countLost(ctx, at); err != nil {
		return err
	}
	if p := t.doubt; p != nil && p.To == at { // it was
		t.tell(p)
	}
	t.doubt = nil
	t.arrive(at)
	tail := t.d.deps.Queue.Tail(at)
	defer tail.Close()
	for {
		page, err := tail.Next(ctx)
		if err != nil {
			return err
		}
		begun := time.Now()
		if err := t.count(ctx, page); err != nil {
			return err
		}
		works()
		t.d.metrics.tallyLag.Set(float64(page.Behind))
		if page.From.Stream != "" && (page.To.Stream != page.From.Stream || page.To.Seq < page.From.Seq) {
			// What was known of lines that ended is of the old stream, or of its lost end. If we crash here, the next leader reads what there is anyway.
			t.driver.forget()
			if t.lost, err = t.countLost(ctx, page.To); err != nil {
				return err
			}
		}
		t.arrive(page.To)
		t.tell(page)
		if page.Behind == 0 { // what ends meanwhile is counted together
			select {
			case <-time.After(tallyBeat - time.Since(begun)):
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	}
}

// tell lets those know who wait for ends.
func (t *tally) tell(page *queue.OutcomePage) {
	for _, r := range page.Records {
		if !r.Outcome.Erased {
			t.driver.note(r)
			t.ended(r)
		}
	}
}

// count takes a page into the ledger.
func (t *tally) count(ctx context.Context, page *queue.OutcomePage) error {
	ended := make([]ledger.Ended, 0, len(page.Records))
	spent := map[string]int64{}
	for _, r := range page.Records {
		if r.Outcome.Erased { // a tombstone of one that was counted
			continue
		}
		e := endedOf(r)
		if t.lost[e.Group] > spent[e.Group] {
			spent[e.Group]++
			e.Group = job.NoGroup
		}
		ended = append(ended, e)
	}
	from, to := ledger.Position{Stream: page.From.Stream, Seq: page.From.Seq}, ledger.Position{Stream: page.To.Stream, Seq: page.To.Seq}
	err := t.d.ledger.Tally(ctx, t.epoch, from, to, ended)
	if err != nil {
		// It may be written all the same. Then the position has moved, and the next look at it finds that out.
		t.doubt = page
		return fmt.Errorf("counting outcomes: %w", err)
	}
	for group, n := range spent {
		t.lost[group] -= n
	}
	return nil
}

func endedOf(r *queue.Record) ledger.Ended {
	j, o := &r.Job, &r.Outcome
	e := ledger.Ended{Tenant: j.Tenant, Model: j.Model, Key: j.APIKey, Group: j.Group, At: o.Finished, OK: answered(o), Tokens: j.Expected()}
	if o.Usage != nil {
		e.Usage = *o.Usage
	}
	return e
}

// answered tells whether an outcome is an answer: with a status of 2xx.
func answered(o *job.Outcome) bool {
	return o.State == job.Completed && o.StatusCode >= 200 && o.StatusCode <= 299
}

// countLost is how many outcomes of each live batch are counted and stand no more in DONE up to the mark.
func (t *tally) countLost(ctx context.Context, at queue.Mark) (map[string]int64, error) {
	lost := map[string]int64{}
	made, err := time.Parse(time.RFC3339Nano, at.Stream)
	if err != nil { // the beginning of everything
		return lost, nil
	}
	batches, err := t.d.ledger.LiveBatches(ctx)
	if err != nil {
		return nil, fmt.Errorf("listing the batches to compare them with DONE: %w", err)
	}
	for i := range batches {
		b := &batches[i]
		counted := b.Done + b.Bad
		if counted == 0 || b.Created.Time().After(made.Add(lostSlack)) { // no older stream can have had any of it
			continue
		}
		for r, err := range t.d.deps.Queue.GroupHeaders(ctx, b.Tenant, b.ID) {
			if err != nil {
				return nil, fmt.Errorf("comparing batch %s with DONE: %w", b.ID, err)
			}
			if r.Seq <= at.Seq || r.Outcome.Erased { // a tombstone stands behind the outcome that was counted
				counted--
			}
		}
		if counted > 0 {
			t.d.log.Error("outcomes of a batch are lost with their stream: counting so many fewer from here on", "batch", b.ID, "lost", counted)
			lost[b.ID] = counted
		}
	}
	return lost, nil
}

// lostSlack allows for clocks that differ: a batch's time is its API's, a stream's its server's.
const lostSlack = 10 * time.Minute

// arrive notes where the tally stands, and wakes who waits for that.
func (t *tally) arrive(at queue.Mark) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.at = at
	close(t.moved)
	t.moved = make(chan struct{})
}

// wait returns once all up to a mark is counted.
func (t *tally) wait(ctx context.Context, mark queue.Mark) error {
	for {
		t.mu.Lock()
		at, moved := t.at, t.moved
		t.mu.Unlock()
		if at.Stream == mark.Stream && at.Seq >= mark.Seq {
			return nil
		}
		select {
		case <-moved:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// guard runs f, and turns a panic into an error.
func guard(f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = &panicked{p}
		}
	}()
	return f()
}

// panicked is a bug of ours that must not take the other batches along.
type panicked struct{ value any }

func (p *panicked) Error() string { return fmt.Sprintf("panic: %v", p.value) }
