package e2e_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// batchView is a batch as the API shows it.
type batchView struct {
	ID         string  `json:"id"`
	Status     string  `json:"status"`
	OutputFile *string `json:"output_file_id"`
	ErrorFile  *string `json:"error_file_id"`
	Errors     *struct {
		Data []struct {
			Code    string `json:"code"`
			Message string `json:"message"`
			Line    *int64 `json:"line"`
		} `json:"data"`
	} `json:"errors"`
	Counts struct {
		Total     int64 `json:"total"`
		Completed int64 `json:"completed"`
		Failed    int64 `json:"failed"`
	} `json:"request_counts"`
	Usage *struct {
		Input  int64 `json:"input_tokens"`
		Output int64 `json:"output_tokens"`
	} `json:"usage"`
}

func (b *batchView) ended() bool {
	switch b.Status {
	case "completed", "failed", "expired", "cancelled":
		return true
	}
	return false
}

// outputLine is one line of an output or error file.
type outputLine struct {
	CustomID string `json:"custom_id"`
	Response *struct {
		StatusCode int             `json:"status_code"`
		Body       json.RawMessage `json:"body"`
	} `json:"response"`
	Error *struct {
		Code    string `json:"code"`
		Message string `json:"message"`
	} `json:"error"`
}

// requestLine is a line of an input file.
func requestLine(id, content, more string) string {
	return fmt.Sprintf(`{"custom_id":%q,"method":"POST","url":"/v1/chat/completions","body":%s}`+"\n", id, chat(content, more))
}

// upload sends a batch's file, as it is written by write, and returns its id. It repeats until it is taken.
func (c *client) upload(write func(io.Writer) error) string {
	c.t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(50 * time.Millisecond) {
		id, err := c.tryUpload(write)
		if err == nil {
			return id
		}
		if time.Now().After(deadline) {
			c.t.Fatalf("uploading a file: %v", err)
		}
	}
}

func (c *client) tryUpload(write func(io.Writer) error) (string, error) {
	c.t.Helper()
	r, w := io.Pipe()
	form := multipart.NewWriter(w)
	var writing sync.WaitGroup
	writing.Go(func() {
		err := form.WriteField("purpose", "batch")
		var part io.Writer
		if err == nil {
			part, err = form.CreateFormFile("file", "in.jsonl")
		}
		if err == nil {
			buffered := bufio.NewWriterSize(part, 64<<10)
			if err = write(buffered); err == nil {
				err = buffered.Flush()
			}
		}
		w.CloseWithError(errors.Join(err, form.Close()))
	})
	defer writing.Wait()
	defer r.Close()
	ctx, cancel := context.WithTimeout(c.t.Context(), 5*patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, "POST", c.url+"/v1/files", r)
	if err != nil {
		return "", err
	}
	req.Header.Set("Content-Type", form.FormDataContentType())
	if c.key != "" {
		req.Header.Set("Authorization", "Bearer "+c.key)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	var file struct {
		ID string `json:"id"`
	}
	raw, err := io.ReadAll(resp.Body)
	if err != nil {
		return "", err
	}
	if resp.StatusCode != http.StatusOK {
		return "", fmt.Errorf("%d %s", resp.StatusCode, raw)
	}
	return file.ID, errors.Join(json.Unmarshal(raw, &file), unless(file.ID != "", "no id"))
}

// unless is nil if good, and else an error of that text.
func unless(good bool, text string) error {
	if !good {
		return errors.New(text)
	}
	return nil
}

// createBatch starts a batch, again and again until it is taken: each time under the same key.
func (c *client) createBatch(file, window string) string {
	c.t.Helper()
	body := fmt.Appendf(nil, `{"input_file_id":%q,"endpoint":"/v1/chat/completions","completion_window":%q}`, file, window)
	var b batchView
	eventually(c.t, patience, "a batch is taken", func() error {
		a, err := c.send("POST", "/v1/batches", body, "Idempotency-Key", "batch-of-"+file)
		if err != nil {
			return err
		}
		if a.status != http.StatusOK {
			return fmt.Errorf("%d %s", a.status, a.body)
		}
		return json.Unmarshal(a.body, &b)
	})
	return b.ID
}

// batch reads a batch; an error means that there was no good answer.
func (c *client) batch(id string) (*batchView, error) {
	a, err := c.send("GET", "/v1/batches/"+id, nil)
	if err != nil {
		return nil, err
	}
	if a.status != http.StatusOK {
		return nil, fmt.Errorf("%d %s", a.status, a.body)
	}
	var b batchView
	if err := json.Unmarshal(a.body, &b); err != nil {
		return nil, err
	}
	return &b, nil
}

// batchEnded polls a batch to its end, and holds each look against what must be true of the counts and the status at any time. at is called with each look.
func (c *client) batchEnded(id string, within time.Duration, at func(*batchView)) *batchView {
	c.t.Helper()
	last := &batchView{Status: "validating"}
	for deadline := time.Now().Add(within); ; time.Sleep(50 * time.Millisecond) {
		b, err := c.batch(id)
		if err == nil {
			n, m := b.Counts, last.Counts
			switch {
			case n.Completed < 0 || n.Failed < 0 || n.Completed+n.Failed > n.Total:
				c.t.Errorf("batch %s counts %+v", id, n)
			case n.Completed < m.Completed || n.Failed < m.Failed || n.Total < m.Total:
				c.t.Errorf("batch %s counts %+v, before it was %+v", id, n, m)
			case last.ended() && b.Status != last.Status:
				c.t.Errorf("batch %s is %s, and was %s", id, b.Status, last.Status)
			}
			last = b
			if at != nil {
				at(b)
			}
			if b.ended() {
				if b.Status != "failed" && n.Completed+n.Failed != n.Total {
					c.t.Errorf("batch %s is %s and counts %+v", id, b.Status, n)
				}
				return b
			}
		}
		if time.Now().After(deadline) {
			c.t.Fatalf("batch %s has not ended: %+v %v", id, last, err)
		}
	}
}

// fileLines reads a file's lines as they come; "" or no file is none.
func (c *client) fileLines(file *string, each func(*outputLine)) {
	c.t.Helper()
	if file == nil {
		return
	}
	ctx, cancel := context.WithTimeout(c.t.Context(), 5*patience)
	defer cancel()
	resp, err := c.http.Do(c.request(ctx, "GET", "/v1/files/"+*file+"/content", nil))
	if err != nil {
		c.t.Fatalf("reading file %s: %v", *file, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		c.t.Fatalf("reading file %s: %d", *file, resp.StatusCode)
	}
	in := json.NewDecoder(resp.Body)
	for {
		var line outputLine
		if err := in.Decode(&line); errors.Is(err, io.EOF) {
			return
		} else if err != nil {
			c.t.Fatalf("reading file %s: %v", *file, err)
		}
		each(&line)
	}
}

// answersOnce asserts that each of the n lines "line-<i>" has exactly one answer, and that it is its own: the emulator's for the prompt of line i.
func (c *client) answersOnce(b *batchView, n int) {
	c.t.Helper()
	seen := make([]bool, n)
	count := 0
	look := func(good bool) func(*outputLine) {
		return func(l *outputLine) {
			i, err := strconv.Atoi(strings.TrimPrefix(l.CustomID, "line-"))
			switch {
			case err != nil || i < 0 || i >= n:
				c.t.Errorf("a line named %q", l.CustomID)
				return
			case seen[i]:
				c.t.Errorf("line %d has two answers", i)
			case good && (l.Response == nil || l.Response.StatusCode != 200 || l.Error != nil || answerText(l.Response.Body) == ""):
				c.t.Errorf("line %d: %+v", i, l)
			case !good:
				c.t.Errorf("line %d failed: %+v %+v", i, l.Response, l.Error)
			}
			seen[i] = true
			count++
		}
	}
	c.fileLines(b.OutputFile, look(true))
	c.fileLines(b.ErrorFile, look(false))
	if count != n {
		c.t.Errorf("%d lines of %d have an answer", count, n)
	}
}

// batchFile writes n lines of about size bytes; tokens is how long each answer is.
func batchFile(n, size, tokens int) func(io.Writer) error {
	filler := strings.Repeat("word ", max(0, size-200)/5)
	return func(w io.Writer) error {
		for i := range n {
			if _, err := io.WriteString(w, requestLine("line-"+strconv.Itoa(i), marked("tokens="+strconv.Itoa(tokens), i)+" "+filler, `"max_tokens":64`)); err != nil {
				return err
			}
		}
		return nil
	}
}

// TestBatchSurvivesKillsOfEveryPart: a batch runs while the worker, the dispatcher, the API and NATS are killed once each, on PostgreSQL. Its sister below has SQLite and the embedded stores.
func TestBatchSurvivesKillsOfEveryPart(t *testing.T) {
	t.Parallel()
	const n = 2000
	d := deployOn(t, "postgres", 24)
	file := d.api.upload(batchFile(n, 300, 6))
	d.killOnTheWay(d.api.createBatch(file, "24h"), n, 3*patience)
}

// killOnTheWay follows a batch of n lines to its end and kills each part once on the way.
func (d *deployment) killOnTheWay(id string, n int, within time.Duration) *batchView {
	d.t.Helper()
	breaks := []*process{d.worker, d.dispatcher, d.api.process, d.nats}
	broken := 0
	var mending sync.WaitGroup
	b := d.api.batchEnded(id, within, func(b *batchView) {
		if broken < len(breaks) && b.Counts.Completed >= int64(n*(broken+1)/(len(breaks)+2)) {
			p := breaks[broken]
			broken++
			if d.beforeKill != nil {
				d.beforeKill(p)
			}
			d.t.Logf("killing %s at %+v", p.name, b.Counts)
			p.kill()
			mending.Go(p.start)
		}
	})
	mending.Wait()
	if broken < len(breaks) {
		d.t.Errorf("only %d parts were killed before the batch had ended", broken)
	}
	if b.Status != "completed" {
		d.t.Fatalf("the batch is %s: %+v", b.Status, b)
	}
	d.api.answersOnce(b, n)
	workEmpty(d.t, connect(d.t, d.natsURL()))
	return b
}

// TestBatchSurvivesKillsOfTheWholePlatform: all parts of `millrace up` die at once, several times, among them soon after the beginning and near the end.
func TestBatchSurvivesKillsOfTheWholePlatform(t *testing.T) {
	t.Parallel()
	const n = 800
	c := newBareCluster(t)
	e := startEngine(t)
	u := c.up("up", append(plain(24), "--engine", e.URL, "--data", c.dir+"/data")...)
	u.start()
	id := u.createBatch(u.upload(batchFile(n, 300, 6)), "24h")
	marks := []int64{0, n / 2, n - 40}
	b := u.batchEnded(id, 3*patience, func(b *batchView) {
		if len(marks) > 0 && b.Counts.Completed >= marks[0] {
			marks = marks[1:]
			u.restart()
		}
	})
	if b.Status != "completed" {
		t.Fatalf("the batch is %s: %+v", b.Status, b)
	}
	u.answersOnce(b, n)
	// A finished line is not run again: what runs twice was in the engine when the platform died.
	if calls := len(e.all()); calls > n+3*24*3 {
		t.Errorf("%d calls of the engine for %d lines", calls, n)
	}
}

// TestCancelKeepsWhatIsDone: the lines that have ended stay readable, and the others say that they were cancelled.
func TestCancelKeepsWhatIsDone(t *testing.T) {
	t.Parallel()
	const n = 300
	d := deployOn(t, "sqlite", 4)
	id := d.api.createBatch(d.api.upload(batchFile(n, 300, 30)), "24h")
	eventually(t, patience, "some lines are done", func() error {
		b, err := d.api.batch(id)
		if err == nil && b.Counts.Completed < 20 {
			err = fmt.Errorf("%+v", b.Counts)
		}
		return err
	})
	a := d.api.must(http.StatusOK, "POST", "/v1/batches/"+id+"/cancel", nil)
	if !bytes.Contains(a.body, []byte(`"cancelling"`)) {
		t.Errorf("cancelled at once: %s", a.body)
	}
	d.dispatcher.restart()
	b := d.api.batchEnded(id, patience, nil)
	if b.Status != "cancelled" || b.Counts.Completed < 20 || b.Counts.Completed == n {
		t.Fatalf("the batch is %+v", b)
	}
	done, undone := int64(0), int64(0)
	d.api.fileLines(b.OutputFile, func(l *outputLine) { done++ })
	d.api.fileLines(b.ErrorFile, func(l *outputLine) {
		undone++
		if l.Response != nil || l.Error == nil || l.Error.Code != "batch_cancelled" {
			t.Errorf("line %s: %+v %+v", l.CustomID, l.Response, l.Error)
		}
	})
	if done != b.Counts.Completed || undone != b.Counts.Failed || done+undone != n {
		t.Errorf("%d and %d lines, counted %+v", done, undone, b.Counts)
	}
	if b := d.api.must(http.StatusOK, "POST", "/v1/batches/"+id+"/cancel", nil); !bytes.Contains(b.body, []byte(`"status":"cancelled"`)) {
		t.Errorf("cancelled twice: %s", b.body)
	}
}
