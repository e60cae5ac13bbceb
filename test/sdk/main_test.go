// Package sdk_test runs OpenAI's own clients, unchanged but for the base URL and the key, against a whole platform: openai-go in this process, openai-node in
// the program node/main.mjs.
package sdk_test

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"net/http"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/millrace/millrace/api"
	"github.com/millrace/millrace/internal/engine"
	"github.com/millrace/millrace/internal/engine/emulator"
	"github.com/millrace/millrace/internal/engine/emulator/emulatortest"
	"github.com/millrace/millrace/internal/ledger"
	"github.com/millrace/millrace/internal/platform"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/testenv"
)

func TestMain(m *testing.M) {
	if testenv.ServeApart() {
		return
	}
	for _, name := range []string{"OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID", "OPENAI_ADMIN_KEY"} { // the clients read them
		if err := os.Unsetenv(name); err != nil {
			panic(err)
		}
	}
	flag.Parse()
	asked := false
	flag.Visit(func(f *flag.Flag) { asked = asked || f.Name == "test.parallel" })
	if !asked {
		if err := flag.Set("test.parallel", atOnce); err != nil {
			panic(err)
		}
	}
	goleak.VerifyTestMain(tests{m}, testenv.NATSLeaves()...)
}

// tests end what they share.
type tests struct{ *testing.M }

func (t tests) Run() int {
	defer theNode.stop()
	return t.M.Run()
}

// model has a name with a slash, as most models have.
const model = "test/model-8b"

// atOnce is how many tests run at once: they wait for each other's clients more than they compute.
const atOnce = "6"

// patience bounds what a test waits for.
const patience = time.Minute

// server is a whole platform in this process, as `millrace up` runs it, beside an engine. Its parts are the embedded ones, unless a test names others.
type server struct {
	url      string
	key      string
	engine   *emulatortest.Server
	platform *platform.Platform

	mu     sync.Mutex
	bodies [][]byte // of the engine's calls
}

// setup is what a test may change.
type setup struct {
	platform platform.Config
	engine   emulator.Config
}

// start starts a server, and stops it when the test ends.
func start(t *testing.T, change ...func(*setup)) *server {
	t.Helper()
	s := &server{key: "any"}
	c := setup{
		platform: platform.Config{
			Dir: t.TempDir(), Relaxed: true, Version: "test",
			// A server in a process of its own reserves what streams may take: small, so that a small disk will do.
			Queue: queue.Config{WorkMaxBytes: 256 << 20, DoneMaxBytes: 256 << 20, LiveMaxBytes: 64 << 20},
			API:   api.Config{Listen: "127.0.0.1:0", DrainTimeout: time.Second},
		},
		engine: emulator.Config{Models: []string{model, "other"}, OnRequest: s.note},
	}
	for _, f := range change {
		f(&c)
	}
	if c.platform.API.APIKey != "" {
		s.key = c.platform.API.APIKey
	}
	c.platform.Worker.Drain = time.Second
	s.engine = emulatortest.Start(t, c.engine)
	c.platform.Engine = engine.Config{URL: s.engine.URL}
	c.platform.Worker.NoCacheSalt = true // what the engine gets is compared with what was sent
	p, err := platform.New(t.Context(), c.platform, prometheus.NewRegistry(), testenv.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	s.platform, s.url = p, p.URL()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context())) // it must outlive what the test still asks when it ends
	ended := make(chan error, 1)
	go func() { ended <- p.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("the platform ended: %v", err)
		}
	})
	checks := p.Ready()
	eventually(t, "the platform is ready", func() error {
		for name, check := range checks {
			if err := check(); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
		}
		return nil
	})
	return s
}

// onEach runs test once for each set of parts that a platform stands on, on a server of its own.
func onEach(t *testing.T, test func(*testing.T, *server), change ...func(*setup)) {
	t.Helper()
	for name, use := range map[string]func(*testing.T, *platform.Config){"embedded": useEmbedded, "external": useExternal} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, start(t, append(change[:len(change):len(change)], func(c *setup) { use(t, &c.platform) })...))
		})
	}
}

// useEmbedded leaves the platform the queue and the store within it, and a SQLite file.
func useEmbedded(*testing.T, *platform.Config) {}

// useExternal gives the platform a NATS server, a Redis and a PostgreSQL database, each in another process, and no folder that it could fall back to.
func useExternal(t *testing.T, c *platform.Config) {
	t.Helper()
	c.Dir, c.NATSURL, c.RedisURL, c.DatabaseURL = "", testenv.NATSApart(t), testenv.Redis(t).URL(), testenv.Postgres(t)
	if _, _, err := ledger.Migrate(t.Context(), ledger.Config{URL: c.DatabaseURL}, testenv.Log(t)); err != nil {
		t.Fatal(err)
	}
}

// note keeps the bodies that the engine gets.
func (s *server) note(_, path string, _ http.Header, body []byte) {
	if len(body) > 0 {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.bodies = append(s.bodies, body)
	}
}

// calls returns the bodies of the engine's calls that hold text.
func (s *server) calls(text string) [][]byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	var found [][]byte
	for _, b := range s.bodies {
		if bytes.Contains(b, []byte(text)) {
			found = append(found, b)
		}
	}
	return found
}

// running is how many sequences the engine runs or has waiting.
func (s *server) running() int {
	stats := s.engine.Stats()
	return stats.Running + stats.Waiting
}

// client is openai-go with the server's URL and key and all its defaults.
func (s *server) client(t *testing.T, opts ...option.RequestOption) openai.Client {
	t.Helper()
	return newClient(t, s.url, s.key, opts...)
}

// newClient makes a client with connections of its own, which end with the test.
func newClient(t *testing.T, url, key string, opts ...option.RequestOption) openai.Client {
	t.Helper()
	transport := http.DefaultTransport.(*http.Transport).Clone()
	t.Cleanup(transport.CloseIdleConnections)
	return openai.NewClient(append([]option.RequestOption{
		option.WithBaseURL(url + "/v1"), option.WithAPIKey(key), option.WithHTTPClient(&http.Client{Transport: transport}),
	}, opts...)...)
}

// chat asks for at most tokens tokens; text may hold the emulator's markers.
func chat(text string, tokens int64) openai.ChatCompletionNewParams {
	return openai.ChatCompletionNewParams{
		Model: model, Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage(text)}, MaxTokens: openai.Int(tokens),
	}
}

// eventually waits until check returns nil.
func eventually(t *testing.T, what string, check func() error) {
	t.Helper()
	for deadline := time.Now().Add(patience); ; {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("never: %s: %v", what, err)
		}
		time.Sleep(5 * time.Millisecond) // what it waits for tells nobody
	}
}

// soon bounds what a test waits for.
func soon(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

// decode reads JSON.
func decode[T any](t *testing.T, raw []byte) T {
	t.Helper()
	var v T
	if err := json.Unmarshal(raw, &v); err != nil {
		t.Fatalf("%v in %s", err, raw)
	}
	return v
}
