package engine

import "io"

// NewResponse is a response whose body is r, for the tests of what reads it.
func NewResponse(r io.Reader, maxEvent int64) *Response {
	return &Response{StatusCode: 200, Body: io.NopCloser(r), maxEvent: maxEvent, size: -1}
}
