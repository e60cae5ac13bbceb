package queue_test

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
)

func TestFirstOutcomeWinsOfFifty(t *testing.T) {
	t.Parallel()
	q, _ := fresh(t, queue.Config{})
	m := newMessage(job.Standard)
	var won atomic.Int64
	seen := make([]job.Token, 50)
	var wg sync.WaitGroup
	for i := range seen {
		wg.Go(func() {
			r, err := q.Settle(t.Context(), outcomeOf(m, job.Token(i+1)))
			if err == nil {
				won.Add(1)
			} else if !errors.Is(err, queue.ErrSettled) {
				t.Error(err)
				return
			}
			seen[i] = r.Outcome.Token
		})
	}
	wg.Wait()
	if won.Load() != 1 {
		t.Errorf("%d won", won.Load())
	}
	r, err := q.Outcome(t.Context(), m.Job.Tenant, job.NoGroup, m.Job.ID)
	if err != nil {
		t.Fatal(err)
	}
	for i, token := range seen {
		if token != r.Outcome.Token {
			t.Errorf("settler %d was told of token %d, stored is %d", i+1, token, r.Outcome.Token)
		}
	}
	if want := fmt.Sprintf(`{"by":%d}`, r.Outcome.Token); string(r.Result) != want {
		t.Errorf("result %s, want %s", r.Result, want)
	}
}

func TestSettleRepeatedIsNoConflict(t *testing.T) {
	t.Parallel()
	q, _ := fresh(t, queue.Config{})
	m := newMessage(job.Standard)
	first, err := q.Settle(t.Context(), outcomeOf(m, 7))
	if err != nil {
		t.Fatal(err)
	}
	again, err := q.Settle(t.Context(), outcomeOf(m, 7))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(first, again); diff != "" {
		t.Error(diff)
	}
	cancelled := &queue.Record{Job: newMessage(job.Standard).Job, Outcome: job.Outcome{State: job.Cancelled, Finished: 1}}
	expired := &queue.Record{Job: cancelled.Job, Outcome: job.Outcome{State: job.Expired, Finished: 2}}
	for range 2 {
		if _, err := q.Settle(t.Context(), cancelled); err != nil {
			t.Error(err)
		}
	}
	if r, err := q.Settle(t.Context(), expired); !errors.Is(err, queue.ErrSettled) || r.Outcome.State != job.Cancelled {
		t.Errorf("%+v, %v: two outcomes without a token passed for one", r, err)
	}
}

func TestOutcomeIsFoundAsStored(t *testing.T) {
	t.Parallel()
	q, _ := fresh(t, queue.Config{})
	m := newMessage(job.Batch)
	m.Job.Tenant, m.Job.Group = "t.x", "batch_1"
	m.Job.Key, m.Job.BodyHash = "k", "h"
	m.Job.Metadata = map[string]string{"a": "ü"}
	want := outcomeOf(m, 3)
	want.Outcome.Attempts = []job.Attempt{{Worker: "w", Started: 1, Ended: 2, Outcome: "completed"}}
	want.Outcome.Usage = &job.Usage{PromptTokens: 1, CompletionTokens: 2, TotalTokens: 3}
	for _, find := range []func() (*queue.Record, error){
		func() (*queue.Record, error) { return q.Outcome(t.Context(), "t.x", "batch_1", m.Job.ID) },
		func() (*queue.Record, error) { return q.FindOutcome(t.Context(), m.Job.ID) },
	} {
		if _, err := find(); !errors.Is(err, queue.ErrNotFound) {
			t.Errorf("before: %v, want ErrNotFound", err)
		}
	}
	if _, err := q.Settle(t.Context(), want); err != nil {
		t.Fatal(err)
	}
	for _, find := range []func() (*queue.Record, error){
		func() (*queue.Record, error) { return q.Outcome(t.Context(), "t.x", "batch_1", m.Job.ID) },
		func() (*queue.Record, error) { return q.FindOutcome(t.Context(), m.Job.ID) },
	} {
		got, err := find()
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got, cmpopts.IgnoreFields(queue.Record{}, "Seq")); diff != "" {
			t.Error(diff)
		}
	}
	if _, err := q.Outcome(t.Context(), "other", "batch_1", m.Job.ID); !errors.Is(err, queue.ErrNotFound) {
		t.Errorf("another tenant: %v, want ErrNotFound", err)
	}
}

func TestLiveOutcomeHasNoResult(t *testing.T) {
	t.Parallel()
	q, _ := fresh(t, queue.Config{})
	m := newMessage(job.Interactive)
	m.Job.API = "api1"
	if _, err := q.Settle(t.Context(), outcomeOf(m, 3)); err != nil {
		t.Fatal(err)
	}
	if r, err := q.FindOutcome(t.Context(), m.Job.ID); err != nil || r.Result != nil {
		t.Errorf("%+v, %v", r, err)
	}
}

func TestEraseLeavesATombstone(t *testing.T) {
	t.Parallel()
	q, _ := fresh(t, queue.Config{})
	m := newMessage(job.Standard)
	m.Job.Metadata, m.Job.Session = map[string]string{"secret": "s"}, "session"
	if err := q.Erase(t.Context(), m.Job.Tenant, job.NoGroup, m.Job.ID); !errors.Is(err, queue.ErrNotFound) {
		t.Errorf("before its end: %v, want ErrNotFound", err)
	}
	r := outcomeOf(m, 3)
	r.Outcome.State, r.Outcome.Usage = job.Failed, &job.Usage{TotalTokens: 9}
	r.Outcome.Error = job.NewError(job.TypeServer, job.CodeEngineError, "secret text")
	if _, err := q.Settle(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := q.Erase(t.Context(), m.Job.Tenant, job.NoGroup, m.Job.ID); err != nil {
			t.Fatal(err)
		}
	}
	want := *r
	want.Job.Metadata, want.Job.Session, want.Result = nil, "", nil
	want.Outcome.Erased = true
	want.Outcome.Error = job.NewError(job.TypeServer, job.CodeEngineError, "")
	got, err := q.FindOutcome(t.Context(), m.Job.ID)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(&want, got, cmpopts.IgnoreFields(queue.Record{}, "Seq")); diff != "" {
		t.Error(diff)
	}
	if s, err := q.Settle(t.Context(), outcomeOf(m, 4)); !errors.Is(err, queue.ErrSettled) || !s.Outcome.Erased {
		t.Errorf("settling an erased job: %+v, %v", s, err)
	}
}

func TestOutcomesListsHeadersFromASequence(t *testing.T) {
	t.Parallel()
	q, _ := fresh(t, queue.Config{})
	for _, err := range q.Outcomes(t.Context(), 0) {
		t.Fatalf("empty: %v", err)
	}
	const n = 1200
	var wg sync.WaitGroup
	for range 60 {
		wg.Go(func() {
			for range n / 60 {
				if _, err := q.Settle(t.Context(), outcomeOf(newMessage(job.Batch), 1)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	for _, from := range []uint64{0, 1, 1000, n, n + 1} {
		next := max(from, 1)
		for r, err := range q.Outcomes(t.Context(), from) {
			if err != nil {
				t.Fatal(err)
			}
			if r.Seq != next || r.Result != nil || r.Job.Class != job.Batch || r.Outcome.State != job.Completed {
				t.Fatalf("from %d: record %+v, want sequence %d", from, r, next)
			}
			next++
		}
		if next != n+1 {
			t.Errorf("from %d: ended before %d", from, next)
		}
	}
	for range q.Outcomes(t.Context(), 0) {
		break // a caller may stop
	}
	if fill, err := q.DoneFill(t.Context()); err != nil || fill <= 0 || fill > 0.01 {
		t.Errorf("fill %v, %v", fill, err)
	}
	if err := q.Healthy(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestFullDoneKeepsWhatItHas(t *testing.T) {
	t.Parallel()
	q, _ := fresh(t, queue.Config{DoneMaxBytes: 20 << 10})
	var first *queue.Message
	for range 100 {
		m := newMessage(job.Standard)
		if first == nil {
			first = m
		}
		_, err := q.Settle(t.Context(), outcomeOf(m, 1))
		if err == nil {
			continue
		}
		if !errors.Is(err, queue.ErrFull) {
			t.Fatalf("%v, want ErrFull", err)
		}
		if _, err := q.FindOutcome(t.Context(), first.Job.ID); err != nil {
			t.Errorf("the first outcome is lost: %v", err)
		}
		return
	}
	t.Error("never full")
}
