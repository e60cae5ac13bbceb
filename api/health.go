package api

import (
	"context"
	"net/http"
	"time"

	"github.com/labstack/echo/v4"
	"golang.org/x/sync/errgroup"
)

type healthObject struct {
	Status string `json:"status"`
}

// healthz tells that the process lives.
func (s *Server) healthz(c echo.Context) error {
	return writeJSON(c, http.StatusOK, healthObject{"ok"})
}

// readyTimeout bounds the checks of readiness.
const readyTimeout = 2 * time.Second

// readyz tells whether new work can be taken: the queue and the result store answer, and the server does not stop.
func (s *Server) readyz(c echo.Context) error {
	select {
	case <-s.closing:
		return unavailable(nil, "The server stops.")
	default:
	}
	ctx, cancel := context.WithTimeout(c.Request().Context(), readyTimeout)
	defer cancel()
	var g errgroup.Group
	g.Go(func() error {
		if err := s.deps.Queue.Healthy(ctx); err != nil {
			return unavailable(err, "The queue does not answer.")
		}
		return nil
	})
	g.Go(func() error {
		if err := s.deps.Results.Ping(ctx); err != nil {
			return unavailable(err, "The result store does not answer.")
		}
		return nil
	})
	if err := g.Wait(); err != nil {
		return err
	}
	return writeJSON(c, http.StatusOK, healthObject{"ready"})
}
