package api_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/millrace/millrace/api"
	"github.com/millrace/millrace/internal/job"
)

// TestBodiesOfUnknownLengthAreHeldToTheLimit sends more bodies that are too long than there is room for at once: each must give its room back.
func TestBodiesOfUnknownLengthAreHeldToTheLimit(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{MaxBody: 64 << 10, MaxBodies: 64 << 10})
	for range 2 {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, e.url+"/v1/chat/completions", io.MultiReader(strings.NewReader(strings.Repeat(" ", 65<<10))))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := client().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		answerOf(t, resp).wantError(t, http.StatusRequestEntityTooLarge, job.CodeRequestTooLarge, "")
	}
}

// A body that stalls is the client's time-out, though the server reports its failure to read as the client's leave.
func TestBodiesThatBreakOff(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	for name, tt := range map[string]struct {
		ctx  context.Context
		err  error
		want int
	}{
		"it stalls":          {gone, os.ErrDeadlineExceeded, http.StatusRequestTimeout},
		"its chunks are off": {t.Context(), errors.New("malformed chunked encoding"), http.StatusBadRequest},
		"the client leaves":  {gone, io.ErrUnexpectedEOF, 499},
	} {
		rec := httptest.NewRecorder()
		req := httptest.NewRequestWithContext(tt.ctx, http.MethodPost, "/v1/jobs", io.MultiReader(strings.NewReader(`{"body":`), iotest.ErrReader(tt.err)))
		req.ContentLength = 100
		e.server.Handler().ServeHTTP(rec, req)
		if rec.Code != tt.want || rec.Header().Get("X-Request-Id") == "" {
			t.Errorf("%s: %d %s", name, rec.Code, rec.Body)
		}
	}
}

// A client that sends all of its body before it looks for an answer gets the answer, however much of the body nobody wants.
func TestRefusalsReachClientsThatSendFirst(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{MaxBody: 1 << 20, MaxFile: 1 << 20, APIKey: "k"})
	const large = 64 << 20 // more than any kernel buffers
	const key, upload = "Authorization: Bearer k\r\n", "Content-Type: multipart/form-data; boundary=x\r\n"
	for name, tt := range map[string]struct{ head, want string }{
		"a large request":           {"POST /v1/jobs HTTP/1.1\r\n" + key, "HTTP/1.1 413 "},
		"a large file":              {"POST /v1/files HTTP/1.1\r\n" + key + upload, "HTTP/1.1 413 "},
		"a request without a key":   {"POST /v1/chat/completions HTTP/1.1\r\n", "HTTP/1.1 401 "},
		"a request for no route":    {"POST /v1/nothing HTTP/1.1\r\n" + key, "HTTP/1.1 404 "},
		"a request of another kind": {"POST /v1/jobs HTTP/1.1\r\n" + key + upload, "HTTP/1.1 415 "},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conn := e.dial(t)
			if _, err := fmt.Fprintf(conn, "%sHost: x\r\nContent-Length: %d\r\n\r\n", tt.head, large); err != nil {
				t.Fatal(err)
			}
			piece := make([]byte, 1<<20)
			for range large / len(piece) {
				if _, err := conn.Write(piece); err != nil {
					t.Fatal(err)
				}
			}
			got, err := io.ReadAll(conn)
			if err != nil || !strings.HasPrefix(string(got), tt.want) || !strings.Contains(string(got), "\r\nX-Request-Id: ") {
				t.Errorf("%q, %v", got, err)
			}
		})
	}
}

func TestOptionsOfTheServerAreNoRoute(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	conn := e.dial(t)
	if _, err := io.WriteString(conn, "OPTIONS * HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	answerOf(t, resp).wantError(t, http.StatusNotFound, job.CodeUnknownURL, "")
}
