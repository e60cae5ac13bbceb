package api_test

import (
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/millrace/millrace/api"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
	"github.com/millrace/millrace/internal/results"
	"github.com/millrace/millrace/internal/testenv"
)

// wantLimit checks a refusal for a limit: its code, and that it names the limit's value and whose it is. final is for one that can never pass.
func (a answer) wantLimit(t testing.TB, code job.Code, value int64, whose string, final bool) {
	t.Helper()
	a.wantError(t, 429, code, "")
	if text := string(a.body); !strings.Contains(text, strconv.FormatInt(value, 10)) || !strings.Contains(text, whose) {
		t.Errorf("it names no %d of %s: %s", value, whose, text)
	}
	if (a.header.Get("X-Should-Retry") == "false") != final {
		t.Errorf("x-should-retry is %q: %s", a.header.Get("X-Should-Retry"), a.body)
	}
	if n, err := strconv.Atoi(a.header.Get("Retry-After")); err != nil || n < 1 || n > 60 {
		t.Errorf("Retry-After is %q", a.header.Get("Retry-After"))
	}
}

// limited makes a tenant with limits, and a key of it with limits of its own.
func (e *env) limited(tenant job.Tenant, ofTenant, ofKey ledger.Limits) (key *ledger.Key, header string) {
	e.t.Helper()
	if _, err := e.ledger.CreateTenant(e.t.Context(), ledger.Tenant{ID: tenant, Limits: ofTenant}); err != nil {
		e.t.Fatal(err)
	}
	return e.key(ledger.Key{Tenant: tenant, Limits: ofKey})
}

func TestLimitsPerMinute(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	e.startWorker(repeat)
	// chat(10) is expected to need some thirty tokens with its prompt.
	inner := chat(10, "")
	var expected int64
	for name, tt := range map[string]struct {
		ofTenant, ofKey ledger.Limits
		code            job.Code
		unit, whose     string
	}{
		"requests of a key":    {ofKey: ledger.Limits{RequestsPerMinute: 2}, code: job.CodeRequestsPerMinute, unit: "Requests", whose: "your API key key_"},
		"requests of a tenant": {ofTenant: ledger.Limits{RequestsPerMinute: 2}, ofKey: ledger.Limits{RequestsPerMinute: 100}, code: job.CodeRequestsPerMinute, unit: "Requests", whose: "your tenant t"},
		"tokens of a key":      {ofKey: ledger.Limits{TokensPerMinute: 80}, ofTenant: ledger.Limits{TokensPerMinute: 1000}, code: job.CodeTokensPerMinute, unit: "Tokens", whose: "your API key key_"},
		"tokens of a tenant":   {ofTenant: ledger.Limits{TokensPerMinute: 80}, code: job.CodeTokensPerMinute, unit: "Tokens", whose: "your tenant t"},
	} {
		t.Run(name, func(t *testing.T) {
			tenant := job.Tenant("t" + strings.ReplaceAll(name, " ", "-"))
			_, header := e.limited(tenant, tt.ofTenant, tt.ofKey)
			limit := max(tt.ofTenant.RequestsPerMinute, tt.ofTenant.TokensPerMinute)
			if strings.Contains(tt.whose, "key") {
				limit = max(tt.ofKey.RequestsPerMinute, tt.ofKey.TokensPerMinute)
			}
			var last answer
			for i := range 10 {
				if i%2 == 0 {
					last = e.send("POST", "/v1/chat/completions", inner, header)
				} else {
					last = e.send("POST", "/v1/jobs", jobBody(inner, ""), header)
				}
				if last.status == 429 {
					if i < 2 {
						t.Fatalf("the first ones are refused: %s", last.body)
					}
					break
				}
				left, err := strconv.ParseInt(last.header.Get("X-Ratelimit-Remaining-"+tt.unit), 10, 64)
				if got := last.header.Get("X-Ratelimit-Limit-" + tt.unit); got != strconv.FormatInt(limit, 10) || err != nil || left >= limit || last.header.Get("X-Ratelimit-Reset-"+tt.unit) == "" {
					t.Errorf("the headers are %v", last.header)
				}
				if i == 0 {
					expected = limit - left
				}
			}
			last.wantLimit(t, tt.code, limit, tt.whose, false)
			if last.header.Get("X-Ratelimit-Remaining-"+tt.unit) == "" {
				t.Errorf("a refusal has no headers: %v", last.header)
			}
			// Reading costs nothing.
			for range 5 {
				if a := e.send("GET", "/v1/jobs", "", header); a.status != 200 {
					t.Errorf("reading: %d", a.status)
				}
			}
		})
	}
	if expected < 1 {
		t.Errorf("a request took %d", expected)
	}
	// What can never pass is told so; another tenant is not touched.
	_, header := e.limited("small", ledger.Limits{TokensPerMinute: 50}, ledger.Limits{})
	e.send("POST", "/v1/chat/completions", chat(100, ""), header).wantLimit(t, job.CodeTokensPerMinute, 50, "your tenant small", true)
	e.send("POST", "/v1/jobs", jobBody(chat(100, ""), ""), header).wantLimit(t, job.CodeTokensPerMinute, 50, "your tenant small", true)
	if a := e.send("POST", "/v1/chat/completions", inner, header); a.status != 200 {
		t.Errorf("a small one: %d %s", a.status, a.body)
	}
	// Without a limit there are no headers.
	_, free := e.limited("free", ledger.Limits{}, ledger.Limits{})
	for name := range e.send("POST", "/v1/chat/completions", inner, free).header {
		if strings.HasPrefix(name, "X-Ratelimit") {
			t.Errorf("a header %s", name)
		}
	}
}

// TestARepeatIsNotAnotherRequest: what an idempotency key stands for already is told also over the limit, and takes nothing of it.
func TestARepeatIsNotAnotherRequest(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	e.startWorker(repeat)
	_, header := e.limited("a", ledger.Limits{RequestsPerMinute: 2}, ledger.Limits{})
	first := e.submit(jobBody(chat(2, ""), ""), header, "Idempotency-Key: k")
	for range 5 {
		if again := e.submit(jobBody(chat(2, ""), ""), header, "Idempotency-Key: k"); again != first {
			t.Error("a repeat is another job")
		}
	}
	e.submit(jobBody(chat(2, ""), ""), header)
	e.send("POST", "/v1/jobs", jobBody(chat(2, ""), ""), header).wantLimit(t, job.CodeRequestsPerMinute, 2, "your tenant a", false)
	if again := e.submit(jobBody(chat(2, ""), ""), header, "Idempotency-Key: k"); again != first {
		t.Error("a repeat over the limit is another job")
	}
	// The refused one has left its key free.
	e.send("POST", "/v1/jobs", jobBody(chat(2, ""), ""), header, "Idempotency-Key: other").wantLimit(t, job.CodeRequestsPerMinute, 2, "your tenant a", false)
}

// TestARepeatedCreateOfABatchOrFileIsNotAnotherRequest: as for jobs, and a key that stands for another request is told so.
func TestARepeatedCreateOfABatchOrFileIsNotAnotherRequest(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	e.known()
	_, header := e.limited("a", ledger.Limits{RequestsPerMinute: 3}, ledger.Limits{})
	same := func(send func() answer) (id string) {
		t.Helper()
		for range 4 {
			a := send()
			if a.status != 200 {
				t.Fatalf("%d %s", a.status, a.body)
			}
			if again := a.object(t)["id"].(string); id != "" && again != id {
				t.Errorf("a repeat of %s is %s", id, again)
			} else {
				id = again
			}
		}
		return id
	}
	lines := `{"custom_id":"1","method":"POST","url":"/v1/chat/completions","body":` + chat(1, "") + "}\n"
	file := same(func() answer { return e.upload("batch", "a.jsonl", lines, header, "Idempotency-Key: f") })
	create := func(endpoint string, headers ...string) answer {
		return e.send("POST", "/v1/batches", `{"input_file_id":"`+file+`","endpoint":"`+endpoint+`","completion_window":"24h"}`, append(headers, header)...)
	}
	const chats, embeddings = "/v1/chat/completions", "/v1/embeddings"
	same(func() answer { return create(chats, "Idempotency-Key: b") })
	if a := create(chats); a.status != 200 {
		t.Fatalf("the third: %d %s", a.status, a.body)
	}
	create(chats).wantLimit(t, job.CodeRequestsPerMinute, 3, "your tenant a", false)
	create(chats, "Idempotency-Key: new").wantLimit(t, job.CodeRequestsPerMinute, 3, "your tenant a", false)
	create(embeddings, "Idempotency-Key: new").wantLimit(t, job.CodeRequestsPerMinute, 3, "your tenant a", false) // which was left free
	e.upload("batch", "b.jsonl", lines, header, "Idempotency-Key: g").wantLimit(t, job.CodeRequestsPerMinute, 3, "your tenant a", false)
	e.upload("batch", "b.jsonl", lines, header).wantLimit(t, job.CodeRequestsPerMinute, 3, "your tenant a", false)
	same(func() answer { return create(chats, "Idempotency-Key: b") })
	create(embeddings, "Idempotency-Key: b").wantError(t, 409, job.CodeIdempotencyConflict, "Idempotency-Key")
	e.upload("batch", "b.jsonl", lines, header, "Idempotency-Key: f").wantError(t, 409, job.CodeIdempotencyConflict, "Idempotency-Key")
	if files := e.filesOf("a"); len(files) != 1 || len(e.objects()) != 1 {
		t.Errorf("there are %d files, and the objects %v", len(files), e.objects())
	}
}

// TestARefusalTellsOfTheLimitThatRefused: not of another one of the same unit, from which nothing is taken.
func TestARefusalTellsOfTheLimitThatRefused(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	e.known()
	_, first := e.limited("a", ledger.Limits{RequestsPerMinute: 2}, ledger.Limits{})
	for range 2 {
		e.submit(jobBody(chat(1, ""), ""), first)
	}
	key, second := e.key(ledger.Key{Tenant: "a", Limits: ledger.Limits{RequestsPerMinute: 1}})
	a := e.send("POST", "/v1/jobs", jobBody(chat(1, ""), ""), second)
	a.wantLimit(t, job.CodeRequestsPerMinute, 2, "your tenant a", false)
	if reset, err := time.ParseDuration(a.header.Get("X-Ratelimit-Reset-Requests")); a.header.Get("X-Ratelimit-Limit-Requests") != "2" || a.header.Get("X-Ratelimit-Remaining-Requests") != "0" || err != nil || reset <= 0 {
		t.Errorf("the headers are %v", a.header)
	}
	left, refused, err := e.results.TakeRates(t.Context(), []results.Rate{{Name: "r:k:" + key.ID, PerMinute: 1, Asked: 1}})
	if err != nil || refused >= 0 {
		t.Errorf("the key's own limit was used up: %+v, %v", left, err)
	}
}

func TestLimitsOnRunningCalls(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	first, firstServer := e.url, e.server
	e.startAPI(api.Config{})
	second := e.url
	hold := make(chan struct{})
	e.startWorker(func(j *job.Job, body []byte) reply {
		r := repeat(j, body)
		if j.Cost.Output == 11 {
			r.before = hold
		}
		return r
	})
	running := func(header string) (ended func()) {
		t.Helper()
		var wg sync.WaitGroup
		on := *e
		on.url = first
		wg.Go(func() {
			if a := on.send("POST", "/v1/chat/completions", chat(11, ""), header); a.status != 200 {
				t.Errorf("a running call: %d %s", a.status, a.body)
			}
		})
		return wg.Wait
	}
	names := map[string]struct {
		ofTenant, ofKey ledger.Limits
		code            job.Code
		value           int64
		whose           string
	}{
		"calls-tenant":  {ofTenant: ledger.Limits{Running: 1}, code: job.CodeRunning, value: 1, whose: "your tenant calls-tenant"},
		"calls-key":     {ofTenant: ledger.Limits{Running: 5}, ofKey: ledger.Limits{Running: 1}, code: job.CodeRunning, value: 1, whose: "your API key key_"},
		"tokens-tenant": {ofTenant: ledger.Limits{RunningTokens: 50}, code: job.CodeRunningTokens, value: 50, whose: "your tenant tokens-tenant"},
		"tokens-key":    {ofKey: ledger.Limits{RunningTokens: 50}, code: job.CodeRunningTokens, value: 50, whose: "your API key key_"},
	}
	headers, waits := map[string]string{}, []func(){}
	for name, tt := range names {
		_, headers[name] = e.limited(job.Tenant(name), tt.ofTenant, tt.ofKey)
		waits = append(waits, running(headers[name]))
	}
	eventually(t, "four calls run", func() bool { return firstServer.Held() == len(names) })
	for name, tt := range names {
		for _, e.url = range []string{first, second} { // of all processes together
			e.send("POST", "/v1/chat/completions", chat(11, ""), headers[name]).wantLimit(t, tt.code, tt.value, tt.whose, false)
		}
		// Durable jobs wait in their line instead.
		if a := e.send("POST", "/v1/jobs", jobBody(chat(2, ""), ""), headers[name]); a.status != 202 {
			t.Errorf("%s: a job: %d %s", name, a.status, a.body)
		}
	}
	e.send("POST", "/v1/chat/completions", chat(100, ""), headers["tokens-key"]).wantLimit(t, job.CodeRunningTokens, 50, "your API key key_", true)
	close(hold)
	for _, wait := range waits {
		wait()
	}
	for name := range names {
		if a := e.send("POST", "/v1/chat/completions", chat(11, ""), headers[name]); a.status != 200 {
			t.Errorf("%s: after the end of the other: %d %s", name, a.status, a.body)
		}
	}
}

func TestLimitsOnAcceptedWork(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{Limits: results.Limits{Tenant: results.Amount{Jobs: 3}}})
	e.remember() // and nobody runs anything
	_, few := e.limited("few", ledger.Limits{Queued: 2}, ledger.Limits{})
	_, many := e.limited("many", ledger.Limits{Queued: 5}, ledger.Limits{})
	_, usual := e.limited("usual", ledger.Limits{}, ledger.Limits{})
	for header, n := range map[string]int64{few: 2, many: 5, usual: 3} {
		for range n {
			e.submit(jobBody(chat(10, ""), ""), header)
		}
		e.send("POST", "/v1/jobs", jobBody(chat(10, ""), ""), header).wantLimit(t, job.CodeTenantQueuedJobs, n, "your tenant", false)
	}
	_, tokens := e.limited("tokens", ledger.Limits{QueuedTokens: 1000}, ledger.Limits{})
	e.submit(jobBody(chat(500, ""), ""), tokens)
	e.send("POST", "/v1/jobs", jobBody(chat(600, ""), ""), tokens).wantLimit(t, job.CodeTenantQueuedTokens, 1000, "your tenant tokens", false)
	e.send("POST", "/v1/jobs", jobBody(chat(1100, ""), ""), tokens).wantLimit(t, job.CodeTenantQueuedTokens, 1000, "your tenant tokens", true)
	// The lines of batches count, too.
	_, batched := e.limited("batched", ledger.Limits{QueuedTokens: 1000}, ledger.Limits{})
	file := e.putFile("batched", "batch", line("l", chat(1, "")))
	id := e.create(createBody(file, ""), batched)["id"].(string)
	if err := e.ledger.Lead(t.Context(), epoch); err != nil {
		t.Fatal(err)
	}
	if _, err := e.ledger.StartBatch(t.Context(), epoch, id, e.results.Now(), model, []ledger.Portion{{Model: model, Lines: 1, Tokens: 900}}); err != nil {
		t.Fatal(err)
	}
	e.submit(jobBody(chat(10, ""), ""), batched)
	a := e.send("POST", "/v1/jobs", jobBody(chat(200, ""), ""), batched)
	a.wantLimit(t, job.CodeTenantQueuedTokens, 1000, "your tenant batched", false)
	if !strings.Contains(string(a.body), "9") {
		t.Errorf("what the batch needs is not told: %s", a.body)
	}
}

// TestLimitsWithoutTheResultStore: calls answered on their connections go on as if there were no limits.
func TestLimitsWithoutTheResultStore(t *testing.T) {
	t.Parallel()
	redis := testenv.Redis(t)
	e := newEnv(t, api.Config{}, redis.URL())
	e.startWorker(repeat)
	_, header := e.limited("a", ledger.Limits{RequestsPerMinute: 1, Running: 1, TokensPerMinute: 1000, RunningTokens: 1000}, ledger.Limits{})
	if a := e.send("POST", "/v1/chat/completions", chat(2, ""), header); a.status != 200 {
		t.Fatalf("with the store: %d %s", a.status, a.body)
	}
	e.send("POST", "/v1/chat/completions", chat(2, ""), header).wantLimit(t, job.CodeRequestsPerMinute, 1, "your tenant a", false)
	redis.Kill()
	for i := range 3 {
		if a := e.send("POST", "/v1/chat/completions", chat(2, ""), header); a.status != 200 {
			t.Errorf("call %d without the store: %d %s", i, a.status, a.body)
		}
	}
	e.send("POST", "/v1/jobs", jobBody(chat(2, ""), ""), header).wantError(t, 503, job.CodeUnavailable, "")
}

// TestUploadsAndBatchesCountAsRequests, and take no tokens.
func TestUploadsAndBatchesCountAsRequests(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	_, header := e.limited("a", ledger.Limits{RequestsPerMinute: 2, TokensPerMinute: 1}, ledger.Limits{})
	file := e.file("batch", line("l", chat(1, "")), header)
	e.create(createBody(file, ""), header)
	e.upload("batch", "f", line("l", chat(1, "")), header).wantLimit(t, job.CodeRequestsPerMinute, 2, "your tenant a", false)
	e.send("POST", "/v1/batches", createBody(file, ""), header).wantLimit(t, job.CodeRequestsPerMinute, 2, "your tenant a", false)
}
