package resultstest

import (
	"fmt"
	"strings"
	"testing"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/results"
)

// Bench measures the hot paths on the server at url.
func Bench(b *testing.B, url string) {
	b.Run("AcceptQueued", func(b *testing.B) {
		e := newEnv(b, url)
		for b.Loop() {
			e.queued()
		}
	})
	b.Run("Claim", func(b *testing.B) {
		e := newEnv(b, url)
		jobs := make([]*job.Job, 0, 1000)
		for b.Loop() {
			if len(jobs) == 0 {
				b.StopTimer()
				for range cap(jobs) {
					jobs = append(jobs, e.queued())
				}
				b.StartTimer()
			}
			e.claim(request(jobs[len(jobs)-1], "w"), results.Taken)
			jobs = jobs[:len(jobs)-1]
		}
	})
	b.Run("Append", func(b *testing.B) {
		e := newEnv(b, url)
		j := e.queued()
		c := e.claim(request(j, "w"), results.Taken)
		n := c.N
		chunk := `{"choices":[{"delta":{"content":"` + strings.Repeat("x", 150) + `"}}]}`
		for b.Loop() {
			n++
			if n%500 == 0 { // as long as an answer is
				b.StopTimer()
				j = e.queued()
				c = e.claim(request(j, "w"), results.Taken)
				n = c.N + 1
				b.StartTimer()
			}
			e.ok(e.Append(e.ctx, j, tokens(c, n, chunk)))
		}
	})
	b.Run("Finish", func(b *testing.B) {
		e := newEnv(b, url)
		answer := []byte(strings.Repeat("x", 2000))
		type running struct {
			j *job.Job
			c *results.Claim
		}
		jobs := make([]running, 0, 1000)
		for b.Loop() {
			if len(jobs) == 0 {
				b.StopTimer()
				for range cap(jobs) {
					j := e.queued()
					jobs = append(jobs, running{j, e.claim(request(j, "w"), results.Taken)})
				}
				b.StartTimer()
			}
			r := jobs[len(jobs)-1]
			jobs = jobs[:len(jobs)-1]
			e.ok(e.Finish(e.ctx, r.j, completed(r.c, e, 2), answer, nil, nil))
		}
	})
	// What is added before a call goes to a worker: for a session, and for the beginnings of a long prompt.
	for _, keys := range [][]string{{"a"}, {"a", "b", "c", "d", "e", "f", "g", "h"}} {
		b.Run(fmt.Sprint("Owners/", len(keys)), func(b *testing.B) {
			e := newEnv(b, url)
			e.bind(session("a", "w"))
			for b.Loop() {
				e.owners(keys...)
			}
		})
	}
	b.Run("Bind", func(b *testing.B) {
		e := newEnv(b, url)
		for b.Loop() {
			e.bind(session("a", "w"))
		}
	})
}
