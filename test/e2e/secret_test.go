package e2e_test

import (
	"bytes"
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

// TestSecretsStayWhereTheyBelong: a client's key is nowhere but in its request. A prompt is in the bodies that are stored and sent, and in no log, metric, name or header.
func TestSecretsStayWhereTheyBelong(t *testing.T) {
	t.Parallel()
	const apiKey, adminKey, engineKey = "sk-canary-client-7Q2", "sk-canary-admin-8R3", "sk-canary-engine-9S4"
	const prompt, idempotency, answerless = "canaryprompt", "canary-idempotency", "canarymeta"
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
	wrong := *api.client
	wrong.key = "sk-canary-wrong-1T5"
	errorsSeen = append(errorsSeen, wrong.must(http.StatusUnauthorized, "GET", "/v1/jobs", nil).body)
	api.ended(patience, ids...)
	// Some that wait, and so are on the disk now.
	e.shut()
	api.submitMany(8, "", func(i int) string { return content("tokens=5") + fmt.Sprint(i) })

	secrets := []string{apiKey, adminKey, engineKey, wrong.key, idempotency}
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
	quiet := append([]string{prompt, answerless}, secrets...)
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
		without("a message's subject or header", []byte(h), append([]string{prompt}, secrets...)...)
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
		without("the value of "+k, []byte(c.value(k)), secrets...)
	}
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
