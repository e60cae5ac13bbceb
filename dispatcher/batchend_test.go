package dispatcher_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
	"github.com/millrace/millrace/internal/queue"
)

// cancelBatch cancels as the API does.
func (e *env) cancelBatch(b *ledger.Batch) *ledger.Batch {
	e.Helper()
	var row *ledger.Batch
	e.until("the ledger takes the cancel", func() (ok bool) {
		var err error
		row, err = e.ledger.CancelBatch(context.Background(), b.Tenant, b.ID, e.results.Now())
		if err != nil && !errors.Is(err, ledger.ErrState) && !errors.Is(err, ledger.ErrUnavailable) {
			e.Fatal(err)
		}
		return row != nil
	})
	e.relay.Nudge()
	return row
}

// gate is an engine that answers the first so many calls, and holds the others until they are stopped or it is opened.
type gate struct {
	answered atomic.Int64
	let      int64
	held     chan string
	open     chan struct{}
	// linger is what a call that is stopped waits for before its worker says so.
	linger chan struct{}
}

func newGate(let int64) *gate {
	linger := make(chan struct{})
	close(linger)
	return &gate{let: let, held: make(chan string, 1000), open: make(chan struct{}), linger: linger}
}

func (g *gate) engine(ctx context.Context, j *job.Job, body []byte) (job.Outcome, []byte) {
	if g.answered.Add(1) <= g.let {
		return answers(ctx, j, body)
	}
	g.held <- j.CustomID
	select {
	case <-g.open:
		return answers(ctx, j, body)
	case <-ctx.Done():
		<-g.linger
		return job.Outcome{State: job.Cancelled, Error: job.NewError(job.TypeInvalidRequest, job.CodeCancelled, "The job was cancelled.")}, nil
	}
}

func TestCancelEndsAllThatHasNotEnded(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.lead(quick)
	g := newGate(4)
	g.linger = make(chan struct{})
	c := e.crew(model, 2, g.engine)
	const n = 40 // more than are fed ahead
	b := e.batch(e.upload(requests(n)))
	<-g.held
	<-g.held
	e.until("four lines are counted", func() bool { return e.row(b).Done == 4 })
	e.cancelBatch(b)
	// While a line runs the batch is cancelling, though all that waited has ended.
	e.until("what waited has ended", func() bool {
		d, err := e.queue.Depth(context.Background(), queue.Work, model)
		e.ok(err)
		return d.Waiting[job.Batch] == 0 && d.Delivered[job.Batch] == 2
	})
	if row := e.row(b); row.Status != ledger.Cancelling {
		t.Fatalf("the batch is %s while lines run", row.Status)
	}
	close(g.linger)
	row := e.batchEnds(b, ledger.Cancelled)
	output, errs := e.files(row, n)
	if len(output) != 4 || row.Done != 4 || row.Bad != n-4 || row.Cancelled == 0 {
		t.Errorf("row %+v", row)
	}
	for id, l := range errs {
		if l.Error == nil || l.Error.Code != "batch_cancelled" || l.Response != nil {
			t.Errorf("line %s: %+v", id, l.Error)
		}
	}
	c.once(b, n, false)
	for _, again := range []*ledger.Batch{e.cancelBatch(b), e.row(b)} {
		if again.Status != ledger.Cancelled {
			t.Errorf("cancelled again the batch is %s", again.Status)
		}
	}
	e.until("nothing is queued", func() bool {
		d, err := e.queue.Depth(context.Background(), queue.Work, model)
		e.ok(err)
		return d.Waiting[job.Batch] == 0
	})
}

// TestCancelRacesTheEnd cancels batches of one line at any moment of their lives.
func TestCancelRacesTheEnd(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.lead(quick)
	c := e.crew(model, 4, func(ctx context.Context, j *job.Job, body []byte) (job.Outcome, []byte) {
		select {
		case <-time.After(5 * time.Millisecond):
			return answers(ctx, j, body)
		case <-ctx.Done():
			return job.Outcome{State: job.Cancelled, Error: job.NewError(job.TypeInvalidRequest, job.CodeCancelled, "The job was cancelled.")}, nil
		}
	})
	file := e.upload(requests(1))
	var ends [2]atomic.Int64
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 25 {
				b := e.batch(file)
				s := sampler{TB: t}
				for stage := rand.N(3); ; time.Sleep(time.Millisecond) { // at any stage
					row := e.row(b)
					s.look(row)
					if stage == 0 || row.Status.Ended() || stage == 1 && row.Status != ledger.Validating || row.Done == 1 {
						break
					}
				}
				time.Sleep(rand.N(10 * time.Millisecond))
				asked := e.cancelBatch(b)
				s.look(asked)
				var row *ledger.Batch
				e.until("the batch ends", func() bool {
					row = e.row(b)
					s.look(row)
					return row.Status.Ended()
				})
				lines := 1
				if row.InProgress == 0 {
					lines = 0
				}
				e.files(row, lines)
				c.once(b, lines, false)
				switch {
				case row.Status == ledger.Cancelled:
					ends[0].Add(1)
				case row.Status == ledger.Completed && asked.Status == ledger.Completed:
					ends[1].Add(1)
				default:
					t.Errorf("asked to cancel it was %s, at its end %s", asked.Status, row.Status)
				}
			}
		})
	}
	wg.Wait()
	t.Logf("%d were cancelled, %d completed", ends[0].Load(), ends[1].Load())
}

func TestExpiryEndsAllThatHasNotEnded(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.lead(quick)
	g := newGate(4)
	e.crew(model, 1, g.engine)
	const n = 40
	b := e.batch(e.upload(requests(n)), func(b *ledger.Batch) { b.Expires = b.Created + 5000 })
	row := e.batchEnds(b, ledger.Expired)
	output, errs := e.files(row, n)
	if row.Expired == 0 || row.Expired < row.Expires || len(output) != 4 {
		t.Errorf("row %+v", row)
	}
	why := map[string]int{}
	for id, l := range errs {
		if l.Error == nil || l.Error.Code != "batch_expired" {
			t.Errorf("line %s: %+v", id, l.Error)
			continue
		}
		for _, reason := range []string{"while it ran", "ready workers", "turn came"} {
			if strings.Contains(l.Error.Message, reason) {
				why[reason]++
			}
		}
	}
	if ran := why["while it ran"]; ran < 1 || ran > n/4 || why["ready workers"] != n-4-ran { // the worker takes others before all are ended
		t.Errorf("the lines say why: %v", why)
	}
}

func TestExpiryWithoutWorkersSaysSo(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	l := e.lead(quick)
	const n = 40
	b := e.batch(e.upload(requests(n)), func(b *ledger.Batch) { b.Expires = b.Created + 1000 })
	e.until("it is in progress", func() bool { return e.row(b).Status == ledger.InProgress })
	l.stop() // and nobody is there when it expires
	e.until("its time is over", func() bool { return e.results.Now() > b.Expires })
	e.lead(quick)
	row := e.batchEnds(b, ledger.Expired)
	output, errs := e.files(row, n)
	if len(output) != 0 || row.OutputFile != "" {
		t.Errorf("row %+v", row)
	}
	for id, l := range errs {
		if l.Error == nil || l.Error.Code != "batch_expired" || !strings.Contains(l.Error.Message, "no worker serves its model") {
			t.Errorf("line %s: %+v", id, l.Error)
		}
	}
}

func TestBatchWhoseLinesAllFail(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.lead(quick)
	e.crew(model, 1, func(context.Context, *job.Job, []byte) (job.Outcome, []byte) {
		return job.Outcome{State: job.Failed, StatusCode: 422, Error: job.NewError(job.TypeInvalidRequest, job.CodeEngineError, "no")}, []byte(`{"error":{"message":"invalid"}}`)
	})
	row := e.batchEnds(e.batch(e.upload(requests(9))), ledger.Completed)
	output, errs := e.files(row, 9)
	if row.OutputFile != "" || len(output) != 0 || len(errs) != 9 || row.Done != 0 || row.Bad != 9 {
		t.Errorf("row %+v", row)
	}
	for _, l := range errs {
		if l.Response == nil || l.Response.StatusCode != 422 || string(l.Response.Body) != `{"error":{"message":"invalid"}}` {
			t.Errorf("line %+v", l)
		}
	}
}

// TestBatchOfAnUnknownModelWaitsForTheWorkersThatStart: as long as one does not know what it will serve and its window lasts, and no longer. A batch that waits holds up no other, and can be cancelled.
func TestBatchOfAnUnknownModelWaitsForTheWorkersThatStart(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	beat := func(id string, models ...job.Model) cluster.Heartbeat {
		return cluster.Heartbeat{ID: id, Role: cluster.RoleWorker, Epoch: id, Worker: &cluster.WorkerInfo{
			Name: id, State: cluster.Starting, StateSince: float64(time.Now().UnixMilli()) / 1000, Models: models,
		}}
	}
	leave := e.announce(e.open(), beat("cold"))
	l := e.lead(quick)
	e.until("the worker is heard", l.cluster.Learning)
	late, never := e.batch(e.upload(requests(3, "late", model))), e.batch(e.upload(requests(3, model, "never")))
	dropped := e.batch(e.upload(requests(1, "never")))
	short := e.batch(e.upload(requests(1, "never")), func(b *ledger.Batch) { b.Expires = b.Created + 6000 })
	e.until("it would be known what there is", func() bool { return l.cluster.Listening(time.Time{}) > 5*time.Second })
	e.crew(model, 1, nil)
	e.batchEnds(e.batch(e.upload(requests(2))), ledger.Completed)
	e.cancelBatch(dropped)
	e.batchEnds(dropped, ledger.Cancelled)
	if row := e.batchEnds(short, ledger.Failed); row.Failed < short.Expires || len(row.Errors) != 1 || row.Errors[0].Code != job.CodeModelNotFound {
		t.Errorf("row of one whose window is over %+v", row)
	}
	for _, b := range []*ledger.Batch{late, never} {
		if row := e.row(b); row.Status != ledger.Validating {
			t.Fatalf("a batch is %s: %+v", row.Status, row.Errors)
		}
	}
	e.announce(e.open(), beat("other", "late"))
	e.until("the batch of the model that is served goes on", func() bool { return e.row(late).Status == ledger.InProgress })
	leave()
	if row := e.batchEnds(never, ledger.Failed); len(row.Errors) != 1 || row.Errors[0].Code != job.CodeModelNotFound {
		t.Errorf("row %+v", row)
	}
}

func TestBatchesThatCannotRunAreRejected(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	cfg := quick
	cfg.BatchMaxLines, cfg.BatchMaxLine = 5, 2000
	e.lead(cfg)
	ctx := context.Background()
	e.ok(e.ledger.InsertFile(ctx, ledger.File{ID: "file-lost", Tenant: job.DefaultTenant, Purpose: "batch", Blob: "file-lost", Created: 1}, 0))
	e.ok(e.ledger.InsertFile(ctx, ledger.File{ID: "file-old", Tenant: job.DefaultTenant, Purpose: "batch", Blob: "file-old", Created: 1, Expires: 2}, 0))
	e.ok(e.ledger.InsertFile(ctx, ledger.File{ID: "file-other", Tenant: job.DefaultTenant, Purpose: "assistants", Blob: "file-other", Created: 1}, 0))
	_, err := e.ledger.CreateTenant(ctx, ledger.Tenant{ID: "small", Name: "small", Weight: 100, Limits: ledger.Limits{QueuedTokens: 50}})
	e.ok(err)
	twice := append(requests(2), requests(1)...)
	for name, c := range map[string]struct {
		file   string
		change func(*ledger.Batch)
		codes  []job.Code
		param  string
	}{
		"bytes gone":     {file: "file-lost", codes: []job.Code{job.CodeInvalidRequest}, param: "file_id"},
		"expired":        {file: "file-old", codes: []job.Code{job.CodeInvalidRequest}, param: "file_id"},
		"purpose":        {file: "file-other", codes: []job.Code{job.CodeInvalidRequest}, param: "file_id"},
		"duplicate":      {file: e.upload(twice), codes: []job.Code{job.CodeDuplicateCustomID}, param: "custom_id"},
		"two bad lines":  {file: e.upload([]string{"x", requests(1)[0], "[]"}), codes: []job.Code{job.CodeInvalidJSONLine, job.CodeInvalidJSONLine}},
		"too many":       {file: e.upload(requests(6)), codes: []job.Code{job.CodeTooManyTasks}},
		"too long":       {file: e.upload([]string{strings.Replace(requests(1)[0], "prompt", strings.Repeat("x", 2000), 1)}), codes: []job.Code{job.CodeRequestTooLarge}, param: "body"},
		"unknown model":  {file: e.upload(requests(2, model, "no such model")), codes: []job.Code{job.CodeModelNotFound}, param: "body.model"},
		"model not his":  {file: e.upload(requests(1)), change: func(b *ledger.Batch) { b.Models = []job.Model{"other"} }, codes: []job.Code{job.CodeModelNotFound}, param: "body.model"},
		"other endpoint": {file: e.upload(requests(1)), change: func(b *ledger.Batch) { b.Endpoint = job.Embeddings }, codes: []job.Code{job.CodeInvalidURL}, param: "url"},
	} {
		t.Run(name, func(t *testing.T) {
			b := e.batch(c.file, func(b *ledger.Batch) {
				if c.change != nil {
					c.change(b)
				}
			})
			row := e.batchEnds(b, ledger.Failed)
			if len(row.Errors) != len(c.codes) || row.Failed == 0 || row.Total != 0 || row.InProgress != 0 {
				t.Fatalf("row %+v", row)
			}
			for i, err := range row.Errors {
				if err.Code != c.codes[i] || err.Message == "" || c.param != "" && (err.Param == nil || *err.Param != c.param) {
					t.Errorf("error %+v", err)
				}
			}
		})
	}
	for s, err := range e.queue.Waiting(ctx, queue.Work, model, "", false) {
		t.Errorf("queued is %+v, %v", s, err)
	}
	t.Run("quota", func(t *testing.T) {
		lines := requests(3)
		file := job.NewName("file-", time.Now())
		_, err := e.blobs.Put(ctx, file, strings.NewReader(strings.Join(lines, "\n")))
		e.ok(err)
		e.ok(e.ledger.InsertFile(ctx, ledger.File{ID: file, Tenant: "small", Purpose: "batch", Blob: file, Created: 1}, 0))
		b := e.batch(file, func(b *ledger.Batch) { b.Tenant = "small" })
		row := e.batchEnds(b, ledger.Failed)
		if len(row.Errors) != 1 || row.Errors[0].Code != job.CodeTokenLimit || row.Errors[0].Line != nil || !strings.Contains(row.Errors[0].Message, "limit of 50 ") {
			t.Errorf("errors %+v", row.Errors)
		}
	})
}

func TestModelWithoutWorkersHoldsUpNoOther(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.ok(e.queue.EnsureModel(context.Background(), "idle"))
	e.lead(quick)
	e.crew(model, 1, nil)
	const n = 100
	b := e.batch(e.upload(requests(n, "idle", model)))
	e.until("half is done", func() bool { return e.row(b).Done == n/2 })
	c := e.crew("idle", 1, nil)
	row := e.batchEnds(b, ledger.Completed)
	e.files(row, n)
	if row.Model != "" {
		t.Errorf("the batch of two models has the model %s", row.Model)
	}
	_ = c
}

// TestAnswersOfAllSizesComeOut has large bodies go in and large answers come out.
func TestAnswersOfAllSizesComeOut(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.lead(quick)
	large := `{"text":"` + strings.Repeat("y", 700_000) + `"}`
	e.crew(model, 2, func(ctx context.Context, j *job.Job, body []byte) (job.Outcome, []byte) {
		o, raw := answers(ctx, j, body)
		if j.CustomID == "c3" {
			if len(body) < 300_000 || j.Blob == "" {
				t.Errorf("a large request came with %d bytes", len(body))
			}
			o.Blob = job.ResultBlob(j.ID, 1)
			if _, err := e.blobs.Put(ctx, o.Blob, strings.NewReader(large)); err != nil {
				t.Error(err)
			}
			return o, nil
		}
		return o, raw
	})
	row := e.batchEnds(e.batch(e.upload(largeRequests(5))), ledger.Completed)
	output, _ := e.files(row, 5)
	if got := string(output["c3"].Response.Body); got != large {
		t.Errorf("the large answer has %d bytes, want %d", len(got), len(large))
	}
}

// TestDriversThatComeAndGo has many short-lived leaders drive one batch.
func TestDriversThatComeAndGo(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	c := e.crew(model, 2, func(ctx context.Context, j *job.Job, body []byte) (job.Outcome, []byte) {
		time.Sleep(5 * time.Millisecond)
		return answers(ctx, j, body)
	})
	const n = 150
	b := e.batch(e.upload(requests(n)))
	s := sampler{TB: t}
	leaders := 0
	d := e.dispatcher(quick)
	e.announce(d.parts, cluster.Heartbeat{ID: "dispatcher-1", Role: cluster.RoleDispatcher})
	for deadline := time.Now().Add(2 * patience); !e.row(b).Status.Ended(); leaders++ {
		if time.Now().After(deadline) {
			t.Fatalf("the batch does not end: %+v", e.row(b))
		}
		// The later ones may live longer: on a machine that is busy with other things the first may be too short to get anything done.
		ctx, cut := context.WithTimeout(context.Background(), rand.N(time.Duration(300+20*leaders)*time.Millisecond))
		led := make(chan struct{})
		go func() {
			defer close(led)
			d.Lead(ctx)
		}()
		for ctx.Err() == nil {
			s.look(e.row(b))
			time.Sleep(2 * time.Millisecond)
		}
		<-led
		cut()
	}
	row := e.batchEnds(b, ledger.Completed)
	e.files(row, n)
	c.once(b, n, true)
	if row.Usage.TotalTokens != 5*n {
		t.Errorf("usage %+v, want %d tokens", row.Usage, 5*n)
	}
	t.Logf("%d leaders", leaders)
}

// TestLostLinesAreFedAgain loses messages, with their records and without.
func TestLostLinesAreFedAgain(t *testing.T) {
	t.Parallel()
	for _, wipe := range []bool{false, true} {
		t.Run(fmt.Sprintf("wiped %v", wipe), func(t *testing.T) {
			t.Parallel()
			e := newEnv(t)
			e.lead(quick)
			const n = 10
			b := e.batch(e.upload(requests(n)))
			waiting := func() (ids []job.ID) {
				for s, err := range e.queue.Waiting(context.Background(), queue.Work, model, "", false) {
					e.ok(err)
					ids = append(ids, s.Job.ID)
				}
				return ids
			}
			e.until("all lines are queued", func() bool { return len(waiting()) == n })
			if wipe {
				e.wipe()
			}
			for _, id := range waiting()[:4] {
				e.ok(e.queue.Remove(context.Background(), queue.Work, model, id))
			}
			e.until("all lines are queued again", func() bool { return len(waiting()) == n })
			c := e.crew(model, 1, nil)
			e.files(e.batchEnds(b, ledger.Completed), n)
			c.once(b, n, true)
		})
	}
}

// TestOutcomesLostWithTheirStream has DONE deleted while a batch runs: the lines whose outcomes were in it run again, and no count falls or passes the total.
func TestOutcomesLostWithTheirStream(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	l := e.lead(quick)
	g := newGate(6)
	c := e.crew(model, 1, g.engine)
	const n = 12
	b := e.batch(e.upload(requests(n)))
	<-g.held
	e.until("six lines are counted", func() bool { return e.row(b).Done == 6 })
	js := e.jetStream()
	s := sampler{TB: t}
	s.look(e.row(b))
	e.ok(js.DeleteStream(context.Background(), "DONE"))
	close(g.open)
	e.until("the new stream is counted", func() bool {
		at, err := e.ledger.Tallied(context.Background())
		e.ok(err)
		end, err := e.queue.DoneEnd(context.Background())
		s.look(e.row(b))
		return err == nil && at.Stream == end.Stream && end.Seq >= 3
	})
	l.stop() // what is not to be counted is found again by the next one
	e.lead(quick)
	row := e.batchEnds(b, ledger.Completed)
	e.files(row, n)
	c.mu.Lock()
	calls := 0
	for _, k := range c.calls {
		calls += k
	}
	c.mu.Unlock()
	if calls != n+6 {
		t.Errorf("the engine was called %d times, want %d", calls, n+6)
	}
	usage, err := e.ledger.Usage(context.Background(), ledger.UsageQuery{})
	e.ok(err)
	if len(usage) != 1 || usage[0].Requests != int64(calls) { // what was spent was spent
		t.Errorf("usage %+v, want %d requests", usage, calls)
	}
}

// jetStream is a bare way to the server.
func (e *env) jetStream() jetstream.JetStream {
	e.Helper()
	nc, err := nats.Connect("", nats.InProcessServer(e.link))
	e.ok(err)
	e.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	e.ok(err)
	return js
}

func TestLineThatKillsItsWorkersFailsAlone(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.worker("witness")
	cfg := quick
	cfg.MaxDeaths = 1
	e.lead(cfg)
	const n = 3
	b := e.batch(e.upload(requests(n)))
	w := e.worker("w1")
	d, _ := e.claim(w, job.Batch)
	w.link.cut() // it dies with the line
	e.until("the line has ended", func() bool { return e.row(b).Bad == 1 })
	c := e.crew(model, 1, nil)
	row := e.batchEnds(b, ledger.Completed)
	_, errs := e.files(row, n)
	if l := errs[d.Job.CustomID]; len(errs) != 1 || l.Error == nil || l.Error.Code != "worker_crashed" {
		t.Errorf("errors %+v", errs)
	}
	_ = c
}

// TestOldOutcomesArePurged has the outcomes of a batch removed when its files have been there for long enough.
func TestOldOutcomesArePurged(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	cfg := quick
	cfg.BatchRunTimeout, cfg.BatchKeep, cfg.BatchPurge = time.Millisecond, 500*time.Millisecond, 20*time.Millisecond
	e.lead(cfg)
	e.crew(model, 1, nil)
	b := e.batch(e.upload(requests(10)))
	row := e.batchEnds(b, ledger.Completed)
	other := e.submit(queue.AnyLane, e.job())
	e.until("the outcomes are gone", func() bool {
		for _, err := range e.queue.GroupHeaders(context.Background(), b.Tenant, b.ID) {
			e.ok(err)
			return false
		}
		return true
	})
	if now := e.results.Now(); now < row.Completed+500 {
		t.Errorf("they were gone after %s", (now - row.Completed).Duration())
	}
	e.ended(other, job.Completed, "")
	e.files(e.row(b), 10)
}

// TestDriverThatIsCutOffGoesOn has the leader lose its connection while a batch runs.
func TestDriverThatIsCutOffGoesOn(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	l := e.lead(quick)
	c := e.crew(model, 2, func(ctx context.Context, j *job.Job, body []byte) (job.Outcome, []byte) {
		time.Sleep(5 * time.Millisecond)
		return answers(ctx, j, body)
	})
	const n = 60
	b := e.batch(e.upload(requests(n)))
	for i := range int64(3) {
		e.until("some lines have ended", func() bool { return e.row(b).Done > 5*i })
		l.link.cut()
		e.until("it is cut off", func() bool { connected, _ := l.cluster.Connected(); return !connected })
		l.link.mend()
	}
	e.files(e.batchEnds(b, ledger.Completed), n)
	c.once(b, n, true)
}

// TestBatchWhoseFileIsLostEnds loses the input file while most of the batch is not queued yet.
func TestBatchWhoseFileIsLostEnds(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	l := e.lead(quick)
	const n = 40
	file := e.upload(requests(n))
	b := e.batch(file)
	e.until("lines are queued", func() bool {
		d, err := e.queue.Depth(context.Background(), queue.Work, model)
		e.ok(err)
		return d.Waiting[job.Batch] > 0
	})
	l.stop()
	e.ok(e.blobs.Delete(context.Background(), file))
	e.lead(quick)
	e.cancelBatch(b)
	row := e.batchEnds(b, ledger.Cancelled)
	if row.Bad != n {
		t.Errorf("row %+v", row)
	}
}

// TestLostIndexIsMadeAgain loses the index while the batch runs.
func TestLostIndexIsMadeAgain(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	l := e.lead(quick)
	const n = 40
	b := e.batch(e.upload(requests(n)))
	e.until("it is in progress", func() bool { return e.row(b).Status == ledger.InProgress })
	l.stop()
	e.ok(e.blobs.Delete(context.Background(), "batchindex-"+b.ID))
	e.lead(quick)
	c := e.crew(model, 2, nil)
	e.files(e.batchEnds(b, ledger.Completed), n)
	c.once(b, n, true)
}
