package dispatcher_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/dispatcher"
	"github.com/millrace/millrace/internal/blob"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
)

// storedFile adds a file of one byte with an object, which expires at that time, 0 for never.
func (e *env) storedFile(expires job.Millis) ledger.File {
	e.Helper()
	now := e.results.Now()
	id := job.NewName("file-", now.Time())
	f := ledger.File{ID: id, Tenant: job.DefaultTenant, Purpose: "batch", Filename: "f", Bytes: 1, Blob: id, Created: now, Expires: expires}
	_, err := e.blobs.Put(context.Background(), f.Blob, strings.NewReader("x"))
	e.ok(err)
	e.ok(e.ledger.InsertFile(context.Background(), f, 0))
	return f
}

// batchOf adds a batch that reads a file.
func (e *env) batchOf(file string) ledger.Batch {
	e.Helper()
	now := e.results.Now()
	b := ledger.Batch{
		ID: job.NewName("batch_", now.Time()), Tenant: job.DefaultTenant, Endpoint: job.ChatCompletions, InputFile: file, Window: "24h", Status: ledger.Validating, Created: now, Expires: now + 86_400_000,
	}
	e.ok(e.ledger.CreateBatch(context.Background(), b))
	return b
}

func TestFilesWhoseTimeIsOverAreRemoved(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	now := e.results.Now()
	var over []ledger.File
	for range 250 { // more than one look takes
		over = append(over, e.storedFile(now+1))
	}
	stays, later := e.storedFile(0), e.storedFile(now+3_600_000)
	_, _, err := e.ledger.Remember(t.Context(), job.DefaultTenant, "/v1/files", "k", "hash", "old", now, time.Millisecond)
	e.ok(err)
	there := func(f ledger.File) (row, object bool) {
		_, err := e.ledger.File(t.Context(), f.Tenant, f.ID)
		if err != nil && !errors.Is(err, ledger.ErrNotFound) {
			t.Fatal(err)
		}
		a, openErr := e.blobs.OpenAt(t.Context(), f.Blob)
		if openErr == nil {
			_ = a.Close()
		}
		return err == nil, openErr == nil
	}
	cfg := quick
	cfg.FileSweep = 20 * time.Millisecond
	e.lead(cfg)
	for _, f := range over {
		e.until(f.ID+" is gone", func() bool { row, object := there(f); return !row && !object })
	}
	for _, f := range []ledger.File{stays, later} {
		if row, object := there(f); !row || !object {
			t.Errorf("%s was removed: row %v, object %v", f.ID, row, object)
		}
	}
	e.until("the key is forgotten", func() bool {
		_, mine, err := e.ledger.Remember(t.Context(), job.DefaultTenant, "/v1/files", "k", "another hash", "new", now, time.Hour) // at a time when it was not over
		return err == nil && mine
	})
}

// TestFileThatALiveBatchReadsOutlivesItsTime: it goes when the batch has ended.
func TestFileThatALiveBatchReadsOutlivesItsTime(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	now := e.results.Now()
	read, other := e.storedFile(now+200), e.storedFile(now+200)
	b := e.batchOf(read.ID)
	there := func(f ledger.File) bool {
		_, err := e.ledger.File(t.Context(), f.Tenant, f.ID)
		return err == nil
	}
	e.until("the time is over", func() bool { return e.results.Now() > now+200 })
	d := e.dispatcher(quick)
	e.ok(d.ExpireFiles(t.Context()))
	if !there(read) || there(other) {
		t.Errorf("the file that is read: %v, the other: %v", there(read), there(other))
	}
	e.ok(e.ledger.Lead(t.Context(), 1))
	_, err := e.ledger.RejectBatch(t.Context(), 1, b.ID, e.results.Now(), nil)
	e.ok(err)
	e.ok(d.ExpireFiles(t.Context()))
	if there(read) {
		t.Error("the batch has ended, and the file is there")
	}
}

// TestObjectOfAnExpiredFileThatStaysIsSwept: the store did not answer when the row was gone already.
func TestObjectOfAnExpiredFileThatStaysIsSwept(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	f := e.storedFile(e.results.Now() + 1)
	e.until("the time is over", func() bool { return e.results.Now() > f.Expires })
	_, err := e.ledger.ExpireFiles(t.Context(), e.results.Now(), 10) // and there we crash
	e.ok(err)
	cfg := quick
	cfg.BlobSweep, cfg.BlobAge = 20*time.Millisecond, time.Nanosecond
	e.lead(cfg)
	e.until("the object is gone", func() bool {
		a, err := e.blobs.OpenAt(t.Context(), f.Blob)
		if err == nil {
			_ = a.Close()
		}
		return errors.Is(err, blob.ErrNotFound)
	})
}

func TestObjectsOfNoFileAndIndexesOfEndedBatchesAreSwept(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	put := func(name string) string {
		_, err := e.blobs.Put(t.Context(), name, strings.NewReader("x"))
		e.ok(err)
		return name
	}
	file := e.storedFile(0)
	live, ended := e.batchOf(file.ID), e.batchOf(file.ID)
	e.ok(e.ledger.Lead(t.Context(), 1))
	_, err := e.ledger.RejectBatch(t.Context(), 1, ended.ID, e.results.Now(), nil)
	e.ok(err)
	want := map[string]bool{file.Blob: true, put("batchindex-" + live.ID): true, put("another"): true}
	put("batchindex-" + ended.ID)
	put("batchindex-batch_none")
	for i := range 250 { // more than one look takes
		put(fmt.Sprintf("file-%d", i))
		if i%50 == 0 {
			want[e.storedFile(0).Blob] = true
		}
	}
	names := func() map[string]bool {
		all := map[string]bool{}
		e.ok(e.blobs.List(t.Context(), func(i blob.Info) error { all[i.Name] = true; return nil }))
		return all
	}
	before := names()
	e.ok(e.dispatcher(dispatcher.Config{}).SweepBlobs(t.Context()))
	if diff := cmp.Diff(before, names()); diff != "" {
		t.Errorf("what is young was removed: %s", diff)
	}
	e.ok(e.dispatcher(dispatcher.Config{BlobAge: time.Nanosecond}).SweepBlobs(t.Context()))
	if diff := cmp.Diff(want, names()); diff != "" {
		t.Error(diff)
	}
}
