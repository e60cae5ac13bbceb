//go:build soak

package e2e_test

import (
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/millrace/millrace/internal/engine/emulator"
	"github.com/millrace/millrace/internal/engine/emulator/emulatortest"
)

const (
	fleetRate  = 70 // requests a second: 40 % of what eight A10 can do of them
	fleetJobs  = 2000
	fleetBound = 1.3
)

// fleetJob is what is measured of one job.
type fleetJob struct {
	Status     string  `json:"status"`
	Created    float64 `json:"created_at"`
	FirstToken float64 `json:"first_token_at"`
	Attempts   []struct {
		Worker string `json:"worker"`
	} `json:"attempts"`
}

// TestSickWorkersHarmNobodyElse: of eight workers one is frozen, the engine of one hangs, and one is 1.6 times slow. No job is lost, and those that ran only on the five healthy ones had their
// first tokens about as soon as in a fleet without the sick ones' trouble.
func TestSickWorkersHarmNobodyElse(t *testing.T) {
	healthy := fleet(t, false)
	sick := fleet(t, true)
	t.Logf("P99 of the time to the first token on the five: %s healthy, %s with three sick ones: %.2f", healthy, sick, sick.Seconds()/healthy.Seconds())
	if sick > time.Duration(fleetBound*float64(healthy)) {
		t.Errorf("the ratio is over %.1f", fleetBound)
	}
}

// fleet runs the load against eight workers, three of which fall sick unless all stay healthy, and returns the P99 of the time to the first token of the jobs whose only attempt ran on one of the other five.
func fleet(t *testing.T, sick bool) time.Duration {
	c := newCluster(t)
	api, dispatcher := c.api("api"), c.dispatcher("dispatcher")
	all := []*process{api.process, dispatcher}
	var engines []*emulatortest.Server
	for i := range 8 {
		speed := 1.0
		if sick && i == 7 {
			speed = 1 / 1.6
		}
		e := emulatortest.Start(t, emulator.Config{Models: []string{model}, Profile: "a10-7b", Speed: speed})
		engines = append(engines, e)
		all = append(all, c.worker(fmt.Sprint("worker-", i), e.URL, "--stall-timeout", "10s"))
	}
	c.startAll(all...)
	c.whole()
	defer func() {
		for _, p := range all {
			p.kill()
		}
	}()

	random := rand.New(rand.NewPCG(7, 7))
	ids := make([]string, fleetJobs)
	begun := time.Now()
	var asked sync.WaitGroup
	at := time.Duration(0)
	for i := range ids {
		at += time.Duration(random.ExpFloat64() / fleetRate * float64(time.Second))
		prompt := int(60 * math.Exp(0.8*random.NormFloat64()))
		if random.IntN(100) == 0 {
			prompt = 1500 + random.IntN(2500)
		}
		output := min(64, max(1, int(9*math.Exp(0.5*random.NormFloat64()))))
		content := fmt.Sprintf("[[emulator:tokens=%d]] %d %s", output, i, strings.Repeat("abc ", max(prompt-10, 0)))
		body := submission(chat(content, `"max_tokens":64`), `"priority":"interactive"`)
		if sick && i == fleetJobs/10 {
			all[2+5].pause()
			f := emulator.Faults{Stall: true}
			if err := engines[6].SetFaults(f); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(time.Until(begun.Add(at))) //nolint:forbidigo // arrivals have their times
		asked.Go(func() {
			a, err := api.send("POST", "/v1/jobs", body)
			if err != nil || a.status != http.StatusAccepted {
				t.Errorf("job %d: %v %v", i, a, err)
				return
			}
			var j jobView
			if err := json.Unmarshal(a.body, &j); err != nil {
				t.Error(err)
			}
			ids[i] = j.ID
		})
	}
	asked.Wait()
	var ttft []time.Duration
	for i, id := range ids {
		eventually(t, 2*time.Minute, "all jobs end", func() error {
			var j fleetJob
			a, err := api.send("GET", "/v1/jobs/"+id, nil)
			if err == nil {
				err = json.Unmarshal(a.body, &j)
			}
			if err != nil || j.Status != "completed" {
				return fmt.Errorf("job %s is %s: %w", id, j.Status, err)
			}
			if i > fleetJobs/10 && len(j.Attempts) == 1 && j.Attempts[0].Worker < "worker-5" {
				ttft = append(ttft, time.Duration((j.FirstToken-j.Created)*float64(time.Second)))
			}
			return nil
		})
	}
	slices.Sort(ttft)
	t.Logf("%d of %d jobs ran on the five alone; P50 %s", len(ttft), fleetJobs, ttft[len(ttft)/2])
	return ttft[len(ttft)*99/100]
}
