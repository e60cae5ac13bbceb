package api_test

import (
	"strings"
	"testing"

	"github.com/millrace/millrace/api"
	"github.com/millrace/millrace/internal/job"
)

// TestJobsAreSaidToWaitForTheQueueWhileItIsAway, whatever the workers were last heard to be. The page of the queues says so too.
func TestJobsAreSaidToWaitForTheQueueWhileItIsAway(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	e.known()
	id := e.submit(jobBody(chat(1, ""), ""))
	reason := func() any {
		return e.send("GET", "/v1/jobs/"+string(id), "").object(t)["queue"].(map[string]any)["reason"]
	}
	if got := reason(); got != "no_worker" {
		t.Errorf("it waits for %v", got)
	}
	e.nats.stop()
	eventually(t, "it is known", func() bool { return reason() == "queue_unavailable" })
	a := e.send("GET", "/admin/v1/queues", "")
	a.wantError(t, 503, job.CodeUnavailable, "")
	if err := a.errorOf(t); !strings.Contains(err.Message, "queue") {
		t.Errorf("the page of the queues says %q", err.Message)
	}
	e.nats.start(t)
	eventually(t, "it is back", func() bool { return reason() == "no_worker" })
}
