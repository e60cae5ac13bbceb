package api_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/millrace/millrace/api"
	"github.com/millrace/millrace/internal/job"
)

// TestBodiesOfUnknownLengthAreHeldToTheLimit sends more bodies that are too long than there is room for at once: each must give its room back.
func TestBodiesOfUnknownLengthAreHeldToTheLimit(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{MaxBody: 64 << 10, MaxBodies: 64 << 10})
	for range 2 {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, e.url+"/v1/chat/completions", io.MultiReader(strings.NewReader(strings.Repeat(" ", 65<<10))))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := client().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		raw, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if err != nil {
			t.Fatal(err)
		}
		answer{resp.StatusCode, resp.Header, raw}.wantError(t, http.StatusRequestEntityTooLarge, job.CodeRequestTooLarge, "")
	}
}

// A body that stalls is the client's time-out, though the server reports its failure to read as the client's leave.
func TestBodiesThatBreakOff(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	for name, tt := range map[string]struct {
		ctx  context.Context
		err  error
		want int
	}{
		"it stalls":          {gone, os.ErrDeadlineExceeded, http.StatusRequestTimeout},
		"its chunks are off": {t.Context(), errors.New("malformed chunked encoding"), http.StatusBadRequest},
		"the client leaves":  {gone, io.ErrUnexpectedEOF, 499},
	} {
		rec := httptest.NewRecorder()
		req := httptest.NewRequestWithContext(tt.ctx, http.MethodPost, "/v1/jobs", io.MultiReader(strings.NewReader(`{"body":`), iotest.ErrReader(tt.err)))
		req.ContentLength = 100
		e.server.Handler().ServeHTTP(rec, req)
		if rec.Code != tt.want || rec.Header().Get("X-Request-Id") == "" {
			t.Errorf("%s: %d %s", name, rec.Code, rec.Body)
		}
	}
}
