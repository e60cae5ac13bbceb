package batch

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"slices"

	"github.com/millrace/millrace/internal/job"
)

// # The format of an index
//
// All numbers are little endian. The head: the mark, the format's version (2 bytes), the size of an entry (2), the bytes of the list of models (4), the CRC-32 (IEEE) of that list (4); then the list, by name: the bytes of
// the name (4), the name, its lines (8), their tokens (8). Behind it stand the entries of the first model in the order in which they are to be fed, then those of the second, and so on. An entry: offset in the file (6
// bytes), length (4), line (4), tokens (4).
const (
	indexMark    = "millrace-batch\n\x00"
	indexVersion = 1
	indexHead    = len(indexMark) + 12
	entrySize    = 18
	// mostList bounds the list of models that is read.
	mostList = 64 << 20
)

// Entry is one line in an index.
type Entry struct {
	Line, Offset, Length int64
	Tokens               job.Tokens
}

func (e *Entry) encode(to *[entrySize]byte) {
	binary.LittleEndian.PutUint64(to[:], uint64(e.Offset)) // of which the last two bytes are overwritten
	binary.LittleEndian.PutUint32(to[6:], uint32(e.Length))
	binary.LittleEndian.PutUint32(to[10:], uint32(e.Line))
	binary.LittleEndian.PutUint32(to[14:], uint32(min(e.Tokens, math.MaxUint32)))
}

func (e *Entry) decode(from []byte) {
	e.Offset = int64(binary.LittleEndian.Uint64(from) & (1<<48 - 1))
	e.Length = int64(binary.LittleEndian.Uint32(from[6:]))
	e.Line = int64(binary.LittleEndian.Uint32(from[10:]))
	e.Tokens = job.Tokens(binary.LittleEndian.Uint32(from[14:]))
}

// Portion is an index's lines of one model.
type Portion struct {
	Model  job.Model
	Lines  int64
	Tokens job.Tokens
}

// Indexer collects the lines of a file. It keeps some twenty bytes for each. Not safe for concurrent use.
type Indexer struct {
	window   int
	sections map[job.Model]*section
	// pending are the lines of the window that is not full yet; keys holds the beginnings of their prompts, one behind the other.
	pending []pendingEntry
	keys    []byte
}

// section holds the entries of one model.
type section struct {
	portion Portion
	// chunks of whole entries. Each is full but the last.
	chunks [][]byte
}

type pendingEntry struct {
	entry    [entrySize]byte
	section  *section
	from, to int // its key in keys
}

// DefaultWindow is the number of lines within which an Indexer orders them if it is asked for none.
const DefaultWindow = 4096

// keyBytes is how much of the beginning of a prompt decides on the order.
const keyBytes = 1024

// NewIndexer returns an empty one. Lines are ordered within windows of so many lines, so that prompts with the same beginning stand together: an engine then finds the beginning in its KV cache. Lines that begin alike
// keep the order of the file. A file gives the same index each time.
func NewIndexer(window int) *Indexer {
	if window <= 0 {
		window = DefaultWindow
	}
	return &Indexer{window: window, sections: map[job.Model]*section{}}
}

// Add takes a line. Nothing of it is kept but numbers, and its prompt's beginning until its window is full.
func (x *Indexer) Add(l *Line) {
	s := x.sections[l.Model]
	if s == nil {
		s = &section{portion: Portion{Model: l.Model}}
		x.sections[l.Model] = s
	}
	s.portion.Lines++
	s.portion.Tokens += l.Tokens
	p := pendingEntry{section: s, from: len(x.keys)}
	(&Entry{Line: l.Number, Offset: l.Offset, Length: l.Length, Tokens: l.Tokens}).encode(&p.entry)
	for _, part := range l.prompt {
		room := keyBytes - (len(x.keys) - p.from)
		x.keys = append(x.keys, part[:min(len(part), room)]...)
	}
	p.to = len(x.keys)
	x.pending = append(x.pending, p)
	if len(x.pending) >= x.window {
		x.flush()
	}
}

// flush orders the window and moves it to the sections.
func (x *Indexer) flush() {
	slices.SortStableFunc(x.pending, func(a, b pendingEntry) int {
		return bytes.Compare(x.keys[a.from:a.to], x.keys[b.from:b.to])
	})
	for i := range x.pending {
		x.pending[i].section.add(&x.pending[i].entry)
	}
	clear(x.pending) // it holds on to sections
	x.pending, x.keys = x.pending[:0], x.keys[:0]
}

// Chunks grow from the first size to the last, so that neither many small models nor one large one wastes much.
const firstChunk, lastChunk = 16 * entrySize, 4096 * entrySize

func (s *section) add(e *[entrySize]byte) {
	n := len(s.chunks)
	if n == 0 || len(s.chunks[n-1]) == cap(s.chunks[n-1]) {
		size := firstChunk
		if n > 0 {
			size = min(2*cap(s.chunks[n-1]), lastChunk)
		}
		s.chunks = append(s.chunks, make([]byte, 0, size))
		n++
	}
	s.chunks[n-1] = append(s.chunks[n-1], e[:]...)
}

// ordered lists the sections by model.
func (x *Indexer) ordered() []*section {
	all := make([]*section, 0, len(x.sections))
	for _, s := range x.sections {
		all = append(all, s)
	}
	slices.SortFunc(all, func(a, b *section) int { return cmp.Compare(a.portion.Model, b.portion.Model) })
	return all
}

// Portions lists the models, by name.
func (x *Indexer) Portions() []Portion {
	all := make([]Portion, 0, len(x.sections))
	for _, s := range x.ordered() {
		all = append(all, s.portion)
	}
	return all
}

// WriteTo writes the index. It may be called again.
func (x *Indexer) WriteTo(w io.Writer) (int64, error) {
	x.flush()
	sections := x.ordered()
	var list []byte
	for _, s := range sections {
		list = binary.LittleEndian.AppendUint32(list, uint32(len(s.portion.Model)))
		list = append(list, s.portion.Model...)
		list = binary.LittleEndian.AppendUint64(list, uint64(s.portion.Lines))
		list = binary.LittleEndian.AppendUint64(list, uint64(s.portion.Tokens))
	}
	if len(list) > mostList {
		return 0, fmt.Errorf("writing an index: the names of its %d models take %d bytes, at most %d fit", len(sections), len(list), mostList)
	}
	head := make([]byte, 0, indexHead+len(list))
	head = append(head, indexMark...)
	head = binary.LittleEndian.AppendUint16(head, indexVersion)
	head = binary.LittleEndian.AppendUint16(head, entrySize)
	head = binary.LittleEndian.AppendUint32(head, uint32(len(list)))
	head = binary.LittleEndian.AppendUint32(head, crc32.ChecksumIEEE(list))
	n, err := w.Write(append(head, list...))
	total := int64(n)
	for _, s := range sections {
		for _, chunk := range s.chunks {
			if err != nil {
				return total, fmt.Errorf("writing an index: %w", err)
			}
			n, err = w.Write(chunk)
			total += int64(n)
		}
	}
	if err != nil {
		return total, fmt.Errorf("writing an index: %w", err)
	}
	return total, nil
}

// Index reads an index's parts. Safe for concurrent use if its reader is.
type Index struct {
	r        io.ReaderAt
	portions []Portion
	// starts are where the portions' entries begin.
	starts []int64
}

// ErrNotIndex says that a text is no index, or one of a version that this build does not know.
var ErrNotIndex = errors.New("not an index of a batch that this version can read")

// OpenIndex reads the head of an index.
func OpenIndex(r io.ReaderAt) (*Index, error) {
	head := make([]byte, indexHead)
	if err := readFull(r, head, 0); err != nil {
		return nil, fmt.Errorf("reading the head of an index: %w", err)
	}
	mark, rest := head[:len(indexMark)], head[len(indexMark):]
	size := binary.LittleEndian.Uint32(rest[4:])
	if string(mark) != indexMark || binary.LittleEndian.Uint16(rest) != indexVersion || binary.LittleEndian.Uint16(rest[2:]) != entrySize || size > mostList {
		return nil, ErrNotIndex
	}
	list := make([]byte, size)
	if err := readFull(r, list, int64(indexHead)); err != nil {
		return nil, fmt.Errorf("reading the models of an index: %w", err)
	}
	if crc32.ChecksumIEEE(list) != binary.LittleEndian.Uint32(rest[8:]) {
		return nil, fmt.Errorf("the models of an index are damaged: %w", ErrNotIndex)
	}
	x := &Index{r: r}
	for at := int64(indexHead) + int64(size); len(list) > 0; {
		if len(list) < 4 {
			return nil, ErrNotIndex
		}
		n := int64(binary.LittleEndian.Uint32(list))
		if list = list[4:]; n+16 > int64(len(list)) {
			return nil, ErrNotIndex
		}
		p := Portion{Model: job.Model(list[:n]), Lines: int64(binary.LittleEndian.Uint64(list[n:])), Tokens: job.Tokens(binary.LittleEndian.Uint64(list[n+8:]))}
		if p.Lines < 0 || p.Lines > (math.MaxInt64-at)/entrySize {
			return nil, ErrNotIndex
		}
		x.portions, x.starts = append(x.portions, p), append(x.starts, at)
		list, at = list[n+16:], at+p.Lines*entrySize
	}
	return x, nil
}

// Portions lists the models, by name.
func (x *Index) Portions() []Portion { return slices.Clone(x.portions) }

// Entries fills dst with a model's entries from the given place in its order on, and returns how many there were: fewer than dst has room for at the end alone, 0 for a model that is not in the index.
func (x *Index) Entries(m job.Model, from int64, dst []Entry) (int, error) {
	i, found := slices.BinarySearchFunc(x.portions, m, func(p Portion, m job.Model) int { return cmp.Compare(p.Model, m) })
	if !found || from < 0 {
		return 0, nil
	}
	n := int(max(0, min(int64(len(dst)), x.portions[i].Lines-from)))
	if n == 0 {
		return 0, nil
	}
	raw := make([]byte, min(n, 4096)*entrySize)
	for done := 0; done < n; {
		piece := raw[:min(len(raw), (n-done)*entrySize)]
		if err := readFull(x.r, piece, x.starts[i]+(from+int64(done))*entrySize); err != nil {
			return 0, fmt.Errorf("reading entries of an index: %w", err)
		}
		for ; len(piece) > 0; piece = piece[entrySize:] {
			dst[done].decode(piece)
			done++
		}
	}
	return n, nil
}

// readFull fills p from offset on. A reader may say io.EOF with the last bytes.
func readFull(r io.ReaderAt, p []byte, off int64) error {
	n, err := r.ReadAt(p, off)
	switch {
	case n == len(p):
		return nil
	case err == nil, errors.Is(err, io.EOF):
		return io.ErrUnexpectedEOF
	default:
		return err
	}
}
