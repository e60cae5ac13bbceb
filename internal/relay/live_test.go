package relay_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/relay"
	"github.com/millrace/millrace/internal/testenv"
)

const api job.API = "api 1.x"

func newDesk(t testing.TB, r *relay.Relay) *relay.Desk {
	t.Helper()
	d, err := r.Desk(t.Context(), api, testenv.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// claimed claims id for w and opens the answer.
func claimed(t testing.TB, r *relay.Relay, id job.ID, w job.Worker) (*relay.Answer, *relay.Claimed) {
	t.Helper()
	c, err := r.Claim(t.Context(), api, relay.ClaimRequest{ID: id, Worker: w, AckSubject: "ack." + string(w)})
	if err != nil {
		t.Fatal(err)
	}
	a, err := r.Answer(api, id, c.Token)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(a.Close)
	return a, c
}

// read takes the whole answer.
func read(t testing.TB, s *relay.Seat) (head *relay.Head, body []byte, end *relay.End) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	for {
		p, err := s.Next(ctx)
		if errors.Is(err, io.EOF) {
			return head, body, end
		}
		if err != nil {
			t.Fatalf("after %d bytes: %v", len(body), err)
		}
		if p.Head != nil {
			head = p.Head
		}
		body = append(body, p.Data...)
		if p.End != nil {
			end = p.End
		}
	}
}

func send(t testing.TB, a *relay.Answer, p relay.Part) {
	t.Helper()
	if err := a.Send(p); err != nil {
		t.Fatal(err)
	}
}

func finish(t testing.TB, a *relay.Answer, e relay.End) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	return a.Finish(ctx, e)
}

func TestAnAnswerArrivesWholeAndInOrder(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	d, w := newDesk(t, newRelay(t, s)), newRelay(t, s)
	seat := d.Expect("job_1")
	defer seat.Close()
	if worker, _, _ := seat.Holder(); worker != "" || seat.Started() {
		t.Errorf("before the claim: held by %q, started %v", worker, seat.Started())
	}
	a, c := claimed(t, w, "job_1", "w1")
	if worker, ack, token := seat.Holder(); worker != "w1" || ack != "ack.w1" || token != c.Token {
		t.Errorf("held by %q, %q, %d", worker, ack, token)
	}
	if now := job.Token(time.Now().UnixMilli()); c.Token > now || c.Token < now-20_000 || c.Charged != 0 {
		t.Errorf("claimed %+v", c)
	}
	head := &relay.Head{StatusCode: 200, ContentType: "text/event-stream"}
	send(t, a, relay.Part{Head: head, Data: []byte("data: 1\n\n")})
	buffer := []byte("data: 2\n\n")
	send(t, a, relay.Part{Data: buffer})
	copy(buffer, "overwrite")
	usage := &job.Usage{PromptTokens: 3, CompletionTokens: 2, TotalTokens: 5}
	done := make(chan error, 1)
	go func() { done <- a.Finish(context.Background(), relay.End{Usage: usage, State: job.Completed}) }()
	h, body, end := read(t, seat)
	if err := within(t, "the end", done); err != nil {
		t.Error(err)
	}
	if d := cmp.Diff(head, h) + cmp.Diff("data: 1\n\ndata: 2\n\n", string(body)) + cmp.Diff(&relay.End{Usage: usage, State: job.Completed}, end); d != "" {
		t.Error(d)
	}
	if worker, _, _ := seat.Holder(); worker != "" || !seat.Started() || len(d.Seats()) != 0 {
		t.Errorf("after the end: held by %q, started %v, waiting %v", worker, seat.Started(), d.Seats())
	}
	if _, err := w.Claim(t.Context(), api, relay.ClaimRequest{ID: "job_1", Worker: "w2", AckSubject: "ack.w2"}); !errors.Is(err, relay.ErrGone) {
		t.Errorf("a claim after the end: %v", err)
	}
	if err := a.Send(relay.Part{Data: []byte("more")}); err == nil {
		t.Error("a part after the end is accepted")
	}
}

func TestPartsSurviveCutConnections(t *testing.T) {
	t.Parallel()
	const parts = 10_000
	s := newServer(t)
	apiConn, workerConn := connect(t, s), connect(t, s)
	d, w := newDesk(t, relay.New(apiConn, testenv.Log(t))), relay.New(workerConn, testenv.Log(t))
	seat := d.Expect("job_1")
	defer seat.Close()
	a, _ := claimed(t, w, "job_1", "w1")
	var want bytes.Buffer
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := range parts {
			p := fmt.Appendf(nil, "%d\n", i)
			want.Write(p)
			if err := a.Send(relay.Part{Data: p}); err != nil {
				t.Error(err)
				return
			}
			switch {
			case i == parts/2:
				s.stop()
				s.start(t)
			case i%500 == 250:
				conn := workerConn
				if i%1000 == 250 {
					conn = apiConn
				}
				if err := conn.ForceReconnect(); err != nil {
					t.Error(err)
				}
			case i%100 == 0:
				time.Sleep(time.Millisecond) // a stream takes its time: cuts then meet parts under way
			}
		}
		if err := finish(t, a, relay.End{State: job.Completed}); err != nil {
			t.Error(err)
		}
	})
	_, body, end := read(t, seat)
	wg.Wait()
	if !bytes.Equal(body, want.Bytes()) {
		t.Errorf("%d bytes came of %d, or others", len(body), want.Len())
	}
	if end == nil || end.State != job.Completed {
		t.Errorf("end %+v", end)
	}
}

func TestABigPartIsSplitAndJoined(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	d, w := newDesk(t, newRelay(t, s)), newRelay(t, s)
	seat := d.Expect("job_1")
	defer seat.Close()
	a, _ := claimed(t, w, "job_1", "w1")
	want := make([]byte, 8<<20)
	for i := range want {
		want[i] = byte(rand.N(256))
	}
	send(t, a, relay.Part{Data: want})
	if err := finish(t, a, relay.End{}); err != nil {
		t.Fatal(err)
	}
	if _, body, _ := read(t, seat); !bytes.Equal(body, want) {
		t.Errorf("%d bytes came, or others", len(body))
	}
}

func TestAReaderThatDoesNotReadBoundsTheAnswer(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	d, w := newDesk(t, newRelay(t, s)), newRelay(t, s)
	seat := d.Expect("job_1")
	defer seat.Close()
	a, _ := claimed(t, w, "job_1", "w1")
	piece := make([]byte, 256<<10)
	sent := 0
	for cancelled := false; !cancelled && sent < 4*relay.MaxBuffered; {
		if err := a.Send(relay.Part{Data: piece}); err != nil { // ahead of the acknowledgements
			time.Sleep(time.Millisecond)
			continue
		}
		sent += len(piece)
		select {
		case <-a.Cancelled():
			cancelled = true
		default:
		}
	}
	within(t, "the word to stop", a.Cancelled())
	if err := finish(t, a, relay.End{}); !errors.Is(err, relay.ErrGone) {
		t.Errorf("finishing: %v", err)
	}
	_, body, end := read(t, seat)
	if len(body) > relay.MaxBuffered || end == nil || end.Error.CodeOf() != job.CodeClientGone {
		t.Errorf("%d bytes were kept, end %+v", len(body), end)
	}
}

func TestAnAPIThatTakesNothingBoundsWhatIsKept(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	w := newRelay(t, s)
	a, err := w.Answer("nobody", "job_1", 1)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	piece := make([]byte, 1<<20)
	sent := 0
	for ; sent <= relay.MaxBuffered; sent += len(piece) {
		if err = a.Send(relay.Part{Data: piece}); err != nil {
			break
		}
	}
	if err == nil || sent > relay.MaxBuffered {
		t.Errorf("%d bytes are kept: %v", sent, err)
	}
}

func TestOneOfManyClaimsWins(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	d, w := newDesk(t, newRelay(t, s)), newRelay(t, s)
	const workers = 20
	for i := range 10 {
		id := job.ID(fmt.Sprintf("job_%d", i))
		defer d.Expect(id).Close()
		won := make(chan job.Token, workers)
		var wg sync.WaitGroup
		for k := range workers {
			wg.Go(func() {
				c, err := w.Claim(t.Context(), api, relay.ClaimRequest{ID: id, Worker: job.Worker(fmt.Sprint(k)), AckSubject: fmt.Sprint(k)})
				switch {
				case err == nil:
					won <- c.Token
				case !errors.Is(err, relay.ErrHeld):
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if len(won) != 1 {
			t.Errorf("%d claims won", len(won))
		}
	}
}

func TestClaims(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	d, w := newDesk(t, newRelay(t, s)), newRelay(t, s)
	seat := d.Expect("job_1")
	claim := func(worker job.Worker, ack string) (*relay.Claimed, error) {
		return w.Claim(t.Context(), api, relay.ClaimRequest{ID: "job_1", Worker: worker, AckSubject: ack})
	}
	first, err := claim("w1", "a")
	if err != nil {
		t.Fatal(err)
	}
	if again, err := claim("w1", "a"); err != nil || again.Token != first.Token {
		t.Errorf("the same claim again: %+v, %v", again, err)
	}
	if _, err := claim("w1", "b"); !errors.Is(err, relay.ErrHeld) {
		t.Errorf("another delivery of it at the same worker: %v", err)
	}
	seat.Release(true)
	seat.Release(true) // there is nobody to charge any more
	if second, err := claim("w2", "b"); err != nil || second.Token <= first.Token || second.Charged != 1 {
		t.Errorf("after a charged release: %+v, %v", second, err)
	}
	seat.Release(false)
	if third, err := claim("w1", "c"); err != nil || third.Charged != 1 {
		t.Errorf("after an uncharged release: %+v, %v", third, err)
	}
	seat.Close()
	if _, err := claim("w1", "c"); !errors.Is(err, relay.ErrGone) {
		t.Errorf("of a seat that is closed: %v", err)
	}
	if _, err := w.Claim(t.Context(), "elsewhere", relay.ClaimRequest{ID: "job_1"}); !errors.Is(err, relay.ErrUnreachable) {
		t.Errorf("at an API that does not live: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := w.Claim(ctx, api, relay.ClaimRequest{ID: "job_1"}); !errors.Is(err, context.Canceled) || errors.Is(err, relay.ErrUnreachable) {
		t.Errorf("once its own context has ended: %v", err)
	}
}

func TestAClosedSeatStopsItsWorker(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	d, w := newDesk(t, newRelay(t, s)), newRelay(t, s)
	for _, row := range []struct {
		name  string
		close func(*relay.Seat)
		want  error
	}{
		{"closed", (*relay.Seat).Close, relay.ErrGone},
		{"released while its worker lives", func(s *relay.Seat) { s.Release(true) }, relay.ErrHeld},
	} {
		seat := d.Expect("job_1")
		defer seat.Close()
		a, _ := claimed(t, w, "job_1", "w1")
		send(t, a, relay.Part{Data: []byte("x")})
		if _, err := seat.Next(t.Context()); err != nil {
			t.Fatal(err)
		}
		row.close(seat)
		within(t, "the word to stop", a.Cancelled())
		if err := a.Err(); !errors.Is(err, row.want) {
			t.Errorf("%s: %v", row.name, err)
		}
		if err := a.Send(relay.Part{Data: []byte("y")}); err != nil {
			t.Errorf("%s: sending after the word to stop: %v", row.name, err)
		}
		if err := finish(t, a, relay.End{}); !errors.Is(err, row.want) {
			t.Errorf("%s: finishing: %v", row.name, err)
		}
		a.Close()
	}
}

func TestASeatClosedWhileNATSIsAwayStopsItsWorkerLater(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	d, w := newDesk(t, newRelay(t, s)), newRelay(t, s)
	seat := d.Expect("job_1")
	a, _ := claimed(t, w, "job_1", "w1")
	s.stop()
	seat.Close()
	s.start(t)
	within(t, "the word to stop", a.Cancelled())
}

func TestTheEndOfADeskClosesItsSeats(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	ctx, cancel := context.WithCancel(t.Context())
	d, err := newRelay(t, s).Desk(ctx, api, testenv.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	seat := d.Expect("job_1")
	a, _ := claimed(t, newRelay(t, s), "job_1", "w1")
	send(t, a, relay.Part{Data: []byte("x")})
	if _, err := seat.Next(t.Context()); err != nil {
		t.Fatal(err)
	}
	cancel()
	if _, err := seat.Next(t.Context()); !errors.Is(err, relay.ErrGone) {
		t.Errorf("reading on: %v", err)
	}
	within(t, "the word to stop", a.Cancelled())
	if _, err := d.Expect("job_2").Next(t.Context()); !errors.Is(err, relay.ErrGone) {
		t.Errorf("a seat that is opened later: %v", err)
	}
}

func TestAJobGivenBackIsRunByAnother(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	d, w := newDesk(t, newRelay(t, s)), newRelay(t, s)
	seat := d.Expect("job_1")
	defer seat.Close()
	first, c1 := claimed(t, w, "job_1", "w1")
	if err := finish(t, first, relay.End{Retry: true, Charged: true, Reason: "engine_error"}); err != nil {
		t.Fatal(err)
	}
	second, c2 := claimed(t, w, "job_1", "w2")
	second.Close() // without an end
	if c2.Token <= c1.Token || c2.Charged != 1 {
		t.Errorf("second claim %+v after %+v", c2, c1)
	}
	third, c3 := claimed(t, w, "job_1", "w1")
	if c3.Token <= c2.Token || c3.Charged != 1 {
		t.Errorf("third claim %+v after %+v", c3, c2)
	}
	if got := d.Seats(); !cmp.Equal(got, []job.ID{"job_1"}) {
		t.Errorf("waiting: %v", got)
	}
	send(t, third, relay.Part{Data: []byte("whole")})
	if err := finish(t, third, relay.End{State: job.Completed}); err != nil {
		t.Fatal(err)
	}
	if _, body, end := read(t, seat); string(body) != "whole" || end.State != job.Completed {
		t.Errorf("read %q, %+v", body, end)
	}
}

func TestWhatWasShownIsNotRunAgain(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	d, w := newDesk(t, newRelay(t, s)), newRelay(t, s)
	for _, row := range []struct {
		name string
		end  func(*relay.Answer) error
	}{
		{"given back", func(a *relay.Answer) error { return finish(t, a, relay.End{Retry: true}) }},
		{"left", func(a *relay.Answer) error { a.Close(); return nil }},
	} {
		seat := d.Expect("job_1")
		a, _ := claimed(t, w, "job_1", "w1")
		send(t, a, relay.Part{Data: []byte("shown")})
		if _, err := seat.Next(t.Context()); err != nil {
			t.Fatal(err)
		}
		send(t, a, relay.Part{Data: []byte("not shown")})
		if err := row.end(a); err != nil {
			t.Error(err)
		}
		if _, body, end := read(t, seat); len(body) != 0 && string(body) != "not shown" || end == nil || end.Error == nil || end.State != job.Failed {
			t.Errorf("%s: read %q, %+v", row.name, body, end)
		}
		seat.Close()
		a.Close()
	}
}

const streamHead = "text/event-stream; charset=utf-8"

// TestAStreamIsGoneOnWithFromWhatWasRead: the next attempt is told what the reader took, and not what its predecessor sent.
func TestAStreamIsGoneOnWithFromWhatWasRead(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(*relay.Seat, *relay.Answer) error{
		"given back": func(_ *relay.Seat, a *relay.Answer) error { return finish(t, a, relay.End{Retry: true, Charged: true}) },
		"left":       func(s *relay.Seat, a *relay.Answer) error { a.Close(); return freed(t, s) },
		"released":   func(s *relay.Seat, _ *relay.Answer) error { s.Release(true); return nil },
	} {
		s := newServer(t)
		d, w := newDesk(t, newRelay(t, s)), newRelay(t, s)
		seat := d.Expect("job_1")
		a, c := claimed(t, w, "job_1", "w1")
		if c.Shown != nil {
			t.Errorf("%s: %q was shown to nobody", name, c.Shown)
		}
		send(t, a, relay.Part{Head: &relay.Head{StatusCode: 200, ContentType: streamHead}})
		for _, data := range []string{"data: 1\n\n", "data: 2\n\n", "data: not read\n\n"} {
			send(t, a, relay.Part{Data: []byte(data)})
		}
		for range 3 {
			if _, err := seat.Next(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if err := end(seat, a); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if !seat.Resumable() {
			t.Errorf("%s: it cannot be gone on with", name)
		}
		next, c := claimed(t, w, "job_1", "w2")
		if string(c.Shown) != "data: 1\n\ndata: 2\n\n" {
			t.Errorf("%s: %q was shown", name, c.Shown)
		}
		if err := a.Send(relay.Part{Data: []byte("data: late\n\n")}); err != nil && name == "released" {
			t.Error(err)
		}
		send(t, next, relay.Part{Head: &relay.Head{StatusCode: 200, ContentType: streamHead, Continues: true}})
		send(t, next, relay.Part{Data: []byte("data: 3\n\n")})
		for range 2 {
			if _, err := seat.Next(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if err := finish(t, next, relay.End{Retry: true}); err != nil {
			t.Error(err)
		}
		last, c := claimed(t, w, "job_1", "w3")
		if string(c.Shown) != "data: 1\n\ndata: 2\n\ndata: 3\n\n" { // of all attempts
			t.Errorf("%s: %q was shown", name, c.Shown)
		}
		if err := finish(t, last, relay.End{State: job.Completed}); err != nil {
			t.Error(err)
		}
		if _, body, end := read(t, seat); len(body) != 0 || end == nil || end.State != job.Completed {
			t.Errorf("%s: read %q, %+v", name, body, end)
		}
	}
}

// freed returns once nobody holds the seat.
func freed(t *testing.T, s *relay.Seat) error {
	t.Helper()
	for deadline := time.Now().Add(60 * time.Second); ; time.Sleep(time.Millisecond) {
		if w, _, _ := s.Holder(); w == "" {
			return nil
		}
		if time.Now().After(deadline) {
			return errors.New("it is still held")
		}
	}
}

// TestAStreamThatCannotBeGoneOnWithEnds: one that is too long to be kept, one that was cut within an event, and an answer that is no stream.
func TestAStreamThatCannotBeGoneOnWithEnds(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	d, w := newDesk(t, newRelay(t, s)), newRelay(t, s)
	event := "data: " + strings.Repeat("x", 100<<10) + "\n\n"
	for name, c := range map[string]struct {
		head  relay.Head
		parts []string
	}{
		"too long":         {relay.Head{StatusCode: 200, ContentType: streamHead}, []string{event, event, event, event, event, event}},
		"within an event":  {relay.Head{StatusCode: 200, ContentType: streamHead}, []string{"data: 1\n\nda"}},
		"another type":     {relay.Head{StatusCode: 200, ContentType: "application/json"}, []string{"{}\n\n"}},
		"an error's words": {relay.Head{StatusCode: 500, ContentType: streamHead}, []string{"{}\n\n"}},
	} {
		seat := d.Expect("job_1")
		a, _ := claimed(t, w, "job_1", "w1")
		send(t, a, relay.Part{Head: &c.head})
		for _, p := range c.parts {
			send(t, a, relay.Part{Data: []byte(p)})
		}
		for range len(c.parts) + 1 {
			if _, err := seat.Next(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if seat.Resumable() {
			t.Errorf("%s: it counts as one to go on with", name)
		}
		if err := finish(t, a, relay.End{Retry: true}); err != nil {
			t.Error(err)
		}
		if _, _, end := read(t, seat); end == nil || end.Error == nil || end.State != job.Failed {
			t.Errorf("%s: read %+v", name, end)
		}
		seat.Close()
		a.Close()
	}
}

// TestAClaimsReplyFitsTheServer, however small its messages must be.
func TestAClaimsReplyFitsTheServer(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	d, w := newDesk(t, newRelay(t, s)), newRelay(t, s)
	seat := d.Expect("job_1")
	a, _ := claimed(t, w, "job_1", "w1")
	send(t, a, relay.Part{Head: &relay.Head{StatusCode: 200, ContentType: streamHead}})
	event := "data: " + strings.Repeat("x", 1016) + "\n\n" // a KiB
	for range relay.MaxShown >> 10 {
		send(t, a, relay.Part{Data: []byte(event)})
	}
	for range relay.MaxShown>>10 + 1 {
		if _, err := seat.Next(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	seat.Release(false)
	if _, c := claimed(t, w, "job_1", "w2"); len(c.Shown) != relay.MaxShown {
		t.Errorf("%d bytes were shown", len(c.Shown))
	}
}

// puppet plays one side of answers by hand.
type puppet struct {
	t    *testing.T
	nc   *nats.Conn
	sub  *nats.Subscription
	from string // where it hears
}

func newPuppet(t *testing.T, s *server, subject string) *puppet {
	t.Helper()
	nc := connect(t, s)
	sub, err := nc.SubscribeSync(subject)
	if err != nil {
		t.Fatal(err)
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	return &puppet{t, nc, sub, subject}
}

func (p *puppet) say(subject string, m relay.Message) {
	p.t.Helper()
	if err := p.nc.PublishRequest(subject, p.from, relay.Encode(m)); err != nil {
		p.t.Fatal(err)
	}
}

// hear returns the next message that is not of the kinds named.
func (p *puppet) hear(but ...byte) (relay.Message, string) {
	p.t.Helper()
	for {
		m, err := p.sub.NextMsg(20 * time.Second)
		if err != nil {
			p.t.Fatal(err)
		}
		msg, err := relay.Decode(m.Data)
		if err != nil {
			p.t.Fatal(err)
		}
		if !bytes.Contains(but, []byte{msg.Kind}) {
			return msg, m.Reply
		}
	}
}

func (p *puppet) expect(want relay.Message, but ...byte) {
	p.t.Helper()
	if got, _ := p.hear(but...); !cmp.Equal(want, got) {
		p.t.Errorf("heard %+v, want %+v", got, want)
	}
}

func TestADeskAsksForWhatIsMissing(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	d, w := newDesk(t, newRelay(t, s)), newRelay(t, s)
	seat := d.Expect("job_1")
	c, err := w.Claim(t.Context(), api, relay.ClaimRequest{ID: "job_1", Worker: "w1"})
	if err != nil {
		t.Fatal(err)
	}
	worker := newPuppet(t, s, "millrace.answer.puppet")
	subject := relay.PartSubject(api)
	msg := func(kind byte, seq uint64, body string) relay.Message {
		return relay.Message{Kind: kind, ID: "job_1", Token: c.Token, Seq: seq, Body: body}
	}
	data := func(seq uint64) { worker.say(subject, msg(relay.KindData, seq, fmt.Sprint(seq))) }

	worker.say(subject, msg(relay.KindTell, 0, ""))
	worker.expect(msg(relay.KindHave, 0, ""))
	data(1)
	data(3) // 2 was lost
	data(4)
	worker.expect(msg(relay.KindAgain, 2, ""))
	data(2)
	data(1) // a duplicate
	worker.say(subject, msg(relay.KindTell, 4, ""))
	worker.expect(msg(relay.KindAgain, 3, "")) // and not of the second that was out of order
	data(3)
	data(4)
	worker.say(subject, msg(relay.KindTell, 4, ""))
	worker.expect(msg(relay.KindHave, 4, ""))
	// Of another attempt, and of a job that nobody waits for.
	worker.say(subject, relay.Message{Kind: relay.KindData, ID: "job_1", Token: c.Token - 1, Seq: 5, Body: "zombie"})
	worker.expect(relay.Message{Kind: relay.KindHeld, ID: "job_1", Token: c.Token - 1})
	worker.say(subject, relay.Message{Kind: relay.KindTell, ID: "job_2", Token: 7})
	worker.expect(relay.Message{Kind: relay.KindGone, ID: "job_2", Token: 7})
	// A kind of a newer version, and rubbish.
	worker.say(subject, msg(33, 5, "?"))
	if err := worker.nc.Publish(subject, []byte("rubbish")); err != nil {
		t.Fatal(err)
	}
	worker.say(subject, msg(relay.KindEnd, 5, `{"state":"completed"}`))
	worker.expect(msg(relay.KindHave, 5, ""))
	// The acknowledgement was lost: it is repeated, also once the seat is closed.
	worker.say(subject, msg(relay.KindTell, 5, ""))
	worker.expect(msg(relay.KindHave, 5, ""))
	_, body, end := read(t, seat)
	if string(body) != "1234" || end.State != job.Completed {
		t.Errorf("read %q, %+v", body, end)
	}
	seat.Close()
	worker.say(subject, msg(relay.KindTell, 5, ""))
	worker.expect(msg(relay.KindHave, 5, ""))
	worker.say(subject, msg(relay.KindLeft, 5, ""))
}

func TestAWorkerSendsAgainWhatWasLost(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	desk := newPuppet(t, s, relay.PartSubject(api))
	a, err := newRelay(t, s).Answer(api, "job_1", 7)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	msg := func(kind byte, seq uint64, body string) relay.Message {
		return relay.Message{Kind: kind, ID: "job_1", Token: 7, Seq: seq, Body: body}
	}
	opened, control := desk.hear()
	if d := cmp.Diff(msg(relay.KindTell, 0, ""), opened); d != "" {
		t.Error(d)
	}
	for i := range 3 {
		send(t, a, relay.Part{Data: fmt.Append(nil, i+1)})
		desk.expect(msg(relay.KindData, uint64(i+1), fmt.Sprint(i+1)), relay.KindTell)
	}
	desk.say(control, msg(relay.KindAgain, 2, ""))
	desk.expect(msg(relay.KindData, 2, "2"), relay.KindTell)
	desk.expect(msg(relay.KindData, 3, "3"), relay.KindTell)
	desk.say(control, msg(relay.KindHave, 2, ""))
	desk.say(control, msg(relay.KindHave, 1, "")) // late
	desk.say(control, msg(relay.KindHave, 9, "")) // nonsense
	desk.say(control, msg(relay.KindAgain, 0, ""))
	desk.say(control, msg(relay.KindAgain, 1, "")) // what was acknowledged is gone
	desk.expect(msg(relay.KindData, 3, "3"), relay.KindTell)

	// The acknowledgement of the end is lost: it asks, and is told.
	done := make(chan error, 1)
	go func() { done <- a.Finish(context.Background(), relay.End{}) }()
	desk.expect(msg(relay.KindEnd, 4, "{}"), relay.KindTell)
	desk.expect(msg(relay.KindTell, 4, ""))
	select {
	case err := <-done:
		t.Errorf("finished before the acknowledgement: %v", err)
	default:
	}
	desk.say(control, msg(relay.KindHave, 4, ""))
	if err := within(t, "the end", done); err != nil {
		t.Error(err)
	}
	// An attempt that is gone says so when asked.
	a.Close()
	desk.say(control, msg(relay.KindKnown, 0, ""))
	desk.expect(msg(relay.KindLeft, 0, ""), relay.KindTell)
}

func TestFinishEndsWithItsContext(t *testing.T) {
	t.Parallel()
	a, err := newRelay(t, newServer(t)).Answer("nobody", "job_1", 1)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := a.Finish(ctx, relay.End{}); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	done := make(chan error, 1)
	go func() { done <- a.Finish(context.Background(), relay.End{}) }()
	a.Close()
	if err := within(t, "the end", done); err == nil {
		t.Error("finished without the API")
	}
}

func TestAnAttemptThatLeftUnheardIsFoundOut(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	d := newDesk(t, newRelay(t, s))
	seat := d.Expect("job_1")
	defer seat.Close()
	nc := connect(t, s)
	first := relay.New(nc, testenv.Log(t))
	a, _ := claimed(t, first, "job_1", "w1")
	send(t, a, relay.Part{Data: []byte("x")}) // so that the API has heard of it
	worker := newRelay(t, s)
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	if _, err := worker.Claim(t.Context(), api, relay.ClaimRequest{ID: "job_1", Worker: "w2"}); !errors.Is(err, relay.ErrHeld) {
		t.Fatal(err)
	}
	s.stop()
	a.Close() // its word is lost
	s.start(t)
	for deadline := time.Now().Add(20 * time.Second); ; {
		_, err := worker.Claim(t.Context(), api, relay.ClaimRequest{ID: "job_1", Worker: "w2"})
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
		time.Sleep(5 * time.Millisecond) // as a redelivery would
	}
}

func TestAClaimThatIsNotTakenUpIsVoid(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		seat := relay.NewSeat()
		first := seat.Claim("w1")
		if held := seat.Claim("w2"); held != 0 {
			t.Errorf("claimed at once: %d", held)
		}
		time.Sleep(relay.VoidAfter)
		if second := seat.Claim("w2"); second <= first {
			t.Errorf("token %d follows %d", second, first)
		}
	})
}

func TestEndedAttemptsAreForgottenInTheirOrder(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, relay.Remembered, 3*relay.Remembered + 7} {
		if kept, last := relay.RememberAttempts(n); kept != min(n, relay.Remembered) || !last {
			t.Errorf("of %d attempts %d are remembered, the last one: %v", n, kept, last)
		}
	}
}

func FuzzDecode(f *testing.F) {
	f.Add(relay.Encode(relay.Message{Kind: relay.KindData, ID: "job_1", Token: 1, Seq: 2, Body: "x"}))
	f.Add([]byte{})
	f.Add([]byte(strings.Repeat("\xff", 18)))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := relay.Decode(b)
		if err == nil && !bytes.Equal(relay.Encode(m), b) {
			t.Errorf("%x becomes %x", b, relay.Encode(m))
		}
	})
}

func BenchmarkClaim(b *testing.B) {
	s := newServer(b)
	d, w := newDesk(b, newRelay(b, s)), newRelay(b, s)
	defer d.Expect("job_1").Close()
	for b.Loop() {
		if _, err := w.Claim(b.Context(), api, relay.ClaimRequest{ID: "job_1", Worker: "w1", AckSubject: "a"}); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkAnswer is a whole answer of one part: claim, open, head, data, end, all acknowledged.
func BenchmarkAnswer(b *testing.B) {
	s := newServer(b)
	d, w := newDesk(b, newRelay(b, s)), newRelay(b, s)
	data := bytes.Repeat([]byte("x"), 1000)
	for i := 0; b.Loop(); i++ {
		id := job.ID(fmt.Sprint(i))
		seat := d.Expect(id)
		c, err := w.Claim(b.Context(), api, relay.ClaimRequest{ID: id, Worker: "w1", AckSubject: "a"})
		if err != nil {
			b.Fatal(err)
		}
		a, err := w.Answer(api, id, c.Token)
		if err != nil {
			b.Fatal(err)
		}
		send(b, a, relay.Part{Head: &relay.Head{StatusCode: 200}, Data: data})
		if err := finish(b, a, relay.End{}); err != nil {
			b.Fatal(err)
		}
		a.Close()
		seat.Close()
	}
}

// BenchmarkParts sends and reads parts of the size of one token's event.
func BenchmarkParts(b *testing.B) {
	s := newServer(b)
	d, w := newDesk(b, newRelay(b, s)), newRelay(b, s)
	seat := d.Expect("job_1")
	defer seat.Close()
	a, _ := claimed(b, w, "job_1", "w1")
	data := bytes.Repeat([]byte("x"), 250)
	b.SetBytes(int64(len(data)))
	const window = 1000 // parts under way
	var wg sync.WaitGroup
	room := make(chan struct{}, window)
	done := make(chan struct{})
	wg.Go(func() {
		defer close(done)
		for {
			p, err := seat.Next(b.Context())
			if err != nil || p.End != nil {
				return
			}
			<-room
		}
	})
	for b.Loop() {
		room <- struct{}{}
		send(b, a, relay.Part{Data: data})
	}
	if err := finish(b, a, relay.End{}); err != nil {
		b.Fatal(err)
	}
	wg.Wait()
}

// BenchmarkPartLatency is the time from sending one part to reading it.
func BenchmarkPartLatency(b *testing.B) {
	s := newServer(b)
	d, w := newDesk(b, newRelay(b, s)), newRelay(b, s)
	seat := d.Expect("job_1")
	defer seat.Close()
	a, _ := claimed(b, w, "job_1", "w1")
	data := bytes.Repeat([]byte("x"), 250)
	for b.Loop() {
		send(b, a, relay.Part{Data: data})
		if _, err := seat.Next(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
}
