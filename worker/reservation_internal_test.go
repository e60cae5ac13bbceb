package worker

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/millrace/millrace/internal/blob"
	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/engine"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/relay"
	"github.com/millrace/millrace/internal/results"
	"github.com/millrace/millrace/internal/schedule"
	"github.com/millrace/millrace/internal/testenv"
)

const capacityOfTrouble = 5000

// troubled is a worker whose calls meet every trouble there is, with its engine. Of the platform there is no more than what the calls themselves need.
type troubled struct {
	testing.TB
	*Worker
	tried   sync.Map // how often each trouble was met, by its name
	settled atomic.Int64
}

func newTroubled(t testing.TB) *troubled {
	t.Helper()
	eng := httptest.NewServer(http.HandlerFunc(trouble))
	t.Cleanup(eng.Close)
	quiet := slog.New(slog.DiscardHandler)
	ok := func(err error) {
		if err != nil {
			t.Fatal(err)
		}
	}
	client, err := engine.New(engine.Config{URL: eng.URL, Kind: engine.Generic}, quiet)
	ok(err)
	t.Cleanup(client.Close)
	store, err := results.Open(t.Context(), results.Config{URL: testenv.MiniRedis(t).URL()}, quiet)
	ok(err)
	t.Cleanup(func() { ok(store.Close()) })
	blobs, err := blob.OpenDir(t.TempDir())
	ok(err)
	w, err := New(Config{Name: "w"}, Deps{
		Queue: &queue.Queue{}, Cluster: &cluster.Cluster{}, Relay: &relay.Relay{}, // not used by a call
		Results: store, Blobs: blobs, Engine: client, Registerer: prometheus.NewRegistry(), Log: quiet,
	})
	ok(err)
	w.models["m"] = &served{stop: func() {}}
	return &troubled{TB: t, Worker: w}
}

// trouble is an engine that does what the body tells it.
func trouble(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/v1/models" {
		_, _ = io.WriteString(w, `{"data":[{"id":"m"}]}`)
		return
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	kind := ""
	if i := bytes.Index(body, []byte(`"kind":"`)); i >= 0 {
		kind, _, _ = strings.Cut(string(body[i+len(`"kind":"`):]), `"`)
	}
	event := func(data string) {
		_, _ = io.WriteString(w, "data: "+data+"\n\n")
		w.(http.Flusher).Flush()
	}
	const token = `{"choices":[{"index":0,"delta":{"content":"a"}}]}`
	if bytes.Contains(body, []byte(`"stream":true`)) {
		w.Header().Set("Content-Type", "text/event-stream")
	} else {
		w.Header().Set("Content-Type", "application/json")
	}
	switch kind {
	case "500", "503", "429":
		var status int
		_, _ = fmt.Sscan(kind, &status)
		w.WriteHeader(status)
	case "reset":
		event(token)
		panic(http.ErrAbortHandler)
	case "refused in mid-stream":
		event(token)
		event(`{"error":{"message":"out of memory"}}`)
	case "broken":
		event(`{"choices":[`)
	case "page":
		w.Header().Set("Content-Type", "text/html")
		_, _ = io.WriteString(w, "<html>")
	case "hang", "cancelled":
		if kind == "cancelled" {
			event(token)
		}
		<-r.Context().Done()
	case "slow":
		for range 4 {
			event(token)
			time.Sleep(20 * time.Millisecond)
		}
		event("[DONE]")
	default:
		if w.Header().Get("Content-Type") == "application/json" {
			_, _ = io.WriteString(w, `{"choices":[{"message":{"content":"a"}}],"usage":{"prompt_tokens":40,"completion_tokens":30,"total_tokens":70}}`)
			return
		}
		event(token + "\n\ndata: " + token)
		event(`{"choices":[],"usage":{"prompt_tokens":40,"completion_tokens":2,"total_tokens":42}}` + "\n\ndata: [DONE]")
	}
}

// troubles are what happens to thirty of a hundred jobs, and how many of a thousand.
var troubles = map[string]int{
	"500": 40, "503": 40, "429": 40, "reset": 40, "refused in mid-stream": 20, "broken": 20, "page": 10, "hang": 20, "cancelled": 20, "cancelled in hand": 30, "panic": 15, "slow": 5,
}

// try is one attempt at a job: what handle, runDurable and execute do, without the stores. It tells whether the job goes back.
func (t *troubled) try(i int, kind string, rnd *rand.Rand) (again bool) {
	now := t.deps.Results.Now()
	j := job.Job{
		ID: job.ID(fmt.Sprintf("job_%d", i)), Tenant: "t", Model: "m", Endpoint: job.ChatCompletions, Class: job.Classes()[rnd.IntN(3)], Group: job.NoGroup, Created: now, Expires: now + 3_600_000,
		Events: kind == "cancelled" || kind == "panic" || kind == "reset" || kind == "slow" || rnd.IntN(2) == 0,
		Cost:   job.Cost{Prompt: job.Tokens(rnd.IntN(800)), Answers: 1 + rnd.IntN(2)},
	}
	if kind == "hang" {
		j.RunTimeout = 5
	}
	if kind == "slow" {
		j.Class = job.Batch
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	if kind == "cancelled in hand" {
		timer := time.AfterFunc(time.Duration(rnd.IntN(2000))*time.Microsecond, func() { cancel(errCancelAsked) })
		defer timer.Stop()
	}
	d := &queue.Delivery{Stored: queue.Stored{Message: queue.Message{Job: j, Body: fmt.Appendf(nil, `{"model":"m","kind":%q,"messages":[]}`, kind)}}, AckWait: time.Minute}
	held, err := t.gate.enter(ctx, entry{
		id: j.ID, preemptible: true, rescuable: rnd.IntN(2) == 0, lane: rnd.IntN(4) == 0,
		ask: schedule.Ask{Tenant: j.Tenant, Model: j.Model, Group: j.Group, Class: j.Class, Cost: j.Cost, Created: time.Now(), Streams: j.Events},
	})
	if err != nil {
		return !errors.Is(err, errCancelAsked)
	}
	defer held.release()
	delist, ok := t.enlist(j.ID, cancel)
	if !ok {
		t.Errorf("job %s runs twice", j.ID)
		return false
	}
	defer delist()
	c := &call{w: t.Worker, log: t.log, d: d, holds: held, anew: func() bool { return true }}
	c.show = func(*reply, engine.Event) bool {
		switch kind {
		case "cancelled":
			t.cancelJob(j.ID)
		case "panic":
			panic("a bug of ours")
		}
		return true
	}
	_, f := c.run(ctx, now)
	if rnd.IntN(4) == 0 {
		held.release() // once more than there is
	}
	return f != nil && f.again
}

// TestReservationsReturnToZeroAfterEveryTrouble: ten thousand jobs through the gate and the calls, of which three in ten meet a trouble at each of their first two attempts; meanwhile the engine says anything of its load or nothing, stalls
// and comes back, and jobs are preempted.
func TestReservationsReturnToZeroAfterEveryTrouble(t *testing.T) {
	t.Parallel()
	w := newTroubled(t)
	w.gate.observe(engine.Load{Ranks: []engine.Rank{{Capacity: capacityOfTrouble}}, MaxRunning: 32, Preemptions: -1, GeneratedTokens: -1, PromptTokens: -1})
	w.gate.setOpen(true)

	const jobs, hands = 10_000, 64
	stop := make(chan struct{})
	var meanwhile sync.WaitGroup
	meanwhile.Go(func() {
		rnd := rand.New(rand.NewPCG(1, 0))
		for n := 0; ; n++ {
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond):
			}
			switch rnd.IntN(8) {
			case 0:
				w.take(engine.Load{}, errors.New("no page"))
			case 1: // a stall is found, and over
				w.gate.setOpen(false)
				w.halt(errStalled)
				w.resume()
				w.gate.setOpen(true)
			default:
				w.take(engine.Load{
					Ranks: []engine.Rank{{Capacity: capacityOfTrouble, Used: job.Tokens(rnd.IntN(capacityOfTrouble))}}, MaxRunning: 32, Running: rnd.IntN(30), Waiting: rnd.IntN(2),
					Preemptions: int64(n / 100), GeneratedTokens: int64(n), PromptTokens: -1, Source: engine.SourceEngine,
				}, nil)
			}
		}
	})
	var names []string
	for kind, n := range troubles {
		for range n {
			names = append(names, kind)
		}
	}
	var next atomic.Int64
	var handed sync.WaitGroup
	for h := range hands {
		handed.Go(func() {
			rnd := rand.New(rand.NewPCG(2, uint64(h)))
			for {
				i := int(next.Add(1))
				if i > jobs {
					return
				}
				kind := "well"
				if n := rnd.IntN(1000); n < len(names) {
					kind = names[n]
				}
				w.tried.Store(kind, true)
				for attempt := 1; w.try(i, kind, rnd); attempt++ {
					if attempt > 1 {
						kind = "well"
					}
					time.Sleep(time.Millisecond) // as a job that goes back does not come again at once
				}
				w.settled.Add(1)
			}
		})
	}
	handed.Wait()
	close(stop)
	meanwhile.Wait()

	if n := w.settled.Load(); n != jobs {
		t.Errorf("%d of %d jobs have ended", n, jobs)
	}
	for kind := range troubles {
		if _, met := w.tried.Load(kind); !met {
			t.Errorf("no job met %q", kind)
		}
	}
	for range 200 { // what preemptions have taught is forgotten in time
		w.take(engine.Load{Ranks: []engine.Rank{{Capacity: capacityOfTrouble}}, Preemptions: -1, GeneratedTokens: -1, PromptTokens: -1, Source: engine.SourceEngine}, nil)
	}
	w.nothingIsHeld(t)
	const share = capacityOfTrouble * 97 / 100
	if s := w.gate.status(); s.Free != share || s.FreeRank != share || s.Running != 0 || s.Sequences != 0 || s.InHand != 0 || s.Load != 0 {
		t.Errorf("of %d tokens: %+v", capacityOfTrouble, s)
	}
	w.progress.mu.Lock()
	defer w.progress.mu.Unlock()
	if w.progress.calls != 0 || w.progress.streams != 0 {
		t.Errorf("%d calls and %d streams are left", w.progress.calls, w.progress.streams)
	}
}

// nothingIsHeld checks the ledger itself.
func (w *Worker) nothingIsHeld(t testing.TB) {
	t.Helper()
	if held := w.Reserved(); held != (Reserved{}) {
		t.Errorf("left over: %+v", held)
	}
}
