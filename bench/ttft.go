package bench

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/millrace/millrace/internal/engine"
	"github.com/millrace/millrace/internal/engine/emulator"
)

func measureTTFT(ctx context.Context, cfg Config) (t TTFT, err error) {
	e, err := emulator.New(emulator.Config{Profile: "h100-8b"}, cfg.Log)
	if err != nil {
		return t, fmt.Errorf("making the emulator: %w", err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return t, fmt.Errorf("listening for the emulator: %w", err)
	}
	running, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- e.Serve(running, l) }()
	defer func() {
		stop()
		err = errors.Join(err, <-ended)
	}()
	url := "http://" + l.Addr().String()
	r, err := openRig(ctx, cfg, rigConfig{engine: engine.Config{URL: url}})
	if err != nil {
		return t, err
	}
	var direct, through []time.Duration
	model := e.Models()[0]
	for begun := time.Now(); err == nil && time.Since(begun) < cfg.scaled(3*time.Second); {
		for _, arm := range []struct {
			url string
			all *[]time.Duration
		}{{url, &direct}, {r.platform.URL(), &through}} {
			// Each prompt is a fresh one: the engine's prefix cache helps neither arm.
			body := fmt.Appendf(nil, `{"model":"%s","stream":true,"max_tokens":2,"messages":[{"role":"user","content":"%d: what is a mill race?"}]}`, model, r.serial.Add(1))
			var d time.Duration
			if d, err = firstToken(ctx, r.http, arm.url, body); err != nil {
				break
			}
			*arm.all = append(*arm.all, d)
		}
	}
	if err = errors.Join(err, r.close()); err != nil {
		return t, err
	}
	t = TTFT{Direct: LatencyOf(direct), Through: LatencyOf(through)}
	t.Added = t.Through.P50 - t.Direct.P50
	return t, nil
}

// firstToken streams a chat completion and returns the time from the send to the first chunk with text. The stream is read to its end.
func firstToken(ctx context.Context, c *http.Client, url string, body []byte) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		return 0, fmt.Errorf("making a request: %w", err)
	}
	req.Header.Set("Content-Type", "application/json")
	sent := time.Now()
	resp, err := c.Do(req)
	if err != nil {
		return 0, fmt.Errorf("streaming: %w", err)
	}
	defer resp.Body.Close() //nolint:errcheck // read to its end
	if resp.StatusCode != http.StatusOK {
		return 0, fmt.Errorf("streaming: status %d", resp.StatusCode)
	}
	var first time.Duration
	for lines := bufio.NewReader(resp.Body); ; {
		line, err := lines.ReadBytes('\n')
		if first == 0 && bytes.Contains(line, []byte(`"content":"`)) && !bytes.Contains(line, []byte(`"content":""`)) {
			first = time.Since(sent)
		}
		switch {
		case errors.Is(err, io.EOF) && first > 0:
			return first, nil
		case errors.Is(err, io.EOF):
			return 0, errors.New("streaming: no token came")
		case err != nil:
			return 0, fmt.Errorf("streaming: %w", err)
		}
	}
}
