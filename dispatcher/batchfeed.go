package dispatcher

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	"github.com/millrace/millrace/internal/batch"
	"github.com/millrace/millrace/internal/blob"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/results"
)

const (
	chunkLines = 256     // lines that are published at once, and that are reserved ahead
	chunkBytes = 4 << 20 // and their bytes in the file: the first line may go beyond
)

// lineSupply feeds the lines of one model of one batch. Where it stands is kept in the ledger: lines before `confirmed` are surely queued, lines from `reserved` on surely not. The order of a chunk is
//
//	reserved behind it, in the ledger -> large bodies to blobs -> records -> published -> (the next reservation confirms it)
//
// If we crash before the reservation, nothing has happened; behind it, the next leader feeds the lines from confirmed on again. Those up to reserved it may find queued, or ended, and looks before it publishes. The
// reservation is fenced by the leader's epoch: what an earlier leader has not reserved, it will not publish.
type lineSupply struct {
	r     *running
	l     *lines
	model job.Model
	lines int64
	// tokens is what all of the lines are expected to need.
	tokens job.Tokens
	// done: all lines have been moved.
	done atomic.Bool
	// fedTo is where the first line stands that is not surely queued; it lags behind while a chunk is published.
	fedTo atomic.Int64

	turn sync.Mutex // guards what follows, for a whole turn
	// closed: nothing is to be fed any more.
	closed   bool
	reserved int64
	// doubtful lines stand before it: an earlier leader may have queued them.
	doubtful int64
	// untouched: from here on nothing was queued by anybody.
	untouched int64
	// ahead are the next lines, as far as the index was read.
	ahead []entry
	read  int64
}

// entry is a line's entry, and its place in the index.
type entry struct {
	batch.Entry
	at int64
}

func newLineSupply(r *running, l *lines, p ledger.Portion) *lineSupply {
	s := &lineSupply{r: r, l: l, model: p.Model, lines: p.Lines, tokens: p.Tokens, reserved: p.Reserved, doubtful: p.Reserved, untouched: p.Reserved, read: p.Confirmed}
	s.fedTo.Store(p.Confirmed)
	return s
}

// recall notes which lines may be queued: those before the reservation that have no outcome.
func (s *lineSupply) recall(ctx context.Context) error {
	page := make([]batch.Entry, 4096)
	for at := int64(0); at < s.reserved; {
		if err := ctx.Err(); err != nil {
			return err
		}
		n, err := s.l.index.Entries(s.model, at, page[:min(int64(len(page)), s.reserved-at)])
		if err != nil || n == 0 {
			return fmt.Errorf("reading the index at %d of model %s: %w", at, s.model, cmp.Or(err, io.ErrUnexpectedEOF))
		}
		r := s.r
		r.mu.Lock()
		for i := range page[:n] {
			e := &page[i]
			if r.ended.has(e.Line) {
				r.left[s.model] -= e.Tokens
			} else {
				r.open[e.Line] = place{supply: s, at: at + int64(i), tokens: e.Tokens}
			}
		}
		r.mu.Unlock()
		at += int64(n)
	}
	return nil
}

// close has nothing fed any more once it returns.
func (s *lineSupply) close() {
	s.turn.Lock()
	defer s.turn.Unlock()
	s.closed = true
	s.done.Store(true)
}

// unfed is how many lines are not surely queued yet, and about what they are expected to need.
func (s *lineSupply) unfed() (lines int64, tokens job.Tokens) {
	if lines = s.lines - s.fedTo.Load(); lines <= 0 {
		return 0, 0
	}
	return lines, job.Tokens(float64(s.tokens) * float64(lines) / float64(s.lines))
}

func (s *lineSupply) tenant() job.Tenant { return s.r.now().Tenant }

func (s *lineSupply) class() job.Class { return job.Batch }

func (s *lineSupply) name() string { return s.r.id }

// head tells what the next line is expected to need.
func (s *lineSupply) head(context.Context) (tokens job.Tokens, ok bool, err error) {
	s.turn.Lock()
	defer s.turn.Unlock()
	err = s.guard(func() error {
		if err := s.look(); err != nil || len(s.ahead) == 0 {
			return err
		}
		tokens, ok = s.ahead[0].Tokens, true
		return nil
	})
	return tokens, ok, err
}

// guard keeps a panic over one batch from the others.
func (s *lineSupply) guard(f func() error) error {
	err := guard(f)
	if errors.As(err, new(*panicked)) {
		s.r.v.d.metrics.failures.WithLabelValues("batch_panic").Inc()
	}
	return err
}

// look reads the index on if nothing is ahead. Lines that have ended are passed over.
func (s *lineSupply) look() error {
	if s.closed {
		s.ahead = nil
		return nil
	}
	for len(s.ahead) > 0 && s.r.hasEnded(s.ahead[0].Line) { // a publish that was not answered had worked
		s.ahead = s.ahead[1:]
	}
	var page []batch.Entry
	for len(s.ahead) == 0 && s.read < s.lines {
		if page == nil {
			page = make([]batch.Entry, chunkLines)
		}
		n, err := s.l.index.Entries(s.model, s.read, page)
		if err != nil || n == 0 {
			return fmt.Errorf("reading the index at %d of model %s: %w", s.read, s.model, cmp.Or(err, io.ErrUnexpectedEOF))
		}
		for i, e := range page[:n] {
			if at := s.read + int64(i); at >= s.doubtful || !s.r.hasEnded(e.Line) {
				s.ahead = append(s.ahead, entry{e, at})
			}
		}
		s.read += int64(n)
	}
	s.stand()
	return nil
}

// stand notes how far everything is queued.
func (s *lineSupply) stand() {
	if len(s.ahead) > 0 {
		s.fedTo.Store(s.ahead[0].at)
		return
	}
	s.fedTo.Store(s.read)
	s.done.Store(s.read >= s.lines)
}

// feed publishes the next lines as class c, a chunk at most.
func (s *lineSupply) feed(ctx context.Context, c job.Class, most int, tokens job.Tokens) (all []fed, err error) {
	s.turn.Lock()
	defer s.turn.Unlock()
	err = s.guard(func() (err error) {
		all, err = s.feedChunk(ctx, c, most, tokens)
		return err
	})
	return all, err
}

func (s *lineSupply) feedChunk(ctx context.Context, c job.Class, most int, tokens job.Tokens) ([]fed, error) {
	if err := s.look(); err != nil || len(s.ahead) == 0 || most <= 0 {
		return nil, err
	}
	if err := s.r.v.room(ctx); err != nil {
		return nil, err
	}
	n, sum, size := 0, job.Tokens(0), int64(0)
	for n < len(s.ahead) && n < min(most, chunkLines) {
		e := &s.ahead[n]
		if n > 0 && (sum+e.Tokens > tokens || size+e.Length > chunkBytes) {
			break
		}
		n, sum, size = n+1, sum+e.Tokens, size+e.Length
	}
	chunk := s.ahead[:n]
	if end := chunk[n-1].at + 1; end > s.reserved {
		to := min(s.lines, max(end, s.fedTo.Load()+chunkLines))
		if err := s.r.v.d.ledger.Reserve(ctx, s.r.v.epoch, s.r.id, s.model, s.fedTo.Load(), to); err != nil {
			return nil, fmt.Errorf("reserving lines %d to %d of batch %s: %w", s.fedTo.Load(), to, s.r.id, err)
		}
		s.reserved = to
	}
	jobs, err := s.jobs(ctx, c, chunk)
	if err != nil {
		return nil, err
	}
	// From here on the lines may be queued, whatever we hear of it.
	s.untouched = max(s.untouched, chunk[n-1].at+1)
	for _, e := range chunk {
		s.r.publishing(e.Line, place{supply: s, at: e.at, tokens: e.Tokens})
	}
	moved, err := s.r.publish(ctx, jobs, func(i int) bool { return chunk[i].at < s.doubtful })
	var all []fed
	rest := make([]entry, 0, len(s.ahead))
	for i, e := range chunk {
		if moved[i] {
			all = append(all, fed{id: jobs[i].Job.ID, tokens: e.Tokens})
		} else if !s.r.hasEnded(e.Line) {
			rest = append(rest, e)
		}
	}
	s.ahead = append(rest, s.ahead[n:]...)
	s.stand()
	s.r.v.d.metrics.lines.WithLabelValues(string(s.model)).Add(float64(len(all)))
	return all, err
}

// jobs reads lines from the file, and makes jobs of class c of them.
func (s *lineSupply) jobs(ctx context.Context, c job.Class, chunk []entry) ([]queue.Message, error) {
	row, now := s.r.now(), s.r.v.d.deps.Results.Now()
	jobs := make([]queue.Message, len(chunk))
	err := s.l.each(ctx, chunk, func(i int, raw []byte) error {
		id, body, err := batch.Parse(raw)
		if err != nil {
			return err
		}
		o, err := job.ParseObject(body)
		if err != nil {
			return err
		}
		m := &jobs[i]
		m.Body = body
		m.Job = job.Job{
			ID: job.LineID(row.ID, chunk[i].Line), Tenant: row.Tenant, Model: s.model, Endpoint: row.Endpoint, Class: c, Group: row.ID, Created: now, Expires: row.Expires,
			RunTimeout: job.Millis(s.r.v.d.cfg.BatchRunTimeout.Milliseconds()), Cost: job.EstimateCost(o, body), BodySize: int64(len(body)),
			APIKey: row.Key, Line: chunk[i].Line, CustomID: id,
		}
		if len(body) > blob.Threshold {
			m.Job.Blob = job.RequestBlob(m.Job.ID)
		}
		return nil
	})
	return jobs, err
}

// each reads lines of the file, in the file's order, and calls fn with each one's place in the list and its text, which is its own.
func (l *lines) each(ctx context.Context, list []entry, fn func(i int, raw []byte) error) error {
	order := make([]int, len(list))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int { return cmp.Compare(list[a].Offset, list[b].Offset) })
	for _, i := range order {
		if err := ctx.Err(); err != nil {
			return err
		}
		e := &list[i]
		raw := make([]byte, e.Length)
		if n, err := l.file.ReadAt(raw, e.Offset); n < len(raw) {
			return fmt.Errorf("reading line %d of the input file: %w", e.Line, err)
		}
		if err := fn(i, raw); err != nil {
			return fmt.Errorf("reading line %d of the input file: %w", e.Line, err)
		}
	}
	return nil
}

// publish has lines queued, and tells which of them are. Of those that may be queued already, or have ended, doubtful is true: they are looked for before. An error may come with a part.
func (r *running) publish(ctx context.Context, jobs []queue.Message, doubtful func(i int) bool) ([]bool, error) {
	moved := make([]bool, len(jobs))
	publish := make([]bool, len(jobs))
	var g errgroup.Group
	g.SetLimit(feedAtOnce)
	for i := range jobs {
		m := &jobs[i]
		publish[i] = true
		if !doubtful(i) && m.Job.Blob == "" {
			continue
		}
		g.Go(func() (err error) {
			if doubtful(i) {
				if moved[i], publish[i], err = r.lookFor(ctx, &m.Job); err != nil || !publish[i] {
					publish[i] = false
					return err
				}
			}
			if m.Job.Blob != "" {
				if _, err := r.v.d.deps.Blobs.Put(ctx, m.Job.Blob, bytes.NewReader(m.Body)); err != nil {
					publish[i] = false
					return fmt.Errorf("storing the body of line %d: %w", m.Job.Line, err)
				}
			}
			return nil
		})
	}
	failed := g.Wait()
	accepted := make([]*job.Job, 0, len(jobs))
	for i := range jobs {
		if publish[i] {
			accepted = append(accepted, &jobs[i].Job)
		}
	}
	if len(accepted) == 0 {
		return moved, failed
	}
	if err := r.v.d.deps.Results.AcceptLines(ctx, accepted); err != nil {
		return moved, errors.Join(failed, err)
	}
	// All at once, so that the queue's committer makes large batches of them.
	var all errgroup.Group
	for i := range jobs {
		if !publish[i] {
			continue
		}
		all.Go(func() error {
			err := r.v.d.deps.Queue.Enqueue(ctx, queue.Work, queue.AnyLane, &jobs[i])
			if err == nil || errors.Is(err, queue.ErrExists) {
				moved[i] = true
				return nil
			}
			return fmt.Errorf("queueing line %d of batch %s: %w", jobs[i].Job.Line, r.id, err)
		})
	}
	return moved, errors.Join(failed, all.Wait())
}

// lookFor looks for a line that may have been queued before. It is there, or is to be published, or neither: then it has ended. The queue's leader answers.
func (r *running) lookFor(ctx context.Context, j *job.Job) (there, publish bool, err error) {
	_, err = r.v.d.deps.Queue.Find(ctx, j.Model, j.ID)
	switch {
	case err == nil:
		return true, false, nil
	case !errors.Is(err, queue.ErrNotFound):
		return false, false, fmt.Errorf("looking for the message of job %s: %w", j.ID, err)
	}
	// Only now: its message is removed after its outcome is stored.
	over, err := r.findOutcome(ctx, j.ID)
	if over || err != nil {
		return false, false, err
	}
	// Without an outcome it has not ended. A record that says so is of an outcome that was lost with its stream, and would keep the line from running again.
	rec, err := r.v.d.deps.Results.Get(ctx, j.ID)
	switch {
	case errors.Is(err, results.ErrNotFound):
	case err != nil:
		return false, false, fmt.Errorf("reading job %s: %w", j.ID, err)
	case rec.State == job.Running && rec.Lease > r.v.d.deps.Results.Now(): // its attempt will end it
		return true, false, nil
	case rec.State.Ended():
		// Since DONE was read it may have been published by a leader that was, have run, and ended.
		if over, err := r.findOutcome(ctx, j.ID); over || err != nil {
			return false, false, err
		}
		if err := r.v.d.deps.Results.Delete(ctx, j.Tenant, j.ID); err != nil {
			return false, false, fmt.Errorf("deleting the record of job %s: %w", j.ID, err)
		}
	}
	return false, true, nil
}

// findOutcome looks for a line's outcome in DONE, and takes it into account if there is one.
func (r *running) findOutcome(ctx context.Context, id job.ID) (bool, error) {
	rec, err := r.v.d.deps.Queue.Outcome(ctx, r.now().Tenant, r.id, id)
	switch {
	case errors.Is(err, queue.ErrNotFound):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("looking for the outcome of job %s: %w", id, err)
	}
	r.note(rec)
	return true, nil
}

// urgency is how much of the model's throughput the lines that have not ended need until the batch expires, where a fifth is kept to spare.
func (s *lineSupply) urgency(throughput float64) float64 {
	row := s.r.now()
	s.r.mu.Lock()
	left := float64(s.r.left[s.model])
	s.r.mu.Unlock()
	if throughput <= 0 || left <= 0 {
		return 0
	}
	time := 0.8 * (row.Expires - s.r.v.d.deps.Results.Now()).Seconds()
	if time <= 0 {
		return 1
	}
	return min(1, left/(throughput*time))
}

// refeed publishes lines again whose messages are lost. Those that a supply is yet to feed are left to it.
func (r *running) refeed(ctx context.Context, numbers []int64) (int, error) {
	bySupply := map[*lineSupply][]entry{}
	r.mu.Lock()
	if r.loaded != nil && r.row.Status == ledger.InProgress {
		for _, n := range numbers {
			if p, ok := r.open[n]; ok && p.at < p.supply.fedTo.Load() {
				bySupply[p.supply] = append(bySupply[p.supply], entry{at: p.at})
			}
		}
	}
	r.mu.Unlock()
	n := 0
	for s, list := range bySupply {
		for part := range slices.Chunk(list, chunkLines) {
			fed, err := s.again(ctx, part)
			n += fed
			if err != nil {
				return n, err
			}
		}
	}
	return n, nil
}

// again publishes lines again that are in neither queue nor DONE.
func (s *lineSupply) again(ctx context.Context, list []entry) (int, error) {
	one := make([]batch.Entry, 1)
	n := 0
	for i := range list {
		if got, err := s.l.index.Entries(s.model, list[i].at, one); err != nil || got == 0 {
			return n, fmt.Errorf("reading the index at %d of model %s: %w", list[i].at, s.model, cmp.Or(err, io.ErrUnexpectedEOF))
		}
		list[i].Entry = one[0]
	}
	for len(list) > 0 {
		end, size := 0, int64(0)
		for ; end < len(list) && (end == 0 || size+list[end].Length <= chunkBytes); end++ {
			size += list[end].Length
		}
		jobs, err := s.jobs(ctx, job.Batch, list[:end])
		if err != nil {
			return n, err
		}
		list = list[end:]
		moved, err := s.r.publish(ctx, jobs, func(int) bool { return true })
		for _, m := range moved {
			if m {
				n++
			}
		}
		if err != nil {
			return n, err
		}
	}
	return n, nil
}
