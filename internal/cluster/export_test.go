package cluster

import "time"

// Registry lets tests step through a registry's life.
type Registry struct {
	r    *registry
	told map[string]time.Time
}

// NewRegistry has the default rules; own is this process.
func NewRegistry(now time.Time, own string) *Registry {
	r := newRegistry(rules{beat: time.Second, silence: 3 * time.Second, grace: 10 * time.Second}, now)
	r.own[own] = true
	return &Registry{r: r, told: make(map[string]time.Time)}
}

func (r *Registry) Hear(now time.Time, h Heartbeat, farewell bool) {
	r.r.hear(now, beatMessage{Heartbeat: h, Farewell: farewell})
}

func (r *Registry) Link(now time.Time, connected, again bool) { r.r.link(now, connected, again) }

// Judge returns the deaths that an observer since `from` is told now.
func (r *Registry) Judge(now, from time.Time) []Death {
	r.r.judge(now)
	list, _ := r.r.deaths(now, from, r.told)
	return list
}

func (r *Registry) Counts(now time.Time, id string, from time.Time) bool {
	return r.r.counts(now, id, from)
}

func (r *Registry) Learning(now time.Time) bool { return r.r.learning(now) }

// Size is how many members are kept.
func (r *Registry) Size() int { return len(r.r.members) }

// Merge is what is remembered of a model with Largest, last claimed at largestSeen, once m has been heard.
func Merge(before KnownModel, largestSeen int64, m KnownModel) (KnownModel, int64) {
	e := modelEntry{KnownModel: before, LargestSeen: largestSeen}.merge(m)
	return e.KnownModel, e.LargestSeen
}
