package ledger

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"

	"github.com/millrace/millrace/migrations"
)

// versions is the table that says which steps of the schema were taken.
const versions = "millrace_schema"

// Step is one numbered change of the schema.
type Step struct {
	Version int64
	Name    string
	// Applied is zero for a step that was not taken.
	Applied time.Time
}

// Migrate brings the schema to the newest that this build knows, and tells from which version to which. Several may do so at once: one does it, the others wait.
func Migrate(ctx context.Context, cfg Config, log *slog.Logger) (from, to int64, err error) {
	return migrate(ctx, cfg, log, func(ctx context.Context, p *goose.Provider, have int64) error {
		if newest := newest(p); have > newest {
			return newerSchema(have, newest)
		}
		_, err := p.Up(ctx)
		return err
	})
}

// MigrateDown takes the steps after version `to` back, the newest first. What only they hold is lost.
func MigrateDown(ctx context.Context, cfg Config, to int64, log *slog.Logger) (from, at int64, err error) {
	return migrate(ctx, cfg, log, func(ctx context.Context, p *goose.Provider, have int64) error {
		if newest := newest(p); have > newest {
			return newerSchema(have, newest)
		}
		if to < 0 || to > have {
			return fmt.Errorf("the schema is at version %d: it can be taken back to 0..%d, not to %d", have, have, to)
		}
		_, err := p.DownTo(ctx, to)
		return err
	})
}

// Schema lists the steps that this build knows, the oldest first, and the version that the database has: 0 for none.
func Schema(ctx context.Context, cfg Config, log *slog.Logger) (have int64, steps []Step, err error) {
	s, err := connect(ctx, cfg, false, log)
	if err != nil {
		return 0, nil, err
	}
	defer s.closePools() //nolint:errcheck // nothing was written
	if have, err = s.version(ctx); err != nil {
		return 0, nil, err
	}
	p, err := s.provider(log)
	if err != nil {
		return 0, nil, err
	}
	taken := map[int64]time.Time{}
	if have > 0 {
		status, err := p.Status(ctx)
		if err != nil {
			return 0, nil, s.failed(ctx, "reading the schema's state", err)
		}
		for _, m := range status {
			taken[m.Source.Version] = m.AppliedAt
		}
	}
	for _, m := range p.ListSources() {
		steps = append(steps, Step{Version: m.Version, Name: m.Path, Applied: taken[m.Version]})
	}
	return have, steps, nil
}

func newest(p *goose.Provider) int64 {
	all := p.ListSources()
	return all[len(all)-1].Version
}

func newerSchema(have, known int64) error {
	return fmt.Errorf("%w: it is at version %d, and this build knows those up to %d: run a newer millrace (or with that one `millrace migrate down --to %d`)", ErrSchema, have, known, known)
}

// attempts is how often a change of the schema is begun again that failed while nobody else made progress with it.
const attempts = 5

// migrate calls change until it has worked, and tells from which version it came to which.
func migrate(ctx context.Context, cfg Config, log *slog.Logger, change func(context.Context, *goose.Provider, int64) error) (from, to int64, err error) {
	s, err := connect(ctx, cfg, true, log)
	if err != nil {
		return 0, 0, err
	}
	defer s.closePools() //nolint:errcheck // what was written is committed
	p, err := s.provider(log)
	if err != nil {
		return 0, 0, err
	}
	if from, err = s.version(ctx); err != nil {
		return 0, 0, err
	}
	// PostgreSQL has a lock for this. On SQLite the second of two processes waits for the first one's transaction, finds its own step taken already, and fails: it
	// then looks again. A step is one transaction, so that none is ever half taken.
	at := from
	for failures := 0; ; {
		err := change(ctx, p, at)
		now, lookErr := s.version(ctx)
		if err == nil && lookErr == nil {
			return from, now, nil
		}
		if failures++; now != at {
			failures, at = 0, now
		}
		if lookErr != nil || failures == attempts || errors.Is(err, ErrSchema) || s.dialect == onPostgres || ctx.Err() != nil {
			return from, now, s.failed(ctx, "changing the schema", errors.Join(err, lookErr))
		}
	}
}

// provider knows the steps.
func (s *Store) provider(log *slog.Logger) (*goose.Provider, error) {
	opts := []goose.ProviderOption{goose.WithDisableGlobalRegistry(true), goose.WithTableName(versions), goose.WithSlog(log)}
	d := goose.DialectSQLite3
	if s.dialect == onPostgres {
		d = goose.DialectPostgres
		l, err := lock.NewPostgresSessionLocker(lock.WithLockID(0x6d696c6c), lock.WithLockTimeout(1, 300))
		if err != nil {
			return nil, fmt.Errorf("making the schema's lock: %w", err)
		}
		opts = append(opts, goose.WithSessionLocker(l))
	}
	p, err := goose.NewProvider(d, s.writer, migrations.FS, opts...)
	if err != nil {
		return nil, fmt.Errorf("reading the schema's steps: %w", err)
	}
	return p, nil
}

// version is the schema that the database has, 0 for none.
func (s *Store) version(ctx context.Context) (v int64, err error) {
	err = s.read(ctx, "reading the schema's version", func(q *query) error {
		look := "SELECT COUNT(*) FROM sqlite_master WHERE type = 'table' AND name = $1"
		if q.dialect == onPostgres {
			look = "SELECT COUNT(*) FROM pg_catalog.pg_class WHERE oid = to_regclass($1)"
		}
		var tables int
		if err := q.row(look, versions).Scan(&tables); err != nil || tables == 0 {
			return err
		}
		return q.row("SELECT COALESCE(MAX(version_id), 0) FROM " + versions + " WHERE is_applied").Scan(&v)
	})
	return v, err
}

// checkSchema compares the database's schema with the one that this build knows.
func (s *Store) checkSchema(ctx context.Context) error {
	p, err := s.provider(s.log)
	if err != nil {
		return err
	}
	have, err := s.version(ctx)
	if err != nil {
		return err
	}
	known := newest(p)
	switch {
	case have > known:
		return newerSchema(have, known)
	case have == 0:
		return fmt.Errorf("%w: it has none yet: run `millrace migrate`", ErrSchema)
	case have < known:
		return fmt.Errorf("%w: it is at version %d, and this build needs %d: run `millrace migrate`", ErrSchema, have, known)
	}
	return nil
}
