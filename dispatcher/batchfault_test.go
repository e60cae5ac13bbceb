package dispatcher_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/millrace/millrace/dispatcher"
	"github.com/millrace/millrace/internal/blob"
	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
	"github.com/millrace/millrace/internal/testenv"
)

// faults is what befalls the writes of a leader: fault is asked before and after each, and what it returns is what the leader is told, instead of having the write done, or in spite of it.
type faults struct {
	fault func(write string, after bool) error
}

func (f *faults) around(write string, do func() error) error {
	if err := f.fault(write, false); err != nil {
		return err
	}
	if err := do(); err != nil {
		return err
	}
	return f.fault(write, true)
}

// faultyLedger is a ledger whose writes fail, not applied, or applied but reported as failed.
type faultyLedger struct {
	*ledger.Store
	*faults
}

func (l *faultyLedger) StartBatch(ctx context.Context, epoch uint64, id string, now job.Millis, m job.Model, p []ledger.Portion) (b *ledger.Batch, err error) {
	err = l.around("StartBatch", func() (err error) { b, err = l.Store.StartBatch(ctx, epoch, id, now, m, p); return err })
	return b, err
}

func (l *faultyLedger) RejectBatch(ctx context.Context, epoch uint64, id string, now job.Millis, errs []job.LineError) (b *ledger.Batch, err error) {
	err = l.around("RejectBatch", func() (err error) { b, err = l.Store.RejectBatch(ctx, epoch, id, now, errs); return err })
	return b, err
}

func (l *faultyLedger) Reserve(ctx context.Context, epoch uint64, batch string, m job.Model, confirmed, reserved int64) error {
	return l.around("Reserve", func() error { return l.Store.Reserve(ctx, epoch, batch, m, confirmed, reserved) })
}

func (l *faultyLedger) FinalizeBatch(ctx context.Context, epoch uint64, id string, now job.Millis, late bool) (b *ledger.Batch, err error) {
	err = l.around("FinalizeBatch", func() (err error) { b, err = l.Store.FinalizeBatch(ctx, epoch, id, now, late); return err })
	return b, err
}

func (l *faultyLedger) EndBatch(ctx context.Context, epoch uint64, id string, now job.Millis, done, bad int64, output, errs *ledger.File) (b *ledger.Batch, err error) {
	err = l.around("EndBatch", func() (err error) {
		b, err = l.Store.EndBatch(ctx, epoch, id, now, done, bad, output, errs)
		return err
	})
	return b, err
}

func (l *faultyLedger) Tally(ctx context.Context, epoch uint64, from, to ledger.Position, ended []ledger.Ended) error {
	what := "Tally"
	if len(ended) == 0 {
		what = "Tally of nothing"
	}
	return l.around(what, func() error { return l.Store.Tally(ctx, epoch, from, to, ended) })
}

// faultyBlobs is a store of objects whose writes fail likewise.
type faultyBlobs struct {
	blob.Store
	*faults
}

func (s *faultyBlobs) Put(ctx context.Context, name string, r io.Reader) (n int64, err error) {
	what := "Put file"
	if strings.HasPrefix(name, "batchindex-") {
		what = "Put index"
	} else if strings.HasPrefix(name, "request/") {
		what = "Put request"
	}
	err = s.around(what, func() (err error) { n, err = s.Store.Put(ctx, name, r); return err })
	return n, err
}

// writes are all that a leader writes on a batch's way, but for what goes to the queue and to Redis.
var writes = []string{"Put index", "StartBatch", "Reserve", "Put request", "Tally", "FinalizeBatch", "Put file", "EndBatch"}

// leadWith has a dispatcher lead whose writes go through f.
func (e *env) leadWith(cfg dispatcher.Config, f *faults) *leader {
	e.Helper()
	l := &leader{parts: e.open(), reg: prometheus.NewRegistry()}
	var err error
	l.Dispatcher, err = dispatcher.New(cfg, dispatcher.Deps{
		Queue: l.queue, Blobs: &faultyBlobs{l.blobs, f}, Results: l.results, Cluster: l.cluster, Relay: l.relay, Ledger: l.ledger, Registerer: l.reg, Log: testenv.Log(e),
	})
	e.ok(err)
	l.SetLedger(&faultyLedger{l.ledger, f})
	e.announce(l.parts, cluster.Heartbeat{ID: "dispatcher-" + string(job.NewID(time.Now())), Role: cluster.RoleDispatcher})
	ctx, cancel := context.WithCancel(context.Background())
	var done sync.WaitGroup
	l.cut = cancel
	done.Go(func() { l.Lead(ctx) })
	l.stop = sync.OnceFunc(func() {
		cancel()
		done.Wait()
	})
	e.Cleanup(l.stop)
	return l
}

// largeRequests are n requests, the third of which is too large for a message.
func largeRequests(n int) []string {
	lines := requests(n)
	lines[2] = strings.Replace(lines[2], "prompt 3", "prompt 3"+strings.Repeat(" and more", 40_000), 1)
	return lines
}

// TestBatchOutlivesItsDriverAtEachWrite cuts the leader off at each of its writes, before it and after it, and has another take over.
func TestBatchOutlivesItsDriverAtEachWrite(t *testing.T) {
	t.Parallel()
	const n = 50
	for _, write := range writes {
		for _, after := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, done %v", write, after), func(t *testing.T) {
				t.Parallel()
				e := newEnv(t)
				c := e.crew(model, 2, nil)
				hit := make(chan struct{})
				var l *leader
				ready := make(chan struct{})
				cut := sync.OnceFunc(func() {
					<-ready
					l.cut()
					close(hit)
				})
				l = e.leadWith(quick, &faults{func(w string, a bool) error {
					if w == write && a == after {
						cut()
						return context.Canceled
					}
					return nil
				}})
				close(ready)
				b := e.batch(e.upload(largeRequests(n)))
				select {
				case <-hit:
				case <-time.After(patience):
					t.Fatal("the write never came")
				}
				l.stop()
				e.lead(quick)
				e.files(e.batchEnds(b, ledger.Completed), n)
				c.once(b, n, true)
			})
		}
	}
}

// TestBatchOutlivesFailingWrites has each of the leader's writes fail twice, not applied, and applied but reported as failed.
func TestBatchOutlivesFailingWrites(t *testing.T) {
	t.Parallel()
	const n = 50
	for _, after := range []bool{false, true} {
		t.Run(fmt.Sprintf("done %v", after), func(t *testing.T) {
			t.Parallel()
			e := newEnv(t)
			c := e.crew(model, 2, nil)
			var mu sync.Mutex
			failed := map[string]int{}
			e.leadWith(quick, &faults{func(w string, a bool) error {
				mu.Lock()
				defer mu.Unlock()
				if a != after || failed[w] >= 2 {
					return nil
				}
				failed[w]++
				return fmt.Errorf("%w: a test says so", ledger.ErrUnavailable)
			}})
			b := e.batch(e.upload(largeRequests(n)))
			e.files(e.batchEnds(b, ledger.Completed), n)
			c.once(b, n, true)
			mu.Lock()
			defer mu.Unlock()
			for _, w := range writes {
				if failed[w] == 0 {
					t.Errorf("%s was not made to fail", w)
				}
			}
		})
	}
}

func TestRejectionIsTriedAgain(t *testing.T) {
	t.Parallel()
	for _, after := range []bool{false, true} {
		e := newEnv(t)
		n := 0
		e.leadWith(quick, &faults{func(w string, a bool) error {
			if w != "RejectBatch" || a != after || n == 2 {
				return nil
			}
			n++
			return fmt.Errorf("%w: a test says so", ledger.ErrUnavailable)
		}})
		b := e.batch(e.upload([]string{"prose"}))
		if row := e.batchEnds(b, ledger.Failed); len(row.Errors) != 1 || row.Errors[0].Code != job.CodeInvalidJSONLine {
			t.Errorf("errors %+v", row.Errors)
		}
	}
}

// TestPanicHoldsUpOneBatchAlone has the driver of one batch panic.
func TestPanicHoldsUpOneBatchAlone(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	c := e.crew(model, 2, nil)
	var mu sync.Mutex
	left := 2
	l := e.leadWith(quick, &faults{func(w string, a bool) error {
		mu.Lock()
		defer mu.Unlock()
		if w == "FinalizeBatch" && !a && left > 0 {
			left--
			panic("a test says so")
		}
		return nil
	}})
	one, two := e.batch(e.upload(requests(5))), e.batch(e.upload(requests(5)))
	for _, b := range []*ledger.Batch{one, two} {
		e.files(e.batchEnds(b, ledger.Completed), 5)
		c.once(b, 5, true)
	}
	if n := counter(t, l.reg, "millrace_dispatcher_failures_total", "batch_panic"); n != 2 {
		t.Errorf("%v panics were counted, want 2", n)
	}
}

// counter reads a counter's value by its one label.
func counter(t *testing.T, reg *prometheus.Registry, name, label string) float64 {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == name && len(m.GetLabel()) == 1 && m.GetLabel()[0].GetValue() == label {
				return m.GetCounter().GetValue()
			}
		}
	}
	return 0
}

// TestTwoLeadersDriveOneBatch has an earlier leader go on while another leads: it is fenced, and does no harm.
func TestTwoLeadersDriveOneBatch(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	const n = 50
	reserved := make(chan struct{})
	hold := make(chan struct{})
	var once sync.Once
	first := e.leadWith(quick, &faults{func(w string, a bool) error {
		if w == "Reserve" && a { // it has reserved, and publishes when the other has been at it
			once.Do(func() { close(reserved) })
			<-hold
		}
		return nil
	}})
	b := e.batch(e.upload(requests(n)))
	<-reserved
	second := e.lead(quick)
	c := e.crew(model, 2, nil)
	e.until("a line has ended", func() bool { return e.row(b).Done > 0 })
	close(hold)
	row := e.batchEnds(b, ledger.Completed)
	e.files(row, n)
	c.once(b, n, true)
	if err := first.ledger.Lead(context.Background(), 0); !errors.Is(err, ledger.ErrFenced) {
		t.Errorf("an old leader got %v", err)
	}
	first.stop()
	second.stop()
}
