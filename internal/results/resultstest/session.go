package resultstest

import (
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/results"
)

// session is a binding of a session, which one worker has at a time.
func session(key string, w job.Worker, replace ...job.Worker) results.Binding {
	return results.Binding{Key: key, Worker: w, TTL: time.Minute, Most: 1, Replace: replace}
}

func (e *env) bind(b results.Binding) []job.Worker {
	e.Helper()
	owners, err := e.Bind(e.ctx, b)
	e.ok(err)
	return owners[0]
}

func (e *env) owners(keys ...string) [][]job.Worker {
	e.Helper()
	owners, err := e.Owners(e.ctx, keys...)
	e.ok(err)
	return owners
}

func sessionsBound(e *env) {
	e.same("of a new session", e.owners("s"), [][]job.Worker{nil})
	e.same("bound", e.bind(session("s", "w 1")), []job.Worker{"w 1"})
	e.same("bound again", e.bind(session("s", "w 1")), []job.Worker{"w 1"})
	e.same("refused to another", e.bind(session("s", "w2")), []job.Worker{"w 1"})
	e.same("refused for a third one's place", e.bind(session("s", "w2", "w3")), []job.Worker{"w 1"})
	e.same("moved", e.bind(session("s", "w2", "w3", "w 1")), []job.Worker{"w2"})
	e.same("refused to the old one", e.bind(session("s", "w 1")), []job.Worker{"w2"})
	e.same("of several", e.owners("none", "s", "none"), [][]job.Worker{nil, {"w2"}, nil})
	owners, err := e.Bind(e.ctx, session("a", "w1"), session("s", "w1"), session("b", "w1"))
	e.ok(err)
	e.same("bound at once", owners, [][]job.Worker{{"w1"}, {"w2"}, {"w1"}})
}

func sessionsExpire(e *env) {
	short := session("s", "w1")
	short.TTL = 300 * time.Millisecond
	e.bind(short)
	e.until("the binding ends", func() bool { return len(e.owners("s")[0]) == 0 })
	e.bind(short)
	e.bind(session("s", "w1")) // renewed
	ttl, err := e.raw.PTTL(e.ctx, e.prefix+"cache:s").Result()
	e.ok(err)
	if ttl < 50*time.Second || ttl > time.Minute {
		e.Errorf("a binding that was renewed lives for %v", ttl)
	}
}

func prefixesBound(e *env) {
	bind := func(w job.Worker, replace ...job.Worker) []job.Worker {
		e.Helper()
		return e.bind(results.Binding{Key: "p", Worker: w, TTL: time.Minute, Most: 3, Replace: replace})
	}
	bind("w1")
	bind("w2")
	e.same("three", bind("w3"), []job.Worker{"w3", "w2", "w1"})
	e.same("the latest first", bind("w1"), []job.Worker{"w1", "w3", "w2"})
	e.same("full", bind("w4"), []job.Worker{"w1", "w3", "w2"})
	e.same("one is replaced, the oldest", bind("w4", "w1", "w2"), []job.Worker{"w4", "w1", "w3"})
	e.same("read", e.owners("p"), [][]job.Worker{{"w4", "w1", "w3"}})
}

// sessionsRaced: many find the same dead owner, and each would move the session to itself. One does, and all see who.
func sessionsRaced(e *env) {
	e.bind(session("s", "dead"))
	const racers = 16
	answers := make([][]job.Worker, racers)
	var running sync.WaitGroup
	for i := range racers {
		own := e.Store
		if i%2 == 1 { // another process
			var err error
			own, err = results.Open(e.ctx, results.Config{URL: e.url, Prefix: e.prefix}, slog.New(slog.DiscardHandler))
			e.ok(err)
			defer own.Close()
		}
		running.Go(func() {
			owners, err := own.Bind(e.ctx, session("s", job.Worker(fmt.Sprint("w", i)), "dead"))
			if err != nil {
				e.Error(err)
				return
			}
			answers[i] = owners[0]
		})
	}
	running.Wait()
	won := e.owners("s")[0]
	for _, a := range answers {
		e.same("the owner as each racer sees it", a, won)
	}
	if len(won) != 1 || won[0] == "dead" {
		e.Errorf("the session is bound to %v", won)
	}
}

func sessionsWiped(e *env) {
	e.bind(session("s", "w1"))
	e.wipe()
	e.same("after the wipe", e.owners("s"), [][]job.Worker{nil})
	e.same("bound anew", e.bind(session("s", "w2")), []job.Worker{"w2"})
}
