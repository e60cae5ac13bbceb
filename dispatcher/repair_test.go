package dispatcher_test

import (
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/results"
)

// TestLostMessagesArePutBack: those of waiting jobs, of jobs whose attempt has given them back, and not those of jobs that run.
func TestLostMessagesArePutBack(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	w := e.worker("w")
	lose := func(j *job.Job) { e.ok(e.queue.Remove(t.Context(), queue.Work, model, j.ID)) }
	e.submit(queue.AnyLane, e.job())
	running, _ := e.claim(w, job.Standard)
	e.submit(queue.AnyLane, e.job())
	given, c := e.claim(w, job.Standard)
	e.ok(w.results.GiveBack(t.Context(), given.Job.ID, c.Token, 0, true, "engine_500"))
	waiting := e.submit(queue.TenantLane("t"), e.job(func(j *job.Job) { j.Class = job.Batch }))
	for _, j := range []*job.Job{&running.Job, &given.Job, waiting} {
		lose(j)
	}
	e.lead(quick)
	e.until("they are back", func() bool { return len(e.lanes(&given.Job)) == 1 && len(e.lanes(waiting)) == 1 })
	d := e.pull(w, job.Batch)
	if diff := cmp.Diff(`{"model":"m"}`, string(d.Body)); diff != "" || d.Job.ID != waiting.ID {
		t.Error(diff, d.Job.ID)
	}
	if n := len(e.lanes(&running.Job)); n != 0 {
		t.Errorf("a running job's message was published again")
	}
	// Its attempt ends and the job goes back: now it must be.
	rec := e.get(&running.Job)
	e.ok(w.results.GiveBack(t.Context(), running.Job.ID, rec.Token, 0, false, "drained"))
	e.until("it is back", func() bool { return len(e.lanes(&running.Job)) == 1 })
}

// TestHalfAcceptedJobsAreDecided: queued if the message is there, else gone with its key; never published.
func TestHalfAcceptedJobsAreDecided(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	accept := func(key string) *queue.Message {
		m := e.job(withKey(key))
		_, _, err := e.results.ReserveKey(t.Context(), m.Job.Tenant, key, results.KeyEntry{ID: m.Job.ID, Hash: "hash"}, 0)
		e.ok(err)
		_, err = e.results.Accept(t.Context(), &m.Job, m.Body, results.Limits{})
		e.ok(err)
		return m
	}
	stored, never, ended := accept("stored"), accept("never"), accept("ended")
	e.ok(e.queue.Enqueue(t.Context(), queue.Work, queue.AnyLane, stored))
	_, err := e.queue.Settle(t.Context(), &queue.Record{Job: ended.Job, Outcome: job.Outcome{State: job.Completed, Token: 1, Finished: 1}})
	e.ok(err)
	e.lead(quick)
	e.until("the stored one is queued", func() bool { return e.get(&stored.Job).State == job.Queued })
	e.until("the other is gone", func() bool {
		_, err := e.results.Get(t.Context(), never.Job.ID)
		return errors.Is(err, results.ErrNotFound)
	})
	e.ended(&ended.Job, job.Completed, "")
	e.until("its key is free", func() bool {
		_, mine, err := e.results.ReserveKey(t.Context(), never.Job.Tenant, "never", results.KeyEntry{ID: "job_other", Hash: "hash"}, 0)
		e.ok(err)
		return mine
	})
	for key, m := range map[string]*queue.Message{"stored": stored, "ended": ended} {
		held, mine, err := e.results.ReserveKey(t.Context(), m.Job.Tenant, key, results.KeyEntry{ID: "job_other", Hash: "hash"}, 0)
		e.ok(err)
		if mine || held.ID != m.Job.ID {
			t.Errorf("key %q is free", key)
		}
	}
	if n := len(e.lanes(&never.Job)); n != 0 {
		t.Error("a job that was never accepted was published")
	}
	if took := e.results.Now() - never.Job.Created; took < 500 {
		t.Errorf("it was decided after %s", took.Duration())
	}
}

// TestUnrecordedOutcomesAreRecorded: the worker died behind DONE, with and without the message.
func TestUnrecordedOutcomesAreRecorded(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	w := e.worker("w")
	var jobs []*job.Job
	for i := range 2 {
		e.submit(queue.AnyLane, e.job(func(j *job.Job) { j.Events = true }))
		d, c := e.claim(w, job.Standard)
		_, err := e.queue.Settle(t.Context(), &queue.Record{Job: d.Job, Outcome: job.Outcome{State: job.Completed, Token: c.Token, Finished: e.results.Now()}, Result: []byte(`{"a":1}`)})
		e.ok(err)
		_, err = e.results.EndLease(t.Context(), d.Job.ID, w.id, false)
		e.ok(err)
		if i == 0 {
			e.ok(e.queue.Remove(t.Context(), queue.Work, model, d.Job.ID))
		} else {
			e.ok(d.Nak(0))
		}
		jobs = append(jobs, &d.Job)
	}
	e.lead(quick)
	rec := e.ended(jobs[0], job.Completed, "")
	if !rec.HasResult {
		t.Error("the answer was not recorded")
	}
	// The second has a message: whoever is delivered it finds the outcome. Here nobody pulls, and its record is as it was.
	if rec := e.get(jobs[1]); rec.State != job.Queued {
		t.Errorf("record %+v", rec)
	}
}

// TestLostRecordsAreRestored: from the message, whether the job is still listed as live or not; and a job that is not listed is listed again.
func TestLostRecordsAreRestored(t *testing.T) {
	t.Parallel()
	e, redis := realRedis(t)
	w := e.worker("w")
	unrecorded := e.submit(queue.TenantLane("t"), e.job(func(j *job.Job) { j.Class = job.Batch }))
	nowhere := e.submit(queue.TenantLane("t"), e.job(func(j *job.Job) { j.Class = job.Batch }))
	unlisted := e.submit(queue.TenantLane("t"), e.job(func(j *job.Job) { j.Class, j.Expires = job.Batch, j.Created+2000 }))
	e.submit(queue.AnyLane, e.job())
	running, _ := e.claim(w, job.Standard)
	for _, j := range []*job.Job{unrecorded, nowhere, &running.Job} {
		redis("DEL mr:{" + string(j.ID) + "}:r mr:{" + string(j.ID) + "}:b")
	}
	e.ok(e.results.Forget(t.Context(), nowhere.ID, unlisted.ID))
	e.lead(quick)
	for _, j := range []*job.Job{unrecorded, nowhere, &running.Job} {
		e.until("the record is back", func() bool {
			rec, err := e.results.Get(t.Context(), j.ID)
			return err == nil && rec.State == job.Queued
		})
		if body, err := e.results.Body(t.Context(), j.ID); err != nil || string(body) != `{"model":"m"}` {
			t.Errorf("its body is %q: %v", body, err)
		}
	}
	e.ended(unlisted, job.Expired, job.CodeExpired) // by the list
	// The running job's worker lives, and says so.
	if _, err := w.results.Renew(t.Context(), renewalOf(running, 7)); err != nil {
		t.Error(err)
	}
	if rec := e.get(&running.Job); rec.State != job.Running || rec.Token != 7 {
		t.Errorf("record %+v", rec)
	}
}

func renewalOf(d *queue.Delivery, token job.Token) results.Renewal {
	return results.Renewal{Job: &d.Job, Body: d.Body, Worker: "w", Token: token, Lease: time.Hour, AckSubject: d.AckSubject}
}

// TestWipedStoreIsRebuilt: each job in each state comes back with its key, and no accepted job runs or ends twice for it.
func TestWipedStoreIsRebuilt(t *testing.T) {
	t.Parallel()
	for name, open := range map[string]func(t *testing.T) *env{
		"embedded": func(t *testing.T) *env { return newEnv(t) },
		"real":     func(t *testing.T) *env { e, _ := realRedis(t); return e },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := open(t)
			w := e.worker("w")
			e.lead(quick)
			end := func(key string, o job.Outcome) *job.Job {
				j := e.submit(queue.AnyLane, e.job(withKey(key), func(j *job.Job) { j.Class, j.Metadata = job.Interactive, map[string]string{"k": key} }))
				o.Finished = e.results.Now()
				rec := e.get(j)
				if o.State == job.Completed {
					d, c := e.claim(w, job.Interactive)
					e.finish(w, d, c)
					return j
				}
				_, err := e.queue.Settle(t.Context(), &queue.Record{Job: *j, Outcome: o})
				e.ok(err)
				e.ok(e.results.Finish(t.Context(), j, &o, nil, nil, nil))
				e.ok(e.queue.Remove(t.Context(), queue.Work, model, rec.Job.ID))
				return j
			}
			ended := map[job.State]*job.Job{}
			for _, s := range []job.State{job.Completed, job.Failed, job.Cancelled, job.Expired} {
				ended[s] = end(string(s), job.Outcome{State: s, Error: job.NewError(job.TypeServer, job.CodeInternal, "x")})
			}
			erased := end("erased", job.Outcome{State: job.Completed})
			e.ok(e.queue.Erase(t.Context(), erased.Tenant, erased.Group, erased.ID))
			waiting := e.submit(queue.AnyLane, e.job(withKey("waiting"), func(j *job.Job) { j.Class = job.Batch }))
			line := e.submit(queue.TenantLane("t"), e.job(withKey("line"), func(j *job.Job) { j.Tenant, j.Class = "t", job.Batch }))
			e.submit(queue.AnyLane, e.job(withKey("running")))
			running, _ := e.claim(w, job.Standard)

			e.wipe()
			e.until("it is whole again", func() bool {
				wiped, err := e.results.Wiped(t.Context())
				return err == nil && !wiped
			})
			for s, j := range ended {
				rec := e.get(j)
				if rec.State != s || rec.Job.Metadata["k"] != string(s) || rec.Outcome == nil {
					t.Errorf("the %s job is %+v", s, rec)
				}
			}
			for _, j := range []*job.Job{waiting, line, &running.Job} {
				if rec := e.get(j); rec.State != job.Queued {
					t.Errorf("record %+v", rec)
				}
				if body, err := e.results.Body(t.Context(), j.ID); err != nil || string(body) != `{"model":"m"}` {
					t.Errorf("its body is %q: %v", body, err)
				}
			}
			if _, err := e.results.Get(t.Context(), erased.ID); !errors.Is(err, results.ErrNotFound) {
				t.Errorf("an erased job is back: %v", err)
			}
			for _, j := range []*job.Job{ended[job.Completed], ended[job.Failed], ended[job.Cancelled], ended[job.Expired], waiting, line, &running.Job} {
				held, mine, err := e.results.ReserveKey(t.Context(), j.Tenant, j.Key, results.KeyEntry{ID: "job_other", Hash: "hash"}, 0)
				e.ok(err)
				if mine || held.ID != j.ID || held.Hash != "hash" {
					t.Errorf("key %q leads to %+v", j.Key, held)
				}
			}
			list, _, err := e.results.List(t.Context(), job.DefaultTenant, results.Filter{}, "", 100)
			e.ok(err)
			if len(list) != 6 {
				t.Errorf("%d jobs are listed", len(list))
			}
		})
	}
}
