package job_test

import (
	"testing"
	"time"

	"github.com/millrace/millrace/internal/job"
)

func TestBlobNamesLeadBackToTheirJob(t *testing.T) {
	t.Parallel()
	id := job.NewID(time.Now())
	for _, name := range []string{job.RequestBlob(id), job.ResultBlob(id, 1), job.ResultBlob(id, 1_800_000_000_123)} {
		if got, ok := job.ParseBlob(name); !ok || got != id {
			t.Errorf("%q is of job %q (%v), want %q", name, got, ok, id)
		}
	}
	for _, name := range []string{"", "request", "request/", "request/" + string(id) + "/1", "file/" + string(id), "result/x/1"} {
		if got, ok := job.ParseBlob(name); ok {
			t.Errorf("%q was taken for an object of job %q", name, got)
		}
	}
}
