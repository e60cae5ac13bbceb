package ledger

import (
	"context"
	"errors"
	"fmt"

	"github.com/millrace/millrace/internal/job"
)

const fileColumns = "id, tenant, api_key, purpose, filename, bytes, sha256, blob, batch, created, expires"

func scanFile(row scanner, f *File) error {
	return row.Scan(&f.ID, &f.Tenant, &f.Key, &f.Purpose, &f.Filename, &f.Bytes, &f.SHA256, &f.Blob, &f.Batch, &f.Created, &f.Expires)
}

func (q *query) insertFile(f *File) error {
	n, err := q.exec("INSERT INTO files ("+fileColumns+") VALUES ("+marks(1, 11)+") ON CONFLICT (id) DO NOTHING",
		f.ID, f.Tenant, f.Key, f.Purpose, f.Filename, f.Bytes, f.SHA256, f.Blob, f.Batch, f.Created, f.Expires)
	if err == nil && n == 0 {
		err = refuse(ErrExists)
	}
	return err
}

func (q *query) fileBytes(t job.Tenant) (n int64, err error) {
	err = q.row("SELECT CAST(COALESCE(SUM(bytes), 0) AS BIGINT) FROM files WHERE tenant = $1", t).Scan(&n)
	return n, err
}

// InsertFile adds a file whose bytes are stored. ErrQuota: its tenant's files would take more than quota bytes (0 is no bound). ErrNotFound: there is no such tenant. ErrExists: the id is taken.
func (s *Store) InsertFile(ctx context.Context, f File, quota int64) error {
	return s.write(ctx, "adding the file "+f.ID, func(q *query) error {
		if quota <= 0 {
			if err := q.keepTenant(f.Tenant); err != nil {
				return err
			}
			return q.insertFile(&f)
		}
		// Of several at once each sees those before it.
		if err := q.lockTenant(f.Tenant); err != nil {
			return err
		}
		had, err := q.fileBytes(f.Tenant)
		if err != nil {
			return err
		}
		if f.Bytes > quota-had {
			return refuse(ErrQuota)
		}
		return q.insertFile(&f)
	})
}

// File returns one.
func (s *Store) File(ctx context.Context, t job.Tenant, id string) (*File, error) {
	var f File
	err := s.read(ctx, "reading the file "+id, func(q *query) error {
		return scanFile(q.row("SELECT "+fileColumns+" FROM files WHERE tenant = $1 AND id = $2", t, id), &f)
	})
	if err != nil {
		return nil, err
	}
	return &f, nil
}

// Files lists a tenant's, of one purpose or, for "", of all.
func (s *Store) Files(ctx context.Context, t job.Tenant, purpose string, p Page) (files []File, more bool, err error) {
	err = s.read(ctx, "listing the files", func(q *query) error {
		where, args := "tenant = $1", []any{t}
		if purpose != "" {
			where, args = where+" AND purpose = $2", append(args, purpose)
		}
		return q.page("files", fileColumns, where, args, p, func(row scanner) error {
			var f File
			err := scanFile(row, &f)
			files = append(files, f)
			return err
		})
	})
	return cut(files, p.limit(), err)
}

// unread is the condition that no live batch reads a row of files.
const unread = "NOT EXISTS (SELECT 1 FROM batches WHERE batches.input_file = files.id AND batches.tenant = files.tenant AND batches.live = 1)"

// DeleteFile removes the row and returns it, so that its blob can go. ErrInUse: a batch that has not ended reads it.
func (s *Store) DeleteFile(ctx context.Context, t job.Tenant, id string) (*File, error) {
	var f File
	err := s.write(ctx, "deleting the file "+id, func(q *query) error {
		// The row is locked first: CreateBatch holds it while it adds a batch, so that the look at the batches sees that one.
		if err := scanFile(q.row("SELECT "+fileColumns+" FROM files WHERE tenant = $1 AND id = $2"+q.dialect.locking(), t, id), &f); err != nil {
			return err
		}
		n, err := q.exec("DELETE FROM files WHERE id = $1 AND "+unread, id)
		if err == nil && n == 0 {
			err = refuse(ErrInUse)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return &f, nil
}

// ExpireFiles removes up to limit files whose time is over and that no live batch reads, and returns them.
func (s *Store) ExpireFiles(ctx context.Context, now job.Millis, limit int) ([]File, error) {
	var gone []File
	err := s.write(ctx, "removing files whose time is over", func(q *query) error {
		gone = nil
		// As in DeleteFile: lock, then look.
		var ids []any
		if err := q.rows(func(row scanner) error {
			var id string
			err := row.Scan(&id)
			ids = append(ids, id)
			return err
		}, "SELECT id FROM files WHERE expires > 0 AND expires <= $1 AND "+unread+" ORDER BY expires, id LIMIT $2"+q.dialect.locking(), now, limit); err != nil {
			return err
		}
		for len(ids) > 0 {
			n := min(len(ids), chunk)
			if err := q.rows(func(row scanner) error {
				var f File
				err := scanFile(row, &f)
				gone = append(gone, f)
				return err
			}, "DELETE FROM files WHERE id IN ("+marks(1, n)+") AND "+unread+" RETURNING "+fileColumns, ids[:n]...); err != nil {
				return err
			}
			ids = ids[n:]
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return gone, nil
}

// chunk bounds the arguments of one statement.
const chunk = 100

// KnownBlobs tells which of the names are files' blobs.
func (s *Store) KnownBlobs(ctx context.Context, names []string) (map[string]bool, error) {
	known := make(map[string]bool)
	err := s.read(ctx, "looking for blobs", func(q *query) error {
		args := make([]any, len(names))
		for i, name := range names {
			args[i] = name
		}
		for len(args) > 0 {
			n := min(len(args), chunk)
			if err := q.rows(func(row scanner) error {
				var name string
				err := row.Scan(&name)
				known[name] = true
				return err
			}, "SELECT blob FROM files WHERE blob IN ("+marks(1, n)+")", args[:n]...); err != nil {
				return err
			}
			args = args[n:]
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return known, nil
}

// FileBytes sums what a tenant's files take.
func (s *Store) FileBytes(ctx context.Context, t job.Tenant) (n int64, err error) {
	err = s.read(ctx, "summing the files' bytes", func(q *query) error {
		n, err = q.fileBytes(t)
		return err
	})
	return n, err
}

// insertOutputs adds the files that a batch has written; nil ones are none.
func (q *query) insertOutputs(batch string, files ...*File) error {
	for _, f := range files {
		if f == nil {
			continue
		}
		if f.Batch != batch {
			return refuse(fmt.Errorf("the file %s says that it is of batch %q, not of %s", f.ID, f.Batch, batch))
		}
		if err := q.insertFile(f); errors.Is(err, ErrExists) {
			return refuse(fmt.Errorf("the file %s of batch %s: %w", f.ID, batch, ErrExists))
		} else if err != nil {
			return err
		}
	}
	return nil
}
