package e2e_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
)

// TestRecordTellsWhatBecameOfTheJob: one that failed twice and succeeded, with the wait, each attempt's worker and reason, and all times.
func TestRecordTellsWhatBecameOfTheJob(t *testing.T) {
	t.Parallel()
	d := deploy(t, 2)
	id := d.api.submit("[[emulator:tokens=8,times=2,status=500]] count", "")
	d.api.ended(patience, id)
	var record struct {
		Status     string   `json:"status"`
		Created    float64  `json:"created_at"`
		Started    *float64 `json:"started_at"`
		FirstToken *float64 `json:"first_token_at"`
		Finished   *float64 `json:"finished_at"`
		Attempts   []struct {
			Worker  string   `json:"worker"`
			Outcome *string  `json:"outcome"`
			Started float64  `json:"started_at"`
			Ended   *float64 `json:"ended_at"`
		} `json:"attempts"`
	}
	a := d.api.must(http.StatusOK, "GET", "/v1/jobs/"+id, nil)
	if err := json.Unmarshal(a.body, &record); err != nil {
		t.Fatalf("%v: %s", err, a.body)
	}
	if record.Status != "completed" || len(record.Attempts) != 3 || record.Started == nil || record.FirstToken == nil || record.Finished == nil {
		t.Fatalf("the record is %s", a.body)
	}
	at := record.Created
	for i, want := range []string{"engine_500", "engine_500", "completed"} {
		n := record.Attempts[i]
		if !strings.HasPrefix(n.Worker, "worker-") || n.Outcome == nil || *n.Outcome != want || n.Started < at || n.Ended == nil || *n.Ended < n.Started {
			t.Errorf("attempt %d is %+v, after %v", i+1, n, at)
		}
		at = *n.Ended
	}
	last := record.Attempts[2]
	if *record.FirstToken < last.Started || *record.FirstToken > *record.Finished || *record.Started < record.Created || *record.Started > last.Started {
		t.Errorf("the times do not follow each other: %s", a.body)
	}
}

// TestPromptOverTheContextEndsAloneAndAtOnce, among twenty that fit: by the API where it is sure, else by the engine's own word; never a second time, and the message names both lengths.
func TestPromptOverTheContextEndsAloneAndAtOnce(t *testing.T) {
	t.Parallel()
	const context = 8192 // of the profile "test"
	d := deploy(t, 4)
	content := func(i int) string { return marked("tokens=4,token-delay=5ms", i) }
	ids := d.api.submitMany(10, "", content)
	long := d.api.submit(strings.Repeat("word ", 2*context), "")
	ids = append(ids, d.api.submitMany(10, "", content)...)
	refused := d.api.must(http.StatusBadRequest, "POST", "/v1/jobs", submission(chat(strings.Repeat("x", 16*(context+1)), ""), ""))
	if refused.code() != "context_length_exceeded" || !strings.Contains(string(refused.body), fmt.Sprint(context)) || !strings.Contains(string(refused.body), fmt.Sprint(context+1)) {
		t.Errorf("the API answers %s", refused.body)
	}
	for id, j := range d.api.ended(patience, append(ids, long)...) {
		if id != long {
			if j.Status != "completed" || len(j.Attempts) != 1 {
				t.Errorf("job %s is %s after %+v", id, j.Status, j.Attempts)
			}
			continue
		}
		if j.Status != "failed" || len(j.Attempts) != 1 || j.Result == nil || j.Result.StatusCode != http.StatusBadRequest ||
			!strings.Contains(string(j.Result.Body), fmt.Sprintf("maximum context length is %d", context)) || !strings.Contains(string(j.Result.Body), "your prompt contains at least") {
			t.Errorf("it is %s after %+v: %+v", j.Status, j.Attempts, j.Result)
		}
	}
	d.engine.once(t, long)
}
