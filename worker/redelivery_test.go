package worker_test

import (
	"context"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/millrace/millrace/internal/queue"
)

// TestSecondDeliveryUnderOneNameIsNoSecondCall: a server that was killed may have forgotten what it had delivered. It then delivers that once more, under the very same ack subject, to a worker that is
// at it already.
func TestSecondDeliveryUnderOneNameIsNoSecondCall(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 2*time.Second)
	release := make(chan struct{})
	eng := play(t, func(w http.ResponseWriter, r *http.Request) {
		<-release
		reply(200, `{"choices":[]}`)(w, r)
	})
	j := e.submit(e.job(chat("a", "")))
	store, before := filepath.Join(e.dir, "nats"), filepath.Join(e.dir, "before")
	e.stopNATS()
	e.ok(os.CopyFS(before, os.DirFS(store)))
	e.startNATS()
	e.work(eng.URL, generic)
	e.until("the engine has it", func() bool { return eng.of(string(j.ID)) == 1 })
	e.stopNATS()
	e.ok(os.RemoveAll(store))
	e.ok(os.Rename(before, store))
	e.startNATS()
	e.until("it is delivered again", func() bool {
		d, err := e.queue.Depth(context.Background(), queue.Work, model)
		return err == nil && d.Delivered[j.Class] == 1
	})
	e.until("the lease was renewed, long after that", func() bool { return e.get(j).Lease > e.results.Now()+1900 })
	close(release)
	e.completed(j)
	if rec := e.get(j); len(rec.Attempts) != 1 || eng.of(string(j.ID)) != 1 {
		t.Errorf("%d calls, %+v", eng.of(string(j.ID)), rec.Attempts)
	}
}
