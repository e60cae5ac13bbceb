package dispatcher

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/fairshare"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/relay"
)

const (
	feedPause   = 10 * time.Millisecond // from the end of a look at a model to the next
	feedTimeout = 10 * time.Second      // of what one supply is asked
	// suppliesAtOnce of a model are read or fed side by side.
	suppliesAtOnce = 8
	// maxGrant is how many jobs one supply is asked for at a time.
	maxGrant = 256
	// A supply that fails is left alone for a while, each time for longer.
	leastRest, mostRest = 250 * time.Millisecond, 10 * time.Second
	// fullFor is how long work has waited before the workers of a model, at every look, when they count as having all that they can take.
	fullFor = 2 * time.Second
	// firstGuess is what a job is expected to need, in tokens, before any was seen.
	firstGuess = 512
	// mostFed is how many jobs of a model are remembered till their end, to settle what they took.
	mostFed = 1 << 16
	// mostSettled is how many ended jobs wait at most to be settled.
	mostSettled = 1 << 14
)

// feeder keeps so much work in the lane that workers pull as they need, and no more: what waits beyond that waits in tenants' lines and batches' files, where whose turn it is can still be decided. Each model is fed by a
// goroutine of its own, so that one that hangs holds up no other. It looks when a job has ended, when a line or a batch has got work, and, in case nobody told, each Sweep.
type feeder struct {
	d       *Dispatcher
	quota   *quota
	batches supplies
	// added gets a value when there is a model whose goroutine has not begun.
	added chan struct{}

	mu     sync.Mutex // guards what follows
	models map[job.Model]*modelFeed
	fresh  []*modelFeed
}

func newFeeder(d *Dispatcher, batches supplies) *feeder {
	f := &feeder{d: d, batches: batches, added: make(chan struct{}, 1), models: map[job.Model]*modelFeed{}}
	f.quota = newQuota(d, f.freed)
	return f
}

// run feeds until ctx ends.
func (f *feeder) run(ctx context.Context) {
	if err := f.d.deps.Relay.OnEnded(ctx, f.wake); err != nil { // the looks do without
		f.d.log.Warn("listening for ended jobs", "err", err)
	}
	if err := f.d.deps.Relay.OnLined(ctx, f.lined); err != nil {
		f.d.log.Warn("listening for waiting lines", "err", err)
	}
	var g sync.WaitGroup
	defer g.Wait()
	g.Go(func() { f.d.loop(ctx, "quota", tenantsEvery, f.quota.refresh) })
	t := time.NewTicker(f.d.cfg.Sweep)
	defer t.Stop()
	for {
		f.mu.Lock()
		for _, m := range f.fresh {
			g.Go(func() { m.run(ctx) })
		}
		f.fresh = nil
		f.mu.Unlock()
		select {
		case <-ctx.Done():
			return
		case <-f.added:
		case <-t.C:
			for _, m := range f.batches.models() {
				f.wake(m)
			}
		}
	}
}

// of is a model's feeder.
func (f *feeder) of(m job.Model) *modelFeed {
	f.mu.Lock()
	defer f.mu.Unlock()
	mf := f.models[m]
	if mf == nil {
		mf = newModelFeed(f, m)
		f.models[m] = mf
		f.fresh = append(f.fresh, mf)
		select {
		case f.added <- struct{}{}:
		default:
		}
	}
	return mf
}

// wake has a model looked at: there may be room, or work. It does not block.
func (f *feeder) wake(m job.Model) { f.of(m).wake() }

// lined notes a line that has got a job.
func (f *feeder) lined(l relay.Lined) {
	if _, err := job.ParseClass(string(l.Class)); err != nil || l.Model == "" {
		return
	}
	m := f.of(l.Model)
	m.stir(queue.Line{Class: l.Class, Lane: queue.TenantLane(l.Tenant)}, false)
	m.wake()
}

// freed has the models looked at where a tenant waits for its limit.
func (f *feeder) freed(t job.Tenant) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, m := range f.models {
		if m.waitsForLimit(t) {
			m.wake()
		}
	}
}

// ended takes an outcome as it was counted, of a durable job or of a call. It does not block.
func (f *feeder) ended(rec *queue.Record) {
	if !rec.Job.Live() {
		f.quota.ended(rec.Job.Tenant, rec.Job.ID)
	}
	f.mu.Lock()
	known := f.models[rec.Job.Model] != nil
	f.mu.Unlock()
	if !known && !f.d.recent(&rec.Outcome) { // of a model that may be served no more
		return
	}
	m := f.of(rec.Job.Model)
	m.ended(rec)
	m.wake()
}

// recent tells whether a job has just ended: a leader that takes over, or could not count for a while, is told of older ends too, which say nothing of how fast work is done now.
func (d *Dispatcher) recent(o *job.Outcome) bool {
	return d.deps.Results.Now()-o.Finished < job.Millis((10 * time.Second).Milliseconds())
}

// seen takes what a look at a model's queue has found, and completes what is told of it.
func (f *feeder) seen(info *cluster.QueueInfo, depth queue.Depth) {
	info.Lines = map[job.Class]int{}
	for l, n := range depth.Lines {
		info.Lines[l.Class] += n
	}
	m := f.of(info.Model)
	for l := range depth.Lines {
		m.stir(l, true)
	}
	full, batches := m.shown()
	info.Quota = full
	info.Lines[job.Batch] += batches
	if len(depth.Lines) > 0 {
		m.wake()
	}
}

// modelFeed feeds one model.
type modelFeed struct {
	f     *feeder
	d     *Dispatcher
	model job.Model
	woken chan struct{}

	mu      sync.Mutex // guards what follows
	lines   map[queue.Line]*line
	settled []settled
	tokens  job.Tokens // expected of the jobs that ended since it was looked at
	limited []job.Tenant
	batches int // supplies of the batch driver that have work

	// The goroutine's own.
	share *fairshare.Share
	slots chan struct{}
	pace  pace
	sizes [3]sizes
	full  time.Time             // since when work has waited before the workers at every look
	fed   map[job.ID]job.Tokens // counted in a tenant's account, and not ended
	rests map[string]rest       // supplies that failed
}

// settled is what an ended job took.
type settled struct {
	id     job.ID
	tenant job.Tenant
	class  job.Class
	took   job.Tokens // less than 0: unknown
}

// rest is till when a supply is left alone.
type rest struct {
	till time.Time
	next time.Duration
}

func newModelFeed(f *feeder, m job.Model) *modelFeed {
	share, err := fairshare.New(fairshare.Config{BatchFloor: f.d.cfg.BatchFloor})
	if err != nil { // complete has checked it
		panic(err)
	}
	return &modelFeed{
		f: f, d: f.d, model: m, woken: make(chan struct{}, 1), lines: map[queue.Line]*line{}, share: share, slots: make(chan struct{}, feedAtOnce),
		fed: map[job.ID]job.Tokens{}, rests: map[string]rest{},
	}
}

func (m *modelFeed) wake() {
	select {
	case m.woken <- struct{}{}:
	default:
	}
}

// stir notes that a line has work. listed: a listing says so, so that a line that was read to its end is read again.
func (m *modelFeed) stir(of queue.Line, listed bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	l := m.lines[of]
	if l == nil {
		l = newLine(m.d, m.model, of, m.slots)
		m.lines[of] = l
	}
	if listed {
		l.listed.Store(true)
	} else {
		l.stirred.Store(true)
	}
}

func (m *modelFeed) ended(rec *queue.Record) {
	j, o := &rec.Job, &rec.Outcome
	s := settled{id: j.ID, tenant: j.Tenant, class: j.Class, took: -1}
	switch {
	case o.Usage != nil:
		s.took = o.Usage.PromptTokens + o.Usage.CompletionTokens
	case o.Started == 0 && o.State != job.Completed:
		s.took = 0
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if o.State == job.Completed && m.d.recent(o) {
		m.tokens += j.Expected()
	}
	if !j.Live() && len(m.settled) < mostSettled {
		m.settled = append(m.settled, s)
	}
}

func (m *modelFeed) waitsForLimit(t job.Tenant) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Contains(m.limited, t)
}

// shown are the tenants that wait for their limit, and how many batches have lines to feed.
func (m *modelFeed) shown() ([]job.Tenant, int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.limited), m.batches
}

// run looks at the model until ctx ends.
func (m *modelFeed) run(ctx context.Context) {
	t := time.NewTimer(m.d.cfg.Sweep)
	defer t.Stop()
	failing := false
	for {
		err := m.turn(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			m.d.metrics.failures.WithLabelValues("feed").Inc()
			if !failing { // once per outage, not once per turn
				m.d.log.Warn("a duty failed: repeating it", "duty", "feed", "model", m.model, "err", err)
			}
			failing = true
		case failing:
			m.d.log.Info("a duty works again", "duty", "feed", "model", m.model)
			failing = false
		}
		t.Reset(feedPause) // what comes in that time is done together
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		t.Reset(m.d.cfg.Sweep)
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		case <-m.woken:
		}
	}
}

// offer is a supply and its next job.
type offer struct {
	supply
	head job.Tokens
	has  bool
	err  error
}

// turn looks once, and feeds what there is room for.
func (m *modelFeed) turn(ctx context.Context) error {
	now := time.Now()
	offers, failed := m.offers(ctx, now)
	m.settle(now)
	if len(offers) == 0 || !m.f.quota.ready() {
		m.full = time.Time{} // nobody looks at what waits
		m.show(nil, 0)
		return failed
	}
	look, err := m.look(ctx, now, offers)
	if err != nil {
		return errors.Join(failed, err)
	}
	m.share.Look(look)
	byName := make(map[string]*offer, len(offers))
	limited := map[job.Tenant]bool{}
	batches := 0
	for _, o := range offers {
		byName[o.name()] = o
		t := o.tenant()
		urgency := 0.0
		if o.class() == job.Batch {
			urgency = o.urgency(look.Throughput)
		}
		if _, ok := o.supply.(*line); !ok {
			batches++
		}
		if !m.f.quota.room(t, o.head) {
			limited[t] = true
		}
		m.share.Offer(o.name(), fairshare.Offer{Tenant: t, Weight: m.f.quota.weight(t), Class: o.class(), Urgency: urgency})
	}
	m.share.Keep(func(name string) bool { return byName[name] != nil })
	for _, o := range offers {
		m.share.Block(o.tenant(), limited[o.tenant()])
	}
	err = m.give(ctx, now, byName, limited)
	m.show(limited, batches)
	return errors.Join(failed, err)
}

func (m *modelFeed) show(limited map[job.Tenant]bool, batches int) {
	m.mu.Lock()
	m.limited, m.batches = slices.Sorted(maps.Keys(limited)), batches
	m.mu.Unlock()
	m.d.metrics.limited.WithLabelValues(string(m.model)).Set(float64(len(limited)))
}

// offers are the supplies that have work, by name. Lines that were read to their end and of which nobody says anything are dropped.
func (m *modelFeed) offers(ctx context.Context, now time.Time) (list []*offer, err error) {
	m.mu.Lock()
	for of, l := range m.lines {
		if l.listed.Swap(false) {
			l.again()
		}
		if l.exhausted() {
			delete(m.lines, of)
			continue
		}
		list = append(list, &offer{supply: l})
	}
	m.mu.Unlock()
	for _, s := range m.f.batches.of(m.model) {
		list = append(list, &offer{supply: s})
	}
	list = slices.DeleteFunc(list, func(o *offer) bool { return now.Before(m.rests[o.name()].till) })
	slices.SortFunc(list, func(a, b *offer) int { return cmp.Compare(a.name(), b.name()) })
	var g errgroup.Group
	g.SetLimit(suppliesAtOnce)
	for _, o := range list {
		g.Go(func() error {
			ctx, cancel := context.WithTimeout(ctx, feedTimeout)
			defer cancel()
			o.head, o.has, o.err = o.supply.head(ctx)
			return nil
		})
	}
	_ = g.Wait() // each has its own error
	var errs []error
	for _, o := range list {
		if m.judge(o.name(), now, o.err); o.err != nil {
			errs = append(errs, o.err)
		}
	}
	return slices.DeleteFunc(list, func(o *offer) bool { return !o.has || o.err != nil }), errors.Join(errs...)
}

// judge gives a supply that has failed a rest, and forgets that of one that has not.
func (m *modelFeed) judge(name string, now time.Time, err error) {
	if err == nil {
		delete(m.rests, name)
		return
	}
	r := m.rests[name]
	r.next = min(max(2*r.next, leastRest), mostRest)
	r.till = now.Add(r.next)
	m.rests[name] = r
}

// settle corrects the tenants' accounts by what ended jobs took, and measures the throughput.
func (m *modelFeed) settle(now time.Time) {
	m.mu.Lock()
	ended, tokens := m.settled, m.tokens
	m.settled, m.tokens = nil, 0
	m.mu.Unlock()
	for _, s := range ended {
		counted, ok := m.fed[s.id]
		if !ok { // it came by another way, and nobody counted it
			continue
		}
		delete(m.fed, s.id)
		if s.took >= 0 {
			m.share.Settle(s.tenant, s.class, counted, s.took)
		}
	}
	m.pace.ended(tokens)
	m.pace.sample(now, !m.full.IsZero())
	m.d.metrics.throughput.WithLabelValues(string(m.model)).Set(m.pace.rate)
}

// look sees how much waits before the workers and how much shall.
func (m *modelFeed) look(ctx context.Context, now time.Time, offers []*offer) (fairshare.Look, error) {
	look := fairshare.Look{Now: now, Throughput: m.pace.rate}
	jobs := 0
	for _, kind := range []queue.Kind{queue.Work, queue.Live} {
		waiting, _, err := m.d.deps.Queue.Shared(ctx, kind, m.model)
		if err != nil {
			return look, err
		}
		for rank, c := range job.Classes() {
			look.Waiting[rank] += m.sizes[rank].of(waiting[c])
			jobs += waiting[c]
		}
	}
	if jobs == 0 {
		m.full = time.Time{}
	} else if m.full.IsZero() {
		m.full = now
	}
	look.Mark = job.Tokens(m.d.cfg.FeedAhead.Seconds() * m.pace.rate)
	if m.full.IsZero() || now.Sub(m.full) < fullFor { // once work waits the room is not real
		look.Mark = max(look.Mark, roomOf(m.d.deps.Cluster.Workers(m.model)))
	}
	look.Mark = max(look.Mark, job.Tokens(m.d.cfg.FeedLeast)*m.mean(offers))
	m.d.metrics.mark.WithLabelValues(string(m.model)).Set(float64(look.Mark))
	return look, nil
}

// mean is what a job is expected to need: of those that were fed last, or of those that are next.
func (m *modelFeed) mean(offers []*offer) job.Tokens {
	sum, n := job.Tokens(0), 0
	for i := range m.sizes {
		sum += m.sizes[i].sum
		n += len(m.sizes[i].last)
	}
	if n == 0 {
		for _, o := range offers {
			sum += o.head
			n++
		}
	}
	return max(1, sum/job.Tokens(max(1, n)))
}

// roomOf is how many tokens the ready workers could take now.
func roomOf(workers []cluster.Member) (free job.Tokens) {
	for _, w := range workers {
		if i := w.Worker; i != nil && i.State == cluster.Ready && i.Brake == "" && i.InHand == 0 && (i.Limit == 0 || i.Running < i.Limit) {
			free += i.Free
		}
	}
	return free
}

// given is what became of a grant.
type given struct {
	grant fairshare.Grant
	offer *offer
	most  int
	upTo  job.Tokens
	head  job.Tokens // before
	moved []fed
	more  bool
	err   error
}

// give feeds turn by turn until there is no room, or no work. Several supplies are fed side by side.
func (m *modelFeed) give(ctx context.Context, now time.Time, offers map[string]*offer, limited map[job.Tenant]bool) error {
	back := make(chan *given)
	out := 0
	var errs []error
	for {
		for out < suppliesAtOnce && ctx.Err() == nil {
			g, ok := m.share.Next()
			if !ok {
				break
			}
			o := offers[g.Key]
			n := &given{grant: g, offer: o, head: o.head}
			if n.most, n.upTo, ok = m.f.quota.lease(g.Tenant, o.head, g.Tokens); !ok {
				m.share.Fed(g, 0, true)
				m.share.Block(g.Tenant, true)
				limited[g.Tenant] = true
				continue
			}
			out++
			go func() {
				m.feed(ctx, n)
				back <- n
			}()
		}
		if out == 0 {
			return errors.Join(errs...)
		}
		n := <-back // each comes within feedTimeout
		out--
		m.f.quota.settle(n.grant.Tenant, n.most, n.head, n.upTo, n.moved)
		m.count(n)
		if m.judge(n.grant.Key, now, n.err); n.err != nil {
			errs = append(errs, n.err)
		}
		var tokens job.Tokens
		for _, f := range n.moved {
			tokens += max(1, f.tokens)
		}
		m.share.Fed(n.grant, tokens, n.more && n.err == nil)
	}
}

// feed carries out a grant.
func (m *modelFeed) feed(ctx context.Context, n *given) {
	ctx, cancel := context.WithTimeout(ctx, feedTimeout)
	defer cancel()
	n.moved, n.err = n.offer.supply.feed(ctx, n.grant.Class, n.most, n.upTo)
	if n.err != nil {
		n.err = fmt.Errorf("feeding model %s: %w", m.model, n.err)
		return
	}
	if head, more, err := n.offer.supply.head(ctx); err == nil { // else the next turn meets it again
		n.offer.head, n.more = head, more
	}
}

// count notes what was fed.
func (m *modelFeed) count(n *given) {
	class := string(n.grant.Class)
	size := &m.sizes[n.grant.Class.Rank()]
	for _, f := range n.moved {
		size.add(f.tokens)
		m.d.metrics.fed.WithLabelValues(string(m.model), class).Inc()
		m.d.metrics.fedTokens.WithLabelValues(string(m.model), class).Add(float64(f.tokens))
		if len(m.fed) >= mostFed { // ends of which nobody told
			clear(m.fed)
		}
		m.fed[f.id] = f.tokens
	}
}
