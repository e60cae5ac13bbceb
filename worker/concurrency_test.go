package worker_test

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/millrace/millrace/internal/engine/emulator"
	"github.com/millrace/millrace/internal/engine/emulator/emulatortest"
	"github.com/millrace/millrace/internal/job"
)

// gatekeeper stands before an engine, counts how many jobs are there at once, and may keep them all waiting.
type gatekeeper struct {
	*httptest.Server
	engine http.Handler

	mu        sync.Mutex // guards what follows
	now, most int
	sum       int           // of all that came
	door      chan struct{} // closed once they may pass
}

// keep puts one before an engine, its door shut.
func keep(t testing.TB, engine http.Handler) *gatekeeper {
	t.Helper()
	k := &gatekeeper{engine: engine, door: make(chan struct{})}
	k.Server = httptest.NewServer(k)
	t.Cleanup(func() {
		k.open()
		k.Close()
	})
	return k
}

func (k *gatekeeper) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Header.Get("X-Request-Id") != "" { // a job's
		k.mu.Lock()
		k.now++
		k.sum++
		k.most = max(k.most, k.now)
		door := k.door
		k.mu.Unlock()
		defer func() {
			k.mu.Lock()
			defer k.mu.Unlock()
			k.now--
		}()
		body, err := io.ReadAll(r.Body) // else it is not seen that the caller leaves
		if err != nil {
			return
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		select {
		case <-door:
		case <-r.Context().Done():
			return
		}
	}
	k.engine.ServeHTTP(w, r)
}

func (k *gatekeeper) open() {
	k.mu.Lock()
	defer k.mu.Unlock()
	select {
	case <-k.door:
	default:
		close(k.door)
	}
}

// there is how many jobs are there now, how many there were at most at once, and how many in all.
func (k *gatekeeper) there() (now, most, sum int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.now, k.most, k.sum
}

// costed gives a job the cost that the API reckons for its body.
func costed(t testing.TB, body string) func(*job.Job) {
	t.Helper()
	o, err := job.ParseObject([]byte(body))
	if err != nil {
		t.Fatal(err)
	}
	return func(j *job.Job) { j.Cost = job.EstimateCost(o, []byte(body)) }
}

// TestAnswersWithoutALimitRunSideBySide: an answer without a limit, or one that allows all the context, is expected to be of common length: so as many run as will fit, not one, and not so many that the engine must preempt. A low limit lets
// more in, and several answers count as several.
func TestAnswersWithoutALimitRunSideBySide(t *testing.T) {
	t.Parallel()
	const jobs, capacity = 20, 2048
	// A prompt takes two blocks here, and an answer of unknown length 256 tokens.
	const prompt, answer = 32, 256
	for name, tt := range map[string]struct {
		more string
		want int
	}{
		"no limit":                      {"", capacity / (prompt + answer)},
		"all the context":               {`"max_tokens":1900,`, capacity / (prompt + answer)},
		"all the context, the new name": {`"max_completion_tokens":1900,`, capacity / (prompt + answer)},
		"16 tokens":                     {`"max_tokens":16,`, jobs},
		"16 tokens, the new name":       {`"max_completion_tokens":16,`, jobs},
		"four answers":                  {`"n":4,`, capacity / (4 * (prompt + answer))},
		"two of at most 200":            {`"n":2,"max_tokens":200,`, capacity / (2 * (prompt + 200))},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newEnv(t, time.Minute)
			eng, _ := emulate(t, emulator.Config{KVTokens: capacity})
			door := keep(t, eng.Handler())
			// Generic, so that what waits at the door is not taken for an engine that hangs.
			p := e.work(door.URL, generic, func(c *workerConfig) { c.engine.KVTokens, c.engine.MaxConcurrency = capacity, 64 })
			var all []*job.Job
			for i := range jobs {
				body := chat(fmt.Sprintf("%02d [[emulator:tokens=16]]", i), tt.more)
				all = append(all, e.submit(e.job(body, costed(t, body))))
			}
			e.until("as many run as fit, and the next waits in hand", func() bool {
				s := p.Reserved()
				now, _, _ := door.there()
				return now >= tt.want && (now == jobs || s.InHand > 0)
			})
			if _, most, _ := door.there(); most != tt.want {
				t.Errorf("%d run side by side, want %d", most, tt.want)
			}
			door.open()
			for _, j := range all {
				e.completed(j)
			}
			if n := eng.Stats().Preemptions; n != 0 {
				t.Errorf("the engine preempted %d", n)
			}
			e.nothingHeld(p)
		})
	}
}

// TestEngineThatTellsNothingGetsNoMoreThanItsLimit: forty jobs of all kinds at once.
func TestEngineThatTellsNothingGetsNoMoreThanItsLimit(t *testing.T) {
	t.Parallel()
	const jobs, limit = 40, 3
	e := newEnv(t, time.Minute)
	door := keep(t, emulatortest.Start(t, emulator.Config{}).Handler())
	door.open() // streams that get no token would be given back
	p := e.work(door.URL, generic, func(c *workerConfig) { c.engine.MaxConcurrency = limit })
	d := e.desk()
	var durable []*job.Job
	var calls []func()
	for i := range jobs {
		body := chat(fmt.Sprintf("%d [[emulator:tokens=8,token-delay=10ms]]", i), "")
		class := func(j *job.Job) { j.Class = job.Classes()[i%3] }
		switch i % 4 {
		case 0:
			durable = append(durable, e.submit(e.job(body, class, withEvents)))
		case 1, 2:
			durable = append(durable, e.submit(e.job(body, class)))
		default:
			s := e.call(d, e.job(body, live))
			calls = append(calls, func() {
				if _, _, end := e.collect(s); end.State != job.Completed {
					t.Errorf("a call ended %+v", end)
				}
			})
		}
	}
	for _, collect := range calls {
		collect()
	}
	for _, j := range durable {
		e.completed(j)
	}
	if _, most, sum := door.there(); most > limit || most < 2 || sum < jobs {
		t.Errorf("%d were there at once, want at most %d; %d in all", most, limit, sum)
	}
	e.nothingHeld(p)
}
