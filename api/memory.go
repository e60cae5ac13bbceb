package api

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"

	"github.com/millrace/millrace/internal/ledger"
)

// patience keeps requests from waiting for a store that does not answer: after a failure one request in each interval asks it, and the others do without.
type patience struct {
	name string
	log  *slog.Logger

	mu    sync.Mutex // guards what follows
	again time.Time  // when the next one may ask; zero while it answers
}

// askAgain is after how long a store that did not answer is asked again.
const askAgain = time.Second

// ask tells whether the caller may ask now. Who does reports by answered.
func (p *patience) ask(now time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.again.IsZero() {
		return true
	}
	if now.Before(p.again) {
		return false
	}
	p.again = now.Add(askAgain) // the others do not wait for this one
	return true
}

// answered notes whether the store has answered.
func (p *patience) answered(ok bool, err error) {
	p.mu.Lock()
	was := !p.again.IsZero()
	if p.again = (time.Time{}); !ok {
		p.again = time.Now().Add(askAgain)
	}
	p.mu.Unlock()
	switch {
	case !ok && !was:
		p.log.Warn("a store does not answer: going on with what is known", "store", p.name, "err", err)
	case ok && was:
		p.log.Info("a store answers again", "store", p.name)
	}
}

// memory keeps for a moment what the ledger has said, so that a request does not cost a query, and so that requests go on for a while when the ledger is away. It is safe for concurrent use.
type memory[V any] struct {
	// fresh is for how long an answer counts; absent the same for the answer that there is no such thing. stale is for how long an answer is used while the ledger does not answer.
	fresh, absent, stale time.Duration
	most                 int // of each kind of answer that is kept
	patience             *patience

	flights singleflight.Group
	mu      sync.Mutex // guards what follows
	there   map[string]said[V]
	missing map[string]time.Time
}

// said is an answer, and when it was asked for.
type said[V any] struct {
	value V
	at    time.Time
}

// askTimeout bounds one question to the ledger.
const askTimeout = 1500 * time.Millisecond

// get returns what the ledger says under key, by fetch or as it is remembered. Its error is ledger.ErrNotFound, or another if nothing is known.
func (m *memory[V]) get(ctx context.Context, key string, fetch func(context.Context) (V, error)) (V, error) {
	now := time.Now()
	known, ok, missing := m.look(key, now)
	switch {
	case missing:
		return known.value, ledger.ErrNotFound
	case ok && now.Sub(known.at) < m.fresh:
		return known.value, nil
	}
	err := ledger.ErrUnavailable
	if m.patience.ask(now) {
		var v any
		v, err, _ = m.flights.Do(key, func() (any, error) { // whose result many may wait for: it is not cut by one client that leaves
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), askTimeout)
			defer cancel()
			at := time.Now() // an answer is as old as its question
			v, err := fetch(ctx)
			answered := err == nil || errors.Is(err, ledger.ErrNotFound)
			m.patience.answered(answered, err)
			if answered {
				m.keep(key, said[V]{v, at}, err == nil)
			}
			return v, err
		})
		if err == nil || errors.Is(err, ledger.ErrNotFound) {
			return v.(V), err
		}
	}
	if ok && now.Sub(known.at) < m.stale {
		return known.value, nil
	}
	return known.value, fmt.Errorf("asking the ledger: %w", err)
}

func (m *memory[V]) look(key string, now time.Time) (known said[V], ok, missing bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if at, found := m.missing[key]; found && now.Sub(at) < m.absent {
		return known, false, true
	}
	known, ok = m.there[key]
	return known, ok, false
}

func (m *memory[V]) keep(key string, s said[V], there bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.there == nil {
		m.there, m.missing = make(map[string]said[V]), make(map[string]time.Time)
	}
	if !there {
		delete(m.there, key)
		if len(m.missing) >= m.most { // they are of use for a second only
			clear(m.missing)
		}
		m.missing[key] = s.at
		return
	}
	delete(m.missing, key)
	if len(m.there) >= m.most {
		maps.DeleteFunc(m.there, func(_ string, old said[V]) bool { return s.at.Sub(old.at) > m.fresh })
	}
	for old := range m.there { // any, if all are fresh
		if len(m.there) < m.most {
			break
		}
		delete(m.there, old)
	}
	m.there[key] = s
}
