package emulator

import (
	"encoding/json"
	"fmt"
	"strconv"
)

// readResponse reads a request of /v1/responses, of which it knows text alone: what else an input has counts as its JSON does.
func (q *request) readResponse(r *reader, seed, kv hash) {
	var instructions, input string
	read(r, "instructions", &instructions)
	if !r.given("input") {
		r.fail(invalid("input", "missing", "Field required"))
		return
	}
	var messages, tools []json.RawMessage
	read(r, "tools", &tools)
	if instructions != "" {
		messages = append(messages, appendMessage("system", instructions))
	}
	if raw := r.object.Get("input"); json.Unmarshal(raw, &input) == nil {
		messages = append(messages, appendMessage("user", input))
	} else {
		var items []json.RawMessage
		read(r, "input", &items)
		for _, item := range items {
			var m message
			if json.Unmarshal(item, &m) != nil || m.Role == "" {
				item = appendMessage("tool", string(compact(item)))
			}
			messages = append(messages, item)
		}
	}
	if len(messages) == 0 {
		r.fail(badRequest("input", "input cannot be empty"))
	}
	var previous string
	read(r, "previous_response_id", &previous)
	if previous != "" {
		r.fail(failure(404, fmt.Sprintf("Response with id '%s' not found.", previous)))
	}
	if r.err != nil {
		return
	}
	q.n = 1 // there is no such field
	q.readMessages(r, messages, tools, false, seed, kv)
}

func appendMessage(role, content string) json.RawMessage {
	b := appendString([]byte(`{"role":`), []byte(role))
	return append(appendString(append(b, `,"content":`...), []byte(content)), '}')
}

// responsePage is what a response has beside its text.
type responsePage struct {
	id, item string
	created  int64
	events   int // so far
}

func newResponsePage(id string, created int64) *responsePage {
	return &responsePage{id: "resp_" + id, item: "msg_" + id, created: created}
}

// event writes an event whose JSON is open until closeEvent.
func (p *page) event(b []byte, kind string) []byte {
	b = append(append(append(b, "event: "...), kind...), "\ndata: {\"type\":\""...)
	b = strconv.AppendInt(append(append(b, kind...), `","sequence_number":`...), int64(p.response.events), 10)
	p.response.events++
	return b
}

func closeEvent(b []byte) []byte { return append(b, "}\n\n"...) }

// ofPart writes which part of the answer an event is about.
func (p *page) ofPart(b []byte) []byte {
	b = appendString(append(b, `,"item_id":`...), []byte(p.response.item))
	return append(b, `,"output_index":0,"content_index":0`...)
}

func (p *page) openResponse(b []byte) []byte {
	for _, kind := range []string{"response.created", "response.in_progress"} {
		b = append(p.event(b, kind), `,"response":`...)
		b = closeEvent(p.appendResponse(b, "in_progress"))
	}
	b = append(p.event(b, "response.output_item.added"), `,"output_index":0,"item":`...)
	b = closeEvent(p.appendItem(b, "in_progress"))
	b = append(p.ofPart(p.event(b, "response.content_part.added")), `,"part":`...)
	return closeEvent(appendPart(b, nil))
}

func (p *page) appendDeltaEvent(b []byte, token, pad int) []byte {
	b = append(p.ofPart(p.event(b, "response.output_text.delta")), `,"delta":`...)
	b = append(appendString(b, p.answers[0].token(token)), `,"logprobs":[]`...)
	if pad > 0 {
		b = append(b, `,"padding":"`...)
		for range pad {
			b = append(b, 'x')
		}
		b = append(b, '"')
	}
	return closeEvent(b)
}

// closeResponse writes what follows the last token. There is no end mark: the last event says enough.
func (p *page) closeResponse(b []byte) []byte {
	text := p.answers[0].text
	b = append(p.ofPart(p.event(b, "response.output_text.done")), `,"text":`...)
	b = closeEvent(append(appendString(b, text), `,"logprobs":[]`...))
	b = append(p.ofPart(p.event(b, "response.content_part.done")), `,"part":`...)
	b = closeEvent(appendPart(b, text))
	b = append(p.event(b, "response.output_item.done"), `,"output_index":0,"item":`...)
	b = closeEvent(p.appendItem(b, p.statusOf()))
	b = append(p.event(b, "response."+p.statusOf()), `,"response":`...)
	return closeEvent(p.appendResponse(b, p.statusOf()))
}

// appendFailure writes the event of a generation that fails.
func (p *page) appendFailure(b []byte) []byte {
	b = append(p.event(b, "error"), `,"code":"server_error","param":null,"message":`...)
	return closeEvent(appendString(b, []byte(generationError().message)))
}

// statusOf is how the answer ends.
func (p *page) statusOf() string {
	if p.answers[0].finish == "length" {
		return "incomplete"
	}
	return "completed"
}

func appendPart(b, text []byte) []byte {
	return append(appendString(append(b, `{"type":"output_text","annotations":[],"logprobs":null,"text":`...), text), '}')
}

// appendItem writes the answer's message; one in progress has no content yet.
func (p *page) appendItem(b []byte, status string) []byte {
	b = appendString(append(b, `{"id":`...), []byte(p.response.item))
	b = append(append(append(b, `,"type":"message","role":"assistant","status":"`...), status...), `","content":[`...)
	if status != "in_progress" {
		b = appendPart(b, p.answers[0].text)
	}
	return append(b, "]}"...)
}

// appendResponse writes the response's object.
func (p *page) appendResponse(b []byte, status string) []byte {
	b = appendString(append(b, `{"id":`...), []byte(p.response.id))
	b = strconv.AppendInt(append(b, `,"object":"response","created_at":`...), p.response.created, 10)
	b = append(append(append(b, `,"status":"`...), status...), `","background":false,"error":null,"incomplete_details":`...)
	if status == "incomplete" {
		b = append(b, `{"reason":"max_output_tokens"}`...)
	} else {
		b = append(b, "null"...)
	}
	b = appendString(append(b, `,"instructions":null,"metadata":null,"model":`...), []byte(p.q.model))
	b = append(b, `,"parallel_tool_calls":true,"temperature":1.0,"tool_choice":"auto","tools":[],"top_p":1.0,"truncation":"disabled","service_tier":"auto","output":[`...)
	if status == "in_progress" {
		return append(b, `],"usage":null}`...)
	}
	b = append(p.appendItem(b, status), `],"usage":{"input_tokens":`...)
	b = strconv.AppendInt(b, int64(p.promptTokens), 10)
	b = strconv.AppendInt(append(b, `,"input_tokens_details":{"cached_tokens":0},"output_tokens":`...), int64(p.completionTokens()), 10)
	b = strconv.AppendInt(append(b, `,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":`...), int64(p.promptTokens+p.completionTokens()), 10)
	return append(b, "}}"...)
}
