package schedule

import (
	"container/list"
	"math"

	"github.com/millrace/millrace/internal/job"
)

const (
	// maxKeys bounds how many histograms are kept: the least recently used go first.
	maxKeys = 1024
	// enough samples make a histogram worth asking before a broader one.
	enough = 8
	// memory is how many samples a histogram holds before all count half, so that it follows what changes.
	memory = 512
	// growth of a bucket's bound over the one before; buckets of them reach beyond a million tokens.
	bucketGrowth = 1.25
	buckets      = 64
)

// kin is who asks: answers' lengths are alike within a batch, less so within a tenant, least within a model.
type kin struct {
	model  job.Model
	tenant job.Tenant
	group  string
}

// lengths learns how long answers are: a running histogram for each model, tenant and batch. Its memory is bounded.
type lengths struct {
	fallback job.Tokens
	byKin    map[kin]*list.Element // of *histogram
	recent   *list.List            // the most recently used in front
}

// histogram counts lengths in buckets that grow geometrically.
type histogram struct {
	kin    kin
	counts [buckets]float64
	total  float64
}

func newLengths(fallback job.Tokens) *lengths {
	return &lengths{fallback: fallback, byKin: map[kin]*list.Element{}, recent: list.New()}
}

// kins are those of a, the nearest first.
func kins(a *Ask) [3]kin {
	k := [3]kin{{a.Model, a.Tenant, a.Group}, {a.Model, a.Tenant, ""}, {a.Model, "", ""}}
	if a.Group == "" || a.Group == job.NoGroup {
		k[0] = k[1]
	}
	return k
}

// learn counts one whole answer.
func (l *lengths) learn(a *Ask, n job.Tokens) {
	all := kins(a)
	for i, k := range all {
		if i > 0 && k == all[i-1] {
			continue
		}
		e := l.byKin[k]
		if e == nil {
			if len(l.byKin) >= maxKeys {
				oldest := l.recent.Back()
				delete(l.byKin, oldest.Value.(*histogram).kin)
				l.recent.Remove(oldest)
			}
			e = l.recent.PushFront(&histogram{kin: k})
			l.byKin[k] = e
		}
		l.recent.MoveToFront(e)
		e.Value.(*histogram).add(n)
	}
}

// quantile is the length that a share q of answers like a's do not exceed, within a's own limit.
func (l *lengths) quantile(a *Ask, q float64) job.Tokens {
	n := l.fallback
	for _, k := range kins(a) {
		e := l.byKin[k]
		if e == nil {
			continue
		}
		if h := e.Value.(*histogram); h.total >= enough {
			n = h.quantile(q)
			break
		}
	}
	if a.Cost.Output > 0 {
		n = min(n, a.Cost.Output)
	}
	return max(n, 1)
}

func (h *histogram) add(n job.Tokens) {
	if h.total >= memory {
		for i := range h.counts {
			h.counts[i] /= 2
		}
		h.total /= 2
	}
	i := 0
	if n > 1 {
		i = min(buckets-1, int(math.Ceil(math.Log(float64(n))/math.Log(bucketGrowth)-1e-9)))
	}
	h.counts[i]++
	h.total++
}

func (h *histogram) quantile(q float64) job.Tokens {
	rest := q * h.total
	for i, c := range h.counts {
		if rest -= c; rest <= 1e-9 {
			return job.Tokens(math.Ceil(math.Pow(bucketGrowth, float64(i)) - 1e-9))
		}
	}
	return job.Tokens(math.Pow(bucketGrowth, buckets-1))
}
