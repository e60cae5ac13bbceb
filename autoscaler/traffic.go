package autoscaler

import (
	"math"
	"sync"
	"time"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/scale"
)

const (
	// settled is how long after its end a second is not added to any more: heartbeats come each second and tell of the second before.
	settled = 1500 * time.Millisecond
	// longestGap is the longest silence of an API over which what came in meanwhile is spread. After a longer one nobody knows when it came.
	longestGap = scale.SeasonBucket
	// young is how old an API may be that is heard for the first time and whose counters count from zero: what it says came in since.
	young = 10 * time.Second
	// keepRecords is how long arrivals wait for a database that is away.
	keepRecords = 2 * time.Hour
)

// arrived is what came in, which may be a share of a job.
type arrived struct{ jobs, tokens, squares float64 }

func (a *arrived) add(b arrived) {
	a.jobs += b.jobs
	a.tokens += b.tokens
	a.squares += b.squares
}

func (a arrived) times(f float64) arrived {
	return arrived{a.jobs * f, a.tokens * f, a.squares * f}
}

func (a arrived) at(start time.Time) scale.Arrivals {
	return scale.Arrivals{Start: start, Amount: scale.Amount{Jobs: int(math.Round(a.jobs)), Tokens: job.Tokens(math.Round(a.tokens))}, Squares: a.squares}
}

// counter is what an API process last said of a model.
type counter struct {
	process string
	heard   time.Time
	counted arrived
}

// traffic makes what comes in at the APIs out of the counters in their heartbeats: for each model in short buckets, and in those that are recorded. Safe for concurrent use.
type traffic struct {
	mu       sync.Mutex // guards all
	since    time.Time  // since when it listens
	counters map[string]map[job.Model]counter
	apis     map[string]apiSeen
	recent   map[job.Model]map[int64]arrived // by the second since 1970
	records  map[int64]map[job.Model]arrived // by the number of the recorded bucket
	blind    map[int64]bool                  // recorded buckets of which something is not known
}

// apiSeen is when an API process was last heard.
type apiSeen struct {
	process string
	heard   time.Time
}

func newTraffic(now time.Time) *traffic {
	return &traffic{
		since: now, counters: map[string]map[job.Model]counter{}, apis: map[string]apiSeen{}, recent: map[job.Model]map[int64]arrived{},
		records: map[int64]map[job.Model]arrived{}, blind: map[int64]bool{},
	}
}

func bucketOf(t time.Time, length time.Duration) int64 { return t.UnixMilli() / length.Milliseconds() }

func startOf(n int64, length time.Duration) time.Time {
	return time.UnixMilli(n * length.Milliseconds())
}

// hear takes in what the APIs say. A counter that is lower than before was started anew.
func (t *traffic) hear(now time.Time, members []cluster.Member) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, m := range members {
		if m.Role == cluster.RoleAPI {
			t.hearOne(m)
		}
	}
	for id, seen := range t.apis {
		if now.Sub(seen.heard) > 2*longestGap {
			delete(t.apis, id)
			delete(t.counters, id)
		}
	}
	t.forget(now)
}

func (t *traffic) hearOne(m cluster.Member) {
	process := m.Epoch
	seen, known := t.apis[m.ID]
	if known && seen.process == process && !m.Heard.After(seen.heard) {
		return
	}
	t.apis[m.ID] = apiSeen{process, m.Heard}
	if t.counters[m.ID] == nil {
		t.counters[m.ID] = map[job.Model]counter{}
	}
	// What an API counted before it was first heard came in since it started, if that is not long ago; else nobody knows when.
	from, begins := seen.heard, known
	if !known || seen.process != process {
		started := time.UnixMilli(m.Started)
		from, begins = started, m.Started > 0 && m.Heard.Sub(started) <= young && started.Before(m.Heard)
	}
	for _, one := range m.Traffic {
		now := arrived{float64(one.Jobs), float64(one.Tokens), one.Squares}
		before, had := t.counters[m.ID][one.Model]
		t.counters[m.ID][one.Model] = counter{process, m.Heard, now}
		var was arrived
		if had && before.process == process && before.counted.jobs <= now.jobs && before.counted.tokens <= now.tokens {
			was = before.counted
		} else if !begins {
			continue
		}
		delta := arrived{now.jobs - was.jobs, now.tokens - was.tokens, max(0, now.squares-was.squares)}
		if delta.jobs <= 0 && delta.tokens <= 0 {
			continue
		}
		if m.Heard.Sub(from) > longestGap {
			for n := bucketOf(from, scale.SeasonBucket); n <= bucketOf(m.Heard, scale.SeasonBucket); n++ {
				t.blind[n] = true
			}
			continue
		}
		t.spread(one.Model, from, m.Heard, delta)
	}
}

// spread adds what came in between two moments to the buckets that lie there.
func (t *traffic) spread(m job.Model, from, to time.Time, all arrived) {
	if t.recent[m] == nil {
		t.recent[m] = map[int64]arrived{}
	}
	share(from, to, time.Second, func(n int64, part float64) {
		b := t.recent[m][n]
		b.add(all.times(part))
		t.recent[m][n] = b
	})
	share(from, to, scale.SeasonBucket, func(n int64, part float64) {
		if t.records[n] == nil {
			t.records[n] = map[job.Model]arrived{}
		}
		b := t.records[n][m]
		b.add(all.times(part))
		t.records[n][m] = b
	})
}

// share calls add for each bucket that lies between two moments, with the part of the time that does.
func share(from, to time.Time, length time.Duration, add func(n int64, part float64)) {
	a, b := from.UnixMilli(), to.UnixMilli()
	if b <= a {
		add(bucketOf(to, length), 1)
		return
	}
	size := length.Milliseconds()
	for n := a / size; n*size < b; n++ {
		inside := min(b, (n+1)*size) - max(a, n*size)
		add(n, float64(inside)/float64(b-a))
	}
}

// forget drops what nobody asks for any more.
func (t *traffic) forget(now time.Time) {
	oldest := bucketOf(now.Add(-scale.RecentFor-2*scale.Bucket), time.Second)
	for m, buckets := range t.recent {
		for n := range buckets {
			if n < oldest {
				delete(buckets, n)
			}
		}
		if len(buckets) == 0 {
			delete(t.recent, m)
		}
	}
	oldest = bucketOf(now.Add(-keepRecords), scale.SeasonBucket)
	for n := range t.records {
		if n < oldest {
			delete(t.records, n)
		}
	}
	for n := range t.blind {
		if n < oldest {
			delete(t.blind, n)
		}
	}
}

// last returns what came in for some models, added up: in the buckets of the last ten minutes, as scale.History.Recent is. lately tells whether anything came in since the last of them.
func (t *traffic) last(now time.Time, models []job.Model) (full []scale.Arrivals, lately bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	end := bucketOf(now.Add(-settled), time.Second) // the first that is not full
	first := max(end-int64(scale.RecentFor/time.Second), bucketOf(t.since, time.Second)+1)
	var seconds []scale.Arrivals
	var all, told arrived // a second may have a share of a job: what it is short of when it is told, the next ones make up for
	for n := first; n < end; n++ {
		one := t.sum(models, n)
		all.add(one)
		s := arrived{all.jobs - told.jobs, all.tokens - told.tokens, one.squares}.at(startOf(n, time.Second))
		told.add(arrived{jobs: float64(s.Jobs), tokens: float64(s.Tokens)})
		seconds = append(seconds, s)
	}
	for n := end; n <= bucketOf(now, time.Second); n++ {
		lately = lately || t.sum(models, n).tokens > 0
	}
	return scale.Buckets(nil, seconds), lately
}

func (t *traffic) sum(models []job.Model, n int64) (sum arrived) {
	for _, m := range models {
		sum.add(t.recent[m][n])
	}
	return sum
}

// record is what came in for a model in a bucket that is recorded.
type record struct {
	bucket int64
	model  job.Model
	arrived
}

// due lists what is to be recorded: the buckets that are over and were heard from their beginning to their end, with zeros for models that had nothing. next is the first bucket that is not over.
func (t *traffic) due(now time.Time, models map[job.Model]bool) (all []record, next int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	next = bucketOf(now.Add(-settled), scale.SeasonBucket)
	first := max(bucketOf(t.since, scale.SeasonBucket)+1, bucketOf(now.Add(-keepRecords), scale.SeasonBucket))
	for n := first; n < next; n++ {
		if t.blind[n] {
			continue
		}
		for m := range models {
			all = append(all, record{n, m, t.records[n][m]})
		}
	}
	return all, next
}
