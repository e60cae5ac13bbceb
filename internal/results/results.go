// Package results keeps what clients ask for often in Redis: job records, token events, idempotency keys.
package results

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/millrace/millrace/internal/job"
)

// Errors that callers branch on.
var (
	// ErrNotFound: the store answered, and has no such record.
	ErrNotFound = errors.New("no such job in the result store")
	// ErrUnavailable: the store did not answer, is loading, read-only or out of memory. Wraps the cause.
	ErrUnavailable = errors.New("the result store does not answer")
	// ErrFenced: another attempt owns the job, or it has ended.
	ErrFenced = errors.New("another attempt owns the job")
	// ErrGone: the job's event stream is not there (wiped); the caller appends its attempt's events again with Restore.
	ErrGone = errors.New("the event stream is gone")
)

// Config of a Store. Zero fields get the defaults named.
type Config struct {
	// URL is redis://, rediss:// or unix://, or several comma-separated host:port of a cluster.
	URL string
	// Prefix of every key. Default "mr:".
	Prefix string
	// Retention is how long a record is kept past the job's deadline. Default 7 days.
	Retention time.Duration
	// KeyTTL is how long an idempotency key is kept. Default 24 h.
	KeyTTL time.Duration
	// MaxEvents bounds a job's event stream in entries. Default 20,000.
	MaxEvents int
}

// Store is safe for concurrent use.
type Store struct{ impl }

// Open connects, loads the scripts, and reads maxmemory-policy: other than noeviction is refused with a message that says what to set
// (a server that hides CONFIG gets one warning).
func Open(ctx context.Context, cfg Config, log *slog.Logger) (*Store, error) { panic("results") }

// Close closes all connections.
func (s *Store) Close() error { panic("results") }

// Ping returns nil if the store takes writes, else ErrUnavailable.
func (s *Store) Ping(ctx context.Context) error { panic("results") }

// Now is the store's clock: this machine's monotonic clock corrected by Redis TIME, which is read at Open and every ten seconds. It does no I/O.
func (s *Store) Now() job.Millis { panic("results") }

// --- submitting ---

// KeyEntry is what an idempotency key stands for.
type KeyEntry struct {
	ID   job.ID
	Hash string // of the request
}

// ReserveKey binds tenant's key to entry unless it is bound already, and returns the entry that holds now and whether it is the caller's.
// ttl 0 is Config.KeyTTL.
func (s *Store) ReserveKey(ctx context.Context, t job.Tenant, key string, entry KeyEntry, ttl time.Duration) (held KeyEntry, mine bool, err error) {
	panic("results")
}

// ReleaseKey unbinds the key if it is bound to id.
func (s *Store) ReleaseKey(ctx context.Context, t job.Tenant, key string, id job.ID) error {
	panic("results")
}

// Accept writes the record in state accepting with `since` = now, with body (nil if it is a blob), and indexes it for List and Due. If the record exists and is
// accepting, only since is renewed; any other state is left alone. It returns the state that holds now and its since.
func (s *Store) Accept(ctx context.Context, j *job.Job, body []byte) (job.State, job.Millis, error) {
	panic("results")
}

// Queued turns accepting into queued. A record in another state is left alone; one that is gone is written whole.
func (s *Store) Queued(ctx context.Context, j *job.Job, body []byte) error { panic("results") }

// Discard removes the record if it is accepting since exactly `since`, and tells whether it did.
func (s *Store) Discard(ctx context.Context, j *job.Job, since job.Millis) (bool, error) {
	panic("results")
}

// --- reading ---

// Record is one job's record.
type Record struct {
	Job   job.Job
	State job.State
	// Since is when it became accepting. Version rises with every change that a client can see.
	Since   job.Millis
	Version int64
	// The current or last attempt: its token, worker, lease end (0 = none), the delivery's ack subject, and when it may be tried again.
	Token      job.Token
	Worker     job.Worker
	Lease      job.Millis
	AckSubject string
	NotBefore  job.Millis
	// CancelAsked: a client wants it cancelled.
	CancelAsked bool
	// N is the number of the last event. Deaths counts attempts that ended with their worker's death, Charged all attempts that count, Uncharged the rest.
	N                          int64
	Deaths, Charged, Uncharged int
	Attempts                   []job.Attempt
	FirstToken                 job.Millis
	// Outcome is set once ended. HasResult tells whether Redis holds the answer (Result reads it).
	Outcome   *job.Outcome
	HasResult bool
}

// Get reads a record without bodies. ErrNotFound, ErrUnavailable.
func (s *Store) Get(ctx context.Context, id job.ID) (*Record, error) { panic("results") }

// Body reads the request's body (kept until the job ends), Result the answer.
func (s *Store) Body(ctx context.Context, id job.ID) ([]byte, error)   { panic("results") }
func (s *Store) Result(ctx context.Context, id job.ID) ([]byte, error) { panic("results") }

// Filter of a listing; zero fields match all.
type Filter struct {
	State   job.State
	Model   job.Model
	Session job.Session
}

// List returns up to limit of tenant's records that match, newest first by (created, id), after the job `after` ("" = from the newest), and whether more follow.
// An `after` that tenant does not have is ErrNotFound.
func (s *Store) List(ctx context.Context, t job.Tenant, f Filter, after job.ID, limit int) ([]*Record, bool, error) {
	panic("results")
}

// Due returns up to limit live jobs whose next deadline (queue timeout while never started, else expiry) is at or before now, earliest first.
func (s *Store) Due(ctx context.Context, now job.Millis, limit int) ([]job.ID, error) {
	panic("results")
}

// Live calls fn with pages of the ids of all jobs that have not ended, in no particular order.
func (s *Store) Live(ctx context.Context, fn func([]job.ID) error) error { panic("results") }

// Forget drops ids from the indexes of live jobs: ids whose record is gone for good.
func (s *Store) Forget(ctx context.Context, ids ...job.ID) error { panic("results") }

// --- running ---

// Verdict is a claim's answer.
type Verdict string

// The verdicts.
const (
	Taken      Verdict = "taken"      // the job is the caller's
	Ended      Verdict = "ended"      // it has ended: ack
	Held       Verdict = "held"       // another attempt's lease lives: nak after Wait
	TooEarly   Verdict = "too_early"  // a retry's delay runs: nak after Wait
	CheckDone  Verdict = "check_done" // look at DONE first, then claim again with Checked
	Unrecorded Verdict = "unrecorded" // no record: after DONE was looked at, claim again with Body
)

// ClaimRequest asks for a job.
type ClaimRequest struct {
	Job        *job.Job
	Worker     job.Worker
	Lease      time.Duration
	AckSubject string
	// Delivered is the delivery's count. Checked says that DONE was looked at and has no outcome.
	Delivered int
	Checked   bool
	// Body is written with the record if there is none; Whole says that it may be (Body may be nil for a blob).
	Body  []byte
	Whole bool
}

// Claim is what a claim gave.
type Claim struct {
	Verdict Verdict
	Wait    time.Duration // Held, TooEarly
	// For Taken: the attempt's token; the number of the event that the claim appended (status or reset), 0 if the job keeps no events; how many tries were charged before;
	// whether cancelling was asked; the store's time; whether an earlier attempt had already put token events into the stream.
	Token                      job.Token
	N                          int64
	Charged, Deaths, Uncharged int
	CancelAsked                bool
	Now                        job.Millis
	Restarted                  bool
}

// Claim is the dedupe of deliveries, in one script: ended -> Ended; live lease of another -> Held; not_before in the future -> TooEarly; no record, an earlier attempt (token > 0), or
// Delivered > 1, unless Checked -> CheckDone; no record and not Whole -> Unrecorded; else taken: token = max(previous + 1, Redis TIME in ms), lease = now + Lease,
// state running, the attempt added, and a `status` event, or a `reset` where token events of an earlier attempt stand in the stream, appended with n+1. If the stream is missing and this is not provably
// the first attempt, n starts at Redis TIME in ms. The worker's held set is written before the script.
func (s *Store) Claim(ctx context.Context, r ClaimRequest) (*Claim, error) { panic("results") }

// Renewal is what a running attempt says about itself; a wiped record is written again from it.
type Renewal struct {
	Job        *job.Job
	Body       []byte
	Worker     job.Worker
	Token      job.Token
	N          int64
	Started    job.Millis
	Lease      time.Duration
	AckSubject string
}

// Renew extends the lease: own token and lease not ended -> extended; no record, or one without a token -> own token, attempt and n written again; else ErrFenced.
// It reports whether cancelling was asked.
func (s *Store) Renew(ctx context.Context, r Renewal) (cancelAsked bool, err error) { panic("results") }

// Owns returns nil if token still owns the job, ErrFenced if another does or it has ended, nil for a wiped record.
func (s *Store) Owns(ctx context.Context, id job.ID, token job.Token) error { panic("results") }

// Append adds an attempt's events under the ids <token>-<n>, and stores the time of the first token event. Repeating it is harmless. ErrFenced if a newer attempt has appended, ErrGone if the stream is not there.
func (s *Store) Append(ctx context.Context, j *job.Job, events []job.Event) error { panic("results") }

// Restore creates a missing stream with the attempt's events from the first kept on, under their own ids. Harmless if the stream is there.
func (s *Store) Restore(ctx context.Context, j *job.Job, events []job.Event) error { panic("results") }

// GiveBack ends an attempt without an outcome: running -> queued, lease ended, not before now + delay. reason is shown in the attempts; charged tells whether it counts. ErrFenced.
func (s *Store) GiveBack(ctx context.Context, id job.ID, token job.Token, delay time.Duration, charged bool, reason string) error {
	panic("results")
}

// EndLease ends the lease of an attempt of a dead worker: state queued, lease 0, token kept; charged adds a death. It returns the record as it then is (with the ack subject). ErrNotFound; ErrFenced if the worker no longer holds it.
func (s *Store) EndLease(ctx context.Context, id job.ID, w job.Worker, charged bool) (*Record, error) {
	panic("results")
}

// Held lists the jobs that w has claimed and not let go; Holders all workers that hold any.
func (s *Store) Held(ctx context.Context, w job.Worker) ([]job.ID, error) { panic("results") }
func (s *Store) Holders(ctx context.Context) ([]job.Worker, error)        { panic("results") }

// LetGo drops ids from w's held set.
func (s *Store) LetGo(ctx context.Context, w job.Worker, ids ...job.ID) error { panic("results") }

// Finish writes the outcome into the record (whole if it is gone), the answer (nil: not kept), drops the request's body and the indexes of live jobs, and, if the job keeps events, appends `done` with
// number o.LastEvent (preceded by a `reset` with resetData if that is not nil, numbered o.LastEvent-1). doneData is the done event's JSON. An ended record is left alone. Repeating it is harmless.
func (s *Store) Finish(ctx context.Context, j *job.Job, o *job.Outcome, result, resetData, doneData []byte) error {
	panic("results")
}

// AskCancel stores the wish to cancel and returns the record. ErrNotFound.
func (s *Store) AskCancel(ctx context.Context, id job.ID) (*Record, error) { panic("results") }

// Delete removes the record of an ended job, its answer, events, index entries.
func (s *Store) Delete(ctx context.Context, t job.Tenant, id job.ID) error { panic("results") }

// --- events ---

// Span is what a stream holds: the numbers of its first and last event; zero if it is empty or gone.
type Span struct{ First, Last int64 }

// Events returns up to limit events with number > after, in order, and the stream's span. A stream that is not there is an empty span and no error.
func (s *Store) Events(ctx context.Context, id job.ID, after int64, limit int) ([]job.Event, Span, error) {
	panic("results")
}

// --- rebuilding ---

// Wiped tells whether the sentinel is missing: the store is new or was wiped. SetSentinel says that it is whole again.
func (s *Store) Wiped(ctx context.Context) (bool, error) { panic("results") }
func (s *Store) SetSentinel(ctx context.Context) error   { panic("results") }

// RestoreQueued writes records of waiting jobs (state queued) where there is none, with their idempotency keys; RestoreEnded those of ended ones, without answers and events.
// Both leave existing records alone, and take many at once in one round trip.
func (s *Store) RestoreQueued(ctx context.Context, jobs []QueuedJob) error { panic("results") }

// QueuedJob is a waiting job and its body.
type QueuedJob struct {
	Job  job.Job
	Body []byte
}

// EndedJob is an ended job.
type EndedJob struct {
	Job     job.Job
	Outcome job.Outcome
}

func (s *Store) RestoreEnded(ctx context.Context, jobs []EndedJob) error { panic("results") }

type impl struct{}
