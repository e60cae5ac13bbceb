package routing

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"golang.org/x/sync/errgroup"
)

// body is a streamed chat of so many prompt and answer tokens on an emulator. The serial number makes its first bytes unlike any other's, so that nothing of it is in a
// prefix cache. limit is the max_tokens that all requests name: the answer's own length is for the engine alone to know.
func body(serial, prompt, output, limit int) []byte {
	const (
		template = len("<|user|>\n") + len("\n<|assistant|>\n") // that the emulator counts too
		digits   = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
	)
	b := fmt.Appendf(nil, `{"model":%q,"stream":true,"max_tokens":%d,"metadata":{"length":"[[emulator:tokens=%d]]"},"messages":[{"role":"user","content":"`, model, limit, output)
	for n := range 4 {
		b = append(b, digits[serial>>(6*n)&63])
	}
	for range 4*(prompt-1) - template {
		b = append(b, 'x')
	}
	return append(b, `"}]}`...)
}

// ask streams one answer and measures it from the moment at which it was to be sent. Its sample has failed if there is an error.
func ask(ctx context.Context, c *http.Client, url string, body []byte, at time.Time) (Sample, error) {
	failed := Sample{Failed: true}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return failed, fmt.Errorf("making a request: %w", err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := c.Do(req)
	if err != nil {
		return failed, fmt.Errorf("asking: %w", err)
	}
	defer resp.Body.Close() //nolint:errcheck // read to its end, or given up
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 500)) // the status says enough
		return failed, fmt.Errorf("asking: status %d: %s", resp.StatusCode, text)
	}
	var s Sample
	for lines := bufio.NewReader(resp.Body); ; {
		line, err := lines.ReadSlice('\n')
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			return failed, fmt.Errorf("reading an answer: %w", err)
		}
		data, ok := bytes.CutPrefix(line, []byte("data: "))
		switch {
		case !ok: // a comment, a blank line, or the rest of a long one
		case bytes.HasPrefix(data, []byte("[DONE]")):
			if s.TTFT == 0 {
				return failed, errors.New("reading an answer: no token came")
			}
			s.E2E = time.Since(at)
			return s, nil
		case bytes.HasPrefix(data, []byte(`{"error"`)):
			return failed, fmt.Errorf("reading an answer: %.500s", data)
		case s.TTFT == 0:
			s.TTFT = time.Since(at)
		}
	}
}

// warmUp asks every arm some short questions, so that connections, queues and code are there, and checks that all are answered.
func warmUp(ctx context.Context, c *http.Client, arms []*arm) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	g, ctx := errgroup.WithContext(ctx)
	for _, a := range arms {
		for i := range warmUps {
			g.Go(func() error {
				if _, err := ask(ctx, c, a.front.url()+chatPath, body(i, 20, 5, 5), time.Now()); err != nil {
					return fmt.Errorf("warming up %s: %w", a.policy, err)
				}
				return nil
			})
		}
	}
	return g.Wait()
}

const chatPath = "/v1/chat/completions"
