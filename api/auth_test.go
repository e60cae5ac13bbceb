package api_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/api"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
	"github.com/millrace/millrace/internal/testenv"
)

// key makes a key in the ledger, and returns it with the header that sends it.
func (e *env) key(k ledger.Key) (*ledger.Key, string) {
	e.t.Helper()
	if k.Tenant == "" {
		k.Tenant = job.DefaultTenant
	}
	secret, made, err := e.ledger.CreateKey(e.t.Context(), k)
	if err != nil {
		e.t.Fatal(err)
	}
	return made, "Authorization: Bearer " + secret
}

// becomes polls until a request is answered with status: processes remember for some seconds what the ledger has said.
func (e *env) becomes(status int, path string, headers ...string) answer {
	e.t.Helper()
	var a answer
	eventually(e.t, fmt.Sprintf("GET %s is %d", path, status), func() bool {
		a = e.send("GET", path, "", headers...)
		return a.status == status
	})
	return a
}

// TestTheFirstKeyClosesTheAPI in all processes, while they run.
func TestTheFirstKeyClosesTheAPI(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	first := e.url
	e.startAPI(api.Config{})
	second := e.url
	for _, e.url = range []string{first, second} {
		for _, path := range []string{"/v1/models", "/v1/files", "/v1/usage", "/admin/v1/keys"} {
			if a := e.send("GET", path, "", "Authorization: Bearer whatever"); a.status != 200 {
				t.Errorf("%s of an open platform: %d %s", path, a.status, a.body)
			}
		}
	}
	_, header := e.key(ledger.Key{})
	for _, e.url = range []string{first, second} {
		// The key counts at once: what is done with it is never done as whoever asks an open platform.
		e.send("GET", "/admin/v1/keys", "", header).wantError(t, 403, job.CodePermissionDenied, "")
		e.becomes(401, "/v1/models").wantError(t, 401, job.CodeInvalidAPIKey, "")
		e.send("GET", "/v1/models", "", "Authorization: Bearer sk-mr-wrong").wantError(t, 401, job.CodeInvalidAPIKey, "")
		e.send("GET", "/admin/v1/keys", "").wantError(t, 401, job.CodeInvalidAPIKey, "")
		e.send("GET", "/admin/v1/keys", "", header).wantError(t, 403, job.CodePermissionDenied, "")
		e.becomes(200, "/v1/models", header)
		if a := e.send("GET", "/healthz", ""); a.status != 200 {
			t.Errorf("health needs a key: %d", a.status)
		}
	}
}

// TestKeysInTheLedgerLetItListenEverywhere: with one it starts, and is closed to all who have none.
func TestKeysInTheLedgerLetItListenEverywhere(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	if _, err := api.New(api.Config{Listen: "0.0.0.0:0"}, e.deps); err == nil || !strings.Contains(err.Error(), "millrace keys create --database-url") {
		t.Fatalf("got %v", err)
	}
	_, header := e.key(ledger.Key{})
	e.startAPI(api.Config{Listen: "0.0.0.0:0"})
	_, port, err := net.SplitHostPort(e.server.Addr())
	if err != nil {
		t.Fatal(err)
	}
	e.url = "http://127.0.0.1:" + port
	e.send("GET", "/v1/models", "").wantError(t, 401, job.CodeInvalidAPIKey, "")
	if a := e.send("GET", "/v1/models", "", header); a.status != 200 {
		t.Errorf("with the key: %d %s", a.status, a.body)
	}
}

func TestScopes(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{APIKey: "sk-configured", AdminKey: "sk-admin"})
	if _, err := e.ledger.CreateTenant(t.Context(), ledger.Tenant{ID: "acme"}); err != nil {
		t.Fatal(err)
	}
	_, inference := e.key(ledger.Key{Tenant: "acme", Scopes: []ledger.Scope{ledger.Inference}})
	_, batches := e.key(ledger.Key{Tenant: "acme", Scopes: []ledger.Scope{ledger.Batches}})
	_, usual := e.key(ledger.Key{Tenant: "acme"})
	_, admin := e.key(ledger.Key{Scopes: []ledger.Scope{ledger.Admin}})
	keys := map[string]string{
		"inference": inference, "batches": batches, "usual": usual, "admin": admin, "configured": "Authorization: Bearer sk-configured", "configured admin": "Authorization: Bearer sk-admin",
	}
	for path, opens := range map[string]string{
		"/v1/models": "inference usual admin configured configured admin", "/v1/jobs": "inference usual admin configured configured admin",
		"/v1/files": "batches usual admin configured configured admin", "/v1/batches": "batches usual admin configured configured admin",
		"/v1/usage":      "inference batches usual admin configured configured admin",
		"/admin/v1/keys": "admin configured admin", "/admin/v1/workers": "admin configured admin", "/admin/v1/usage": "admin configured admin",
	} {
		for name, header := range keys {
			a := e.send("GET", path, "", header)
			want := strings.Contains(" "+opens+" ", " "+name+" ")
			if name == "configured" { // it is also the beginning of another
				want = strings.Contains(opens, "configured configured admin")
			}
			switch {
			case want && a.status != 200:
				t.Errorf("GET %s with the key %s: %d %s", path, name, a.status, a.body)
			case !want:
				a.wantError(t, 403, job.CodePermissionDenied, "")
				scope, _, _ := strings.Cut(strings.TrimPrefix(strings.TrimPrefix(path, "/v1/"), "/"), "/")
				if map[string]string{"models": "inference", "jobs": "inference", "files": "batches", "batches": "batches", "admin": "admin"}[scope] == "" ||
					!strings.Contains(string(a.body), `scope \"`+map[string]string{"models": "inference", "jobs": "inference", "files": "batches", "batches": "batches", "admin": "admin"}[scope]) {
					t.Errorf("it does not name the scope: %s", a.body)
				}
			}
		}
	}
}

// TestAKeysModels: a model that a key may not use is to its holder as one that does not exist.
func TestAKeysModels(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	e.startWorker(repeat)
	_, all := e.key(ledger.Key{})
	_, one := e.key(ledger.Key{Models: []job.Model{model}})
	_, other := e.key(ledger.Key{Models: []job.Model{"other/model"}})
	e.becomes(401, "/v1/models")
	listed := func(header string) int {
		t.Helper()
		return len(e.send("GET", "/v1/models", "", header).object(t)["data"].([]any))
	}
	if a, o, n := listed(all), listed(one), listed(other); a != 1 || o != 1 || n != 0 {
		t.Errorf("they list %d, %d, %d models", a, o, n)
	}
	inner := chat(2, "")
	for _, c := range []struct{ method, path, body, param string }{
		{"GET", "/v1/models/" + url.PathEscape(string(model)), "", "model"},
		{"POST", "/v1/chat/completions", inner, "model"},
		{"POST", "/v1/chat/completions", chat(2, `,"stream":true`), "model"},
		{"POST", "/v1/completions", fmt.Sprintf(`{"model":%q,"prompt":"x"}`, model), "model"},
		{"POST", "/v1/embeddings", fmt.Sprintf(`{"model":%q,"input":"x"}`, model), "model"},
		{"POST", "/v1/responses", fmt.Sprintf(`{"model":%q,"input":"x"}`, model), "model"},
		{"POST", "/v1/responses", fmt.Sprintf(`{"model":%q,"input":"x","background":true}`, model), "model"},
		{"POST", "/v1/jobs", jobBody(inner, ""), "body.model"},
	} {
		a := e.send(c.method, c.path, c.body, other)
		a.wantError(t, 404, job.CodeModelNotFound, c.param)
		unknown := e.send(c.method, strings.ReplaceAll(c.path, url.PathEscape(string(model)), "nobody"), strings.ReplaceAll(c.body, string(model), "nobody"), all)
		if diff := cmp.Diff(strings.ReplaceAll(string(unknown.body), "nobody", string(model)), string(a.body)); diff != "" {
			t.Errorf("%s %s: a forbidden model is told from an unknown one: %s", c.method, c.path, diff)
		}
	}
	if a := e.send("POST", "/v1/chat/completions", inner, one); a.status != 200 {
		t.Errorf("its own model: %d %s", a.status, a.body)
	}
}

// TestAKeyEnds by revocation, expiry or its tenant's disabling, although processes remember it for a moment.
func TestAKeyEnds(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	if _, err := e.ledger.CreateTenant(t.Context(), ledger.Tenant{ID: "acme"}); err != nil {
		t.Fatal(err)
	}
	k, revoked := e.key(ledger.Key{})
	_, expired := e.key(ledger.Key{Expires: e.results.Now() + 1500})
	_, disabled := e.key(ledger.Key{Tenant: "acme"})
	old, rotated := e.key(ledger.Key{Name: "r"})
	for _, h := range []string{revoked, expired, disabled, rotated} {
		e.becomes(200, "/v1/models", h)
	}
	if _, err := e.ledger.RevokeKey(t.Context(), k.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := e.ledger.UpdateTenant(t.Context(), "acme", func(t *ledger.Tenant) error { t.Disabled = true; return nil }); err != nil {
		t.Fatal(err)
	}
	secret, _, err := e.ledger.RotateKey(t.Context(), old.ID, 0)
	if err != nil {
		t.Fatal(err)
	}
	if a := e.send("GET", "/v1/models", "", "Authorization: Bearer "+secret); a.status != 200 {
		t.Errorf("the new key: %d", a.status)
	}
	for _, h := range []string{expired, revoked, disabled, rotated} {
		e.becomes(401, "/v1/models", h).wantError(t, 401, job.CodeInvalidAPIKey, "")
	}
}

// cuttable stands between a store and PostgreSQL.
type cuttable struct {
	dir    string
	target string
	mu     sync.Mutex
	cut    bool
	conns  []net.Conn
}

func newCuttable(t *testing.T) *cuttable {
	t.Helper()
	c := &cuttable{dir: t.TempDir(), target: testenv.PostgresSocket(t)}
	l, err := net.Listen("unix", filepath.Join(c.dir, ".s.PGSQL.5432"))
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("unix", c.target)
			c.mu.Lock()
			if err != nil || c.cut {
				in.Close()
				if out != nil {
					out.Close()
				}
				c.mu.Unlock()
				continue
			}
			c.conns = append(c.conns, in, out)
			c.mu.Unlock()
			wg.Go(func() { _, _ = io.Copy(out, in); out.Close(); in.Close() })
			wg.Go(func() { _, _ = io.Copy(in, out); out.Close(); in.Close() })
		}
	})
	t.Cleanup(func() { l.Close(); c.set(true); wg.Wait() })
	return c
}

// set cuts all connections, or lets new ones through.
func (c *cuttable) set(cut bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cut = cut; cut {
		for _, conn := range c.conns {
			conn.Close()
		}
		c.conns = nil
	}
}

// TestTheDatabaseAwayKeepsInferenceGoing for keys that were seen lately; others are told to come again, and not that their key is wrong.
func TestTheDatabaseAwayKeepsInferenceGoing(t *testing.T) {
	t.Parallel()
	at, err := url.Parse(testenv.Postgres(t))
	if err != nil {
		t.Fatal(err)
	}
	wire := newCuttable(t)
	at.RawQuery = url.Values{"host": {wire.dir}}.Encode()
	e := newEnv(t, api.Config{})
	e.stopAPI()
	e.ledger = testenv.OpenLedger(t, at.String())
	e.deps.Ledger = e.ledger
	e.startAPI(api.Config{AdminKey: "sk-admin"})
	e.startWorker(repeat)
	_, seen := e.key(ledger.Key{})
	_, unseen := e.key(ledger.Key{})
	e.becomes(200, "/v1/models", seen)
	wire.set(true)
	eventually(t, "what was remembered is no longer fresh", func() bool {
		a := e.send("POST", "/v1/chat/completions", chat(2, ""), seen)
		if a.status != 200 {
			t.Fatalf("a call: %d %s", a.status, a.body)
		}
		return e.send("GET", "/v1/models", "", unseen).status == 503
	})
	e.send("GET", "/v1/models", "", unseen).wantError(t, 503, job.CodeUnavailable, "")
	e.send("GET", "/v1/models", "", "Authorization: Bearer sk-mr-wrong").wantError(t, 503, job.CodeUnavailable, "")
	for _, h := range []string{seen, "Authorization: Bearer sk-admin"} {
		if a := e.send("POST", "/v1/chat/completions", chat(2, ""), h); a.status != 200 {
			t.Errorf("a call: %d %s", a.status, a.body)
		}
		if a := e.send("POST", "/v1/jobs", jobBody(chat(2, ""), ""), h); a.status != 202 {
			t.Errorf("a job: %d %s", a.status, a.body)
		}
	}
	e.send("GET", "/admin/v1/tenants", "", "Authorization: Bearer sk-admin").wantError(t, 503, job.CodeUnavailable, "")
	wire.set(false)
	e.becomes(200, "/v1/models", unseen)
	e.becomes(401, "/v1/models", "Authorization: Bearer sk-mr-wrong")
}

// TestTenantsSeeNothingOfEachOther: every route under /v1 that names an object is tried with every object of another tenant. It fails when a route is added that it does not know.
func TestTenantsSeeNothingOfEachOther(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{AdminKey: "sk-admin"})
	e.startWorker(repeat)
	a, b := e.tenant("a", ledger.Limits{}), e.tenant("b", ledger.Limits{})
	for _, h := range []string{a, b} {
		e.becomes(200, "/v1/models", h)
	}
	file := e.file("batch", line("l1", chat(1, "")), a)
	ended := string(e.submit(jobBody(chat(2, ""), ""), a, "Idempotency-Key: same"))
	waiting := string(e.submit(jobBody(chat(2, ""), `,"priority":"batch","metadata":{"whose":"a"}`), a))
	batch := e.create(createBody(file, ""), a)["id"].(string)
	done := e.create(createBody(file, ""), a)["id"].(string)
	response := e.send("POST", "/v1/responses", fmt.Sprintf(`{"model":%q,"input":"x","background":true,"max_output_tokens":2}`, model), a).object(t)["id"].(string)
	output := e.putFile("a", "batch_output", "{}\n")
	objects := map[string][]string{
		"/v1/jobs/:id": {ended, waiting}, "/v1/files/:id": {file, output}, "/v1/batches/:id": {batch, done}, "/v1/responses/:id": {response},
	}
	codes := map[string]job.Code{
		"/v1/jobs/:id": job.CodeJobNotFound, "/v1/files/:id": job.CodeFileNotFound, "/v1/batches/:id": job.CodeBatchNotFound, "/v1/responses/:id": job.CodeResponseNotFound,
	}
	params := map[string]string{"/v1/jobs/:id": "id", "/v1/files/:id": "id", "/v1/batches/:id": "batch_id", "/v1/responses/:id": "id"}
	for _, path := range []string{"/v1/jobs/" + ended, "/v1/jobs/" + waiting, "/v1/responses/" + response} {
		eventually(t, path+" has ended", func() bool {
			s, _ := e.send("GET", path, "", a).object(t)["status"].(string)
			return s != "queued" && s != "running" && s != "in_progress"
		})
	}
	read := func() map[string]string {
		t.Helper()
		all := map[string]string{}
		for route, ids := range objects {
			for _, id := range ids {
				path := strings.Replace(route, ":id", id, 1)
				got := e.send("GET", path, "", a)
				if got.status != 200 {
					t.Errorf("the owner reads %s: %d %s", path, got.status, got.body)
				}
				all[path] = string(got.body)
			}
		}
		return all
	}
	before := read()
	tried := 0
	for _, r := range e.server.Routes() {
		if !strings.HasPrefix(r.Path, "/v1/") || !strings.Contains(r.Path, ":") || r.Path == "/v1/models/:model" {
			continue
		}
		kind := r.Path[:strings.Index(r.Path, ":id")+len(":id")]
		ids, known := objects[kind]
		if !known {
			t.Errorf("the route %s %s is not tried: add an object of its kind", r.Method, r.Path)
		}
		for _, id := range ids {
			for who, header := range map[string]string{"another tenant": b, "an operator": "Authorization: Bearer sk-admin"} {
				var body string
				if r.Method == http.MethodPost {
					body = "{}"
				}
				got := e.send(r.Method, strings.Replace(r.Path, ":id", id, 1), body, header)
				if got.status != 404 {
					t.Errorf("%s: %s %s of %s: %d %s", who, r.Method, r.Path, id, got.status, got.body)
					continue
				}
				got.wantError(t, 404, codes[kind], params[kind])
				tried++
			}
		}
	}
	if tried < 30 {
		t.Errorf("only %d were tried", tried)
	}
	// Lists, and marks within them.
	for _, path := range []string{"/v1/jobs", "/v1/files", "/v1/batches"} {
		var l struct {
			Data    []json.RawMessage `json:"data"`
			FirstID *string           `json:"first_id"`
			HasMore bool              `json:"has_more"`
		}
		got := e.send("GET", path, "", b)
		if err := json.Unmarshal(got.body, &l); err != nil || len(l.Data) != 0 || l.FirstID != nil || l.HasMore {
			t.Errorf("%s: %v %s", path, err, got.body)
		}
		after := map[string]string{"/v1/jobs": ended, "/v1/files": file, "/v1/batches": batch}[path]
		e.send("GET", path+"?after="+after, "", b).wantError(t, 400, job.CodeInvalidValue, "after")
	}
	// Another's file as the input of a batch is as one that does not exist: what validates the batch looks among its tenant's.
	var asked [2]string
	for i, id := range []string{file, "file-nobody"} {
		o := e.create(createBody(id, ""), b)
		asked[i] = fmt.Sprint(o["status"], o["errors"], o["request_counts"], o["model"])
	}
	if asked[0] != asked[1] {
		t.Errorf("another's file: %s; none: %s", asked[0], asked[1])
	}
	// The same idempotency key is another's.
	if id := string(e.submit(jobBody(chat(2, ""), ""), b, "Idempotency-Key: same")); id == ended {
		t.Error("two tenants share an idempotency key")
	}
	if got := e.send("POST", "/v1/jobs", jobBody(chat(3, ""), ""), b, "Idempotency-Key: same"); got.status != 409 {
		t.Errorf("their own key with another body: %d", got.status)
	}
	if diff := cmp.Diff(before, read()); diff != "" {
		t.Errorf("something has changed: %s", diff)
	}
	// No header or query makes somebody another tenant.
	for _, h := range []string{"OpenAI-Organization: a", "X-Millrace-Tenant: a", "X-Tenant: a"} {
		e.send("GET", "/v1/jobs/"+ended+"?tenant=a", "", b, h).wantError(t, 404, job.CodeJobNotFound, "id")
	}
}
