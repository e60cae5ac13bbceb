// Package ledger keeps in SQL what must outlive every queue: tenants, API keys, files, batches, usage, and which creates were done already.
package ledger

import (
	"errors"

	"github.com/millrace/millrace/internal/job"
)

// Errors that callers branch on.
var (
	ErrNotFound    = errors.New("no such row")                          // or it is another tenant's
	ErrExists      = errors.New("such a row exists already")            // a tenant of that id
	ErrDeleted     = errors.New("a tenant of that id was deleted")      // which keeps its id
	ErrInUse       = errors.New("it is in use")                         // the input of a batch that lives; a tenant that has keys; a pool that comes from a file
	ErrTaken       = errors.New("the model has a pool already")         // a pool with a model of another one
	ErrWorkload    = errors.New("the workload has a pool already")      // a pool with the Kubernetes workload of another one
	ErrState       = errors.New("the status does not allow it")         // a compare-and-set found another status; the row as it is comes with it where the method returns one
	ErrFenced      = errors.New("another process leads by now")         // a higher epoch has written
	ErrUnavailable = errors.New("the database does not answer")         // nothing is known of what was written
	ErrSchema      = errors.New("the database has another schema")      // the message says which, and what to run
	ErrReused      = errors.New("the key stands for another request")   // Remember: same key, other hash
	ErrQuota       = errors.New("the tenant's files take all its room") // InsertFile
)

// Config of a Store.
type Config struct {
	// URL is postgres://user:password@host/database?…, or sqlite:PATH (sqlite: and a path; a file that several processes of one machine may share).
	URL string
	// MaxConns bounds the connections to PostgreSQL. Default 8.
	MaxConns int
}

// Limits bound what a tenant or a key may do. 0 is no limit. Those of a key count besides its tenant's.
type Limits struct {
	// RequestsPerMinute and TokensPerMinute bound what is submitted: calls, jobs, and the creates of files and batches; tokens are those expected. A batch's lines count in neither.
	RequestsPerMinute int64 `json:"requests_per_minute,omitempty"`
	TokensPerMinute   int64 `json:"tokens_per_minute,omitempty"`
	// Running bounds the calls that are answered on their connections at once, and, of a tenant, how many durable jobs and batch lines are given to workers at once; RunningTokens the tokens that all these are expected to
	// need. Calls over it are refused, durable jobs and lines wait.
	Running       int64 `json:"running,omitempty"`
	RunningTokens int64 `json:"running_tokens,omitempty"`
	// Queued and QueuedTokens bound what is accepted and has not ended; lines of live batches count in QueuedTokens alone. Of a tenant; a key has none.
	Queued       int64 `json:"queued,omitempty"`
	QueuedTokens int64 `json:"queued_tokens,omitempty"`
	// FileBytes bounds the bytes of all files that are kept. Of a tenant; a key has none.
	FileBytes int64 `json:"file_bytes,omitempty"`
}

// Tenant owns keys, files, batches and jobs. The tenant job.DefaultTenant always exists.
type Tenant struct {
	ID      job.Tenant
	Name    string
	Weight  int // its share of a model that is short of room, against other tenants': 1..1000, default 100
	Limits  Limits
	Created job.Millis
	// Disabled tenants' keys open nothing; what was accepted is finished.
	Disabled bool
}

// Scope is what a key opens.
type Scope string

// The scopes. Admin opens all, as tenant job.DefaultTenant.
const (
	Inference Scope = "inference" // chat, completions, embeddings, responses, jobs, models
	Batches   Scope = "batches"   // files and batches
	Admin     Scope = "admin"     // /admin
)

// Scopes lists all scopes.
func Scopes() []Scope { return []Scope{Inference, Batches, Admin} }

// Key is an API key as people see it: the secret is shown once, when it is made, and kept as its SHA-256 alone.
type Key struct {
	ID     string // "key_…"
	Tenant job.Tenant
	Name   string
	Prefix string  // the secret's first characters, to know it by
	Scopes []Scope // default Inference and Batches
	// Models that it may use; empty is all.
	Models  []job.Model
	Limits  Limits
	Created job.Millis
	// Expires and Revoked are 0 for never. LastUsed is known to the minute.
	Expires, Revoked, LastUsed job.Millis
}

// Identity is what a secret opens.
type Identity struct {
	Key    Key
	Tenant Tenant
}

// FilePrefix begins a file's id, and the names of its objects.
const FilePrefix = "file-"

// File is a stored file. Its bytes are the blob of that name.
type File struct {
	ID       string // "file-…"
	Tenant   job.Tenant
	Key      string // id of the API key that made it, "" for none
	Purpose  string // batch, batch_output, …
	Filename string
	Bytes    int64
	SHA256   string // hex
	Blob     string
	// Batch is the one that wrote it, "" for an upload.
	Batch   string
	Created job.Millis
	Expires job.Millis // 0 is never
}

// Page asks for a part of a listing, in the order of (created, id).
type Page struct {
	After string // id of the item before the first; one that the tenant does not have is ErrNotFound
	Limit int
	Asc   bool // oldest first; default newest first
}

// Status of a batch, as the OpenAI API names them.
type Status string

// The statuses.
const (
	Validating Status = "validating"
	InProgress Status = "in_progress"
	Finalizing Status = "finalizing"
	Cancelling Status = "cancelling"
	Completed  Status = "completed"
	Failed     Status = "failed"
	Expired    Status = "expired"
	Cancelled  Status = "cancelled"
)

// Ended tells whether s is terminal.
func (s Status) Ended() bool {
	return s == Completed || s == Failed || s == Expired || s == Cancelled
}

// Batch is a batch's row.
type Batch struct {
	ID        string // "batch_…"
	Tenant    job.Tenant
	Key       string // id of the API key that made it, "" for none
	Endpoint  job.Endpoint
	InputFile string
	Window    string      // completion_window as asked
	Models    []job.Model // that its key may use; empty is all
	Metadata  map[string]string
	// OutputExpires is the lifetime of its output files in seconds, 0 for none.
	OutputExpires int64
	// RetryOf is the batch whose failed lines these are.
	RetryOf string

	Status Status
	// Late: its window closed before it was done, so that its end is Expired.
	Late   bool
	Errors []job.LineError
	// Model is the one of all its lines; "" while it is not validated, or for a mixture.
	Model                 job.Model
	OutputFile, ErrorFile string
	// Total lines; Done ended with 2xx, Bad otherwise. Tokens that all lines are expected to need, TokensDone those of the lines that ended.
	Total, Done, Bad   int64
	Tokens, TokensDone job.Tokens
	Usage              job.Usage

	Created, InProgress, Expires, Finalizing, Completed, Failed, Expired, Cancelling, Cancelled job.Millis
}

// Portion is a batch's lines of one model, in the order of its index: those before Confirmed are surely queued, those from Reserved on surely not; between them a crash may have cut.
type Portion struct {
	Model               job.Model
	Lines               int64
	Tokens              job.Tokens
	Confirmed, Reserved int64
}

// Ended is what the ledger takes from one outcome in DONE.
type Ended struct {
	Tenant job.Tenant
	Model  job.Model
	Key    string // id of the API key
	Group  string // job.NoGroup or a batch
	At     job.Millis
	OK     bool       // 2xx
	Tokens job.Tokens // expected, as in Batch.Tokens
	Usage  job.Usage
}

// Position is how far a reader of a stream has come. Stream tells one incarnation of it from another made later under its name: by its creation time.
type Position struct {
	Stream string
	Seq    uint64
}

// UsageRow is what was used on one day (UTC, "2006-01-02"); fields that were not asked for are "".
type UsageRow struct {
	Day    string
	Tenant job.Tenant
	Model  job.Model
	Key    string

	Requests, Failed int64
	Usage            job.Usage
}

// UsageQuery asks for sums. From and To are days, both included, "" for no bound. By names the fields to keep apart: day, tenant, model, key.
type UsageQuery struct {
	From, To string
	Tenant   job.Tenant
	Model    job.Model
	Key      string
	By       []string
}
