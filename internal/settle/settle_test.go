package settle_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/millrace/millrace/internal/blob"
	"github.com/millrace/millrace/internal/embedded"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/relay"
	"github.com/millrace/millrace/internal/results"
	"github.com/millrace/millrace/internal/settle"
	"github.com/millrace/millrace/internal/testenv"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, testenv.NATSLeaves()...) }

// env is a Settler on real stores.
type env struct {
	testing.TB
	*settle.Settler
	nats  *embedded.NATS
	redis *testenv.RedisServer
}

func newEnv(t *testing.T) *env {
	t.Helper()
	log := testenv.Log(t)
	e := &env{TB: t, Settler: &settle.Settler{Log: log}, nats: testenv.NATS(t), redis: testenv.Redis(t)}
	nc := testenv.Connect(t, e.nats)
	e.Relay = relay.New(nc, log)
	var err error
	e.Queue, err = queue.Open(t.Context(), nc, queue.Config{}, log)
	e.ok(err)
	t.Cleanup(e.Queue.Close)
	e.Results, err = results.Open(t.Context(), results.Config{URL: e.redis.URL()}, log)
	e.ok(err)
	t.Cleanup(func() { e.ok(e.Results.Close()) })
	e.Blobs, err = blob.OpenDir(t.TempDir())
	e.ok(err)
	return e
}

func (e *env) ok(err error) {
	e.Helper()
	if err != nil {
		e.Fatal(err)
	}
}

// submit accepts a job whose request is an object.
func (e *env) submit(change func(*job.Job)) *job.Job {
	e.Helper()
	now := e.Results.Now()
	j := &job.Job{
		ID: job.NewID(now.Time()), Tenant: "t", Model: "m", Endpoint: job.ChatCompletions, Class: job.Standard, Group: job.NoGroup, Created: now, Expires: now + 3_600_000,
	}
	j.Blob = job.RequestBlob(j.ID)
	change(j)
	ctx := e.Context()
	_, err := e.Blobs.Put(ctx, j.Blob, bytes.NewReader([]byte("{}")))
	e.ok(err)
	_, err = e.Results.Accept(ctx, j, nil, results.Limits{})
	e.ok(err)
	e.ok(e.Queue.Enqueue(ctx, queue.Work, queue.AnyLane, &queue.Message{Job: *j}))
	e.ok(e.Results.Queued(ctx, j, nil))
	return j
}

func (e *env) claim(j *job.Job) *results.Claim {
	e.Helper()
	c, err := e.Results.Claim(e.Context(), results.ClaimRequest{Job: j, Worker: "w", Lease: time.Minute, Checked: true})
	e.ok(err)
	if c.Verdict != results.Taken {
		e.Fatal(c.Verdict)
	}
	return c
}

func (e *env) get(j *job.Job) *results.Record {
	e.Helper()
	r, err := e.Results.Get(e.Context(), j.ID)
	e.ok(err)
	return r
}

// gone checks that nothing is left of the job but its outcome and its record.
func (e *env) gone(j *job.Job) {
	e.Helper()
	if _, err := e.Queue.Find(e.Context(), j.Model, j.ID); !errors.Is(err, queue.ErrNotFound) {
		e.Errorf("its message: %v", err)
	}
	if _, err := e.Blobs.Get(e.Context(), j.Blob); !errors.Is(err, blob.ErrNotFound) {
		e.Errorf("its request: %v", err)
	}
}

func cancelled() job.Outcome {
	return job.Outcome{State: job.Cancelled, Error: job.NewError(job.TypeInvalidRequest, job.CodeCancelled, "The job was cancelled.")}
}

func TestEndOfAWaitingJob(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	j := e.submit(func(*job.Job) {})
	bell, stop := e.Relay.Watch(j.ID)
	defer stop()
	stored, err := e.End(t.Context(), j, e.get(j), cancelled())
	e.ok(err)
	<-bell
	if rec := e.get(j); rec.State != job.Cancelled || rec.Outcome.Error.CodeOf() != job.CodeCancelled || stored.Outcome.Finished == 0 {
		t.Errorf("stored %+v, record %+v", stored.Outcome, rec)
	}
	e.gone(j)
}

// TestEndOfARunningJob: its worker is told, its attempt is closed, and its events end.
func TestEndOfARunningJob(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	told := make(chan job.ID, 1)
	e.ok(e.Relay.OnCancel(t.Context(), func(id job.ID) { told <- id }))
	j := e.submit(func(j *job.Job) { j.Events = true })
	c := e.claim(j)
	rec := e.get(j)
	stored, err := e.End(t.Context(), j, rec, cancelled())
	e.ok(err)
	if id := <-told; id != j.ID {
		t.Errorf("%s was told to stop", id)
	}
	if diff := cmp.Diff([]job.Attempt{{Worker: "w", Started: c.Now, Ended: stored.Outcome.Finished, Outcome: "cancelled"}}, stored.Outcome.Attempts); diff != "" {
		t.Error(diff)
	}
	if rec.Attempts[0].Ended != 0 {
		t.Error("the caller's record was changed")
	}
	events, _, err := e.Results.Events(t.Context(), j.ID, 0, 10)
	e.ok(err)
	if n := len(events); n != 2 || events[1].Kind != job.EventDone || events[1].N != stored.Outcome.LastEvent {
		t.Errorf("events %+v", events)
	}
	if err := e.Results.Owns(t.Context(), j.ID, c.Token); !errors.Is(err, results.ErrFenced) {
		t.Errorf("the attempt still owns the job: %v", err)
	}
	e.gone(j)
}

// TestEndYieldsToTheOutcomeThatWasFirst, and takes the steps behind it, with the text that counts where readers have seen another attempt's.
func TestEndYieldsToTheOutcomeThatWasFirst(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	j := e.submit(func(j *job.Job) { j.Events = true })
	c := e.claim(j)
	first := &queue.Record{
		Job: *j, Outcome: job.Outcome{State: job.Completed, Token: c.Token - 1, StatusCode: 200, Finished: 1},
		Result: []byte(`{"choices":[{"index":0,"message":{"content":"first"}}]}`),
	}
	_, err := e.Queue.Settle(t.Context(), first)
	e.ok(err)
	stored, err := e.End(t.Context(), j, e.get(j), cancelled())
	e.ok(err)
	rec := e.get(j)
	if stored.Outcome.State != job.Completed || rec.State != job.Completed || !rec.HasResult {
		t.Errorf("stored %+v, record %+v", stored.Outcome, rec)
	}
	events, _, err := e.Results.Events(t.Context(), j.ID, 0, 10)
	e.ok(err)
	if n := len(events); n != 3 || events[1].Kind != job.EventReset || string(events[1].Data) != `{"text":"first"}` || events[2].Kind != job.EventDone {
		t.Errorf("events %+v", events)
	}
	e.gone(j)
	e.ok(e.Finish(t.Context(), stored)) // once more changes nothing
	if again := e.get(j); again.Version != rec.Version {
		t.Error("a repeat changed the record")
	}
}

// TestFinishTellsTheTextWhereEventsAreMissing: the attempt wrote its outcome and died before its last events, or the store was wiped.
func TestFinishTellsTheTextWhereEventsAreMissing(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	for name, c := range map[string]struct {
		written int64
		wipe    bool
		want    []string
	}{
		"all are there":   {written: 4, want: []string{"1 status", "2 token", "3 token", "4 token", "5 done"}},
		"two are missing": {written: 2, want: []string{"1 status", "2 token", "4 reset", "5 done"}},
		"one is missing":  {written: 3, want: []string{"1 status", "2 token", "3 token", "4 reset", "5 done"}},
		"wiped":           {written: 2, wipe: true, want: []string{"4 reset", "5 done"}},
	} {
		j := e.submit(func(j *job.Job) { j.Events = true })
		claim := e.claim(j)
		var events []job.Event
		for n := int64(2); n <= c.written; n++ {
			events = append(events, job.Event{N: n, Token: claim.Token, Kind: job.EventToken, Data: []byte(`{}`)})
		}
		e.ok(e.Results.Append(t.Context(), j, events))
		stored, err := e.Queue.Settle(t.Context(), &queue.Record{
			Job: *j, Outcome: job.Outcome{State: job.Completed, Token: claim.Token, StatusCode: 200, Finished: 1, LastEvent: 5},
			Result: []byte(`{"choices":[{"index":0,"message":{"content":"all of it"}}]}`),
		})
		e.ok(err)
		if c.wipe {
			e.redis.Kill()
			e.redis.Start(t)
		}
		e.ok(e.Finish(t.Context(), stored))
		events, _, err = e.Results.Events(t.Context(), j.ID, 0, 10)
		e.ok(err)
		var got []string
		for _, ev := range events {
			got = append(got, fmt.Sprint(ev.N, " ", ev.Kind))
			if ev.Kind == job.EventReset && string(ev.Data) != `{"text":"all of it"}` {
				t.Errorf("%s: the reset is %s", name, ev.Data)
			}
		}
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}

// TestEndWhileAStoreIsAway: before DONE has the outcome nothing has happened; behind it the job is over, and the rest can be made up for.
func TestEndWhileAStoreIsAway(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	j := e.submit(func(*job.Job) {})
	rec := e.get(j)
	e.redis.Kill()
	stored, err := e.End(t.Context(), j, rec, cancelled())
	if stored == nil || stored.Outcome.State != job.Cancelled || !errors.Is(err, results.ErrUnavailable) {
		t.Errorf("without Redis: %+v, %v", stored, err)
	}
	e.redis.Start(t)
	e.ok(e.Finish(t.Context(), stored))
	if rec := e.get(j); rec.State != job.Cancelled {
		t.Errorf("record %+v", rec)
	}
	e.gone(j)

	other := e.submit(func(*job.Job) {})
	rec = e.get(other)
	e.nats.Shutdown()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if stored, err := e.End(ctx, other, rec, cancelled()); stored != nil || !errors.Is(err, queue.ErrUnavailable) {
		t.Errorf("without NATS: %+v, %v", stored, err)
	}
	if rec := e.get(other); rec.State != job.Queued {
		t.Errorf("record %+v", rec)
	}
}
