package ledger

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/millrace/millrace/internal/job"
)

const tenantColumns = "id, name, weight, limits, created, disabled"

func scanTenant(row scanner, t *Tenant) error {
	var limits string
	if err := row.Scan(&t.ID, &t.Name, &t.Weight, &limits, &t.Created, &t.Disabled); err != nil {
		return err
	}
	return decode("limits", limits, &t.Limits)
}

// check is nil for a tenant that can be kept.
func (t *Tenant) check() error {
	if t.Weight == 0 {
		t.Weight = 100
	}
	if t.ID == "" {
		return errors.New("a tenant needs an id")
	}
	if t.Weight < 1 || t.Weight > 1000 {
		return fmt.Errorf("the weight of tenant %s is %d: it must be between 1 and 1000", t.ID, t.Weight)
	}
	return nil
}

// CreateTenant adds a tenant; a weight of 0 is the default, and Created is now unless it is given. An id that a tenant has or had is ErrExists or ErrDeleted.
func (s *Store) CreateTenant(ctx context.Context, t Tenant) (*Tenant, error) {
	if err := t.check(); err != nil {
		return nil, err
	}
	if t.Created == 0 {
		t.Created = job.MillisOf(time.Now())
	}
	err := s.write(ctx, "creating the tenant "+string(t.ID), func(q *query) error {
		n, err := q.exec("INSERT INTO tenants ("+tenantColumns+") VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT (id) DO NOTHING", t.ID, t.Name, t.Weight, encode(t.Limits), t.Created, t.Disabled)
		if err != nil || n == 1 {
			return err
		}
		var deleted job.Millis
		if err := q.row("SELECT deleted FROM tenants WHERE id = $1", t.ID).Scan(&deleted); err != nil {
			return err
		}
		if deleted != 0 {
			return refuse(ErrDeleted)
		}
		return refuse(ErrExists)
	})
	if err != nil {
		return nil, err
	}
	return &t, nil
}

// Tenant returns one.
func (s *Store) Tenant(ctx context.Context, id job.Tenant) (*Tenant, error) {
	var t Tenant
	err := s.read(ctx, "reading the tenant "+string(id), func(q *query) error {
		return scanTenant(q.row("SELECT "+tenantColumns+" FROM tenants WHERE id = $1 AND deleted = 0", id), &t)
	})
	if err != nil {
		return nil, err
	}
	return &t, nil
}

// Tenants lists all, by id.
func (s *Store) Tenants(ctx context.Context) ([]Tenant, error) {
	var all []Tenant
	err := s.read(ctx, "listing the tenants", func(q *query) error {
		return q.rows(func(row scanner) error {
			var t Tenant
			err := scanTenant(row, &t)
			all = append(all, t)
			return err
		}, "SELECT "+tenantColumns+" FROM tenants WHERE deleted = 0 ORDER BY id")
	})
	return all, err
}

// TenantPage lists up to limit of those behind the id after, "" for the first, by id. An after that no tenant has or had is ErrNotFound: whoever pages goes on behind one that was deleted meanwhile.
func (s *Store) TenantPage(ctx context.Context, after job.Tenant, limit int) (tenants []Tenant, more bool, err error) {
	err = s.read(ctx, "listing the tenants", func(q *query) error {
		if after != "" {
			var found string
			if err := q.row("SELECT id FROM tenants WHERE id = $1", after).Scan(&found); err != nil {
				return err
			}
		}
		return q.rows(func(row scanner) error {
			var t Tenant
			err := scanTenant(row, &t)
			tenants = append(tenants, t)
			return err
		}, "SELECT "+tenantColumns+" FROM tenants WHERE deleted = 0 AND id > $1 ORDER BY id LIMIT $2", after, limit+1)
	})
	return cut(tenants, limit, err)
}

// UpdateTenant has change alter the tenant's name, weight, limits and Disabled: nobody else alters it meanwhile. change may be called again, and its error comes back as it is.
func (s *Store) UpdateTenant(ctx context.Context, id job.Tenant, change func(*Tenant) error) (*Tenant, error) {
	var now Tenant
	err := s.write(ctx, "changing the tenant "+string(id), func(q *query) error {
		var t Tenant
		if err := scanTenant(q.row("SELECT "+tenantColumns+" FROM tenants WHERE id = $1 AND deleted = 0"+q.dialect.locking(), id), &t); err != nil {
			return err
		}
		err := change(&t)
		if err == nil {
			err = t.check()
		}
		if err != nil {
			return refuse(err)
		}
		return scanTenant(q.row("UPDATE tenants SET name = $2, weight = $3, limits = $4, disabled = $5 WHERE id = $1 RETURNING "+tenantColumns,
			id, t.Name, t.Weight, encode(t.Limits), t.Disabled), &now)
	})
	if err != nil {
		return nil, err
	}
	return &now, nil
}

// DeleteTenant removes a tenant without keys that are not revoked, files and live batches: else ErrInUse, as for job.DefaultTenant. Its ended batches go with it; its usage and its keys' rows stay, and so does its id, for its jobs and their answers are kept under it.
func (s *Store) DeleteTenant(ctx context.Context, id job.Tenant) error {
	return s.write(ctx, "deleting the tenant "+string(id), func(q *query) error {
		// Its row is locked: nothing of its own can be added meanwhile.
		if err := q.lockTenant(id); err != nil {
			return err
		}
		var keys, files, batches int
		if err := q.row(`SELECT (SELECT COUNT(*) FROM api_keys WHERE tenant = $1 AND revoked = 0), (SELECT COUNT(*) FROM files WHERE tenant = $1),
			(SELECT COUNT(*) FROM batches WHERE tenant = $1 AND live = 1)`, id).Scan(&keys, &files, &batches); err != nil {
			return err
		}
		if id == job.DefaultTenant {
			return refuse(fmt.Errorf("%w: the tenant %s always exists", ErrInUse, id))
		}
		if keys+files+batches > 0 {
			return refuse(fmt.Errorf("%w: the tenant has keys that are not revoked (%d), files (%d) or live batches (%d)", ErrInUse, keys, files, batches))
		}
		for _, text := range []string{"DELETE FROM batches WHERE tenant = $1", "DELETE FROM idempotency WHERE tenant = $1"} {
			if _, err := q.exec(text, id); err != nil {
				return err
			}
		}
		_, err := q.exec("UPDATE tenants SET deleted = $2, disabled = 1 WHERE id = $1", id, job.MillisOf(time.Now()))
		return err
	})
}

// lockTenant keeps the tenant as it is until the transaction ends, and others from adding to what is its own. ErrNotFound if it does not exist.
func (q *query) lockTenant(id job.Tenant) error {
	var found string
	return q.row("SELECT id FROM tenants WHERE id = $1 AND deleted = 0"+q.dialect.locking(), id).Scan(&found)
}

// keepTenant keeps the tenant from being deleted until the transaction ends. ErrNotFound if it does not exist.
func (q *query) keepTenant(id job.Tenant) error {
	var found string
	return q.row("SELECT id FROM tenants WHERE id = $1 AND deleted = 0"+q.dialect.sharing(), id).Scan(&found)
}
