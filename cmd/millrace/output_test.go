package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestEveryCommandPrintsJSON(t *testing.T) {
	t.Parallel()
	// These run until they are stopped, answer by their exit code, or print what is JSON lines or an answer as it comes.
	others := []string{"up", "demo", "api", "dispatcher", "autoscaler", "worker", "emulator", "health", "jobs watch", "batch results"}
	for _, cmd := range descendants(newRoot(&program{lookup: lookup(nil)})) {
		path := strings.TrimSpace(strings.TrimPrefix(cmd.CommandPath(), "millrace"))
		if cmd.Hidden || (cmd.HasSubCommands() && path != "migrate") || slices.Contains(others, path) {
			continue
		}
		if f := cmd.Flags().Lookup("output"); f == nil || f.Value.Type() != "format" {
			t.Errorf("%s has no JSON", cmd.CommandPath())
		}
	}
}

// TestOfSeveralThingsJSONListsThoseThatWereDone: also when one of them fails.
func TestOfSeveralThingsJSONListsThoseThatWereDone(t *testing.T) {
	t.Parallel()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.Contains(r.URL.Path, "gone") || r.Method == http.MethodPut {
			w.WriteHeader(http.StatusNotFound)
			_, _ = fmt.Fprint(w, `{"error":{"message":"There is none.","type":"invalid_request_error","param":null,"code":"job_not_found"}}`)
			return
		}
		_, _ = fmt.Fprint(w, `{"id":"x","name":"x","status":"cancelled","spec":{}}`)
	}))
	defer s.Close()
	env := map[string]string{"MILLRACE_URL": s.URL}
	for _, args := range [][]string{
		{"jobs", "cancel", "x"}, {"jobs", "delete", "x"}, {"batch", "cancel", "x"}, {"tenants", "delete", "x"}, {"keys", "revoke", "x"}, {"pools", "delete", "x"},
	} {
		one := millrace(t, env, "", append(args, "-o", "json")...)
		some := millrace(t, env, "", append(args, "gone", "-o", "json")...)
		none := millrace(t, env, "", args[0], args[1], "gone", "-o", "json")
		var all []struct{ ID, Name string }
		if err := json.Unmarshal([]byte(one.out), &all); err != nil || one.code != 0 || len(all) != 1 || all[0].ID+all[0].Name == "" || one.err != "" {
			t.Errorf("%v: %v: %+v", args, err, one)
		}
		if some.out != one.out || some.code != exitFailed || !strings.Contains(some.err, "There is none.") {
			t.Errorf("%v: one of two: %+v", args, some)
		}
		if none.out != "" || none.code != exitFailed {
			t.Errorf("%v: none: %+v", args, none)
		}
	}
	r := millrace(t, env, "pools:\n  - name: x\n    models: [m]\n    provider: process\n    engine: {command: [serve]}\n    shape: {gpus: 1}\n    max: 4\n", "pools", "apply", "-f", "-", "-o", "json")
	var all []struct{ Name, Result string }
	if err := json.Unmarshal([]byte(r.out), &all); err != nil || r.code != 0 || len(all) != 1 || all[0].Name != "x" || all[0].Result != "made" {
		t.Errorf("%v: %+v", err, r)
	}
}

func TestMigrateAsJSON(t *testing.T) {
	t.Parallel()
	env := map[string]string{"MILLRACE_DATABASE_URL": "sqlite:" + filepath.Join(t.TempDir(), "millrace.db")}
	ask := func(into any, args ...string) {
		t.Helper()
		r := millrace(t, env, "", append(append([]string{"migrate"}, args...), "-o", "json")...)
		if err := json.Unmarshal([]byte(r.out), into); err != nil || r.code != 0 {
			t.Fatalf("%v: %v: %+v", args, err, r)
		}
	}
	var first, again, back migration
	var before, after schema
	ask(&first)
	ask(&again, "up")
	ask(&before, "status")
	ask(&back, "down", "--to", "0")
	ask(&after, "status")
	newest := first.To
	if diff := cmp.Diff([]migration{{0, newest}, {newest, newest}, {newest, 0}}, []migration{first, again, back}); diff != "" || newest == 0 {
		t.Error(diff)
	}
	if n := len(before.Steps); before.Version != newest || n == 0 || !before.Steps[n-1].Applied || before.Steps[0].AppliedAt == nil || before.Steps[0].Version != 1 {
		t.Errorf("before: %+v", before)
	}
	if after.Version != 0 || len(after.Steps) != len(before.Steps) || after.Steps[0].Applied || after.Steps[0].AppliedAt != nil {
		t.Errorf("after: %+v", after)
	}
}
