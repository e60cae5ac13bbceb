package resultstest

import (
	"fmt"
	"strings"
	"time"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/results"
)

const lineBatch = "batch_0123456789abcdefghijklmnopqrstuv0123"

// line is line n of a batch.
func (e *env) line(n int64, change ...func(*job.Job)) *job.Job {
	return e.job(append([]func(*job.Job){func(j *job.Job) {
		j.ID, j.Group, j.Line, j.CustomID, j.Class, j.Events, j.Metadata = job.LineID(lineBatch, n), lineBatch, n, fmt.Sprint("c", n), job.Batch, false, nil
		j.BodySize = 10
	}}, change...)...)
}

// bodies are the keys of request bodies and answers.
func (e *env) bodies() []string {
	e.Helper()
	var found []string
	for _, k := range e.keys() {
		if strings.HasSuffix(k, "}:b") || strings.HasSuffix(k, "}:o") {
			found = append(found, k)
		}
	}
	return found
}

func linesAccepted(e *env) {
	var lines []*job.Job
	for n := range int64(250) { // more than one round trip
		lines = append(lines, e.line(n+1))
	}
	e.ok(e.AcceptLines(e.ctx, nil))
	e.ok(e.AcceptLines(e.ctx, lines))
	e.same("live", len(e.living()), len(lines))
	e.same("backlog", e.backlogs()["m"].Classes[job.Batch].Jobs, int64(len(lines)))
	r := e.state(lines[3], job.Queued)
	e.same("job", r.Job, *lines[3])
	listed, _, err := e.List(e.ctx, "acme", results.Filter{}, "", 100)
	e.ok(err)
	e.same("listed", len(listed), 0)

	// One that runs, and one that has ended, stay what they are when they are accepted again.
	c := e.claim(request(lines[0], "w"), results.Taken)
	done := e.claim(request(lines[1], "w"), results.Taken)
	e.ok(e.Finish(e.ctx, lines[1], completed(done, e, 0), []byte("answer"), nil, nil))
	e.ok(e.AcceptLines(e.ctx, lines[:3]))
	e.same("token", e.state(lines[0], job.Running).Token, c.Token)
	e.same("kept answer", e.state(lines[1], job.Completed).HasResult, false)
	e.state(lines[2], job.Queued)
	e.same("live", len(e.living()), len(lines)-1)
	e.same("backlog", e.backlogs()["m"].Classes[job.Batch].Jobs, int64(len(lines)-1))
	e.same("due", len(e.dueIDs(lines[len(lines)-1].Expires)), len(lines)-1)
	e.same("bodies", e.bodies(), []string(nil))
}

func (e *env) dueIDs(at job.Millis) []job.ID {
	e.Helper()
	ids, err := e.Due(e.ctx, at, 1000)
	e.ok(err)
	return ids
}

func linesKeepNoBody(e *env) {
	// However a record comes to be written, a line's body stays out of it.
	claimed, renewed, restored := e.line(1), e.line(2), e.line(3)
	r := again(claimed, "w", 1)
	r.Whole, r.Body = true, body
	c := e.claim(r, results.Taken)
	_, err := e.Renew(e.ctx, renewal(renewed, "w", &results.Claim{Token: 7, Now: e.Now()}))
	e.ok(err)
	e.ok(e.RestoreQueued(e.ctx, []results.QueuedJob{{Job: *restored, Body: body}}))
	e.ok(e.Queued(e.ctx, e.line(4), body))
	e.same("live", len(e.living()), 4)
	e.ok(e.Finish(e.ctx, claimed, completed(c, e, 0), body, nil, nil))
	e.same("bodies", e.bodies(), []string(nil))
	listed, _, err := e.List(e.ctx, "acme", results.Filter{}, "", 100)
	e.ok(err)
	e.same("listed", len(listed), 0)
}

func lineRecordIsSoonGone(e *env) {
	j := e.line(1)
	e.ok(e.AcceptLines(e.ctx, []*job.Job{j}))
	c := e.claim(request(j, "w"), results.Taken)
	key := e.prefix + "{" + string(j.ID) + "}:r"
	lives := func() time.Duration {
		e.Helper()
		ttl, err := e.raw.PTTL(e.ctx, key).Result()
		e.ok(err)
		return ttl
	}
	if ttl := lives(); ttl < time.Hour {
		e.Errorf("while it runs the record lives for %s", ttl)
	}
	o := completed(c, e, 0)
	e.ok(e.Finish(e.ctx, j, o, body, nil, nil))
	if ttl := lives(); ttl <= 0 || ttl > time.Minute {
		e.Errorf("after its end the record lives for %s", ttl)
	}
	e.ok(e.raw.Del(e.ctx, key).Err())
	e.ok(e.Finish(e.ctx, j, o, body, nil, nil)) // somebody finds the outcome once more
	e.ok(e.RestoreEnded(e.ctx, []results.EndedJob{{Job: *j, Outcome: *o}}))
	if n := e.raw.Exists(e.ctx, key).Val(); n != 0 {
		e.Error("the record of an ended line is there again")
	}
	e.claim(request(j, "w"), results.CheckDone) // and a late delivery asks DONE
	e.same("live", e.living(), []job.ID(nil))
	e.same("backlog", len(e.backlogs()), 0)
	// Its deadline may be sooner than that.
	soon := e.line(2, func(j *job.Job) { j.Expires = j.Created - job.Millis(7*24*time.Hour.Milliseconds()) + 60_000 })
	soon.Created = soon.Expires
	e.ok(e.AcceptLines(e.ctx, []*job.Job{soon}))
	c = e.claim(request(soon, "w"), results.Taken)
	e.ok(e.Finish(e.ctx, soon, completed(c, e, 0), nil, nil, nil))
	if ttl, err := e.raw.PTTL(e.ctx, e.prefix+"{"+string(soon.ID)+"}:r").Result(); err != nil || ttl > time.Minute {
		e.Errorf("the record outlives its retention: %s, %v", ttl, err)
	}
}
