package e2e_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/nats-io/nats.go"
)

// TestSecretsStayWhereTheyBelong: a client's key is nowhere but in its request, and in the database as its hash. A prompt is in the bodies that are stored and sent (the messages of waiting work, the records of its jobs, files,
// answers on their way), and in no log, metric, name, header or row of the database; one of a batch's line is in its file and in its message, and not in Redis at all.
func TestSecretsStayWhereTheyBelong(t *testing.T) {
	t.Parallel()
	const apiKey, adminKey, engineKey = "sk-canary-client-7Q2", "sk-canary-admin-8R3", "sk-canary-engine-9S4"
	const prompt, linePrompt, idempotency, answerless = "canaryprompt", "canaryline", "canary-idempotency", "canarymeta"
	c := newCluster(t)
	c.env = append(c.env, "MILLRACE_API_KEY="+apiKey, "MILLRACE_ADMIN_KEY="+adminKey)
	e := startEngine(t)
	nc := connect(t, c.natsURL())
	// A tap on all that passes through NATS: streams, heartbeats, answers on their way.
	var mu sync.Mutex
	var heads []string
	var bodies bytes.Buffer
	tap, err := nc.Subscribe(">", func(m *nats.Msg) {
		mu.Lock()
		defer mu.Unlock()
		heads = append(heads, fmt.Sprint(m.Subject, m.Reply, m.Header))
		bodies.Write(m.Data)
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	api, dispatcher := c.api("api"), c.dispatcher("dispatcher")
	api.key = apiKey
	c.env = append(c.env, "MILLRACE_ENGINE_API_KEY="+engineKey)
	worker := c.worker("worker", e.URL, plain(4)...)
	c.startAll(api.process, dispatcher, worker)
	c.whole()
	workEmpty(t, nc) // the streams are there: who publishes where nobody listens is not told so while a tap listens to all

	content := func(markers string) string { return "[[emulator:" + markers + "]] " + prompt }
	ids := []string{
		api.submit(content("tokens=5"), `"session":"a-session","metadata":{"k":"`+answerless+`"}`, "Idempotency-Key", idempotency),
		api.submit(content("tokens=6"), `"stream":false`),
		api.submit(content("status=400"), ""),
		api.submit(content("tokens=20,reset-after=3"), `"deadline":"4s"`),
	}
	api.must(http.StatusOK, "POST", "/v1/chat/completions", chat(content("tokens=7"), ""))
	s, err := api.open("POST", "/v1/chat/completions", chat(content("tokens=8"), `"stream":true`))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.rest(); err != nil {
		t.Error(err)
	}
	s.close()
	errorsSeen := [][]byte{
		api.must(http.StatusBadRequest, "POST", "/v1/jobs", submission([]byte(`{"model":"`+model+`","messages":"`+prompt+`"}`), `"deadline":"x"`)).body,
		api.must(http.StatusNotFound, "POST", "/v1/jobs", submission([]byte(`{"model":"nobody","messages":[{"role":"user","content":"`+prompt+`"}]}`), "")).body,
		api.must(http.StatusConflict, "POST", "/v1/jobs", submission(chat(prompt, ""), ""), "Idempotency-Key", idempotency).body,
	}
	mine, keyID := api.tenantOfItsOwn("acme", adminKey)
	batched := mine.everythingOfBatches(func(markers string) string { return "[[emulator:" + markers + "]] " + linePrompt })
	errorsSeen = append(errorsSeen, batched...)
	for _, raw := range batched {
		if bytes.Contains(raw, []byte(linePrompt)) {
			t.Errorf("an error repeats a line's prompt: %s", raw)
		}
	}
	mine.respond(content("tokens=5"))
	eventually(t, patience, "the usage is the key's", func() error {
		if a := mine.must(http.StatusOK, "GET", "/v1/usage?by=key", nil); !bytes.Contains(a.body, []byte(keyID)) {
			return fmt.Errorf("it is %s", a.body)
		}
		return nil
	})
	wrong := *api.client
	wrong.key = "sk-canary-wrong-1T5"
	errorsSeen = append(errorsSeen, wrong.must(http.StatusUnauthorized, "GET", "/v1/jobs", nil).body)
	api.ended(patience, ids...)
	// Some that wait, and so are on the disk now.
	e.shut()
	api.submitMany(8, "", func(i int) string { return content("tokens=5") + fmt.Sprint(i) })

	secrets := []string{apiKey, adminKey, engineKey, wrong.key, mine.key, idempotency}
	without := func(where string, raw []byte, words ...string) {
		t.Helper()
		for _, w := range words {
			if i := bytes.Index(raw, []byte(w)); i >= 0 {
				t.Errorf("%s tells %s: …%s…", where, w, raw[max(0, i-100):min(len(raw), i+100)])
			}
		}
	}
	for _, raw := range errorsSeen {
		without("an error", raw, secrets...)
	}
	quiet := append([]string{prompt, linePrompt, answerless}, secrets...)
	for _, p := range c.roles {
		if len(p.output()) == 0 {
			t.Errorf("%s has logged nothing", p.name)
		}
		without("the log of "+p.name, p.output(), quiet...)
		resp, err := c.http.Get("http://" + p.metrics + "/metrics")
		if err != nil {
			t.Fatal(err)
		}
		page, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || !bytes.Contains(page, []byte("millrace_")) {
			t.Errorf("the metrics of %s: %v %.200s", p.name, err, page)
		}
		without("the metrics of "+p.name, page, quiet...)
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	if err := tap.Unsubscribe(); err != nil {
		t.Fatal(err)
	}
	mu.Lock()
	defer mu.Unlock()
	if !bytes.Contains(bodies.Bytes(), []byte(prompt)) {
		t.Error("the tap saw no prompt: it proves nothing")
	}
	without("a message's body", bodies.Bytes(), secrets...)
	for _, h := range heads {
		without("a message's subject or header", []byte(h), append([]string{prompt, linePrompt}, secrets...)...)
	}
	files, seen := 0, false
	err = filepath.WalkDir(c.dir+"/nats", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		raw, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		files++
		seen = seen || bytes.Contains(raw, []byte(prompt))
		without(path, raw, secrets...)
		return nil
	})
	if err != nil || files == 0 || !seen {
		t.Errorf("reading the queue's files: %v; %d files, a prompt seen: %v", err, files, seen)
	}
	for _, k := range c.keys(t) {
		without("a key's name in Redis", []byte(k), quiet...)
		without("the value of "+k, []byte(c.value(k)), append([]string{linePrompt}, secrets...)...)
	}
	for _, name := range []string{"millrace.db", "millrace.db-wal"} {
		raw, err := os.ReadFile(filepath.Join(c.dir, name))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Error(err)
		}
		if name == "millrace.db" && len(raw) == 0 {
			t.Error("the database is not where the test looks")
		}
		without("the database", raw, quiet...)
	}
}

// tenantOfItsOwn makes a tenant with a key in the ledger, and returns a client with it, and the key's id.
func (c *client) tenantOfItsOwn(name, adminKey string) (mine *client, keyID string) {
	c.t.Helper()
	admin, own := *c, *c
	admin.key = adminKey
	admin.must(http.StatusOK, "POST", "/admin/v1/tenants", fmt.Appendf(nil, `{"id":%q,"limits":{"running":100,"requests_per_minute":10000,"tokens_per_minute":100000000}}`, name))
	var key struct{ ID, Secret string }
	if err := json.Unmarshal(admin.must(http.StatusOK, "POST", "/admin/v1/keys", fmt.Appendf(nil, `{"tenant":%q}`, name)).body, &key); err != nil || key.Secret == "" {
		c.t.Fatalf("a key without a secret: %v", err)
	}
	own.key = key.Secret
	return &own, key.ID
}

// everythingOfBatches runs a batch, reads its answers in each way, and has one refused for its lines. It returns what told of errors.
func (c *client) everythingOfBatches(content func(markers string) string) (told [][]byte) {
	c.t.Helper()
	good := c.upload(func(w io.Writer) error {
		var err error
		for i, markers := range []string{"tokens=3", "tokens=4", "status=400", "tokens=5"} {
			_, failed := io.WriteString(w, requestLine(fmt.Sprint("line-", i), content(markers), ""))
			err = errors.Join(err, failed)
		}
		return err
	})
	id := c.createBatch(good, "24h")
	b := c.batchEnded(id, 2*patience, func(*batchView) {})
	if b.Status != "completed" || b.Counts.Completed != 3 || b.Counts.Failed != 1 {
		c.t.Errorf("the batch ended as %+v", b)
	}
	c.fileLines(b.OutputFile, func(*outputLine) {})
	c.fileLines(b.ErrorFile, func(*outputLine) {})
	for _, path := range []string{"/v1/files", "/v1/batches", "/v1/batches/" + id, "/v1/batches/" + id + "/results"} {
		c.must(http.StatusOK, "GET", path, nil)
	}
	bad := c.upload(func(w io.Writer) error {
		_, err := io.WriteString(w, requestLine("a", content("tokens=3"), "")+requestLine("a", content("tokens=3"), "")+`{"custom_id":"b","body":"`+content("")+"\n"+
			strings.Replace(requestLine("c", content(""), ""), model, "nobody", 1)+strings.Replace(requestLine("d", content(""), ""), "/v1/chat/completions", "/v1/"+"other", 1))
		return err
	})
	refused := c.createBatch(bad, "24h")
	if b := c.batchEnded(refused, patience, func(*batchView) {}); b.Status != "failed" || b.Errors == nil || len(b.Errors.Data) < 3 {
		c.t.Errorf("the batch of bad lines ended as %+v", b)
	}
	told = append(told, c.must(http.StatusOK, "GET", "/v1/batches/"+refused, nil).body)
	return append(told, c.must(http.StatusNotFound, "GET", "/v1/files/file-nobody", nil).body)
}

// respond asks for a response in each way.
func (c *client) respond(content string) {
	c.t.Helper()
	body := func(more string) []byte { return fmt.Appendf(nil, `{"model":%q,"input":%q%s}`, model, content, more) }
	c.must(http.StatusOK, "POST", "/v1/responses", body(""))
	s, err := c.open("POST", "/v1/responses", body(`,"stream":true`))
	if err != nil {
		c.t.Fatal(err)
	}
	if _, err := s.rest(); err != nil {
		c.t.Error(err)
	}
	s.close()
	var r struct{ ID, Status string }
	if err := json.Unmarshal(c.must(http.StatusOK, "POST", "/v1/responses", body(`,"background":true`)).body, &r); err != nil {
		c.t.Fatal(err)
	}
	eventually(c.t, patience, "the response has ended", func() error {
		if err := json.Unmarshal(c.must(http.StatusOK, "GET", "/v1/responses/"+r.ID, nil).body, &r); err != nil {
			return err
		}
		if r.Status != "completed" {
			return fmt.Errorf("it is %s", r.Status)
		}
		return nil
	})
}

// value is all that a key of the Redis server holds, as text.
func (c *cluster) value(key string) string {
	c.t.Helper()
	commands := map[string][]string{
		"string": {"GET", key}, "hash": {"HGETALL", key}, "list": {"LRANGE", key, "0", "-1"}, "set": {"SMEMBERS", key},
		"zset": {"ZRANGE", key, "0", "-1"}, "stream": {"XRANGE", key, "-", "+"},
	}
	kind, _ := c.do("TYPE", key).(string)
	if kind == "none" {
		return ""
	}
	command, ok := commands[kind]
	if !ok {
		c.t.Errorf("key %s is a %s", key, kind)
		return ""
	}
	return strings.TrimSpace(fmt.Sprint(c.do(command...)))
}
