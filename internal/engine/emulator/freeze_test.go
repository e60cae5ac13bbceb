package emulator_test

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/millrace/millrace/internal/engine/emulator"
	"github.com/millrace/millrace/internal/engine/emulator/emulatortest"
)

// inBubble runs an engine without a network and calls do, in virtual time.
func inBubble(t *testing.T, cfg emulator.Config, do func(t *testing.T, e *emulator.Emulator)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		e, err := emulator.New(cfg, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- e.Run(ctx) }()
		do(t, e)
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// took is how long a call takes.
func took(t *testing.T, e *emulator.Emulator, method, path, body string) time.Duration {
	t.Helper()
	begun := time.Now()
	w := httptest.NewRecorder()
	r := httptest.NewRequestWithContext(t.Context(), method, path, strings.NewReader(body))
	r.Header.Set("Content-Type", "application/json")
	e.Handler().ServeHTTP(w, r)
	if w.Code >= http.StatusBadRequest {
		t.Errorf("%s %s: status %d: %s", method, path, w.Code, w.Body)
	}
	return time.Since(begun)
}

func TestASlowEngineTakesItsFactorLonger(t *testing.T) {
	t.Parallel()
	body := strings.ReplaceAll(long(""), "emulator-test", "m")
	for name, row := range map[string]struct {
		speed float64
		ratio float64
	}{"1.6 times slower": {1 / 1.6, 1.6}, "twice as fast": {2, 0.5}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var own, scaled time.Duration
			inBubble(t, emulator.Config{Models: []string{"m"}}, func(t *testing.T, e *emulator.Emulator) { own = took(t, e, "POST", chat, body) })
			inBubble(t, emulator.Config{Models: []string{"m"}, Speed: row.speed}, func(t *testing.T, e *emulator.Emulator) { scaled = took(t, e, "POST", chat, body) })
			if got := scaled.Seconds() / own.Seconds(); own < time.Second || got < row.ratio-1e-4 || got > row.ratio+1e-4 {
				t.Errorf("took %v, and %v at its own speed: a factor of %v, want %v", scaled, own, got, row.ratio)
			}
		})
	}
}

func TestAFrozenEngineComputesAndAnswersNothing(t *testing.T) {
	t.Parallel()
	body := strings.ReplaceAll(long(""), "emulator-test", "m")
	inBubble(t, emulator.Config{Models: []string{"m"}}, func(t *testing.T, e *emulator.Emulator) {
		undisturbed := took(t, e, "POST", chat, body)
		begun := time.Now()
		ended := make(chan time.Duration)
		go func() { ended <- took(t, e, "POST", chat, body) }()
		time.Sleep(undisturbed / 2)
		took(t, e, "POST", "/emulator/freeze?for=3s", "")
		for _, path := range []string{"/health", "/metrics", "/v1/models"} {
			go func() { ended <- took(t, e, "GET", path, "") }()
		}
		for range 3 {
			if got := <-ended; got != 3*time.Second {
				t.Errorf("a page came after %v, want it after the stall", got)
			}
		}
		<-ended
		if got := time.Since(begun) - undisturbed; got < 3*time.Second-50*time.Millisecond || got > 3*time.Second+50*time.Millisecond {
			t.Errorf("the call took %v longer than undisturbed, want the stall", got)
		}
	})
}

func TestStallsComeAboutAsOftenAsAsked(t *testing.T) {
	t.Parallel()
	stalls := func(seed uint64) (at []time.Duration) {
		cfg := emulator.Config{Seed: seed, Faults: emulator.Faults{StallEvery: time.Minute, StallFor: 3 * time.Second}}
		inBubble(t, cfg, func(t *testing.T, e *emulator.Emulator) {
			begun := time.Now()
			for time.Since(begun) < 100*time.Minute {
				time.Sleep(100 * time.Millisecond)
				if d := took(t, e, "GET", "/health", ""); d > 0 {
					at = append(at, time.Since(begun))
					if d > 3*time.Second {
						t.Errorf("a stall of %v, want 3s", d)
					}
				}
			}
			// It can be ended and begun again while it runs.
			if err := e.SetFaults(emulator.Faults{}); err != nil {
				t.Fatal(err)
			}
			time.Sleep(10 * time.Second)
			for range 1000 {
				time.Sleep(time.Second)
				if d := took(t, e, "GET", "/health", ""); d > 0 {
					t.Fatal("it stalls though it is to do so no more")
				}
			}
			if err := e.SetFaults(cfg.Faults); err != nil {
				t.Fatal(err)
			}
			for d := time.Duration(0); d == 0; d = took(t, e, "GET", "/health", "") {
				time.Sleep(100 * time.Millisecond)
			}
		})
		return at
	}
	one, same, other := stalls(1), stalls(1), stalls(2)
	if n := len(one); n < 90 || n > 110 {
		t.Errorf("%d stalls in 100 minutes, want about 100", n)
	}
	if len(one) != len(same) || one[0] != same[0] || one[0] == other[0] {
		t.Errorf("the seed does not decide: %v, %v, %v", one[0], same[0], other[0])
	}
	for i := 1; i < len(one); i++ {
		if gap := one[i] - one[i-1]; gap < 29*time.Second || gap > 91*time.Second {
			t.Errorf("stalls %v apart", gap)
		}
	}
}

func TestACallWhoseClientLeftDuringAStallIsDropped(t *testing.T) {
	t.Parallel()
	s := emulatortest.Start(t, emulator.Config{})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	if _, err := post(ctx, t, s, chat, long("[[emulator:hang]]", streaming)); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the call to run", func() bool { return s.Stats().Running == 1 })
	s.Freeze(300 * time.Millisecond)
	frozen := time.Now()
	cancel()
	late, leave := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer leave()
	if _, err := post(late, t, s, chat, long("[[emulator:hang]] 2", streaming)); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a frozen engine answered: %v", err)
	}
	if s.Stats().Running != 1 && time.Since(frozen) < 300*time.Millisecond {
		t.Error("it noticed during the stall that its client left")
	}
	waitFor(t, "both calls to be dropped", func() bool { return s.Counts().Disconnects == 2 && s.Stats().Running+s.Stats().Waiting == 0 })
}
