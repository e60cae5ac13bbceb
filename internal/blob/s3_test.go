package blob_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"
	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/millrace/millrace/internal/blob"
)

const bucket = "objects"

// s3Server is a server in memory.
func s3Server() http.Handler {
	backend := s3mem.New()
	if err := backend.CreateBucket(bucket); err != nil {
		panic(err)
	}
	return gofakes3.New(backend, gofakes3.WithLogger(gofakes3.DiscardLog())).Server()
}

// s3Process tells the test's program to be a server.
const s3Process = "MILLRACE_TEST_S3_PROCESS"

// serveS3 is false where this process is the test; else it serves until its input ends, so that it ends with the test.
func serveS3() bool {
	if os.Getenv(s3Process) == "" {
		return false
	}
	srv := httptest.NewServer(s3Server())
	defer srv.Close()
	fmt.Fprintln(os.Stdout, srv.URL)
	_, _ = io.Copy(io.Discard, os.Stdin)
	return true
}

func connectS3(t testing.TB, endpoint string) blob.Store {
	t.Helper()
	s, err := blob.OpenS3(t.Context(), blob.S3Config{Bucket: bucket, Prefix: "pre/fix", Endpoint: endpoint, AccessKey: "key", SecretKey: "secret"})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// s3Client is a client of a test's own.
func s3Client(t testing.TB, endpoint string) *minio.Core {
	t.Helper()
	u, err := url.Parse(endpoint)
	if err != nil {
		t.Fatal(err)
	}
	c, err := minio.NewCore(u.Host, &minio.Options{Creds: credentials.NewStaticV4("key", "secret", ""), Region: "us-east-1"})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func openS3(t testing.TB) fixture {
	srv := httptest.NewServer(s3Server())
	t.Cleanup(srv.Close)
	return s3Fixture(t, srv.URL)
}

func s3Fixture(t testing.TB, endpoint string) fixture {
	c := s3Client(t, endpoint)
	edit := func(change func([]byte) []byte) func() {
		return func() {
			for o := range c.ListObjectsIter(t.Context(), bucket, minio.ListObjectsOptions{Recursive: true}) {
				if o.Err != nil {
					t.Fatal(o.Err)
				}
				r, _, _, err := c.GetObject(t.Context(), bucket, o.Key, minio.GetObjectOptions{})
				if err != nil {
					t.Fatal(err)
				}
				raw, err := io.ReadAll(r)
				if err != nil {
					t.Fatal(err)
				}
				raw = change(raw)
				if _, err := c.PutObject(t.Context(), bucket, o.Key, bytes.NewReader(raw), int64(len(raw)), "", "", minio.PutObjectOptions{}); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	return fixture{
		store:   connectS3(t, endpoint),
		corrupt: edit(func(b []byte) []byte { b[len(b)/2] ^= 1; return b }),
		cut:     edit(func(b []byte) []byte { return b[:len(b)-5] }),
		parts: func() int {
			page, err := c.ListMultipartUploads(t.Context(), bucket, "", "", "", "", 1000)
			if minio.ToErrorResponse(err).Code == "NoSuchUpload" { // what this server says where there was none
				return 0
			}
			if err != nil {
				t.Fatal(err)
			}
			return len(page.Uploads)
		},
	}
}

// faulty stands before a server. fault may answer a request in the server's place, or after it.
func faulty(t testing.TB, fault func(w http.ResponseWriter, r *http.Request, server http.Handler)) string {
	t.Helper()
	server := s3Server()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fault(w, r, server) }))
	t.Cleanup(srv.Close)
	return srv.URL
}

func completes(r *http.Request) bool {
	return r.Method == http.MethodPost && r.URL.Query().Has("uploadId")
}

func TestUploadWhoseLastAnswerIsLostIsThere(t *testing.T) {
	t.Parallel()
	for name, size := range map[string]int{"in one request": 100, "in parts": 6 << 20} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			endpoint := faulty(t, func(w http.ResponseWriter, r *http.Request, server http.Handler) {
				if completes(r) || r.Method == http.MethodPut && !r.URL.Query().Has("uploadId") {
					server.ServeHTTP(httptest.NewRecorder(), r)
					panic(http.ErrAbortHandler)
				}
				server.ServeHTTP(w, r)
			})
			s := connectS3(t, endpoint)
			content := random(t, size)
			put(t, s, "o", content)
			if got, err := get(t, s, "o"); err != nil || !bytes.Equal(got, content) {
				t.Errorf("%d bytes, %v", len(got), err)
			}
		})
	}
}

func TestUploadWhoseLastRequestIsRefusedLeavesNothing(t *testing.T) {
	t.Parallel()
	f := s3Fixture(t, faulty(t, func(w http.ResponseWriter, r *http.Request, server http.Handler) {
		if completes(r) {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		server.ServeHTTP(w, r)
	}))
	if _, err := f.store.Put(t.Context(), "o", bytes.NewReader(random(t, 6<<20))); !errors.Is(err, blob.ErrUnavailable) {
		t.Errorf("%v, want ErrUnavailable", err)
	}
	if _, err := get(t, f.store, "o"); !errors.Is(err, blob.ErrNotFound) {
		t.Errorf("%v, want ErrNotFound", err)
	}
	if n := f.parts(); n != 0 {
		t.Errorf("%d uploads are left", n)
	}
}

func TestRequestsThatFailAreRepeated(t *testing.T) {
	t.Parallel()
	var failed atomic.Int32
	seen := map[string]bool{} // the requests come one after the other
	s := connectS3(t, faulty(t, func(w http.ResponseWriter, r *http.Request, server http.Handler) {
		if id := r.Method + r.URL.String() + r.Header.Get("Range"); !seen[id] {
			seen[id] = true
			failed.Add(1)
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		server.ServeHTTP(w, r)
	}))
	content := random(t, 6<<20)
	put(t, s, "o", content)
	if got, err := get(t, s, "o"); err != nil || !bytes.Equal(got, content) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	if failed.Load() < 5 {
		t.Errorf("only %d requests failed", failed.Load())
	}
}

// TestAnswerThatBreaksOffIsNoEnd: what the network cuts is neither the object's end nor its damage.
func TestAnswerThatBreaksOffIsNoEnd(t *testing.T) {
	t.Parallel()
	var breaks atomic.Bool
	s := connectS3(t, faulty(t, func(w http.ResponseWriter, r *http.Request, server http.Handler) {
		if !breaks.Load() || r.Method != http.MethodGet {
			server.ServeHTTP(w, r)
			return
		}
		whole := httptest.NewRecorder()
		server.ServeHTTP(whole, r)
		for key, v := range whole.Header() {
			w.Header()[key] = v
		}
		w.Header().Set("Content-Length", fmt.Sprint(whole.Body.Len()))
		w.WriteHeader(whole.Code)
		_, _ = w.Write(whole.Body.Bytes()[:whole.Body.Len()/2])
		panic(http.ErrAbortHandler)
	}))
	put(t, s, "o", random(t, 1<<20))
	a, err := s.OpenAt(t.Context(), "o")
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	breaks.Store(true)
	if got, err := get(t, s, "o"); !errors.Is(err, blob.ErrUnavailable) {
		t.Errorf("%d bytes, %v; want ErrUnavailable", len(got), err)
	}
	if n, err := a.ReadAt(make([]byte, 100), 1000); !errors.Is(err, blob.ErrUnavailable) {
		t.Errorf("a part: %d bytes, %v; want ErrUnavailable", n, err)
	}
}

func TestUploadsOfCrashedWritersInS3AreTidiedAway(t *testing.T) {
	t.Parallel()
	backend := s3mem.New()
	if err := backend.CreateBucket(bucket); err != nil {
		t.Fatal(err)
	}
	clock := gofakes3.FixedTimeSource(time.Now().Add(-48 * time.Hour))
	srv := httptest.NewServer(gofakes3.New(backend, gofakes3.WithLogger(gofakes3.DiscardLog()), gofakes3.WithTimeSource(clock), gofakes3.WithTimeSkewLimit(0)).Server())
	defer srv.Close()
	c := s3Client(t, srv.URL)
	begin := func(key string) {
		t.Helper()
		if _, err := c.NewMultipartUpload(t.Context(), bucket, key, minio.PutObjectOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	begin("pre/fix/old.blob")
	begin("another/old.blob")
	clock.Advance(48 * time.Hour)
	begin("pre/fix/young.blob")
	if err := connectS3(t, srv.URL).Tidy(t.Context(), time.Now().Add(-time.Hour)); err != nil {
		t.Fatal(err)
	}
	page, err := c.ListMultipartUploads(t.Context(), bucket, "", "", "", "", 1000)
	if err != nil {
		t.Fatal(err)
	}
	left := map[string]bool{}
	for _, u := range page.Uploads {
		left[u.Key] = true
	}
	if len(left) != 2 || !left["another/old.blob"] || !left["pre/fix/young.blob"] {
		t.Errorf("left: %v", left)
	}
}

func TestOpeningABucketSaysWhatIsWrong(t *testing.T) {
	t.Parallel()
	srv := httptest.NewServer(s3Server())
	defer srv.Close()
	cfg := blob.S3Config{Bucket: "another", Endpoint: srv.URL, AccessKey: "key", SecretKey: "secret"}
	if _, err := blob.OpenS3(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), "does not exist") || errors.Is(err, blob.ErrUnavailable) {
		t.Errorf("no bucket: %v", err)
	}
	denied := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusForbidden) }))
	defer denied.Close()
	cfg.Endpoint = denied.URL
	if _, err := blob.OpenS3(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), "AWS_SECRET_ACCESS_KEY") || errors.Is(err, blob.ErrUnavailable) {
		t.Errorf("denied: %v", err)
	}
	srv.Close()
	cfg.Endpoint = srv.URL
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	if _, err := blob.OpenS3(ctx, cfg); !errors.Is(err, blob.ErrUnavailable) {
		t.Errorf("away: %v, want ErrUnavailable", err)
	}
	cfg.Endpoint = "https://user:hidden@host"
	if _, err := blob.OpenS3(t.Context(), cfg); err == nil || strings.Contains(err.Error(), "hidden") {
		t.Errorf("a secret in the endpoint: %v", err)
	}
}

func TestStoresAreNamedByURL(t *testing.T) {
	srv := httptest.NewServer(s3Server())
	defer srv.Close()
	t.Setenv("AWS_ACCESS_KEY_ID", "key")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "secret")
	for name, text := range map[string]string{
		"a folder": "dir:" + t.TempDir(), "a folder as a URL": "dir://" + t.TempDir(), "a bucket": "s3://" + bucket + "/some/where?region=eu-1&endpoint=" + url.QueryEscape(srv.URL),
	} {
		s, err := blob.Open(t.Context(), blob.Config{URL: text})
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		put(t, s, "o", []byte("content"))
		if got, err := get(t, s, "o"); err != nil || string(got) != "content" {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
	if s3Objects(t, srv.URL)[0] != "some/where/o.blob" {
		t.Errorf("the bucket has %v", s3Objects(t, srv.URL))
	}
	for _, text := range []string{"dir:", "dir:relative", "s3://", "s3://b?region=r&endpint=e", "s3://key:hidden@b", "s3://b/%zz-hidden", "file:///x", "/a/path"} {
		if err := blob.CheckURL(text); err == nil || strings.Contains(err.Error(), "hidden") {
			t.Errorf("%q: %v", text, err)
		}
	}
	if err := blob.CheckURL(""); err != nil {
		t.Error(err)
	}
}

func s3Objects(t testing.TB, endpoint string) (keys []string) {
	t.Helper()
	for o := range s3Client(t, endpoint).ListObjectsIter(t.Context(), bucket, minio.ListObjectsOptions{Recursive: true}) {
		keys = append(keys, o.Key)
	}
	return keys
}
