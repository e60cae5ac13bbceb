package testenv

import (
	"path/filepath"
	"testing"

	"github.com/millrace/millrace/internal/ledger"
)

// Ledger gives a store with the newest schema in a SQLite file of the test's own.
func Ledger(t testing.TB) *ledger.Store {
	t.Helper()
	return OpenLedger(t, "sqlite:"+filepath.Join(t.TempDir(), "ledger.db"))
}

// OpenLedger brings the database to the newest schema and opens it until the test ends.
func OpenLedger(t testing.TB, url string) *ledger.Store {
	t.Helper()
	cfg := ledger.Config{URL: url}
	if _, _, err := ledger.Migrate(t.Context(), cfg, Log(t)); err != nil {
		t.Fatal(err)
	}
	s, err := ledger.Open(t.Context(), cfg, Log(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}
