package api

import (
	"bytes"
	"mime"
	"net/http"
	"strconv"

	"github.com/labstack/echo/v4"

	"github.com/millrace/millrace/internal/job"
)

// beginEvents sends the head of an event stream.
func beginEvents(c echo.Context) {
	h := c.Response().Header()
	h.Set(echo.HeaderContentType, "text/event-stream")
	h.Set(echo.HeaderCacheControl, "no-cache")
	h.Set("X-Accel-Buffering", "no")
	c.Response().WriteHeader(http.StatusOK)
}

// flush sends what was written so far.
func flush(c echo.Context) error { return http.NewResponseController(c.Response().Writer).Flush() }

func isEventStream(contentType string) bool {
	media, _, err := mime.ParseMediaType(contentType)
	return err == nil && media == "text/event-stream"
}

// writeData writes data as the data lines of an event, one for each of its own lines. The blank line that ends the event is the caller's.
func writeData(b *bytes.Buffer, data []byte) {
	for {
		b.WriteString("data: ")
		i := bytes.IndexAny(data, "\r\n")
		if i < 0 {
			b.Write(data)
			b.WriteByte('\n')
			return
		}
		b.Write(data[:i])
		b.WriteByte('\n')
		if data[i] == '\r' && i+1 < len(data) && data[i+1] == '\n' {
			i++
		}
		data = data[i+1:]
	}
}

// writeEvent writes one event of a job with its number.
func writeEvent(b *bytes.Buffer, n int64, kind job.EventKind, data []byte) {
	b.WriteString("id: ")
	b.WriteString(strconv.FormatInt(n, 10))
	b.WriteString("\nevent: ")
	b.WriteString(string(kind))
	b.WriteByte('\n')
	writeData(b, data)
	b.WriteByte('\n')
}

// tail is the end of what was sent of an engine's stream.
type tail struct {
	last []byte
	some bool
}

// tailLength is enough for the event that ends a stream.
const tailLength = len("data: [DONE]\r\n\r\n")

func (t *tail) add(data []byte) {
	t.some = t.some || len(data) > 0
	if len(data) >= tailLength {
		t.last = append(t.last[:0], data[len(data)-tailLength:]...)
		return
	}
	t.last = append(t.last, data...)
	if over := len(t.last) - tailLength; over > 0 {
		t.last = append(t.last[:0], t.last[over:]...)
	}
}

// atBoundary tells whether an event may begin here.
func (t *tail) atBoundary() bool {
	return !t.some || bytes.HasSuffix(t.last, []byte("\n\n")) || bytes.HasSuffix(t.last, []byte("\n\r\n")) || bytes.HasSuffix(t.last, []byte("\r\r"))
}

// done tells whether the stream has ended with [DONE].
func (t *tail) done() bool { return bytes.HasSuffix(bytes.TrimRight(t.last, "\r\n"), []byte("[DONE]")) }
