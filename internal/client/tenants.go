package client

import (
	"context"
	"net/http"
	"net/url"
	"strings"

	"github.com/millrace/millrace/internal/job"
)

// Limits bound what a tenant or a key may do, by their names in the API: requests_per_minute, tokens_per_minute, running, running_tokens, and of tenants queued, queued_tokens and file_bytes. nil is none.
type Limits map[string]*int64

// Tenant owns keys, files, batches and jobs. Times are unix seconds.
type Tenant struct {
	ID        job.Tenant `json:"id"`
	Object    string     `json:"object"`
	Name      string     `json:"name"`
	Weight    int        `json:"weight"`
	Limits    Limits     `json:"limits"`
	Disabled  bool       `json:"disabled"`
	CreatedAt float64    `json:"created_at"`
}

// TenantChange is what is set of a tenant; nil fields stay as they are, as do limits that are not in Limits. A limit of 0 is none.
type TenantChange struct {
	ID       job.Tenant       `json:"id,omitempty"` // of a new one
	Name     *string          `json:"name,omitempty"`
	Weight   *int             `json:"weight,omitempty"`
	Limits   map[string]int64 `json:"limits,omitempty"`
	Disabled *bool            `json:"disabled,omitempty"`
}

// Key is an API key. Times are unix seconds, nil for never. Secret is there once: when the key is made.
type Key struct {
	ID         string      `json:"id"`
	Object     string      `json:"object"`
	Tenant     job.Tenant  `json:"tenant"`
	Name       string      `json:"name"`
	Prefix     string      `json:"prefix"`
	Scopes     []string    `json:"scopes"`
	Models     []job.Model `json:"models"`
	Limits     Limits      `json:"limits"`
	CreatedAt  float64     `json:"created_at"`
	ExpiresAt  *float64    `json:"expires_at"`
	RevokedAt  *float64    `json:"revoked_at"`
	LastUsedAt *float64    `json:"last_used_at"`
	Secret     string      `json:"secret,omitempty"`
}

// NewKey is what a key is to be. Zero fields are the server's defaults: the tenant "default", the scopes inference and batches, all models, no limits, no end.
type NewKey struct {
	Tenant    job.Tenant       `json:"tenant,omitempty"`
	Name      string           `json:"name,omitempty"`
	Scopes    []string         `json:"scopes,omitempty"`
	Models    []job.Model      `json:"models,omitempty"`
	Limits    map[string]int64 `json:"limits,omitempty"`
	ExpiresAt float64          `json:"expires_at,omitempty"`
}

// Usage is what was used; the fields that it is not kept apart by are nil.
type Usage struct {
	Object   string      `json:"object"`
	Day      *string     `json:"day"`
	Tenant   *job.Tenant `json:"tenant"`
	Model    *job.Model  `json:"model"`
	Key      *string     `json:"key"`
	Requests int64       `json:"requests"`
	Failed   int64       `json:"failed_requests"`
	Usage    job.Usage   `json:"usage"`
}

// UsageQuery asks for sums. From and To are days like 2026-01-31 of UTC, both included; "" is the server's. By names the fields to keep apart: day, tenant, model, key; nil is the server's.
type UsageQuery struct {
	From, To string
	Tenant   job.Tenant
	Model    job.Model
	Key      string
	By       []string
}

func tenantPath(id job.Tenant) string { return "/admin/v1/tenants/" + url.PathEscape(string(id)) }

func keyPath(id string) string { return "/admin/v1/keys/" + url.PathEscape(id) }

// Tenants lists all tenants. This and what follows needs an admin key where any is configured, OwnUsage aside.
func (c *Client) Tenants(ctx context.Context) ([]Tenant, error) {
	return all[Tenant](ctx, c, "/admin/v1/tenants", nil)
}

// all reads all pages of a listing.
func all[T any](ctx context.Context, c *Client, path string, q url.Values) ([]T, error) {
	var items []T
	for {
		var page struct {
			Data    []T    `json:"data"`
			LastID  string `json:"last_id"`
			HasMore bool   `json:"has_more"`
		}
		if err := c.do(ctx, request{method: http.MethodGet, path: path, query: q}, &page); err != nil {
			return nil, err
		}
		items = append(items, page.Data...)
		if !page.HasMore || page.LastID == "" {
			return items, nil
		}
		next := url.Values{"after": {page.LastID}}
		for name, values := range q {
			if name != "after" {
				next[name] = values
			}
		}
		q = next
	}
}

// CreateTenant makes one.
func (c *Client) CreateTenant(ctx context.Context, t TenantChange) (*Tenant, error) {
	var made Tenant
	err := c.do(ctx, request{method: http.MethodPost, path: "/admin/v1/tenants", body: t, once: true}, &made)
	return &made, err
}

// UpdateTenant changes one.
func (c *Client) UpdateTenant(ctx context.Context, id job.Tenant, t TenantChange) (*Tenant, error) {
	t.ID = ""
	var now Tenant
	err := c.do(ctx, request{method: http.MethodPatch, path: tenantPath(id), body: t}, &now)
	return &now, err
}

// DeleteTenant removes one that has no keys, files and live batches.
func (c *Client) DeleteTenant(ctx context.Context, id job.Tenant) error {
	return c.do(ctx, request{method: http.MethodDelete, path: tenantPath(id), once: true}, nil)
}

// Keys lists the keys of a tenant, "" for all, newest first.
func (c *Client) Keys(ctx context.Context, t job.Tenant) ([]Key, error) {
	var q url.Values
	if t != "" {
		q = url.Values{"tenant": {string(t)}}
	}
	return all[Key](ctx, c, "/admin/v1/keys", q)
}

// CreateKey makes a key; its Secret is told here and never again.
func (c *Client) CreateKey(ctx context.Context, k NewKey) (*Key, error) {
	var made Key
	err := c.do(ctx, request{method: http.MethodPost, path: "/admin/v1/keys", body: k, once: true}, &made)
	return &made, err
}

// RotateKey makes a new key like the one of that id, which still opens for grace, a length of time like "24h"; "" is the server's.
func (c *Client) RotateKey(ctx context.Context, id, grace string) (*Key, error) {
	body := map[string]string{}
	if grace != "" {
		body["grace"] = grace
	}
	var made Key
	err := c.do(ctx, request{method: http.MethodPost, path: keyPath(id) + "/rotate", body: body, once: true}, &made)
	return &made, err
}

// RevokeKey closes a key for ever.
func (c *Client) RevokeKey(ctx context.Context, id string) (*Key, error) {
	var k Key
	err := c.do(ctx, request{method: http.MethodPost, path: keyPath(id) + "/revoke"}, &k)
	return &k, err
}

// Usage sums what all tenants, or one, used.
func (c *Client) Usage(ctx context.Context, q UsageQuery) ([]Usage, error) {
	return c.usage(ctx, "/admin/v1/usage", q)
}

// OwnUsage sums what the key's own tenant used. Tenant must be "".
func (c *Client) OwnUsage(ctx context.Context, q UsageQuery) ([]Usage, error) {
	return c.usage(ctx, "/v1/usage", q)
}

func (c *Client) usage(ctx context.Context, path string, q UsageQuery) ([]Usage, error) {
	v := make(url.Values)
	for name, value := range map[string]string{"from": q.From, "to": q.To, "tenant": string(q.Tenant), "model": string(q.Model), "key": q.Key, "by": strings.Join(q.By, ",")} {
		if value != "" {
			v.Set(name, value)
		}
	}
	var list struct {
		Data []Usage `json:"data"`
	}
	err := c.do(ctx, request{method: http.MethodGet, path: path, query: v}, &list)
	return list.Data, err
}
