package results_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/results"
	"github.com/millrace/millrace/internal/results/resultstest"
	"github.com/millrace/millrace/internal/testenv"
)

func open(t testing.TB, url string) *results.Store {
	t.Helper()
	s, err := results.Open(t.Context(), results.Config{URL: url}, testenv.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func raw(t testing.TB, addr string) *redis.Client {
	c := redis.NewClient(&redis.Options{Addr: addr})
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// submit puts a job into the state running.
func submit(t testing.TB, s *results.Store) (*job.Job, *results.Claim) {
	t.Helper()
	now := s.Now()
	j := &job.Job{ID: job.NewID(now.Time()), Tenant: "acme", Model: "m", Group: job.NoGroup, Events: true, Created: now, Expires: now + 3_600_000}
	_, err := s.Accept(t.Context(), j, []byte("{}"), results.Limits{})
	ok(t, err)
	ok(t, s.Queued(t.Context(), j, nil))
	c, err := s.Claim(t.Context(), results.ClaimRequest{Job: j, Worker: "w", Lease: time.Minute, AckSubject: "a", Delivered: 1})
	ok(t, err)
	return j, c
}

// calls is every method that asks the store, on a running job.
func calls(s *results.Store, j *job.Job, c *results.Claim) map[string]func(context.Context) error {
	events := []job.Event{{N: c.N + 1, Token: c.Token, Kind: job.EventToken, Data: []byte("a")}}
	o := &job.Outcome{State: job.Completed, Token: c.Token, Finished: c.Now}
	return map[string]func(context.Context) error{
		"Ping": s.Ping,
		"ReserveKey": func(ctx context.Context) error {
			_, _, err := s.ReserveKey(ctx, "t", "k", results.KeyEntry{ID: j.ID}, 0)
			return err
		},
		"BindKey": func(ctx context.Context) error {
			return s.BindKey(ctx, "t", "k", j.ID)
		},
		"AcceptFresh": func(ctx context.Context) error {
			_, err := s.AcceptFresh(ctx, j, []byte("{}"), results.Limits{})
			return err
		},
		"ReleaseKey": func(ctx context.Context) error { return s.ReleaseKey(ctx, "t", "k", j.ID) },
		"Accept": func(ctx context.Context) error {
			_, err := s.Accept(ctx, j, []byte("{}"), results.Limits{})
			return err
		},
		"Queued":  func(ctx context.Context) error { return s.Queued(ctx, j, nil) },
		"Discard": func(ctx context.Context) error { _, err := s.Discard(ctx, j, 1); return err },
		"Get":     func(ctx context.Context) error { _, err := s.Get(ctx, j.ID); return err },
		"Body":    func(ctx context.Context) error { _, err := s.Body(ctx, j.ID); return err },
		"Result":  func(ctx context.Context) error { _, err := s.Result(ctx, j.ID); return err },
		"List":    func(ctx context.Context) error { _, _, err := s.List(ctx, "acme", results.Filter{}, "", 1); return err },
		"Due":     func(ctx context.Context) error { _, err := s.Due(ctx, c.Now, 1); return err },
		"Live":    func(ctx context.Context) error { return s.Live(ctx, func([]job.ID) error { return nil }) },
		"Forget":  func(ctx context.Context) error { return s.Forget(ctx, "job_none") },
		"Claim": func(ctx context.Context) error {
			_, err := s.Claim(ctx, results.ClaimRequest{Job: j, Worker: "w2", Lease: time.Minute})
			return err
		},
		"Renew": func(ctx context.Context) error {
			_, err := s.Renew(ctx, results.Renewal{Job: j, Worker: "w", Token: c.Token, Lease: time.Minute})
			return err
		},
		"Owns":           func(ctx context.Context) error { return s.Owns(ctx, j.ID, c.Token) },
		"Append":         func(ctx context.Context) error { return s.Append(ctx, j, events) },
		"Restore":        func(ctx context.Context) error { return s.Restore(ctx, j, events) },
		"GiveBack":       func(ctx context.Context) error { return s.GiveBack(ctx, j.ID, c.Token, 0, false, "x") },
		"EndLease":       func(ctx context.Context) error { _, err := s.EndLease(ctx, j.ID, "w", false); return err },
		"Held":           func(ctx context.Context) error { _, err := s.Held(ctx, "w"); return err },
		"Holders":        func(ctx context.Context) error { _, err := s.Holders(ctx); return err },
		"LetGo":          func(ctx context.Context) error { return s.LetGo(ctx, "w", "job_none") },
		"Finish":         func(ctx context.Context) error { return s.Finish(ctx, j, o, nil, nil, nil) },
		"AskCancel":      func(ctx context.Context) error { _, err := s.AskCancel(ctx, j.ID); return err },
		"AcceptLines":    func(ctx context.Context) error { return s.AcceptLines(ctx, []*job.Job{j}) },
		"Delete":         func(ctx context.Context) error { return s.Delete(ctx, "acme", j.ID) },
		"Events":         func(ctx context.Context) error { _, _, err := s.Events(ctx, j.ID, 0, 1); return err },
		"Owners":         func(ctx context.Context) error { _, err := s.Owners(ctx, "k"); return err },
		"Owners of many": func(ctx context.Context) error { _, err := s.Owners(ctx, "k", "l"); return err },
		"Bind": func(ctx context.Context) error {
			_, err := s.Bind(ctx, results.Binding{Key: "k", Worker: "w", TTL: time.Minute, Most: 1})
			return err
		},
		"Backlogs":          func(ctx context.Context) error { _, err := s.Backlogs(ctx); return err },
		"TokensBesideLines": func(ctx context.Context) error { _, err := s.TokensBesideLines(ctx, "acme"); return err },
		"Places":            func(ctx context.Context) error { _, err := s.Places(ctx, []*job.Job{j}); return err },
		"RepairBacklog": func(ctx context.Context) error {
			_, _, err := s.RepairBacklog(ctx, map[job.ID]bool{"job_none": true}, func(job.ID) bool { return true })
			return err
		},
		"Wiped":       func(ctx context.Context) error { _, err := s.Wiped(ctx); return err },
		"SetSentinel": s.SetSentinel,
		"RestoreQueued": func(ctx context.Context) error {
			return s.RestoreQueued(ctx, []results.QueuedJob{{Job: *j}})
		},
		"RestoreEnded": func(ctx context.Context) error {
			return s.RestoreEnded(ctx, []results.EndedJob{{Job: *j, Outcome: *o}})
		},
	}
}

// unavailable makes all calls at once; each must say so, and in time.
func unavailable(t *testing.T, all map[string]func(context.Context) error) {
	t.Helper()
	var wg sync.WaitGroup
	for name, call := range all {
		wg.Go(func() {
			begin := time.Now()
			if err := call(t.Context()); !errors.Is(err, results.ErrUnavailable) || errors.Is(err, results.ErrNotFound) {
				t.Errorf("%s: %v", name, err)
			}
			if took := time.Since(begin); took > 4500*time.Millisecond {
				t.Errorf("%s took %s", name, took)
			}
		})
	}
	wg.Wait()
}

// recovers waits until writes are taken again.
func recovers(t testing.TB, s *results.Store) {
	t.Helper()
	var err error
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); {
		if err = s.Ping(t.Context()); err == nil {
			return
		}
		if !errors.Is(err, results.ErrUnavailable) {
			break
		}
	}
	t.Fatalf("the store does not come back: %v", err)
}

func TestPausedServerIsUnavailable(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	s := open(t, server.URL())
	j, c := submit(t, s)
	ok(t, server.Process().Signal(syscall.SIGSTOP))
	unavailable(t, calls(s, j, c))
	if _, err := results.Open(t.Context(), results.Config{URL: server.URL()}, testenv.Log(t)); !errors.Is(err, results.ErrUnavailable) {
		t.Errorf("opening: %v", err)
	}
	ok(t, server.Process().Signal(syscall.SIGCONT))
	recovers(t, s)
	_, err := s.Get(t.Context(), j.ID)
	if err != nil && !errors.Is(err, results.ErrNotFound) { // some of the calls may have run late, Delete among them
		t.Fatal(err)
	}
}

func TestKilledServerIsUnavailableAndComesBackWiped(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	s := open(t, server.URL())
	j, c := submit(t, s)
	ok(t, s.SetSentinel(t.Context()))
	server.Kill()
	unavailable(t, calls(s, j, c))
	server.Start(t)
	recovers(t, s)
	wiped, err := s.Wiped(t.Context())
	ok(t, err)
	if !wiped {
		t.Error("a server without its data is not called wiped")
	}
	if _, err := s.Get(t.Context(), j.ID); !errors.Is(err, results.ErrNotFound) {
		t.Errorf("getting: %v", err)
	}
	if _, err := s.Renew(t.Context(), results.Renewal{Job: j, Worker: "w", Token: c.Token, N: c.N, Started: c.Now, Lease: time.Minute}); err != nil {
		t.Errorf("renewing: %v", err)
	}
}

func TestFlushAllLosesNothingThatOthersKnow(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	s := open(t, server.URL())
	ok(t, s.SetSentinel(t.Context()))
	j, c := submit(t, s)
	ok(t, raw(t, server.Addr).FlushAll(t.Context()).Err())
	wiped, err := s.Wiped(t.Context())
	ok(t, err)
	if !wiped {
		t.Error("not called wiped")
	}
	ok(t, s.Finish(t.Context(), j, &job.Outcome{State: job.Completed, Token: c.Token, Finished: s.Now(), LastEvent: 2}, []byte("x"), nil, nil))
	r, err := s.Get(t.Context(), j.ID)
	ok(t, err)
	if r.State != job.Completed || !r.HasResult {
		t.Errorf("record: %+v", r)
	}
}

// While a server is a replica, writes say that the store is away and reads go on; when it is the primary again, so do writes.
func TestReadOnlyServerRecovers(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	s := open(t, server.URL())
	admin := raw(t, server.Addr)
	j, c := submit(t, s)
	ok(t, admin.Do(t.Context(), "REPLICAOF", "127.0.0.1", "1").Err())
	all := calls(s, j, c)
	for _, read := range []string{"Get", "Body", "Result", "List", "Live", "Due", "Owns", "Held", "Holders", "Events", "Wiped", "Owners", "Owners of many", "Backlogs", "TokensBesideLines", "Places", "RepairBacklog"} {
		if err := all[read](t.Context()); errors.Is(err, results.ErrUnavailable) {
			t.Errorf("%s: %v", read, err)
		}
		delete(all, read)
	}
	for _, idle := range []string{"ReleaseKey", "Discard", "Queued", "Delete"} { // scripts that find nothing to write
		delete(all, idle)
	}
	unavailable(t, all)
	ok(t, admin.Do(t.Context(), "REPLICAOF", "NO", "ONE").Err())
	recovers(t, s)
	ok(t, s.GiveBack(t.Context(), j.ID, c.Token, 0, false, "drained"))
}

// After a failover the server's name leads to the new primary. Connections to the old one, which answers READONLY, are left.
func TestFailoverIsFollowedWithoutRestart(t *testing.T) {
	t.Parallel()
	before, after := testenv.Redis(t), testenv.Redis(t)
	name := resultstest.NewProxy(t, before.Addr)
	s := open(t, "redis://"+name.Addr())
	var wg sync.WaitGroup
	for range 10 { // many connections
		wg.Go(func() {
			if err := s.Ping(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	ok(t, raw(t, before.Addr).Do(t.Context(), "REPLICAOF", "127.0.0.1", "1").Err())
	if err := s.Ping(t.Context()); !errors.Is(err, results.ErrUnavailable) {
		t.Errorf("pinging a replica: %v", err)
	}
	name.Point(after.Addr)
	recovers(t, s)
	for range 10 {
		wg.Go(func() {
			for range 20 {
				_, _, err := accept(t, s)
				if err == nil {
					return
				}
				if !errors.Is(err, results.ErrUnavailable) {
					t.Error(err)
				}
			}
			t.Error("writes do not recover")
		})
	}
	wg.Wait()
}

func accept(t testing.TB, s *results.Store) (*job.Job, job.Millis, error) {
	now := s.Now()
	j := &job.Job{ID: job.NewID(now.Time()), Tenant: "acme", Created: now, Expires: now + 3_600_000}
	a, err := s.Accept(t.Context(), j, nil, results.Limits{})
	if err != nil {
		return j, 0, err
	}
	return j, a.Since, nil
}

func TestFullServerIsUnavailableAndHalfWritesNothing(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t, "--maxmemory", "20mb")
	s := open(t, server.URL())
	answer := bytes.Repeat([]byte("x"), 100<<10)
	var full *job.Job
	var token job.Token
	for range 1000 {
		var jobs [5]*job.Job
		var claims [5]*results.Claim
		for i := range jobs {
			j, _, err := accept(t, s)
			if err == nil {
				claims[i], err = s.Claim(t.Context(), results.ClaimRequest{Job: j, Worker: "w", Lease: time.Minute, AckSubject: "a", Delivered: 1})
			}
			if errors.Is(err, results.ErrUnavailable) {
				break
			}
			ok(t, err)
			jobs[i] = j
		}
		for i, j := range jobs {
			if j == nil || full != nil {
				break
			}
			err := s.Finish(t.Context(), j, &job.Outcome{State: job.Completed, Token: claims[i].Token, Finished: s.Now()}, answer, nil, nil)
			if errors.Is(err, results.ErrUnavailable) {
				full, token = j, claims[i].Token
			} else {
				ok(t, err)
			}
		}
		if full != nil {
			break
		}
	}
	if full == nil {
		t.Fatal("the server never refused a write")
	}
	admin := raw(t, server.Addr)
	ok(t, admin.ConfigSet(t.Context(), "maxmemory", "1mb").Err())
	if err := s.Ping(t.Context()); !errors.Is(err, results.ErrUnavailable) {
		t.Errorf("pinging a full server: %v", err)
	}
	r, err := s.Get(t.Context(), full.ID)
	ok(t, err)
	if r.State != job.Running || r.HasResult || r.Outcome != nil {
		t.Fatalf("half written: %+v", r)
	}
	found := false
	ok(t, s.Live(t.Context(), func(ids []job.ID) error {
		for _, id := range ids {
			found = found || id == full.ID
		}
		return nil
	}))
	if !found {
		t.Error("the job left the live index without an outcome")
	}
	ok(t, admin.ConfigSet(t.Context(), "maxmemory", "100mb").Err())
	ok(t, s.Finish(t.Context(), full, &job.Outcome{State: job.Completed, Token: token, Finished: s.Now()}, answer, nil, nil))
	if r, err = s.Get(t.Context(), full.ID); err != nil || r.State != job.Completed {
		t.Errorf("record: %+v, %v", r, err)
	}
}

func TestOpenRefusesEviction(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t, "--maxmemory-policy", "allkeys-lru")
	_, err := results.Open(t.Context(), results.Config{URL: server.URL()}, testenv.Log(t))
	if err == nil || !strings.Contains(err.Error(), "allkeys-lru") || !strings.Contains(err.Error(), "noeviction") {
		t.Errorf("opening: %v", err)
	}
}

func TestOpenWarnsWhereTheSettingsAreHidden(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	ok(t, raw(t, server.Addr).Do(t.Context(), "ACL", "SETUSER", "m", "on", ">secret", "~*", "+@all", "-info", "-config").Err())
	var out bytes.Buffer
	s, err := results.Open(t.Context(), results.Config{URL: "redis://m:secret@" + server.Addr}, slog.New(slog.NewTextHandler(&out, nil)))
	ok(t, err)
	ok(t, s.Close())
	if n := strings.Count(out.String(), "noeviction"); n != 1 {
		t.Errorf("%d warnings: %s", n, out.String())
	}
}

func TestOpenErrors(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	ok(t, err)
	free := l.Addr().String()
	ok(t, l.Close())
	for _, c := range []struct {
		reason, url string
		unavailable bool
	}{
		{"nobody listens", "redis://:hunter2@" + free, true},
		{"no cluster listens", free + "," + free, true},
		{"no scheme", "user:hunter2@host", false},
		{"another scheme", "http://user:hunter2@host", false},
		{"a port that is part of the password", "redis://user:hunter2:/@host", false},
		{"a bad escape", "redis://user:hunter2%zz@host", false},
		{"a bad database", "redis://user:hunter2@host/x", false},
		{"a cluster with a database", "redis://user:hunter2@host:1/3,host:2", false},
		{"a cluster without ports", "hunter2,host", false},
		{"empty", "", false},
	} {
		_, err := results.Open(t.Context(), results.Config{URL: c.url}, testenv.Log(t))
		if err == nil || errors.Is(err, results.ErrUnavailable) != c.unavailable || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: %v", c.reason, err)
		}
	}
	for _, cfg := range []results.Config{{Retention: -1}, {KeyTTL: -1}, {MaxEvents: -1}} {
		cfg.URL = "redis://" + free
		if _, err := results.Open(t.Context(), cfg, testenv.Log(t)); err == nil || errors.Is(err, results.ErrUnavailable) {
			t.Errorf("%+v: %v", cfg, err)
		}
	}
}

// A caller that gives up gets its own error; one whose deadline passes learns that the store did not answer.
func TestCallersContextIsObeyed(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	s := open(t, server.URL())
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Ping(ctx); !errors.Is(err, context.Canceled) || errors.Is(err, results.ErrUnavailable) {
		t.Errorf("cancelled: %v", err)
	}
	ok(t, server.Process().Signal(syscall.SIGSTOP))
	ctx, cancel = context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	begin := time.Now()
	if err := s.Ping(ctx); !errors.Is(err, results.ErrUnavailable) || time.Since(begin) > time.Second {
		t.Errorf("after %s: %v", time.Since(begin), err)
	}
	ok(t, server.Process().Signal(syscall.SIGCONT))
}
