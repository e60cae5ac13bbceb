//go:build engine

package engine_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"testing"

	"github.com/openai/openai-go/v3"

	"github.com/millrace/millrace/internal/client"
	"github.com/millrace/millrace/internal/job"
)

// counter passes calls on to an engine, and counts those for jobs that are there at once: what else is asked costs nothing.
type counter struct {
	proxy *httputil.ReverseProxy

	mu             sync.Mutex // guards what follows
	now, most, sum int
}

func (c *counter) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method == http.MethodPost && strings.HasPrefix(r.Header.Get("X-Request-Id"), "job_") {
		c.mu.Lock()
		c.now++
		c.sum++
		c.most = max(c.most, c.now)
		c.mu.Unlock()
		defer func() {
			c.mu.Lock()
			defer c.mu.Unlock()
			c.now--
		}()
	}
	c.proxy.ServeHTTP(w, r)
}

// TestEngineGetsNoMoreThanItRunsAtOnce: forty jobs at a time, durable ones and calls, streamed and not; all complete, and at no moment more are at the engine than its limit, though all have work waiting.
func TestEngineGetsNoMoreThanItRunsAtOnce(t *testing.T) {
	target, err := url.Parse(base(engineURL(t)))
	if err != nil {
		t.Fatal(err)
	}
	for _, limit := range []int{1, 3} {
		t.Run(fmt.Sprint(limit), func(t *testing.T) {
			c := &counter{proxy: &httputil.ReverseProxy{
				Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(target) }, FlushInterval: -1,
			}}
			front := httptest.NewServer(c)
			defer front.Close()
			p := start(t, front.URL, "--max-concurrency", fmt.Sprint(limit))
			const jobs = 40
			var all sync.WaitGroup
			for i := range jobs {
				all.Go(func() {
					switch i % 4 {
					case 0:
						if _, err := p.openai.Chat.Completions.New(t.Context(), p.question(12)); err != nil {
							t.Errorf("a call: %v", err)
						}
					case 1:
						stream := p.openai.Chat.Completions.NewStreaming(t.Context(), openai.ChatCompletionNewParams{
							Model: string(p.model), MaxTokens: openai.Int(12), Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage("Why?")},
						})
						for stream.Next() {
						}
						if err := stream.Err(); err != nil {
							t.Errorf("a stream: %v", err)
						}
					default:
						body := json.RawMessage(fmt.Sprintf(`{"model":%q,"messages":[{"role":"user","content":"Question %d"}],"max_tokens":12}`, p.model, i))
						j, err := p.client.Submit(t.Context(), client.Submission{Body: body})
						if err != nil {
							t.Errorf("submitting: %v", err)
							return
						}
						if j, err = p.client.Wait(t.Context(), j.ID); err != nil || j.Status != job.Completed {
							t.Errorf("job %s: %v, %v", j.ID, j.Status, err)
						}
					}
				})
			}
			all.Wait()
			p.idle(t)
			c.mu.Lock()
			defer c.mu.Unlock()
			t.Logf("of %d calls %d were at the engine at once", c.sum, c.most)
			if c.most > limit || c.most < 1 || c.sum < jobs {
				t.Errorf("%d of %d calls were at the engine at once, want at most %d", c.most, c.sum, limit)
			}
		})
	}
}
