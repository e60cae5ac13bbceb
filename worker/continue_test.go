package worker_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/engine/emulator"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/relay"
	"github.com/millrace/millrace/internal/results"
)

// completion is a completion request.
func completion(text, more string) string {
	return fmt.Sprintf(`{"model":%q,%s"prompt":%q}`, model, more, text)
}

func asCompletion(j *job.Job) { j.Endpoint = job.Completions }

func asBatch(j *job.Job) { j.Class = job.Batch }

var (
	jobIDs  = regexp.MustCompile(`job_[0-9A-Za-z]+`)
	created = regexp.MustCompile(`"created":\d+`)
)

// alike is text without what differs from one run to the next: the job's id and the time.
func alike(text []byte) string {
	return created.ReplaceAllString(jobIDs.ReplaceAllString(string(text), "job_X"), `"created":0`)
}

// chunks are the chunks of a job's token events behind the last reset, one a line.
func (e *env) chunks(j *job.Job) string {
	e.Helper()
	var b bytes.Buffer
	for _, ev := range e.events(j) {
		switch ev.Kind {
		case job.EventReset:
			b.Reset()
		case job.EventToken:
			b.Write(ev.Data)
			b.WriteByte('\n')
		}
	}
	return b.String()
}

// told are the kinds of a job's events but for status, of which there is one for each attempt: a machine so busy that the engine seems to halt makes more of them.
func (e *env) told(j *job.Job) []job.EventKind {
	e.Helper()
	return kinds(slices.DeleteFunc(e.events(j), func(ev job.Event) bool { return ev.Kind == job.EventStatus }))
}

// streamed waits until n token events of a job are there.
func (e *env) streamed(j *job.Job, n int) {
	e.Helper()
	e.until(fmt.Sprintf("%d chunks are there", n), func() bool {
		got := 0
		for _, ev := range e.events(j) {
			if ev.Kind == job.EventToken {
				got++
			}
		}
		return got >= n
	})
}

// undisturbed runs the same request once more, which nothing disturbs, and compares what both jobs' readers and askers got.
func (e *env) undisturbed(j *job.Job, body string, change ...func(*job.Job)) {
	e.Helper()
	whole := e.submit(e.job(body, change...))
	want := alike(e.completed(whole))
	got := e.outcome(j)
	if diff := cmp.Diff(want, alike(got.Result)); diff != "" {
		e.Errorf("the answer: %s", diff)
	}
	lines := func(j *job.Job) []string {
		all := strings.Split(alike([]byte(e.chunks(j))), "\n")
		if strings.Contains(body, `"n":2`) { // the two come in any order
			slices.Sort(all)
		}
		return all
	}
	if diff := cmp.Diff(lines(whole), lines(j)); diff != "" {
		e.Errorf("the events: %s", diff)
	}
	if diff := cmp.Diff(e.outcome(whole).Outcome.Usage, got.Outcome.Usage); diff != "" {
		e.Errorf("the usage: %s", diff)
	}
	ids := map[string]bool{}
	for _, line := range strings.Split(strings.TrimSpace(e.chunks(j)), "\n") {
		var c struct {
			ID      string      `json:"id"`
			Created json.Number `json:"created"`
		}
		e.ok(json.Unmarshal([]byte(line), &c))
		ids[c.ID+" "+c.Created.String()] = true
	}
	if len(ids) != 1 {
		e.Errorf("the chunks have the names %v", ids)
	}
}

// TestJobGoesOnWhereverItWasCut: for every number of tokens that the readers have, the rest joins to what an undisturbed run gives, byte for byte.
func TestJobGoesOnWhereverItWasCut(t *testing.T) {
	t.Parallel()
	e := newEnv(t, time.Hour)
	eng, _ := emulate(t, emulator.Config{})
	p := e.work(eng.URL)
	type cut struct {
		j      *job.Job
		body   string
		change []func(*job.Job)
	}
	var cuts []cut
	for k := 1; k < 12; k++ {
		for variant, more := range []string{
			``, `"max_tokens":9,`, `"max_completion_tokens":9,"max_tokens":1,"min_tokens":5,"stream_options":{"include_usage":true},`,
			`"stream_options":{"include_usage":true,"continuous_usage_stats":true},`,
		} {
			if strings.Contains(more, `:9,`) && k >= 9 {
				continue // it has ended before
			}
			marker := fmt.Sprintf("[[emulator:tokens=12,hang-after=%d,times=1]] variant %d", k, variant)
			change := []func(*job.Job){withEvents, asBatch}
			body := chat(marker, more)
			cuts = append(cuts, cut{e.submit(e.job(body, change...)), body, change})
			if strings.Contains(more, "max_completion") {
				continue
			}
			if !strings.Contains(more, "max_tokens") {
				more += `"max_tokens":40,`
			}
			change, body = append(change, asCompletion), completion(marker+" once upon", more)
			cuts = append(cuts, cut{e.submit(e.job(body, change...)), body, change})
		}
	}
	stopped := map[job.ID]bool{}
	e.until("all were stopped", func() bool {
		for _, c := range cuts {
			if stopped[c.j.ID] {
				continue
			}
			var k int
			_, after, _ := strings.Cut(c.body, "hang-after=")
			_, err := fmt.Sscanf(after, "%d", &k)
			e.ok(err)
			if c.j.Endpoint == job.ChatCompletions {
				k++ // the role
			}
			if strings.Count(e.chunks(c.j), "\n") == k {
				p.Preempt(c.j.ID)
				stopped[c.j.ID] = true
			}
		}
		return len(stopped) == len(cuts)
	})
	for _, c := range cuts {
		e.completed(c.j)
		rec := e.get(c.j)
		if len(rec.Attempts) < 2 || rec.Attempts[0].Outcome != "preempted" || rec.Charged != 0 {
			t.Errorf("record %+v", rec)
		}
		if got := e.told(c.j); !cmp.Equal(got, []job.EventKind{"token", "done"}) {
			t.Errorf("the events are %v", got)
		}
		e.undisturbed(c.j, c.body, c.change...)
		if t.Failed() {
			t.Fatalf("with the body %s", c.body)
		}
	}
	e.idle(p)
}

// TestJobGoesOnAfterEachTrouble of those that end an attempt in the middle of a stream.
func TestJobGoesOnAfterEachTrouble(t *testing.T) {
	t.Parallel()
	const hangs = "[[emulator:tokens=20,hang-after=7,times=1]] tell me"
	for name, c := range map[string]struct {
		text    string
		trouble func(e *env, url string, p *process, j *job.Job)
		config  func(*workerConfig)
		charged int
	}{
		"the worker dies": {text: hangs, trouble: func(e *env, url string, p *process, j *job.Job) { p.die() }},
		"the worker drains": {
			text: hangs, trouble: func(e *env, url string, p *process, j *job.Job) { e.ends(p) },
			config: func(c *workerConfig) { c.Drain = 50 * time.Millisecond },
		},
		"the engine stalls":     {text: hangs, config: func(c *workerConfig) { c.StallTimeout = time.Second }},
		"the engine breaks off": {text: "[[emulator:tokens=20,reset-after=7,times=1]] tell me", charged: 1},
		"the engine fails":      {text: "[[emulator:tokens=20,error-after=7,times=1]] tell me", charged: 1},
		"it is in a large body": {text: hangs + strings.Repeat(" padding", 40_000), trouble: func(e *env, url string, p *process, j *job.Job) { p.Preempt(j.ID) }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newEnv(t, 500*time.Millisecond)
			eng, calls := emulate(t, emulator.Config{MaxModelLen: 200_000, KVTokens: 400_000})
			p := e.work(eng.URL, func(w *workerConfig) {
				if c.config != nil {
					c.config(w)
				}
			})
			for i, endpoint := range []job.Endpoint{job.ChatCompletions, job.Completions} {
				change := []func(*job.Job){withEvents, func(j *job.Job) {
					j.Endpoint = endpoint
					if j.BodySize > 256<<10 {
						j.Blob = job.RequestBlob(j.ID)
					}
				}}
				body := chat(c.text, "")
				if endpoint == job.Completions {
					body = completion(c.text, `"max_tokens":30,`)
				}
				j := e.submit(e.job(body, change...))
				if c.trouble != nil {
					e.streamed(j, 8-i)
					c.trouble(e, eng.URL, p, j)
					if name != "it is in a large body" {
						p = e.work(eng.URL, func(w *workerConfig) {
							if c.config != nil {
								c.config(w)
							}
						})
					}
				}
				e.completed(j)
				if n := calls.of(string(j.ID)); n < 2 { // more on a machine so busy that the engine seems to halt
					t.Errorf("the engine was called %d times: %+v", n, e.get(j).Attempts)
				}
				if rec := e.get(j); rec.Charged != c.charged || rec.FirstToken == 0 || rec.Outcome.FirstToken != rec.FirstToken {
					t.Errorf("record %+v, outcome %+v", rec, rec.Outcome)
				}
				for _, ev := range e.events(j) {
					if ev.Kind == job.EventReset {
						t.Errorf("there is a reset: %v", kinds(e.events(j)))
					}
				}
				e.undisturbed(j, body, change...)
			}
		})
	}
}

// TestJobOnAnEngineThatDoesNotContinueBeginsAnew: after one reset.
func TestJobOnAnEngineThatDoesNotContinueBeginsAnew(t *testing.T) {
	t.Parallel()
	e := newEnv(t, time.Hour)
	eng, _ := emulate(t, emulator.Config{NoContinuation: true})
	p := e.work(eng.URL)
	for name, body := range map[string]string{
		"it refuses":            chat("[[emulator:tokens=9,hang-after=4,times=1]] a", ""),
		"log probabilities":     chat("[[emulator:tokens=9,hang-after=4,times=1]] b", `"logprobs":true,`),
		"two answers":           chat("[[emulator:tokens=9,hang-after=4,times=1]] c", `"n":2,`),
		"an answer with a form": chat("[[emulator:tokens=9,hang-after=4,times=1]] d", `"response_format":{"type":"json_object"},`),
	} {
		j := e.submit(e.job(body, withEvents))
		e.streamed(j, 4)
		p.Preempt(j.ID)
		e.completed(j)
		if got := e.told(j); !cmp.Equal(got, []job.EventKind{"token", "reset", "token", "done"}) {
			t.Errorf("%s: the events are %v", name, got)
		}
		e.undisturbed(j, body, withEvents)
	}
	e.idle(p)
}

// TestContinuedEventsArePutBackWhole: the store is wiped while a job goes on; who reads from the start gets the text from its start.
func TestContinuedEventsArePutBackWhole(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 500*time.Millisecond)
	eng, _ := emulate(t, emulator.Config{})
	p := e.work(eng.URL)
	body := chat("[[emulator:tokens=60,token-delay=25ms]] long", "")
	j := e.submit(e.job(body, withEvents))
	e.streamed(j, 5)
	p.Preempt(j.ID)
	e.running(j, 2)
	e.until("it goes on", func() bool { k := kinds(e.events(j)); return len(k) == 4 })
	e.wipe()
	e.ok(e.results.SetSentinel(context.Background()))
	e.completed(j)
	events := e.events(j)
	for i, ev := range events {
		if ev.N != int64(i)+1 {
			t.Fatalf("event %d has the number %d", i, ev.N)
		}
	}
	if got := e.told(j); !cmp.Equal(got, []job.EventKind{"token", "done"}) {
		t.Errorf("the events are %v", got)
	}
	e.undisturbed(j, body, withEvents)
}

// TestEventsWithAGapBeginAnew: readers may have what the store has not.
func TestEventsWithAGapBeginAnew(t *testing.T) {
	t.Parallel()
	e := newEnv(t, time.Hour)
	eng, _ := emulate(t, emulator.Config{})
	body := chat("[[emulator:tokens=9]] gap", "")
	j := e.submit(e.job(body, withEvents))
	c, err := e.results.Claim(t.Context(), results.ClaimRequest{Job: j, Worker: "other", Lease: time.Hour, AckSubject: "other", Delivered: 1})
	e.ok(err)
	tok := func(n int64, text string) job.Event {
		return job.Event{N: n, Token: c.Token, Kind: job.EventToken, Data: fmt.Appendf(nil, `{"choices":[{"index":0,"delta":{"content":%q}}]}`, text)}
	}
	e.ok(e.results.Append(t.Context(), j, []job.Event{tok(2, "a"), tok(4, "c")}))
	e.ok(e.results.GiveBack(t.Context(), j.ID, c.Token, 0, false, "drained"))
	e.work(eng.URL)
	e.completed(j)
	if got := e.told(j); !cmp.Equal(got, []job.EventKind{"token", "reset", "token", "done"}) {
		t.Errorf("the events are %v", got)
	}
	e.undisturbed(j, body, withEvents)
}

// scripted is a script that looks like vLLM: it continues.
func scripted(t testing.TB, answer http.HandlerFunc) *script {
	s := play(t, answer)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.metrics = `vllm:num_requests_running{engine="0"} 0
vllm:num_requests_waiting{engine="0"} 0
vllm:kv_cache_usage_perc{engine="0"} 0
vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="1001"} 1
`
	return s
}

// breakOff sends chunks, and breaks the connection once release is closed.
func breakOff(release <-chan struct{}, chunks ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		send(w, chunks...)
		select {
		case <-release:
		case <-r.Context().Done():
		}
		panic(http.ErrAbortHandler)
	}
}

// chatChunk is a chunk of a chat.
func chatChunk(id, members, finish, more string) string {
	return `{"id":"` + id + `","object":"chat.completion.chunk","created":1` + id[len(id)-1:] + `,"model":"m","choices":[{"index":0,"delta":{` + members + `},"finish_reason":` + finish + `}]` + more + `}`
}

func TestTwoPartsJoin(t *testing.T) {
	t.Parallel()
	const role, null = `"role":"assistant","content":""`, "null"
	text := func(s string) string { return `"content":"` + s + `"` }
	for name, c := range map[string]struct {
		body          string
		first, second []string
		chunks        []string // what the readers get
		rest          string   // is in the body that the engine got for the rest; "" if it was not called again
		usage         *job.Usage
	}{
		"the engine counts as it goes, several tokens a chunk": {
			body:   chat("x", `"max_tokens":10,"stream_options":{"include_usage":true,"continuous_usage_stats":true},`),
			first:  []string{chatChunk("a1", role, null, `,"usage":{"prompt_tokens":5,"total_tokens":5,"completion_tokens":0}`), chatChunk("a1", text("one two"), null, `,"usage":{"prompt_tokens":5,"total_tokens":8,"completion_tokens":3}`)},
			second: []string{chatChunk("b2", role, null, `,"usage":{"prompt_tokens":9,"total_tokens":9,"completion_tokens":0}`), chatChunk("b2", text(" three"), `"stop"`, `,"usage":{"prompt_tokens":9,"total_tokens":11,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":8}}`)},
			chunks: []string{chatChunk("a1", role, null, `,"usage":{"prompt_tokens":5,"total_tokens":5,"completion_tokens":0}`), chatChunk("a1", text("one two"), null, `,"usage":{"prompt_tokens":5,"total_tokens":8,"completion_tokens":3}`), chatChunk("a1", text(" three"), `"stop"`, `,"usage":{"prompt_tokens":5,"total_tokens":10,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":5}}`)},
			rest:   `"max_tokens":7`,
			usage:  &job.Usage{PromptTokens: 5, CompletionTokens: 5, TotalTokens: 10, CachedTokens: 5},
		},
		"the role comes with the text": {
			body:   chat("x", ""),
			first:  []string{chatChunk("a1", `"role":"assistant",`+text("one"), null, "")},
			second: []string{chatChunk("b2", `"role":"assistant",`+text(" two"), null, ""), chatChunk("b2", text(" three"), `"stop"`, "")},
			chunks: []string{chatChunk("a1", `"role":"assistant",`+text("one"), null, ""), chatChunk("a1", text(" two"), null, ""), chatChunk("a1", text(" three"), `"stop"`, "")},
			rest:   `,{"role":"assistant","content":"one"}]`,
		},
		"a role is all that was shown": {
			body:   chat("x", `"max_tokens":10,`),
			first:  []string{chatChunk("a1", role, null, "")},
			second: []string{chatChunk("b2", role, null, ""), chatChunk("b2", text("one"), `"stop"`, ""), `{"id":"b2","choices":[],"usage":{"prompt_tokens":5,"completion_tokens":1,"total_tokens":6}}`},
			chunks: []string{chatChunk("a1", role, null, ""), chatChunk("a1", text("one"), `"stop"`, "")},
			rest:   `"max_tokens":10,"messages":[{"role":"user","content":"x"}]`,
			usage:  &job.Usage{PromptTokens: 5, CompletionTokens: 1, TotalTokens: 6},
		},
		"characters in several tokens": {
			body:   chat("x", `"max_tokens":10,`),
			first:  []string{chatChunk("a1", role, null, ""), chatChunk("a1", text(""), null, ""), chatChunk("a1", text("東"), null, ""), chatChunk("a1", text(""), null, "")},
			second: []string{chatChunk("b2", text("京"), `"stop"`, "")},
			chunks: []string{chatChunk("a1", role, null, ""), chatChunk("a1", text(""), null, ""), chatChunk("a1", text("東"), null, ""), chatChunk("a1", text(""), null, ""), chatChunk("a1", text("京"), `"stop"`, "")},
			rest:   `"max_tokens":8`,
		},
		"the limit was reached and not told": {
			body:   chat("x", `"max_tokens":2,`),
			first:  []string{chatChunk("a1", role, null, ""), chatChunk("a1", text("one"), null, ""), chatChunk("a1", text(" two"), null, "")},
			chunks: []string{chatChunk("a1", role, null, ""), chatChunk("a1", text("one"), null, ""), chatChunk("a1", text(" two"), null, ""), `{"id":"a1","object":"chat.completion.chunk","created":11,"model":"m","choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"length"}]}`},
		},
		"all was there but the end mark": {
			body:   chat("x", `"stream_options":{"include_usage":true},`),
			first:  []string{chatChunk("a1", role, null, ""), chatChunk("a1", text("one"), `"stop"`, ""), `{"id":"a1","choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2,"total_tokens":7}}`},
			chunks: []string{chatChunk("a1", role, null, ""), chatChunk("a1", text("one"), `"stop"`, ""), `{"id":"a1","choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2,"total_tokens":7}}`},
			usage:  &job.Usage{PromptTokens: 5, CompletionTokens: 2, TotalTokens: 7},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newEnv(t, time.Hour)
			release := make(chan struct{})
			eng := scripted(t, breakOff(release, c.first...))
			e.work(eng.URL)
			d := e.desk()

			j := e.submit(e.job(c.body, withEvents))
			e.streamed(j, len(c.first))
			eng.then(stream(c.second...))
			close(release)
			e.completed(j)
			if diff := cmp.Diff(strings.Join(c.chunks, "\n")+"\n", e.chunks(j)); diff != "" {
				t.Errorf("the events: %s", diff)
			}
			if diff := cmp.Diff(c.usage, e.outcome(j).Outcome.Usage); diff != "" {
				t.Errorf("the usage: %s", diff)
			}
			calls := eng.list()
			want := 2
			if c.rest == "" {
				want = 1
			}
			if len(calls) != want || !strings.Contains(calls[len(calls)-1].body, c.rest) {
				t.Errorf("the engine was called with %+v", calls)
			}

			// The same on a client's own connection.
			release = make(chan struct{})
			eng.then(breakOff(release, c.first...))
			m := e.job(strings.Replace(c.body, "{", `{"stream":true,`, 1), liveStream)
			s := e.call(d, m)
			var got strings.Builder
			for strings.Count(got.String(), "\n\n") < len(c.first) {
				part, err := s.Next(t.Context())
				e.ok(err)
				got.Write(part.Data)
			}
			eng.then(stream(c.second...))
			close(release)
			head, rest, end := e.collect(s)
			got.WriteString(rest)
			whole := "data: " + strings.Join(c.chunks, "\n\ndata: ") + "\n\n"
			if diff := cmp.Diff(whole, strings.TrimSuffix(got.String(), "data: [DONE]\n\n")); diff != "" {
				t.Errorf("the stream: %s", diff)
			}
			if end.State != job.Completed || !cmp.Equal(end.Usage, c.usage) || head != nil && !head.Continues {
				t.Errorf("head %+v, end %+v", head, end)
			}
			e.settledLive(&m.Job)
		})
	}
}

// TestEngineThatRefusesTheRestBeginsAnew, also if it continues in general.
func TestEngineThatRefusesTheRestBeginsAnew(t *testing.T) {
	t.Parallel()
	e := newEnv(t, time.Hour)
	whole := []string{chatChunk("a1", `"role":"assistant","content":"one"`, "null", ""), chatChunk("a1", `"content":" two"`, `"stop"`, "")}
	release := make(chan struct{})
	eng := scripted(t, breakOff(release, whole[0]))
	e.work(eng.URL)
	second := func(w http.ResponseWriter, r *http.Request) {
		body := eng.list()
		if strings.Contains(body[len(body)-1].body, "continue_final_message") {
			reply(400, `{"error":{"message":"roles must alternate"}}`)(w, r)
			return
		}
		stream(whole...)(w, r)
	}
	j := e.submit(e.job(chat("x", ""), withEvents))
	e.streamed(j, 1)
	eng.then(second)
	close(release)
	e.completed(j)
	if got := e.told(j); !cmp.Equal(got, []job.EventKind{"token", "reset", "token", "done"}) || e.chunks(j) != strings.Join(whole, "\n")+"\n" {
		t.Errorf("the events are %v: %s", got, e.chunks(j))
	}

	release = make(chan struct{})
	eng.then(breakOff(release, whole[0]))
	m := e.job(chat("x", `"stream":true,`), liveStream)
	s := e.call(e.desk(), m)
	for range 2 {
		_, err := s.Next(t.Context())
		e.ok(err)
	}
	eng.then(second)
	close(release)
	_, rest, end := e.collect(s)
	if rest != "" || end.State != job.Failed || end.Error.CodeOf() != job.CodeEngineError {
		t.Errorf("rest %q, end %+v", rest, end)
	}
	if o := e.settledLive(&m.Job); o.State != job.Failed {
		t.Errorf("outcome %+v", o)
	}
}

// TestLiveStreamGoesOnAfterEachTrouble: its client gets each byte once, and all of them.
func TestLiveStreamGoesOnAfterEachTrouble(t *testing.T) {
	t.Parallel()
	const hangs = "[[emulator:tokens=20,hang-after=7,times=1]] tell me"
	for name, c := range map[string]struct {
		text    string
		trouble func(e *env, p *process, s *relay.Seat)
		config  func(*workerConfig)
	}{
		"the worker dies": {text: hangs, trouble: func(e *env, p *process, s *relay.Seat) {
			p.die()
			s.Release(true)
		}},
		"the worker drains": {
			text: hangs, trouble: func(e *env, p *process, s *relay.Seat) { e.ends(p) },
			config: func(c *workerConfig) { c.Drain = 50 * time.Millisecond },
		},
		"the engine stalls":     {text: hangs, config: func(c *workerConfig) { c.StallTimeout = time.Second }},
		"the engine breaks off": {text: "[[emulator:tokens=20,reset-after=7,times=1]] tell me"},
		"the engine fails":      {text: "[[emulator:tokens=20,error-after=7,times=1]] tell me"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newEnv(t, 500*time.Millisecond)
			eng, calls := emulate(t, emulator.Config{})
			config := func(w *workerConfig) {
				if c.config != nil {
					c.config(w)
				}
			}
			p := e.work(eng.URL, config)
			d := e.desk()
			for i, endpoint := range []job.Endpoint{job.ChatCompletions, job.Completions} {
				body := chat(c.text, `"stream":true,"stream_options":{"include_usage":true},`)
				if endpoint == job.Completions {
					body = completion(c.text, `"stream":true,"max_tokens":30,`)
				}
				m := e.job(body, liveStream, func(j *job.Job) { j.Endpoint = endpoint })
				s := e.call(d, m)
				var got strings.Builder
				for strings.Count(got.String(), "\n\n") < 8-i {
					part, err := s.Next(t.Context())
					e.ok(err)
					got.Write(part.Data)
				}
				if c.trouble != nil {
					c.trouble(e, p, s)
					p = e.work(eng.URL, config)
				}
				head, rest, end := e.collect(s)
				got.WriteString(rest)
				if head != nil && !head.Continues || end.State != job.Completed { // the loop above may have taken it
					t.Errorf("head %+v, end %+v", head, end)
				}
				if n := calls.of(string(m.Job.ID)); n < 2 {
					t.Errorf("the engine was called %d times", n)
				}
				whole := e.job(body, liveStream, func(j *job.Job) { j.Endpoint = endpoint })
				_, want, wantEnd := e.collect(e.call(d, whole))
				if diff := cmp.Diff(alike([]byte(want)), alike([]byte(got.String()))); diff != "" {
					t.Errorf("the stream: %s", diff)
				}
				if diff := cmp.Diff(wantEnd.Usage, end.Usage); diff != "" {
					t.Errorf("the usage: %s", diff)
				}
				if o := e.settledLive(&m.Job); o.State != job.Completed {
					t.Errorf("outcome %+v", o)
				}
			}
		})
	}
}

// TestLiveStreamCountsWhatItsClientHas: the API has got more than it has passed on when the worker goes. The rest begins behind what was passed on.
func TestLiveStreamCountsWhatItsClientHas(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 500*time.Millisecond)
	eng, _ := emulate(t, emulator.Config{})
	e.work(eng.URL)
	d := e.desk()
	body := chat("[[emulator:tokens=20,reset-after=12,times=1]] tell me", `"stream":true,`)
	m := e.job(body, liveStream)
	s := e.call(d, m)
	var got strings.Builder
	for strings.Count(got.String(), "\n\n") < 4 {
		part, err := s.Next(t.Context())
		e.ok(err)
		got.Write(part.Data)
	}
	e.until("the job is given back", func() bool { w, _, _ := s.Holder(); return w == "" })
	_, rest, end := e.collect(s)
	got.WriteString(rest)
	_, want, _ := e.collect(e.call(d, e.job(body, liveStream)))
	if diff := cmp.Diff(alike([]byte(want)), alike([]byte(got.String()))); diff != "" || end.State != job.Completed {
		t.Errorf("end %+v: %s", end, diff)
	}
}

// TestLiveStreamOnAnEngineThatDoesNotContinueFails: what its client has cannot be taken back.
func TestLiveStreamOnAnEngineThatDoesNotContinueFails(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 500*time.Millisecond)
	eng, calls := emulate(t, emulator.Config{NoContinuation: true})
	p := e.work(eng.URL)
	m := e.job(chat("[[emulator:tokens=20,hang-after=7,times=1]] tell me", `"stream":true,`), liveStream)
	s := e.call(e.desk(), m)
	for range 6 {
		_, err := s.Next(t.Context())
		e.ok(err)
	}
	p.die()
	s.Release(true)
	e.work(eng.URL)
	head, rest, end := e.collect(s)
	if head != nil || rest != "" || end.State != job.Failed || end.Error.CodeOf() != job.CodeEngineError {
		t.Errorf("head %+v, rest %q, end %+v", head, rest, end)
	}
	if o := e.settledLive(&m.Job); o.State != job.Failed {
		t.Errorf("outcome %+v", o)
	}
	if n := calls.of(string(m.Job.ID)); n != 1 {
		t.Errorf("the engine was called %d times", n)
	}
}

// TestJobIsPreemptedThreeTimesAtMost: then it stays. Higher classes never give way.
func TestJobIsPreemptedThreeTimesAtMost(t *testing.T) {
	t.Parallel()
	e := newEnv(t, time.Hour)
	eng, _ := emulate(t, emulator.Config{})
	p := e.work(eng.URL)
	body := chat("[[emulator:tokens=150,token-delay=30ms]] x", "")
	j := e.submit(e.job(body, withEvents, asBatch))
	preempted := func() (n int) {
		for _, a := range e.get(j).Attempts {
			if a.Outcome == "preempted" {
				n++
			}
		}
		return n
	}
	e.streamed(j, 3)
	e.until("it has made room three times", func() bool {
		n := preempted()
		if n < 3 && p.Preemptible(j.ID) {
			p.Preempt(j.ID)
		}
		return n >= 3
	})
	got := strings.Count(e.chunks(j), "\n")
	e.streamed(j, got+3) // the next attempt runs
	if p.Preemptible(j.ID) {
		t.Error("it may give way once more")
	}
	e.completed(j)
	e.undisturbed(j, body, withEvents, asBatch)
	e.idle(p)
}

// TestPriorityIsTheClass where the engine orders by it, whatever the client asked; elsewhere the body stays as it is.
func TestPriorityIsTheClass(t *testing.T) {
	t.Parallel()
	e := newEnv(t, time.Hour)
	for _, priorities := range []bool{true, false} {
		eng, calls := emulate(t, emulator.Config{PriorityScheduling: priorities})
		p := e.work(eng.URL, func(c *workerConfig) { c.NoCacheSalt = true })
		for i, class := range job.Classes() {
			body := chat("hello", `"priority":0,"stream":false,`)
			j := e.submit(e.job(body, func(j *job.Job) { j.Class = class }))
			e.completed(j)
			want := body
			if priorities {
				want = strings.Replace(body, `"priority":0`, fmt.Sprintf(`"priority":%d`, i), 1)
			}
			all := calls.list()
			if got := all[len(all)-1].body; got != want {
				t.Errorf("%s: the engine got %s", class, got)
			}
		}
		e.ends(p)
	}
}

// TestCacheSaltIsTheTenants where the engine knows any, in place of the client's own; every other byte stays as it is.
func TestCacheSaltIsTheTenants(t *testing.T) {
	t.Parallel()
	e := newEnv(t, time.Hour)
	eng, calls := emulate(t, emulator.Config{})
	p := e.work(eng.URL)
	ask := func(tenant job.Tenant, body string) (got, salt string) {
		t.Helper()
		e.completed(e.submit(e.job(body, func(j *job.Job) { j.Tenant, j.Events = tenant, false })))
		all := calls.list()
		got = all[len(all)-1].body
		var sent struct {
			CacheSalt string `json:"cache_salt"`
		}
		if err := json.Unmarshal([]byte(got), &sent); err != nil {
			t.Fatal(err)
		}
		return got, sent.CacheSalt
	}
	plain := chat("hello", `"user" :  "u\u00e9", "stream":false,`)
	got, own := ask("acme", plain)
	if len(own) != 43 || got != strings.TrimSuffix(plain, "}")+`,"cache_salt":"`+own+`"}` {
		t.Errorf("the engine got %s", got)
	}
	_, other := ask("globex", plain)
	if other == own || len(other) != 43 {
		t.Errorf("two tenants have the salts %q and %q", own, other)
	}
	salted := chat("hello", `"cache_salt":"`+other+`","stream":false,`) // another tenant's
	if got, _ = ask("acme", salted); got != strings.Replace(salted, other, own, 1) {
		t.Errorf("the engine got %s", got)
	}
	e.ends(p)
	p = e.work(eng.URL, func(c *workerConfig) { c.NoCacheSalt = true })
	if got, _ = ask("acme", salted); got != salted {
		t.Errorf("switched off, the engine got %s", got)
	}
	e.ends(p)
}
