package results

import (
	"context"
	"sync"
	"time"

	"github.com/millrace/millrace/internal/job"
)

const clockPeriod = 10 * time.Second

// clock follows another machine's clock by this one's monotonic clock.
type clock struct {
	mu sync.Mutex
	// theirs is their time at ours; both under mu.
	theirs time.Time
	ours   time.Time
}

func (c *clock) now() job.Millis {
	c.mu.Lock()
	defer c.mu.Unlock()
	return job.MillisOf(c.theirs.Add(time.Since(c.ours)))
}

func (c *clock) set(theirs, ours time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.theirs, c.ours = theirs, ours
}

// readTime asks for the store's time. It was read about half-way between asking and hearing, so of several readings the fastest is the best: the first may have had to
// dial.
func (s *Store) readTime(ctx context.Context) error {
	var theirs, ours time.Time
	best := time.Duration(-1)
	for range 3 {
		asked := time.Now()
		t, err := s.db.Time(ctx).Result()
		if err != nil {
			return err
		}
		if took := time.Since(asked); best < 0 || took < best {
			theirs, ours, best = t, asked.Add(took/2), took
		}
	}
	s.clock.set(theirs, ours)
	return nil
}

// keepTime reads the store's time again and again until ctx ends. While the store is away the clock runs on.
func (s *Store) keepTime(ctx context.Context) {
	t := time.NewTicker(clockPeriod)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
			short, cancel := context.WithTimeout(ctx, opTimeout)
			_ = s.readTime(short) // others will say that the store is away; the last reading stays good enough
			cancel()
		}
	}
}
