package worker

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"

	"github.com/millrace/millrace/internal/engine"
	"github.com/millrace/millrace/internal/job"
)

// saltDomain keeps our salts apart from whatever else is hashed, and from those of a later way to make them.
const saltDomain = "millrace/cache-salt/v1"

// frame hashes parts, each behind its length: no two lists of parts have the same text.
func frame(parts ...string) string {
	h := sha256.New()
	for _, p := range parts {
		_, _ = h.Write(binary.BigEndian.AppendUint64(nil, uint64(len(p)))) // a hash never fails
		_, _ = h.Write([]byte(p))
	}
	return base64.RawURLEncoding.EncodeToString(h.Sum(nil))
}

// saltOf is a tenant's cache salt: the engine shares the KV cache of a prompt's beginning between those requests alone that have the same one. So no tenant can tell by the time to its first token what another has asked.
func saltOf(t job.Tenant) string { return frame(saltDomain, string(t)) }

// salt sets the tenant's cache salt where the engine knows any, in place of the client's own.
func (c *call) salt(can engine.Abilities, body []byte) ([]byte, error) {
	if c.w.cfg.NoCacheSalt || !can.CacheSalt {
		return body, nil
	}
	return job.SetField(body, "cache_salt", []byte(`"`+saltOf(c.d.Job.Tenant)+`"`))
}
