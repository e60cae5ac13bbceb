package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"time"
)

const (
	// askTimeout bounds each small question: metrics, models, health. They are answered from memory.
	askTimeout = 5 * time.Second
	// maxPage bounds their answers in bytes. A vLLM page is some 100 KiB.
	maxPage = 8 << 20
	// maxQuoted bounds how much of an engine's error text goes into ours, in bytes.
	maxQuoted = 300
	userAgent = "millrace"
)

// newHTTPClient returns a client that has no time-outs of its own beyond connecting: an answer may take minutes, and the call's context bounds it.
func newHTTPClient() *http.Client {
	dialer := &net.Dialer{Timeout: 5 * time.Second, KeepAlive: 15 * time.Second}
	return &http.Client{
		Transport: &http.Transport{
			Proxy:               http.ProxyFromEnvironment, // which never sends loopback through a proxy
			DialContext:         dialer.DialContext,
			TLSHandshakeTimeout: 10 * time.Second,
			MaxIdleConnsPerHost: 512,
			// Below the 5 s after which uvicorn (vLLM, SGLang) closes idle connections: a request sent on one as it closes is lost, and must not be sent twice.
			IdleConnTimeout:        3 * time.Second,
			DisableCompression:     true,
			MaxResponseHeaderBytes: 256 << 10,
			// No HTTP/2: with one connection per running request, closing it always reaches the engine.
			ForceAttemptHTTP2: false,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// statusError is an answer other than 200 to one of our own questions.
type statusError struct {
	status int
	text   string
}

func (e *statusError) Error() string {
	if e.text == "" {
		return "status " + strconv.Itoa(e.status)
	}
	return fmt.Sprintf("status %d: %s", e.status, e.text)
}

// absent tells whether err says that the engine is there and has no such route. (llama.cpp without --metrics says 501.)
func absent(err error) bool {
	var s *statusError
	if errors.As(err, &s) {
		return s.status < 500 && s.status != http.StatusTooManyRequests && s.status != http.StatusRequestTimeout || s.status == http.StatusNotImplemented
	}
	return errors.Is(err, errNotJSON)
}

var errNotJSON = errors.New("the answer is not the JSON expected")

// newRequest makes a request to a URL of the engine's.
func (e *Engine) newRequest(ctx context.Context, method, target string, body io.Reader) (*http.Request, error) {
	req, err := http.NewRequestWithContext(ctx, method, target, body)
	if err != nil {
		return nil, fmt.Errorf("making a request to the engine: %w", err)
	}
	req.Header.Set("User-Agent", userAgent)
	if e.cfg.APIKey != "" && req.URL.Hostname() == e.url.Hostname() {
		req.Header.Set("Authorization", "Bearer "+e.cfg.APIKey)
	}
	return req, nil
}

// do sends req; the caller closes the answer's body.
func (e *Engine) do(req *http.Request) (*http.Response, error) {
	resp, err := e.http.Do(req)
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", req.Method, req.URL.Path, broken(req.Context(), err))
	}
	return resp, nil
}

// get returns the page at path, which must be a 200.
func (e *Engine) get(ctx context.Context, path string) ([]byte, error) {
	return e.getURL(ctx, e.base+path)
}

// getURL returns the page at a URL of the engine's.
func (e *Engine) getURL(ctx context.Context, target string) ([]byte, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, askTimeout, fmt.Errorf("%w: no answer within %s", ErrUnreachable, askTimeout))
	defer cancel()
	req, err := e.newRequest(ctx, http.MethodGet, target, nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Accept", "application/json, text/plain;q=0.9, */*;q=0.1")
	return e.ask(req)
}

// ask sends req and returns the answer's body, which must be a 200 and at most maxPage bytes.
func (e *Engine) ask(req *http.Request) ([]byte, error) {
	resp, err := e.do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close() //nolint:errcheck // read only
	page, err := io.ReadAll(io.LimitReader(resp.Body, maxPage+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("%s %s: %w", req.Method, req.URL.Path, broken(req.Context(), err))
	case resp.StatusCode != http.StatusOK:
		return nil, fmt.Errorf("%s %s: %w", req.Method, req.URL.Path, &statusError{resp.StatusCode, quote(page)})
	case len(page) > maxPage:
		return nil, fmt.Errorf("%s %s: %w: over %d bytes", req.Method, req.URL.Path, ErrTooLarge, maxPage)
	}
	return page, nil
}

// getJSON reads the page at path into v.
func (e *Engine) getJSON(ctx context.Context, path string, v any) error {
	page, err := e.get(ctx, path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(page, v); err != nil {
		return fmt.Errorf("GET %s: %w: %w", path, errNotJSON, err)
	}
	return nil
}

// quote is what an error page says, short enough for an error of ours.
func quote(page []byte) string {
	if err := parseError(page); err != nil {
		page = []byte(err.Message)
	}
	if len(page) > maxQuoted {
		page = page[:maxQuoted]
	}
	return strconv.Quote(string(page))
}

// broken says why an exchange broke off: because the caller ended it, or else because of the engine.
func broken(ctx context.Context, err error) error {
	ended := ctx.Err()
	if ended == nil {
		return fmt.Errorf("%w: %w", ErrUnreachable, err)
	}
	if cause := context.Cause(ctx); !errors.Is(ended, cause) {
		return fmt.Errorf("%w: %w", ended, cause)
	}
	return ended
}
