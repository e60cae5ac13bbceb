package api

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"mime"
	"net/http"
	"os"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/labstack/echo/v4"

	"github.com/millrace/millrace/internal/job"
)

// smallBody is the size in bytes up to which bodies are not counted against Config.MaxBodies.
const smallBody = 1 << 20

// How long one piece of a body, and a whole body, may take to arrive; and how long a large one waits until there is room for it.
const (
	pieceTimeout = 30 * time.Second
	bodyTimeout  = 10 * time.Minute
	roomTimeout  = 10 * time.Second
)

// readBody returns the request's body, which is one JSON object, and its top level. release gives the room of a large body back, and must be called once the
// body is stored or dropped; calling it again does nothing.
func (s *Server) readBody(c echo.Context) (body []byte, o *job.Object, release func(), err error) {
	limit := s.cfg.MaxBody
	return s.readBodyUpTo(c, limit, fail(http.StatusRequestEntityTooLarge, job.CodeRequestTooLarge, "The request's body is larger than the limit of %d bytes.", limit))
}

// readBodyUpTo is readBody with a limit in bytes, not over Config.MaxBody, and with what a client is told whose body is larger.
func (s *Server) readBodyUpTo(c echo.Context, limit int64, tooLarge *failure) (body []byte, o *job.Object, release func(), err error) {
	r := c.Request()
	if err := checkMedia(r.Header); err != nil {
		return nil, nil, nil, err
	}
	control := http.NewResponseController(c.Response().Writer)
	if r.ContentLength > limit {
		refuseBody(c.Response().Writer, r)
		return nil, nil, nil, tooLarge
	}
	giveBack := func() {} // not the named result, which an error's return sets to nil
	if r.ContentLength > smallBody || r.ContentLength < 0 {
		if giveBack, err = s.makeRoom(r, limit); err != nil {
			return nil, nil, nil, err
		}
	}
	defer func() {
		if err != nil {
			giveBack()
		}
	}()
	in := &patientReader{from: http.MaxBytesReader(takeBody(c.Response().Writer), r.Body, limit), control: control, end: time.Now().Add(bodyTimeout)}
	buf := bytes.NewBuffer(make([]byte, 0, max(0, r.ContentLength)+bytes.MinRead))
	if _, err = buf.ReadFrom(in); err != nil {
		return nil, nil, nil, s.bodyFailure(c, err, tooLarge)
	}
	in.done()
	body = buf.Bytes()
	o, err = parseObject(body)
	return body, o, giveBack, err
}

// refuseBody makes the server read nothing more of r's body before w's answer. The server is told that a limit was hit, by a reader that needs no byte of the body: it then closes the connection, once the client has had time to see why.
func refuseBody(w http.ResponseWriter, r *http.Request) {
	_, _ = http.MaxBytesReader(takeBody(w), io.NopCloser(strings.NewReader("x")), 0).Read(make([]byte, 1))
	leaveBody(w, r)
}

// bodyFailure is what a client is told whose body could not be read, for the reason err. tooLarge is what it is told of one that is too large.
func (s *Server) bodyFailure(c echo.Context, err error, tooLarge *failure) error {
	var over *http.MaxBytesError
	switch {
	case errors.As(err, &over):
		leaveBody(c.Response().Writer, c.Request())
		return tooLarge
	case errors.Is(err, os.ErrDeadlineExceeded): // before the context, for the server takes any failure to read for the client's leave
		c.Response().Header().Set(echo.HeaderConnection, "close") // the deadline stays: the server would read on
		return fail(http.StatusRequestTimeout, job.CodeInvalidValue, "The request's body came too slowly.")
	case c.Request().Context().Err() != nil:
		return context.Canceled
	default:
		c.Response().Header().Set(echo.HeaderConnection, "close")
		return invalid("", job.CodeInvalidValue, "The request's body cannot be read to its end: %v.", err)
	}
}

// makeRoom waits until the bodies held at once leave room for r's, which has up to limit bytes.
func (s *Server) makeRoom(r *http.Request, limit int64) (func(), error) {
	n := r.ContentLength
	if n < 0 {
		n = limit
	}
	ctx, cancel := context.WithTimeout(r.Context(), roomTimeout)
	defer cancel()
	if err := s.bodies.Acquire(ctx, n); err != nil {
		if r.Context().Err() != nil {
			return nil, context.Canceled
		}
		return nil, unavailable(nil, "Too many large requests are being read at once: try again later.")
	}
	given := false
	return func() {
		if !given {
			given = true
			s.bodies.Release(n)
		}
	}, nil
}

// checkMedia refuses what certainly is no plain JSON. Clients send JSON under many names, so the rest is judged by what is in it.
func checkMedia(h http.Header) error {
	if enc := h.Get(echo.HeaderContentEncoding); enc != "" && !strings.EqualFold(enc, "identity") {
		return fail(http.StatusUnsupportedMediaType, job.CodeUnsupportedMedia, "The content encoding %q is not supported: send plain JSON.", enc)
	}
	if media, _, err := mime.ParseMediaType(h.Get(echo.HeaderContentType)); err == nil && strings.HasPrefix(media, "multipart/") {
		return fail(http.StatusUnsupportedMediaType, job.CodeUnsupportedMedia, "The content type %q is not supported: send application/json.", media)
	}
	return nil
}

// parseObject reads the top level of a body.
func parseObject(body []byte) (*job.Object, error) {
	if !utf8.Valid(body) {
		return nil, invalid("", job.CodeInvalidJSON, "The request's body is not valid UTF-8.")
	}
	o, err := job.ParseObject(body)
	switch {
	case errors.Is(err, job.ErrNotObject):
		return nil, invalid("", job.CodeInvalidType, "The request's body must be a JSON object.")
	case err != nil && len(bytes.TrimSpace(body)) == 0:
		return nil, invalid("", job.CodeInvalidJSON, "The request has no body: send a JSON object.")
	case err != nil:
		return nil, invalid("", job.CodeInvalidJSON, "The request's body cannot be read: %v.", err)
	}
	return o, nil
}

// patientReader gives each piece of a body its own time.
type patientReader struct {
	from    io.Reader
	control *http.ResponseController
	end     time.Time
}

func (r *patientReader) Read(b []byte) (int, error) {
	deadline := time.Now().Add(pieceTimeout)
	if deadline.After(r.end) {
		deadline = r.end
	}
	_ = r.control.SetReadDeadline(deadline) // a recorder in a test has none
	return r.from.Read(b)
}

// done takes the deadline away: from here on the server itself reads, to notice that the client leaves.
func (r *patientReader) done() { _ = r.control.SetReadDeadline(time.Time{}) }

// request is the engine's part of what a client asks: an endpoint and a body that names a model.
type request struct {
	endpoint job.Endpoint
	body     []byte
	object   *job.Object
	model    job.Model
	// stream is what the body itself asks for.
	stream bool
}

// parseRequest checks the fields that every request of the endpoint has. prefix stands before the names of fields in errors.
func parseRequest(endpoint job.Endpoint, body []byte, o *job.Object, prefix string) (*request, error) {
	r := &request{endpoint: endpoint, body: body, object: o}
	var model string
	switch raw := o.Get("model"); {
	case isNull(raw):
		return nil, missing(prefix + "model")
	case json.Unmarshal(raw, &model) != nil:
		return nil, invalid(prefix+"model", job.CodeInvalidType, "model must be a string.")
	case model == "":
		return nil, invalid(prefix+"model", job.CodeInvalidValue, "model must not be empty.")
	}
	r.model = job.Model(model)
	field, list := "messages", true
	switch endpoint {
	case job.Completions:
		field, list = "prompt", false
	case job.Embeddings, job.Responses:
		field, list = "input", false
	}
	switch raw := o.Get(field); {
	case isNull(raw):
		return nil, missing(prefix + field)
	case raw[0] == '[', raw[0] == '"' && !list:
	case list:
		return nil, invalid(prefix+field, job.CodeInvalidType, "%s must be an array.", field)
	default:
		return nil, invalid(prefix+field, job.CodeInvalidType, "%s must be a string or an array.", field)
	}
	if raw := o.Get("stream"); !isNull(raw) && json.Unmarshal(raw, &r.stream) != nil {
		return nil, invalid(prefix+"stream", job.CodeInvalidType, "stream must be true or false.")
	}
	r.stream = r.stream && endpoint.Generates()
	var options struct {
		IncludeUsage bool `json:"include_usage"`
	}
	if raw := o.Get("stream_options"); !isNull(raw) && json.Unmarshal(raw, &options) != nil {
		return nil, invalid(prefix+"stream_options", job.CodeInvalidType, "stream_options must be an object whose include_usage is true or false.")
	}
	return r, nil
}

func missing(param string) *failure {
	return invalid(param, job.CodeMissingParameter, "The request must have %s.", param)
}

// hashBody is the hash of what a body means: the order of keys and the space between values do not count, numbers count as they are written.
func hashBody(route string, body []byte) (string, error) {
	dec := json.NewDecoder(bytes.NewReader(body))
	dec.UseNumber()
	var v any
	if err := dec.Decode(&v); err != nil {
		return "", invalid("", job.CodeInvalidJSON, "The request's body cannot be read: %v.", err)
	}
	h := sha256.New()
	_, _ = io.WriteString(h, route+"\n") // a hash never fails
	if err := json.NewEncoder(h).Encode(v); err != nil {
		return "", invalid("", job.CodeInvalidJSON, "The request's body cannot be read: %v.", err)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// hashKey is how a client's idempotency key is kept. kind keeps keys that clients send and those that we make apart.
func hashKey(kind, key string) string {
	h := sha256.Sum256([]byte(kind + "\n" + key))
	return hex.EncodeToString(h[:16])
}
