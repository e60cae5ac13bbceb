package api

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/labstack/echo/v4"

	"github.com/millrace/millrace/internal/blob"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
)

// fileObject is a file as clients see it.
type fileObject struct {
	ID            string  `json:"id"`
	Object        string  `json:"object"`
	Bytes         int64   `json:"bytes"`
	CreatedAt     int64   `json:"created_at"`
	ExpiresAt     *int64  `json:"expires_at"`
	Filename      string  `json:"filename"`
	Purpose       string  `json:"purpose"`
	Status        string  `json:"status"` // always processed: other words make clients wait for it
	StatusDetails *string `json:"status_details"`
}

func newFileObject(f *ledger.File) fileObject {
	return fileObject{
		ID: f.ID, Object: "file", Bytes: f.Bytes, CreatedAt: int64(f.Created) / 1000, ExpiresAt: wholeSeconds(f.Expires), Filename: f.Filename, Purpose: f.Purpose, Status: "processed",
	}
}

// purposeBatch is the purpose of a batch's input, whose content is looked at.
const purposeBatch = "batch"

// purposes are those that an upload may have. Only batch means something here; the rest is kept.
var purposes = []string{purposeBatch, "user_data", "assistants", "fine-tune", "vision", "evals"}

const (
	filesRoute = "/v1/files"
	maxFiles   = 10_000 // of a page
	// maxForm bounds what an upload's request may hold beside the file, maxField the value of one field.
	maxForm  = 1 << 20
	maxField = 1 << 10
	// maxFilename bounds a file's name in bytes.
	maxFilename = 255
	// uploadTimeout bounds a whole upload. An object that belongs to no file is swept when it is far older.
	uploadTimeout = time.Hour
)

// fileForm is an upload as far as it has been read.
type fileForm struct {
	id       string // of the file that it becomes, and of its blob
	purpose  string
	lifetime int64 // seconds, 0 for ever
	name     string

	stored bool // the blob is there
	bytes  int64
	digest string
	first  firstLine
	given  []string // names of the parts
}

// createFile answers POST /v1/files. The file goes straight into the object store while it is read; nothing else holds more than a piece of it.
//
// The order of the writes, and what a crash after each leaves:
//
//  1. the object, which becomes visible when all of it is there: an object without a file, which is swept.
//  2. the idempotency key, bound to the file's id: a retry takes the id over.
//  3. the file's row. From here on the file exists; a retry with the same key finds it.
func (s *Server) createFile(c echo.Context) error {
	ctx, id := c.Request().Context(), identityOf(c)
	d, err := retryOf(c.Request().Header)
	if err != nil {
		return err
	}
	if d.fresh() { // what may repeat an earlier upload is charged once it is known not to
		if err := s.allow(ctx, id, 0); err != nil {
			return err
		}
	}
	room, err := s.fileRoom(ctx, &id.Tenant, d)
	if err != nil {
		return err
	}
	form, err := s.readForm(c, room)
	if form != nil && form.stored {
		kept := false
		defer func() {
			if !kept {
				s.dropBlob(context.WithoutCancel(ctx), form.id)
			}
		}()
		if err == nil && ctx.Err() != nil { // the client gave up while it waited, and its retry may be on its way
			err = context.Canceled
		}
		if err == nil {
			var f *ledger.File
			f, kept, err = s.insertFile(context.WithoutCancel(ctx), id, form, d)
			if err == nil {
				return writeJSON(c, http.StatusOK, newFileObject(f))
			}
		}
	}
	return err
}

// fileRoom is how many bytes the tenant's files may take yet, -1 for no bound. It is asked before an upload, so that one that cannot end well is refused at its beginning; but one that may repeat an earlier upload, which has taken its room,
// is judged when its row is added.
func (s *Server) fileRoom(ctx context.Context, t *ledger.Tenant, d dedupe) (int64, error) {
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	quota := t.Limits.FileBytes
	if quota <= 0 || d.key != "" || d.retry {
		if err := s.deps.Ledger.Ping(ctx); err != nil {
			return 0, fmt.Errorf("asking the database: %w", err)
		}
		return -1, nil
	}
	used, err := s.deps.Ledger.FileBytes(ctx, t.ID)
	if err != nil {
		return 0, fmt.Errorf("summing the files of %s: %w", t.ID, err)
	}
	if used >= quota {
		return 0, s.overQuota(t)
	}
	return quota - used, nil
}

func (s *Server) overQuota(t *ledger.Tenant) *failure {
	s.metrics.refuse(job.CodeFileBytes)
	f := fail(http.StatusTooManyRequests, job.CodeFileBytes, "The limit of %d bytes for all files of your tenant %s is reached: delete some, or let them expire.", t.Limits.FileBytes, t.ID)
	f.final = true // time alone does not heal it
	return f
}

// readForm reads an upload to its end. The parts may come in any order. It returns what was read also with an error: the file may be stored by then.
func (s *Server) readForm(c echo.Context, room int64) (*fileForm, error) {
	r := c.Request()
	if enc := r.Header.Get(echo.HeaderContentEncoding); enc != "" && !strings.EqualFold(enc, "identity") {
		return nil, fail(http.StatusUnsupportedMediaType, job.CodeUnsupportedMedia, "The content encoding %q is not supported: send the file as it is.", clip(enc))
	}
	media, params, err := mime.ParseMediaType(r.Header.Get(echo.HeaderContentType))
	if err != nil || media != "multipart/form-data" || params["boundary"] == "" {
		return nil, fail(http.StatusUnsupportedMediaType, job.CodeUnsupportedMedia, "A file is uploaded as multipart/form-data, with the parts file and purpose.")
	}
	control, server := http.NewResponseController(c.Response().Writer), takeBody(c.Response().Writer)
	if r.ContentLength > s.cfg.MaxFile+maxForm {
		refuseBody(c.Response().Writer, r)
		return nil, s.fileTooLarge()
	}
	in := &patientReader{from: http.MaxBytesReader(server, r.Body, s.cfg.MaxFile+maxForm), control: control, end: time.Now().Add(uploadTimeout)}
	body := &rememberingReader{from: in}
	form := &fileForm{id: job.NewName(ledger.FilePrefix, time.Now())}
	err = s.readParts(c, form, multipart.NewReader(bufio.NewReaderSize(body, 64<<10), params["boundary"]), room)
	switch {
	case err == nil:
		in.end = time.Now().Add(restTimeout)
		_, err = io.CopyN(io.Discard, body, maxForm) // what stands behind the last boundary
		if err == nil || body.err != nil {
			refuseBody(c.Response().Writer, r) // whatever that is, it is not ours
		} else {
			in.done()
		}
		return form, nil
	case body.err != nil && !isFailure(err): // a part that is wrong comes first: it came whole
		return form, s.bodyFailure(c, body.err, s.fileTooLarge())
	case errors.Is(err, errNotMultipart):
		err = invalid("", job.CodeInvalidValue, "The request's body is not whole multipart/form-data: %s.", clip(err.Error()))
	}
	// The rest of a body that is refused is read if it is short, for then the connection can go on.
	in.end = time.Now().Add(restTimeout)
	if _, rest := io.CopyN(io.Discard, body, maxRest); errors.Is(rest, io.EOF) {
		in.done()
	} else {
		refuseBody(c.Response().Writer, r)
	}
	return form, err
}

func isFailure(err error) bool {
	var f *failure
	return errors.As(err, &f)
}

func (s *Server) fileTooLarge() *failure {
	return fail(http.StatusRequestEntityTooLarge, job.CodeRequestTooLarge, "The file is larger than the limit of %d bytes.", s.cfg.MaxFile).at("file")
}

// rememberingReader keeps the error with which its source ended.
type rememberingReader struct {
	from io.Reader
	err  error // not io.EOF
}

func (r *rememberingReader) Read(p []byte) (int, error) {
	n, err := r.from.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		r.err = err
	}
	return n, err
}

func (s *Server) readParts(c echo.Context, form *fileForm, parts *multipart.Reader, room int64) error {
	anchor := ""
	for {
		part, err := parts.NextPart()
		if err == io.EOF { //nolint:errorlint // wrapped, it is an end that should not be there
			break
		}
		if err != nil {
			return fmt.Errorf("%w: %w", errNotMultipart, err)
		}
		name := part.FormName()
		if slices.Contains(form.given, name) {
			return invalid(clip(name), job.CodeInvalidValue, "The request has more than one part %q.", clip(name))
		}
		form.given = append(form.given, name)
		switch name {
		case "file":
			err = s.readFile(c, form, part, room)
		case "purpose":
			if form.purpose, err = fieldOf(part); err == nil && !slices.Contains(purposes, form.purpose) {
				err = invalid(name, job.CodeInvalidValue, "purpose is %q: it must be one of %s.", clip(form.purpose), strings.Join(purposes, ", "))
			}
		case "expires_after[anchor]":
			if anchor, err = fieldOf(part); err == nil && anchor != "created_at" {
				err = invalid(name, job.CodeInvalidValue, "expires_after[anchor] is %q: it must be created_at.", clip(anchor))
			}
		case "expires_after[seconds]":
			form.lifetime, err = lifetimeOf(part)
		default:
			err = invalid(clip(name), job.CodeUnsupportedParameter, "There is no field %q: a file has file, purpose, expires_after[anchor] and expires_after[seconds].", clip(name))
		}
		if err != nil {
			return err
		}
	}
	switch {
	case !form.stored:
		return missing("file")
	case form.purpose == "":
		return missing("purpose")
	case anchor == "" && form.lifetime != 0:
		return missing("expires_after[anchor]")
	case anchor != "" && form.lifetime == 0:
		return missing("expires_after[seconds]")
	case form.purpose == purposeBatch:
		return form.first.judge()
	}
	return nil
}

// errNotMultipart is that the parts could not be read to their end: the body is none of parts, or reading it failed.
var errNotMultipart = errors.New("reading the parts")

// fieldOf reads a part that is a short text.
func fieldOf(part *multipart.Part) (string, error) {
	raw, err := io.ReadAll(io.LimitReader(part, maxField+1))
	if err != nil {
		return "", fmt.Errorf("%w: %w", errNotMultipart, err)
	}
	if len(raw) > maxField {
		return "", invalid(part.FormName(), job.CodeInvalidValue, "%s has more than %d bytes.", part.FormName(), maxField)
	}
	return string(raw), nil
}

func lifetimeOf(part *multipart.Part) (int64, error) {
	text, err := fieldOf(part)
	if err != nil {
		return 0, err
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < minFileExpiry || n > maxFileExpiry {
		return 0, invalid(part.FormName(), job.CodeInvalidValue, "expires_after[seconds] is %q: it must be a whole number from %d to %d.", clip(text), minFileExpiry, maxFileExpiry)
	}
	return n, nil
}

// readFile stores the file. A file that is cut, too large, or seen to be no batch's leaves nothing.
func (s *Server) readFile(c echo.Context, form *fileForm, part *multipart.Part, room int64) error {
	form.name = cleanFilename(part.FileName())
	in := &fileReader{s: s, tenant: &identityOf(c).Tenant, form: form, from: part, sum: sha256.New(), room: room}
	n, err := s.deps.Blobs.Put(c.Request().Context(), form.id, in)
	switch {
	case in.err != nil: // the source's, not the store's
		return in.err
	case err != nil:
		return fmt.Errorf("storing a file: %w", err)
	}
	form.stored, form.bytes, form.digest = true, n, hex.EncodeToString(in.sum.Sum(nil))
	return nil
}

// fileReader is a file on its way into the store.
type fileReader struct {
	s      *Server
	tenant *ledger.Tenant
	form   *fileForm
	from   io.Reader
	sum    hash.Hash
	read   int64
	room   int64 // -1 for no bound
	judged bool
	err    error // why it ended, if not with the file
}

func (r *fileReader) Read(p []byte) (int, error) {
	n, err := r.from.Read(p)
	r.sum.Write(p[:n])
	_, _ = r.form.first.Write(p[:n]) // never fails
	r.read += int64(n)
	switch {
	case r.read > r.s.cfg.MaxFile:
		err = r.s.fileTooLarge()
	case r.room >= 0 && r.read > r.room:
		err = r.s.overQuota(r.tenant)
	case err != nil && !errors.Is(err, io.EOF):
		err = fmt.Errorf("%w: %w", errNotMultipart, err)
	case r.form.purpose == purposeBatch && r.form.first.done && !r.judged:
		r.judged = true
		if bad := r.form.first.judge(); bad != nil { // the rest is not worth reading
			err = bad
		}
	}
	if err != nil && !errors.Is(err, io.EOF) {
		r.err = err
	}
	return n, err
}

// cleanFilename makes of a client's name for a file one that is safe to show and to offer: no folders, no control characters, valid UTF-8, not too long.
func cleanFilename(name string) string {
	name = path.Base(strings.ReplaceAll(strings.ToValidUTF8(name, "\uFFFD"), `\`, "/"))
	name = strings.TrimSpace(strings.Map(func(r rune) rune {
		if unicode.IsControl(r) || r == '\u2028' || r == '\u2029' || unicode.Is(unicode.Bidi_Control, r) {
			return -1
		}
		return r
	}, name))
	for len(name) > maxFilename {
		_, size := utf8.DecodeLastRuneInString(name)
		name = name[:len(name)-size]
	}
	if strings.Trim(name, "./") == "" {
		return "file"
	}
	return name
}

// maxFirst is how much of a file's first line is looked at, in bytes.
const maxFirst = 512 << 10

// firstLine looks at a file that passes for its first line that is not blank.
type firstLine struct {
	number int64  // of the lines before it
	text   []byte // its beginning
	cut    bool   // it is longer
	any    bool   // the file has a byte
	done   bool   // there is one, and text has all of it that is looked at
}

func (f *firstLine) Write(p []byte) (int, error) {
	f.any = f.any || len(p) > 0
	for rest := p; len(rest) > 0 && !f.done; {
		piece, after, ended := bytes.Cut(rest, []byte("\n"))
		if len(f.text) == 0 {
			piece = bytes.TrimLeft(piece, " \t\r") // blanks take no room
		}
		n := min(len(piece), maxFirst-len(f.text))
		f.text = append(f.text, piece[:n]...)
		switch {
		case n < len(piece):
			f.cut, f.done = true, true
		case ended && len(f.content()) > 0:
			f.done = true
		case ended:
			f.number++
			f.text = f.text[:0]
		}
		rest = after
	}
	return len(p), nil
}

// content is the line without what may stand around it.
func (f *firstLine) content() []byte {
	text := f.text
	if f.number == 0 {
		text = bytes.TrimPrefix(text, []byte("\uFEFF"))
	}
	return bytes.TrimSpace(text)
}

// judge tells what is wrong with the beginning of a batch's file: an empty one, and one whose first line is not JSON at all. The rest is looked at when a batch is made of it.
func (f *firstLine) judge() error {
	text := f.content()
	switch {
	case !f.any:
		return invalid("file", job.CodeEmptyFile, "The file is empty: a batch's file holds one JSON object per line.")
	case len(text) > 0 && (f.cut && !beginsJSON(text) || !f.cut && !json.Valid(text)):
		return invalid("file", job.CodeInvalidJSONLine, "Line %d of the file is not JSON: a batch's file holds one JSON object per line.", f.number+1)
	}
	return nil
}

// beginsJSON tells whether text may be the beginning of a JSON value, or is one.
func beginsJSON(text []byte) bool {
	var v json.RawMessage
	d := json.NewDecoder(bytes.NewReader(text))
	if err := d.Decode(&v); err != nil {
		return errors.Is(err, io.ErrUnexpectedEOF)
	}
	return len(bytes.TrimSpace(text[d.InputOffset():])) == 0
}

// hash is that of all that the upload asks for.
func (form *fileForm) hash() string {
	sum := sha256.Sum256(encode([]any{form.purpose, form.name, form.lifetime, form.digest}))
	return hex.EncodeToString(sum[:])
}

// insertFile makes the upload a file, or finds the one that an earlier try has made. kept tells whether the upload's object is needed, or may be.
func (s *Server) insertFile(ctx context.Context, id *ledger.Identity, form *fileForm, d dedupe) (f *ledger.File, kept bool, err error) {
	t := &id.Tenant
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	d = d.of(form.hash())
	bound, repeated, err := s.once(ctx, t.ID, filesRoute, d, form.id)
	if err != nil {
		return nil, false, err
	}
	now := s.deps.Results.Now()
	if repeated {
		f, err := s.deps.Ledger.File(ctx, t.ID, bound)
		switch {
		case err == nil && expired(f, now):
			f := fail(http.StatusConflict, job.CodeIdempotencyConflict, "The idempotency key stands for a file whose time is over: use a new key.").at(headerKey)
			f.final = true
			return nil, false, f
		case err == nil:
			return f, false, nil
		case !errors.Is(err, ledger.ErrNotFound):
			return nil, false, fmt.Errorf("looking for the file of an earlier request: %w", err)
		}
		// That try went no further, or is about to: whoever adds the row first makes the file.
	}
	if !d.fresh() {
		if err := s.allow(ctx, id, 0); err != nil {
			s.forget(ctx, t.ID, filesRoute, d, form.id)
			return nil, false, err
		}
	}
	f = &ledger.File{ID: bound, Tenant: t.ID, Key: id.Key.ID, Purpose: form.purpose, Filename: form.name, Bytes: form.bytes, SHA256: form.digest, Blob: form.id, Created: now}
	if form.lifetime != 0 {
		f.Expires = now + job.Millis(form.lifetime*1000)
	}
	err = s.deps.Ledger.InsertFile(ctx, *f, t.Limits.FileBytes)
	switch {
	case err == nil:
		return f, true, nil
	case errors.Is(err, ledger.ErrExists):
		if f, err = s.deps.Ledger.File(ctx, t.ID, bound); err != nil {
			return nil, true, fmt.Errorf("reading a file: %w", err)
		}
		return f, f.Blob == form.id, nil
	case errors.Is(err, ledger.ErrQuota):
		s.forget(ctx, t.ID, filesRoute, d, form.id)
		return nil, false, s.overQuota(t)
	case errors.Is(err, ledger.ErrNotFound):
		s.forget(ctx, t.ID, filesRoute, d, form.id)
		return nil, false, fail(http.StatusForbidden, job.CodePermissionDenied, "Your tenant %s does not exist any more.", t.ID)
	case errors.Is(err, ledger.ErrUnavailable), errors.Is(err, context.DeadlineExceeded):
		// It may be written: the object stays, and is swept if it is not. A retry with the same key finds the file, or makes it.
		return nil, true, fmt.Errorf("adding a file: %w", err)
	default:
		s.forget(ctx, t.ID, filesRoute, d, form.id)
		return nil, false, fmt.Errorf("adding a file: %w", err)
	}
}

// expired tells whether a file's time is over: it is then as if deleted, whenever that is done.
func expired(f *ledger.File, now job.Millis) bool { return f.Expires != 0 && f.Expires <= now }

// isFileID tells whether text may be a file's id. What is not never gets into a query.
func isFileID(text string) bool {
	rest, ok := strings.CutPrefix(text, ledger.FilePrefix)
	return ok && len(rest) > 0 && len(rest) <= 100 && strings.IndexFunc(rest, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '_' && r != '-'
	}) < 0
}

func noFile(id string) *failure {
	return fail(http.StatusNotFound, job.CodeFileNotFound, "There is no file %q.", clip(id)).at("id")
}

// findFile returns the tenant's file that the path names.
func (s *Server) findFile(ctx context.Context, c echo.Context) (*ledger.File, error) {
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	id := pathParam(c, "id")
	if !isFileID(id) {
		return nil, noFile(id)
	}
	f, err := s.deps.Ledger.File(ctx, tenantOf(c), id)
	switch {
	case errors.Is(err, ledger.ErrNotFound), err == nil && expired(f, s.deps.Results.Now()):
		return nil, noFile(id)
	case err != nil:
		return nil, fmt.Errorf("reading file %s: %w", id, err)
	}
	return f, nil
}

// getFile answers GET /v1/files/{id}.
func (s *Server) getFile(c echo.Context) error {
	f, err := s.findFile(c.Request().Context(), c)
	if err != nil {
		return err
	}
	return writeJSON(c, http.StatusOK, newFileObject(f))
}

// listFiles answers GET /v1/files, from the ledger alone.
func (s *Server) listFiles(c echo.Context) error {
	p, err := pageParams(c, maxFiles, maxFiles)
	if err != nil {
		return err
	}
	purpose := c.QueryParam("purpose")
	if len(purpose) > 64 || strings.IndexFunc(purpose, func(r rune) bool { return (r < 'a' || r > 'z') && r != '_' && r != '-' }) >= 0 {
		return invalid("purpose", job.CodeInvalidValue, "purpose is %q: there is no such purpose.", clip(purpose))
	}
	if p.After != "" && !isFileID(p.After) {
		return unknownAfter(p.After)
	}
	ctx, cancel := context.WithTimeout(c.Request().Context(), storeTimeout)
	defer cancel()
	files, more, err := s.unexpired(ctx, tenantOf(c), purpose, p)
	if errors.Is(err, ledger.ErrNotFound) {
		return unknownAfter(p.After)
	}
	if err != nil {
		return fmt.Errorf("listing files: %w", err)
	}
	return writeJSON(c, http.StatusOK, newList(files, func(o fileObject) string { return o.ID }, more))
}

// unexpired is a page of files without those whose time is over, which the ledger may have yet.
func (s *Server) unexpired(ctx context.Context, t job.Tenant, purpose string, p ledger.Page) (files []fileObject, more bool, err error) {
	most, now := p.Limit, s.deps.Results.Now()
	for {
		p.Limit = most + 1 - len(files) // one more than fits tells whether there is a next page
		page, rest, err := s.deps.Ledger.Files(ctx, t, purpose, p)
		if err != nil {
			return nil, false, fmt.Errorf("reading files: %w", err)
		}
		for i := range page {
			if !expired(&page[i], now) {
				files = append(files, newFileObject(&page[i]))
			}
		}
		if len(files) > most {
			return files[:most], true, nil
		}
		if !rest || len(page) == 0 {
			return files, false, nil
		}
		p.After = page[len(page)-1].ID
	}
}

type deletedFile struct {
	ID      string `json:"id"`
	Object  string `json:"object"`
	Deleted bool   `json:"deleted"`
}

// deleteFile answers DELETE /v1/files/{id}. The row goes first, then the object: a crash in between leaves an object without a file, which is swept.
func (s *Server) deleteFile(c echo.Context) error {
	ctx := context.WithoutCancel(c.Request().Context()) // once begun it is carried out though its client may leave
	f, err := s.findFile(ctx, c)
	if err != nil {
		return err
	}
	short, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	f, err = s.deps.Ledger.DeleteFile(short, f.Tenant, f.ID)
	switch {
	case errors.Is(err, ledger.ErrNotFound):
		return noFile(pathParam(c, "id"))
	case errors.Is(err, ledger.ErrInUse):
		f := fail(http.StatusConflict, job.CodeFileInUse, "A batch that has not ended reads the file: cancel the batch, or delete the file when the batch has ended.").at("id")
		f.final = true
		return f
	case err != nil:
		return fmt.Errorf("deleting a file: %w", err)
	}
	s.dropBlob(ctx, f.Blob)
	return writeJSON(c, http.StatusOK, deletedFile{ID: f.ID, Object: "file", Deleted: true})
}

// contentPiece is how much of a file is sent at a time. Two pieces are what one download holds.
const contentPiece = 64 << 10

// fileContent answers GET /v1/files/{id}/content with the file's bytes, whatever the client says that it accepts. The last piece is sent only when the whole is known to be what was stored: else the connection breaks, and no client takes the
// file for whole.
func (s *Server) fileContent(c echo.Context) error {
	ctx := c.Request().Context()
	f, err := s.findFile(ctx, c)
	if err != nil {
		return err
	}
	h, etag := c.Response().Header(), `"`+f.SHA256+`"`
	if known := c.Request().Header.Get("If-None-Match"); known != "" && matches(known, etag) {
		h.Set("ETag", etag)
		return c.NoContent(http.StatusNotModified)
	}
	piece, next := make([]byte, contentPiece), make([]byte, contentPiece)
	in, n, end, err := s.openContent(ctx, f, piece)
	if errors.Is(err, blob.ErrCorrupt) { // another copy of the object may be whole
		in, n, end, err = s.openContent(ctx, f, piece)
	}
	if err != nil {
		if _, gone := s.findFile(ctx, c); gone != nil { // deleted meanwhile
			return gone
		}
		return err
	}
	defer in.Close() //nolint:errcheck // only read
	h.Set(echo.HeaderContentType, "application/octet-stream")
	h.Set(echo.HeaderContentLength, strconv.FormatInt(f.Bytes, 10))
	h.Set(echo.HeaderContentDisposition, cmp.Or(mime.FormatMediaType("attachment", map[string]string{"filename": f.Filename}), "attachment"))
	h.Set("X-Content-Type-Options", "nosniff") // it is somebody's upload
	h.Set("ETag", etag)
	c.Response().WriteHeader(http.StatusOK)
	if isHead(c) {
		return nil
	}
	for sent := int64(0); ; {
		var m int
		if end == nil {
			m, end = readPiece(in, next)
		}
		last := m == 0 && errors.Is(end, io.EOF)
		switch {
		case end != nil && !errors.Is(end, io.EOF):
			err = end
		case last && sent+int64(n) != f.Bytes:
			err = blob.ErrCorrupt
		default:
			_, err = c.Response().Write(piece[:n])
		}
		if err != nil {
			if ctx.Err() == nil {
				s.log.Warn("sending a file", "file", f.ID, "err", err)
			}
			panic(http.ErrAbortHandler) // a cut file must not look whole
		}
		if last {
			return nil
		}
		sent += int64(n)
		piece, next, n = next, piece, m
	}
}

// openContent opens a file's content, and reads the first piece of it, with which end may come.
func (s *Server) openContent(ctx context.Context, f *ledger.File, piece []byte) (in io.ReadCloser, n int, end, err error) {
	in, err = s.deps.Blobs.Get(ctx, f.Blob)
	if errors.Is(err, blob.ErrNotFound) {
		err = fmt.Errorf("%w: it is not there", blob.ErrCorrupt)
	}
	if err == nil {
		if n, end = readPiece(in, piece); end == nil || errors.Is(end, io.EOF) {
			return in, n, end, nil
		}
		_ = in.Close()
		err = end
	}
	return nil, 0, nil, fmt.Errorf("reading file %s: %w", f.ID, err)
}

// readPiece fills p as far as the file goes. io.EOF comes with the last bytes, or behind them, and only if the whole is what was stored.
func readPiece(in io.Reader, p []byte) (n int, err error) {
	for n < len(p) && err == nil {
		var m int
		m, err = in.Read(p[n:])
		n += m
	}
	return n, err
}
