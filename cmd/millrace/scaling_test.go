package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/client"
	"github.com/millrace/millrace/internal/scale"
)

// fakePools answers the routes of pools as the API does.
type fakePools struct {
	*httptest.Server

	mu        sync.Mutex
	pools     map[string]json.RawMessage
	state     *client.PoolState
	asked     []string
	decisions []client.ScalingDecision // the oldest first
	// looked, if not nil, is called when decisions are listed.
	looked func()
}

func newFakePools(t *testing.T) *fakePools {
	t.Helper()
	f := &fakePools{pools: map[string]json.RawMessage{}}
	refuse := func(w http.ResponseWriter, status int, code string) {
		w.WriteHeader(status)
		_, _ = fmt.Fprintf(w, `{"error":{"message":"No.","type":"invalid_request_error","param":null,"code":%q}}`, code)
	}
	object := func(name string) client.Pool {
		return client.Pool{Object: "pool", Name: name, Source: "api", CreatedAt: 1700000000, UpdatedAt: float64(time.Now().Add(-90 * time.Second).Unix()), Spec: f.pools[name], State: f.state}
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /admin/v1/pools", func(w http.ResponseWriter, _ *http.Request) {
		list := struct {
			Data []client.Pool `json:"data"`
		}{}
		for name := range f.pools {
			list.Data = append(list.Data, object(name))
		}
		_ = json.NewEncoder(w).Encode(list)
	})
	mux.HandleFunc("POST /admin/v1/pools", func(w http.ResponseWriter, r *http.Request) {
		var spec struct{ Name string }
		var raw json.RawMessage
		_ = json.NewDecoder(r.Body).Decode(&raw)
		_ = json.Unmarshal(raw, &spec)
		f.pools[spec.Name] = raw
		_ = json.NewEncoder(w).Encode(object(spec.Name))
	})
	mux.HandleFunc("/admin/v1/pools/{name}", func(w http.ResponseWriter, r *http.Request) {
		name := r.PathValue("name")
		switch _, there := f.pools[name]; {
		case !there:
			refuse(w, 404, "pool_not_found")
		case name == "filed" && r.Method != "GET":
			refuse(w, 409, "pool_from_file")
		case r.Method == "DELETE":
			delete(f.pools, name)
			_, _ = w.Write([]byte(`{}`))
		case r.Method == "PUT":
			var raw json.RawMessage
			_ = json.NewDecoder(r.Body).Decode(&raw)
			f.pools[name] = raw
			fallthrough
		default:
			_ = json.NewEncoder(w).Encode(object(name))
		}
	})
	mux.HandleFunc("GET /admin/v1/scaling", func(w http.ResponseWriter, r *http.Request) {
		list := struct {
			Data    []client.ScalingDecision `json:"data"`
			HasMore bool                     `json:"has_more"`
		}{}
		limit, _ := strconv.Atoi(r.URL.Query().Get("limit"))
		after, _ := strconv.Atoi(r.URL.Query().Get("after"))
		for i := len(f.decisions) - 1; i >= 0; i-- {
			d := f.decisions[i]
			id, _ := strconv.Atoi(d.ID)
			if pool := r.URL.Query().Get("pool"); after > 0 && id >= after || pool != "" && d.Pool != pool {
				continue
			}
			if list.HasMore = len(list.Data) == limit; list.HasMore {
				break
			}
			list.Data = append(list.Data, d)
		}
		_ = json.NewEncoder(w).Encode(list)
		if f.looked != nil {
			f.looked()
		}
	})
	f.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.asked = append(f.asked, r.Method+" "+r.URL.RequestURI())
		if r.Header.Get("Authorization") == "Bearer wrong" {
			refuse(w, 403, "permission_denied")
			return
		}
		mux.ServeHTTP(w, r)
	}))
	t.Cleanup(f.Close)
	return f
}

func (f *fakePools) decide(n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for range n {
		f.add()
	}
}

func (f *fakePools) add() {
	id := len(f.decisions) + 1
	f.decisions = append(f.decisions, client.ScalingDecision{ID: strconv.Itoa(id), Pool: "chat", At: 1700000000 + float64(id), Action: "scale_up", From: id, Want: id + 1, Reason: fmt.Sprintf("reason %d.", id)})
}

func (f *fakePools) ask(t *testing.T, stdin string, args ...string) result {
	t.Helper()
	return millrace(t, map[string]string{"MILLRACE_URL": f.URL}, stdin, args...)
}

const twoPools = `pools:
  - name: chat
    models: [llama]
    provider: process
    max: 4
    engine: {command: [vllm, serve, "{port}"], env: {TOKEN: "***"}}
  - name: filed
    models: [qwen]
    provider: kubernetes
    min: 1
    max: 2
    kubernetes: {kind: Deployment, name: worker}
`

func TestPoolsAreAppliedAndRead(t *testing.T) {
	t.Parallel()
	f := newFakePools(t)
	if r := f.ask(t, "", "pools", "list"); r.code != 0 || !strings.Contains(r.out, "millrace pools apply -f FILE") {
		t.Errorf("none: %+v", r)
	}
	file := filepath.Join(t.TempDir(), "pools.yaml")
	if err := os.WriteFile(file, []byte(twoPools), 0o600); err != nil {
		t.Fatal(err)
	}
	if r := f.ask(t, "", "pools", "apply", "-f", file); r.code != 0 || r.out != "chat made\nfiled made\n" {
		t.Fatalf("%+v", r)
	}
	// What was read can be applied, and changes nothing.
	before := string(f.pools["chat"])
	got := f.ask(t, "", "pools", "get", "chat")
	if got.code != 0 || !strings.HasPrefix(got.out, "pools:\n") || !strings.Contains(got.out, "cooldown: 5m\n") || !strings.Contains(got.out, "TOKEN: '***'\n") {
		t.Fatalf("%+v", got)
	}
	if r := f.ask(t, got.out, "pools", "apply", "-f", "-"); r.code != 0 || r.out != "chat changed\n" {
		t.Fatalf("%+v", r)
	}
	if d := cmp.Diff(before, string(f.pools["chat"])); d != "" {
		t.Error(d)
	}
	if pools, err := scale.ParsePools([]byte(got.out)); err != nil || len(pools) != 1 || pools[0].Max != 4 {
		t.Errorf("%v: %+v", err, pools)
	}
	f.state = &client.PoolState{Wanted: 3, Ready: 2, Starting: 1, Max: 4}
	if r := f.ask(t, "", "pools", "list"); r.code != 0 || !strings.Contains(r.out, "POOL   PROVIDER    MIN  MAX  WANTED  READY  STARTING  FROM  CHANGED    MODELS\n") ||
		!strings.Contains(r.out, "filed  kubernetes  1    2    3       2      1         api   1m") {
		t.Errorf("%+v", r)
	}
	var list []client.Pool
	r := f.ask(t, "", "pools", "list", "-o", "json")
	if err := json.Unmarshal([]byte(r.out), &list); err != nil || len(list) != 2 || list[0].State.Wanted != 3 {
		t.Errorf("%v: %+v", err, r)
	}
	if r := f.ask(t, "", "pools", "delete", "chat"); r.code != 0 || r.out != "chat deleted\n" {
		t.Errorf("%+v", r)
	}
	for _, tt := range []struct {
		stdin string
		args  []string
		code  int
		want  string
	}{
		{"", []string{"pools", "delete", "chat"}, exitFailed, "pool_not_found"},
		{"", []string{"pools", "delete", "filed"}, exitFailed, "pool_from_file"},
		{"", []string{"pools", "delete"}, exitUsage, "a pool's name is missing"},
		{"", []string{"pools", "get", "nobody"}, exitFailed, "pool_not_found"},
		{"", []string{"pools", "apply"}, exitUsage, "file is missing"},
		{"", []string{"pools", "apply", "-f", "/nowhere/x.yaml"}, exitFailed, "no such file"},
		{"pools:\n  - name: a\n    maxx: 1", []string{"pools", "apply", "-f", "-"}, exitUsage, `line 3: pool "a": maxx is not known`},
		{twoPools, []string{"pools", "apply", "-f", "-"}, exitFailed, "pool filed: No. (409 pool_from_file)"},
		{"", []string{"pools", "list", "--admin-key", "wrong"}, exitFailed, "set MILLRACE_ADMIN_KEY"},
		{"", []string{"pools", "show"}, exitUsage, `no command "show"`},
		{"", []string{"scaling", "nobody"}, exitFailed, "pool_not_found"},
		{"", []string{"scaling", "--limit", "101"}, exitUsage, "limit is 101"},
		{"", []string{"scaling", "--every", "0s"}, exitUsage, "every is 0s"},
	} {
		if r := f.ask(t, tt.stdin, tt.args...); r.code != tt.code || !strings.Contains(r.err, tt.want) || strings.Count(r.err, "\n") != 1 {
			t.Errorf("%v: %+v, want %s", tt.args, r, tt.want)
		}
	}
}

func TestScalingIsOnePage(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_700_000_000, 0)
	at := func(d time.Duration) float64 { return float64(now.Add(d).UnixMilli()) / 1000 }
	p := &page{
		Pools: []client.Pool{
			{Name: "chat", State: &client.PoolState{
				Wanted: 5, Ready: 2, Starting: 3, Draining: 1, Max: 8, ReadyAt: at(32 * time.Second), Action: "scale_up",
				Reason: "5 workers are wanted: 182,400 tokens wait and are to start within 30s, and the trend leads from 900 to 2,150 tokens/s within a cold start of 48s; 2 are ready and 3 start",
			}},
			{Name: "long-context-with-a-long-name", State: &client.PoolState{Wanted: 1, Max: 1, Unavailable: "it exits with code 1", RetryAt: at(80 * time.Second), Action: "unavailable", Reason: "starts fail"}},
			{Name: "new"},
		},
		Decisions: []client.ScalingDecision{
			{ID: "12", Pool: "chat", At: at(-4 * time.Second), Action: "scale_up", From: 2, Want: 5, Reason: strings.Repeat("a reason that is rather long and goes on, ", 4) + strings.Repeat("x", 90)},
			{ID: "11", Pool: "long-context-with-a-long-name", At: at(-3 * time.Hour), Action: "at_capacity", From: 0, Want: 1, Reason: "the provider has no room"},
		},
	}
	var out strings.Builder
	if err := printScalingPage(&out, now, p); err != nil {
		t.Fatal(err)
	}
	const want = `POOL                           WANTED  READY  STARTING  DRAINING  MAX  NOW
chat                           5       2      3         1         8    first ready in ~32 s; 5 workers are wanted:
                                                                       182,400 tokens wait and are to start within 30s,
                                                                       and the trend leads from 900 to 2,150 tokens/s
                                                                       within a cold start of 48s; 2 are ready and 3
                                                                       start
long-context-with-a-long-name  1       0      0         0         1    no worker can be started: it exits with code 1;
                                                                       the next try is in ~1m20s; starts fail
new                            ?       ?      ?         ?         ?    no autoscaler has told of it

no autoscaler leads, or it has not decided yet: start one with ` + "`millrace autoscaler`" + `

AGO    POOL                           ACTION       WORKERS  WHY
4s     chat                           scale up     2 -> 5   a reason that is rather long and goes on, a reason that is
                                                            rather long and goes on, a reason that is rather long and
                                                            goes on, a reason that is rather long and goes on,
                                                            xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx
                                                            xxxxxxxxxxxxxxxxxxxxxxxxxxxxxx
3h00m  long-context-with-a-long-name  at capacity  0 -> 1   the provider has no room
`
	if d := cmp.Diff(want, out.String()); d != "" {
		t.Error(d)
	}
	for line := range strings.Lines(out.String()) {
		if utf8.RuneCountInString(strings.TrimRight(line, "\n")) > 120 {
			t.Errorf("wider than 120 columns: %q", line)
		}
	}
	out.Reset()
	if err := printScalingPage(&out, now, &page{}); err != nil || out.String() != noPools+"\n" {
		t.Errorf("%v: %q", err, out.String())
	}
	out.Reset()
	if err := printScalingPage(&out, now, &page{Pools: []client.Pool{{Name: "a", State: &client.PoolState{}}}}); err != nil || !strings.HasSuffix(out.String(), "\nnothing was decided yet\n") {
		t.Errorf("%v: %q", err, out.String())
	}
}

func TestScalingAsJSONIsAll(t *testing.T) {
	t.Parallel()
	f := newFakePools(t)
	f.decide(3)
	if r := f.ask(t, "", "scaling", "--limit", "2", "-o", "json"); r.code != 0 || !strings.Contains(r.out, `"pools": []`) || strings.Count(r.out, `"reason": `) != 2 || !strings.Contains(r.out, "reason 3.") {
		t.Errorf("%+v", r)
	}
}

// TestScalingIsFollowed: each decision is told once and in order, however many come between two looks.
func TestScalingIsFollowed(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		args []string
		// line is how the n-th decision is told.
		line func(n int) string
		// first is the first that is told as a line.
		first int
	}{
		"lines": {nil, func(n int) string {
			return fmt.Sprintf("%s  chat  scale up  %d -> %d  reason %d.", time.Unix(1_700_000_000+int64(n), 0).Format(time.TimeOnly), n, n+1, n)
		}, 4},
		"JSON": {[]string{"-o", "json"}, func(n int) string { return fmt.Sprintf(`"reason":"reason %d."`, n) }, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFakePools(t)
			f.decide(3)
			looks := 0
			f.looked = func() { // after the first look, one; after the second more than two pages
				switch looks++; looks {
				case 1:
					f.add()
				case 2:
					for range 250 {
						f.add()
					}
				}
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			out := newScreen()
			p := &program{in: strings.NewReader(""), out: out, err: newScreen(), lookup: lookup(map[string]string{"MILLRACE_URL": f.URL})}
			ended := make(chan int, 1)
			go func() { ended <- run(ctx, p, append([]string{"scaling", "--watch", "--every", "1ms"}, c.args...)) }()
			text := out.wait(soon(t), t, c.line(254))
			cancel()
			if code := <-ended; code != exitInterrupted {
				t.Errorf("it ended with %d", code)
			}
			at := 0
			for n := c.first; n <= 254; n++ {
				i := strings.Index(text[at:], c.line(n))
				if i < 0 || strings.Count(text, c.line(n)) != 1 {
					t.Fatalf("decision %d is not told once and in order, but %d times in %d lines", n, strings.Count(text, c.line(n)), strings.Count(text, "\n"))
				}
				at += i
			}
		})
	}
}

// TestScalingIsRedrawnOnATerminal: the page takes the place of the last one.
func TestScalingIsRedrawnOnATerminal(t *testing.T) {
	t.Parallel()
	f := newFakePools(t)
	f.decide(1)
	c, err := client.New(client.Config{URL: f.URL})
	if err != nil {
		t.Fatal(err)
	}
	defer c.CloseIdleConnections()
	f.looked = f.add
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	out := newScreen()
	s := &scalingView{api: c, w: out, limit: 1, every: time.Millisecond}
	ended := make(chan error, 1)
	go func() { ended <- s.watch(ctx, true) }()
	text := out.wait(soon(t), t, "reason 3.")
	cancel()
	<-ended
	if strings.Count(text, "\x1b[H\x1b[2JAGO")+strings.Count(text, "\x1b[H\x1b[2J\nAGO") < 3 {
		t.Errorf("it is not drawn anew:\n%q", text)
	}
}

// TestPoolsThroughTheAPI: what the fake of the other tests plays, a platform does.
func TestPoolsThroughTheAPI(t *testing.T) {
	t.Parallel()
	_, url := startUp(t, "--data", t.TempDir())
	env := map[string]string{"MILLRACE_URL": url}
	ask := func(stdin string, args ...string) result { return millrace(t, env, stdin, args...) }
	const pool = "pools:\n  - {name: chat, models: [llama], provider: command, max: 4, command: {start: [a], stop: [b], list: ['true']}, engine: {env: {TOKEN: s3cret}}}\n"
	if r := ask(pool, "pools", "apply", "-f", "-"); r.code != 0 || r.out != "chat made\n" {
		t.Fatalf("%+v", r)
	}
	got := ask("", "pools", "get", "chat")
	if got.code != 0 || !strings.Contains(got.out, "TOKEN: '***'") || strings.Contains(got.out, "s3cret") {
		t.Fatalf("%+v", got)
	}
	if r := ask(strings.Replace(got.out, "max: 4", "max: 5", 1), "pools", "apply", "-f", "-"); r.code != 0 || r.out != "chat changed\n" {
		t.Errorf("%+v", r)
	}
	if r := ask(strings.Replace(pool, "chat", "b", 1), "pools", "apply", "-f", "-"); r.code != exitFailed || !strings.Contains(r.err, "pool b: ") || !strings.Contains(r.err, "llama is of the pool chat") {
		t.Errorf("%+v", r)
	}
	if r := ask("", "pools", "list"); r.code != 0 || !strings.Contains(r.out, "chat  command   0    5 ") {
		t.Errorf("%+v", r)
	}
	for _, args := range [][]string{{"scaling"}, {"scaling", "chat"}, {"scaling", "-o", "json"}} {
		if r := ask("", args...); r.code != 0 || !strings.Contains(r.out, "chat") {
			t.Errorf("%v: %+v", args, r)
		}
	}
	if r := ask("", "pools", "delete", "chat"); r.code != 0 || r.out != "chat deleted\n" {
		t.Errorf("%+v", r)
	}
}
