package queue_test

import (
	"bufio"
	"bytes"
	"flag"
	"fmt"
	"maps"
	"net/textproto"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
)

var update = flag.Bool("update", false, "write the golden file of the newest version")

// Stored messages outlive deploys. The newest golden file is what is written today; a change of the form gets a new file, and the old ones stay,
// for what they hold must still be read.
const newest = "v1"

func goldenJob() job.Job {
	return job.Job{
		ID: "job_06h2mf638jsu1i3qko88aq8dosqt7v5n89u0", Tenant: "te.nant", Model: model, Endpoint: job.ChatCompletions, Class: job.Standard,
		Group: "batch_1", Session: "s", Events: true, Stream: true, Created: 1796021732164, Expires: 1796025332164,
		QueueTimeout: 1000, RunTimeout: 2000, Metadata: map[string]string{"k": "ü🎉<&>\n"}, Key: "k0", BodyHash: "h0",
		Cost: job.Cost{Prompt: 9, Output: 16, Answers: 2}, BodySize: 11,
	}
}

func goldenRecord() *queue.Record {
	failed := job.NewError(job.TypeServer, job.CodeEngineError, "ü")
	return &queue.Record{
		Job: goldenJob(),
		Outcome: job.Outcome{
			State: job.Failed, Token: 1796021732999, StatusCode: 500, ContentType: "application/json", Error: failed,
			Usage:    &job.Usage{PromptTokens: 1, CompletionTokens: 2, TotalTokens: 3, CachedTokens: 4, ReasoningTokens: 5},
			Attempts: []job.Attempt{{Worker: "w", Started: 1, Ended: 2, Outcome: "failed"}},
			Started:  1, FirstToken: 2, Finished: 3, LastEvent: 4, ResultSize: 8,
		},
		Result: []byte("{\"a\":\xff}"),
	}
}

func text(subject string, h nats.Header, data []byte) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "Subject: %s\n", subject)
	for _, k := range slices.Sorted(maps.Keys(h)) {
		fmt.Fprintf(&b, "%s: %s\n", k, h.Get(k))
	}
	fmt.Fprintf(&b, "\n%s", data)
	return b.Bytes()
}

func TestStoredMessagesAreAsEver(t *testing.T) {
	t.Parallel()
	q, nc := fresh(t, queue.Config{})
	body := []byte("{\"model\":1\x00}")
	enqueue(t, q, queue.Work, queue.TenantLane("te.nant"), &queue.Message{Job: goldenJob(), Body: body})
	if _, err := q.Settle(t.Context(), goldenRecord()); err != nil {
		t.Fatal(err)
	}
	for stream, name := range map[string]string{workStream: "work", "DONE": "done"} {
		s, err := admin(t, nc).Stream(t.Context(), stream)
		if err != nil {
			t.Fatal(err)
		}
		raw, err := s.GetMsg(t.Context(), 1, jetstream.WithGetMsgSubject(">"))
		if err != nil {
			t.Fatal(err)
		}
		for k := range raw.Header {
			if !bytes.HasPrefix([]byte(k), []byte("Millrace-")) && k != "Nats-Expected-Last-Subject-Sequence" {
				raw.Header.Del(k) // what a direct read adds
			}
		}
		got := text(raw.Subject, raw.Header, raw.Data)
		file := filepath.Join("testdata", name+"-"+newest+".txt")
		if *update {
			if err := os.WriteFile(file, got, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(want), string(got)); diff != "" {
			t.Errorf("%s: %s", file, diff)
		}
	}
}

func TestOldMessagesAreRead(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) < 2 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		raw, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		head, data, _ := bytes.Cut(raw, []byte("\n\n"))
		h, err := textproto.NewReader(bufio.NewReader(bytes.NewReader(append(head, "\n\n"...)))).ReadMIMEHeader()
		if err != nil {
			t.Fatal(err)
		}
		subject := h.Get("Subject")
		h.Del("Subject")
		q, nc := fresh(t, queue.Config{})
		if err := q.EnsureModel(t.Context(), model); err != nil {
			t.Fatal(err)
		}
		if _, err := admin(t, nc).PublishMsg(t.Context(), &nats.Msg{Subject: subject, Header: nats.Header(h), Data: data}); err != nil {
			t.Fatal(err)
		}
		want := goldenJob()
		if bytes.HasPrefix([]byte(subject), []byte("done.")) {
			r, err := q.FindOutcome(t.Context(), want.ID)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(goldenRecord(), r, cmpopts.IgnoreFields(queue.Record{}, "Seq")); diff != "" {
				t.Errorf("%s: %s", file, diff)
			}
			continue
		}
		s, err := q.Find(t.Context(), "", want.ID)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(queue.Message{Job: want, Body: data}, s.Message); diff != "" || s.Lane != queue.TenantLane("te.nant") {
			t.Errorf("%s: %s", file, diff)
		}
	}
}
