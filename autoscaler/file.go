package autoscaler

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"

	"github.com/millrace/millrace/internal/scale"
)

// poolsFile follows a file of pools. It is read each time, for it is small, and a changed file may look unchanged to whoever compares times.
type poolsFile struct {
	path string
	log  *slog.Logger
	// seen is what the last look found, and is judged once a second look finds the same: an editor may be in the middle of writing it.
	seen   []byte
	judged bool
	lost   bool // it could not be read

	mu      sync.Mutex // guards what follows
	pools   []scale.Pool
	version int // rises with each change of pools
	// bad: the file cannot be used as it is. refused: the database does not take its pools.
	bad, refused bool
}

// openPoolsFile reads the file for the first time; path "" is a file without pools. One that cannot be used is an error.
func openPoolsFile(path string, log *slog.Logger) (*poolsFile, error) {
	f := &poolsFile{path: path, log: log, version: 1, judged: true}
	if path == "" {
		return f, nil
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("reading the pools file: %w", err)
	}
	f.seen = text
	if f.pools, err = parsePools(text); err != nil {
		return nil, fmt.Errorf("reading the pools file %s: %w", path, err)
	}
	return f, nil
}

func parsePools(text []byte) ([]scale.Pool, error) {
	if len(bytes.TrimSpace(text)) == 0 {
		return nil, errors.New("it is empty: write `pools: []` if there shall be none")
	}
	pools, err := scale.ParsePools(text)
	if err != nil {
		return nil, err
	}
	for i := range pools { // a file has nothing kept that a hidden value could stand for
		if err := pools[i].Unhide(nil); err != nil {
			return nil, fmt.Errorf("pool %q: %w", pools[i].Name, err)
		}
	}
	return pools, nil
}

// look reads the file again. One that cannot be used leaves the pools as they were, and is told once.
func (f *poolsFile) look() {
	if f.path == "" {
		return
	}
	text, err := os.ReadFile(f.path)
	if err != nil {
		if !f.lost {
			f.log.Warn("the pools file cannot be read: its pools stay as they were", "file", f.path, "err", err)
		}
		f.lost = true
		f.set(nil, false)
		return
	}
	if f.lost {
		f.lost, f.judged = false, false
	}
	if !bytes.Equal(text, f.seen) {
		f.seen, f.judged = text, false
		return
	}
	if f.judged {
		return
	}
	f.judged = true
	pools, err := parsePools(text)
	if err != nil {
		f.log.Warn("the pools file cannot be used: its pools stay as they were", "file", f.path, "err", err)
		f.set(nil, false)
		return
	}
	f.log.Info("the pools file was read again", "file", f.path, "pools", len(pools))
	f.set(pools, true)
}

func (f *poolsFile) set(pools []scale.Pool, good bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.bad = !good
	if good {
		f.pools, f.refused = pools, false
		f.version++
	}
}

// mark notes whether the database takes the pools, if they are still those of that version. A file that became unusable since stays so.
func (f *poolsFile) mark(version int, refused bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.version == version {
		f.refused = refused
	}
}

func (f *poolsFile) current() (pools []scale.Pool, version int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.pools, f.version
}

func (f *poolsFile) invalid() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.bad || f.refused
}
