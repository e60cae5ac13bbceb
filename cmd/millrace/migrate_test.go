package main

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/millrace/millrace/internal/testenv"
)

func TestMigrate(t *testing.T) {
	t.Parallel()
	for kind, url := range map[string]string{"sqlite": "sqlite:" + filepath.Join(t.TempDir(), "new", "millrace.db"), "postgres": testenv.Postgres(t)} {
		env := map[string]string{"MILLRACE_DATABASE_URL": url}
		for _, step := range []struct {
			args string
			code int
			want []string
		}{
			{"migrate down", exitUsage, []string{"--to"}},
			{"migrate", 0, []string{"from version 0 to 3"}},
			{"migrate up", 0, []string{"at version 3 already"}},
			{"migrate status", 0, []string{"00001_ledger.sql", "00002_scaling.sql", "00003_deleted.sql", "applied 20"}},
			{"migrate down --to 4", exitFailed, []string{"0..3, not to 4"}},
			{"migrate down --to 0", 0, []string{"from version 3 to 0", "is gone"}},
			{"migrate status", 0, []string{"00001_ledger.sql", "missing: run `millrace migrate`"}},
			{"migrate down --to 0", 0, []string{"at version 0 already"}},
			{"migrate up now", exitUsage, []string{"now"}},
		} {
			r := millrace(t, env, "", strings.Fields(step.args)...)
			for _, w := range step.want {
				if r.code != step.code || !strings.Contains(r.out+r.err, w) {
					t.Errorf("%s, %s: %+v does not say %q with code %d", kind, step.args, r, w, step.code)
				}
			}
		}
	}
	for url, want := range map[string]string{
		"": "--database-url", "mysql://u:s3cret@h/d": "postgres:// or sqlite:", "postgres://u:s3cret@127.0.0.1:1/d": "is it there", "postgres://u:s3cret%zz@h/d": "cannot be read",
	} {
		r := millrace(t, map[string]string{"MILLRACE_DATABASE_URL": url, "MILLRACE_WAIT": "1ms"}, "", "migrate")
		if r.code == 0 || !strings.Contains(r.err, want) || strings.Contains(r.err, "s3cret") {
			t.Errorf("%q: %+v", url, r)
		}
	}
}
