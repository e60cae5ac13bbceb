package engine

import (
	"bytes"
	"fmt"
	"slices"
)

// node is a value that grows chunk by chunk. Strings, numbers and elements are kept as the raw text that came, so nothing is rounded or escaped anew, and a pair of
// surrogates split over two chunks joins.
type node struct {
	kind    nodeKind
	text    []byte // raw: the value; joined: the string without its quotes; list: the elements parted by commas
	members []member
	items   []item
}

type nodeKind byte

const (
	nodeAbsent nodeKind = iota
	nodeRaw             // a number, true, false, null
	nodeString
	nodeList  // an array whose elements are only ever added
	nodeItems // an array of objects that grow, each known by its index
	nodeObject
)

type member struct {
	key string
	node
}

// item is an element with its index, or -1 if it told none.
type item struct {
	index int
	node
}

// nodeSize is what a node counts beside its text, in bytes.
const nodeSize = 96

// growth merges values into nodes and counts what they hold.
type growth struct {
	size, limit int64
}

func (g *growth) add(n int) error {
	g.size += int64(n)
	if g.size > g.limit {
		return fmt.Errorf("assembling an answer: %w: over %d bytes", ErrTooLarge, g.limit)
	}
	return nil
}

// become makes n an empty value of kind, unless it is of that kind already.
func (g *growth) become(n *node, kind nodeKind) {
	if n.kind != kind {
		g.size -= int64(len(n.text))
		*n = node{kind: kind, text: n.text[:0]}
	}
}

// set makes n's text raw.
func (g *growth) set(n *node, kind nodeKind, raw []byte) error {
	g.become(n, kind)
	grown := len(raw) - len(n.text)
	n.text = append(n.text[:0], raw...)
	return g.add(grown)
}

func (g *growth) member(n *node, key []byte) (*node, error) {
	for i := range n.members {
		if n.members[i].key == string(key) {
			return &n.members[i].node, nil
		}
	}
	n.members = append(n.members, member{key: string(key)})
	return &n.members[len(n.members)-1].node, g.add(nodeSize + len(key))
}

func (g *growth) item(n *node, index int) (*node, error) {
	if index >= 0 {
		for i := len(n.items) - 1; i >= 0; i-- { // most often the last
			if n.items[i].index == index {
				return &n.items[i].node, nil
			}
		}
	}
	n.items = append(n.items, item{index: index})
	return &n.items[len(n.items)-1].node, g.add(nodeSize)
}

// merge adds a chunk's value to n. null changes nothing that is there; numbers and booleans replace; objects merge by member; elements are added. With pieces, strings
// are pieces of a text and join, and elements that tell an index merge with the one of that index; without, a string replaces (unless it is empty).
func (g *growth) merge(n *node, raw []byte, pieces bool) error {
	switch raw[0] {
	case 'n':
		if n.kind == nodeAbsent {
			return g.set(n, nodeRaw, raw)
		}
		return nil
	case '"':
		text := raw[1 : len(raw)-1]
		switch {
		case n.kind == nodeString && len(text) == 0:
			return nil
		case pieces && n.kind == nodeString:
			n.text = append(n.text, text...)
			return g.add(len(text))
		}
		return g.set(n, nodeString, text)
	case '{':
		g.become(n, nodeObject)
		for key, value := range members(raw) {
			m, err := g.member(n, key)
			if err != nil {
				return err
			}
			if err := g.merge(m, value, pieces && !isName(key)); err != nil {
				return err
			}
		}
		return nil
	case '[':
		return g.mergeList(n, raw, pieces)
	}
	return g.set(n, nodeRaw, raw)
}

func (g *growth) mergeList(n *node, raw []byte, pieces bool) error {
	inner := bytes.TrimSpace(raw[1 : len(raw)-1])
	indexed := n.kind == nodeItems
	if !indexed && pieces && len(inner) > 0 && len(n.text) == 0 {
		_, indexed = indexOf(firstElement(raw))
	}
	if !indexed {
		if g.become(n, nodeList); len(inner) == 0 {
			return nil
		}
		if len(n.text) > 0 {
			n.text = append(n.text, ',')
		}
		n.text = append(n.text, inner...)
		return g.add(len(inner) + 1)
	}
	g.become(n, nodeItems)
	for element := range elements(raw) {
		index, ok := indexOf(element)
		if !ok {
			index = -1
		}
		it, err := g.item(n, index)
		if err != nil {
			return err
		}
		if err := g.merge(it, element, true); err != nil {
			return err
		}
	}
	return nil
}

func firstElement(raw []byte) []byte {
	for e := range elements(raw) {
		return e
	}
	return nil
}

// isName tells whether a member names something rather than being a piece of text: engines say it once, or say all of it again.
func isName(key []byte) bool {
	switch string(key) {
	case "role", "id", "type", "name", "format", "status":
		return true
	}
	return false
}

// holds tells whether the value is text, or an object or list that is not empty.
func (n *node) holds() bool {
	for i := range n.members {
		if n.members[i].holds() {
			return true
		}
	}
	return len(n.items) > 0 || (n.kind == nodeString || n.kind == nodeList) && len(n.text) > 0
}

// write appends the value's JSON; an object among items goes without the member named drop.
func (n *node) write(out []byte, drop string) []byte {
	switch n.kind {
	case nodeString:
		out = append(out, '"')
		out = append(out, n.text...)
		return append(out, '"')
	case nodeList:
		out = append(out, '[')
		out = append(out, n.text...)
		return append(out, ']')
	case nodeItems:
		out = append(out, '[')
		for i := range n.items {
			if i > 0 {
				out = append(out, ',')
			}
			it := &n.items[i]
			if it.kind == nodeObject {
				out = it.writeObject(out, func(key string) bool { return key == drop })
			} else {
				out = it.write(out, "")
			}
		}
		return append(out, ']')
	case nodeObject:
		return n.writeObject(out, func(string) bool { return false })
	case nodeRaw:
		return append(out, n.text...)
	}
	return append(out, "null"...)
}

func (n *node) writeObject(out []byte, skip func(key string) bool) []byte {
	w := objectWriter{out: append(out, '{')}
	for i := range n.members {
		if m := &n.members[i]; !skip(m.key) {
			w.member(m.key, &m.node)
		}
	}
	return append(w.out, '}')
}

// get returns the member's node, nil if there is none.
func (n *node) get(key string) *node {
	i := slices.IndexFunc(n.members, func(m member) bool { return m.key == key })
	if i < 0 {
		return nil
	}
	return &n.members[i].node
}

// objectWriter writes the members of an object, whose braces are its user's.
type objectWriter struct {
	out  []byte
	some bool
}

func (w *objectWriter) key(raw string) {
	if w.some {
		w.out = append(w.out, ',')
	}
	w.some = true
	w.out = append(w.out, '"')
	w.out = append(w.out, raw...)
	w.out = append(w.out, '"', ':')
}

func (w *objectWriter) member(key string, n *node) {
	w.key(key)
	w.out = n.write(w.out, "")
}
