package api_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/google/go-cmp/cmp"
	"github.com/labstack/echo/v4"
	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/millrace/millrace/api"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/testenv"
)

func TestNewRefusesWhatIsUnsafeOrNonsense(t *testing.T) {
	t.Parallel()
	store := testenv.Ledger(t)
	tests := map[string]struct {
		cfg  api.Config
		want string
	}{
		"all addresses without a key": {api.Config{Listen: ":0"}, "API key"},
		"0.0.0.0 without a key":       {api.Config{Listen: "0.0.0.0:0"}, "API key"},
		"only an admin key":           {api.Config{Listen: "0.0.0.0:0", AdminKey: "a"}, "API key"},
		"insecure":                    {api.Config{Listen: "0.0.0.0:0", Insecure: true}, ""},
		"with a key":                  {api.Config{Listen: "0.0.0.0:0", APIKey: "k"}, ""},
		"loopback":                    {api.Config{Listen: "127.0.0.1:0"}, ""},
		"localhost":                   {api.Config{Listen: "localhost:0"}, ""},
		"deadlines the wrong way":     {api.Config{Listen: "127.0.0.1:0", DefaultDeadline: 2 * time.Hour, MaxDeadline: time.Hour}, "default-deadline"},
		"a deadline beyond DONE":      {api.Config{Listen: "127.0.0.1:0", MaxDeadline: 169 * time.Hour}, "max-deadline"},
		"a run time-out too long":     {api.Config{Listen: "127.0.0.1:0", DefaultRunTimeout: 13 * time.Hour}, "default-run-timeout"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, err := api.New(tt.cfg, api.Deps{Ledger: store})
			if s != nil {
				_ = s.Close()
			}
			if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
}

func TestKeys(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{APIKey: "sk-tenant", AdminKey: "sk-admin"})
	for _, tt := range []struct {
		path, key string
		status    int
	}{
		{"/v1/models", "", 401},
		{"/v1/models", "wrong", 401},
		{"/v1/models", "sk-tenan", 401},
		{"/v1/models", "sk-tenant", 200},
		{"/v1/models", "sk-admin", 200},
		{"/v1/jobs", "", 401},
		{"/v1/nope", "", 401},
		{"/v1/nope", "sk-tenant", 404},
		{"/admin/v1/workers", "", 401},
		{"/admin/v1/workers", "sk-tenant", 403},
		{"/admin/v1/workers", "sk-admin", 200},
		{"/admin/v1/queues", "sk-tenant", 403},
		{"/admin/v1/jobs", "sk-tenant", 403},
		{"/admin/v1/keys", "sk-tenant", 403},
		{"/admin/v1/nope", "sk-tenant", 403},
		{"/healthz", "", 200},
		{"/readyz", "", 200},
		{"/openapi.json", "", 200},
		{"/metrics", "sk-admin", 404},
	} {
		var h []string
		if tt.key != "" {
			h = append(h, "Authorization: Bearer "+tt.key)
		}
		a := e.send("GET", tt.path, "", h...)
		if a.status != tt.status {
			t.Errorf("GET %s with %q: %d, want %d", tt.path, tt.key, a.status, tt.status)
		}
		switch tt.status {
		case 401:
			a.wantError(t, 401, job.CodeInvalidAPIKey, "")
		case 403:
			a.wantError(t, 403, job.CodePermissionDenied, "")
		case 404:
			a.wantError(t, 404, job.CodeUnknownURL, "")
		}
	}
	if a := e.send("GET", "/v1/models", "", "Authorization: bearer sk-tenant"); a.status != 200 {
		t.Errorf("the scheme's case counts: %d", a.status)
	}
}

func TestAdminIsClosedWithoutAnAdminKey(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{APIKey: "sk-tenant"})
	e.send("GET", "/admin/v1/workers", "", "Authorization: Bearer sk-tenant").wantError(t, 403, job.CodePermissionDenied, "")
	e.send("GET", "/admin/v1/workers", "", "Authorization: Bearer ").wantError(t, 401, job.CodeInvalidAPIKey, "")
}

func TestEveryFailureIsAnErrorObject(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	e.server.AddRoute("/v1/panics", func(echo.Context) error { panic("a bug with a secret") })
	e.send("GET", "/v1/nope", "").wantError(t, 404, job.CodeUnknownURL, "")
	e.send("GET", "/", "").wantError(t, 404, job.CodeUnknownURL, "")
	for _, path := range []string{"/v1/nope/nope", "/admin/v1/nope"} {
		e.send("POST", path, "{}").wantError(t, 404, job.CodeUnknownURL, "")
	}
	a := e.send("PUT", "/v1/jobs", "{}")
	a.wantError(t, 405, job.CodeMethodNotAllowed, "")
	if allow := a.header.Get("Allow"); !strings.Contains(allow, "GET") || !strings.Contains(allow, "POST") {
		t.Errorf("Allow is %q", allow)
	}
	e.send("GET", "/v1/chat/completions", "").wantError(t, 405, job.CodeMethodNotAllowed, "")
	for _, query := range []string{"limit=%zz", "status=failed;limit=1"} { // nothing is left out silently
		e.send("GET", "/v1/jobs?"+query, "").wantError(t, 400, job.CodeInvalidValue, "")
	}
	a = e.send("GET", "/v1/panics", "")
	a.wantError(t, 500, job.CodeInternal, "")
	if strings.Contains(string(a.body), "secret") {
		t.Errorf("the client sees %s", a.body)
	}
	for sent, ok := range map[string]bool{"my-id.1": true, strings.Repeat("x", 129): false, "a b": false, "<script>": false} {
		got := e.send("GET", "/healthz", "", "X-Request-Id: "+sent).header.Get("X-Request-Id")
		if (got == sent) != ok || got == "" {
			t.Errorf("sent %q, got %q", sent, got)
		}
	}
	if a := e.send("HEAD", "/v1/models", ""); a.status != 200 || len(a.body) != 0 || a.header.Get("Content-Type") != "application/json" {
		t.Errorf("HEAD: %d %q %v", a.status, a.body, a.header)
	}
	if a := e.send("HEAD", "/v1/jobs/x/events", ""); a.status != 405 || a.header.Get("Allow") == "" {
		t.Errorf("HEAD of a stream: %d %v", a.status, a.header)
	}
}

// A body that was announced and does not come holds nothing up for long: not the answer of a route that wants none, not a refusal.
func TestBodiesThatNeverCome(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{MaxBody: 1000, APIKey: "k"})
	const key = "Authorization: Bearer k\r\n"
	tests := map[string]struct {
		head string
		want string
	}{
		"a route that takes none":              {"GET /v1/models HTTP/1.1\r\n" + key + "Content-Length: 100\r\n", "HTTP/1.1 200 "},
		"one of unknown length":                {"GET /v1/models HTTP/1.1\r\n" + key + "Transfer-Encoding: chunked\r\n", "HTTP/1.1 200 "},
		"no such job":                          {"POST /v1/jobs/x/cancel HTTP/1.1\r\n" + key + "Content-Length: 100\r\n", "HTTP/1.1 404 "},
		"no key":                               {"POST /v1/jobs HTTP/1.1\r\nContent-Length: 100\r\n", "HTTP/1.1 401 "},
		"no key, and the client asks first":    {"POST /v1/jobs HTTP/1.1\r\nContent-Length: 100\r\nExpect: 100-continue\r\n", "HTTP/1.1 401 "},
		"too large":                            {"POST /v1/jobs HTTP/1.1\r\n" + key + "Content-Length: 1001\r\n", "HTTP/1.1 413 "},
		"too large, and the client asks first": {"POST /v1/jobs HTTP/1.1\r\n" + key + "Content-Length: 1001\r\nExpect: 100-continue\r\n", "HTTP/1.1 413 "},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conn := e.dial(t)
			if err := conn.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
				t.Fatal(err)
			}
			if _, err := io.WriteString(conn, tt.head+"Host: x\r\n\r\n"); err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(conn) // the server closes: it cannot tell where the next request begins
			if err != nil || !strings.HasPrefix(string(got), tt.want) {
				t.Errorf("%q, %v", got, err)
			}
		})
	}
	// One that comes is read away, and the connection lives on.
	conn := e.dial(t)
	in := bufio.NewReader(conn)
	for range 2 {
		if _, err := io.WriteString(conn, "GET /v1/models HTTP/1.1\r\n"+key+"Content-Length: 2\r\nHost: x\r\n\r\n{}"); err != nil {
			t.Fatal(err)
		}
		resp, err := http.ReadResponse(in, nil)
		if err != nil || resp.StatusCode != 200 {
			t.Fatalf("%v, %v", resp, err)
		}
		if _, err := io.Copy(io.Discard, resp.Body); err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
	}
}

func TestModels(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	w := e.startWorker(repeat)
	o := e.send("GET", "/v1/models", "").object(t)
	data := o["data"].([]any)
	if o["object"] != "list" || len(data) != 1 || o["has_more"] != false {
		t.Fatalf("%v", o)
	}
	m := data[0].(map[string]any)
	if m["id"] != string(model) || m["object"] != "model" || m["owned_by"] != "millrace" || m["created"] != float64(int64(m["created"].(float64))) {
		t.Errorf("%v", m)
	}
	// The name has a slash: clients escape it, people do not.
	for _, path := range []string{"test%2Fmodel-8b", "test/model-8b"} {
		if a := e.send("GET", "/v1/models/"+path, ""); a.status != 200 || a.object(t)["id"] != string(model) {
			t.Errorf("%s: %d %s", path, a.status, a.body)
		}
	}
	e.send("GET", "/v1/models/nope", "").wantError(t, 404, job.CodeModelNotFound, "model")

	workers := e.send("GET", "/admin/v1/workers", "").object(t)["data"].([]any)
	if len(workers) != 1 || workers[0].(map[string]any)["id"] != string(w.id) {
		t.Errorf("workers: %v", workers)
	}
	queues := e.send("GET", "/admin/v1/queues", "").object(t)["data"].([]any)
	if len(queues) != 1 {
		t.Fatalf("queues: %v", queues)
	}
	q := queues[0].(map[string]any)
	if q["model"] != string(model) || q["reason"] != nil || q["workers"].(map[string]any)["ready"] != 1.0 || q["capacity_tokens"] != 100_000.0 {
		t.Errorf("%v", q)
	}
}

func TestAdminListsJobsThatRunForLong(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	never := make(chan struct{})
	e.startWorker(func(j *job.Job, body []byte) reply {
		r := repeat(j, body)
		r.before = never
		return r
	})
	id := e.submit(jobBody(chat(1, ""), ""))
	list := func(query string) []any {
		return e.send("GET", "/admin/v1/jobs"+query, "").object(t)["data"].([]any)
	}
	eventually(t, "it is listed", func() bool {
		all := list("?older_than=0s")
		return len(all) == 1 && all[0].(map[string]any)["id"] == string(id)
	})
	if n := len(list("")); n != 0 {
		t.Errorf("%d jobs are older than twice the usual", n)
	}
	e.send("GET", "/admin/v1/jobs?older_than=x", "").wantError(t, 400, job.CodeInvalidValue, "older_than")
}

func TestDescriptionIsValidAndComplete(t *testing.T) {
	t.Parallel()
	raw, err := os.ReadFile("openapi.json")
	if err != nil {
		t.Fatal(err)
	}
	doc, err := openapi3.NewLoader().LoadFromData(raw)
	if err != nil {
		t.Fatal(err)
	}
	if err := doc.Validate(t.Context()); err != nil {
		t.Fatal(err)
	}
	e := newEnv(t, api.Config{})
	if a := e.send("GET", "/openapi.json", ""); !bytes.Equal(a.body, raw) {
		t.Error("another description is served")
	}
	served := make(map[string]bool)
	for _, r := range e.server.Routes() {
		parts := strings.Split(r.Path, "/")
		for i, p := range parts {
			if strings.HasPrefix(p, ":") {
				parts[i] = "{" + p[1:] + "}"
			}
		}
		served[r.Method+" "+strings.Join(parts, "/")] = true
	}
	described := make(map[string]bool)
	for path, item := range doc.Paths.Map() {
		for method := range item.Operations() {
			described[method+" "+path] = true
		}
	}
	if diff := cmp.Diff(slices.Sorted(maps.Keys(described)), slices.Sorted(maps.Keys(served))); diff != "" {
		t.Errorf("described (-) and served (+) differ: %s", diff)
	}
}

func TestObjectsAreAsDescribed(t *testing.T) {
	t.Parallel()
	doc, err := openapi3.NewLoader().LoadFromFile("openapi.json")
	if err != nil {
		t.Fatal(err)
	}
	e := newEnv(t, api.Config{})
	e.startWorker(repeat)
	id := e.submit(jobBody(chat(1, ""), ""))
	e.wait(id)
	for path, schema := range map[string]string{
		"/v1/jobs/" + string(id): "Job", "/v1/jobs": "JobList", "/v1/models": "ModelList", "/v1/models/" + string(model): "Model", "/v1/jobs/x": "Error",
		"/admin/v1/workers": "WorkerList", "/admin/v1/queues": "QueueList", "/admin/v1/jobs?older_than=0s": "JobList", "/healthz": "Health", "/readyz": "Health",
	} {
		var v any
		if err := json.Unmarshal(e.send("GET", path, "").body, &v); err != nil {
			t.Fatal(err)
		}
		if err := doc.Components.Schemas[schema].Value.VisitJSON(v); err != nil {
			t.Errorf("%s is no %s: %v", path, schema, err)
		}
	}
}

func TestOpenAIClientWorksUnchanged(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{APIKey: "sk-x"})
	e.startWorker(func(j *job.Job, body []byte) reply {
		if j.Endpoint == job.Embeddings {
			return reply{status: 200, contentType: "application/json", body: `{"object":"list","data":[{"object":"embedding","index":0,"embedding":[0.5,1]}],"model":"m","usage":{"prompt_tokens":1,"total_tokens":1}}`}
		}
		return repeat(j, body)
	})
	c := openai.NewClient(option.WithBaseURL(e.url+"/v1"), option.WithAPIKey("sk-x"), option.WithHTTPClient(client()))
	ctx := t.Context()
	params := openai.ChatCompletionNewParams{Model: string(model), MaxTokens: openai.Int(3), Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage("hi")}}
	got, err := c.Chat.Completions.New(ctx, params)
	if err != nil || got.Choices[0].Message.Content != "t0 t1 t2 " || got.Usage.TotalTokens != 6 {
		t.Fatalf("%+v, %v", got, err)
	}
	stream := c.Chat.Completions.NewStreaming(ctx, params)
	var text strings.Builder
	for stream.Next() {
		text.WriteString(stream.Current().Choices[0].Delta.Content)
	}
	if err := stream.Err(); err != nil || text.String() != "t0 t1 t2 " {
		t.Errorf("%q, %v", text.String(), err)
	}
	models, err := c.Models.List(ctx)
	if err != nil || len(models.Data) != 1 || models.Data[0].ID != string(model) {
		t.Errorf("%+v, %v", models, err)
	}
	if m, err := c.Models.Get(ctx, string(model)); err != nil || m.ID != string(model) {
		t.Errorf("%+v, %v", m, err)
	}
	emb, err := c.Embeddings.New(ctx, openai.EmbeddingNewParams{Model: string(model), Input: openai.EmbeddingNewParamsInputUnion{OfString: openai.String("x")}})
	if err != nil || len(emb.Data[0].Embedding) != 2 {
		t.Errorf("%+v, %v", emb, err)
	}
	params.Model = "nope"
	var failed *openai.Error
	if _, err = c.Chat.Completions.New(ctx, params); err == nil || !asOpenAI(err, &failed) || failed.StatusCode != 404 || failed.Code != "model_not_found" || failed.Param != "model" || failed.Message == "" {
		t.Errorf("%v", err)
	}
	bad := openai.NewClient(option.WithBaseURL(e.url+"/v1"), option.WithAPIKey("wrong"), option.WithHTTPClient(client()))
	if _, err = bad.Models.List(ctx); err == nil || !asOpenAI(err, &failed) || failed.StatusCode != 401 || failed.Code != "invalid_api_key" {
		t.Errorf("%v", err)
	}
}

func TestSecretsStayWhereTheyAre(t *testing.T) {
	t.Parallel()
	const key, prompt = "sk-canary-4711", "canary prompt 0815"
	e := newEnv(t, api.Config{APIKey: key})
	e.stopAPI()
	var mu sync.Mutex
	var log bytes.Buffer
	e.deps.Log = slog.New(slog.NewTextHandler(writerFunc(func(p []byte) (int, error) {
		mu.Lock()
		defer mu.Unlock()
		return log.Write(p)
	}), &slog.HandlerOptions{Level: slog.LevelDebug}))
	e.startAPI(api.Config{APIKey: key})
	e.startWorker(repeat)
	auth := "Authorization: Bearer " + key
	body := strings.Replace(chat(1, ""), "hi", prompt, 1)
	e.send("POST", "/v1/chat/completions", body, auth)
	id := e.submit(jobBody(body, ""), auth, "Idempotency-Key: k")
	eventually(t, "it ends", func() bool { return e.send("GET", "/v1/jobs/"+string(id), "", auth).object(t)["status"] == "completed" })
	a := e.send("POST", "/v1/jobs", jobBody(body, `,"foo":1`), "Authorization: Bearer x"+key)
	if bytes.Contains(a.body, []byte(key)) {
		t.Errorf("the key is in %s", a.body)
	}
	e.stopAPI()
	mu.Lock()
	defer mu.Unlock()
	for _, secret := range []string{key, prompt} {
		if strings.Contains(log.String(), secret) {
			t.Errorf("%q is in the log", secret)
		}
	}
	err := filepath.WalkDir(e.nats.dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return nil //nolint:nilerr // files come and go
		}
		raw, err := os.ReadFile(path)
		if err == nil && bytes.Contains(raw, []byte(key)) {
			t.Errorf("the key is in %s", path)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

func TestMetricsHaveClosedLabels(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	e.stopAPI()
	reg := prometheus.NewRegistry()
	deps := e.deps
	deps.Registerer = reg
	s, err := api.New(api.Config{Listen: "127.0.0.1:0"}, deps)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	e.url = "http://" + s.Addr()
	id := job.NewID(time.Now())
	for _, path := range []string{"/v1/jobs/" + string(id), "/v1/nope/" + string(id), "/healthz"} {
		e.send("GET", path, "")
	}
	e.send("BREW", "/healthz", "")
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	routes := make(map[string]bool)
	for _, f := range families {
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				if strings.Contains(l.GetValue(), string(id)) || l.GetValue() == "BREW" {
					t.Errorf("%s has the label %s=%q", f.GetName(), l.GetName(), l.GetValue())
				}
				if l.GetName() == "route" {
					routes[l.GetValue()] = true
				}
			}
		}
	}
	for _, want := range []string{"/v1/jobs/:id", "unmatched", "/healthz"} {
		if !routes[want] {
			t.Errorf("no route %q among %v", want, routes)
		}
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func asOpenAI(err error, to **openai.Error) bool {
	e, ok := err.(*openai.Error) //nolint:errorlint // it is never wrapped
	*to = e
	return ok
}

func TestPureParts(t *testing.T) {
	t.Parallel()
	hash := func(body string) string {
		t.Helper()
		h, err := api.HashBody("/r", []byte(body))
		if err != nil {
			t.Fatal(err)
		}
		return h
	}
	base := hash(`{"a":1,"b":{"c":[1,2],"d":"é"}}`)
	if hash(` {"b": {"d":"\u00e9","c":[1, 2]},"a":1}`) != base {
		t.Error("the order of keys counts")
	}
	for _, other := range []string{`{"a":1.0,"b":{"c":[1,2],"d":"é"}}`, `{"a":1,"b":{"c":[2,1],"d":"é"}}`, `{"a":9007199254740993}`} {
		if hash(other) == base {
			t.Errorf("%s has the same hash", other)
		}
	}
	if hash(`{"a":9007199254740993}`) == hash(`{"a":9007199254740992}`) {
		t.Error("big numbers are rounded")
	}

	for text, want := range map[string]bool{`{"a":[1,{"b":null}]}`: true, `1`: true, `"x"`: true, `[]`: true, ``: false, `{`: false, `1 2`: false, `{} x`: false, `{"a":}`: false, `[1,2`: false} {
		if got, err := api.ValidJSON(strings.NewReader(text)); got != want || err != nil {
			t.Errorf("%q: %v, %v", text, got, err)
		}
	}
	if _, err := api.ValidJSON(io.MultiReader(strings.NewReader(`{"a":`), brokenReader{})); err == nil {
		t.Error("a broken object is no error")
	}

	for data, want := range map[string][]string{
		`{"a":1}`:                     {`{"a":1}`},
		"{\"a\":1}\n{\"b\":2}":        {`{"a":1}`, `{"b":2}`},
		"{\"a\":\n1}\n{\"b\":2}":      {"{\"a\":\n1}", `{"b":2}`},
		"{\"a\":1}\nnonsense\n{\"b\"": {`{"a":1}`, "nonsense\n{\"b\""},
	} {
		var got []string
		for _, c := range api.Chunks([]byte(data)) {
			got = append(got, string(c))
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%q: %s", data, diff)
		}
	}

	for header, want := range map[string]bool{`W/"a"`: true, `"a"`: true, `"b", W/"a"`: true, `*`: true, `"b"`: false, ``: false, `,`: false} {
		if got := api.Matches(header, `W/"a"`); got != want {
			t.Errorf("%q: %v", header, got)
		}
	}
	for header, want := range map[string]string{
		"respond-async": "async 0s", "Respond-Async, wait=20": "async 20s", "wait=5": "sync 5s", "respond-async; x=1, wait=\"7\"": "async 7s", "respond-async, wait=-1": "async 0s",
		"respond-async, wait=1000": "async 1m0s", "return=minimal": "sync 0s",
	} {
		p := api.ParsePrefer(http.Header{"Prefer": {header}})
		if got := p.String(); got != want {
			t.Errorf("%q: %s", header, got)
		}
	}
}

type brokenReader struct{}

func (brokenReader) Read([]byte) (int, error) { return 0, io.ErrClosedPipe }
