package worker

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/millrace/millrace/internal/job"
)

// TestLimitFollowsWhatTheEngineTakes: an engine that refuses with 429 what is over its capacity, which steps from 4 to 32 and back, with more work than it can do all the time. Each refused job comes again a second later.
func TestLimitFollowsWhatTheEngineTakes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := openGate(t, 1_000_000, 0, nil)
		defer g.close()
		const jobs, phase = 64, 60 * time.Second
		var (
			mu                          sync.Mutex
			capacity, running           int
			refused, completed, started int
		)
		stop := make(chan struct{})
		var wg sync.WaitGroup
		for range jobs {
			wg.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
					}
					r, err := g.enter(t.Context(), streamed(job.Standard, 16))
					if err != nil {
						t.Error(err)
						return
					}
					mu.Lock()
					full := running >= capacity
					if full {
						refused++
					} else {
						running++
						started++
					}
					mu.Unlock()
					if full {
						r.ended(&reply{status: 429}, failed(job.CodeEngineError, "full"))
						r.release()
						time.Sleep(time.Second)
						continue
					}
					for range 10 {
						time.Sleep(50 * time.Millisecond)
						r.grow(1)
					}
					mu.Lock()
					running--
					completed++
					mu.Unlock()
					r.ended(&reply{status: 200}, nil)
					r.release()
				}
			})
		}
		for _, want := range []int{4, 32, 4} {
			mu.Lock()
			capacity, refused = want, 0
			mu.Unlock()
			time.Sleep(phase / 2)
			mu.Lock()
			before := completed
			mu.Unlock()
			time.Sleep(phase / 2)
			mu.Lock()
			// Each takes half a second.
			if most := want * int(phase/time.Second); completed-before < most*6/10 {
				t.Errorf("with room for %d, %d jobs have run in the second half minute, of %d that could have", want, completed-before, most)
			}
			// All that run at first may be refused, then a few at each second in which the limit has grown once too often.
			if bound := jobs + int(phase/time.Second); refused > bound {
				t.Errorf("with room for %d, %d were refused in a minute, more than %d", want, refused, bound)
			}
			mu.Unlock()
			if limit := g.status().Limit; limit < 1 || limit > 2*want {
				t.Errorf("the limit is %d on an engine with room for %d", limit, want)
			}
		}
		close(stop)
		wg.Wait()
		if tokens, pending, sequences := g.sched.Reserved(); tokens != 0 || pending != 0 || sequences != 0 {
			t.Errorf("left over: %d tokens, %d pending, %d sequences", tokens, pending, sequences)
		}
	})
}
