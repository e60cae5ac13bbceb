package e2e_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// TestRequestsWhileTheQueueIsAwayAreRefused: NATS hangs, then is dead. What begins then gets 503 in time, and no engine is ever called for it.
func TestRequestsWhileTheQueueIsAwayAreRefused(t *testing.T) {
	t.Parallel()
	for _, away := range []struct {
		name        string
		begin, over func(*process)
	}{
		{"paused", (*process).pause, (*process).unpause},
		{"dead", (*process).kill, (*process).start},
	} {
		t.Run(away.name, func(t *testing.T) {
			t.Parallel()
			d := deploy(t, 8)
			before := d.api.submit("[[emulator:tokens=5]] before", "")
			d.api.ended(patience, before)

			// In the moment in which it goes away requests are under way. Whether one of them was stored is not known to anybody: it has at most one outcome, and a
			// retry with its key gets that.
			var wg sync.WaitGroup
			cut := make([]string, 40)
			contentOf := func(i int) []byte { return submission(chat(marked("tokens=5", i), ""), "") }
			for i := range cut {
				wg.Go(func() {
					a, err := d.api.send("POST", "/v1/jobs", contentOf(i), "Idempotency-Key", fmt.Sprint("cut-", i))
					var j jobView
					switch {
					case err != nil:
						t.Errorf("request %d: %v", i, err)
					case a.status == http.StatusAccepted && json.Unmarshal(a.body, &j) == nil:
						cut[i] = j.ID
					case a.status != http.StatusServiceUnavailable:
						t.Errorf("request %d gets %d: %s", i, a.status, a.body)
					case a.took > 6*time.Second:
						t.Errorf("request %d got its 503 after %v", i, a.took)
					}
				})
				if i == len(cut)/2 {
					away.begin(d.nats)
				}
			}
			wg.Wait()
			eventually(t, patience, "the API knows", func() error {
				if d.api.ready() == nil {
					return fmt.Errorf("it is ready")
				}
				return nil
			})
			for i := range 6 {
				wg.Go(func() {
					path, body := "/v1/jobs", submission(chat(marked("tokens=5", 100+i), ""), "")
					switch i % 3 {
					case 1:
						path, body = "/v1/chat/completions", chat(marked("tokens=5", 100+i), "")
					case 2:
						path, body = "/v1/chat/completions", chat(marked("tokens=5", 100+i), `"stream":true`)
					}
					a, err := d.api.send("POST", path, body)
					if err != nil || a.status != http.StatusServiceUnavailable || a.header.Get("Retry-After") == "" || a.code() == "" {
						t.Errorf("%s: %v %+v", path, err, a)
					} else if a.took > 5*time.Second {
						t.Errorf("%s took %v", path, a.took)
					}
				})
			}
			wg.Wait()
			// What has ended is told all the same.
			if j, err := d.api.job(before, ""); err != nil || j.Status != "completed" {
				t.Errorf("the ended job: %v %+v", err, j)
			}

			away.over(d.nats)
			eventually(t, patience, "the API is ready again", d.api.ready)
			// A request that comes now passes all that those before might have left.
			after := make([]string, 5)
			for i := range after {
				eventually(t, patience, "a submit is taken again", func() error {
					a, err := d.api.send("POST", "/v1/jobs", submission(chat(marked("tokens=5", 200+i), ""), ""), "Idempotency-Key", fmt.Sprint("after-", i))
					if err != nil || a.status != http.StatusAccepted {
						return fmt.Errorf("%w %+v", err, a)
					}
					after[i] = idOf(t, a)
					return nil
				})
			}
			d.api.ended(patience, after...)
			for i := range cut {
				var id string
				eventually(t, patience, "a cut request is taken again", func() error {
					a, err := d.api.send("POST", "/v1/jobs", contentOf(i), "Idempotency-Key", fmt.Sprint("cut-", i))
					if err != nil || a.status != http.StatusAccepted {
						return fmt.Errorf("%w %+v", err, a)
					}
					id = idOf(t, a)
					return nil
				})
				if cut[i] != "" && cut[i] != id {
					t.Errorf("request %d was job %s, and with the same key it is %s", i, cut[i], id)
				}
				cut[i] = id
			}
			nc := connect(t, d.natsURL())
			exactlyOnce(t, nc, d.api.client, 2*patience, slices.Concat(cut, []string{before})...)
			workEmpty(t, nc)
			known := map[string]bool{before: true}
			for _, id := range append(append([]string(nil), cut...), after...) {
				known[id] = true
			}
			for _, c := range d.engine.all() {
				if !known[c.job] {
					t.Errorf("the engine was called for %s, whose client heard 503: %s", c.job, c.body)
				}
			}
			d.engine.once(t, cut...)
		})
	}
}

// TestAPIKilledWhileItAccepts: the API dies under many submits. What it had promised is kept, and of what it had begun a retry with the same key makes one job.
func TestAPIKilledWhileItAccepts(t *testing.T) {
	t.Parallel()
	d := deploy(t, 8)
	accepted := make([]string, 200)
	contentOf := func(i int) []byte { return submission(chat(marked("tokens=3", i), ""), "") }
	post := func(i int) (string, error) {
		a, err := d.api.send("POST", "/v1/jobs", contentOf(i), "Idempotency-Key", fmt.Sprint("accept-", i))
		switch {
		case err != nil:
			return "", fmt.Errorf("%w: %w", errNotYet, err)
		case a.status == http.StatusServiceUnavailable:
			return "", errNotYet
		case a.status != http.StatusAccepted:
			return "", fatalError{fmt.Errorf("it answers %d: %s", a.status, a.body)}
		}
		return idOf(t, a), nil
	}
	var wg sync.WaitGroup
	var answered atomic.Int32
	die := make(chan struct{})
	slots := make(chan struct{}, 32)
	for i := range accepted {
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			accepted[i], _ = post(i) // those that fail are sent again below
			if answered.Add(1) == 60 {
				close(die)
			}
		})
	}
	<-die
	d.api.kill()
	wg.Wait()
	d.api.start()
	known := map[string]bool{}
	for i, id := range accepted {
		var again string
		eventually(t, patience, "a submit is taken again", func() (err error) {
			again, err = post(i)
			return err
		})
		if id != "" && id != again {
			t.Errorf("request %d was job %s, and with the same key it is %s", i, id, again)
		}
		accepted[i] = again
		known[again] = true
	}
	if len(known) != len(accepted) {
		t.Errorf("%d requests made %d jobs", len(accepted), len(known))
	}
	nc := connect(t, d.natsURL())
	exactlyOnce(t, nc, d.api.client, patience, accepted...)
	workEmpty(t, nc)
	for _, c := range d.engine.all() {
		if !known[c.job] {
			t.Errorf("the engine was called for %s, of which no client knows", c.job)
		}
	}
	d.engine.once(t, accepted...)
}

// TestRolesStartBeforeTheirServers: every role is there before NATS and Redis are, and joins when they come.
func TestRolesStartBeforeTheirServers(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.nats.kill()
	c.redis.Kill()
	e := startEngine(t)
	worker, dispatcher, api := c.worker("worker", e.URL, plain(4)...), c.dispatcher("dispatcher"), c.api("api")
	for _, p := range []*process{worker, dispatcher, api.process} {
		p.begin()
		eventually(t, patience, p.name+" says that it lives", func() error { return c.get200("http://" + p.metrics + "/healthz") })
		if p.ready() == nil {
			t.Errorf("%s is ready without its servers", p.name)
		}
	}
	c.nats.start()
	c.redis.Start(t)
	for _, p := range []*process{worker, dispatcher, api.process} {
		p.await()
	}
	ids := api.submitMany(10, "", func(i int) string { return marked("tokens=5", i) })
	exactlyOnce(t, connect(t, c.natsURL()), api.client, patience, ids...)
	e.once(t, ids...)
}

// TestFiftyEqualPostsAreOneJob: the same request with the same key, at the same time, at two APIs.
func TestFiftyEqualPostsAreOneJob(t *testing.T) {
	t.Parallel()
	d := deploy(t, 8)
	other := d.cluster.api("other")
	other.start()
	body := submission(chat("[[emulator:tokens=5]] once only", `"seed":7`), `"metadata":{"a":"b"}`)
	reordered := []byte(`{"metadata":{"a":"b"},"body":{"seed":7,"messages":[{"content":"[[emulator:tokens=5]] once only","role":"user"}],"model":"` + model + `"}}`)
	ids := make([]string, 50)
	var wg sync.WaitGroup
	for i := range ids {
		wg.Go(func() {
			at, b := d.api.client, body
			if i%2 == 1 {
				at = other.client
			}
			if i%3 == 0 {
				b = reordered
			}
			// Two at the very same moment: the later may be told to come again.
			eventually(t, patience, "a post is answered", func() error {
				a, err := at.send("POST", "/v1/jobs", b, "Idempotency-Key", "one")
				switch {
				case err != nil:
					return fatalError{err}
				case a.status == http.StatusServiceUnavailable:
					return errNotYet
				case a.status != http.StatusAccepted:
					return fatalError{fmt.Errorf("it answers %d: %s", a.status, a.body)}
				}
				ids[i] = idOf(t, a)
				return nil
			})
		})
	}
	wg.Wait()
	for _, id := range ids {
		if id != ids[0] {
			t.Errorf("one key gave the jobs %s and %s", ids[0], id)
		}
	}
	nc := connect(t, d.natsURL())
	exactlyOnce(t, nc, d.api.client, patience, ids[0])
	if n := len(outcomes(t, nc)); n != 1 {
		t.Errorf("there are %d outcomes", n)
	}
	if n := len(d.engine.all()); n != 1 {
		t.Errorf("the engine was called %d times", n)
	}
	a := d.api.must(http.StatusConflict, "POST", "/v1/jobs", submission(chat("another", ""), ""), "Idempotency-Key", "one")
	if a.header.Get("X-Should-Retry") != "false" {
		t.Errorf("a client would try the conflict again: %v", a.header)
	}
}
