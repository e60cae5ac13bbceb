package api_test

import (
	"testing"

	"github.com/millrace/millrace/api"
)

// TestJobsAreSaidToWaitForTheQueueWhileItIsAway, in their objects and on the page of the queues: whatever the workers were last heard to be.
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
	q := e.send("GET", "/admin/v1/queues", "").object(t)["data"].([]any)[0].(map[string]any)
	if q["reason"] != "queue_unavailable" {
		t.Errorf("the page of the queues tells %v", q)
	}
	e.nats.start(t)
	eventually(t, "it is back", func() bool { return reason() == "no_worker" })
}
