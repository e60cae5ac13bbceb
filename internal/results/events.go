package results

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/millrace/millrace/internal/job"
)

// Append adds an attempt's events under the ids <token>-<n>, and stores the time of the first token event. Repeating it is harmless. ErrFenced if a newer attempt has appended, or the job has ended; ErrGone if the stream is not there.
// All events are of one attempt, and their numbers rise. They are added together or not at all.
func (s *Store) Append(ctx context.Context, j *job.Job, events []job.Event) error {
	if err := s.append(ctx, j, events, false); err != nil {
		return wrap(err, "appending events of job %s", j.ID)
	}
	return nil
}

// Restore creates a missing stream with the attempt's events from the first kept on, under their own ids. To a stream that is there it adds what it lacks; ErrFenced if a newer
// attempt made that.
func (s *Store) Restore(ctx context.Context, j *job.Job, events []job.Event) error {
	if err := s.append(ctx, j, events, true); err != nil {
		return wrap(err, "restoring the events of job %s", j.ID)
	}
	return nil
}

func (s *Store) append(ctx context.Context, j *job.Job, events []job.Event, mayCreate bool) error {
	if len(events) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	args := make([]any, 0, 4+3*len(events))
	args = append(args, int64(events[0].Token), flag(mayCreate), s.expireAt(j), s.cfg.MaxEvents)
	for i := range events {
		e := &events[i]
		if e.Token != events[0].Token {
			return fmt.Errorf("%w: events of two attempts", errAnswer)
		}
		args = append(args, e.N, string(e.Kind), e.Data)
	}
	word, err := appendScript.Run(ctx, s.db, []string{s.recordKey(j.ID), s.eventsKey(j.ID)}, args...).Text()
	switch {
	case err != nil:
		return err
	case word == "fenced":
		return ErrFenced
	case word == "gone":
		return ErrGone
	}
	return nil
}

// Span is what a stream holds: the numbers of its first and last event; zero if it is empty or gone.
type Span struct{ First, Last int64 }

// Events returns up to limit events with number > after, in order, and the stream's span. A stream that is not there is an empty span and no error.
func (s *Store) Events(ctx context.Context, id job.ID, after int64, limit int) ([]job.Event, Span, error) {
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	if limit <= 0 {
		after, limit = 1<<53, 1 // the span alone
	}
	answer, err := eventsScript.Run(ctx, s.db, []string{s.eventsKey(id)}, max(after, 0), limit).Slice()
	if err != nil {
		return nil, Span{}, wrap(err, "reading the events of job %s", id)
	}
	events, span, err := parseEvents(answer)
	if err != nil {
		return nil, Span{}, fmt.Errorf("reading the events of job %s: %w", id, err)
	}
	return events, span, nil
}

func parseEvents(answer []any) ([]job.Event, Span, error) {
	if len(answer) != 3 {
		return nil, Span{}, fmt.Errorf("%w: %d parts", errAnswer, len(answer))
	}
	var span Span
	span.First, _ = strconv.ParseInt(text(answer[0]), 10, 64)
	span.Last, _ = strconv.ParseInt(text(answer[1]), 10, 64)
	entries, _ := answer[2].([]any)
	var events []job.Event
	for _, e := range entries {
		entry, _ := e.([]any)
		if len(entry) != 2 {
			return nil, Span{}, fmt.Errorf("%w: an entry of %d parts", errAnswer, len(entry))
		}
		token, n, _ := strings.Cut(text(entry[0]), "-")
		pair, _ := entry[1].([]any)
		if len(pair) != 2 {
			return nil, Span{}, fmt.Errorf("%w: entry %v has %d fields", errAnswer, entry[0], len(pair))
		}
		ev := job.Event{Kind: job.EventKind(text(pair[0])), Data: []byte(text(pair[1]))}
		t, err := strconv.ParseInt(token, 10, 64)
		if err == nil {
			ev.N, err = strconv.ParseInt(n, 10, 64)
		}
		if err != nil {
			return nil, Span{}, fmt.Errorf("%w: entry id %v", errAnswer, entry[0])
		}
		ev.Token = job.Token(t)
		events = append(events, ev)
	}
	return events, span, nil
}
