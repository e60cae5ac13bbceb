// Package blob keeps large bytes by name: request bodies and answers that do not fit a message.
package blob

import (
	"context"
	"errors"
	"io"

	"github.com/nats-io/nats.go"
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

// OpenJetStream keeps objects in the JetStream Object Store bucket "blobs", created with replicas if missing.
func OpenJetStream(ctx context.Context, nc *nats.Conn, replicas int) (Store, error) { panic("blob") }

// OpenDir keeps objects as files below dir: written to a temporary name, synced, renamed, and the folder synced.
func OpenDir(dir string) (Store, error) { panic("blob") }
