package admission

import "github.com/millrace/millrace/internal/job"

// Lane names where a job waits.
type Lane string

// The lanes. Shared is pulled by every worker of the model, WorkerLane by one alone; from TenantLine the dispatcher moves jobs to Shared.
const (
	Shared     Lane = "shared"
	WorkerLane Lane = "worker"
	TenantLine Lane = "tenant"
)

// MinDeep is the least number of jobs in the shared lane from which on newcomers wait in their tenant's line. DeepSeconds is the measured work in seconds
// that the shared lane holds at least before it counts as deep: as much as the dispatcher keeps in it.
const (
	MinDeep     = 64
	DeepSeconds = 3
)

// lane is where a job waits that may enter, and the worker of a WorkerLane. The worker that has its cache is asked first: that one has room, so the job passes no other that could run there.
// Who is answered on a connection waits in no line: without room it is refused. And without a dispatcher nobody would move a line on; only a tenant with a limit on its running work waits for one all the same.
// While others of its class wait in lines, a newcomer that went past them would get more than its share: it takes its turn.
func lane(r Request, v View) (Lane, job.Worker) {
	deep := max(MinDeep, int(DeepSeconds*v.JobsPerSecond))
	switch {
	case !r.Live && v.Limited:
		return TenantLine, ""
	case v.Warm != "":
		return WorkerLane, v.Warm
	case !r.Live && v.Leader && (v.TenantWaiting > 0 || v.Lined > 0 || v.Shared >= deep):
		return TenantLine, ""
	}
	return Shared, ""
}
