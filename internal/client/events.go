package client

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/millrace/millrace/internal/job"
)

// Event is one event of a job's stream.
type Event struct {
	// N rises with each event; 0 for a comment.
	N    int64
	Kind job.EventKind
	// Data is the event's JSON text; of a token event one or more engine chunks, one a line.
	Data []byte
	// Comment is the text of a keep-alive comment; then all else is zero.
	Comment string
}

// maxEvent bounds one event's bytes: somewhat above what an engine may send.
const maxEvent = 33 << 20

// silence is after how long without a byte a stream counts as broken: the server lets none pass without a keep-alive for longer than 15 s.
const silence = 45 * time.Second

// Events yields the events of a job with numbers above after, each exactly once and in order, and the keep-alive comments between them. It ends after the
// job's done event. A stream that breaks is resumed behind the last event; an error ends it.
func (c *Client) Events(ctx context.Context, id job.ID, after int64) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		var ended bool // done was seen, or the caller has enough
		for !ended {
			err := c.persist(ctx, true, func() error {
				before := after
				err := c.stream(ctx, id, after, func(e Event) bool {
					if e.Kind != "" && e.N <= after {
						return true // seen
					}
					after = max(after, e.N)
					ended = !yield(e, nil) || e.Kind == job.EventDone
					return !ended
				})
				if after > before && errors.Is(err, ErrUnreachable) {
					return nil // it worked for a while: patience begins anew
				}
				return err
			})
			if err != nil && !ended {
				yield(Event{}, err)
				return
			}
		}
	}
}

// stream reads one connection's events until fn has enough, and returns nil only then.
func (c *Client) stream(ctx context.Context, id job.ID, after int64, fn func(Event) bool) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	errSilent := fmt.Errorf("nothing came for %v", silence)
	watchdog := time.AfterFunc(silence, func() { cancel(errSilent) })
	defer watchdog.Stop()

	header := map[string]string{"Accept": "text/event-stream"}
	if after > 0 {
		header["Last-Event-ID"] = strconv.FormatInt(after, 10)
	}
	resp, err := c.send(ctx, request{method: http.MethodGet, path: "/v1/jobs/" + url.PathEscape(string(id)) + "/events", header: header}, nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close() //nolint:errcheck // cut off
	for e, err := range parseEvents(alive{resp.Body, watchdog}) {
		if err != nil {
			if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, errSilent) {
				return fmt.Errorf("reading the events of %s: %w", id, cause)
			}
			return fmt.Errorf("reading the events of %s: %w: %w", id, ErrUnreachable, err)
		}
		if !fn(e) {
			return nil
		}
	}
	return fmt.Errorf("the events of %s broke off: %w", id, ErrUnreachable)
}

// alive restarts the watchdog with each byte.
type alive struct {
	io.Reader
	watchdog *time.Timer
}

func (a alive) Read(p []byte) (int, error) {
	n, err := a.Reader.Read(p)
	if n > 0 {
		a.watchdog.Reset(silence)
	}
	return n, err
}

// parseEvents reads an event stream by the rules of the HTML standard; comments are yielded too. An event that the stream's end cuts is dropped.
func parseEvents(r io.Reader) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		in := bufio.NewReaderSize(r, 32<<10)
		var e Event
		var data bytes.Buffer
		var some bool // a field of an event was seen
		for {
			line, err := readLine(in, maxEvent-data.Len())
			if err != nil {
				if !errors.Is(err, io.EOF) {
					yield(Event{}, err)
				}
				return
			}
			if len(line) == 0 {
				if !some {
					continue
				}
				e.Data = bytes.Clone(bytes.TrimSuffix(data.Bytes(), []byte("\n")))
				if e.Kind == "" {
					e.Kind = "message"
				}
				if !yield(e, nil) {
					return
				}
				e, some = Event{}, false
				data.Reset()
				continue
			}
			if text, ok := bytes.CutPrefix(line, []byte(":")); ok {
				if !yield(Event{Comment: string(bytes.TrimSpace(text))}, nil) {
					return
				}
				continue
			}
			name, value, _ := bytes.Cut(line, []byte(":"))
			value = bytes.TrimPrefix(value, []byte(" "))
			switch string(name) {
			case "event":
				e.Kind, some = job.EventKind(value), true
			case "id":
				n, err := strconv.ParseInt(string(value), 10, 64)
				if err != nil {
					yield(Event{}, fmt.Errorf("the event's id %q is not a number", value))
					return
				}
				e.N, some = n, true
			case "data":
				data.Write(value)
				data.WriteByte('\n')
				some = true
			}
		}
	}
}

// readLine returns a line without its end, which may be \n or \r\n. io.EOF: the stream ended, perhaps within a line.
func readLine(in *bufio.Reader, limit int) ([]byte, error) {
	var line []byte
	for {
		part, err := in.ReadSlice('\n')
		if len(line)+len(part) > limit {
			return nil, fmt.Errorf("an event is longer than %d bytes", maxEvent)
		}
		if err == nil && line == nil {
			return bytes.TrimSuffix(part[:len(part)-1], []byte("\r")), nil
		}
		line = append(line, part...)
		if err == nil {
			return bytes.TrimSuffix(line[:len(line)-1], []byte("\r")), nil
		}
		if !errors.Is(err, bufio.ErrBufferFull) {
			return nil, err
		}
	}
}
