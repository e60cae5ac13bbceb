// Package queue keeps accepted jobs and their outcomes in JetStream.
package queue

import (
	"context"
	"errors"
	"iter"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/millrace/millrace/internal/job"
)

// Errors that callers branch on.
var (
	// ErrExists: a copy of the job already waits on that subject (10071). For a retried publish it means success.
	ErrExists = errors.New("the job is already queued")
	// ErrFull: the stream is at its limit, or the disk is full; nothing was stored.
	ErrFull = errors.New("the queue is full")
	// ErrUnavailable: the server did not answer or refused for now; for a publish it is unknown whether it was stored.
	ErrUnavailable = errors.New("the queue does not answer")
	// ErrRefused: a definite refusal for another reason; nothing was stored.
	ErrRefused = errors.New("the queue refused the job")
	// ErrSettled: another outcome was first; it comes with the error.
	ErrSettled = errors.New("the job has already ended")
	// ErrNotFound: the leader of the stream has no such record.
	ErrNotFound = errors.New("no such job in the queue")
	// ErrSettings: an existing stream or consumer has settings that cannot be changed into ours; the message names the difference.
	ErrSettings = errors.New("existing stream has other settings")
)

// Kind tells which of a model's two streams a job waits in.
type Kind string

// Work is the file stream of durable jobs, Live the memory stream of jobs answered on their own connection.
const (
	Work Kind = "work"
	Live Kind = "live"
)

// Lane is where in a stream a job waits: for any worker, for one worker, or in a tenant's waiting line, which nobody pulls.
type Lane string

// AnyLane is pulled by every worker of the model.
const AnyLane Lane = "any"

// WorkerLane is pulled by worker w alone.
func WorkerLane(w job.Worker) Lane { return Lane("w-" + string(w)) }

// TenantLane is t's waiting line: the dispatcher moves jobs from it to AnyLane.
func TenantLane(t job.Tenant) Lane { return Lane("t-" + string(t)) }

// Config of a Queue. Zero fields get the defaults named.
type Config struct {
	// Replicas of every stream: 1, or 3 on a cluster. Default 1.
	Replicas int
	// WorkMaxBytes and DoneMaxBytes are the streams' one limit, in bytes. Defaults 8 GiB and 16 GiB; LiveMaxBytes 256 MiB.
	WorkMaxBytes, DoneMaxBytes, LiveMaxBytes int64
	// Retention is how long an outcome is kept after the longest deadline. DONE's MaxAge is 7 days (the longest deadline) + Retention + 1 day.
	// Default 7 days.
	Retention time.Duration
	// WorkAckWait and LiveAckWait: a delivery not renewed for so long goes to another worker. Defaults 15 s and 5 s.
	WorkAckWait, LiveAckWait time.Duration
}

// Message is a job with its body, as stored. Body is nil where the body is a blob.
type Message struct {
	Job  job.Job
	Body []byte
}

// Stored is a message and where it stands in its stream.
type Stored struct {
	Message
	Kind Kind
	Lane Lane
	Seq  uint64
	Time time.Time
}

// Record is an outcome as DONE has it: the whole job object in headers, the engine's answer as data. Result is nil in reads of headers only,
// for a LIVE job, for a blob, and once erased.
type Record struct {
	Job     job.Job
	Outcome job.Outcome
	Result  []byte
	Seq     uint64
}

// Queue is one process's access to the streams. Its methods are safe for concurrent use. All but Close take a context and return by its deadline;
// where it has none they use 5 seconds.
type Queue struct{ impl }

// Open checks the server's version, creates or migrates DONE, and starts the committer. It does not close nc.
func Open(ctx context.Context, nc *nats.Conn, cfg Config, log *slog.Logger) (*Queue, error) {
	panic("queue")
}

// Close stops the committer after what it holds is stored.
func (q *Queue) Close() { panic("queue") }

// EnsureModel creates or repairs the model's two streams and their shared consumers. Cheap when all is there and known to this process.
func (q *Queue) EnsureModel(ctx context.Context, m job.Model) error { panic("queue") }

// Models lists the models that have a WORK stream, by their real names (kept in the streams' metadata).
func (q *Queue) Models(ctx context.Context) ([]job.Model, error) { panic("queue") }

// Enqueue stores m in lane and returns once it is synced (WORK) or in memory (LIVE). Errors: ErrExists, ErrFull, ErrRefused, ErrUnavailable.
// A model's missing streams are created first.
func (q *Queue) Enqueue(ctx context.Context, kind Kind, lane Lane, m *Message) error { panic("queue") }

// Settle writes the job's outcome to DONE and returns once it is synced. The first outcome wins: if another is stored, Settle returns it and ErrSettled
// (with the same Token: a repeat of our own write, returned with a nil error). group is j.Group.
func (q *Queue) Settle(ctx context.Context, r *Record) (*Record, error) { panic("queue") }

// Outcome reads the outcome of a job of tenant in group (job.NoGroup, or a batch), with its answer. A miss of a direct read is confirmed by the leader. ErrNotFound, ErrUnavailable.
func (q *Queue) Outcome(ctx context.Context, t job.Tenant, group string, id job.ID) (*Record, error) {
	panic("queue")
}

// FindOutcome is Outcome without a known tenant and group.
func (q *Queue) FindOutcome(ctx context.Context, id job.ID) (*Record, error) { panic("queue") }

// Find looks for the job's message in a WORK stream: in model's if it is not "", else in all. The leader answers. Several copies: the one in AnyLane.
func (q *Queue) Find(ctx context.Context, m job.Model, id job.ID) (*Stored, error) { panic("queue") }

// Erase replaces the outcome of an ended job by a tombstone without body, metadata and error text, keeping state, times and usage.
func (q *Queue) Erase(ctx context.Context, t job.Tenant, group string, id job.ID) error {
	panic("queue")
}

// Remove deletes every copy of the job's message from the model's stream of that kind; none is no error.
func (q *Queue) Remove(ctx context.Context, kind Kind, m job.Model, id job.ID) error { panic("queue") }

// Waiting yields the messages of one lane ("" = every lane) of a model's stream in stream order, headers only (Body nil) unless bodies. It includes delivered, unacknowledged ones.
func (q *Queue) Waiting(ctx context.Context, kind Kind, m job.Model, lane Lane, bodies bool) iter.Seq2[*Stored, error] {
	panic("queue")
}

// Outcomes yields DONE's records from sequence seq on, headers only.
func (q *Queue) Outcomes(ctx context.Context, seq uint64) iter.Seq2[*Record, error] { panic("queue") }

// Present returns the ids of the jobs that have a message in the model's WORK stream, by one listing of its subjects, with each one's lane.
func (q *Queue) Present(ctx context.Context, m job.Model) (map[job.ID]Lane, error) { panic("queue") }

// Move publishes s again in lane `to` of its own stream, then deletes the old sequence: at no moment is the job without a copy. ErrExists from the
// publish counts as published. Any other failure leaves the old copy.
func (q *Queue) Move(ctx context.Context, s *Stored, to Lane) error { panic("queue") }

// Depth counts what one stream holds.
type Depth struct {
	// Waiting and Delivered (unacknowledged) messages in AnyLane by class.
	Waiting, Delivered map[job.Class]int
	// WorkerLanes and TenantLanes count the messages in such lanes, by lane. For worker lanes delivered ones are included.
	WorkerLanes, TenantLanes map[Lane]int
	// Bytes held and the stream's limit.
	Bytes, MaxBytes int64
}

// Depth reads the counts of a model's stream.
func (q *Queue) Depth(ctx context.Context, kind Kind, m job.Model) (Depth, error) { panic("queue") }

// Healthy returns nil if JetStream answers and DONE can be read.
func (q *Queue) Healthy(ctx context.Context) error { panic("queue") }

// DoneFill is the share of DONE's limit in use, 0..1.
func (q *Queue) DoneFill(ctx context.Context) (float64, error) { panic("queue") }

// NakSubject hands back the delivery that has this ack subject, after delay: for another process's deliveries, when that process is dead.
func (q *Queue) NakSubject(ctx context.Context, ackSubject string, delay time.Duration) error {
	panic("queue")
}

// DeleteLane deletes the consumers of a worker that is gone, and moves nothing.
func (q *Queue) DeleteLane(ctx context.Context, m job.Model, w job.Worker) error { panic("queue") }

// PullerConfig says what a Puller pulls: class's AnyLane, or, if Worker is set, that worker's own lane with all classes.
type PullerConfig struct {
	Kind   Kind
	Model  job.Model
	Class  job.Class
	Worker job.Worker
}

// Puller pulls from one consumer. One Pull may be outstanding at a time. The reply inbox lives as long as the Puller, so nothing delivered late is lost.
type Puller struct{ pullerImpl }

// Puller creates the consumer if needed.
func (q *Queue) Puller(ctx context.Context, cfg PullerConfig) (*Puller, error) { panic("queue") }

// PullRequest is one pull.
type PullRequest struct {
	// Batch is how many deliveries are wanted at most, at least 1.
	Batch int
	// Expires ends the pull at the server.
	Expires time.Duration
	// Level is the pull's priority, 0..9, the lowest served first. Ignored for a worker's own lane.
	Level int
}

// Pull sends one request and returns a channel of its deliveries that is closed when the request has ended: all delivered, expired, or refused. A lost
// stream or consumer is created again and a lost connection waited for before the channel closes, so that a caller may simply pull again.
// ctx ending does not end the request: the channel must be drained until closed, which happens at most a second after Expires.
func (p *Puller) Pull(ctx context.Context, r PullRequest) (<-chan *Delivery, error) { panic("queue") }

// Close unsubscribes; call it once the last Pull's channel is closed.
func (p *Puller) Close() { panic("queue") }

// Delivery is one message handed to this process. Exactly one of Ack and Nak ends it.
type Delivery struct {
	Stored
	// Delivered counts deliveries of this message, from 1.
	Delivered int
	// AckSubject lets another process hand the delivery back (NakSubject).
	AckSubject string
	AckWait    time.Duration

	deliveryImpl
}

// Ack removes the message from the stream. It does not wait for the server.
func (d *Delivery) Ack() error { panic("queue") }

// Nak hands the message back; it is delivered again after delay.
func (d *Delivery) Nak(delay time.Duration) error { panic("queue") }

// InProgress restarts AckWait.
func (d *Delivery) InProgress() error { panic("queue") }

type (
	impl         struct{}
	pullerImpl   struct{}
	deliveryImpl struct{}
)

// Connect opens a connection as every Millrace process needs it: it reconnects for ever, buffers no publishes while cut off (a buffered one would be delivered long after it was reported failed), and
// notices a dead server within seconds. server is an in-process server, or nil to dial url. name shows in the server's listings.
func Connect(url, name string, server nats.InProcessConnProvider, log *slog.Logger) (*nats.Conn, error) {
	panic("queue")
}
