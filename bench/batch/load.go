package batch

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
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/millrace/millrace/bench"
	"github.com/millrace/millrace/internal/engine/emulator"
)

// input is the file of lines, made while it is read. All its lines are equally long, so that it can seek.
type input struct {
	cfg    Config
	length int64
	at     int64
	line   []byte
	number int
}

func newInput(cfg Config) *input {
	in := &input{cfg: cfg, number: -1}
	in.length = int64(len(in.make(0)))
	return in
}

// Size of the whole in bytes.
func (in *input) Size() int64 { return in.length * int64(in.cfg.Lines) }

// make writes line n.
func (in *input) make(n int) []byte {
	return fmt.Appendf(nil, `{"custom_id":"line-%08d","method":"POST","url":"/v1/chat/completions","body":%s}`+"\n", n, body(in.cfg, n, false))
}

// answer is how long the answer to line n naturally is, in tokens: spread evenly from half the mean to half as much again.
func answer(cfg Config, n int) int {
	return max(1, cfg.Tokens/2+int(uint64(n)*0x9e3779b97f4a7c15>>33%uint64(cfg.Tokens+1)))
}

// body is the request of line n. Its beginning is its own, so that no prompt is found in a cache.
func body(cfg Config, n int, stream bool) []byte {
	head := fmt.Sprintf("%08d [[emulator:tokens=%05d]] ", n, answer(cfg, n))
	pad := max(0, 4*cfg.Prompt-len(head)-12) // what the chat's frame takes, about
	return fmt.Appendf(nil, `{"model":"%s","stream":%-5t,"max_tokens":%d,"messages":[{"role":"user","content":"%s%s"}]}`, model, stream, 2*cfg.Tokens, head, strings.Repeat("x", pad))
}

func (in *input) Read(p []byte) (int, error) {
	if in.at >= in.Size() {
		return 0, io.EOF
	}
	total := 0
	for total < len(p) && in.at < in.Size() {
		if n := int(in.at / in.length); n != in.number {
			in.line, in.number = in.make(n), n
		}
		k := copy(p[total:], in.line[in.at%in.length:])
		total += k
		in.at += int64(k)
	}
	return total, nil
}

func (in *input) Seek(offset int64, whence int) (int64, error) {
	switch whence {
	case io.SeekCurrent:
		offset += in.at
	case io.SeekEnd:
		offset += in.Size()
	}
	if offset < 0 {
		return 0, errors.New("before the beginning")
	}
	in.at = offset
	return offset, nil
}

// numberOf is the line of a custom_id.
func numberOf(customID string) (int, bool) {
	digits, ok := strings.CutPrefix(customID, "line-")
	n, err := strconv.Atoi(digits)
	return n, ok && err == nil && n >= 0
}

// direct drives the engines without Millrace, at the concurrency that fills them, with a sample of the lines: numbers beyond the batch's own, so that the prompts are new.
func direct(ctx context.Context, cfg Config, p *platform) (Direct, []size, error) {
	d := Direct{Concurrency: len(p.engines) * emulator.MaxRunning}
	d.Lines = min(cfg.Lines, 6*d.Concurrency)
	d.Concurrency = min(d.Concurrency, d.Lines)
	c := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: d.Concurrency, DisableCompression: true}}
	defer c.CloseIdleConnections()
	sizes := make([]size, d.Lines)
	var next atomic.Int64
	g, ctx := errgroup.WithContext(ctx)
	begun := time.Now()
	for slot := range d.Concurrency {
		g.Go(func() error {
			for {
				n := int(next.Add(1)) - 1
				if n >= d.Lines {
					return nil
				}
				var err error
				if sizes[n], err = complete(ctx, c, p.engines[slot%len(p.engines)], body(cfg, cfg.Lines+n, false)); err != nil {
					return err
				}
			}
		})
	}
	if err := g.Wait(); err != nil {
		return d, nil, err
	}
	d.LinesPerSecond = float64(d.Lines) / time.Since(begun).Seconds()
	return d, sizes, nil
}

// complete makes one call that is not streamed.
func complete(ctx context.Context, c *http.Client, url string, body []byte) (size, error) {
	resp, err := post(ctx, c, url, body)
	if err != nil {
		return size{}, err
	}
	defer resp.Body.Close() //nolint:errcheck // read to its end
	var v struct {
		Usage struct {
			Prompt int `json:"prompt_tokens"`
			Output int `json:"completion_tokens"`
		} `json:"usage"`
	}
	if err := json.NewDecoder(resp.Body).Decode(&v); err != nil {
		return size{}, fmt.Errorf("reading an answer: %w", err)
	}
	return size{v.Usage.Prompt, v.Usage.Output}, nil
}

func post(ctx context.Context, c *http.Client, url string, body []byte) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		return nil, fmt.Errorf("making a request: %w", err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := c.Do(req)
	if err != nil {
		return nil, fmt.Errorf("calling %s: %w", url, err)
	}
	if resp.StatusCode != http.StatusOK {
		raw, _ := io.ReadAll(io.LimitReader(resp.Body, 1000)) // only to say more
		_ = resp.Body.Close()
		return nil, fmt.Errorf("calling %s: status %d: %s", url, resp.StatusCode, raw)
	}
	return resp, nil
}

// calls are the interactive ones.
type calls struct {
	cfg    Config
	url    string
	http   *http.Client
	serial atomic.Int64
	failed atomic.Int64

	mu    sync.Mutex // guards what follows
	first []time.Duration
}

func newCalls(cfg Config, url string) *calls {
	return &calls{cfg: cfg, url: url, http: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 256, DisableCompression: true}}}
}

func (c *calls) close() { c.http.CloseIdleConnections() }

// callTakes bounds one call.
const callTakes = 30 * time.Second

// run makes calls at the rate for a time, 0 until ctx ends, and waits for their ends. A call that fails is counted; that all fail is an error.
func (c *calls) run(ctx context.Context, length time.Duration) error {
	every := time.Duration(float64(time.Second) / c.cfg.Rate)
	begun := time.Now()
	tick := time.NewTicker(every)
	defer tick.Stop()
	var open sync.WaitGroup
	var last atomic.Pointer[error]
	made, failed := 0, c.failed.Load()
	own, end := context.WithCancel(context.WithoutCancel(ctx)) // what was begun is measured to its end
	defer end()
	for length == 0 || time.Since(begun) < length {
		made++
		open.Go(func() {
			if err := c.one(own); err != nil {
				c.failed.Add(1)
				last.Store(&err)
			}
		})
		select {
		case <-tick.C:
			continue
		case <-ctx.Done():
		}
		break
	}
	open.Wait()
	if c.failed.Load()-failed == int64(made) {
		return fmt.Errorf("no interactive call was answered: %w", *last.Load())
	}
	return nil
}

// one makes a call and notes the time to its first token.
func (c *calls) one(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, callTakes)
	defer cancel()
	n := 9*10_000_000 + int(c.serial.Add(1)) // no line has that number
	begun := time.Now()
	resp, err := post(ctx, c.http, c.url, body(c.cfg, n, true))
	if err != nil {
		return err
	}
	defer resp.Body.Close() //nolint:errcheck // read to its end
	var first time.Duration
	for lines := bufio.NewReader(resp.Body); ; {
		text, err := lines.ReadBytes('\n')
		if first == 0 && bytes.Contains(text, []byte(`"content":"`)) && !bytes.Contains(text, []byte(`"content":""`)) {
			first = time.Since(begun)
		}
		switch {
		case errors.Is(err, io.EOF) && first > 0:
			c.mu.Lock()
			defer c.mu.Unlock()
			c.first = append(c.first, first)
			return nil
		case errors.Is(err, io.EOF):
			return errors.New("streaming: no token came")
		case err != nil:
			return fmt.Errorf("streaming: %w", err)
		}
	}
}

// take returns the times since the last take.
func (c *calls) take() bench.Latency {
	c.mu.Lock()
	defer c.mu.Unlock()
	l := bench.LatencyOf(c.first)
	c.first = nil
	return l
}

// sizes are those of the calls since the last take.
func (c *calls) sizes() []size {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := make([]size, len(c.first))
	for i := range all {
		all[i] = size{c.cfg.Prompt, c.cfg.Tokens}
	}
	return all
}

// engineWatch looks again and again at how many requests the engines have.
type engineWatch struct {
	// count is set while it counts.
	count atomic.Bool
	stop  context.CancelFunc
	ended chan struct{}

	sum   float64
	looks int
}

// lookEvery is how often they are asked.
const lookEvery = 250 * time.Millisecond

func watchEngines(ctx context.Context, urls []string) *engineWatch {
	ctx, stop := context.WithCancel(ctx)
	w := &engineWatch{stop: stop, ended: make(chan struct{})}
	go func() {
		defer close(w.ended)
		c := &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{}}
		defer c.CloseIdleConnections()
		tick := time.NewTicker(lookEvery)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
			case <-ctx.Done():
				return
			}
			if !w.count.Load() {
				continue
			}
			total := 0.0
			for _, url := range urls {
				n, err := runningAt(ctx, c, url)
				if err != nil {
					total = -1 // a look that failed is no look
					break
				}
				total += n
			}
			if total >= 0 && w.count.Load() {
				w.sum, w.looks = w.sum+total, w.looks+1
			}
		}
	}()
	return w
}

// end stops it and returns the average.
func (w *engineWatch) end() float64 {
	w.stop()
	<-w.ended
	return w.sum / float64(max(w.looks, 1))
}

func runningAt(ctx context.Context, c *http.Client, url string) (float64, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/metrics", nil)
	if err != nil {
		return 0, fmt.Errorf("asking an engine: %w", err)
	}
	resp, err := c.Do(req)
	if err != nil {
		return 0, fmt.Errorf("asking an engine: %w", err)
	}
	defer resp.Body.Close() //nolint:errcheck // read to its end
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		if text := lines.Text(); strings.HasPrefix(text, "vllm:num_requests_running{") {
			return strconv.ParseFloat(text[strings.LastIndexByte(text, ' ')+1:], 64)
		}
	}
	return 0, errors.New("asking an engine: it does not tell how many requests run")
}
