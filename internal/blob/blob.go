// Package blob keeps large bytes by name: request bodies and answers that do not fit a message.
//
// An object is visible only once all of it is durable, and its bytes are checked against a SHA-256 digest when they are read: a reader gets the whole
// object or an error, never less with success. Names are meant to be used once: of two Puts of one name at a time either may stay, whole.
package blob

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
)

// Errors that callers branch on.
var (
	ErrNotFound    = errors.New("no such object")
	ErrCorrupt     = errors.New("the object's digest does not match")
	ErrUnavailable = errors.New("the object store does not answer")
)

// Threshold is the size in bytes above which bytes go here and not into a message.
const Threshold = 256 << 10

// Store keeps objects.
type Store interface {
	// Put stores r under name and returns its size once all of it is durable. A Put that fails, or is cut, leaves nothing visible.
	Put(ctx context.Context, name string, r io.Reader) (int64, error)
	// Get streams an object. A digest that does not match is ErrCorrupt at the last Read, in place of io.EOF.
	Get(ctx context.Context, name string) (io.ReadCloser, error)
	// Delete removes an object; one that is not there is no error.
	Delete(ctx context.Context, name string) error
	// List calls fn with the name and modification time of every object.
	List(ctx context.Context, fn func(Info) error) error
}

// Info of one object.
type Info struct {
	Name string
	Size int64
	Time int64 // unix milliseconds
}

// maxName bounds an object's name in bytes.
const maxName = 200

func checkName(name string) error {
	if name == "" || len(name) > maxName {
		return fmt.Errorf("an object's name has %d bytes, must have 1 to %d", len(name), maxName)
	}
	return nil
}

// verifier hands out the bytes of r and ends with io.EOF only if there were size of them with that digest.
type verifier struct {
	name   string
	r      io.Reader
	sum    hash.Hash
	left   int64
	digest [sha256.Size]byte
}

func newVerifier(name string, r io.Reader, size int64, digest []byte) *verifier {
	v := &verifier{name: name, r: r, sum: sha256.New(), left: size}
	copy(v.digest[:], digest)
	return v
}

func (v *verifier) Read(p []byte) (int, error) {
	n, err := v.r.Read(p)
	v.sum.Write(p[:n])
	v.left -= int64(n)
	if errors.Is(err, io.EOF) || v.left < 0 {
		if v.left != 0 || [sha256.Size]byte(v.sum.Sum(nil)) != v.digest {
			return n, fmt.Errorf("reading object %s: %w", v.name, ErrCorrupt)
		}
	}
	return n, err
}
