package ledger_test

import (
	"database/sql"
	"errors"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
	"github.com/millrace/millrace/internal/testenv"
)

// newest is the schema that this build knows.
const newest = 3

// raw opens a database without the store.
func raw(t testing.TB, url string) *sql.DB {
	t.Helper()
	driver := "pgx"
	if path, ok := strings.CutPrefix(url, "sqlite:"); ok {
		driver, url = "sqlite", path+"?_pragma=foreign_keys(1)"
	}
	db, err := sql.Open(driver, url)
	ok(t, err)
	t.Cleanup(func() { ok(t, db.Close()) })
	return db
}

// eachURL runs a test on an empty database of each kind.
func eachURL(t *testing.T, f func(*testing.T, string)) {
	t.Parallel()
	for name, url := range kinds {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f(t, url(t))
		})
	}
}

func TestSchemaGoesUpAndDown(t *testing.T) {
	eachURL(t, func(t *testing.T, url string) {
		ctx, cfg, log := t.Context(), ledger.Config{URL: url}, testenv.Log(t)
		refused := func(words ...string) {
			t.Helper()
			_, err := ledger.Open(ctx, cfg, log)
			want(t, err, ledger.ErrSchema)
			for _, w := range words {
				if err != nil && !strings.Contains(err.Error(), w) {
					t.Errorf("%q is not in: %v", w, err)
				}
			}
		}
		refused("run `millrace migrate`")
		up := func(wantFrom, wantTo int64) {
			t.Helper()
			from, to, err := ledger.Migrate(ctx, cfg, log)
			ok(t, err)
			if from != wantFrom || to != wantTo {
				t.Errorf("it went from %d to %d, not from %d to %d", from, to, wantFrom, wantTo)
			}
		}
		up(0, newest)
		up(newest, newest)
		s, err := ledger.Open(ctx, cfg, log)
		ok(t, err)
		tenants(t, s)
		started(t, s, "batch_1", 1)
		ok(t, s.Close())
		have, steps, err := ledger.Schema(ctx, cfg, log)
		ok(t, err)
		if have != newest || len(steps) != newest || steps[0].Version != 1 || steps[0].Name != "00001_ledger.sql" || steps[1].Name != "00002_scaling.sql" || steps[2].Name != "00003_deleted.sql" || steps[0].Applied.IsZero() {
			t.Errorf("version %d, steps %+v", have, steps)
		}

		for _, to := range []int64{-1, newest + 1} {
			if _, _, err := ledger.MigrateDown(ctx, cfg, to, log); err == nil || !strings.Contains(err.Error(), "0..3") {
				t.Errorf("down to %d: %v", to, err)
			}
		}
		from, at, err := ledger.MigrateDown(ctx, cfg, 0, log)
		ok(t, err)
		if from != newest || at != 0 {
			t.Errorf("it went from %d to %d", from, at)
		}
		have, steps, err = ledger.Schema(ctx, cfg, log)
		ok(t, err)
		if have != 0 || !steps[0].Applied.IsZero() {
			t.Errorf("version %d, steps %+v", have, steps)
		}
		refused("run `millrace migrate`")
		up(0, newest)
		s, err = ledger.Open(ctx, cfg, log)
		ok(t, err)
		all, err := s.Tenants(ctx)
		ok(t, err)
		same(t, all, []ledger.Tenant{{ID: job.DefaultTenant, Weight: 100}})
		ok(t, s.Close())
	})
}

func TestAnUnknownSchemaIsRefused(t *testing.T) {
	eachURL(t, func(t *testing.T, url string) {
		ctx, cfg, log := t.Context(), ledger.Config{URL: url}, testenv.Log(t)
		_, _, err := ledger.Migrate(ctx, cfg, log)
		ok(t, err)
		_, err = raw(t, url).ExecContext(ctx, "INSERT INTO millrace_schema (version_id, is_applied) VALUES (99, $1)", true)
		ok(t, err)
		_, err = ledger.Open(ctx, cfg, log)
		want(t, err, ledger.ErrSchema)
		_, _, up := ledger.Migrate(ctx, cfg, log)
		want(t, up, ledger.ErrSchema)
		_, _, down := ledger.MigrateDown(ctx, cfg, 0, log)
		want(t, down, ledger.ErrSchema)
		for _, err := range []error{err, up, down} {
			if !strings.Contains(err.Error(), "version 99") || !strings.Contains(err.Error(), "run a newer millrace") {
				t.Error(err)
			}
		}
		have, _, err := ledger.Schema(ctx, cfg, log)
		ok(t, err)
		same(t, have, int64(99))
	})
	t.Run("a file that is not there", func(t *testing.T) {
		t.Parallel()
		path := filepath.Join(t.TempDir(), "no", "ledger.db")
		_, err := ledger.Open(t.Context(), ledger.Config{URL: "sqlite:" + path}, testenv.Log(t))
		if !errors.Is(err, ledger.ErrSchema) || !strings.Contains(err.Error(), path) {
			t.Error(err)
		}
	})
}

func TestManyMigrateAtOnce(t *testing.T) {
	eachURL(t, func(t *testing.T, url string) {
		var wg sync.WaitGroup
		for range 6 {
			wg.Go(func() {
				_, to, err := ledger.Migrate(t.Context(), ledger.Config{URL: url}, testenv.Log(t))
				if err != nil || to != newest {
					t.Errorf("to %d: %v", to, err)
				}
			})
		}
		wg.Wait()
		s, err := ledger.Open(t.Context(), ledger.Config{URL: url}, testenv.Log(t))
		ok(t, err)
		ok(t, s.Close())
	})
}

// TestRowsOfTheFirstSchema: what an older build has written is read as it was meant, and this build writes the same.
func TestRowsOfTheFirstSchema(t *testing.T) {
	eachURL(t, func(t *testing.T, url string) {
		ctx := t.Context()
		s := testenv.OpenLedger(t, url)
		db := raw(t, url)
		line, param := int64(3), "body.model"
		tenant := ledger.Tenant{
			ID: acme, Name: "Acme <&>", Weight: 300, Created: noon, Disabled: true,
			Limits: ledger.Limits{RequestsPerMinute: 1, TokensPerMinute: 2, Running: 3, RunningTokens: 4, Queued: 5, QueuedTokens: 6, FileBytes: 7},
		}
		key := ledger.Key{
			ID: "key_1", Tenant: acme, Name: "ci", Prefix: "sk-mr-abcd", Scopes: []ledger.Scope{ledger.Inference, ledger.Batches}, Models: []job.Model{"a/b"}, Limits: ledger.Limits{Running: 1},
			Created: noon, Expires: noon + 1, Revoked: noon + 2, LastUsed: noon + 3,
		}
		full := ledger.Batch{
			ID: "batch_1", Tenant: acme, Key: "key_1", Endpoint: job.ChatCompletions, InputFile: "file-1", Window: "24h", Models: []job.Model{"m", "n"}, Metadata: map[string]string{"a": "<b>", "": "x"},
			OutputExpires: 3600, RetryOf: "batch_0", Status: ledger.Finalizing, Late: true, Errors: []job.LineError{{Code: "c", Message: "m", Param: &param, Line: &line}, {Code: "d", Message: "n"}},
			Model: "m", OutputFile: "file-2", ErrorFile: "file-3", Total: 5, Done: 3, Bad: 1, Tokens: 500, TokensDone: 400,
			Usage:   job.Usage{PromptTokens: 1, CompletionTokens: 2, TotalTokens: 3, CachedTokens: 4, ReasoningTokens: 5},
			Created: noon, InProgress: noon + 1, Expires: noon + 2, Finalizing: noon + 3, Completed: noon + 4, Failed: noon + 5, Expired: noon + 6, Cancelling: noon + 7, Cancelled: noon + 8,
		}
		empty := ledger.Batch{ID: "batch_2", Tenant: acme, Status: ledger.Failed}
		// The columns that hold JSON, and those whose values are words: they outlive a build.
		for _, text := range []string{
			`INSERT INTO tenants (id, name, weight, limits, created, disabled) VALUES ('acme', 'Acme <&>', 300,
				'{"requests_per_minute":1,"tokens_per_minute":2,"running":3,"running_tokens":4,"queued":5,"queued_tokens":6,"file_bytes":7}', 1772366400000, 1)`,
			`INSERT INTO api_keys (id, tenant, hash, name, prefix, scopes, models, limits, created, expires, revoked, last_used) VALUES ('key_1', 'acme', 'f', 'ci', 'sk-mr-abcd',
				'["inference","batches"]', '["a/b"]', '{"running":1}', 1772366400000, 1772366400001, 1772366400002, 1772366400003)`,
			`INSERT INTO batches (id, tenant, api_key, endpoint, input_file, completion_window, models, metadata, output_expires, retry_of, status, live, late, errors, model, output_file, error_file,
				total, done, bad, tokens, tokens_done, prompt_tokens, completion_tokens, total_tokens, cached_tokens, reasoning_tokens,
				created, in_progress, expires, finalizing, completed, failed, expired, cancelling, cancelled) VALUES
				('batch_1', 'acme', 'key_1', '/v1/chat/completions', 'file-1', '24h', '["m","n"]', '{"":"x","a":"\u003cb\u003e"}', 3600, 'batch_0', 'finalizing', 1, 1,
				'[{"code":"c","message":"m","param":"body.model","line":3},{"code":"d","message":"n","param":null,"line":null}]', 'm', 'file-2', 'file-3',
				5, 3, 1, 500, 400, 1, 2, 3, 4, 5,
				1772366400000, 1772366400001, 1772366400002, 1772366400003, 1772366400004, 1772366400005, 1772366400006, 1772366400007, 1772366400008)`,
			`INSERT INTO batches (id, tenant, api_key, endpoint, input_file, completion_window, models, metadata, output_expires, retry_of, status, live, late, errors, model, output_file, error_file,
				total, done, bad, tokens, tokens_done, prompt_tokens, completion_tokens, total_tokens, cached_tokens, reasoning_tokens,
				created, in_progress, expires, finalizing, completed, failed, expired, cancelling, cancelled) VALUES
				('batch_2', 'acme', '', '', '', '', 'null', 'null', 0, '', 'failed', 0, 0, 'null', '', '', '', 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)`,
		} {
			_, err := db.ExecContext(ctx, text)
			ok(t, err)
		}
		gotTenant, err := s.Tenant(ctx, acme)
		ok(t, err)
		same(t, *gotTenant, tenant)
		gotKey, err := s.Key(ctx, "key_1")
		ok(t, err)
		same(t, *gotKey, key)
		for _, b := range []ledger.Batch{full, empty} {
			got, err := s.Batch(ctx, acme, b.ID)
			ok(t, err)
			same(t, *got, b)
		}

		// And back.
		again := tenant
		again.ID = "again"
		_, err = s.CreateTenant(ctx, again)
		ok(t, err)
		for i, b := range []ledger.Batch{full, empty} {
			b.ID, b.Tenant = []string{"batch_1_again", "batch_2_again"}[i], "again"
			ok(t, s.CreateBatch(ctx, b))
		}
		_, fresh, err := s.CreateKey(ctx, ledger.Key{Tenant: "again", Name: key.Name, Scopes: key.Scopes, Models: key.Models, Limits: key.Limits, Expires: key.Expires})
		ok(t, err)
		read := func(columns, table, id string) []string {
			t.Helper()
			n := len(strings.Split(columns, ","))
			values, into := make([]string, n), make([]any, n)
			for i := range values {
				into[i] = &values[i]
			}
			ok(t, db.QueryRowContext(ctx, "SELECT "+columns+" FROM "+table+" WHERE id = $1", id).Scan(into...))
			return values
		}
		for _, pair := range []struct{ columns, table, old, now string }{
			{"name, weight, limits, created, disabled", "tenants", "acme", "again"},
			{"name, scopes, models, limits, expires", "api_keys", "key_1", fresh.ID},
			{"models, metadata, status, live, late, errors, endpoint, created, cancelled, reasoning_tokens", "batches", "batch_1", "batch_1_again"},
			{"models, metadata, status, live, late, errors, endpoint, created, cancelled, reasoning_tokens", "batches", "batch_2", "batch_2_again"},
		} {
			if d := cmp.Diff(read(pair.columns, pair.table, pair.old), read(pair.columns, pair.table, pair.now)); d != "" {
				t.Errorf("%s (-old +new)\n%s", pair.table, d)
			}
		}
	})
}
