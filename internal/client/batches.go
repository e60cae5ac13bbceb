package client

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/millrace/millrace/internal/job"
)

// Batch is the API's batch object. Times are unix seconds, 0 for not yet.
type Batch struct {
	ID               string       `json:"id"`
	Object           string       `json:"object"`
	Endpoint         job.Endpoint `json:"endpoint"`
	Model            job.Model    `json:"model"`
	InputFileID      string       `json:"input_file_id"`
	CompletionWindow string       `json:"completion_window"`
	Status           string       `json:"status"`
	OutputFileID     string       `json:"output_file_id"`
	ErrorFileID      string       `json:"error_file_id"`
	Errors           *struct {
		Data []job.LineError `json:"data"`
	} `json:"errors"`
	CreatedAt     int64             `json:"created_at"`
	InProgressAt  int64             `json:"in_progress_at"`
	ExpiresAt     int64             `json:"expires_at"`
	FinalizingAt  int64             `json:"finalizing_at"`
	CompletedAt   int64             `json:"completed_at"`
	FailedAt      int64             `json:"failed_at"`
	ExpiredAt     int64             `json:"expired_at"`
	CancellingAt  int64             `json:"cancelling_at"`
	CancelledAt   int64             `json:"cancelled_at"`
	RequestCounts RequestCounts     `json:"request_counts"`
	Usage         *BatchUsage       `json:"usage"`
	Metadata      map[string]string `json:"metadata"`

	raw json.RawMessage
}

// RequestCounts of a batch. Completed counts the lines answered with 2xx.
type RequestCounts struct {
	Total     int64 `json:"total"`
	Completed int64 `json:"completed"`
	Failed    int64 `json:"failed"`
}

// BatchUsage is what the lines of a batch took so far.
type BatchUsage struct {
	InputTokens        job.Tokens `json:"input_tokens"`
	InputTokensDetails struct {
		CachedTokens job.Tokens `json:"cached_tokens"`
	} `json:"input_tokens_details"`
	OutputTokens        job.Tokens `json:"output_tokens"`
	OutputTokensDetails struct {
		ReasoningTokens job.Tokens `json:"reasoning_tokens"`
	} `json:"output_tokens_details"`
	TotalTokens job.Tokens `json:"total_tokens"`
}

// The statuses of a batch.
const (
	BatchValidating = "validating"
	BatchInProgress = "in_progress"
	BatchFinalizing = "finalizing"
	BatchCancelling = "cancelling"
	BatchCompleted  = "completed"
	BatchFailed     = "failed"
	BatchExpired    = "expired"
	BatchCancelled  = "cancelled"
)

// Ended tells whether the batch's status is its last.
func (b *Batch) Ended() bool {
	return b.Status == BatchCompleted || b.Status == BatchFailed || b.Status == BatchExpired || b.Status == BatchCancelled
}

// EndedAt is when it ended, in unix seconds, 0 for not yet.
func (b *Batch) EndedAt() int64 {
	if !b.Ended() {
		return 0
	}
	return max(b.CompletedAt, b.FailedAt, b.ExpiredAt, b.CancelledAt)
}

// UnmarshalJSON reads a batch object.
func (b *Batch) UnmarshalJSON(raw []byte) error {
	type plain Batch // without the methods
	if err := json.Unmarshal(raw, (*plain)(b)); err != nil {
		return err
	}
	b.raw = bytes.Clone(raw)
	return nil
}

// MarshalJSON returns the batch object as the server wrote it, with the fields that this client does not know.
func (b Batch) MarshalJSON() ([]byte, error) {
	if b.raw != nil {
		return b.raw, nil
	}
	type plain Batch
	return json.Marshal(plain(b))
}

// NewBatch is what a batch is created from.
type NewBatch struct {
	InputFileID      string            `json:"input_file_id"`
	Endpoint         job.Endpoint      `json:"endpoint"`
	CompletionWindow string            `json:"completion_window"`
	Metadata         map[string]string `json:"metadata,omitempty"`
	// Key makes repeated creates one batch; "" is a fresh one.
	Key string `json:"-"`
}

// CreateBatch starts a batch. When it returns, the batch is durable.
func (c *Client) CreateBatch(ctx context.Context, n NewBatch) (*Batch, error) {
	if n.Key == "" {
		n.Key = rand.Text()
	}
	var b Batch
	err := c.do(ctx, request{method: http.MethodPost, path: "/v1/batches", body: n, header: map[string]string{"Idempotency-Key": n.Key}}, &b)
	return &b, err
}

func batchPath(id string) string { return "/v1/batches/" + url.PathEscape(id) }

// Batch reads a batch.
func (c *Client) Batch(ctx context.Context, id string) (*Batch, error) {
	var b Batch
	err := c.do(ctx, request{method: http.MethodGet, path: batchPath(id)}, &b)
	return &b, err
}

// BatchPage is a page of a listing, newest first.
type BatchPage struct {
	Data    []Batch `json:"data"`
	LastID  string  `json:"last_id"`
	HasMore bool    `json:"has_more"`
}

// Batches lists batches. after is the last id of the page before, "" for the first; limit 0 is the server's.
func (c *Client) Batches(ctx context.Context, after string, limit int) (*BatchPage, error) {
	q := make(url.Values)
	if after != "" {
		q.Set("after", after)
	}
	if limit > 0 {
		q.Set("limit", strconv.Itoa(limit))
	}
	var p BatchPage
	err := c.do(ctx, request{method: http.MethodGet, path: "/v1/batches", query: q}, &p)
	return &p, err
}

// CancelBatch asks that a batch ends without its other lines. One that ended otherwise is an Error with status 409.
func (c *Client) CancelBatch(ctx context.Context, id string) (*Batch, error) {
	var b Batch
	err := c.do(ctx, request{method: http.MethodPost, path: batchPath(id) + "/cancel"}, &b)
	return &b, err
}

// CancelAnyBatch is CancelBatch for operators: the batch may be any tenant's. It needs an admin key where any is configured.
func (c *Client) CancelAnyBatch(ctx context.Context, id string) (*Batch, error) {
	var b Batch
	err := c.do(ctx, request{method: http.MethodPost, path: "/admin" + batchPath(id) + "/cancel"}, &b)
	return &b, err
}

// retryTimeout bounds one try of RetryBatch: the server writes the new batch's file meanwhile.
const retryTimeout = 10 * time.Minute

// RetryBatch starts a batch of the lines of an ended one that did not complete. key makes repeated calls one batch; "" is a fresh one.
func (c *Client) RetryBatch(ctx context.Context, id, key string) (*Batch, error) {
	if key == "" {
		key = rand.Text()
	}
	var b Batch
	err := c.do(ctx, request{method: http.MethodPost, path: batchPath(id) + "/retry", header: map[string]string{"Idempotency-Key": key}, timeout: retryTimeout}, &b)
	return &b, err
}

// maxResultLine bounds one line of a batch's results, in bytes.
const maxResultLine = maxAnswer

// Results writes the lines of a batch that have ended so far, whole lines only, and returns how many. They come in no order. A stream that breaks off is an error, for
// the next one may come in another order.
func (c *Client) Results(ctx context.Context, id string, w io.Writer) (int64, error) {
	lines := int64(0)
	err := c.persist(ctx, true, func() error {
		ctx, idle := c.watch(ctx)
		defer idle.stop()
		r := request{method: http.MethodGet, path: batchPath(id) + "/results"}
		req, err := c.newRequest(ctx, r, http.NoBody)
		if err != nil {
			return err
		}
		resp, err := c.call(req)
		if err != nil {
			return err
		}
		defer resp.Body.Close() //nolint:errcheck // read, or given up
		n, err := copyLines(w, &moving{resp.Body, idle})
		lines += n
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil && errors.Is(context.Cause(ctx), context.Canceled):
			return fmt.Errorf("reading the results of %s: %w", id, context.Canceled)
		case errors.Is(err, errWriting) || lines > 0:
			return fmt.Errorf("reading the results of %s: after %d lines: %w", id, lines, err)
		}
		return fmt.Errorf("reading the results of %s: %w: %w", id, ErrUnreachable, err)
	})
	return lines, err
}

// moving has its reads watched.
type moving struct {
	io.Reader
	idle *idleWatch
}

func (m *moving) Read(p []byte) (int, error) {
	m.idle.arm()
	defer m.idle.disarm()
	return m.Reader.Read(p)
}

// errWriting: the copy could not be written.
var errWriting = errors.New("writing a line")

// copyLines copies whole lines. What stands behind the last newline is lost, and an error.
func copyLines(w io.Writer, r io.Reader) (lines int64, err error) {
	var held []byte // what came since the last newline
	buffer := make([]byte, 64<<10)
	for {
		n, err := r.Read(buffer)
		chunk := buffer[:n]
		if end := bytes.LastIndexByte(chunk, '\n') + 1; end > 0 {
			whole := chunk[:end]
			if len(held) > 0 {
				whole = append(held, whole...)
				held = nil
			}
			if _, err := w.Write(whole); err != nil {
				return lines, fmt.Errorf("%w: %w", errWriting, err)
			}
			lines += int64(bytes.Count(whole, []byte{'\n'}))
			chunk = chunk[end:]
		}
		held = append(held, chunk...)
		switch {
		case len(held) > maxResultLine:
			return lines, fmt.Errorf("a line is longer than %d bytes", maxResultLine)
		case errors.Is(err, io.EOF) && len(held) > 0:
			return lines, io.ErrUnexpectedEOF
		case errors.Is(err, io.EOF):
			return lines, nil
		case err != nil:
			return lines, err
		}
	}
}
