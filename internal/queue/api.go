package queue

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

const (
	apiPrefix      = "$JS.API."
	defaultTimeout = 5 * time.Second
)

// The server's error codes that decide what is done next.
const (
	codeResources        = 10002 // the account's limits
	codeNoPeers          = 10005 // nodes do not know each other's stores yet
	codeUnavailable      = 10008
	codeNotLeader        = 10009
	codeNoConsumer       = 10014
	codeInsufficient     = 10023
	codeMemory           = 10028
	codeNoMessage        = 10037
	codeNoSequence       = 10043
	codeStorage          = 10047
	codeDeleteFailed     = 10057
	codeNameInUse        = 10058
	codeNoStream         = 10059
	codeWrongLast        = 10071
	codeStoreFailed      = 10077
	codeFilterTaken      = 10100
	codeStreamOffline    = 10118
	codeExpectLater      = 10163 // the expected sequence cannot be checked yet
	codeWrongLastPending = 10164 // another message on the subject is on its way into a replicated stream
	codeTooMany          = 10167
	codeStreamOfflineFor = 10194
)

// errNoStream says that nothing listens on the subject: the stream is gone, or has no leader. Nothing was stored.
var errNoStream = errors.New("no stream takes the subject")

// errPending says that another message on the same subject is about to be stored: whether it will be is not known yet.
var errPending = errors.New("another copy is being stored")

// bound gives ctx the default deadline if it has none, and ends it when the connection is lost: an answer to what was asked before will not come.
func (q *Queue) bound(ctx context.Context) (context.Context, context.CancelFunc) {
	deadline, has := ctx.Deadline()
	if !has {
		deadline = time.Now().Add(defaultTimeout)
	}
	ctx, cancel := context.WithDeadline(ctx, deadline)
	q.mu.Lock()
	link := q.link
	q.mu.Unlock()
	stop := context.AfterFunc(link, cancel)
	return ctx, func() {
		stop()
		cancel()
	}
}

// brief is bound, for defaultTimeout at most.
func (q *Queue) brief(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(ctx, defaultTimeout)
	ctx, unbind := q.bound(ctx)
	return ctx, func() {
		unbind()
		cancel()
	}
}

// transport turns what went wrong on the way to the server into this package's errors.
func transport(err error) error {
	switch {
	case errors.Is(err, nats.ErrNoResponders):
		return errNoStream
	case errors.Is(err, nats.ErrMaxPayload), errors.Is(err, nats.ErrBadSubject):
		return fmt.Errorf("%w: %w", ErrRefused, err)
	case errors.Is(err, context.Canceled):
		// Not passed on as what it is: most often the connection's end, and not the caller's, has ended the context.
		return fmt.Errorf("%w: the call was cut off", ErrUnavailable)
	default:
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
}

// refusal turns the server's answer into this package's errors.
func refusal(e *jetstream.APIError) error {
	switch e.ErrorCode {
	case codeWrongLast:
		return ErrExists
	case codeWrongLastPending, codeExpectLater:
		return errPending
	case codeNoStream, codeStreamOffline, codeStreamOfflineFor:
		return errNoStream
	case codeResources, codeInsufficient, codeMemory, codeStorage, codeStoreFailed:
		return fmt.Errorf("%w: %w", ErrFull, e)
	case codeUnavailable, codeNotLeader, codeNoPeers, codeTooMany:
		return fmt.Errorf("%w: %w", ErrUnavailable, e)
	case codeNoMessage:
		return ErrNotFound
	}
	if e.Code >= 500 { // the server's own trouble
		return fmt.Errorf("%w: %w", ErrUnavailable, e)
	}
	return fmt.Errorf("%w: %w", ErrRefused, e)
}

// classify is refusal for errors that come from the jetstream package.
func classify(err error) error {
	var e *jetstream.APIError
	if errors.As(err, &e) {
		return refusal(e)
	}
	return transport(err)
}

// transient tells whether err says nothing about what was asked: another try may do.
func transient(err error) bool {
	var e *jetstream.APIError
	return !errors.As(err, &e) || hasCode(err, codeResources, codeUnavailable, codeNotLeader, codeNoPeers, codeInsufficient, codeMemory, codeStorage,
		codeNoStream, codeStreamOffline, codeStreamOfflineFor, codeTooMany)
}

func hasCode(err error, codes ...jetstream.ErrorCode) bool {
	var e *jetstream.APIError
	if !errors.As(err, &e) {
		return false
	}
	for _, c := range codes {
		if e.ErrorCode == c {
			return true
		}
	}
	return false
}

// publish sends m and returns its sequence once the stream has stored it.
func (q *Queue) publish(ctx context.Context, m *nats.Msg) (uint64, error) {
	reply, err := q.nc.RequestMsgWithContext(ctx, m)
	if err != nil {
		if errors.Is(err, nats.ErrMaxPayload) {
			err = fmt.Errorf("%w: the message has %d bytes, the server takes %d", err, m.Size(), q.nc.MaxPayload())
		}
		return 0, transport(err)
	}
	var ack struct {
		Error *jetstream.APIError `json:"error"`
		Seq   uint64              `json:"seq"`
	}
	if err := json.Unmarshal(reply.Data, &ack); err != nil {
		return 0, fmt.Errorf("%w: reading the server's answer: %w", ErrUnavailable, err)
	}
	if ack.Error != nil {
		return 0, refusal(ack.Error)
	}
	return ack.Seq, nil
}

// call asks the JetStream API for what into.
func (q *Queue) call(ctx context.Context, what string, request, into any) error {
	ctx, cancel := q.bound(ctx)
	defer cancel()
	data, err := json.Marshal(request)
	if err != nil {
		return fmt.Errorf("writing a request: %w", err)
	}
	reply, err := q.nc.RequestWithContext(ctx, apiPrefix+what, data)
	if errors.Is(err, nats.ErrNoResponders) { // JetStream itself is away, which says nothing of the stream
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	if err != nil {
		return transport(err)
	}
	var answer struct {
		Error *jetstream.APIError `json:"error"`
	}
	if err := json.Unmarshal(reply.Data, &answer); err != nil {
		return fmt.Errorf("%w: reading the server's answer: %w", ErrUnavailable, err)
	}
	if answer.Error != nil {
		return refusal(answer.Error)
	}
	if into == nil {
		return nil
	}
	if err := json.Unmarshal(reply.Data, into); err != nil {
		return fmt.Errorf("%w: reading the server's answer: %w", ErrUnavailable, err)
	}
	return nil
}

// raw is a message as a stream holds it.
type raw struct {
	subject string
	seq     uint64
	time    time.Time
	header  nats.Header
	data    []byte
}

type getRequest struct {
	Seq      uint64 `json:"seq,omitempty"`
	Last     string `json:"last_by_subj,omitempty"`
	Next     string `json:"next_by_subj,omitempty"`
	Batch    int    `json:"batch,omitempty"`
	MaxBytes int    `json:"max_bytes,omitempty"`
}

// leaderGet reads one message from the stream's leader. ErrNotFound is certain.
func (q *Queue) leaderGet(ctx context.Context, stream string, r getRequest) (*raw, error) {
	var answer struct {
		Message struct {
			Subject string    `json:"subject"`
			Seq     uint64    `json:"seq"`
			Header  []byte    `json:"hdrs"`
			Data    []byte    `json:"data"`
			Time    time.Time `json:"time"`
		} `json:"message"`
	}
	if err := q.call(ctx, "STREAM.MSG.GET."+stream, r, &answer); err != nil {
		return nil, err
	}
	m := answer.Message
	h, err := nats.DecodeHeadersMsg(m.Header)
	if err != nil && len(m.Header) > 0 {
		return nil, fmt.Errorf("message %d of %s: reading its headers: %w", m.Seq, stream, err)
	}
	return &raw{m.Subject, m.Seq, m.Time, h, m.Data}, nil
}

// directLast reads the last message on subject from any replica, so that ErrNotFound may be stale.
func (q *Queue) directLast(ctx context.Context, stream, subject string) (*raw, error) {
	ctx, cancel := q.bound(ctx)
	defer cancel()
	reply, err := q.nc.RequestWithContext(ctx, apiPrefix+"DIRECT.GET."+stream+"."+subject, nil)
	if err != nil {
		return nil, transport(err)
	}
	return direct(reply)
}

// directPage reads up to batch messages on filter from sequence seq on, from any replica. last says that there are none after them.
func (q *Queue) directPage(ctx context.Context, stream, filter string, seq uint64, batch, maxBytes int) (page []*raw, last bool, err error) {
	ctx, cancel := q.bound(ctx)
	defer cancel()
	inbox := q.nc.NewInbox()
	sub, err := q.nc.SubscribeSync(inbox)
	if err != nil {
		return nil, false, transport(err)
	}
	defer sub.Unsubscribe()          //nolint:errcheck // the connection is closed: so is the subscription
	_ = sub.SetPendingLimits(-1, -1) // bounded by the request
	data, err := json.Marshal(getRequest{Seq: max(seq, 1), Next: filter, Batch: batch, MaxBytes: maxBytes})
	if err != nil {
		return nil, false, fmt.Errorf("writing a request: %w", err)
	}
	if err := q.nc.PublishRequest(apiPrefix+"DIRECT.GET."+stream, inbox, data); err != nil {
		return nil, false, transport(err)
	}
	for {
		// An answer that is cut in half must not look like a short one, so the end is the server's mark and nothing else.
		m, err := sub.NextMsgWithContext(ctx)
		if err != nil {
			return nil, false, transport(err)
		}
		if m.Header.Get("Status") == "204" {
			left, _ := strconv.ParseUint(m.Header.Get("Nats-Num-Pending"), 10, 64)
			return page, left == 0 || len(page) == 0, nil
		}
		one, err := direct(m)
		if errors.Is(err, ErrNotFound) {
			return page, true, nil
		}
		if err != nil {
			return nil, false, err
		}
		page = append(page, one)
	}
}

// direct reads the answer to a direct read. A status has no subject; a stored message always has.
func direct(m *nats.Msg) (*raw, error) {
	subject := m.Header.Get("Nats-Subject")
	if subject == "" {
		switch status := m.Header.Get("Status"); status {
		case "404":
			return nil, ErrNotFound
		case "503":
			return nil, errNoStream
		default:
			return nil, fmt.Errorf("%w: a direct read got %s %s", ErrUnavailable, status, m.Header.Get("Description"))
		}
	}
	seq, err := strconv.ParseUint(m.Header.Get("Nats-Sequence"), 10, 64)
	if err != nil {
		return nil, fmt.Errorf("%w: a direct read's sequence: %w", ErrUnavailable, err)
	}
	t, err := time.Parse(time.RFC3339Nano, m.Header.Get("Nats-Time-Stamp"))
	if err != nil {
		return nil, fmt.Errorf("%w: a direct read's time: %w", ErrUnavailable, err)
	}
	return &raw{subject, seq, t, m.Header, m.Data}, nil
}

// remove deletes one message of a stream; one that is gone is no error.
func (q *Queue) remove(ctx context.Context, stream string, seq uint64) error {
	err := q.call(ctx, "STREAM.MSG.DELETE."+stream, map[string]any{"seq": seq, "no_erase": true}, nil)
	if hasCode(err, codeNoSequence, codeDeleteFailed) {
		// The server says the same of a message that is not there and of one that it could not delete.
		if _, err := q.leaderGet(ctx, stream, getRequest{Seq: seq}); errors.Is(err, ErrNotFound) {
			return nil
		}
	}
	return err
}

// subjects lists the subjects of a stream that match filter, as its leader has them, with the number of messages on each.
func (q *Queue) subjects(ctx context.Context, stream, filter string, each func(subject string, n int) error) error {
	for offset := 0; ; {
		var answer struct {
			State struct {
				Subjects map[string]int `json:"subjects"`
			} `json:"state"`
			Total int `json:"total"`
		}
		request := map[string]any{"subjects_filter": filter, "offset": offset}
		if err := q.call(ctx, "STREAM.INFO."+stream, request, &answer); err != nil {
			return err
		}
		for s, n := range answer.State.Subjects {
			if err := each(s, n); err != nil {
				return err
			}
		}
		offset += len(answer.State.Subjects)
		if len(answer.State.Subjects) == 0 || offset >= answer.Total {
			return nil
		}
	}
}
