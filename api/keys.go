package api

import (
	"errors"
	"net/http"
	"time"

	"github.com/labstack/echo/v4"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
)

// keyObject is an API key as operators see it. Times are unix seconds, null for never. Secret is there once: in the answer to its making.
type keyObject struct {
	ID         string            `json:"id"`
	Object     string            `json:"object"`
	Tenant     job.Tenant        `json:"tenant"`
	Name       string            `json:"name"`
	Prefix     string            `json:"prefix"`
	Scopes     []ledger.Scope    `json:"scopes"`
	Models     []job.Model       `json:"models"`
	Limits     map[string]*int64 `json:"limits"`
	CreatedAt  float64           `json:"created_at"`
	ExpiresAt  *float64          `json:"expires_at"`
	RevokedAt  *float64          `json:"revoked_at"`
	LastUsedAt *float64          `json:"last_used_at"`
	Secret     string            `json:"secret,omitempty"`
}

func newKeyObject(k *ledger.Key, secret string) keyObject {
	o := keyObject{
		ID: k.ID, Object: "api_key", Tenant: k.Tenant, Name: k.Name, Prefix: k.Prefix, Scopes: k.Scopes, Models: k.Models, Limits: shownLimits(&k.Limits, ledger.KeyLimitNames()),
		CreatedAt: k.Created.Seconds(), ExpiresAt: orNever(k.Expires), RevokedAt: orNever(k.Revoked), LastUsedAt: orNever(k.LastUsed), Secret: secret,
	}
	if o.Models == nil {
		o.Models = []job.Model{}
	}
	return o
}

func orNever(at job.Millis) *float64 {
	if at == 0 {
		return nil
	}
	s := at.Seconds()
	return &s
}

// listKeys answers GET /admin/v1/keys: those of ?tenant=, or of all, newest first.
func (s *Server) listKeys(c echo.Context) error {
	p, err := pageParams(c, maxOperators, maxOperators)
	if err != nil {
		return err
	}
	ctx, cancel := s.brief(c)
	defer cancel()
	page, more, err := s.deps.Ledger.KeyPage(ctx, job.Tenant(c.QueryParam("tenant")), p)
	if errors.Is(err, ledger.ErrNotFound) {
		return unknownAfter(p.After)
	}
	if err != nil {
		return err
	}
	objects := make([]keyObject, len(page))
	for i := range page {
		objects[i] = newKeyObject(&page[i], "")
	}
	return writeJSON(c, http.StatusOK, newList(objects, func(k keyObject) string { return k.ID }, more))
}

// createKey answers POST /admin/v1/keys. The answer is the only place where the secret can be read.
func (s *Server) createKey(c echo.Context) error {
	k := ledger.Key{Tenant: job.DefaultTenant}
	err := s.readFields(c, false, fields{"tenant": &k.Tenant, "name": &k.Name, "scopes": &k.Scopes, "models": &k.Models, "limits": &k.Limits, "expires_at": &k.Expires})
	if err != nil {
		return err
	}
	if err := ledger.CheckKey(k, s.deps.Results.Now()); err != nil {
		return badField(err)
	}
	ctx, cancel := s.brief(c)
	defer cancel()
	secret, made, err := s.deps.Ledger.CreateKey(ctx, k)
	if err != nil {
		return noTenant(err, k.Tenant, "tenant")
	}
	return writeSecret(c, made, secret)
}

// writeSecret answers with a new key, and asks everybody on the way to keep no copy.
func writeSecret(c echo.Context, k *ledger.Key, secret string) error {
	c.Response().Header().Set(echo.HeaderCacheControl, "no-store")
	return writeJSON(c, http.StatusOK, newKeyObject(k, secret))
}

// getKey answers GET /admin/v1/keys/{id}.
func (s *Server) getKey(c echo.Context) error {
	ctx, cancel := s.brief(c)
	defer cancel()
	k, err := s.deps.Ledger.Key(ctx, pathParam(c, "id"))
	if err != nil {
		return noKey(err, pathParam(c, "id"))
	}
	return writeJSON(c, http.StatusOK, newKeyObject(k, ""))
}

// Grace of a key that is rotated: how long it opens beside the new one.
const (
	defaultGrace = time.Hour
	maxGrace     = 90 * 24 * time.Hour
)

// rotateKey answers POST /admin/v1/keys/{id}/rotate: a new key like the old one, which opens for grace yet.
func (s *Server) rotateKey(c echo.Context) error {
	var text string
	if err := s.readFields(c, true, fields{"grace": &text}); err != nil {
		return err
	}
	grace := defaultGrace
	if text != "" {
		var err error
		if grace, err = time.ParseDuration(text); err != nil || grace < 0 || grace > maxGrace {
			return invalid("grace", job.CodeInvalidValue, "grace is %q: it must be a length of time like \"24h\", at most %v.", clip(text), maxGrace)
		}
	}
	ctx, cancel := s.brief(c)
	defer cancel()
	secret, made, err := s.deps.Ledger.RotateKey(ctx, pathParam(c, "id"), grace)
	if errors.Is(err, ledger.ErrState) {
		f := fail(http.StatusConflict, job.CodeKeyClosed, "The key %s is revoked or expired: make a new one.", clip(pathParam(c, "id")))
		f.final = true
		return f
	}
	if err != nil {
		return noKey(err, pathParam(c, "id"))
	}
	return writeSecret(c, made, secret)
}

// revokeKey answers POST /admin/v1/keys/{id}/revoke and DELETE /admin/v1/keys/{id}: the key opens nothing any more, for ever. Its row stays, for the accounts.
func (s *Server) revokeKey(c echo.Context) error {
	ctx, cancel := s.brief(c)
	defer cancel()
	k, err := s.deps.Ledger.RevokeKey(ctx, pathParam(c, "id"))
	if err != nil {
		return noKey(err, pathParam(c, "id"))
	}
	return writeJSON(c, http.StatusOK, newKeyObject(k, ""))
}

// noKey is what a client is told of a key that the ledger does not have; other errors stay as they are. What is asked for may be a secret, put in the place of an id by mistake: it is not repeated.
func noKey(err error, id string) error {
	if !errors.Is(err, ledger.ErrNotFound) {
		return err
	}
	if len(id) < 4 || id[:4] != "key_" {
		return fail(http.StatusNotFound, job.CodeKeyNotFound, "There is no key of that id: ids begin with key_.").at("id")
	}
	return fail(http.StatusNotFound, job.CodeKeyNotFound, "There is no key %q.", clip(id)).at("id")
}
