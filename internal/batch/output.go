package batch

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/millrace/millrace/internal/job"
)

// Output is one line of an output or error file.
type Output struct {
	ID       string // "batch_req_…"
	CustomID string
	// RequestID, StatusCode and Body are the engine's answer; StatusCode 0 is none.
	RequestID  string
	StatusCode int
	Body       json.RawMessage
	// Error is set where no answer came.
	Error *job.Error
}

// Good tells whether it belongs into the output file, and not into the error file.
func (o *Output) Good() bool { return o.StatusCode >= 200 && o.StatusCode <= 299 }

// OutputOf is the output of a line that has ended, with body as the engine's answer: that answer, or why there is none. cancelled tells that its batch was cancelled.
func OutputOf(j *job.Job, o *job.Outcome, body []byte, cancelled bool) Output {
	out := Output{ID: OutputID(j.Group, j.Line), CustomID: j.CustomID, RequestID: string(j.ID), StatusCode: o.StatusCode, Body: body}
	if o.StatusCode != 0 && (out.Good() && o.State == job.Completed || !out.Good() && o.State == job.Failed) {
		return out
	}
	out.StatusCode, out.Body = 0, nil
	e := job.Error{Type: job.TypeServer}
	if o.Error != nil {
		e = *o.Error
	}
	code := e.CodeOf()
	switch {
	case o.State == job.Expired:
		code = job.CodeBatchExpired
	case o.State == job.Cancelled && cancelled:
		code = job.CodeBatchCancelled
	case code == "":
		code = job.CodeInternal
	}
	if e.Code = &code; e.Message == "" {
		e.Message = fmt.Sprintf("The request ended as %s.", o.State)
	}
	out.Error = &e
	return out
}

// OutputID is the id of line n's output.
func OutputID(batch string, n int64) string {
	return "batch_req_" + strings.TrimPrefix(string(job.LineID(batch, n)), "job_")
}

// AppendOutput appends the line, with its newline. A body that is no JSON becomes a JSON string; one that is stands there byte for byte, but for the ends of its lines, which become blanks. The result is valid UTF-8.
func AppendOutput(dst []byte, o *Output) []byte {
	dst = append(dst, `{"id":`...)
	dst = appendString(dst, o.ID)
	dst = append(dst, `,"custom_id":`...)
	dst = appendString(dst, o.CustomID)
	if o.StatusCode == 0 {
		dst = append(dst, `,"response":null,"error":`...)
		dst = appendError(dst, o.Error)
		return append(dst, "}\n"...)
	}
	dst = append(dst, `,"response":{"status_code":`...)
	dst = strconv.AppendInt(dst, int64(o.StatusCode), 10)
	dst = append(dst, `,"request_id":`...)
	dst = appendString(dst, o.RequestID)
	dst = append(dst, `,"body":`...)
	dst = appendBody(dst, o.Body)
	return append(dst, "},\"error\":null}\n"...)
}

func appendError(dst []byte, e *job.Error) []byte {
	if e == nil {
		e = job.NewError(job.TypeServer, job.CodeInternal, "The request ended without an answer.")
	}
	dst = append(dst, `{"code":`...)
	if code := e.CodeOf(); code != "" {
		dst = appendString(dst, string(code))
	} else {
		dst = append(dst, "null"...)
	}
	dst = append(dst, `,"message":`...)
	dst = appendString(dst, e.Message)
	return append(dst, '}')
}

func appendBody(dst []byte, body []byte) []byte {
	body = bytes.TrimSpace(body)
	switch {
	case len(body) == 0:
		return append(dst, "null"...)
	case !json.Valid(body):
		return appendString(dst, string(body))
	case !utf8.Valid(body): // inside a string
		body = bytes.ToValidUTF8(body, []byte("\ufffd"))
	}
	from := len(dst)
	dst = append(dst, body...)
	for i := from; i < len(dst); i++ { // between tokens: a string has none
		if dst[i] == '\n' || dst[i] == '\r' {
			dst[i] = ' '
		}
	}
	return dst
}

// appendString appends s as a JSON string, whose < > & stay as they are.
func appendString(dst []byte, s string) []byte {
	b := bytes.NewBuffer(dst)
	enc := json.NewEncoder(b)
	enc.SetEscapeHTML(false)
	_ = enc.Encode(s) // neither a string nor a buffer fails
	return bytes.TrimSuffix(b.Bytes(), []byte("\n"))
}

// errUnnamed is that a line has an empty custom_id. An output has it if its input was lost before its name was read.
var errUnnamed = errors.New("custom_id is empty")

// OutputIDs calls each with the custom_id of every line of an output or error file that has one.
func OutputIDs(ctx context.Context, r io.Reader, each func(customID string) error) error {
	in := newLines(r, 0)
	for {
		t, err := in.next(ctx)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("reading line %d: %w", in.number, err)
		}
		id, err := nameOf(t)
		if errors.Is(err, errUnnamed) {
			continue
		}
		if err != nil {
			return fmt.Errorf("reading line %d: %w", t.number, err)
		}
		if err := each(id); err != nil {
			return err
		}
	}
}

// Select copies those lines of an input file whose custom_id is kept to w, byte for byte and each ended by a newline. It returns how many there were. Lines that Scan would not accept are left out.
func Select(ctx context.Context, w io.Writer, r io.Reader, maxLine int64, keep func(customID string) bool) (int64, error) {
	in, n := newLines(r, maxLine), int64(0)
	var out []byte
	for {
		t, err := in.next(ctx)
		if errors.Is(err, io.EOF) {
			return n, nil
		}
		if err != nil {
			return n, fmt.Errorf("reading line %d: %w", in.number, err)
		}
		id, err := nameOf(t)
		if err != nil || !keep(id) {
			continue
		}
		out = append(append(out[:0], t.raw...), '\n')
		if _, err := w.Write(out); err != nil {
			return n, fmt.Errorf("writing line %d: %w", t.number, err)
		}
		n++
	}
}

// nameOf is the custom_id of a line of any of a batch's files.
func nameOf(t text) (string, error) {
	switch {
	case t.tooLong:
		return "", errors.New("it is too long")
	case !json.Valid(t.raw) || t.raw[0] != '{':
		return "", errors.New("it is not a JSON object")
	}
	name, _, _, _ := cut(t.raw)
	switch {
	case name == nil:
		return "", errors.New("it has no custom_id")
	case isText(name, ""):
		return "", errUnnamed
	}
	var id string
	if p := readID(name, &id); p != nil {
		return "", errors.New(p.message)
	}
	return id, nil
}
