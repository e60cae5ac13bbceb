package affinity_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/affinity"
	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
)

// pool is workers a, b, c … of equal capacity with so many jobs each.
func pool(jobs ...int) []affinity.Worker {
	var all []affinity.Worker
	for i, n := range jobs {
		all = append(all, affinity.Worker{ID: job.Worker('a' + rune(i)), Capacity: 10_000, Jobs: n})
	}
	return all
}

func with(all []affinity.Worker, change func(a *affinity.Worker)) []affinity.Worker {
	change(&all[0])
	return all
}

// TestOverloaded asks of worker a.
func TestOverloaded(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		all  []affinity.Worker
		want bool
	}{
		"idle":                                   {pool(0, 0, 0, 0), false},
		"a few jobs are never too many":          {pool(7, 0, 0, 0), false},
		"more than a few, and nobody else any":   {pool(8, 0, 0, 0), true},
		"its fair share":                         {pool(10, 10, 10, 10), false},
		"a quarter over its fair share":          {pool(12, 10, 10, 10), false}, // 1.25 x 43/4 is 13.4
		"more than that":                         {pool(15, 10, 10, 10), true},
		"nearly full":                            {with(pool(1, 1), func(a *affinity.Worker) { a.Load = 0.79 }), false},
		"full":                                   {with(pool(1, 1), func(a *affinity.Worker) { a.Load = 0.8 }), true},
		"full by what it was given since":        {with(pool(1, 1), func(a *affinity.Worker) { a.Load = 0.5; a.Assign(1, 3000) }), true},
		"at its limit":                           {with(pool(2, 2), func(a *affinity.Worker) { a.Limit = 2 }), true},
		"below its limit":                        {with(pool(1, 1), func(a *affinity.Worker) { a.Limit = 2 }), false},
		"braked":                                 {with(pool(0, 0), func(a *affinity.Worker) { a.Braked = true }), true},
		"a large one's share is large":           {with(pool(30, 6), func(a *affinity.Worker) { a.Capacity = 50_000 }), false},
		"a small one's share is small":           {with(pool(8, 15), func(a *affinity.Worker) { a.Capacity = 1000 }), true},
		"shares are equal if one has no measure": {with(pool(8, 8), func(a *affinity.Worker) { a.Capacity = 0 }), false},
		"alone it has all":                       {pool(100), false},
	} {
		if got := affinity.Overloaded(c.all[0], c.all); got != c.want {
			t.Errorf("%s: overloaded %v, want %v", name, got, c.want)
		}
	}
}

func TestChoose(t *testing.T) {
	t.Parallel()
	busy := func(w ...job.Worker) []affinity.Worker {
		all := pool(0, 0, 0, 0)
		for i := range all {
			if slices.Contains(w, all[i].ID) {
				all[i].Load = 0.9
			}
		}
		return all
	}
	for name, c := range map[string]struct {
		owners [][]job.Worker
		all    []affinity.Worker
		want   job.Worker
		result affinity.Result
	}{
		"nothing is bound":                       {[][]job.Worker{nil, nil}, pool(0, 0, 0), "", affinity.Miss},
		"the owner":                              {[][]job.Worker{{"b"}}, pool(0, 0, 0), "b", affinity.Hit},
		"the owner is gone":                      {[][]job.Worker{{"x"}}, pool(0, 0, 0), "", affinity.Spill},
		"the owner is full":                      {[][]job.Worker{{"b"}}, busy("b"), "", affinity.Spill},
		"the deepest wins":                       {[][]job.Worker{{"a"}, {"b"}, nil}, pool(0, 0, 0, 0), "b", affinity.Hit},
		"the deepest is full":                    {[][]job.Worker{{"a"}, {"b"}, nil}, busy("b"), "", affinity.Spill},
		"the deepest is gone, a shallower there": {[][]job.Worker{{"a"}, {"x"}}, pool(0, 0, 0, 0), "a", affinity.Hit},
		"of several the least loaded":            {[][]job.Worker{{"a", "b"}}, with(pool(0, 0, 0, 0), func(a *affinity.Worker) { a.Load = 0.2 }), "b", affinity.Hit},
		"of several the one with room":           {[][]job.Worker{{"a", "b"}}, busy("a"), "b", affinity.Hit},
		"of several one that lives":              {[][]job.Worker{{"x", "b", "y"}}, pool(0, 0, 0), "b", affinity.Hit},
		"most have it":                           {[][]job.Worker{{"a", "b", "c"}}, pool(0, 0, 0, 0), "", affinity.Off},
		"most have the beginning, one the rest":  {[][]job.Worker{{"a", "b", "c"}, {"c"}}, pool(0, 0, 0, 0), "c", affinity.Hit},
	} {
		got, result := affinity.Choose(c.owners, c.all)
		if got != c.want || result != c.result {
			t.Errorf("%s: %q, %s, want %q, %s", name, got, result, c.want, c.result)
		}
	}
}

func TestReplaceable(t *testing.T) {
	t.Parallel()
	full := func(all []affinity.Worker, n int) []affinity.Worker {
		for i := range n {
			all[i].Load = 0.9
		}
		return all
	}
	for name, c := range map[string]struct {
		owners []job.Worker
		all    []affinity.Worker
		want   []job.Worker
	}{
		"an owner with room stays, it is warm":  {[]job.Worker{"a"}, pool(0, 0), nil},
		"one that is gone":                      {[]job.Worker{"x"}, pool(0, 0), []job.Worker{"x"}},
		"one that is still full":                {[]job.Worker{"a"}, full(pool(0, 0), 1), []job.Worker{"a"}},
		"all are full: nothing goes to and fro": {[]job.Worker{"a"}, full(pool(0, 0), 2), nil},
		"of several those":                      {[]job.Worker{"a", "x", "c"}, full(pool(0, 0, 0), 1), []job.Worker{"a", "x"}},
	} {
		if d := cmp.Diff(c.want, affinity.Replaceable("b", c.owners, c.all)); d != "" {
			t.Errorf("%s (-want +got):\n%s", name, d)
		}
	}
}

// TestManyJobsOfOneSessionSpill: as a gateway counts what it has assigned, only a fair share goes to the owner, however many come before its next heartbeat.
func TestManyJobsOfOneSessionSpill(t *testing.T) {
	t.Parallel()
	all := pool(2, 3, 2, 3)
	hits := 0
	for range 1000 {
		if w, _ := affinity.Choose([][]job.Worker{{"a"}}, all); w != "" {
			all[0].Assign(1, 100)
			hits++
		}
	}
	if hits == 0 || hits > 2*affinity.Few {
		t.Errorf("%d of 1,000 went to the owner", hits)
	}
}

func TestWorkersAreThoseThatTakeTheModel(t *testing.T) {
	t.Parallel()
	member := func(id string, change func(*cluster.WorkerInfo)) cluster.Member {
		w := &cluster.WorkerInfo{State: cluster.Ready, Models: []job.Model{"m"}, Capacity: 100, Load: 0.5, Running: 2, InHand: 1, Limit: 8, Brake: "x"}
		change(w)
		return cluster.Member{Heartbeat: cluster.Heartbeat{ID: id, Worker: w}}
	}
	got := affinity.Workers([]cluster.Member{
		{Heartbeat: cluster.Heartbeat{ID: "api"}},
		member("draining", func(w *cluster.WorkerInfo) { w.State = cluster.Draining }),
		member("stalled", func(w *cluster.WorkerInfo) { w.State = cluster.Stalled }),
		member("other", func(w *cluster.WorkerInfo) { w.Models = []job.Model{"n"} }),
		member("w", func(*cluster.WorkerInfo) {}),
		member("full of batches", func(w *cluster.WorkerInfo) { w.Load, w.CacheLoad, w.Sequences, w.Limit = 0.97, 0.15, 248, 0 }), // by its places
		member("full", func(w *cluster.WorkerInfo) { w.Load, w.CacheLoad, w.Sequences = 0.75, 0.15, 6 }),
	}, "m")
	want := []affinity.Worker{
		{ID: "w", Capacity: 100, Load: 0.5, Jobs: 3, Limit: 8, Braked: true},
		{ID: "full of batches", Capacity: 100, Load: 0.15, Jobs: 3, Braked: true},
		{ID: "full", Capacity: 100, Load: 0.75, Jobs: 3, Limit: 8, Braked: true},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

func object(t testing.TB, text string) *job.Object {
	t.Helper()
	o, err := job.ParseObject([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return o
}

// talk is a chat of so many turns, each message as long as given.
func talk(t testing.TB, system string, turns, length int, more string) *job.Object {
	t.Helper()
	type message struct {
		Role    string `json:"role"`
		Content string `json:"content"`
	}
	messages := []message{{"system", system}}
	for i := range turns {
		if i > 0 {
			messages = append(messages, message{"assistant", strings.Repeat(fmt.Sprint("answer ", i, " "), length/9)})
		}
		messages = append(messages, message{"user", strings.Repeat(fmt.Sprint("question ", i, " "), length/11)})
	}
	raw, err := json.Marshal(messages)
	if err != nil {
		t.Fatal(err)
	}
	return object(t, fmt.Sprintf(`{"model":"m",%s "messages": %s}`, more, raw))
}

func chain(o *job.Object) []string { return affinity.Chain("t", "m", job.ChatCompletions, o) }

// shared is how many keys two chains share: those of what both prompts begin with.
func shared(a, b []string) int {
	n := 0
	for n < min(len(a), len(b)) && a[n] == b[n] {
		n++
	}
	for i := n; i < min(len(a), len(b)); i++ { // and none behind
		if a[i] == b[i] {
			return -1
		}
	}
	return n
}

func TestChainGrowsWithTheConversation(t *testing.T) {
	t.Parallel()
	var last []string
	for turns := 1; turns <= 20; turns++ {
		keys := chain(talk(t, "You are helpful.", turns, 200, `"temperature":0.`+fmt.Sprint(turns)+`,`))
		if n := shared(last, keys); n != len(last) {
			t.Errorf("turn %d shares %d keys with the one before, which had %d", turns, n, len(last))
		}
		last = keys
	}
	if len(last) != 6 { // 256 to 8192 of some 8,500 bytes
		t.Errorf("twenty turns have %d keys", len(last))
	}
}

func TestChainCoversDoublingBeginnings(t *testing.T) {
	t.Parallel()
	completion := func(n int) []string {
		return affinity.Chain("t", "m", job.Completions, object(t, `{"prompt":"`+strings.Repeat("x", n-1)+`"}`)) // with the quote that opens it
	}
	for n, want := range map[int]int{2: 0, 255: 0, 256: 1, 511: 1, 512: 2, 1023: 2, 1024: 3, 32<<10 - 1: 7, 32 << 10: 8, 1 << 20: 8} {
		if got := len(completion(n)); got != want {
			t.Errorf("%d bytes have %d keys, want %d", n, got, want)
		}
	}
	if n := shared(completion(600), completion(5000)); n != 2 {
		t.Errorf("a prompt and a longer one share %d keys", n)
	}
}

func TestChainTellsApart(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("You are helpful. ", 40) // 680 bytes
	a := chain(talk(t, long, 3, 1000, ""))
	for name, c := range map[string]struct {
		keys []string
		want int
	}{
		"the same":             {chain(talk(t, long, 3, 1000, "")), len(a)},
		"other options":        {chain(talk(t, long, 3, 1000, `"stream":true,"max_tokens":5,`)), len(a)},
		"another conversation": {chain(talk(t, long+"!", 3, 1000, "")), 2},
		"another system":       {chain(talk(t, "B"+long, 3, 1000, "")), 0},
		"other tools":          {chain(talk(t, long, 3, 1000, `"tools":[{"type":"function"}],`)), 0},
		"another tenant":       {affinity.Chain("u", "m", job.ChatCompletions, talk(t, long, 3, 1000, "")), 0},
		"another model":        {affinity.Chain("t", "n", job.ChatCompletions, talk(t, long, 3, 1000, "")), 0},
		"names that run on":    {affinity.Chain("tm", "", job.ChatCompletions, talk(t, long, 3, 1000, "")), 0},
	} {
		if n := shared(a, c.keys); n != c.want {
			t.Errorf("%s: %d of %d keys are shared, want %d", name, n, len(a), c.want)
		}
	}
}

func TestChainOfResponses(t *testing.T) {
	t.Parallel()
	keys := func(body string) []string { return affinity.Chain("t", "m", job.Responses, object(t, body)) }
	long := strings.Repeat("You are helpful. ", 40)
	turn := `{"role":"user","content":"` + long + `"}`
	first, second := keys(`{"instructions":"`+long+`","input":[`+turn+`]}`), keys(`{"input":[`+turn+`,`+turn+`],"instructions":"`+long+`","stream":true}`)
	if len(first) == 0 || len(second) <= len(first) || shared(first, second) != len(first) {
		t.Errorf("two turns share %d keys of %d and %d", shared(first, second), len(first), len(second))
	}
	if text, longer := keys(`{"input":"`+long+`"}`), keys(`{"input":"`+long+long+`"}`); len(text) == 0 || shared(text, longer) != len(text) {
		t.Errorf("two texts share %d keys of %d and %d", shared(text, longer), len(text), len(longer))
	}
}

func TestKeys(t *testing.T) {
	t.Parallel()
	body := talk(t, "s", 3, 1000, "")
	j := func(s job.Session, e job.Endpoint) *job.Job {
		return &job.Job{Tenant: "t", Model: "m", Session: s, Endpoint: e}
	}
	session := []string{affinity.SessionKey("t", "m", "s")}
	for name, c := range map[string]struct{ got, want []string }{
		"session":           {affinity.Keys(j("s", job.ChatCompletions), body, true), session},
		"session, no body":  {affinity.Keys(j("s", job.Completions), nil, true), session},
		"no session":        {affinity.Keys(j("", job.ChatCompletions), body, true), chain(body)},
		"prefixes are off":  {affinity.Keys(j("", job.ChatCompletions), body, false), nil},
		"no body":           {affinity.Keys(j("", job.ChatCompletions), nil, true), nil},
		"embeddings":        {affinity.Keys(j("s", job.Embeddings), body, true), nil},
		"no messages":       {affinity.Keys(j("", job.ChatCompletions), object(t, `{}`), true), nil},
		"another's session": {affinity.Keys(&job.Job{Tenant: "t", Model: "m", Session: "s2", Endpoint: job.Completions}, nil, true), []string{affinity.SessionKey("t", "m", "s2")}},
	} {
		if d := cmp.Diff(c.want, c.got); d != "" {
			t.Errorf("%s (-want +got):\n%s", name, d)
		}
	}
	for _, other := range []string{affinity.SessionKey("u", "m", "s"), affinity.SessionKey("t", "n", "s"), affinity.SessionKey("t", "ms", ""), affinity.SessionKey("tm", "", "s")} {
		if other == session[0] {
			t.Error("another scope has the same key")
		}
	}
}

func FuzzChain(f *testing.F) {
	f.Add("a", "b", uint16(300))
	f.Fuzz(func(t *testing.T, a, b string, n uint16) {
		text := strings.Repeat(a+"-", int(n)/(len(a)+1)+1)
		chainOf := func(s string) []string {
			raw, err := json.Marshal(s)
			if err != nil {
				t.Fatal(err)
			}
			return affinity.Chain("t", "m", job.Completions, object(t, `{"prompt":`+string(raw)+`}`))
		}
		short, long := chainOf(text), chainOf(text+b)
		if got := shared(short, long); got != len(short) {
			t.Errorf("a prompt of %d bytes has %d keys, of which one that goes on shares %d", len(text), len(short), got)
		}
		if len(long) > affinity.MostKeys {
			t.Errorf("%d keys", len(long))
		}
	})
}

func BenchmarkChain(b *testing.B) {
	for _, turns := range []int{1, 20, 100} {
		o := talk(b, "You are helpful.", turns, 400, "")
		b.Run(fmt.Sprint(len(o.Get("messages")), "B"), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				chain(o)
			}
		})
	}
}
