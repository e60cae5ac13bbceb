package scale

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/millrace/millrace/internal/job"
)

const (
	// quiet is how long a worker must have been idle to be taken away, if the pool is not quicker.
	quiet = 10 * time.Second
	// crumb is the share of a worker that must be usual at a time for an empty pool to be made ready for it.
	crumb = 0.05
	// lastLook is how long ago the last look may have been that confirms a trend.
	lastLook = 3 * Bucket
	// slackKept is the share of a batch's time that is kept for what goes wrong.
	slackKept = 0.1
	// horizonMargin is added to a cold start: the decision, the order, and the first jobs.
	horizonMargin = 10 * time.Second
)

// GiveUp is how many starts fail in a row until a pool counts as unavailable, and only one start at a time is tried.
const GiveUp = 3

// Decide says what to do about a pool. It is pure: the same arguments give the same decision.
//
// It plans for the moment at which a worker that is asked for now would be ready. The rate of arrivals then is the highest of what it is now, where a significant trend leads, and what the hour and the weekday promise; to
// that come what will be waiting by then, within the time that it may wait, and what batches need to end within their windows. A need is met at once and as a whole; fewer workers are wanted only when fewer were
// enough for the pool's Cooldown, or when nothing at all was asked of it for its Idle time. Those that go are idle ones.
func Decide(s Sample, h History, p *Pool) Decision {
	d := Decision{At: s.Now, Pool: p.Name, Sample: s}
	c := countWorkers(&s)
	if s.Unknown != "" {
		return d.unknown(c, h, p)
	}
	busy := s.demand() > 0
	idle := !busy && h.idle(s.Now) >= time.Duration(p.Idle)
	d.forecast(h, busy, idle)
	d.need(c, p, busy)
	d.Needed = min(d.Need.most(), p.Max)
	if d.Want = d.Needed; !idle {
		d.Want = max(d.Needed, d.held(c, h, p))
	}
	d.act(c, p)
	return d
}

// most is how many workers all reasons together want.
func (n *Need) most() int { return max(n.Rate, n.Backlog, n.Deadline, n.Schedule, n.Min) }

// broken tells whether nobody knows what was needed lately: there was no look, or the demand could not be told. That time is neither quiet nor idle.
func (h *History) broken(now time.Time) bool {
	n := len(h.Wanted)
	return n == 0 || now.Sub(h.Wanted[n-1].At) > silent
}

// idle is for how long nothing has been asked of the pool: since there was any demand, as far back as is known.
func (h *History) idle(now time.Time) time.Duration {
	if h.LastDemand.IsZero() || h.broken(now) {
		return 0
	}
	return now.Sub(h.LastDemand)
}

// lately is the most that was needed within the pool's cool-down, and whether that is known for all of it.
func (h *History) lately(now time.Time, p *Pool) (most int, known bool) {
	for _, w := range h.Wanted {
		if now.Sub(w.At) <= time.Duration(p.Cooldown) {
			most = max(most, w.N)
		}
	}
	return most, !h.broken(now) && now.Sub(h.Wanted[0].At) >= time.Duration(p.Cooldown)
}

// counts of a sample's workers.
type counts struct {
	ready, starting, away, draining int
	// live is how many there are that do not go: ready, starting, and away for so short a time that they may come back.
	live int
	// working are those that have a job, up those that are ready.
	working int
	up      []Worker
}

func countWorkers(s *Sample) counts {
	var c counts
	for _, w := range s.Workers {
		if w.Jobs > 0 {
			c.working++
		}
		switch w.State {
		case Starting:
			c.starting++
		case Draining:
			c.draining++
		case Away:
			if s.Now.Sub(w.Since) < max(2*s.ColdStart.P90, 2*time.Minute) {
				c.away++
			}
		case Ready:
			c.ready++
			c.up = append(c.up, w)
		}
	}
	c.live = c.ready + c.starting + c.away
	return c
}

// demand is all work that is there, in tokens; at least one for each job.
func (s *Sample) demand() job.Tokens {
	sum := max(s.InFlight.Tokens, job.Tokens(s.InFlight.Jobs))
	for _, a := range s.Waiting {
		sum += max(a.Tokens, job.Tokens(a.Jobs))
	}
	for _, a := range s.Unfed {
		sum += max(a.Tokens, job.Tokens(a.Jobs))
	}
	return sum
}

// waits tells whether anything waits for a worker.
func (s *Sample) waits() bool {
	for _, a := range s.Waiting {
		if a.Jobs > 0 {
			return true
		}
	}
	return false
}

// unknown keeps the last plan.
func (d Decision) unknown(c counts, h History, p *Pool) Decision {
	last := 0
	if n := len(h.Wanted); n > 0 { // the plan of when it was made last
		last, _ = h.lately(h.Wanted[n-1].At, p)
	}
	d.Need.Min, d.Need.Schedule = p.Min, p.AtLeast(d.At, d.At.Add(d.Sample.ColdStart.P90))
	d.Needed = min(max(last, d.Need.Min, d.Need.Schedule), p.Max)
	d.Want = max(d.Needed, min(c.live, p.Max))
	d.start(c)
	if d.Start == 0 {
		d.Action = Unknown
	}
	d.Reason = fmt.Sprintf("the demand is not known (%s): the last plan of %s stands", d.Sample.Unknown, workers(d.Want))
	return d
}

// forecast fills in the rate that is reckoned with. What is idle has only its season to expect.
func (d *Decision) forecast(h History, busy, idle bool) {
	ahead := d.Sample.ColdStart.P90 + horizonMargin
	f := &d.Forecast
	if !idle {
		f.Now, f.Trend = newRates(h.Recent).forecast(ahead)
	}
	f.Season = h.Season.forecast(d.At, ahead+SeasonBucket/2, h.Recent)
	if !busy && f.Now == 0 && f.Season < crumb*d.Sample.Throughput {
		f.Season = 0
	}
	f.Used = max(f.Now, h.sure(d.At, f.Trend), f.Season)
}

// sure is a trend as far as the last look has seen it, too: chance makes one for a moment now and then, above all where a step lies across two buckets.
func (h *History) sure(now time.Time, trend float64) float64 {
	n := len(h.Wanted)
	if n == 0 || now.Sub(h.Wanted[n-1].At) > lastLook {
		return 0
	}
	return min(trend, h.Wanted[n-1].Trend)
}

// need fills in how many workers each reason wants. busy tells whether there is any demand now.
func (d *Decision) need(c counts, p *Pool, busy bool) {
	s, n := &d.Sample, &d.Need
	n.Min, n.Schedule = p.Min, p.AtLeast(s.Now, s.Now.Add(s.ColdStart.P90))
	if !busy && d.Forecast.Used == 0 {
		return
	}
	n.Rate = 1
	if s.Throughput <= 0 {
		if n.Rate = max(1, c.working); s.waits() { // it is measured on what there is
			n.Rate = max(1, c.live)
		}
		return
	}
	rate := d.Forecast.Used / s.Throughput // in workers
	now := d.Forecast.Now / s.Throughput
	n.Rate = max(1, ceil(rate*(1+p.headroom())))
	if busy || now > 0 {
		n.Rate = max(n.Rate, ceil(now)+p.Spare)
	}
	d.reserve = n.Rate - max(ceil(rate), 1)
	n.Backlog = ceil(rate + d.backlog(p))
	n.Deadline = ceil(rate + d.deadlines())
	if len(s.Unfed) > 0 {
		n.Deadline = max(n.Deadline, 1)
	}
}

// backlog is how many workers more it takes to get done what will be waiting when a worker that is asked for now is ready, each class within the time that it may wait, or that a start takes if that is more.
func (d *Decision) backlog(p *Pool) float64 {
	s := &d.Sample
	horizon := s.ColdStart.P50.Seconds()
	// What gets done until then beyond what comes: workers that are starting help from when they are ready.
	done := -d.Forecast.Now * horizon
	for _, w := range s.Workers {
		switch w.State {
		case Ready:
			done += s.Throughput * horizon
		case Starting:
			left := max(0, s.ColdStart.P50-s.Now.Sub(w.Since)).Seconds()
			done += s.Throughput * max(0, horizon-left)
		}
	}
	sum := 0.0
	for _, class := range job.Classes() {
		waiting := float64(s.Waiting[class].Tokens) - done
		done = max(0, -waiting)
		if waiting > 0 {
			sum += waiting / s.Throughput / max(time.Duration(p.TargetWait[class]).Seconds(), s.ColdStart.P50.Seconds(), 1)
		}
	}
	return sum
}

// deadlines is how many workers more it takes to get batches done within their windows: of all that is due by some time, the most per time that is left. Work with slack takes what is there.
func (d *Decision) deadlines() float64 {
	s := &d.Sample
	all := slices.SortedFunc(slices.Values(s.Unfed), func(a, b Due) int { return a.By.Compare(b.By) })
	var sum, most float64
	for _, due := range all {
		sum += float64(due.Tokens)
		left := float64(due.By.Sub(s.Now))*(1-slackKept) - float64(s.ColdStart.P90)
		most = max(most, sum/s.Throughput/max(time.Duration(left), time.Minute).Seconds())
	}
	return most
}

// held is how many of the workers that there are stay though fewer are needed now.
func (d *Decision) held(c counts, h History, p *Pool) int {
	there := min(c.live, p.Max)
	most, known := h.lately(d.At, p)
	if !known {
		return there
	}
	return min(max(most, 1), there) // the last one goes after the idle time alone
}

// act fills in what is done, and why.
func (d *Decision) act(c counts, p *Pool) {
	needed := d.Need.most()
	switch {
	// Rates are never known exactly: a fifth of the reserve too few is near enough while nothing waits, and in a pool of more than twice its spares as many as the reserve too many.
	case d.Want > c.live && d.Want <= c.live+d.reserve/5 && d.Forecast.Used == d.Forecast.Now && max(d.Need.Min, d.Need.Schedule, d.Need.Deadline, d.Need.Backlog) <= c.live:
		d.Action, d.Reason = Hold, d.why(needed)+fmt.Sprintf("; %d are near enough", c.live)
	case d.Want > c.live:
		d.start(c)
	case d.Want < c.live && d.Want > 0 && c.live <= p.Max && d.Want >= c.live-min(d.reserve, max(0, c.live-2*p.Spare)):
		d.Action, d.Reason = Hold, d.why(needed)+fmt.Sprintf("; %d are near enough", c.live)
	case d.Want < c.live:
		d.stop(c, p)
	case needed > p.Max:
		d.Action, d.Reason = AtMax, fmt.Sprintf("%s: max is %d", d.why(needed), p.Max)
	case d.Needed < d.Want && c.live > 0:
		d.Action, d.Reason = Cooling, fmt.Sprintf("%s would do; more were needed within the last %s", workers(d.Needed), time.Duration(p.Cooldown))
		if d.Needed == 0 {
			d.Reason = fmt.Sprintf("nothing is asked of it; the last worker goes after %s of that", time.Duration(p.Idle))
		}
	default:
		d.Action, d.Reason = Hold, d.why(needed)
	}
}

// start fills in how many are asked for.
func (d *Decision) start(c counts) {
	s := &d.Sample
	missing := d.Want - c.live
	if missing <= 0 {
		return
	}
	why := d.why(d.Need.most())
	if s.Failures > 0 && s.Now.Before(s.RetryAt) {
		d.Action, d.Reason = Unavailable, fmt.Sprintf("%s; but %s failed, the last with %q: the next is tried at %s", why, starts(s.Failures), s.Failure, s.RetryAt.UTC().Format(time.TimeOnly))
		return
	}
	if s.Failures >= GiveUp {
		if c.starting > 0 {
			d.Action, d.Reason = Unavailable, fmt.Sprintf("%s; but %s failed, the last with %q: one is tried alone", why, starts(s.Failures), s.Failure)
			return
		}
		missing = 1
	}
	if s.Limit > 0 && c.live+missing > s.Limit {
		if missing = s.Limit - c.live; missing <= 0 {
			d.Action, d.Reason = AtCapacity, fmt.Sprintf("%s; but the provider had no room for more than %d of late", why, s.Limit)
			return
		}
	}
	d.Action, d.Start, d.Reason = ScaleUp, missing, why
}

// stop fills in which go: idle ones, and no more than are ready beyond what is wanted, for those that start are no use yet. Work spreads over all workers, so that at a moderate load none is ever idle: as many as are too many
// then yield to the others.
func (d *Decision) stop(c counts, p *Pool) {
	excess := c.ready - d.Want
	still := min(quiet, time.Duration(p.Idle), time.Duration(p.Cooldown))
	slices.SortStableFunc(c.up, func(a, b Worker) int {
		return cmp.Or(first(a.Jobs == 0, b.Jobs == 0), first(a.Yields, b.Yields), cmp.Compare(a.Jobs, b.Jobs), a.IdleSince.Compare(b.IdleSince), cmp.Compare(a.Name, b.Name))
	})
	for _, w := range c.up[:max(0, min(excess, len(c.up)))] {
		if w.Jobs == 0 && !w.IdleSince.IsZero() && d.At.Sub(w.IdleSince) >= still {
			d.Stop = append(d.Stop, w.Name)
		} else {
			d.Yield = append(d.Yield, w.Name)
		}
	}
	if len(d.Stop) > 0 {
		d.Action, d.Reason = ScaleDown, fmt.Sprintf("%s would do for %s", workers(d.Want), time.Duration(p.Cooldown))
		if d.Want == 0 {
			d.Reason = fmt.Sprintf("nothing was asked of it for %s", time.Duration(p.Idle))
		}
		return
	}
	d.Action, d.Reason = Busy, fmt.Sprintf("%s would do, but none of %d has been idle for long enough: one that runs something, has just done so, or starts is not stopped", workers(d.Want), c.live)
}

// first orders true before false.
func first(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return -1
	}
	return 1
}

// why says what needs so many workers.
func (d *Decision) why(n int) string {
	s, f, need := &d.Sample, &d.Forecast, &d.Need
	switch {
	case n == 0:
		return "nothing is asked of it"
	case s.Throughput <= 0 && n == need.Rate:
		if len(s.Workers) == 0 {
			return "there is work; how fast a worker is will be measured on the first (tokens_per_second is not set)"
		}
		return fmt.Sprintf("%s: how fast one is has not been measured yet (tokens_per_second is not set)", workers(n))
	case n == need.Backlog && n > need.Rate:
		waiting := job.Tokens(0)
		for _, a := range s.Waiting {
			waiting += a.Tokens
		}
		return fmt.Sprintf("%s needed: %d tokens wait and %.0f/s come; one does %.0f/s", workers(n), waiting, f.Used, s.Throughput)
	case n == need.Deadline && n > need.Rate:
		unfed := job.Tokens(0)
		for _, a := range s.Unfed {
			unfed += a.Tokens
		}
		return fmt.Sprintf("%s needed: batches of %d tokens are to end in time, and %.0f/s come; one does %.0f/s", workers(n), unfed, f.Used, s.Throughput)
	case n == need.Rate:
		from := fmt.Sprintf("will come in %s by the trend, %.0f/s now", s.ColdStart.P90.Round(time.Second), f.Now)
		switch f.Used {
		case f.Now:
			from = "come now"
		case f.Season:
			from = fmt.Sprintf("are usual at this time in %s, %.0f/s now", s.ColdStart.P90.Round(time.Second), f.Now)
		}
		return fmt.Sprintf("%s needed: %.0f tokens/s %s; one does %.0f/s", workers(n), f.Used, from, s.Throughput)
	case n == need.Schedule && n > need.Min:
		return fmt.Sprintf("%s by the schedule", workers(n))
	default:
		return fmt.Sprintf("%s: the pool's min", workers(n))
	}
}

func (p *Pool) headroom() float64 { return max(p.Headroom, 0) }

func workers(n int) string {
	if n == 1 {
		return "1 worker"
	}
	return fmt.Sprintf("%d workers", n)
}

func starts(n int) string {
	if n == 1 {
		return "1 start"
	}
	return fmt.Sprintf("%d starts", n)
}

// ceil rounds up, but for what is an error of the calculation.
func ceil(v float64) int { return int(math.Ceil(min(v, 1e6) - 1e-9)) }
