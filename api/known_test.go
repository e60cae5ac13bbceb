package api_test

import (
	"net/http"
	"strconv"
	"testing"
	"time"

	"github.com/millrace/millrace/api"
	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
)

// TestUnknownModelIsNotMissingWhileAWorkerStartsThatMayServeIt: clients do not try again after a 404. Once the worker knows its models, what asks for them waits for it, and what asks for others is refused for good.
func TestUnknownModelIsNotMissingWhileAWorkerStartsThatMayServeIt(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	set := e.announce()
	starting := workerBeat("cold", cluster.WorkerInfo{State: cluster.Starting, StateSince: in(0)})
	starting.Worker.Models = nil
	set(starting)
	eventually(t, "the worker is heard", e.cluster.Learning)
	for path, body := range map[string]string{
		"/v1/chat/completions": chat(2, ""), "/v1/completions": `{"model":"m7","prompt":"x","stream":true}`, "/v1/responses": `{"model":"m7","input":"x","background":true}`, "/v1/jobs": jobBody(chat(2, ""), ""),
	} {
		a := e.send("POST", path, body)
		a.wantError(t, http.StatusServiceUnavailable, job.CodeModelUnavailable, map[bool]string{false: "model", true: "body.model"}[path == "/v1/jobs"])
		if after, _ := strconv.Atoi(a.header.Get("Retry-After")); after < 5 || after > 10 {
			t.Errorf("%s: Retry-After %q", path, a.header.Get("Retry-After"))
		}
	}
	e.send("GET", "/v1/models/m7", "").wantError(t, http.StatusServiceUnavailable, job.CodeModelUnavailable, "model")

	knows := workerBeat("cold", *starting.Worker)
	set(knows)
	eventually(t, "it knows its models", func() bool { return !e.cluster.Learning() })
	if place := e.placeOf(e.submit(jobBody(chat(2, ""), ""))); place["reason"] != "starting" {
		t.Errorf("a job of the model waits for %v", place)
	}
	e.send("POST", "/v1/chat/completions", `{"model":"nope","messages":[]}`).wantError(t, http.StatusNotFound, job.CodeModelNotFound, "model")

	// One that has started for so long that it will hardly ever serve anything is not waited for.
	starting.Worker.StateSince = in(-2 * time.Hour)
	hopeless := *starting.Worker
	set(cluster.Heartbeat{ID: "hopeless", Role: cluster.RoleWorker, Epoch: "hopeless", Worker: &hopeless})
	eventually(t, "it is heard", func() bool { return len(e.cluster.Workers("")) == 2 })
	e.send("POST", "/v1/chat/completions", `{"model":"nope","messages":[]}`).wantError(t, http.StatusNotFound, job.CodeModelNotFound, "model")
}

// TestModelIsAsOldAsItsFirstWorker, however long it is served.
func TestModelIsAsOldAsItsFirstWorker(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	set := e.announce()
	begun := time.Now().Add(-time.Hour)
	b := workerBeat("w", cluster.WorkerInfo{State: cluster.Ready})
	b.Started = begun.UnixMilli()
	set(b)
	created := func() any { return e.send("GET", "/v1/models/"+string(model), "").object(t)["created"] }
	want := float64(begun.Unix())
	eventually(t, "it is heard", func() bool { return len(e.cluster.Known()) == 1 })
	if got := created(); got != want {
		t.Errorf("created %v, want %v", got, want)
	}
	for _, first := range []time.Time{begun, time.Now()} { // the worker's word, and that of one that came later
		if err := e.cluster.Remember(t.Context(), cluster.KnownModel{Model: model, Largest: 1, Seen: time.Now().UnixMilli(), First: first.UnixMilli()}); err != nil {
			t.Fatal(err)
		}
	}
	if got := created(); got != want {
		t.Errorf("created %v after it was remembered, want %v", got, want)
	}
}
