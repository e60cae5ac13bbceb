package results

import (
	"context"
	"errors"
	"fmt"

	"github.com/redis/go-redis/v9"
)

// Errors that callers branch on.
var (
	// ErrNotFound: the store answered, and has no such record.
	ErrNotFound = errors.New("no such job in the result store")
	// ErrUnavailable: the store did not answer, is loading, read-only or out of memory. Wraps the cause.
	ErrUnavailable = errors.New("the result store does not answer")
	// ErrFenced: another attempt owns the job, or it has ended.
	ErrFenced = errors.New("another attempt owns the job")
	// ErrGone: the job's event stream is not there (wiped); the caller appends its attempt's events again with Restore.
	ErrGone = errors.New("the event stream is gone")
)

// passing lists the beginnings of a server's errors that speak of the server's condition and not of the command.
var passing = []string{
	"LOADING", "READONLY", "OOM", "MISCONF", "CLUSTERDOWN", "MASTERDOWN", "TRYAGAIN", "NOREPLICAS", "BUSY", "UNKILLABLE", "MOVED", "ASK",
	"NOAUTH", "WRONGPASS", "NOPERM", "max number of clients",
}

// wrap says what was being done, and makes err an ErrUnavailable unless it is the caller's or the command's fault.
func wrap(err error, format string, args ...any) error {
	what := fmt.Sprintf(format, args...)
	if !errors.Is(err, ErrUnavailable) && unavailable(err) {
		return fmt.Errorf("%s: %w: %w", what, ErrUnavailable, err)
	}
	return fmt.Errorf("%s: %w", what, err)
}

func unavailable(err error) bool {
	var answer redis.Error
	switch {
	case errors.As(err, new(*LimitError)):
		return false
	case errors.Is(err, context.Canceled), errors.Is(err, ErrNotFound), errors.Is(err, ErrFenced), errors.Is(err, ErrGone), errors.Is(err, errAnswer):
		return false
	case errors.As(err, &answer):
		for _, p := range passing {
			if redis.HasErrorPrefix(err, p) {
				return true
			}
		}
		return false
	default: // no answer: refused, cut, timed out, no free connection
		return true
	}
}

// errAnswer: the store answered something that this package never wrote.
var errAnswer = errors.New("unexpected answer")
