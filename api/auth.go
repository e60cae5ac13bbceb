package api

import (
	"crypto/sha256"
	"crypto/subtle"
	"net"
	"net/http"
	"strings"

	"github.com/labstack/echo/v4"

	"github.com/millrace/millrace/internal/job"
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

// authenticate lets through who may: the tenant's key for /v1, the admin key for /admin, anybody for health and the description. Without any configured
// key all is open, which New allows on loopback alone.
func (s *Server) authenticate(next echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		path := c.Request().URL.Path
		token := bearer(c.Request().Header)
		switch {
		case under(path, "/v1"):
			if s.apiKey.set && !s.apiKey.is(token) && !s.adminKey.is(token) {
				return unauthorized(token)
			}
			c.Set(contextTenant, job.DefaultTenant)
		case under(path, "/admin"):
			if (s.apiKey.set || s.adminKey.set) && !s.adminKey.is(token) {
				return unauthorized(token)
			}
		}
		return next(c)
	}
}

func under(path, root string) bool {
	rest, ok := strings.CutPrefix(path, root)
	return ok && (rest == "" || rest[0] == '/')
}

const contextTenant = "tenant"

// tenantOf is the tenant that authenticate found.
func tenantOf(c echo.Context) job.Tenant {
	t, _ := c.Get(contextTenant).(job.Tenant)
	return t
}

func bearer(h http.Header) string {
	scheme, token, ok := strings.Cut(h.Get(echo.HeaderAuthorization), " ")
	if !ok || !strings.EqualFold(scheme, "Bearer") {
		return ""
	}
	return strings.TrimSpace(token)
}

func unauthorized(token string) *failure {
	if token == "" {
		return fail(http.StatusUnauthorized, job.CodeInvalidAPIKey, "No API key is given: send it as `Authorization: Bearer <key>`.")
	}
	return fail(http.StatusUnauthorized, job.CodeInvalidAPIKey, "The API key is wrong.")
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
