package blob_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/millrace/millrace/internal/blob"
	"github.com/millrace/millrace/internal/testenv"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, testenv.NATSLeaves()...) }

// fixture is a store and the means to damage what it holds.
type fixture struct {
	store blob.Store
	// corrupt changes a byte of the only object, cut takes its end away.
	corrupt, cut func()
	// parts counts what is stored of objects that are not visible.
	parts func() int
}

func openDir(t testing.TB) fixture {
	dir := t.TempDir()
	s, err := blob.OpenDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	edit := func(change func([]byte) []byte) func() {
		return func() {
			files, err := filepath.Glob(filepath.Join(dir, "*.blob"))
			if err != nil || len(files) != 1 {
				t.Fatal(files, err)
			}
			raw, err := os.ReadFile(files[0])
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(files[0], change(raw), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	return fixture{
		store:   s,
		corrupt: edit(func(b []byte) []byte { b[len(b)/2] ^= 1; return b }),
		cut:     edit(func(b []byte) []byte { return b[:len(b)-5] }),
		parts: func() int {
			files, err := filepath.Glob(filepath.Join(dir, "part", "*"))
			if err != nil {
				t.Fatal(err)
			}
			return len(files)
		},
	}
}

func openJetStream(t testing.TB) fixture {
	nc := testenv.Connect(t, testenv.NATS(t))
	s, err := blob.OpenJetStream(t.Context(), nc, 1)
	if err != nil {
		t.Fatal(err)
	}
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	stream, err := js.Stream(t.Context(), "OBJ_blobs")
	if err != nil {
		t.Fatal(err)
	}
	lastChunk := func() *jetstream.RawStreamMsg {
		m, err := stream.GetLastMsgForSubject(t.Context(), "$O.blobs.C.>")
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	return fixture{
		store: s,
		corrupt: func() {
			m := lastChunk()
			m.Data[len(m.Data)/2] ^= 1
			if err := stream.DeleteMsg(t.Context(), m.Sequence); err != nil {
				t.Fatal(err)
			}
			if _, err := js.PublishMsg(t.Context(), &nats.Msg{Subject: m.Subject, Data: m.Data}); err != nil {
				t.Fatal(err)
			}
		},
		cut: func() {
			if err := stream.DeleteMsg(t.Context(), lastChunk().Sequence); err != nil {
				t.Fatal(err)
			}
		},
		parts: func() int {
			info, err := stream.Info(t.Context(), jetstream.WithSubjectFilter("$O.blobs.C.>"))
			if err != nil {
				t.Fatal(err)
			}
			return len(info.State.Subjects)
		},
	}
}

func eachStore(t *testing.T, test func(t *testing.T, f fixture)) {
	t.Parallel()
	for name, open := range map[string]func(testing.TB) fixture{"dir": openDir, "jetstream": openJetStream} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, open(t))
		})
	}
}

func random(t testing.TB, n int) []byte {
	t.Helper()
	b := make([]byte, n)
	if _, err := rand.Read(b); err != nil {
		t.Fatal(err)
	}
	return b
}

func put(t testing.TB, s blob.Store, name string, content []byte) {
	t.Helper()
	n, err := s.Put(t.Context(), name, bytes.NewReader(content))
	if err != nil || n != int64(len(content)) {
		t.Fatalf("stored %d bytes, %v", n, err)
	}
}

func get(t testing.TB, s blob.Store, name string) ([]byte, error) {
	t.Helper()
	r, err := s.Get(t.Context(), name)
	if err != nil {
		return nil, err
	}
	defer r.Close() // only read
	return io.ReadAll(r)
}

func list(t testing.TB, s blob.Store) map[string]int64 {
	t.Helper()
	all := map[string]int64{}
	err := s.List(t.Context(), func(i blob.Info) error {
		if age := time.Since(time.UnixMilli(i.Time)).Abs(); age > time.Minute {
			t.Errorf("object %s is %v old", i.Name, age)
		}
		all[i.Name] = i.Size
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func TestObjectsComeBackAsStored(t *testing.T) {
	eachStore(t, func(t *testing.T, f fixture) {
		want := map[string]int64{}
		for _, size := range []int{0, 1, 256<<10 - 1, 256 << 10, 256<<10 + 1, 1 << 20, 8 << 20} {
			name := fmt.Sprintf("body/job_%d", size)
			content := random(t, size)
			put(t, f.store, name, content)
			got, err := get(t, f.store, name)
			if err != nil || !bytes.Equal(got, content) {
				t.Errorf("%d bytes: got %d, %v", size, len(got), err)
			}
			want[name] = int64(size)
		}
		if diff := cmp.Diff(want, list(t, f.store)); diff != "" {
			t.Error(diff)
		}
	})
}

func TestNamesMayHaveAnyBytes(t *testing.T) {
	eachStore(t, func(t *testing.T, f fixture) {
		want := map[string]int64{}
		for i, name := range []string{".", "..", "../x", "a/b", "a.b.>", "*", "ü 🎉", "%2F", "part", strings.Repeat("x", 200)} {
			put(t, f.store, name, make([]byte, i))
			want[name] = int64(i)
		}
		if diff := cmp.Diff(want, list(t, f.store)); diff != "" {
			t.Error(diff)
		}
		for _, name := range []string{"", strings.Repeat("x", 201)} {
			if _, err := f.store.Put(t.Context(), name, strings.NewReader("")); err == nil {
				t.Errorf("stored %q", name)
			}
		}
	})
}

func TestCutUploadLeavesNothing(t *testing.T) {
	eachStore(t, func(t *testing.T, f fixture) {
		broken := errors.New("the client has gone")
		for _, sent := range []int{0, 100, 700 << 10} {
			r := io.MultiReader(bytes.NewReader(random(t, sent)), iotest.ErrReader(broken))
			if _, err := f.store.Put(t.Context(), "cut", r); !errors.Is(err, broken) {
				t.Errorf("after %d bytes: %v", sent, err)
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		r := io.MultiReader(bytes.NewReader(random(t, 700<<10)), readerFunc(func([]byte) (int, error) {
			cancel()
			return 0, nil
		}), bytes.NewReader(random(t, 700<<10)))
		if _, err := f.store.Put(ctx, "cut", r); err == nil {
			t.Error("stored after its caller had gone")
		}
		if _, err := get(t, f.store, "cut"); !errors.Is(err, blob.ErrNotFound) {
			t.Errorf("%v, want ErrNotFound", err)
		}
		if got := list(t, f.store); len(got) != 0 {
			t.Errorf("listed: %v", got)
		}
		if n := f.parts(); n != 0 {
			t.Errorf("%d parts are left", n)
		}
	})
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) {
	if n, err := f(p); err != nil || n > 0 {
		return n, err
	}
	return 0, io.EOF
}

func TestDamageIsFoundAtTheEnd(t *testing.T) {
	eachStore(t, func(t *testing.T, f fixture) {
		put(t, f.store, "o", random(t, 600<<10))
		f.corrupt()
		if got, err := get(t, f.store, "o"); !errors.Is(err, blob.ErrCorrupt) {
			t.Errorf("changed: %d bytes, %v; want ErrCorrupt", len(got), err)
		}
		put(t, f.store, "o", random(t, 600<<10))
		if _, err := get(t, f.store, "o"); err != nil {
			t.Errorf("stored again: %v", err)
		}
		f.cut()
		if got, err := get(t, f.store, "o"); !errors.Is(err, blob.ErrCorrupt) {
			t.Errorf("cut: %d bytes, %v; want ErrCorrupt", len(got), err)
		}
	})
}

func TestDeleteMayBeRepeated(t *testing.T) {
	eachStore(t, func(t *testing.T, f fixture) {
		put(t, f.store, "a", random(t, 300<<10))
		put(t, f.store, "b", nil)
		for range 2 {
			if err := f.store.Delete(t.Context(), "a"); err != nil {
				t.Fatal(err)
			}
			if _, err := get(t, f.store, "a"); !errors.Is(err, blob.ErrNotFound) {
				t.Errorf("%v, want ErrNotFound", err)
			}
		}
		if diff := cmp.Diff(map[string]int64{"b": 0}, list(t, f.store)); diff != "" {
			t.Error(diff)
		}
		if n := f.parts(); n != 0 {
			t.Errorf("%d parts are left", n)
		}
		put(t, f.store, "a", []byte("again"))
		if got, err := get(t, f.store, "a"); err != nil || string(got) != "again" {
			t.Errorf("%q, %v", got, err)
		}
	})
}

func TestConcurrentPutsKeepOneWhole(t *testing.T) {
	eachStore(t, func(t *testing.T, f fixture) {
		var all [][]byte
		var wg sync.WaitGroup
		for range 5 {
			content := random(t, 600<<10)
			all = append(all, content)
			wg.Go(func() { put(t, f.store, "same", content) })
			wg.Go(func() { put(t, f.store, fmt.Sprintf("own-%x", content[:4]), content) })
		}
		wg.Wait()
		got, err := get(t, f.store, "same")
		if err != nil || !slices.ContainsFunc(all, func(c []byte) bool { return bytes.Equal(c, got) }) {
			t.Errorf("%d bytes, %v: none of those stored", len(got), err)
		}
		for _, content := range all {
			got, err := get(t, f.store, fmt.Sprintf("own-%x", content[:4]))
			if err != nil || !bytes.Equal(got, content) {
				t.Errorf("%d bytes, %v", len(got), err)
			}
		}
	})
}

func TestListStopsWithItsCaller(t *testing.T) {
	eachStore(t, func(t *testing.T, f fixture) {
		put(t, f.store, "a", nil)
		put(t, f.store, "b", nil)
		enough := errors.New("enough")
		n := 0
		if err := f.store.List(t.Context(), func(blob.Info) error { n++; return enough }); !errors.Is(err, enough) || n != 1 {
			t.Errorf("%d calls, %v", n, err)
		}
	})
}

func TestObjectStoreAwayIsUnavailable(t *testing.T) {
	t.Parallel()
	n := testenv.NATS(t)
	nc := testenv.Connect(t, n, nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
	s, err := blob.OpenJetStream(t.Context(), nc, 1)
	if err != nil {
		t.Fatal(err)
	}
	put(t, s, "a", random(t, 1<<20))
	r, err := s.Get(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close() // only read
	n.Shutdown()
	if _, err := io.ReadAll(r); !errors.Is(err, blob.ErrUnavailable) {
		t.Errorf("reading on: %v, want ErrUnavailable", err)
	}
	if _, err := s.Get(t.Context(), "a"); !errors.Is(err, blob.ErrUnavailable) {
		t.Errorf("getting: %v, want ErrUnavailable", err)
	}
	if _, err := s.Put(t.Context(), "b", strings.NewReader("x")); !errors.Is(err, blob.ErrUnavailable) {
		t.Errorf("putting: %v, want ErrUnavailable", err)
	}
	if err := s.Delete(t.Context(), "a"); !errors.Is(err, blob.ErrUnavailable) {
		t.Errorf("deleting: %v, want ErrUnavailable", err)
	}
	if err := s.List(t.Context(), func(blob.Info) error { return nil }); !errors.Is(err, blob.ErrUnavailable) {
		t.Errorf("listing: %v, want ErrUnavailable", err)
	}
}

func TestBucketIsTheObjectStoresOwnForm(t *testing.T) {
	t.Parallel()
	nc := testenv.Connect(t, testenv.NATS(t))
	s, err := blob.OpenJetStream(t.Context(), nc, 1)
	if err != nil {
		t.Fatal(err)
	}
	content := random(t, 700<<10)
	put(t, s, "ours", content)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	theirs, err := js.ObjectStore(t.Context(), "blobs")
	if err != nil {
		t.Fatal(err)
	}
	if got, err := theirs.GetBytes(t.Context(), "ours"); err != nil || !bytes.Equal(got, content) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	if _, err := theirs.PutBytes(t.Context(), "theirs", content); err != nil {
		t.Fatal(err)
	}
	if got, err := get(t, s, "theirs"); err != nil || !bytes.Equal(got, content) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	if err := theirs.Delete(t.Context(), "theirs"); err != nil {
		t.Fatal(err)
	}
	if _, err := get(t, s, "theirs"); !errors.Is(err, blob.ErrNotFound) {
		t.Errorf("%v, want ErrNotFound", err)
	}
}

func TestOldPartsAreSwept(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if _, err := blob.OpenDir(dir); err != nil {
		t.Fatal(err)
	}
	for name, age := range map[string]time.Duration{"old": 48 * time.Hour, "young": time.Minute} {
		file := filepath.Join(dir, "part", name)
		if err := os.WriteFile(file, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		then := time.Now().Add(-age)
		if err := os.Chtimes(file, then, then); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := blob.OpenDir(dir); err != nil {
		t.Fatal(err)
	}
	left, err := filepath.Glob(filepath.Join(dir, "part", "*"))
	if err != nil || len(left) != 1 || filepath.Base(left[0]) != "young" {
		t.Errorf("%v, %v", left, err)
	}
}

func BenchmarkPut(b *testing.B) {
	for name, open := range map[string]func(testing.TB) fixture{"dir": openDir, "jetstream": openJetStream} {
		for _, size := range []int{300 << 10, 8 << 20} {
			b.Run(fmt.Sprintf("%s/%dKiB", name, size>>10), func(b *testing.B) {
				f := open(b)
				content := random(b, size)
				b.SetBytes(int64(size))
				for b.Loop() {
					put(b, f.store, "x", content)
				}
			})
		}
	}
}
