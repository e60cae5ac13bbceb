package batch_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/millrace/millrace/bench/batch"
	scan "github.com/millrace/millrace/internal/batch"
	"github.com/millrace/millrace/internal/engine/emulator"
	"github.com/millrace/millrace/internal/job"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// TestTheInputIsAGoodFile: every line by the rules of batches, and the same from every place on.
func TestTheInputIsAGoodFile(t *testing.T) {
	t.Parallel()
	cfg := batch.Config{Lines: 1000, Prompt: 64, Tokens: 32}
	whole, err := io.ReadAll(batch.NewInput(cfg))
	if err != nil {
		t.Fatal(err)
	}
	in := batch.NewInput(cfg)
	if int64(len(whole)) != in.Size() {
		t.Errorf("%d bytes, it says %d", len(whole), in.Size())
	}
	tokens := 0
	sum, err := scan.Scan(t.Context(), bytes.NewReader(whole), scan.Rules{Endpoint: job.ChatCompletions}, func(l *scan.Line) error {
		var marker int
		_, text, _ := strings.Cut(string(l.Body), "tokens=")
		if _, err := fmt.Sscanf(text, "%d", &marker); err != nil || marker < 16 || marker > 48 {
			t.Errorf("line %d asks for %d tokens: %v", l.Number, marker, err)
		}
		tokens += marker
		if l.CustomID != fmt.Sprintf("line-%08d", l.Number-1) || l.Cost.Output != 64 {
			t.Errorf("%+v", l)
		}
		return nil
	})
	if err != nil || sum.Lines != 1000 || len(sum.Errors) > 0 {
		t.Fatalf("%+v, %v", sum, err)
	}
	if mean := float64(tokens) / 1000; mean < 30 || mean > 34 {
		t.Errorf("answers have %.1f tokens on average, want 32", mean)
	}
	for _, at := range []int64{0, 1, 100, in.Size() / 2, in.Size() - 1, in.Size()} {
		if _, err := in.Seek(at, io.SeekStart); err != nil {
			t.Fatal(err)
		}
		rest, err := io.ReadAll(iotest.OneByteReader(in))
		if err != nil || !bytes.Equal(rest, whole[at:]) {
			t.Errorf("from %d on it is another: %v", at, err)
		}
	}
}

func TestTheIdealFollowsTheStepModel(t *testing.T) {
	t.Parallel()
	p := emulator.Profiles()[0]
	one := batch.IdealOf(p, 1, 1, 64, 32)
	many, halved := batch.IdealOf(p, 1, 4096, 64, 32), batch.IdealOf(p, 2, 4096, 64, 32)
	if one < 31*p.Floor || many >= 4096*one/4 || many <= one {
		t.Errorf("one line takes %v, 4096 %v", one, many)
	}
	if ratio := float64(many) / float64(halved); ratio < 1.9 || ratio > 2.1 {
		t.Errorf("two engines are %.2f times as fast as one", ratio)
	}
	if batch.IdealOf(p, 2, 0, 64, 32) != time.Duration(0) {
		t.Error("nothing takes time")
	}
}

func TestEveryLineIsCounted(t *testing.T) {
	t.Parallel()
	text := `{"custom_id":"line-00000000","response":{"body":{"usage":{"prompt_tokens":5,"completion_tokens":3}}}}
{"custom_id":"line-00000002","response":null}
{"custom_id":"line-00000002","response":null}
{"custom_id":"line-00000004","response":null}
{"custom_id":"line-x","response":null}`
	got, err := batch.Count(4, true, strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(batch.Counts{Completed: 3, Once: 1, Missing: 2, Twice: 3}, got); diff != "" { // one twice, one that was never sent, one that is none
		t.Error(diff)
	}
	if _, err := batch.Count(4, true, strings.NewReader(text+"{")); err == nil {
		t.Error("a file that is cut off is taken")
	}
}

func TestWhereAChildListensIsFoundInItsLog(t *testing.T) {
	t.Parallel()
	raw, err := json.Marshal(map[string]string{"msg": "listening", "addr": "127.0.0.1:7"})
	if err != nil {
		t.Fatal(err)
	}
	addr, last := batch.Listening("{\"msg\":\"starting\"}\nno JSON\n"+string(raw[:9]), string(raw[9:])+"\n{\"msg\":\"oth", "er\"}\nend")
	if addr != "127.0.0.1:7" || last != "end" {
		t.Errorf("found %q, last %q", addr, last)
	}
	if addr, _ := batch.Listening("{\"msg\":\"listening\""); addr != "" {
		t.Errorf("found %q in half a line", addr)
	}
}

func TestBoundsAreNamed(t *testing.T) {
	t.Parallel()
	for want, cfg := range map[string]batch.Config{
		"lines is -1": {Lines: -1}, "workers is 33": {Workers: 33}, "tokens is 1": {Tokens: 1}, "prompt is 5": {Prompt: 5},
	} {
		if _, err := batch.Run(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %s", err, want)
		}
	}
}
