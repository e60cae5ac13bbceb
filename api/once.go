package api

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
	"github.com/millrace/millrace/internal/results"
)

// keyWindow is for how long a client's idempotency key stands for what it created.
const keyWindow = 24 * time.Hour

// once binds the key of a create to the id of what it is about to make, and returns the id to make it under. repeated: an earlier create bound the key, and the id is that one's. It exists, or that create went no
// further: then the caller makes it now, under that id, and whoever else does so at the same time makes the same.
func (s *Server) once(ctx context.Context, t job.Tenant, route string, d dedupe, id string) (bound string, repeated bool, err error) {
	ttl := keyWindow
	if d.implied {
		ttl = results.ImpliedKeyTTL
	}
	for try := 0; ; try++ {
		bound, mine, err := s.deps.Ledger.Remember(ctx, t, route, d.key, d.hash, id, s.deps.Results.Now(), ttl)
		switch {
		case errors.Is(err, ledger.ErrReused):
			f := fail(http.StatusConflict, job.CodeIdempotencyConflict, "The idempotency key stands for another request already: use a new key for a new request.").at(headerKey)
			f.final = true
			return "", false, f
		case err != nil:
			return "", false, fmt.Errorf("binding an idempotency key: %w", err)
		case mine:
			return id, false, nil
		case !d.fresh():
			return bound, true, nil
		case try > 0: // two at the same time, both meant as new: the key serves the other's retries
			return id, false, nil
		}
		// The same request again, meant as a new one.
		if err := s.deps.Ledger.Forget(ctx, t, route, d.key, bound); err != nil {
			return "", false, fmt.Errorf("releasing an idempotency key: %w", err)
		}
	}
}

// forget unbinds the key of a create that came to nothing. Best effort: a key without an object is taken over.
func (s *Server) forget(ctx context.Context, t job.Tenant, route string, d dedupe, id string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), dropTimeout)
	defer cancel()
	if err := s.deps.Ledger.Forget(ctx, t, route, d.key, id); err != nil {
		s.log.Warn("releasing an idempotency key", "route", route, "err", err)
	}
}
