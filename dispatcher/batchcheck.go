package dispatcher

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/millrace/millrace/internal/batch"
	"github.com/millrace/millrace/internal/blob"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
)

const (
	// mostLineErrors of a file are shown, and how many more there are.
	mostLineErrors = 1000
	// modelsSettle is for how long after its start, or after its connection came back, a process may not yet have heard of every model.
	modelsSettle = 3 * time.Second
)

// indexBlob names a batch's index. It is always made anew from the file, which gives the same bytes each time: whoever writes it last has changed nothing.
func indexBlob(id string) string { return batch.IndexPrefix + id }

// validate reads the whole file, and starts the batch or rejects it. Order: index -> the row, with its portions, in one transaction (the point of no return). If we crash before that, all of it is done again.
func (r *running) validate(ctx context.Context) error {
	row := r.now()
	if r.unknown != "" { // before all is read again
		if _, err := r.knows(ctx, &row, r.unknown); err != nil {
			return err
		}
	}
	f, err := r.v.d.ledger.File(ctx, row.Tenant, row.InputFile)
	switch {
	case errors.Is(err, ledger.ErrNotFound):
		return r.reject(ctx, fileError("There is no file %q.", row.InputFile))
	case err != nil:
		return fmt.Errorf("reading the row of the input file: %w", err)
	case f.Expires > 0 && f.Expires <= r.v.d.deps.Results.Now():
		return r.reject(ctx, fileError("The file %q has expired.", row.InputFile))
	case f.Purpose != "batch":
		return r.reject(ctx, fileError("The file %q has the purpose %q: upload it with the purpose \"batch\".", row.InputFile, f.Purpose))
	}
	var unknown error
	x, sum, err := r.scan(ctx, &row, f, r.usable(ctx, &row, &unknown))
	if err == nil {
		err = unknown
	}
	switch {
	case errors.Is(err, blob.ErrNotFound):
		return r.reject(ctx, fileError("The bytes of file %q are gone: upload it again.", row.InputFile))
	case err != nil:
		return fmt.Errorf("validating the input file: %w", err)
	case len(sum.Errors) > 0:
		return r.reject(ctx, sum.Errors...)
	}
	if err := r.putIndex(ctx, x); err != nil {
		return err
	}
	var portions []ledger.Portion
	var model job.Model
	for _, p := range x.Portions() {
		portions = append(portions, ledger.Portion{Model: p.Model, Lines: p.Lines, Tokens: p.Tokens})
		model = p.Model
	}
	if len(portions) != 1 {
		model = ""
	}
	r.v.admitting.Lock()
	defer r.v.admitting.Unlock()
	over, err := r.overQuota(ctx, &row, sum.Tokens)
	switch {
	case err != nil:
		return err
	case over != "":
		return r.reject(ctx, job.LineError{Code: job.CodeTokenLimit, Message: over})
	}
	started, err := r.v.d.ledger.StartBatch(ctx, r.v.epoch, r.id, r.v.d.deps.Results.Now(), model, portions)
	if err == nil {
		r.log.Info("batch validated", "lines", sum.Lines, "models", len(portions), "tokens", sum.Tokens)
	}
	return r.moved(started, err)
}

func fileError(format string, args ...any) job.LineError {
	param := "file_id"
	return job.LineError{Code: job.CodeInvalidRequest, Message: fmt.Sprintf(format, args...), Param: &param}
}

// reject ends the batch before anything of it was accepted.
func (r *running) reject(ctx context.Context, errs ...job.LineError) error {
	row, err := r.v.d.ledger.RejectBatch(ctx, r.v.epoch, r.id, r.v.d.deps.Results.Now(), errs)
	return r.moved(row, err)
}

// scan reads the input file. A nil usable lets all models pass.
func (r *running) scan(ctx context.Context, row *ledger.Batch, f *ledger.File, usable func(job.Model) *job.Error) (*batch.Indexer, *batch.Summary, error) {
	in, err := r.v.d.deps.Blobs.Get(ctx, f.Blob)
	if err != nil {
		return nil, nil, err
	}
	defer in.Close() //nolint:errcheck // read only
	cfg := &r.v.d.cfg
	x := batch.NewIndexer(batch.DefaultWindow)
	sum, err := batch.Scan(ctx, in, batch.Rules{Endpoint: row.Endpoint, MaxLine: cfg.BatchMaxLine, MaxLines: cfg.BatchMaxLines, MaxErrors: mostLineErrors, Model: usable}, func(l *batch.Line) error {
		x.Add(l)
		return nil
	})
	return x, sum, err
}

// putIndex stores an index.
func (r *running) putIndex(ctx context.Context, x *batch.Indexer) error {
	out, in := io.Pipe()
	written := make(chan struct{})
	go func() {
		defer close(written)
		_, err := x.WriteTo(in)
		in.CloseWithError(err) // which is io.EOF where there is none
	}()
	_, err := r.v.d.deps.Blobs.Put(ctx, indexBlob(r.id), out)
	out.CloseWithError(io.ErrClosedPipe)
	<-written
	if err != nil {
		return fmt.Errorf("storing the index: %w", err)
	}
	return nil
}

// usable says of models why the batch cannot use them. What keeps it from knowing goes to failed.
func (r *running) usable(ctx context.Context, row *ledger.Batch, failed *error) func(job.Model) *job.Error {
	return func(m job.Model) *job.Error {
		known := true
		if len(row.Models) > 0 && !slices.Contains(row.Models, m) {
			known = false
		} else if *failed == nil {
			var err error
			if known, err = r.knows(ctx, row, m); err != nil {
				*failed, known, r.unknown = err, true, m
			}
		}
		if known {
			return nil
		}
		return job.NewError(job.TypeInvalidRequest, job.CodeModelNotFound, fmt.Sprintf("The model %q does not exist, or you may not use it.", m))
	}
}

// errLearning: a worker starts that may come to serve the model.
var errLearning = errors.New("a worker starts whose engine has not told yet what it serves")

// knows is the dispatcher's knows, for a batch: once its time is over, no worker is waited for.
func (r *running) knows(ctx context.Context, row *ledger.Batch, m job.Model) (bool, error) {
	known, err := r.v.d.knows(ctx, m)
	if errors.Is(err, errLearning) && r.v.d.deps.Results.Now() >= row.Expires {
		return false, nil
	}
	return known, err
}

// knows tells whether a model exists: a worker serves it or did within the last day, or it has a queue. A process that has just started, or been cut off, is given time to hear of it.
func (d *Dispatcher) knows(ctx context.Context, m job.Model) (bool, error) {
	for {
		learning := d.deps.Cluster.Learning() // before what is known, lest what it learns meanwhile is missed
		for _, k := range d.deps.Cluster.Known() {
			if k.Model == m {
				return true, nil
			}
		}
		queues, err := d.deps.Queue.Models(ctx)
		if err != nil {
			return false, fmt.Errorf("listing models: %w", err)
		}
		if slices.Contains(queues, m) {
			return true, nil
		}
		switch settled := d.deps.Cluster.Listening(d.begun) > modelsSettle; {
		case settled && learning:
			return false, errLearning
		case settled:
			return false, nil
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return false, ctx.Err()
		}
	}
}

// overQuota says why the batch's tokens are too many for its tenant, "" if they are not. What counts are the jobs that wait or run, without the lines of batches, and what the tenant's live batches still need, their
// lines that wait or run among it.
func (r *running) overQuota(ctx context.Context, row *ledger.Batch, tokens job.Tokens) (string, error) {
	t, err := r.v.d.ledger.Tenant(ctx, row.Tenant)
	if err != nil {
		return "", fmt.Errorf("reading the tenant's limits: %w", err)
	}
	limit := job.Tokens(t.Limits.QueuedTokens)
	if limit == 0 {
		return "", nil
	}
	batches, err := r.v.d.ledger.BatchTokens(ctx, row.Tenant)
	if err != nil {
		return "", fmt.Errorf("reading what the tenant's batches need: %w", err)
	}
	jobs, err := r.v.d.deps.Results.TokensBesideLines(ctx, row.Tenant)
	if err != nil {
		return "", fmt.Errorf("reading what is accepted: %w", err)
	}
	used := batches + jobs
	if used+tokens <= limit {
		return "", nil
	}
	return fmt.Sprintf("The batch is expected to need %d tokens. Of the limit of %d queued tokens %d are in use: wait until others have ended, or send less.", tokens, limit, used), nil
}

// read opens the batch's file and index, and finds out which of its lines have ended, which may be queued, and which are to be fed.
func (r *running) read(ctx context.Context) (failed error) {
	row := r.now()
	portions, err := r.v.d.ledger.Portions(ctx, r.id)
	if err != nil {
		return fmt.Errorf("reading the portions: %w", err)
	}
	f, err := r.v.d.ledger.File(ctx, row.Tenant, row.InputFile)
	if err != nil {
		return fmt.Errorf("reading the row of the input file: %w", err)
	}
	life, closing := context.WithCancel(ctx)
	l := &lines{closing: closing}
	defer func() {
		if failed != nil {
			l.close()
		}
	}()
	if l.file, err = r.v.d.deps.Blobs.OpenAt(life, f.Blob); errors.Is(err, blob.ErrNotFound) {
		r.log.Error("the input file of a batch is lost: what is not queued yet cannot run", "file", f.ID)
		l.file, err = lostFile{}, nil
	}
	if err != nil {
		return fmt.Errorf("opening the input file: %w", err)
	}
	if err := r.openIndex(life, &row, f, portions, l); err != nil {
		return err
	}
	r.mu.Lock()
	r.open, r.left = map[int64]place{}, map[job.Model]job.Tokens{}
	for _, p := range portions {
		r.left[p.Model] = p.Tokens
	}
	r.mu.Unlock()
	// The batch is known to the tally, which notes what comes from here on: nothing falls between.
	for rec, err := range r.v.d.deps.Queue.GroupHeaders(ctx, row.Tenant, r.id) {
		if err != nil {
			return fmt.Errorf("reading which lines have ended: %w", err)
		}
		r.note(rec)
	}
	for _, p := range portions {
		s := newLineSupply(r, l, p)
		if err := s.recall(ctx); err != nil {
			return err
		}
		l.supplies = append(l.supplies, s)
	}
	r.mu.Lock()
	r.loaded = l
	r.mu.Unlock()
	for _, s := range l.supplies {
		r.v.feed(s.model)
	}
	return nil
}

// openIndex opens the index, and makes it anew if it is lost.
func (r *running) openIndex(ctx context.Context, row *ledger.Batch, f *ledger.File, portions []ledger.Portion, l *lines) error {
	for try := 0; ; try++ {
		var err error
		if l.blob, err = r.v.d.deps.Blobs.OpenAt(ctx, indexBlob(r.id)); err == nil {
			if l.index, err = batch.OpenIndex(l.blob); err == nil {
				err = fits(l.index, portions)
			}
		}
		switch {
		case err == nil:
			return nil
		case try > 0 || !errors.Is(err, blob.ErrNotFound) && !errors.Is(err, blob.ErrCorrupt) && !errors.Is(err, batch.ErrNotIndex) && !errors.Is(err, io.ErrUnexpectedEOF):
			return fmt.Errorf("opening the index: %w", err)
		}
		r.log.Error("a batch's index is lost: making it again from its file", "err", err)
		if l.blob != nil {
			_ = l.blob.Close() // read only
			l.blob = nil
		}
		x, _, err := r.scan(ctx, row, f, nil)
		if err != nil {
			return fmt.Errorf("reading the input file again: %w", err)
		}
		if err := r.putIndex(ctx, x); err != nil {
			return err
		}
	}
}

// fits tells whether an index is that of the portions.
func fits(x *batch.Index, portions []ledger.Portion) error {
	have := x.Portions()
	slices.SortFunc(portions, func(a, b ledger.Portion) int { return slices.Compare([]byte(a.Model), []byte(b.Model)) })
	if !slices.EqualFunc(have, portions, func(a batch.Portion, b ledger.Portion) bool { return a.Model == b.Model && a.Lines == b.Lines }) {
		return fmt.Errorf("%w: it has other lines than the batch", batch.ErrNotIndex)
	}
	return nil
}

// lostFile is a file whose bytes are gone.
type lostFile struct{}

func (lostFile) ReadAt([]byte, int64) (int, error) { return 0, blob.ErrNotFound }
func (lostFile) Size() int64                       { return 0 }
func (lostFile) Close() error                      { return nil }

func (l *lines) close() {
	for _, s := range l.supplies {
		s.close()
	}
	l.closing()
	if l.file != nil {
		_ = l.file.Close() // read only
	}
	if l.blob != nil {
		_ = l.blob.Close()
	}
}
