package api

// maxDepth bounds how deep JSON may be nested, as encoding/json does.
const maxDepth = 10_000

// syntax tells of a text that passes in pieces whether it is one JSON value, as json.Valid does of a whole. It holds what is open, and nothing of the text. The zero value has seen nothing.
type syntax struct {
	at   spot
	open []byte // the brackets that are open
	// key: the string is a member's name. rest is what a literal, or the digits of an escape, lack yet.
	key  bool
	rest string
}

// spot is where in a JSON text the next byte stands.
type spot uint8

const (
	atValue     spot = iota // a value must begin
	atFirst                 // the first value of an array, or its end
	atFirstKey              // the first name of an object, or its end
	atKey                   // a name must begin
	atColon                 // behind a name
	behindValue             // a comma, an end, or nothing more
	inString                // or at its end
	inEscape                // behind a backslash
	inHex                   // rest counts the digits that are missing
	inLiteral               // rest is what is missing
	behindMinus             // a digit must come
	behindZero              // no digit may come
	inWhole                 // digits before a point
	behindPoint             // a digit must come
	inFraction              // digits behind a point
	behindE                 // a sign or a digit must come
	behindSign              // a digit must come
	inExponent              // digits of an exponent
	nowhere                 // it is no JSON
)

const (
	hexDigits     = "0123456789abcdefABCDEF"
	escapeLetters = `"\/bfnrt`
)

// feed takes the next piece, and tells whether the text may be JSON yet.
func (s *syntax) feed(piece []byte) bool {
	for _, b := range piece {
		if s.at == inString && b >= ' ' && b != '"' && b != '\\' {
			continue
		}
		if s.at = s.next(b); s.at == nowhere {
			return false
		}
	}
	return s.at != nowhere
}

// whole tells whether the text, if nothing more comes, is JSON.
func (s *syntax) whole() bool {
	switch s.at {
	case behindValue, behindZero, inWhole, inFraction, inExponent:
		return len(s.open) == 0
	}
	return false
}

// next is the spot behind b.
func (s *syntax) next(b byte) spot {
	switch s.at {
	case inString:
		switch {
		case b == '\\':
			return inEscape
		case b == '"' && s.key:
			return atColon
		case b == '"':
			return behindValue
		case b < ' ':
			return nowhere
		}
		return inString
	case inEscape:
		switch {
		case b == 'u':
			s.rest = "0000"
			return inHex
		case has(escapeLetters, b):
			return inString
		}
		return nowhere
	case inHex:
		if s.rest = s.rest[1:]; !has(hexDigits, b) {
			return nowhere
		}
		if s.rest == "" {
			return inString
		}
		return inHex
	case inLiteral:
		ok := s.rest[0] == b
		s.rest = s.rest[1:]
		switch {
		case !ok:
			return nowhere
		case s.rest == "":
			return behindValue
		}
		return inLiteral
	case behindMinus, behindZero, inWhole, behindPoint, inFraction, behindE, behindSign, inExponent:
		return s.number(b)
	}
	switch b {
	case ' ', '\t', '\r', '\n':
		return s.at
	}
	switch {
	case s.at == behindValue:
		return s.behind(b)
	case s.at == atColon && b == ':':
		return atValue
	case s.at == atFirst && b == ']', s.at == atFirstKey && b == '}':
		return s.behind(b)
	case s.at == atKey || s.at == atFirstKey:
		if b != '"' {
			return nowhere
		}
		s.key = true
		return inString
	case s.at == atValue || s.at == atFirst:
		return s.begin(b)
	}
	return nowhere
}

// begin is the spot behind the first byte of a value.
func (s *syntax) begin(b byte) spot {
	switch {
	case b == '{' || b == '[':
		if len(s.open) == maxDepth {
			return nowhere
		}
		s.open = append(s.open, b)
		if b == '{' {
			return atFirstKey
		}
		return atFirst
	case b == '"':
		s.key = false
		return inString
	case b == '-':
		return behindMinus
	case b == '0':
		return behindZero
	case digit(b):
		return inWhole
	}
	switch b {
	case 't':
		s.rest = "rue"
	case 'f':
		s.rest = "alse"
	case 'n':
		s.rest = "ull"
	default:
		return nowhere
	}
	return inLiteral
}

// behind is the spot behind b, which stands behind a value or ends what is empty.
func (s *syntax) behind(b byte) spot {
	n := len(s.open) - 1
	if n < 0 {
		return nowhere
	}
	switch in := s.open[n]; {
	case b == ',' && in == '{':
		return atKey
	case b == ',':
		return atValue
	case b == '}' && in == '{', b == ']' && in == '[':
		s.open = s.open[:n]
		return behindValue
	}
	return nowhere
}

// number is the spot behind b within a number.
func (s *syntax) number(b byte) spot {
	switch {
	case digit(b):
		switch s.at {
		case behindZero:
			return nowhere
		case behindMinus:
			if b == '0' {
				return behindZero
			}
			return inWhole
		case behindPoint:
			return inFraction
		case behindE, behindSign:
			return inExponent
		}
		return s.at
	case s.at == behindE && (b == '+' || b == '-'):
		return behindSign
	case s.at == behindMinus, s.at == behindPoint, s.at == behindE, s.at == behindSign: // a digit is missing
		return nowhere
	case b == '.' && (s.at == behindZero || s.at == inWhole):
		return behindPoint
	case (b == 'e' || b == 'E') && s.at != inExponent:
		return behindE
	}
	// It has ended.
	switch b {
	case ' ', '\t', '\r', '\n':
		return behindValue
	}
	return s.behind(b)
}

func digit(b byte) bool { return '0' <= b && b <= '9' }

func has(letters string, b byte) bool {
	for i := range len(letters) {
		if letters[i] == b {
			return true
		}
	}
	return false
}
