package api_test

import (
	"io"
	"net/http"
	"strings"
	"testing"

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
