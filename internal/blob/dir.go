package blob

import (
	"bufio"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"
)

const (
	// suffix of an object's file. The file is the object's bytes and then the 32 bytes of their SHA-256.
	suffix = ".blob"
	// partDir holds what is being written.
	partDir = "part"
	// partAge is how old a left-over of a crashed writer is when it is removed: far more than any upload takes.
	partAge = 24 * time.Hour
)

type dirStore struct{ dir string }

// OpenDir keeps objects as files below dir: written to a temporary name, synced, renamed, and the folder synced.
func OpenDir(dir string) (Store, error) {
	parts := filepath.Join(dir, partDir)
	if err := os.MkdirAll(parts, 0o700); err != nil {
		return nil, fmt.Errorf("opening the object folder: %w", err)
	}
	s := &dirStore{dir}
	if err := s.Tidy(context.Background(), time.Now().Add(-partAge)); err != nil { // which waits for nothing
		return nil, fmt.Errorf("opening the object folder: %w", err)
	}
	return s, nil
}

func (s *dirStore) Tidy(_ context.Context, before time.Time) error {
	parts := filepath.Join(s.dir, partDir)
	old, err := os.ReadDir(parts)
	if err != nil {
		return fmt.Errorf("looking for parts of objects: %w", unavailable(err))
	}
	for _, e := range old {
		if info, err := e.Info(); err == nil && info.ModTime().Before(before) {
			_ = os.Remove(filepath.Join(parts, e.Name())) // the next look tries again
		}
	}
	return nil
}

// path of an object. Escaping leaves no separator, and the suffix makes "." and ".." plain names.
func (s *dirStore) path(name string) (string, error) {
	if err := checkName(name); err != nil {
		return "", err
	}
	file := url.PathEscape(name) + suffix
	if len(file) > 255 {
		return "", fmt.Errorf("an object's name has %d bytes when escaped, must have at most 255", len(file))
	}
	return filepath.Join(s.dir, file), nil
}

func (s *dirStore) Put(ctx context.Context, name string, r io.Reader) (int64, error) {
	path, err := s.path(name)
	if err != nil {
		return 0, fmt.Errorf("storing an object: %w", err)
	}
	size, err := s.put(ctx, path, r)
	if err != nil {
		return 0, fmt.Errorf("storing object %s: %w", name, err)
	}
	return size, nil
}

func (s *dirStore) put(ctx context.Context, path string, r io.Reader) (size int64, err error) {
	f, err := os.CreateTemp(filepath.Join(s.dir, partDir), "*")
	if err != nil {
		return 0, unavailable(err)
	}
	defer func() {
		if err != nil {
			_ = f.Close()
			_ = os.Remove(f.Name()) // swept when the folder is opened next
		}
	}()
	sum := sha256.New()
	size, err = io.Copy(io.MultiWriter(sum, diskWriter{f}), contextReader{ctx, r})
	if err != nil {
		return 0, err
	}
	if _, err = f.Write(sum.Sum(nil)); err != nil {
		return 0, unavailable(err)
	}
	if err = f.Sync(); err != nil {
		return 0, unavailable(err)
	}
	if err = f.Close(); err != nil {
		return 0, unavailable(err)
	}
	if err = os.Rename(f.Name(), path); err != nil {
		return 0, unavailable(err)
	}
	// Until the folder is synced a power loss can take the name away, so success is not reported before.
	return size, s.syncDir()
}

// diskWriter marks the disk's errors apart from the source's.
type diskWriter struct{ f *os.File }

func (w diskWriter) Write(p []byte) (int, error) {
	n, err := w.f.Write(p)
	if err != nil {
		err = unavailable(err)
	}
	return n, err
}

func unavailable(err error) error { return fmt.Errorf("%w: %w", ErrUnavailable, err) }

// contextReader ends with ctx.
type contextReader struct {
	ctx context.Context
	r   io.Reader
}

func (c contextReader) Read(p []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	return c.r.Read(p)
}

func (s *dirStore) syncDir() error {
	d, err := os.Open(s.dir)
	if err != nil {
		return unavailable(err)
	}
	err = d.Sync()
	if err := errors.Join(err, d.Close()); err != nil {
		return unavailable(err)
	}
	return nil
}

// open opens an object's file, and tells the size of the object in it.
func (s *dirStore) open(name string) (*os.File, int64, error) {
	path, err := s.path(name)
	if err != nil {
		return nil, 0, fmt.Errorf("reading an object: %w", err)
	}
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, 0, fmt.Errorf("reading object %s: %w", name, ErrNotFound)
	}
	if err != nil {
		return nil, 0, fmt.Errorf("reading object %s: %w", name, unavailable(err))
	}
	info, err := f.Stat()
	if err == nil && info.Size() >= sha256.Size {
		return f, info.Size() - sha256.Size, nil
	}
	_ = f.Close()
	if err != nil {
		return nil, 0, fmt.Errorf("reading object %s: %w", name, unavailable(err))
	}
	return nil, 0, fmt.Errorf("reading object %s: %w", name, ErrCorrupt)
}

func (s *dirStore) Get(ctx context.Context, name string) (io.ReadCloser, error) {
	f, size, err := s.open(name)
	if err != nil {
		return nil, err
	}
	digest := make([]byte, sha256.Size)
	if _, err = f.ReadAt(digest, size); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("reading object %s: %w", name, ErrCorrupt)
	}
	content := bufio.NewReaderSize(contextReader{ctx, io.LimitReader(f, size)}, 64<<10)
	return struct {
		io.Reader
		io.Closer
	}{newVerifier(name, content, size, known(digest)), f}, nil
}

func (s *dirStore) OpenAt(ctx context.Context, name string) (At, error) {
	f, size, err := s.open(name)
	if err != nil {
		return nil, err
	}
	return &dirAt{SectionReader: io.NewSectionReader(f, 0, size), ctx: ctx, name: name, f: f}, nil
}

// dirAt reads the part of a file that is the object.
type dirAt struct {
	*io.SectionReader
	ctx  context.Context // of the OpenAt
	name string
	f    *os.File
}

func (a *dirAt) ReadAt(p []byte, off int64) (int, error) {
	if err := a.ctx.Err(); err != nil {
		return 0, err
	}
	if off < 0 {
		return 0, beforeStart(a.name, off)
	}
	n, err := a.SectionReader.ReadAt(p, off)
	switch {
	case err == nil, errors.Is(err, io.EOF) && off+int64(n) >= a.Size():
		return n, err
	case errors.Is(err, io.EOF): // somebody has cut the file since
		return n, fmt.Errorf("reading object %s: %w", a.name, ErrCorrupt)
	default:
		return n, fmt.Errorf("reading object %s: %w", a.name, unavailable(err))
	}
}

func (a *dirAt) Close() error { return a.f.Close() }

func (s *dirStore) Delete(_ context.Context, name string) error {
	path, err := s.path(name)
	if err != nil {
		return fmt.Errorf("deleting an object: %w", err)
	}
	err = os.Remove(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		err = s.syncDir()
	}
	if err != nil {
		return fmt.Errorf("deleting object %s: %w", name, unavailable(err))
	}
	return nil
}

func (s *dirStore) List(ctx context.Context, fn func(Info) error) error {
	d, err := os.Open(s.dir)
	if err != nil {
		return fmt.Errorf("listing the objects: %w", unavailable(err))
	}
	defer d.Close() //nolint:errcheck // only read
	for {
		entries, err := d.ReadDir(256)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("listing the objects: %w", unavailable(err))
		}
		for _, e := range entries {
			if err := ctx.Err(); err != nil {
				return fmt.Errorf("listing the objects: %w", err)
			}
			escaped, ok := strings.CutSuffix(e.Name(), suffix)
			name, unescapeErr := url.PathUnescape(escaped)
			info, err := e.Info()
			if !ok || unescapeErr != nil || errors.Is(err, fs.ErrNotExist) { // not ours, or deleted meanwhile
				continue
			}
			if err != nil {
				return fmt.Errorf("listing the objects: %w", unavailable(err))
			}
			if err := fn(Info{Name: name, Size: info.Size() - sha256.Size, Time: info.ModTime().UnixMilli()}); err != nil {
				return err
			}
		}
	}
}
