package relay

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"mime"
	"net/http"

	"github.com/millrace/millrace/internal/job"
)

// MaxBuffered bounds the bytes of one answer that either side keeps.
const MaxBuffered = 64 << 20

// maxPiece is how many bytes of a body one message carries at most.
const maxPiece = 256 << 10

// Part is one piece of an answer.
type Part struct {
	// Head comes first: the engine's status and content type.
	Head *Head
	// Data is a piece of the body: for a stream one or more whole SSE events' raw bytes; else any piece. At most 256 KiB are sent in one message; larger ones are split and joined in order, not re-framed.
	Data []byte
	// End comes last.
	End *End
}

// Head of an answer.
type Head struct {
	StatusCode  int    `json:"status_code"`
	ContentType string `json:"content_type"`
	// Continues: what follows goes on behind what the client has, as Claimed.Shown told it.
	Continues bool `json:"continues,omitempty"`
}

// stream tells whether a stream of events follows.
func (h *Head) stream() bool {
	media, _, err := mime.ParseMediaType(h.ContentType)
	return err == nil && media == "text/event-stream" && h.StatusCode == http.StatusOK
}

// End of an answer. Error is set when the attempt ended without a whole answer: the job failed for good. Retry says that the job was given back and another attempt will follow; then no part of the answer
// had been read before, or one of a stream that can be gone on with.
type End struct {
	Error *job.Error `json:"error,omitempty"`
	Usage *job.Usage `json:"usage,omitempty"`
	Retry bool       `json:"retry,omitempty"`
	// Charged, with Retry: the attempt counts among the job's tries.
	Charged bool      `json:"charged,omitempty"`
	Reason  string    `json:"reason,omitempty"`
	State   job.State `json:"state,omitempty"`
}

// kind of a message between an answer's two sides. Numbers are only added: versions run side by side, and ignore kinds that they do not know.
type kind byte

// From the worker to the API. The number of tell is that of the last part sent, so that a lost one shows; left gives the job back without an End.
const (
	kindHead kind = 1
	kindData kind = 2
	kindEnd  kind = 3
	kindTell kind = 4
	kindLeft kind = 5
)

// From the API to the worker. The number of have is that of the last part received in order, of again that of the first one to be sent once more.
// gone and held end the attempt with ErrGone and ErrHeld; known asks whether the attempt still runs, and is answered by left if not.
const (
	kindHave  kind = 65
	kindAgain kind = 66
	kindGone  kind = 67
	kindHeld  kind = 68
	kindKnown kind = 69
)

// message is what travels: the kind, the token and the number as 8 bytes each, big-endian, the job's id behind its length in one byte, and the rest.
type message struct {
	kind kind
	attempt
	seq  uint64
	body []byte
}

const (
	headSize = 1 + 8 + 8 + 1
	maxID    = 255
)

var errShort = errors.New("the message is cut short")

func (m message) encode() []byte {
	b := make([]byte, 0, headSize+len(m.id)+len(m.body))
	b = append(b, byte(m.kind))
	b = binary.BigEndian.AppendUint64(b, uint64(m.token))
	b = binary.BigEndian.AppendUint64(b, m.seq)
	b = append(b, byte(len(m.id)))
	b = append(b, m.id...)
	return append(b, m.body...)
}

// decode reads a message; its body is a part of b.
func decode(b []byte) (message, error) {
	if len(b) < headSize || len(b) < headSize+int(b[headSize-1]) {
		return message{}, errShort
	}
	end := headSize + int(b[headSize-1])
	return message{
		kind: kind(b[0]), seq: binary.BigEndian.Uint64(b[9:]),
		attempt: attempt{token: job.Token(binary.BigEndian.Uint64(b[1:])), id: job.ID(b[headSize:end])}, //nolint:gosec // it was encoded so
		body:    b[end:],
	}, nil
}

// part is the Part that m carries.
func (m message) part() (*Part, error) {
	p := &Part{}
	var err error
	switch m.kind {
	case kindHead:
		p.Head = &Head{}
		err = json.Unmarshal(m.body, p.Head)
	case kindData:
		p.Data = m.body
	case kindEnd:
		p.End = &End{}
		err = json.Unmarshal(m.body, p.End)
	}
	if err != nil {
		return nil, fmt.Errorf("reading part %d of the answer of job %s: %w", m.seq, m.id, err)
	}
	return p, nil
}
