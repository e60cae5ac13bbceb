package e2e_test

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"sync"
	"syscall"
	"testing"
	"time"
)

// chaosSeed is the order in which things break: another one each time where tests are run over and over, as `make soak` does.
func chaosSeed() uint64 {
	if flag.Lookup("test.count").Value.String() == "1" {
		return 1
	}
	return rand.Uint64()
}

// TestEverythingBreaksInTurn breaks every part in every way, one after the other in random order, under a load of jobs, readers and calls.
func TestEverythingBreaksInTurn(t *testing.T) {
	t.Parallel()
	seed := chaosSeed()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	d := deploy(t, 6)
	second := d.cluster.worker("second", d.engine.URL, plain(6)...)
	standby := d.cluster.dispatcher("standby")
	d.startAll(second, standby)

	stop := make(chan struct{})
	stopped := func() bool {
		select {
		case <-stop:
			return true
		default:
			return false
		}
	}
	var load sync.WaitGroup
	end := sync.OnceFunc(func() { close(stop); load.Wait() })
	defer end()
	var mu sync.Mutex // guards what follows
	var ids []string
	heard := map[string][]event{}
	for n := range 4 {
		load.Go(func() { // one client after the other: submits, and reads to the end over whatever breaks
			for i := 0; !stopped(); i++ {
				key := fmt.Sprintf("chaos-%d-%d", n, i)
				id, ok := d.insist(key, marked("tokens=12,token-delay=60ms", 1000*n+i))
				if !ok {
					return
				}
				mu.Lock()
				ids = append(ids, id)
				mu.Unlock()
				events, err := d.readAll(id)
				if err != nil {
					t.Errorf("reading the events of %s: %v", id, err)
					return
				}
				mu.Lock()
				heard[id] = events
				mu.Unlock()
			}
		})
	}
	load.Go(func() { // and calls on their connection, which may fail, but not lie
		for i := 0; !stopped(); i++ {
			a, err := d.api.send("POST", "/v1/chat/completions", chat(marked("tokens=6,token-delay=30ms", 9000+i), ""))
			switch {
			case err != nil: // its API was killed
				time.Sleep(20 * time.Millisecond) // it is not there, and tells nobody when it is
			case a.status == http.StatusOK && answerText(a.body) == "":
				t.Errorf("a call was answered with %s", a.body)
			case a.status != http.StatusOK && a.code() == "":
				t.Errorf("a call was answered %d with %s", a.status, a.body)
			}
		}
	})

	restart := func(p *process) func() { return p.restart }
	pause := func(p *process, most time.Duration) func() {
		return func() {
			p.pause()
			time.Sleep(time.Duration(random.Int64N(int64(most))))
			p.unpause()
		}
	}
	breaks := []struct {
		name string
		f    func()
	}{
		{"kill worker", restart(d.worker)},
		{"kill second worker", restart(second)},
		{"kill API", restart(d.api.process)},
		{"kill dispatcher", restart(d.dispatcher)},
		{"kill standby", restart(standby)},
		{"kill NATS", restart(d.nats)},
		{"pause NATS", pause(d.nats, 4*time.Second)},
		{"pause worker", pause(d.worker, 6*time.Second)},
		{"pause dispatcher", pause(d.dispatcher, 4*time.Second)},
		{"pause API", pause(d.api.process, 3*time.Second)},
		{"wipe Redis", func() { d.do("FLUSHALL") }},
		{"kill Redis", func() { d.redis.Kill(); d.redis.Start(t) }},
		{"pause Redis", func() {
			d.signalRedis(syscall.SIGSTOP)
			time.Sleep(time.Duration(random.Int64N(int64(3 * time.Second))))
			d.signalRedis(syscall.SIGCONT)
		}},
		{"end worker", func() { second.terminate(patience); second.start() }},
	}
	for _, i := range random.Perm(len(breaks)) {
		b := breaks[i]
		t.Logf("%s %s", time.Now().Format("15:04:05.000"), b.name)
		b.f()
		time.Sleep(time.Duration(random.Int64N(int64(800 * time.Millisecond)))) // chaos keeps no time
	}
	end()
	if t.Failed() {
		return
	}
	nc := connect(t, d.natsURL())
	jobs := exactlyOnce(t, nc, d.api.client, 2*patience, ids...)
	t.Logf("%d jobs", len(ids))
	for _, id := range ids {
		j := jobs[id]
		if j.Status != "completed" && j.Error.code() != "worker_crashed" {
			t.Errorf("job %s is %s after %+v: %+v", id, j.Status, j.Attempts, j.Error)
			continue
		}
		if want := j.text(); told(heard[id]) != want {
			t.Errorf("the reader of %s was told %q, the answer is %q; the events:\n%s", id, told(heard[id]), want, rawOf(heard[id]))
		}
	}
	workEmpty(t, nc)
}

// insist submits under a key until it is taken.
func (d *deployment) insist(key, content string) (id string, ok bool) {
	for deadline := time.Now().Add(patience); ; {
		a, err := d.api.send("POST", "/v1/jobs", submission(chat(content, ""), ""), "Idempotency-Key", key)
		switch {
		case err == nil && a.status == http.StatusAccepted:
			return idOf(d.t, a), true
		case err == nil && a.status != http.StatusServiceUnavailable || time.Now().After(deadline):
			d.t.Errorf("submitting %s: %v %+v", key, err, a)
			return "", false
		}
		time.Sleep(20 * time.Millisecond) // it is away, and tells nobody when it is back
	}
}

// readAll reads a job's events to the end, and resumes as often as the stream breaks off.
func (d *deployment) readAll(id string) ([]event, error) {
	var all []event
	after := int64(0)
	for deadline := time.Now().Add(2 * patience); ; {
		s, err := d.api.events(id, after)
		for err == nil {
			var e event
			if e, err = s.next(); err == nil {
				all = append(all, e)
				if after = e.id; e.kind == "done" {
					s.close()
					return all, nil
				}
			}
		}
		if s != nil {
			s.close()
		}
		if time.Now().After(deadline) {
			if errors.Is(err, io.EOF) {
				err = errors.New("the stream ends again and again without its done")
			}
			return all, err
		}
		time.Sleep(20 * time.Millisecond) // as a client waits before it comes again
	}
}
