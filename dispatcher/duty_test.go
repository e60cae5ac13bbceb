package dispatcher_test

import (
	"bytes"
	"io"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/dispatcher"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/results"
)

func TestLateJobsExpire(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.lead(quick)
	w := e.worker("w")
	soon := func(j *job.Job) { j.Expires = j.Created + 300 }
	e.submit(queue.AnyLane, e.job(soon))
	running, _ := e.claim(w, job.Standard)
	waiting := e.submit(queue.AnyLane, e.job(soon))
	line := e.submit(queue.TenantLane("t"), e.job(soon, func(j *job.Job) { j.Class = job.Batch }))
	impatient := e.submit(queue.AnyLane, e.job(func(j *job.Job) { j.QueueTimeout = 300 }))
	for _, j := range []*job.Job{&running.Job, waiting, line, impatient} {
		rec := e.ended(j, job.Expired, job.CodeExpired)
		if rec.Outcome.Finished < j.Created+300 {
			t.Errorf("it expired after %s", (rec.Outcome.Finished - j.Created).Duration())
		}
	}
	if _, err := w.results.Renew(t.Context(), renewalOf(running, 1)); err == nil {
		t.Error("an expired job's lease was renewed")
	}
}

// TestStartedJobsKeepTheirQueueTimeoutBehindThem: however many have passed it, they neither expire nor hide one that is late.
func TestStartedJobsKeepTheirQueueTimeoutBehindThem(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	w := e.worker("w")
	var started []*job.Job
	for range 600 { // more than two pages
		j := &e.job(func(j *job.Job) { j.QueueTimeout = 1 }).Job
		_, err := e.results.Accept(t.Context(), j, nil, results.Limits{})
		e.ok(err)
		if _, err := w.results.Claim(t.Context(), claimOf(j, w.id)); err != nil {
			t.Fatal(err)
		}
		started = append(started, j)
	}
	late := e.submit(queue.AnyLane, e.job(func(j *job.Job) { j.QueueTimeout = 1 }))
	e.lead(quick)
	e.ended(late, job.Expired, job.CodeExpired)
	for _, j := range started {
		if rec := e.get(j); rec.State != job.Running {
			t.Fatalf("a started job is %s", rec.State)
		}
	}
}

func TestObjectsWithoutAJobAreSwept(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	w := e.worker("w")
	put := func(name string) string {
		_, err := e.blobs.Put(t.Context(), name, bytes.NewReader([]byte("x")))
		e.ok(err)
		return name
	}
	waiting := e.submit(queue.TenantLane("t"), e.job(func(j *job.Job) { j.Class, j.Blob = job.Batch, job.RequestBlob(j.ID) }))
	e.submit(queue.AnyLane, e.job(func(j *job.Job) { j.Blob = job.RequestBlob(j.ID) }))
	d, c := e.claim(w, job.Standard)
	o := job.Outcome{State: job.Completed, Token: c.Token, Blob: job.ResultBlob(d.Job.ID, c.Token), Finished: e.results.Now()}
	_, err := e.queue.Settle(t.Context(), &queue.Record{Job: d.Job, Outcome: o})
	e.ok(err)
	keep := []string{put(job.RequestBlob(waiting.ID)), put(o.Blob), put("another"), put("request/abc")}
	drop := []string{put(job.RequestBlob(d.Job.ID)), put(job.ResultBlob(d.Job.ID, c.Token+1)), put(job.RequestBlob(job.NewID(time.Now()))), put(job.ResultBlob(job.NewID(time.Now()), 1))}
	there := func(name string) bool {
		r, err := e.blobs.Get(t.Context(), name)
		if err == nil {
			_, err = io.Copy(io.Discard, r)
			_ = r.Close()
		}
		return err == nil
	}
	young := e.lead(dispatcher.Config{BlobSweep: 10 * time.Millisecond})
	young.stop() // it has swept once, and all was too young
	for _, name := range drop {
		if !there(name) {
			t.Errorf("%s was removed too early", name)
		}
	}
	cfg := quick
	cfg.BlobSweep, cfg.BlobAge = 20*time.Millisecond, time.Nanosecond
	e.lead(cfg)
	for _, name := range drop {
		e.until(name+" is removed", func() bool { return !there(name) })
	}
	for _, name := range keep {
		if !there(name) {
			t.Errorf("%s was removed", name)
		}
	}
}

// TestAnotherTakesOverWhenTheLeaderIsGone: within the life of a lease, and does what is due.
func TestAnotherTakesOverWhenTheLeaderIsGone(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	for range 2 {
		l := e.dispatcher(quick)
		e.background(l.Run)
		e.leaders = append(e.leaders, l)
	}
	first := e.theLeader(nil)
	first.link.cut()
	cut := time.Now()
	second := e.theLeader(first)
	if took := time.Since(cut); took > 8*time.Second { // a lease lives for three
		t.Errorf("it took %s", took)
	}
	e.ended(e.submit(queue.AnyLane, e.job(func(j *job.Job) { j.Expires = j.Created + 50 })), job.Expired, job.CodeExpired)
	first.link.mend()
	e.until("the first one stands by", func() bool { return first.Ready() == nil })
	if now := e.theLeader(nil); now != second {
		t.Error("the first one took the lease back")
	}
}

// theLeader waits until one dispatcher other than `not` leads.
func (e *env) theLeader(not *leader) *leader {
	e.Helper()
	var found *leader
	e.until("one leads", func() bool {
		for _, l := range e.leaders {
			if l != not && l.Leads() {
				found = l
			}
		}
		return found != nil
	})
	return found
}

// TestTwoLeadersDoNoHarm: for a moment two may act. Each job still ends once, and none is lost.
func TestTwoLeadersDoNoHarm(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	cfg := quick
	cfg.FeedLeast = 8
	cfg.Deadlines, cfg.Sweep, cfg.Reconcile = 5*time.Millisecond, 20*time.Millisecond, 50*time.Millisecond
	dead := e.worker("dead")
	var held []*job.Job
	for range 20 {
		e.submit(queue.AnyLane, e.job(func(j *job.Job) { j.Class = job.Interactive }))
		d, _ := e.claim(dead, job.Interactive)
		held = append(held, &d.Job)
		e.submit(queue.WorkerLane(dead.id), e.job())
	}
	dead.link.cut()
	var late []*job.Job
	for i := range 40 {
		m := e.job(func(j *job.Job) { j.Class = job.Batch })
		if i%2 == 0 {
			m.Job.Expires = m.Job.Created + 500
			late = append(late, &m.Job)
		}
		e.submit(queue.TenantLane("t"), m)
	}
	e.lead(cfg)
	e.lead(cfg)
	for _, j := range late {
		e.ended(j, job.Expired, job.CodeExpired)
	}
	w := e.worker("w")
	for range 20 {
		d, c := e.claim(w, job.Interactive)
		e.finish(w, d, c)
		d, c = e.claim(w, job.Standard)
		e.finish(w, d, c)
		d, c = e.claim(w, job.Batch)
		e.finish(w, d, c)
	}
	for _, j := range held {
		rec := e.ended(j, job.Completed, "")
		if n := rec.Charged + rec.Uncharged; n != 1 {
			t.Errorf("one death counted %d times", n)
		}
	}
	n := 0
	for _, err := range e.queue.Outcomes(t.Context(), 0) {
		e.ok(err)
		n++
	}
	if diff := cmp.Diff(80, n); diff != "" {
		t.Error(diff)
	}
}
