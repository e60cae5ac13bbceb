package ledger_test

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
	"github.com/millrace/millrace/internal/testenv"
)

// proxy stands between a store and its PostgreSQL server, and breaks what a test asks for.
type proxy struct {
	net.Listener
	socket string
	wg     sync.WaitGroup

	mu    sync.Mutex
	conns map[net.Conn]struct{}
	// cut, if not nil, sees each piece that a client sends: it tells whether its connection breaks before the server has it, or once the server has it and before it can answer.
	cut func(sent []byte) (before, after bool)
	// mute keeps what servers answer.
	mute atomic.Bool
}

func newProxy(t testing.TB) *proxy {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	ok(t, err)
	p := &proxy{Listener: l, socket: testenv.PostgresSocket(t), conns: map[net.Conn]struct{}{}}
	p.wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			p.wg.Go(func() { p.serve(c) })
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		p.breakAll()
		p.wg.Wait()
	})
	return p
}

// url is that of a database, through the proxy.
func (p *proxy) url(t testing.TB, direct string) string {
	u, err := url.Parse(direct)
	ok(t, err)
	u.Host, u.RawQuery, u.User = p.Addr().String(), "sslmode=disable", url.UserPassword("postgres", "s3cret-p%ss")
	return u.String()
}

func (p *proxy) add(c net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.conns[c] = struct{}{}
}

// breakAll ends all connections.
func (p *proxy) breakAll() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		_ = c.Close()
	}
	clear(p.conns)
}

func (p *proxy) breakWhen(cut func([]byte) (before, after bool)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cut = cut
}

func (p *proxy) serve(client net.Conn) {
	server, err := net.Dial("unix", p.socket)
	if err != nil {
		_ = client.Close()
		return
	}
	p.add(client)
	p.add(server)
	var silent atomic.Bool
	p.wg.Go(func() {
		defer client.Close()
		buf := make([]byte, 32<<10)
		for {
			n, err := server.Read(buf)
			if silent.Load() {
				return // the server has done it, and nobody hears of it
			}
			if n > 0 && !p.mute.Load() {
				if _, err := client.Write(buf[:n]); err != nil {
					return
				}
			}
			if err != nil {
				return
			}
		}
	})
	defer server.Close()
	buf := make([]byte, 32<<10)
	for {
		n, err := client.Read(buf)
		if err != nil {
			return
		}
		p.mu.Lock()
		cut := p.cut
		p.mu.Unlock()
		if cut != nil {
			before, after := cut(buf[:n])
			if before {
				_ = client.Close()
				return
			}
			if after {
				silent.Store(true)
			}
		}
		if _, err := server.Write(buf[:n]); err != nil {
			return
		}
	}
}

func TestALostConnectionAtTheCommit(t *testing.T) {
	t.Parallel()
	p := newProxy(t)
	s := testenv.OpenLedger(t, p.url(t, testenv.Postgres(t)))
	ctx := t.Context()
	tenants(t, s)
	started(t, s, "batch_1", 10)
	at := ledger.Position{}
	for round, applied := range []bool{false, true, false, true} {
		to := ledger.Position{Stream: "s", Seq: at.Seq + 1}
		var once sync.Once
		p.breakWhen(func(sent []byte) (before, after bool) {
			if bytes.Contains(sent, []byte("commit")) {
				once.Do(func() { before, after = !applied, applied })
			}
			return before, after
		})
		want(t, s.Tally(ctx, 1, at, to, []ledger.Ended{outcome("batch_1", true)}), ledger.ErrUnavailable)
		p.breakWhen(nil)
		// Whether it was counted stands in the position alone.
		var now ledger.Position
		until(t, "the server has decided", func() bool {
			var err error
			now, err = s.Tallied(ctx)
			ok(t, err)
			return !applied || now == to
		})
		if !applied {
			same(t, now, at)
			ok(t, s.Tally(ctx, 1, at, to, []ledger.Ended{outcome("batch_1", true)}))
		} else {
			want(t, s.Tally(ctx, 1, at, to, []ledger.Ended{outcome("batch_1", true)}), ledger.ErrState)
		}
		at = to
		b, err := s.Batch(ctx, acme, "batch_1")
		ok(t, err)
		same(t, b.Done, int64(round+1))
	}

	// A create whose answer was lost is the caller's when it tries again.
	var once sync.Once
	p.breakWhen(func(sent []byte) (before, after bool) {
		if bytes.Contains(sent, []byte("commit")) {
			once.Do(func() { after = true })
		}
		return before, after
	})
	_, _, err := s.Remember(ctx, acme, "r", "k", "h", "mine", noon, time.Minute)
	want(t, err, ledger.ErrUnavailable)
	p.breakWhen(nil)
	until(t, "the server has decided", func() bool {
		bound, mine, err := s.Remember(ctx, acme, "r", "k", "h", "mine", noon, time.Minute)
		ok(t, err)
		return bound == "mine" && mine
	})
}

func TestAServerThatIsAway(t *testing.T) {
	t.Parallel()
	p := newProxy(t)
	direct := testenv.Postgres(t)
	s := testenv.OpenLedger(t, p.url(t, direct))
	tenants(t, s)
	// It hangs: a call ends with its context, and says that the database does not answer.
	p.mute.Store(true)
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	for name, err := range everyCall(ctx, s) {
		if !errors.Is(err, ledger.ErrUnavailable) {
			t.Errorf("%s while the server hangs: %v", name, err)
		}
	}
	p.mute.Store(false)
	p.breakAll()
	until(t, "it is there again", func() bool { return s.Ping(t.Context()) == nil })

	// It is gone: at once.
	_ = p.Close()
	p.breakAll()
	for name, err := range everyCall(t.Context(), s) {
		if !errors.Is(err, ledger.ErrUnavailable) {
			t.Errorf("%s while the server is gone: %v", name, err)
		}
		silentAbout(t, err, "s3cret", "SELECT", "INSERT", "UPDATE", "postgres://")
	}
	_, err := ledger.Open(t.Context(), ledger.Config{URL: p.url(t, direct)}, testenv.Log(t))
	want(t, err, ledger.ErrUnavailable)
	silentAbout(t, err, "s3cret", "postgres://")
}

// everyCall calls every method that asks the database, and returns what came of it.
func everyCall(ctx context.Context, s *ledger.Store) map[string]error {
	all := map[string]error{}
	note := func(name string, err error) { all[name] = err }
	note("Ping", s.Ping(ctx))
	_, err := s.CreateTenant(ctx, ledger.Tenant{ID: "new"})
	note("CreateTenant", err)
	_, err = s.Tenant(ctx, acme)
	note("Tenant", err)
	_, err = s.Tenants(ctx)
	note("Tenants", err)
	_, err = s.UpdateTenant(ctx, acme, to(ledger.Tenant{}))
	note("UpdateTenant", err)
	note("DeleteTenant", s.DeleteTenant(ctx, acme))
	_, _, err = s.CreateKey(ctx, ledger.Key{Tenant: acme})
	note("CreateKey", err)
	_, _, err = s.RotateKey(ctx, "key_1", 0)
	note("RotateKey", err)
	_, err = s.RevokeKey(ctx, "key_1")
	note("RevokeKey", err)
	_, err = s.Key(ctx, "key_1")
	note("Key", err)
	_, err = s.Keys(ctx, acme)
	note("Keys", err)
	_, err = s.HasKeys(ctx)
	note("HasKeys", err)
	_, err = s.Identify(ctx, "sk-mr-x", noon)
	note("Identify", err)
	note("InsertFile", s.InsertFile(ctx, file("file-1", acme, noon), 0))
	note("InsertFile with a quota", s.InsertFile(ctx, file("file-1", acme, noon), 1))
	_, err = s.File(ctx, acme, "file-1")
	note("File", err)
	_, _, err = s.Files(ctx, acme, "", ledger.Page{})
	note("Files", err)
	_, _, err = s.Files(ctx, acme, "", ledger.Page{After: "file-1"})
	note("Files after", err)
	_, err = s.DeleteFile(ctx, acme, "file-1")
	note("DeleteFile", err)
	_, err = s.ExpireFiles(ctx, noon, 1)
	note("ExpireFiles", err)
	_, err = s.KnownBlobs(ctx, []string{"x"})
	note("KnownBlobs", err)
	_, err = s.FileBytes(ctx, acme)
	note("FileBytes", err)
	note("CreateBatch", s.CreateBatch(ctx, ledger.Batch{ID: "batch_1", Tenant: acme}))
	_, err = s.Batch(ctx, acme, "batch_1")
	note("Batch", err)
	_, _, err = s.Batches(ctx, acme, ledger.Page{})
	note("Batches", err)
	_, err = s.CancelBatch(ctx, acme, "batch_1", noon)
	note("CancelBatch", err)
	_, err = s.BatchTokens(ctx, acme)
	note("BatchTokens", err)
	_, err = s.EndedBatches(ctx, 0, noon, 1)
	note("EndedBatches", err)
	note("Lead", s.Lead(ctx, 1))
	_, err = s.LiveBatches(ctx)
	note("LiveBatches", err)
	_, err = s.Portions(ctx, "batch_1")
	note("Portions", err)
	_, err = s.StartBatch(ctx, 1, "batch_1", noon, "", nil)
	note("StartBatch", err)
	_, err = s.RejectBatch(ctx, 1, "batch_1", noon, nil)
	note("RejectBatch", err)
	note("Reserve", s.Reserve(ctx, 1, "batch_1", "m", 0, 1))
	_, err = s.FinalizeBatch(ctx, 1, "batch_1", noon, false)
	note("FinalizeBatch", err)
	_, err = s.EndBatch(ctx, 1, "batch_1", noon, 0, 0, nil, nil)
	note("EndBatch", err)
	_, err = s.Tallied(ctx)
	note("Tallied", err)
	note("Tally", s.Tally(ctx, 1, ledger.Position{}, ledger.Position{Seq: 1}, []ledger.Ended{outcome("batch_1", true)}))
	_, err = s.Usage(ctx, ledger.UsageQuery{})
	note("Usage", err)
	_, _, err = s.Remember(ctx, acme, "r", "k", "h", "o", noon, time.Second)
	note("Remember", err)
	note("Forget", s.Forget(ctx, acme, "r", "k", "o"))
	note("Tidy", s.Tidy(ctx, noon))
	_, err = s.Pools(ctx)
	note("Pools", err)
	_, err = s.Pool(ctx, "a")
	note("Pool", err)
	_, err = s.CreatePool(ctx, pool("a", "m"))
	note("CreatePool", err)
	_, err = s.UpdatePool(ctx, pool("a", "m"))
	note("UpdatePool", err)
	note("DeletePool", s.DeletePool(ctx, "a"))
	note("LeadScaling", s.LeadScaling(ctx, 1))
	note("SyncPools", s.SyncPools(ctx, 1, nil))
	note("InsertLaunches", s.InsertLaunches(ctx, 1, ledger.Launch{Pool: "a", Name: "a-1"}))
	note("UpdateLaunch", s.UpdateLaunch(ctx, 1, ledger.Launch{Pool: "a", Name: "a-1"}))
	note("DeleteLaunch", s.DeleteLaunch(ctx, 1, "a", "a-1"))
	_, err = s.Launches(ctx)
	note("Launches", err)
	note("SavePoolState", s.SavePoolState(ctx, 1, "a", []byte("{}")))
	_, err = s.PoolStates(ctx)
	note("PoolStates", err)
	note("AddArrivals", s.AddArrivals(ctx, 1, ledger.Arrivals{Model: "m"}))
	_, err = s.Arrivals(ctx, []job.Model{"m"}, 0)
	note("Arrivals", err)
	note("InsertScaling", s.InsertScaling(ctx, 1, ledger.Scaling{Pool: "a", Decision: []byte("{}")}))
	_, _, err = s.Scalings(ctx, "", 0, 1)
	note("Scalings", err)
	note("TrimScaling", s.TrimScaling(ctx, 1, 0, 0))
	return all
}

func silentAbout(t testing.TB, err error, words ...string) {
	t.Helper()
	for _, w := range words {
		if err != nil && strings.Contains(err.Error(), w) {
			t.Errorf("%q is in: %v", w, err)
		}
	}
}

func TestADatabaseThatAnotherProcessHoldsLocked(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "ledger.db")
	s := testenv.OpenLedger(t, "sqlite:"+path)
	tenants(t, s)
	db, err := sql.Open("sqlite", path+"?_txlock=immediate")
	ok(t, err)
	defer db.Close()
	tx, err := db.BeginTx(t.Context(), nil)
	ok(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_, err = s.UpdateTenant(ctx, acme, to(ledger.Tenant{Name: "late"}))
	want(t, err, ledger.ErrUnavailable)
	silentAbout(t, err, "UPDATE")
	got, err := s.Tenant(t.Context(), acme) // readers do not wait
	ok(t, err)
	same(t, got.Name, "")
	ok(t, tx.Rollback())
	_, err = s.UpdateTenant(t.Context(), acme, to(ledger.Tenant{Name: "in time"}))
	ok(t, err)
}

func TestProcessesShareASQLiteFile(t *testing.T) {
	t.Parallel()
	url := "sqlite:" + filepath.Join(t.TempDir(), "ledger.db")
	stores := []*ledger.Store{testenv.OpenLedger(t, url), testenv.OpenLedger(t, url), testenv.OpenLedger(t, url)}
	tenants(t, stores[0])
	var wg sync.WaitGroup
	for i, s := range stores {
		wg.Go(func() {
			for n := range 20 {
				if err := s.InsertFile(t.Context(), file(fmt.Sprintf("file-%d-%d", i, n), acme, noon), 1000); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	n, err := stores[1].FileBytes(t.Context(), acme)
	ok(t, err)
	same(t, n, int64(600))
}

// TestSecretsStayHidden: what is in a log or in the database's own bytes opens nothing.
func TestSecretsStayHidden(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	var log bytes.Buffer
	cfg := ledger.Config{URL: "sqlite:" + filepath.Join(dir, "ledger.db")}
	l := slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	_, _, err := ledger.Migrate(t.Context(), cfg, l)
	ok(t, err)
	s, err := ledger.Open(t.Context(), cfg, l)
	ok(t, err)
	secret, k, err := s.CreateKey(t.Context(), ledger.Key{Tenant: job.DefaultTenant})
	ok(t, err)
	_, err = s.Identify(t.Context(), secret, noon)
	ok(t, err)
	_, _, err = s.RotateKey(t.Context(), k.ID, time.Hour)
	ok(t, err)
	ok(t, s.Close())
	files, err := os.ReadDir(dir)
	ok(t, err)
	for _, f := range files {
		raw, err := os.ReadFile(filepath.Join(dir, f.Name()))
		ok(t, err)
		if bytes.Contains(raw, []byte(secret[10:])) {
			t.Errorf("the secret is in %s", f.Name())
		}
		if info, err := f.Info(); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s has the mode %v", f.Name(), info.Mode())
		}
	}
	if strings.Contains(log.String(), secret[10:]) {
		t.Error("the secret is in the log")
	}
}

func TestURLs(t *testing.T) {
	t.Parallel()
	for _, raw := range []string{
		"", "mysql://u:s3cret@h/x", "sqlite:", "sqlite::memory:", "sqlite://relative/x", "postgres://u:s3cret%zz@h/x", "postgres://u:s3cret@h/x?sslmode=nonsense", "postgres://u:s3cret@h:port/x",
		"postgres://u:s3cret@h:99999/x", "postgresql://u:s3cret@h/x?connect_timeout=no", "host=x password=s3cret",
	} {
		_, err := ledger.Open(t.Context(), ledger.Config{URL: raw}, testenv.Log(t))
		if err == nil || errors.Is(err, ledger.ErrUnavailable) {
			t.Errorf("%s: %v", raw, err)
		}
		silentAbout(t, err, "s3cret")
	}
	// Wrong names are not waited for.
	direct := testenv.Postgres(t)
	u, err := url.Parse(direct)
	ok(t, err)
	u.Path = "/nothing"
	_, err = ledger.Open(t.Context(), ledger.Config{URL: u.String()}, testenv.Log(t))
	if err == nil || errors.Is(err, ledger.ErrUnavailable) || !strings.Contains(err.Error(), "check user, password and name") {
		t.Errorf("a database that is not there: %v", err)
	}
	// Any path will do.
	odd := "sqlite:" + filepath.Join(t.TempDir(), "a b?c#d%20é", "x.db")
	testenv.OpenLedger(t, odd)
	if _, err := os.Stat(strings.TrimPrefix(odd, "sqlite:")); err != nil {
		t.Error(err)
	}
}
