//go:build soak

package e2e_test

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/millrace/millrace/internal/engine/emulator"
	"github.com/millrace/millrace/internal/engine/emulator/emulatortest"
)

const (
	soakLines  = 50_000
	soakSize   = 4_200 // bytes of a line: 210 MB in all
	soakGrowth = 128 << 20
	// soakSpeed makes the engine's part last five minutes and more: about 1,000 prompt tokens a line at some 8,000 tokens a second.
	soakSpeed = 16
)

// TestLargeBatchSurvivesKills: 50,000 lines in a file of 210 MB are uploaded, run and downloaded. On the way the worker, the dispatcher, the API and NATS are killed once each. Every line has one answer, and neither
// the API nor the dispatcher needs more than 128 MiB beyond what it had when it was idle.
func TestLargeBatchSurvivesKills(t *testing.T) {
	d := deployment{cluster: newCluster(t)}
	d.api, d.dispatcher = d.cluster.api("api", "--max-file", "250MiB"), d.cluster.dispatcher("dispatcher")
	e := emulatortest.Start(t, emulator.Config{Models: []string{model}, Profile: "l40s-8b", Speed: soakSpeed})
	d.worker = d.cluster.worker("worker", e.URL)
	d.startAll(d.api.process, d.dispatcher, d.worker)
	d.whole()

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
	file := d.api.upload(batchFile(soakLines, soakSize, 8))
	look("after the upload")
	begun := time.Now()
	d.beforeKill = func(p *process) {
		if before, ok := idle[p]; ok && p.peakRSS()-before > soakGrowth {
			t.Errorf("before its end: the %s has grown by %d MiB", p.name, (p.peakRSS()-before)>>20)
		}
	}
	d.killOnTheWay(d.api.createBatch(file, "24h"), soakLines, time.Hour)
	t.Logf("%d lines in %s", soakLines, time.Since(begun).Round(time.Second))
	look("after the download")
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
