package blob_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
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

func TestMain(m *testing.M) {
	if testenv.ServeApart() || serveS3() {
		return
	}
	goleak.VerifyTestMain(m, testenv.NATSLeaves()...)
}

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

var stores = map[string]func(testing.TB) fixture{"dir": openDir, "jetstream": openJetStream, "s3": openS3}

func eachStore(t *testing.T, test func(t *testing.T, f fixture)) {
	t.Parallel()
	for name, open := range stores {
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
		for _, size := range []int{0, 1, 256<<10 - 1, 256 << 10, 256<<10 + 1, 1 << 20, 5 << 20, 8 << 20} {
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
		for _, sent := range []int{0, 100, 700 << 10, 6 << 20} {
			r := io.MultiReader(bytes.NewReader(random(t, sent)), iotest.ErrReader(broken))
			if _, err := f.store.Put(t.Context(), "cut", r); !errors.Is(err, broken) {
				t.Errorf("after %d bytes: %v", sent, err)
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		r := io.MultiReader(bytes.NewReader(random(t, 6<<20)), readerFunc(func([]byte) (int, error) {
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

func TestTidyLeavesWhatIsWhole(t *testing.T) {
	eachStore(t, func(t *testing.T, f fixture) {
		content := random(t, 6<<20)
		put(t, f.store, "a", content)
		put(t, f.store, "empty", nil)
		if err := f.store.Tidy(t.Context(), time.Now().Add(time.Hour)); err != nil {
			t.Fatal(err)
		}
		if got, err := get(t, f.store, "a"); err != nil || !bytes.Equal(got, content) {
			t.Errorf("%d bytes, %v", len(got), err)
		}
		if got, err := get(t, f.store, "empty"); err != nil || len(got) != 0 {
			t.Errorf("%d bytes, %v", len(got), err)
		}
	})
}

func TestChunksOfCrashedWritersAreTidiedAway(t *testing.T) {
	t.Parallel()
	nc := testenv.Connect(t, testenv.NATS(t))
	s, err := blob.OpenJetStream(t.Context(), nc, 1)
	if err != nil {
		t.Fatal(err)
	}
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	for _, nuid := range []string{"one", "two"} {
		for range 3 {
			if _, err := js.Publish(t.Context(), "$O.blobs.C."+nuid, random(t, 1000)); err != nil {
				t.Fatal(err)
			}
		}
	}
	left := func() int {
		stream, err := js.Stream(t.Context(), "OBJ_blobs")
		if err != nil {
			t.Fatal(err)
		}
		info, err := stream.Info(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return int(info.State.Msgs)
	}
	if err := s.Tidy(t.Context(), time.Now().Add(-time.Hour)); err != nil || left() != 6 {
		t.Errorf("%d chunks of young uploads, %v", left(), err)
	}
	if err := s.Tidy(t.Context(), time.Now().Add(time.Hour)); err != nil || left() != 0 {
		t.Errorf("%d chunks of old uploads, %v", left(), err)
	}
}

func TestSplitStoreFindsEachObjectInItsPart(t *testing.T) {
	t.Parallel()
	rest, apart := openDir(t).store, openDir(t).store
	s := blob.Split(rest, apart, "file-", "index-")
	put(t, rest, "file-unseen", nil)
	where := map[string]blob.Store{"file-a": apart, "index-b": apart, "file": rest, "request/file-a": rest}
	want := map[string]int64{}
	for name, part := range where {
		put(t, s, name, []byte(name))
		want[name] = int64(len(name))
		if got, err := get(t, part, name); err != nil || string(got) != name {
			t.Errorf("%s in its part: %q, %v", name, got, err)
		}
		if got, err := get(t, s, name); err != nil || string(got) != name {
			t.Errorf("%s: %q, %v", name, got, err)
		}
		a, err := s.OpenAt(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		defer a.Close()
		if a.Size() != int64(len(name)) {
			t.Errorf("%s has %d bytes", name, a.Size())
		}
	}
	if diff := cmp.Diff(want, list(t, s)); diff != "" {
		t.Error(diff)
	}
	if err := s.Tidy(t.Context(), time.Now()); err != nil {
		t.Error(err)
	}
	for name := range where {
		if err := s.Delete(t.Context(), name); err != nil {
			t.Error(err)
		}
	}
	if got := list(t, s); len(got) != 0 {
		t.Errorf("left: %v", got)
	}
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

func TestPartsAreReadInAnyOrder(t *testing.T) {
	eachStore(t, func(t *testing.T, f fixture) {
		const size = 1<<20 + 300<<10 + 17 // several chunks, and a short one
		content := random(t, size)
		put(t, f.store, "beside", random(t, 600<<10))
		put(t, f.store, "o", content)
		put(t, f.store, "empty", nil)
		a, err := f.store.OpenAt(t.Context(), "o")
		if err != nil {
			t.Fatal(err)
		}
		defer a.Close()
		if a.Size() != size {
			t.Errorf("size %d, want %d", a.Size(), size)
		}
		check := func(off, n int64) {
			t.Helper()
			p := make([]byte, n)
			got, err := a.ReadAt(p, off)
			want := content[min(off, size):min(off+n, size)]
			if !bytes.Equal(p[:got], want) {
				t.Errorf("%d bytes from %d: other bytes, or %d of them where %d are", n, off, got, len(want))
			}
			if ended := off+n > size; ended && !errors.Is(err, io.EOF) || !ended && err != nil && !errors.Is(err, io.EOF) {
				t.Errorf("%d bytes from %d: %v", n, off, err)
			}
		}
		for _, border := range []int64{0, 256 << 10, 512 << 10, 1 << 20, 5 << 18, size} {
			for _, before := range []int64{0, 1, 1000} {
				if off := border - before; off >= 0 {
					check(off, 2000)
					check(off, before)
				}
			}
		}
		check(0, size)
		check(0, size+1)
		check(size-1, 1)
		check(size+5, 10)
		check(100, 0)
		if _, err := a.ReadAt(make([]byte, 1), -1); err == nil || errors.Is(err, io.EOF) {
			t.Errorf("before the start: %v", err)
		}
		var wg sync.WaitGroup
		for i := range int64(8) {
			wg.Go(func() { check((i*177_777)%size, 300<<10) })
		}
		wg.Wait()
		if all, err := io.ReadAll(io.NewSectionReader(a, 0, a.Size())); err != nil || !bytes.Equal(all, content) {
			t.Errorf("in one go: %d bytes, %v", len(all), err)
		}

		empty, err := f.store.OpenAt(t.Context(), "empty")
		if err != nil {
			t.Fatal(err)
		}
		defer empty.Close()
		if n, err := empty.ReadAt(make([]byte, 1), 0); n != 0 || !errors.Is(err, io.EOF) || empty.Size() != 0 {
			t.Errorf("an empty object: %d of %d bytes, %v", n, empty.Size(), err)
		}
		if _, err := f.store.OpenAt(t.Context(), "none"); !errors.Is(err, blob.ErrNotFound) {
			t.Errorf("no object: %v, want ErrNotFound", err)
		}
	})
}

func TestPartsOfAnObjectThatIsCutAreCorrupt(t *testing.T) {
	eachStore(t, func(t *testing.T, f fixture) {
		put(t, f.store, "o", random(t, 2<<20))
		a, err := f.store.OpenAt(t.Context(), "o")
		if err != nil {
			t.Fatal(err)
		}
		defer a.Close()
		f.cut()
		p := make([]byte, 4<<10)
		if n, err := a.ReadAt(p, 2<<20-int64(len(p))); err == nil || errors.Is(err, io.EOF) {
			// A folder's file has its digest behind the object: what is cut there is seen by whoever reads the digest.
			if _, err := get(t, f.store, "o"); !errors.Is(err, blob.ErrCorrupt) {
				t.Errorf("%d bytes; and reading all: %v, want ErrCorrupt", n, err)
			}
		}
	})
}

func TestPartsOfAnObjectThatIsOverwrittenAreNotMixed(t *testing.T) {
	eachStore(t, func(t *testing.T, f fixture) {
		old, now := random(t, 2<<20), random(t, 2<<20)
		put(t, f.store, "o", old)
		a, err := f.store.OpenAt(t.Context(), "o")
		if err != nil {
			t.Fatal(err)
		}
		defer a.Close()
		put(t, f.store, "o", now)
		p := make([]byte, 4<<10)
		for _, off := range []int64{0, 1 << 20, 2<<20 - 4<<10} {
			if _, err := a.ReadAt(p, off); err == nil && !bytes.Equal(p, old[off:off+int64(len(p))]) {
				t.Errorf("at %d: bytes of the other object", off)
			} else if err != nil && !errors.Is(err, blob.ErrCorrupt) {
				t.Errorf("at %d: %v, want ErrCorrupt", off, err)
			}
		}
	})
}

func TestPartsOfAnotherToolsObject(t *testing.T) {
	t.Parallel()
	nc := testenv.Connect(t, testenv.NATS(t))
	s, err := blob.OpenJetStream(t.Context(), nc, 1)
	if err != nil {
		t.Fatal(err)
	}
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	theirs, err := js.ObjectStore(t.Context(), "blobs")
	if err != nil {
		t.Fatal(err)
	}
	content := random(t, 700<<10)
	if _, err := theirs.PutBytes(t.Context(), "theirs", content); err != nil {
		t.Fatal(err)
	}
	a, err := s.OpenAt(t.Context(), "theirs")
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	p := make([]byte, 300<<10)
	if _, err := a.ReadAt(p, 200<<10); err != nil || !bytes.Equal(p, content[200<<10:500<<10]) {
		t.Errorf("got other bytes: %v", err)
	}
}

// TestBigObjectsTakeNoMemory holds five uploads and downloads at once to a bound that is far below their size. The servers, which keep much in memory, are in processes of their own. It runs alone: tests in
// parallel begin when it has ended.
func TestBigObjectsTakeNoMemory(t *testing.T) {
	const (
		many  = 5
		size  = 40 << 20
		bound = 64 << 20
	)
	for _, name := range []string{"dir", "jetstream", "s3"} {
		t.Run(name, func(t *testing.T) {
			var s blob.Store
			switch name {
			case "s3":
				s = connectS3(t, testenv.Apart(t, s3Process+"=1"))
			case "jetstream":
				nc, err := nats.Connect(testenv.NATSApart(t))
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(nc.Close)
				if s, err = blob.OpenJetStream(t.Context(), nc, 1); err != nil {
					t.Fatal(err)
				}
			default:
				s = stores[name](t).store
			}
			runtime.GC()
			peak := peakHeap(t)
			var wg sync.WaitGroup
			for i := range many {
				wg.Go(func() {
					name := fmt.Sprintf("big-%d", i)
					sent, got := sha256.New(), sha256.New()
					n, err := s.Put(t.Context(), name, io.TeeReader(io.LimitReader(rand.Reader, size), sent))
					if err != nil || n != size {
						t.Errorf("stored %d bytes, %v", n, err)
						return
					}
					r, err := s.Get(t.Context(), name)
					if err != nil {
						t.Error(err)
						return
					}
					defer r.Close()
					if n, err := io.Copy(got, r); err != nil || n != size || !bytes.Equal(sent.Sum(nil), got.Sum(nil)) {
						t.Errorf("read %d bytes, %v", n, err)
					}
				})
			}
			wg.Wait()
			if grown := peak(); grown > bound {
				t.Errorf("the heap grew by %d MiB", grown>>20)
			} else {
				t.Logf("the heap grew by %d MiB", grown>>20)
			}
		})
	}
}

// peakHeap watches the heap; the returned function ends that, and tells by how many bytes it grew at most. Meanwhile garbage goes soon, however much of the heap other tests hold.
func peakHeap(t testing.TB) func() int64 {
	t.Helper()
	percent := debug.SetGCPercent(10)
	t.Cleanup(func() { debug.SetGCPercent(percent) })
	inUse := func() int64 {
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapInuse)
	}
	start, most := inUse(), int64(0)
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			most = max(most, inUse()-start)
			select {
			case <-stop:
				return
			case <-time.After(5 * time.Millisecond):
			}
		}
	}()
	return func() int64 {
		close(stop)
		<-done
		return most
	}
}

func BenchmarkPut(b *testing.B) {
	for name, open := range stores {
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
