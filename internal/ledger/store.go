package ledger

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"
	"modernc.org/sqlite"
)

// callTimeout bounds each method.
const callTimeout = 5 * time.Second

// Store is one process's access to the database. Safe for concurrent use. Every method bounds itself by 5 s where its context has no earlier deadline.
type Store struct {
	dialect dialect
	// writer has one connection on SQLite, whose transactions begin immediate; there reader has some that only read, while writer writes. On PostgreSQL both are one pool.
	writer, reader *sql.DB
	log            *slog.Logger
	uses           *uses
}

// dialect is what the databases differ in.
type dialect string

const (
	onPostgres dialect = "postgres"
	onSQLite   dialect = "sqlite"
)

// locking is what a SELECT of rows to be changed in its transaction ends with: on SQLite the transaction has the whole database.
func (d dialect) locking() string {
	if d == onPostgres {
		return " FOR UPDATE"
	}
	return ""
}

// sharing keeps rows from being changed or removed until the transaction ends.
func (d dialect) sharing() string {
	if d == onPostgres {
		return " FOR SHARE"
	}
	return ""
}

// Open connects and compares the schema with the one that this build knows: a different one is ErrSchema. A server that is not there is ErrUnavailable.
func Open(ctx context.Context, cfg Config, log *slog.Logger) (_ *Store, err error) {
	s, err := connect(ctx, cfg, false, log)
	if err != nil {
		return nil, err
	}
	if err := s.checkSchema(ctx); err != nil {
		_ = s.closePools() // the first error counts
		return nil, err
	}
	s.uses = startUses(s)
	return s, nil
}

// CheckURL is nil for a URL that Open may understand.
func CheckURL(raw string) error {
	path, isFile := strings.CutPrefix(raw, "sqlite:")
	switch {
	case isFile && (path == "" || strings.HasPrefix(path, ":") || strings.HasPrefix(path, "//") && !strings.HasPrefix(path, "///") || strings.ContainsRune(path, 0)):
		return fmt.Errorf("the database URL is %q: the path of a file must follow, as in sqlite:/var/lib/millrace/millrace.db", raw)
	case isFile:
		return nil
	case !isPostgres(raw):
		return errors.New("the database URL must begin with postgres:// or sqlite:, as in postgres://user:password@host:5432/millrace or sqlite:/var/lib/millrace/millrace.db")
	}
	if _, err := url.Parse(raw); err != nil { // whose text may hold the password
		return errors.New("the database URL cannot be read: it must look like postgres://user:password@host:5432/database, with special characters of the password written as %XX")
	}
	return nil
}

func isPostgres(raw string) bool {
	return strings.HasPrefix(raw, "postgres://") || strings.HasPrefix(raw, "postgresql://")
}

// connect makes the pools, and proves that the database answers. A SQLite file that is missing is made if create, else it is ErrSchema.
func connect(ctx context.Context, cfg Config, create bool, log *slog.Logger) (*Store, error) {
	s := &Store{log: log}
	err := CheckURL(cfg.URL)
	if err != nil {
		return nil, err
	}
	if isPostgres(cfg.URL) {
		err = s.usePostgres(cfg)
	} else {
		err = s.useSQLite(strings.TrimPrefix(cfg.URL, "sqlite:"), create)
	}
	if err != nil {
		return nil, err
	}
	if err := s.knock(ctx); err != nil {
		_ = s.closePools() // the first error counts
		return nil, err
	}
	return s, nil
}

// knock is nil once the database has answered. What waiting does not cure is not ErrUnavailable.
func (s *Store) knock(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	err := s.writer.PingContext(ctx)
	// Of two that make a file's log at once one is turned away without having waited.
	for busy(err) && ctx.Err() == nil {
		select {
		case <-time.After(10 * time.Millisecond):
			err = s.writer.PingContext(ctx)
		case <-ctx.Done():
		}
	}
	var pg *pgconn.PgError
	if errors.As(err, &pg) && (strings.HasPrefix(pg.Code, "28") || pg.Code == "3D000") { // who we are, or which database
		return fmt.Errorf("opening the database: it refuses: %s (%s): check user, password and name in the database URL", pg.Message, pg.Code)
	}
	return s.failed(ctx, "opening the database", err)
}

// busy tells whether SQLite's file is another's at the moment.
func busy(err error) bool {
	var lite *sqlite.Error
	return errors.As(err, &lite) && lite.Code()&0xff == codeBusy
}

func (s *Store) usePostgres(cfg Config) error {
	pc, err := pgx.ParseConfig(cfg.URL)
	if err != nil {
		text := err.Error()
		if u, err := url.Parse(cfg.URL); err == nil {
			if password, _ := u.User.Password(); password != "" {
				text = strings.NewReplacer(cfg.URL, u.Redacted(), password, "xxxxx", url.QueryEscape(password), "xxxxx").Replace(text)
			}
		}
		return fmt.Errorf("reading the database URL: %s", text)
	}
	conns := cfg.MaxConns
	if conns <= 0 {
		conns = 8
	}
	db := stdlib.OpenDB(*pc)
	db.SetMaxOpenConns(conns)
	db.SetMaxIdleConns(conns)
	db.SetConnMaxIdleTime(5 * time.Minute)
	db.SetConnMaxLifetime(time.Hour) // so that a server that came back gets its share
	s.dialect, s.writer, s.reader = onPostgres, db, db
	return nil
}

// readers bounds the connections that read a SQLite file at once.
const readers = 4

func (s *Store) useSQLite(path string, create bool) error {
	path, err := filepath.Abs(path)
	if err != nil {
		return fmt.Errorf("finding the database's file: %w", err)
	}
	mode := "rw"
	if create {
		mode = "rwc"
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			return fmt.Errorf("making the folder of the database's file: %w", err)
		}
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600) // SQLite would let all users read it
		if err != nil {
			return fmt.Errorf("making the database's file: %w", err)
		}
		_ = f.Close() // nothing was written
	} else if _, err := os.Stat(path); errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("%w: there is no file %s: run `millrace migrate`", ErrSchema, path)
	}
	slashed := filepath.ToSlash(path)
	if !strings.HasPrefix(slashed, "/") {
		slashed = "/" + slashed // a drive's letter
	}
	// With WAL, readers and the writer do not wait for each other. Writers of several processes do, for less than a call may take; each begins as one, so that none
	// finds out at its first write that another was there meanwhile. FULL: what is committed is on disk.
	dsn := (&url.URL{Scheme: "file", Path: slashed}).String() + "?mode=" + mode + "&_busy_timeout=4000&_pragma=foreign_keys(1)&_pragma=synchronous(FULL)"
	if s.writer, err = openSQLite(dsn+"&_pragma=journal_mode(WAL)&_txlock=immediate", 1); err != nil {
		return err
	}
	if s.reader, err = openSQLite(dsn+"&_pragma=query_only(1)", readers); err != nil {
		_ = s.writer.Close() // nothing was written
		return err
	}
	s.dialect = onSQLite
	return nil
}

func openSQLite(dsn string, conns int) (*sql.DB, error) {
	c, err := sqlite.NewConnector(dsn)
	if err != nil {
		return nil, fmt.Errorf("opening the database's file: %w", err)
	}
	db := sql.OpenDB(c)
	db.SetMaxOpenConns(conns)
	db.SetMaxIdleConns(conns)
	return db, nil
}

// Close ends the connections. Calls must have returned.
func (s *Store) Close() error {
	s.uses.stop()
	return s.closePools()
}

func (s *Store) closePools() error {
	err := s.writer.Close()
	if s.reader != s.writer {
		err = errors.Join(s.reader.Close(), err)
	}
	if err != nil {
		return fmt.Errorf("closing the database: %w", err)
	}
	return nil
}

// Ping returns nil if the database answers, else ErrUnavailable.
func (s *Store) Ping(ctx context.Context) error {
	return s.read(ctx, "asking the database", func(q *query) error {
		var one int
		return q.row("SELECT 1").Scan(&one)
	})
}

// query runs statements for one call: in its transaction, or each on its own.
type query struct {
	ctx context.Context
	on  interface {
		ExecContext(context.Context, string, ...any) (sql.Result, error)
		QueryContext(context.Context, string, ...any) (*sql.Rows, error)
		QueryRowContext(context.Context, string, ...any) *sql.Row
	}
	dialect dialect
}

// exec returns how many rows were written.
func (q *query) exec(text string, args ...any) (int64, error) {
	r, err := q.on.ExecContext(q.ctx, text, plain(args)...)
	if err != nil {
		return 0, err
	}
	return r.RowsAffected()
}

func (q *query) row(text string, args ...any) *sql.Row {
	return q.on.QueryRowContext(q.ctx, text, plain(args)...)
}

// rows calls scan for each row.
func (q *query) rows(scan func(scanner) error, text string, args ...any) error {
	rows, err := q.on.QueryContext(q.ctx, text, plain(args)...)
	if err != nil {
		return err
	}
	defer rows.Close() //nolint:errcheck // what matters of it is in rows.Err
	for rows.Next() {
		if err := scan(rows); err != nil {
			return err
		}
	}
	return rows.Err()
}

// scanner is a row.
type scanner interface{ Scan(...any) error }

// plain turns arguments into what both databases take: text (valid, and without the NUL that PostgreSQL refuses), and whole numbers.
func plain(args []any) []any {
	out := make([]any, len(args))
	for i, a := range args {
		switch v := reflect.ValueOf(a); v.Kind() {
		case reflect.String:
			out[i] = strings.ReplaceAll(strings.ToValidUTF8(v.String(), "\uFFFD"), "\x00", "\uFFFD")
		case reflect.Bool:
			out[i] = int64(0)
			if v.Bool() {
				out[i] = int64(1)
			}
		case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
			out[i] = v.Int()
		case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
			out[i] = int64(v.Uint())
		default:
			out[i] = a
		}
	}
	return out
}

// read runs what only reads.
func (s *Store) read(ctx context.Context, doing string, f func(*query) error) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return s.failed(ctx, doing, f(&query{ctx, s.reader, s.dialect}))
}

// tries is how often a transaction is begun that the database broke off in favour of another.
const tries = 4

// write runs f in one transaction, which is committed if f returns nil. f may be run again. After ErrUnavailable it may be committed or not.
func (s *Store) write(ctx context.Context, doing string, f func(*query) error) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	var err error
	for range tries {
		if err = s.tryWrite(ctx, f); !brokenOff(err) {
			break
		}
	}
	return s.failed(ctx, doing, err)
}

func (s *Store) tryWrite(ctx context.Context, f func(*query) error) error {
	tx, err := s.writer.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback() //nolint:errcheck // after a commit there is nothing to roll back, and before it the database does so by itself
	if err := f(&query{ctx, tx, s.dialect}); err != nil {
		return err
	}
	return tx.Commit()
}

// brokenOff tells whether a transaction lost against another and can be run again: a serialization failure or a deadlock.
func brokenOff(err error) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) && (pg.Code == "40001" || pg.Code == "40P01")
}

// failed says in the ledger's own words what went wrong, nil for nil. Statements and settings never get into the text.
func (s *Store) failed(ctx context.Context, doing string, err error) error {
	var known *refusal
	var connecting *pgconn.ConnectError
	var pg *pgconn.PgError
	var lite *sqlite.Error
	switch {
	case err == nil:
		return nil
	case errors.As(err, &known):
		return known.error
	case errors.Is(err, sql.ErrNoRows):
		return ErrNotFound
	case errors.Is(ctx.Err(), context.Canceled):
		return fmt.Errorf("%s: %w", doing, context.Canceled)
	case ctx.Err() != nil:
		return fmt.Errorf("%s: %w in time", doing, ErrUnavailable)
	case errors.As(err, &pg):
		if passes(pg.Code) || errors.As(err, &connecting) {
			return fmt.Errorf("%s: %w: %s (%s)", doing, ErrUnavailable, pg.Message, pg.Code)
		}
		return fmt.Errorf("%s: the database refuses: %s (%s)", doing, pg.Message, pg.Code)
	case errors.As(err, &lite):
		switch lite.Code() & 0xff {
		case codeBusy, codeLocked, codeReadOnly, codeInterrupt, codeIO, codeFull, codeCantOpen:
			return fmt.Errorf("%s: %w: %s", doing, ErrUnavailable, lite.Error())
		}
		return fmt.Errorf("%s: the database refuses: %s", doing, lite.Error())
	case s.dialect == onPostgres && lost(err):
		return fmt.Errorf("%s: %w: its connection is lost or refused", doing, ErrUnavailable)
	}
	return fmt.Errorf("%s: %w", doing, err)
}

// SQLite's primary result codes of what may pass: another process's lock, a disk that is full or away.
const (
	codeBusy, codeLocked, codeReadOnly, codeInterrupt, codeIO, codeFull, codeCantOpen = 5, 6, 8, 9, 10, 13, 14
)

// passes tells whether a PostgreSQL error is one of a server that is starting, stopping, overloaded, or a standby for now: connection exceptions, insufficient
// resources, operator intervention, system errors; read-only; in favour of another, again and again.
func passes(code string) bool {
	switch code[:min(2, len(code))] {
	case "08", "53", "57", "58", "40":
		return true
	}
	return code == "25006"
}

// lost tells whether err came from the connection to a server, and not from a value that cannot be read.
func lost(err error) bool {
	var connecting *pgconn.ConnectError
	var network net.Error
	return errors.As(err, &connecting) || errors.As(err, &network) || pgconn.SafeToRetry(err) || errors.Is(err, driver.ErrBadConn) || errors.Is(err, sql.ErrConnDone) ||
		errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, net.ErrClosed) || errors.Is(err, sql.ErrTxDone)
}

// refusal is an error of the ledger's own, found inside a transaction.
type refusal struct{ error }

func (r *refusal) Unwrap() error { return r.error }

// refuse ends a transaction with an error for the caller.
func refuse(err error) error { return &refusal{err} }

// encode is v as JSON. What it cannot encode does not exist in this package.
func encode(v any) string {
	raw, err := json.Marshal(v)
	if err != nil {
		panic(fmt.Sprintf("ledger: encoding %T: %v", v, err))
	}
	return string(raw)
}

// decode reads a JSON column.
func decode(column, text string, v any) error {
	if err := json.Unmarshal([]byte(text), v); err != nil {
		return fmt.Errorf("reading the column %s: %w", column, err)
	}
	return nil
}

// marks writes n placeholders from $from on, with commas.
func marks(from, n int) string {
	var b strings.Builder
	for i := range n {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteByte('$')
		b.WriteString(strconv.Itoa(from + i))
	}
	return b.String()
}

// page reads one part of a tenant's listing: the columns of the table's rows that fit where, in the order of (created, id). where's arguments come first, and the first of all is the tenant. It scans one row more than asked for if there is one.
func (q *query) page(table, columns, where string, args []any, p Page, scan func(scanner) error) error {
	// After is an item of the same tenant, whatever else the listing asks for.
	return q.pageOf("tenant = $1", table, columns, where, args, p, scan)
}

// pageOf is page of rows of which p.After may be any that fits whose; that has the first of where's arguments, or none.
func (q *query) pageOf(whose, table, columns, where string, args []any, p Page, scan func(scanner) error) error {
	order, than := " DESC", "<"
	if p.Asc {
		order, than = "", ">"
	}
	n := len(args)
	if p.After != "" {
		var created int64
		one := args[:min(n, 1):min(n, 1)]
		if err := q.row(fmt.Sprintf("SELECT created FROM %s WHERE %s AND id = $%d", table, whose, len(one)+1), append(one, p.After)...).Scan(&created); err != nil {
			return err
		}
		where += fmt.Sprintf(" AND (created, id) %s ($%d, $%d)", than, n+1, n+2)
		args = append(args[:n:n], created, p.After)
	}
	text := fmt.Sprintf("SELECT %s FROM %s WHERE %s ORDER BY created%s, id%s LIMIT %d", columns, table, where, order, order, p.limit()+1)
	return q.rows(scan, text, args...)
}

// cut is the page of list, which has one item more if there are more.
func cut[T any](list []T, limit int, err error) (page []T, more bool, _ error) {
	if err != nil {
		return nil, false, err
	}
	return list[:min(len(list), limit)], len(list) > limit, nil
}

// limit is the page's, with its default.
func (p Page) limit() int {
	if p.Limit <= 0 {
		return 20
	}
	return p.Limit
}
