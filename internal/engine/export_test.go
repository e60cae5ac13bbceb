package engine

import (
	"io"
	"net/http"
)

// SetTransport has answers come from t instead of the network.
func (e *Engine) SetTransport(t http.RoundTripper) { e.http.Transport = t }

// MetricsURLs are the places where an engine of kind k is asked for its metrics.
func (e *Engine) MetricsURLs(k Kind) []string {
	d := driverOf(k)
	return e.metricsURLs(d.metrics, d.port)
}

// NewResponse is a response whose body is r, for the tests of what reads it.
func NewResponse(r io.Reader, maxEvent int64) *Response {
	return &Response{StatusCode: 200, Body: io.NopCloser(r), maxEvent: maxEvent, size: -1}
}
