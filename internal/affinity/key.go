package affinity

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"hash"
	"io"

	"github.com/millrace/millrace/internal/job"
)

const (
	// firstBlock is how many bytes of a prompt the first key of its chain covers. Each further one covers twice as many, up to MostKeys: 32 KiB.
	firstBlock = 256
	// MostKeys bounds the keys of one request.
	MostKeys = 8
)

// Keys are what j's KV cache is looked for by: its session, or, without one and if prefixes are used, its prompt's chain. None: there is nothing to find, as for embeddings, which leave
// no cache, and short prompts, which are computed sooner than looked for. body is the engine's request.
func Keys(j *job.Job, body *job.Object, prefixes bool) []string {
	switch {
	case !j.Endpoint.Generates():
		return nil
	case j.Session != "":
		return []string{SessionKey(j.Tenant, j.Model, j.Session)}
	case prefixes && body != nil:
		return Chain(j.Tenant, j.Model, j.Endpoint, body)
	}
	return nil
}

// SessionKey is the key of a tenant's session with a model.
func SessionKey(t job.Tenant, m job.Model, s job.Session) string {
	return sum(begin("session", string(t), string(m), string(s)))
}

// Chain are the keys of the growing beginnings of a prompt, at most MostKeys, the deepest last: over the first 256 bytes, 512, and so on. They are taken over the text as the client wrote
// it, which is what a client that sends a conversation once more sends alike: for chat the tools, which templates put first, then the messages in their order; for responses the same; for completions the prompt.
// Two prompts that begin alike, sent by one tenant to one model, share the keys of what they share. It is nil for what is shorter than the first block.
func Chain(t job.Tenant, m job.Model, e job.Endpoint, body *job.Object) []string {
	var parts [][]byte
	switch e {
	case job.ChatCompletions:
		// Without the closing bracket: in its place the next turn has a comma.
		parts = [][]byte{body.Get("tools"), bytes.TrimRight(bytes.TrimSuffix(body.Get("messages"), []byte("]")), " \t\r\n")}
	case job.Responses: // the instructions are put before the input, which is a text or a list of messages
		parts = [][]byte{body.Get("tools"), body.Get("instructions"), bytes.TrimRight(bytes.TrimRight(body.Get("input"), `"]`), " \t\r\n")}
	case job.Completions:
		parts = [][]byte{bytes.TrimSuffix(body.Get("prompt"), []byte(`"`))}
	}
	total := 0
	for _, p := range parts {
		total += len(p)
	}
	if total < firstBlock {
		return nil
	}
	h := begin("prefix", string(t), string(m), string(e))
	var keys []string
	left := firstBlock // bytes until the next key
	for _, p := range parts {
		for len(p) >= left {
			h.Write(p[:left])
			p = p[left:]
			keys = append(keys, sum(h))
			if len(keys) == MostKeys {
				return keys
			}
			left = firstBlock << (len(keys) - 1) // doubles what is covered
		}
		h.Write(p)
		left -= len(p)
	}
	return keys
}

// begin hashes names, each behind its length, so that no two lists of them are the same bytes.
func begin(names ...string) hash.Hash {
	h := sha256.New() // its Write never fails
	var length [binary.MaxVarintLen64]byte
	for _, n := range names {
		h.Write(binary.AppendUvarint(length[:0], uint64(len(n))))
		_, _ = io.WriteString(h, n)
	}
	return h
}

// sum is a key of what h has got so far: 128 bits, in 22 characters.
func sum(h hash.Hash) string {
	var b [sha256.Size]byte
	return base64.RawURLEncoding.EncodeToString(h.Sum(b[:0])[:16])
}
