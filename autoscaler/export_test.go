package autoscaler

import (
	"time"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/scale"
)

// Hurry makes the autoscaler's periods short ones.
func (a *Autoscaler) Hurry(change ...func(*Timing)) {
	a.timing = timing{
		stale: 500 * time.Millisecond, list: 50 * time.Millisecond, listTimeout: 5 * time.Second, listStale: 30 * time.Second, sync: 50 * time.Millisecond, batchesStale: 10 * time.Second,
		firstRetry: 100 * time.Millisecond, lastRetry: 400 * time.Millisecond, firstRoom: 300 * time.Millisecond, lastRoom: time.Second, startLimit: time.Minute, steady: time.Minute,
		absent: 200 * time.Millisecond, repeat: time.Minute, save: 50 * time.Millisecond, call: 10 * time.Second, unnamed: 200 * time.Millisecond, minute: time.Second, learn: time.Second, trim: time.Hour,
	}
	for _, f := range change {
		f(&Timing{&a.timing})
	}
}

// Timing lets tests choose single periods.
type Timing struct{ t *timing }

func (t *Timing) StartLimit(d time.Duration) { t.t.startLimit = d }
func (t *Timing) Steady(d time.Duration)     { t.t.steady = d }
func (t *Timing) Retry(first, last time.Duration) {
	t.t.firstRetry, t.t.lastRetry = first, last
}

func (t *Timing) Room(first, last time.Duration) {
	t.t.firstRoom, t.t.lastRoom = first, last
}
func (t *Timing) ListStale(d time.Duration) { t.t.listStale = d }
func (t *Timing) Repeat(d time.Duration)    { t.t.repeat = d }

// DecideBy replaces scale.Decide.
func (a *Autoscaler) DecideBy(f func(scale.Sample, scale.History, *scale.Pool) scale.Decision) {
	a.decide = f
}

// HeardBefore replaces what was heard of arrivals.
func (a *Autoscaler) HeardBefore(t Traffic) { a.traffic = t.t }

// Traffic lets tests step through what is heard of arrivals.
type Traffic struct{ t *traffic }

func NewTraffic(now time.Time) Traffic { return Traffic{newTraffic(now)} }

func (t Traffic) Hear(now time.Time, members ...cluster.Member) { t.t.hear(now, members) }

func (t Traffic) Last(now time.Time, models ...job.Model) ([]scale.Arrivals, bool) {
	return t.t.last(now, models)
}

// Due is what is to be recorded: by start, the jobs.
func (t Traffic) Due(now time.Time, m job.Model) map[time.Time]float64 {
	all, _ := t.t.due(now, map[job.Model]bool{m: true})
	jobs := map[time.Time]float64{}
	for _, r := range all {
		jobs[startOf(r.bucket, scale.SeasonBucket)] = r.jobs
	}
	return jobs
}

// Demand is what demandOf and split say, n jobs being at no worker.
func Demand(models []job.Model, dispatcher cluster.Member, n int, members ...cluster.Member) (waiting map[job.Class]scale.Amount, inFlight scale.Amount, nowhere int) {
	d := demandOf(models, &dispatcher, members)
	waiting, inFlight = d.split(n)
	return waiting, inFlight, d.nowhere()
}

// Absence is the memory of jobs that are nowhere.
type Absence struct{ a absence }

func (a *Absence) Add(now time.Time, n int, within time.Duration) int {
	return a.a.add(now, n, within)
}

// Condense merges heaps of unfed work.
func Condense(dues []scale.Due) []scale.Due { return condense(dues) }

// Meter measures one worker.
type Meter struct{ m meter }

func (m *Meter) Hear(b cluster.Member, waits bool) (float64, bool) { return m.m.hear(&b, waits) }

// Learned is what is known of a pool.
type Learned struct{ l learned }

func (l *Learned) Start(took time.Duration) {
	l.l.ColdStarts = keep(l.l.ColdStarts, took.Seconds(), keptStarts)
}

func (l *Learned) Rate(v float64)                          { l.l.Rates = keep(l.l.Rates, v, keptRates) }
func (l *Learned) ColdStart(p *scale.Pool) scale.ColdStart { return l.l.coldStart(p) }
func (l *Learned) Throughput(p *scale.Pool) float64        { return l.l.throughput(p) }
func (l *Learned) Fail(now time.Time, why string) time.Time {
	l.l.failStart(now, why, usual)
	return l.l.RetryAt
}

func (l *Learned) Refuse(now time.Time, there int) time.Time {
	l.l.refuse(now, there, "full", usual)
	return l.l.RoomAt
}

// Bound is what Refuse and Fail have left, as a process takes it over at a time.
func (l *Learned) Bound(now time.Time) (retryAt, roomAt time.Time) {
	l.l.clamp(now, usual)
	return l.l.RetryAt, l.l.RoomAt
}

// StartLimit is how long a start of the pool may take.
func (l *Learned) StartLimit(p *scale.Pool) time.Duration {
	k := keeper{a: &Autoscaler{timing: usual}, pool: p, learned: &l.l}
	return k.startLimit()
}

// Limits are how long a pool's calls to list and to stop may take, and how old a listing may be.
func Limits(p *scale.Pool) (list, stop, stale time.Duration) {
	return limit(p, usual.listTimeout), stopLimit(p), staleAfter(p, usual)
}
