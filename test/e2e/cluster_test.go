package e2e_test

import (
	"fmt"
	"net/http"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/millrace/millrace/internal/ledger"
	"github.com/millrace/millrace/internal/testenv"
)

// cluster is a deployment of the test's own.
type cluster struct {
	t   *testing.T
	dir string
	env []string

	nats     *process
	natsAddr string
	redis    *testenv.RedisServer
	// database is the URL of the roles' database: a file that they share, unless a test names another before it starts the first role.
	database string
	http     *http.Client
	roles    []*process
}

// newCluster starts NATS and Redis, and no role.
func newCluster(t *testing.T) *cluster {
	t.Helper()
	c := newBareCluster(t)
	c.redis = testenv.Redis(t)
	c.nats.start()
	return c
}

// newBareCluster starts nothing.
func newBareCluster(t *testing.T) *cluster {
	t.Helper()
	c := &cluster{t: t, dir: t.TempDir(), natsAddr: testenv.FreeAddr(t)}
	c.use("sqlite:" + c.dir + "/millrace.db")
	c.env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + c.dir, "TMPDIR=" + c.dir}
	transport := &http.Transport{MaxIdleConnsPerHost: 64}
	t.Cleanup(transport.CloseIdleConnections)
	c.http = &http.Client{Transport: transport}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	env := append(slices.Clone(c.env), natsListen+"="+c.natsAddr, natsStore+"="+c.dir+"/nats")
	c.nats = newProcess(t, c.dir, "nats", []string{self}, env, func() error {
		nc, err := nats.Connect(c.natsURL(), nats.Timeout(time.Second), nats.NoReconnect())
		if err != nil {
			return err
		}
		nc.Close()
		return nil
	})
	return c
}

// use has the roles use this database, and brings its schema to the newest. It is for before the first role.
func (c *cluster) use(database string) {
	c.t.Helper()
	if _, _, err := ledger.Migrate(c.t.Context(), ledger.Config{URL: database}, testenv.Log(c.t)); err != nil {
		c.t.Fatal(err)
	}
	c.database = database
}

func (c *cluster) natsURL() string { return "nats://" + c.natsAddr }

// role describes the process of a command that serves; args come after those that all have.
func (c *cluster) role(name, command string, args ...string) *process {
	c.t.Helper()
	metrics := testenv.FreeAddr(c.t)
	all := []string{program, command, "--metrics-listen", metrics, "--log-format", "json", "--log-level", "info"}
	if command != "up" {
		all = append(all, "--nats-url", c.natsURL(), "--redis-url", c.redis.URL())
	}
	if command == "api" || command == "dispatcher" {
		all = append(all, "--database-url", c.database)
	}
	p := newProcess(c.t, c.dir, name, append(all, args...), c.env, func() error { return c.get200("http://" + metrics + "/readyz") })
	p.metrics = metrics
	c.roles = append(c.roles, p)
	return p
}

func (c *cluster) get200(url string) error {
	resp, err := c.http.Get(url)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answers %d", url, resp.StatusCode)
	}
	return nil
}

// apiProcess is an API and a client of it.
type apiProcess struct {
	*process
	*client
}

// api describes an API.
func (c *cluster) api(name string, args ...string) *apiProcess {
	c.t.Helper()
	addr := testenv.FreeAddr(c.t)
	p := c.role(name, "api", append([]string{"--listen", addr, "--insecure"}, args...)...)
	return &apiProcess{p, &client{t: c.t, url: "http://" + addr, http: c.http}}
}

func (c *cluster) dispatcher(name string) *process {
	c.t.Helper()
	return c.role(name, "dispatcher")
}

// worker describes a worker beside an engine.
func (c *cluster) worker(name, engine string, args ...string) *process {
	c.t.Helper()
	return c.role(name, "worker", append([]string{"--name", name, "--engine", engine}, args...)...)
}

// deployment is one process of each role, and an engine in the test's process.
type deployment struct {
	*cluster
	api        *apiProcess
	dispatcher *process
	worker     *process
	engine     *engine
	// beforeKill is called before killOnTheWay kills a process; nil for nothing.
	beforeKill func(*process)
}

// deploy starts one process of each role. The engine tells no limits of its own: slots is how many calls the worker gives it at once.
func deploy(t *testing.T, slots int, workerArgs ...string) *deployment {
	t.Helper()
	return deployOn(t, "sqlite", slots, workerArgs...)
}

// deployOn is deploy on a database of a kind: sqlite or postgres.
func deployOn(t *testing.T, database string, slots int, workerArgs ...string) *deployment {
	t.Helper()
	c := newCluster(t)
	if database == "postgres" {
		c.use(testenv.Postgres(t))
	}
	d := &deployment{cluster: c, engine: startEngine(t)}
	d.api = c.api("api")
	d.dispatcher = c.dispatcher("dispatcher")
	d.worker = c.worker("worker", d.engine.URL, append(plain(slots), workerArgs...)...)
	d.startAll(d.api.process, d.dispatcher, d.worker)
	c.whole()
	c.served()
	return d
}

// whole waits until the dispatcher has seen that the new store is empty: before that a request with a key could repeat one of which nobody knows.
func (c *cluster) whole() {
	c.t.Helper()
	const parts = 16
	exist := []string{"EXISTS"}
	for i := range parts {
		exist = append(exist, fmt.Sprintf("mr:{%d}:whole", i))
	}
	eventually(c.t, patience, "the store is whole", func() error {
		if n := c.do(exist...); n != int64(parts) {
			return fmt.Errorf("%v of its %d parts are", n, parts)
		}
		return nil
	})
}

// served waits until a worker has made the model's streams: where many tests sync to one disk that may take longer than a request waits.
func (c *cluster) served() {
	c.t.Helper()
	workEmpty(c.t, connect(c.t, c.natsURL()))
}

// plain are a worker's arguments for an engine that tells no limits.
func plain(slots int) []string {
	return []string{"--engine-kind", "openai", "--max-concurrency", fmt.Sprint(slots)}
}

// startAll starts processes at once, and returns when all do their work.
func (c *cluster) startAll(all ...*process) {
	c.t.Helper()
	for _, p := range all {
		p.begin()
	}
	for _, p := range all {
		p.await()
	}
}
