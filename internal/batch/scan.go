package batch

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/millrace/millrace/internal/job"
)

// Rules are what a file must keep to.
type Rules struct {
	Endpoint job.Endpoint
	// MaxLine bounds one line's bytes, without its end; MaxLines the lines that are requests (and, for embeddings, their inputs). 0 is no bound.
	MaxLine, MaxLines int64
	// MaxErrors bounds the errors that are kept; one more entry then says how many others there were. 0 is no bound.
	MaxErrors int
	// Model says why a model cannot be used, nil if it can. It is asked once per model, unless there are thousands of them. nil lets all pass.
	Model func(job.Model) *job.Error
}

// Line is one request of a file.
type Line struct {
	// Number is physical, from 1. Offset and Length are those of its text in the file, in bytes.
	Number, Offset, Length int64
	CustomID               string
	Model                  job.Model
	// Body is the engine's request, byte for byte. It is valid until the next line is read.
	Body []byte
	Cost job.Cost
	// Tokens that it is expected to need, as job.Job.Expected.
	Tokens job.Tokens

	// prompt holds the values that the engine's prompt is made of, in the order in which it uses them; parts of Body.
	prompt [3][]byte
}

// Summary is what a scan found.
type Summary struct {
	// Lines that are requests, good or bad, Bytes of the file, and Tokens of the good lines.
	Lines, Bytes int64
	Tokens       job.Tokens
	// Errors about the file as a whole come first, then those of lines, by line.
	Errors []job.LineError
}

// Scan reads a file to its end in bounded memory, and calls each with every good line. What is wrong with the file stands in the summary; an error is one of reading, or what each returned. Once a file has more
// requests than it may have, the rest are only counted.
//
// A line with several mistakes gets one entry: first what keeps it from being read (too long, not UTF-8, no JSON object), then a field that is missing, then a bad custom_id, a body that
// is no object, a custom_id that an earlier line has, the url, the method, and what is in the body.
func Scan(ctx context.Context, r io.Reader, rules Rules, each func(*Line) error) (*Summary, error) {
	s := &scan{rules: rules, models: map[string]verdict{}}
	in := newLines(r, rules.MaxLine)
	for {
		l, err := in.next(ctx)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("reading line %d of the file: %w", in.number, err)
		}
		s.sum.Lines++
		if s.over() {
			continue
		}
		if e := s.check(l); e != nil {
			s.report(l.number, e)
			continue
		}
		if s.over() { // by the inputs of this line
			continue
		}
		s.sum.Tokens += s.line.Tokens
		if err := each(&s.line); err != nil {
			return nil, err
		}
	}
	s.sum.Bytes = in.offset
	s.finish()
	return &s.sum, nil
}

type scan struct {
	rules  Rules
	sum    Summary
	seen   IDs
	models map[string]verdict
	line   Line
	// bounds is room for the fields that an estimate looks at.
	bounds job.Object
	// inputs counts those that a line has beyond one.
	inputs int64
	// more counts errors beyond MaxErrors.
	more int64
}

// verdict on a model.
type verdict struct {
	model job.Model
	err   *job.Error
}

// mostModels bounds the verdicts that are kept, maxModel a model's name in bytes: no model has a longer one.
const (
	mostModels = 4096
	maxModel   = 256
)

func (s *scan) over() bool {
	return s.rules.MaxLines > 0 && s.sum.Lines+s.inputs > s.rules.MaxLines
}

// problem is what is wrong with a line.
type problem struct {
	code    job.Code
	param   string
	message string
}

func (s *scan) report(number int64, p *problem) {
	if s.rules.MaxErrors > 0 && len(s.sum.Errors) >= s.rules.MaxErrors {
		s.more++
		return
	}
	s.sum.Errors = append(s.sum.Errors, lineError(p, &number))
}

func lineError(p *problem, number *int64) job.LineError {
	e := job.LineError{Code: p.code, Message: p.message, Line: number}
	if p.param != "" {
		e.Param = &p.param
	}
	return e
}

// finish adds what can be said at the end only.
func (s *scan) finish() {
	var file *problem
	switch {
	case s.sum.Lines == 0:
		file = &problem{code: job.CodeEmptyFile, message: "The file holds no requests: it has nothing but blank lines."}
	case s.over() && s.inputs > 0:
		file = &problem{code: job.CodeTooManyTasks, message: fmt.Sprintf("The file has more than the %d inputs that a batch may have: put them into several batches.", s.rules.MaxLines)}
	case s.over():
		file = &problem{code: job.CodeTooManyTasks, message: fmt.Sprintf("The file has %d requests, and a batch may have %d: put them into several batches.", s.sum.Lines, s.rules.MaxLines)}
	}
	if file != nil {
		s.sum.Errors = append([]job.LineError{lineError(file, nil)}, s.sum.Errors...)
		if most := s.rules.MaxErrors; most > 0 && len(s.sum.Errors) > most {
			s.more += int64(len(s.sum.Errors) - most)
			s.sum.Errors = s.sum.Errors[:most]
		}
	}
	if s.more > 0 {
		text := fmt.Sprintf("%d more lines are wrong.", s.more)
		if s.more == 1 {
			text = "1 more line is wrong."
		}
		s.sum.Errors = append(s.sum.Errors, lineError(&problem{code: job.CodeInvalidRequest, message: text}, nil))
	}
}

// check reads a line into s.line, or says what is wrong with it.
func (s *scan) check(t text) *problem {
	switch {
	case t.tooLong:
		return &problem{job.CodeRequestTooLarge, "body", fmt.Sprintf("The line has %d bytes: a request may have %d.", t.size, s.rules.MaxLine)}
	case !utf8.Valid(t.raw):
		return &problem{code: job.CodeInvalidEncoding, message: "The line is not valid UTF-8: save the file in that encoding."}
	case !json.Valid(t.raw):
		return &problem{code: job.CodeInvalidJSONLine, message: "The line is not valid JSON: " + whyInvalid(t.raw) + "."}
	case t.raw[0] != '{':
		return &problem{code: job.CodeInvalidJSONLine, message: "The line is not a JSON object."}
	}
	customID, method, url, body := cut(t.raw)
	for _, f := range [...]struct {
		name  string
		value []byte
	}{{"custom_id", customID}, {"method", method}, {"url", url}, {"body", body}} {
		if f.value == nil {
			return &problem{job.CodeMissingParameter, f.name, "The line must have " + f.name + "."}
		}
	}
	l := &s.line
	*l = Line{Number: t.number, Offset: t.offset, Length: int64(len(t.raw)), Body: body}
	if p := readID(customID, &l.CustomID); p != nil {
		return p
	}
	// Also of a line that turns out to be wrong: its name is taken.
	fresh := s.seen.Add(l.CustomID)
	switch {
	case body[0] != '{':
		return &problem{job.CodeInvalidValue, "body", "body must be an object: the request to " + string(s.rules.Endpoint) + "."}
	case !fresh:
		return &problem{job.CodeDuplicateCustomID, "custom_id", fmt.Sprintf("The custom_id %q of line %d stands in an earlier line already: each line needs its own.", clip(l.CustomID), t.number)}
	case !isText(url, string(s.rules.Endpoint)):
		return &problem{job.CodeInvalidURL, "url", fmt.Sprintf("url is %s: it must be the batch's endpoint, %q.", clip(string(url)), s.rules.Endpoint)}
	case !isText(method, "POST"):
		return &problem{job.CodeInvalidMethod, "method", fmt.Sprintf("method is %s: it must be \"POST\".", clip(string(method)))}
	}
	return s.checkBody(l)
}

// readID decodes a custom_id.
func readID(raw []byte, to *string) *problem {
	wrong := func(why string) *problem { return &problem{job.CodeInvalidValue, "custom_id", "custom_id " + why} }
	if raw[0] != '"' {
		return wrong("must be a string.")
	}
	if len(raw) > 6*MaxCustomID+2 { // longer than that many bytes can be escaped to
		return wrong(fmt.Sprintf("has more than %d bytes.", MaxCustomID))
	}
	id, ok := decode(raw)
	switch {
	case !ok:
		return wrong("holds half of a surrogate pair.")
	case strings.TrimSpace(id) == "":
		return wrong("must not be blank.")
	case len(id) > MaxCustomID:
		return wrong(fmt.Sprintf("has %d bytes: at most %d are allowed.", len(id), MaxCustomID))
	}
	*to = id
	return nil
}

// checkBody reads what a line's body must have.
func (s *scan) checkBody(l *Line) *problem {
	e, field := s.rules.Endpoint, promptField(s.rules.Endpoint)
	var b fields
	b.read(l.Body, field)
	if !off(b.stream) {
		return &problem{job.CodeStreamingUnsupported, "body.stream", "A line of a batch is answered in one piece: leave stream out, or set it to false."}
	}
	if p := s.checkModel(l, b.model); p != nil && p.code == job.CodeInvalidRequest {
		return p
	} else if q := s.checkPrompt(b.prompt, field); q != nil {
		return q
	} else if e == job.Responses && !off(b.background) {
		return &problem{job.CodeInvalidRequest, "body.background", "A batch runs in the background as a whole: leave background out."}
	} else if p != nil { // a model that cannot be used comes after all that is wrong with the request itself
		return p
	}
	s.bounds.Fields = b.bounds(s.bounds.Fields[:0])
	l.Cost = job.EstimateCost(&s.bounds, l.Body)
	l.Tokens = (&job.Job{Endpoint: e, Cost: l.Cost}).Expected()
	l.prompt = [...][]byte{b.tools, b.instructions, b.prompt}
	if e == job.Embeddings {
		s.inputs += inputs(b.prompt) - 1
	}
	return nil
}

// checkModel reads the model. One that has no name is invalid_request, one that may not be used model_not_found.
func (s *scan) checkModel(l *Line, raw []byte) *problem {
	var name []byte
	switch {
	case isNull(raw):
		return &problem{job.CodeInvalidRequest, "body.model", "The request must have a model."}
	case raw[0] != '"':
		return &problem{job.CodeInvalidRequest, "body.model", "model must be a string."}
	case bytes.IndexByte(raw, '\\') < 0:
		name = raw[1 : len(raw)-1]
	default:
		text, ok := decode(raw)
		if !ok {
			return &problem{job.CodeInvalidRequest, "body.model", "model holds half of a surrogate pair."}
		}
		name = []byte(text)
	}
	switch {
	case len(name) == 0:
		return &problem{job.CodeInvalidRequest, "body.model", "model must not be empty."}
	case len(name) > maxModel:
		return &problem{job.CodeModelNotFound, "body.model", fmt.Sprintf("The model %q does not exist.", clip(string(name)))}
	}
	v, known := s.models[string(name)]
	if !known {
		v.model = job.Model(name)
		if s.rules.Model != nil {
			v.err = s.rules.Model(v.model)
		}
		if len(s.models) < mostModels {
			s.models[string(name)] = v
		}
	}
	if v.err != nil {
		return &problem{job.CodeModelNotFound, "body.model", v.err.Message}
	}
	l.Model = v.model
	return nil
}

func (s *scan) checkPrompt(raw []byte, field string) *problem {
	list := s.rules.Endpoint == job.ChatCompletions
	wrong := func(why string) *problem { return &problem{job.CodeInvalidRequest, "body." + field, why} }
	switch {
	case isNull(raw):
		return wrong("The request must have " + field + ".")
	case list && raw[0] != '[':
		return wrong(field + " must be an array.")
	case raw[0] != '[' && raw[0] != '"':
		return wrong(field + " must be a string or an array.")
	case list && raw[job.SkipSpace(raw, 1)] == ']':
		return wrong(field + " must not be empty.")
	}
	return nil
}

// Parse cuts one line that Scan has accepted into its name and its body, whose bytes are those of raw.
func Parse(raw []byte) (customID string, body []byte, err error) {
	if !json.Valid(raw) {
		return "", nil, fmt.Errorf("not valid JSON: %s", whyInvalid(raw))
	}
	if raw[job.SkipSpace(raw, 0)] != '{' {
		return "", nil, job.ErrNotObject
	}
	name, _, _, body := cut(raw)
	switch {
	case name == nil:
		return "", nil, errors.New("it has no custom_id")
	case body == nil || body[0] != '{':
		return "", nil, errors.New("it has no body")
	}
	if p := readID(name, &customID); p != nil {
		return "", nil, errors.New(p.message)
	}
	return customID, body, nil
}

// walk calls each with the members of an object's text, which json.Valid has passed. Keys have their escapes decoded. Nothing is copied but a key that has any.
func walk(raw []byte, each func(key, value []byte)) {
	i := job.SkipSpace(raw, job.SkipSpace(raw, 0)+1)
	for raw[i] != '}' {
		end := job.SkipString(raw, i)
		key := raw[i+1 : end-1]
		if bytes.IndexByte(key, '\\') >= 0 {
			var text string
			_ = json.Unmarshal(raw[i:end], &text) // it is a valid string
			key = []byte(text)
		}
		i = job.SkipSpace(raw, end)
		i = job.SkipSpace(raw, i+1)
		end = job.SkipValue(raw, i)
		each(key, raw[i:end])
		i = job.SkipSpace(raw, end)
		if raw[i] == ',' {
			i = job.SkipSpace(raw, i+1)
		}
	}
}

// cut finds the members of a line; nil is absent. Of a repeated member the last counts.
func cut(raw []byte) (customID, method, url, body []byte) {
	walk(raw, func(key, value []byte) {
		switch string(key) {
		case "custom_id":
			customID = value
		case "method":
			method = value
		case "url":
			url = value
		case "body":
			body = value
		}
	})
	return customID, method, url, body
}

// fields are the members of a body that matter here; nil is absent.
type fields struct {
	model, prompt, instructions, tools, stream, background []byte
	maxTokens, maxCompletion, maxOutput, n                 []byte
}

func (f *fields) read(body []byte, prompt string) {
	walk(body, func(key, value []byte) {
		switch string(key) {
		case prompt:
			f.prompt = value
		case "model":
			f.model = value
		case "instructions":
			f.instructions = value
		case "tools":
			f.tools = value
		case "stream":
			f.stream = value
		case "background":
			f.background = value
		case "max_tokens":
			f.maxTokens = value
		case "max_completion_tokens":
			f.maxCompletion = value
		case "max_output_tokens":
			f.maxOutput = value
		case "n":
			f.n = value
		}
	})
}

// bounds are the members that an estimate looks at.
func (f *fields) bounds(dst []job.Field) []job.Field {
	for _, m := range [...]job.Field{{Key: "max_tokens", Value: f.maxTokens}, {Key: "max_completion_tokens", Value: f.maxCompletion}, {Key: "max_output_tokens", Value: f.maxOutput}, {Key: "n", Value: f.n}} {
		if m.Value != nil {
			dst = append(dst, m)
		}
	}
	return dst
}

// inputs counts those of an embeddings request: the strings or token lists of an array, else one.
func inputs(raw []byte) int64 {
	if raw[0] != '[' {
		return 1
	}
	i := job.SkipSpace(raw, 1)
	if raw[i] != '"' && raw[i] != '[' {
		return 1 // token ids
	}
	n := int64(0)
	for raw[i] != ']' {
		n++
		i = job.SkipSpace(raw, job.SkipValue(raw, i))
		if raw[i] == ',' {
			i = job.SkipSpace(raw, i+1)
		}
	}
	return n
}

// decode is the text of a JSON string. It is false for one with half of a surrogate pair, which no text can hold.
func decode(raw []byte) (string, bool) {
	if bytes.IndexByte(raw, '\\') < 0 {
		return string(raw[1 : len(raw)-1]), true
	}
	var s string
	if json.Unmarshal(raw, &s) != nil {
		return "", false
	}
	// What cannot be decoded became U+FFFD: of those there may be no more than were written as such. Behind an escaped backslash the letters are no escape.
	lower := bytes.ToLower(bytes.ReplaceAll(raw, []byte(`\\`), nil))
	return s, strings.Count(s, "\ufffd") <= bytes.Count(raw, []byte("\ufffd"))+bytes.Count(lower, []byte(`\ufffd`))
}

// isText tells whether raw is the JSON string of want.
func isText(raw []byte, want string) bool {
	if raw[0] != '"' {
		return false
	}
	if bytes.IndexByte(raw, '\\') < 0 {
		return string(raw[1:len(raw)-1]) == want
	}
	s, ok := decode(raw)
	return ok && s == want
}

// off tells whether a switch is absent or off. What is no boolean may be taken for true by an engine.
func off(raw []byte) bool { return isNull(raw) || string(raw) == "false" }

func isNull(raw []byte) bool { return raw == nil || string(raw) == "null" }

// whyInvalid says where a text stops being JSON. It quotes nothing of it but one character.
func whyInvalid(raw []byte) string {
	var v json.RawMessage
	err := json.Unmarshal(raw, &v)
	var syntax *json.SyntaxError
	if errors.As(err, &syntax) {
		return syntax.Error() + " (byte " + strconv.FormatInt(syntax.Offset, 10) + ")"
	}
	return "it cannot be read"
}

// clip bounds a client's text in a message.
func clip(s string) string {
	const most = 100
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "…"
}

// text is one line of a file that is not blank.
type text struct {
	number, offset int64
	// raw is without the space around it, nil for a line that is too long. It is valid until the next is read.
	raw []byte
	// size of the line without its end.
	size    int64
	tooLong bool
}

// lines reads a file line by line. It holds one line, and none that is too long.
type lines struct {
	r   io.Reader
	max int
	buf []byte
	// buf[from:to] is read and not handed out.
	from, to int
	// offset is that of buf[from] in the file, number the last line's.
	offset, number int64
	ended          bool
}

const firstBuffer = 256 << 10

func newLines(r io.Reader, longest int64) *lines {
	if longest <= 0 || longest > math.MaxUint32 {
		longest = math.MaxUint32 // as far as an index can tell
	}
	return &lines{r: r, max: int(longest), buf: make([]byte, firstBuffer)}
}

var bom = []byte("\xef\xbb\xbf")

// next returns the next line that is not blank, io.EOF after the last.
func (in *lines) next(ctx context.Context) (text, error) {
	for {
		t, err := in.any(ctx)
		if err != nil || t.tooLong || len(t.raw) > 0 {
			return t, err
		}
	}
}

// any returns the next line, blank or not.
func (in *lines) any(ctx context.Context) (text, error) {
	looked := 0 // bytes from in.from on that hold no line end
	for {
		if i := bytes.IndexByte(in.buf[in.from+looked:in.to], '\n'); i >= 0 {
			return in.hand(looked+i, 1), nil
		}
		looked = in.to - in.from
		if in.ended {
			if looked == 0 {
				return text{}, io.EOF
			}
			return in.hand(looked, 0), nil
		}
		if looked > in.max+len(bom)+1 { // a line end, and a mark of the byte order, may stand beside the longest
			return in.skip(ctx)
		}
		if err := in.fill(ctx); err != nil {
			return text{}, err
		}
	}
}

// hand returns the line of n bytes at in.from, and steps over it and its end.
func (in *lines) hand(n, end int) text {
	in.number++
	raw, at := in.buf[in.from:in.from+n], in.offset
	in.from += n + end
	in.offset += int64(n + end)
	if in.number == 1 && bytes.HasPrefix(raw, bom) {
		raw, at = raw[len(bom):], at+int64(len(bom))
	}
	size := len(raw)
	if size > 0 && raw[size-1] == '\r' {
		size--
	}
	raw = raw[:size]
	begin := job.SkipSpace(raw, 0)
	raw = bytes.TrimRight(raw[begin:], " \t\r")
	t := text{number: in.number, offset: at + int64(begin), raw: raw, size: int64(size)}
	if size > in.max && len(raw) > 0 {
		t.raw, t.tooLong = nil, true
	}
	return t
}

// skip steps over a line that is too long for the buffer.
func (in *lines) skip(ctx context.Context) (text, error) {
	in.number++
	t := text{number: in.number, offset: in.offset}
	if in.number == 1 && bytes.HasPrefix(in.buf[in.from:in.to], bom) {
		in.from += len(bom)
		in.offset += int64(len(bom))
	}
	var last byte
	for {
		piece := in.buf[in.from:in.to]
		i := bytes.IndexByte(piece, '\n')
		if i >= 0 {
			piece = piece[:i]
		}
		if len(piece) > 0 {
			last = piece[len(piece)-1]
		}
		t.tooLong = t.tooLong || len(bytes.TrimLeft(piece, " \t\r")) > 0
		t.size += int64(len(piece))
		in.offset += int64(len(piece))
		in.from += len(piece)
		if i >= 0 {
			in.from++
			in.offset++
		}
		if i >= 0 || in.ended {
			if last == '\r' {
				t.size--
			}
			return t, nil
		}
		if err := in.fill(ctx); err != nil {
			return text{}, err
		}
	}
}

// fill reads more behind what is there, in a larger buffer if that is full.
func (in *lines) fill(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if in.from > 0 {
		copy(in.buf, in.buf[in.from:in.to])
		in.from, in.to = 0, in.to-in.from
	}
	if in.to == len(in.buf) {
		larger := make([]byte, min(2*len(in.buf), in.max+firstBuffer)) // any() keeps less than that
		copy(larger, in.buf)
		in.buf = larger
	}
	for range 100 {
		n, err := in.r.Read(in.buf[in.to:])
		in.to += n
		switch {
		case errors.Is(err, io.EOF):
			in.ended = true
			return nil
		case err != nil:
			return err
		case n > 0:
			return nil
		}
	}
	return io.ErrNoProgress
}
