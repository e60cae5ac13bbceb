package batch

import (
	"io"
	"time"

	"github.com/millrace/millrace/internal/engine/emulator"
)

// NewInput is newInput, Size what it says of its length.
func NewInput(cfg Config) interface {
	io.ReadSeeker
	Size() int64
} {
	return newInput(cfg)
}

// Ideal is ideal for lines of one size.
func IdealOf(p emulator.Profile, engines, lines, prompt, output int) time.Duration {
	all := make([]size, lines)
	for i := range all {
		all[i] = size{prompt, output}
	}
	return ideal(p, engines, all, nil)
}

// Count tallies the lines of a file of n.
func Count(n int, ok bool, files ...io.Reader) (Counts, error) {
	t := newTally(n)
	for _, f := range files {
		if err := t.lines(f, ok); err != nil {
			return Counts{}, err
		}
	}
	return t.counts(), nil
}

// Listening is what output finds in a log written in pieces.
func Listening(pieces ...string) (addr, last string) {
	o := &output{found: make(chan string, 1)}
	for _, p := range pieces {
		_, _ = o.Write([]byte(p))
	}
	select {
	case addr = <-o.found:
	default:
	}
	return addr, string(o.last())
}
