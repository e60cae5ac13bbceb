package worker_test

import (
	"testing"
	"time"

	"github.com/millrace/millrace/internal/job"
)

func TestEveryGoodStatusWithJSONIsAnAnswer(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 5*time.Second)
	eng := play(t, reply(201, `{"object":"chat.completion","choices":[]}`))
	e.work(eng.URL, generic)
	if o := e.await(e.submit(e.job(chat("x", "")))).Outcome; o.State != job.Completed || o.StatusCode != 201 || len(o.Attempts) != 1 {
		t.Errorf("outcome %+v", o)
	}
}

func TestErrorsOfAnEngineAreOfTheKindOfItsStatus(t *testing.T) {
	t.Parallel()
	for status, want := range map[int]string{400: job.TypeInvalidRequest, 501: job.TypeServer, 429: job.TypeRateLimit} {
		e := newEnv(t, 5*time.Second)
		eng := play(t, reply(status, `{"error":{"message":"no"}}`))
		e.work(eng.URL, generic)
		if o := e.await(e.submit(e.job(chat("x", "")))).Outcome; o.State != job.Failed || o.StatusCode != status || o.Error.Type != want {
			t.Errorf("%d: outcome %+v, %+v", status, o, o.Error)
		}
	}
}
