package job

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/base32"
	"fmt"
	"strings"
	"time"
)

// ID names a job for ever: "job_" and 36 characters that hold 48 bits of time (milliseconds) and 128 random bits.
// IDs sort by the time of their making.
type ID string

const (
	idPrefix   = "job_"
	idEncoded  = 36 // characters: (6+16) bytes in base 32
	idRawBytes = 22
)

// idEncoding keeps the order of the bytes: its alphabet ascends.
var idEncoding = base32.NewEncoding("0123456789abcdefghijklmnopqrstuv").WithPadding(base32.NoPadding)

// NewID returns a fresh id whose time is now.
func NewID(now time.Time) ID { return ID(newID(idPrefix, now)) }

// NewName returns prefix and an unguessable, time-sortable suffix of the same form as a job's: for objects that are not jobs.
func NewName(prefix string, now time.Time) string { return newID(prefix, now) }

func newID(prefix string, now time.Time) string {
	var raw [idRawBytes]byte
	ms := now.UnixMilli()
	for i := range 6 {
		raw[i] = byte(ms >> (8 * (5 - i)))
	}
	_, _ = rand.Read(raw[6:]) // never fails: it aborts the program instead
	return prefix + idEncoding.EncodeToString(raw[:])
}

// LineID is the id of the job that is line n of a batch: always the same, so that a line that is queued again is known to be the same job. Its time is the batch's.
func LineID(batch string, n int64) ID {
	_, name, _ := strings.Cut(batch, "_")
	raw, err := idEncoding.DecodeString(name)
	if err != nil || len(raw) != idRawBytes { // not a batch of ours: it has no time
		raw = make([]byte, idRawBytes)
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%s/%d", batch, n))
	copy(raw[6:], sum[:])
	return ID(idPrefix + idEncoding.EncodeToString(raw))
}

// ParseID checks that s has an id's form. It says nothing about whether such a job exists.
func ParseID(s string) (ID, error) {
	rest, ok := strings.CutPrefix(s, idPrefix)
	if !ok || len(rest) != idEncoded {
		return "", fmt.Errorf("%q is not a job id", s)
	}
	if _, err := idEncoding.DecodeString(rest); err != nil {
		return "", fmt.Errorf("%q is not a job id", s)
	}
	return ID(s), nil
}

// Time returns when the id was made, or the zero time if it has not an id's form.
func (id ID) Time() time.Time {
	rest, ok := strings.CutPrefix(string(id), idPrefix)
	if !ok || len(rest) != idEncoded {
		return time.Time{}
	}
	raw, err := idEncoding.DecodeString(rest)
	if err != nil {
		return time.Time{}
	}
	var ms int64
	for _, b := range raw[:6] {
		ms = ms<<8 | int64(b)
	}
	return time.UnixMilli(ms)
}
