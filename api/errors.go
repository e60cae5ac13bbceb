package api

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net/http"
	"strconv"
	"time"

	"github.com/labstack/echo/v4"

	"github.com/millrace/millrace/internal/blob"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/results"
)

// failure is an answer that is an error object.
type failure struct {
	status int
	body   *job.Error
	// final: the same request can never succeed, though its status is one that clients retry.
	final bool
	// after is when it is worth coming again; 0 is unknown.
	after time.Duration
	// cause is for the log; clients do not see it.
	cause error
}

func (f *failure) Error() string {
	if f.cause != nil {
		return fmt.Sprintf("%s: %v", f.body.Message, f.cause)
	}
	return f.body.Message
}

func (f *failure) Unwrap() error { return f.cause }

// statusClientGone is never seen by anybody but the metrics: the client left before its answer.
const statusClientGone = 499

func fail(status int, code job.Code, format string, args ...any) *failure {
	return &failure{status: status, body: job.NewError(job.TypeOf(status), code, fmt.Sprintf(format, args...))}
}

// invalid is a 400 that names the field at fault; "" names none.
func invalid(param string, code job.Code, format string, args ...any) *failure {
	return fail(http.StatusBadRequest, code, format, args...).at(param)
}

func (f *failure) at(param string) *failure {
	if param != "" {
		f.body.Param = &param
	}
	return f
}

func unavailable(cause error, format string, args ...any) *failure {
	f := fail(http.StatusServiceUnavailable, job.CodeUnavailable, format, args...)
	f.cause = cause
	return f
}

// storeFailure is what a store's error is to a client.
func storeFailure(err error) *failure {
	switch {
	case errors.Is(err, queue.ErrFull):
		f := fail(http.StatusTooManyRequests, job.CodeQueueFull, "The queue is full: try again later.")
		f.cause = err
		return f
	case errors.Is(err, results.ErrUnavailable):
		return unavailable(err, "The result store does not answer: try again later.")
	case errors.Is(err, ledger.ErrUnavailable):
		return unavailable(err, "The database does not answer: try again later.")
	case errors.Is(err, queue.ErrUnavailable):
		return unavailable(err, "The queue does not answer: try again later.")
	case errors.Is(err, queue.ErrRefused):
		return unavailable(err, "The queue refuses new work for now: try again later.")
	case errors.Is(err, blob.ErrUnavailable), errors.Is(err, blob.ErrNotFound):
		return unavailable(err, "The object store does not answer: try again later.")
	case errors.Is(err, blob.ErrCorrupt):
		f := fail(http.StatusBadGateway, job.CodeInternal, "The stored object is damaged.")
		f.cause = err
		return f
	case errors.Is(err, context.DeadlineExceeded):
		return unavailable(err, "A store does not answer: try again later.")
	}
	return nil
}

// failureOf makes of any error what the client is told.
func failureOf(err error) *failure {
	var f *failure
	if errors.As(err, &f) {
		return f
	}
	var h *echo.HTTPError
	if errors.As(err, &h) {
		switch h.Code {
		case http.StatusNotFound:
			return fail(h.Code, job.CodeUnknownURL, "There is no such route.")
		case http.StatusMethodNotAllowed:
			return fail(h.Code, job.CodeMethodNotAllowed, "This route has no such method: see the Allow header.")
		case http.StatusRequestEntityTooLarge:
			return fail(h.Code, job.CodeRequestTooLarge, "The request is too large.")
		default:
			return fail(h.Code, job.CodeInvalidValue, "%s", http.StatusText(h.Code))
		}
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, errNobodyReads) {
		return &failure{status: statusClientGone, body: job.NewError(job.TypeInvalidRequest, job.CodeClientGone, "The client has gone."), cause: err}
	}
	if f := storeFailure(err); f != nil {
		return f
	}
	f = fail(http.StatusInternalServerError, job.CodeInternal, "Something went wrong on the server. It has been logged under the x-request-id of this answer.")
	f.cause = err
	return f
}

// handleError writes the error object. It is Echo's HTTPErrorHandler.
func (s *Server) handleError(err error, c echo.Context) {
	f := failureOf(err)
	switch {
	case f.status == statusClientGone:
	case f.status >= 500:
		s.log.Warn("request failed", "route", route(c), "status", f.status, "code", f.body.CodeOf(), "request", c.Response().Header().Get(headerRequestID), "err", f.cause)
	}
	if c.Response().Committed {
		return // too late to tell: whoever wrote has closed the answer in its own way
	}
	h := c.Response().Header()
	if f.status == http.StatusTooManyRequests || f.status == http.StatusServiceUnavailable {
		h.Set(headerRetryAfter, f.retryAfter())
	}
	if f.final {
		h.Set("X-Should-Retry", "false")
	}
	if f.status == http.StatusUnauthorized {
		h.Set("WWW-Authenticate", "Bearer")
	}
	_ = writeJSON(c, f.status, errorObject{f.body}) // the client is gone: nobody is left to tell
}

// errorObject is the JSON of every failure.
type errorObject struct {
	Error *job.Error `json:"error"`
}

// retryAfter is the failure's Retry-After: up to a quarter more than is known to be needed, so that clients refused together do not come back together.
func (f *failure) retryAfter() string {
	if f.after <= 0 {
		return retryAfter(f.status)
	}
	n := int(math.Ceil(min(f.after, time.Minute).Seconds()))
	return strconv.Itoa(min(60, n+rand.IntN(n/4+2)))
}

// retryAfter is a whole number of seconds in 1..60, spread so that clients refused together do not come back together.
func retryAfter(status int) string {
	if status == http.StatusTooManyRequests {
		return strconv.Itoa(2 + rand.IntN(9))
	}
	return strconv.Itoa(1 + rand.IntN(5))
}

// statusOf is the HTTP status under which a job's own error is told on the connection that waits for the job.
func statusOf(code job.Code) int {
	switch code {
	case job.CodeExpired, job.CodeRunTimeout:
		return http.StatusGatewayTimeout
	case job.CodeEngineStalled, job.CodeUnavailable:
		return http.StatusServiceUnavailable
	case job.CodeCancelled:
		return http.StatusConflict
	case job.CodeClientGone:
		return statusClientGone
	case job.CodeInvalidJSON, job.CodeInvalidValue, job.CodeInvalidType, job.CodeContextLength:
		return http.StatusBadRequest
	case job.CodeInternal:
		return http.StatusInternalServerError
	default:
		return http.StatusBadGateway
	}
}

// jobFailure tells a job's error on the connection that waits for the job.
func jobFailure(e *job.Error) *failure {
	if e == nil {
		e = job.NewError(job.TypeServer, job.CodeInternal, "The job ended without an answer.")
	}
	status := statusOf(e.CodeOf())
	return &failure{status: status, body: e, final: status == http.StatusConflict}
}

// engineError makes of an engine's answer with an error status an error object. The engine's own bytes are kept where they are one; what is missing of the
// four keys, or is of another type, is mended in place; so is the word for its kind under a status that has one.
func engineError(status int, body []byte) []byte {
	if mended := mendError(status, body); mended != nil {
		return mended
	}
	text := string(bytes.ToValidUTF8(body[:min(len(body), 2000)], nil))
	if text == "" {
		text = http.StatusText(status)
	}
	return encode(errorObject{job.NewError(job.TypeOf(status), job.CodeEngineError, "The engine answered "+strconv.Itoa(status)+": "+text)})
}

// errorIn is the error that an engine's answer with an error status tells.
func errorIn(status int, body []byte) *job.Error {
	var o errorObject
	if json.Unmarshal(engineError(status, body), &o) != nil || o.Error == nil {
		return job.NewError(job.TypeServer, job.CodeEngineError, "The engine answered "+strconv.Itoa(status)+".")
	}
	return o.Error
}

// mendError returns the body of an answer with an error status, edited where its error object needs it, or nil if it has no error object with a message.
func mendError(status int, body []byte) []byte {
	o, err := job.ParseObject(body)
	if err != nil {
		return nil
	}
	inner := []byte(o.Get("error"))
	e, err := job.ParseObject(inner)
	if err != nil {
		return nil
	}
	if !isString(e.Get("message")) {
		return nil
	}
	set := func(key, value string) {
		if err == nil {
			inner, err = job.SetField(inner, key, []byte(value))
		}
	}
	if typ := strconv.Quote(job.TypeOf(status)); !isString(e.Get("type")) || typ != strconv.Quote(job.TypeInvalidRequest) && string(e.Get("type")) != typ {
		set("type", typ)
	}
	for _, key := range []string{"param", "code"} {
		switch v := e.Get(key); {
		case v == nil:
			set(key, "null")
		case isString(v), isNull(v):
		case v[0] == '{' || v[0] == '[':
			set(key, "null")
		default: // vLLM's code is the HTTP status as a number
			set(key, `"`+string(v)+`"`)
		}
	}
	if err == nil {
		body, err = job.SetField(body, "error", inner)
	}
	if err != nil {
		return nil
	}
	return body
}

func isString(v json.RawMessage) bool { return len(v) > 0 && v[0] == '"' }
func isNull(v json.RawMessage) bool   { return len(v) == 0 || string(v) == "null" }

// encode is v as JSON with < > & as they are. v is one of our own types, which always marshal.
func encode(v any) []byte {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		panic(fmt.Sprintf("encoding %T: %v", v, err))
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n"))
}

func writeJSON(c echo.Context, status int, v any) error {
	return writeRaw(c, status, encode(v))
}

func writeRaw(c echo.Context, status int, body []byte) error {
	return writeRawAs(c, status, "application/json", body)
}

func writeRawAs(c echo.Context, status int, contentType string, body []byte) error {
	h := c.Response().Header()
	h.Set(echo.HeaderContentType, contentType)
	h.Set(echo.HeaderContentLength, strconv.Itoa(len(body)))
	c.Response().WriteHeader(status)
	_, err := c.Response().Write(body)
	return err
}

// storeTimeout bounds one look at the stores, submitTimeout all the writes of a submit but the upload of a large body. A client is told within 5 s that a store is
// away: submitTimeout leaves the rest of that to admission.
const (
	storeTimeout  = 4 * time.Second
	submitTimeout = 3 * time.Second
)
