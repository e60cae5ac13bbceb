package api_test

import (
	"context"
	"encoding/json"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/getkin/kin-openapi/openapi3"

	"github.com/millrace/millrace/api"
	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
	"github.com/millrace/millrace/internal/scale"
)

// poolBody is a pool's description; more is added to it.
func poolBody(name, model, more string) string {
	return `{"name":"` + name + `","models":["` + model + `"],"provider":"process","max":3,"engine":{"command":["engine"],"env":{"TOKEN":"s3cret","LEVEL":"1"}}` + more + `}`
}

// fakeAutoscaler sends the heartbeats of an autoscaler, until it is told to be silent.
func (e *env) fakeAutoscaler(leads bool, pools ...cluster.PoolInfo) (say func(...cluster.PoolInfo), leave func()) {
	var now atomic.Pointer[[]cluster.PoolInfo]
	now.Store(&pools)
	ctx, cancel := context.WithCancel(e.t.Context())
	done := make(chan struct{})
	id := job.NewName("autoscaler_", time.Now())
	go func() {
		defer close(done)
		_ = e.cluster.Announce(ctx, func() cluster.Heartbeat { // what it is for is seen
			return cluster.Heartbeat{ID: id, Role: cluster.RoleAutoscaler, Epoch: id, Leader: leads, Pools: *now.Load()}
		})
	}()
	leave = func() { cancel(); <-done }
	e.t.Cleanup(leave)
	return func(p ...cluster.PoolInfo) { now.Store(&p); e.cluster.Nudge() }, leave
}

func TestPoolsAreAdministered(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{AdminKey: "sk-admin"})
	a := e.send("POST", "/admin/v1/pools", poolBody("chat", "m", ""), adminHeader)
	made := a.object(t)
	spec, _ := made["spec"].(map[string]any)
	if a.status != 200 || made["object"] != "pool" || made["name"] != "chat" || made["source"] != "api" || made["created_at"].(float64) < 1e9 || made["state"] != nil || spec["max"] != 3.0 || spec["idle"] != "5m" || spec["timezone"] != "UTC" {
		t.Fatalf("made: %d %s", a.status, a.body)
	}
	kept := func() map[string]string {
		t.Helper()
		p, err := e.ledger.Pool(t.Context(), "chat")
		if err != nil {
			t.Fatal(err)
		}
		var spec scale.Pool
		if err := json.Unmarshal(p.Spec, &spec); err != nil {
			t.Fatal(err)
		}
		return spec.Engine.Env
	}
	if env := kept(); env["TOKEN"] != "s3cret" || env["LEVEL"] != "1" {
		t.Errorf("it is kept with %v", env)
	}
	// What is hidden stays, and what is left out goes.
	changed := e.admin(200, "PUT", "/admin/v1/pools/chat", `{"models":["m","n"],"provider":"process","max":5,"engine":{"command":["engine"],"env":{"TOKEN":"***","NEW":"n3w"}}}`)
	if spec := changed["spec"].(map[string]any); spec["max"] != 5.0 || len(spec["models"].([]any)) != 2 || changed["created_at"] != made["created_at"] {
		t.Errorf("changed: %v", changed)
	}
	if env := kept(); len(env) != 2 || env["TOKEN"] != "s3cret" || env["NEW"] != "n3w" {
		t.Errorf("it is kept with %v", env)
	}
	for _, path := range []string{"/admin/v1/pools", "/admin/v1/pools/chat"} {
		if a := e.send("GET", path, "", adminHeader); a.status != 200 || !strings.Contains(string(a.body), `"env":{"NEW":"***","TOKEN":"***"}`) || strings.Contains(string(a.body), "s3cret") || strings.Contains(string(a.body), "n3w") {
			t.Errorf("%s: %d %s", path, a.status, a.body)
		}
	}
	if err := e.ledger.SyncPools(t.Context(), 1, []ledger.Pool{{Name: "filed", Spec: []byte(poolBody("filed", "of-file", ""))}}); err != nil {
		t.Fatal(err)
	}
	list := e.admin(200, "GET", "/admin/v1/pools", "")
	if data := list["data"].([]any); len(data) != 2 || list["first_id"] != "chat" || list["last_id"] != "filed" || data[1].(map[string]any)["source"] != "file" {
		t.Errorf("listed: %v", list)
	}
	e.admin(200, "POST", "/admin/v1/pools", `{"name":"pods","models":["of-pods"],"provider":"kubernetes","max":3,"kubernetes":{"namespace":"prod","kind":"Deployment","name":"llm"}}`)
	for name, tt := range map[string]struct {
		method, path, body string
		status             int
		code               job.Code
		param              string
	}{
		"there already":         {"POST", "", poolBody("chat", "x", ""), 409, job.CodePoolExists, "name"},
		"there in the file":     {"POST", "", poolBody("filed", "x", ""), 409, job.CodePoolExists, "name"},
		"another's model":       {"POST", "", poolBody("b", "n", ""), 409, job.CodeModelTaken, "models"},
		"the file's model":      {"PUT", "/chat", poolBody("chat", "of-file", ""), 409, job.CodeModelTaken, "models"},
		"out of bounds":         {"POST", "", poolBody("b", "x", `,"min":4`), 400, job.CodeInvalidValue, "min"},
		"unknown field":         {"POST", "", poolBody("b", "x", `,"maxx":4`), 400, job.CodeUnsupportedParameter, "maxx"},
		"twice":                 {"POST", "", poolBody("b", "x", `,"max":4`), 400, job.CodeInvalidValue, "max"},
		"a name of no text":     {"POST", "", `{"name":5}`, 400, job.CodeInvalidValue, "name"},
		"no object":             {"POST", "", `[]`, 400, job.CodeInvalidType, ""},
		"no body":               {"POST", "", ``, 400, job.CodeInvalidJSON, ""},
		"hidden from the start": {"POST", "", strings.Replace(poolBody("b", "x", ""), "s3cret", "***", 1), 400, job.CodeInvalidValue, "engine.env.TOKEN"},
		"hidden and not there":  {"PUT", "/chat", `{"models":["m"],"provider":"process","max":5,"engine":{"command":["e"],"env":{"OTHER":"***"}}}`, 400, job.CodeInvalidValue, "engine.env.OTHER"},
		"another name":          {"PUT", "/chat", poolBody("other", "m", ""), 400, job.CodeInvalidValue, "name"},
		"put of none":           {"PUT", "/nobody", poolBody("nobody", "x", ""), 404, job.CodePoolNotFound, "name"},
		"get of none":           {"GET", "/nobody", "", 404, job.CodePoolNotFound, "name"},
		"delete of none":        {"DELETE", "/nobody", "", 404, job.CodePoolNotFound, "name"},
		"desired of none":       {"GET", "/nobody/desired", "", 404, job.CodePoolNotFound, "name"},
		"put of the file's":     {"PUT", "/filed", poolBody("filed", "x", ""), 409, job.CodePoolFromFile, ""},
		"delete of the file's":  {"DELETE", "/filed", "", 409, job.CodePoolFromFile, ""},
		"another's workload": {
			"POST", "", `{"name":"b","models":["x"],"provider":"kubernetes","max":3,"kubernetes":{"namespace":"prod","kind":"Deployment","name":"llm","observe":true}}`, 409, job.CodeWorkloadTaken, "kubernetes.name",
		},
		"put of another's workload": {
			"PUT", "/chat", `{"models":["m"],"provider":"kubernetes","max":3,"kubernetes":{"namespace":"prod","kind":"Deployment","name":"llm"}}`, 409, job.CodeWorkloadTaken, "kubernetes.name",
		},
	} {
		a := e.send(tt.method, "/admin/v1/pools"+tt.path, tt.body, adminHeader)
		t.Log(name)
		a.wantError(t, tt.status, tt.code, tt.param)
		if tt.code == job.CodeWorkloadTaken && !strings.Contains(string(a.body), "Deployment llm is of the pool pods") {
			t.Errorf("%s: %s does not name the other pool", name, a.body)
		}
		if tt.code == job.CodePoolFromFile && !strings.Contains(string(a.body), "--pools") {
			t.Errorf("%s: %s does not say where to change it", name, a.body)
		}
	}
	if gone := e.admin(200, "DELETE", "/admin/v1/pools/chat", ""); gone["deleted"] != true || gone["name"] != "chat" {
		t.Errorf("deleted: %v", gone)
	}
	e.send("GET", "/admin/v1/pools/chat", "", adminHeader).wantError(t, 404, job.CodePoolNotFound, "name")
	for _, k := range e.cluster.Known() {
		if k.Model == "m" || k.Model == "n" {
			t.Errorf("the model of a pool that is gone is known: %+v", k)
		}
	}
	for _, path := range []string{"/admin/v1/pools", "/admin/v1/pools/filed/desired", "/admin/v1/scaling"} {
		e.send("GET", path, "").wantError(t, 401, job.CodeInvalidAPIKey, "")
	}
}

func TestSecretsInAPoolsCommandAreKeptAndNotShown(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	made := e.send("POST", "/admin/v1/pools", `{"name":"chat","models":["m"],"provider":"process","max":3,"engine":{"command":["engine","--api-key","s3cret","--hf-token=t0ken"]}}`)
	shown := made.object(t)["spec"].(map[string]any)
	shown["max"] = 4
	body, err := json.Marshal(shown)
	if err != nil {
		t.Fatal(err)
	}
	changed := e.send("PUT", "/admin/v1/pools/chat", string(body))
	for _, a := range []answer{made, changed, e.send("GET", "/admin/v1/pools/chat", ""), e.send("GET", "/admin/v1/pools", "")} {
		if a.status != 200 || !strings.Contains(string(a.body), `"command":["engine","--api-key","***","--hf-token=***"]`) {
			t.Errorf("%d %s", a.status, a.body)
		}
	}
	p, err := e.ledger.Pool(t.Context(), "chat")
	if err != nil || !strings.Contains(string(p.Spec), `"command":["engine","--api-key","s3cret","--hf-token=t0ken"]`) || !strings.Contains(string(p.Spec), `"max":4`) {
		t.Errorf("kept: %s, %v", p.Spec, err)
	}
	e.send("PUT", "/admin/v1/pools/chat", strings.Replace(string(body), "--hf-token", "--other-token", 1)).wantError(t, 400, job.CodeInvalidValue, "engine.command[3]")
}

// TestAPoolsModelIsKnownOnceThePoolIsThere: its jobs are accepted before any autoscaler has seen it.
func TestAPoolsModelIsKnownOnceThePoolIsThere(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	eventually(t, "all are heard who are there", func() bool { return e.send("GET", "/v1/models/"+string(model), "").status == 404 })
	e.admin(200, "POST", "/admin/v1/pools", poolBody("chat", string(model), ""))
	e.submit(jobBody(chat(1, ""), ""))
	e.admin(200, "PUT", "/admin/v1/pools/chat", poolBody("chat", "another", ""))
	if a := e.send("GET", "/v1/models/another", ""); a.status != 200 {
		t.Errorf("%d %s", a.status, a.body)
	}
}

func TestWhatAPoolIsToHaveIsTheAutoscalersWord(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	e.admin(200, "POST", "/admin/v1/pools", poolBody("chat", "m", ""))
	const path = "/admin/v1/pools/chat/desired"
	// Without an autoscaler that leads nothing is known, and nothing is 0.
	e.send("GET", path, "").wantError(t, 503, job.CodeUnavailable, "")
	e.fakeAutoscaler(false, cluster.PoolInfo{Name: "chat", Wanted: 1})
	eventually(t, "the standby is heard", func() bool {
		for _, m := range e.cluster.Members() {
			if m.Role == cluster.RoleAutoscaler {
				return true
			}
		}
		return false
	})
	e.send("GET", path, "").wantError(t, 503, job.CodeUnavailable, "")

	say, leave := e.fakeAutoscaler(true)
	eventually(t, "it leads", func() bool { return strings.Contains(string(e.send("GET", path, "").body), "has not decided") })
	e.send("GET", path, "").wantError(t, 503, job.CodeUnavailable, "")
	e.send("GET", "/admin/v1/pools/nobody/desired", "").wantError(t, 404, job.CodePoolNotFound, "name")

	say(cluster.PoolInfo{
		Name: "chat", Models: []job.Model{"m"}, Wanted: 2, Desired: 3, Ready: 1, Starting: 2, Draining: 1, Max: 3, ReadyAt: 1772366400, Unavailable: "it exits with code 1", RetryAt: 1772366500, Action: "scale_up", Reason: "because",
	})
	eventually(t, "it wants 3", func() bool { return e.send("GET", path, "").status == 200 })
	if a := e.send("GET", path, ""); string(a.body) != `{"pool":"chat","object":"pool.desired","desired":3}` {
		t.Errorf("%s", a.body)
	}
	state, _ := e.admin(200, "GET", "/admin/v1/pools/chat", "")["state"].(map[string]any)
	if state["wanted"] != 2.0 || state["ready"] != 1.0 || state["starting"] != 2.0 || state["draining"] != 1.0 || state["ready_at"] != 1772366400.0 || state["unavailable"] != "it exits with code 1" ||
		state["retry_at"] != 1772366500.0 || state["action"] != "scale_up" || state["reason"] != "because" {
		t.Errorf("its state is %v", state)
	}
	// A plan of 0 counts if it was decided on, and not if the demand could not be read.
	say(cluster.PoolInfo{Name: "chat", Action: "unknown", Reason: "no dispatcher leads"})
	eventually(t, "nothing is known", func() bool { return e.send("GET", path, "").status == 503 })
	say(cluster.PoolInfo{Name: "chat", Action: "hold"})
	eventually(t, "it wants none", func() bool {
		return string(e.send("GET", path, "").body) == `{"pool":"chat","object":"pool.desired","desired":0}`
	})
	leave()
	eventually(t, "it is gone", func() bool { return e.send("GET", path, "").status == 503 })
	if o := e.admin(200, "GET", "/admin/v1/pools/chat", ""); o["state"] != nil {
		t.Errorf("its state is %v", o["state"])
	}
}

func TestDecisionsAreListedNewestFirst(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	at := time.UnixMilli(1772366400500).UTC()
	for i, pool := range []string{"a", "b", "a", "b"} {
		d := scale.Decision{At: at, Pool: pool, Want: i, Action: scale.Hold, Reason: "as many as wanted"}
		if i == 3 {
			d = scale.Decision{
				At: at, Pool: pool, Want: 5, Start: 2, Stop: []string{"b-1"}, Action: scale.ScaleUp, Reason: "2,000 tokens wait", Forecast: scale.Forecast{Now: 1, Trend: 2, Season: 3, Used: 4}, Need: scale.Need{Rate: 1, Backlog: 5, Deadline: 5},
				Sample: scale.Sample{
					Now: at, Waiting: map[job.Class]scale.Amount{job.Standard: {Jobs: 4, Tokens: 2000}}, InFlight: scale.Amount{Jobs: 1, Tokens: 10}, Unfed: []scale.Due{{Amount: scale.Amount{Jobs: 7, Tokens: 70}, By: at.Add(time.Hour)}},
					Workers:    []scale.Worker{{Name: "b-1", State: scale.Ready, Since: at, Jobs: 0, IdleSince: at}, {Name: "b-2", State: scale.Starting, Since: at}, {Name: "b-3", State: scale.Draining, Since: at, Jobs: 2}},
					Throughput: 1200, ColdStart: scale.ColdStart{P50: 45 * time.Second, P90: time.Minute, Samples: 9}, Failures: 1, RetryAt: at.Add(time.Second), Failure: "exit 1", Limit: 4,
				},
			}
		}
		raw, err := json.Marshal(d)
		if err != nil {
			t.Fatal(err)
		}
		if err := e.ledger.InsertScaling(t.Context(), 1, ledger.Scaling{Pool: pool, At: job.MillisOf(at), Action: string(d.Action), Decision: raw}); err != nil {
			t.Fatal(err)
		}
	}
	list := e.admin(200, "GET", "/admin/v1/scaling?limit=2", "")
	if data := list["data"].([]any); len(data) != 2 || list["first_id"] != "4" || list["last_id"] != "3" || list["has_more"] != true {
		t.Errorf("the first page: %v", list)
	}
	rest := e.admin(200, "GET", "/admin/v1/scaling?after=3", "")
	if data := rest["data"].([]any); len(data) != 2 || rest["first_id"] != "2" || rest["has_more"] != false {
		t.Errorf("the rest: %v", rest)
	}
	a := e.send("GET", "/admin/v1/scaling?pool=b&limit=1", "")
	const want = `{"object":"list","data":[{"id":"4","object":"scaling_decision","pool":"b","at":1772366400.5,"action":"scale_up","reason":"2,000 tokens wait","from":2,"want":5,"start":2,"stop":["b-1"],` +
		`"forecast":{"now":1,"trend":2,"season":3,"used":4},"need":{"rate":1,"backlog":5,"deadline":5,"schedule":0,"min":0},` +
		`"sample":{"unknown":null,"waiting":{"standard":{"jobs":4,"tokens":2000}},"in_flight":{"jobs":1,"tokens":10},"unfed":[{"jobs":7,"tokens":70,"by":1772370000.5}],` +
		`"workers":[{"name":"b-1","state":"ready","since":1772366400.5,"jobs":0,"idle_since":1772366400.5},{"name":"b-2","state":"starting","since":1772366400.5,"jobs":0,"idle_since":null},` +
		`{"name":"b-3","state":"draining","since":1772366400.5,"jobs":2,"idle_since":null}],"tokens_per_second":1200,"cold_start":{"p50_seconds":45,"p90_seconds":60,"samples":9},` +
		`"failures":1,"failure":"exit 1","retry_at":1772366401.5,"limit":4}}],"first_id":"4","last_id":"4","has_more":true}`
	if string(a.body) != want {
		t.Errorf("got  %s\nwant %s", a.body, want)
	}
	if none := e.admin(200, "GET", "/admin/v1/scaling?pool=c", ""); len(none["data"].([]any)) != 0 || none["first_id"] != nil {
		t.Errorf("of a pool that has none: %v", none)
	}
	e.send("GET", "/admin/v1/scaling?limit=0", "").wantError(t, 400, job.CodeInvalidValue, "limit")
	for _, after := range []string{"x", "0", "-1"} {
		e.send("GET", "/admin/v1/scaling?after="+after, "").wantError(t, 400, job.CodeInvalidValue, "after")
	}

	// All is as it is described.
	doc, err := openapi3.NewLoader().LoadFromFile("openapi.json")
	if err != nil {
		t.Fatal(err)
	}
	e.admin(200, "POST", "/admin/v1/pools", poolBody("chat", "m", ""))
	e.fakeAutoscaler(true, cluster.PoolInfo{Name: "chat", Wanted: 1, Action: "hold"})
	eventually(t, "the autoscaler is heard", func() bool { return e.send("GET", "/admin/v1/pools/chat/desired", "").status == 200 })
	for path, schema := range map[string]string{
		"/admin/v1/pools": "PoolList", "/admin/v1/pools/chat": "Pool", "/admin/v1/pools/chat/desired": "DesiredWorkers", "/admin/v1/scaling": "ScalingList",
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
