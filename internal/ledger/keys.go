package ledger

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base32"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/millrace/millrace/internal/job"
)

// SecretPrefix begins every secret.
const SecretPrefix = "sk-mr-"

// Behind it stand secretRandom characters that hold 5 random bits each. As these are 200 random bits, a secret cannot be guessed from a plain hash of it.
const (
	secretRandom = 40
	shownPrefix  = len(SecretPrefix) + 4
)

var secretEncoding = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)

func newSecret() string {
	var raw [secretRandom * 5 / 8]byte
	_, _ = rand.Read(raw[:]) // never fails: it aborts the program instead
	return SecretPrefix + secretEncoding.EncodeToString(raw[:])
}

func hashSecret(secret string) string {
	sum := sha256.Sum256([]byte(secret))
	return hex.EncodeToString(sum[:])
}

const keyColumns = "id, tenant, name, prefix, scopes, models, limits, created, expires, revoked, last_used"

// keyFields are where a row of keyColumns goes; done reads its JSON.
func keyFields(k *Key) (fields []any, done func() error) {
	var scopes, models, limits string
	return []any{&k.ID, &k.Tenant, &k.Name, &k.Prefix, &scopes, &models, &limits, &k.Created, &k.Expires, &k.Revoked, &k.LastUsed}, func() error {
		return errors.Join(decode("scopes", scopes, &k.Scopes), decode("models", models, &k.Models), decode("limits", limits, &k.Limits))
	}
}

func scanKey(row scanner, k *Key) error {
	fields, done := keyFields(k)
	if err := row.Scan(fields...); err != nil {
		return err
	}
	return done()
}

// insertKey gives k an id and a secret, and adds it.
func (q *query) insertKey(k *Key, now time.Time) (secret string, err error) {
	secret = newSecret()
	k.ID, k.Prefix, k.Created, k.Revoked, k.LastUsed = job.NewName("key_", now), secret[:shownPrefix], job.MillisOf(now), 0, 0
	if len(k.Scopes) == 0 {
		k.Scopes = []Scope{Inference, Batches}
	}
	_, err = q.exec("INSERT INTO api_keys ("+keyColumns+", hash) VALUES ("+marks(1, 12)+")",
		k.ID, k.Tenant, k.Name, k.Prefix, encode(k.Scopes), encode(k.Models), encode(k.Limits), k.Created, k.Expires, k.Revoked, k.LastUsed, hashSecret(secret))
	return secret, err
}

// CreateKey makes a key, and returns its secret, which nobody can read again. Of k it takes tenant, name, scopes, models, limits and expiry. ErrNotFound: there is no such tenant.
func (s *Store) CreateKey(ctx context.Context, k Key) (secret string, key *Key, err error) {
	for _, scope := range k.Scopes {
		if !slices.Contains(Scopes(), scope) {
			return "", nil, fmt.Errorf("the scope is %q: it must be one of %v", scope, Scopes())
		}
	}
	err = s.write(ctx, "creating a key", func(q *query) (err error) {
		if err := q.keepTenant(k.Tenant); err != nil {
			return err
		}
		secret, err = q.insertKey(&k, time.Now())
		return err
	})
	if err != nil {
		return "", nil, err
	}
	return secret, &k, nil
}

// RotateKey makes a new key like the one of that id; the old one still opens for grace, and not longer than it would have. ErrState: the old one opens nothing any more.
func (s *Store) RotateKey(ctx context.Context, id string, grace time.Duration) (secret string, key *Key, err error) {
	var k Key
	err = s.write(ctx, "rotating the key "+id, func(q *query) (err error) {
		now := time.Now()
		k = Key{}
		if err := scanKey(q.row("SELECT "+keyColumns+" FROM api_keys WHERE id = $1"+q.dialect.locking(), id), &k); err != nil {
			return err
		}
		if k.Revoked != 0 || k.Expires != 0 && k.Expires <= job.MillisOf(now) {
			return refuse(fmt.Errorf("%w: the key is revoked or expired: make a new one", ErrState))
		}
		if err := q.keepTenant(k.Tenant); err != nil {
			return err
		}
		end := job.MillisOf(now.Add(max(grace, 0)))
		if k.Expires != 0 {
			end = min(end, k.Expires)
		}
		if _, err := q.exec("UPDATE api_keys SET expires = $2 WHERE id = $1", id, end); err != nil {
			return err
		}
		secret, err = q.insertKey(&k, now)
		return err
	})
	if err != nil {
		return "", nil, err
	}
	return secret, &k, nil
}

// RevokeKey closes a key at once and for ever. One that is revoked stays as it is.
func (s *Store) RevokeKey(ctx context.Context, id string) (*Key, error) {
	var k Key
	err := s.write(ctx, "revoking the key "+id, func(q *query) error {
		return scanKey(q.row("UPDATE api_keys SET revoked = CASE WHEN revoked = 0 THEN $2 ELSE revoked END WHERE id = $1 RETURNING "+keyColumns, id, time.Now().UnixMilli()), &k)
	})
	if err != nil {
		return nil, err
	}
	return &k, nil
}

// Key returns one.
func (s *Store) Key(ctx context.Context, id string) (*Key, error) {
	var k Key
	err := s.read(ctx, "reading the key "+id, func(q *query) error {
		return scanKey(q.row("SELECT "+keyColumns+" FROM api_keys WHERE id = $1", id), &k)
	})
	if err != nil {
		return nil, err
	}
	return &k, nil
}

// Keys lists those of a tenant, "" for all, newest first.
func (s *Store) Keys(ctx context.Context, t job.Tenant) ([]Key, error) {
	var all []Key
	err := s.read(ctx, "listing the keys", func(q *query) error {
		where, args := "", []any(nil)
		if t != "" {
			where, args = " WHERE tenant = $1", []any{t}
		}
		return q.rows(func(row scanner) error {
			var k Key
			err := scanKey(row, &k)
			all = append(all, k)
			return err
		}, "SELECT "+keyColumns+" FROM api_keys"+where+" ORDER BY created DESC, id DESC", args...)
	})
	return all, err
}

// KeyPage lists a part of those of a tenant, "" for all. An After that is no key of these is ErrNotFound.
func (s *Store) KeyPage(ctx context.Context, t job.Tenant, p Page) (keys []Key, more bool, err error) {
	err = s.read(ctx, "listing the keys", func(q *query) error {
		where, args := "1 = 1", []any(nil)
		if t != "" {
			where, args = "tenant = $1", []any{t}
		}
		return q.pageOf(where, "api_keys", keyColumns, where, args, p, func(row scanner) error {
			var k Key
			err := scanKey(row, &k)
			keys = append(keys, k)
			return err
		})
	})
	return cut(keys, p.limit(), err)
}

// HasKeys tells whether any key was ever made: from then on nobody is let in without one.
func (s *Store) HasKeys(ctx context.Context) (has bool, err error) {
	err = s.read(ctx, "looking for keys", func(q *query) error {
		return q.row("SELECT EXISTS (SELECT 1 FROM api_keys)").Scan(&has)
	})
	return has, err
}

// Identify returns what a secret opens at the time now: ErrNotFound for one that is unknown, revoked, expired, or its tenant's disabled. It notes the use, to the minute; the note is written a moment later.
func (s *Store) Identify(ctx context.Context, secret string, now job.Millis) (*Identity, error) {
	var i Identity
	err := s.read(ctx, "looking up a key", func(q *query) error {
		i = Identity{}
		fields, done := keyFields(&i.Key)
		var limits string
		t := &i.Tenant
		fields = append(fields, &t.ID, &t.Name, &t.Weight, &limits, &t.Created, &t.Disabled)
		if err := q.row(`SELECT k.id, k.tenant, k.name, k.prefix, k.scopes, k.models, k.limits, k.created, k.expires, k.revoked, k.last_used,
			t.id, t.name, t.weight, t.limits, t.created, t.disabled FROM api_keys k JOIN tenants t ON t.id = k.tenant WHERE k.hash = $1`, hashSecret(secret)).Scan(fields...); err != nil {
			return err
		}
		return errors.Join(done(), decode("limits", limits, &t.Limits))
	})
	if err != nil {
		return nil, err
	}
	if k := &i.Key; k.Revoked != 0 || k.Expires != 0 && k.Expires <= now || i.Tenant.Disabled {
		return nil, ErrNotFound
	}
	s.uses.note(i.Key.ID, i.Key.LastUsed, now)
	return &i, nil
}

// uses writes when keys were last used, behind the calls that use them: nobody waits for it, and one that cannot be written is noted at the next use.
type uses struct {
	due    chan use
	done   chan struct{}
	cancel context.CancelFunc

	mu      sync.Mutex            // guards what follows, and that nothing is sent to due once it is closed
	stopped bool                  // due is closed
	noted   map[string]job.Millis // when a key's use was last sent to due; about those that were used here in the last minute
}

type use struct {
	key string
	at  job.Millis
}

const minute = job.Millis(time.Minute / time.Millisecond)

func startUses(s *Store) *uses {
	ctx, cancel := context.WithCancel(context.Background()) // what is noted belongs to no call; stop ends it
	u := &uses{due: make(chan use, 256), done: make(chan struct{}), cancel: cancel, noted: make(map[string]job.Millis)}
	go func() {
		defer close(u.done)
		for x := range u.due {
			if err := s.write(ctx, "noting the use of the key "+x.key, func(q *query) error {
				_, err := q.exec("UPDATE api_keys SET last_used = $2 WHERE id = $1 AND last_used < $2", x.key, x.at)
				return err
			}); err != nil && ctx.Err() == nil {
				s.log.Warn("the use of a key is not noted", "key", x.key, "err", err) // the next use tries again
			}
		}
	}()
	return u
}

// note has a use written unless one of the same minute was. It does not wait.
func (u *uses) note(key string, last, now job.Millis) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.stopped || now < max(last, u.noted[key])+minute {
		return
	}
	if len(u.noted) > 10_000 {
		clear(u.noted) // at worst some are written twice
	}
	select {
	case u.due <- use{key, now}:
		u.noted[key] = now
	default:
	}
}

// stop writes what is due, for up to a second, and ends.
func (u *uses) stop() {
	u.mu.Lock()
	if !u.stopped {
		u.stopped = true
		close(u.due)
	}
	u.mu.Unlock()
	late := time.AfterFunc(time.Second, u.cancel)
	<-u.done
	late.Stop()
	u.cancel()
}
