package main

import (
	"encoding/json"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/millrace/millrace/internal/client"
	"github.com/millrace/millrace/internal/ledger"
	"github.com/millrace/millrace/internal/testenv"
)

// TestKeysWithoutAnAPI: the first key is made on the database itself.
func TestKeysWithoutAnAPI(t *testing.T) {
	t.Parallel()
	data := t.TempDir()
	there := []string{"--data", data}
	if r := millrace(t, nil, "", "keys", "list", "--data", data); r.code == 0 || !strings.Contains(r.err, "no database") {
		t.Errorf("a folder without a database: %+v", r)
	}
	r := millrace(t, nil, "", append([]string{"keys", "create", "--scope", "admin", "--name", "mine"}, there...)...)
	secret := strings.TrimSuffix(r.out, "\n")
	if r.code != 0 || !strings.HasPrefix(secret, "sk-mr-") || strings.ContainsAny(secret, " \n") || !strings.Contains(r.err, "only time") || strings.Contains(r.err, secret) {
		t.Fatalf("got %+v", r)
	}
	if r := millrace(t, nil, "", append([]string{"tenants", "create", "acme", "--weight", "200", "--file-bytes", "1GiB", "--queued", "10"}, there...)...); r.code != 0 || !strings.Contains(r.out, "queued 10, file-bytes 1,073,741,824") {
		t.Errorf("got %+v", r)
	}
	var k client.Key
	r = millrace(t, nil, "", append([]string{"keys", "create", "--tenant", "acme", "--model", "m1,m2", "--expires-in", "1h", "--requests-per-minute", "60", "-o", "json"}, there...)...)
	if err := json.Unmarshal([]byte(r.out), &k); err != nil || k.Tenant != "acme" || len(k.Models) != 2 || k.ExpiresAt == nil || k.Secret == "" || *k.Limits["requests_per_minute"] != 60 || r.err != "" {
		t.Fatalf("%v: %+v", err, r)
	}
	// The same on its URL, and with the environment.
	env := map[string]string{"MILLRACE_DATABASE_URL": "sqlite:" + filepath.Join(data, "millrace.db")}
	if r := millrace(t, env, "", "keys", "list"); r.code != 0 || !strings.Contains(r.out, k.ID) || !strings.Contains(r.out, "mine") || strings.Contains(r.out, k.Secret) {
		t.Errorf("got %+v", r)
	}
	r = millrace(t, env, "", "keys", "rotate", k.ID, "--grace", "0s")
	if r.code != 0 || !strings.HasPrefix(r.out, "sk-mr-") || strings.TrimSpace(r.out) == k.Secret {
		t.Errorf("got %+v", r)
	}
	store, err := ledger.Open(t.Context(), ledger.Config{URL: env["MILLRACE_DATABASE_URL"]}, testenv.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	keys, err := store.Keys(t.Context(), "acme")
	if err != nil || len(keys) != 2 {
		t.Fatalf("%v: %+v", err, keys)
	}
	ids := make([]string, 0, 2)
	for _, k := range keys {
		ids = append(ids, k.ID)
	}
	if r := millrace(t, env, "", append([]string{"keys", "revoke"}, ids...)...); r.code != 0 || strings.Count(r.out, "revoked") != 2 {
		t.Errorf("got %+v", r)
	}
	if r := millrace(t, env, "", "tenants", "update", "acme", "--disable", "--queued", "0"); r.code != 0 || !strings.Contains(r.out, "disabled") || strings.Contains(r.out, "queued") {
		t.Errorf("got %+v", r)
	}
	if r := millrace(t, env, "", "usage"); r.code != 0 || r.out != "nothing was used\n" {
		t.Errorf("got %+v", r)
	}
	if r := millrace(t, env, "", "tenants", "delete", "acme"); r.code != 0 || r.out != "acme deleted\n" {
		t.Errorf("got %+v", r)
	}
	for _, tt := range []struct {
		args []string
		want string
	}{
		{[]string{"tenants", "delete", "acme"}, `no tenant "acme"`},
		{[]string{"tenants", "delete", "default"}, "always exists"},
		{[]string{"tenants", "create", "a b"}, "id is"},
		{[]string{"tenants", "create", "default"}, "already"},
		{[]string{"tenants", "update", "default"}, "nothing"},
		{[]string{"tenants", "update", "default", "--weight", "0"}, "weight is 0"},
		{[]string{"tenants", "update", "default", "--queued", "-1"}, "limits.queued is -1"},
		{[]string{"keys", "create", "--tenant", "nobody"}, `no tenant "nobody"`},
		{[]string{"keys", "create", "--scope", "root"}, `"root"`},
		{[]string{"keys", "create", "--expires-in", "-1s"}, "expires-in is -1s"},
		{[]string{"keys", "rotate", "key_x"}, `no key "key_x"`},
		{[]string{"keys", "rotate", keys[0].ID}, "revoked or expired"},
		{[]string{"keys", "revoke", "key_x"}, `no key "key_x"`},
		{[]string{"usage", "--by", "hour"}, `"hour"`},
		{[]string{"usage", "--from", "yesterday"}, `"yesterday"`},
		{[]string{"usage", "--data", "x"}, "choose one"},
	} {
		if r := millrace(t, env, "", tt.args...); r.code == 0 || !strings.Contains(r.err, tt.want) || strings.Count(r.err, "\n") != 1 {
			t.Errorf("%v: %+v, want %s", tt.args, r, tt.want)
		}
	}
}

// TestAdministrationThroughTheAPI: the same commands ask a running platform, which a key closes while it runs.
func TestAdministrationThroughTheAPI(t *testing.T) {
	t.Parallel()
	_, url := startUp(t, "--data", t.TempDir())
	env := map[string]string{"MILLRACE_URL": url}
	if r := millrace(t, env, "", "tenants", "create", "acme", "--tokens-per-minute", "1000"); r.code != 0 {
		t.Fatalf("%+v", r)
	}
	r := millrace(t, env, "", "keys", "create", "--scope", "admin")
	if r.code != 0 {
		t.Fatalf("%+v", r)
	}
	admin := strings.TrimSpace(r.out)
	for end := time.Now().Add(10 * time.Second); millrace(t, env, "", "keys", "list").code == 0; time.Sleep(10 * time.Millisecond) { // no event tells that a process has looked
		if time.Now().After(end) {
			t.Fatal("the platform stays open")
		}
	}
	if r := millrace(t, env, "", "keys", "list"); !strings.Contains(r.err, "401") || !strings.Contains(r.err, "MILLRACE_ADMIN_KEY") {
		t.Errorf("%+v", r)
	}
	settings := filepath.Join(t.TempDir(), "millrace.yaml")
	if err := os.WriteFile(settings, []byte("admin-key: "+admin+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, cmd := range [][]string{{"status"}, {"drain", "nobody"}, {"pools", "list"}, {"tenants", "list"}} {
		if r := millrace(t, env, "", cmd...); r.code != exitFailed || !strings.Contains(r.err, "401") || !strings.Contains(r.err, "set MILLRACE_ADMIN_KEY") {
			t.Errorf("%v without a key: %+v", cmd, r)
		}
		wrong := map[string]string{"MILLRACE_URL": url, "MILLRACE_ADMIN_KEY": "wrong", "MILLRACE_API_KEY": admin}
		if r := millrace(t, wrong, "", cmd...); r.code != exitFailed || !strings.Contains(r.err, "set MILLRACE_ADMIN_KEY") {
			t.Errorf("%v with the wrong one of two keys: %+v", cmd, r)
		}
		for _, flags := range [][]string{{"--admin-key", admin}, {"--config", settings}} {
			if r := millrace(t, env, "", append(cmd, flags...)...); strings.Contains(r.err, "401") || (r.code == 0) != (cmd[0] != "drain") {
				t.Errorf("%v with %s: %+v", cmd, flags[0], r)
			}
		}
	}
	env["MILLRACE_ADMIN_KEY"] = admin
	for _, tt := range []struct{ args, want string }{
		{"drain nobody", "`millrace status`"},
		{"tenants update nope --weight 5", "`millrace tenants list`"},
		{"tenants create acme", "`millrace tenants update`"},
		{"keys revoke key_nope", "`millrace keys list`"},
		{"pools get nope", "`millrace pools list`"},
	} {
		if r := millrace(t, env, "", strings.Fields(tt.args)...); r.code != exitFailed || !strings.Contains(r.err, tt.want) || strings.Count(r.err, "\n") != 1 {
			t.Errorf("%s: %+v", tt.args, r)
		}
	}
	r = millrace(t, env, "", "keys", "create", "--tenant", "acme", "--requests-per-minute", "7")
	if r.code != 0 {
		t.Fatalf("%+v", r)
	}
	env["MILLRACE_API_KEY"] = strings.TrimSpace(r.out)
	r = millrace(t, env, "", "keys", "list", "--tenant", "acme", "-o", "json")
	var keys []client.Key
	if err := json.Unmarshal([]byte(r.out), &keys); err != nil || len(keys) != 1 || *keys[0].Limits["requests_per_minute"] != 7 || !slices.Equal(keys[0].Scopes, []string{"inference", "batches"}) {
		t.Fatalf("%v: %+v", err, r)
	}
	if r := millrace(t, env, "", "keys", "rotate", keys[0].ID); r.code != 0 || !strings.HasPrefix(r.out, "sk-mr-") || !strings.Contains(r.err, "1h0m0s") {
		t.Errorf("%+v", r)
	}
	if r := millrace(t, env, "", "tenants", "update", "acme", "--name", "A", "--tokens-per-minute", "0"); r.code != 0 || strings.Contains(r.out, "1,000") {
		t.Errorf("%+v", r)
	}
	if r := millrace(t, env, "", "tenants", "list", "-o", "json"); r.code != 0 || !strings.Contains(r.out, `"name": "A"`) {
		t.Errorf("%+v", r)
	}
	for _, args := range [][]string{{"usage"}, {"usage", "--by", "tenant"}} {
		if r := millrace(t, env, "", args...); r.code != 0 || r.out != "nothing was used\n" {
			t.Errorf("%v: %+v", args, r)
		}
	}
	delete(env, "MILLRACE_ADMIN_KEY") // a tenant's own
	if r := millrace(t, env, "", "status"); r.code != exitFailed || !strings.Contains(r.err, "403") || !strings.Contains(r.err, "set MILLRACE_ADMIN_KEY") {
		t.Errorf("%+v", r)
	}
	if r := millrace(t, env, "", "batch", "get", "batch_nope"); !strings.Contains(r.err, "`millrace batch list`") {
		t.Errorf("%+v", r)
	}
	if r := millrace(t, env, "", "jobs", "get", "job_nope"); !strings.Contains(r.err, "`millrace jobs list`") {
		t.Errorf("%+v", r)
	}
	if r := millrace(t, env, "", "usage"); r.code != 0 {
		t.Errorf("%+v", r)
	}
	if r := millrace(t, env, "", "usage", "--tenant", "default"); r.code == 0 || !strings.Contains(r.err, "403 permission_denied") {
		t.Errorf("%+v", r)
	}
	if r := millrace(t, env, "", "tenants", "delete", "acme"); r.code == 0 || !strings.Contains(r.err, "admin") {
		t.Errorf("%+v", r)
	}
	env["MILLRACE_ADMIN_KEY"] = admin
	if r := millrace(t, env, "", "tenants", "delete", "acme"); r.code == 0 || !strings.Contains(r.err, "tenant_in_use") {
		t.Errorf("%+v", r)
	}
	if r := millrace(t, env, "", "keys", "revoke", keys[0].ID); r.code != 0 || r.out != keys[0].ID+" revoked\n" {
		t.Errorf("%+v", r)
	}
}

// TestListeningEverywhereNeedsAKey: the message tells how to make the first one, and that is all it takes.
func TestListeningEverywhereNeedsAKey(t *testing.T) {
	t.Parallel()
	data := t.TempDir()
	l, err := net.Listen("tcp", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	l.Close()
	r := millrace(t, nil, "", "up", "--data", data, "--listen", addr, "--metrics-listen", "off")
	if r.code == 0 || !strings.Contains(r.err, "millrace keys create --database-url") || !strings.Contains(r.err, "--insecure") {
		t.Errorf("%+v", r)
	}
}
