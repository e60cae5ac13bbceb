package job

import (
	"bytes"
	"encoding/json"
	"math"
	"strconv"
)

// BytesPerToken is the first guess at how many bytes of a request one prompt token stands for, before an engine's usage teaches a better one.
const BytesPerToken = 4

// DefaultOutput is the length of an answer in tokens that is expected of a request without a limit, before any was seen.
const DefaultOutput Tokens = 256

// MaxBytesPerToken is a bound that no real tokenizer reaches over a whole prompt: what does not fit at this ratio surely does not fit.
const MaxBytesPerToken = 16

// MediaTokens is what a picture, a sound or a file in a request's body counts for, whatever its size in bytes: about what a picture of a megapixel takes of most models.
const MediaTokens Tokens = 1024

// EstimateCost returns what a request will need of an engine's KV cache, from its fields and its body.
// A limit that is not a positive whole number counts as none: the engine will refuse it.
func EstimateCost(o *Object, body []byte) Cost {
	media, encoded := mediaIn(body)
	c := Cost{Prompt: Tokens((len(body)-encoded+BytesPerToken-1)/BytesPerToken) + Tokens(media)*MediaTokens, Answers: 1}
	c.Output = Tokens(positive(o.Get("max_completion_tokens")))
	for _, name := range []string{"max_tokens", "max_output_tokens"} { // the latter is the Responses API's
		if c.Output == 0 {
			c.Output = Tokens(positive(o.Get(name)))
		}
	}
	if n := positive(o.Get("n")); n > 1 {
		c.Answers = int(min(n, math.MaxInt32))
	}
	return c
}

// mediaIn finds what stands in a body as base64: data URLs that are the value of "url" or of a name that ends so, or of "file_data", and sound, which is the value of "data". It returns how many there are, and how many bytes they take. What is too
// short to be worth its MediaTokens counts as text, and so does what holds anything but base64: no text becomes cheap by its beginning.
func mediaIn(body []byte) (n, size int) {
	for at := 0; ; {
		i := bytes.Index(body[at:], []byte(`"data`))
		if i < 0 {
			return n, size
		}
		at += i
		encoded, ok := mediaAt(body[:at], body[at:])
		at += len(`"data`)
		if !ok {
			continue
		}
		length := base64Length(encoded)
		if Tokens(length) > MediaTokens*BytesPerToken && length < len(encoded) && encoded[length] == '"' {
			n++
			size += length
		}
		at = len(body) - len(encoded) + length
	}
}

// mediaAt returns what may be base64, and what follows it, of a place where `"data` begins. before is what stands before.
func mediaAt(before, at []byte) (encoded []byte, ok bool) {
	const space = " \t\r\n"
	if field, isName := bytes.CutPrefix(at, []byte(`"data"`)); isName {
		if field, isName = bytes.CutPrefix(bytes.TrimLeft(field, space), []byte(":")); !isName {
			return nil, false
		}
		return bytes.CutPrefix(bytes.TrimLeft(field, space), []byte(`"`))
	}
	before, ok = bytes.CutSuffix(bytes.TrimRight(before, space), []byte(":"))
	if !ok { // no value, but within a text, or in a list
		return nil, false
	}
	before = bytes.TrimRight(before, space)
	if !bytes.HasSuffix(before, []byte(`url"`)) && !bytes.HasSuffix(before, []byte(`"file_data"`)) {
		return nil, false
	}
	const head = 128 // a media type and its parameters
	i := bytes.Index(at[:min(len(at), head)], []byte(";base64,"))
	if i < 0 || bytes.IndexByte(at[1:i], '"') >= 0 {
		return nil, false
	}
	return at[i+len(";base64,"):], true
}

// base64Length is how many bytes text begins with that base64 is made of. JSON may write a slash behind a backslash.
func base64Length(text []byte) int {
	for i, c := range text {
		switch {
		case 'A' <= c && c <= 'Z', 'a' <= c && c <= 'z', '0' <= c && c <= '9', c == '+', c == '/', c == '-', c == '_', c == '=':
		case c == '\\' && i+1 < len(text) && text[i+1] == '/':
		default:
			return i
		}
	}
	return len(text)
}

// LeastPrompt is the least number of prompt tokens that a body of size bytes can hold.
func LeastPrompt(size int64) Tokens { return Tokens(size / MaxBytesPerToken) }

func positive(raw json.RawMessage) int64 {
	if len(raw) == 0 {
		return 0
	}
	n, err := strconv.ParseInt(string(raw), 10, 64) // of JSON texts it takes the whole numbers that fit
	if err != nil || n < 0 {
		return 0
	}
	return n
}

// mostExpected bounds what one job is expected to need, so that sums of a million jobs stay whole numbers in a double.
const mostExpected = 1 << 32

// Longest is how long a sequence the request may make, in tokens: an engine refuses what is over its context. Without a limit on the answer it is the prompt alone, for the answer then ends where the context does.
func (c Cost) Longest() Tokens {
	return min(max(0, c.Prompt), mostExpected) + min(max(0, c.Output), mostExpected)
}

// Expected is how many tokens the job is expected to need in all: its prompt, and as many answers as it asks for, each of the length that it allows. It is an estimate to compare and to add up, not a
// bound: whoever needs times divides by rates that are measured in the same estimates.
func (j *Job) Expected() Tokens {
	prompt := min(max(0, j.Cost.Prompt), mostExpected)
	if !j.Endpoint.Generates() {
		return prompt
	}
	output := j.Cost.Output
	if output <= 0 {
		output = DefaultOutput
	}
	return min(prompt+min(output, mostExpected)*Tokens(min(max(1, j.Cost.Answers), 1<<20)), mostExpected)
}
