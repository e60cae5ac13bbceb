package worker_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/engine/emulator"
	"github.com/millrace/millrace/internal/job"
)

// TestJobThatOnlyTheLargerWorkerHoldsRunsThere, whoever pulls it, among jobs that fit everywhere; and also when it comes back.
func TestJobThatOnlyTheLargerWorkerHoldsRunsThere(t *testing.T) {
	t.Parallel()
	e := newEnv(t, time.Minute)
	small, calls := emulate(t, emulator.Config{MaxModelLen: 1024})
	large, _ := emulate(t, emulator.Config{MaxModelLen: 8192})
	p, q := e.work(small.URL), e.work(large.URL)
	e.ready(p, q)
	var long, short []*job.Job
	for i := range 60 {
		text, change := "short", func(j *job.Job) { j.Class = job.Classes()[i%3] }
		if i%3 == 0 {
			text = strings.Repeat("a long story ", 600)
		}
		more := ""
		if i%6 == 3 { // its prompt is short, but the answer may be long
			text, more = "short", `"max_tokens":4000,`
		}
		body := chat(fmt.Sprintf("%d [[emulator:tokens=8]] %s", i, text), more)
		j := e.submit(e.job(body, change, costed(t, body)))
		if i%3 == 0 {
			long = append(long, j)
		} else {
			short = append(short, j)
		}
	}
	for _, j := range long {
		if d := cmp.Diff([]job.Worker{q.ID()}, e.ranOn(j)); d != "" {
			t.Errorf("it ran on (-want +got):\n%s", d)
		}
		if n := calls.of(string(j.ID)); n != 0 {
			t.Errorf("the small engine was called %d times", n)
		}
		if rec := e.get(j); len(rec.Attempts) != 1 || rec.Charged+rec.Uncharged != 0 {
			t.Errorf("record %+v", rec)
		}
	}
	for _, j := range short {
		e.completed(j)
	}
	e.nothingHeld(p)
	e.nothingHeld(q)
}

// TestJobThatNoWorkerHoldsIsRefusedAtOnce, by the engine's own word, and delays nobody: it waits for no room that can never be.
func TestJobThatNoWorkerHoldsIsRefusedAtOnce(t *testing.T) {
	t.Parallel()
	e := newEnv(t, time.Minute)
	eng, calls := emulate(t, emulator.Config{KVTokens: 2048})
	p := e.work(eng.URL)
	running := e.submit(e.job(chat("runs [[emulator:hang-after=1]]", ""), withEvents))
	e.running(running, 1)
	body := chat(strings.Repeat("a long story ", 1300), "")
	var all []*job.Job
	var tooLong *job.Job
	for i := range 20 {
		if i == 10 {
			tooLong = e.submit(e.job(body, costed(t, body)))
		}
		all = append(all, e.submit(e.job(chat(fmt.Sprintf("%d [[emulator:tokens=4]]", i), ""))))
	}
	rec := e.await(tooLong)
	if o := rec.Outcome; o.State != job.Failed || o.StatusCode != 400 || len(o.Attempts) != 1 || calls.of(string(tooLong.ID)) != 1 {
		t.Errorf("outcome %+v", o)
	}
	if text := string(e.outcome(tooLong).Result); !strings.Contains(text, "maximum context length is 2048") || !strings.Contains(text, "your prompt contains at least") {
		t.Errorf("the client is told %s", text)
	}
	for _, j := range all {
		e.completed(j)
	}
	if rec := e.get(running); rec.State != job.Running {
		t.Errorf("the one beside them is %s", rec.State)
	}
	e.cancel(running)
	e.cancelled(running)
	e.nothingHeld(p)
}
