// Package batch knows the files of batches: the lines that go in, an index of them in the order in which they are to be fed, and the lines that come out. It does no I/O of its own.
//
// # Memory
//
// Scan holds one line, and 16 to 28 bytes for each custom_id. An Indexer holds 18 bytes for each line, and the beginnings of the prompts of one window. Everything else is read or written in pieces: a file of a million
// lines takes some 40 MB while it is validated, and next to nothing afterwards.
package batch

import (
	"crypto/sha256"
	"encoding/binary"

	"github.com/millrace/millrace/internal/job"
)

// IndexPrefix begins the names of the objects that hold indexes.
const IndexPrefix = "batchindex-"

// RetryOf is the metadata key that names the batch whose failed lines a batch repeats.
const RetryOf = "millrace_retry_of"

// MaxCustomID bounds a custom_id in bytes.
const MaxCustomID = 512

// IDs is a set of custom_ids, kept as hashes of 127 bits: two that share one are not found in any set that fits a machine. The zero value is empty. Not safe for concurrent use.
type IDs struct {
	// Each shard grows for itself and by half, so that growing needs little room beside the set: a shard is a hash table with linear probing, at most seven eighths full.
	shards [256]shard
	n      int
}

type shard struct {
	slots []hash
	used  int
}

// hash is never zero: that is a free slot.
type hash [2]uint64

func hashID(id string) hash {
	sum := sha256.Sum256([]byte(id))
	return hash{binary.LittleEndian.Uint64(sum[:]), binary.LittleEndian.Uint64(sum[8:]) | 1}
}

// Add puts id in, and tells whether it was not in yet.
func (s *IDs) Add(id string) bool {
	h := hashID(id)
	sh := &s.shards[h[0]>>56]
	if (sh.used+1)*8 > len(sh.slots)*7 {
		sh.grow()
	}
	if !sh.put(h) {
		return false
	}
	s.n++
	return true
}

// Has tells whether id is in.
func (s *IDs) Has(id string) bool {
	h := hashID(id)
	sh := &s.shards[h[0]>>56]
	if len(sh.slots) == 0 {
		return false
	}
	_, found := sh.find(h)
	return found
}

// Len is how many are in.
func (s *IDs) Len() int { return s.n }

// find returns where h is, or the free slot where it would be put. There always is one.
func (sh *shard) find(h hash) (at int, found bool) {
	for at = int((h[0] << 8 >> 8) % uint64(len(sh.slots))); ; at++ {
		if at == len(sh.slots) {
			at = 0
		}
		switch sh.slots[at] {
		case h:
			return at, true
		case hash{}:
			return at, false
		}
	}
}

func (sh *shard) put(h hash) bool {
	at, found := sh.find(h)
	if !found {
		sh.slots[at] = h
		sh.used++
	}
	return !found
}

func (sh *shard) grow() {
	old := sh.slots
	*sh = shard{slots: make([]hash, max(8, len(old)*3/2))}
	for _, h := range old {
		if h != (hash{}) {
			sh.put(h)
		}
	}
}

// promptField is the field of a body that holds the prompt.
func promptField(e job.Endpoint) string {
	switch e {
	case job.ChatCompletions:
		return "messages"
	case job.Completions:
		return "prompt"
	default:
		return "input"
	}
}
