package e2e_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/millrace/millrace/internal/testenv"
)

// up is `millrace up` on a folder.
type up struct {
	*process
	*client
	nats string
}

// up describes the whole platform in one process, whose queue others may look into.
func (c *cluster) up(name string, args ...string) *up {
	c.t.Helper()
	addr, nats := testenv.FreeAddr(c.t), testenv.FreeAddr(c.t)
	p := c.role(name, "up", append([]string{"--listen", addr, "--nats-listen", nats}, args...)...)
	return &up{p, &client{t: c.t, url: "http://" + addr, http: c.http}, "nats://" + nats}
}

// marked is a prompt that the emulator answers as its markers say, different for each number.
func marked(markers string, i int) string {
	return fmt.Sprintf("[[emulator:%s]] prompt %d", markers, i)
}

// populate brings jobs into every state, ten or more in each, and leaves the engine shut: what runs stays so. It returns the ids by state; "line" are those in the
// tenant's waiting line, of which nothing but their number is known: they are among the queued.
func populate(t *testing.T, c *client, e *engine, slots int) map[string][]string {
	t.Helper()
	const n = 12
	ids := map[string][]string{}
	ids["completed"] = c.submitMany(n, "", func(i int) string { return marked("tokens=5", i) })
	ids["failed"] = c.submitMany(n, "", func(i int) string { return marked("status=400", i) })
	for _, state := range []string{"completed", "failed"} {
		for id, j := range c.ended(patience, ids[state]...) {
			if j.Status != state {
				t.Fatalf("job %s is %s, not %s: %+v", id, j.Status, state, j)
			}
		}
	}
	e.shut()
	ids["running"] = c.submitMany(slots, "", func(i int) string { return marked("tokens=6", 100+i) })
	for _, id := range ids["running"] {
		e.called(t, id, 1)
		c.status(id, "running")
	}
	ids["cancelled"] = c.submitMany(n, "", func(i int) string { return marked("tokens=5", 200+i) })
	ids["expired"] = c.submitMany(n, `"deadline":"500ms"`, func(i int) string { return marked("tokens=5", 300+i) })
	for _, id := range ids["cancelled"] {
		c.must(http.StatusOK, "POST", "/v1/jobs/"+id+"/cancel", nil)
	}
	for state, all := range map[string][]string{"cancelled": ids["cancelled"], "expired": ids["expired"]} {
		for id, j := range c.ended(patience, all...) {
			if j.Status != state {
				t.Fatalf("job %s is %s, not %s", id, j.Status, state)
			}
		}
	}
	// Newcomers wait in the tenant's line once the lane that workers pull is deep, as the dispatcher tells each second.
	eventually(t, patience, "the waiting line holds jobs", func() error {
		q, err := c.queues()
		if err != nil {
			return err
		}
		lane, line := q.Waiting["standard"], q.Lines["default"]
		if lane+line >= len(ids["queued"]) && line < n && len(ids["queued"]) < 2000 {
			ids["queued"] = append(ids["queued"], c.submitMany(4*n, "", func(i int) string { return marked("tokens=5", 1000+len(ids["queued"])+i) })...)
		}
		if line < n || lane < n {
			return fmt.Errorf("%d jobs are in the line and %d in the lane", line, lane)
		}
		return nil
	})
	return ids
}

// settled asserts that what populate made ended as it must, with its results readable.
func settled(t *testing.T, jobs map[string]*jobView, ids map[string][]string) {
	t.Helper()
	for state, all := range ids {
		want := state
		if state == "running" || state == "queued" {
			want = "completed"
		}
		for _, id := range all {
			j := jobs[id]
			if j.Status != want {
				t.Errorf("job %s was %s, is now %s, not %s: %+v", id, state, j.Status, want, j.Error)
			}
			if want == "completed" && (j.Result == nil || j.Result.StatusCode != 200 || strings.TrimSpace(j.text()) == "") {
				t.Errorf("job %s is completed and has no text: %+v", id, j.Result)
			}
			if want == "failed" && (j.Result == nil || j.Result.StatusCode != 400) {
				t.Errorf("job %s has lost the engine's refusal: %+v", id, j.Result)
			}
		}
	}
}

func flatten(ids map[string][]string) []string {
	var all []string
	for _, list := range ids {
		all = append(all, list...)
	}
	return all
}

func TestKilledPlatformEndsEveryAcceptedJobOnce(t *testing.T) {
	t.Parallel()
	const slots = 12
	c := newBareCluster(t)
	e := startEngine(t)
	u := c.up("up", append(plain(slots), "--engine", e.URL, "--data", c.dir+"/data")...)
	u.start()
	ids := populate(t, u.client, e, slots)
	all := flatten(ids)
	if len(all) < 100 {
		t.Fatalf("only %d jobs were accepted", len(all))
	}

	u.kill()
	e.open()
	begun := time.Now()
	u.start()
	jobs := exactlyOnce(t, connect(t, u.nats), u.client, 120*time.Second, all...)
	t.Logf("%d jobs ended %v after the kill", len(all), time.Since(begun))
	settled(t, jobs, ids)
	e.once(t, ids["completed"]...)
	e.once(t, ids["queued"]...)
}

func TestSecondPlatformOnOneFolderIsRefused(t *testing.T) {
	t.Parallel()
	c := newBareCluster(t)
	first := c.up("first", "--data", c.dir+"/data", "--profile", "test")
	first.start()
	second := c.up("second", "--data", c.dir+"/data", "--profile", "test")
	second.begin()
	second.wait()
	if out := second.tail(5); !strings.Contains(out, "--data") || !strings.Contains(out, c.dir+"/data") || second.state.ExitCode() == 0 {
		t.Errorf("the second ends with code %d and says: %s", second.state.ExitCode(), out)
	}
	// The first one goes on.
	id := first.submit(marked("tokens=3", 1), "")
	if j := first.ended(patience, id)[id]; j.Status != "completed" {
		t.Errorf("the first one's job is %s", j.Status)
	}
	first.terminate(patience)
	// Its folder is free then.
	third := c.up("third", "--data", c.dir+"/data", "--profile", "test")
	third.start()
	if j := third.ended(patience, id)[id]; j.Status != "completed" || j.text() == "" {
		t.Errorf("after the restart the job is %s with the text %q", j.Status, j.text())
	}
}
