package queue

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"

	"github.com/millrace/millrace/internal/job"
)

const (
	maxToken   = 100  // bytes of a subject token; longer ones are cut and get a hash
	cutToken   = 60   // bytes that remain of a token that was cut
	hashMark   = "_-" // parts them from the hash; no escape looks so
	hashDigits = 32   // hex digits of the hash
)

// token writes a name as one token of a subject: bytes outside [A-Za-z0-9-] become _HH, and what is over 100 bytes then keeps its first 60 and a hash.
func token(name string) string {
	escapes := 0
	for i := range len(name) {
		if !plain(name[i]) {
			escapes++
		}
	}
	if escapes == 0 && len(name) <= maxToken && name != "" {
		return name
	}
	if name == "" {
		return "_" // no subject has an empty token
	}
	const digits = "0123456789ABCDEF"
	b := make([]byte, 0, len(name)+2*escapes)
	for i := range len(name) {
		if c := name[i]; plain(c) {
			b = append(b, c)
		} else {
			b = append(b, '_', digits[c>>4], digits[c&15])
		}
	}
	if len(b) > maxToken {
		sum := sha256.Sum256([]byte(name))
		b = hex.AppendEncode(append(b[:cutToken], hashMark...), sum[:hashDigits/2])
	}
	return string(b)
}

func plain(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-'
}

// hashed tells whether s is a token that was cut, whose name cannot be read from it.
func hashed(s string) bool {
	return len(s) == cutToken+len(hashMark)+hashDigits && s[cutToken:cutToken+len(hashMark)] == hashMark
}

// untoken reads a name back from a token that is not hashed.
func untoken(tok string) (string, error) {
	if strings.IndexByte(tok, '_') < 0 {
		return tok, nil
	}
	if tok == "_" {
		return "", nil
	}
	b := make([]byte, 0, len(tok))
	for i := 0; i < len(tok); i++ {
		if tok[i] != '_' {
			b = append(b, tok[i])
			continue
		}
		if i+3 > len(tok) {
			return "", fmt.Errorf("token %q: cut escape", tok)
		}
		c, err := hex.DecodeString(tok[i+1 : i+3])
		if err != nil {
			return "", fmt.Errorf("token %q: %w", tok, err)
		}
		b = append(b, c[0])
		i += 2
	}
	return string(b), nil
}

// newLane joins a lane's prefix and its owner's name. A name too long for a token is known by its hash from here on, so that a lane that was
// read from a subject equals the one that was written to it.
func newLane(prefix, name string) Lane {
	if tok := token(prefix + name); hashed(tok) {
		return Lane(tok)
	}
	return Lane(prefix + name)
}

func (l Lane) token() string {
	if hashed(string(l)) {
		return string(l)
	}
	return token(string(l))
}

func laneOf(tok string) (Lane, error) {
	if hashed(tok) {
		return Lane(tok), nil
	}
	name, err := untoken(tok)
	return Lane(name), err
}

// place is what a subject says of the job that waits on it.
type place struct {
	class job.Class
	lane  Lane
	id    job.ID
}

// parsePlace reads <kind>.<model>.<class>.<lane>.<job>.
func parsePlace(subject string) (place, error) {
	parts := strings.Split(subject, ".")
	if len(parts) != 5 {
		return place{}, fmt.Errorf("subject %q: %d tokens, want 5", subject, len(parts))
	}
	lane, err := laneOf(parts[3])
	if err != nil {
		return place{}, fmt.Errorf("subject %q: %w", subject, err)
	}
	id, err := untoken(parts[4])
	if err != nil {
		return place{}, fmt.Errorf("subject %q: %w", subject, err)
	}
	return place{job.Class(parts[2]), lane, job.ID(id)}, nil
}

func doneSubject(t job.Tenant, group string, id job.ID) string {
	return "done." + token(string(t)) + "." + token(group) + "." + token(string(id))
}
