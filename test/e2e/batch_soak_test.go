//go:build soak

package e2e_test

import (
	"fmt"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/millrace/millrace/bench/batch"
	"github.com/millrace/millrace/internal/engine/emulator"
	"github.com/millrace/millrace/internal/engine/emulator/emulatortest"
	"github.com/millrace/millrace/internal/testenv"
)

const (
	soakLines  = 50_000
	soakSize   = 4_200 // bytes of a line: 210 MB in all
	soakGrowth = 128 << 20
	// soakSpeed makes the engine's part last five minutes and more: about 1,000 prompt tokens a line at some 8,000 tokens a second.
	soakSpeed   = 16
	soakProfile = "l40s-8b"
	// soakBusy is the least share of the ideal that engines must be busy.
	soakBusy = 0.95
)

// TestLargeBatchSurvivesKills: 50,000 lines in a file of 210 MB are uploaded, run and downloaded. On the way the worker, the dispatcher, the API and NATS are killed once each. Every line has one answer, and neither
// the API nor the dispatcher needs more than 128 MiB beyond what it had when it was idle.
func TestLargeBatchSurvivesKills(t *testing.T) {
	d := deployment{cluster: newCluster(t)}
	d.api, d.dispatcher = d.cluster.api("api", "--max-file", "250MiB"), d.cluster.dispatcher("dispatcher")
	var called atomic.Int64
	e := emulatortest.Start(t, emulator.Config{
		Models: []string{model}, Profile: soakProfile, Speed: soakSpeed,
		OnRequest: func(_, _ string, header http.Header, _ []byte) {
			if strings.HasPrefix(header.Get("X-Request-Id"), "job_") { // else it is a probe
				called.Add(1)
			}
		},
	})
	d.worker = d.cluster.worker("worker", e.URL)
	d.startAll(d.api.process, d.dispatcher, d.worker)
	d.whole()
	profile, err := emulator.ProfileByName(soakProfile)
	if err != nil {
		t.Fatal(err)
	}

	idle := map[*process]int64{d.api.process: d.api.rss(), d.dispatcher: d.dispatcher.rss()}
	look := func(what string) {
		for p, before := range idle {
			grown := p.peakRSS() - before
			t.Logf("%s: the %s has grown by at most %d MiB beyond its %d", what, p.name, grown>>20, before>>20)
			if grown > soakGrowth {
				t.Errorf("%s: the %s has grown by %d MiB", what, p.name, grown>>20)
			}
		}
	}
	lines := batchLines{n: soakLines, size: soakSize, tokens: 8}
	file := d.api.upload(lines.write)
	look("after the upload")
	begun := time.Now()
	d.beforeKill = func(p *process) {
		if before, ok := idle[p]; ok && p.peakRSS()-before > soakGrowth {
			t.Errorf("before its end: the %s has grown by %d MiB", p.name, (p.peakRSS()-before)>>20)
		}
	}
	// The engine has room for as many lines as its cache holds prompts, of a token for four bytes.
	room := profile.KVTokens / ((soakSize - 200) / 4)
	d.killOnTheWay(d.api.createBatch(file, "24h"), lines, func() int { return int(called.Load()) }, room, time.Hour)
	t.Logf("%d lines in %s", soakLines, time.Since(begun).Round(time.Second))
	look("after the download")
}

// TestLargeBatchKeepsTheEnginesBusy: nothing is killed while 50,000 lines run beside interactive calls, on two engines that ideally do 77 a second: two processors do more. It is for a machine without other work, for what
// waits for processors counts as the platform's idleness. Every line ends once, and no role needs more than 128 MiB beyond what it had when it was idle.
func TestLargeBatchKeepsTheEnginesBusy(t *testing.T) {
	r, err := batch.Run(t.Context(), batch.Config{
		Lines: soakLines, Workers: 2, Tokens: 128, Profile: soakProfile, RedisURL: testenv.Redis(t).URL(), Dir: t.TempDir(), Program: []string{program}, Within: time.Hour,
		Say: func(line string) { t.Log(line) },
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d lines in %.0f s: the engines were busy for %.1f %% of the ideal, and for %.1f %% where they were driven without Millrace", r.Lines, r.Phases.Run, 100*r.BusyShare, 100*r.Direct.BusyShare)
	if r.Counts.Completed != soakLines || r.Counts.Once != soakLines {
		t.Errorf("of %d lines: %+v", soakLines, r.Counts)
	}
	if r.BusyShare < soakBusy {
		load, _ := os.ReadFile("/proc/loadavg") // only to say more
		t.Errorf("the engines were busy for %.1f %% of the ideal: with %d processors the load averages are %s", 100*r.BusyShare, r.CPUs, load)
	}
	for _, role := range r.Roles {
		t.Logf("the %s has grown by at most %d MiB beyond its %d", role.Name, (role.Peak-role.Idle)>>20, role.Idle>>20)
		if slices.Contains([]string{"api", "dispatcher", "workers"}, role.Name) && (role.Peak == 0 || role.Peak-role.Idle > soakGrowth) {
			t.Errorf("the %s has grown from %d to %d MiB", role.Name, role.Idle>>20, role.Peak>>20)
		}
	}
}

// peakRSS is the most memory that a process has had, in bytes.
func (p *process) peakRSS() int64 { return p.memory("VmHWM") }

// rss is the memory that it has now.
func (p *process) rss() int64 { return p.memory("VmRSS") }

func (p *process) memory(field string) int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(raw)) {
		if rest, ok := strings.CutPrefix(line, field+":"); ok {
			kib, _ := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
			return kib << 10
		}
	}
	return 0
}
