package emulator

import (
	"bytes"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// Faults are what goes wrong, for the whole engine. The zero value is a healthy one. Rates are shares of calls, 0 to 1, drawn from a sequence
// that Config.Seed starts.
type Faults struct {
	// ErrorRate of calls are answered 500. HangRate of them run and never give a token. ResetRate of them lose their connection after one
	// token or more.
	ErrorRate, HangRate, ResetRate float64
	// Status, if not 0, answers every completion and embedding, with RetryAfter as its Retry-After header unless that is empty. 429 is an
	// engine that is always full.
	Status     int
	RetryAfter string
	// Stall stops the engine: calls are accepted and counted as running or waiting, none gets a token, and /health goes on saying 200.
	Stall bool
	// StallEvery and StallFor freeze the engine again and again, starting StallEvery after the last start, on average: other than with Stall its HTTP hangs too. In wall
	// time, and drawn from a sequence that Config.Seed starts. 0 is never.
	StallEvery, StallFor time.Duration
	// HealthLies has /health say 200 whatever is the case, also while the model loads.
	HealthLies bool
	// PreemptionRate of steps begin by preempting the sequence admitted last, though nobody needs its blocks; 1 is a storm.
	PreemptionRate float64
	// Metrics is what happens to the metrics page.
	Metrics MetricsFault
	// MaxNumSeqs is the limit on running sequences. 0 is MaxRunning.
	MaxNumSeqs int
}

// MetricsFault is what may be wrong with the metrics page.
type MetricsFault string

// The faults of the metrics page: it is 404, no metrics at all, a page whose KV usage is NaN, or one that takes ten seconds.
const (
	MetricsGood    MetricsFault = ""
	MetricsMissing MetricsFault = "missing"
	MetricsGarbage MetricsFault = "garbage"
	MetricsNaN     MetricsFault = "nan"
	MetricsSlow    MetricsFault = "slow"
)

func (f Faults) validate() error {
	for _, r := range []struct {
		name string
		rate float64
	}{{"ErrorRate", f.ErrorRate}, {"HangRate", f.HangRate}, {"ResetRate", f.ResetRate}, {"PreemptionRate", f.PreemptionRate}} {
		if !(r.rate >= 0 && r.rate <= 1) {
			return fmt.Errorf("field Faults.%s is %v: it must be from 0 to 1", r.name, r.rate)
		}
	}
	if f.Status != 0 && (f.Status < 400 || f.Status > 599) {
		return fmt.Errorf("field Faults.Status is %d: it must be 0 or from 400 to 599", f.Status)
	}
	if f.StallEvery < 0 || f.StallFor < 0 {
		return fmt.Errorf("fields Faults.StallEvery and StallFor are %v and %v: they must not be negative", f.StallEvery, f.StallFor)
	}
	if f.StallEvery > 0 && f.StallEvery < 2*f.StallFor {
		return fmt.Errorf("field Faults.StallEvery is %v: it must be 0 or at least twice StallFor, which is %v", f.StallEvery, f.StallFor)
	}
	if f.MaxNumSeqs < 0 {
		return fmt.Errorf("field Faults.MaxNumSeqs is %d: it must not be negative", f.MaxNumSeqs)
	}
	switch f.Metrics {
	case MetricsGood, MetricsMissing, MetricsGarbage, MetricsNaN, MetricsSlow:
		return nil
	default:
		return fmt.Errorf("field Faults.Metrics is %q: it must be missing, garbage, nan, slow, or empty", f.Metrics)
	}
}

// never is a token count that is not reached.
const never = -1

// mishap is what goes wrong with one call. The after fields are counts of tokens given, all choices together.
type mishap struct {
	status     int
	retryAfter string
	hangAfter  int
	resetAfter int
	crashAfter int
	errorAfter int
	breakAfter int
	// slowDisconnect delays noticing that the client left; delay the answer; tokenDelay each token.
	slowDisconnect, delay, tokenDelay time.Duration
	pad                               int
	tokens                            int // the answer's natural length, 0 for its own
}

func noMishap() mishap {
	return mishap{hangAfter: never, resetAfter: never, crashAfter: never, errorAfter: never, breakAfter: never}
}

// watchesTokens tells whether something happens between tokens, so that also an answer in one piece must follow them.
func (m *mishap) watchesTokens() bool {
	return m.resetAfter > 0 || m.crashAfter > 0 || m.errorAfter != never || m.tokenDelay > 0
}

const (
	markerOpen  = "[[emulator:"
	markerClose = "]]"
)

// parseMarkers reads the markers that stand in body. times is 0 for "always".
func parseMarkers(body []byte, now time.Time) (m mishap, times int, err error) {
	m = noMishap()
	for {
		i := bytes.Index(body, []byte(markerOpen))
		if i < 0 {
			return m, times, nil
		}
		body = body[i+len(markerOpen):]
		n := bytes.Index(body, []byte(markerClose))
		if n < 0 || n > 1000 {
			return m, 0, fmt.Errorf("an emulator marker without its end %q", markerClose)
		}
		for _, option := range strings.Split(string(body[:n]), ",") {
			key, value, _ := strings.Cut(strings.TrimSpace(option), "=")
			if err := m.set(key, value, now, &times); err != nil {
				return m, 0, fmt.Errorf("the emulator marker option %q: %w", option, err)
			}
		}
		body = body[n:]
	}
}

func (m *mishap) set(key, value string, now time.Time, times *int) error {
	var err error
	count := func(into *int, least int) {
		if *into, err = strconv.Atoi(value); err == nil && *into < least {
			err = fmt.Errorf("the number must be at least %d", least)
		}
	}
	wait := func(into *time.Duration) { *into, err = time.ParseDuration(value) }
	switch key {
	case "status":
		count(&m.status, 400)
		if err == nil && m.status > 599 {
			err = fmt.Errorf("the status must be from 400 to 599")
		}
	case "retry-after":
		m.retryAfter = value
	case "retry-date":
		var seconds int
		count(&seconds, 0)
		m.retryAfter = now.Add(time.Duration(seconds) * time.Second).UTC().Format(http.TimeFormat)
	case "hang":
		m.hangAfter = 0
	case "hang-after":
		count(&m.hangAfter, 0)
	case "reset-after":
		count(&m.resetAfter, 0)
	case "crash":
		m.crashAfter = 0
	case "crash-after":
		count(&m.crashAfter, 0)
	case "error-after":
		count(&m.errorAfter, 0)
	case "broken-chunk-after":
		count(&m.breakAfter, 0)
	case "slow-disconnect":
		wait(&m.slowDisconnect)
	case "delay":
		wait(&m.delay)
	case "token-delay":
		wait(&m.tokenDelay)
	case "pad":
		count(&m.pad, 0)
		m.pad = min(m.pad, maxBody)
	case "tokens":
		count(&m.tokens, 1)
	case "times":
		count(times, 1)
	default:
		err = fmt.Errorf("there is no such option")
	}
	return err
}
