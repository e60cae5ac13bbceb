package results

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/millrace/millrace/internal/job"
)

// Verdict is a claim's answer.
type Verdict string

// The verdicts.
const (
	Taken      Verdict = "taken"      // the job is the caller's
	Ended      Verdict = "ended"      // it has ended: ack
	Held       Verdict = "held"       // another attempt's lease lives: nak after Wait
	TooEarly   Verdict = "too_early"  // a retry's delay runs: nak after Wait
	CheckDone  Verdict = "check_done" // look at DONE first, then claim again with Checked
	Unrecorded Verdict = "unrecorded" // no record: after DONE was looked at, claim again with Body
)

// ClaimRequest asks for a job.
type ClaimRequest struct {
	Job        *job.Job
	Worker     job.Worker
	Lease      time.Duration
	AckSubject string
	// Delivered is the delivery's count. Checked says that DONE was looked at and has no outcome.
	Delivered int
	Checked   bool
	// Body is written with the record if there is none; Whole says that it may be (Body may be nil for a blob).
	Body  []byte
	Whole bool
	// Resume: the caller can perhaps continue a partial answer. Where a reset would be appended because token events of an earlier attempt stand in the stream, a status is, and Partial is set; the caller that cannot
	// continue after all appends the reset itself, as its first event.
	Resume bool
}

// Claim is what a claim gave.
type Claim struct {
	Verdict Verdict
	Wait    time.Duration // Held, TooEarly
	// For Taken: the attempt's token; the number of the event that the claim appended (status or reset), 0 if the job keeps no events; how many tries were charged before;
	// whether cancelling was asked; the store's time; whether readers may have an earlier attempt's text (that event is then a reset).
	Token                      job.Token
	N                          int64
	Charged, Deaths, Uncharged int
	CancelAsked                bool
	Now                        job.Millis
	Restarted                  bool
	// Partial: token events of earlier attempts stand in the stream below N, and are to be continued or reset.
	Partial bool
}

// Claim is the dedupe of deliveries, in one script: ended -> Ended; live lease of another -> Held; not_before in the future -> TooEarly; no record, an earlier attempt (token > 0), or
// Delivered > 1, unless Checked -> CheckDone; no record and not Whole -> Unrecorded; else taken: token = max(previous + 1, Redis TIME in ms), lease = now + Lease,
// state running, the attempt added, and a `status` event, or a `reset` where token events of an earlier attempt stand in the stream and not Resume, appended with n+1. If the stream is missing and this is not provably
// the first attempt, readers may have text of one that is forgotten: n starts at Redis TIME in ms, with a `reset`. The worker's held set is written before the script. An attempt whose lease ran out before is counted as uncharged.
// A claim by the same worker for the same AckSubject, while that claim's lease lives, is a repeat: Taken, with the same token.
func (s *Store) Claim(ctx context.Context, r ClaimRequest) (*Claim, error) {
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	c, err := s.claim(ctx, r)
	if err == nil && c.Verdict == Unrecorded && r.Whole {
		if err = s.recreate(ctx, r.Job, r.Body); err == nil {
			c, err = s.claim(ctx, r)
		}
	}
	if err != nil {
		return nil, wrap(err, "claiming job %s", r.Job.ID)
	}
	return c, nil
}

// claim writes the held set, then runs the script. If we crash in between, the set names a job that the worker does not hold: ending its lease finds that out.
func (s *Store) claim(ctx context.Context, r ClaimRequest) (*Claim, error) {
	worker := oneLine(string(r.Worker))
	answers, err := s.inOrder(ctx, func(p redis.Pipeliner) { s.hold(ctx, p, r.Worker, r.Job.ID) }, call{
		script: claimScript,
		keys:   []string{s.recordKey(r.Job.ID), s.eventsKey(r.Job.ID)},
		args: []any{
			worker, r.Lease.Milliseconds(), r.AckSubject, flag(r.Checked), flag(r.Delivered > 1),
			flag(r.Job.Events), s.expireAt(r.Job), s.cfg.MaxEvents, flag(r.Resume),
		},
	})
	if err != nil {
		return nil, err
	}
	a, ok := answers[0].([]any)
	if !ok || len(a) == 0 {
		return nil, fmt.Errorf("%w: %v", errAnswer, answers[0])
	}
	c := &Claim{Verdict: Verdict(text(a[0]))}
	switch {
	case c.Verdict == Taken && len(a) == 9:
		c.Token, c.N, c.Now = job.Token(number(a[1])), number(a[2]), job.Millis(number(a[7]))
		c.Charged, c.Deaths, c.Uncharged = int(number(a[3])), int(number(a[4])), int(number(a[5]))
		c.CancelAsked, c.Restarted, c.Partial = number(a[6]) == 1, number(a[8]) == 1, number(a[8]) == 2
		return c, nil
	case c.Verdict == Held && len(a) == 3:
		c.Wait = job.Millis(number(a[1])).Duration()
		if text(a[2]) == worker { // by an attempt of the same worker: it does hold the job
			return c, nil
		}
	case c.Verdict == TooEarly && len(a) == 2:
		c.Wait = job.Millis(number(a[1])).Duration()
	case c.Verdict == Ended, c.Verdict == CheckDone, c.Verdict == Unrecorded:
	default:
		return nil, fmt.Errorf("%w: %v", errAnswer, a)
	}
	return c, s.LetGo(ctx, r.Worker, r.Job.ID)
}

// hold adds a job to a worker's held set.
func (s *Store) hold(ctx context.Context, p redis.Pipeliner, w job.Worker, id job.ID) {
	p.ZAdd(ctx, s.holdersKey(), redis.Z{Score: float64(s.Now()), Member: string(w)})
	p.SAdd(ctx, s.heldKey(w), string(id))
	p.PExpire(ctx, s.heldKey(w), heldTTL)
}

// Renewal is what a running attempt says about itself; a wiped record is written again from it.
type Renewal struct {
	Job        *job.Job
	Body       []byte
	Worker     job.Worker
	Token      job.Token
	N          int64
	Started    job.Millis
	Lease      time.Duration
	AckSubject string
}

// Renew extends the lease: own token and lease not ended -> extended (also one that ran out, if nobody has claimed the job since); no record, or one without a token -> own
// token, attempt and n written again; else ErrFenced. It reports whether cancelling was asked.
func (s *Store) Renew(ctx context.Context, r Renewal) (cancelAsked bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	cancelAsked, err = s.renew(ctx, r)
	if errors.Is(err, ErrNotFound) {
		if err = s.recreate(ctx, r.Job, r.Body); err == nil {
			cancelAsked, err = s.renew(ctx, r)
		}
	}
	if err != nil {
		return false, wrap(err, "renewing the lease of job %s", r.Job.ID)
	}
	return cancelAsked, nil
}

func (s *Store) renew(ctx context.Context, r Renewal) (cancelAsked bool, err error) {
	a, err := renewScript.Run(ctx, s.db, []string{s.recordKey(r.Job.ID)},
		int64(r.Token), r.Lease.Milliseconds(), oneLine(string(r.Worker)), r.AckSubject, r.N, int64(r.Started)).Slice()
	if err != nil {
		return false, err
	}
	if len(a) != 2 {
		return false, fmt.Errorf("%w: %v", errAnswer, a)
	}
	switch text(a[0]) {
	case "ok":
	case "written":
		// The held set was wiped, too. If we crash before it is written, the delivery comes back after its ack wait instead of at once.
		if _, err := s.db.Pipelined(ctx, func(p redis.Pipeliner) error { s.hold(ctx, p, r.Worker, r.Job.ID); return nil }); err != nil {
			return false, err
		}
	case "fenced":
		return false, ErrFenced
	case "gone":
		return false, ErrNotFound
	default:
		return false, fmt.Errorf("%w: %v", errAnswer, a)
	}
	return number(a[1]) == 1, nil
}

// Owns returns nil if token still owns the job, ErrFenced if another does or it has ended, nil for a wiped record. A lease that was ended leaves the job its owner until
// another claims it.
func (s *Store) Owns(ctx context.Context, id job.ID, token job.Token) error {
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	v, err := s.db.HMGet(ctx, s.recordKey(id), "s", "k").Result()
	if err == nil && len(v) == 2 {
		owner, _ := strconv.ParseInt(text(v[1]), 10, 64) // a missing one is 0
		if job.State(text(v[0])).Ended() || owner != 0 && owner != int64(token) {
			err = ErrFenced
		}
	}
	if err != nil {
		return wrap(err, "asking who owns job %s", id)
	}
	return nil
}

// GiveBack ends an attempt without an outcome: running -> queued, lease ended, not before now + delay. reason is shown in the attempts; charged tells whether it counts. ErrFenced.
// An attempt that was ended before is not counted again, and a record that is gone is no error.
func (s *Store) GiveBack(ctx context.Context, id job.ID, token job.Token, delay time.Duration, charged bool, reason string) error {
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	answer, err := giveBackScript.Run(ctx, s.db, []string{s.recordKey(id)}, int64(token), delay.Milliseconds(), flag(charged), oneLine(reason)).Text()
	if err == nil && answer != "ok" {
		err = ErrFenced
	}
	if err != nil {
		return wrap(err, "giving back job %s", id)
	}
	return nil
}

// EndLease ends the lease of an attempt of a dead worker: state queued, lease 0, token kept; charged adds a death. It returns the record as it then is (with the ack subject). ErrNotFound; ErrFenced if the worker no longer holds it.
func (s *Store) EndLease(ctx context.Context, id job.ID, w job.Worker, charged bool) (*Record, error) {
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	answer, err := endLeaseScript.Run(ctx, s.db, []string{s.recordKey(id)}, oneLine(string(w)), flag(charged)).Result()
	var r *Record
	var word string
	if err == nil {
		r, word, err = whole(answer)
	}
	switch word {
	case "fenced":
		err = ErrFenced
	case "gone":
		err = ErrNotFound
	}
	if err != nil {
		return nil, wrap(err, "ending the lease of job %s", id)
	}
	return r, nil
}

// Held lists the jobs that w has claimed and not let go; Holders all workers that hold any. A crash may leave a job in the list that w does not hold: EndLease then
// returns ErrFenced or ErrNotFound.
func (s *Store) Held(ctx context.Context, w job.Worker) ([]job.ID, error) {
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	ids, err := s.db.SMembers(ctx, s.heldKey(w)).Result()
	if err != nil {
		return nil, wrap(err, "reading what worker %s holds", w)
	}
	return idsOf(ids), nil
}

// idleHolder is how long ago a worker without jobs must have claimed to be dropped: a claim writes the two sets one after the other.
const idleHolder = time.Minute

// Holders lists the workers that hold jobs.
func (s *Store) Holders(ctx context.Context) ([]job.Worker, error) {
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	all, err := s.db.ZRangeWithScores(ctx, s.holdersKey(), 0, -1).Result()
	if err != nil {
		return nil, wrap(err, "reading which workers hold jobs")
	}
	counts := make([]*redis.IntCmd, len(all))
	_, err = s.db.Pipelined(ctx, func(p redis.Pipeliner) error {
		for i, z := range all {
			counts[i] = p.SCard(ctx, s.heldKey(job.Worker(text(z.Member))))
		}
		return nil
	})
	if err != nil {
		return nil, wrap(err, "reading which workers hold jobs")
	}
	var holders []job.Worker
	for i, z := range all {
		switch w := text(z.Member); {
		case counts[i].Val() > 0:
			holders = append(holders, job.Worker(w))
		case job.Millis(z.Score) < s.Now()-job.Millis(idleHolder.Milliseconds()):
			// Best effort: it is dropped another time.
			_ = dismissScript.Run(ctx, s.db, []string{s.holdersKey()}, w, strconv.FormatFloat(z.Score, 'f', -1, 64)).Err()
		}
	}
	return holders, nil
}

// LetGo drops ids from w's held set.
func (s *Store) LetGo(ctx context.Context, w job.Worker, ids ...job.ID) error {
	if len(ids) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	members := make([]any, len(ids))
	for i, id := range ids {
		members[i] = string(id)
	}
	if err := s.db.SRem(ctx, s.heldKey(w), members...).Err(); err != nil {
		return wrap(err, "letting go of %d jobs of worker %s", len(ids), w)
	}
	return nil
}

// Finish writes the outcome into the record (whole if it is gone), the answer (nil: not kept), drops the request's body and the indexes of live jobs, and, if the job keeps events, appends `done` with
// number o.LastEvent (preceded by a `reset` with resetData if that is not nil, numbered o.LastEvent-1). doneData is the done event's JSON. An ended record is left alone. Repeating it is harmless.
// Where events with such numbers are there already, `done` gets the next number: it always stands last.
// An erased outcome writes no record. A batch's line keeps no answer, and its record only for lineKept: DONE has both; a record that is gone stays so. Order: record, answer and events -> live index and backlog. If we crash in between, Due, Live and RepairBacklog drop the entry.
func (s *Store) Finish(ctx context.Context, j *job.Job, o *job.Outcome, result, resetData, doneData []byte) error {
	if s.expireAt(j) <= int64(s.Now()) {
		return nil // too old to be kept
	}
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	if j.InBatch() {
		result = nil
	}
	kept := !o.Erased && !j.InBatch()
	word, err := s.finish(ctx, j, o, result, resetData, doneData)
	if err == nil && word == "gone" && kept {
		if err = s.recreate(ctx, j, nil); err == nil {
			word, err = s.finish(ctx, j, o, result, resetData, doneData)
		}
	}
	if err == nil && word == "gone" && kept {
		err = fmt.Errorf("%w: the record vanished while it was written", ErrUnavailable) // wiped again
	}
	if err == nil {
		err = s.leave(ctx, j)
	}
	if err != nil {
		return wrap(err, "recording the outcome of job %s", j.ID)
	}
	return nil
}

func (s *Store) finish(ctx context.Context, j *job.Job, o *job.Outcome, result, resetData, doneData []byte) (string, error) {
	outcome, err := encode(o)
	if err != nil {
		return "", err
	}
	end := s.expireAt(j)
	if j.InBatch() {
		end = min(end, int64(s.Now())+lineKept.Milliseconds())
	}
	return finishScript.Run(ctx, s.db, []string{s.recordKey(j.ID), s.eventsKey(j.ID), s.bodyKey(j.ID), s.answerKey(j.ID)},
		string(o.State), outcome, int64(o.FirstToken), int64(o.Finished), int64(o.Token), o.LastEvent, flag(j.Events),
		doneData, flag(resetData != nil), resetData, flag(result != nil), result, end, s.cfg.MaxEvents).Text()
}
