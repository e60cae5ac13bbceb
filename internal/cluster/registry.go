package cluster

import (
	"cmp"
	"slices"
	"time"
)

// rules are the lengths of time that a death is judged by.
type rules struct {
	// beat is the period of heartbeats, silence after how long without one a member is dead, grace how much more it gets when it may not be its own fault.
	beat, silence, grace time.Duration
}

// gap is the longest pause between two heartbeats of a process that still counts as beating all the while.
func (r rules) gap() time.Duration { return r.silence - r.beat }

// graceBeats is rules.grace in beats: 10 s with heartbeats each second.
const graceBeats = 10

// keepGone is how long who is gone is remembered: for a leader that was elected after the death. It is found again by nobody who comes later.
const keepGone = 15 * time.Minute

// registry is who was heard and when, and the judgement of who is dead. It has neither clock nor network: it is told the time and what happened, so that
// the whole of it can be tested step by step. Its owner guards it.
type registry struct {
	rules     rules
	members   map[string]*member // by Heartbeat.ID
	own       map[string]bool    // Heartbeat.Epoch of this process
	connected bool
	since     time.Time // of the connection, or when this process went on after it had been stopped
	// learns is since when there is a worker that does not know its models yet, without a pause longer than learnsGap, learnsHeard when one was last heard.
	learns, learnsHeard time.Time
}

type member struct {
	Member
	steady time.Time // since when its heartbeats come without a pause longer than rules.gap
	gone   time.Time // when it was found dead, zero while it is alive
	left   bool      // gone by its own farewell
	// charged: gone by its own fault.
	charged bool
}

func newRegistry(r rules, now time.Time) *registry {
	return &registry{rules: r, members: make(map[string]*member), own: make(map[string]bool), connected: true, since: now}
}

// hear takes a heartbeat in and tells whether somebody went by it.
func (r *registry) hear(now time.Time, b beatMessage) (changed bool) {
	m := r.members[b.ID]
	if m == nil {
		m = &member{steady: now}
		r.members[b.ID] = m
	} else if !m.gone.IsZero() || now.Sub(m.Heard) > r.rules.gap() {
		m.steady = now
	}
	m.Member = Member{Heartbeat: b.Heartbeat, Heard: now}
	m.gone, m.left, m.charged = time.Time{}, false, false
	if learns(b.Heartbeat, now) {
		if now.Sub(r.learnsHeard) > learnsGap {
			r.learns = now
		}
		r.learnsHeard = now
	}
	if b.Farewell {
		m.gone, m.left = now, true
	}
	return b.Farewell
}

// link notes whether this process is connected. again says that it is so anew: the silence before counts against nobody.
func (r *registry) link(now time.Time, connected, again bool) {
	if connected && (again || !r.connected) {
		r.since = now
	}
	r.connected = connected
}

// judge finds who is dead now, and tells whether anybody is newly so.
func (r *registry) judge(now time.Time) (changed bool) {
	for id, m := range r.members {
		switch {
		case !m.gone.IsZero():
			if now.Sub(m.gone) > keepGone {
				delete(r.members, id)
			}
		case now.Sub(m.Heard) >= r.rules.silence:
			if dead, charged := r.silent(now, m.Epoch, m.Heard, m.Heard); dead {
				m.gone, m.charged, changed = now, charged, true
			}
		}
	}
	return changed
}

// silent decides on a member of the process epoch that was last heard at heard (zero: never) and is missed from the time `from` on.
func (r *registry) silent(now time.Time, epoch string, heard, from time.Time) (dead, charged bool) {
	if !r.connected {
		return false, false
	}
	if from.Before(r.since) {
		from = r.since
	}
	quiet := now.Sub(from)
	if quiet < r.rules.silence {
		return false, false
	}
	known := !heard.IsZero()
	witness, alone := r.witnesses(now, epoch, from)
	if known && heard.Before(r.since) {
		// It was there before the cut and has not come back: others may be slower to reconnect than this process.
		return quiet >= r.rules.silence+r.rules.grace, false
	}
	if witness {
		return true, known
	}
	// Nobody else was heard all the while. If there is nobody else but this process, which hears itself, then NATS works; otherwise all fell silent at once.
	return alone || quiet >= r.rules.silence+r.rules.grace, false
}

// witnesses tells whether a process that is neither epoch nor this one has been heard without a pause from `from` until now; and whether this process alone
// has, there being no other.
func (r *registry) witnesses(now time.Time, epoch string, from time.Time) (witness, alone bool) {
	self, others := false, false
	for _, m := range r.members {
		own := r.own[m.Epoch]
		if !m.gone.IsZero() || m.Epoch == epoch && !own {
			continue
		}
		steady := now.Sub(m.Heard) <= r.rules.gap() && !m.steady.After(from.Add(r.rules.beat))
		switch {
		case own:
			self = self || steady
		case steady:
			return true, false
		default:
			others = true
		}
	}
	return false, self && !others
}

// alive lists the members that are not gone, by id.
func (r *registry) alive() []Member {
	list := make([]Member, 0, len(r.members))
	for _, m := range r.members {
		if m.gone.IsZero() {
			list = append(list, m.Member)
		}
	}
	slices.SortFunc(list, func(a, b Member) int { return cmp.Compare(a.ID, b.ID) })
	return list
}

// counts tells whether id counts as dead for an observer who watches from the time `from` on.
func (r *registry) counts(now time.Time, id string, from time.Time) (dead bool) {
	m := r.members[id]
	if m == nil {
		dead, _ = r.silent(now, "", time.Time{}, from)
		return dead
	}
	return !m.gone.IsZero() && (m.left || now.Sub(from) >= r.rules.silence)
}

// deaths lists who is gone for an observer who watches from the time `from` on, but for those told before, in the order of their going. told is kept up to date:
// by id, when the death was found that was told. later is when the next one counts that does not yet, zero if there is none.
func (r *registry) deaths(now, from time.Time, told map[string]time.Time) (list []Death, later time.Time) {
	var found []*member
	for id, m := range r.members {
		switch {
		case m.gone.IsZero() || told[id].Equal(m.gone):
		case m.left || now.Sub(from) >= r.rules.silence:
			told[id] = m.gone
			found = append(found, m)
		default:
			later = from.Add(r.rules.silence)
		}
	}
	for id := range told {
		if m := r.members[id]; m == nil || m.gone.IsZero() {
			delete(told, id)
		}
	}
	slices.SortFunc(found, func(a, b *member) int { return a.gone.Compare(b.gone) })
	for _, m := range found {
		list = append(list, Death{Heartbeat: m.Heartbeat, Farewell: m.left, Charged: m.charged})
	}
	return list, later
}
