package blob

import (
	"context"
	"errors"
	"io"
	"strings"
	"time"
)

// Split keeps the objects whose names begin with one of the prefixes in apart, all others in rest.
func Split(rest, apart Store, prefixes ...string) Store { return &split{rest, apart, prefixes} }

type split struct {
	rest, apart Store
	prefixes    []string
}

func (s *split) of(name string) Store {
	for _, p := range s.prefixes {
		if strings.HasPrefix(name, p) {
			return s.apart
		}
	}
	return s.rest
}

func (s *split) Put(ctx context.Context, name string, r io.Reader) (int64, error) {
	return s.of(name).Put(ctx, name, r)
}

func (s *split) Get(ctx context.Context, name string) (io.ReadCloser, error) {
	return s.of(name).Get(ctx, name)
}

func (s *split) OpenAt(ctx context.Context, name string) (At, error) {
	return s.of(name).OpenAt(ctx, name)
}

func (s *split) Delete(ctx context.Context, name string) error { return s.of(name).Delete(ctx, name) }

func (s *split) List(ctx context.Context, fn func(Info) error) error {
	for _, store := range []Store{s.rest, s.apart} {
		if err := store.List(ctx, func(i Info) error {
			if s.of(i.Name) != store {
				return nil // nobody finds it under its name
			}
			return fn(i)
		}); err != nil {
			return err
		}
	}
	return nil
}

func (s *split) Tidy(ctx context.Context, before time.Time) error {
	return errors.Join(s.rest.Tidy(ctx, before), s.apart.Tidy(ctx, before))
}
