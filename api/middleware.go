package api

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"github.com/labstack/echo/v4"

	"github.com/millrace/millrace/internal/job"
)

// Names of headers.
const (
	headerRequestID  = "X-Request-Id"
	headerRetryAfter = "Retry-After"
	headerJob        = "X-Millrace-Job"
	headerPriority   = "X-Millrace-Priority"
	headerSession    = "X-Millrace-Session"
	headerRetryCount = "X-Stainless-Retry-Count"
	headerKey        = "Idempotency-Key"
)

// headAsGet answers HEAD as GET, whose body the HTTP server leaves out. An event stream has no head worth asking for. It stands before the router, which has no word for "as".
func headAsGet(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodHead && !strings.HasSuffix(r.URL.Path, "/events") {
			r = r.WithContext(context.WithValue(r.Context(), headKey{}, true))
			r.Method = http.MethodGet
		}
		next.ServeHTTP(w, r)
	})
}

type headKey struct{}

// isHead tells whether the client has asked for the head alone, so that a handler need not write a long body for nobody.
func isHead(c echo.Context) bool { return c.Request().Context().Value(headKey{}) != nil }

// identify gives the request its id and its answer a writer that cuts clients which do not read.
func (s *Server) identify(next echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		s.handlers.Add(1)
		defer s.handlers.Done()
		id := c.Request().Header.Get(headerRequestID)
		if !saneID(id) {
			id = job.NewName("req_", time.Now())
		}
		c.Response().Header().Set(headerRequestID, id)
		inner := c.Response().Writer
		w := &patientWriter{ResponseWriter: inner, control: http.NewResponseController(inner), patience: s.cfg.WriteTimeout}
		if c.Request().ContentLength != 0 {
			w.unread = c.Request()
		}
		c.Response().Writer = w
		w.extend() // the deadline of the connection's last answer may be past, and the server may have to say 100 Continue
		err := next(c)
		if w.rest != nil && c.Response().Committed {
			s.drainBody(w)
		}
		return err
	}
}

// saneID tells whether a client's request id can be sent back as it is.
func saneID(id string) bool {
	if id == "" || len(id) > 128 {
		return false
	}
	return strings.IndexFunc(id, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && !strings.ContainsRune("-_.:", r)
	}) < 0
}

// patientWriter gives each write its own time: the server has no time-out for a whole answer, since a stream may last for hours.
type patientWriter struct {
	http.ResponseWriter
	control  *http.ResponseController
	patience time.Duration
	// unread is the request if it has a body that no handler has read, rest if that is to be read behind the answer.
	unread, rest *http.Request
}

// restTimeout and maxRest bound what is read of a body that no handler wanted before its answer, drainTimeout what is read behind it: a client that still sends may not look for its answer before it is done.
const (
	restTimeout  = 2 * time.Second
	maxRest      = 256 << 10
	drainTimeout = 5 * time.Second
)

// leaveBody has what is left of r's body read behind w's answer, after which the connection is closed.
func leaveBody(w http.ResponseWriter, r *http.Request) {
	p, ok := w.(*patientWriter)
	if !ok {
		return
	}
	_ = p.control.SetReadDeadline(time.Now().Add(restTimeout)) // of what the server reads by itself after the answer
	if r.Header.Get("Expect") == "" {                          // else the client waits for our word before it sends
		p.rest = r
	}
}

// drainBody sends the answer, and reads what the client still sends until it has seen the answer: closed with bytes unread, the connection breaks, and many a client then reports that in place of the answer. It ends after drainTimeout, or when
// the server stops.
func (s *Server) drainBody(w *patientWriter) {
	if w.FlushError() != nil || w.control.SetReadDeadline(time.Now().Add(drainTimeout)) != nil {
		return
	}
	done := make(chan struct{})
	var watch sync.WaitGroup
	watch.Go(func() {
		select {
		case <-s.closing:
			_ = w.control.SetReadDeadline(time.Now()) // it had one just now
		case <-done:
		}
	})
	_, _ = io.Copy(io.Discard, w.rest.Body) // whatever ends it, there is nothing more to do
	close(done)
	watch.Wait()
}

// dropBody reads a body that no handler wanted. Left alone the server would do so before the answer's head, and wait for as long as the client likes.
func (w *patientWriter) dropBody() {
	r := w.unread
	if r == nil {
		return
	}
	w.unread = nil
	_ = w.control.SetReadDeadline(time.Now().Add(restTimeout)) // also of what the server reads after the answer
	if r.Header.Get("Expect") == "" {                          // else the client waits for our word before it sends
		switch _, err := io.CopyN(io.Discard, r.Body, maxRest); {
		case errors.Is(err, io.EOF):
			_ = w.control.SetReadDeadline(time.Time{}) // from here on the server itself reads, to notice that the client leaves
			return
		case err == nil:
			leaveBody(w, r)
		}
	}
	w.Header().Set(echo.HeaderConnection, "close")
}

func (w *patientWriter) WriteHeader(status int) {
	w.dropBody()
	w.extend()
	w.ResponseWriter.WriteHeader(status)
}

func (w *patientWriter) Write(b []byte) (int, error) {
	w.extend()
	return w.ResponseWriter.Write(b)
}

// FlushError makes the writer one that http.ResponseController can flush.
func (w *patientWriter) FlushError() error {
	w.extend()
	return w.control.Flush()
}

// Unwrap lets http.ResponseController reach the connection.
func (w *patientWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// takeBody tells w that its request's body is being read, and returns the server's own writer behind w.
func takeBody(w http.ResponseWriter) http.ResponseWriter {
	if p, ok := w.(*patientWriter); ok {
		p.unread = nil
		return p.ResponseWriter
	}
	return w
}

// extend moves the connection's write deadline. It stays in force after the answer, and the next answer on the connection moves it again before it writes.
func (w *patientWriter) extend() {
	_ = w.control.SetWriteDeadline(time.Now().Add(w.patience)) // what has no deadlines (a recorder in a test) does not block either
}

// observe counts the request and times it, and writes the error object of one that failed.
func (s *Server) observe(next echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		start := time.Now()
		if err := next(c); err != nil {
			c.Error(err)
		}
		s.metrics.request(route(c), c.Request().Method, c.Response().Status, time.Since(start))
		return nil
	}
}

// checkQuery refuses a query that cannot be read: what is in it would be left out silently.
func checkQuery(next echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		if _, err := url.ParseQuery(c.Request().URL.RawQuery); err != nil {
			return invalid("", job.CodeInvalidValue, "The query of the URL cannot be read: %v.", err)
		}
		return next(c)
	}
}

// route is the matched route's template, so that labels and logs hold no ids.
func route(c echo.Context) string {
	if p := c.Path(); p != "" {
		return p
	}
	return "unmatched"
}

// recoverPanic answers a bug in a handler with an error object and logs its stack.
func (s *Server) recoverPanic(next echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) (err error) {
		defer func() {
			p := recover()
			if p == nil {
				return
			}
			if p == http.ErrAbortHandler { //nolint:errorlint // a sentinel by identity
				panic(p)
			}
			s.metrics.panics.Inc()
			s.log.Error("a handler panicked", "route", route(c), "request", c.Response().Header().Get(headerRequestID), "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
			if c.Response().Committed {
				panic(http.ErrAbortHandler) // a cut answer must not look whole
			}
			err = fmt.Errorf("a handler panicked: %v", p)
		}()
		return next(c)
	}
}

func hostname() string {
	name, err := os.Hostname()
	if err != nil {
		return ""
	}
	return name
}
