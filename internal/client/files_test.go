package client_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/client"
)

// received reads an upload as a server does.
func received(t *testing.T, r *http.Request) (fields map[string]string, name, content string) {
	t.Helper()
	parts, err := r.MultipartReader()
	if err != nil {
		t.Error(err)
		return nil, "", ""
	}
	fields = make(map[string]string)
	for {
		p, err := parts.NextPart()
		if errors.Is(err, io.EOF) {
			return fields, name, content
		}
		if err != nil {
			t.Errorf("reading the form: %v", err)
			return nil, "", ""
		}
		text, _ := io.ReadAll(p)
		if p.FormName() == "file" {
			name, content = p.FileName(), string(text)
		} else {
			fields[p.FormName()] = string(text)
		}
	}
}

// waits has the client wait for a go-ahead before it sends an upload, as a client of its own does.
func waits(cfg *client.Config) {
	cfg.HTTP.Transport.(*http.Transport).ExpectContinueTimeout = 5 * time.Second
}

// onlyReader hides that a reader can seek.
type onlyReader struct{ io.Reader }

func TestUploadSendsTheFormAndTellsHowFarItIs(t *testing.T) {
	t.Parallel()
	text := strings.Repeat("{}\n", 100_000)
	for _, tt := range []struct {
		name    string
		content io.Reader
		size    int64
	}{
		{"of known length", strings.NewReader(text), int64(len(text))},
		{"of unknown length", onlyReader{strings.NewReader(text)}, -1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			c := fake(t, func(w http.ResponseWriter, r *http.Request) {
				if known := r.ContentLength > 0; known != (tt.size >= 0) {
					t.Errorf("content length %d", r.ContentLength)
				}
				if r.Header.Get("Authorization") != "Bearer secret" || r.Header.Get("Idempotency-Key") != "k" {
					t.Errorf("headers %v", r.Header)
				}
				fields, name, content := received(t, r)
				want := map[string]string{"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
				if diff := cmp.Diff(want, fields); diff != "" || name != "in.jsonl" || content != text {
					t.Errorf("name %s, %d bytes, fields %s", name, len(content), diff)
				}
				_, _ = fmt.Fprintf(w, `{"id":"file-1","bytes":%d,"purpose":"batch","status":"processed"}`, len(content))
			})
			sent, calls := int64(0), 0
			f, err := c.Upload(t.Context(), client.Upload{
				Content: tt.content, Size: tt.size, Name: "in.jsonl", ExpiresAfter: time.Hour, Key: "k", Progress: func(n int64) { sent = n; calls++ },
			})
			if err != nil {
				t.Fatal(err)
			}
			if f.ID != "file-1" || f.Bytes != int64(len(text)) || sent != f.Bytes || calls < 2 {
				t.Errorf("got %+v; told %d bytes in %d calls", f, sent, calls)
			}
		})
	}
}

// TestAnUploadThatBreaksIsSentAgain under one key, from where the content stood.
func TestAnUploadThatBreaksIsSentAgain(t *testing.T) {
	t.Parallel()
	text := strings.Repeat("0123456789", 200_000)
	var tries atomic.Int32
	var key atomic.Value
	c := fake(t, func(w http.ResponseWriter, r *http.Request) {
		switch tries.Add(1) {
		case 1: // refused before anything is read
			key.Store(r.Header.Get("Idempotency-Key"))
			w.WriteHeader(http.StatusServiceUnavailable)
		case 2: // broken in the middle
			_, _ = io.CopyN(io.Discard, r.Body, 300_000)
			panic(http.ErrAbortHandler)
		case 3: // stored, and the answer is lost
			_, _ = io.Copy(io.Discard, r.Body)
			panic(http.ErrAbortHandler)
		default:
			if r.Header.Get("Idempotency-Key") != key.Load() {
				t.Error("another key")
			}
			if _, _, content := received(t, r); content != text[7:] {
				t.Errorf("%d bytes came", len(content))
			}
			_, _ = io.WriteString(w, `{"id":"file-1"}`)
		}
	}, waits)
	content := strings.NewReader(text)
	_, _ = content.Seek(7, io.SeekStart)
	f, err := c.Upload(t.Context(), client.Upload{Content: content, Size: int64(len(text) - 7)})
	if err != nil || f.ID != "file-1" || tries.Load() != 4 {
		t.Errorf("got %+v, %v after %d tries", f, err, tries.Load())
	}
}

func TestAPipeIsSentOnce(t *testing.T) {
	t.Parallel()
	var tries atomic.Int32
	c := fake(t, func(_ http.ResponseWriter, r *http.Request) {
		tries.Add(1)
		_, _ = io.CopyN(io.Discard, r.Body, 100)
		panic(http.ErrAbortHandler)
	})
	_, err := c.Upload(t.Context(), client.Upload{Content: onlyReader{strings.NewReader(strings.Repeat("x", 1<<20))}, Size: -1})
	if err == nil || !strings.Contains(err.Error(), "second time") || tries.Load() != 1 {
		t.Errorf("got %v after %d tries", err, tries.Load())
	}
}

func TestARefusedUploadIsAnErrorAtOnce(t *testing.T) {
	t.Parallel()
	c := fake(t, func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusRequestEntityTooLarge)
		_, _ = io.WriteString(w, `{"error":{"message":"The file is over 200 MB.","type":"invalid_request_error","param":"file","code":"request_too_large"}}`)
	}, waits)
	read := false
	_, err := c.Upload(t.Context(), client.Upload{Content: bytes.NewReader(make([]byte, 50<<20)), Size: 50 << 20, Progress: func(int64) { read = true }})
	var refused *client.Error
	if !errors.As(err, &refused) || refused.Status != http.StatusRequestEntityTooLarge || read {
		t.Errorf("got %v; sent content: %v", err, read)
	}
}

type brokenReader struct{ n int }

func (b *brokenReader) Read(p []byte) (int, error) {
	if b.n--; b.n < 0 {
		return 0, errors.New("the disk is gone")
	}
	return copy(p, "x"), nil
}

func TestContentThatCannotBeReadIsTheError(t *testing.T) {
	t.Parallel()
	c := fake(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.WriteHeader(http.StatusBadRequest)
	})
	for want, u := range map[string]client.Upload{
		"the disk is gone": {Content: &brokenReader{3}, Size: -1, Name: "in.jsonl"},
		"size changed":     {Content: strings.NewReader("abc"), Size: 10},
		"from 2 bytes":     {Content: strings.NewReader("abc"), Size: 2},
	} {
		if _, err := c.Upload(t.Context(), u); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %s", err, want)
		}
	}
}

func TestAnUploadThatStandsStillEnds(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	c := fake(t, func(http.ResponseWriter, *http.Request) { <-release }, func(cfg *client.Config) { cfg.Timeout, cfg.Patience = 50*time.Millisecond, 0 })
	_, err := c.Upload(t.Context(), client.Upload{Content: strings.NewReader("{}"), Size: 2})
	close(release)
	if !errors.Is(err, client.ErrUnreachable) {
		t.Errorf("got %v", err)
	}
}

// TestADownloadGoesOnAfterItBroke: every byte once, though each connection breaks a little later than the one before.
func TestADownloadGoesOnAfterItBroke(t *testing.T) {
	t.Parallel()
	text := strings.Repeat("0123456789", 100_000)
	var tries atomic.Int32
	c := fake(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v1/files/file-1" {
			_, _ = fmt.Fprintf(w, `{"id":"file-1","bytes":%d}`, len(text))
			return
		}
		n := int(tries.Add(1))
		if n == 4 {
			_, _ = io.WriteString(w, text)
			return
		}
		w.Header().Set("Content-Length", strconv.Itoa(len(text)))
		_, _ = io.WriteString(w, text[:n*200_000])
		panic(http.ErrAbortHandler)
	})
	var got bytes.Buffer
	last := int64(0)
	n, err := c.Download(t.Context(), "file-1", &got, func(done, total int64) {
		if done <= last || total != int64(len(text)) {
			t.Errorf("%d of %d after %d", done, total, last)
		}
		last = done
	})
	if err != nil || n != int64(len(text)) || got.String() != text || last != n {
		t.Errorf("got %d bytes of %d, %v", n, len(text), err)
	}
}

func TestATruncatedDownloadIsAnError(t *testing.T) {
	t.Parallel()
	c := fake(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v1/files/file-1" {
			_, _ = io.WriteString(w, `{"id":"file-1","bytes":10}`)
			return
		}
		_, _ = io.WriteString(w, "short")
	}, func(cfg *client.Config) { cfg.Patience = 0 })
	if n, err := c.Download(t.Context(), "file-1", io.Discard, nil); err == nil || !strings.Contains(err.Error(), "10 bytes, and 5 came") || n != 5 {
		t.Errorf("got %d, %v", n, err)
	}
}

type fullWriter struct{}

func (fullWriter) Write([]byte) (int, error) { return 0, errors.New("no space left") }

func TestADownloadThatCannotBeWrittenIsNotTriedAgain(t *testing.T) {
	t.Parallel()
	var tries atomic.Int32
	c := fake(t, func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/content") {
			tries.Add(1)
			_, _ = io.WriteString(w, "0123456789")
			return
		}
		_, _ = io.WriteString(w, `{"id":"file-1","bytes":10}`)
	})
	if _, err := c.Download(t.Context(), "file-1", fullWriter{}, nil); err == nil || !strings.Contains(err.Error(), "no space left") || tries.Load() != 1 {
		t.Errorf("got %v after %d tries", err, tries.Load())
	}
}

func TestDeleteFile(t *testing.T) {
	t.Parallel()
	c := fake(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodDelete || r.URL.Path != "/v1/files/file-1" {
			t.Errorf("%s %s", r.Method, r.URL)
		}
		w.WriteHeader(http.StatusConflict)
		_, _ = io.WriteString(w, `{"error":{"message":"A batch reads it.","type":"invalid_request_error","param":null,"code":"file_in_use"}}`)
	})
	var refused *client.Error
	if err := c.DeleteFile(t.Context(), "file-1"); !errors.As(err, &refused) || refused.Code != "file_in_use" {
		t.Errorf("got %v", err)
	}
}
