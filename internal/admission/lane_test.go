package admission_test

import (
	"testing"

	"github.com/millrace/millrace/internal/admission"
	"github.com/millrace/millrace/internal/job"
)

// TestWarmWorkerComesFirst: before the shared lane and before the tenant's waiting line, for durable jobs and live ones, but not for one that is refused.
func TestWarmWorkerComesFirst(t *testing.T) {
	t.Parallel()
	body, err := job.ParseObject([]byte(`{"model":"m","messages":[]}`))
	if err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		live   bool
		view   admission.View
		lane   admission.Lane
		worker job.Worker
	}{
		"none is warm":                    {view: admission.View{Known: true, Leader: true}, lane: admission.Shared},
		"one is":                          {view: admission.View{Known: true, Leader: true, Warm: "w"}, lane: admission.WorkerLane, worker: "w"},
		"for a live job":                  {live: true, view: admission.View{Known: true, Warm: "w"}, lane: admission.WorkerLane, worker: "w"},
		"though the tenant waits already": {view: admission.View{Known: true, Leader: true, TenantWaiting: 5, Shared: 1000, Warm: "w"}, lane: admission.WorkerLane, worker: "w"},
		"though nobody leads":             {view: admission.View{Known: true, Warm: "w"}, lane: admission.WorkerLane, worker: "w"},
		"but for a limit on what runs":    {view: admission.View{Known: true, Leader: true, Limited: true, Warm: "w"}, lane: admission.TenantLine},
		"which is not a live job's":       {live: true, view: admission.View{Known: true, Limited: true, Warm: "w"}, lane: admission.WorkerLane, worker: "w"},
		"and the job is refused":          {view: admission.View{Known: true, WorkFill: 1, Warm: "w"}},
	} {
		d := admission.Decide(admission.Request{Tenant: "t", Model: "m", Endpoint: job.ChatCompletions, Body: body, Size: 20, Live: tt.live}, tt.view)
		if d.Lane != tt.lane || d.Worker != tt.worker || (d.Refuse != nil) != (tt.lane == "") {
			t.Errorf("%s: lane %q of %q, refusal %v, want lane %q of %q", name, d.Lane, d.Worker, d.Refuse, tt.lane, tt.worker)
		}
	}
}
