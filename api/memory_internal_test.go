package api

import (
	"context"
	"errors"
	"log/slog"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/millrace/millrace/internal/ledger"
)

// source is a ledger that says what it is told to.
type source struct {
	value int
	err   error
	asked int
}

func (s *source) ask(context.Context) (int, error) {
	s.asked++
	return s.value, s.err
}

func newMemory() *memory[int] {
	return &memory[int]{fresh: 5 * time.Second, absent: time.Second, stale: 5 * time.Minute, most: 3, patience: &patience{name: "x", log: slog.New(slog.DiscardHandler)}}
}

func TestMemory(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m, s := newMemory(), &source{value: 1}
		want := func(value int, err error, asked int) {
			t.Helper()
			got, gotErr := m.get(t.Context(), "k", s.ask)
			if got != value || !errors.Is(gotErr, err) || (err == nil) != (gotErr == nil) || s.asked != asked {
				t.Fatalf("%d, %v, asked %d times; want %d, %v, %d", got, gotErr, s.asked, value, err, asked)
			}
		}
		want(1, nil, 1)
		s.value = 2
		time.Sleep(5*time.Second - 1)
		want(1, nil, 1) // fresh
		time.Sleep(time.Nanosecond)
		want(2, nil, 2)
		// Away: what is known goes on, and only one a second is asked.
		s.err = ledger.ErrUnavailable
		time.Sleep(5 * time.Second)
		want(2, nil, 3)
		want(2, nil, 3)
		time.Sleep(time.Second)
		want(2, nil, 4)
		time.Sleep(5*time.Minute - 6*time.Second - 1)
		want(2, nil, 5)
		time.Sleep(time.Nanosecond)
		want(0+2, ledger.ErrUnavailable, 5)
		if _, err := m.get(t.Context(), "other", s.ask); !errors.Is(err, ledger.ErrUnavailable) || s.asked != 5 {
			t.Fatalf("an unknown one: %v, asked %d times", err, s.asked)
		}
		// Back, and gone there.
		s.err = ledger.ErrNotFound
		time.Sleep(time.Second)
		want(2, ledger.ErrNotFound, 6)
		want(0, ledger.ErrNotFound, 6)
		s.err = nil
		time.Sleep(time.Second)
		want(2, nil, 7)
	})
}

func TestMemoryIsBounded(t *testing.T) {
	t.Parallel()
	m := newMemory()
	for i := range 100 {
		for _, err := range []error{nil, ledger.ErrNotFound} {
			s := &source{err: err}
			_, _ = m.get(t.Context(), strconv.Itoa(i)+strconv.FormatBool(err == nil), s.ask)
		}
	}
	if len(m.there) > 3 || len(m.missing) > 3 {
		t.Errorf("it keeps %d and %d", len(m.there), len(m.missing))
	}
}

// TestRoutesNeedTheirScope: a route is closed to keys without its scope also if its path is written in an unusual way.
func TestRoutesNeedTheirScope(t *testing.T) {
	t.Parallel()
	for path, want := range map[string]ledger.Scope{
		"/v1/chat/completions": ledger.Inference, "/v1/jobs/:id": ledger.Inference, "/v1": ledger.Inference, "/v1/nope": ledger.Inference, "/v1/filesystem": ledger.Inference,
		"/v1/files": ledger.Batches, "/v1/files/:id/content": ledger.Batches, "/v1/batches/:id/retry": ledger.Batches,
		"/admin": ledger.Admin, "/admin/v1/keys/:id/rotate": ledger.Admin, "/admin/v1/batches/:id/cancel": ledger.Admin, "/healthz": "", "/v10": "", "/administer": "", "": "",
	} {
		if got, own := scopeOf(path); got != want || own {
			t.Errorf("%s needs %q, want %q", path, got, want)
		}
	}
	if _, own := scopeOf("/v1/usage"); !own {
		t.Error("a tenant's own usage needs a scope")
	}
}
