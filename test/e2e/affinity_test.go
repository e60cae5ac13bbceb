package e2e_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/millrace/millrace/internal/engine/emulator"
	"github.com/millrace/millrace/internal/engine/emulator/emulatortest"
)

// pool is workers, each a process beside an engine of its own, and two APIs.
type pool struct {
	*cluster
	apis       []*apiProcess
	dispatcher *process
	workers    []*process
	engines    []*emulatortest.Server

	mu sync.Mutex     // guards what follows
	at map[string]int // the engine that got a session's latest call
}

// sessionIn is how a prompt names its session.
var sessionIn = regexp.MustCompile(`session-[0-9]+\.`)

func newPool(t *testing.T, workers int) *pool {
	t.Helper()
	p := &pool{cluster: newCluster(t), at: map[string]int{}}
	for i := range 2 {
		p.apis = append(p.apis, p.api(fmt.Sprint("api-", i)))
	}
	p.dispatcher = p.cluster.dispatcher("dispatcher")
	all := []*process{p.apis[0].process, p.apis[1].process, p.dispatcher}
	for i := range workers {
		e := emulatortest.Start(t, emulator.Config{Models: []string{model}, Profile: "l40s-8b", Speed: 8, OnRequest: func(_, _ string, _ http.Header, body []byte) {
			if s := sessionIn.Find(body); s != nil {
				p.mu.Lock()
				p.at[string(s)] = i
				p.mu.Unlock()
			}
		}})
		p.engines = append(p.engines, e)
		p.workers = append(p.workers, p.cluster.worker(fmt.Sprint("worker-", i), e.URL))
	}
	p.startAll(append(all, p.workers...)...)
	p.served()
	for _, a := range p.apis {
		eventually(t, patience, "the API knows all workers", func() error {
			var list struct {
				Data []struct{ State string } `json:"data"`
			}
			answer, err := a.send("GET", "/admin/v1/workers", nil)
			if err == nil {
				err = json.Unmarshal(answer.body, &list)
			}
			if err != nil || len(list.Data) != workers {
				return fmt.Errorf("it knows %d: %w", len(list.Data), err)
			}
			return nil
		})
	}
	return p
}

// hits and queries are the prompt tokens that the engines found in their caches, and those that they looked for.
func (p *pool) hits() (hits, queries int64) {
	for _, e := range p.engines {
		s := e.Stats()
		hits += s.PrefixHits
		queries += s.PrefixQueries
	}
	return hits, queries
}

// talk is a conversation, which grows by each turn.
type talk struct {
	name     string
	messages []json.RawMessage
	bodies   [][]byte // of the turns so far
}

func (k *talk) say(t testing.TB, role, content string) {
	t.Helper()
	raw, err := json.Marshal(map[string]string{"role": role, "content": content})
	if err != nil {
		t.Fatal(err)
	}
	k.messages = append(k.messages, raw)
}

// turn takes one turn and tells whether it was answered.
func (p *pool) turn(k *talk, headers ...string) error {
	n := len(k.bodies)
	k.say(p.t, "user", fmt.Sprintf("question %d of %s %s", n, k.name, strings.Repeat("and so on, ", 20)))
	messages, err := json.Marshal(k.messages)
	if err != nil {
		return err
	}
	body := fmt.Appendf(nil, `{"model":%q,"max_tokens":24,"messages":%s}`, model, messages)
	k.bodies = append(k.bodies, body)
	a, err := p.apis[n%len(p.apis)].send("POST", "/v1/chat/completions", body, headers...)
	switch {
	case err != nil:
		return fmt.Errorf("turn %d of %s: %w", n, k.name, err)
	case a.status != http.StatusOK:
		return fmt.Errorf("turn %d of %s is answered %d: %s", n, k.name, a.status, a.body)
	}
	k.say(p.t, "assistant", answerText(a.body))
	return nil
}

// atATime is how many talks have a turn under way: people think between two turns.
const atATime = 12

// round has each talk take so many turns, one after the other, the talks side by side. headers are those of a talk.
func (p *pool) round(talks []*talk, turns int, headers func(*talk) []string) {
	p.t.Helper()
	var wg sync.WaitGroup
	places := make(chan struct{}, atATime)
	for _, k := range talks {
		wg.Go(func() {
			for range turns {
				places <- struct{}{}
				err := p.turn(k, headers(k)...)
				<-places
				if err != nil {
					p.t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	if p.t.Failed() {
		p.t.FailNow()
	}
}

// ideal is an engine with a cache that never forgets, which gets each turn of the talks once more, in order.
type ideal struct {
	engine *emulatortest.Server
	found  map[*talk][]int64 // by turn, how many prompt tokens its cache had
}

func newIdeal(t *testing.T) *ideal {
	return &ideal{emulatortest.Start(t, emulator.Config{Models: []string{model}, Profile: "l40s-8b", Speed: 1e6, KVTokens: 4_000_000}), map[*talk][]int64{}}
}

// hits are how many prompt tokens its cache had in the talks' turns so far, from turn `from` on.
func (i *ideal) hits(t *testing.T, talks []*talk, from int) (hits int64) {
	t.Helper()
	for _, k := range talks {
		for n := len(i.found[k]); n < len(k.bodies); n++ {
			before := i.engine.Stats().PrefixHits
			resp, err := http.Post(i.engine.URL+"/v1/chat/completions", "application/json", bytes.NewReader(k.bodies[n]))
			if err != nil {
				t.Fatal(err)
			}
			_, err = io.Copy(io.Discard, resp.Body)
			_ = resp.Body.Close()
			if err != nil || resp.StatusCode != http.StatusOK {
				t.Fatalf("replaying turn %d of %s: %d %v", n, k.name, resp.StatusCode, err)
			}
			i.found[k] = append(i.found[k], i.engine.Stats().PrefixHits-before)
		}
		for _, n := range i.found[k][from:] {
			hits += n
		}
	}
	return hits
}

func talksOf(t testing.TB, n int, system func(i int) string) []*talk {
	var talks []*talk
	for i := range n {
		k := &talk{name: fmt.Sprintf("session-%d.", i)}
		k.say(t, "system", system(i))
		talks = append(talks, k)
	}
	return talks
}

// TestSessionsStayWhereTheirCacheIs: a thousand turns of fifty sessions over four workers and two APIs; then a worker is killed, and then the store wiped.
func TestSessionsStayWhereTheirCacheIs(t *testing.T) {
	t.Parallel()
	const sessions, turns, workers = 50, 20, 4
	p := newPool(t, workers)
	talks := talksOf(t, sessions, func(i int) string { return fmt.Sprintf("This is session-%d. %s", i, strings.Repeat("Be brief. ", 60)) })
	header := func(k *talk) []string { return []string{"X-Millrace-Session", k.name} }
	p.round(talks, turns, header)

	hits, queries := p.hits()
	ideal := newIdeal(t)
	best := ideal.hits(t, talks, 0)
	p.tell()
	t.Logf("of %d prompt tokens %d were in the caches, ideally %d (%.1f %%)", queries, hits, best, 100*float64(hits)/float64(best))
	if float64(hits) < warmShare*float64(best) {
		t.Errorf("the caches had %d prompt tokens, less than %.1f of the ideal %d", hits, warmShare, best)
	}
	for i, e := range p.engines {
		n := e.Counts().Completed
		t.Logf("engine %d ran %d turns", i, n)
		if float64(n) > mostOfShare*sessions*turns/workers {
			t.Errorf("engine %d ran %d of %d turns", i, n, sessions*turns)
		}
	}

	// An owner dies: each of its sessions begins anew once, and the others notice nothing.
	p.mu.Lock()
	dead := p.at[talks[0].name]
	var orphans []*talk
	for _, k := range talks {
		if p.at[k.name] == dead {
			orphans = append(orphans, k)
		}
	}
	p.mu.Unlock()
	p.workers[dead].kill()
	before, _ := p.hits()
	p.round(talks, 3, header)
	after, _ := p.hits()
	coldOnce := ideal.hits(t, orphans, turns) - ideal.hits(t, orphans, turns+1)
	best = ideal.hits(t, talks, turns)
	t.Logf("after the death of the owner of %d sessions, %d of %d prompt tokens were in the caches; one cold turn each is %d", len(orphans), after-before, best, coldOnce)
	if got := after - before; float64(got) < warmShare*float64(best-coldOnce) {
		t.Errorf("the caches had %d prompt tokens: more than one cold turn of each of %d sessions, which leaves %d", got, len(orphans), best-coldOnce)
	}

	// Without the bindings all sessions go on, anew or not.
	p.do("FLUSHALL")
	p.round(talks, 1, header)
	before, _ = p.hits()
	p.round(talks, 5, header) // of one turn alone a few that spill would be a tenth
	after, _ = p.hits()
	best = ideal.hits(t, talks, turns+4)
	if got := after - before; float64(got) < warmShare*float64(best) {
		t.Errorf("from the second turn on after the store was wiped the caches had %d prompt tokens of %d", got, best)
	}
}

// TestPromptsThatBeginAlikeMeet: without any session, conversations find their way by how they begin, though all begin with the same instructions; and these draw not all to one worker.
func TestPromptsThatBeginAlikeMeet(t *testing.T) {
	t.Parallel()
	const talking, turns, workers = 24, 10, 4
	p := newPool(t, workers)
	common := strings.Repeat("You are helpful, and you answer briefly. ", 30) // 1,230 bytes
	talks := talksOf(t, talking, func(i int) string {
		return fmt.Sprint(common, strings.Repeat(fmt.Sprintf("This is session-%d. ", i), 40))
	})
	none := func(*talk) []string { return nil }
	p.round(talks, turns, none)
	hits, _ := p.hits()
	best := newIdeal(t).hits(t, talks, 0)
	p.tell()
	t.Logf("%d prompt tokens were in the caches, ideally %d (%.1f %%)", hits, best, 100*float64(hits)/float64(best))
	if float64(hits) < alikeShare*float64(best) {
		t.Errorf("the caches had %d prompt tokens, less than %.1f of the ideal %d", hits, alikeShare, best)
	}
	for i, e := range p.engines {
		if n := e.Counts().Completed; float64(n) > mostOfShare*talking*turns/workers {
			t.Errorf("engine %d ran %d of %d turns", i, n, talking*turns)
		}
	}
}

// affinityTotal is a count of millrace_affinity_total.
func (p *apiProcess) affinityTotal(result string) float64 {
	p.client.t.Helper()
	resp, err := p.client.http.Get("http://" + p.metrics + "/metrics")
	if err != nil {
		p.client.t.Fatal(err)
	}
	defer resp.Body.Close()
	page, err := io.ReadAll(resp.Body)
	if err != nil {
		p.client.t.Fatal(err)
	}
	var n float64
	for line := range strings.Lines(string(page)) {
		if rest, ok := strings.CutPrefix(line, fmt.Sprintf("millrace_affinity_total{result=%q} ", result)); ok {
			if _, err := fmt.Sscan(rest, &n); err != nil {
				p.client.t.Fatal(err)
			}
		}
	}
	return n
}

// tell logs what came of the looks for warm caches.
func (p *pool) tell() {
	p.t.Helper()
	for _, result := range []string{"hit", "spill", "miss", "off"} {
		p.t.Logf("%s: %v", result, p.apis[0].affinityTotal(result)+p.apis[1].affinityTotal(result))
	}
}

// TestFullOwnerSpillsAtOnce: the turns that do not fit run on the other worker while those that did still block the owner; and afterwards the owner, whose cache is warm, has the session again.
func TestFullOwnerSpillsAtOnce(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	api, dispatcher := c.api("api"), c.dispatcher("dispatcher")
	engines := []*engine{startEngine(t), startEngine(t)}
	const slots = 2
	workers := []*process{c.worker("worker-0", engines[0].URL, plain(slots)...), c.worker("worker-1", engines[1].URL, plain(slots)...)}
	c.startAll(api.process, dispatcher, workers[0], workers[1])
	turn := func(i int) (string, error) {
		a, err := api.send("POST", "/v1/chat/completions", chat(fmt.Sprint("[[emulator:tokens=2]] turn ", i), ""), "X-Millrace-Session", "s")
		if err == nil && a.status != http.StatusOK {
			err = fmt.Errorf("turn %d is answered %d: %s", i, a.status, a.body)
		}
		if err != nil {
			return "", err
		}
		return a.header.Get("X-Millrace-Job"), nil
	}
	owner := 0 // who got the turn that found it
	eventually(t, patience, "the session has an owner", func() error {
		before := len(engines[1].all())
		if _, err := turn(0); err != nil {
			return fatalError{err}
		}
		if api.affinityTotal("hit") == 0 {
			return errors.New("no turn has found it")
		}
		owner = len(engines[1].all()) - before
		return nil
	})
	own, other := engines[owner], engines[1-owner]
	own.shut()
	before := len(own.all())
	const n = 10
	done := make(chan error, n)
	for i := range n {
		go func() {
			_, err := turn(i + 1)
			done <- err
		}()
	}
	for range n - slots {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	// What the owner held in its hand was put back; the turns that follow go elsewhere at once, unless the session has moved: on a busy machine those eight may have ended late enough.
	turns, moved := len(other.all()), api.affinityTotal("hit")
	eventually(t, patience, "turns spill, or the session has moved", func() error {
		turns++
		if _, err := turn(turns); err != nil {
			return fatalError{err}
		}
		if api.affinityTotal("spill") == 0 && (api.affinityTotal("hit") == moved || len(other.all()) < turns) {
			return errors.New("neither")
		}
		return nil
	})
	if calls := len(own.all()) - before; calls > slots {
		t.Errorf("the full owner got %d calls", calls)
	}
	if len(other.all()) == 0 {
		t.Error("the other worker got none")
	}
	own.open()
	for range slots {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

// TestOneSessionsThousandJobsKeepAllWorkersBusy: calls and durable jobs together. The owner gets its share, and the rest runs everywhere.
func TestOneSessionsThousandJobsKeepAllWorkersBusy(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	api, dispatcher := c.api("api"), c.dispatcher("dispatcher")
	const workers, calls, jobs = 4, 800, 200
	all := []*process{api.process, dispatcher}
	var engines []*engine
	for i := range workers {
		e := startEngine(t)
		engines = append(engines, e)
		all = append(all, c.worker(fmt.Sprint("worker-", i), e.URL, plain(4)...))
	}
	c.startAll(all...)
	c.whole()
	content := func(i int) string { return marked("tokens=2,token-delay=10ms", i) }
	api.ended(patience, api.submitMany(1, `"session":"s"`, content)...)

	var running sync.WaitGroup
	slots := make(chan struct{}, 128)
	running.Go(func() {
		for i := range calls {
			slots <- struct{}{}
			running.Go(func() {
				defer func() { <-slots }()
				a, err := api.send("POST", "/v1/chat/completions", chat(content(i), ""), "X-Millrace-Session", "s")
				if err != nil || a.status != http.StatusOK {
					t.Errorf("call %d: %+v %v", i, a, err)
				}
			})
		}
	})
	ids := api.submitMany(jobs, `"session":"s"`, content)
	running.Wait()
	for id, j := range api.ended(2*patience, ids...) {
		if j.Status != "completed" {
			t.Errorf("job %s is %s: %+v", id, j.Status, j.Error)
		}
	}
	if api.affinityTotal("hit") == 0 || api.affinityTotal("spill") == 0 {
		t.Errorf("%v hits and %v spills", api.affinityTotal("hit"), api.affinityTotal("spill"))
	}
	for i, e := range engines {
		n := len(e.all())
		t.Logf("engine %d was called %d times", i, n)
		if n < (calls+jobs)/workers/3 {
			t.Errorf("engine %d was called %d times", i, n)
		}
	}
}
