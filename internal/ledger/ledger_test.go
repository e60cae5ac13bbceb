package ledger_test

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"golang.org/x/sync/errgroup"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
	"github.com/millrace/millrace/internal/testenv"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// kinds are the databases that everything is tested on, with a way to make an empty one.
var kinds = map[string]func(testing.TB) string{
	"postgres": testenv.Postgres,
	"sqlite":   func(t testing.TB) string { return "sqlite:" + filepath.Join(t.TempDir(), "ledger.db") },
}

// each runs a test on a store of each kind.
func each(t *testing.T, f func(*testing.T, *ledger.Store)) {
	t.Parallel()
	for name, url := range kinds {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f(t, testenv.OpenLedger(t, url(t)))
		})
	}
}

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func want(t testing.TB, err, target error) {
	t.Helper()
	if !errors.Is(err, target) {
		t.Errorf("got %v, want %v", err, target)
	}
}

func same(t testing.TB, got, want any) {
	t.Helper()
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got)\n%s", d)
	}
}

const (
	acme  job.Tenant = "acme"
	other job.Tenant = "other"
	day              = job.Millis(24 * time.Hour / time.Millisecond)
	// noon of 2026-03-01, UTC.
	noon = job.Millis(1772366400000)
)

// to makes of a tenant what t is, but for its id and when it was made.
func to(t ledger.Tenant) func(*ledger.Tenant) error {
	return func(now *ledger.Tenant) error {
		now.Name, now.Weight, now.Limits, now.Disabled = t.Name, t.Weight, t.Limits, t.Disabled
		return nil
	}
}

// tenants adds acme and other.
func tenants(t testing.TB, s *ledger.Store) {
	t.Helper()
	for _, id := range []job.Tenant{acme, other} {
		_, err := s.CreateTenant(t.Context(), ledger.Tenant{ID: id})
		ok(t, err)
	}
}

func file(id string, t job.Tenant, created job.Millis) ledger.File {
	return ledger.File{ID: id, Tenant: t, Key: "key_1", Purpose: "batch", Filename: "a.jsonl", Bytes: 10, SHA256: strings.Repeat("ab", 32), Blob: id, Created: created}
}

// batch adds a batch of acme and its input file.
func batch(t testing.TB, s *ledger.Store, id string) ledger.Batch {
	t.Helper()
	ok(t, s.InsertFile(t.Context(), file("file-"+id, acme, noon), 0))
	b := ledger.Batch{
		ID: id, Tenant: acme, Key: "key_1", Endpoint: job.ChatCompletions, InputFile: "file-" + id, Window: "24h", Models: []job.Model{"m"}, Metadata: map[string]string{"a": "b"},
		OutputExpires: 3600, RetryOf: "batch_0", Status: ledger.Validating, Created: noon, Expires: noon + day,
	}
	ok(t, s.CreateBatch(t.Context(), b))
	return b
}

// started is batch with lines in progress: of model m, and one of n where there are several.
func started(t testing.TB, s *ledger.Store, id string, lines int64) *ledger.Batch {
	t.Helper()
	batch(t, s, id)
	b, err := s.StartBatch(t.Context(), 1, id, noon+1, "m", []ledger.Portion{{Model: "m", Lines: lines, Tokens: job.Tokens(100 * lines)}})
	ok(t, err)
	return b
}

func TestTenants(t *testing.T) {
	each(t, func(t *testing.T, s *ledger.Store) {
		ctx := t.Context()
		all, err := s.Tenants(ctx)
		ok(t, err)
		same(t, all, []ledger.Tenant{{ID: job.DefaultTenant, Weight: 100}})

		a := ledger.Tenant{ID: acme, Name: "Acme \x00\xff <&> Ä", Weight: 300, Limits: ledger.Limits{RequestsPerMinute: 1, TokensPerMinute: 2, Running: 3, RunningTokens: 4, Queued: 5, QueuedTokens: 6, FileBytes: 7}, Created: noon}
		made, err := s.CreateTenant(ctx, a)
		ok(t, err)
		same(t, *made, a)
		a.Name = "Acme \uFFFD\uFFFD <&> Ä" // what no text of a database can hold is replaced
		got, err := s.Tenant(ctx, acme)
		ok(t, err)
		same(t, *got, a)
		_, err = s.CreateTenant(ctx, ledger.Tenant{ID: acme})
		want(t, err, ledger.ErrExists)
		_, err = s.Tenant(ctx, "nobody\x00")
		want(t, err, ledger.ErrNotFound)
		for _, bad := range []ledger.Tenant{{}, {ID: "x", Weight: 1001}, {ID: "x", Weight: -1}} {
			if _, err := s.CreateTenant(ctx, bad); err == nil {
				t.Errorf("%+v was taken", bad)
			}
		}

		a.Name, a.Weight, a.Limits, a.Disabled = "new", 1, ledger.Limits{}, true
		got, err = s.UpdateTenant(ctx, acme, to(a))
		ok(t, err)
		same(t, *got, a)
		got, err = s.Tenant(ctx, acme)
		ok(t, err)
		same(t, *got, a)
		_, err = s.UpdateTenant(ctx, "nobody", to(ledger.Tenant{}))
		want(t, err, ledger.ErrNotFound)
		all, err = s.Tenants(ctx)
		ok(t, err)
		same(t, all, []ledger.Tenant{a, {ID: job.DefaultTenant, Weight: 100}})
	})
}

func TestATenantInUseIsNotDeleted(t *testing.T) {
	each(t, func(t *testing.T, s *ledger.Store) {
		ctx := t.Context()
		tenants(t, s)
		want(t, s.DeleteTenant(ctx, job.DefaultTenant), ledger.ErrInUse)
		want(t, s.DeleteTenant(ctx, "nobody"), ledger.ErrNotFound)

		_, k, err := s.CreateKey(ctx, ledger.Key{Tenant: acme})
		ok(t, err)
		want(t, s.DeleteTenant(ctx, acme), ledger.ErrInUse)
		_, err = s.RevokeKey(ctx, k.ID)
		ok(t, err)

		batch(t, s, "batch_1")
		want(t, s.DeleteTenant(ctx, acme), ledger.ErrInUse) // a file and a live batch
		_, err = s.CancelBatch(ctx, acme, "batch_1", noon)
		ok(t, err)
		_, err = s.EndBatch(ctx, 1, "batch_1", noon, 0, 0, nil, nil)
		ok(t, err)
		want(t, s.DeleteTenant(ctx, acme), ledger.ErrInUse) // a file
		_, err = s.DeleteFile(ctx, acme, "file-batch_1")
		ok(t, err)
		ok(t, s.Tally(ctx, 1, ledger.Position{}, ledger.Position{Stream: "1", Seq: 1}, []ledger.Ended{{Tenant: acme, Model: "m", Key: k.ID, Group: job.NoGroup, At: noon, OK: true}}))
		ok(t, s.DeleteTenant(ctx, acme))
		_, err = s.Tenant(ctx, acme)
		want(t, err, ledger.ErrNotFound)
		_, err = s.Batch(ctx, acme, "batch_1")
		want(t, err, ledger.ErrNotFound)

		// That keys were made is not forgotten, nor what was used.
		has, err := s.HasKeys(ctx)
		ok(t, err)
		if !has {
			t.Error("the keys are forgotten")
		}
		rows, err := s.Usage(ctx, ledger.UsageQuery{Tenant: acme})
		ok(t, err)
		same(t, rows, []ledger.UsageRow{{Requests: 1}})
	})
}

// TestADeletedTenantsIDIsNotUsedAgain: the jobs that are kept under it, and their answers, are nobody's.
func TestADeletedTenantsIDIsNotUsedAgain(t *testing.T) {
	each(t, func(t *testing.T, s *ledger.Store) {
		ctx := t.Context()
		tenants(t, s)
		ok(t, s.DeleteTenant(ctx, acme))
		for range 2 {
			_, err := s.CreateTenant(ctx, ledger.Tenant{ID: acme})
			want(t, err, ledger.ErrDeleted)
		}
		_, err := s.Tenant(ctx, acme)
		want(t, err, ledger.ErrNotFound)
		all, err := s.Tenants(ctx)
		ok(t, err)
		if len(all) != 2 || all[0].ID != job.DefaultTenant || all[1].ID != other {
			t.Errorf("listed: %+v", all)
		}
		// Nothing is done to it, and nothing made for it.
		_, err = s.UpdateTenant(ctx, acme, to(ledger.Tenant{}))
		want(t, err, ledger.ErrNotFound)
		want(t, s.DeleteTenant(ctx, acme), ledger.ErrNotFound)
		_, _, err = s.CreateKey(ctx, ledger.Key{Tenant: acme})
		want(t, err, ledger.ErrNotFound)
		want(t, s.InsertFile(ctx, file("file-1", acme, noon), 0), ledger.ErrNotFound)
		want(t, s.CreateBatch(ctx, ledger.Batch{ID: "batch_1", Tenant: acme, InputFile: "file-1"}), ledger.ErrNotFound)
	})
}

// TestChangesOfATenantAtOnceAreAllMade: none undoes another's.
func TestChangesOfATenantAtOnceAreAllMade(t *testing.T) {
	each(t, func(t *testing.T, s *ledger.Store) {
		tenants(t, s)
		const n = 8
		var all errgroup.Group
		for range n {
			all.Go(func() error {
				_, err := s.UpdateTenant(t.Context(), acme, func(t *ledger.Tenant) error { t.Limits.Running++; return nil })
				return err
			})
		}
		ok(t, all.Wait())
		got, err := s.Tenant(t.Context(), acme)
		ok(t, err)
		same(t, got.Limits.Running, int64(n))
		no := errors.New("no")
		_, err = s.UpdateTenant(t.Context(), acme, func(t *ledger.Tenant) error { t.Weight = 1; return no })
		want(t, err, no)
		got, err = s.Tenant(t.Context(), acme)
		ok(t, err)
		same(t, got.Weight, 100)
	})
}

// TestTenantsAndKeysComeInPages: together they are the whole list, each item once.
func TestTenantsAndKeysComeInPages(t *testing.T) {
	each(t, func(t *testing.T, s *ledger.Store) {
		ctx := t.Context()
		for _, id := range []job.Tenant{"b", "a", "d", "c"} {
			_, err := s.CreateTenant(ctx, ledger.Tenant{ID: id})
			ok(t, err)
		}
		var found []job.Tenant
		for after, more := job.Tenant(""), true; more; {
			var page []ledger.Tenant
			var err error
			page, more, err = s.TenantPage(ctx, after, 2)
			ok(t, err)
			for _, one := range page {
				found = append(found, one.ID)
			}
			after = found[len(found)-1]
		}
		same(t, found, []job.Tenant{"a", "b", "c", "d", job.DefaultTenant})
		page, more, err := s.TenantPage(ctx, "c", 2)
		ok(t, err)
		if len(page) != 2 || more {
			t.Errorf("the last page is %v, more %v", page, more)
		}
		ok(t, s.DeleteTenant(ctx, "c"))
		page, _, err = s.TenantPage(ctx, "c", 2)
		ok(t, err)
		if len(page) != 2 || page[0].ID != "d" {
			t.Errorf("behind one that was deleted: %v", page)
		}
		_, _, err = s.TenantPage(ctx, "nobody\x00", 2)
		want(t, err, ledger.ErrNotFound)

		var made []string
		for i := range 5 {
			_, k, err := s.CreateKey(ctx, ledger.Key{Tenant: []job.Tenant{"a", "b"}[i%2]})
			ok(t, err)
			made = append([]string{k.ID}, made...)
		}
		walk := func(of job.Tenant, asc bool) (found []string) {
			p := ledger.Page{Limit: 2, Asc: asc}
			for more := true; more; {
				var page []ledger.Key
				var err error
				page, more, err = s.KeyPage(ctx, of, p)
				ok(t, err)
				found = append(found, ids(page)...)
				p.After = found[len(found)-1]
			}
			return found
		}
		all, err := s.Keys(ctx, "")
		ok(t, err)
		same(t, walk("", false), ids(all))
		of, err := s.Keys(ctx, "a")
		ok(t, err)
		same(t, walk("a", false), ids(of))
		backwards := walk("", true)
		slices.Reverse(backwards)
		same(t, backwards, ids(all))
		for _, after := range []string{"key_none", made[1], "\x00"} { // the second is another tenant's
			_, _, err = s.KeyPage(ctx, "a", ledger.Page{After: after})
			want(t, err, ledger.ErrNotFound)
		}
		_, _, err = s.KeyPage(ctx, "", ledger.Page{After: "key_none"})
		want(t, err, ledger.ErrNotFound)
	})
}

func TestKeys(t *testing.T) {
	each(t, func(t *testing.T, s *ledger.Store) {
		ctx := t.Context()
		tenants(t, s)
		has, err := s.HasKeys(ctx)
		ok(t, err)
		if has {
			t.Error("there are keys before the first is made")
		}
		now := job.MillisOf(time.Now())
		k := ledger.Key{
			Tenant: acme, Name: "ci", Scopes: []ledger.Scope{ledger.Inference}, Models: []job.Model{"a/b", "c"}, Limits: ledger.Limits{Running: 2}, Expires: now + day,
			ID: "chosen", Prefix: "chosen", Revoked: 1, LastUsed: 1, // these are not taken
		}
		secret, made, err := s.CreateKey(ctx, k)
		ok(t, err)
		if !strings.HasPrefix(secret, "sk-mr-") || len(secret) != 46 || !strings.HasPrefix(secret, made.Prefix) || len(made.Prefix) != 10 || !strings.HasPrefix(made.ID, "key_") {
			t.Errorf("the secret is %q, the key %+v", secret, made)
		}
		k.ID, k.Prefix, k.Created, k.Revoked, k.LastUsed = made.ID, made.Prefix, made.Created, 0, 0
		same(t, *made, k)
		got, err := s.Key(ctx, k.ID)
		ok(t, err)
		same(t, *got, k)
		id, err := s.Identify(ctx, secret, now)
		ok(t, err)
		same(t, id.Key, k)
		if id.Tenant.ID != acme || id.Tenant.Weight != 100 {
			t.Errorf("its tenant is %+v", id.Tenant)
		}

		second, k2, err := s.CreateKey(ctx, ledger.Key{Tenant: other})
		ok(t, err)
		same(t, k2.Scopes, []ledger.Scope{ledger.Inference, ledger.Batches})
		if second == secret {
			t.Error("two keys have one secret")
		}
		all, err := s.Keys(ctx, "")
		ok(t, err)
		same(t, ids(all), []string{k2.ID, k.ID})
		all, err = s.Keys(ctx, acme)
		ok(t, err)
		same(t, ids(all), []string{k.ID})

		for _, wrong := range []string{"", "sk-mr-", secret + "x", strings.ToUpper(secret), made.Prefix, made.ID, "' OR 1=1 --", "\x00"} {
			_, err := s.Identify(ctx, wrong, now)
			want(t, err, ledger.ErrNotFound)
		}
		_, _, err = s.CreateKey(ctx, ledger.Key{Tenant: "nobody"})
		want(t, err, ledger.ErrNotFound)
		if _, _, err := s.CreateKey(ctx, ledger.Key{Tenant: acme, Scopes: []ledger.Scope{"root"}}); err == nil || !strings.Contains(err.Error(), "root") {
			t.Errorf("an unknown scope: %v", err)
		}
		for _, f := range []func() error{
			func() error { _, err := s.Key(ctx, "key_0"); return err },
			func() error { _, err := s.RevokeKey(ctx, "key_0"); return err },
			func() error { _, _, err := s.RotateKey(ctx, "key_0", 0); return err },
		} {
			want(t, f(), ledger.ErrNotFound)
		}
	})
}

func ids(keys []ledger.Key) []string {
	var all []string
	for _, k := range keys {
		all = append(all, k.ID)
	}
	return all
}

func TestWhatNoKeyOpens(t *testing.T) {
	each(t, func(t *testing.T, s *ledger.Store) {
		ctx := t.Context()
		tenants(t, s)
		now := job.MillisOf(time.Now())
		secret, k, err := s.CreateKey(ctx, ledger.Key{Tenant: acme, Expires: now + 1000})
		ok(t, err)
		_, err = s.Identify(ctx, secret, now+999)
		ok(t, err)
		_, err = s.Identify(ctx, secret, now+1000)
		want(t, err, ledger.ErrNotFound)

		_, err = s.UpdateTenant(ctx, acme, to(ledger.Tenant{Disabled: true}))
		ok(t, err)
		_, err = s.Identify(ctx, secret, now)
		want(t, err, ledger.ErrNotFound)
		_, err = s.UpdateTenant(ctx, acme, to(ledger.Tenant{}))
		ok(t, err)
		_, err = s.Identify(ctx, secret, now)
		ok(t, err)

		revoked, err := s.RevokeKey(ctx, k.ID)
		ok(t, err)
		if revoked.Revoked < now {
			t.Errorf("it was revoked at %d", revoked.Revoked)
		}
		_, err = s.Identify(ctx, secret, now)
		want(t, err, ledger.ErrNotFound)
		again, err := s.RevokeKey(ctx, k.ID)
		ok(t, err)
		if again.Revoked != revoked.Revoked {
			t.Error("the second revocation moved the first")
		}
		_, _, err = s.RotateKey(ctx, k.ID, time.Hour)
		want(t, err, ledger.ErrState)
	})
}

func TestRotation(t *testing.T) {
	each(t, func(t *testing.T, s *ledger.Store) {
		ctx := t.Context()
		tenants(t, s)
		old, k, err := s.CreateKey(ctx, ledger.Key{Tenant: acme, Name: "n", Models: []job.Model{"m"}, Scopes: []ledger.Scope{ledger.Admin}, Limits: ledger.Limits{Running: 1}})
		ok(t, err)
		before := job.MillisOf(time.Now())
		fresh, k2, err := s.RotateKey(ctx, k.ID, time.Hour)
		ok(t, err)
		after := job.MillisOf(time.Now())
		hour := job.Millis(time.Hour / time.Millisecond)
		if fresh == old || k2.ID == k.ID || k2.Name != "n" || k2.Expires != 0 || k2.Limits.Running != 1 || k2.Tenant != acme || !slices.Equal(k2.Models, k.Models) || !slices.Equal(k2.Scopes, k.Scopes) {
			t.Errorf("the new key is %+v", k2)
		}
		_, err = s.Identify(ctx, old, before+hour-1)
		ok(t, err)
		_, err = s.Identify(ctx, old, after+hour)
		want(t, err, ledger.ErrNotFound)
		_, err = s.Identify(ctx, fresh, after+hour)
		ok(t, err)

		// The old key does not live longer by it.
		_, k3, err := s.RotateKey(ctx, k.ID, 48*time.Hour)
		ok(t, err)
		got, err := s.Key(ctx, k.ID)
		ok(t, err)
		if got.Expires > after+hour || k3.Expires != got.Expires {
			t.Errorf("rotated again it expires at %d, the new one at %d; the first grace ended by %d", got.Expires, k3.Expires, after+hour)
		}
		// Without grace it ends at once.
		_, _, err = s.RotateKey(ctx, k2.ID, 0)
		ok(t, err)
		_, err = s.Identify(ctx, fresh, job.MillisOf(time.Now()))
		want(t, err, ledger.ErrNotFound)
		_, _, err = s.RotateKey(ctx, k2.ID, time.Hour)
		want(t, err, ledger.ErrState)
	})
}

func TestTheUseOfAKeyIsNotedToTheMinute(t *testing.T) {
	each(t, func(t *testing.T, s *ledger.Store) {
		ctx := t.Context()
		tenants(t, s)
		secret, k, err := s.CreateKey(ctx, ledger.Key{Tenant: acme})
		ok(t, err)
		minute := job.Millis(60_000)
		for _, step := range []struct{ used, noted job.Millis }{{noon, noon}, {noon + minute - 1, noon}, {noon + minute, noon + minute}, {noon + 5, noon + minute}, {noon + 3*minute, noon + 3*minute}} {
			_, err := s.Identify(ctx, secret, step.used)
			ok(t, err)
			until(t, fmt.Sprintf("a use at %d is noted", step.used), func() bool {
				got, err := s.Key(ctx, k.ID)
				ok(t, err)
				return got.LastUsed == step.noted
			})
		}
	})
}

// until polls until f holds.
func until(t testing.TB, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !f(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}

func TestFiles(t *testing.T) {
	each(t, func(t *testing.T, s *ledger.Store) {
		ctx := t.Context()
		tenants(t, s)
		f := ledger.File{ID: "file-1", Tenant: acme, Key: "key_1", Purpose: "batch", Filename: "späte \"x\".jsonl", Bytes: 1 << 40, SHA256: strings.Repeat("0a", 32), Blob: "file-1", Batch: "batch_9", Created: noon, Expires: noon + 5}
		ok(t, s.InsertFile(ctx, f, 0))
		got, err := s.File(ctx, acme, "file-1")
		ok(t, err)
		same(t, *got, f)
		want(t, s.InsertFile(ctx, f, 0), ledger.ErrExists)
		ghost := file("file-2", "nobody", noon)
		want(t, s.InsertFile(ctx, ghost, 0), ledger.ErrNotFound)
		want(t, s.InsertFile(ctx, ghost, 100), ledger.ErrNotFound)
		_, err = s.File(ctx, other, "file-1")
		want(t, err, ledger.ErrNotFound)
		_, err = s.DeleteFile(ctx, other, "file-1")
		want(t, err, ledger.ErrNotFound)
		n, err := s.FileBytes(ctx, acme)
		ok(t, err)
		same(t, n, int64(1<<40))
		known, err := s.KnownBlobs(ctx, []string{"file-0", "file-1", "file-2"})
		ok(t, err)
		same(t, known, map[string]bool{"file-1": true})
		gone, err := s.DeleteFile(ctx, acme, "file-1")
		ok(t, err)
		same(t, *gone, f)
		_, err = s.DeleteFile(ctx, acme, "file-1")
		want(t, err, ledger.ErrNotFound)
		n, err = s.FileBytes(ctx, acme)
		ok(t, err)
		same(t, n, int64(0))
	})
}

func TestManyBlobsAreLookedUpAtOnce(t *testing.T) {
	each(t, func(t *testing.T, s *ledger.Store) {
		tenants(t, s)
		var names []string
		wanted := map[string]bool{}
		for i := range 1000 {
			name := fmt.Sprintf("file-%04d", i)
			names = append(names, name)
			if i%100 == 0 {
				ok(t, s.InsertFile(t.Context(), file(name, acme, noon), 0))
				wanted[name] = true
			}
		}
		known, err := s.KnownBlobs(t.Context(), names)
		ok(t, err)
		same(t, known, wanted)
		known, err = s.KnownBlobs(t.Context(), nil)
		ok(t, err)
		same(t, known, map[string]bool{})
	})
}

func TestQuota(t *testing.T) {
	each(t, func(t *testing.T, s *ledger.Store) {
		ctx := t.Context()
		tenants(t, s)
		ok(t, s.InsertFile(ctx, file("file-of-another", other, noon), 10))
		// Many at once: five of ten bytes fit.
		var wg sync.WaitGroup
		var in, refused atomic.Int64
		for i := range 20 {
			wg.Go(func() {
				switch err := s.InsertFile(ctx, file(fmt.Sprintf("file-%d", i), acme, noon), 59); {
				case err == nil:
					in.Add(1)
				case errors.Is(err, ledger.ErrQuota):
					refused.Add(1)
				default:
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if in.Load() != 5 || refused.Load() != 15 {
			t.Errorf("%d were taken and %d refused", in.Load(), refused.Load())
		}
		huge := file("file-huge", acme, noon)
		huge.Bytes = 1<<63 - 1
		want(t, s.InsertFile(ctx, huge, 59), ledger.ErrQuota)
		nine := file("file-nine", acme, noon)
		nine.Bytes = 9
		ok(t, s.InsertFile(ctx, nine, 59))
	})
}

func TestFilesExpireUnlessALiveBatchReadsThem(t *testing.T) {
	each(t, func(t *testing.T, s *ledger.Store) {
		ctx := t.Context()
		tenants(t, s)
		for i, expires := range []job.Millis{0, noon + 1, noon + 2, noon + 3, noon + 10} {
			f := file(fmt.Sprintf("file-%d", i), acme, noon)
			f.Expires = expires
			ok(t, s.InsertFile(ctx, f, 0))
		}
		ok(t, s.CreateBatch(ctx, ledger.Batch{ID: "batch_1", Tenant: acme, InputFile: "file-1", Created: noon}))
		names := func(files []ledger.File) []string {
			var all []string
			for _, f := range files {
				all = append(all, f.ID)
			}
			return all
		}
		expire := func(now job.Millis, limit int, want ...string) {
			t.Helper()
			gone, err := s.ExpireFiles(ctx, now, limit)
			ok(t, err)
			same(t, names(gone), want)
		}
		expire(noon+1, 10)
		expire(noon+3, 1, "file-2")
		expire(noon+3, 10, "file-3")
		_, err := s.RejectBatch(ctx, 1, "batch_1", noon, nil)
		ok(t, err)
		expire(noon+3, 10, "file-1")
		left, _, err := s.Files(ctx, acme, "", ledger.Page{Limit: 10, Asc: true})
		ok(t, err)
		same(t, names(left), []string{"file-0", "file-4"})
	})
}

func TestManyFilesExpireAtOnce(t *testing.T) {
	each(t, func(t *testing.T, s *ledger.Store) {
		ctx := t.Context()
		tenants(t, s)
		const n = 250
		for i := range n {
			f := file(fmt.Sprintf("file-%d", i), acme, noon)
			f.Expires = noon
			ok(t, s.InsertFile(ctx, f, 0))
		}
		// Two dispatchers may do it at once: each file is removed by one.
		var wg sync.WaitGroup
		var gone atomic.Int64
		for range 2 {
			wg.Go(func() {
				files, err := s.ExpireFiles(ctx, noon, n)
				if err != nil {
					t.Error(err)
				}
				gone.Add(int64(len(files)))
			})
		}
		wg.Wait()
		same(t, gone.Load(), int64(n))
	})
}

func TestListingsPageThroughRowsOfOneMillisecond(t *testing.T) {
	each(t, func(t *testing.T, s *ledger.Store) {
		ctx := t.Context()
		tenants(t, s)
		// Ids that do not follow the times of making, several rows to a millisecond, and another tenant's between them.
		var ids []string
		for i := range 30 {
			id := fmt.Sprintf("x%02d", i*7%30)
			f := file("file-"+id, acme, noon+job.Millis(i/10))
			if i%3 == 0 {
				f.Purpose = "batch_output"
			}
			ok(t, s.InsertFile(ctx, f, 0))
			ok(t, s.InsertFile(ctx, file("file-other-"+id, other, noon), 0))
			ok(t, s.CreateBatch(ctx, ledger.Batch{ID: "batch_" + id, Tenant: acme, InputFile: "file-" + id, Created: noon + job.Millis(i/10)}))
			ids = append(ids, fmt.Sprintf("%d %s", i/10, id))
		}
		slices.Sort(ids) // by (created, id)
		for i := range ids {
			ids[i] = ids[i][2:]
		}
		backwards := slices.Clone(ids)
		slices.Reverse(backwards)
		for _, asc := range []bool{true, false} {
			wanted := backwards
			if asc {
				wanted = ids
			}
			for _, limit := range []int{1, 7, 10, 29, 30, 31} {
				read := func(what string, page func(ledger.Page) ([]string, bool, error)) {
					t.Helper()
					var got []string
					p := ledger.Page{Limit: limit, Asc: asc}
					for more := true; more; {
						part, m, err := page(p)
						ok(t, err)
						if len(part) > limit || m && len(part) != limit {
							t.Fatalf("%s: a page of %d has %d items", what, limit, len(part))
						}
						if more = m; more {
							p.After = part[len(part)-1]
						}
						got = append(got, part...)
					}
					for i := range got {
						_, got[i], _ = strings.Cut(got[i], "x")
						got[i] = "x" + got[i]
					}
					if what != "outputs" {
						same(t, got, wanted)
					} else if len(got) != 10 {
						t.Errorf("%d outputs were listed", len(got))
					}
				}
				filesOf := func(purpose string) func(ledger.Page) ([]string, bool, error) {
					return func(p ledger.Page) (names []string, more bool, err error) {
						files, more, err := s.Files(ctx, acme, purpose, p)
						for _, f := range files {
							names = append(names, f.ID)
						}
						return names, more, err
					}
				}
				read("files", filesOf(""))
				read("outputs", filesOf("batch_output"))
				read("batches", func(p ledger.Page) (names []string, more bool, err error) {
					batches, more, err := s.Batches(ctx, acme, p)
					for _, b := range batches {
						names = append(names, b.ID)
					}
					return names, more, err
				})
			}
		}
		for _, after := range []string{"file-none", "file-other-x00", "batch_x00"} {
			_, _, err := s.Files(ctx, acme, "", ledger.Page{After: after})
			want(t, err, ledger.ErrNotFound)
		}
		_, _, err := s.Batches(ctx, other, ledger.Page{After: "batch_x00"})
		want(t, err, ledger.ErrNotFound)
		// An item of another purpose is a place in the listing all the same.
		_, _, err = s.Files(ctx, acme, "batch_output", ledger.Page{After: "file-x07"})
		ok(t, err)
		none, more, err := s.Files(ctx, acme, "vision", ledger.Page{})
		ok(t, err)
		if len(none) != 0 || more {
			t.Errorf("%d files of no purpose", len(none))
		}
	})
}

func TestALifeOfABatch(t *testing.T) {
	each(t, func(t *testing.T, s *ledger.Store) {
		ctx := t.Context()
		tenants(t, s)
		b := batch(t, s, "batch_1")
		get := func() ledger.Batch {
			t.Helper()
			got, err := s.Batch(ctx, acme, "batch_1")
			ok(t, err)
			return *got
		}
		same(t, get(), b)
		want(t, s.CreateBatch(ctx, b), ledger.ErrExists)
		_, err := s.Batch(ctx, other, "batch_1")
		want(t, err, ledger.ErrNotFound)
		_, err = s.CancelBatch(ctx, other, "batch_1", noon)
		want(t, err, ledger.ErrNotFound)
		_, err = s.Batch(ctx, acme, "batch_2")
		want(t, err, ledger.ErrNotFound)

		// It does not finalize, nor end, before it runs.
		was, err := s.FinalizeBatch(ctx, 1, "batch_1", noon, false)
		want(t, err, ledger.ErrState)
		same(t, *was, b)
		was, err = s.EndBatch(ctx, 1, "batch_1", noon, 0, 0, nil, nil)
		want(t, err, ledger.ErrState)
		same(t, *was, b)

		portions := []ledger.Portion{{Model: "a", Lines: 2, Tokens: 20}, {Model: "b", Lines: 3, Tokens: 50}}
		got, err := s.StartBatch(ctx, 1, "batch_1", noon+1, "", portions)
		ok(t, err)
		b.Status, b.InProgress, b.Total, b.Tokens = ledger.InProgress, noon+1, 5, 70
		same(t, *got, b)
		same(t, get(), b)
		_, err = s.StartBatch(ctx, 1, "batch_1", noon+1, "", portions)
		want(t, err, ledger.ErrState)
		_, err = s.RejectBatch(ctx, 1, "batch_1", noon+1, nil)
		want(t, err, ledger.ErrState)
		live, err := s.LiveBatches(ctx)
		ok(t, err)
		same(t, live, []ledger.Batch{b})
		tokens, err := s.BatchTokens(ctx, acme)
		ok(t, err)
		same(t, tokens, job.Tokens(70))

		ok(t, s.Reserve(ctx, 1, "batch_1", "b", 0, 2))
		ok(t, s.Reserve(ctx, 1, "batch_1", "b", 0, 2)) // once more, as after an answer that was lost
		ok(t, s.Reserve(ctx, 1, "batch_1", "b", 2, 3))
		for _, p := range [][2]int64{{0, 3}, {2, 2}, {3, 2}, {3, 4}} {
			want(t, s.Reserve(ctx, 1, "batch_1", "b", p[0], p[1]), ledger.ErrState)
		}
		want(t, s.Reserve(ctx, 1, "batch_1", "c", 0, 1), ledger.ErrNotFound)
		portions[1].Confirmed, portions[1].Reserved = 2, 3
		kept, err := s.Portions(ctx, "batch_1")
		ok(t, err)
		same(t, kept, portions)

		got, err = s.FinalizeBatch(ctx, 1, "batch_1", noon+2, false)
		ok(t, err)
		b.Status, b.Finalizing = ledger.Finalizing, noon+2
		same(t, *got, b)
		output, errs := file("file-out", acme, noon+3), file("file-err", acme, noon+3)
		output.Batch, errs.Batch = "batch_1", "batch_1"
		for _, counts := range [][2]int64{{6, 0}, {3, 3}, {-1, 0}, {0, -1}} {
			if _, err := s.EndBatch(ctx, 1, "batch_1", noon+3, counts[0], counts[1], nil, nil); err == nil {
				t.Errorf("it ended with the counts %v", counts)
			}
		}
		strange := file("file-strange", acme, noon)
		if _, err := s.EndBatch(ctx, 1, "batch_1", noon+3, 3, 2, &output, &strange); err == nil {
			t.Error("it ended with a file that is not its own")
		}
		_, err = s.File(ctx, acme, "file-out") // which would have come first
		want(t, err, ledger.ErrNotFound)
		got, err = s.EndBatch(ctx, 1, "batch_1", noon+3, 3, 2, &output, &errs)
		ok(t, err)
		b.Status, b.Completed, b.Done, b.Bad, b.OutputFile, b.ErrorFile = ledger.Completed, noon+3, 3, 2, "file-out", "file-err"
		same(t, *got, b)
		same(t, get(), b)
		for _, f := range []ledger.File{output, errs} {
			got, err := s.File(ctx, acme, f.ID)
			ok(t, err)
			same(t, *got, f)
		}
		was, err = s.EndBatch(ctx, 1, "batch_1", noon+4, 5, 0, &output, nil)
		want(t, err, ledger.ErrState)
		same(t, *was, b)
		was, err = s.CancelBatch(ctx, acme, "batch_1", noon+4)
		want(t, err, ledger.ErrState)
		same(t, *was, b)
		live, err = s.LiveBatches(ctx)
		ok(t, err)
		if len(live) != 0 {
			t.Errorf("%d batches live", len(live))
		}
		tokens, err = s.BatchTokens(ctx, acme)
		ok(t, err)
		same(t, tokens, job.Tokens(0))
	})
}

func TestOtherEndsOfABatch(t *testing.T) {
	each(t, func(t *testing.T, s *ledger.Store) {
		ctx := t.Context()
		tenants(t, s)
		// Rejected.
		b := batch(t, s, "batch_rejected")
		line := int64(7)
		param := "body.model"
		errs := []job.LineError{{Code: "invalid_model", Message: "no <model> \u2028", Param: &param, Line: &line}, {Code: "x", Message: "y"}}
		got, err := s.RejectBatch(ctx, 1, b.ID, noon+1, errs)
		ok(t, err)
		b.Status, b.Failed, b.Errors = ledger.Failed, noon+1, errs
		same(t, *got, b)
		got, err = s.Batch(ctx, acme, b.ID)
		ok(t, err)
		same(t, *got, b)

		// Expired.
		started(t, s, "batch_expired", 2)
		_, err = s.FinalizeBatch(ctx, 1, "batch_expired", noon+2, true)
		ok(t, err)
		got, err = s.EndBatch(ctx, 1, "batch_expired", noon+3, 1, 1, nil, nil)
		ok(t, err)
		if got.Status != ledger.Expired || got.Expired != noon+3 || got.Completed != 0 || got.OutputFile != "" {
			t.Errorf("%+v", got)
		}

		// Cancelled, from each status that lives.
		for from, prepare := range map[string]func(id string){
			"validating":  func(id string) { batch(t, s, id) },
			"in_progress": func(id string) { started(t, s, id, 2) },
			"finalizing": func(id string) {
				started(t, s, id, 2)
				_, err := s.FinalizeBatch(ctx, 1, id, noon+2, true)
				ok(t, err)
			},
		} {
			id := "batch_cancelled_" + from
			prepare(id)
			got, err := s.CancelBatch(ctx, acme, id, noon+3)
			ok(t, err)
			if got.Status != ledger.Cancelling || got.Cancelling != noon+3 {
				t.Errorf("from %s: %+v", from, got)
			}
			again, err := s.CancelBatch(ctx, acme, id, noon+4)
			ok(t, err)
			same(t, *again, *got)
			for _, f := range []func() error{
				func() error { _, err := s.StartBatch(ctx, 1, id, noon, "", nil); return err },
				func() error { _, err := s.RejectBatch(ctx, 1, id, noon, nil); return err },
				func() error { _, err := s.FinalizeBatch(ctx, 1, id, noon, false); return err },
			} {
				want(t, f(), ledger.ErrState)
			}
			got, err = s.EndBatch(ctx, 1, id, noon+5, 0, got.Total, nil, nil)
			ok(t, err)
			if got.Status != ledger.Cancelled || got.Cancelled != noon+5 {
				t.Errorf("from %s: %+v", from, got)
			}
			again, err = s.CancelBatch(ctx, acme, id, noon+6)
			ok(t, err)
			same(t, *again, *got)
		}
	})
}

func TestTheInputOfALiveBatchStays(t *testing.T) {
	each(t, func(t *testing.T, s *ledger.Store) {
		ctx := t.Context()
		tenants(t, s)
		want(t, s.CreateBatch(ctx, ledger.Batch{ID: "batch_0", Tenant: "nobody", InputFile: "file-other"}), ledger.ErrNotFound)
		// One of a file that is not there, or is another's, is found when it is validated, and keeps nobody's file.
		ok(t, s.InsertFile(ctx, file("file-other", other, noon), 0))
		ok(t, s.CreateBatch(ctx, ledger.Batch{ID: "batch_0", Tenant: acme, InputFile: "file-none"}))
		ok(t, s.CreateBatch(ctx, ledger.Batch{ID: "batch_00", Tenant: acme, InputFile: "file-other"}))
		_, err := s.DeleteFile(ctx, other, "file-other")
		ok(t, err)
		batch(t, s, "batch_1")
		_, err = s.DeleteFile(ctx, acme, "file-batch_1")
		want(t, err, ledger.ErrInUse)
		_, err = s.RejectBatch(ctx, 1, "batch_1", noon, nil)
		ok(t, err)
		_, err = s.DeleteFile(ctx, acme, "file-batch_1")
		ok(t, err)

		// Deleted while batches of it are made: who deletes it sees no batch of it, and whoever is refused sees one.
		for round := range 20 {
			name := fmt.Sprintf("file-%d", round)
			f := file(name, acme, noon)
			f.Expires = noon
			ok(t, s.InsertFile(ctx, f, 0))
			var wg sync.WaitGroup
			var deleted, refused atomic.Int64
			for i := range 3 {
				wg.Go(func() {
					if err := s.CreateBatch(ctx, ledger.Batch{ID: fmt.Sprintf("batch_%d_%d", round, i), Tenant: acme, InputFile: name}); err != nil {
						t.Error(err)
					}
				})
			}
			for range 2 {
				wg.Go(func() {
					switch _, err := s.DeleteFile(ctx, acme, name); {
					case err == nil:
						deleted.Add(1)
					case errors.Is(err, ledger.ErrInUse):
						refused.Add(1)
					case !errors.Is(err, ledger.ErrNotFound):
						t.Error(err)
					}
				})
			}
			wg.Go(func() {
				files, err := s.ExpireFiles(ctx, noon, 10)
				if err != nil {
					t.Error(err)
				}
				deleted.Add(int64(len(files)))
			})
			wg.Wait()
			_, err := s.File(ctx, acme, name)
			if gone := errors.Is(err, ledger.ErrNotFound); deleted.Load() > 1 || gone != (deleted.Load() == 1) || gone && refused.Load() > 0 {
				t.Fatalf("it was deleted %d times, which was refused %d times, and it is gone: %v", deleted.Load(), refused.Load(), gone)
			}
		}
	})
}

func TestOneOfManyEndsWins(t *testing.T) {
	each(t, func(t *testing.T, s *ledger.Store) {
		ctx := t.Context()
		tenants(t, s)
		for round := range 15 {
			id := fmt.Sprintf("batch_%d", round)
			started(t, s, id, 4)
			_, err := s.FinalizeBatch(ctx, 1, id, noon+2, round%2 == 0)
			ok(t, err)
			var wg sync.WaitGroup
			var ended atomic.Int64
			var seen sync.Map
			for i := range 3 {
				wg.Go(func() {
					out := file(fmt.Sprintf("file-out-%d-%d", round, i), acme, noon)
					out.Batch = id
					switch _, err := s.EndBatch(ctx, 1, id, noon+3, 4, 0, &out, nil); {
					case err == nil:
						ended.Add(1)
					case !errors.Is(err, ledger.ErrState):
						t.Error(err)
					}
				})
			}
			for range 4 {
				wg.Go(func() {
					b, err := s.CancelBatch(ctx, acme, id, noon+3)
					if err != nil && !errors.Is(err, ledger.ErrState) {
						t.Error(err)
						return
					}
					if (err != nil) != (b.Status == ledger.Completed || b.Status == ledger.Expired) {
						t.Errorf("cancelled with %v it is %s", err, b.Status)
					}
					seen.Store(b.Status == ledger.Cancelling || b.Status == ledger.Cancelled, true)
				})
			}
			wg.Wait()
			b, err := s.Batch(ctx, acme, id)
			ok(t, err)
			_, cancelled := seen.Load(true)
			_, refused := seen.Load(false)
			if ended.Load() != 1 || !b.Status.Ended() || cancelled == refused || cancelled != (b.Status == ledger.Cancelled) {
				t.Fatalf("it ended %d times and is %s; a cancel went through: %v, was refused: %v", ended.Load(), b.Status, cancelled, refused)
			}
			files, _, err := s.Files(ctx, acme, "", ledger.Page{Limit: 1000})
			ok(t, err)
			outputs := 0
			for _, f := range files {
				if f.Batch == id {
					outputs++
				}
			}
			same(t, outputs, 1)
		}
	})
}

func TestWhoLeadsNoMoreWritesNothing(t *testing.T) {
	each(t, func(t *testing.T, s *ledger.Store) {
		ctx := t.Context()
		tenants(t, s)
		batch(t, s, "batch_v")
		started(t, s, "batch_p", 3)
		ok(t, s.Lead(ctx, 5))
		ok(t, s.Lead(ctx, 5))
		position := ledger.Position{Stream: "s", Seq: 1}
		attempts := map[string]func(epoch uint64) error{
			"lead":     func(e uint64) error { return s.Lead(ctx, e) },
			"start":    func(e uint64) error { _, err := s.StartBatch(ctx, e, "batch_v", noon, "", nil); return err },
			"reject":   func(e uint64) error { _, err := s.RejectBatch(ctx, e, "batch_v", noon, nil); return err },
			"reserve":  func(e uint64) error { return s.Reserve(ctx, e, "batch_p", "m", 0, 1) },
			"finalize": func(e uint64) error { _, err := s.FinalizeBatch(ctx, e, "batch_p", noon, false); return err },
			"end":      func(e uint64) error { _, err := s.EndBatch(ctx, e, "batch_p", noon, 0, 0, nil, nil); return err },
			"tally":    func(e uint64) error { return s.Tally(ctx, e, ledger.Position{}, position, nil) },
		}
		before, err := s.LiveBatches(ctx)
		ok(t, err)
		for name, f := range attempts {
			if err := f(4); !errors.Is(err, ledger.ErrFenced) {
				t.Errorf("%s with an old epoch: %v", name, err)
			}
		}
		after, err := s.LiveBatches(ctx)
		ok(t, err)
		same(t, after, before)
		p, err := s.Tallied(ctx)
		ok(t, err)
		same(t, p, ledger.Position{})

		// A write with a higher epoch fences as Lead does.
		ok(t, attempts["reserve"](6))
		want(t, attempts["tally"](5), ledger.ErrFenced)
		ok(t, attempts["tally"](6))
	})
}

// outcome is what ended in a test's DONE.
func outcome(group string, good bool, change ...func(*ledger.Ended)) ledger.Ended {
	e := ledger.Ended{Tenant: acme, Model: "m", Key: "key_1", Group: group, At: noon, OK: good, Tokens: 100, Usage: job.Usage{PromptTokens: 1, CompletionTokens: 10, TotalTokens: 11, CachedTokens: 1000, ReasoningTokens: 10000}}
	for _, f := range change {
		f(&e)
	}
	return e
}

func TestTallyCountsOnce(t *testing.T) {
	each(t, func(t *testing.T, s *ledger.Store) {
		ctx := t.Context()
		tenants(t, s)
		started(t, s, "batch_1", 4)
		started(t, s, "batch_2", 9)
		p1, p2 := ledger.Position{Stream: "a", Seq: 10}, ledger.Position{Stream: "a", Seq: 20}
		page := []ledger.Ended{outcome("batch_1", true), outcome("batch_1", false), outcome("batch_2", true), outcome(job.NoGroup, true), outcome("batch_of_nobody", true)}
		counts := func(id string, done, bad int64, tokens job.Tokens, u job.Usage) {
			t.Helper()
			b, err := s.Batch(ctx, acme, id)
			ok(t, err)
			if b.Done != done || b.Bad != bad || b.TokensDone != tokens || b.Usage != u {
				t.Errorf("%s has done %d, bad %d, tokens %d, usage %+v; want %d, %d, %d, %+v", id, b.Done, b.Bad, b.TokensDone, b.Usage, done, bad, tokens, u)
			}
		}
		ok(t, s.Tally(ctx, 1, ledger.Position{}, p1, page))
		check := func() {
			t.Helper()
			counts("batch_1", 1, 1, 200, job.Usage{PromptTokens: 2, CompletionTokens: 20, TotalTokens: 22, CachedTokens: 2000, ReasoningTokens: 20000})
			counts("batch_2", 1, 0, 100, job.Usage{PromptTokens: 1, CompletionTokens: 10, TotalTokens: 11, CachedTokens: 1000, ReasoningTokens: 10000})
			rows, err := s.Usage(ctx, ledger.UsageQuery{})
			ok(t, err)
			same(t, rows, []ledger.UsageRow{{Requests: 5, Failed: 1, Usage: job.Usage{PromptTokens: 5, CompletionTokens: 50, TotalTokens: 55, CachedTokens: 5000, ReasoningTokens: 50000}}})
			at, err := s.Tallied(ctx)
			ok(t, err)
			same(t, at, p1)
		}
		check()
		// Once more, as after an answer that was lost; and from places where it is not.
		for _, from := range []ledger.Position{{}, {Stream: "a", Seq: 9}, {Stream: "b", Seq: 10}, p2} {
			want(t, s.Tally(ctx, 1, from, p2, page), ledger.ErrState)
		}
		check()
		// Of several at once from one place, one counts.
		var wg sync.WaitGroup
		var counted atomic.Int64
		for range 8 {
			wg.Go(func() {
				switch err := s.Tally(ctx, 1, p1, p2, []ledger.Ended{outcome("batch_1", false)}); {
				case err == nil:
					counted.Add(1)
				case !errors.Is(err, ledger.ErrState):
					t.Error(err)
				}
			})
		}
		wg.Wait()
		same(t, counted.Load(), int64(1))
		counts("batch_1", 1, 2, 300, job.Usage{PromptTokens: 3, CompletionTokens: 30, TotalTokens: 33, CachedTokens: 3000, ReasoningTokens: 30000})
		tokens, err := s.BatchTokens(ctx, acme)
		ok(t, err)
		same(t, tokens, job.Tokens(1300-400))
	})
}

func TestCountsNeverPassTheTotalNorAnEnd(t *testing.T) {
	each(t, func(t *testing.T, s *ledger.Store) {
		ctx := t.Context()
		tenants(t, s)
		at := ledger.Position{}
		tally := func(good, bad int) {
			t.Helper()
			var page []ledger.Ended
			for range good {
				page = append(page, outcome("batch_1", true))
			}
			for range bad {
				page = append(page, outcome("batch_1", false))
			}
			to := ledger.Position{Stream: "s", Seq: at.Seq + 1}
			ok(t, s.Tally(ctx, 1, at, to, page))
			at = to
		}
		check := func(done, bad int64, tokens job.Tokens) {
			t.Helper()
			b, err := s.Batch(ctx, acme, "batch_1")
			ok(t, err)
			if b.Done != done || b.Bad != bad || b.TokensDone != tokens {
				t.Errorf("done %d, bad %d, tokens %d; want %d, %d, %d", b.Done, b.Bad, b.TokensDone, done, bad, tokens)
			}
		}
		batch(t, s, "batch_1")
		tally(1, 1) // it has no lines yet
		check(0, 0, 0)
		_, err := s.StartBatch(ctx, 1, "batch_1", noon, "m", []ledger.Portion{{Model: "m", Lines: 5, Tokens: 450}})
		ok(t, err)
		tally(2, 1)
		check(2, 1, 300)
		tally(1, 3)
		check(3, 2, 450)
		tally(2, 2)
		check(3, 2, 450)
		_, err = s.FinalizeBatch(ctx, 1, "batch_1", noon, false)
		ok(t, err)
		_, err = s.EndBatch(ctx, 1, "batch_1", noon, 1, 4, nil, nil)
		ok(t, err)
		before, err := s.Batch(ctx, acme, "batch_1")
		ok(t, err)
		tally(1, 1)
		after, err := s.Batch(ctx, acme, "batch_1")
		ok(t, err)
		same(t, after, before)
		rows, err := s.Usage(ctx, ledger.UsageQuery{})
		ok(t, err)
		same(t, rows[0].Requests, int64(2+3+4+4+2)) // usage counts them all
	})
}

func TestUsage(t *testing.T) {
	each(t, func(t *testing.T, s *ledger.Store) {
		ctx := t.Context()
		none, err := s.Usage(ctx, ledger.UsageQuery{})
		ok(t, err)
		same(t, len(none), 0)
		// A page with more rows than one statement takes, among them names that no text of a database can hold; and one that adds to all of them.
		var page []ledger.Ended
		for i := range 300 {
			page = append(page, outcome(job.NoGroup, i%2 == 0, func(e *ledger.Ended) {
				e.At = noon + job.Millis(i%3)*day
				e.Tenant = []job.Tenant{acme, other}[i%2]
				e.Model = job.Model(fmt.Sprintf("m\x00%d", i%50))
				e.Key = []string{"", "key_1"}[i/2%2]
				e.Usage = job.Usage{TotalTokens: 1}
			}))
		}
		at := ledger.Position{}
		for seq := range uint64(2) {
			to := ledger.Position{Stream: "s", Seq: seq + 1}
			ok(t, s.Tally(ctx, 1, at, to, page))
			at = to
		}
		row := func(day string, tenant job.Tenant, key string, n, failed int64) ledger.UsageRow {
			return ledger.UsageRow{Day: day, Tenant: tenant, Key: key, Requests: n, Failed: failed, Usage: job.Usage{TotalTokens: job.Tokens(n)}}
		}
		for name, tt := range map[string]struct {
			q    ledger.UsageQuery
			want []ledger.UsageRow
		}{
			"all":       {ledger.UsageQuery{}, []ledger.UsageRow{row("", "", "", 600, 300)}},
			"by tenant": {ledger.UsageQuery{By: []string{"tenant"}}, []ledger.UsageRow{row("", acme, "", 300, 0), row("", other, "", 300, 300)}},
			"by day":    {ledger.UsageQuery{By: []string{"day"}}, []ledger.UsageRow{row("2026-03-01", "", "", 200, 100), row("2026-03-02", "", "", 200, 100), row("2026-03-03", "", "", 200, 100)}},
			"from a day by tenant and day": {
				ledger.UsageQuery{From: "2026-03-02", Tenant: other, By: []string{"tenant", "day"}},
				[]ledger.UsageRow{row("2026-03-02", other, "", 100, 100), row("2026-03-03", other, "", 100, 100)},
			},
			"to a day of a key": {ledger.UsageQuery{To: "2026-03-01", Key: "key_1", By: []string{"key"}}, []ledger.UsageRow{row("", "", "key_1", 100, 50)}},
			"a day":             {ledger.UsageQuery{From: "2026-03-02", To: "2026-03-02"}, []ledger.UsageRow{row("", "", "", 200, 100)}},
			"a model":           {ledger.UsageQuery{Model: "m\x001"}, []ledger.UsageRow{row("", "", "", 12, 12)}},
			"nothing":           {ledger.UsageQuery{Tenant: "nobody"}, nil},
			"nothing by day":    {ledger.UsageQuery{From: "2027-01-01", By: []string{"day"}}, nil},
		} {
			got, err := s.Usage(ctx, tt.q)
			ok(t, err)
			if d := cmp.Diff(tt.want, got); d != "" {
				t.Errorf("%s (-want +got)\n%s", name, d)
			}
		}
		models, err := s.Usage(ctx, ledger.UsageQuery{By: []string{"model", "tenant"}})
		ok(t, err)
		same(t, len(models), 50)
		if _, err := s.Usage(ctx, ledger.UsageQuery{By: []string{"password"}}); err == nil || !strings.Contains(err.Error(), "day, tenant, model or key") {
			t.Errorf("by an unknown field: %v", err)
		}
	})
}

func TestRemember(t *testing.T) {
	each(t, func(t *testing.T, s *ledger.Store) {
		ctx := t.Context()
		remember := func(tenant job.Tenant, route, key, hash, object string, now job.Millis) (string, bool) {
			t.Helper()
			bound, mine, err := s.Remember(ctx, tenant, route, key, hash, object, now, time.Second)
			ok(t, err)
			return bound, mine
		}
		expect := func(wanted string, wantMine bool) func(string, bool) {
			return func(bound string, mine bool) {
				t.Helper()
				if bound != wanted || mine != wantMine {
					t.Errorf("it is bound to %q, mine: %v; want %q, %v", bound, mine, wanted, wantMine)
				}
			}
		}
		expect("one", true)(remember(acme, "POST /v1/batches", "k", "h", "one", noon))
		expect("one", false)(remember(acme, "POST /v1/batches", "k", "h", "two", noon+999))
		expect("one", true)(remember(acme, "POST /v1/batches", "k", "h", "one", noon)) // the first call's answer was lost
		expect("two", true)(remember(other, "POST /v1/batches", "k", "x", "two", noon))
		expect("two", true)(remember(acme, "POST /v1/files", "k", "x", "two", noon))
		_, _, err := s.Remember(ctx, acme, "POST /v1/batches", "k", "other hash", "three", noon, time.Second)
		want(t, err, ledger.ErrReused)
		// Past its time it is free, for any request.
		expect("four", true)(remember(acme, "POST /v1/batches", "k", "another hash", "four", noon+1000))
		expect("four", false)(remember(acme, "POST /v1/batches", "k", "another hash", "five", noon+1001))

		ok(t, s.Forget(ctx, acme, "POST /v1/batches", "k", "one")) // bound to another by now
		expect("four", false)(remember(acme, "POST /v1/batches", "k", "another hash", "five", noon+1001))
		ok(t, s.Forget(ctx, acme, "POST /v1/batches", "k", "four"))
		ok(t, s.Forget(ctx, acme, "POST /v1/batches", "k", "four"))
		expect("six", true)(remember(acme, "POST /v1/batches", "k", "h", "six", noon+1001))

		ok(t, s.Tidy(ctx, noon+1000)) // removes those of noon alone
		expect("six", false)(remember(acme, "POST /v1/batches", "k", "h", "x", noon+1001))
		expect("seven", true)(remember(acme, "POST /v1/files", "k", "y", "seven", noon))

		// Fifty at once make one.
		var wg sync.WaitGroup
		var won atomic.Int64
		var objects sync.Map
		for i := range 50 {
			wg.Go(func() {
				bound, mine, err := s.Remember(ctx, acme, "race", "k", "h", fmt.Sprint("object-", i), noon, time.Second)
				if err != nil {
					t.Error(err)
					return
				}
				if mine {
					won.Add(1)
				}
				objects.Store(bound, true)
			})
		}
		wg.Wait()
		n := 0
		objects.Range(func(any, any) bool { n++; return true })
		if won.Load() != 1 || n != 1 {
			t.Errorf("%d calls made %d objects", won.Load(), n)
		}
	})
}

func TestAClosedContextIsSaidAsSuch(t *testing.T) {
	each(t, func(t *testing.T, s *ledger.Store) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err := s.Tenants(ctx)
		want(t, err, context.Canceled)
		_, err = s.CreateTenant(ctx, ledger.Tenant{ID: "x"})
		want(t, err, context.Canceled)
		ctx, cancel = context.WithDeadline(t.Context(), time.Now())
		defer cancel()
		_, err = s.Tenants(ctx)
		want(t, err, ledger.ErrUnavailable)
		want(t, s.Ping(ctx), ledger.ErrUnavailable)
		ok(t, s.Ping(t.Context()))
	})
}
