package embedded

import (
	"crypto/rand"
	"fmt"
	"sync"
	"time"

	"github.com/alicebob/miniredis/v2"
)

// Redis is a Redis-compatible store in memory. It starts empty each time: whoever uses it rebuilds it from JetStream.
type Redis struct {
	mini     *miniredis.Miniredis
	password string
	stop     chan struct{}
	ended    sync.WaitGroup
}

// StartRedis listens on a free loopback port, behind a random password.
func StartRedis() (*Redis, error) {
	r := &Redis{mini: miniredis.NewMiniRedis(), password: rand.Text(), stop: make(chan struct{})}
	r.mini.RequireAuth(r.password)
	if err := r.mini.StartAddr("127.0.0.1:0"); err != nil {
		return nil, fmt.Errorf("starting the embedded Redis: %w", err)
	}
	if err := startScripts(r.mini, r.password); err != nil {
		r.mini.Close()
		return nil, fmt.Errorf("starting the embedded Redis: %w", err)
	}
	r.ended.Go(r.tick)
	return r, nil
}

// tick moves the store's clock, which does not run by itself: keys expire by it, up to one step early. A step goes through all keys, sorted, and holds up the store
// meanwhile, 1 to 2 ms for a thousand: so it comes every 100 ms to a small store, and to a large one as often as costs half a percent of its time, but no later than every 5 s: on a busy
// machine a step only seems to take long.
func (r *Redis) tick() {
	const period, longest = 100 * time.Millisecond, 5 * time.Second
	last := time.Now()
	t := time.NewTimer(period)
	defer t.Stop()
	for {
		select {
		case <-t.C:
			now := time.Now()
			r.mini.FastForward(now.Sub(last))
			last = now
			t.Reset(min(max(period, 200*time.Since(now)), longest))
		case <-r.stop:
			return
		}
	}
}

// URL to connect to, with the password.
func (r *Redis) URL() string { return "redis://:" + r.password + "@" + r.mini.Addr() }

// Wipe drops everything, as FLUSHALL does.
func (r *Redis) Wipe() { r.mini.FlushAll() }

// Close stops the store.
func (r *Redis) Close() {
	close(r.stop)
	r.ended.Wait()
	r.mini.Close()
}
