package client_test

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/client"
	"github.com/millrace/millrace/internal/job"
)

func TestParseEvents(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, in string
		want     []client.Event
	}{
		{name: "nothing"},
		{
			name: "one event", in: "event: token\nid: 7\ndata: {\"a\":1}\n\n",
			want: []client.Event{{N: 7, Kind: job.EventToken, Data: []byte(`{"a":1}`)}},
		},
		{
			name: "chunks that share one", in: "event: token\nid: 7\ndata: {}\ndata: {\"b\":2}\n\n",
			want: []client.Event{{N: 7, Kind: job.EventToken, Data: []byte("{}\n{\"b\":2}")}},
		},
		{
			name: "carriage returns and no space", in: "event:status\r\nid:1\r\ndata:{}\r\n\r\n",
			want: []client.Event{{N: 1, Kind: job.EventStatus, Data: []byte("{}")}},
		},
		{
			name: "comments between and within", in: ": position=3 eta=2\n\nevent: status\n: k\nid: 1\ndata: {}\n\n",
			want: []client.Event{{Comment: "position=3 eta=2"}, {Comment: "k"}, {N: 1, Kind: job.EventStatus, Data: []byte("{}")}},
		},
		{name: "fields it does not know", in: "retry: 5\nx: y\n\n"},
		{name: "no kind", in: "data: x\n\n", want: []client.Event{{Kind: "message", Data: []byte("x")}}},
		{name: "a cut event is none", in: "event: token\nid: 7\ndata: {}\n"},
		{name: "only the first space goes", in: "data:  x\n\n", want: []client.Event{{Kind: "message", Data: []byte(" x")}}},
		{
			name: "a line longer than any buffer", in: "id: 2\ndata: " + strings.Repeat("é", 100_000) + "\n\n",
			want: []client.Event{{N: 2, Kind: "message", Data: []byte(strings.Repeat("é", 100_000))}},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			for _, r := range []io.Reader{strings.NewReader(tt.in), iotest.OneByteReader(strings.NewReader(tt.in))} {
				var got []client.Event
				for e, err := range client.ParseEvents(r) {
					if err != nil {
						t.Fatal(err)
					}
					got = append(got, e)
				}
				if diff := cmp.Diff(tt.want, got); diff != "" {
					t.Error(diff)
				}
			}
		})
	}
}

func TestParseEventsRefusesWhatIsNone(t *testing.T) {
	t.Parallel()
	for name, r := range map[string]io.Reader{
		"an id that is no number": strings.NewReader("id: abc\n\n"),
		"a broken connection":     iotest.ErrReader(io.ErrUnexpectedEOF),
		"an endless line":         io.MultiReader(strings.NewReader("data: "), zeros{}),
	} {
		var failed bool
		for _, err := range client.ParseEvents(r) {
			failed = err != nil
		}
		if !failed {
			t.Errorf("%s: no error", name)
		}
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

func FuzzParseEvents(f *testing.F) {
	f.Add("event: token\nid: 7\ndata: {}\n\n: c\n")
	f.Fuzz(func(_ *testing.T, in string) {
		for _, err := range client.ParseEvents(strings.NewReader(in)) {
			if err != nil {
				return
			}
		}
	})
}

// TestEventsResumeBehindTheLastOne cuts the stream after each event, once in its middle, and refuses once in between.
func TestEventsResumeBehindTheLastOne(t *testing.T) {
	t.Parallel()
	all := []string{
		"event: status\nid: 1\ndata: {}\n\n", "event: token\nid: 4\ndata: {}\ndata: {}\n\n",
		"event: token\nid: 5\ndata: {}\n\n", "event: done\nid: 6\ndata: {\"status\":\"completed\"}\n\n",
	}
	numbers := []int64{1, 4, 5, 6}
	var calls atomic.Int32
	c := fake(t, func(w http.ResponseWriter, r *http.Request) {
		var after int64
		if v := r.Header.Get("Last-Event-ID"); v != "" {
			_, _ = fmt.Sscan(v, &after)
		}
		if calls.Add(1) == 2 {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		for i, n := range numbers {
			if n <= after {
				continue
			}
			_, _ = io.WriteString(w, ": keep-alive\n"+all[i])
			if i+1 < len(all) {
				_, _ = io.WriteString(w, all[i+1][:10])
			}
			break
		}
	})
	var got []int64
	for e, err := range c.Events(t.Context(), "job_1", 0) {
		if err != nil {
			t.Fatal(err)
		}
		if e.Comment == "" {
			got = append(got, e.N)
		}
	}
	if diff := cmp.Diff(numbers, got); diff != "" {
		t.Error(diff)
	}
}

func TestEventsEndWhereTheCallerStops(t *testing.T) {
	t.Parallel()
	c := fake(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, "event: status\nid: 1\ndata: {}\n\n")
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	})
	for _, err := range c.Events(t.Context(), "job_1", 0) {
		if err != nil {
			t.Fatal(err)
		}
		break
	}
}

func TestEventsOfNoJobAreAnError(t *testing.T) {
	t.Parallel()
	c := fake(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNotFound) })
	var n int
	for _, err := range c.Events(t.Context(), "job_1", 0) {
		if err == nil {
			t.Error("an event came")
		}
		n++
	}
	if n != 1 {
		t.Errorf("the error came %d times", n)
	}
}
