package admission_test

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/millrace/millrace/internal/admission"
	"github.com/millrace/millrace/internal/job"
)

func TestInteractiveWorkIsRefusedWhenItWouldWaitTooLong(t *testing.T) {
	t.Parallel()
	const s = time.Second
	busy := admission.Pressure{Ready: 3, Busy: 3, Ahead: 40_000, Rate: 1000, TTFT: s}
	change := func(f func(*admission.Pressure)) admission.Pressure {
		p := busy
		f(&p)
		return p
	}
	tests := map[string]struct {
		pressure admission.Pressure
		most     time.Duration
		durable  bool
		after    time.Duration // 0: let in
	}{
		"no worker at all":                     {admission.Pressure{Ahead: 1e9}, 30 * s, false, 0},
		"all are busy and the wait is long":    {busy, 30 * s, false, 11 * s},
		"the wait is just short enough":        {busy, 41 * s, false, 0},
		"no bound":                             {busy, 0, false, 0},
		"a job that may wait":                  {busy, 30 * s, true, 0},
		"one has room":                         {change(func(p *admission.Pressure) { p.Busy = 2 }), 30 * s, false, 0},
		"nothing waits":                        {change(func(p *admission.Pressure) { p.Ahead = 0 }), 30 * s, false, 0},
		"the first token alone takes too long": {change(func(p *admission.Pressure) { p.Ahead, p.TTFT = 0, 31*s }), 30 * s, false, s},
		"nobody has measured anything":         {change(func(p *admission.Pressure) { p.Rate = 0 }), 30 * s, false, 0},
		"a rate that is no number":             {change(func(p *admission.Pressure) { p.Rate = math.NaN() }), 30 * s, false, 0},
		"a rate near nothing":                  {change(func(p *admission.Pressure) { p.Rate = 1e-300 }), 30 * s, false, 365*24*time.Hour + s - 30*s},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := admission.Decide(
				admission.Request{Tenant: "t", Model: "m", Live: !tt.durable, Body: &job.Object{}},
				admission.View{Known: true, Pressure: tt.pressure, MaxWait: tt.most},
			)
			if d.After != tt.after || (d.Refuse != nil) != (tt.after > 0) {
				t.Fatalf("come again in %v, %v; want %v", d.After, d.Refuse, tt.after)
			}
			if d.Refuse != nil && d.Refuse.CodeOf() != job.CodeRateLimit {
				t.Error(d.Refuse.CodeOf())
			}
		})
	}
	d := admission.Decide(admission.Request{Model: "m", Live: true, Body: &job.Object{}}, admission.View{Known: true, Pressure: busy, MaxWait: 30 * s})
	for _, fact := range []string{`3 ready workers of "m"`, "80 %", "40000 tokens", "1000 are done", "41 s", "30 s", "11 s"} {
		if !strings.Contains(d.Refuse.Message, fact) {
			t.Errorf("%q does not tell %s", d.Refuse.Message, fact)
		}
	}
}
