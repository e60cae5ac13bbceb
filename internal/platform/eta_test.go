package platform_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/millrace/millrace/internal/client"
	"github.com/millrace/millrace/internal/engine/emulator"
	"github.com/millrace/millrace/internal/job"
)

// TestTimesToldComeTrue: behind a slow engine, the last of many jobs is told when it starts, and it starts about then. Answers are much shorter than their limits, as they are in life.
func TestTimesToldComeTrue(t *testing.T) {
	t.Parallel()
	cfg := config(t)
	cfg.Relaxed = true
	cfg.Emulator = emulator.Config{Profile: "a10-7b", KVTokens: 700}
	p := run(t, cfg)
	c, err := client.New(client.Config{URL: p.URL()})
	if err != nil {
		t.Fatal(err)
	}
	defer c.CloseIdleConnections()
	until := func(what string, ok func() bool) {
		t.Helper()
		for deadline := time.Now().Add(time.Minute); !ok(); time.Sleep(20 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("never: %s", what)
			}
		}
	}
	until("a worker is ready", func() bool {
		workers, err := c.Workers(t.Context())
		return err == nil && len(workers) == 1 && workers[0].State == "ready"
	})
	const n = 150
	submit := func(i int) job.ID {
		body := fmt.Sprintf(`{"model":"emulator-a10-7b","max_tokens":200,"messages":[{"role":"user","content":"[[emulator:tokens=30]] question %d"}]}`, i)
		j, err := c.Submit(t.Context(), client.Submission{Body: json.RawMessage(body)})
		if err != nil {
			t.Error(err)
			return ""
		}
		return j.ID
	}
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { submit(i) })
	}
	wg.Wait()
	last := submit(n)
	type told struct {
		at       time.Time
		eta      float64
		position int
	}
	var all []told
	var j *client.Job
	until("the last job starts", func() bool {
		var err error
		if j, err = c.Job(t.Context(), last, 0); err != nil {
			t.Fatal(err)
		}
		if j.Queue != nil && j.Status == job.Queued {
			all = append(all, told{time.Now(), j.Queue.ETASeconds, j.Queue.Position})
		}
		return j.Status != job.Queued
	})
	started := time.UnixMilli(int64(j.StartedAt * 1000))
	var ratios []float64
	for i, x := range all {
		if x.position < 1 || x.position > n+1 {
			t.Errorf("position %d", x.position)
		}
		if i > 0 && x.position > all[i-1].position+n/5 { // what workers have is known to the second
			t.Errorf("from position %d to %d", all[i-1].position, x.position)
		}
		rest := started.Sub(x.at)
		settled := x.at.Sub(all[0].at) > started.Sub(all[0].at)/3 // by then the rate is measured
		if rest := rest.Seconds(); settled && x.eta > 0 && rest > 1 {
			ratios = append(ratios, x.eta/rest)
		}
	}
	if len(ratios) < 10 {
		t.Fatalf("only %d times were told in %v", len(ratios), started.Sub(all[0].at))
	}
	first := all[0]
	slices.Sort(ratios)
	median := ratios[len(ratios)/2]
	t.Logf("waited %v from position %d; %d times told, by what was left: least %.2f, median %.2f, most %.2f", started.Sub(first.at), first.position, len(ratios), ratios[0], median, ratios[len(ratios)-1])
	if median < 0.4 || median > 2.5 {
		t.Errorf("the times told are %.2f of what it took", median)
	}
}
