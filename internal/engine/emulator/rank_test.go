package emulator_test

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/engine/emulator"
	"github.com/millrace/millrace/internal/engine/emulator/emulatortest"
)

func TestRanksShareTheLoadAndShowItApart(t *testing.T) {
	t.Parallel()
	s := emulatortest.Start(t, emulator.Config{Profile: "test", DataParallel: 3, KVTokens: 1600})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for i := range 6 {
		if _, err := post(ctx, t, s, chat, long(fmt.Sprintf("[[emulator:hang]] %d", i), streaming)); err != nil {
			t.Fatal(err)
		}
		waitFor(t, "the call to run", func() bool { return s.Stats().Running == i+1 })
	}
	families := scrape(t, s)
	for name, want := range map[string]float64{"vllm:num_requests_running": 2, "vllm:num_requests_waiting": 0, "vllm:cache_config_info": 1} {
		got := map[string]float64{}
		for _, m := range families[name].GetMetric() {
			for _, l := range m.GetLabel() {
				if l.GetName() == "engine" {
					got[l.GetValue()] = m.GetGauge().GetValue()
				}
			}
		}
		if diff := cmp.Diff(map[string]float64{"0": want, "1": want, "2": want}, got); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
	if got := s.Stats().Blocks; got != 300 {
		t.Errorf("%d blocks in all, want 100 in each of 3 ranks", got)
	}
	cancel()
	waitFor(t, "all ranks to be empty", func() bool { s := s.Stats(); return s.Running == 0 && s.UsedBlocks == 0 })
	if status, text := ask(t, s, chat, say(strings.Repeat("word", 1601))); status != http.StatusBadRequest || !strings.Contains(text, "maximum context length is 1600") {
		t.Errorf("more than one rank holds: %d %s", status, text)
	}
	// The choices of one call are sequences like others: they spread too.
	if got := whole(t, s, chat, say("x", `"n":6,"ignore_eos":true,"max_tokens":10`)); got.Usage.Completion != 60 {
		t.Errorf("%d tokens of 6 choices, want 60", got.Usage.Completion)
	}
}

func TestPrioritiesAreRefusedUnlessTheyAreScheduled(t *testing.T) {
	t.Parallel()
	plain := emulatortest.Start(t, emulator.Config{})
	status, text := ask(t, plain, chat, say("x", `"priority":1`))
	if status != http.StatusBadRequest || !strings.Contains(text, "Got priority 1 but Priority scheduling is not enabled.") {
		t.Errorf("%d %s", status, text)
	}
	if status, text := ask(t, plain, chat, say("x", `"priority":0`)); status != http.StatusOK {
		t.Errorf("priority 0: %d %s", status, text)
	}

	s := emulatortest.Start(t, emulator.Config{PriorityScheduling: true, Faults: emulator.Faults{MaxNumSeqs: 1}})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	if _, err := post(ctx, t, s, chat, long("[[emulator:hang]]", streaming)); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the first call to run", func() bool { return s.Stats().Running == 1 })
	order := make(chan string, 3)
	for i, priority := range []string{"7", "-7", "0"} {
		go func() {
			status, _ := ask(t, s, chat, say("x"+priority, `"max_tokens":500,"ignore_eos":true,"priority":`+priority))
			order <- fmt.Sprint(priority, " ", status)
		}()
		waitFor(t, "the call to wait", func() bool { return s.Stats().Waiting == i+1 })
	}
	cancel()
	if diff := cmp.Diff([]string{"-7 200", "0 200", "7 200"}, []string{<-order, <-order, <-order}); diff != "" {
		t.Error(diff)
	}
}

func TestAnEngineWithoutContinuationRefusesIt(t *testing.T) {
	t.Parallel()
	s := emulatortest.Start(t, emulator.Config{NoContinuation: true})
	body := `{"model":"emulator-test","messages":[{"role":"user","content":"x"},{"role":"assistant","content":"Yes"}],"continue_final_message":true,"add_generation_prompt":false}`
	if status, text := ask(t, s, chat, body); status != http.StatusBadRequest || !strings.Contains(text, "continue_final_message") {
		t.Errorf("%d %s", status, text)
	}
	// A completion goes on from where its prompt ends, whatever the engine knows of chats.
	first := whole(t, s, completion, `{"model":"emulator-test","prompt":"Once","max_tokens":5,"ignore_eos":true}`)
	all := whole(t, s, completion, `{"model":"emulator-test","prompt":"Once","max_tokens":10,"ignore_eos":true}`)
	rest := whole(t, s, completion, fmt.Sprintf(`{"model":"emulator-test","prompt":%q,"max_tokens":5,"ignore_eos":true}`, "Once"+first.Text[0]))
	if got, want := first.Text[0]+rest.Text[0], all.Text[0]; got != want {
		t.Errorf("continued to %q, want %q", got, want)
	}
}
