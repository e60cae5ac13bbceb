package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/millrace/millrace/internal/job"
)

// Request is one call.
type Request struct {
	Endpoint job.Endpoint
	// Body is sent as it is, and closed if it is an io.Closer.
	Body io.Reader
	// Size is the body's length in bytes.
	Size int64
	// ID becomes the X-Request-Id header.
	ID job.ID
}

// Response is the engine's answer: the caller closes Body. Closing it, or ending the call's context, before its end cancels the work in the engine.
type Response struct {
	StatusCode  int
	ContentType string
	Header      http.Header
	// RetryAfter is the engine's Retry-After (seconds or a date), 0 if none.
	RetryAfter time.Duration
	Body       io.ReadCloser

	size                int64 // Content-Length, -1 if unknown
	maxEvent, maxAnswer int64
	path                string
}

// Call posts the request and returns when the answer's head is here. Errors wrap ErrUnreachable or the context's.
func (e *Engine) Call(ctx context.Context, r Request) (*Response, error) {
	callCtx, cancel := context.WithCancel(ctx)
	req, err := e.newRequest(callCtx, http.MethodPost, e.base+string(r.Endpoint), r.Body)
	if err != nil {
		cancel()
		return nil, err
	}
	if r.Size > 0 {
		req.ContentLength = r.Size
	}
	req.Header.Set("Content-Type", "application/json")
	if r.ID != "" {
		req.Header.Set("X-Request-Id", string(r.ID))
	}
	resp, err := e.do(req) //nolint:bodyclose // the Response has it, and its caller closes it
	if err != nil {
		cancel()
		return nil, err
	}
	return &Response{
		StatusCode:  resp.StatusCode,
		ContentType: resp.Header.Get("Content-Type"),
		Header:      resp.Header,
		RetryAfter:  retryAfter(resp.Header.Get("Retry-After"), time.Now()),
		Body:        &answerBody{ReadCloser: resp.Body, why: func(err error) error { return broken(ctx, err) }, cancel: cancel},
		size:        resp.ContentLength,
		maxEvent:    e.cfg.MaxEvent,
		maxAnswer:   e.cfg.MaxAnswer,
		path:        string(r.Endpoint),
	}, nil
}

// retryAfter reads the header in both its forms, 0 for anything else or the past.
func retryAfter(header string, now time.Time) time.Duration {
	if seconds, err := strconv.ParseInt(header, 10, 32); err == nil {
		return max(0, time.Duration(seconds)*time.Second)
	}
	if date, err := http.ParseTime(header); err == nil {
		return max(0, date.Sub(now))
	}
	return 0
}

// answerBody is an answer's body whose errors tell who ended it.
type answerBody struct {
	io.ReadCloser
	why    func(error) error // what an error of reading means: the caller's context has ended, or the engine broke off
	cancel context.CancelFunc

	whole atomic.Bool // what matters has been read: the connection can serve another call
}

func (b *answerBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		err = b.why(err)
	}
	return n, err
}

// drainTimeout and maxDrain bound what Close reads behind a stream's [DONE] to keep the connection: the end of the chunked body, which most often is here already.
const (
	drainTimeout = 50 * time.Millisecond
	maxDrain     = 4 << 10
)

// Close closes the connection, unless the answer has been read to its end.
func (b *answerBody) Close() error {
	defer b.cancel()
	if b.whole.Load() {
		end := time.AfterFunc(drainTimeout, b.cancel)
		_, _ = io.CopyN(io.Discard, b.ReadCloser, maxDrain) // the answer is whole: what is wrong behind it costs no more than the connection
		end.Stop()
	}
	return b.ReadCloser.Close()
}

// Over notes that all that matters has been read, though the body may not have ended: closing it then need not break the connection. Events does so by itself at [DONE].
func (r *Response) Over() {
	if body, ok := r.Body.(*answerBody); ok {
		body.whole.Store(true)
	}
}

// ReadAll reads the answer whole, at most MaxAnswer bytes. A cut answer is ErrUnreachable.
func (r *Response) ReadAll() ([]byte, error) {
	limit := r.maxAnswer
	if limit == 0 {
		limit = defaults.MaxAnswer
	}
	if r.size > limit {
		return nil, fmt.Errorf("reading the answer of %s: %w: %d bytes, the limit is %d", r.path, ErrTooLarge, r.size, limit)
	}
	const most = 1 << 20 // to believe a length before its bytes are here
	buf := make([]byte, 0, min(max(r.size, 0), most)+512)
	for {
		n, err := r.Body.Read(buf[len(buf):cap(buf)])
		buf = buf[:len(buf)+n]
		if int64(len(buf)) > limit {
			return nil, fmt.Errorf("reading the answer of %s: %w: over %d bytes", r.path, ErrTooLarge, limit)
		}
		if errors.Is(err, io.EOF) {
			return buf, nil
		}
		if err != nil {
			return nil, fmt.Errorf("reading the answer of %s: %w", r.path, err)
		}
		if len(buf) == cap(buf) {
			buf = append(buf, 0)[:len(buf)]
		}
	}
}
