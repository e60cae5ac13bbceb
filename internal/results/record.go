package results

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/millrace/millrace/internal/job"
)

// Record is one job's record.
type Record struct {
	Job   job.Job
	State job.State
	// Since is when it became accepting. Version rises with every change that a client can see, across a wiped store too.
	Since   job.Millis
	Version int64
	// The current or last attempt: its token, worker, lease end (0 = none), the delivery's ack subject, and when it may be tried again.
	Token      job.Token
	Worker     job.Worker
	Lease      job.Millis
	AckSubject string
	NotBefore  job.Millis
	// CancelAsked: a client wants it cancelled.
	CancelAsked bool
	// N is the number of the last event. Deaths counts attempts that ended with their worker's death, Charged all attempts that count, Uncharged the rest.
	N                          int64
	Deaths, Charged, Uncharged int
	// Attempts has the first attempt and the latest ones, about fifty in all.
	Attempts   []job.Attempt
	FirstToken job.Millis
	// Outcome is set once ended. HasResult tells whether Redis holds the answer (Result reads it).
	Outcome   *job.Outcome
	HasResult bool
}

// decode reads a record's hash.
func decode(m map[string]string) (*Record, error) {
	num := func(field string) int64 {
		n, _ := strconv.ParseInt(m[field], 10, 64) // written by our scripts alone; a missing one is 0
		return n
	}
	r := &Record{
		State: job.State(m["s"]), Since: job.Millis(num("a")), Version: num("v"),
		Token: job.Token(num("k")), Worker: job.Worker(m["w"]), Lease: job.Millis(num("l")), AckSubject: m["q"], NotBefore: job.Millis(num("nb")),
		CancelAsked: m["c"] == "1", N: num("n"), Deaths: int(num("d")), Charged: int(num("ch")), Uncharged: int(num("un")),
		Attempts: attempts(m["at"]), FirstToken: job.Millis(num("f")), HasResult: m["h"] == "1",
	}
	if err := json.Unmarshal([]byte(m["j"]), &r.Job); err != nil {
		return nil, fmt.Errorf("reading a record's job: %w: %w", errAnswer, err)
	}
	if text := m["o"]; text != "" {
		r.Outcome = new(job.Outcome)
		if err := json.Unmarshal([]byte(text), r.Outcome); err != nil {
			return nil, fmt.Errorf("reading a record's outcome: %w: %w", errAnswer, err)
		}
		if len(r.Outcome.Attempts) > 0 { // the settled list knows also what a wiped record has forgotten
			r.Attempts = r.Outcome.Attempts
		}
	}
	return r, nil
}

// attempts reads the log of attempts that the scripts write.
func attempts(log string) []job.Attempt {
	var list []job.Attempt
	for line := range strings.Lines(log) {
		at, what, _ := strings.Cut(strings.TrimSuffix(line[1:], "\n"), " ")
		ms, _ := strconv.ParseInt(at, 10, 64) // written by our scripts alone
		switch {
		case line[0] == '+':
			list = append(list, job.Attempt{Worker: job.Worker(what), Started: job.Millis(ms)})
		case len(list) > 0:
			list[len(list)-1].Ended, list[len(list)-1].Outcome = job.Millis(ms), what
		}
	}
	return list
}

// oneLine keeps a text from breaking the log of attempts.
func oneLine(s string) string {
	return strings.Map(func(r rune) rune {
		if r == '\n' || r == '\r' {
			return ' '
		}
		return r
	}, s)
}

// whole reads a script's answer that is all of a record, or a word.
func whole(answer any) (*Record, string, error) {
	list, ok := answer.([]any)
	if !ok {
		return nil, text(answer), nil
	}
	m := make(map[string]string, len(list)/2)
	for i := 0; i+1 < len(list); i += 2 {
		m[text(list[i])] = text(list[i+1])
	}
	r, err := decode(m)
	return r, "", err
}

func text(v any) string {
	s, _ := v.(string)
	return s
}

func number(v any) int64 {
	n, _ := v.(int64)
	return n
}

func flag(b bool) int {
	if b {
		return 1
	}
	return 0
}

func encode(v any) ([]byte, error) {
	raw, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("encoding %T: %w: %w", v, errAnswer, err)
	}
	return raw, nil
}

// Get reads a record without bodies. ErrNotFound, ErrUnavailable.
func (s *Store) Get(ctx context.Context, id job.ID) (*Record, error) {
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	m, err := s.db.HGetAll(ctx, s.recordKey(id)).Result()
	var r *Record
	if err == nil && len(m) == 0 {
		err = ErrNotFound
	}
	if err == nil {
		r, err = decode(m)
	}
	if err != nil {
		return nil, wrap(err, "reading job %s", id)
	}
	return r, nil
}

// Body reads the request's body (kept until the job ends), Result the answer. ErrNotFound if it is not kept, ErrUnavailable.
func (s *Store) Body(ctx context.Context, id job.ID) ([]byte, error) {
	return s.bytes(ctx, s.bodyKey(id), "body", id)
}

// Result reads the engine's answer.
func (s *Store) Result(ctx context.Context, id job.ID) ([]byte, error) {
	return s.bytes(ctx, s.answerKey(id), "answer", id)
}

func (s *Store) bytes(ctx context.Context, key, what string, id job.ID) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	raw, err := s.db.Get(ctx, key).Bytes()
	if errors.Is(err, redis.Nil) {
		err = ErrNotFound
	}
	if err != nil {
		return nil, wrap(err, "reading the %s of job %s", what, id)
	}
	return raw, nil
}

// AskCancel stores the wish to cancel and returns the record. ErrNotFound.
func (s *Store) AskCancel(ctx context.Context, id job.ID) (*Record, error) {
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	answer, err := cancelScript.Run(ctx, s.db, []string{s.recordKey(id)}).Result()
	var r *Record
	if err == nil {
		r, _, err = whole(answer)
	}
	if err == nil && r == nil {
		err = ErrNotFound
	}
	if err != nil {
		return nil, wrap(err, "asking to cancel job %s", id)
	}
	return r, nil
}

// Delete removes the record of an ended job, its answer, events, index entries. Another tenant's job is ErrNotFound; one that is gone is no error.
// Order: record -> indexes. A crash in between leaves entries that lead nowhere.
func (s *Store) Delete(ctx context.Context, t job.Tenant, id job.ID) error {
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	r, err := s.Get(ctx, id)
	switch {
	case errors.Is(err, ErrNotFound): // the entries may still be there
	case err != nil:
		return err
	case r.Job.Tenant != t:
		return wrap(ErrNotFound, "deleting job %s", id)
	}
	gone, err := deleteScript.Run(ctx, s.db, []string{s.recordKey(id), s.eventsKey(id), s.bodyKey(id), s.answerKey(id)}).Bool()
	switch {
	case err != nil:
		return wrap(err, "deleting job %s", id)
	case !gone:
		return fmt.Errorf("deleting job %s: it has not ended", id)
	}
	if err := s.unindex(ctx, t, id); err != nil {
		return wrap(err, "deleting the index entries of job %s", id)
	}
	return nil
}
