package worker

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"

	"github.com/millrace/millrace/internal/engine"
	"github.com/millrace/millrace/internal/job"
)

// resumption is an answer that earlier attempts began, and whose rest this one brings as if there had been one stream.
type resumption struct {
	endpoint  job.Endpoint
	assembler *engine.Assembler
	head      []headField // of the stream's first chunk
	used      job.Tokens  // tokens of the text so far
	pending   job.Tokens  // tokens without text behind the last one with some
	prompt    job.Tokens  // of the original request; -1 is unknown
	counted   bool        // the readers have the usage of the whole answer
	roles     bool        // the rest's first choice, which tells the role again, is still to come
}

// headField is a member that all chunks of a stream share.
type headField struct {
	key string
	raw []byte
}

// errNotAlike: what the readers have is no stream that can be gone on with.
var errNotAlike = errors.New("the answer so far cannot be read")

// newResumption reads the chunks that readers have.
func newResumption(endpoint job.Endpoint, chunks [][]byte, hideUsage bool) (*resumption, error) {
	s := &resumption{endpoint: endpoint, assembler: engine.NewAssembler(endpoint, hideUsage), prompt: -1, roles: endpoint == job.ChatCompletions}
	for _, data := range chunks {
		chunk, err := s.assembler.Add(data)
		if err != nil {
			return nil, fmt.Errorf("reading the answer so far: %w", err)
		}
		if chunk.Error != nil {
			return nil, errNotAlike
		}
		if s.head == nil && chunk.Choice {
			if err := s.readHead(data); err != nil {
				return nil, err
			}
		}
		s.count(chunk)
	}
	if s.assembler.Finished(1) {
		s.used += s.pending
	}
	return s, nil
}

func (s *resumption) readHead(data []byte) error {
	o, err := job.ParseObject(data)
	if err != nil {
		return fmt.Errorf("reading the answer so far: %w", err)
	}
	s.head = []headField{}
	for _, key := range []string{"id", "object", "created", "model"} {
		if raw := o.Get(key); raw != nil {
			s.head = append(s.head, headField{key, bytes.Clone(raw)})
		}
	}
	return nil
}

// count counts a chunk's tokens: as the engine says where it says so in each chunk, else a chunk is a token. What comes without text belongs to the text behind it, as the first bytes of a character.
func (s *resumption) count(c engine.Chunk) {
	if c.Usage {
		if u := s.assembler.Usage(); u != nil {
			s.prompt = u.PromptTokens
			s.counted = !c.Choice
			if c.Token || s.assembler.Finished(1) {
				s.used, s.pending = u.CompletionTokens, 0
			}
			return
		}
	}
	switch {
	case c.Token:
		s.used, s.pending = s.used+s.pending+1, 0
	case c.Empty:
		s.pending++
	}
}

// join makes a chunk of the rest one of the stream that the readers have: with its names, without the role again, and with the usage of the whole. It is nil if nothing is left to show.
func (s *resumption) join(data []byte) ([]byte, error) {
	o, err := job.ParseObject(data)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", engine.ErrBadStream, err)
	}
	for _, f := range s.head {
		if f.key != "object" && o.Get(f.key) != nil {
			if data, err = job.SetField(data, f.key, f.raw); err != nil {
				return nil, fmt.Errorf("joining a chunk: %w", err)
			}
		}
	}
	if s.roles {
		choices, empty, err := s.withoutRole(o.Get("choices"))
		switch {
		case err != nil:
			return nil, err
		case empty:
			return nil, nil
		case choices != nil:
			if data, err = job.SetField(data, "choices", choices); err != nil {
				return nil, fmt.Errorf("joining a chunk: %w", err)
			}
		}
	}
	if raw := o.Get("usage"); len(raw) > 0 && raw[0] == '{' {
		usage, err := s.wholeUsage(raw)
		if err == nil {
			data, err = job.SetField(data, "usage", usage)
		}
		if err != nil {
			return nil, fmt.Errorf("joining a usage: %w", err)
		}
	}
	return data, nil
}

// withoutRole takes the role from the first choice that comes: the readers have it. empty: the choice had nothing else. It returns nil if there is nothing to change.
func (s *resumption) withoutRole(raw []byte) (choices []byte, empty bool, err error) {
	var list []json.RawMessage
	if len(raw) == 0 || json.Unmarshal(raw, &list) != nil || len(list) != 1 {
		return nil, false, nil //nolint:nilerr // what is no list of one tells no role
	}
	choice, err := job.ParseObject(list[0])
	if err != nil {
		return nil, false, fmt.Errorf("%w: %w", engine.ErrBadStream, err)
	}
	s.roles = false
	delta := choice.Get("delta")
	if o, err := job.ParseObject(delta); err != nil || o.Get("role") == nil {
		return nil, false, nil //nolint:nilerr // what has no delta tells no role
	}
	if delta, err = job.RemoveField(delta, "role"); err != nil {
		return nil, false, fmt.Errorf("joining a chunk: %w", err)
	}
	o, err := job.ParseObject(delta)
	if err != nil {
		return nil, false, fmt.Errorf("joining a chunk: %w", err)
	}
	nothing := func(f job.Field) bool {
		return slices.Contains([]string{"null", `""`, "[]", "{}"}, string(f.Value))
	}
	if reason := choice.Get("finish_reason"); (reason == nil || string(reason) == "null") && !slices.ContainsFunc(o.Fields, func(f job.Field) bool { return !nothing(f) }) {
		return nil, true, nil
	}
	edited, err := job.SetField(list[0], "delta", delta)
	if err != nil {
		return nil, false, fmt.Errorf("joining a chunk: %w", err)
	}
	return slices.Concat([]byte("["), edited, []byte("]")), false, nil
}

// wholeUsage is the rest's usage with what came before: the prompt is the original request's, and the tokens are those of both parts.
func (s *resumption) wholeUsage(raw []byte) ([]byte, error) {
	var u struct {
		Prompt     job.Tokens `json:"prompt_tokens"`
		Completion job.Tokens `json:"completion_tokens"`
		Details    struct {
			Cached job.Tokens `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	}
	if err := json.Unmarshal(raw, &u); err != nil {
		return raw, nil //nolint:nilerr // what is no usage is left alone
	}
	o, err := job.ParseObject(raw)
	if err != nil {
		return nil, err
	}
	prompt := s.prompt
	if prompt < 0 { // the text so far was a part of this request's prompt
		prompt = max(u.Prompt-s.used, 0)
	}
	for _, f := range []struct {
		key string
		n   job.Tokens
	}{{"prompt_tokens", prompt}, {"completion_tokens", u.Completion + s.used}, {"total_tokens", prompt + u.Completion + s.used}} {
		if o.Get(f.key) == nil {
			continue
		}
		if raw, err = job.SetField(raw, f.key, fmt.Append(nil, f.n)); err != nil {
			return nil, err
		}
	}
	if u.Details.Cached <= prompt {
		return raw, nil
	}
	details, err := job.SetField(o.Get("prompt_tokens_details"), "cached_tokens", fmt.Append(nil, prompt))
	if err != nil {
		return nil, err
	}
	return job.SetField(raw, "prompt_tokens_details", details)
}

// chunk makes a chunk of the stream: its head with the rest of its members.
func (s *resumption) chunk(rest string) []byte {
	b := []byte("{")
	for _, f := range s.head {
		b = append(append(append(append(append(b, '"'), f.key...), `":`...), f.raw...), ',')
	}
	return append(append(b, rest...), '}')
}

// lengthChunk ends an answer that has reached its limit.
func (s *resumption) lengthChunk() []byte {
	if s.endpoint == job.Completions {
		return s.chunk(`"choices":[{"index":0,"text":"","logprobs":null,"finish_reason":"length"}]`)
	}
	return s.chunk(`"choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"length"}]`)
}

func (s *resumption) usageChunk() []byte {
	return s.chunk(fmt.Sprintf(`"choices":[],"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}`, s.prompt, s.prompt+s.used, s.used))
}

// eventOf is an event with one chunk.
func eventOf(chunk []byte) engine.Event {
	var raw []byte
	for line := range bytes.Lines(chunk) {
		raw = append(append(append(raw, "data: "...), bytes.TrimRight(line, "\r\n")...), '\n')
	}
	return engine.Event{Data: chunk, Raw: append(raw, '\n')}
}

// defaultLimits are how many tokens an engine generates at most for a completion that sets no limit, as engines document it; -1 is no limit.
var defaultLimits = map[engine.Kind]job.Tokens{engine.VLLM: 16, engine.SGLang: 16, engine.LlamaCPP: -1}

// goOn brings the rest of an answer that earlier attempts began, of which the readers have c.earlier. ok is false if it has to begin anew; then nothing was shown.
func (c *call) goOn(ctx context.Context, request []byte) (r *reply, f *fault, ok bool) {
	j := &c.d.Job
	_, hideUsage, err := job.SetStreaming(request)
	if err != nil {
		return nil, nil, false
	}
	s, err := newResumption(j.Endpoint, c.earlier, hideUsage)
	if err != nil {
		c.log.Warn("going on with a partial answer: beginning anew", "err", err)
		return nil, nil, false
	}
	c.assembler = s.assembler
	text, plain := s.assembler.Partial()
	switch {
	case !oneChoice(request, j.Endpoint):
		return nil, nil, false
	case s.assembler.Finished(1):
		r, f = c.complete(ctx, request, s)
		return r, f, true
	case !plain:
		return nil, nil, false
	case text == "": // the readers have a role and no more: any engine begins where that ends
		s.used, s.pending = 0, 0
		return c.generate(ctx, request, s)
	}
	c.w.mu.Lock()
	limit := defaultLimits[c.w.kind]
	c.w.mu.Unlock()
	rest, left, err := job.Continue(request, j.Endpoint, job.Partial{Text: text, Tokens: s.used, DefaultLimit: limit})
	switch {
	case err != nil:
		c.log.Info("a partial answer is not continued", "err", err)
		return nil, nil, false
	case !left:
		r, f = c.complete(ctx, request, s, s.lengthChunk())
		return r, f, true
	case !c.engineContinues(ctx):
		c.log.Info("the engine does not continue partial answers")
		return nil, nil, false
	}
	if s.prompt < 0 {
		s.prompt = c.promptTokens(ctx, request)
	}
	c.log.Info("continuing a partial answer", "tokens", s.used)
	return c.generate(ctx, rest, s)
}

// abilities are what the engine can do with the job's model. A job that is stopped does not stop the asking, for what could not be found out counts as missing to others, too.
func (c *call) abilities(ctx context.Context) engine.Abilities {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), storeTimeout)
	defer cancel()
	return c.w.deps.Engine.Abilities(ctx, c.d.Job.Model)
}

// engineContinues tells whether the engine can go on with a text that it is given.
func (c *call) engineContinues(ctx context.Context) bool {
	can := c.abilities(ctx)
	switch c.d.Job.Endpoint {
	case job.ChatCompletions:
		return can.ContinueChat
	case job.Completions:
		return can.ContinueCompletion
	}
	return false
}

// continuable tells whether another attempt may go on with what this one has brought, as far as the request, the answer so far and this engine tell.
func (c *call) continuable(ctx context.Context) bool {
	if c.answering != nil { // something was shown, and a response begins with what only one attempt can say
		return false
	}
	if c.assembler == nil {
		return true // nothing has come yet
	}
	if !oneChoice(c.request, c.d.Job.Endpoint) {
		return false
	}
	text, plain := c.assembler.Partial()
	if c.assembler.Finished(1) || plain && text == "" {
		return true
	}
	if !plain || !c.engineContinues(ctx) {
		return false
	}
	_, _, err := job.Continue(c.request, c.d.Job.Endpoint, job.Partial{Text: text, Tokens: 1, DefaultLimit: -1})
	return err == nil
}

// oneChoice tells whether a request asks for one answer to one prompt.
func oneChoice(request []byte, endpoint job.Endpoint) bool {
	o, err := job.ParseObject(request)
	if err != nil {
		return false
	}
	if prompt := o.Get("prompt"); endpoint == job.Completions && (len(prompt) == 0 || prompt[0] != '"') {
		return false
	}
	n := string(o.Get("n"))
	return n == "" || n == "null" || n == "1"
}

// choices is how many answers a request asks for.
func choices(request []byte, endpoint job.Endpoint) int {
	var r struct {
		N      int             `json:"n"`
		Prompt json.RawMessage `json:"prompt"`
	}
	_ = json.Unmarshal(request, &r) // what cannot be read is left at its zero: the engine took the request
	n := max(1, r.N)
	var prompts []json.RawMessage
	if endpoint == job.Completions && json.Unmarshal(r.Prompt, &prompts) == nil && len(prompts) > 0 && bytes.ContainsAny(prompts[0][:1], `"[`) { // else it is one prompt, or one of tokens
		n *= len(prompts)
	}
	return n
}

// complete ends an answer to which no token is to be added: what is still missing behind the last one is told.
func (c *call) complete(ctx context.Context, request []byte, s *resumption, chunks ...[]byte) (*reply, *fault) {
	if !s.counted {
		if s.prompt < 0 {
			s.prompt = c.promptTokens(ctx, request)
		}
		if s.prompt >= 0 { // else the answer goes without
			chunks = append(chunks, s.usageChunk())
		}
	}
	if f := c.stopped(ctx); f != nil {
		return nil, f
	}
	r := &reply{status: http.StatusOK, contentType: "text/event-stream", streamed: true, continues: true}
	for _, data := range chunks {
		chunk, err := s.assembler.Add(data)
		if err != nil {
			return r, failed(job.CodeEngineError, "The engine's answer is too large to be kept.")
		}
		if chunk.Show && !c.show(r, eventOf(data)) {
			return r, ended(job.Cancelled, job.CodeClientGone, "The client read its answer too slowly.")
		}
	}
	return r, c.whole(ctx, r, s.assembler)
}

// promptTokens asks the engine how long the request's prompt is: it completes one token, and counts. -1 if it does not tell.
func (c *call) promptTokens(ctx context.Context, request []byte) job.Tokens {
	ctx, cancel := context.WithTimeout(ctx, c.w.cfg.ProbeTimeout)
	defer cancel()
	u, err := func() (*job.Usage, error) {
		body, err := job.SetOneToken(request, c.d.Job.Endpoint)
		if err == nil {
			body, err = c.salt(c.abilities(ctx), body)
		}
		if err != nil {
			return nil, err
		}
		response, err := c.w.deps.Engine.Call(ctx, engine.Request{Endpoint: c.d.Job.Endpoint, Body: bytes.NewReader(body), Size: int64(len(body))})
		if err != nil {
			return nil, err
		}
		defer response.Body.Close() //nolint:errcheck // read only
		answer, err := response.ReadAll()
		if err != nil {
			return nil, err
		}
		if response.StatusCode != http.StatusOK {
			return nil, fmt.Errorf("the engine answered %d", response.StatusCode)
		}
		return engine.UsageOf(answer), nil
	}()
	if err != nil || u == nil {
		c.log.Warn("counting a prompt: reckoning it", "err", err)
		return -1
	}
	c.w.progress.alive()
	c.w.gate.alive()
	return u.PromptTokens
}

// chunksOf are the chunks of a token event: several are parted by newlines. One that has newlines of its own stands alone.
func chunksOf(data []byte) [][]byte {
	if !bytes.ContainsRune(data, '\n') || json.Valid(data) {
		return [][]byte{data}
	}
	return bytes.Split(data, []byte("\n"))
}

// chunksShown are the chunks in the events of a stream that a client has got. They are never nil.
func chunksShown(stream []byte) [][]byte {
	chunks := [][]byte{}
	r := &engine.Response{Body: io.NopCloser(bytes.NewReader(stream))}
	for ev, err := range r.Events() {
		if err != nil { // the end, for the stream has broken off
			break
		}
		if ev.Data != nil && !ev.Done {
			chunks = append(chunks, bytes.Clone(ev.Data))
		}
	}
	return chunks
}

// errLostEvents: some of what readers have is not in the store.
var errLostEvents = errors.New("the stream has a gap")

// resume finds what the job's readers have of earlier attempts, and has the call go on with it, or the events begin anew.
func (a *attempt) resume(ctx context.Context) {
	a.call.anew = func() bool {
		a.events.reset(a.claim.Charged + a.claim.Uncharged + 1)
		return true
	}
	earlier, err := a.earlier(ctx)
	switch {
	case err == nil:
	case ctx.Err() != nil: // it was stopped meanwhile, as the call finds out
		return
	default:
		a.log.Warn("reading what an earlier attempt brought: beginning anew", "err", err)
		a.call.anew()
		return
	}
	a.events.prepend(earlier)
	for _, ev := range earlier {
		if ev.Kind == job.EventToken {
			a.call.earlier = append(a.call.earlier, chunksOf(ev.Data)...)
		}
	}
}

// earlier reads the events before this attempt's own, from the last reset on: what readers have if they have all.
func (a *attempt) earlier(ctx context.Context) ([]job.Event, error) {
	var (
		events []job.Event
		size   int
		last   int64
		whole  bool // no event before those in hand is missing
	)
	for {
		page, err := a.readEvents(ctx, last)
		if err != nil {
			return nil, err
		}
		for _, ev := range page {
			begins := ev.N == 1 && last == 0
			if ev.Kind == job.EventReset {
				var r struct {
					Text string `json:"text"`
				}
				begins = json.Unmarshal(ev.Data, &r) == nil && r.Text == ""
			}
			switch {
			case begins:
				events, size, whole = events[:0], 0, true
			case ev.N != last+1:
				whole = false
			}
			last = ev.N
			if ev.N >= a.claim.N {
				if !whole || ev.N > a.claim.N {
					return nil, errLostEvents
				}
				return events, nil
			}
			if size += len(ev.Data); size > maxKept/2 {
				return nil, fmt.Errorf("an answer of more than %d bytes", maxKept/2)
			}
			events = append(events, ev)
		}
		if len(page) == 0 {
			return nil, errLostEvents
		}
	}
}

func (a *attempt) readEvents(ctx context.Context, after int64) ([]job.Event, error) {
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	events, _, err := a.w.deps.Results.Events(ctx, a.job.ID, after, writeEvents)
	return events, err
}
