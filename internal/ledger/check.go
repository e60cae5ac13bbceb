package ledger

import (
	"fmt"
	"regexp"
	"slices"
	"unicode/utf8"

	"github.com/millrace/millrace/internal/job"
)

// FieldError is what is wrong with a field of a tenant or a key, as its JSON names it.
type FieldError struct{ Field, Problem string }

func (e *FieldError) Error() string { return e.Field + " " + e.Problem }

func bad(field, format string, args ...any) *FieldError {
	return &FieldError{field, fmt.Sprintf(format, args...)}
}

// Bounds of what people name and set.
const (
	maxName      = 200
	maxKeyModels = 100
	maxModelName = 256
	maxLimit     = 1_000_000_000_000_000
)

var tenantID = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$`)

// CheckTenant returns a *FieldError if t cannot be a tenant, else nil.
func CheckTenant(t Tenant) error {
	switch {
	case !tenantID.MatchString(string(t.ID)):
		return bad("id", "is %.100q: it must be 1 to 64 letters, digits, dots, dashes and underscores, the first a letter or digit", string(t.ID))
	case utf8.RuneCountInString(t.Name) > maxName:
		return bad("name", "has more than %d characters", maxName)
	case t.Weight < 1 || t.Weight > 1000:
		return bad("weight", "is %d: it must be a whole number from 1 to 1000", t.Weight)
	}
	return checkLimits(t.Limits)
}

// CheckKey returns a *FieldError if k cannot be made a key at the time now, else nil.
func CheckKey(k Key, now job.Millis) error {
	switch {
	case utf8.RuneCountInString(k.Name) > maxName:
		return bad("name", "has more than %d characters", maxName)
	case len(k.Models) > maxKeyModels:
		return bad("models", "has %d entries: at most %d are allowed; leave it out for all models", len(k.Models), maxKeyModels)
	case k.Expires != 0 && k.Expires <= now:
		return bad("expires_at", "must lie in the future")
	}
	if k.Scopes != nil && len(k.Scopes) == 0 {
		return bad("scopes", "is empty, and a key of no scope opens nothing: leave it out for %q and %q", string(Inference), string(Batches))
	}
	for i, s := range k.Scopes {
		switch {
		case !slices.Contains(Scopes(), s):
			return bad("scopes", "holds %.100q: it must be of %v", string(s), Scopes())
		case slices.Contains(k.Scopes[:i], s):
			return bad("scopes", "holds %q twice", string(s))
		case s == Admin && k.Tenant != job.DefaultTenant:
			return bad("scopes", "holds %q, which opens everything: only keys of the tenant %q have it", string(s), string(job.DefaultTenant))
		}
	}
	for _, m := range k.Models {
		if m == "" || utf8.RuneCountInString(string(m)) > maxModelName {
			return bad("models", "holds %.100q: a model's name has 1 to %d characters", string(m), maxModelName)
		}
	}
	for _, l := range []struct {
		name  string
		value int64
	}{{"queued", k.Limits.Queued}, {"queued_tokens", k.Limits.QueuedTokens}, {"file_bytes", k.Limits.FileBytes}} {
		if l.value != 0 {
			return bad("limits."+l.name, "is a limit of tenants: a key has none")
		}
	}
	return checkLimits(k.Limits)
}

func checkLimits(l Limits) error {
	for _, name := range LimitNames() {
		if v := *l.Named(name); v < 0 || v > maxLimit {
			return bad("limits."+name, "is %d: it must be from 0, which is no limit, to %d", v, int64(maxLimit))
		}
	}
	return nil
}

// LimitNames lists the limits' names in JSON.
func LimitNames() []string {
	return []string{"requests_per_minute", "tokens_per_minute", "running", "running_tokens", "queued", "queued_tokens", "file_bytes"}
}

// KeyLimitNames lists those of them that a key may have.
func KeyLimitNames() []string { return LimitNames()[:4] }

// Named returns the limit of that name in JSON, nil if there is none.
func (l *Limits) Named(name string) *int64 {
	return map[string]*int64{
		"requests_per_minute": &l.RequestsPerMinute, "tokens_per_minute": &l.TokensPerMinute, "running": &l.Running, "running_tokens": &l.RunningTokens,
		"queued": &l.Queued, "queued_tokens": &l.QueuedTokens, "file_bytes": &l.FileBytes,
	}[name]
}
