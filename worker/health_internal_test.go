package worker

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/engine"
	"github.com/millrace/millrace/internal/job"
)

func TestJudge(t *testing.T) {
	t.Parallel()
	const stall = 60 * time.Second
	now := time.Unix(10_000, 0)
	for _, tt := range []struct {
		name              string
		quiet             time.Duration
		counted, streamed bool
		probed            time.Duration // ago; 0 is never
		full              bool
		want              verdict
	}{
		{name: "short", quiet: 29 * time.Second, want: goesOn},
		{name: "an engine that counts: no probe", quiet: 59 * time.Second, counted: true, streamed: true, want: goesOn},
		{name: "an engine that counts stands still", quiet: 60 * time.Second, counted: true, want: stalled},
		{name: "a full one that counts stands still", quiet: 60 * time.Second, counted: true, full: true, want: stalled},
		{name: "asked in time", quiet: 30 * time.Second, want: wait},
		{name: "a probe of before counts for nothing", quiet: 40 * time.Second, probed: 50 * time.Second, want: wait},
		{name: "the probe is not answered", quiet: 60 * time.Second, want: stalled},
		{name: "streams are silent and the probe too", quiet: 60 * time.Second, streamed: true, want: stalled},
		{name: "the probe was answered", quiet: 70 * time.Second, probed: 10 * time.Second, want: goesOn},
		{name: "asked again", quiet: 70 * time.Second, probed: 30 * time.Second, want: wait},
		{name: "long answers in one piece, beside which it completes others", quiet: time.Hour, probed: 10 * time.Second, want: goesOn},
		{name: "streams that never begin, though it completes others", quiet: 3 * time.Minute, streamed: true, probed: 10 * time.Second, want: tired},
		{name: "full: the probe has to wait", quiet: 179 * time.Second, full: true, want: wait},
		{name: "full for too long", quiet: 3 * time.Minute, full: true, want: tired},
	} {
		s := silence{length: tt.quiet, since: now.Add(-tt.quiet), counted: tt.counted, streamed: tt.streamed}
		var probed time.Time
		if tt.probed > 0 {
			probed = now.Add(-tt.probed)
		}
		if got := judge(s, stall, patient, probed, tt.full, now); got != tt.want {
			t.Errorf("%s: verdict %d, want %d", tt.name, got, tt.want)
		}
	}
}

func TestWhatCountsAsProgress(t *testing.T) {
	t.Parallel()
	load := func(generated, prompt int64, used job.Tokens) engine.Load {
		return engine.Load{GeneratedTokens: generated, PromptTokens: prompt, Ranks: []engine.Rank{{Capacity: 100, Used: used}}, Source: engine.SourceEngine}
	}
	for _, tt := range []struct {
		name       string
		next       engine.Load
		moves, can bool
	}{
		{"nothing", load(5, 7, 20), false, true},
		{"a token", load(6, 7, 20), true, true},
		{"a prompt was computed", load(5, 8, 20), true, true},
		{"a long prompt is being computed", load(5, 7, 21), true, true},
		{"a call was cancelled", load(5, 7, 10), false, true},
		{"an engine that came anew", load(0, 0, 0), false, true},
		{"an engine that tells nothing", engine.Load{GeneratedTokens: -1, PromptTokens: -1, Source: engine.SourceEstimated}, false, false},
	} {
		var p progress
		p.observe(load(5, 7, 20))
		p.begin()
		p.last = time.Unix(0, 0)
		p.observe(tt.next)
		s := p.silence(time.Now())
		if moved := s.since.Unix() != 0; moved != tt.moves || s.counted != tt.can {
			t.Errorf("%s: moved %v, counted %v", tt.name, moved, s.counted)
		}
	}
	var p progress
	p.observe(load(5, 7, 20))
	p.begin()
	p.unseen()
	if p.silence(time.Now()).counted {
		t.Error("metrics that cannot be read count as standing still")
	}
}

func TestFallBacksInARowAskForMoreProof(t *testing.T) {
	t.Parallel()
	type proof struct {
		n     int
		pause time.Duration
	}
	var h health
	now := time.Unix(10_000, 0)
	var got []proof
	for range 9 {
		h.fall(now)
		n, pause := h.proofs(now)
		got = append(got, proof{n, pause})
	}
	want := []proof{{1, 0}, {1, 0}, {2, time.Second}, {2, 2 * time.Second}, {2, 4 * time.Second}, {2, 8 * time.Second}, {2, 15 * time.Second}, {2, 15 * time.Second}, {2, 15 * time.Second}}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(proof{})); diff != "" {
		t.Error(diff)
	}
	if n, pause := h.proofs(now.Add(fallWindow)); n != 1 || pause != 0 {
		t.Errorf("after a calm time it needs %d, %s apart", n, pause)
	}
	for range 1000 {
		h.fall(now)
	}
	if h.total != 1009 || len(h.falls) > 32 {
		t.Errorf("%d told, %d kept", h.total, len(h.falls))
	}
}

func TestFailuresInARowAreOfDifferentJobs(t *testing.T) {
	t.Parallel()
	var h health
	for range 5 {
		if h.badCall("a", 3) {
			t.Error("one job that comes back condemns the engine")
		}
	}
	h.badCall("b", 3)
	h.goodCall()
	if h.badCall("c", 3) || h.badCall("d", 3) || !h.badCall("e", 3) {
		t.Error("it is not the third job in a row that counts")
	}
}
