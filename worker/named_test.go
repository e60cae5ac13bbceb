package worker_test

import (
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
)

// TestModelsAreNamedBeforeTheyAreServed: at once those that the operator has named, and else as soon as the engine lists them, though it has not completed a token yet.
func TestModelsAreNamedBeforeTheyAreServed(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 5*time.Second)
	var loaded, listed atomic.Bool
	eng := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == "/v1/models" && listed.Load():
			_, _ = io.WriteString(w, `{"object":"list","data":[{"id":"a"},{"id":"b"}]}`)
		case loaded.Load():
			reply(200, `{"choices":[{"message":{"content":"H"}}]}`)(w, r)
		default:
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	}))
	t.Cleanup(eng.Close)
	known := func() (names []job.Model) {
		for _, k := range e.cluster.Known() {
			names = append(names, k.Model)
		}
		return names
	}
	serve := []job.Model{"b", "c"}
	named := e.start(eng.URL, generic, func(c *workerConfig) { c.Models = serve })
	e.until("it is heard", func() bool { return e.heard(named).State == cluster.Starting })
	if got := known(); !slices.Equal(got, serve) || e.cluster.Learning() {
		t.Errorf("known are %v; somebody learns: %t", got, e.cluster.Learning())
	}
	free := e.start(eng.URL, generic)
	e.until("it is heard, too", func() bool { return e.heard(free).State == cluster.Starting })
	if got := known(); !slices.Equal(got, serve) || !e.cluster.Learning() {
		t.Errorf("known are %v; somebody learns: %t", got, e.cluster.Learning())
	}
	listed.Store(true)
	e.until("the engine's own are known, and what it has not is no more", func() bool { return slices.Equal(known(), []job.Model{"a", "b"}) })
	if e.cluster.Learning() {
		t.Error("a worker that knows its models still learns them")
	}
	for _, p := range []*process{named, free} {
		if s := e.heard(p).State; s != cluster.Starting {
			t.Errorf("a worker is %s", s)
		}
	}
	created := e.cluster.Known()[1].First
	loaded.Store(true)
	e.until("both are ready", func() bool { return named.Ready() == nil && free.Ready() == nil })
	e.until("the engine's kind is told", func() bool { return e.cluster.Known()[1].Engine != "" })
	if now := e.cluster.Known()[1].First; now != created || created == 0 {
		t.Errorf("b was first seen at %d, and now at %d", created, now)
	}
}

// TestModelsThatTheEngineHasNotAreNotNamed: the worker takes back what the operator has named once the engine lists others. One that lists none yet may be about to get it.
func TestModelsThatTheEngineHasNotAreNotNamed(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 5*time.Second)
	var list atomic.Value
	list.Store("")
	eng := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if data := list.Load().(string); r.URL.Path == "/v1/models" && data != "" {
			_, _ = io.WriteString(w, `{"object":"list","data":`+data+`}`)
			return
		}
		w.WriteHeader(http.StatusServiceUnavailable)
	}))
	t.Cleanup(eng.Close)
	p := e.start(eng.URL, generic, func(c *workerConfig) { c.Models = []job.Model{"typo"} })
	for _, step := range []struct {
		data     string
		models   []job.Model
		learning bool
	}{
		{"", []job.Model{"typo"}, false},
		{`[]`, nil, true},
		{`[{"id":"a"}]`, nil, false},
		{`[{"id":"a"},{"id":"typo"}]`, []job.Model{"typo"}, false},
	} {
		list.Store(step.data)
		e.until("it names what it may come to serve where the engine lists "+step.data, func() bool {
			w := e.heard(p)
			return w.State == cluster.Starting && slices.Equal(w.Models, step.models) && e.cluster.Learning() == step.learning && len(e.cluster.Known()) == len(step.models)
		})
	}
}
