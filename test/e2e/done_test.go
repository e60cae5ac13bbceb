package e2e_test

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
)

// connect makes a connection of the test's own to a NATS server.
func connect(t testing.TB, url string) *nats.Conn {
	t.Helper()
	var nc *nats.Conn
	eventually(t, patience, "NATS takes a connection", func() (err error) {
		nc, err = nats.Connect(url, nats.Timeout(2*time.Second))
		return err
	})
	t.Cleanup(nc.Close)
	return nc
}

// ask asks JetStream's own API, whose answers are JSON.
func ask(nc *nats.Conn, subject string, question, answer any) error {
	raw, err := json.Marshal(question)
	if err != nil {
		return err
	}
	m, err := nc.Request("$JS.API."+subject, raw, 5*time.Second)
	if err != nil {
		return err
	}
	var failed struct {
		Error *struct {
			Code int    `json:"err_code"`
			Text string `json:"description"`
		} `json:"error"`
	}
	if err := json.Unmarshal(m.Data, &failed); err != nil {
		return err
	}
	if failed.Error != nil {
		if failed.Error.Code == 10037 {
			return errNoMessage
		}
		return fmt.Errorf("%s: %s (%d)", subject, failed.Error.Text, failed.Error.Code)
	}
	return json.Unmarshal(m.Data, answer)
}

var errNoMessage = errors.New("no such message")

// stored is a message of a stream.
type stored struct {
	subject string
	header  nats.Header
	size    int
}

// messages reads all of a stream.
func messages(t testing.TB, nc *nats.Conn, name string) []stored {
	t.Helper()
	var all []stored
	for seq := uint64(1); ; {
		var a struct {
			Message struct {
				Subject string `json:"subject"`
				Seq     uint64 `json:"seq"`
				Header  string `json:"hdrs"`
				Data    string `json:"data"`
			} `json:"message"`
		}
		err := ask(nc, "STREAM.MSG.GET."+name, map[string]any{"seq": seq, "next_by_subj": ">"}, &a)
		if errors.Is(err, errNoMessage) {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		raw, err := base64.StdEncoding.DecodeString(a.Message.Header)
		if err != nil {
			t.Fatal(err)
		}
		h, err := nats.DecodeHeadersMsg(raw)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, stored{subject: a.Message.Subject, header: h, size: len(a.Message.Data)})
		seq = a.Message.Seq + 1
	}
}

// outcome is a record of DONE.
type outcome struct {
	State    string `json:"state"`
	Attempts []struct {
		Outcome string `json:"outcome"`
	} `json:"attempts"`
}

// outcomes reads DONE, and fails the test if a job has more than one record, or if a record was ever replaced.
func outcomes(t testing.TB, nc *nats.Conn) map[string]outcome {
	t.Helper()
	var info struct {
		State struct {
			Messages uint64 `json:"messages"`
			First    uint64 `json:"first_seq"`
			Last     uint64 `json:"last_seq"`
		} `json:"state"`
	}
	if err := ask(nc, "STREAM.INFO.DONE", map[string]any{}, &info); err != nil {
		t.Fatal(err)
	}
	if s := info.State; s.Messages > 0 && (s.First != 1 || s.Last != s.Messages) {
		t.Errorf("DONE has %d records from %d to %d: some were replaced or removed", s.Messages, s.First, s.Last)
	}
	all := make(map[string]outcome)
	for _, m := range messages(t, nc, "DONE") {
		var j struct {
			ID string `json:"id"`
		}
		if err := json.Unmarshal([]byte(m.header.Get("Millrace-Job")), &j); err != nil {
			t.Fatalf("the record on %s: %v", m.subject, err)
		}
		id := j.ID
		if _, twice := all[id]; twice {
			t.Errorf("job %s has two records", id)
		}
		var o outcome
		if err := json.Unmarshal([]byte(m.header.Get("Millrace-Outcome")), &o); err != nil {
			t.Fatalf("the record of %s: %v", id, err)
		}
		all[id] = o
	}
	return all
}

// exactlyOnce waits until the jobs have ended and asserts that each has one outcome, and that the API tells the same. It returns the jobs.
func exactlyOnce(t testing.TB, nc *nats.Conn, c *client, within time.Duration, ids ...string) map[string]*jobView {
	t.Helper()
	jobs := c.ended(within, ids...)
	records := outcomes(t, nc)
	for _, id := range ids {
		record, ok := records[id]
		switch {
		case !ok:
			t.Errorf("job %s is %s and has no record", id, jobs[id].Status)
		case record.State != jobs[id].Status:
			t.Errorf("job %s is %s by the API and %s by its record", id, jobs[id].Status, record.State)
		}
	}
	return jobs
}

// held is how many messages a stream holds.
func held(nc *nats.Conn, stream string) (int, error) {
	var info struct {
		State struct {
			Messages int `json:"messages"`
		} `json:"state"`
	}
	err := ask(nc, "STREAM.INFO."+stream, map[string]any{}, &info)
	return info.State.Messages, err
}

// workEmpty waits until no work is left in the streams of the model: every message is acknowledged.
func workEmpty(t testing.TB, nc *nats.Conn) {
	t.Helper()
	eventually(t, patience, "the streams hold no work", func() error {
		for _, name := range []string{"WORK_" + model, "LIVE_" + model} {
			if n, err := held(nc, name); err != nil || n > 0 {
				return fmt.Errorf("%s holds %d messages: %w", name, n, err)
			}
		}
		return nil
	})
}

// queues is what GET /admin/v1/queues tells of the model.
type queues struct {
	Waiting map[string]int `json:"waiting"`
	Lines   map[string]int `json:"waiting_lines"`
	Running int            `json:"running"`
	Workers map[string]int `json:"workers"`
}

func (c *client) queues() (*queues, error) {
	a, err := c.send("GET", "/admin/v1/queues", nil)
	if err != nil {
		return nil, err
	}
	if a.status != http.StatusOK {
		return nil, fmt.Errorf("it answers %d: %s", a.status, a.body)
	}
	var list struct {
		Data []queues `json:"data"`
	}
	if err := json.Unmarshal(a.body, &list); err != nil {
		return nil, err
	}
	if len(list.Data) != 1 {
		return nil, fmt.Errorf("there are %d queues", len(list.Data))
	}
	return &list.Data[0], nil
}
