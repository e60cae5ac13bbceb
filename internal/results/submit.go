package results

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/millrace/millrace/internal/job"
)

// KeyEntry is what an idempotency key stands for.
type KeyEntry struct {
	ID   job.ID
	Hash string // of the request
}

func (e KeyEntry) String() string { return string(e.ID) + " " + e.Hash }

// ReserveKey binds tenant's key to entry unless it is bound already, and returns the entry that holds now and whether it is the caller's.
// ttl 0 is Config.KeyTTL.
func (s *Store) ReserveKey(ctx context.Context, t job.Tenant, key string, entry KeyEntry, ttl time.Duration) (held KeyEntry, mine bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	if ttl == 0 {
		ttl = s.cfg.KeyTTL
	}
	old, err := s.db.SetArgs(ctx, s.idempotencyKey(t, key), entry.String(), redis.SetArgs{Mode: "NX", Get: true, TTL: ttl}).Result()
	switch {
	case errors.Is(err, redis.Nil):
		return entry, true, nil
	case err != nil:
		return KeyEntry{}, false, wrap(err, "reserving an idempotency key for job %s", entry.ID)
	}
	id, hash, _ := strings.Cut(old, " ")
	held = KeyEntry{ID: job.ID(id), Hash: hash}
	return held, held == entry, nil // a repeat finds what its first run bound
}

// ImpliedKeyTTL is for how long a key is kept that stands for a request alone: one whose job has a Key and no BodyHash.
const ImpliedKeyTTL = 10 * time.Minute

// BindKey binds tenant's key, which stands for the request alone, to id for ImpliedKeyTTL, whatever it was bound to.
func (s *Store) BindKey(ctx context.Context, t job.Tenant, key string, id job.ID) error {
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	if err := s.bindKey(ctx, s.db, t, key, id).Err(); err != nil {
		return wrap(err, "binding an idempotency key to job %s", id)
	}
	return nil
}

func (s *Store) bindKey(ctx context.Context, p redis.Cmdable, t job.Tenant, key string, id job.ID) *redis.StatusCmd {
	return p.Set(ctx, s.idempotencyKey(t, key), KeyEntry{ID: id}.String(), ImpliedKeyTTL)
}

// ReleaseKey unbinds the key if it is bound to id.
func (s *Store) ReleaseKey(ctx context.Context, t job.Tenant, key string, id job.ID) error {
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	if err := releaseScript.Run(ctx, s.db, []string{s.idempotencyKey(t, key)}, string(id)).Err(); err != nil {
		return wrap(err, "releasing the idempotency key of job %s", id)
	}
	return nil
}

// creation is a record to write where there is none.
type creation struct {
	job    *job.Job
	state  job.State
	body   []byte
	fields []any
	// key says that the job's idempotency key is bound, too, if it is bound to nothing; fresh that it is bound whatever it was bound to.
	key, fresh bool
}

// standing is how a record stands after a creation, and the job in the backlog.
type standing struct {
	state job.State
	since job.Millis
	place Place
}

// create writes index entries, then records, and counts those that have not ended in the backlog. If we crash in between, entries are left that lead nowhere: List skips them, of the live ones the dispatcher
// asks, finds nothing, and calls Forget, and RepairBacklog drops the members. A job that is over a limit gives a *LimitError beside its standing; its record is written all the same, for the caller to discard.
func (s *Store) create(ctx context.Context, l Limits, all ...creation) ([]standing, error) {
	calls := make([]call, 0, 2*len(all))
	for _, c := range all {
		text, err := encode(c.job)
		if err != nil {
			return nil, err
		}
		if !c.state.Ended() {
			calls = append(calls, s.enterCall(c.job, l))
		}
		body := c.body
		if c.job.InBatch() { // its file has it
			body = nil
		}
		args := append([]any{string(c.state), text, s.expireAt(c.job), body}, c.fields...)
		calls = append(calls, call{script: createScript, keys: []string{s.recordKey(c.job.ID), s.bodyKey(c.job.ID)}, args: args})
	}
	answers, err := s.inOrder(ctx, func(p redis.Pipeliner) {
		for _, c := range all {
			s.index(ctx, p, c.job, c.state)
			if c.fresh {
				s.bindKey(ctx, p, c.job.Tenant, c.job.Key, c.job.ID)
			}
			if c.key && c.job.Key != "" {
				ttl := s.cfg.KeyTTL
				if c.job.BodyHash == "" {
					ttl = ImpliedKeyTTL
				}
				if left := (c.job.Created - s.Now()).Duration() + ttl; left > 0 {
					p.SetNX(ctx, s.idempotencyKey(c.job.Tenant, c.job.Key), KeyEntry{ID: c.job.ID, Hash: c.job.BodyHash}.String(), left)
				}
			}
		}
	}, calls...)
	if err != nil {
		return nil, err
	}
	stand := make([]standing, 0, len(all))
	var over error
	var ended []*job.Job
	for _, c := range all {
		var st standing
		if !c.state.Ended() {
			if st.place, err = entered(answers[0], c.job, l); errors.As(err, new(*LimitError)) {
				over = err
			} else if err != nil {
				return nil, err
			}
			answers = answers[1:]
		}
		list, ok := answers[0].([]any)
		if !ok || len(list) != 2 {
			return nil, fmt.Errorf("%w: %v", errAnswer, answers[0])
		}
		answers = answers[1:]
		st.state, st.since = job.State(text(list[0])), job.Millis(number(list[1]))
		if st.state.Ended() && !c.state.Ended() { // before it was counted
			ended = append(ended, c.job)
		}
		stand = append(stand, st)
	}
	if len(ended) > 0 {
		if err := s.leaveEnded(ctx, ended); err != nil {
			return nil, err
		}
	}
	return stand, over
}

// trimOneIn jobs has its tenant's list trimmed: the embedded store sorts the whole list for that.
const trimOneIn = 256

// index adds a job to its tenant's list, but for a batch's line, and to the live index. An entry that is there keeps its deadline.
func (s *Store) index(ctx context.Context, p redis.Pipeliner, j *job.Job, state job.State) {
	if !j.InBatch() {
		list := s.listKey(j.Tenant)
		p.ZAdd(ctx, list, redis.Z{Score: float64(j.Created), Member: string(j.ID)})
		if rand.N(trimOneIn) == 0 {
			p.ZRemRangeByScore(ctx, list, "-inf", fmt.Sprint(int64(s.Now())-(longestDeadline+s.cfg.Retention).Milliseconds()))
		}
		p.PExpire(ctx, list, s.listTTL())
	}
	if !state.Ended() {
		p.ZAddNX(ctx, s.liveKey(j.ID), redis.Z{Score: float64(firstDeadline(j)), Member: string(j.ID)})
	}
}

// Acceptance is how a job stands once it was accepted: its state and since when it is accepting, and its place in the backlog.
type Acceptance struct {
	State job.State
	Since job.Millis
	Place Place
}

// Accept writes the record in state accepting with `since` = now, with body (nil if it is a blob), indexes it for List and Due, and counts it in the backlog. If the record exists and is
// accepting, only since is renewed; any other state is left alone. It returns the state that holds now and its since. A job that would pass a limit gets a *LimitError: if that comes with an Acceptance, a record was written, and the
// caller must Discard it. A job that is counted already is never refused.
func (s *Store) Accept(ctx context.Context, j *job.Job, body []byte, l Limits) (*Acceptance, error) {
	return s.accept(ctx, creation{job: j, body: body}, l)
}

// AcceptFresh is Accept, and does in the same round trip what BindKey does for the job's key.
func (s *Store) AcceptFresh(ctx context.Context, j *job.Job, body []byte, l Limits) (*Acceptance, error) {
	return s.accept(ctx, creation{job: j, body: body, fresh: true}, l)
}

func (s *Store) accept(ctx context.Context, c creation, l Limits) (*Acceptance, error) {
	j := c.job
	c.state, c.fields = job.Accepting, []any{"fr", 1}
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	if time.Since(time.UnixMilli(s.refused.Load())) < askedFor {
		if err := s.enter(ctx, j, l); err != nil {
			return nil, s.noteRefused(err, j)
		}
	}
	now, err := s.create(ctx, l, c)
	if len(now) == 0 {
		return nil, wrap(err, "accepting job %s", j.ID)
	}
	return &Acceptance{State: now[0].state, Since: now[0].since, Place: now[0].place}, s.noteRefused(err, j)
}

func (s *Store) noteRefused(err error, j *job.Job) error {
	if err == nil {
		return nil
	}
	if errors.As(err, new(*LimitError)) {
		s.refused.Store(time.Now().UnixMilli())
	}
	return wrap(err, "accepting job %s", j.ID)
}

// Queued turns accepting into queued. A record in another state is left alone; one that is gone is written whole.
func (s *Store) Queued(ctx context.Context, j *job.Job, body []byte) error {
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	err := queuedScript.Run(ctx, s.db, []string{s.recordKey(j.ID)}).Err()
	if errors.Is(err, redis.Nil) {
		err = s.recreate(ctx, j, body)
	}
	if err != nil {
		return wrap(err, "recording that job %s is queued", j.ID)
	}
	return nil
}

// recreate writes the record of a job that is known to wait or run, after the store was wiped.
func (s *Store) recreate(ctx context.Context, j *job.Job, body []byte) error {
	_, err := s.create(ctx, Limits{}, creation{job: j, state: job.Queued, body: body})
	return err
}

// Discard removes the record if it is accepting since exactly `since`, and tells whether it did. A record that is gone counts as removed, so that a repeat says the same.
func (s *Store) Discard(ctx context.Context, j *job.Job, since job.Millis) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	gone, err := discardScript.Run(ctx, s.db, []string{s.recordKey(j.ID), s.bodyKey(j.ID), s.eventsKey(j.ID)}, int64(since)).Bool()
	if err == nil && gone {
		err = s.unindex(ctx, j.Tenant, j.ID, s.leaveCall(countedFor(j), j.Model, j.ID))
	}
	if err != nil {
		return false, wrap(err, "discarding job %s", j.ID)
	}
	return gone, nil
}

// unindex removes a job from its tenant's list and the live index, once its record is gone, and makes the calls that go with that.
func (s *Store) unindex(ctx context.Context, t job.Tenant, id job.ID, calls ...call) error {
	pipe := s.db.Pipeline()
	pipe.ZRem(ctx, s.listKey(t), string(id))
	pipe.ZRem(ctx, s.liveKey(id), string(id))
	_, err := s.run(ctx, pipe, calls...)
	return err
}
