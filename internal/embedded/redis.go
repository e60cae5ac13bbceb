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
	r.ended.Go(r.tick)
	return r, nil
}

// tick moves the store's clock, which does not run by itself: keys expire by it.
func (r *Redis) tick() {
	const period = 100 * time.Millisecond
	t := time.NewTicker(period)
	defer t.Stop()
	last := time.Now()
	for {
		select {
		case now := <-t.C:
			r.mini.FastForward(now.Sub(last))
			last = now
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
