package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/client"
	"github.com/millrace/millrace/internal/job"
)

const (
	doneJob = `{"id":"job_1","object":"job","status":"completed","endpoint":"/v1/chat/completions","model":"m","priority":"standard","created_at":1700000000.5,` +
		`"started_at":1700000001,"first_token_at":1700000001.25,"finished_at":1700000003,"expires_at":1700086400,"attempts":[{"worker":"w","started_at":1700000001,` +
		`"ended_at":1700000003,"outcome":"completed"}],"queue":null,"result":{"status_code":200,"body":{"choices":[{"index":0,"message":{"content":"Because."}}]}},` +
		`"error":null,"usage":{"prompt_tokens":12,"completion_tokens":2,"total_tokens":14},"metadata":{}}`
	failedJob = `{"id":"job_2","object":"job","status":"failed","model":"m","created_at":1700000000,"finished_at":1700000003,` +
		`"error":{"message":"The engine crashed.","type":"server_error","param":null,"code":"worker_crashed"},"result":null}`
	waitingJob = `{"id":"job_3","object":"job","status":"queued","model":"m","priority":"batch","created_at":1700000000,"queue":{"position":12,"eta_seconds":3.4,"reason":"saturated"},"error":null,"result":null}`
)

// fakeAPI answers as the API does, and notes what it was asked.
type fakeAPI struct {
	*httptest.Server
	asked []string
	job   string // what a submitted job becomes
}

func newFakeAPI(t *testing.T) *fakeAPI {
	t.Helper()
	f := &fakeAPI{job: doneJob}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"object":"list","data":[{"id":"m"},{"id":"m:latest"}]}`)
	})
	mux.HandleFunc("POST /v1/jobs", func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		f.asked = append(f.asked, string(body))
		w.WriteHeader(http.StatusAccepted)
		_, _ = io.WriteString(w, f.job)
	})
	mux.HandleFunc("GET /v1/jobs", func(w http.ResponseWriter, r *http.Request) {
		f.asked = append(f.asked, r.URL.RawQuery)
		if r.URL.Query().Get("after") == "" {
			_, _ = fmt.Fprintf(w, `{"object":"list","data":[%s,%s],"last_id":"job_2","has_more":true}`, waitingJob, failedJob)
			return
		}
		_, _ = fmt.Fprintf(w, `{"object":"list","data":[%s],"last_id":"job_1","has_more":false}`, doneJob)
	})
	mux.HandleFunc("GET /v1/jobs/{id}", func(w http.ResponseWriter, r *http.Request) {
		switch r.PathValue("id") {
		case "job_3":
			_, _ = io.WriteString(w, waitingJob)
		case "job_404":
			w.WriteHeader(http.StatusNotFound)
			_, _ = io.WriteString(w, `{"error":{"message":"There is no such job.","type":"invalid_request_error","param":null,"code":"job_not_found"}}`)
		default:
			_, _ = io.WriteString(w, f.job)
		}
	})
	mux.HandleFunc("GET /v1/jobs/{id}/events", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, ": queued reason=saturated position=3 eta=2.0\n"+
			"event: status\nid: 1\ndata: {\"status\":\"running\"}\n\n"+
			"event: token\nid: 3\ndata: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"Be\"}}]}\ndata: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"cause.\"}}]}\n\n"+
			"event: done\nid: 4\ndata: "+f.job+"\n\n")
	})
	mux.HandleFunc("POST /v1/jobs/{id}/cancel", func(w http.ResponseWriter, r *http.Request) {
		_, _ = fmt.Fprintf(w, `{"id":%q,"status":"cancelled"}`, r.PathValue("id"))
	})
	mux.HandleFunc("POST /admin/v1/workers/{id}/drain", func(w http.ResponseWriter, r *http.Request) {
		id := r.PathValue("id")
		if id == "nobody" {
			w.WriteHeader(http.StatusNotFound)
			_, _ = io.WriteString(w, `{"error":{"message":"There is no live worker \"nobody\".","type":"invalid_request_error","param":"id","code":"worker_not_found"}}`)
			return
		}
		f.asked = append(f.asked, "drain "+id)
		w.WriteHeader(http.StatusAccepted)
		_, _ = fmt.Fprintf(w, `{"id":%q,"object":"worker","name":"gpu","state":"draining","models":["m"],"running":%d,"in_hand":0}`, id, len(id)-1)
	})
	mux.HandleFunc("DELETE /v1/jobs/{id}", func(w http.ResponseWriter, r *http.Request) {
		f.asked = append(f.asked, "DELETE "+r.PathValue("id"))
	})
	f.Server = httptest.NewServer(mux)
	t.Cleanup(f.Close)
	return f
}

// ask runs a client command against the fake.
func (f *fakeAPI) ask(t *testing.T, stdin string, args ...string) result {
	t.Helper()
	return millrace(t, map[string]string{"OPENAI_BASE_URL": f.URL + "/v1"}, stdin, args...)
}

func TestDrain(t *testing.T) {
	t.Parallel()
	f := newFakeAPI(t)
	for _, tt := range []struct {
		args      []string
		code      int
		out, errs string
	}{
		{args: []string{"a/b"}, out: "a/b drains; 2 jobs on it, by its last word: stop it once none runs\n"},
		{args: []string{"w"}, out: "w drains; nothing runs on it: stop it whenever you like\n"},
		{args: []string{"nobody"}, code: exitFailed, errs: "There is no live worker"},
		{code: exitUsage, errs: "the worker is missing"},
	} {
		r := f.ask(t, "", append([]string{"drain"}, tt.args...)...)
		if r.code != tt.code || r.out != tt.out || !strings.Contains(r.err, tt.errs) {
			t.Errorf("drain %v: %+v", tt.args, r)
		}
	}
	if r := f.ask(t, "", "drain", "w", "-o", "json"); r.code != 0 || !strings.Contains(r.out, `"state": "draining"`) {
		t.Errorf("as JSON: %+v", r)
	}
	if want := []string{"drain a/b", "drain w", "drain w"}; !slices.Equal(f.asked, want) {
		t.Errorf("asked %v", f.asked)
	}
}

func TestSubmit(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name      string
		args      []string
		stdin     string
		job       string
		code      int
		out, errs string
	}{
		{name: "waits by itself", args: []string{"Why?"}, out: "Because.\n"},
		{name: "waits when told", args: []string{"--wait", "Why?"}, out: "Because.\n"},
		{name: "streams", args: []string{"--stream", "Why?"}, out: "Because.\n", errs: "queued: position 3, about 2.0s: every worker is full\n"},
		{name: "does not wait", args: []string{"--async", "Why?"}, out: "job_1\n"},
		{name: "reads the standard input", args: []string{"-"}, stdin: "Why?", out: "Because.\n"},
		{name: "reads it without being told", stdin: "Why?", out: "Because.\n"},
		{name: "a failed job", args: []string{"Why?"}, job: failedJob, code: exitJob, errs: "millrace: job_2 failed: The engine crashed. (worker_crashed)\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			f := newFakeAPI(t)
			if tt.job != "" {
				f.job = tt.job
			}
			r := f.ask(t, tt.stdin, append([]string{"submit"}, tt.args...)...)
			if diff := cmp.Diff(result{tt.code, tt.out, tt.errs}, r, cmp.AllowUnexported(result{})); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestSubmitSendsWhatItWasTold(t *testing.T) {
	t.Parallel()
	f := newFakeAPI(t)
	r := f.ask(t, "", "submit", "--priority", "batch", "--session", "s1", "--deadline", "90s", "--max-tokens", "7", "-o", "json", "a \"b\" <c>")
	if r.code != 0 || !json.Valid([]byte(r.out)) {
		t.Fatalf("code %d: %s%s", r.code, r.out, r.err)
	}
	want := `{"body":{"model":"m","messages":[{"role":"user","content":"a \"b\" \u003cc\u003e"}],"max_tokens":7},"priority":"batch","session":"s1","stream":false,"deadline":"1m30s"}`
	if diff := cmp.Diff([]string{want}, f.asked); diff != "" {
		t.Error(diff)
	}
}

func TestJobsList(t *testing.T) {
	t.Parallel()
	f := newFakeAPI(t)
	r := f.ask(t, "", "jobs", "list", "--all", "--status", "queued", "--limit", "2")
	for _, want := range []string{"ID", "WAITED", "job_1", "job_2", "job_3", "failed", "500ms"} {
		if !strings.Contains(r.out, want) {
			t.Errorf("no %q in:\n%s", want, r.out)
		}
	}
	if diff := cmp.Diff([]string{"limit=2&status=queued", "after=job_2&limit=2&status=queued"}, f.asked); diff != "" {
		t.Error(diff)
	}
	if r := f.ask(t, "", "jobs", "list"); !strings.Contains(r.out, "there are more") {
		t.Errorf("it does not say that there are more:\n%s", r.out)
	}
}

func TestJobsGet(t *testing.T) {
	t.Parallel()
	f := newFakeAPI(t)
	for _, tt := range []struct {
		id   string
		want []string
	}{
		{"job_1", []string{"completed", "waited", "500ms", "2.0s, first token after 250ms", "w: completed", "12 in, 2 out", "\nBecause.\n"}},
		{"job_3", []string{"queued", "position 12, about 3.4s: every worker is full"}},
	} {
		r := f.ask(t, "", "jobs", "get", tt.id)
		for _, want := range tt.want {
			if !strings.Contains(r.out, want) {
				t.Errorf("no %q in:\n%s%s", want, r.out, r.err)
			}
		}
	}
	r := f.ask(t, "", "jobs", "get", "job_1", "--wait", "-o", "json")
	var got, want any
	if err := json.Unmarshal([]byte(r.out), &got); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal([]byte(doneJob), &want); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("the JSON is not the server's: %s", diff)
	}
	if r := f.ask(t, "", "jobs", "get", "job_404"); r.code != exitFailed || r.err != "millrace: There is no such job. (404 job_not_found): `millrace jobs list` shows those that there are\n" {
		t.Errorf("got %+v", r)
	}
}

func TestJobsWatchCancelDelete(t *testing.T) {
	t.Parallel()
	f := newFakeAPI(t)
	for _, tt := range []struct {
		args []string
		out  string
	}{
		{[]string{"watch", "job_1"}, "Because.\n"},
		{[]string{"cancel", "job_1", "job_2"}, "job_1 cancelled\njob_2 cancelled\n"},
		{[]string{"delete", "job_1"}, "job_1 deleted\n"},
	} {
		if r := f.ask(t, "", append([]string{"jobs"}, tt.args...)...); r.code != 0 || r.out != tt.out {
			t.Errorf("%v: got %+v", tt.args, r)
		}
	}
}

func TestHealthAsksTheRouteOfTheEnvironment(t *testing.T) {
	t.Parallel()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/bad" {
			w.WriteHeader(http.StatusServiceUnavailable)
			_, _ = io.WriteString(w, "{\"status\":\"not ready\"}\n")
		}
	}))
	t.Cleanup(srv.Close)
	if r := millrace(t, map[string]string{"MILLRACE_HEALTH_URL": srv.URL + "/good"}, "", "health"); r.code != 0 {
		t.Errorf("got %+v", r)
	}
	r := millrace(t, map[string]string{"MILLRACE_HEALTH_URL": srv.URL + "/bad"}, "", "health")
	if r.code != exitFailed || !strings.Contains(r.err, "not ready") || !strings.Contains(r.err, "503") {
		t.Errorf("got %+v", r)
	}
}

func TestATenantThatWasDeletedIsNotSaidToBeChangeable(t *testing.T) {
	t.Parallel()
	for code, hinted := range map[job.Code]bool{job.CodeTenantExists: true, job.CodeTenantDeleted: false} {
		err := explain(nil, &client.Error{Status: http.StatusConflict, Code: code, Message: "no"})
		if strings.Contains(err.Error(), "`millrace tenants update`") != hinted {
			t.Errorf("hinted %v: %v", !hinted, err)
		}
	}
}

// TestTheOtherKeysFlagIsNamed: some commands take --admin-key in place of --api-key.
func TestTheOtherKeysFlagIsNamed(t *testing.T) {
	t.Parallel()
	for args, want := range map[string]string{
		"status --api-key k": "this command takes --admin-key", "keys list --api-key=k": "this command takes --admin-key", "jobs list --admin-key k": "this command takes --api-key",
		"status --nope k": "unknown flag: --nope: see",
	} {
		if r := millrace(t, nil, "", strings.Fields(args)...); r.code != exitUsage || !strings.Contains(r.err, want) || !strings.Contains(r.err, "--help`") {
			t.Errorf("%s: %+v", args, r)
		}
	}
}

func TestAKeysLimitsAreNotATenants(t *testing.T) {
	t.Parallel()
	if r := millrace(t, nil, "", "keys", "create", "--help"); strings.Contains(r.out, "given to workers") || !strings.Contains(r.out, "jobs and lines aside") {
		t.Errorf("a key's: %s", r.out)
	}
	if r := millrace(t, nil, "", "tenants", "create", "--help"); !strings.Contains(r.out, "given to workers") {
		t.Errorf("a tenant's: %s", r.out)
	}
}
