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
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/millrace/millrace/internal/engine/emulator"
	"github.com/millrace/millrace/internal/engine/emulator/emulatortest"
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

// batchLines are those of an input file, "line-<i>": n of about size bytes, whose answers are so many tokens long.
type batchLines struct{ n, size, tokens int }

// request is what line i asks.
func (l batchLines) request(i int) (content, more string) {
	return marked("tokens="+strconv.Itoa(l.tokens), i) + " " + strings.Repeat("word ", max(0, l.size-200)/5), `"max_tokens":64`
}

func (l batchLines) write(w io.Writer) error {
	for i := range l.n {
		content, more := l.request(i)
		if _, err := io.WriteString(w, requestLine("line-"+strconv.Itoa(i), content, more)); err != nil {
			return err
		}
	}
	return nil
}

// answers are what the emulator says to each line. That follows from the request alone, so an engine that nobody else calls says what those say that ran the batch.
func (l batchLines) answers(t *testing.T) []string {
	t.Helper()
	e := emulatortest.Start(t, emulator.Config{Models: []string{model}, Speed: 1e6}).Handler()
	texts := make([]string, l.n)
	const callers = 32
	var calls sync.WaitGroup
	for first := range callers {
		calls.Go(func() {
			for i := first; i < l.n; i += callers {
				r := httptest.NewRequestWithContext(t.Context(), "POST", "/v1/chat/completions", bytes.NewReader(chat(l.request(i))))
				r.Header.Set("Content-Type", "application/json")
				w := httptest.NewRecorder()
				e.ServeHTTP(w, r)
				texts[i] = answerText(w.Body.Bytes())
			}
		})
	}
	calls.Wait()
	whose := make(map[string]int, l.n)
	for i, text := range texts {
		if other, known := whose[text]; known || text == "" {
			t.Fatalf("lines %d and %d are answered %q: nobody could tell them apart", i, other, text)
		}
		whose[text] = i
	}
	return texts
}

// sheet is what the lines must be answered, and which of them were.
type sheet struct {
	want []string
	seen []bool
}

func newSheet(want []string) *sheet { return &sheet{want: want, seen: make([]bool, len(want))} }

// take says what is wrong with a line of the output file or, unless good, of the error file.
func (s *sheet) take(l *outputLine, good bool) error {
	i, err := strconv.Atoi(strings.TrimPrefix(l.CustomID, "line-"))
	if err != nil || i < 0 || i >= len(s.want) {
		return fmt.Errorf("a line named %q", l.CustomID)
	}
	before := s.seen[i]
	s.seen[i] = true
	switch {
	case before:
		return fmt.Errorf("line %d has two answers", i)
	case !good:
		return fmt.Errorf("line %d failed: %+v %+v", i, l.Response, l.Error)
	case l.Response == nil || l.Response.StatusCode != http.StatusOK || l.Error != nil:
		return fmt.Errorf("line %d: %+v", i, l)
	}
	if got := answerText(l.Response.Body); got != s.want[i] {
		return fmt.Errorf("line %d is answered %q: its own answer is %q", i, got, s.want[i])
	}
	return nil
}

// answersOnce asserts that each line has exactly one answer, and that it is its own: the emulator's for the prompt of line i.
func (c *client) answersOnce(b *batchView, l batchLines) {
	c.t.Helper()
	s := newSheet(l.answers(c.t))
	wrong := 0
	take := func(good bool) func(*outputLine) {
		return func(o *outputLine) {
			if err := s.take(o, good); err != nil {
				if wrong++; wrong <= 20 {
					c.t.Error(err)
				}
			}
		}
	}
	c.fileLines(b.OutputFile, take(true))
	c.fileLines(b.ErrorFile, take(false))
	missing := 0
	for _, seen := range s.seen {
		if !seen {
			missing++
		}
	}
	if missing > 0 || wrong > 0 {
		c.t.Errorf("of %d lines %d have no answer, and %d that came are wrong", l.n, missing, wrong)
	}
}

// calls is how often the engines were called for lines.
type calls func() int

func (e *engine) calledFor() int { return len(e.all()) }

// notRedone asserts that no line ran again that had ended. An engine is called again for what a dead worker had called it for and had not settled, which is never more than it has room for: a line keeps its
// place until its outcome is stored. Nothing else makes a line run again: a worker outlives NATS, and settles what has run once it is back; the API has nothing to do with it; and what the dispatcher
// queues a second time is found there, or ended. deaths are those of workers.
func notRedone(t *testing.T, called calls, l batchLines, room, deaths int) {
	t.Helper()
	n, most := called(), l.n+room*deaths
	t.Logf("%d calls of the engines for %d lines, at most %d are right", n, l.n, most)
	if n > most {
		t.Errorf("%d calls of the engines for %d lines and %d deaths of workers with room for %d: lines that had ended ran again", n, l.n, deaths, room)
	}
}

// TestBatchSurvivesKillsOfEveryPart: a batch runs while the worker, the dispatcher, the API and NATS are killed once each, on PostgreSQL. Its sister below has SQLite and the embedded stores.
func TestBatchSurvivesKillsOfEveryPart(t *testing.T) {
	t.Parallel()
	const room = 24
	lines := batchLines{n: 2000, size: 300, tokens: 6}
	d := deployOn(t, "postgres", room)
	d.killOnTheWay(d.api.createBatch(d.api.upload(lines.write), "24h"), lines, d.engine.calledFor, room, 3*patience)
}

// killOnTheWay follows a batch to its end and kills each part once on the way. room is how many lines the worker runs at once.
func (d *deployment) killOnTheWay(id string, l batchLines, called calls, room int, within time.Duration) {
	d.t.Helper()
	breaks := []*process{d.worker, d.dispatcher, d.api.process, d.nats}
	broken := 0
	var mending sync.WaitGroup
	b := d.api.batchEnded(id, within, func(b *batchView) {
		if broken < len(breaks) && b.Counts.Completed >= int64(l.n*(broken+1)/(len(breaks)+2)) {
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
	d.api.answersOnce(b, l)
	// One that was only taken for dead, on a machine that stood still, has lost its lines too.
	notRedone(d.t, called, l, room, max(1, bytes.Count(d.dispatcher.output(), []byte(`"a worker is gone"`))))
	workEmpty(d.t, connect(d.t, d.natsURL()))
}

// TestBatchSurvivesKillsOfTheWholePlatform: all parts of `millrace up` die at once, several times, among them soon after the beginning and near the end.
func TestBatchSurvivesKillsOfTheWholePlatform(t *testing.T) {
	t.Parallel()
	const room = 24
	lines := batchLines{n: 2000, size: 300, tokens: 6}
	c := newBareCluster(t)
	e := startEngine(t)
	u := c.up("up", append(plain(room), "--engine", e.URL, "--data", c.dir+"/data")...)
	u.start()
	id := u.createBatch(u.upload(lines.write), "24h")
	marks := []int{0, lines.n / 2, lines.n - 40}
	deaths := 0
	b := u.batchEnded(id, 3*patience, func(b *batchView) {
		if deaths < len(marks) && b.Counts.Completed >= int64(marks[deaths]) {
			deaths++
			u.restart()
		}
	})
	if b.Status != "completed" {
		t.Fatalf("the batch is %s: %+v", b.Status, b)
	}
	u.answersOnce(b, lines)
	notRedone(t, e.calledFor, lines, room, deaths)
}

// TestCancelKeepsWhatIsDone: the lines that have ended stay readable, and the others say that they were cancelled.
func TestCancelKeepsWhatIsDone(t *testing.T) {
	t.Parallel()
	const n = 300
	d := deployOn(t, "sqlite", 4)
	id := d.api.createBatch(d.api.upload(batchLines{n: n, size: 300, tokens: 30}.write), "24h")
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
