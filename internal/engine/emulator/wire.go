package emulator

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"math"
	"strconv"

	"github.com/millrace/millrace/internal/job"
)

// appendString writes s as a JSON string as vLLM does: what need not be escaped is not.
func appendString(dst, s []byte) []byte {
	dst = append(dst, '"')
	dst = appendEscaped(dst, s)
	return append(dst, '"')
}

func appendEscaped(dst, s []byte) []byte {
	const hex = "0123456789abcdef"
	from := 0
	for i, c := range s {
		if c >= 0x20 && c != '"' && c != '\\' {
			continue
		}
		dst = append(dst, s[from:i]...)
		from = i + 1
		switch c {
		case '"', '\\':
			dst = append(dst, '\\', c)
		case '\n':
			dst = append(dst, `\n`...)
		case '\r':
			dst = append(dst, `\r`...)
		case '\t':
			dst = append(dst, `\t`...)
		case '\b':
			dst = append(dst, `\b`...)
		case '\f':
			dst = append(dst, `\f`...)
		default:
			dst = append(dst, '\\', 'u', '0', '0', hex[c>>4], hex[c&15])
		}
	}
	return append(dst, s[from:]...)
}

// page renders one call's answer: its chunks, or the whole. It holds what does not change from chunk to chunk.
type page struct {
	q       *request
	answers []answer
	// head is a chunk up to its choices; full that of a whole answer.
	head, full   []byte
	promptTokens int
	// response is set if the answer is one.
	response *responsePage
}

func newPage(q *request, answers []answer, id string, created int64, promptTokens int) *page {
	p := &page{q: q, answers: answers, promptTokens: promptTokens}
	prefix, object := "chatcmpl-", "chat.completion"
	switch q.endpoint {
	case job.Completions:
		prefix, object = "cmpl-", "text_completion"
	case job.Embeddings:
		prefix, object = "embd-", "list"
	}
	head := func(object string) []byte {
		b := append([]byte(nil), `{"id":`...)
		b = appendString(b, []byte(prefix+id))
		b = append(append(append(b, `,"object":"`...), object...), `","created":`...)
		b = strconv.AppendInt(b, created, 10)
		return appendString(append(b, `,"model":`...), []byte(q.model))
	}
	if q.endpoint == job.Responses {
		p.response = newResponsePage(id, created)
		return p
	}
	p.full = head(object)
	if q.endpoint == job.ChatCompletions {
		object = "chat.completion.chunk"
	}
	p.head = append([]byte("data: "), head(object)...)
	return p
}

// appendOpening writes what a stream begins with: in a chat, each choice's role.
func (p *page) appendOpening(b []byte) []byte {
	if p.response != nil {
		return p.openResponse(b)
	}
	if p.q.endpoint != job.ChatCompletions {
		return b
	}
	for i := range p.answers {
		b = p.openChoice(b, i)
		b = append(b, `"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"prompt_token_ids":null`...)
		b = p.closeChunk(b, 0)
	}
	return b
}

func (p *page) openChoice(b []byte, choice int) []byte {
	b = append(append(b, p.head...), `,"choices":[{"index":`...)
	return append(strconv.AppendInt(b, int64(choice), 10), ',')
}

func (p *page) closeChunk(b []byte, completionTokens int) []byte {
	if p.q.continuous {
		b = append(b, `,"usage":`...)
		b = p.appendUsage(b, completionTokens)
		b = append(b, '}')
	}
	return append(b, "}\n\n"...)
}

// appendToken writes the chunk of one token of a choice. pad is the length of an unknown field that it carries.
func (p *page) appendToken(b []byte, choice, token, pad int) []byte {
	if p.response != nil {
		return p.appendDeltaEvent(b, token, pad)
	}
	a := &p.answers[choice]
	last := token == len(a.ends)-1
	b = p.openChoice(b, choice)
	text := a.token(token)
	if p.q.endpoint == job.Completions {
		b = append(b, `"text":"`...)
		if token == 0 && p.q.echo {
			b = p.appendEcho(b, choice)
		}
		b = append(appendEscaped(b, text), '"')
	} else {
		b = p.appendDelta(b, text, token)
	}
	b = append(b, `,"logprobs":`...)
	b = p.appendLogprobs(b, a, choice, token, token+1)
	b = append(b, `,"finish_reason":`...)
	switch {
	case last:
		b = p.appendFinish(b, a)
	case p.q.endpoint == job.Completions:
		b = append(b, `null,"stop_reason":null`...)
	default:
		b = append(b, `null`...)
	}
	if p.q.endpoint == job.Completions {
		b = append(b, `,"prompt_token_ids":null`...)
	}
	b = append(b, `,"token_ids":null}]`...)
	if pad > 0 {
		b = append(b, `,"padding":"`...)
		for range pad {
			b = append(b, 'x')
		}
		b = append(b, '"')
	}
	return p.closeChunk(b, token+1)
}

// appendEcho writes the prompt before the completion. Token ids are no text, and look like it.
func (p *page) appendEcho(b []byte, choice int) []byte {
	return appendEscaped(b, bytes.ToValidUTF8(p.q.prompts[choice/p.q.n].text, []byte("\ufffd")))
}

func (p *page) appendDelta(b, text []byte, token int) []byte {
	c := p.q.call
	if c == nil {
		b = append(b, `"delta":{"content":"`...)
		return append(appendEscaped(b, text), `"}`...)
	}
	b = append(b, `"delta":{"tool_calls":[{`...)
	if token == 0 {
		b = appendString(append(b, `"id":`...), []byte(c.id))
		b = appendString(append(b, `,"type":"function","index":0,"function":{"name":`...), []byte(c.name))
		b = append(b, ',')
	} else {
		b = append(b, `"index":0,"function":{`...)
	}
	b = append(b, `"arguments":"`...)
	return append(appendEscaped(b, text), `"}}]}`...)
}

// appendFinish writes the finish reason and the stop reason.
func (p *page) appendFinish(b []byte, a *answer) []byte {
	finish := a.finish
	if p.q.call != nil && finish == "stop" {
		finish = p.q.call.finish
	}
	b = append(append(append(b, '"'), finish...), `","stop_reason":`...)
	if a.stop == "" {
		return append(b, "null"...)
	}
	return appendString(b, []byte(a.stop))
}

// appendUsage writes the usage object up to its last brace.
func (p *page) appendUsage(b []byte, completionTokens int) []byte {
	b = strconv.AppendInt(append(b, `{"prompt_tokens":`...), int64(p.promptTokens), 10)
	b = strconv.AppendInt(append(b, `,"total_tokens":`...), int64(p.promptTokens+completionTokens), 10)
	return strconv.AppendInt(append(b, `,"completion_tokens":`...), int64(completionTokens), 10)
}

// appendClosing writes what follows the last token: the usage, if it was asked for, and the end mark.
func (p *page) appendClosing(b []byte) []byte {
	if p.response != nil {
		return p.closeResponse(b)
	}
	if p.q.usage {
		b = append(append(b, p.head...), `,"choices":[],"usage":`...)
		b = append(p.appendUsage(b, p.completionTokens()), "}}\n\n"...)
	}
	return append(b, "data: [DONE]\n\n"...)
}

func (p *page) completionTokens() int {
	n := 0
	for i := range p.answers {
		n += len(p.answers[i].ends)
	}
	return n
}

// appendWhole writes the answer in one piece.
func (p *page) appendWhole(b []byte) []byte {
	if p.response != nil {
		return p.appendResponse(b, p.statusOf())
	}
	b = append(append(b, p.full...), `,"choices":[`...)
	for i := range p.answers {
		a := &p.answers[i]
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendInt(append(b, `{"index":`...), int64(i), 10)
		if p.q.endpoint == job.Completions {
			b = append(b, `,"text":"`...)
			if p.q.echo {
				b = p.appendEcho(b, i)
			}
			b = append(appendEscaped(b, a.text), '"')
		} else {
			b = p.appendMessage(b, a)
		}
		b = append(b, `,"logprobs":`...)
		b = p.appendLogprobs(b, a, i, 0, len(a.ends))
		b = append(b, `,"finish_reason":`...)
		b = p.appendFinish(b, a)
		b = append(b, `,"token_ids":null`...)
		if p.q.endpoint == job.Completions {
			b = append(b, `,"prompt_logprobs":null,"prompt_token_ids":null`...)
		}
		b = append(b, '}')
	}
	b = append(b, `],"service_tier":null,"system_fingerprint":null,"usage":`...)
	b = append(p.appendUsage(b, p.completionTokens()), `,"prompt_tokens_details":null}`...)
	if p.q.endpoint == job.ChatCompletions {
		b = append(b, `,"prompt_logprobs":null,"prompt_token_ids":null`...)
	}
	return append(b, `,"kv_transfer_params":null}`...)
}

func (p *page) appendMessage(b []byte, a *answer) []byte {
	b = append(b, `,"message":{"role":"assistant","content":"`...)
	if p.q.call == nil {
		b = appendEscaped(b, a.text)
	}
	b = append(b, `","refusal":null,"annotations":null,"audio":null,"function_call":null,"tool_calls":[`...)
	if c := p.q.call; c != nil {
		b = appendString(append(b, `{"id":`...), []byte(c.id))
		b = appendString(append(b, `,"type":"function","function":{"name":`...), []byte(c.name))
		b = appendString(append(b, `,"arguments":`...), a.text)
		b = append(b, "}}"...)
	}
	return append(b, `],"reasoning":null}`...)
}

// appendLogprobs writes the log probabilities of tokens from to to, null if nobody asked.
func (p *page) appendLogprobs(b []byte, a *answer, choice, from, to int) []byte {
	if p.q.logprobs < 0 {
		return append(b, "null"...)
	}
	seed := p.q.prompts[choice/p.q.n].seed + uint64(choice)
	if p.q.endpoint == job.Completions {
		return p.appendCompletionLogprobs(b, a, seed, from, to)
	}
	b = append(b, `{"content":[`...)
	for i := from; i < to; i++ {
		if i > from {
			b = append(b, ',')
		}
		b = appendTokenLogprob(b, a.token(i), logprob(seed, i, 0))
		b = append(b, `,"top_logprobs":[`...)
		for k := range p.q.logprobs {
			if k > 0 {
				b = append(b, ',')
			}
			b = appendTokenLogprob(b, alternative(a.token(i), seed, i, k), logprob(seed, i, k))
			b = append(b, '}')
		}
		b = append(b, "]}"...)
	}
	return append(b, "]}"...)
}

// appendTokenLogprob writes one token's entry up to its last brace.
func appendTokenLogprob(b, token []byte, lp float64) []byte {
	b = appendString(append(b, `{"token":`...), token)
	b = appendFloat(append(b, `,"logprob":`...), lp)
	b = append(b, `,"bytes":[`...)
	for i, c := range token {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendUint(b, uint64(c), 10)
	}
	return append(b, ']')
}

func (p *page) appendCompletionLogprobs(b []byte, a *answer, seed uint64, from, to int) []byte {
	list := func(name string, item func(b []byte, i int) []byte) {
		b = append(append(append(b, '"'), name...), `":[`...)
		for i := from; i < to; i++ {
			if i > from {
				b = append(b, ',')
			}
			b = item(b, i)
		}
		b = append(b, ']')
	}
	b = append(b, '{')
	list("text_offset", func(b []byte, i int) []byte {
		return strconv.AppendInt(b, int64(a.ends[i])-int64(len(a.token(i))), 10)
	})
	b = append(b, ',')
	list("token_logprobs", func(b []byte, i int) []byte { return appendFloat(b, logprob(seed, i, 0)) })
	b = append(b, ',')
	list("tokens", func(b []byte, i int) []byte { return appendString(b, a.token(i)) })
	b = append(b, ',')
	list("top_logprobs", func(b []byte, i int) []byte {
		b = append(b, '{')
		for k := range max(p.q.logprobs, 1) {
			if k > 0 {
				b = append(b, ',')
			}
			b = appendString(b, alternative(a.token(i), seed, i, k))
			b = appendFloat(append(b, ':'), logprob(seed, i, k))
		}
		return append(b, '}')
	})
	return append(b, '}')
}

// logprob of the k-th likeliest token at place i: falling with k.
func logprob(seed uint64, i, k int) float64 {
	return -float64(mix(seed+uint64(i))%1000)/1000 - float64(k)
}

// alternative is the k-th likeliest token at place i; the likeliest is the one that was said.
func alternative(token []byte, seed uint64, i, k int) []byte {
	if k == 0 {
		return token
	}
	// Neighbours in the list of words differ from each other; the space and the number keep them apart from what was said.
	return []byte(" " + words[(mix(seed+uint64(i))+uint64(k))%uint64(len(words))] + "-" + strconv.Itoa(k))
}

func appendFloat(b []byte, f float64) []byte { return strconv.AppendFloat(b, f, 'g', -1, 64) }

// appendEmbeddings writes the answer of an embedding call: unit vectors seeded by the inputs.
func (p *page) appendEmbeddings(b []byte) []byte {
	b = append(append(b, p.full...), `,"data":[`...)
	for i := range p.q.prompts {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendInt(append(b, `{"index":`...), int64(i), 10)
		b = append(b, `,"object":"embedding","embedding":`...)
		b = appendVector(b, p.q.prompts[i].seed, p.q.dimensions, p.q.base64)
		b = append(b, '}')
	}
	b = append(p.appendUsage(append(b, `],"usage":`...), 0), `,"prompt_tokens_details":null}}`...)
	return b
}

func appendVector(b []byte, seed uint64, dimensions int, asBase64 bool) []byte {
	v := make([]float32, dimensions)
	var sum float64
	for i := range v {
		v[i] = float32(mix(seed+uint64(i))>>40)/(1<<23) - 1
		sum += float64(v[i]) * float64(v[i])
	}
	norm := float32(math.Sqrt(max(sum, math.SmallestNonzeroFloat32)))
	if asBase64 {
		raw := make([]byte, 0, 4*dimensions)
		for _, x := range v {
			raw = binary.LittleEndian.AppendUint32(raw, math.Float32bits(x/norm))
		}
		return append(base64.StdEncoding.AppendEncode(append(b, '"'), raw), '"')
	}
	b = append(b, '[')
	for i, x := range v {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendFloat(b, float64(x/norm), 'g', -1, 32)
	}
	return append(b, ']')
}
