package dispatcher_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/results"
)

// requests are the lines of a file of n requests, with the custom_ids c1 to cn.
func requests(n int, models ...job.Model) []string {
	if len(models) == 0 {
		models = []job.Model{model}
	}
	var all []string
	for i := range n {
		all = append(all, fmt.Sprintf(`{"custom_id":"c%d","method":"POST","url":"/v1/chat/completions","body":{"model":%q,"messages":[{"role":"user","content":"prompt %d"}],"max_tokens":8}}`, i+1, models[i%len(models)], i+1))
	}
	return all
}

// upload stores a file as the API does.
func (e *env) upload(lines []string) string {
	e.Helper()
	return e.uploadFor(job.DefaultTenant, lines)
}

func (e *env) uploadFor(tenant job.Tenant, lines []string) string {
	e.Helper()
	id := job.NewName("file-", e.results.Now().Time())
	text := strings.Join(lines, "\n")
	_, err := e.blobs.Put(context.Background(), id, strings.NewReader(text))
	e.ok(err)
	e.ok(e.ledger.InsertFile(context.Background(), ledger.File{
		ID: id, Tenant: tenant, Purpose: "batch", Filename: "in.jsonl", Bytes: int64(len(text)), Blob: id, Created: e.results.Now(),
	}, 0))
	return id
}

// batch creates a batch as the API does.
func (e *env) batch(file string, change ...func(*ledger.Batch)) *ledger.Batch {
	e.Helper()
	now := e.results.Now()
	b := ledger.Batch{
		ID: job.NewName("batch_", now.Time()), Tenant: job.DefaultTenant, Endpoint: job.ChatCompletions, InputFile: file, Window: "24h",
		Status: ledger.Validating, Created: now, Expires: now + job.Millis(24*time.Hour.Milliseconds()),
	}
	for _, f := range change {
		f(&b)
	}
	e.until("the ledger takes the batch", func() bool { // on a machine that is busy it may take its time
		err := e.ledger.CreateBatch(context.Background(), b)
		if err != nil && !errors.Is(err, ledger.ErrUnavailable) && !errors.Is(err, ledger.ErrExists) {
			e.Fatal(err)
		}
		return err == nil || errors.Is(err, ledger.ErrExists)
	})
	e.relay.Nudge()
	return &b
}

func (e *env) row(b *ledger.Batch) *ledger.Batch {
	e.Helper()
	var row *ledger.Batch
	e.until("the ledger answers", func() bool {
		var err error
		if row, err = e.ledger.Batch(context.Background(), b.Tenant, b.ID); !errors.Is(err, ledger.ErrUnavailable) {
			e.ok(err)
		}
		return err == nil
	})
	return row
}

// batchEnds waits for the batch's end, and samples what must hold at any time: counts never fall, and never pass the total; no status goes back.
func (e *env) batchEnds(b *ledger.Batch, want ledger.Status) *ledger.Batch {
	e.Helper()
	var row *ledger.Batch
	s := sampler{TB: e}
	e.until("the batch ends", func() bool {
		row = e.row(b)
		s.look(row)
		return row.Status.Ended()
	})
	if row.Status != want {
		e.Fatalf("the batch is %s, want %s: %+v", row.Status, want, row.Errors)
	}
	if row.InProgress > 0 && row.Done+row.Bad != row.Total {
		e.Errorf("at its end the batch counts %d and %d of %d", row.Done, row.Bad, row.Total)
	}
	return row
}

// sampler checks what must hold from look to look.
type sampler struct {
	testing.TB
	last *ledger.Batch
}

func (s *sampler) look(row *ledger.Batch) {
	s.Helper()
	rank := []ledger.Status{ledger.Validating, ledger.InProgress, ledger.Finalizing, ledger.Cancelling}
	if row.Done < 0 || row.Bad < 0 || row.Done+row.Bad > row.Total {
		s.Errorf("the batch counts %d and %d of %d", row.Done, row.Bad, row.Total)
	}
	if l := s.last; l != nil {
		if row.Done < l.Done || row.Bad < l.Bad {
			s.Errorf("the counts fell from %d, %d to %d, %d", l.Done, l.Bad, row.Done, row.Bad)
		}
		if l.Status.Ended() && row.Status != l.Status || !row.Status.Ended() && slices.Index(rank, row.Status) < slices.Index(rank, l.Status) {
			s.Errorf("the status went from %s to %s", l.Status, row.Status)
		}
	}
	s.last = row
}

// outLine is a line of an output or error file.
type outLine struct {
	ID       string `json:"id"`
	CustomID string `json:"custom_id"`
	Response *struct {
		StatusCode int             `json:"status_code"`
		RequestID  string          `json:"request_id"`
		Body       json.RawMessage `json:"body"`
	} `json:"response"`
	Error *struct{ Code, Message string } `json:"error"`
}

// file reads a batch's file by custom_id, and checks its row.
func (e *env) file(b *ledger.Batch, id string) map[string]outLine {
	e.Helper()
	all := map[string]outLine{}
	if id == "" {
		return all
	}
	row, err := e.ledger.File(context.Background(), b.Tenant, id)
	e.ok(err)
	in, err := e.blobs.Get(context.Background(), row.Blob)
	e.ok(err)
	defer in.Close()
	raw, err := io.ReadAll(in)
	e.ok(err)
	if int64(len(raw)) != row.Bytes || row.Purpose != "batch_output" || row.Batch != b.ID || row.Tenant != b.Tenant || row.Key != b.Key {
		e.Errorf("file of %d bytes: %+v", len(raw), row)
	}
	lines := bufio.NewScanner(strings.NewReader(string(raw)))
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		var l outLine
		e.ok(json.Unmarshal(lines.Bytes(), &l))
		if _, twice := all[l.CustomID]; twice {
			e.Errorf("custom_id %s is twice in file %s", l.CustomID, id)
		}
		all[l.CustomID] = l
	}
	if len(all) == 0 {
		e.Errorf("file %s has no line", id)
	}
	return all
}

// files reads both files, and checks that each of the lines c1 to cn is in one of them.
func (e *env) files(b *ledger.Batch, n int) (output, errs map[string]outLine) {
	e.Helper()
	output, errs = e.file(b, b.OutputFile), e.file(b, b.ErrorFile)
	for i := range n {
		id := fmt.Sprint("c", i+1)
		_, out := output[id]
		_, bad := errs[id]
		if out == bad {
			e.Errorf("line %s is in the output file: %v, in the error file: %v", id, out, bad)
		}
	}
	if len(output)+len(errs) != n || int64(len(output)) != b.Done || int64(len(errs)) != b.Bad {
		e.Errorf("the files have %d and %d lines, the counts are %d and %d of %d", len(output), len(errs), b.Done, b.Bad, n)
	}
	return output, errs
}

// crew are workers that take all of a model's durable work, as workers do: they claim, call their engine, and settle.
type crew struct {
	*env
	fake
	// engine answers a job. ctx ends when the job is cancelled, or the crew stopped.
	engine func(ctx context.Context, j *job.Job, body []byte) (job.Outcome, []byte)
	stop   func()

	mu    sync.Mutex
	calls map[job.ID]int
	stops map[job.ID]context.CancelFunc
}

func answers(context.Context, *job.Job, []byte) (job.Outcome, []byte) {
	return job.Outcome{State: job.Completed, StatusCode: 200, Usage: &job.Usage{PromptTokens: 3, CompletionTokens: 2, TotalTokens: 5}}, []byte(`{"ok":true}`)
}

// crew starts workers for a model, side by side as many as n, until the test ends or stop is called. A nil engine answers at once.
func (e *env) crew(m job.Model, n int, engine func(context.Context, *job.Job, []byte) (job.Outcome, []byte)) *crew {
	e.Helper()
	if engine == nil {
		engine = answers
	}
	c := &crew{env: e, fake: *e.worker("crew-" + string(job.NewID(time.Now()))), engine: engine, calls: map[job.ID]int{}, stops: map[job.ID]context.CancelFunc{}}
	ctx, cancel := context.WithCancel(context.Background())
	e.ok(c.fake.relay.OnCancel(ctx, func(id job.ID) {
		c.mu.Lock()
		defer c.mu.Unlock()
		if stop := c.stops[id]; stop != nil {
			stop()
		}
	}))
	var g sync.WaitGroup
	for range n {
		for _, class := range []job.Class{job.Standard, job.Batch} {
			g.Go(func() { c.work(ctx, m, class) })
		}
	}
	c.stop = sync.OnceFunc(func() {
		cancel()
		g.Wait()
	})
	e.Cleanup(c.stop)
	return c
}

func (c *crew) work(ctx context.Context, m job.Model, class job.Class) {
	var p *queue.Puller
	for ctx.Err() == nil {
		if p == nil {
			var err error
			if p, err = c.fake.queue.Puller(ctx, queue.PullerConfig{Kind: queue.Work, Model: m, Class: class}); err != nil {
				continue
			}
		}
		out, err := p.Pull(ctx, queue.PullRequest{Batch: 1, Expires: 200 * time.Millisecond})
		if err != nil {
			continue
		}
		for d := range out {
			c.take(ctx, d)
		}
	}
	if p != nil {
		p.Close()
	}
}

// take does with a delivery what a worker does. Stores that are away are asked again.
func (c *crew) take(ctx context.Context, d *queue.Delivery) {
	r := results.ClaimRequest{Job: &d.Job, Worker: c.id, Lease: time.Hour, AckSubject: d.AckSubject, Delivered: d.Delivered}
	var claim *results.Claim
	for ctx.Err() == nil {
		var err error
		if claim, err = c.fake.results.Claim(ctx, r); err != nil {
			continue
		}
		switch claim.Verdict {
		case results.CheckDone:
			stored, err := c.fake.queue.Outcome(ctx, d.Job.Tenant, d.Job.Group, d.Job.ID)
			if err == nil {
				_ = c.fake.results.Finish(ctx, &stored.Job, &stored.Outcome, stored.Result, nil, nil)
				_ = d.Ack()
				return
			}
			r.Checked = errors.Is(err, queue.ErrNotFound)
			continue
		case results.Unrecorded:
			r.Whole, r.Body = true, d.Body
			continue
		case results.Ended:
			_ = d.Ack()
			return
		case results.Taken:
		default:
			_ = d.Nak(10 * time.Millisecond)
			return
		}
		break
	}
	if ctx.Err() != nil {
		return
	}
	body := d.Body
	if d.Job.Blob != "" {
		in, err := c.fake.blobs.Get(ctx, d.Job.Blob)
		if err == nil {
			body, _ = io.ReadAll(in)
			_ = in.Close()
		}
	}
	call, stop := context.WithCancel(ctx)
	c.mu.Lock()
	c.calls[d.Job.ID]++
	c.stops[d.Job.ID] = stop
	c.mu.Unlock()
	var o job.Outcome
	var result []byte
	if claim.CancelAsked {
		o = job.Outcome{State: job.Cancelled, Error: job.NewError(job.TypeInvalidRequest, job.CodeCancelled, "cancelled")}
	} else {
		o, result = c.engine(call, &d.Job, body)
	}
	stop()
	c.mu.Lock()
	delete(c.stops, d.Job.ID)
	c.mu.Unlock()
	if o.State == "" { // a worker that dies says nothing
		return
	}
	o.Token, o.Started, o.Finished = claim.Token, claim.Now, c.fake.results.Now()
	for ctx.Err() == nil {
		stored, err := c.fake.queue.Settle(ctx, &queue.Record{Job: d.Job, Outcome: o, Result: result})
		if err == nil || errors.Is(err, queue.ErrSettled) {
			if c.fake.results.Finish(ctx, &stored.Job, &stored.Outcome, stored.Result, nil, nil) == nil {
				_ = d.Ack()
				c.fake.relay.Ended(d.Job.Model)
				_ = c.fake.results.LetGo(ctx, c.id, d.Job.ID)
				return
			}
		}
	}
}

// once checks that the engine was called once for each of the batch's lines, or at most once if not all had to run.
func (c *crew) once(b *ledger.Batch, n int, all bool) {
	c.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range n {
		if calls := c.calls[job.LineID(b.ID, int64(i+1))]; calls > 1 || all && calls != 1 {
			c.Errorf("the engine was called %d times for line %d", calls, i+1)
		}
	}
}

func TestBatchRunsFromFileToFiles(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.lead(quick)
	bodies := map[string]string{}
	var mu sync.Mutex
	c := e.crew(model, 2, func(_ context.Context, j *job.Job, body []byte) (job.Outcome, []byte) {
		mu.Lock()
		bodies[j.CustomID] = string(body)
		mu.Unlock()
		if j.CustomID == "c7" {
			return job.Outcome{State: job.Failed, StatusCode: 400, Error: job.NewError(job.TypeInvalidRequest, job.CodeEngineError, "no")}, []byte(`{"error":{"message":"bad parameter"}}`)
		}
		o, _ := answers(context.Background(), j, body)
		return o, fmt.Appendf(nil, `{"for":%q}`, j.CustomID)
	})
	const n = 20
	b := e.batch(e.upload(requests(n)), func(b *ledger.Batch) { b.Key, b.OutputExpires = "key_1", 3600 })
	row := e.batchEnds(b, ledger.Completed)
	output, errs := e.files(row, n)
	if len(output) != n-1 || len(errs) != 1 || errs["c7"].Response.StatusCode != 400 || errs["c7"].Error != nil || !strings.Contains(string(errs["c7"].Response.Body), "bad parameter") {
		t.Errorf("errors %+v", errs)
	}
	for id, l := range output {
		if string(l.Response.Body) != fmt.Sprintf(`{"for":%q}`, id) || l.Response.StatusCode != 200 || l.Error != nil || !strings.HasPrefix(l.ID, "batch_req_") {
			t.Errorf("line %+v", l)
		}
		if !strings.Contains(bodies[id], "prompt "+id[1:]+`"`) || !strings.HasPrefix(bodies[id], `{"model":"m",`) {
			t.Errorf("the engine got %s for %s", bodies[id], id)
		}
	}
	c.once(b, n, true)
	if row.Model != model || row.Usage.TotalTokens != 5*(n-1) || row.Total != n || row.Completed == 0 || row.Finalizing == 0 || row.Tokens != row.TokensDone {
		t.Errorf("row %+v", row)
	}
	file, err := e.ledger.File(context.Background(), b.Tenant, row.OutputFile)
	e.ok(err)
	if file.Expires != file.Created+3600_000 {
		t.Errorf("file %+v", file)
	}
	usage, err := e.ledger.Usage(context.Background(), ledger.UsageQuery{By: []string{"key"}})
	e.ok(err)
	if len(usage) != 1 || usage[0].Key != "key_1" || usage[0].Requests != n || usage[0].Failed != 1 {
		t.Errorf("usage %+v", usage)
	}
	// Nothing is left of it in the queue and in the counts.
	backlog, err := e.results.Backlogs(context.Background())
	e.ok(err)
	if sum := backlog[model].Sum(); sum.Jobs != 0 {
		t.Errorf("the backlog still counts %+v", sum)
	}
	e.until("the index is gone", func() bool {
		_, err := e.blobs.Get(context.Background(), "batchindex-"+b.ID)
		return err != nil
	})
}
