package e2e_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// client speaks to one API.
type client struct {
	t    *testing.T
	url  string
	key  string
	http *http.Client
}

// jobView is a job as the API shows it.
type jobView struct {
	ID       string `json:"id"`
	Status   string `json:"status"`
	Attempts []struct {
		Worker  string  `json:"worker"`
		Outcome *string `json:"outcome"`
	} `json:"attempts"`
	Result *struct {
		StatusCode int             `json:"status_code"`
		Body       json.RawMessage `json:"body"`
	} `json:"result"`
	Error *apiError `json:"error"`
	Usage *struct {
		Completion int `json:"completion_tokens"`
	} `json:"usage"`
	Queue *struct {
		Reason string `json:"reason"`
	} `json:"queue"`
}

type apiError struct {
	Message string  `json:"message"`
	Type    string  `json:"type"`
	Code    *string `json:"code"`
}

func (e *apiError) code() string {
	if e == nil || e.Code == nil {
		return ""
	}
	return *e.Code
}

func (j *jobView) ended() bool {
	switch j.Status {
	case "completed", "failed", "cancelled", "expired":
		return true
	}
	return false
}

// text is the text of a chat's answer.
func (j *jobView) text() string {
	if j.Result == nil {
		return ""
	}
	return answerText(j.Result.Body)
}

func answerText(body []byte) string {
	var a struct {
		Choices []struct {
			Message struct {
				Content string `json:"content"`
			} `json:"message"`
		} `json:"choices"`
	}
	if json.Unmarshal(body, &a) != nil || len(a.Choices) == 0 {
		return ""
	}
	return a.Choices[0].Message.Content
}

// answer is an HTTP answer, read whole.
type answer struct {
	status int
	header http.Header
	body   []byte
	took   time.Duration
}

// code is that of the error object, "" if it is none.
func (a *answer) code() string {
	var o struct {
		Error *apiError `json:"error"`
	}
	if json.Unmarshal(a.body, &o) != nil {
		return ""
	}
	return o.Error.code()
}

// request makes a request; headers are name and value in turn.
func (c *client) request(ctx context.Context, method, path string, body []byte, headers ...string) *http.Request {
	c.t.Helper()
	r, err := http.NewRequestWithContext(ctx, method, c.url+path, bytes.NewReader(body))
	if err != nil {
		c.t.Fatal(err)
	}
	r.Header.Set("Content-Type", "application/json")
	if c.key != "" {
		r.Header.Set("Authorization", "Bearer "+c.key)
	}
	for i := 0; i+1 < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	return r
}

// send sends a request. An error means that there was no whole answer.
func (c *client) send(method, path string, body []byte, headers ...string) (*answer, error) {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), 2*patience)
	defer cancel()
	begun := time.Now()
	resp, err := c.http.Do(c.request(ctx, method, path, body, headers...))
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, err
	}
	return &answer{status: resp.StatusCode, header: resp.Header, body: raw, took: time.Since(begun)}, nil
}

// must is send, and the test ends unless the answer has that status.
func (c *client) must(status int, method, path string, body []byte, headers ...string) *answer {
	c.t.Helper()
	a, err := c.send(method, path, body, headers...)
	if err != nil {
		c.t.Fatalf("%s %s: %v", method, path, err)
	}
	if a.status != status {
		c.t.Fatalf("%s %s answers %d: %s", method, path, a.status, a.body)
	}
	return a
}

// chat is the body of a chat; content holds the emulator's markers. more are further fields.
func chat(content, more string) []byte {
	if more != "" {
		more = "," + more
	}
	return fmt.Appendf(nil, `{"model":%q,"messages":[{"role":"user","content":%q}]%s}`, model, content, more)
}

// submission is the body of POST /v1/jobs.
func submission(body []byte, more string) []byte {
	if more != "" {
		more = "," + more
	}
	return fmt.Appendf(nil, `{"body":%s%s}`, body, more)
}

// submit makes a durable job and returns its id.
func (c *client) submit(content, more string, headers ...string) string {
	c.t.Helper()
	a := c.must(http.StatusAccepted, "POST", "/v1/jobs", submission(chat(content, ""), more), headers...)
	var j jobView
	if err := json.Unmarshal(a.body, &j); err != nil || j.ID == "" {
		c.t.Fatalf("a 202 without a job: %s", a.body)
	}
	return j.ID
}

// submitMany makes n durable jobs, several at a time; content gets their numbers.
func (c *client) submitMany(n int, more string, content func(i int) string) []string {
	c.t.Helper()
	ids := make([]string, n)
	var wg sync.WaitGroup
	slots := make(chan struct{}, 16)
	for i := range n {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			a, err := c.send("POST", "/v1/jobs", submission(chat(content(i), ""), more))
			var j jobView
			switch {
			case err != nil:
				c.t.Errorf("submitting: %v", err)
			case a.status != http.StatusAccepted || json.Unmarshal(a.body, &j) != nil:
				c.t.Errorf("submitting answers %d: %s", a.status, a.body)
			}
			ids[i] = j.ID
		})
	}
	wg.Wait()
	if c.t.Failed() {
		c.t.FailNow()
	}
	return ids
}

// errNotYet: the API does not answer now.
var errNotYet = errors.New("the API does not answer")

// job reads a job. Of an API or a store that is away it says errNotYet.
func (c *client) job(id, query string) (*jobView, error) {
	a, err := c.send("GET", "/v1/jobs/"+id+query, nil)
	switch {
	case err != nil:
		return nil, fmt.Errorf("%w: %w", errNotYet, err)
	case a.status == http.StatusServiceUnavailable:
		return nil, fmt.Errorf("%w: %s", errNotYet, a.body)
	case a.status != http.StatusOK:
		return nil, fatalError{fmt.Errorf("GET job %s answers %d: %s", id, a.status, a.body)}
	}
	var j jobView
	if err := json.Unmarshal(a.body, &j); err != nil {
		return nil, fatalError{fmt.Errorf("GET job %s is no JSON: %w: %.2000s", id, err, a.body)}
	}
	return &j, nil
}

// ended waits until all jobs have ended, within the time, and returns them. An API that is away for a while is no error; a job that is unknown is.
func (c *client) ended(within time.Duration, ids ...string) map[string]*jobView {
	c.t.Helper()
	deadline := time.Now().Add(within)
	var mu sync.Mutex
	all := make(map[string]*jobView, len(ids))
	var wg sync.WaitGroup
	slots := make(chan struct{}, 16)
	for _, id := range ids {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			j, err := c.end(id, deadline)
			if err != nil {
				c.t.Errorf("job %s has not ended: %v", id, err)
				return
			}
			mu.Lock()
			all[id] = j
			mu.Unlock()
		})
	}
	wg.Wait()
	if c.t.Failed() {
		c.t.FailNow()
	}
	return all
}

func (c *client) end(id string, deadline time.Time) (*jobView, error) {
	for {
		j, err := c.job(id, "?wait=5s")
		if err == nil && j.ended() {
			return j, nil
		}
		var fatal fatalError
		if errors.As(err, &fatal) {
			return nil, err
		}
		if time.Now().After(deadline) {
			if err == nil {
				err = fmt.Errorf("it is %s: %+v", j.Status, j)
			}
			return nil, err
		}
		if err != nil {
			time.Sleep(20 * time.Millisecond) // the API is not there, and tells nobody when it is
		}
	}
}

// status waits until the job has the status.
func (c *client) status(id, want string) *jobView {
	c.t.Helper()
	var j *jobView
	eventually(c.t, patience, "job "+id+" is "+want, func() (err error) {
		if j, err = c.job(id, ""); err == nil && j.Status != want {
			err = fmt.Errorf("it is %s", j.Status)
		}
		return err
	})
	return j
}

// --- event streams ---

// event is one event of a stream, as it came.
type event struct {
	id   int64
	kind string
	data string
	// raw are its bytes, with the blank line, without comments.
	raw string
}

// stream is an open event stream.
type stream struct {
	t    testing.TB
	resp *http.Response
	in   *bufio.Reader
	stop context.CancelFunc
	// comments counts the comment lines so far.
	comments int
}

// open sends a request whose answer is a stream. The caller closes it.
func (c *client) open(method, path string, body []byte, headers ...string) (*stream, error) {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), 2*patience)
	resp, err := c.http.Do(c.request(ctx, method, path, body, headers...))
	if err != nil {
		cancel()
		return nil, err
	}
	s := &stream{t: c.t, resp: resp, in: bufio.NewReaderSize(resp.Body, 64<<10), stop: cancel}
	if resp.StatusCode != http.StatusOK || !strings.HasPrefix(resp.Header.Get("Content-Type"), "text/event-stream") {
		raw, _ := io.ReadAll(resp.Body)
		s.close()
		return nil, fmt.Errorf("%s %s answers %d: %s", method, path, resp.StatusCode, raw)
	}
	return s, nil
}

// events opens the stream of a job's events, after the one with that number.
func (c *client) events(id string, after int64) (*stream, error) {
	c.t.Helper()
	var headers []string
	if after > 0 {
		headers = []string{"Last-Event-ID", strconv.FormatInt(after, 10)}
	}
	return c.open("GET", "/v1/jobs/"+id+"/events", nil, headers...)
}

// mustEvents is events, and the test ends if the stream does not open.
func (c *client) mustEvents(id string, after int64) *stream {
	c.t.Helper()
	s, err := c.events(id, after)
	if err != nil {
		c.t.Fatal(err)
	}
	return s
}

func (s *stream) close() {
	s.stop()
	_ = s.resp.Body.Close() // cut by us
}

// next returns the next event. io.EOF is the stream's end, in order.
func (s *stream) next() (event, error) {
	var e event
	var data []string
	for {
		line, err := s.in.ReadString('\n')
		if err != nil {
			if errors.Is(err, io.EOF) && (line != "" || e.raw != "") {
				err = io.ErrUnexpectedEOF
			}
			return event{}, err
		}
		text := strings.TrimSuffix(line, "\n")
		switch {
		case strings.HasPrefix(text, ":"):
			s.comments++
			continue
		case text == "" && e.raw == "":
			s.t.Error("a blank line without an event: clients take it for an empty one")
			continue
		case text == "":
			e.raw += line
			e.data = strings.Join(data, "\n")
			return e, nil
		}
		e.raw += line
		field, value, _ := strings.Cut(text, ":")
		value = strings.TrimPrefix(value, " ")
		switch field {
		case "id":
			e.id, err = strconv.ParseInt(value, 10, 64)
			if err != nil {
				return event{}, fmt.Errorf("an event's id is %q", value)
			}
		case "event":
			e.kind = value
		case "data":
			data = append(data, value)
		}
	}
}

// rest reads to the stream's end.
func (s *stream) rest() ([]event, error) {
	var all []event
	for {
		e, err := s.next()
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return all, err
		}
		all = append(all, e)
		if e.kind == "done" || e.data == "[DONE]" {
			// What follows is the end alone.
			if _, err := s.next(); !errors.Is(err, io.EOF) {
				return all, fmt.Errorf("after the last event: %w", err)
			}
			return all, nil
		}
	}
}

// contents joins the text that chunks add to the first choice.
func contents(events []event) string {
	var b strings.Builder
	for _, e := range events {
		if e.kind != "" && e.kind != "token" {
			continue
		}
		for line := range strings.SplitSeq(e.data, "\n") {
			b.WriteString(chunkText(line))
		}
	}
	return b.String()
}

func chunkText(data string) string {
	var c struct {
		Choices []struct {
			Delta struct {
				Content string `json:"content"`
			} `json:"delta"`
		} `json:"choices"`
	}
	if json.Unmarshal([]byte(data), &c) != nil || len(c.Choices) == 0 {
		return ""
	}
	return c.Choices[0].Delta.Content
}
