package ledger

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/millrace/millrace/internal/job"
)

const batchColumns = "id, tenant, api_key, endpoint, input_file, completion_window, models, metadata, output_expires, retry_of, status, late, errors, model, output_file, error_file, " +
	"total, done, bad, tokens, tokens_done, prompt_tokens, completion_tokens, total_tokens, cached_tokens, reasoning_tokens, " +
	"created, in_progress, expires, finalizing, completed, failed, expired, cancelling, cancelled"

func scanBatch(row scanner, b *Batch) error {
	var models, metadata, errs string
	u := &b.Usage
	if err := row.Scan(&b.ID, &b.Tenant, &b.Key, &b.Endpoint, &b.InputFile, &b.Window, &models, &metadata, &b.OutputExpires, &b.RetryOf, &b.Status, &b.Late, &errs, &b.Model, &b.OutputFile, &b.ErrorFile,
		&b.Total, &b.Done, &b.Bad, &b.Tokens, &b.TokensDone, &u.PromptTokens, &u.CompletionTokens, &u.TotalTokens, &u.CachedTokens, &u.ReasoningTokens,
		&b.Created, &b.InProgress, &b.Expires, &b.Finalizing, &b.Completed, &b.Failed, &b.Expired, &b.Cancelling, &b.Cancelled); err != nil {
		return err
	}
	return errors.Join(decode("models", models, &b.Models), decode("metadata", metadata, &b.Metadata), decode("errors", errs, &b.Errors))
}

// CreateBatch adds a batch, Validating unless it says otherwise. Its input file stays for as long as it lives; one that is not there, or is another tenant's, is found when the batch is validated. ErrNotFound: the tenant is gone. ErrExists: the id is taken.
func (s *Store) CreateBatch(ctx context.Context, b Batch) error {
	if b.Status == "" {
		b.Status = Validating
	}
	return s.write(ctx, "adding the batch "+b.ID, func(q *query) error {
		if err := q.keepTenant(b.Tenant); err != nil {
			return err
		}
		var file string
		if err := q.row("SELECT id FROM files WHERE tenant = $1 AND id = $2"+q.dialect.sharing(), b.Tenant, b.InputFile).Scan(&file); err != nil && !errors.Is(err, sql.ErrNoRows) {
			return err
		}
		u := &b.Usage
		n, err := q.exec("INSERT INTO batches ("+batchColumns+", live) VALUES ("+marks(1, 36)+") ON CONFLICT (id) DO NOTHING",
			b.ID, b.Tenant, b.Key, b.Endpoint, b.InputFile, b.Window, encode(b.Models), encode(b.Metadata), b.OutputExpires, b.RetryOf, b.Status, b.Late, encode(b.Errors), b.Model, b.OutputFile, b.ErrorFile,
			b.Total, b.Done, b.Bad, b.Tokens, b.TokensDone, u.PromptTokens, u.CompletionTokens, u.TotalTokens, u.CachedTokens, u.ReasoningTokens,
			b.Created, b.InProgress, b.Expires, b.Finalizing, b.Completed, b.Failed, b.Expired, b.Cancelling, b.Cancelled, !b.Status.Ended())
		if err == nil && n == 0 {
			err = refuse(ErrExists)
		}
		return err
	})
}

// Batch returns one.
func (s *Store) Batch(ctx context.Context, t job.Tenant, id string) (*Batch, error) {
	var b Batch
	err := s.read(ctx, "reading the batch "+id, func(q *query) error {
		return scanBatch(q.row("SELECT "+batchColumns+" FROM batches WHERE tenant = $1 AND id = $2", t, id), &b)
	})
	if err != nil {
		return nil, err
	}
	return &b, nil
}

// Batches lists a tenant's.
func (s *Store) Batches(ctx context.Context, t job.Tenant, p Page) (batches []Batch, more bool, err error) {
	err = s.read(ctx, "listing the batches", func(q *query) error {
		return q.page("batches", batchColumns, "tenant = $1", []any{t}, p, func(row scanner) error {
			var b Batch
			err := scanBatch(row, &b)
			batches = append(batches, b)
			return err
		})
	})
	return cut(batches, p.limit(), err)
}

// CancelBatch turns a live batch into cancelling; one that is cancelling or cancelled is returned as it is, another end is ErrState with the batch.
func (s *Store) CancelBatch(ctx context.Context, t job.Tenant, id string, now job.Millis) (*Batch, error) {
	return s.cancelBatch(ctx, id, now, func(b *Batch) bool { return b.Tenant == t })
}

// CancelAnyBatch is CancelBatch for operators: of whatever tenant's.
func (s *Store) CancelAnyBatch(ctx context.Context, id string, now job.Millis) (*Batch, error) {
	return s.cancelBatch(ctx, id, now, func(*Batch) bool { return true })
}

func (s *Store) cancelBatch(ctx context.Context, id string, now job.Millis, may func(*Batch) bool) (*Batch, error) {
	return s.change(ctx, nil, "cancelling the batch "+id, id, func(_ *query, b *Batch) error {
		switch {
		case !may(b):
			return refuse(ErrNotFound)
		case b.Status == Cancelling, b.Status == Cancelled:
			return nil
		case b.Status.Ended():
			return refuse(ErrState)
		}
		b.Status, b.Cancelling = Cancelling, now
		return nil
	})
}

// BatchTokens sums what the tenant's live batches still need: Tokens - TokensDone.
func (s *Store) BatchTokens(ctx context.Context, t job.Tenant) (n job.Tokens, err error) {
	err = s.read(ctx, "summing the batches' tokens", func(q *query) error {
		return q.row("SELECT CAST(COALESCE(SUM(tokens - tokens_done), 0) AS BIGINT) FROM batches WHERE tenant = $1 AND live = 1", t).Scan(&n)
	})
	return n, err
}

// change reads a batch, lets decide change it, and writes it, in one transaction; fence comes first if it is not nil, as in all transactions of a leader. The batch comes with ErrState as it is.
func (s *Store) change(ctx context.Context, fence func(*query) error, doing, id string, decide func(*query, *Batch) error) (*Batch, error) {
	var was, b Batch
	err := s.write(ctx, doing, func(q *query) error {
		if fence != nil {
			if err := fence(q); err != nil {
				return err
			}
		}
		b = Batch{}
		if err := scanBatch(q.row("SELECT "+batchColumns+" FROM batches WHERE id = $1"+q.dialect.locking(), id), &b); err != nil {
			return err
		}
		was = b
		if err := decide(q, &b); err != nil {
			return err
		}
		if b.Status == was.Status {
			return nil
		}
		_, err := q.exec(`UPDATE batches SET status = $2, live = $3, late = $4, errors = $5, model = $6, output_file = $7, error_file = $8, total = $9, done = $10, bad = $11, tokens = $12,
			in_progress = $13, finalizing = $14, completed = $15, failed = $16, expired = $17, cancelling = $18, cancelled = $19 WHERE id = $1`,
			id, b.Status, !b.Status.Ended(), b.Late, encode(b.Errors), b.Model, b.OutputFile, b.ErrorFile, b.Total, b.Done, b.Bad, b.Tokens,
			b.InProgress, b.Finalizing, b.Completed, b.Failed, b.Expired, b.Cancelling, b.Cancelled)
		return err
	})
	if errors.Is(err, ErrState) {
		return &was, err
	}
	if err != nil {
		return nil, err
	}
	return &b, nil
}

// What follows is the leading dispatcher's. Each write compares its epoch with the highest that has written, and is ErrFenced behind it.

// leads is a row of leadership: who leads in what.
type leads int

const (
	dispatching leads = 1
	autoscaling leads = 2
)

// fence makes epoch the highest of the dispatchers', and keeps it until the transaction ends: who leads next waits for that.
func (q *query) fence(epoch uint64) error { return q.fenceOf(dispatching, epoch) }

func (q *query) fenceOf(who leads, epoch uint64) error {
	highest, err := q.highest(who)
	if err != nil {
		return err
	}
	if highest > epoch {
		return refuse(ErrFenced)
	}
	if highest == epoch {
		return nil
	}
	_, err = q.exec("UPDATE leadership SET epoch = $1 WHERE id = $2", epoch, who)
	return err
}

// highest is the highest epoch that has written. It stays so until the transaction ends.
func (q *query) highest(who leads) (epoch uint64, err error) {
	err = q.row("SELECT epoch FROM leadership WHERE id = $1"+q.dialect.locking(), who).Scan(&epoch)
	return epoch, err
}

// Lead makes epoch the highest.
func (s *Store) Lead(ctx context.Context, epoch uint64) error {
	return s.write(ctx, "taking the lead", func(q *query) error { return q.fence(epoch) })
}

// LiveBatches lists all that have not ended, oldest first.
func (s *Store) LiveBatches(ctx context.Context) ([]Batch, error) {
	var all []Batch
	err := s.read(ctx, "listing the live batches", func(q *query) error {
		return q.rows(func(row scanner) error {
			var b Batch
			err := scanBatch(row, &b)
			all = append(all, b)
			return err
		}, "SELECT "+batchColumns+" FROM batches WHERE live = 1 ORDER BY created, id")
	})
	return all, err
}

// Portions lists a batch's, by model.
func (s *Store) Portions(ctx context.Context, batch string) ([]Portion, error) {
	var all []Portion
	err := s.read(ctx, "reading the portions of batch "+batch, func(q *query) error {
		return q.rows(func(row scanner) error {
			var p Portion
			err := row.Scan(&p.Model, &p.Lines, &p.Tokens, &p.Confirmed, &p.Reserved)
			all = append(all, p)
			return err
		}, "SELECT model, total, tokens, confirmed, reserved FROM batch_portions WHERE batch = $1 ORDER BY model", batch)
	})
	return all, err
}

// StartBatch moves validating -> in_progress, with Total, Tokens, Model and its portions. ErrState if it is not validating.
func (s *Store) StartBatch(ctx context.Context, epoch uint64, id string, now job.Millis, model job.Model, portions []Portion) (*Batch, error) {
	return s.lead(ctx, epoch, "starting the batch "+id, id, func(q *query, b *Batch) error {
		if b.Status != Validating {
			return refuse(ErrState)
		}
		b.Status, b.InProgress, b.Model, b.Total, b.Tokens = InProgress, now, model, 0, 0
		for len(portions) > 0 {
			n := min(len(portions), chunk/6)
			var args []any
			values := ""
			for i, p := range portions[:n] {
				if i > 0 {
					values += ","
				}
				values += "(" + marks(len(args)+1, 6) + ")"
				args = append(args, id, p.Model, p.Lines, p.Tokens, p.Confirmed, p.Reserved)
				b.Total += p.Lines
				b.Tokens += p.Tokens
			}
			if _, err := q.exec("INSERT INTO batch_portions (batch, model, total, tokens, confirmed, reserved) VALUES "+values, args...); err != nil {
				return err
			}
			portions = portions[n:]
		}
		return nil
	})
}

// lead is change by the leader of an epoch.
func (s *Store) lead(ctx context.Context, epoch uint64, doing, id string, decide func(*query, *Batch) error) (*Batch, error) {
	return s.change(ctx, func(q *query) error { return q.fence(epoch) }, doing, id, decide)
}

// RejectBatch moves validating -> failed, with errors.
func (s *Store) RejectBatch(ctx context.Context, epoch uint64, id string, now job.Millis, errs []job.LineError) (*Batch, error) {
	return s.lead(ctx, epoch, "rejecting the batch "+id, id, func(_ *query, b *Batch) error {
		if b.Status != Validating {
			return refuse(ErrState)
		}
		b.Status, b.Failed, b.Errors = Failed, now, errs
		return nil
	})
}

// Reserve writes how far a portion is confirmed and reserved. ErrState: that would take either back, or past the portion's end.
func (s *Store) Reserve(ctx context.Context, epoch uint64, batch string, m job.Model, confirmed, reserved int64) error {
	return s.write(ctx, "reserving lines of batch "+batch, func(q *query) error {
		if err := q.fence(epoch); err != nil {
			return err
		}
		n, err := q.exec(`UPDATE batch_portions SET confirmed = $3, reserved = $4 WHERE batch = $1 AND model = $2
			AND confirmed <= $3 AND reserved <= $4 AND $3 <= $4 AND $4 <= total`, batch, m, confirmed, reserved)
		if err != nil || n == 1 {
			return err
		}
		var p Portion
		if err := q.row("SELECT total, confirmed, reserved FROM batch_portions WHERE batch = $1 AND model = $2", batch, m).Scan(&p.Lines, &p.Confirmed, &p.Reserved); err != nil {
			return err
		}
		return refuse(fmt.Errorf("%w: reserving %d..%d of %d lines for %s where %d..%d are", ErrState, confirmed, reserved, p.Lines, m, p.Confirmed, p.Reserved))
	})
}

// FinalizeBatch moves in_progress -> finalizing; late tells that its end will be expired. ErrState if it is not in progress.
func (s *Store) FinalizeBatch(ctx context.Context, epoch uint64, id string, now job.Millis, late bool) (*Batch, error) {
	return s.lead(ctx, epoch, "finalizing the batch "+id, id, func(_ *query, b *Batch) error {
		if b.Status != InProgress {
			return refuse(ErrState)
		}
		b.Status, b.Finalizing, b.Late = Finalizing, now, late
		return nil
	})
}

// EndBatch moves finalizing -> completed or expired, cancelling -> cancelled, with its files (either may be nil) in the same transaction, and the final counts. ErrState if it is neither.
func (s *Store) EndBatch(ctx context.Context, epoch uint64, id string, now job.Millis, done, bad int64, output, errorFile *File) (*Batch, error) {
	return s.lead(ctx, epoch, "ending the batch "+id, id, func(q *query, b *Batch) error {
		switch {
		case b.Status == Cancelling:
			b.Status, b.Cancelled = Cancelled, now
		case b.Status == Finalizing && b.Late:
			b.Status, b.Expired = Expired, now
		case b.Status == Finalizing:
			b.Status, b.Completed = Completed, now
		default:
			return refuse(ErrState)
		}
		b.Done, b.Bad = done, bad
		if done < 0 || bad < 0 || done+bad > b.Total {
			return refuse(fmt.Errorf("ending the batch %s: %d lines that ended well and %d others are not those of %d", id, done, bad, b.Total))
		}
		if output != nil {
			b.OutputFile = output.ID
		}
		if errorFile != nil {
			b.ErrorFile = errorFile.ID
		}
		return q.insertOutputs(id, output, errorFile)
	})
}
