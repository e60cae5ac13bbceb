package client

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"net/url"
	"strconv"
	"sync"
	"time"
)

// File is a stored file. Times are unix seconds, 0 for never.
type File struct {
	ID        string `json:"id"`
	Object    string `json:"object"`
	Bytes     int64  `json:"bytes"`
	CreatedAt int64  `json:"created_at"`
	ExpiresAt int64  `json:"expires_at,omitempty"`
	Filename  string `json:"filename"`
	Purpose   string `json:"purpose"`
	Status    string `json:"status"`
}

// Upload is a file to be stored.
type Upload struct {
	// Content is read to its end. One that can seek is sent again, from where it stands now, when the connection breaks; any other is sent once.
	Content io.Reader
	// Size of the content in bytes, -1 if it is not known.
	Size int64
	// Name of the file. Default anonymous_file.
	Name string
	// Purpose of the file. Default batch.
	Purpose string
	// ExpiresAfter is how long it is kept; 0 is as long as the server keeps such files.
	ExpiresAfter time.Duration
	// Key makes repeated uploads one file; "" is a fresh one.
	Key string
	// Progress, if set, is told how many bytes of the content were given to the connection; fewer than before when it begins again.
	Progress func(sent int64)
}

// errIdle: the connection took or gave nothing for Config.Timeout.
var errIdle = errors.New("the connection stands still")

// Upload stores a file. It is streamed: no more than a buffer of it is in memory.
func (c *Client) Upload(ctx context.Context, u Upload) (*File, error) {
	if u.Key == "" {
		u.Key = rand.Text()
	}
	if u.Name == "" {
		u.Name = "anonymous_file"
	}
	if u.Purpose == "" {
		u.Purpose = "batch"
	}
	head, tail, kind, err := form(u)
	if err != nil {
		return nil, err
	}
	seeker, again := u.Content.(io.Seeker)
	begin := int64(0)
	if again {
		if begin, err = seeker.Seek(0, io.SeekCurrent); err != nil {
			again = false // as a pipe
		}
	}
	r := request{method: http.MethodPost, path: "/v1/files", header: map[string]string{
		"Idempotency-Key": u.Key, "Content-Type": kind,
		"Expect": "100-continue", // a refusal then comes before the content is sent, and is not lost with a broken connection
	}}
	var f File
	begun := false
	err = c.persist(ctx, again, func() error {
		if begun && again {
			if _, err := seeker.Seek(begin, io.SeekStart); err != nil {
				return fmt.Errorf("reading %s again: %w", u.Name, err)
			}
		}
		begun = true
		ctx, idle := c.watch(ctx)
		defer idle.stop()
		content := &sending{from: u.Content, size: u.Size, idle: idle, progress: u.Progress}
		req, err := c.newRequest(ctx, r, io.MultiReader(bytes.NewReader(head), content, bytes.NewReader(tail)))
		if err != nil {
			return err
		}
		if u.Size >= 0 {
			req.ContentLength = int64(len(head)) + u.Size + int64(len(tail))
		}
		resp, err := c.call(req)
		sent, broken := content.end(again)
		if sent > 0 { // somebody took it
			c.met.Store(true)
		}
		if broken != nil {
			err = fmt.Errorf("reading %s: %w", u.Name, broken)
		} else if err != nil && sent > 0 && !again {
			err = fmt.Errorf("sending %s: it cannot be read a second time: %w", u.Name, asFinal(err))
		}
		if resp != nil {
			defer resp.Body.Close() //nolint:errcheck // read, or given up
		}
		if err != nil {
			return err
		}
		return c.decode(resp, r.path, &f)
	})
	return &f, err
}

// asFinal is err without what would have it tried again.
func asFinal(err error) error {
	var refused *Error
	if errors.As(err, &refused) && refused.forNow() {
		return fmt.Errorf("%s", refused) //nolint:errorlint // its text alone
	}
	return err
}

// form writes what stands before and behind the content, and its content type.
func form(u Upload) (head, tail []byte, kind string, err error) {
	var b bytes.Buffer
	w := multipart.NewWriter(&b)
	fields := [][2]string{{"purpose", u.Purpose}}
	if u.ExpiresAfter > 0 {
		fields = append(fields, [2]string{"expires_after[anchor]", "created_at"}, [2]string{"expires_after[seconds]", strconv.FormatInt(int64(u.ExpiresAfter/time.Second), 10)})
	}
	for _, f := range fields {
		if err = w.WriteField(f[0], f[1]); err != nil {
			return nil, nil, "", fmt.Errorf("writing the form: %w", err)
		}
	}
	if _, err = w.CreateFormFile("file", u.Name); err == nil {
		head = bytes.Clone(b.Bytes())
		b.Reset()
		err = w.Close()
	}
	if err != nil {
		return nil, nil, "", fmt.Errorf("writing the form: %w", err)
	}
	return head, b.Bytes(), w.FormDataContentType(), nil
}

// sending is the content of an upload on its way. The transport reads it, maybe still after the call has returned.
type sending struct {
	from     io.Reader
	size     int64 // -1 if it is not known
	idle     *idleWatch
	progress func(int64)

	reading sync.Mutex // held while from is read

	mu     sync.Mutex // guards what follows
	sent   int64
	broken error // of from
	ended  bool
}

func (s *sending) Read(p []byte) (int, error) {
	s.reading.Lock()
	defer s.reading.Unlock()
	s.mu.Lock()
	ended := s.ended
	s.mu.Unlock()
	if ended {
		return 0, context.Canceled
	}
	s.idle.disarm() // what it is read from may take its time
	n, err := s.from.Read(p)
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.ended {
		s.idle.arm()
	}
	s.sent += int64(n)
	switch {
	case err != nil && !errors.Is(err, io.EOF):
		s.broken = err
	case s.size >= 0 && (s.sent > s.size || err != nil && s.sent < s.size):
		s.broken = fmt.Errorf("its size changed while it was read, from %d bytes", s.size)
		err = s.broken
	}
	if n > 0 && !s.ended && s.progress != nil {
		s.progress(s.sent)
	}
	return n, err
}

// end has nothing more read, and returns how much was, and the content's own error. With wait, no read goes on when it returns.
func (s *sending) end(wait bool) (sent int64, broken error) {
	s.mu.Lock()
	s.ended = true
	s.mu.Unlock()
	if wait {
		s.reading.Lock()
		defer s.reading.Unlock()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sent, s.broken
}

// idleWatch ends a call whose bytes do not move.
type idleWatch struct {
	timer   *time.Timer
	timeout time.Duration
	cancel  context.CancelCauseFunc
}

// watch returns a context that ends when nothing moved for Config.Timeout.
func (c *Client) watch(ctx context.Context) (context.Context, *idleWatch) {
	ctx, cancel := context.WithCancelCause(ctx)
	return ctx, &idleWatch{timer: time.AfterFunc(c.cfg.Timeout, func() { cancel(errIdle) }), timeout: c.cfg.Timeout, cancel: cancel}
}

// arm begins to count, disarm stops that.
func (w *idleWatch) arm() { w.timer.Reset(w.timeout) }

func (w *idleWatch) disarm() { w.timer.Stop() }

func (w *idleWatch) stop() {
	w.timer.Stop()
	w.cancel(nil)
}

// File reads what is known of a file.
func (c *Client) File(ctx context.Context, id string) (*File, error) {
	var f File
	err := c.do(ctx, request{method: http.MethodGet, path: "/v1/files/" + url.PathEscape(id)}, &f)
	return &f, err
}

// DeleteFile removes a file. One that a batch still reads is an Error with status 409.
func (c *Client) DeleteFile(ctx context.Context, id string) error {
	return c.do(ctx, request{method: http.MethodDelete, path: "/v1/files/" + url.PathEscape(id)}, nil)
}

// Download writes a file's bytes to w and returns how many there were: all of it, or an error. When the connection breaks it begins again, and leaves out what w has got already.
func (c *Client) Download(ctx context.Context, id string, w io.Writer, progress func(done, total int64)) (int64, error) {
	info, err := c.File(ctx, id)
	if err != nil {
		return 0, err
	}
	done := int64(0)
	report := func(n int64) {
		done = n
		if progress != nil {
			progress(done, info.Bytes)
		}
	}
	for {
		before := done
		err = c.persist(ctx, true, func() error { return c.content(ctx, info, w, done, report) })
		if done == before || !errors.Is(err, ErrUnreachable) { // else it went on, though slowly
			return done, err
		}
	}
}

// content makes one try. The first done bytes of the file are left out.
func (c *Client) content(ctx context.Context, info *File, w io.Writer, done int64, report func(int64)) error {
	ctx, idle := c.watch(ctx)
	defer idle.stop()
	r := request{method: http.MethodGet, path: "/v1/files/" + url.PathEscape(info.ID) + "/content"}
	req, err := c.newRequest(ctx, r, http.NoBody)
	if err != nil {
		return err
	}
	resp, err := c.call(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close() //nolint:errcheck // read, or given up
	place, buffer := int64(0), make([]byte, 64<<10)
	for {
		idle.arm()
		n, err := resp.Body.Read(buffer)
		idle.disarm() // w may take its time
		if n > 0 {
			if skip := min(max(done-place, 0), int64(n)); skip < int64(n) {
				if _, err := w.Write(buffer[skip:n]); err != nil {
					return fmt.Errorf("writing %s: %w", info.ID, err)
				}
				done = place + int64(n)
				report(done)
			}
			place += int64(n)
		}
		switch {
		case errors.Is(err, io.EOF) && place == info.Bytes:
			return nil
		case errors.Is(err, io.EOF):
			return fmt.Errorf("reading %s: %w: it has %d bytes, and %d came", info.ID, ErrUnreachable, info.Bytes, place)
		case err != nil && errors.Is(context.Cause(ctx), context.Canceled):
			return fmt.Errorf("reading %s: %w", info.ID, context.Canceled)
		case err != nil:
			return fmt.Errorf("reading %s: %w: %w", info.ID, ErrUnreachable, err)
		}
	}
}
