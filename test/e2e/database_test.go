package e2e_test

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"sync"
	"testing"

	"github.com/millrace/millrace/internal/testenv"
)

// gate stands between the roles and their PostgreSQL server. While it is shut, connections break at once.
type gate struct {
	addr, socket string

	mu    sync.Mutex
	shut  bool
	conns []net.Conn
}

func newGate(t *testing.T) *gate {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	g := &gate{addr: l.Addr().String(), socket: testenv.PostgresSocket(t)}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			server, ok := g.pass(c)
			if !ok {
				continue
			}
			for _, way := range [][2]net.Conn{{c, server}, {server, c}} {
				wg.Go(func() {
					_, _ = io.Copy(way[0], way[1]) // either end may break: that is what a gate is for
					_ = way[0].Close()
				})
			}
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		g.set(true)
		wg.Wait()
	})
	return g
}

// pass connects c's server, unless the gate is shut.
func (g *gate) pass(c net.Conn) (server net.Conn, ok bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	server, err := net.Dial("unix", g.socket)
	if err != nil || g.shut {
		_ = c.Close()
		if err == nil {
			_ = server.Close()
		}
		return nil, false
	}
	g.conns = append(g.conns, c, server)
	return server, true
}

func (g *gate) set(shut bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.shut = shut
	for _, c := range g.conns {
		_ = c.Close()
	}
	g.conns = nil
}

// TestInferenceGoesOnWithoutTheDatabase: while the database is away calls and jobs run as before, the API says that it is ready, and files and batches are 503.
func TestInferenceGoesOnWithoutTheDatabase(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	direct := testenv.Postgres(t)
	c.use(direct)
	g := newGate(t)
	u, err := url.Parse(direct)
	if err != nil {
		t.Fatal(err)
	}
	u.Host, u.RawQuery = g.addr, "sslmode=disable"
	c.database = u.String()
	e := startEngine(t)
	api, dispatcher, worker := c.api("api"), c.dispatcher("dispatcher"), c.worker("worker", e.URL, plain(4)...)
	c.startAll(api.process, dispatcher, worker)
	c.whole()
	api.must(http.StatusOK, "GET", "/v1/batches", nil)

	g.set(true)
	var ids []string
	for round := range 3 {
		api.must(http.StatusOK, "POST", "/v1/chat/completions", chat(marked("tokens=3", round), ""))
		ids = append(ids, api.submit(marked("tokens=3", 10+round), ""))
		for _, path := range []string{"/v1/batches", "/v1/files", "/v1/batches/batch_x"} {
			if a := api.must(http.StatusServiceUnavailable, "GET", path, nil); a.header.Get("Retry-After") == "" {
				t.Errorf("%s without the database: %s", path, a.body)
			}
		}
		for _, p := range []*process{api.process, dispatcher} {
			if err := p.ready(); err != nil {
				t.Errorf("%s without the database: %v", p.name, err)
			}
		}
	}
	api.ended(patience, ids...)

	g.set(false)
	eventually(t, patience, "batches are there again", func() error {
		a, err := api.send("GET", "/v1/batches", nil)
		if err == nil && a.status != http.StatusOK {
			err = fmt.Errorf("%d %s", a.status, a.body)
		}
		return err
	})
	exactlyOnce(t, connect(t, c.natsURL()), api.client, patience, ids...)
}
