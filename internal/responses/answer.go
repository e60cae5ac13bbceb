package responses

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/millrace/millrace/internal/job"
)

// Event is one event of a stream: its type, and its JSON.
type Event struct {
	Type string
	Data []byte
}

// The types of events that others branch on.
const (
	EventCreated    = "response.created"
	EventInProgress = "response.in_progress"
	EventCompleted  = "response.completed"
	EventIncomplete = "response.incomplete"
	EventFailed     = "response.failed"
	EventCancelled  = "response.cancelled"
	EventError      = "error"
)

// EndOf is the type of the event that ends the stream of a response with such a status.
func EndOf(s Status) string { return "response." + string(s) }

// Ends tells whether an event of that type is the last of its stream.
func Ends(event string) bool {
	switch event {
	case EventCompleted, EventIncomplete, EventFailed, EventCancelled:
		return true
	}
	return false
}

// ObjectEvent is the event of a type that tells of the whole object.
func ObjectEvent(kind string, n int64, object []byte) Event {
	// Built by hand, for the encoder would write a large object anew.
	b := append(make([]byte, 0, len(object)+96), `{"type":"`...)
	b = append(append(b, kind...), `","sequence_number":`...)
	b = append(fmt.Append(b, n), `,"response":`...)
	return Event{Type: kind, Data: append(append(b, object...), '}')}
}

// Number returns an event's JSON with n as its number.
func Number(event []byte, n int64) ([]byte, error) {
	return job.SetField(event, "sequence_number", fmt.Append(nil, n))
}

// TypeOf is the type that an event's JSON tells.
func TypeOf(event []byte) string {
	var e struct {
		Type string `json:"type"`
	}
	_ = json.Unmarshal(event, &e) // what cannot be read has no type
	return e.Type
}

// errNoChat says that an engine's answer is no chat's.
var errNoChat = errors.New("the answer is no chat completion")

// output is what a chat's answer, or a chunk of it, says.
type output struct {
	text, reasoning string
	finish          string
	choices         int
}

// readOutput reads the first choice; field is "message" or "delta".
func readOutput(data []byte, field string) (output, error) {
	var answer struct {
		Choices []map[string]json.RawMessage `json:"choices"`
	}
	if err := json.Unmarshal(data, &answer); err != nil {
		return output{}, fmt.Errorf("%w: %w", errNoChat, err)
	}
	var out output
	for _, c := range answer.Choices {
		var index int
		if raw := c["index"]; len(raw) > 0 && json.Unmarshal(raw, &index) == nil && index != 0 {
			continue
		}
		out.choices++
		var said struct {
			Content          *string `json:"content"`
			Reasoning        *string `json:"reasoning"`
			ReasoningContent *string `json:"reasoning_content"`
			Refusal          *string `json:"refusal"`
		}
		if raw := c[field]; len(raw) > 0 {
			if err := json.Unmarshal(raw, &said); err != nil {
				return output{}, fmt.Errorf("%w: %w", errNoChat, err)
			}
		}
		for _, s := range []*string{said.Content, said.Refusal} {
			if s != nil {
				out.text += *s
			}
		}
		if s := said.Reasoning; s != nil && *s != "" { // some engines tell it under both names
			out.reasoning += *s
		} else if s := said.ReasoningContent; s != nil {
			out.reasoning += *s
		}
		if raw := c["finish_reason"]; len(raw) > 0 {
			var finish string
			if json.Unmarshal(raw, &finish) == nil && finish != "" {
				out.finish = finish
			}
		}
	}
	return out, nil
}

// reasonOf is why an answer that finished so is incomplete, "" if it is whole.
func reasonOf(finish string) string {
	switch finish {
	case "length":
		return "max_output_tokens"
	case "content_filter":
		return finish
	}
	return ""
}

// end fills in how an answer ended.
func (o *Object) end(finish string, now int64) {
	if reason := reasonOf(finish); reason != "" {
		o.Status, o.IncompleteDetails = Incomplete, &Details{reason}
	} else {
		o.Status, o.CompletedAt = Completed, &now
	}
	for i, it := range o.Output {
		switch {
		case it.Status == "": // reasoning has none
		case i == len(o.Output)-1: // what others follow is whole
			it.Status = o.Status
		default:
			it.Status = Completed
		}
	}
}

// The types of items and their parts.
const (
	typeMessage   = "message"
	typeReasoning = "reasoning"

	partText      = "output_text"
	partReasoning = "reasoning_text"
)

// newItem begins the item of a type with that index.
func newItem(kind string, f Frame, index int) *Item {
	suffix := fmt.Sprintf("%s_%d", strings.TrimPrefix(f.ID, idPrefix), index)
	if kind == typeReasoning {
		return &Item{ID: "rs_" + suffix, Type: kind, Content: []Part{}, Summary: &[0]string{}}
	}
	return &Item{ID: "msg_" + suffix, Type: kind, Status: InProgress, Role: "assistant", Content: []Part{}}
}

// newPart is the one part of an item of a type.
func newPart(kind, text string) Part {
	if kind == typeReasoning {
		return Part{Type: partReasoning, Text: text}
	}
	return Part{Type: partText, Text: text, Annotations: &[0]string{}, Logprobs: &[0]string{}}
}

// Answer makes the response of a chat's whole answer, whose usage is u. now is in unix seconds.
func (r *Request) Answer(f Frame, answer []byte, u *job.Usage, now int64) (*Object, error) {
	out, err := readOutput(answer, "message")
	if err != nil {
		return nil, err
	}
	if out.choices == 0 {
		return nil, errNoChat
	}
	o := NewObject(f, Completed, r.object)
	if out.reasoning != "" {
		it := newItem(typeReasoning, f, len(o.Output))
		it.Content = append(it.Content, newPart(typeReasoning, out.reasoning))
		o.Output = append(o.Output, it)
	}
	if out.text != "" || len(o.Output) == 0 {
		it := newItem(typeMessage, f, len(o.Output))
		it.Content = append(it.Content, newPart(typeMessage, out.text))
		o.Output = append(o.Output, it)
	}
	o.Usage = usageOf(u)
	o.end(out.finish, now)
	return o, nil
}

// Stream makes the events of a response from a chat's chunks. It is for one goroutine.
type Stream struct {
	object *Object
	next   int64 // number of the next event
	begun  bool
	finish string
	open   *Item // the item that grows, nil if none does
	text   strings.Builder
	ready  []Event
}

// Stream begins a stream.
func (r *Request) Stream(f Frame) *Stream {
	return &Stream{object: NewObject(f, InProgress, r.object)}
}

// Add takes a chunk, and returns the events that it makes. The caller has found errors in chunks before.
func (s *Stream) Add(chunk []byte) ([]Event, error) {
	out, err := readOutput(chunk, "delta")
	if err != nil {
		return nil, err
	}
	s.begin()
	if out.reasoning != "" {
		s.say(typeReasoning, out.reasoning)
	}
	if out.text != "" {
		s.say(typeMessage, out.text)
	}
	if out.finish != "" {
		s.finish = out.finish
	}
	return s.take(), nil
}

// End ends the stream, and returns its last events and the whole object.
func (s *Stream) End(u *job.Usage, now int64) (events []Event, object []byte) {
	s.begin()
	if s.open == nil && len(s.object.Output) == 0 { // an answer always has a message
		s.openItem(typeMessage)
	}
	s.object.Usage = usageOf(u)
	if s.open != nil {
		status := Completed
		if reasonOf(s.finish) != "" {
			status = Incomplete
		}
		s.close(status)
	}
	s.object.end(s.finish, now)
	object = Encode(s.object)
	s.ready = append(s.ready, ObjectEvent(EndOf(s.object.Status), s.number(), object))
	return s.take(), object
}

func (s *Stream) take() []Event {
	events := s.ready
	s.ready = nil
	return events
}

func (s *Stream) number() int64 {
	s.next++
	return s.next - 1
}

func (s *Stream) begin() {
	if s.begun {
		return
	}
	s.begun = true
	object := Encode(s.object)
	s.ready = append(s.ready, ObjectEvent(EventCreated, s.number(), object), ObjectEvent(EventInProgress, s.number(), object))
}

// itemEvent is an event about an item or a part of it. What its type does not have is left out.
type itemEvent struct {
	Type     string       `json:"type"`
	Sequence int64        `json:"sequence_number"`
	ItemID   string       `json:"item_id,omitempty"`
	Output   int          `json:"output_index"`
	Content  *int         `json:"content_index,omitempty"`
	Item     *Item        `json:"item,omitempty"`
	Part     *Part        `json:"part,omitempty"`
	Delta    *string      `json:"delta,omitempty"`
	Text     *string      `json:"text,omitempty"`
	Logprobs *[0]struct{} `json:"logprobs,omitempty"`
}

// tell adds an event about the open item; of a part it is about its first one, for there is no other.
func (s *Stream) tell(e itemEvent, part bool) {
	e.Sequence, e.Output = s.number(), len(s.object.Output)-1
	if part {
		e.ItemID, e.Content = s.open.ID, new(int)
	}
	s.ready = append(s.ready, Event{Type: e.Type, Data: Encode(e)})
}

// textEvent is the name of an event about the open item's text.
func (s *Stream) textEvent(what string) itemEvent {
	if s.open.Type == typeReasoning {
		return itemEvent{Type: "response.reasoning_text." + what}
	}
	return itemEvent{Type: "response.output_text." + what, Logprobs: &[0]struct{}{}}
}

func (s *Stream) say(kind, text string) {
	if s.open != nil && s.open.Type != kind {
		s.close(Completed)
	}
	if s.open == nil {
		s.openItem(kind)
	}
	s.text.WriteString(text)
	e := s.textEvent("delta")
	e.Delta = &text
	s.tell(e, true)
}

func (s *Stream) openItem(kind string) {
	s.open = newItem(kind, Frame{ID: s.object.ID}, len(s.object.Output))
	s.object.Output = append(s.object.Output, s.open)
	s.text.Reset()
	s.tell(itemEvent{Type: "response.output_item.added", Item: s.open}, false)
	part := newPart(kind, "")
	s.tell(itemEvent{Type: "response.content_part.added", Part: &part}, true)
}

// close ends the open item.
func (s *Stream) close(status Status) {
	text := s.text.String()
	e := s.textEvent("done")
	e.Text = &text
	s.tell(e, true)
	part := newPart(s.open.Type, text)
	s.tell(itemEvent{Type: "response.content_part.done", Part: &part}, true)
	s.open.Content = append(s.open.Content, part)
	if s.open.Status != "" {
		s.open.Status = status
	}
	s.tell(itemEvent{Type: "response.output_item.done", Item: s.open}, false)
	s.open = nil
}

// Whole are the events of an answer that came in one piece: its beginning and its end.
func Whole(object []byte, s Status) ([]Event, error) {
	begin, err := job.SetField(object, "status", Encode(InProgress))
	for _, f := range []struct{ key, value string }{{"output", "[]"}, {"usage", "null"}, {"completed_at", "null"}, {"incomplete_details", "null"}} {
		if err == nil {
			begin, err = job.SetField(begin, f.key, []byte(f.value))
		}
	}
	if err != nil {
		return nil, fmt.Errorf("editing a response: %w", err)
	}
	return []Event{ObjectEvent(EventCreated, 0, begin), ObjectEvent(EndOf(s), 1, object)}, nil
}

// NativeStream reads the events of an engine that makes them itself.
type NativeStream struct{ frame Frame }

// NativeStream begins to read a stream.
func (f Frame) NativeStream() *NativeStream { return &NativeStream{f} }

// Step is what an engine's own event says.
type Step struct {
	Event Event
	// Token: it carries generated text.
	Token bool
	// Object is the whole object, of the event that ends the stream.
	Object []byte
	// Error is set if the engine failed. It is no part of the answer.
	Error *job.Error
}

// Add takes an event's data, and returns it with Millrace's own words about the response in place.
func (s *NativeStream) Add(data []byte) (Step, error) {
	o, err := job.ParseObject(data)
	if err != nil {
		return Step{}, fmt.Errorf("reading an event: %w", err)
	}
	var kind string
	if json.Unmarshal(o.Get("type"), &kind) != nil || kind == "" || strings.ContainsAny(kind, "\r\n") { // it becomes a line of the stream
		return Step{}, errors.New("an event without a proper type")
	}
	step := Step{Event: Event{Type: kind, Data: data}, Token: strings.HasSuffix(kind, ".delta")}
	if kind == EventError {
		var message string
		if json.Unmarshal(o.Get("message"), &message) != nil || message == "" {
			message = "the engine reported an error without a message"
		}
		step.Error = job.NewError(job.TypeServer, job.CodeEngineError, message)
		return step, nil
	}
	object := o.Get("response")
	if unset(object) {
		return step, nil
	}
	owned, err := s.frame.Own(object)
	if err != nil {
		return Step{}, err
	}
	if step.Event.Data, err = job.SetField(data, "response", owned); err != nil {
		return Step{}, fmt.Errorf("editing an event: %w", err)
	}
	if kind == EventFailed || Ends(kind) {
		sum, err := Summarize(owned)
		if err != nil {
			return Step{}, err
		}
		step.Object, step.Error = owned, sum.Error
	}
	return step, nil
}
