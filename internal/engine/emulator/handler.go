package emulator

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/millrace/millrace/internal/job"
)

// Version is that of the vLLM whose answers it imitates.
const Version = "0.15.1"

// maxBody bounds a request's body, in bytes.
const maxBody = 256 << 20

// slowMetrics is how long a slow metrics page takes.
const slowMetrics = 10 * time.Second

// maxFreeze bounds what a call may freeze the engine for.
const maxFreeze = 10 * time.Minute

func (e *Emulator) routes() http.Handler {
	mux := http.NewServeMux()
	get := func(path string, h http.HandlerFunc) {
		mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) {
			if r.Method != http.MethodGet && r.Method != http.MethodHead {
				writeError(w, &apiError{status: http.StatusMethodNotAllowed, kind: "Method Not Allowed", message: "Method Not Allowed"})
				return
			}
			e.report(r, nil)
			h(w, r)
		})
	}
	get("/health", e.health)
	get("/ping", e.health)
	get("/version", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, fmt.Appendf(nil, `{"version":"%s"}`, Version))
	})
	get("/v1/models", e.models)
	metrics := promhttp.HandlerFor(e.metrics, promhttp.HandlerOpts{})
	get("/metrics", func(w http.ResponseWriter, r *http.Request) { e.metricsPage(w, r, metrics) })
	for _, ep := range job.Endpoints() {
		if ep == job.Responses && !e.cfg.Responses {
			continue
		}
		mux.HandleFunc(string(ep), func(w http.ResponseWriter, r *http.Request) { e.serveCall(w, r, ep) })
	}
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		e.report(r, nil)
		writeError(w, &apiError{status: http.StatusNotFound, kind: "Not Found", message: "Not Found"})
	})
	mux.HandleFunc("POST /emulator/freeze", e.freeze)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		e.thawed(e.stopped)
		mux.ServeHTTP(w, r)
	})
}

// freeze lets a benchmark choose when the engine stalls.
func (e *Emulator) freeze(w http.ResponseWriter, r *http.Request) {
	d, err := time.ParseDuration(r.FormValue("for"))
	if err != nil || d < 0 || d > maxFreeze {
		writeError(w, badRequest("for", "for is %q: it must be a duration from 0s to %v", r.FormValue("for"), maxFreeze))
		return
	}
	e.Freeze(d)
	w.WriteHeader(http.StatusNoContent)
}

func (e *Emulator) report(r *http.Request, body []byte) {
	if e.cfg.OnRequest != nil {
		e.cfg.OnRequest(r.Method, r.URL.Path, r.Header.Clone(), body)
	}
}

func (e *Emulator) loading() bool { return time.Now().Before(e.ready) }

func (e *Emulator) currentFaults() Faults {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.faults
}

func loadingError() *apiError {
	return failure(http.StatusServiceUnavailable, "The model is loading.")
}

func (e *Emulator) health(w http.ResponseWriter, _ *http.Request) {
	if e.loading() && !e.currentFaults().HealthLies {
		writeError(w, loadingError())
		return
	}
	w.WriteHeader(http.StatusOK)
}

func (e *Emulator) models(w http.ResponseWriter, r *http.Request) {
	switch {
	case !e.authorized(w, r):
		return
	case e.loading():
		writeError(w, loadingError())
		return
	}
	created := strconv.FormatInt(e.ready.Unix(), 10)
	b := append([]byte(nil), `{"object":"list","data":[`...)
	for i, m := range e.cfg.Models {
		if i > 0 {
			b = append(b, ',')
		}
		b = appendString(append(b, `{"id":`...), []byte(m))
		b = append(b, `,"object":"model","created":`+created+`,"owned_by":"vllm","root":`...)
		b = appendString(b, []byte(m))
		b = append(strconv.AppendInt(append(b, `,"parent":null,"max_model_len":`...), int64(e.profile.MaxModelLen), 10), `,"permission":[]}`...)
	}
	writeJSON(w, http.StatusOK, append(b, "]}"...))
}

func (e *Emulator) metricsPage(w http.ResponseWriter, r *http.Request, page http.Handler) {
	switch e.currentFaults().Metrics {
	case MetricsMissing:
		writeError(w, &apiError{status: http.StatusNotFound, kind: "Not Found", message: "Not Found"})
		return
	case MetricsGarbage:
		w.Header().Set("Content-Type", "text/plain; version=0.0.4")
		_, _ = io.WriteString(w, "<html>vllm:kv_cache_usage_perc{ much\n") // a client that left needs no answer
		return
	case MetricsSlow:
		if e.pause(r.Context(), slowMetrics) != nil {
			return
		}
	}
	page.ServeHTTP(w, r)
}

// authorized checks the key, and answers if it is wrong.
func (e *Emulator) authorized(w http.ResponseWriter, r *http.Request) bool {
	if e.cfg.APIKey == "" || r.Header.Get("Authorization") == "Bearer "+e.cfg.APIKey {
		return true
	}
	writeJSON(w, http.StatusUnauthorized, []byte(`{"error":"Unauthorized"}`)) // vLLM's own shape
	return false
}

func writeJSON(w http.ResponseWriter, status int, body []byte) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(status)
	_, _ = w.Write(body) // a client that left needs no answer
}

func writeError(w http.ResponseWriter, e *apiError) {
	if e.retryAfter != "" {
		w.Header().Set("Retry-After", e.retryAfter)
	}
	writeJSON(w, e.status, e.body())
}

// errStopped says that the engine has stopped.
var errStopped = errors.New("the engine has stopped")

// pause waits, unless the client leaves or the engine stops.
func (e *Emulator) pause(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-e.stopped:
		return errStopped
	}
}

// serveCall answers one completion or embedding.
func (e *Emulator) serveCall(w http.ResponseWriter, r *http.Request, ep job.Endpoint) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		writeError(w, badRequest("", "reading the body: %s", err))
		return
	}
	e.report(r, body)
	if r.Method != http.MethodPost {
		writeError(w, &apiError{status: http.StatusMethodNotAllowed, kind: "Method Not Allowed", message: "Method Not Allowed"})
		return
	}
	e.calls.Add(1)
	if !e.authorized(w, r) {
		return
	}
	faults := e.currentFaults()
	switch {
	case faults.Status != 0:
		refusal := failure(faults.Status, http.StatusText(faults.Status))
		refusal.retryAfter = faults.RetryAfter
		writeError(w, refusal)
		return
	case e.loading():
		writeError(w, loadingError())
		return
	case !isJSON(r.Header.Get("Content-Type")):
		writeError(w, badRequest("", "Unsupported Media Type: Only 'application/json' is allowed"))
		return
	}
	q, refusal := parse(ep, body, e.salt)
	if refusal == nil {
		refusal = e.checkModel(q)
	}
	if refusal == nil {
		refusal = e.checkAbilities(q)
	}
	if refusal != nil {
		writeError(w, refusal)
		return
	}
	now := time.Now()
	m, refusal := e.fate(q, body, now)
	if refusal != nil {
		writeError(w, refusal)
		return
	}
	most, refusal := q.fit(e.profile.MaxModelLen)
	if refusal != nil {
		writeError(w, refusal)
		return
	}
	err = e.answer(w, r, q, &m, most, now)
	switch {
	case err == nil:
		e.completed.Add(1)
	case errors.Is(err, errReset), errors.Is(err, errStopped):
		reset(w)
	default: // the client is gone
		e.disconnects.Add(1)
	}
}

func isJSON(contentType string) bool {
	for i, c := range contentType {
		if c == ';' || c == ' ' {
			contentType = contentType[:i]
			break
		}
	}
	return contentType == "application/json"
}

// checkModel fills in the model where the body names none, and refuses one that is not served.
func (e *Emulator) checkModel(q *request) *apiError {
	if q.model == "" {
		q.model = e.cfg.Models[0]
	}
	if !slices.Contains(e.cfg.Models, q.model) {
		refusal := failure(http.StatusNotFound, fmt.Sprintf("The model `%s` does not exist.", q.model))
		refusal.param = "model"
		return refusal
	}
	return nil
}

// checkAbilities refuses what this engine was set up not to know.
func (e *Emulator) checkAbilities(q *request) *apiError {
	switch {
	case q.continues && e.cfg.NoContinuation:
		return invalid("continue_final_message", "extra_forbidden", "Extra inputs are not permitted")
	case q.priority != 0 && !e.cfg.PriorityScheduling:
		return badRequest("", "Got priority %d but Priority scheduling is not enabled.", q.priority)
	}
	return nil
}

// maxTimes bounds the memory of markers that count only so many times.
const maxTimes = 10_000

// fate decides what goes wrong with a call: by its own markers, else by the engine's rates. An answer that is wrong from the start is returned
// as an error.
func (e *Emulator) fate(q *request, body []byte, now time.Time) (mishap, *apiError) {
	m, times, err := parseMarkers(body, now)
	if err != nil {
		return m, badRequest("", "%s", err)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if times > 0 {
		if len(e.times) >= maxTimes {
			clear(e.times)
		}
		e.times[q.seed]++
		if e.times[q.seed] > times {
			m = noMishap()
		}
	}
	f := e.faults
	switch {
	case m.status != 0:
	case f.ErrorRate > 0 && e.random.Float64() < f.ErrorRate:
		m.status = http.StatusInternalServerError
	case f.HangRate > 0 && e.random.Float64() < f.HangRate:
		m.hangAfter = 0
	case f.ResetRate > 0 && e.random.Float64() < f.ResetRate:
		m.resetAfter = 1 + e.random.IntN(16)
	}
	if m.status != 0 {
		refusal := failure(m.status, http.StatusText(m.status))
		refusal.retryAfter = m.retryAfter
		return m, refusal
	}
	return m, nil
}

// answer runs a call that is in order. Its error means that the answer is not whole: the client left, the engine stopped, or so it was to be.
func (e *Emulator) answer(w http.ResponseWriter, r *http.Request, q *request, m *mishap, most []int, now time.Time) error {
	if m.crashAfter == 0 {
		e.cfg.Crash()
		return errReset
	}
	if m.resetAfter == 0 {
		return errReset
	}
	if err := e.pause(r.Context(), m.delay); err != nil {
		return err
	}
	answers := e.compose(q, m, most)
	promptTokens := 0
	for i := range q.prompts {
		promptTokens += countTokens(q.prompts[i].text)
	}
	id := r.Header.Get("X-Request-Id")
	if id == "" {
		id = fmt.Sprintf("%016x%016x", rand.Uint64(), rand.Uint64()) // not from the seeded sequence: no two engines share an id
	}
	p := newPage(q, answers, id, now.Unix(), promptTokens)
	c, err := e.submit(q, answers, m, now)
	if err != nil { // what fits the context fits the cache, so this would be a bug
		writeError(w, failure(http.StatusInternalServerError, err.Error()))
		return nil
	}
	defer e.withdraw(c)
	d := delivery{e: e, w: w, page: p, call: c, mishap: m}
	if q.stream {
		return d.stream(r.Context())
	}
	return d.whole(r.Context())
}

// compose writes the answers: those of each prompt's n choices. Embeddings have none.
func (e *Emulator) compose(q *request, m *mishap, most []int) []answer {
	if q.endpoint == job.Embeddings {
		return nil
	}
	answers := make([]answer, 0, len(q.prompts)*q.n)
	for i := range q.prompts {
		p := &q.prompts[i]
		for n := range q.n {
			v := voice{seed: p.seed, space: q.endpoint == job.Completions, fixed: q.fixed}
			if n > 0 {
				v.seed = mix(p.seed + uint64(n))
			}
			l := limits{natural: e.length.length(v.seed), most: most[i], least: q.minTokens, ignoreEOS: q.ignoreEOS, stop: q.stop, keepStop: q.keepStop}
			if m.tokens > 0 {
				l.natural = m.tokens
			}
			if q.fixed != nil {
				l.natural, l.least = len(q.fixed)+1, 0 // it ends where it ends
			}
			answers = append(answers, utter(v, p.said, l))
		}
	}
	return answers
}

// errReset says that the connection has to be reset.
var errReset = errors.New("reset on demand")

// reset breaks the connection: with a TCP reset where that can be done, else by ending it early.
func reset(w http.ResponseWriter) {
	if conn, _, err := http.NewResponseController(w).Hijack(); err == nil {
		if tcp, ok := conn.(*net.TCPConn); ok {
			_ = tcp.SetLinger(0) // without it the end is merely an orderly one
		}
		_ = conn.Close() // it is to break
		return
	}
	panic(http.ErrAbortHandler)
}

// delivery brings the tokens of one call to its client.
type delivery struct {
	e      *Emulator
	w      http.ResponseWriter
	page   *page
	call   *call
	mishap *mishap
	given  int    // tokens so far
	buf    []byte // what is not written yet
}

// next waits until something has happened.
func (d *delivery) next(ctx context.Context) error {
	select {
	case <-d.call.wake:
		return nil
	case <-d.e.stopped:
		return errStopped
	case <-ctx.Done():
	}
	if late := d.mishap.slowDisconnect; late > 0 {
		_ = d.e.pause(context.WithoutCancel(ctx), late) // the client is gone; only the engine's end cuts this short
	}
	return ctx.Err()
}

// follow gives each choice's tokens as they come, until all have been given, and calls after at the end of each step.
func (d *delivery) follow(ctx context.Context, give func(choice, token int), after func() error) error {
	seen := make([]int, len(d.call.sinks))
	for left := len(seen); left > 0; {
		if err := d.next(ctx); err != nil {
			return err
		}
		for i := range seen {
			s := &d.call.sinks[i]
			for ; seen[i] < int(s.done.Load()); seen[i]++ {
				if err := d.beforeToken(ctx, after); err != nil {
					return err
				}
				give(i, seen[i])
				d.given++
				if seen[i] == s.output-1 {
					left--
				}
			}
		}
		if err := after(); err != nil {
			return err
		}
	}
	return nil
}

// beforeToken lets happen what is to happen before the next token. What was given before reaches the client first.
func (d *delivery) beforeToken(ctx context.Context, flush func() error) error {
	m := d.mishap
	if d.given != m.crashAfter && d.given != m.resetAfter && d.given != m.errorAfter && m.tokenDelay == 0 {
		return nil
	}
	if err := flush(); err != nil {
		return err
	}
	switch d.given {
	case m.crashAfter:
		d.e.cfg.Crash()
		return errReset
	case m.resetAfter:
		return errReset
	case m.errorAfter:
		return errFailed
	}
	return d.e.pause(ctx, m.tokenDelay)
}

// whole writes the answer in one piece, once all of it is there.
func (d *delivery) whole(ctx context.Context) error {
	if d.call.eachToken {
		err := d.follow(ctx, func(int, int) {}, func() error { return nil })
		if errors.Is(err, errFailed) {
			writeError(d.w, generationError())
			return nil
		}
		if err != nil {
			return err
		}
	}
	for d.call.left.Load() > 0 {
		if err := d.next(ctx); err != nil {
			return err
		}
	}
	switch {
	case d.mishap.breakAfter != never:
		writeJSON(d.w, http.StatusOK, []byte(brokenChunk))
	case d.page.q.endpoint == job.Embeddings:
		writeJSON(d.w, http.StatusOK, d.page.appendEmbeddings(nil))
	default:
		writeJSON(d.w, http.StatusOK, d.page.appendWhole(nil))
	}
	return nil
}

// errFailed says that the generation fails on demand; generationError is what the client hears of it.
var errFailed = errors.New("failed on demand")

func generationError() *apiError {
	return failure(http.StatusInternalServerError, "Internal server error")
}

const brokenChunk = `{"id":"broken","choices":[{"index":`

// stream writes a chunk for each token of each choice, flushed once per step.
func (d *delivery) stream(ctx context.Context) error {
	h := d.w.Header()
	h.Set("Content-Type", "text/event-stream; charset=utf-8")
	h.Set("Cache-Control", "no-cache")
	d.w.WriteHeader(http.StatusOK)
	control := http.NewResponseController(d.w)
	flush := func() error {
		if _, err := d.w.Write(d.buf); err != nil {
			return fmt.Errorf("writing the stream: %w", err)
		}
		d.buf = d.buf[:0]
		if err := control.Flush(); err != nil {
			return fmt.Errorf("flushing the stream: %w", err)
		}
		return nil
	}
	if err := flush(); err != nil {
		return err
	}
	opened := false
	give := func(choice, token int) {
		if !opened {
			d.buf = d.page.appendOpening(d.buf)
			opened = true
		}
		if d.given == d.mishap.breakAfter {
			d.buf = append(append(append(d.buf, "data: "...), brokenChunk...), "\n\n"...)
		}
		pad := 0
		if d.given == 0 {
			pad = d.mishap.pad
		}
		d.buf = d.page.appendToken(d.buf, choice, token, pad)
	}
	err := d.follow(ctx, give, flush)
	switch {
	case errors.Is(err, errFailed):
		if d.page.q.endpoint == job.Responses {
			d.buf = d.page.appendFailure(d.buf)
		} else {
			d.buf = append(append(append(d.buf, "data: "...), generationError().body()...), "\n\ndata: [DONE]\n\n"...)
		}
	case err != nil:
		return err
	default:
		d.buf = d.page.appendClosing(d.buf)
	}
	return flush()
}
