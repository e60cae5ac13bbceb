package fairshare

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/millrace/millrace/internal/job"
)

const (
	// DefaultWeight is a tenant's that has none of its own; weights are 1 to MaxWeight.
	DefaultWeight = 100
	MaxWeight     = 1000

	// lapPart is which part of the room one round over all tenants fills at least: with few tenants a turn is worth its while.
	lapPart = 4
	// refillPart is which part of the mark must be missing before a class is filled up: to feed each job by itself costs more.
	refillPart = 8
	// debtMarks bounds a tenant's debt in marks, and leastDebt is what the bound is at least, in tokens.
	debtMarks = 16
	leastDebt = 1 << 20
	// short is the urgency of all batches of the model together from which on time is short.
	short = 0.1
	// mostUrgent bounds how much urgency raises a weight: to 20 times.
	mostUrgent = 0.95
	// mostAbsent is how many tenants without work are remembered for their debts.
	mostAbsent = 4096
)

// Config of a Share. Zero fields get the defaults named.
type Config struct {
	// BatchFloor is the part of the mark that batch work may always fill, 0 to below 1. Default 0.1; negative is none.
	BatchFloor float64
	// Quantum is what one round gives a tenant of weight DefaultWeight, in tokens, at least. Default 512.
	Quantum job.Tokens
}

// Offer is a supply that has work.
type Offer struct {
	Tenant job.Tenant
	// Weight of the tenant, 1 to MaxWeight; what is outside counts as the nearest, 0 as DefaultWeight.
	Weight int
	Class  job.Class
	// Urgency is the share of the model's throughput, 0 to 1, that the supply needs to be done in time; of the batch class alone.
	Urgency float64
}

// Look is what the caller sees of the model at one moment.
type Look struct {
	Now time.Time
	// Mark is how many tokens shall wait before the workers, Waiting how many do, by the class's rank.
	Mark    job.Tokens
	Waiting [3]job.Tokens
	// Throughput of the model in tokens per second; 0 is unknown.
	Throughput float64
}

// Grant lets one supply be fed.
type Grant struct {
	Key    string
	Tenant job.Tenant
	// Class is the one to feed as: of a batch that is short of time it is standard.
	Class job.Class
	// Tokens to feed, 1 at least. The first job may be larger.
	Tokens job.Tokens

	flow *flow
}

// Share is one model's account. Not safe for concurrent use.
type Share struct {
	cfg      Config
	look     Look
	classes  [3]class
	supplies map[string]*supply
	flows    map[flowKey]*flow
	blocked  map[job.Tenant]bool
	urgent   map[string]*supply // those of supplies that have urgency
	out      int                // grants of which nothing is known yet
	open     [3]bool            // classes that are filled up, from this look to the next
}

type flowKey struct {
	class  int
	tenant job.Tenant
}

// class is one class's round.
type class struct {
	round uint64
	// now are those whose turn comes in this round, then those that have had theirs.
	now, then []*flow
	out       int
}

// flow is a tenant in one class.
type flow struct {
	flowKey
	weight  int
	balance job.Tokens // what may be fed; below zero it is debt
	round   uint64     // the last that gave it its quantum
	left    job.Tokens // of what it may be fed in this round: what jobs that end meanwhile give back is for the next
	place   place
	// supplies that have work, in the order in which they came.
	supplies []*supply
	served   float64 // of the supply that has got the least
}

type place int

const (
	nowhere place = iota // nothing to feed, or not allowed to
	inNow
	inThen
	granted
)

// supply is one source of a tenant's work.
type supply struct {
	key     string
	offer   Offer
	flow    *flow // nil while it has no work
	served  float64
	lack    float64 // tokens that it should have got and has not
	hurried bool    // fed as standard
	busy    bool
}

// New validates cfg; the error names field, value and bound.
func New(cfg Config) (*Share, error) {
	if cfg.BatchFloor == 0 {
		cfg.BatchFloor = 0.1
	}
	if !(cfg.BatchFloor < 1) {
		return nil, fmt.Errorf("fairshare: BatchFloor is %v: want less than 1; a negative one is none", cfg.BatchFloor)
	}
	cfg.BatchFloor = max(0, cfg.BatchFloor)
	if cfg.Quantum == 0 {
		cfg.Quantum = 512
	}
	if cfg.Quantum < 1 {
		return nil, fmt.Errorf("fairshare: Quantum is %d: want 1 or more", cfg.Quantum)
	}
	return &Share{cfg: cfg, supplies: map[string]*supply{}, flows: map[flowKey]*flow{}, blocked: map[job.Tenant]bool{}, urgent: map[string]*supply{}}, nil
}

// Look begins a look at the model: what waits there, and how much time has passed for the batches that have deadlines. No grant is out.
func (s *Share) Look(l Look) {
	elapsed := 0.0
	if !s.look.Now.IsZero() {
		elapsed = min(max(0, l.Now.Sub(s.look.Now).Seconds()), 60)
	}
	s.look = l
	total := 0.0
	for _, u := range s.urgent {
		total += u.offer.Urgency
	}
	for _, key := range sortedKeys(s.urgent) {
		u := s.urgent[key]
		// What it lacks is bounded, so that a time without any throughput is not made good by a flood; and so is what it is ahead.
		mark := float64(l.Mark)
		u.lack = min(max(u.lack+u.offer.Urgency*l.Throughput*elapsed, -mark), mark)
		if hurry := u.lack >= 1 && total >= short; hurry != u.hurried {
			u.hurried = hurry
			s.rejoin(u)
		}
	}
	for rank := range s.open {
		whole := l.Mark
		if rank == job.Batch.Rank() && s.cfg.BatchFloor > 0 {
			whole = job.Tokens(s.cfg.BatchFloor * float64(l.Mark))
		}
		room := s.room(rank)
		s.open[rank] = room > 0 && room >= whole/refillPart
	}
}

// Offer tells that a supply has work, or that something about it has changed.
func (s *Share) Offer(key string, o Offer) {
	o.Weight = min(max(cmp.Or(o.Weight, DefaultWeight), 1), MaxWeight)
	o.Urgency = min(max(o.Urgency, 0), 1)
	if o.Class != job.Batch || o.Urgency != o.Urgency { // only batches have deadlines; NaN has no meaning
		o.Urgency = 0
	}
	u := s.supplies[key]
	if u == nil {
		u = &supply{key: key}
		s.supplies[key] = u
	}
	if u.offer.Tenant != o.Tenant || u.offer.Class != o.Class {
		s.leave(u)
	}
	u.offer = o
	if o.Urgency > 0 {
		s.urgent[key] = u
	} else {
		delete(s.urgent, key)
		if u.hurried {
			u.hurried = false
			s.leave(u)
		}
		u.lack = 0
	}
	if u.flow == nil && !u.busy {
		s.join(u)
	}
	if u.flow != nil {
		u.flow.weight = o.Weight
	}
}

// Withdraw tells that a supply has no work for now.
func (s *Share) Withdraw(key string) {
	if u := s.supplies[key]; u != nil {
		s.leave(u)
		delete(s.supplies, key)
		delete(s.urgent, key)
	}
}

// Keep withdraws the supplies of which keep says no.
func (s *Share) Keep(keep func(key string) bool) {
	for key := range s.supplies {
		if !keep(key) {
			s.Withdraw(key)
		}
	}
}

// Block tells whether a tenant may not be fed now. While it may not, it holds no place and gathers no credit.
func (s *Share) Block(t job.Tenant, blocked bool) {
	if s.blocked[t] == blocked {
		return
	}
	if blocked {
		s.blocked[t] = true
	} else {
		delete(s.blocked, t)
	}
	for rank := range s.classes {
		if f := s.flows[flowKey{rank, t}]; f != nil {
			s.place(f)
		}
	}
}

// Settle corrects a tenant's account by a job of its that has ended: what it took instead of what was counted.
func (s *Share) Settle(t job.Tenant, c job.Class, counted, took job.Tokens) {
	if f := s.flows[flowKey{c.Rank(), t}]; f != nil {
		f.balance = s.bounded(f.balance + counted - took)
	}
}

// room is how many tokens of a class may be fed.
func (s *Share) room(rank int) job.Tokens {
	left := s.look.Mark
	for r := range rank + 1 {
		left -= s.look.Waiting[r]
	}
	if rank == job.Batch.Rank() {
		left = max(left, job.Tokens(s.cfg.BatchFloor*float64(s.look.Mark))-s.look.Waiting[rank])
	}
	return left
}

// Next grants the next turn, counted as fed at once. Without one, and with grants out, there may be one when those have come back.
func (s *Share) Next() (Grant, bool) {
	for rank := range s.classes {
		room := s.room(rank)
		if room <= 0 || !s.open[rank] {
			continue
		}
		if f := s.turn(rank, room); f != nil {
			return s.grant(f, room), true
		}
	}
	return Grant{}, false
}

// turn takes the flow whose turn it is from its class's round.
func (s *Share) turn(rank int, room job.Tokens) *flow {
	c := &s.classes[rank]
	for range 2 {
		for len(c.now) > 0 {
			f := c.now[0]
			c.now = c.now[1:]
			if f.balance > 0 && f.left > 0 {
				return f
			}
			f.place = inThen
			c.then = append(c.then, f)
		}
		if c.out > 0 || len(c.then) == 0 { // who is out may have a turn left in this round
			return nil
		}
		s.newRound(c, room)
	}
	return nil
}

// newRound gives each tenant its quantum: several, where all are in debt, so that one can be fed.
func (s *Share) newRound(c *class, room job.Tokens) {
	c.now, c.then = c.then, c.now[:0]
	sum := 0.0
	for _, f := range c.now {
		sum += f.effective()
	}
	rounds := job.Tokens(0)
	for i, f := range c.now {
		q := s.quantum(f, sum, room)
		if n := max(1, 1+(-f.balance)/q); i == 0 || n < rounds {
			rounds = n
		}
	}
	c.round += uint64(rounds)
	for _, f := range c.now {
		q := s.quantum(f, sum, room)
		f.balance = s.bounded(f.balance + rounds*q)
		f.place, f.round, f.left = inNow, c.round, f.balance
	}
}

// quantum is what a round gives to a flow, where all have sum as their weights.
func (s *Share) quantum(f *flow, sum float64, room job.Tokens) job.Tokens {
	w := f.effective()
	return max(1, job.Tokens(float64(s.cfg.Quantum)*w/DefaultWeight), job.Tokens(float64(room)/lapPart*w/sum))
}

// grant lets a flow be fed.
func (s *Share) grant(f *flow, room job.Tokens) Grant {
	u := f.pick()
	tokens := min(f.balance, f.left, room)
	if u.hurried {
		tokens = max(1, min(tokens, job.Tokens(u.lack)))
	}
	u.busy, f.place = true, granted
	s.out++
	s.classes[f.class].out++
	s.count(f, u, tokens)
	return Grant{Key: u.key, Tenant: f.tenant, Class: job.Classes()[f.class], Tokens: tokens, flow: f}
}

// count books tokens as fed; fewer than 0 takes them back.
func (s *Share) count(f *flow, u *supply, tokens job.Tokens) {
	s.look.Waiting[f.class] += tokens
	f.balance = s.bounded(f.balance - tokens)
	f.left -= tokens
	u.served += float64(tokens) * (1 - min(u.offer.Urgency, mostUrgent))
	u.lack -= float64(tokens)
}

// Fed tells what became of a grant: how many tokens were fed, and whether the supply has more. One of which nothing was fed has none for now: it is offered again when it has.
func (s *Share) Fed(g Grant, tokens job.Tokens, more bool) {
	f := g.flow
	s.out--
	s.classes[f.class].out--
	f.place = nowhere
	u := s.supplies[g.Key]
	if u == nil { // withdrawn meanwhile
		s.look.Waiting[f.class] += tokens - g.Tokens
		f.balance = s.bounded(f.balance + g.Tokens - tokens)
		s.place(f)
		return
	}
	u.busy = false
	s.count(f, u, tokens-g.Tokens)
	switch {
	case !more || tokens <= 0:
		s.leave(u)
		delete(s.supplies, g.Key)
		delete(s.urgent, g.Key)
	case u.hurried && u.lack < 1: // it has got what it needs as standard work
		u.hurried = false
		s.leave(u)
		s.join(u)
	case u.flow == nil: // it was offered as another's
		s.join(u)
	}
	s.place(f)
}

// --- who is where ---

// rejoin puts a supply where it belongs now.
func (s *Share) rejoin(u *supply) {
	if u.flow == nil || u.busy {
		return
	}
	s.leave(u)
	s.join(u)
}

// join adds a supply to its tenant's flow.
func (s *Share) join(u *supply) {
	rank := u.offer.Class.Rank()
	if u.hurried {
		rank = job.Standard.Rank()
	}
	key := flowKey{rank, u.offer.Tenant}
	f := s.flows[key]
	if f == nil {
		f = &flow{flowKey: key}
		s.flows[key] = f
	}
	f.weight = u.offer.Weight
	// Who comes later does not get what it has missed.
	if len(f.supplies) > 0 {
		f.served = f.supplies[0].served
		for _, o := range f.supplies {
			f.served = min(f.served, o.served)
		}
	}
	u.served = max(u.served, f.served)
	u.flow = f
	f.supplies = append(f.supplies, u)
	s.place(f)
}

// leave takes a supply out of its flow.
func (s *Share) leave(u *supply) {
	f := u.flow
	if f == nil {
		return
	}
	u.flow = nil
	f.supplies = slices.DeleteFunc(f.supplies, func(o *supply) bool { return o == u })
	f.served = max(f.served, u.served)
	s.place(f)
}

// place puts a flow into the round, or takes it out of it.
func (s *Share) place(f *flow) {
	if f.place == granted {
		return
	}
	c := &s.classes[f.class]
	if s.blocked[f.tenant] || len(f.supplies) == 0 {
		switch f.place {
		case inNow:
			c.now = slices.DeleteFunc(c.now, func(o *flow) bool { return o == f })
		case inThen:
			c.then = slices.DeleteFunc(c.then, func(o *flow) bool { return o == f })
		}
		f.place = nowhere
		f.balance = min(f.balance, 0)
		if len(f.supplies) == 0 {
			s.forget(f)
		}
		return
	}
	if f.place != nowhere {
		return
	}
	if f.round < c.round || c.round == 0 { // it has not had its turn in this round: it is the next
		s.arrive(c, f)
		return
	}
	if f.balance > 0 && f.left > 0 { // the rest of its turn
		f.place = inNow
		c.now = slices.Insert(c.now, 0, f)
		return
	}
	f.place = inThen
	c.then = append(c.then, f)
}

// arrive gives a flow that comes into a round what the others have got in it. Rounds that it was away for pay its debt, and no more.
func (s *Share) arrive(c *class, f *flow) {
	c.round = max(c.round, 1)
	q := max(1, job.Tokens(float64(s.cfg.Quantum)*f.effective()/DefaultWeight))
	missed := job.Tokens(min(c.round-f.round, 1<<20)) - 1
	f.balance = s.bounded(min(0, f.balance+missed*q) + q)
	f.round, f.left, f.place = c.round, f.balance, inNow
	c.now = slices.Insert(c.now, 0, f)
}

// forget drops a flow without work that owes nothing. Debts are remembered, of a bounded number.
func (s *Share) forget(f *flow) {
	if f.balance >= 0 && f.round < s.classes[f.class].round {
		delete(s.flows, f.flowKey)
		return
	}
	if len(s.flows) <= mostAbsent {
		return
	}
	for key, o := range s.flows {
		if o.place == nowhere && len(o.supplies) == 0 {
			delete(s.flows, key)
		}
	}
}

// pick is the flow's supply that has got the least and is not being fed.
func (f *flow) pick() *supply {
	return slices.MinFunc(f.supplies, func(a, b *supply) int { return cmp.Compare(a.served, b.served) })
}

// effective is the weight with the urgency of the flow's batches.
func (f *flow) effective() float64 {
	urgency := 0.0
	for _, u := range f.supplies {
		urgency += u.offer.Urgency
	}
	return float64(f.weight) / (1 - min(urgency, mostUrgent))
}

// bounded keeps an account within its bounds: credit of a mark, debt of several.
func (s *Share) bounded(n job.Tokens) job.Tokens {
	return min(max(n, -max(debtMarks*s.look.Mark, leastDebt)), max(s.look.Mark, s.cfg.Quantum*MaxWeight/DefaultWeight))
}

func sortedKeys(m map[string]*supply) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
