package job_test

import (
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/job"
)

func TestIDsSortByTimeAndParse(t *testing.T) {
	t.Parallel()
	at := time.UnixMilli(1_800_000_000_123)
	var ids []string
	for i := range 100 {
		ids = append(ids, string(job.NewID(at.Add(time.Duration(i)*time.Millisecond))))
	}
	if !slices.IsSorted(ids) {
		t.Error("ids of rising times do not rise")
	}
	id, err := job.ParseID(ids[0])
	if err != nil {
		t.Fatal(err)
	}
	if !id.Time().Equal(at) {
		t.Errorf("the id's time is %s, want %s", id.Time(), at)
	}
	if first, second := job.NewID(at), job.NewID(at); first == second {
		t.Error("two ids of one moment are the same")
	}
	for _, bad := range []string{"", "job_", "job_x", "batch_" + ids[0][4:], strings.ToUpper(ids[0]), ids[0] + "0", ids[0][:39] + "*"} {
		if _, err := job.ParseID(bad); err == nil {
			t.Errorf("%q was taken for an id", bad)
		}
	}
}

func TestEstimateCostReadsBothLimits(t *testing.T) {
	t.Parallel()
	for body, want := range map[string]job.Cost{
		`{"max_tokens":7}`: {Prompt: 4, Output: 7, Answers: 1},
		`{"max_tokens":7,"max_completion_tokens":5,"n":3}`: {Prompt: 12, Output: 5, Answers: 3},
		`{"max_tokens":-1,"n":0}`:                          {Prompt: 6, Answers: 1},
		`{"max_tokens":"7","n":1.5}`:                       {Prompt: 7, Answers: 1},
		`{}`:                                               {Prompt: 1, Answers: 1},
	} {
		o, err := job.ParseObject([]byte(body))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, job.EstimateCost(o, []byte(body))); diff != "" {
			t.Errorf("%s: %s", body, diff)
		}
	}
}

// TestEstimateCostCountsMediaByTheirNumber: a picture of a megabyte is no prompt of a quarter of a million tokens.
func TestEstimateCostCountsMediaByTheirNumber(t *testing.T) {
	t.Parallel()
	long, short := strings.Repeat("A", 1<<20), strings.Repeat("A", 100)
	for name, c := range map[string]struct {
		body  string
		media job.Tokens
		text  int // bytes
	}{
		"pictures":                    {`[{"url":"data:image/png;base64,` + long + `"},{"url" : "data:image/jpeg;charset=x;base64,` + long + `"}]`, 2, 79},
		"a picture of a response":     {`{"image_url":"data:image/png;base64,` + long + `"}`, 1, 38},
		"a file":                      {`{"file_data":"data:application/pdf;base64,` + long + `"}`, 1, 44},
		"a sound":                     {`{"input_audio":{"data" : "` + long + `","format":"wav"}}`, 1, 44},
		"slashes behind backslashes":  {`{"url":"data:image/png;base64,` + strings.Repeat(`A\/`, 1<<12) + `"}`, 1, 32},
		"a small one":                 {`{"url":"data:image/png;base64,` + short + `"}`, 0, 132},
		"a URL":                       {`{"url":"https://example.com/` + long + `"}`, 0, 28 + 1<<20 + 2},
		"a text":                      {`{"text":"the data: image/png;base64,` + long + `"}`, 0, 37 + 1<<20 + 2},
		"a text that begins so":       {`{"text":"data:image/png;base64,` + long + `"}`, 0, 31 + 1<<20 + 2},
		"a prompt that begins so":     {`{"prompt":["data:image/png;base64,` + long + `"]}`, 0, 34 + 1<<20 + 3},
		"a text with a picture in it": {`{"text":"\"url\":\"data:image/png;base64,` + long + `\""}`, 0, 41 + 1<<20 + 4},
		"prose behind a mark":         {`{"url":"data:;base64,` + strings.Repeat("many words ", 1<<16) + `"}`, 0, 21 + 11<<16 + 2},
		"another's mark":              {`{"url":"data","text":";base64,` + long + `"}`, 0, 30 + 1<<20 + 2},
		"a text of that name":         {`{"data":["` + long + `"]}`, 0, 10 + 1<<20 + 3},
		"one that is cut off":         {`{"url":"data:image/png;base64,` + long, 0, 30 + 1<<20},
		"names that begin so":         {`{"database":"` + long + `","dataset":1}`, 0, 13 + 1<<20 + 15},
		"a name and no value":         {`{"data"`, 0, 7},
		"a mark and no string":        {`{"url":"data:`, 0, 13},
	} {
		got := job.EstimateCost(&job.Object{}, []byte(c.body)).Prompt
		if want := c.media*job.MediaTokens + job.Tokens((c.text+job.BytesPerToken-1)/job.BytesPerToken); got != want {
			t.Errorf("%s: %d tokens, want %d", name, got, want)
		}
	}
}

func TestStates(t *testing.T) {
	t.Parallel()
	for _, s := range job.PublicStates() {
		if got, ok := job.ParseState(string(s)); !ok || got != s {
			t.Errorf("%s does not parse", s)
		}
		if want := s != job.Queued && s != job.Running; s.Ended() != want {
			t.Errorf("%s.Ended() is not %v", s, want)
		}
	}
	if _, ok := job.ParseState(string(job.Accepting)); ok {
		t.Error("clients can ask for a state that they never see")
	}
	if job.Accepting.Public() != job.Queued {
		t.Error("a job that is being accepted does not show as queued")
	}
}

func TestErrorAlwaysHasFourKeys(t *testing.T) {
	t.Parallel()
	got, err := json.Marshal(job.Error{Message: "m", Type: job.TypeServer})
	if err != nil {
		t.Fatal(err)
	}
	if want := `{"message":"m","type":"server_error","param":null,"code":null}`; string(got) != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// TestOldJobsAndOutcomesStillDecode: these texts stand in streams and stores of running systems.
func TestOldJobsAndOutcomesStillDecode(t *testing.T) {
	t.Parallel()
	check := func(file string, into any) {
		raw, err := os.ReadFile("testdata/" + file)
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(raw, into); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		again, err := json.MarshalIndent(into, "", "  ")
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(strings.TrimSpace(string(raw)), string(again)); diff != "" {
			t.Errorf("%s: %s", file, diff)
		}
	}
	check("job-v1.json", &job.Job{})
	check("outcome-v1.json", &job.Outcome{})
}

func TestAnswerText(t *testing.T) {
	t.Parallel()
	for body, want := range map[string]string{
		`{"choices":[{"index":0,"message":{"role":"assistant","content":"hi"}}]}`: "hi",
		`{"choices":[{"index":1,"text":"no"},{"index":0,"text":"yes"}]}`:          "yes",
		`{"choices":[{"index":0,"message":{"content":null,"tool_calls":[]}}]}`:    "",
		`{"object":"response","output":[{"type":"reasoning","content":[{"type":"reasoning_text","text":"no"}]},{"type":"message","content":[{"type":"output_text","text":"he"},{"type":"output_text","text":"y"}]}]}`: "hey",
		`{"data":[]}`: "",
		`<html>`:      "",
	} {
		if got := job.AnswerText([]byte(body)); got != want {
			t.Errorf("%s: got %q, want %q", body, got, want)
		}
	}
}
