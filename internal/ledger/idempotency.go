package ledger

import (
	"context"
	"database/sql"
	"errors"
	"time"

	"github.com/millrace/millrace/internal/job"
)

// Remember binds (tenant, route, key) to object until now + ttl, unless it is bound: then it returns what it is bound to and false, or ErrReused if the hash is another. Bound to this very object already, as by
// a call whose answer was lost, it is the caller's.
func (s *Store) Remember(ctx context.Context, t job.Tenant, route, key, hash, object string, now job.Millis, ttl time.Duration) (bound string, mine bool, err error) {
	err = s.write(ctx, "remembering a create", func(q *query) error {
		for {
			n, err := q.exec(`INSERT INTO idempotency (tenant, route, idempotency_key, hash, object, expires) VALUES ($1, $2, $3, $4, $5, $6)
				ON CONFLICT (tenant, route, idempotency_key) DO UPDATE SET hash = excluded.hash, object = excluded.object, expires = excluded.expires WHERE idempotency.expires <= $7`,
				t, route, key, hash, object, now+job.Millis(ttl.Milliseconds()), now)
			if err != nil {
				return err
			}
			if n == 1 {
				bound, mine = object, true
				return nil
			}
			var itsHash string
			err = q.row("SELECT hash, object FROM idempotency WHERE tenant = $1 AND route = $2 AND idempotency_key = $3", t, route, key).Scan(&itsHash, &bound)
			if errors.Is(err, sql.ErrNoRows) {
				continue // it was forgotten meanwhile
			}
			if err != nil {
				return err
			}
			if itsHash != hash {
				return refuse(ErrReused)
			}
			mine = bound == object
			return nil
		}
	})
	if err != nil {
		return "", false, err
	}
	return bound, mine, nil
}

// Forget unbinds it if it is bound to object.
func (s *Store) Forget(ctx context.Context, t job.Tenant, route, key, object string) error {
	return s.write(ctx, "forgetting a create", func(q *query) error {
		_, err := q.exec("DELETE FROM idempotency WHERE tenant = $1 AND route = $2 AND idempotency_key = $3 AND object = $4", t, route, key, object)
		return err
	})
}

// Tidy removes what is over: bindings past their time.
func (s *Store) Tidy(ctx context.Context, now job.Millis) error {
	return s.write(ctx, "tidying", func(q *query) error {
		_, err := q.exec("DELETE FROM idempotency WHERE expires <= $1", now)
		return err
	})
}
