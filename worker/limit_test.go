package worker_test

import (
	"net/http"
	"testing"
	"time"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/engine/emulator"
	"github.com/millrace/millrace/internal/job"
)

// TestAWorkerThatIsToldToStopKeepsToTheLimitOfItsOrderToDrain: the two times do not add up.
func TestAWorkerThatIsToldToStopKeepsToTheLimitOfItsOrderToDrain(t *testing.T) {
	t.Parallel()
	e := newEnv(t, time.Hour)
	begun := make(chan struct{}, 1)
	slow := play(t, func(w http.ResponseWriter, r *http.Request) {
		send(w, `{"choices":[{"index":0,"delta":{"content":"a"}}]}`)
		begun <- struct{}{}
		<-r.Context().Done()
	})
	p := e.work(slow.URL, generic, func(c *workerConfig) { c.Drain = time.Hour })
	j := e.submit(e.job(chat("runs", ""), withEvents))
	<-begun
	for _, limit := range []time.Duration{time.Millisecond, time.Hour} { // the first one counts
		e.ok(e.cluster.OrderDrainWithin(t.Context(), string(p.ID()), limit))
	}
	e.until("it drains, and goes on with what it has", func() bool { info := e.heard(p); return info.State == cluster.Draining && info.Running == 1 })
	if took := e.ends(p); took > 10*time.Second {
		t.Errorf("it took %s to end", took)
	}
	fast, _ := emulate(t, emulator.Config{})
	other := e.work(fast.URL)
	if rec := e.await(j); rec.State != job.Completed || rec.Attempts[0].Outcome != "drained" || rec.Attempts[len(rec.Attempts)-1].Worker != other.ID() || rec.Charged != 0 {
		t.Errorf("record %+v", rec)
	}
}
