package emulator

// block is one block of the KV cache. A block with no holder is in the free list; it keeps its name, and so can be reused, until it is taken
// for something else.
type block struct {
	name       uint64 // of its content and all that stands before it; 0 is none
	holders    int32
	prev, next int32 // neighbours in the free list, while it is there
}

// pool is the KV cache: its blocks, the free ones in the order in which they were freed, and the named ones by name.
type pool struct {
	blocks []block // the last one is the free list's end: its next is the oldest free block, its prev the newest
	byName map[uint64]int32
	free   int
}

func newPool(n int) *pool {
	p := &pool{blocks: make([]block, n+1), byName: make(map[uint64]int32), free: n}
	for i := range p.blocks {
		p.blocks[i].prev = int32((i + n) % (n + 1))
		p.blocks[i].next = int32((i + 1) % (n + 1))
	}
	return p
}

func (p *pool) size() int { return len(p.blocks) - 1 }
func (p *pool) used() int { return p.size() - p.free }

// take returns the block that was freed longest ago, under no name. The caller has checked that one is free.
func (p *pool) take() int32 {
	id := p.blocks[p.size()].next
	p.unlink(id)
	p.unname(id)
	p.blocks[id].holders = 1
	return id
}

// hold adds a holder to a block found by name.
func (p *pool) hold(id int32) {
	if p.blocks[id].holders == 0 {
		p.unlink(id)
	}
	p.blocks[id].holders++
}

// release ends the hold of one holder on all of ids. The last block becomes the oldest free one of them: the start of a text is more often
// wanted again than its end.
func (p *pool) release(ids []int32) {
	end := int32(p.size())
	for i := len(ids) - 1; i >= 0; i-- {
		b := &p.blocks[ids[i]]
		if b.holders--; b.holders > 0 {
			continue
		}
		newest := p.blocks[end].prev
		b.prev, b.next = newest, end
		p.blocks[newest].next = ids[i]
		p.blocks[end].prev = ids[i]
		p.free++
	}
}

// name gives a full block its name. A second block with the same content stays without one.
func (p *pool) name(id int32, name uint64) {
	if _, ok := p.byName[name]; !ok && p.blocks[id].name == 0 {
		p.blocks[id].name = name
		p.byName[name] = id
	}
}

// unname takes a block's name away: nobody finds it any more.
func (p *pool) unname(id int32) {
	if b := &p.blocks[id]; b.name != 0 {
		delete(p.byName, b.name)
		b.name = 0
	}
}

func (p *pool) unlink(id int32) {
	b := &p.blocks[id]
	p.blocks[b.prev].next = b.next
	p.blocks[b.next].prev = b.prev
	p.free--
}
