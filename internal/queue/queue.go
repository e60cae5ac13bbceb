package queue

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/millrace/millrace/internal/job"
)

// Errors that callers branch on.
var (
	// ErrExists: a copy of the job already waits on that subject (10071). For a retried publish it means success. It can be this very call's copy,
	// where the first answer was lost and the message sent again.
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

// WorkerLane is pulled by worker w alone. A name too long for a subject is hashed in it.
func WorkerLane(w job.Worker) Lane { return newLane("w-", string(w)) }

// TenantLane is t's waiting line: the dispatcher moves jobs from it to AnyLane. A name too long for a subject is hashed in it.
func TenantLane(t job.Tenant) Lane { return newLane("t-", string(t)) }

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

func (c Config) withDefaults() (Config, error) {
	d := Config{
		Replicas: 1, WorkMaxBytes: 8 << 30, DoneMaxBytes: 16 << 30, LiveMaxBytes: 256 << 20,
		Retention: 7 * 24 * time.Hour, WorkAckWait: 15 * time.Second, LiveAckWait: 5 * time.Second,
	}
	for _, f := range []struct {
		name    string
		value   *int64
		initial int64
	}{
		{"WorkMaxBytes", &c.WorkMaxBytes, d.WorkMaxBytes},
		{"DoneMaxBytes", &c.DoneMaxBytes, d.DoneMaxBytes},
		{"LiveMaxBytes", &c.LiveMaxBytes, d.LiveMaxBytes},
		{"Retention", (*int64)(&c.Retention), int64(d.Retention)},
		{"WorkAckWait", (*int64)(&c.WorkAckWait), int64(d.WorkAckWait)},
		{"LiveAckWait", (*int64)(&c.LiveAckWait), int64(d.LiveAckWait)},
	} {
		if *f.value < 0 {
			return c, fmt.Errorf("queue: %s is %d, must not be negative", f.name, *f.value)
		}
		if *f.value == 0 {
			*f.value = f.initial
		}
	}
	if c.Replicas == 0 {
		c.Replicas = d.Replicas
	}
	if c.Replicas < 1 || c.Replicas > 5 {
		return c, fmt.Errorf("queue: Replicas is %d, must be 1 to 5", c.Replicas)
	}
	return c, nil
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
type Queue struct {
	nc     *nats.Conn
	js     jetstream.JetStream
	cfg    Config
	log    *slog.Logger
	commit *committer
	models sync.Map // job.Model -> *model; as many as this process has used

	stop    chan struct{} // closed by Close
	status  chan nats.Status
	life    context.Context
	end     context.CancelFunc
	running sync.WaitGroup
	repair  chan struct{} // holds one element while the models are to be made sure of

	mu      sync.Mutex
	up      chan struct{}   // closed and replaced at each reconnection
	link    context.Context // ends when the connection is lost; replaced at each reconnection
	unlink  context.CancelFunc
	pullers map[*Puller]struct{}
	closed  bool
}

// Open checks the server's version, creates or migrates DONE, and starts the committer. It does not close nc. It waits for a server that is not there yet
// until ctx ends. What the Queue itself runs ends with Close, not with ctx.
func Open(ctx context.Context, nc *nats.Conn, cfg Config, log *slog.Logger) (*Queue, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, fmt.Errorf("opening the queue: %w", err)
	}
	q := &Queue{
		nc: nc, js: js, cfg: cfg, log: log,
		stop: make(chan struct{}), repair: make(chan struct{}, 1),
		up: make(chan struct{}), pullers: map[*Puller]struct{}{},
	}
	q.commit = &committer{q: q, js: js, lines: map[string]*line{}}
	q.life, q.end = context.WithCancel(context.WithoutCancel(ctx)) // the repairs go on when the opening is over
	q.link, q.unlink = context.WithCancel(q.life)
	q.status = nc.StatusChanged(nats.CONNECTED, nats.RECONNECTING, nats.CLOSED)
	q.running.Go(q.watch)
	q.running.Go(q.repairs)
	if err := q.open(ctx); err != nil {
		q.Close()
		return nil, fmt.Errorf("opening the queue: %w", err)
	}
	return q, nil
}

// open tries until ctx ends: a server that has just started refuses for a while, and a cluster without a leader does not answer at all.
func (q *Queue) open(ctx context.Context) error {
	if _, has := ctx.Deadline(); !has {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, defaultTimeout)
		defer cancel()
	}
	const perTry, pause = 2 * time.Second, 100 * time.Millisecond
	for {
		err := q.waitConnected(ctx)
		if err == nil {
			err = checkServer(q.nc, q.log)
		}
		if err == nil {
			try, cancel := context.WithTimeout(ctx, perTry)
			err = q.ensureStream(try, q.doneConfig(), false)
			cancel()
		}
		if !errors.Is(err, ErrUnavailable) {
			return err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return err
		}
	}
}

// Close stops the committer after what it holds is stored. Pullers are to be closed before.
func (q *Queue) Close() {
	q.mu.Lock()
	if q.closed {
		q.mu.Unlock()
		return
	}
	q.closed = true
	q.mu.Unlock()
	q.commit.close()
	close(q.stop)
	q.end()
	q.nc.RemoveStatusListener(q.status)
	q.running.Wait()
}

// outward turns what only this package knows into what callers know.
func outward(err error) error {
	if errors.Is(err, errNoStream) || errors.Is(err, errPending) {
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	return err
}
