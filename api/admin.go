package api

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/labstack/echo/v4"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/results"
)

// workerObject is a worker as operators see it.
type workerObject struct {
	ID      string `json:"id"`
	Object  string `json:"object"`
	Version string `json:"version"`
	Host    string `json:"host"`
	// StartedAt and HeardAt are unix seconds.
	StartedAt float64 `json:"started_at"`
	HeardAt   float64 `json:"heard_at"`
	cluster.WorkerInfo
}

// adminWorkers answers GET /admin/v1/workers.
func (s *Server) adminWorkers(c echo.Context) error {
	var workers []workerObject
	for _, m := range s.deps.Cluster.Workers("") {
		workers = append(workers, newWorkerObject(m))
	}
	slices.SortFunc(workers, func(a, b workerObject) int { return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.ID, b.ID)) })
	return writeJSON(c, http.StatusOK, newList(workers, func(w workerObject) string { return w.ID }, false))
}

// newWorkerObject makes the object of a member that is a worker.
func newWorkerObject(m cluster.Member) workerObject {
	return workerObject{
		ID: m.ID, Object: "worker", Version: m.Version, Host: m.Host, StartedAt: job.Millis(m.Started).Seconds(),
		HeardAt: job.MillisOf(m.Heard).Seconds(), WorkerInfo: *m.Worker,
	}
}

// drainWorker answers POST /admin/v1/workers/{id}/drain: the worker takes no more work, hands back what has not started, finishes what runs, and stays, with nothing to do, until its process is told to stop. The order may be
// repeated. The path has the worker's id, or its name if only one live worker has it.
func (s *Server) drainWorker(c echo.Context) error {
	name := pathParam(c, "id")
	var found []cluster.Member
	for _, m := range s.deps.Cluster.Workers("") {
		if m.ID == name {
			found = []cluster.Member{m}
			break
		}
		if m.Worker.Name == name {
			found = append(found, m)
		}
	}
	switch len(found) {
	case 0:
		return fail(http.StatusNotFound, job.CodeWorkerNotFound, "There is no live worker %q.", clip(name)).at("id")
	case 1:
	default:
		f := fail(http.StatusConflict, job.CodeInvalidValue, "%d live workers have the name %q: use the id of one of them.", len(found), clip(name)).at("id")
		f.final = true
		return f
	}
	w := found[0]
	// Once begun the order is carried out though its client may leave.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(c.Request().Context()), storeTimeout)
	defer cancel()
	if err := s.deps.Cluster.OrderDrain(ctx, w.ID); err != nil {
		return unavailable(err, "Worker %q does not answer: try again later.", clip(w.ID))
	}
	o := newWorkerObject(w)
	o.State = cluster.Draining // which its next heartbeat says too
	return writeJSON(c, http.StatusAccepted, o)
}

// modelQueueObject is one model's queue as operators see it.
type modelQueueObject struct {
	Model  job.Model `json:"model"`
	Object string    `json:"object"`
	// Waiting counts the jobs that any worker may take, by class; WaitingLines those in each tenant's line; BatchLines each tenant's lines of batches that are not queued yet; Running the jobs that workers have.
	Waiting      map[job.Class]int  `json:"waiting"`
	WaitingLines map[job.Tenant]int `json:"waiting_lines"`
	BatchLines   map[job.Tenant]int `json:"batch_lines"`
	Running      int                `json:"running"`
	// RunningTokens is what running jobs hold of the workers' KV caches, CapacityTokens what these can hold.
	RunningTokens  job.Tokens `json:"running_tokens"`
	CapacityTokens job.Tokens `json:"capacity_tokens"`
	// Backlog is the durable work that is accepted and has not ended; Tenants parts it by tenant, those with the most first where there are too many to tell.
	Backlog amountObject                `json:"backlog"`
	Tenants map[job.Tenant]amountObject `json:"backlog_by_tenant"`
	// WaitingTokens is what waiting jobs and lines are expected to need, TokensPerSecond how many of these the model's workers get done when they are full, and ETASeconds in how many seconds the last job that waits now
	// starts; null is unknown.
	WaitingTokens   job.Tokens `json:"waiting_tokens"`
	TokensPerSecond *float64   `json:"tokens_per_second"`
	ETASeconds      *float64   `json:"eta_seconds"`
	// Limits are those of this API; LimitFill is the largest share of one that is in use, and LimitName which: null if there are none.
	Limits    limitsObject `json:"limits"`
	LimitFill *float64     `json:"limit_fill"`
	LimitName *string      `json:"limit_name"`
	// WorkFill is the share of the stream's limit in use, 0..1.
	WorkFill float64 `json:"work_fill"`
	// JobsPerSecond is how fast the model's jobs end lately.
	JobsPerSecond float64                     `json:"jobs_per_second"`
	Workers       map[cluster.WorkerState]int `json:"workers"`
	// Pools are those that start workers for the model, as the leading autoscaler tells.
	Pools []cluster.PoolInfo `json:"pools"`
	// Reason is the first thing that keeps jobs waiting; null if none wait.
	Reason *string `json:"reason"`
}

// amountObject is an amount of work.
type amountObject struct {
	Jobs   int64      `json:"jobs"`
	Bytes  int64      `json:"bytes"`
	Tokens job.Tokens `json:"tokens"`
}

// adminQueues answers GET /admin/v1/queues: by the leading dispatcher's word, or, without one, by a look of our own.
func (s *Server) adminQueues(c echo.Context) error {
	ctx, cancel := context.WithTimeout(c.Request().Context(), storeTimeout)
	defer cancel()
	models := make(map[job.Model]bool)
	for _, k := range s.deps.Cluster.Known() {
		models[k.Model] = true
	}
	held, err := s.deps.Queue.Models(ctx)
	if err != nil {
		return fmt.Errorf("listing the models that have work: %w", err)
	}
	for _, m := range held {
		models[m] = true
	}
	backlogs, err := s.deps.Results.Backlogs(ctx)
	if err != nil {
		return fmt.Errorf("reading what is accepted: %w", err)
	}
	queues := make([]modelQueueObject, 0, len(models))
	for m := range models {
		q, err := s.modelQueue(ctx, m, backlogs[m])
		if err != nil {
			return err
		}
		queues = append(queues, q)
	}
	slices.SortFunc(queues, func(a, b modelQueueObject) int { return cmp.Compare(a.Model, b.Model) })
	return writeJSON(c, http.StatusOK, newList(queues, func(q modelQueueObject) string { return string(q.Model) }, false))
}

func (s *Server) modelQueue(ctx context.Context, m job.Model, backlog *results.Backlog) (modelQueueObject, error) {
	q := modelQueueObject{
		Model: m, Object: "queue", Waiting: make(map[job.Class]int), WaitingLines: make(map[job.Tenant]int), BatchLines: make(map[job.Tenant]int),
		JobsPerSecond: s.pace.of(m), Workers: make(map[cluster.WorkerState]int), Pools: s.pools(m),
	}
	for _, st := range []cluster.WorkerState{cluster.Ready, cluster.Starting, cluster.Draining, cluster.Stalled, cluster.Unready} {
		q.Workers[st] = 0
	}
	workers := s.deps.Cluster.Workers(m)
	for _, w := range workers {
		if w.Worker != nil {
			q.Workers[w.Worker.State]++
			q.CapacityTokens += w.Worker.Capacity
			q.RunningTokens += w.Worker.Used
		}
	}
	info, known := s.queueInfo(m)
	if known {
		q.Running, q.WorkFill = info.Running, info.WorkFill
		for class, n := range info.Waiting {
			q.Waiting[class] += n
		}
		for t, n := range info.WaitingLines {
			q.WaitingLines[t] += n
		}
		for t, n := range info.BatchLines {
			q.BatchLines[t] += n
		}
	} else if err := s.lookAtQueue(ctx, m, &q); err != nil {
		return q, err
	}
	for _, class := range job.Classes() {
		q.Waiting[class] += 0 // each class has its number
	}
	if q.Pools == nil {
		q.Pools = []cluster.PoolInfo{}
	}
	w := waitingOf(&q, &info)
	cold := prospectOf(blocking(workers, w.first, w.firsts-1), q.Pools, time.Now())
	if w.jobs+w.lines > 0 {
		reason := cold.reason
		if known && couldRun(reason) && allLimited(&info) {
			reason = reasonQuota
		}
		q.Reason = &reason
	}
	s.weigh(&q, backlog, w, workers, cold)
	return q, nil
}

// waits is what waits of a model.
type waits struct {
	// jobs that are queued, and lines of batches that are not yet with the tokens that these are expected to need.
	jobs, lines int
	tokens      job.Tokens
	// first is the class of what starts next, of which firsts wait, last that of what starts last.
	first, last job.Class
	firsts      int
}

// waitingOf sums up what waits. Jobs in lines count as standard where nobody tells their class.
func waitingOf(q *modelQueueObject, info *cluster.QueueInfo) waits {
	w := waits{tokens: info.BatchTokens}
	there := make(map[job.Class]int)
	for c, n := range q.Waiting {
		w.jobs += n
		there[c] += n
	}
	for _, n := range q.BatchLines {
		w.lines += n
	}
	there[job.Batch] += w.lines
	lined := 0
	for _, n := range q.WaitingLines {
		lined += n
	}
	w.jobs += lined
	switch {
	case lined == 0:
	case len(info.Lines) == 0:
		there[job.Standard] += lined
	default:
		for c, n := range info.Lines { // among batch work's are the batches themselves: a few
			there[c] += n
		}
	}
	for _, c := range job.Classes() {
		if there[c] > 0 {
			w.last = c
			if w.first == "" {
				w.first, w.firsts = c, there[c]
			}
		}
	}
	return w
}

// allLimited tells whether all that waits does so for its tenant's own limit.
func allLimited(q *cluster.QueueInfo) bool {
	for _, n := range q.Waiting {
		if n > 0 {
			return false
		}
	}
	for _, lines := range []map[job.Tenant]int{q.WaitingLines, q.BatchLines} {
		for t := range lines {
			if !slices.Contains(q.Quota, t) {
				return false
			}
		}
	}
	return len(q.Quota) > 0
}

// maxTenants bounds how many tenants are told apart.
const maxTenants = 100

// weigh fills in what is known of the tokens that wait, and of the limits.
func (s *Server) weigh(q *modelQueueObject, backlog *results.Backlog, w waits, workers []cluster.Member, cold prospect) {
	q.Tenants, q.Limits = make(map[job.Tenant]amountObject), newLimitsObject(s.cfg.Limits)
	total, tenants := backlog.Sum(), backlog.Largest(maxTenants)
	q.Backlog = amountObject(total)
	for t, a := range tenants {
		q.Tenants[t] = amountObject(a)
	}
	if fill, name := fullest(s.cfg.Limits, total, tenants); name != "" {
		q.LimitFill, q.LimitName = &fill, &name
	}
	mean := s.pace.mean(q.Model)
	if total.Jobs > 0 { // what waits, live calls aside, is of the backlog
		mean = float64(total.Tokens) / float64(total.Jobs)
	}
	waiting := float64(w.jobs)*mean + float64(w.tokens)
	q.WaitingTokens = job.Tokens(waiting)
	rate := s.pace.tokens(q.Model, workers, mean)
	if rate > 0 {
		q.TokensPerSecond = &rate
	}
	if q.Reason == nil {
		return
	}
	before := ahead{jobs: w.jobs + w.lines - 1, tokens: max(0, waiting-mean)}
	switch *q.Reason {
	case reasonDispatching, reasonSaturated, reasonLimit:
		q.ETASeconds = eta(before, mean, blocking(workers, w.last, before.jobs) == reasonDispatching, workers, rate)
	case reasonStarting:
		q.ETASeconds = cold.start(before)
	case reasonUnavailable:
		q.ETASeconds = cold.in
	}
}

// lookAtQueue counts what the model's two streams hold.
func (s *Server) lookAtQueue(ctx context.Context, m job.Model, q *modelQueueObject) error {
	for _, kind := range []queue.Kind{queue.Work, queue.Live} {
		d, err := s.deps.Queue.Depth(ctx, kind, m)
		if errors.Is(err, queue.ErrNotFound) {
			continue // a model that nobody has asked yet
		}
		if err != nil {
			return fmt.Errorf("counting the jobs of %q: %w", m, err)
		}
		for class, n := range d.Waiting {
			q.Waiting[class] += n
		}
		for _, n := range d.Delivered {
			q.Running += n
		}
		for lane, n := range d.TenantLanes {
			q.WaitingLines[job.Tenant(strings.TrimPrefix(string(lane), string(queue.TenantLane(""))))] += n
		}
		if kind == queue.Work && d.MaxBytes > 0 {
			q.WorkFill = float64(d.Bytes) / float64(d.MaxBytes)
		}
	}
	return nil
}

// maxOldJobs bounds the listing of jobs that run for long.
const maxOldJobs = 1000

// adminJobs answers GET /admin/v1/jobs: the jobs whose running attempt is older than ?older_than=, by default twice the usual bound of one, oldest first. It is how work that is stuck is found.
func (s *Server) adminJobs(c echo.Context) error {
	age := 2 * s.cfg.DefaultRunTimeout
	if text := c.QueryParam("older_than"); text != "" {
		d, err := time.ParseDuration(text)
		if err != nil || d < 0 {
			return invalid("older_than", job.CodeInvalidValue, "older_than is %q: it must be a length of time like 2h.", clip(text))
		}
		age = d
	}
	ctx, cancel := context.WithTimeout(c.Request().Context(), 5*storeTimeout)
	defer cancel()
	records, err := s.running(ctx, s.deps.Results.Now()-job.Millis(age.Milliseconds()))
	if err != nil {
		return err
	}
	slices.SortFunc(records, func(a, b *results.Record) int { return cmp.Compare(runningSince(a), runningSince(b)) })
	more := len(records) > maxOldJobs
	objects := make([]*jobObject, 0, min(len(records), maxOldJobs))
	for _, r := range records[:min(len(records), maxOldJobs)] {
		objects = append(objects, s.render(viewOfRecord(r)))
	}
	return writeJSON(c, http.StatusOK, newList(objects, func(o *jobObject) string { return string(o.ID) }, more))
}

// running lists the jobs whose running attempt began before `before`: among those that workers have claimed.
func (s *Server) running(ctx context.Context, before job.Millis) ([]*results.Record, error) {
	holders, err := s.deps.Results.Holders(ctx)
	if err != nil {
		return nil, fmt.Errorf("listing the workers that hold jobs: %w", err)
	}
	var old []*results.Record
	for _, w := range holders {
		ids, err := s.deps.Results.Held(ctx, w)
		if err != nil {
			return nil, fmt.Errorf("listing the jobs of worker %s: %w", w, err)
		}
		for _, id := range ids {
			r, err := s.deps.Results.Get(ctx, id)
			if errors.Is(err, results.ErrNotFound) {
				continue // it ended meanwhile
			}
			if err != nil {
				return nil, fmt.Errorf("reading job %s: %w", id, err)
			}
			if r.State == job.Running && r.Worker == w && runningSince(r) <= before {
				old = append(old, r)
			}
		}
	}
	return old, nil
}

func runningSince(r *results.Record) job.Millis {
	if n := len(r.Attempts); n > 0 {
		return r.Attempts[n-1].Started
	}
	return 0
}
