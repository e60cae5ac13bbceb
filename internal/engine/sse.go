package engine

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"slices"
)

// Event is one server-sent event of an engine's stream.
type Event struct {
	// Raw is the event as it came, with its blank line: all Raws joined are the stream. Data is its data lines joined by newlines; nil if it has none, as a comment.
	// Both are valid until the next event.
	Raw, Data []byte
	// Done: data is [DONE].
	Done bool
}

// Events yields the events of a streamed answer. It ends after [DONE], or with ErrNoDone where the stream ends without it, ErrUnreachable where it breaks off, ErrTooLarge, ErrBadStream, or the
// context's error. That data is JSON is for Assembler.Add to check.
func (r *Response) Events() iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		limit := r.maxEvent
		if limit == 0 {
			limit = defaults.MaxEvent
		}
		events := eventReader{src: r.Body, limit: limit}
		for {
			event, err := events.next()
			if err != nil {
				yield(Event{}, fmt.Errorf("reading the events of %s: %w", r.path, err))
				return
			}
			if event.Done {
				r.Over()
			}
			if !yield(event, nil) || event.Done {
				return
			}
		}
	}
}

// ErrNoDone wraps ErrUnreachable: a stream has ended, by the engine's own will as far as can be seen, without [DONE]. Whether it is whole its chunks tell.
var ErrNoDone = fmt.Errorf("%w: the stream ended without [DONE]", ErrUnreachable)

var (
	doneData = []byte("[DONE]")
	utf8BOM  = []byte("\ufeff")
)

// firstBuffer is the reader's first buffer in bytes: many events of the usual size.
const firstBuffer = 8 << 10

// eventReader cuts a stream into events within one buffer, which grows to the largest event and is used again.
type eventReader struct {
	src   io.Reader
	limit int64 // of one event in bytes

	buf        []byte
	start, end int    // what has been read and not yet yielded is buf[start:end]
	joined     []byte // the data of an event with several data lines
	begun      bool   // the first line, which may have a BOM before it, is past
	err        error  // src has ended so
}

// next returns the next event. Its error is final.
func (r *eventReader) next() (Event, error) {
	var (
		line     int      // where the line begins that is read now, as all offsets here counted from start: buf may move
		searched int      // up to here the line has no end
		data     dataSpan // of the data lines so far
	)
	for {
		length, size := r.findLine(line, searched)
		if size == 0 { // the line's end is not here
			searched = max(line, r.end-r.start-1) // a CR that came last is looked at again
			if int64(r.end-r.start) > r.limit {
				return Event{}, r.tooLarge()
			}
			if err := r.fill(); err != nil {
				return r.last(line, data, err)
			}
			continue
		}
		if int64(line+size) > r.limit {
			return Event{}, r.tooLarge()
		}
		if length == 0 || (!r.begun && bytes.Equal(r.at(line, line+length), utf8BOM)) { // the event is whole
			r.begun = true
			event := r.event(line+size, data)
			r.start += line + size
			return event, nil
		}
		if err := r.field(line, line+length, &data); err != nil {
			return Event{}, err
		}
		line += size
		searched = line
	}
}

// dataSpan is an event's data: of one line a span of the buffer, of several lines what is in joined.
type dataSpan struct {
	lines    int
	from, to int
}

func (r *eventReader) at(from, to int) []byte { return r.buf[r.start+from : r.start+to] }

func (r *eventReader) tooLarge() error {
	return fmt.Errorf("%w: an event over %d bytes", ErrTooLarge, r.limit)
}

// findLine finds the end of the line at offset line; nothing before searched need be looked at. It returns the line's length, and its size with its end: LF, CR LF
// or CR. Size is 0 if the end is not here; a CR that is the last byte may be half of one.
func (r *eventReader) findLine(line, searched int) (length, size int) {
	rest := r.at(searched, r.end-r.start)
	lf := bytes.IndexByte(rest, '\n')
	if lf >= 0 {
		rest = rest[:lf]
	}
	cr := bytes.IndexByte(rest, '\r')
	before := searched - line
	switch {
	case cr >= 0 && cr == lf-1:
		return before + cr, before + lf + 1
	case cr >= 0 && (lf >= 0 || cr < len(rest)-1 || r.err != nil):
		return before + cr, before + cr + 1
	case cr < 0 && lf >= 0:
		return before + lf, before + lf + 1
	}
	return 0, 0
}

// field takes one line that is not blank. What is no field of an event stream is an error: an engine that writes its error bare into the stream must not lose it.
func (r *eventReader) field(from, to int, data *dataSpan) error {
	line := r.at(from, to)
	if !r.begun {
		r.begun = true
		line = bytes.TrimPrefix(line, utf8BOM)
	}
	name, value, _ := bytes.Cut(line, []byte(":"))
	switch string(name) {
	case "data":
		value = bytes.TrimPrefix(value, []byte(" "))
		switch data.lines {
		case 0:
			data.from, data.to = to-len(value), to
		case 1:
			r.joined = append(r.joined[:0], r.at(data.from, data.to)...)
			fallthrough
		default:
			r.joined = append(append(r.joined, '\n'), value...)
		}
		data.lines++
	case "", "event", "id", "retry": // "" is a comment
	default:
		return fmt.Errorf("%w: a line that is no field of an event", ErrBadStream)
	}
	return nil
}

// event is the event that fills size bytes.
func (r *eventReader) event(size int, span dataSpan) Event {
	e := Event{Raw: r.at(0, size)}
	switch span.lines {
	case 0:
	case 1:
		e.Data = r.at(span.from, span.to)
	default:
		e.Data = r.joined
	}
	if len(e.Data) == 0 { // as the standard has it: no data, no event
		e.Data = nil
	}
	e.Done = bytes.Equal(bytes.TrimSpace(e.Data), doneData)
	return e
}

// last ends the stream, which broke off at err in the event whose unfinished line begins at line. [DONE] and a chunk that is whole count without their blank line. The chunk gets one, for more may come behind it.
func (r *eventReader) last(line int, data dataSpan, err error) (Event, error) {
	if !errors.Is(err, io.EOF) {
		return Event{}, err
	}
	rest := r.end - r.start
	if line == rest || r.field(line, rest, &data) == nil {
		if event := r.event(rest, data); event.Done || json.Valid(event.Data) {
			if !event.Done {
				event.Raw = slices.Concat(bytes.TrimRight(event.Raw, "\r\n"), []byte("\n\n"))
			}
			r.start = r.end
			return event, nil
		}
	}
	return Event{}, ErrNoDone
}

// fill reads more behind what is here. Its error is the stream's end: all that came before has been seen.
func (r *eventReader) fill() error {
	if r.err != nil {
		return r.err
	}
	if r.start > 0 {
		r.end = copy(r.buf, r.buf[r.start:r.end])
		r.start = 0
	}
	if r.end == len(r.buf) {
		grown := make([]byte, max(firstBuffer, 2*len(r.buf)))
		copy(grown, r.buf[:r.end])
		r.buf = grown
	}
	for range 100 {
		var n int
		n, r.err = r.src.Read(r.buf[r.end:])
		r.end += n
		if n > 0 || r.err != nil {
			return nil //nolint:nilerr // the caller looks once more first: a CR that came last is now known to be alone
		}
	}
	return fmt.Errorf("%w: %w", ErrUnreachable, io.ErrNoProgress)
}
