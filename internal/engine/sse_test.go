package engine_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/engine"
)

// event is a copy of an engine.Event.
type event struct {
	Raw, Data string
	NoData    bool
	Done      bool
}

func collect(r *engine.Response) ([]event, error) {
	var events []event
	for e, err := range r.Events() {
		if err != nil {
			return events, err
		}
		events = append(events, event{string(e.Raw), string(e.Data), e.Data == nil, e.Done})
	}
	return events, nil
}

const end = "data: [DONE]\n\n"

var endEvent = event{Raw: end, Data: "[DONE]", Done: true}

func TestEventsOfEveryForm(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		stream string
		want   []event
		err    error
	}{
		"one line":                 {"data: {\"a\":1}\n\n" + end, []event{{Raw: "data: {\"a\":1}\n\n", Data: `{"a":1}`}, endEvent}, nil},
		"no space":                 {"data:{}\n\n" + end, []event{{Raw: "data:{}\n\n", Data: "{}"}, endEvent}, nil},
		"one space goes, not two":  {"data:  {} \n\n" + end, []event{{Raw: "data:  {} \n\n", Data: " {} "}, endEvent}, nil},
		"CRLF":                     {"data: {}\r\n\r\ndata: [DONE]\r\n\r\n", []event{{Raw: "data: {}\r\n\r\n", Data: "{}"}, {Raw: "data: [DONE]\r\n\r\n", Data: "[DONE]", Done: true}}, nil},
		"CR":                       {"data: {}\r\rdata: [DONE]\r\r", []event{{Raw: "data: {}\r\r", Data: "{}"}, {Raw: "data: [DONE]\r\r", Data: "[DONE]", Done: true}}, nil},
		"mixed ends":               {"data: {\r\ndata: }\n\r\n" + end, []event{{Raw: "data: {\r\ndata: }\n\r\n", Data: "{\n}"}, endEvent}, nil},
		"several data lines":       {"data: {\ndata:\ndata: }\n\n" + end, []event{{Raw: "data: {\ndata:\ndata: }\n\n", Data: "{\n\n}"}, endEvent}, nil},
		"all fields":               {"event: x\nid: 7\nretry: 10\n: hi\ndata: {}\nevent\n\n" + end, []event{{Raw: "event: x\nid: 7\nretry: 10\n: hi\ndata: {}\nevent\n\n", Data: "{}"}, endEvent}, nil},
		"comment with blank line":  {": OPENROUTER PROCESSING\n\n" + end, []event{{Raw: ": OPENROUTER PROCESSING\n\n", NoData: true}, endEvent}, nil},
		"comment without":          {":\n" + end, []event{{Raw: ":\n" + end, Data: "[DONE]", Done: true}}, nil},
		"empty data":               {"data:\n\ndata\n\n" + end, []event{{Raw: "data:\n\n", NoData: true}, {Raw: "data\n\n", NoData: true}, endEvent}, nil},
		"blank lines":              {"\n\n" + end, []event{{Raw: "\n", NoData: true}, {Raw: "\n", NoData: true}, endEvent}, nil},
		"BOM":                      {"\ufeffdata: {}\n\n" + end, []event{{Raw: "\ufeffdata: {}\n\n", Data: "{}"}, endEvent}, nil},
		"BOM alone":                {"\ufeff\n" + end, []event{{Raw: "\ufeff\n", NoData: true}, endEvent}, nil},
		"second BOM":               {"data: {}\n\n\ufeffdata: {}\n\n", []event{{Raw: "data: {}\n\n", Data: "{}"}}, engine.ErrBadStream},
		"what follows is not read": {end + "data: {}\n\n", []event{endEvent}, nil},
		"done without blank line":  {"data: [DONE]\n", []event{{Raw: "data: [DONE]\n", Data: "[DONE]", Done: true}}, nil},
		"done without any end":     {"data: [DONE]", []event{{Raw: "data: [DONE]", Data: "[DONE]", Done: true}}, nil},
		"done with a lone CR":      {"data: [DONE]\r", []event{{Raw: "data: [DONE]\r", Data: "[DONE]", Done: true}}, nil},
		"nothing":                  {"", nil, engine.ErrUnreachable},
		"no done":                  {"data: {}\n\n", []event{{Raw: "data: {}\n\n", Data: "{}"}}, engine.ErrNoDone},
		"no blank line":            {"data: {}\n", []event{{Raw: "data: {}\n\n", Data: "{}"}}, engine.ErrNoDone},
		"no blank line, CR":        {"event: x\rdata: {}\r", []event{{Raw: "event: x\rdata: {}\n\n", Data: "{}"}}, engine.ErrNoDone},
		"no end of the line":       {"data: {}\n\ndata: {}", []event{{Raw: "data: {}\n\n", Data: "{}"}, {Raw: "data: {}\n\n", Data: "{}"}}, engine.ErrNoDone},
		"cut in an event":          {"data: {\n", nil, engine.ErrNoDone},
		"cut in a line of data":    {"data: {\"a\":1", nil, engine.ErrNoDone},
		"cut in a comment":         {": a", nil, engine.ErrNoDone},
		"cut in a line":            {"data: {}\n\nda", []event{{Raw: "data: {}\n\n", Data: "{}"}}, engine.ErrUnreachable},
		"cut in done":              {"data: [DON", nil, engine.ErrUnreachable},
		"a bare error":             {"data: {}\n\n{\"error\":\"out of memory\"}\n\n", []event{{Raw: "data: {}\n\n", Data: "{}"}}, engine.ErrBadStream},
		"an HTML page":             {"<html>\n</html>\n", nil, engine.ErrBadStream},
		"an unknown field":         {"dada: {}\n\n" + end, nil, engine.ErrBadStream},
		"UTF-8 as it came":         {"data: \"é世\\ud83d\xff\x00\"\n\n" + end, []event{{Raw: "data: \"é世\\ud83d\xff\x00\"\n\n", Data: "\"é世\\ud83d\xff\x00\""}, endEvent}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for how, r := range map[string]io.Reader{
				"whole":        strings.NewReader(tc.stream),
				"byte by byte": iotest.OneByteReader(strings.NewReader(tc.stream)),
				"end with it":  iotest.DataErrReader(strings.NewReader(tc.stream)),
			} {
				got, err := collect(engine.NewResponse(r, 0))
				if diff := cmp.Diff(tc.want, got); diff != "" || !errors.Is(err, tc.err) || tc.err == nil && err != nil {
					t.Errorf("%s: %v; want %v. Events (-want +got):\n%s", how, err, tc.err, diff)
				}
			}
		})
	}
}

func TestALongLineIsReadWhole(t *testing.T) {
	t.Parallel()
	long := "data: {\"b64\":\"" + strings.Repeat("QUJD", 512<<10) + "\"}\n\n" // 2 MiB
	r := answer(t, engine.Config{}, func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "data: {}\n\n"+long+long+end)
	})
	got, err := collect(r)
	if err != nil || len(got) != 4 || got[1].Raw != long || got[2].Raw != long || got[1].Data != long[6:len(long)-2] {
		t.Errorf("%d events, %v; want 4, the long ones whole", len(got), err)
	}
}

func TestAnEventOverTheLimitIsTooLarge(t *testing.T) {
	t.Parallel()
	const limit = 10_000
	for name, tc := range map[string]struct {
		event string
		want  error
	}{
		"just under":   {"data: " + strings.Repeat("x", limit-8) + "\n\n", nil},
		"a byte over":  {"data: " + strings.Repeat("x", limit-7) + "\n\n", engine.ErrTooLarge},
		"many lines":   {strings.Repeat("data: x\n", limit/8) + "\n", engine.ErrTooLarge},
		"never ending": {strings.Repeat("x", 5*limit), engine.ErrTooLarge},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if _, err := collect(engine.NewResponse(strings.NewReader(tc.event+end), limit)); !errors.Is(err, tc.want) || tc.want == nil && err != nil {
				t.Errorf("%v; want %v", err, tc.want)
			}
		})
	}
}

func TestAReaderThatReadsNothingIsGivenUp(t *testing.T) {
	t.Parallel()
	if _, err := collect(engine.NewResponse(stuck{}, 0)); !errors.Is(err, io.ErrNoProgress) {
		t.Errorf("%v; want no progress", err)
	}
}

type stuck struct{}

func (stuck) Read([]byte) (int, error) { return 0, nil }

func FuzzEvents(f *testing.F) {
	for _, seed := range []string{
		"data: {}\r\n\r\n: c\n\ndata: {\ndata: }\n\n" + end, "\ufeffdata:x\r\rdata: [DONE]", "event: e\nid\n\n\n\n{}\n", "data: \xff\r", end,
	} {
		f.Add([]byte(seed), 3)
	}
	golden, err := filepath.Glob("testdata/golden/*.sse")
	if err != nil || len(golden) == 0 {
		f.Fatal(golden, err)
	}
	for _, path := range golden {
		data, err := os.ReadFile(path)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data, 100)
	}
	f.Fuzz(func(t *testing.T, stream []byte, step int) {
		whole, err := collect(engine.NewResponse(bytes.NewReader(stream), 1<<16))
		var joined strings.Builder
		for _, e := range whole {
			joined.WriteString(e.Raw)
		}
		if !strings.HasPrefix(string(stream), joined.String()) {
			t.Errorf("the events joined are not the stream: %q of %q", joined.String(), stream)
		}
		pieces, err2 := collect(engine.NewResponse(&stepReader{stream, max(1, step%64)}, 1<<16))
		if diff := cmp.Diff(whole, pieces); diff != "" || fmt.Sprint(err) != fmt.Sprint(err2) {
			t.Errorf("in pieces: %v; want %v. Events (-whole +pieces):\n%s", err2, err, diff)
		}
	})
}

// stepReader reads at most n bytes at once.
type stepReader struct {
	rest []byte
	n    int
}

func (r *stepReader) Read(p []byte) (int, error) {
	if len(r.rest) == 0 {
		return 0, io.EOF
	}
	n := copy(p[:min(len(p), r.n)], r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

func BenchmarkEvents(b *testing.B) {
	chunk := "data: {\"id\":\"chatcmpl-488\",\"object\":\"chat.completion.chunk\",\"created\":1796020416,\"model\":\"tiny\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" year\"},\"finish_reason\":null}]}\n\n"
	stream := []byte(strings.Repeat(chunk, 1000) + end)
	b.SetBytes(int64(len(stream)))
	b.ReportAllocs()
	for b.Loop() { // a stream of 1,000 events
		n := 0
		for _, err := range engine.NewResponse(bytes.NewReader(stream), 0).Events() {
			if err != nil {
				b.Fatal(err)
			}
			n++
		}
		if n != 1001 {
			b.Fatal(n)
		}
	}
}
