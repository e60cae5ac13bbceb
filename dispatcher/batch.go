package dispatcher

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/millrace/millrace/internal/batch"
	"github.com/millrace/millrace/internal/blob"
	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
	"github.com/millrace/millrace/internal/queue"
)

// batchLedger is what the leader asks of the ledger.
type batchLedger interface {
	File(ctx context.Context, t job.Tenant, id string) (*ledger.File, error)
	Tenant(ctx context.Context, id job.Tenant) (*ledger.Tenant, error)
	Batch(ctx context.Context, t job.Tenant, id string) (*ledger.Batch, error)
	BatchTokens(ctx context.Context, t job.Tenant) (job.Tokens, error)
	Lead(ctx context.Context, epoch uint64) error
	LiveBatches(ctx context.Context) ([]ledger.Batch, error)
	EndedBatches(ctx context.Context, after, until job.Millis, limit int) ([]ledger.Batch, error)
	Portions(ctx context.Context, batch string) ([]ledger.Portion, error)
	StartBatch(ctx context.Context, epoch uint64, id string, now job.Millis, model job.Model, portions []ledger.Portion) (*ledger.Batch, error)
	RejectBatch(ctx context.Context, epoch uint64, id string, now job.Millis, errs []job.LineError) (*ledger.Batch, error)
	Reserve(ctx context.Context, epoch uint64, batch string, m job.Model, confirmed, reserved int64) error
	FinalizeBatch(ctx context.Context, epoch uint64, id string, now job.Millis, late bool) (*ledger.Batch, error)
	EndBatch(ctx context.Context, epoch uint64, id string, now job.Millis, done, bad int64, output, errorFile *ledger.File) (*ledger.Batch, error)
	Tallied(ctx context.Context) (ledger.Position, error)
	Tally(ctx context.Context, epoch uint64, from, to ledger.Position, ended []ledger.Ended) error
}

// driver moves batches from their creation to their end, as long as it leads. Each live batch has a goroutine, which takes turns: a turn looks where the batch stands and does what is next. What a turn does may be cut
// anywhere, by an error, a panic or a kill -9: the next one, of this leader or another, begins from what is stored.
//
//	validating   file is read -> index -> in_progress with its portions (or failed)
//	in_progress  the feeder takes lines: reserved -> record -> published; outcomes come by the tally
//	finalizing,  lines that are still about are ended -> files -> the end, with the files' rows
//	cancelling
//
// The ledger's row is the truth of a batch's status, and changes by compare-and-set alone, fenced by the leader's epoch.
type driver struct {
	d     *Dispatcher
	epoch uint64
	tally *tally
	// feed has the feeder look at a model.
	feed func(job.Model)
	// heavy bounds how many batches are read or written whole at once, heavyOf how many of each tenant.
	heavy   chan struct{}
	heavyOf sync.Map // of chan struct{} by tenant
	nudge   chan struct{}
	// admitting is held from the question whether a batch's tokens fit its tenant's quota to the answer's being written.
	admitting sync.Mutex
	driving   sync.WaitGroup

	mu      sync.Mutex // guards what follows
	batches map[string]*running

	fillMu sync.Mutex // guards what follows
	fill   float64
	fillAt time.Time
}

const (
	batchLook  = time.Second // between two looks at the ledger
	batchRetry = time.Second // after a turn that failed
	// heavyAtOnce batches are validated, taken over or finalized side by side, of one tenant heavyOfOne: others need not wait behind all of its files.
	heavyAtOnce = 4
	heavyOfOne  = 2
)

func newDriver(d *Dispatcher, epoch uint64) *driver {
	return &driver{d: d, epoch: epoch, heavy: make(chan struct{}, heavyAtOnce), nudge: make(chan struct{}, 1), batches: map[string]*running{}}
}

// run drives until ctx ends.
func (v *driver) run(ctx context.Context) {
	if err := v.d.deps.Relay.OnNudge(ctx, func() {
		select {
		case v.nudge <- struct{}{}:
		default:
		}
	}); err != nil { // the looks at the ledger do without
		v.d.log.Warn("listening for batches", "err", err)
	}
	defer v.driving.Wait()
	t := time.NewTicker(batchLook)
	defer t.Stop()
	failing := false
	for led := false; ; {
		var err error
		if !led { // before anything is read: from here on no earlier leader writes
			err = v.d.ledger.Lead(ctx, v.epoch)
			led = err == nil
		}
		if led {
			err = v.look(ctx)
		}
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			v.d.metrics.failures.WithLabelValues("batches").Inc()
			if !failing {
				v.d.log.Warn("a duty failed: repeating it", "duty", "batches", "err", err)
			}
			failing = true
		case failing:
			v.d.log.Info("a duty works again", "duty", "batches")
			failing = false
		}
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		case <-v.nudge:
		}
	}
}

// look compares the batches that live with those that are driven.
func (v *driver) look(ctx context.Context) error {
	rows, err := v.d.ledger.LiveBatches(ctx)
	if err != nil {
		return fmt.Errorf("listing the live batches: %w", err)
	}
	counts := map[ledger.Status]int{}
	live := make(map[string]bool, len(rows))
	v.mu.Lock()
	for i := range rows {
		row := &rows[i]
		live[row.ID] = true
		counts[row.Status]++
		r := v.batches[row.ID]
		if r == nil {
			r = newRunning(v, row)
			v.batches[row.ID] = r
			v.driving.Go(func() { v.drive(ctx, r) })
			continue
		}
		r.learn(row)
	}
	for id, r := range v.batches {
		if !live[id] {
			r.gone.Store(true)
			r.poke()
		}
	}
	v.mu.Unlock()
	v.d.metrics.countBatches(counts)
	return nil
}

// drive takes turns at one batch until it has ended, or ctx has.
func (v *driver) drive(ctx context.Context, r *running) {
	defer func() {
		r.close()
		v.mu.Lock()
		delete(v.batches, r.id)
		v.mu.Unlock()
	}()
	failing := false
	for {
		var ended bool
		var wait time.Duration
		err := guard(func() (err error) {
			ended, wait, err = r.turn(ctx)
			return err
		})
		switch {
		case ctx.Err() != nil || ended:
			return
		case err != nil:
			duty := "batch"
			if errors.As(err, new(*panicked)) {
				duty = "batch_panic"
				r.close() // what was in the middle of changing is read again
			}
			v.d.metrics.failures.WithLabelValues(duty).Inc()
			if !failing {
				r.log.Warn("driving a batch failed: repeating it", "err", err)
			}
			failing, wait = true, batchRetry
			r.gone.Store(true) // the row may have changed in spite of the error
		case failing:
			r.log.Info("driving a batch works again")
			failing = false
		}
		t := time.NewTimer(wait)
		select {
		case <-ctx.Done():
		case <-t.C:
		case <-r.wake:
		}
		t.Stop()
	}
}

// note takes the outcome of a line into account.
func (v *driver) note(rec *queue.Record) {
	if !rec.Job.InBatch() {
		return
	}
	v.mu.Lock()
	r := v.batches[rec.Job.Group]
	v.mu.Unlock()
	if r != nil {
		r.note(rec)
	}
}

// mostDone is the share of DONE's limit from which on no lines are fed: what is accepted already must find room for its outcome.
const mostDone = 0.8

// room returns nil if DONE has room for the outcomes of more lines.
func (v *driver) room(ctx context.Context) error {
	v.fillMu.Lock()
	defer v.fillMu.Unlock()
	if time.Since(v.fillAt) > time.Second {
		fill, err := v.d.deps.Queue.DoneFill(ctx)
		if err != nil {
			return err
		}
		v.fill, v.fillAt = fill, time.Now()
	}
	if v.fill > mostDone {
		return fmt.Errorf("no lines of batches are fed while the outcomes take %.0f %% of their room: %w", 100*v.fill, queue.ErrFull)
	}
	return nil
}

// forget has every batch read anew what has ended: DONE is another one.
func (v *driver) forget() {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, r := range v.batches {
		r.stale.Store(true)
		r.poke()
	}
}

// unfed adds to a model's queue what its running batches have yet to feed.
func (v *driver) unfed(info *cluster.QueueInfo) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, r := range v.batches {
		s := r.supplyOf(info.Model)
		if s == nil {
			continue
		}
		if lines, tokens := s.unfed(); lines > 0 {
			info.BatchLines[s.tenant()] += int(lines)
			info.BatchTokens += tokens
		}
	}
}

// of lists the running batches' supplies of a model, by batch.
func (v *driver) of(m job.Model) []supply {
	var all []*lineSupply
	v.mu.Lock()
	for _, r := range v.batches {
		if s := r.supplyOf(m); s != nil {
			all = append(all, s)
		}
	}
	v.mu.Unlock()
	slices.SortFunc(all, func(a, b *lineSupply) int { return a.r.before(b.r) })
	list := make([]supply, len(all))
	for i, s := range all {
		list[i] = s
	}
	return list
}

// models lists the models that have any.
func (v *driver) models() []job.Model {
	v.mu.Lock()
	defer v.mu.Unlock()
	var all []job.Model
	for _, r := range v.batches {
		all = append(all, r.models()...)
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// running is one live batch.
type running struct {
	v   *driver
	id  string
	log *slog.Logger
	// wake ends the wait between two turns.
	wake chan struct{}
	// gone: the row is to be read again, for the ledger does not list it among the live ones, or may have changed it. stale: what is known of its ended lines may be wrong.
	gone, stale atomic.Bool

	mu     sync.Mutex // guards what follows
	row    ledger.Batch
	loaded *lines // nil until it is read which lines there are, and after it must be read again
	// ended are the lines that have an outcome; late: one of them is that its time was over.
	ended lineSet
	late  bool
	// open are the lines that may be queued and have no outcome yet, with their places in the index.
	open map[int64]place
	// left is what the lines of each model that have not ended are expected to need.
	left map[job.Model]job.Tokens
	// absent are open lines that had no message when the reconciler looked last.
	absent map[int64]bool
	// unknown is a model of the input file of which it could not be told whether it exists. It is the turns' own.
	unknown job.Model
	// files are written, but it is not known whether their batch has ended with them.
	files *conclusion
}

// lines are a batch's file and index while they are open.
type lines struct {
	file, blob blob.At // the input, and the index
	index      *batch.Index
	supplies   []*lineSupply
	closing    context.CancelFunc
}

// place is a line's entry in the index.
type place struct {
	supply *lineSupply
	at     int64
	tokens job.Tokens
}

func newRunning(v *driver, row *ledger.Batch) *running {
	r := &running{
		v: v, id: row.ID, log: v.d.log.With("batch", row.ID, "tenant", row.Tenant), row: *row, wake: make(chan struct{}, 1), open: map[int64]place{}, left: map[job.Model]job.Tokens{},
	}
	r.gone.Store(true) // the row was read before: the batch may just have ended
	return r
}

func (r *running) poke() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// rank orders the statuses of a live batch: none goes back.
func rank(s ledger.Status) int {
	return slices.Index([]ledger.Status{ledger.Validating, ledger.InProgress, ledger.Finalizing, ledger.Cancelling}, s)
}

// learn takes a row that was read: it may be older than what is known.
func (r *running) learn(row *ledger.Batch) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !row.Status.Ended() && rank(row.Status) <= rank(r.row.Status) {
		return
	}
	r.row = *row
	r.poke()
}

// now is the row as it is known.
func (r *running) now() ledger.Batch {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.row
}

// before orders batches by their age.
func (r *running) before(o *running) int {
	a, b := r.now(), o.now()
	if a.Created != b.Created {
		return int(min(1, max(-1, a.Created-b.Created)))
	}
	if r.id < o.id {
		return -1
	}
	return 1
}

// note takes the outcome of one of the lines into account.
func (r *running) note(rec *queue.Record) {
	line := rec.Job.Line
	if line <= 0 {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.ended.add(line) {
		return
	}
	r.late = r.late || rec.Outcome.State == job.Expired
	if p, ok := r.open[line]; ok {
		delete(r.open, line)
		r.left[p.supply.model] -= p.tokens
	}
	if r.loaded != nil && (r.ended.n >= r.row.Total || len(r.open) == 0 && r.row.Status != ledger.InProgress) {
		r.poke()
	}
}

// publishing notes that a line may be queued from now on.
func (r *running) publishing(line int64, p place) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, ok := r.open[line]; !ok && !r.ended.has(line) {
		r.open[line] = p
	}
}

func (r *running) hasEnded(line int64) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.ended.has(line)
}

// close lets go of the files.
func (r *running) close() {
	r.mu.Lock()
	l := r.loaded
	r.loaded = nil
	r.mu.Unlock()
	if l != nil {
		l.close()
	}
}

func (r *running) supplyOf(m job.Model) *lineSupply {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.loaded == nil || r.row.Status != ledger.InProgress {
		return nil
	}
	for _, s := range r.loaded.supplies {
		if s.model == m && !s.done.Load() {
			return s
		}
	}
	return nil
}

func (r *running) models() []job.Model {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.loaded == nil || r.row.Status != ledger.InProgress {
		return nil
	}
	var all []job.Model
	for _, s := range r.loaded.supplies {
		if !s.done.Load() {
			all = append(all, s.model)
		}
	}
	return all
}

// turn does what is next, and tells whether the batch has ended, and else after what time it is to be looked at again, unless something happens before.
func (r *running) turn(ctx context.Context) (ended bool, wait time.Duration, err error) {
	for ctx.Err() == nil {
		if r.gone.Swap(false) {
			if err := r.reread(ctx); err != nil {
				return false, 0, err
			}
		}
		if r.stale.Swap(false) {
			r.close()
			r.mu.Lock()
			// What comes meanwhile stands in the new DONE already, which is read next.
			r.ended, r.late, r.files = lineSet{}, false, nil
			r.mu.Unlock()
		}
		row := r.now()
		switch {
		case row.Status.Ended():
			r.tidy(ctx, &row)
			return true, 0, nil
		case row.Status == ledger.Validating:
			if err = r.heavily(ctx, r.validate); errors.Is(err, errLearning) {
				return false, batchLook, nil
			}
		case row.Status == ledger.InProgress:
			if wait, err = r.watch(ctx, &row); wait > 0 && err == nil {
				return false, wait, nil
			}
		default:
			if wait, err = r.finish(ctx, &row); wait > 0 && err == nil {
				return false, wait, nil
			}
		}
		if err != nil {
			return false, 0, err
		}
	}
	return false, 0, ctx.Err()
}

// reread reads the row.
func (r *running) reread(ctx context.Context) error {
	row, err := r.v.d.ledger.Batch(ctx, r.now().Tenant, r.id)
	if errors.Is(err, ledger.ErrNotFound) { // nobody deletes them, but what is gone needs no driver
		row = &ledger.Batch{ID: r.id, Status: ledger.Failed}
	} else if err != nil {
		return err
	}
	r.learn(row)
	return nil
}

// heavily runs f when there is room for that.
func (r *running) heavily(ctx context.Context, f func(context.Context) error) error {
	own, _ := r.v.heavyOf.LoadOrStore(r.now().Tenant, make(chan struct{}, heavyOfOne))
	for _, slots := range []chan struct{}{own.(chan struct{}), r.v.heavy} {
		select {
		case slots <- struct{}{}:
			defer func() { <-slots }()
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return f(ctx)
}

// moved takes the row that a change of the status has brought, also where it was refused because the status is another already.
func (r *running) moved(row *ledger.Batch, err error) error {
	was := r.now().Status
	if row != nil && (err == nil || errors.Is(err, ledger.ErrState)) {
		r.learn(row)
		if r.now().Status != was {
			return nil
		}
	}
	if err == nil {
		err = fmt.Errorf("the batch is still %s", was)
	}
	return err
}

// known returns once the tally stands at DONE's end as it is now. If that is another DONE, of which the batch knows nothing yet, it is stale from here on: some of the ends that it knows may be lost.
func (r *running) known(ctx context.Context) error {
	end, err := r.v.d.deps.Queue.DoneEnd(ctx)
	if err != nil {
		return err
	}
	short, cancel := context.WithTimeout(ctx, countPatience)
	defer cancel()
	if err := r.v.tally.wait(short, end); err != nil {
		return fmt.Errorf("waiting for the outcomes up to %d to be counted: %w", end.Seq, err)
	}
	return nil
}

// watch waits for the end of a batch in progress: it is over when all its lines have ended, or its time has.
func (r *running) watch(ctx context.Context, row *ledger.Batch) (time.Duration, error) {
	if err := r.load(ctx); err != nil {
		return 0, err
	}
	now := r.v.d.deps.Results.Now()
	r.mu.Lock()
	all, late := r.ended.n >= r.row.Total, r.late
	r.mu.Unlock()
	over := now >= row.Expires
	if !over && !all {
		return min((row.Expires - now).Duration(), time.Minute), nil
	}
	if !over {
		if err := r.known(ctx); err != nil || r.stale.Load() {
			return 0, err
		}
	}
	// The last lines may have been expired one by one just before.
	return 0, r.moved(r.v.d.ledger.FinalizeBatch(ctx, r.v.epoch, r.id, now, late || !all))
}

// load reads which lines there are and which of them have ended, unless that is known.
func (r *running) load(ctx context.Context) error {
	r.mu.Lock()
	loaded := r.loaded != nil
	r.mu.Unlock()
	if loaded {
		return nil
	}
	return r.heavily(ctx, r.read)
}
