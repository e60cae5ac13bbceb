package api_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"net/http/httptest"
	"net/textproto"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go"

	"github.com/millrace/millrace/api"
	"github.com/millrace/millrace/internal/blob"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
	"github.com/millrace/millrace/internal/testenv"
)

// oneLine is a batch's file of one line.
const oneLine = `{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{"model":"m","messages":[]}}` + "\n"

// part is a field of a form, or, with a filename, a file.
type part struct{ name, filename, content string }

const boundary = "the-boundary"

// form is a multipart body of these parts.
func form(parts ...part) string {
	var b bytes.Buffer
	w := multipart.NewWriter(&b)
	_ = w.SetBoundary(boundary)
	for _, p := range parts {
		h := textproto.MIMEHeader{"Content-Disposition": {fmt.Sprintf(`form-data; name=%q`, p.name)}}
		if p.filename != "" {
			h.Set("Content-Disposition", fmt.Sprintf(`form-data; name="%s"; filename="%s"`, p.name, p.filename))
			h.Set("Content-Type", "application/octet-stream")
		}
		out, _ := w.CreatePart(h)
		_, _ = io.WriteString(out, p.content)
	}
	_ = w.Close()
	return b.String()
}

const formType = "Content-Type: multipart/form-data; boundary=" + boundary

// upload sends a file and returns the answer.
func (e *env) upload(purpose, filename, content string, headers ...string) answer {
	e.t.Helper()
	return e.send("POST", "/v1/files", form(part{"purpose", "", purpose}, part{"file", filename, content}), append([]string{formType}, headers...)...)
}

// file uploads a file and returns its id.
func (e *env) file(purpose, content string, headers ...string) string {
	e.t.Helper()
	a := e.upload(purpose, "f.jsonl", content, headers...)
	if a.status != http.StatusOK {
		e.t.Fatalf("upload: %d %s", a.status, a.body)
	}
	return a.object(e.t)["id"].(string)
}

// filesOf are the tenant's files in the ledger.
func (e *env) filesOf(t job.Tenant) []ledger.File {
	e.t.Helper()
	files, _, err := e.ledger.Files(e.t.Context(), t, "", ledger.Page{Limit: 1000})
	if err != nil {
		e.t.Fatal(err)
	}
	return files
}

// wantNothing checks that neither rows nor objects are there.
func (e *env) wantNothing() {
	e.t.Helper()
	if files := e.filesOf(job.DefaultTenant); len(files) != 0 {
		e.t.Errorf("files are there: %+v", files)
	}
	if names := e.objects(); len(names) != 0 {
		e.t.Errorf("objects are there: %v", names)
	}
}

func TestFileComesBackAsUploaded(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	content := strings.Repeat(oneLine, 5000) // several pieces
	before := time.Now().Unix()
	a := e.upload("batch", "in put.jsonl", content)
	o := a.object(t)
	id, _ := o["id"].(string)
	created, _ := o["created_at"].(float64)
	if int64(created) < before-1 || int64(created) > time.Now().Unix()+1 {
		t.Errorf("created_at is %v", o["created_at"])
	}
	want := map[string]any{
		"id": id, "object": "file", "bytes": float64(len(content)), "created_at": created, "expires_at": nil, "filename": "in put.jsonl", "purpose": "batch", "status": "processed", "status_details": nil,
	}
	if diff := cmp.Diff(want, o); diff != "" || a.status != http.StatusOK || !strings.HasPrefix(id, "file-") {
		t.Errorf("%d, id %q: %s", a.status, id, diff)
	}
	if got := e.send("GET", "/v1/files/"+id, "").object(t); !cmp.Equal(o, got) {
		t.Errorf("got %v, want %v", got, o)
	}
	// Whatever is accepted, the bytes come.
	got := e.send("GET", "/v1/files/"+id+"/content", "", "Accept: application/binary")
	if got.status != http.StatusOK || string(got.body) != content {
		t.Errorf("content: %d, %d bytes", got.status, len(got.body))
	}
	sum := sha256.Sum256([]byte(content))
	etag := `"` + hex.EncodeToString(sum[:]) + `"`
	for name, value := range map[string]string{
		"Content-Length": fmt.Sprint(len(content)), "Content-Type": "application/octet-stream", "Content-Disposition": `attachment; filename="in put.jsonl"`, "Etag": etag,
	} {
		if got.header.Get(name) != value {
			t.Errorf("%s is %q, want %q", name, got.header.Get(name), value)
		}
	}
	if a := e.send("GET", "/v1/files/"+id+"/content", "", "If-None-Match: "+etag); a.status != http.StatusNotModified || len(a.body) != 0 {
		t.Errorf("known content: %d, %d bytes", a.status, len(a.body))
	}
	if a := e.send("HEAD", "/v1/files/"+id+"/content", ""); a.status != http.StatusOK || a.header.Get("Content-Length") != fmt.Sprint(len(content)) || len(a.body) != 0 {
		t.Errorf("head: %d, %v", a.status, a.header)
	}
	del := e.send("DELETE", "/v1/files/"+id, "")
	if diff := cmp.Diff(map[string]any{"id": id, "object": "file", "deleted": true}, del.object(t)); diff != "" || del.status != http.StatusOK {
		t.Errorf("%d %s", del.status, diff)
	}
	e.wantNothing()
	for _, r := range []string{"GET /v1/files/" + id, "GET /v1/files/" + id + "/content", "DELETE /v1/files/" + id} {
		method, path, _ := strings.Cut(r, " ")
		e.send(method, path, "").wantError(t, 404, job.CodeFileNotFound, "id")
	}
}

func TestPartsOfAnUploadMayComeInAnyOrder(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	file, purpose := part{"file", "x", oneLine}, part{"purpose", "", "batch"}
	anchor, seconds := part{"expires_after[anchor]", "", "created_at"}, part{"expires_after[seconds]", "", "3600"}
	for _, parts := range [][]part{{file, purpose}, {purpose, file}, {file, seconds, purpose, anchor}, {anchor, seconds, purpose, file}} {
		a := e.send("POST", "/v1/files", form(parts...), formType)
		if a.status != http.StatusOK {
			t.Errorf("%v: %d %s", parts, a.status, a.body)
			continue
		}
		o := a.object(t)
		at, has := o["expires_at"].(float64)
		if want := len(parts) == 4; has != want || has && at != o["created_at"].(float64)+3600 {
			t.Errorf("%v: expires_at is %v", parts, o["expires_at"])
		}
	}
}

func TestWrongUploadsAreRefusedAndLeaveNothing(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{MaxFile: 1 << 20})
	file, purpose := part{"file", "x", oneLine}, part{"purpose", "", "batch"}
	expiry := func(anchor, seconds string) string {
		return form(purpose, file, part{"expires_after[anchor]", "", anchor}, part{"expires_after[seconds]", "", seconds})
	}
	whole := form(purpose, file)
	for name, test := range map[string]struct {
		body        string
		contentType string
		status      int
		code        job.Code
		param       string
	}{
		"no file":                   {form(purpose), "", 400, job.CodeMissingParameter, "file"},
		"no purpose":                {form(file), "", 400, job.CodeMissingParameter, "purpose"},
		"no part":                   {"--" + boundary + "--\r\n", "", 400, job.CodeMissingParameter, "file"},
		"two files":                 {form(purpose, file, file), "", 400, job.CodeInvalidValue, "file"},
		"two purposes":              {form(purpose, file, purpose), "", 400, job.CodeInvalidValue, "purpose"},
		"unknown purpose":           {form(part{"purpose", "", "fun"}, file), "", 400, job.CodeInvalidValue, "purpose"},
		"unknown purpose at last":   {form(file, part{"purpose", "", "fun"}), "", 400, job.CodeInvalidValue, "purpose"},
		"purpose of our own":        {form(part{"purpose", "", "batch_output"}, file), "", 400, job.CodeInvalidValue, "purpose"},
		"endless purpose":           {form(part{"purpose", "", strings.Repeat("x", 5000)}, file), "", 400, job.CodeInvalidValue, "purpose"},
		"unknown field":             {form(purpose, file, part{"model", "", "m"}), "", 400, job.CodeUnsupportedParameter, "model"},
		"wrong anchor":              {expiry("now", "3600"), "", 400, job.CodeInvalidValue, "expires_after[anchor]"},
		"expiry too soon":           {expiry("created_at", "3599"), "", 400, job.CodeInvalidValue, "expires_after[seconds]"},
		"expiry too late":           {expiry("created_at", "2592001"), "", 400, job.CodeInvalidValue, "expires_after[seconds]"},
		"expiry no number":          {expiry("created_at", "1e4"), "", 400, job.CodeInvalidValue, "expires_after[seconds]"},
		"expiry without anchor":     {form(purpose, file, part{"expires_after[seconds]", "", "3600"}), "", 400, job.CodeMissingParameter, "expires_after[anchor]"},
		"expiry without seconds":    {form(purpose, file, part{"expires_after[anchor]", "", "created_at"}), "", 400, job.CodeMissingParameter, "expires_after[seconds]"},
		"json":                      {"{}", "application/json", 415, job.CodeUnsupportedMedia, ""},
		"no boundary":               {whole, "multipart/form-data", 415, job.CodeUnsupportedMedia, ""},
		"another boundary":          {whole, "multipart/form-data; boundary=other", 400, job.CodeInvalidValue, ""},
		"cut in the file":           {whole[:len(whole)-len(oneLine)], "", 400, job.CodeInvalidValue, ""},
		"cut before the last brace": {whole[:len(whole)-4], "", 400, job.CodeInvalidValue, ""},
		"one byte too many":         {form(purpose, part{"file", "x", "{}\n" + strings.Repeat("x", 1<<20-2)}), "", 413, job.CodeRequestTooLarge, "file"},
		"far too many":              {form(purpose, part{"file", "x", "{}\n" + strings.Repeat("x", 3<<20)}), "", 413, job.CodeRequestTooLarge, "file"},
		"empty":                     {form(purpose, part{"file", "x", ""}), "", 400, job.CodeEmptyFile, "file"},
		"prose":                     {form(purpose, part{"file", "x.txt", "Dear model,\nplease"}), "", 400, job.CodeInvalidJSONLine, "file"},
		"pretty JSON":               {form(part{"file", "x", "{\n \"custom_id\": 1\n}\n"}, purpose), "", 400, job.CodeInvalidJSONLine, "file"},
		"a long line of no JSON":    {form(purpose, part{"file", "x", `{"a":` + strings.Repeat("x", 700<<10)}), "", 400, job.CodeInvalidJSONLine, "file"},
		"a long line of JSON first": {form(purpose, part{"file", "x", `{"a":"` + strings.Repeat("x", 400<<10)}), "", 400, job.CodeInvalidJSONLine, "file"},
		"a long line never closed":  {form(part{"file", "x", `{"a":"` + strings.Repeat("x", 400<<10) + "\n" + `"}`}, purpose), "", 400, job.CodeInvalidJSONLine, "file"},
		"a long line of two values": {form(purpose, part{"file", "x", `{"a":1} {` + strings.Repeat(" ", 700<<10)}), "", 400, job.CodeInvalidJSONLine, "file"},
	} {
		t.Run(name, func(t *testing.T) {
			contentType := formType
			if test.contentType != "" {
				contentType = "Content-Type: " + test.contentType
			}
			e.send("POST", "/v1/files", test.body, contentType).wantError(t, test.status, test.code, test.param)
			// Without a Content-Length it is the same.
			req, err := http.NewRequestWithContext(t.Context(), "POST", e.url+"/v1/files", io.MultiReader(strings.NewReader(test.body)))
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("Content-Type", strings.TrimPrefix(contentType, "Content-Type: "))
			resp, err := client().Do(req)
			if err != nil {
				t.Fatal(err)
			}
			answerOf(t, resp).wantError(t, test.status, test.code, test.param)
			e.wantNothing()
		})
	}
	e.send("POST", "/v1/files", whole, formType, "Content-Encoding: gzip").wantError(t, 415, job.CodeUnsupportedMedia, "")
}

func TestRefusedLineIsNamed(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	for content, line := range map[string]string{"nonsense\n": "Line 1 ", "\r\n\n  \nnonsense": "Line 4 ", "\uFEFF\n\n{]}\n": "Line 3 "} {
		a := e.upload("batch", "x", content)
		a.wantError(t, 400, job.CodeInvalidJSONLine, "file")
		if !strings.Contains(string(a.body), line) {
			t.Errorf("%q: %s", content, a.body)
		}
	}
}

func TestFilesThatLookOddAreTaken(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{MaxFile: 1 << 20})
	for name, content := range map[string]string{
		"a byte order mark":  "\uFEFF" + oneLine,
		"CRLF":               strings.ReplaceAll(oneLine, "\n", "\r\n"),
		"no newline":         strings.TrimSuffix(oneLine, "\n"),
		"blank lines first":  "\n \n" + oneLine,
		"blanks far":         strings.Repeat(" ", 200<<10) + oneLine,
		"a long line":        `{"a":"` + strings.Repeat("x", 200<<10) + `"}` + "\n",
		"blanks behind":      `{"a":1}` + strings.Repeat(" ", 200<<10),
		"a bad second line":  oneLine + "nonsense",
		"as large as may be": "{}\n" + strings.Repeat("x", 1<<20-3),
	} {
		if a := e.upload("batch", "x", content); a.status != http.StatusOK {
			t.Errorf("%s: %d %s", name, a.status, a.body)
		} else if got := e.send("GET", "/v1/files/"+a.object(t)["id"].(string)+"/content", ""); string(got.body) != content {
			t.Errorf("%s: other bytes came back", name)
		}
	}
	// Only a batch's file is looked at.
	for _, purpose := range []string{"user_data", "assistants", "fine-tune", "vision", "evals"} {
		for _, content := range []string{"prose", ""} {
			if a := e.upload(purpose, "x", content); a.status != http.StatusOK {
				t.Errorf("%s: %d %s", purpose, a.status, a.body)
			}
		}
	}
}

func TestFilenamesAreMadeSafe(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	for given, want := range map[string]string{
		"a.jsonl": "a.jsonl", "../../etc/passwd": "passwd", `C:\\Users\\me\\in.jsonl`: "in.jsonl", "..": "file", "/": "file", "a\u0085b": "ab", "ü 🎉.txt": "ü 🎉.txt", "a\u202Etxt.exe": "atxt.exe",
		strings.Repeat("ü", 300): strings.Repeat("ü", 127), "": "file", "bad\xffutf8": "bad\uFFFDutf8",
	} {
		a := e.send("POST", "/v1/files", form(part{"purpose", "", "batch"}, part{"file", given, oneLine}), formType)
		if got := a.object(t)["filename"]; got != want {
			t.Errorf("%q became %q, want %q", given, got, want)
		}
		// The name comes back with the content.
		id, _ := a.object(t)["id"].(string)
		content := e.send("GET", "/v1/files/"+id+"/content", "")
		if d := content.header.Get("Content-Disposition"); !strings.HasPrefix(d, "attachment; filename") {
			t.Errorf("%q: Content-Disposition is %q", given, d)
		}
	}
}

// slowBlobs lets a test see and change what the object store does.
type slowBlobs struct {
	blob.Store
	put chan error // gets the end of each Put, if not nil
	get func(r io.ReadCloser, err error) (io.ReadCloser, error)
}

func (b *slowBlobs) Put(ctx context.Context, name string, r io.Reader) (int64, error) {
	n, err := b.Store.Put(ctx, name, r)
	if b.put != nil {
		b.put <- err
	}
	return n, err
}

func (b *slowBlobs) Get(ctx context.Context, name string) (io.ReadCloser, error) {
	r, err := b.Store.Get(ctx, name)
	if b.get != nil {
		return b.get(r, err)
	}
	return r, err
}

// newFilesEnv is an env whose object store a test stands before.
func newFilesEnv(t *testing.T, cfg api.Config) (*env, *slowBlobs) {
	t.Helper()
	e := newEnv(t, cfg)
	e.stopAPI()
	b := &slowBlobs{Store: e.blobs}
	e.deps.Blobs = b
	e.startAPI(cfg)
	return e, b
}

func TestBrokenUploadLeavesNothing(t *testing.T) {
	t.Parallel()
	e, b := newFilesEnv(t, api.Config{})
	b.put = make(chan error, 1)
	head := "POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=" + boundary + "\r\n"
	body := form(part{"purpose", "", "batch"}, part{"file", "x", strings.Repeat(oneLine, 10_000)})
	for name, sent := range map[string]string{
		"with a length": head + fmt.Sprintf("Content-Length: %d\r\n\r\n", len(body)) + body[:len(body)/2],
		"in chunks":     head + "Transfer-Encoding: chunked\r\n\r\n" + fmt.Sprintf("%x\r\n", len(body)) + body[:len(body)/2],
	} {
		c := e.dial(t)
		if _, err := io.WriteString(c, sent); err != nil {
			t.Fatal(err)
		}
		_ = c.Close()
		if err := <-b.put; err == nil {
			t.Errorf("%s: it was stored", name)
		}
		e.wantNothing()
	}
}

// TestUploadsThatBreakOff: what a client is told depends on why its body ended, wherever in the form that is. The server reports its failure to read as the client's leave.
func TestUploadsThatBreakOff(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	whole := form(part{"file", "x", oneLine}, part{"purpose", "", "batch"})
	for name, tt := range map[string]struct {
		at   string // what the last bytes that come stand before
		gone bool   // the client, as far as the server can tell
		err  error
		want int
	}{
		"it stalls before the file":        {`name="file"`, true, os.ErrDeadlineExceeded, http.StatusRequestTimeout},
		"it stalls in the file":            {`"body":`, true, os.ErrDeadlineExceeded, http.StatusRequestTimeout},
		"it stalls behind the file":        {`name="purpose"`, true, os.ErrDeadlineExceeded, http.StatusRequestTimeout},
		"it stalls in the purpose":         {"tch\r\n", true, os.ErrDeadlineExceeded, http.StatusRequestTimeout},
		"the client leaves in the file":    {`"body":`, true, io.ErrUnexpectedEOF, 499},
		"the client leaves in the purpose": {"tch\r\n", true, io.ErrUnexpectedEOF, 499},
		"its chunks are off":               {`"body":`, false, errors.New("malformed chunked encoding"), http.StatusBadRequest},
		"it is too long":                   {`"body":`, false, &http.MaxBytesError{Limit: 1}, http.StatusRequestEntityTooLarge},
		"it is no whole form":              {`"body":`, false, io.EOF, http.StatusBadRequest},
	} {
		ctx, leave := context.WithCancel(t.Context())
		fails := readerFunc(func([]byte) (int, error) {
			if tt.gone {
				leave()
			}
			return 0, tt.err
		})
		rec := httptest.NewRecorder()
		before, _, _ := strings.Cut(whole, tt.at)
		req := httptest.NewRequestWithContext(ctx, http.MethodPost, "/v1/files", io.MultiReader(strings.NewReader(before), fails))
		req.Header.Set("Content-Type", strings.TrimPrefix(formType, "Content-Type: "))
		e.server.Handler().ServeHTTP(rec, req)
		leave()
		if rec.Code != tt.want {
			t.Errorf("%s: %d %s", name, rec.Code, rec.Body)
		}
		e.wantNothing()
	}
}

// TestUploadOverTheLimitIsNotReadOn: an endless body is answered, and its client does not get rid of it all.
func TestUploadOverTheLimitIsNotReadOn(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{MaxFile: 1 << 20})
	c := e.dial(t)
	_, err := io.WriteString(c, "POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary="+boundary+"\r\nTransfer-Encoding: chunked\r\n\r\n")
	if err != nil {
		t.Fatal(err)
	}
	begin := form(part{"purpose", "", "batch"}, part{"file", "x", oneLine})
	begin = begin[:strings.LastIndex(begin, "\r\n--")]
	var sent atomic.Int64
	var wg sync.WaitGroup
	wg.Go(func() {
		piece := begin
		for {
			if _, err := fmt.Fprintf(c, "%x\r\n%s\r\n", len(piece), piece); err != nil {
				return
			}
			sent.Add(int64(len(piece)))
			piece = strings.Repeat("x", 64<<10)
		}
	})
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusRequestEntityTooLarge || !resp.Close {
		t.Errorf("%d, the connection stays: %v", resp.StatusCode, !resp.Close)
	}
	wg.Wait() // the server closes the connection: the client's write fails
	t.Logf("%d KiB were sent", sent.Load()>>10)
	e.wantNothing()
}

func TestUploadToAStoreThatIsAway(t *testing.T) {
	t.Parallel()
	e, b := newFilesEnv(t, api.Config{})
	b.Store = brokenBlobs{b.Store}
	e.upload("batch", "x", oneLine).wantError(t, 503, job.CodeUnavailable, "")
	b.Store = e.blobs
	e.wantNothing()
}

type brokenBlobs struct{ blob.Store }

func (brokenBlobs) Put(context.Context, string, io.Reader) (int64, error) {
	return 0, fmt.Errorf("storing: %w", blob.ErrUnavailable)
}

func TestDamagedFileNeverLooksWhole(t *testing.T) {
	t.Parallel()
	e, b := newFilesEnv(t, api.Config{})
	small, large := e.file("user_data", "short"), e.file("user_data", strings.Repeat("0123456789abcdef", 64<<10))
	url := func(id string) string { return "/v1/files/" + id + "/content" }
	ends := func(n int64, end error) func(io.ReadCloser, error) (io.ReadCloser, error) {
		return func(r io.ReadCloser, err error) (io.ReadCloser, error) {
			if err != nil {
				return nil, err
			}
			return struct {
				io.Reader
				io.Closer
			}{io.MultiReader(io.LimitReader(r, n), errReader{end}), r}, nil
		}
	}
	// Known before the first byte: an error object.
	b.get = ends(5, blob.ErrCorrupt)
	e.send("GET", url(small), "").wantError(t, 502, job.CodeInternal, "")
	b.get = ends(0, blob.ErrUnavailable)
	e.send("GET", url(large), "").wantError(t, 503, job.CodeUnavailable, "")
	b.get = func(r io.ReadCloser, _ error) (io.ReadCloser, error) {
		_ = r.Close()
		return nil, blob.ErrNotFound
	}
	e.send("GET", url(large), "").wantError(t, 502, job.CodeInternal, "")
	// One copy of several may be damaged.
	var looks atomic.Int32
	b.get = func(r io.ReadCloser, err error) (io.ReadCloser, error) {
		if looks.Add(1) == 1 {
			return ends(5, blob.ErrCorrupt)(r, err)
		}
		return r, err
	}
	if a := e.send("GET", url(small), ""); a.status != http.StatusOK || string(a.body) != "short" {
		t.Errorf("from another copy: %d %q", a.status, a.body)
	}
	// Known later: the connection breaks, even where only the digest is wrong and all bytes are there.
	for name, get := range map[string]func(io.ReadCloser, error) (io.ReadCloser, error){
		"the digest": ends(1<<20, blob.ErrCorrupt), "in the middle": ends(300<<10, blob.ErrUnavailable), "too short": ends(1<<20-1, io.EOF), "cut at a piece": ends(256<<10, io.EOF),
	} {
		b.get = get
		resp := e.open(t.Context(), "GET", url(large), "")
		raw, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if resp.StatusCode != http.StatusOK || err == nil {
			t.Errorf("%s: %d, %d bytes, %v: it looks whole", name, resp.StatusCode, len(raw), err)
		}
	}
	b.get = nil
	if a := e.send("GET", url(large), ""); len(a.body) != 1<<20 {
		t.Errorf("whole again: %d bytes", len(a.body))
	}
}

type errReader struct{ err error }

func (r errReader) Read([]byte) (int, error) { return 0, r.err }

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

// tenant makes a tenant and returns the header of a key of its own.
func (e *env) tenant(id job.Tenant, limits ledger.Limits) string {
	e.t.Helper()
	if _, err := e.ledger.CreateTenant(e.t.Context(), ledger.Tenant{ID: id, Name: string(id), Weight: 100, Limits: limits}); err != nil {
		e.t.Fatal(err)
	}
	secret, _, err := e.ledger.CreateKey(e.t.Context(), ledger.Key{Tenant: id, Name: "k", Scopes: []ledger.Scope{ledger.Inference, ledger.Batches}})
	if err != nil {
		e.t.Fatal(err)
	}
	return "Authorization: Bearer " + secret
}

func TestFilesOfOthersAndExpiredFilesAreNotThere(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	mine, theirs := e.tenant("mine", ledger.Limits{}), e.tenant("theirs", ledger.Limits{})
	id := e.file("batch", oneLine, mine, "Idempotency-Key: k")
	old := e.file("batch", oneLine, theirs, "Idempotency-Key: k")
	if id == old {
		t.Error("they share an idempotency key")
	}
	row, err := e.ledger.File(t.Context(), "theirs", old)
	if err != nil {
		t.Fatal(err)
	}
	row.ID, row.Expires = "file-over", row.Created+1
	if err := e.ledger.InsertFile(t.Context(), *row, 0); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the file's time is over", func() bool { return e.results.Now() > row.Expires })
	for _, id := range []string{id, "file-over", "file-none", "file-", "file-%00", "job_1", "file-%2e%2e", "file-" + strings.Repeat("x", 300)} {
		for _, r := range []string{"GET /v1/files/" + id, "GET /v1/files/" + id + "/content", "DELETE /v1/files/" + id} {
			method, path, _ := strings.Cut(r, " ")
			e.send(method, path, "", theirs).wantError(t, 404, job.CodeFileNotFound, "id")
		}
	}
	for key, want := range map[string][]string{mine: {id}, theirs: {old}} {
		if got := e.list(t, "", key); !slices.Equal(got.ids, want) || got.more {
			t.Errorf("listed %v, want %v", got, want)
		}
	}
	e.send("GET", "/v1/files?after="+id, "", theirs).wantError(t, 400, job.CodeInvalidValue, "after")
	if a := e.send("GET", "/v1/files/"+id, "", mine); a.status != http.StatusOK {
		t.Errorf("its owner: %d", a.status)
	}
}

// listing is a page of files.
type listing struct {
	ids         []string
	first, last string
	more        bool
}

func (e *env) list(t testing.TB, query string, headers ...string) listing {
	t.Helper()
	a := e.send("GET", "/v1/files"+query, "", headers...)
	o := a.object(t)
	if a.status != http.StatusOK || o["object"] != "list" {
		t.Fatalf("%s: %d %s", query, a.status, a.body)
	}
	var l listing
	for _, f := range o["data"].([]any) {
		l.ids = append(l.ids, f.(map[string]any)["id"].(string))
	}
	for key, to := range map[string]*string{"first_id": &l.first, "last_id": &l.last} {
		v, ok := o[key]
		if !ok {
			t.Errorf("there is no %s", key)
		}
		*to, _ = v.(string)
	}
	l.more = o["has_more"].(bool)
	if len(l.ids) > 0 && (l.first != l.ids[0] || l.last != l.ids[len(l.ids)-1]) || len(l.ids) == 0 && (l.more || l.first != "" || l.last != "") {
		t.Errorf("%s: %+v", query, l)
	}
	return l
}

func TestFilesAreListedInPages(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	if l := e.list(t, ""); len(l.ids) != 0 {
		t.Errorf("listed %v", l)
	}
	// Many files of the same time, and between them some whose time is over.
	now := e.results.Now()
	var newest []string
	for i := range 30 {
		f := ledger.File{
			ID: fmt.Sprintf("file-%02d", i), Tenant: job.DefaultTenant, Purpose: []string{"batch", "user_data"}[i%2], Filename: "x", Blob: fmt.Sprintf("file-%02d", i), Created: now - 5000 + job.Millis(i/10),
		}
		if i%5 == 2 || i < 3 {
			f.Expires = now - 1
		} else {
			newest = append(newest, f.ID)
		}
		if err := e.ledger.InsertFile(t.Context(), f, 0); err != nil {
			t.Fatal(err)
		}
	}
	oldest := slices.Clone(newest)
	slices.Reverse(newest)
	pages := func(query string) (ids []string) {
		t.Helper()
		after := ""
		for {
			l := e.list(t, "?"+query+after)
			ids = append(ids, l.ids...)
			if !l.more {
				return ids
			}
			after = "&after=" + l.last
		}
	}
	only := func(ids []string, odd int) (some []string) {
		for _, id := range ids {
			if int(id[len(id)-1]-'0')%2 == odd {
				some = append(some, id)
			}
		}
		return some
	}
	for query, want := range map[string][]string{
		"": newest, "limit=1": newest, "limit=7&order=desc": newest, "limit=10000": newest, "order=asc": oldest, "order=asc&limit=2": oldest,
		"purpose=batch&limit=3": only(newest, 0), "purpose=user_data&order=asc&limit=4": only(oldest, 1), "purpose=vision": nil, "purpose=fine-tune-results": nil,
	} {
		if diff := cmp.Diff(want, pages(query)); diff != "" {
			t.Errorf("%q: %s", query, diff)
		}
	}
	// The last page that is full says that it is the last.
	if l := e.list(t, fmt.Sprintf("?limit=%d", len(newest))); l.more {
		t.Error("a page with all files says that there are more")
	}
	for query, param := range map[string]string{
		"limit=0": "limit", "limit=10001": "limit", "limit=x": "limit", "limit=": "limit", "limit=-1": "limit", "order=up": "order", "after=file-none": "after", "after=x%00": "after", "purpose=%00": "purpose",
	} {
		e.send("GET", "/v1/files?"+query, "").wantError(t, 400, job.CodeInvalidValue, param)
	}
}

func TestFileThatABatchReadsIsNotDeleted(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	id := e.file("batch", oneLine)
	now := e.results.Now()
	b := ledger.Batch{
		ID: job.NewName("batch_", now.Time()), Tenant: job.DefaultTenant, Endpoint: job.ChatCompletions, InputFile: id, Window: "24h", Status: ledger.Validating, Created: now, Expires: now + 86_400_000,
	}
	if err := e.ledger.CreateBatch(t.Context(), b); err != nil {
		t.Fatal(err)
	}
	a := e.send("DELETE", "/v1/files/"+id, "")
	a.wantError(t, 409, job.CodeFileInUse, "id")
	if a.header.Get("X-Should-Retry") != "false" {
		t.Error("clients would try again")
	}
	if err := e.ledger.Lead(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	if _, err := e.ledger.RejectBatch(t.Context(), 1, b.ID, now, nil); err != nil {
		t.Fatal(err)
	}
	if a := e.send("DELETE", "/v1/files/"+id, ""); a.status != http.StatusOK {
		t.Errorf("when the batch has ended: %d %s", a.status, a.body)
	}
	e.wantNothing()
}

func TestFilesOfATenantHaveALimit(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	key := e.tenant("small", ledger.Limits{FileBytes: 1000})
	first := e.file("user_data", strings.Repeat("x", 600), key)
	refused := func(content string, headers ...string) {
		t.Helper()
		a := e.upload("user_data", "x", content, append(headers, key)...)
		a.wantError(t, 429, job.CodeFileBytes, "")
		if a.header.Get("X-Should-Retry") != "false" {
			t.Error("clients would try again")
		}
		if names := e.objects(); len(names) != 1 {
			t.Errorf("objects: %v", names)
		}
	}
	refused(strings.Repeat("x", 401))
	refused(strings.Repeat("x", 3<<20))
	refused(strings.Repeat("x", 401), "Idempotency-Key: k")
	refused(strings.Repeat("x", 401), "X-Stainless-Retry-Count: 1")
	e.send("DELETE", "/v1/files/"+first, "", key)
	full := e.file("user_data", strings.Repeat("y", 1000), key, "X-Stainless-Retry-Count: 0")
	refused("z")
	// A retry of what has filled the room finds it.
	if a := e.upload("user_data", "f.jsonl", strings.Repeat("y", 1000), key, "X-Stainless-Retry-Count: 1"); a.status != http.StatusOK || a.object(t)["id"] != full {
		t.Errorf("%d %s, want %s", a.status, a.body, full)
	}
}

func TestRetriedUploadMakesOneFile(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	count := func(want int) {
		t.Helper()
		if files, names := e.filesOf(job.DefaultTenant), e.objects(); len(files) != want || len(names) != want {
			t.Errorf("%d files and %d objects, want %d", len(files), len(names), want)
		}
	}
	// With a key of the client's own.
	id := e.file("batch", oneLine, "Idempotency-Key: k")
	if again := e.file("batch", oneLine, "Idempotency-Key: k"); again != id {
		t.Errorf("the same upload again is %s, want %s", again, id)
	}
	count(1)
	for name, a := range map[string]answer{
		"other content": e.upload("batch", "f.jsonl", oneLine+oneLine, "Idempotency-Key: k"),
		"another name":  e.upload("batch", "g.jsonl", oneLine, "Idempotency-Key: k"),
		"another use":   e.upload("evals", "f.jsonl", oneLine, "Idempotency-Key: k"),
	} {
		a.wantError(t, 409, job.CodeIdempotencyConflict, "Idempotency-Key")
		if a.header.Get("X-Should-Retry") != "false" {
			t.Errorf("%s: clients would try again", name)
		}
	}
	count(1)
	if other := e.file("batch", oneLine, "Idempotency-Key: k2"); other == id {
		t.Error("another key has the same file")
	}
	e.send("POST", "/v1/files", form(part{"purpose", "", "batch"}, part{"file", "x", oneLine}), formType, "Idempotency-Key: "+strings.Repeat("k", 256)).wantError(t, 400, job.CodeInvalidValue, "Idempotency-Key")
	count(2)
	// Without one: a retry repeats, the same meant anew does not, and retries then repeat the newer one.
	first := e.file("batch", oneLine, "X-Stainless-Retry-Count: 0")
	if again := e.file("batch", oneLine, "X-Stainless-Retry-Count: 1"); again != first {
		t.Errorf("a retry is %s, want %s", again, first)
	}
	second := e.file("batch", oneLine, "X-Stainless-Retry-Count: 0")
	if second == first {
		t.Error("a second upload is the first")
	}
	if again := e.file("batch", oneLine, "X-Stainless-Retry-Count: 2"); again != second {
		t.Errorf("a retry is %s, want %s", again, second)
	}
	plain := e.file("batch", oneLine)
	if plain == first || plain == second {
		t.Error("an upload that counts no retries is an earlier one")
	}
	if again := e.file("batch", oneLine, "X-Stainless-Retry-Count: 1"); again != plain {
		t.Errorf("the retry of an upload that counted none is %s, want %s", again, plain)
	}
	count(5)
	// A retry of what was never stored makes it.
	if id := e.file("evals", "fresh", "X-Stainless-Retry-Count: 1"); id == "" {
		t.Error("nothing was made")
	}
	count(6)
}

// What is JSON, or blank, is stored: the batch that reads it tells what is wrong, and in which line.
func TestUploadIsRefusedForItsFirstLineOnlyIfThatIsNoJSON(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	for name, content := range map[string]string{
		"an array": "[{}]\n", "a number": "1", "a text": `"a"` + "\r\n", "null": "\n\nnull\n", "a long array": "[" + strings.Repeat(`"x",`, 50<<10) + "1]\n",
		"blanks": "  \r\n\t\n\n", "a byte order mark alone": "\uFEFF\n",
	} {
		if a := e.upload("batch", "f.jsonl", content); a.status != http.StatusOK || a.object(t)["bytes"] != float64(len(content)) {
			t.Errorf("%s: %d %s", name, a.status, a.body)
		}
	}
}

// TestUploadThatCrashedHalfWayIsTakenOver: the key was bound, and the row not written.
func TestUploadThatCrashedHalfWayIsTakenOver(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	id := e.file("batch", oneLine, "Idempotency-Key: k")
	f, err := e.ledger.DeleteFile(t.Context(), job.DefaultTenant, id) // as if it had never been written
	if err != nil {
		t.Fatal(err)
	}
	if again := e.file("batch", oneLine, "Idempotency-Key: k"); again != id {
		t.Errorf("the retry made %s, want %s", again, id)
	}
	if a := e.send("GET", "/v1/files/"+id+"/content", ""); string(a.body) != oneLine {
		t.Errorf("content: %d %q", a.status, a.body)
	}
	if now := e.filesOf(job.DefaultTenant); len(now) != 1 || now[0].Blob == f.Blob {
		t.Errorf("files: %+v", now)
	}
	// The same, by several at once: one file, and no object but its.
	e.send("DELETE", "/v1/files/"+id, "")
	if err := e.blobs.Delete(t.Context(), f.Blob); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if again := e.file("batch", oneLine, "Idempotency-Key: k"); again != id {
				t.Errorf("made %s, want %s", again, id)
			}
		})
	}
	wg.Wait()
	if files, names := e.filesOf(job.DefaultTenant), e.objects(); len(files) != 1 || len(names) != 1 || files[0].Blob != names[0] {
		t.Errorf("files %+v, objects %v", files, names)
	}
}

// TestBigFilesTakeNoMemory: five clients upload and download at once, and a sixth does not read what it has asked for. The object store's server, which keeps much in memory, is in a process of its own. It runs alone: tests in parallel begin
// when it has ended.
func TestBigFilesTakeNoMemory(t *testing.T) {
	const (
		many  = 5
		size  = 40 << 20
		bound = 64 << 20
	)
	nc, err := nats.Connect(testenv.NATSApart(t))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	blobs, err := blob.OpenJetStream(t.Context(), nc, 1)
	if err != nil {
		t.Fatal(err)
	}
	e := newEnv(t, api.Config{})
	e.stopAPI()
	e.deps.Blobs = blobs
	e.startAPI(api.Config{})
	stalled := bigUpload(t, e, size)
	resp := e.open(t.Context(), "GET", "/v1/files/"+stalled.id+"/content", "")
	defer resp.Body.Close() // nothing of it is read

	runtime.GC()
	peak := peakHeap()
	var wg sync.WaitGroup
	for range many {
		wg.Go(func() {
			up := bigUpload(t, e, size)
			resp := e.open(t.Context(), "GET", "/v1/files/"+up.id+"/content", "")
			defer resp.Body.Close()
			got := sha256.New()
			n, err := io.Copy(got, resp.Body)
			if err != nil || n != size || resp.ContentLength != size || hex.EncodeToString(got.Sum(nil)) != up.digest {
				t.Errorf("downloaded %d of %d bytes, %v", n, resp.ContentLength, err)
			}
		})
	}
	wg.Wait()
	grown := peak()
	t.Logf("the heap grew by %d MiB", grown>>20)
	if grown > bound {
		t.Errorf("the heap grew by %d MiB, more than %d", grown>>20, bound>>20)
	}
}

type bigFile struct{ id, digest string }

// bigUpload uploads random bytes, which are made as they are sent.
func bigUpload(t testing.TB, e *env, size int64) bigFile {
	r, w := io.Pipe()
	form := multipart.NewWriter(w)
	sum := sha256.New()
	go func() {
		_ = form.WriteField("purpose", "user_data")
		out, err := form.CreateFormFile("file", "big.bin")
		if err == nil {
			_, err = io.Copy(io.MultiWriter(out, sum), io.LimitReader(rand.Reader, size))
		}
		_ = w.CloseWithError(errors.Join(err, form.Close()))
	}()
	req, err := http.NewRequestWithContext(t.Context(), "POST", e.url+"/v1/files", r)
	if err != nil {
		t.Error(err)
		return bigFile{}
	}
	req.Header.Set("Content-Type", form.FormDataContentType())
	resp, err := client().Do(req)
	if err != nil {
		t.Error(err)
		return bigFile{}
	}
	defer resp.Body.Close()
	var o struct {
		ID    string `json:"id"`
		Bytes int64  `json:"bytes"`
	}
	if err := json.NewDecoder(resp.Body).Decode(&o); err != nil || o.Bytes != size {
		t.Errorf("uploaded %d bytes, %v", o.Bytes, err)
	}
	return bigFile{o.ID, hex.EncodeToString(sum.Sum(nil))}
}

// peakHeap watches the heap; the returned function ends that, and tells by how many bytes it grew at most.
func peakHeap() func() int64 {
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
