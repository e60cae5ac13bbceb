package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/millrace/millrace/internal/client"
)

// outcomes reads a file of results or errors: how often each custom_id stands in it.
func outcomes(t *testing.T, name string) map[string]int {
	t.Helper()
	ids := map[string]int{}
	for text := range strings.Lines(contentOf(t, name)) {
		var l struct {
			CustomID string `json:"custom_id"`
		}
		if err := json.Unmarshal([]byte(text), &l); err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		ids[l.CustomID]++
	}
	return ids
}

// TestBatchesOnAPlatform runs every command against a whole platform.
func TestBatchesOnAPlatform(t *testing.T) {
	t.Parallel()
	b, url := startUp(t, "--data", t.TempDir()) // one engine: a marker that counts, counts there
	env := map[string]string{"MILLRACE_URL": url}
	ask := func(args ...string) result {
		return millrace(t, env, "", append([]string{"batch"}, args...)...)
	}
	dir := t.TempDir()
	name := func(s string) string { return filepath.Join(dir, s) }
	write := func(file string, lines ...string) {
		if err := os.WriteFile(name(file), []byte(strings.Join(lines, "")), 0o600); err != nil {
			t.Fatal(err)
		}
	}

	// A file with lines that fail: 3, and the ids of the failed ones are in the errors.
	var lines []string
	for i := range 40 {
		text := fmt.Sprintf("question %d", i)
		if i%10 == 3 {
			text = "[[emulator:times=1,status=400]] " + text
		}
		lines = append(lines, line(fmt.Sprintf("q%d", i), "emulator-test", text))
	}
	write("in.jsonl", lines...)
	if r := ask("validate", name("in.jsonl")); r.code != 0 || !strings.Contains(r.out, "every line is good") || !strings.Contains(r.out, "emulator-test") {
		t.Errorf("validate: %+v", r)
	}
	r := ask("run", name("in.jsonl"), "--output", "json")
	var done client.Batch
	if err := json.Unmarshal([]byte(r.out), &done); err != nil || r.code != exitJob {
		t.Fatalf("run: %v: %+v", err, r)
	}
	good, bad := outcomes(t, name("in.output.jsonl")), outcomes(t, name("in.errors.jsonl"))
	if len(good) != 36 || len(bad) != 4 || bad["q3"] != 1 || bad["q33"] != 1 || done.RequestCounts != (client.RequestCounts{Total: 40, Completed: 36, Failed: 4}) {
		t.Errorf("%d completed, %v failed, counts %+v", len(good), bad, done.RequestCounts)
	}
	for id, n := range good {
		if n != 1 || bad[id] > 0 {
			t.Errorf("%s stands there %d times, and %d times in the errors", id, n, bad[id])
		}
	}
	if r := ask("results", done.ID, "-o", name("all.jsonl")); r.code != 0 || len(outcomes(t, name("all.jsonl"))) != 40 {
		t.Errorf("results: %+v", r)
	}
	if r := ask("get", done.ID); r.code != 0 || !strings.Contains(r.out, "40 of 40 ended") {
		t.Errorf("get: %+v", r)
	}

	// The markers fail a body once only: the retry completes.
	r = ask("retry", done.ID, "--wait", "-o", name("retry.jsonl"))
	if again := outcomes(t, name("retry.jsonl")); r.code != 0 || len(again) != 4 || again["q3"] != 1 {
		t.Errorf("retry: %v, %+v", again, r)
	}

	// A file with a line that is no good is refused as a whole.
	write("bad.jsonl", lines[0], "{}\n", lines[0])
	if r := ask("run", name("bad.jsonl")); r.code != exitJob || !strings.Contains(r.out, "missing_required_parameter") || !strings.Contains(r.out, "duplicate_custom_id") || !strings.Contains(r.err, "nothing ran") {
		t.Errorf("a bad file: %+v", r)
	}

	// One that goes on after Ctrl-C, is found by the same command, and ends by cancel.
	write("slow.jsonl", line("s1", "emulator-test", "[[emulator:hang]] one"), line("s2", "emulator-test", "two"))
	r = interrupt(t, url, "running", "run", name("slow.jsonl"))
	_, rest, found := strings.Cut(r.err, "millrace batch cancel ")
	id := strings.TrimSpace(rest)
	if r.code != exitInterrupted || !found || !strings.HasPrefix(id, "batch_") || !strings.Contains(r.err, "millrace batch run --resume "+id+" -o ") {
		t.Fatalf("Ctrl-C: %+v", r)
	}
	if r = interrupt(t, url, "runs already", "run", name("slow.jsonl")); !strings.Contains(r.err, id) {
		t.Errorf("the same command: %+v", r)
	}
	if r := ask("cancel", id); r.code != 0 || r.out != id+" cancelling\n" {
		t.Errorf("cancel: %+v", r)
	}
	if r := ask("run", "--resume", id, "-o", name("slow.out.jsonl")); r.code != exitJob || !strings.Contains(r.out, id+" cancelled") || !strings.Contains(r.out, "batch_cancelled") {
		t.Errorf("resume: %+v", r)
	}
	ended := outcomes(t, name("slow.out.errors.jsonl"))
	if _, err := os.Stat(name("slow.out.jsonl")); err == nil {
		for id, n := range outcomes(t, name("slow.out.jsonl")) {
			ended[id] += n
		}
	}
	if len(ended) != 2 || ended["s1"] != 1 || ended["s2"] != 1 {
		t.Errorf("ended: %v", ended)
	}
	if r := ask("list", "--all"); r.code != 0 || strings.Count(r.out, "batch_") != 4 || !strings.Contains(r.out, "cancelled") {
		t.Errorf("list: %+v", r)
	}
	if code := b.stop(t); code != 0 {
		t.Errorf("the platform ended with code %d:\n%s", code, b.err)
	}
}
