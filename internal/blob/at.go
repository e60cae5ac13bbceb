package blob

import (
	"fmt"
	"io"
	"sort"
	"sync"
)

// piecesAt reads an object that is stored, or fetched, in pieces. It keeps the one that was read last.
type piecesAt struct {
	name string
	// ends of the pieces in the object; the last one's is the object's size.
	ends []int64
	// fetch returns the bytes of a piece: as many as there should be, or an error.
	fetch func(i int) ([]byte, error)

	mu    sync.Mutex // guards what follows: nobody changes the bytes of a piece
	at    int        // the piece's place, which means nothing without one
	piece []byte
}

// evenPieces are the ends of pieces of one length.
func evenPieces(size, length int64) []int64 {
	ends := make([]int64, 0, (size+length-1)/length)
	for end := length; end < size; end += length {
		ends = append(ends, end)
	}
	if size > 0 {
		ends = append(ends, size)
	}
	return ends
}

// start of piece i in the object.
func (a *piecesAt) start(i int) int64 {
	if i == 0 {
		return 0
	}
	return a.ends[i-1]
}

func (a *piecesAt) read(i int) ([]byte, error) {
	a.mu.Lock()
	at, piece := a.at, a.piece
	a.mu.Unlock()
	if piece != nil && at == i {
		return piece, nil
	}
	piece, err := a.fetch(i)
	if err != nil {
		return nil, err
	}
	if int64(len(piece)) != a.ends[i]-a.start(i) {
		return nil, ErrCorrupt
	}
	a.mu.Lock()
	a.at, a.piece = i, piece
	a.mu.Unlock()
	return piece, nil
}

func (a *piecesAt) ReadAt(p []byte, off int64) (n int, err error) {
	if off < 0 {
		return 0, beforeStart(a.name, off)
	}
	for i := sort.Search(len(a.ends), func(i int) bool { return a.ends[i] > off }); n < len(p); i++ {
		if i >= len(a.ends) {
			return n, io.EOF
		}
		piece, err := a.read(i)
		if err != nil {
			return n, fmt.Errorf("reading object %s: %w", a.name, err)
		}
		n += copy(p[n:], piece[off+int64(n)-a.start(i):])
	}
	return n, nil
}

func (a *piecesAt) Size() int64 {
	if len(a.ends) == 0 {
		return 0
	}
	return a.ends[len(a.ends)-1]
}

func (a *piecesAt) Close() error {
	a.mu.Lock()
	a.piece = nil
	a.mu.Unlock()
	return nil
}

func beforeStart(name string, off int64) error {
	return fmt.Errorf("reading object %s: the offset %d is negative", name, off)
}
