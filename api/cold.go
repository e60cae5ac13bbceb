package api

import (
	"math"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/millrace/millrace/internal/admission"
	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/scale"
)

// prospect is when a model without a ready worker has one again, as its pools tell.
type prospect struct {
	// reason is what keeps its jobs from starting.
	reason string
	// in is for how many seconds it is expected to last; nil is unknown, as it is for all that no pool changes.
	in *float64
	// rate is how many expected tokens per second the workers that start will get done, once they are full; 0 is unknown.
	rate float64
	// failure is why no worker can be started, where that is the reason. due: it may be tried again now, and nobody does.
	failure string
	due     bool
}

// pools are those that serve the model, as the leading autoscaler tells.
func (s *Server) pools(m job.Model) []cluster.PoolInfo {
	var list []cluster.PoolInfo
	for _, member := range s.deps.Cluster.Members() {
		if member.Role != cluster.RoleAutoscaler || !member.Leader {
			continue
		}
		for _, p := range member.Pools {
			if slices.Contains(p.Models, m) {
				list = append(list, p)
			}
		}
	}
	return list
}

// prospectOf tells what becomes of a model's jobs, given what keeps its workers from taking more (as blocking has it) and its pools. While a worker is ready pools change nothing.
func prospectOf(reason string, pools []cluster.PoolInfo, now time.Time) prospect {
	p := prospect{reason: reason}
	if couldRun(reason) {
		return p
	}
	var starting, able, failing bool
	var ready, retry float64
	var rate, cold, coldRate float64
	for _, pool := range pools {
		switch {
		case pool.Unavailable != "":
			failing, p.failure = true, pool.Unavailable
			p.due = p.due || pool.RetryAt > 0 && pool.Starting == 0 && until(now, pool.RetryAt) == nil
			retry = sooner(now, sooner(now, retry, pool.RetryAt), pool.ReadyAt)
		case pool.Starting > 0 || pool.ReadyAt > 0:
			starting = true
			ready = sooner(now, ready, pool.ReadyAt)
			rate += pool.WorkerRate * float64(max(1, pool.Starting))
		case pool.Max > 0:
			able = true
			if soon := promised(pool); soon > 0 && (cold == 0 || soon < cold) {
				cold, coldRate = soon, pool.WorkerRate
			}
		}
	}
	switch {
	case starting:
		p.reason, p.in, p.rate = reasonStarting, until(now, ready), rate
	case able && reason == reasonNoWorker: // the autoscaler has yet to see that somebody waits
		p.reason = reasonStarting
		if cold > 0 {
			p.in, p.rate = &cold, coldRate
		}
	case failing && !able:
		p.reason, p.in = reasonUnavailable, until(now, retry)
	}
	if p.reason != reasonUnavailable {
		p.failure, p.due = "", false
	}
	return p
}

// promised is for how many seconds a start of the pool will last that begins now; 0 is unknown, as it is where the pool's last decision was that none begins.
func promised(p cluster.PoolInfo) float64 {
	switch scale.Action(p.Action) {
	case scale.AtMax, scale.AtCapacity, scale.Unavailable, scale.Unknown:
		return 0
	}
	return p.ColdStart
}

// sooner is the earlier of two times in unix seconds that are still to come; 0 is none.
func sooner(now time.Time, a, b float64) float64 {
	n := job.MillisOf(now).Seconds()
	switch {
	case b <= n:
		return a
	case a <= n:
		return b
	}
	return min(a, b)
}

// until is in how many seconds a time is; nil for one that is past: what was expected then is late, and nobody knows by how much.
func until(now time.Time, at float64) *float64 {
	d := at - job.MillisOf(now).Seconds()
	if d <= 0 {
		return nil
	}
	d = math.Ceil(d*10) / 10
	return &d
}

// start is in how many seconds a job starts that waits for a worker, behind what goes before it; nil is unknown.
func (p *prospect) start(before ahead) *float64 {
	if p.in == nil || p.rate <= 0 || before.tokens <= 0 {
		return p.in
	}
	t := math.Ceil((*p.in+before.tokens/p.rate)*10) / 10
	if t > maxETA.Seconds() {
		return nil
	}
	return &t
}

// unavailable tells why no worker of a model can be started, and in how long it is tried again (0 is unknown); "" while it has a ready worker, or may get one. So it is, too, once the next try is due: without a call that waits nobody
// would want a worker, and it would never be tried.
func (s *Server) unavailable(m job.Model, now time.Time) (why string, next time.Duration) {
	pools := s.pools(m)
	if len(pools) == 0 {
		return "", 0
	}
	p := prospectOf(blocking(s.deps.Cluster.Workers(m), job.Interactive, 0), pools, now)
	if p.due {
		return "", 0
	}
	if p.in != nil {
		next = time.Duration(*p.in * float64(time.Second))
	}
	return forStrangers(p.failure), next
}

// hopeless is what a call is told that was let in and that nobody has taken, once there is no worker of its model, and none can be started; nil while there is one, which may come to be ready (again), or end what it has, or may be. A start that is under
// way may succeed, and is tried for the sake of those who wait. What is heard right after the connection came back may not be all yet.
func (s *Server) hopeless(m job.Model, now time.Time) *failure {
	if len(s.deps.Cluster.Workers(m)) > 0 {
		return nil
	}
	why, next := s.unavailable(m, now)
	starts := func(p cluster.PoolInfo) bool { return p.Starting > 0 }
	if why == "" || slices.ContainsFunc(s.pools(m), starts) || s.deps.Cluster.Listening(s.started) <= settleTime {
		return nil
	}
	d := admission.Unavailable(m, admission.View{Unavailable: why, NextTry: next})
	return &failure{status: http.StatusServiceUnavailable, body: d.Refuse, after: d.After}
}

// failing tells whether a model's starts fail, and it has no worker but such as start: one of them may succeed all the same.
func (s *Server) failing(m job.Model, now time.Time) bool {
	workers := s.deps.Cluster.Workers(m)
	if slices.ContainsFunc(workers, func(w cluster.Member) bool { return w.Worker == nil || w.Worker.State != cluster.Starting }) {
		return false
	}
	return prospectOf(blocking(workers, job.Interactive, 0), s.pools(m), now).reason == reasonUnavailable
}

// maxFailure bounds what a client is told of why workers cannot be started, in bytes.
const maxFailure = 300

// What looks like a secret in an operator's message: the user and password of a URL, and the value of a setting that is named like one.
var (
	urlUser = regexp.MustCompile(`://[^/\s@]+@`)
	setting = regexp.MustCompile(`(?i)((?:key|token|secret|password|passwd|credential|authorization)[a-z0-9_-]*["']?\s*[=:]\s*["']?(?:(?:bearer|basic)\s+)?)[^\s,;"']+`)
)

// forStrangers makes of an operator's message what any client may read: one line, not long, and without what looks like a secret.
func forStrangers(text string) string {
	text = strings.Join(strings.Fields(text), " ")
	text = setting.ReplaceAllString(urlUser.ReplaceAllString(text, "://"), "${1}…")
	if len(text) > maxFailure {
		text = strings.ToValidUTF8(text[:maxFailure], "") + "…"
	}
	return strings.TrimRight(text, ".")
}
