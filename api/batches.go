package api

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"strings"
	"time"
	"unicode"

	"github.com/labstack/echo/v4"
	"golang.org/x/sync/errgroup"

	"github.com/millrace/millrace/internal/batch"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
	"github.com/millrace/millrace/internal/queue"
)

// batchObject is a batch as the OpenAI API shows it. Times are whole unix seconds; what is not set is null.
type batchObject struct {
	ID               string            `json:"id"`
	Object           string            `json:"object"`
	Endpoint         job.Endpoint      `json:"endpoint"`
	Model            *job.Model        `json:"model"`
	Errors           *batchErrors      `json:"errors"`
	InputFileID      string            `json:"input_file_id"`
	CompletionWindow string            `json:"completion_window"`
	Status           ledger.Status     `json:"status"`
	OutputFileID     *string           `json:"output_file_id"`
	ErrorFileID      *string           `json:"error_file_id"`
	CreatedAt        int64             `json:"created_at"`
	InProgressAt     *int64            `json:"in_progress_at"`
	ExpiresAt        *int64            `json:"expires_at"`
	FinalizingAt     *int64            `json:"finalizing_at"`
	CompletedAt      *int64            `json:"completed_at"`
	FailedAt         *int64            `json:"failed_at"`
	ExpiredAt        *int64            `json:"expired_at"`
	CancellingAt     *int64            `json:"cancelling_at"`
	CancelledAt      *int64            `json:"cancelled_at"`
	RequestCounts    requestCounts     `json:"request_counts"`
	Usage            batchUsage        `json:"usage"`
	Metadata         map[string]string `json:"metadata"`
}

type batchErrors struct {
	Object string          `json:"object"`
	Data   []job.LineError `json:"data"`
}

type requestCounts struct {
	Total     int64 `json:"total"`
	Completed int64 `json:"completed"`
	Failed    int64 `json:"failed"`
}

type batchUsage struct {
	InputTokens        job.Tokens `json:"input_tokens"`
	InputTokensDetails struct {
		CachedTokens job.Tokens `json:"cached_tokens"`
	} `json:"input_tokens_details"`
	OutputTokens        job.Tokens `json:"output_tokens"`
	OutputTokensDetails struct {
		ReasoningTokens job.Tokens `json:"reasoning_tokens"`
	} `json:"output_tokens_details"`
	TotalTokens job.Tokens `json:"total_tokens"`
}

func newBatchObject(b *ledger.Batch) *batchObject {
	o := &batchObject{
		ID: b.ID, Object: "batch", Endpoint: b.Endpoint, Model: orNil(b.Model), InputFileID: b.InputFile, CompletionWindow: b.Window, Status: b.Status,
		OutputFileID: orNil(b.OutputFile), ErrorFileID: orNil(b.ErrorFile),
		CreatedAt: int64(b.Created) / 1000, InProgressAt: wholeSeconds(b.InProgress), ExpiresAt: wholeSeconds(b.Expires), FinalizingAt: wholeSeconds(b.Finalizing), CompletedAt: wholeSeconds(b.Completed),
		FailedAt: wholeSeconds(b.Failed), ExpiredAt: wholeSeconds(b.Expired), CancellingAt: wholeSeconds(b.Cancelling), CancelledAt: wholeSeconds(b.Cancelled),
		RequestCounts: requestCounts{Total: b.Total, Completed: b.Done, Failed: b.Bad}, Metadata: b.Metadata,
	}
	if b.Status == ledger.Failed {
		o.Errors = &batchErrors{Object: "list", Data: b.Errors}
		if b.Errors == nil {
			o.Errors.Data = []job.LineError{}
		}
	}
	u := &o.Usage
	u.InputTokens, u.OutputTokens, u.TotalTokens = b.Usage.PromptTokens, b.Usage.CompletionTokens, b.Usage.TotalTokens
	u.InputTokensDetails.CachedTokens, u.OutputTokensDetails.ReasoningTokens = b.Usage.CachedTokens, b.Usage.ReasoningTokens
	return o
}

// orNil is nil for the zero value.
func orNil[T comparable](v T) *T {
	var zero T
	if v == zero {
		return nil
	}
	return &v
}

// wholeSeconds is m as whole unix seconds, nil for "not yet".
func wholeSeconds(m job.Millis) *int64 {
	if m == 0 {
		return nil
	}
	n := int64(m) / 1000
	return &n
}

// Bounds of what a create may ask for.
const (
	minFileExpiry = 3600
	maxFileExpiry = 2_592_000
	maxFileID     = 256
)

// createBatch answers POST /v1/batches. What is wrong with the request itself is told here; what is wrong with the file, by the batch, which then fails.
func (s *Server) createBatch(c echo.Context) error {
	body, o, release, err := s.readBody(c)
	if err != nil {
		return err
	}
	defer release()
	b, window, err := parseBatch(o)
	if err != nil {
		return err
	}
	d, err := dedupeOf(c, body)
	if err != nil {
		return err
	}
	s.own(b, identityOf(c), window)
	// Once begun it is carried out though its client may leave.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(c.Request().Context()), storeTimeout)
	defer cancel()
	stored, _, err := s.beginBatch(ctx, c, d, b)
	if err == nil && stored == nil {
		stored, err = s.putBatch(ctx, b)
	}
	if err != nil {
		return err
	}
	return writeJSON(c, http.StatusOK, newBatchObject(stored))
}

// beginBatch binds the key of a create to b, and counts it as a request. If it repeats an earlier one it costs nothing, and that one's batch comes back; if that one went no further (repeated), b has its id now.
func (s *Server) beginBatch(ctx context.Context, c echo.Context, d dedupe, b *ledger.Batch) (earlier *ledger.Batch, repeated bool, err error) {
	if d.fresh() {
		if err := s.allow(ctx, identityOf(c), 0); err != nil {
			return nil, false, err
		}
	}
	bound, repeated, err := s.once(ctx, b.Tenant, route(c), d, b.ID)
	if err != nil {
		return nil, false, err
	}
	if b.ID = bound; repeated {
		earlier, err := s.deps.Ledger.Batch(ctx, b.Tenant, b.ID)
		if !errors.Is(err, ledger.ErrNotFound) {
			return earlier, true, batchFailure("reading", b.ID, err)
		}
	}
	if !d.fresh() {
		err = s.allow(ctx, identityOf(c), 0)
	}
	if err != nil && !repeated {
		s.forget(ctx, b.Tenant, route(c), d, b.ID)
	}
	return nil, repeated, err
}

// own makes b a fresh batch of the caller's.
func (s *Server) own(b *ledger.Batch, id *ledger.Identity, window time.Duration) {
	now := s.deps.Results.Now()
	b.ID, b.Tenant, b.Key, b.Models = job.NewName("batch_", now.Time()), id.Tenant.ID, id.Key.ID, id.Key.Models
	b.Status, b.Created, b.Expires = ledger.Validating, now, now+job.Millis(window.Milliseconds())
}

// putBatch stores a batch and wakes whoever drives it. If we crash behind the insert the batch runs, and a retry with the same key finds it.
func (s *Server) putBatch(ctx context.Context, b *ledger.Batch) (*ledger.Batch, error) {
	err := s.deps.Ledger.CreateBatch(ctx, *b)
	if errors.Is(err, ledger.ErrExists) { // another request with the same key was faster
		earlier, err := s.deps.Ledger.Batch(ctx, b.Tenant, b.ID)
		return earlier, batchFailure("reading", b.ID, err)
	}
	if err != nil {
		return nil, fmt.Errorf("storing batch %s: %w", b.ID, err)
	}
	s.deps.Relay.Nudge()
	return b, nil
}

// batchFailure says what was being done with a batch. One that is not there, or is another tenant's, is a 404.
func batchFailure(doing, id string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, ledger.ErrNotFound):
		return noBatch(id)
	}
	return fmt.Errorf("%s batch %s: %w", doing, id, err)
}

func noBatch(id string) *failure {
	return fail(http.StatusNotFound, job.CodeBatchNotFound, "There is no batch %q.", clip(id)).at("batch_id")
}

// parseBatch reads the fields of POST /v1/batches strictly: what is not supported is refused and never silently ignored.
func parseBatch(o *job.Object) (*ledger.Batch, time.Duration, error) {
	for _, f := range o.Fields {
		switch f.Key {
		case "input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after":
		default:
			return nil, 0, invalid(clip(f.Key), job.CodeUnsupportedParameter, "There is no field %q.", clip(f.Key))
		}
	}
	b := &ledger.Batch{}
	var endpoint string
	for _, f := range []struct {
		name string
		to   *string
	}{{"input_file_id", &b.InputFile}, {"endpoint", &endpoint}, {"completion_window", &b.Window}} {
		text, given, err := stringField(o, f.name)
		switch {
		case err != nil:
			return nil, 0, err
		case !given:
			return nil, 0, missing(f.name)
		}
		*f.to = text
	}
	// Whether there is such a file shows when it is read; but a text that can be no file's id is a slip of the caller's.
	if b.InputFile == "" || len(b.InputFile) > maxFileID || strings.ContainsFunc(b.InputFile, unicode.IsControl) {
		return nil, 0, invalid("input_file_id", job.CodeInvalidValue, "input_file_id is %q: it must be the id of an uploaded file.", clip(b.InputFile))
	}
	var err error
	if b.Endpoint, err = job.ParseEndpoint(endpoint); err != nil {
		return nil, 0, invalid("endpoint", job.CodeInvalidValue, "endpoint is %q: the supported values are %s.", clip(endpoint), endpointNames())
	}
	window, err := parseWindow(b.Window)
	if err != nil {
		return nil, 0, err
	}
	if b.Metadata, err = metadataField(o); err != nil {
		return nil, 0, err
	}
	if b.OutputExpires, err = expiryField(o, "output_expires_after"); err != nil {
		return nil, 0, err
	}
	return b, window, nil
}

// parseWindow reads a completion_window.
func parseWindow(text string) (time.Duration, error) {
	window, ok := batch.ParseWindow(text)
	if !ok {
		return 0, invalid("completion_window", job.CodeInvalidValue, "completion_window is %q: the supported values are 24h, and any whole number of minutes or hours up to 7 days, as 90m or 48h.", clip(text))
	}
	return window, nil
}

func endpointNames() string {
	names := make([]string, 0, 4)
	for _, e := range job.Endpoints() {
		names = append(names, string(e))
	}
	return strings.Join(names, ", ")
}

// expiryField reads the lifetime of files in seconds, 0 if none is asked for.
func expiryField(o *job.Object, name string) (int64, error) {
	raw := o.Get(name)
	if isNull(raw) {
		return 0, nil
	}
	if raw[0] != '{' {
		return 0, invalid(name, job.CodeInvalidType, "%s must be an object with anchor and seconds.", name)
	}
	inner, err := job.ParseObject(raw)
	if err != nil {
		return 0, invalid(name, job.CodeInvalidJSON, "%s cannot be read: %v.", name, err)
	}
	for _, f := range inner.Fields {
		if f.Key != "anchor" && f.Key != "seconds" {
			return 0, invalid(name+"."+clip(f.Key), job.CodeUnsupportedParameter, "There is no field %q.", name+"."+clip(f.Key))
		}
	}
	anchor, given, err := stringField(inner, "anchor")
	switch {
	case err != nil:
		return 0, prefixed(name+".", err)
	case !given:
		return 0, missing(name + ".anchor")
	case anchor != "created_at":
		return 0, invalid(name+".anchor", job.CodeInvalidValue, "%s.anchor is %q: the supported value is created_at.", name, clip(anchor))
	}
	var seconds int64
	switch raw := inner.Get("seconds"); {
	case isNull(raw):
		return 0, missing(name + ".seconds")
	case json.Unmarshal(raw, &seconds) != nil:
		return 0, invalid(name+".seconds", job.CodeInvalidType, "%s.seconds must be a whole number.", name)
	case seconds < minFileExpiry || seconds > maxFileExpiry:
		return 0, invalid(name+".seconds", job.CodeInvalidValue, "%s.seconds is %d: it must be from %d to %d.", name, seconds, minFileExpiry, maxFileExpiry)
	}
	return seconds, nil
}

// findBatch returns the caller's batch that the path names.
func (s *Server) findBatch(c echo.Context) (*ledger.Batch, error) {
	id := pathParam(c, "id")
	if !saneName(id, "batch_") {
		return nil, noBatch(id)
	}
	ctx, cancel := context.WithTimeout(c.Request().Context(), storeTimeout)
	defer cancel()
	b, err := s.deps.Ledger.Batch(ctx, tenantOf(c), id)
	return b, batchFailure("reading", id, err)
}

// saneName tells whether text has the form of an id with that prefix. What has not need not be looked up, and may be what a database cannot hold.
func saneName(text, prefix string) bool { return strings.HasPrefix(text, prefix) && saneID(text) }

// getBatch answers GET /v1/batches/{id}.
func (s *Server) getBatch(c echo.Context) error {
	b, err := s.findBatch(c)
	if err != nil {
		return err
	}
	return writeJSON(c, http.StatusOK, newBatchObject(b))
}

// listBatches answers GET /v1/batches: the tenant's own, newest first.
func (s *Server) listBatches(c echo.Context) error {
	p, err := pageParams(c, defaultLimit, maxLimit)
	if err != nil {
		return err
	}
	if p.After != "" && !saneName(p.After, "batch_") {
		return unknownAfter(p.After)
	}
	ctx, cancel := context.WithTimeout(c.Request().Context(), storeTimeout)
	defer cancel()
	batches, more, err := s.deps.Ledger.Batches(ctx, tenantOf(c), p)
	if errors.Is(err, ledger.ErrNotFound) {
		return unknownAfter(p.After)
	}
	if err != nil {
		return fmt.Errorf("listing batches: %w", err)
	}
	objects := make([]*batchObject, 0, len(batches))
	for i := range batches {
		objects = append(objects, newBatchObject(&batches[i]))
	}
	return writeJSON(c, http.StatusOK, newList(objects, func(o *batchObject) string { return o.ID }, more))
}

// cancelBatch answers POST /v1/batches/{id}/cancel.
func (s *Server) cancelBatch(c echo.Context) error {
	return s.endBatch(c, func(ctx context.Context, id string) (*ledger.Batch, error) {
		return s.deps.Ledger.CancelBatch(ctx, tenantOf(c), id, s.deps.Results.Now())
	})
}

// adminCancelBatch answers POST /admin/v1/batches/{id}/cancel: the batch may be any tenant's, and stays its own, as do its files.
func (s *Server) adminCancelBatch(c echo.Context) error {
	return s.endBatch(c, func(ctx context.Context, id string) (*ledger.Batch, error) {
		return s.deps.Ledger.CancelAnyBatch(ctx, id, s.deps.Results.Now())
	})
}

// endBatch has the batch that the path names cancelled.
func (s *Server) endBatch(c echo.Context, cancelIt func(context.Context, string) (*ledger.Batch, error)) error {
	id := pathParam(c, "id")
	if !saneName(id, "batch_") {
		return noBatch(id)
	}
	// The wish is stored though its client may leave.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(c.Request().Context()), storeTimeout)
	defer cancel()
	b, err := cancelIt(ctx, id)
	if errors.Is(err, ledger.ErrState) && b != nil {
		return batchConflict(job.CodeBatchEnded, "Batch %s has ended already: it is %s.", id, b.Status)
	}
	if err != nil {
		return batchFailure("cancelling", id, err)
	}
	s.deps.Relay.Nudge()
	return writeJSON(c, http.StatusOK, newBatchObject(b))
}

// batchConflict is a 409 that no retry changes.
func batchConflict(code job.Code, format string, args ...any) *failure {
	f := fail(http.StatusConflict, code, format, args...)
	f.final = true
	return f
}

// batchResults answers GET /v1/batches/{id}/results: the lines that have ended so far, in no order. While the batch runs they come from DONE; once it has ended, from its files.
func (s *Server) batchResults(c echo.Context) error {
	b, err := s.findBatch(c)
	if err != nil {
		return err
	}
	out := &jsonlWriter{c: c}
	switch {
	case isHead(c):
	case b.Status.Ended():
		err = s.fileLines(c.Request().Context(), b, out)
	default:
		err = s.doneLines(c.Request().Context(), b, out)
	}
	if err == nil {
		err = out.end()
	}
	switch {
	case err == nil:
		return nil
	case !out.begun:
		return err
	case c.Request().Context().Err() == nil:
		s.log.Warn("sending the results of a batch", "batch", b.ID, "err", err)
	}
	panic(http.ErrAbortHandler) // a cut answer must not look whole
}

// jsonlWriter sends lines as one answer, which begins with the first of them: until then a failure can still be told.
type jsonlWriter struct {
	c     echo.Context
	w     *bufio.Writer
	begun bool
}

func (l *jsonlWriter) Write(p []byte) (int, error) {
	if !l.begun {
		l.begun = true
		l.c.Response().Header().Set(echo.HeaderContentType, "application/jsonl")
		l.c.Response().WriteHeader(http.StatusOK)
		l.w = bufio.NewWriterSize(l.c.Response(), 64<<10)
	}
	return l.w.Write(p)
}

// end sends what is left.
func (l *jsonlWriter) end() error {
	if _, err := l.Write(nil); err != nil {
		return err
	}
	return l.w.Flush()
}

// doneLines writes the outcomes of a batch's lines.
func (s *Server) doneLines(ctx context.Context, b *ledger.Batch, out *jsonlWriter) error {
	var line []byte
	_, err := s.deps.Queue.GroupOutcomes(ctx, b.Tenant, b.ID, 1, func(r *queue.Record) error {
		if r.Outcome.Erased {
			return nil
		}
		body := r.Result
		if r.Outcome.Blob != "" {
			var err error
			if body, err = s.readBlob(ctx, r.Outcome.Blob); err != nil {
				return fmt.Errorf("reading the answer to line %d: %w", r.Job.Line, err)
			}
		}
		o := batch.OutputOf(&r.Job, &r.Outcome, body, b.Status == ledger.Cancelling)
		line = batch.AppendOutput(line[:0], &o)
		if _, err := out.Write(line); err != nil {
			return errNobodyReads
		}
		return nil
	})
	return err
}

func (s *Server) readBlob(ctx context.Context, name string) ([]byte, error) {
	r, err := s.deps.Blobs.Get(ctx, name)
	if err != nil {
		return nil, err
	}
	defer r.Close() //nolint:errcheck // read only
	return io.ReadAll(r)
}

// fileLines writes the files of a batch that has ended. Both are opened before the first byte is sent.
func (s *Server) fileLines(ctx context.Context, b *ledger.Batch, out *jsonlWriter) error {
	var files []io.Reader
	for _, id := range []string{b.OutputFile, b.ErrorFile} {
		if id == "" {
			continue
		}
		r, err := s.openFile(ctx, b.Tenant, id)
		if err != nil {
			return err
		}
		defer r.Close() //nolint:errcheck // read only
		files = append(files, r)
	}
	for _, r := range files {
		if _, err := io.Copy(out, r); err != nil {
			return fmt.Errorf("copying the results of batch %s: %w", b.ID, err)
		}
	}
	return nil
}

// openFile opens a file of a batch. One that was deleted, or whose time is over, is a 410.
func (s *Server) openFile(ctx context.Context, t job.Tenant, id string) (io.ReadCloser, error) {
	short, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	f, err := s.deps.Ledger.File(short, t, id)
	switch {
	case errors.Is(err, ledger.ErrNotFound), err == nil && expired(f, s.deps.Results.Now()):
		return nil, fail(http.StatusGone, job.CodeResultExpired, "The file %s is no longer kept.", clip(id))
	case err != nil:
		return nil, fmt.Errorf("reading the row of file %s: %w", id, err)
	}
	r, err := s.deps.Blobs.Get(ctx, f.Blob)
	if err != nil {
		return nil, fmt.Errorf("opening file %s: %w", id, err)
	}
	return r, nil
}

// retryTimeout bounds the making of a retry's input file.
const retryTimeout = 10 * time.Minute

// retryBatch answers POST /v1/batches/{id}/retry with a new batch of those lines of an ended one that stand in its error file. Its input file has their bytes as they were. What the body does not say is as it was.
//
// The order of the writes, and what a crash after each leaves: the key, bound to the batch's id, which a retry takes over; the file's bytes, which are swept; the file's row, a file that nobody uses; the batch.
func (s *Server) retryBatch(c echo.Context) error {
	old, err := s.findBatch(c)
	if err != nil {
		return err
	}
	o, release, err := s.readOptional(c)
	if err != nil {
		return err
	}
	defer release()
	b, window, err := parseRetry(old, o)
	if err != nil {
		return err
	}
	switch {
	case !old.Status.Ended():
		return batchConflict(job.CodeBatchNotEnded, "Batch %s has not ended: it is %s. Cancel it, or wait for its end.", old.ID, old.Status)
	case old.Status == ledger.Failed:
		return invalid("batch_id", job.CodeInvalidValue, "Batch %s was refused for its file, and none of its lines ran: upload a corrected file, and create a new batch.", old.ID)
	case old.ErrorFile == "":
		return invalid("batch_id", job.CodeInvalidValue, "No line of batch %s failed: there is nothing to retry.", old.ID)
	}
	d, err := dedupeOf(c, retryMeaning(old, o))
	if err != nil {
		return err
	}
	id := identityOf(c)
	s.own(b, id, window)
	ctx, cancel := context.WithTimeout(c.Request().Context(), retryTimeout)
	defer cancel()
	stored, repeated, err := s.beginBatch(ctx, c, d, b)
	if err == nil && stored == nil {
		if stored, err = s.storeRetry(ctx, &id.Tenant, old, b); err != nil && !repeated {
			s.forget(ctx, b.Tenant, route(c), d, b.ID)
		}
	}
	if err != nil {
		return err
	}
	return writeJSON(c, http.StatusOK, newBatchObject(stored))
}

// parseRetry makes of the batch old, and what a retry's body says, the batch that repeats it, and its window.
func parseRetry(old *ledger.Batch, o *job.Object) (*ledger.Batch, time.Duration, error) {
	for _, f := range o.Fields {
		switch f.Key {
		case "completion_window", "metadata", "output_expires_after":
		case "input_file_id", "endpoint":
			return nil, 0, invalid(f.Key, job.CodeUnsupportedParameter, "A retry has the %s of its batch: it takes completion_window, metadata and output_expires_after.", f.Key)
		default:
			return nil, 0, invalid(clip(f.Key), job.CodeUnsupportedParameter, "There is no field %q: a retry takes completion_window, metadata and output_expires_after.", clip(f.Key))
		}
	}
	b := &ledger.Batch{Endpoint: old.Endpoint, Window: old.Window, OutputExpires: old.OutputExpires, RetryOf: old.ID, Metadata: old.Metadata}
	text, given, err := stringField(o, "completion_window")
	if err != nil {
		return nil, 0, err
	}
	if given {
		b.Window = text
	}
	window, err := parseWindow(b.Window)
	if err != nil && !given { // it was accepted by a version that knew more
		err = invalid("batch_id", job.CodeInvalidValue, "Batch %s has the completion window %q, which this version does not support: say another as completion_window.", old.ID, clip(old.Window))
	}
	if err != nil {
		return nil, 0, err
	}
	metadata, err := metadataField(o)
	if err != nil {
		return nil, 0, err
	}
	if metadata != nil {
		b.Metadata = metadata
	}
	b.Metadata = retryMetadata(b.Metadata, old.ID)
	expires, err := expiryField(o, "output_expires_after")
	if err != nil {
		return nil, 0, err
	}
	if expires != 0 {
		b.OutputExpires = expires
	}
	return b, window, nil
}

// retryMeaning is what a retry asks, for its idempotency key: fields that say nothing are left out, so that a body of none is as no body.
func retryMeaning(old *ledger.Batch, o *job.Object) []byte {
	meaning := map[string]any{"batch": old.ID}
	for _, f := range o.Fields {
		if raw := o.Get(f.Key); !isNull(raw) {
			meaning[f.Key] = raw
		}
	}
	return encode(meaning)
}

// retryMetadata is given with the id of the batch that is repeated. Where there is no room for that the row alone tells.
func retryMetadata(given map[string]string, id string) map[string]string {
	m := maps.Clone(given)
	if m == nil {
		m = make(map[string]string)
	}
	if _, there := m[batch.RetryOf]; there || len(m) < maxPairs {
		m[batch.RetryOf] = id
	}
	return m
}

// storeRetry makes the file of old's failed lines, and the batch b of it.
func (s *Server) storeRetry(ctx context.Context, t *ledger.Tenant, old, b *ledger.Batch) (*ledger.Batch, error) {
	f, err := s.failedLines(ctx, old)
	if err != nil {
		return nil, err
	}
	f.Key = b.Key
	// Once the bytes are stored the rest is carried out though the client may leave.
	short, cancel := context.WithTimeout(context.WithoutCancel(ctx), storeTimeout)
	defer cancel()
	if err := s.deps.Ledger.InsertFile(short, *f, t.Limits.FileBytes); err != nil {
		s.dropBlob(short, f.Blob)
		if errors.Is(err, ledger.ErrQuota) {
			return nil, s.overQuota(t)
		}
		return nil, fmt.Errorf("storing the row of file %s: %w", f.ID, err)
	}
	b.InputFile = f.ID
	stored, err := s.putBatch(short, b)
	if err != nil || stored.InputFile != f.ID { // another retry with the same key was faster, or nobody knows: a file that a batch reads is not deleted
		if _, err := s.deps.Ledger.DeleteFile(short, f.Tenant, f.ID); err == nil {
			s.dropBlob(short, f.Blob)
		}
	}
	return stored, err
}

// failedLines stores the lines of old's input that stand in its error file, joined by their custom_ids, and returns the row of the file that they make.
func (s *Server) failedLines(ctx context.Context, old *ledger.Batch) (*ledger.File, error) {
	var failed batch.IDs
	errorFile, err := s.openFile(ctx, old.Tenant, old.ErrorFile)
	if err != nil {
		return nil, err
	}
	defer errorFile.Close() //nolint:errcheck // read only
	if err := batch.OutputIDs(ctx, errorFile, func(id string) error { failed.Add(id); return nil }); err != nil {
		return nil, fmt.Errorf("reading the error file of batch %s: %w", old.ID, err)
	}
	if failed.Len() == 0 {
		return nil, fail(http.StatusGone, job.CodeResultExpired, "The input of the lines of batch %s that failed was lost, and they cannot be retried: upload them again, and create a new batch.", old.ID)
	}
	input, err := s.openFile(ctx, old.Tenant, old.InputFile)
	if err != nil {
		return nil, err
	}
	defer input.Close() //nolint:errcheck // read only
	now := s.deps.Results.Now()
	id := job.NewName(ledger.FilePrefix, now.Time())
	f := &ledger.File{ID: id, Tenant: old.Tenant, Purpose: purposeBatch, Filename: old.ID + "_retry.jsonl", Blob: id, Created: now}
	sum := sha256.New()
	read, write := io.Pipe()
	var work errgroup.Group
	work.Go(func() error {
		n, err := batch.Select(ctx, io.MultiWriter(write, sum), input, 0, failed.Has)
		if err == nil && n != int64(failed.Len()) {
			err = fmt.Errorf("the input file has %d of the %d lines that failed", n, failed.Len())
		}
		_ = write.CloseWithError(err) // nil is io.EOF
		return err
	})
	f.Bytes, err = s.deps.Blobs.Put(ctx, f.Blob, read)
	_ = read.CloseWithError(err) // so that the writer ends in any case
	if written := work.Wait(); err == nil {
		err = written
	}
	if err != nil {
		return nil, fmt.Errorf("making the input of a retry of batch %s: %w", old.ID, err)
	}
	f.SHA256 = hex.EncodeToString(sum.Sum(nil))
	return f, nil
}
