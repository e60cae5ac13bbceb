package engine_test

import (
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"

	"go.uber.org/goleak"

	"github.com/millrace/millrace/internal/engine"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func discard() *slog.Logger { return slog.New(slog.DiscardHandler) }

// testdata reads a file of the folder testdata.
func testdata(t testing.TB, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("testdata", filepath.FromSlash(path)))
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// abort breaks the connection off.
func abort(t *testing.T, w http.ResponseWriter) {
	conn, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		t.Errorf("taking the connection: %v", err)
		return
	}
	_ = conn.Close()
}

// routes are what a test's engine serves.
type routes map[string]http.HandlerFunc

func page(body []byte) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(body) }
}

func status(code int, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(code)
		_, _ = io.WriteString(w, body)
	}
}

// start serves rs and returns a client of it.
func start(t *testing.T, cfg engine.Config, rs routes) *engine.Engine {
	t.Helper()
	mux := http.NewServeMux()
	for pattern, handler := range rs {
		mux.HandleFunc(pattern, handler)
	}
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	cfg.URL = server.URL
	return client(t, cfg)
}

func client(t *testing.T, cfg engine.Config) *engine.Engine {
	t.Helper()
	e, err := engine.New(cfg, discard())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	return e
}
