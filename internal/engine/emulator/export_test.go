package emulator

import (
	"bytes"
	"encoding/json"
	"fmt"

	"github.com/millrace/millrace/internal/job"
)

// Check verifies that the core's books agree with each other.
func (c *Core) Check() error {
	p := c.pool
	holders := make([]int32, p.size())
	for _, s := range c.byID {
		for _, id := range s.blocks {
			holders[id]++
		}
		if s.waits && len(s.blocks) > 0 {
			return fmt.Errorf("sequence %d waits and holds %d blocks", s.id, len(s.blocks))
		}
		if !s.waits && s.computed > len(s.blocks)*BlockTokens {
			return fmt.Errorf("sequence %d has %d tokens in %d blocks", s.id, s.computed, len(s.blocks))
		}
	}
	unheld := 0
	for id, n := range holders {
		b := p.blocks[id]
		if b.holders != n {
			return fmt.Errorf("block %d counts %d holders and has %d", id, b.holders, n)
		}
		if n == 0 {
			unheld++
		}
	}
	for name, id := range p.byName {
		if p.blocks[id].name != name {
			return fmt.Errorf("block %d is found by a name that it does not bear", id)
		}
	}
	listed := 0
	for id := p.blocks[p.size()].next; id != int32(p.size()); id = p.blocks[id].next {
		if p.blocks[id].holders != 0 {
			return fmt.Errorf("block %d is free and held", id)
		}
		listed++
	}
	if listed != p.free || unheld != p.free {
		return fmt.Errorf("%d blocks free, %d listed, %d without a holder", p.free, listed, unheld)
	}
	waiting := 0
	for s, before := c.waiting.first, (*sequence)(nil); s != nil; s, before = s.next, s {
		if s.prev != before || !s.waits {
			return fmt.Errorf("sequence %d stands wrong in the waiting line", s.id)
		}
		if c.priorities && before != nil && !s.after(before) {
			return fmt.Errorf("sequence %d waits behind %d", s.id, before.id)
		}
		waiting++
	}
	if waiting != c.waiting.n {
		return fmt.Errorf("%d sequences in the waiting line, %d counted", waiting, c.waiting.n)
	}
	prefilling, pending := 0, 0
	for _, s := range c.running {
		if !s.decoding {
			prefilling++
			pending += s.total() - s.computed
		}
	}
	if prefilling != c.prefilling || pending != c.stats.PrefillPending {
		return fmt.Errorf("%d sequences prefill %d tokens, %d and %d counted", prefilling, pending, c.prefilling, c.stats.PrefillPending)
	}
	if got := len(c.running) + c.waiting.n; got != len(c.byID) {
		return fmt.Errorf("%d sequences in line, %d known", got, len(c.byID))
	}
	return nil
}

// ParseBody checks a body and composes its answer, as a call does.
func ParseBody(ep job.Endpoint, raw []byte) {
	q, refusal := parse(ep, raw, hashStart)
	if refusal != nil {
		_ = refusal.body()
		return
	}
	most, refusal := q.fit(500)
	if refusal != nil {
		return
	}
	m := noMishap()
	e := &Emulator{length: Workloads()[0]}
	answers := e.compose(q, &m, most)
	p := newPage(q, answers, "id", 0, 0)
	if ep == job.Embeddings {
		_ = p.appendEmbeddings(nil)
		return
	}
	whole := p.appendWhole(nil)
	if !json.Valid(whole) {
		panic("invalid answer: " + string(whole))
	}
	for i := range answers {
		for k := range answers[i].ends {
			chunk := p.appendToken(nil, i, k, 0)
			_, data, _ := bytes.Cut(chunk, []byte("data: "))
			if !json.Valid(data) {
				panic("invalid chunk: " + string(chunk))
			}
		}
	}
}
