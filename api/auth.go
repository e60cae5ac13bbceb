package api

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/labstack/echo/v4"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
)

// secret is a configured key, kept as its hash so that comparing takes the same time whatever is sent.
type secret struct {
	set  bool
	hash [sha256.Size]byte
}

func newSecret(key string) secret { return secret{set: key != "", hash: sha256.Sum256([]byte(key))} }

func (k secret) is(token string) bool {
	hash := sha256.Sum256([]byte(token))
	return k.set && subtle.ConstantTimeCompare(hash[:], k.hash[:]) == 1
}

// For how long the ledger's word on a key counts, and that there is no such key; and for how long keys that were seen open while the ledger does not answer. So a revocation reaches every API process within the first.
const (
	keyFresh  = 5 * time.Second
	keyAbsent = time.Second
	keyStale  = 5 * time.Minute
	// most keys and tenants that are remembered.
	maxRemembered = 10_000
)

// keyring tells who is asking, by the configured keys and by those in the ledger.
type keyring struct {
	ledger           *ledger.Store
	apiKey, adminKey secret
	now              func() job.Millis

	identities memory[*ledger.Identity]
	tenants    memory[*ledger.Tenant]
	anyKey     memory[bool]
	batched    memory[job.Tokens]
	// locked: the ledger has keys. It never becomes false again.
	locked atomic.Bool
}

func newKeyring(store *ledger.Store, cfg Config, now func() job.Millis, log *slog.Logger) *keyring {
	p := &patience{name: "database", log: log}
	return &keyring{
		ledger: store, apiKey: newSecret(cfg.APIKey), adminKey: newSecret(cfg.AdminKey), now: now,
		identities: memory[*ledger.Identity]{fresh: keyFresh, absent: keyAbsent, stale: keyStale, most: maxRemembered, patience: p},
		tenants:    memory[*ledger.Tenant]{fresh: keyFresh, absent: keyAbsent, stale: 24 * time.Hour, most: maxRemembered, patience: p},
		anyKey:     memory[bool]{fresh: keyAbsent, absent: keyAbsent, stale: keyStale, most: 1, patience: p},
		batched:    memory[job.Tokens]{fresh: time.Second, absent: time.Second, stale: keyStale, most: maxRemembered, patience: p},
	}
}

// hasKeys tells whether the ledger has keys: from then on nobody is let in without one.
func (k *keyring) hasKeys(ctx context.Context) (bool, error) {
	if k.locked.Load() {
		return true, nil
	}
	has, err := k.anyKey.get(ctx, "", k.ledger.HasKeys)
	if has {
		k.locked.Store(true)
	}
	return has, err
}

// open tells whether a route that needs scope is open to everybody.
func (k *keyring) open(ctx context.Context, scope ledger.Scope) (bool, error) {
	if k.apiKey.set || scope == ledger.Admin && k.adminKey.set {
		return false, nil
	}
	has, err := k.hasKeys(ctx)
	return !has && err == nil, err
}

// errNoKey and errWrongKey are why a request has no identity.
var (
	errNoKey    = errors.New("no API key is given")
	errWrongKey = errors.New("the API key opens nothing")
)

// identify returns whom token stands for on a route that needs scope. Its errors are errNoKey, errWrongKey, or the ledger's if it does not answer and nothing is remembered.
func (k *keyring) identify(ctx context.Context, token string, scope ledger.Scope) (*ledger.Identity, error) {
	switch {
	case token != "" && k.adminKey.is(token):
		return k.standing(ctx, ledger.Scopes()), nil
	case token != "" && k.apiKey.is(token):
		id := k.standing(ctx, []ledger.Scope{ledger.Inference, ledger.Batches})
		if id.Tenant.Disabled {
			return nil, errWrongKey
		}
		return id, nil
	}
	open, err := k.open(ctx, scope)
	switch {
	case err != nil:
		return nil, err
	case open && !strings.HasPrefix(token, ledger.SecretPrefix): // a secret of the ledger's may be its first, of the last second
		return k.standing(ctx, ledger.Scopes()), nil
	case token == "":
		return nil, errNoKey
	}
	hash := sha256.Sum256([]byte(token))
	id, err := k.identities.get(ctx, string(hash[:]), func(ctx context.Context) (*ledger.Identity, error) {
		return k.ledger.Identify(ctx, token, k.now())
	})
	switch {
	case errors.Is(err, ledger.ErrNotFound) && open:
		return k.standing(ctx, ledger.Scopes()), nil
	case errors.Is(err, ledger.ErrNotFound):
		return nil, errWrongKey
	case err != nil:
		return nil, err
	}
	k.locked.Store(true)
	switch {
	case id.Key.Expires != 0 && id.Key.Expires <= k.now(): // since it was remembered
		return nil, errWrongKey
	case slices.Contains(id.Key.Scopes, ledger.Admin) && id.Tenant.ID != job.DefaultTenant:
		all := *id
		all.Tenant = k.tenant(ctx, job.DefaultTenant)
		return &all, nil
	}
	return id, nil
}

// standing is whoever needs no key of the ledger: the tenant "default" with its limits.
func (k *keyring) standing(ctx context.Context, scopes []ledger.Scope) *ledger.Identity {
	return &ledger.Identity{Key: ledger.Key{Tenant: job.DefaultTenant, Scopes: scopes}, Tenant: k.tenant(ctx, job.DefaultTenant)}
}

// tenant is a tenant as the ledger has it. One that cannot be read now has no limits of its own.
func (k *keyring) tenant(ctx context.Context, id job.Tenant) ledger.Tenant {
	t, err := k.tenants.get(ctx, string(id), func(ctx context.Context) (*ledger.Tenant, error) { return k.ledger.Tenant(ctx, id) })
	if err != nil {
		return ledger.Tenant{ID: id}
	}
	return *t
}

// batchTokens is what a tenant's live batches are expected to need yet, as of the last second; 0 if that cannot be read now.
func (k *keyring) batchTokens(ctx context.Context, id job.Tenant) job.Tokens {
	n, _ := k.batched.get(ctx, string(id), func(ctx context.Context) (job.Tokens, error) { return k.ledger.BatchTokens(ctx, id) })
	return n
}

// scopeOf is the scope that a route needs, "" for a route that anybody may ask. path is the route's template, or the URL's path where there is no such route. own: a key of any scope will do.
func scopeOf(path string) (scope ledger.Scope, own bool) {
	switch {
	case under(path, "/v1/usage"):
		return ledger.Inference, true
	case under(path, "/v1/files"), under(path, "/v1/batches"):
		return ledger.Batches, false
	case under(path, "/v1"):
		return ledger.Inference, false
	case under(path, "/admin"):
		return ledger.Admin, false
	}
	return "", false
}

// authenticate lets through who may, and notes who it is: holders of a key with the route's scope under /v1 and /admin, anybody for health and the description. Where no key is configured and the ledger has none, all is
// open, which New allows on loopback alone.
func (s *Server) authenticate(next echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		path := c.Path()
		if path == "" {
			path = c.Request().URL.Path
		}
		scope, own := scopeOf(path)
		if scope == "" {
			return next(c)
		}
		token, ctx := bearer(c.Request().Header), c.Request().Context()
		id, err := s.keys.identify(ctx, token, scope)
		switch {
		case errors.Is(err, errNoKey):
			return fail(http.StatusUnauthorized, job.CodeInvalidAPIKey, "No API key is given: send it as `Authorization: Bearer <key>`.")
		case errors.Is(err, errWrongKey):
			return fail(http.StatusUnauthorized, job.CodeInvalidAPIKey, "The API key is wrong.")
		case err != nil:
			return unavailable(err, "The database of API keys does not answer: try again later.")
		case !own && !opens(id, scope):
			return fail(http.StatusForbidden, job.CodePermissionDenied, "This API key lacks the scope %q, which this route needs.", scope)
		}
		c.SetRequest(c.Request().WithContext(context.WithValue(ctx, callerKey{}, &caller{id, c.Response().Header()})))
		return next(c)
	}
}

// opens tells whether a key has the scope. An admin's has them all.
func opens(id *ledger.Identity, scope ledger.Scope) bool {
	return slices.Contains(id.Key.Scopes, scope) || slices.Contains(id.Key.Scopes, ledger.Admin)
}

func under(path, root string) bool {
	rest, ok := strings.CutPrefix(path, root)
	return ok && (rest == "" || rest[0] == '/')
}

// caller is who has made a request, as its context knows; header is that of the answer.
type caller struct {
	identity *ledger.Identity
	header   http.Header
}

type callerKey struct{}

// callerOf is who has made the request of ctx, nil on a route that anybody may ask.
func callerOf(ctx context.Context) *caller {
	c, _ := ctx.Value(callerKey{}).(*caller)
	return c
}

// identityOf is whom authenticate found. It is shared between requests: read only.
func identityOf(c echo.Context) *ledger.Identity {
	if caller := callerOf(c.Request().Context()); caller != nil {
		return caller.identity
	}
	return &ledger.Identity{}
}

// tenantOf is the tenant that authenticate found. Nothing that a client sends but its key decides about it.
func tenantOf(c echo.Context) job.Tenant { return identityOf(c).Tenant.ID }

// mayUse tells whether the key may use a model. One that it may not is to its holder as one that does not exist.
func mayUse(id *ledger.Identity, m job.Model) bool {
	return len(id.Key.Models) == 0 || slices.Contains(id.Key.Models, m)
}

// noModel is what a client is told of a model that does not exist, or not for its key.
func noModel(m job.Model) *failure {
	return fail(http.StatusNotFound, job.CodeModelNotFound, "The model %.100q does not exist: no worker serves it.", string(m)).at("model")
}

func bearer(h http.Header) string {
	scheme, token, ok := strings.Cut(h.Get(echo.HeaderAuthorization), " ")
	if !ok || !strings.EqualFold(scheme, "Bearer") {
		return ""
	}
	return strings.TrimSpace(token)
}

// checkExposure refuses to listen beyond this machine while everybody who reaches the address could do all.
func (s *Server) checkExposure() error {
	if s.cfg.APIKey != "" || s.cfg.Insecure || loopback(s.cfg.Listen) {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), storeTimeout) // New has no context: it starts nothing that would outlive it
	defer cancel()
	has, err := s.keys.hasKeys(ctx)
	switch {
	case err != nil:
		return fmt.Errorf("looking for API keys in the database: %w", err)
	case !has:
		return fmt.Errorf("listen is %q and there is no API key: everybody who reaches that address could use and read everything. "+
			"Create the first one with `millrace keys create --database-url …` (beside `up`: `--data DIR`), set --api-key, listen on 127.0.0.1, or say --insecure", s.cfg.Listen)
	}
	return nil
}

// loopback tells whether only this machine can reach addr (host:port).
func loopback(addr string) bool {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return false
	}
	if host == "localhost" {
		return true
	}
	ip := net.ParseIP(host)
	return ip != nil && ip.IsLoopback()
}
