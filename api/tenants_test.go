package api_test

import (
	"encoding/json"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/millrace/millrace/api"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
)

const adminHeader = "Authorization: Bearer sk-admin"

// admin sends an operator's request that must be answered with status.
func (e *env) admin(status int, method, path, body string) map[string]any {
	e.t.Helper()
	a := e.send(method, path, body, adminHeader)
	if a.status != status {
		e.t.Fatalf("%s %s: %d %s", method, path, a.status, a.body)
	}
	return a.object(e.t)
}

func TestTenantsAreAdministered(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{AdminKey: "sk-admin"})
	made := e.admin(200, "POST", "/admin/v1/tenants", `{"id":"acme","name":"Acme","limits":{"running":7,"queued":null}}`)
	limits := made["limits"].(map[string]any)
	if made["object"] != "tenant" || made["weight"] != 100.0 || made["disabled"] != false || len(limits) != 7 || limits["running"] != 7.0 || limits["queued"] != nil || made["created_at"].(float64) < 1e9 {
		t.Errorf("made: %v", made)
	}
	changed := e.admin(200, "PATCH", "/admin/v1/tenants/acme", `{"weight":5,"disabled":true,"limits":{"tokens_per_minute":10}}`)
	limits = changed["limits"].(map[string]any)
	if changed["name"] != "Acme" || changed["weight"] != 5.0 || changed["disabled"] != true || limits["running"] != 7.0 || limits["tokens_per_minute"] != 10.0 {
		t.Errorf("changed: %v", changed)
	}
	changed = e.admin(200, "PATCH", "/admin/v1/tenants/acme", `{"name":null,"limits":{"running":null,"tokens_per_minute":0}}`)
	limits = changed["limits"].(map[string]any)
	if changed["name"] != "Acme" || limits["running"] != nil || limits["tokens_per_minute"] != nil {
		t.Errorf("taken away: %v", changed)
	}
	list := e.admin(200, "GET", "/admin/v1/tenants", "")
	if data := list["data"].([]any); len(data) != 2 || list["first_id"] != "acme" || list["last_id"] != "default" {
		t.Errorf("listed: %v", list)
	}
	for _, tt := range []struct {
		method, path, body string
		status             int
		code               job.Code
		param              string
	}{
		{"POST", "", `{"id":"acme"}`, 409, job.CodeTenantExists, "id"},
		{"POST", "", `{}`, 400, job.CodeMissingParameter, "id"},
		{"POST", "", `{"id":"a b"}`, 400, job.CodeInvalidValue, "id"},
		{"POST", "", `{"id":7}`, 400, job.CodeInvalidType, "id"},
		{"POST", "", `{"id":"b","wieght":1}`, 400, job.CodeUnsupportedParameter, "wieght"},
		{"POST", "", `{"id":"b","weight":0}`, 400, job.CodeInvalidValue, "weight"},
		{"POST", "", `{"id":"b","weight":1.5}`, 400, job.CodeInvalidType, "weight"},
		{"POST", "", `{"id":"b","limits":[]}`, 400, job.CodeInvalidType, "limits"},
		{"POST", "", `{"id":"b","limits":{"rpm":1}}`, 400, job.CodeUnsupportedParameter, "limits.rpm"},
		{"POST", "", `{"id":"b","limits":{"queued":-1}}`, 400, job.CodeInvalidValue, "limits.queued"},
		{"POST", "", `{"id":"b","limits":{"queued":"1"}}`, 400, job.CodeInvalidType, "limits.queued"},
		{"POST", "", `{"id":"b","name":"` + strings.Repeat("x", 201) + `"}`, 400, job.CodeInvalidValue, "name"},
		{"POST", "", `[]`, 400, job.CodeInvalidType, ""},
		{"PATCH", "/nobody", `{}`, 404, job.CodeTenantNotFound, "id"},
		{"PATCH", "/acme", `{"id":"other"}`, 400, job.CodeUnsupportedParameter, "id"},
		{"PATCH", "/acme", `{"weight":1001}`, 400, job.CodeInvalidValue, "weight"},
		{"GET", "/nobody", "", 404, job.CodeTenantNotFound, "id"},
		{"DELETE", "/nobody", "", 404, job.CodeTenantNotFound, "id"},
		{"DELETE", "/default", "", 409, job.CodeTenantInUse, ""},
	} {
		e.send(tt.method, "/admin/v1/tenants"+tt.path, tt.body, adminHeader).wantError(t, tt.status, tt.code, tt.param)
	}
	key := e.admin(200, "POST", "/admin/v1/keys", `{"tenant":"acme"}`)
	e.send("DELETE", "/admin/v1/tenants/acme", "", adminHeader).wantError(t, 409, job.CodeTenantInUse, "")
	e.admin(200, "DELETE", "/admin/v1/keys/"+key["id"].(string), "")
	if gone := e.admin(200, "DELETE", "/admin/v1/tenants/acme", ""); gone["deleted"] != true || gone["id"] != "acme" {
		t.Errorf("deleted: %v", gone)
	}
	e.send("GET", "/admin/v1/tenants/acme", "", adminHeader).wantError(t, 404, job.CodeTenantNotFound, "id")
}

// TestADeletedTenantLeavesNothingToTheNext: its jobs and their answers outlive it, so that nobody may have its id, and it goes when they have ended.
func TestADeletedTenantLeavesNothingToTheNext(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{AdminKey: "sk-admin"})
	e.known()
	e.admin(200, "POST", "/admin/v1/tenants", `{"id":"tz"}`)
	key := e.admin(200, "POST", "/admin/v1/keys", `{"tenant":"tz"}`)
	header := "Authorization: Bearer " + key["secret"].(string)
	id := e.submit(jobBody(chat(1, ""), ""), header)
	a := e.send("DELETE", "/admin/v1/tenants/tz", "", adminHeader)
	a.wantError(t, 409, job.CodeTenantInUse, "")
	if !strings.Contains(string(a.body), "1 of its jobs") {
		t.Errorf("%s", a.body)
	}
	if a := e.send("POST", "/v1/jobs/"+string(id)+"/cancel", "", header); a.status != 200 {
		t.Fatalf("cancelling: %d %s", a.status, a.body)
	}
	e.admin(200, "DELETE", "/admin/v1/keys/"+key["id"].(string), "")
	e.admin(200, "DELETE", "/admin/v1/tenants/tz", "")
	a = e.send("POST", "/admin/v1/tenants", `{"id":"tz"}`, adminHeader)
	a.wantError(t, 409, job.CodeTenantDeleted, "id")
	if !strings.Contains(string(a.body), "no id is used twice") {
		t.Errorf("%s", a.body)
	}
	e.send("POST", "/admin/v1/keys", `{"tenant":"tz"}`, adminHeader).wantError(t, 404, job.CodeTenantNotFound, "tenant")
	if list := e.admin(200, "GET", "/admin/v1/tenants", ""); len(list["data"].([]any)) != 1 {
		t.Errorf("listed: %v", list)
	}
}

func TestKeysAreAdministered(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{AdminKey: "sk-admin"})
	e.admin(200, "POST", "/admin/v1/tenants", `{"id":"acme"}`)
	a := e.send("POST", "/admin/v1/keys", `{"tenant":"acme","name":"ci","scopes":["inference"],"models":["m"],"limits":{"running":2},"expires_at":99999999999}`, adminHeader)
	made := a.object(t)
	secret, _ := made["secret"].(string)
	id, _ := made["id"].(string)
	if a.status != 200 || a.header.Get("Cache-Control") != "no-store" || len(secret) < 40 || !strings.HasPrefix(secret, made["prefix"].(string)) || made["tenant"] != "acme" || made["expires_at"] != 99999999999.0 ||
		made["revoked_at"] != nil || made["last_used_at"] != nil || len(made["limits"].(map[string]any)) != 4 {
		t.Fatalf("made: %d %s", a.status, a.body)
	}
	header := "Authorization: Bearer " + secret
	if a := e.send("GET", "/v1/jobs", "", header); a.status != 200 {
		t.Errorf("it opens nothing: %d %s", a.status, a.body)
	}
	for _, path := range []string{"/admin/v1/keys", "/admin/v1/keys?tenant=acme", "/admin/v1/keys/" + id} {
		if a := e.send("GET", path, "", adminHeader); a.status != 200 || !strings.Contains(string(a.body), id) || strings.Contains(string(a.body), secret) {
			t.Errorf("%s: %d %s", path, a.status, a.body)
		}
	}
	if a := e.send("GET", "/admin/v1/keys?tenant=default", "", adminHeader); len(a.object(t)["data"].([]any)) != 0 {
		t.Errorf("of another tenant: %s", a.body)
	}
	rotated := e.admin(200, "POST", "/admin/v1/keys/"+id+"/rotate", "")
	if rotated["secret"] == secret || rotated["id"] == id || rotated["name"] != "ci" || rotated["tenant"] != "acme" {
		t.Errorf("rotated: %v", rotated)
	}
	old := e.admin(200, "GET", "/admin/v1/keys/"+id, "")
	if left := old["expires_at"].(float64) - float64(time.Now().Unix()); left < 3000 || left > 3700 {
		t.Errorf("the old one opens for %v s yet", left)
	}
	revoked := e.admin(200, "POST", "/admin/v1/keys/"+id+"/revoke", "")
	if revoked["revoked_at"] == nil {
		t.Errorf("revoked: %v", revoked)
	}
	if again := e.admin(200, "DELETE", "/admin/v1/keys/"+id, ""); again["revoked_at"] != revoked["revoked_at"] {
		t.Errorf("revoked again: %v", again)
	}
	other := rotated["id"].(string)
	for _, tt := range []struct {
		method, path, body string
		status             int
		code               job.Code
		param              string
	}{
		{"POST", "", `{"tenant":"nobody"}`, 404, job.CodeTenantNotFound, "tenant"},
		{"POST", "", `{"scopes":[]}`, 400, job.CodeInvalidValue, "scopes"},
		{"POST", "", `{"scopes":["root"]}`, 400, job.CodeInvalidValue, "scopes"},
		{"POST", "", `{"scopes":["batches","batches"]}`, 400, job.CodeInvalidValue, "scopes"},
		{"POST", "", `{"scopes":"admin"}`, 400, job.CodeInvalidType, "scopes"},
		{"POST", "", `{"scopes":[null]}`, 400, job.CodeInvalidType, "scopes"},
		{"POST", "", `{"tenant":"acme","scopes":["admin"]}`, 400, job.CodeInvalidValue, "scopes"},
		{"POST", "", `{"models":[""]}`, 400, job.CodeInvalidValue, "models"},
		{"POST", "", `{"limits":{"queued":1}}`, 400, job.CodeInvalidValue, "limits.queued"},
		{"POST", "", `{"expires_at":1}`, 400, job.CodeInvalidValue, "expires_at"},
		{"POST", "", `{"expires_at":"tomorrow"}`, 400, job.CodeInvalidType, "expires_at"},
		{"POST", "", `{"secret":"mine"}`, 400, job.CodeUnsupportedParameter, "secret"},
		{"POST", "/" + other + "/rotate", `{"grace":"soon"}`, 400, job.CodeInvalidValue, "grace"},
		{"POST", "/" + other + "/rotate", `{"grace":"-1s"}`, 400, job.CodeInvalidValue, "grace"},
		{"POST", "/" + id + "/rotate", `{"grace":"1s"}`, 409, job.CodeKeyClosed, ""},
		{"POST", "/key_nobody/rotate", "", 404, job.CodeKeyNotFound, "id"},
		{"POST", "/key_nobody/revoke", "", 404, job.CodeKeyNotFound, "id"},
		{"GET", "/key_nobody", "", 404, job.CodeKeyNotFound, "id"},
		{"DELETE", "/key_nobody", "", 404, job.CodeKeyNotFound, "id"},
	} {
		e.send(tt.method, "/admin/v1/keys"+tt.path, tt.body, adminHeader).wantError(t, tt.status, tt.code, tt.param)
	}
	// A secret in the place of an id is not told on.
	if a := e.send("GET", "/admin/v1/keys/"+secret, "", adminHeader); a.status != 404 || strings.Contains(string(a.body), secret) {
		t.Errorf("%d %s", a.status, a.body)
	}
}

// TestTenantsAndKeysArePaged as all lists are.
func TestTenantsAndKeysArePaged(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{AdminKey: "sk-admin"})
	for _, id := range []string{"b", "a", "c"} {
		e.admin(200, "POST", "/admin/v1/tenants", `{"id":"`+id+`"}`)
	}
	for _, id := range []string{"b", "a", "c"} {
		e.admin(200, "POST", "/admin/v1/keys", `{"tenant":"`+id+`"}`)
		e.admin(200, "POST", "/admin/v1/keys", `{"tenant":"a"}`)
	}
	walk := func(path string) (ids []string) {
		t.Helper()
		for after, more := "", true; more; {
			list := e.admin(200, "GET", path+after, "")
			data := list["data"].([]any)
			for _, one := range data {
				ids = append(ids, one.(map[string]any)["id"].(string))
			}
			if n := len(data); n == 0 || list["object"] != "list" || list["first_id"] != ids[len(ids)-n] || list["last_id"] != ids[len(ids)-1] {
				t.Fatalf("%s%s: %v", path, after, list)
			}
			more = list["has_more"].(bool)
			after = "&after=" + ids[len(ids)-1]
		}
		return ids
	}
	for path, want := range map[string]int{"/admin/v1/tenants?": 4, "/admin/v1/keys?": 6, "/admin/v1/keys?tenant=a&": 4, "/admin/v1/keys?order=asc&": 6} {
		if whole, pages := walk(path), walk(path+"limit=2"); len(whole) != want || !slices.Equal(whole, pages) {
			t.Errorf("%s: %v, and in pages %v", path, whole, pages)
		}
	}
	others := walk("/admin/v1/keys?tenant=b")[0]
	for query, param := range map[string]string{
		"tenants?limit=0": "limit", "tenants?limit=10001": "limit", "tenants?limit=x": "limit", "tenants?limit=": "limit", "tenants?after=nobody": "after", "tenants?after=%00": "after",
		"keys?limit=0": "limit", "keys?limit=10001": "limit", "keys?limit=-1": "limit", "keys?after=key_none": "after", "keys?tenant=a&after=" + others: "after", "keys?order=up": "order",
	} {
		e.send("GET", "/admin/v1/"+query, "", adminHeader).wantError(t, 400, job.CodeInvalidValue, param)
	}
}

func TestUsage(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{AdminKey: "sk-admin"})
	mine := e.tenant("mine", ledger.Limits{})
	e.tenant("theirs", ledger.Limits{})
	if err := e.ledger.Lead(t.Context(), epoch); err != nil {
		t.Fatal(err)
	}
	now := e.results.Now()
	day := func(at job.Millis) string { return at.Time().UTC().Format(time.DateOnly) }
	old, today := now-job.Millis((40*24*time.Hour).Milliseconds()), now
	ended := func(tenant job.Tenant, m job.Model, key string, at job.Millis, ok bool, tokens job.Tokens) ledger.Ended {
		return ledger.Ended{Tenant: tenant, Model: m, Key: key, Group: job.NoGroup, At: at, OK: ok, Usage: job.Usage{PromptTokens: tokens, CompletionTokens: 1, TotalTokens: tokens + 1}}
	}
	if err := e.ledger.Tally(t.Context(), epoch, ledger.Position{}, ledger.Position{Stream: "s", Seq: 4}, []ledger.Ended{
		ended("mine", "m1", "key_a", today, true, 10), ended("mine", "m1", "key_b", today, false, 20), ended("mine", "m2", "key_a", old, true, 40), ended("theirs", "m1", "", today, true, 80),
	}); err != nil {
		t.Fatal(err)
	}
	type row struct {
		Day, Tenant, Model, Key *string
		Requests                int64
		Failed                  int64     `json:"failed_requests"`
		Usage                   job.Usage `json:"usage"`
	}
	ask := func(path, header string) []row {
		t.Helper()
		var list struct{ Data []row }
		a := e.send("GET", path, "", header)
		if err := json.Unmarshal(a.body, &list); err != nil || a.status != 200 {
			t.Fatalf("%s: %d %s", path, a.status, a.body)
		}
		return list.Data
	}
	if rows := ask("/admin/v1/usage", adminHeader); len(rows) != 2 || *rows[0].Tenant != "mine" || *rows[0].Day != day(today) || rows[0].Requests != 2 || rows[0].Failed != 1 || rows[0].Usage.PromptTokens != 30 || rows[0].Key != nil {
		t.Errorf("all: %+v", rows)
	}
	if rows := ask("/admin/v1/usage?by=tenant&from="+day(old), adminHeader); len(rows) != 2 || rows[0].Usage.TotalTokens != 73 || rows[0].Day != nil || *rows[1].Tenant != "theirs" {
		t.Errorf("by tenant: %+v", rows)
	}
	if rows := ask("/admin/v1/usage?by=&from=0", adminHeader); len(rows) != 1 || rows[0].Requests != 4 || rows[0].Tenant != nil {
		t.Errorf("all in one: %+v", rows)
	}
	if rows := ask("/admin/v1/usage?by=day,key&key=key_a&model=m2&to="+url.QueryEscape(day(old)), adminHeader); len(rows) != 1 || *rows[0].Key != "key_a" || *rows[0].Day != day(old) {
		t.Errorf("of a key and a model: %+v", rows)
	}
	if rows := ask("/admin/v1/usage?tenant=theirs", adminHeader); len(rows) != 1 || rows[0].Usage.PromptTokens != 80 {
		t.Errorf("of a tenant: %+v", rows)
	}
	if rows := ask("/v1/usage", mine); len(rows) != 1 || rows[0].Usage.PromptTokens != 30 || rows[0].Tenant != nil {
		t.Errorf("one's own: %+v", rows)
	}
	if rows := ask("/v1/usage?by=key", mine); len(rows) != 2 || *rows[0].Key != "key_a" {
		t.Errorf("one's own by key: %+v", rows)
	}
	for query, param := range map[string]string{"by=hour": "by", "from=yesterday": "from", "to=2026-13-01": "to", "from=2026-02-01&to=2026-01-01": "to"} {
		e.send("GET", "/admin/v1/usage?"+query, "", adminHeader).wantError(t, 400, job.CodeInvalidValue, param)
	}
	e.send("GET", "/v1/usage?by=tenant", "", mine).wantError(t, 400, job.CodeInvalidValue, "by")
	e.send("GET", "/v1/usage?tenant=theirs", "", mine).wantError(t, 400, job.CodeUnsupportedParameter, "tenant")
}
