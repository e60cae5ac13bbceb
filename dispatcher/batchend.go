package dispatcher

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/millrace/millrace/internal/batch"
	"github.com/millrace/millrace/internal/blob"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/results"
)

const (
	// endingLook is how often lines that still run are looked at while their batch is to end.
	endingLook = 250 * time.Millisecond
	// endAtOnce lines are ended side by side.
	endAtOnce = 64
	// countPatience bounds the wait until the ledger has counted what a batch's files have.
	countPatience = 10 * time.Second
)

// finish brings a batch that is finalizing or cancelling to its end. Order:
//
//	nothing is fed any more -> each line that may be queued has an outcome in DONE -> files -> the end, with the files' rows and the counts, in one transaction (the point of no return)
//
// If we crash before that, all of it is done again: lines have one outcome each, and the files get the same ids. Each leader writes them to objects of its own, so that one that is late cannot change what another has
// ended the batch with; what is left of the others is swept. Behind the end only the index is left to go.
func (r *running) finish(ctx context.Context, row *ledger.Batch) (time.Duration, error) {
	if row.InProgress == 0 { // cancelled before anything of it was accepted
		return 0, r.moved(r.v.d.ledger.EndBatch(ctx, r.v.epoch, r.id, r.v.d.deps.Results.Now(), 0, 0, nil, nil))
	}
	if err := r.load(ctx); err != nil {
		return 0, err
	}
	r.mu.Lock()
	l := r.loaded
	r.mu.Unlock()
	if l == nil {
		return 0, errors.New("the batch's files were closed meanwhile")
	}
	for _, s := range l.supplies {
		s.close()
	}
	left, err := r.endOpen(ctx, row)
	if err != nil {
		return 0, err
	}
	if left > 0 {
		return endingLook, nil
	}
	return 0, r.conclude(ctx, row, l)
}

// endOpen ends the lines that may be queued and have no outcome, and returns how many of them still run.
func (r *running) endOpen(ctx context.Context, row *ledger.Batch) (int, error) {
	r.mu.Lock()
	open := make(map[int64]place, len(r.open))
	for n, p := range r.open {
		open[n] = p
	}
	r.mu.Unlock()
	var g errgroup.Group
	g.SetLimit(endAtOnce)
	for n, p := range open {
		if ctx.Err() != nil {
			break
		}
		g.Go(func() error { return r.endLine(ctx, row, n, p) })
	}
	if err := g.Wait(); err != nil {
		return 0, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.open), ctx.Err()
}

// endLine ends one line. One that runs in a batch that is cancelled is told to its worker, again each time, and has not ended before that says so, or its lease has run out.
func (r *running) endLine(ctx context.Context, row *ledger.Batch, n int64, p place) error {
	d, id := r.v.d, job.LineID(r.id, n)
	cancelled := row.Status == ledger.Cancelling
	get := d.deps.Results.Get
	if cancelled { // the wish is stored first: whoever claims the line from here on ends it
		get = d.deps.Results.AskCancel
	}
	rec, err := get(ctx, id)
	if err != nil && !errors.Is(err, results.ErrNotFound) {
		return fmt.Errorf("reading job %s to end it: %w", id, err)
	}
	if err != nil {
		rec = nil
	}
	now := d.deps.Results.Now()
	if rec != nil && rec.State.Ended() {
		if over, err := r.findOutcome(ctx, id); over || err != nil {
			return err
		}
		rec = nil // its outcome was lost with its stream
	}
	if cancelled && rec != nil && rec.State == job.Running && rec.Lease > now {
		d.deps.Relay.Cancel(id)
		return nil
	}
	j, err := r.jobOf(ctx, rec, n, p)
	if err != nil {
		return err
	}
	stored, err := d.settler.End(ctx, j, rec, r.ending(row, rec, p.supply.model, now))
	if stored == nil {
		return err
	}
	if err != nil { // the outcome stands, and the rest is made up for by the reconciler
		r.log.Warn("recording a line's end", "job", id, "err", err)
	}
	d.metrics.ended.WithLabelValues(string(stored.Outcome.State)).Inc()
	r.note(stored)
	return nil
}

// jobOf is a line's job, from its record, or from the file.
func (r *running) jobOf(ctx context.Context, rec *results.Record, n int64, p place) (*job.Job, error) {
	if rec != nil {
		return &rec.Job, nil
	}
	one := make([]batch.Entry, 1)
	if got, err := p.supply.l.index.Entries(p.supply.model, p.at, one); err != nil || got == 0 {
		return nil, fmt.Errorf("reading the index for line %d: %w", n, errors.Join(err, io.ErrUnexpectedEOF))
	}
	jobs, err := p.supply.jobs(ctx, job.Batch, []entry{{one[0], p.at}})
	if lost(err) { // it ends without its name
		row := r.now()
		return &job.Job{ID: job.LineID(r.id, n), Tenant: row.Tenant, Model: p.supply.model, Endpoint: row.Endpoint, Class: job.Batch, Group: r.id, Expires: row.Expires, APIKey: row.Key, Line: n}, nil
	}
	if err != nil {
		return nil, err
	}
	return &jobs[0].Job, nil
}

// lost tells whether a line's text is gone for good.
func lost(err error) bool { return errors.Is(err, blob.ErrNotFound) || errors.Is(err, blob.ErrCorrupt) }

// ending is the outcome of a line that its batch's end ends. rec is nil for one without a record.
func (r *running) ending(row *ledger.Batch, rec *results.Record, m job.Model, now job.Millis) job.Outcome {
	switch {
	case row.Status == ledger.Cancelling:
		return job.Outcome{State: job.Cancelled, Error: job.NewError(job.TypeInvalidRequest, job.CodeBatchCancelled, "The batch was cancelled before the line had ended.")}
	case row.Late:
		why := ""
		if rec != nil {
			why = late(rec, now, r.v.d.deps.Cluster.Workers(m))
		}
		if why == "" {
			why = r.neverRun(row, m).Message
		}
		return job.Outcome{State: job.Expired, Error: job.NewError(job.TypeServer, job.CodeBatchExpired, why)}
	default: // all lines had ended, and DONE has lost some of the outcomes since
		return job.Outcome{State: job.Failed, Error: job.NewError(job.TypeServer, job.CodeInternal, "The line's outcome was lost.")}
	}
}

// neverRun says why a line of a batch that is over was not run.
func (r *running) neverRun(row *ledger.Batch, m job.Model) *job.Error {
	if row.Late {
		return job.NewError(job.TypeServer, job.CodeBatchExpired, "The batch's completion window closed before the line's turn came: "+capacity(r.v.d.deps.Cluster.Workers(m)))
	}
	return job.NewError(job.TypeInvalidRequest, job.CodeBatchCancelled, "The batch was cancelled before the line's turn came.")
}

// fileID names a file of a batch: always the same, so that a second try to end the batch does not make other files.
func fileID(batch string, kind int64) string {
	return ledger.FilePrefix + strings.TrimPrefix(string(job.LineID(batch, kind)), "job_")
}

// The kinds of files are numbers that no line has.
const (
	outputFile int64 = -1
	errorFile  int64 = -2
)

// conclusion is what a batch ends with.
type conclusion struct {
	done, bad    int64
	output, errs *ledger.File // nil for one without lines
	// last is where the last of the outcomes stands in DONE.
	last queue.Mark
}

// conclude writes the files, unless they are written, and ends the batch. All lines have an outcome, or were never queued.
func (r *running) conclude(ctx context.Context, row *ledger.Batch, l *lines) error {
	r.mu.Lock()
	c := r.files
	r.mu.Unlock()
	if c == nil {
		err := r.heavily(ctx, func(ctx context.Context) (err error) {
			c, err = r.writeFiles(ctx, row, l)
			return err
		})
		if err != nil {
			return err
		}
		r.mu.Lock()
		r.files = c
		r.mu.Unlock()
	}
	// The ledger counts nothing for a batch that has ended: usage that is not counted by then would be missing. The counts, which rise with it, come to be those of the files.
	short, cancel := context.WithTimeout(ctx, countPatience)
	defer cancel()
	if err := r.v.tally.wait(short, c.last); err != nil {
		return fmt.Errorf("waiting until all outcomes are counted: %w", err)
	}
	// If we crash here, the files are without rows, and are written again.
	ended, err := r.v.d.ledger.EndBatch(ctx, r.v.epoch, r.id, r.v.d.deps.Results.Now(), c.done, c.bad, c.output, c.errs)
	return r.moved(ended, err)
}

// writeFiles writes the output and the error file.
func (r *running) writeFiles(ctx context.Context, row *ledger.Batch, l *lines) (c *conclusion, failed error) {
	output, errs := r.newFile(outputFile), r.newFile(errorFile)
	defer func() {
		if failed != nil {
			output.abort()
			errs.abort()
		}
	}()
	c = &conclusion{}
	var line []byte
	write := func(o *batch.Output, good bool) error {
		line = batch.AppendOutput(line[:0], o)
		if good {
			c.done++
			return output.write(ctx, line)
		}
		c.bad++
		return errs.write(ctx, line)
	}
	var seen lineSet
	answer := func(rec *queue.Record) error {
		c.last.Seq = max(c.last.Seq, rec.Seq)
		if rec.Job.Line <= 0 || !seen.add(rec.Job.Line) { // a tombstone stands behind what it replaces
			return nil
		}
		o, err := r.outputOf(ctx, row, rec)
		if err != nil {
			return err
		}
		return write(o, answered(&rec.Outcome))
	}
	if _, err := r.v.d.deps.Queue.GroupOutcomes(ctx, row.Tenant, r.id, 0, answer); err != nil {
		return nil, err
	}
	for _, s := range l.supplies {
		if err := r.rest(ctx, row, s, &seen, answer, write); err != nil {
			return nil, err
		}
	}
	if c.done+c.bad != row.Total {
		return nil, fmt.Errorf("the batch has %d lines, and its files %d and %d", row.Total, c.done, c.bad)
	}
	end, err := r.v.d.deps.Queue.DoneEnd(ctx)
	if err != nil {
		return nil, err
	}
	c.last.Stream = end.Stream // one made anew since has what was read anew, too
	now := r.v.d.deps.Results.Now()
	if c.output, err = output.close(row, now); err != nil {
		return nil, err
	}
	if c.errs, err = errs.close(row, now); err != nil {
		return nil, err
	}
	return c, nil
}

// rest writes what became of a model's lines that were not among the outcomes: they were never queued, or a replica did not have their outcomes yet.
func (r *running) rest(ctx context.Context, row *ledger.Batch, s *lineSupply, seen *lineSet, answer func(*queue.Record) error, write func(*batch.Output, bool) error) error {
	page := make([]batch.Entry, 4096)
	missing := make([]entry, 0, chunkLines)
	why := r.neverRun(row, s.model)
	flush := func() error {
		names := make([]string, len(missing))
		err := s.l.each(ctx, missing, func(i int, raw []byte) (err error) {
			names[i], _, err = batch.Parse(raw)
			return err
		})
		if lost(err) { // the lines end all the same
			r.log.Error("lines of a batch end without their names", "err", err)
		} else if err != nil {
			return err
		}
		for i, e := range missing {
			if err := write(&batch.Output{ID: batch.OutputID(r.id, e.Line), CustomID: names[i], Error: why}, false); err != nil {
				return err
			}
		}
		missing = missing[:0]
		return nil
	}
	size := int64(0)
	for at := int64(0); at < s.lines; {
		n, err := s.l.index.Entries(s.model, at, page)
		if err != nil || n == 0 {
			return fmt.Errorf("reading the index at %d of model %s: %w", at, s.model, errors.Join(err, io.ErrUnexpectedEOF))
		}
		for i, e := range page[:n] {
			if seen.has(e.Line) {
				continue
			}
			if place := at + int64(i); place < s.untouched { // it has an outcome
				rec, err := r.v.d.deps.Queue.Outcome(ctx, row.Tenant, r.id, job.LineID(r.id, e.Line))
				if err != nil {
					if errors.Is(err, queue.ErrNotFound) { // lost with its stream, just now
						r.stale.Store(true)
					}
					return fmt.Errorf("reading the outcome of line %d: %w", e.Line, err)
				}
				if err := answer(rec); err != nil {
					return err
				}
				continue
			}
			seen.add(e.Line)
			if missing = append(missing, entry{e, at + int64(i)}); len(missing) == cap(missing) || size > chunkBytes {
				if err := flush(); err != nil {
					return err
				}
				size = 0
			}
			size += e.Length
		}
		at += int64(n)
	}
	return flush()
}

// outputOf is what the files say of an outcome.
func (r *running) outputOf(ctx context.Context, row *ledger.Batch, rec *queue.Record) (*batch.Output, error) {
	body, err := r.answerOf(ctx, rec)
	if err != nil {
		return nil, err
	}
	out := batch.OutputOf(&rec.Job, &rec.Outcome, body, row.Status == ledger.Cancelling)
	return &out, nil
}

// answerOf is the engine's answer.
func (r *running) answerOf(ctx context.Context, rec *queue.Record) ([]byte, error) {
	name := rec.Outcome.Blob
	if name == "" {
		return rec.Result, nil
	}
	in, err := r.v.d.deps.Blobs.Get(ctx, name)
	if errors.Is(err, blob.ErrNotFound) {
		r.log.Error("the answer of a line is gone", "job", rec.Job.ID)
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading the answer of job %s: %w", rec.Job.ID, err)
	}
	defer in.Close() //nolint:errcheck // read only
	body, err := io.ReadAll(in)
	if err != nil {
		return nil, fmt.Errorf("reading the answer of job %s: %w", rec.Job.ID, err)
	}
	return body, nil
}

// outFile is a file that is being written to its blob. There is none before its first line.
type outFile struct {
	r    *running
	id   string
	blob string
	kind int64
	size int64
	sum  hash.Hash
	out  *bufio.Writer
	in   *io.PipeWriter
	done chan error
}

func (r *running) newFile(kind int64) *outFile {
	id := fileID(r.id, kind)
	return &outFile{r: r, id: id, blob: fmt.Sprintf("%s-%d", id, r.v.epoch), kind: kind}
}

func (f *outFile) write(ctx context.Context, line []byte) error {
	if f.out == nil {
		read, write := io.Pipe()
		f.in, f.sum, f.done = write, sha256.New(), make(chan error, 1)
		f.out = bufio.NewWriterSize(io.MultiWriter(write, f.sum), 256<<10)
		go func() {
			_, err := f.r.v.d.deps.Blobs.Put(ctx, f.blob, read)
			if err == nil {
				err = io.ErrClosedPipe // for who writes on
			}
			read.CloseWithError(err)
			f.done <- err
		}()
	}
	f.size += int64(len(line))
	if _, err := f.out.Write(line); err != nil {
		return fmt.Errorf("writing file %s: %w", f.id, err)
	}
	return nil
}

// abort leaves nothing of the file behind. One that is closed stays.
func (f *outFile) abort() {
	if f.in == nil {
		return
	}
	f.in.CloseWithError(errAborted)
	<-f.done //nolint:errcheck // it says that it was aborted
	f.in = nil
}

var errAborted = errors.New("the file is not needed any more")

// close returns the file's row once its bytes are durable, nil if it has no line.
func (f *outFile) close(row *ledger.Batch, now job.Millis) (*ledger.File, error) {
	if f.in == nil {
		return nil, nil
	}
	err := f.out.Flush()
	if err != nil {
		return nil, fmt.Errorf("writing file %s: %w", f.id, err)
	}
	_ = f.in.Close() // never fails
	err = <-f.done
	f.in = nil
	if !errors.Is(err, io.ErrClosedPipe) {
		return nil, fmt.Errorf("storing file %s: %w", f.id, err)
	}
	name := row.ID + "_output.jsonl"
	if f.kind == errorFile {
		name = row.ID + "_error.jsonl"
	}
	file := &ledger.File{
		ID: f.id, Tenant: row.Tenant, Key: row.Key, Purpose: "batch_output", Filename: name, Bytes: f.size, SHA256: hex.EncodeToString(f.sum.Sum(nil)), Blob: f.blob, Batch: row.ID, Created: now,
	}
	if row.OutputExpires > 0 {
		file.Expires = now + job.Millis(row.OutputExpires*1000)
	}
	return file, nil
}

// tidy removes what an ended batch needs no more, counts it, and writes its one log line.
func (r *running) tidy(ctx context.Context, row *ledger.Batch) {
	r.close()
	if err := r.v.d.deps.Blobs.Delete(ctx, indexBlob(r.id)); err != nil {
		r.log.Warn("removing a batch's index: the sweep will", "err", err)
	}
	r.v.d.metrics.batchesEnded.WithLabelValues(string(row.Status)).Inc()
	attrs := []any{"status", row.Status, "lines", row.Total, "completed", row.Done, "failed", row.Bad, "tokens", row.TokensDone, "model", row.Model}
	if row.InProgress > 0 {
		attrs = append(attrs, "took_ms", int64(r.v.d.deps.Results.Now()-row.Created))
	}
	if len(row.Errors) > 0 {
		attrs = append(attrs, "code", row.Errors[0].Code, "errors", len(row.Errors))
	}
	r.log.Info("batch ended", attrs...)
}
