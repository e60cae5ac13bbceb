// Package client calls Millrace's HTTP API: jobs and their events, files and batches, and what the platform says of itself.
//
// # Failure
//
// A call that the server refuses for now (429, 503) or that breaks on the way is made again until Config.Patience is over; a job is submitted under an
// idempotency key, so that a call made again never makes a second job. A server that was never reached is an error at once.
package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/millrace/millrace/internal/job"
)

// Config of a Client. Zero fields get the defaults named.
type Config struct {
	// URL of the API, with or without /v1 at its end. Default http://127.0.0.1:8080.
	URL string
	// APIKey is sent as bearer token if set.
	APIKey string
	// Patience is for how long one call is made again while the server refuses it for now or cannot be reached any more. 0 is not at all.
	Patience time.Duration
	// Timeout bounds one try of a call, long polls and event streams aside. Default 30 s.
	Timeout time.Duration
	// UserAgent names the program.
	UserAgent string
	// HTTP makes the calls. Default: a client of its own with no time-out.
	HTTP *http.Client
}

// DefaultURL is where a platform listens that was started without --listen.
const DefaultURL = "http://127.0.0.1:8080"

// maxAnswer bounds the body of an answer that is read whole, in bytes.
const maxAnswer = 64 << 20

// Client is safe for concurrent use.
type Client struct {
	cfg  Config
	base string
	// met tells that the server has answered once: it exists, and a broken connection is worth another try.
	met atomic.Bool
}

// New checks cfg and connects to nothing.
func New(cfg Config) (*Client, error) {
	if cfg.URL == "" {
		cfg.URL = DefaultURL
	}
	u, err := url.Parse(cfg.URL)
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" {
		return nil, fmt.Errorf("url is %q: it must be like %s", cfg.URL, DefaultURL)
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = 30 * time.Second
	}
	if cfg.HTTP == nil {
		cfg.HTTP = &http.Client{Transport: http.DefaultTransport.(*http.Transport).Clone()}
	}
	base := strings.TrimSuffix(strings.TrimSuffix(strings.TrimRight(cfg.URL, "/"), "/v1"), "/")
	return &Client{cfg: cfg, base: base}, nil
}

// URL is the API's base, without /v1.
func (c *Client) URL() string { return c.base }

// CloseIdleConnections closes the connections that no call uses.
func (c *Client) CloseIdleConnections() { c.cfg.HTTP.CloseIdleConnections() }

// Error is the API's refusal.
type Error struct {
	// Status is the HTTP status.
	Status int
	// Code is the API's own code, "" if it gave none. Message is for people. Param names the field at fault.
	Code           job.Code
	Message, Param string
	// RetryAfter is for how long the server wants to be left alone, 0 if it did not say.
	RetryAfter time.Duration
}

func (e *Error) Error() string {
	if e.Code != "" {
		return fmt.Sprintf("%s (%d %s)", e.Message, e.Status, e.Code)
	}
	return fmt.Sprintf("%s (%d)", e.Message, e.Status)
}

// forNow tells whether the same call may work later.
func (e *Error) forNow() bool {
	return e.Status == http.StatusTooManyRequests || e.Status == http.StatusBadGateway || e.Status == http.StatusServiceUnavailable || e.Status == http.StatusGatewayTimeout
}

// ErrUnreachable: no server answered. It wraps the cause.
var ErrUnreachable = errors.New("no answer")

// request is one call of the API.
type request struct {
	method, path string
	query        url.Values
	body         any // json.RawMessage as it is; nil for none
	header       map[string]string
	// timeout of a try; 0 is Config.Timeout.
	timeout time.Duration
	// once: another try could do another thing than the first.
	once bool
}

// do makes the call, again while that helps, and decodes its answer into out unless that is nil.
func (c *Client) do(ctx context.Context, r request, out any) error {
	var body []byte
	if r.body != nil {
		var err error
		if body, err = json.Marshal(r.body); err != nil {
			return fmt.Errorf("writing the body of %s %s: %w", r.method, r.path, err)
		}
	}
	return c.persist(ctx, !r.once, func() error {
		timeout := r.timeout
		if timeout == 0 {
			timeout = c.cfg.Timeout
		}
		ctx, cancel := context.WithTimeout(ctx, timeout)
		defer cancel()
		resp, err := c.send(ctx, r, body)
		if err != nil {
			return err
		}
		defer resp.Body.Close() //nolint:errcheck // read, or given up
		if out == nil {
			return nil
		}
		return c.decode(resp, r.path, out)
	})
}

// decode reads a whole answer into out.
func (c *Client) decode(resp *http.Response, path string, out any) error {
	raw, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	switch {
	case err != nil:
		return fmt.Errorf("reading the answer of %s: %w: %w", path, ErrUnreachable, err)
	case len(raw) > maxAnswer:
		return fmt.Errorf("the answer of %s is longer than %d bytes", path, maxAnswer)
	}
	if err := json.Unmarshal(raw, out); err != nil {
		return fmt.Errorf("%s answered something that is not Millrace's API: %w: check the URL", c.base+path, err)
	}
	return nil
}

// persist calls try until it works, fails for good, or Patience is over.
func (c *Client) persist(ctx context.Context, again bool, try func() error) error {
	var deadline time.Time // from the first failure on: what is long may fail late
	for pause := 100 * time.Millisecond; ; pause = min(2*pause, 5*time.Second) {
		err := try()
		if err == nil || ctx.Err() != nil {
			return err
		}
		if deadline.IsZero() {
			deadline = time.Now().Add(c.cfg.Patience)
		}
		wait := pause/2 + rand.N(pause)
		var refused *Error
		switch {
		case errors.As(err, &refused) && refused.forNow():
			wait = max(wait, refused.RetryAfter)
		case errors.Is(err, ErrUnreachable) && again && c.met.Load():
		default:
			return err
		}
		if time.Now().Add(wait).After(deadline) {
			return err
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return err
		}
	}
}

// send makes one try and returns an answer below 400, whose body the caller closes.
func (c *Client) send(ctx context.Context, r request, body []byte) (*http.Response, error) {
	req, err := c.newRequest(ctx, r, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	return c.call(req)
}

// newRequest makes the request of one try.
func (c *Client) newRequest(ctx context.Context, r request, body io.Reader) (*http.Request, error) {
	u := c.base + r.path
	if len(r.query) > 0 {
		u += "?" + r.query.Encode()
	}
	req, err := http.NewRequestWithContext(ctx, r.method, u, body)
	if err != nil {
		return nil, fmt.Errorf("making the call %s %s: %w", r.method, u, err)
	}
	if c.cfg.APIKey != "" {
		req.Header.Set("Authorization", "Bearer "+c.cfg.APIKey)
	}
	if c.cfg.UserAgent != "" {
		req.Header.Set("User-Agent", c.cfg.UserAgent)
	}
	for name, value := range r.header {
		req.Header.Set(name, value)
	}
	return req, nil
}

// call sends a request and returns an answer below 400, whose body the caller closes.
func (c *Client) call(req *http.Request) (*http.Response, error) {
	resp, err := c.cfg.HTTP.Do(req)
	if err != nil {
		if ctx := req.Context(); ctx.Err() != nil && errors.Is(context.Cause(ctx), context.Canceled) {
			return nil, fmt.Errorf("calling %s: %w", c.base, context.Canceled)
		}
		return nil, fmt.Errorf("calling %s: %w: %w", c.base, ErrUnreachable, err)
	}
	c.met.Store(true)
	if resp.StatusCode < http.StatusBadRequest {
		return resp, nil
	}
	defer resp.Body.Close() //nolint:errcheck // read as far as it matters
	return nil, refusal(resp)
}

// refusal reads the error object, or makes do without one: a proxy may have answered.
func refusal(resp *http.Response) *Error {
	e := &Error{Status: resp.StatusCode, Message: http.StatusText(resp.StatusCode)}
	if s, err := strconv.Atoi(resp.Header.Get("Retry-After")); err == nil && s > 0 {
		e.RetryAfter = time.Duration(s) * time.Second
	}
	raw, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	var body struct {
		Error *job.Error `json:"error"`
	}
	if err == nil && json.Unmarshal(raw, &body) == nil && body.Error != nil {
		e.Code = body.Error.CodeOf()
		if body.Error.Message != "" {
			e.Message = body.Error.Message
		}
		if body.Error.Param != nil {
			e.Param = *body.Error.Param
		}
	}
	return e
}
