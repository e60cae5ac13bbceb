package queue

import (
	"bytes"
	"encoding/json"
	"fmt"
	"unicode/utf8"

	"github.com/nats-io/nats.go"

	"github.com/millrace/millrace/internal/job"
)

// The headers of stored messages. All headers of a publish are built from this list and from what the server is to check: a copied
// Nats-Batch header would make it refuse the copy for ever.
const (
	headerJob     = "Millrace-Job"     // job.Job as JSON
	headerOutcome = "Millrace-Outcome" // job.Outcome as JSON
	headerExpect  = "Nats-Expected-Last-Subject-Sequence"
)

// The server takes 65,535 bytes of headers. A job that fits its share when it is enqueued fits again beside its outcome.
const (
	maxJobHeader     = 56 << 10
	maxOutcomeHeader = 7 << 10
)

// envelope is a message on its way to a stream.
type envelope struct {
	stream, subject string
	job, outcome    string // header values; outcome is "" but in DONE
	expect          string // the sequence that the subject's last message must have, "0" for none
	data            []byte
}

// msg builds the message anew each time: a batch writes into the headers of those it is given.
func (e *envelope) msg() *nats.Msg {
	h := make(nats.Header, 6)
	h[headerExpect] = []string{e.expect}
	h[headerJob] = []string{e.job}
	if e.outcome != "" {
		h[headerOutcome] = []string{e.outcome}
	}
	return &nats.Msg{Subject: e.subject, Header: h, Data: e.data}
}

func (e *envelope) size() int { return len(e.subject) + len(e.job) + len(e.outcome) + len(e.data) }

// encode returns v as compact JSON that a header can hold: in ASCII, or, where escaping would make that too long, in UTF-8, which headers carry as well.
func encode(v any, limit int) (string, error) {
	var buf bytes.Buffer
	e := json.NewEncoder(&buf)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return "", err
	}
	b := bytes.TrimSuffix(buf.Bytes(), []byte{'\n'})
	if len(b) <= limit {
		if a := ascii(b); len(a) <= limit {
			b = a
		}
		return string(b), nil
	}
	return "", fmt.Errorf("%d bytes of header, at most %d", len(b), limit)
}

// ascii escapes what is not ASCII in valid JSON text. It returns b itself if there is nothing to escape.
func ascii(b []byte) []byte {
	i := 0
	for i < len(b) && b[i] < utf8.RuneSelf {
		i++
	}
	if i == len(b) {
		return b
	}
	out := make([]byte, i, len(b)+len(b)/2)
	copy(out, b)
	for i < len(b) {
		if b[i] < utf8.RuneSelf {
			out = append(out, b[i])
			i++
			continue
		}
		r, n := utf8.DecodeRune(b[i:])
		i += n
		if r > 0xFFFF {
			r -= 0x10000
			out = fmt.Appendf(out, `\u%04x\u%04x`, 0xD800+r>>10, 0xDC00+r&0x3FF)
		} else {
			out = fmt.Appendf(out, `\u%04x`, r)
		}
	}
	return out
}

func encodeJob(j *job.Job) (string, error) {
	s, err := encode(j, maxJobHeader)
	if err != nil {
		return "", fmt.Errorf("%w: writing job %s: %w", ErrRefused, j.ID, err)
	}
	return s, nil
}

// encodeOutcome never refuses: an outcome must be stored. What does not fit loses the middle of its attempts, then the end of its error's text.
func encodeOutcome(o job.Outcome) (string, error) {
	s, err := encode(o, maxOutcomeHeader)
	if err == nil {
		return s, nil
	}
	if n := len(o.Attempts); n > 8 {
		o.Attempts = append(append(make([]job.Attempt, 0, 8), o.Attempts[:4]...), o.Attempts[n-4:]...)
	}
	if o.Error != nil && len(o.Error.Message) > 2<<10 {
		short := *o.Error
		short.Message = string(bytes.ToValidUTF8([]byte(short.Message[:2<<10]), nil)) + "…"
		o.Error = &short
	}
	if s, err = encode(o, maxOutcomeHeader); err != nil {
		return "", fmt.Errorf("%w: writing an outcome: %w", ErrRefused, err)
	}
	return s, nil
}

func decodeJob(h nats.Header) (job.Job, error) {
	var j job.Job
	text := h.Get(headerJob)
	if text == "" {
		return j, fmt.Errorf("no header %s", headerJob)
	}
	if err := json.Unmarshal([]byte(text), &j); err != nil {
		return j, fmt.Errorf("reading the header %s: %w", headerJob, err)
	}
	return j, nil
}

// decodeStored reads a job's message. Without keep the body is left out.
func decodeStored(m *raw, kind Kind, keep bool) (*Stored, error) {
	p, err := parsePlace(m.subject)
	if err != nil {
		return nil, err
	}
	j, err := decodeJob(m.header)
	if err != nil {
		return nil, fmt.Errorf("message %d on %s: %w", m.seq, m.subject, err)
	}
	s := &Stored{Message: Message{Job: j}, Kind: kind, Lane: p.lane, Seq: m.seq, Time: m.time}
	if keep && j.Blob == "" {
		s.Body = m.data
	}
	return s, nil
}

func decodeRecord(m *raw) (*Record, error) {
	j, err := decodeJob(m.header)
	if err != nil {
		return nil, fmt.Errorf("record %d on %s: %w", m.seq, m.subject, err)
	}
	r := &Record{Job: j, Seq: m.seq}
	if err := json.Unmarshal([]byte(m.header.Get(headerOutcome)), &r.Outcome); err != nil {
		return nil, fmt.Errorf("record %d on %s: reading the header %s: %w", m.seq, m.subject, headerOutcome, err)
	}
	if len(m.data) > 0 {
		r.Result = m.data
	}
	return r, nil
}
