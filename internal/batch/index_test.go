package batch_test

import (
	"bytes"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/batch"
	"github.com/millrace/millrace/internal/job"
)

var update = flag.Bool("update", false, "write the golden files of this version")

// golden compares with a file that outlives deploys: what is written under an old name must be read for ever.
func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, got, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Fatal(diff)
	}
}

// prompt is a line whose prompt begins with text.
func prompt(id, model, text string) string {
	return chatWith(id, `{"model":"`+model+`","messages":[{"role":"user","content":"`+text+`"}]}`)
}

func index(t testing.TB, file string, window int) *batch.Indexer {
	t.Helper()
	x := batch.NewIndexer(window)
	r := rules()
	r.MaxLines = 0
	sum, err := batch.Scan(t.Context(), strings.NewReader(file), r, func(l *batch.Line) error { x.Add(l); return nil })
	if err != nil || len(sum.Errors) > 0 {
		t.Fatal(err, sum.Errors)
	}
	return x
}

func write(t testing.TB, x *batch.Indexer) []byte {
	t.Helper()
	var b bytes.Buffer
	if n, err := x.WriteTo(&b); err != nil || n != int64(b.Len()) {
		t.Fatal(n, err)
	}
	return b.Bytes()
}

func open(t testing.TB, raw []byte) *batch.Index {
	t.Helper()
	x, err := batch.OpenIndex(bytes.NewReader(raw))
	if err != nil {
		t.Fatal(err)
	}
	return x
}

// entries are all of a model's.
func entries(t testing.TB, x *batch.Index, m job.Model) []batch.Entry {
	t.Helper()
	all := make([]batch.Entry, 100_000)
	n, err := x.Entries(m, 0, all)
	if err != nil {
		t.Fatal(err)
	}
	return all[:n]
}

func order(all []batch.Entry) []int64 {
	lines := make([]int64, 0, len(all))
	for _, e := range all {
		lines = append(lines, e.Line)
	}
	return lines
}

func TestPromptsThatBeginAlikeStandTogether(t *testing.T) {
	t.Parallel()
	file := strings.Join([]string{
		prompt("1", "m", "zebra 1"), prompt("2", "n", "b"), prompt("3", "m", "apple 1"), "", prompt("5", "m", "zebra 0"), prompt("6", "n", "a"), prompt("7", "m", "apple 1"), // the first window
		prompt("8", "m", "aaa"), // the next
	}, "\n")
	x := index(t, file, 6)
	if diff := cmp.Diff([]batch.Portion{{Model: "m", Lines: 5, Tokens: x.Portions()[0].Tokens}, {Model: "n", Lines: 2, Tokens: x.Portions()[1].Tokens}}, x.Portions()); diff != "" {
		t.Fatal(diff)
	}
	raw := write(t, x)
	got := open(t, raw)
	if diff := cmp.Diff(x.Portions(), got.Portions()); diff != "" {
		t.Fatal(diff)
	}
	if diff := cmp.Diff([]int64{3, 7, 5, 1, 8}, order(entries(t, got, "m"))); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]int64{6, 2}, order(entries(t, got, "n"))); diff != "" {
		t.Error(diff)
	}
	var tokens job.Tokens
	for _, e := range entries(t, got, "m") {
		tokens += e.Tokens
		id, _, err := batch.Parse([]byte(file[e.Offset : e.Offset+e.Length]))
		if err != nil || id != fmt.Sprint(e.Line) {
			t.Errorf("line %d holds %q, %v", e.Line, id, err)
		}
	}
	if tokens != got.Portions()[0].Tokens || tokens == 0 {
		t.Errorf("%d tokens, want %d", tokens, got.Portions()[0].Tokens)
	}
	// The same file gives the same index, and writing it again too.
	if again := write(t, x); !bytes.Equal(raw, again) {
		t.Error("another index when written again")
	}
	if again := write(t, index(t, file, 6)); !bytes.Equal(raw, again) {
		t.Error("another index of the same file")
	}
}

func TestToolsAndInstructionsComeFirst(t *testing.T) {
	t.Parallel()
	r := rules()
	r.Endpoint = job.Responses
	line := func(id, tools, instructions, input string) string {
		return `{"custom_id":"` + id + `","method":"POST","url":"/v1/responses","body":{"model":"m","input":"` + input + `","instructions":"` + instructions + `","tools":[` + tools + `]}}`
	}
	x := batch.NewIndexer(0)
	file := strings.Join([]string{line("1", "1", "b", "x"), line("2", "", "b", "x"), line("3", "1", "a", "y"), line("4", "1", "a", "x"), line("5", "", "b", "a")}, "\n")
	if _, err := batch.Scan(t.Context(), strings.NewReader(file), r, func(l *batch.Line) error { x.Add(l); return nil }); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]int64{4, 3, 1, 5, 2}, order(entries(t, open(t, write(t, x)), "m"))); diff != "" {
		t.Error(diff)
	}
}

func TestEntriesAreReadInParts(t *testing.T) {
	t.Parallel()
	var file strings.Builder
	for i := range 10_000 {
		file.WriteString(prompt(fmt.Sprint(i), []string{"a", "b", "c"}[i%3], fmt.Sprint(i*7919%10_000)) + "\n")
	}
	x := open(t, write(t, index(t, file.String(), 1000)))
	seen := map[int64]bool{}
	for _, m := range []job.Model{"a", "b", "c"} {
		all := entries(t, x, m)
		for _, e := range all {
			seen[e.Line] = true
		}
		for _, size := range []int{1, 7, 4096, 5000} {
			var parts []batch.Entry
			dst := make([]batch.Entry, size)
			for {
				n, err := x.Entries(m, int64(len(parts)), dst)
				if err != nil {
					t.Fatal(err)
				}
				if parts = append(parts, dst[:n]...); n < size {
					break
				}
			}
			if !slices.Equal(parts, all) {
				t.Errorf("%s in parts of %d: %d entries, want %d", m, size, len(parts), len(all))
			}
		}
	}
	if len(seen) != 10_000 {
		t.Errorf("%d lines of 10,000", len(seen))
	}
	for name, c := range map[string]struct {
		model job.Model
		from  int64
	}{"another model": {"d", 0}, "no model": {"", 0}, "behind the end": {"a", 1 << 40}, "before the beginning": {"a", -1}} {
		if n, err := x.Entries(c.model, c.from, make([]batch.Entry, 3)); n != 0 || err != nil {
			t.Errorf("%s: %d entries, %v", name, n, err)
		}
	}
}

func TestEntriesKeepLargeNumbers(t *testing.T) {
	t.Parallel()
	x := batch.NewIndexer(0)
	want := batch.Entry{Line: math.MaxUint32, Offset: 1<<48 - 1, Length: math.MaxUint32, Tokens: math.MaxUint32}
	x.Add(&batch.Line{Number: want.Line, Offset: want.Offset, Length: want.Length, Tokens: 1 << 32, Model: "m"})
	if diff := cmp.Diff([]batch.Entry{want}, entries(t, open(t, write(t, x)), "m")); diff != "" {
		t.Fatal(diff)
	}
}

func TestGoldenIndex(t *testing.T) {
	t.Parallel()
	file := "\ufeff" + strings.Join([]string{prompt("1", "m", "b"), prompt("2", "Qwen/é", "x"), "", prompt("4", "m", "a")}, "\r\n")
	raw := write(t, index(t, file, 0))
	golden(t, "index_v1.hex", []byte(hex.Dump(raw)))
}

func TestDamagedIndexIsRefused(t *testing.T) {
	t.Parallel()
	raw := write(t, index(t, prompt("1", "m", "b")+"\n"+prompt("2", "n", "b"), 0))
	for i := range raw[:len(raw)-2*18] {
		bad := bytes.Clone(raw)
		bad[i] ^= 1
		if _, err := batch.OpenIndex(bytes.NewReader(bad)); err == nil {
			t.Errorf("byte %d may be anything", i)
		}
	}
	if _, err := batch.OpenIndex(strings.NewReader("")); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Error(err)
	}
	if _, err := batch.OpenIndex(strings.NewReader(strings.Repeat("x", 1000))); !errors.Is(err, batch.ErrNotIndex) {
		t.Error(err)
	}
	cut := open(t, raw[:len(raw)-1])
	if n, err := cut.Entries("m", 0, make([]batch.Entry, 5)); n != 1 || err != nil {
		t.Error(n, err)
	}
	if _, err := cut.Entries("n", 0, make([]batch.Entry, 5)); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Error(err)
	}
}

func FuzzOpenIndex(f *testing.F) {
	f.Add([]byte{})
	x := batch.NewIndexer(0)
	x.Add(&batch.Line{Number: 1, Length: 5, Model: "m"})
	var b bytes.Buffer
	if _, err := x.WriteTo(&b); err != nil {
		f.Fatal(err)
	}
	f.Add(b.Bytes())
	f.Fuzz(func(_ *testing.T, raw []byte) {
		x, err := batch.OpenIndex(bytes.NewReader(raw))
		if err != nil {
			return
		}
		for _, p := range x.Portions() {
			_, _ = x.Entries(p.Model, 0, make([]batch.Entry, 10))
			_, _ = x.Entries(p.Model, p.Lines-1, make([]batch.Entry, 10))
		}
	})
}

// TestMemoryOfManyLines holds the package's comment to its word. It counts what is reachable, not what the collector has not taken yet.
func TestMemoryOfManyLines(t *testing.T) {
	const lines = 300_000
	i := 0
	next := func() []byte {
		if i++; i > lines {
			return nil
		}
		return fmt.Appendf(nil, "{\"custom_id\":\"request-%d\",\"method\":\"POST\",\"url\":\"/v1/completions\",\"body\":{\"model\":\"m\",\"prompt\":\"%d\"}}\n", i, i)
	}
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	x := batch.NewIndexer(0)
	sum, err := batch.Scan(t.Context(), &generated{next: next}, batch.Rules{Endpoint: job.Completions}, func(l *batch.Line) error {
		if x.Add(l); l.Number == lines { // the scan and the index are both whole now
			runtime.GC()
			runtime.ReadMemStats(&after)
		}
		return nil
	})
	if err != nil || sum.Lines != lines || len(sum.Errors) > 0 {
		t.Fatal(err, sum.Lines, sum.Errors)
	}
	held := int64(after.HeapAlloc) - int64(before.HeapAlloc)
	t.Logf("%d bytes a line", held/lines)
	if held > 50*lines {
		t.Errorf("%d bytes are held for %d lines", held, lines)
	}
	n, err := x.WriteTo(io.Discard)
	if err != nil || n > 18*lines+200 {
		t.Errorf("the index has %d bytes, %v", n, err)
	}
}

// generated reads what next gives.
type generated struct {
	next func() []byte
	rest []byte
}

func (g *generated) Read(p []byte) (int, error) {
	n := 0
	for n < len(p) {
		if len(g.rest) == 0 {
			if g.rest = g.next(); g.rest == nil {
				break
			}
		}
		m := copy(p[n:], g.rest)
		g.rest = g.rest[m:]
		n += m
	}
	if n == 0 {
		return 0, io.EOF
	}
	return n, nil
}
