// Package blob keeps large bytes by name: files, and request bodies and answers that do not fit a message. They are in the JetStream Object Store, in a folder, or in S3.
//
// An object is visible only once all of it is durable, and its bytes are checked against a SHA-256 digest when they are read: a reader gets the whole
// object or an error, never less with success. Names are meant to be used once: of two Puts of one name at a time either may stay, whole.
package blob

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"time"
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
	// OpenAt opens an object to read parts of it, in any order, by several at a time. ctx bounds all the reading. The parts are not compared with the object's digest: whoever must be sure of all its bytes
	// reads it once with Get before. What is found to be missing or cut is ErrCorrupt.
	OpenAt(ctx context.Context, name string) (At, error)
	// Delete removes an object; one that is not there is no error.
	Delete(ctx context.Context, name string) error
	// List calls fn with the name and modification time of every object.
	List(ctx context.Context, fn func(Info) error) error
	// Tidy removes the parts of objects that crashed writers began before that time and never made visible: they take space, and List does not show them.
	Tidy(ctx context.Context, before time.Time) error
}

// At reads parts of one object. It holds little memory, so that it may stay open for long.
type At interface {
	// ReadAt is as in io.ReaderAt: fewer bytes than asked come with an error, which is io.EOF at the object's end.
	io.ReaderAt
	Size() int64
	io.Closer
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
	digest func() ([]byte, error) // called once, at the end
	end    error                  // what every Read after the end returns
}

func newVerifier(name string, r io.Reader, size int64, digest func() ([]byte, error)) *verifier {
	return &verifier{name: name, r: r, sum: sha256.New(), left: size, digest: digest}
}

func (v *verifier) Read(p []byte) (int, error) {
	if v.end != nil {
		return 0, v.end
	}
	n, err := v.r.Read(p)
	v.sum.Write(p[:n])
	v.left -= int64(n)
	if errors.Is(err, io.EOF) || v.left < 0 {
		err = v.check()
	}
	v.end = err
	return n, err
}

func (v *verifier) check() error {
	if v.left == 0 {
		digest, err := v.digest()
		if err != nil {
			return err
		}
		if bytes.Equal(digest, v.sum.Sum(nil)) {
			return io.EOF
		}
	}
	return fmt.Errorf("reading object %s: %w", v.name, ErrCorrupt)
}

// known is the digest of an object that is known before it is read.
func known(digest []byte) func() ([]byte, error) {
	return func() ([]byte, error) { return digest, nil }
}
