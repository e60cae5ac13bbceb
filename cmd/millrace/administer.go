package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/millrace/millrace/internal/client"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
)

// administration is what operators do with tenants and keys: through the API, or on the database itself.
type administration interface {
	Tenants(ctx context.Context) ([]client.Tenant, error)
	CreateTenant(ctx context.Context, t client.TenantChange) (*client.Tenant, error)
	UpdateTenant(ctx context.Context, id job.Tenant, t client.TenantChange) (*client.Tenant, error)
	DeleteTenant(ctx context.Context, id job.Tenant) error
	Keys(ctx context.Context, t job.Tenant) ([]client.Key, error)
	CreateKey(ctx context.Context, k client.NewKey) (*client.Key, error)
	RotateKey(ctx context.Context, id, grace string) (*client.Key, error)
	RevokeKey(ctx context.Context, id string) (*client.Key, error)
	Usage(ctx context.Context, q client.UsageQuery) ([]client.Usage, error)
}

// adminFlags say what an operator's command works on.
type adminFlags struct {
	operatorFlags
	database databaseFlags
	data     string
}

func (c *adminFlags) add(fs *pflag.FlagSet) {
	c.operatorFlags.add(fs)
	c.database.add(fs, "default none: the API is asked")
	fs.StringVar(&c.data, "data", "", "`folder` of a millrace up, whose database is used in place of the API")
}

// do opens what the flags name, and calls f with it.
func (c *adminFlags) do(cmd *cobra.Command, f func(context.Context, administration) error) error {
	ctx := cmd.Context()
	switch {
	case c.database.url != "" && c.data != "":
		return usageError(cmd, errors.New("database-url and data both name a database: choose one"))
	case c.database.url == "" && c.data == "":
		cl, err := c.open()
		if err != nil {
			return err
		}
		return explainAdmin(cl, f(ctx, cl), ", or name the database with --database-url or --data")
	}
	if err := c.database.check(false); err != nil {
		return usageError(cmd, err)
	}
	cfg, log := ledger.Config{URL: c.database.url}, slog.New(slog.DiscardHandler) // what goes wrong is the command's error
	if c.data != "" {
		file := filepath.Join(c.data, "millrace.db")
		cfg.URL = "sqlite:" + file
		if _, err := os.Stat(file); err != nil && cmd.Name() != "create" {
			return fmt.Errorf("there is no database of a `millrace up` in %s: %w", c.data, err)
		}
		// As `millrace up` does at its start, which may come after the first key.
		if err := os.MkdirAll(c.data, 0o700); err != nil {
			return fmt.Errorf("making the folder of the database: %w", err)
		}
		if _, _, err := ledger.Migrate(ctx, cfg, log); err != nil {
			return err
		}
	}
	store, err := ledger.Open(ctx, cfg, log)
	if err != nil {
		return err
	}
	return errors.Join(f(ctx, direct{store}), store.Close())
}

// explainAdmin adds to an error what can be done about it; also is what else helps without an admin key.
func explainAdmin(c *client.Client, err error, also string) error {
	var refused *client.Error
	if errors.As(err, &refused) && (refused.Status == 401 || refused.Status == 403) {
		return fmt.Errorf("%w: set MILLRACE_ADMIN_KEY to the admin key of %s, or to a key of scope admin%s", err, c.URL(), also)
	}
	return explain(c, err)
}

// direct administers a database itself: for the first key, and where no admin key is left.
type direct struct{ ledger *ledger.Store }

// said puts plain words to the ledger's errors.
func said(err error, kind, id string) error {
	var field *ledger.FieldError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &field):
		return &exitError{exitUsage, err}
	case errors.Is(err, ledger.ErrNotFound):
		return fmt.Errorf("there is no %s %q: `millrace %ss list` shows those that there are", kind, id, kind)
	case errors.Is(err, ledger.ErrExists):
		return fmt.Errorf("there is a %s %q already: change it with `millrace tenants update`", kind, id)
	case errors.Is(err, ledger.ErrDeleted):
		return fmt.Errorf("there was a %s %q, and no id is used twice: choose another", kind, id)
	}
	return err
}

func shownTenant(t *ledger.Tenant) *client.Tenant {
	return &client.Tenant{
		ID: t.ID, Object: "tenant", Name: t.Name, Weight: t.Weight, Limits: shownLimits(&t.Limits, ledger.LimitNames()), Disabled: t.Disabled, CreatedAt: t.Created.Seconds(),
	}
}

func shownKey(k *ledger.Key, secret string) *client.Key {
	never := func(at job.Millis) *float64 {
		if at == 0 {
			return nil
		}
		s := at.Seconds()
		return &s
	}
	c := &client.Key{
		ID: k.ID, Object: "api_key", Tenant: k.Tenant, Name: k.Name, Prefix: k.Prefix, Models: k.Models, Limits: shownLimits(&k.Limits, ledger.KeyLimitNames()),
		CreatedAt: k.Created.Seconds(), ExpiresAt: never(k.Expires), RevokedAt: never(k.Revoked), LastUsedAt: never(k.LastUsed), Secret: secret,
	}
	for _, s := range k.Scopes {
		c.Scopes = append(c.Scopes, string(s))
	}
	if c.Models == nil {
		c.Models = []job.Model{}
	}
	return c
}

func shownLimits(l *ledger.Limits, names []string) client.Limits {
	shown := make(client.Limits, len(names))
	for _, name := range names {
		if shown[name] = l.Named(name); *shown[name] == 0 {
			shown[name] = nil
		}
	}
	return shown
}

// change makes of t what c asks.
func change(t *ledger.Tenant, c client.TenantChange) error {
	if c.Name != nil {
		t.Name = *c.Name
	}
	if c.Weight != nil {
		t.Weight = *c.Weight
	}
	if c.Disabled != nil {
		t.Disabled = *c.Disabled
	}
	for name, v := range c.Limits {
		*t.Limits.Named(name) = v
	}
	return ledger.CheckTenant(*t)
}

func (d direct) Tenants(ctx context.Context) ([]client.Tenant, error) {
	all, err := d.ledger.Tenants(ctx)
	shown := make([]client.Tenant, len(all))
	for i := range all {
		shown[i] = *shownTenant(&all[i])
	}
	return shown, err
}

func (d direct) CreateTenant(ctx context.Context, c client.TenantChange) (*client.Tenant, error) {
	t := &ledger.Tenant{ID: c.ID, Weight: 100}
	err := change(t, c)
	if err == nil {
		t, err = d.ledger.CreateTenant(ctx, *t)
	}
	if err != nil {
		return nil, said(err, "tenant", string(c.ID))
	}
	return shownTenant(t), nil
}

func (d direct) UpdateTenant(ctx context.Context, id job.Tenant, c client.TenantChange) (*client.Tenant, error) {
	t, err := d.ledger.UpdateTenant(ctx, id, func(t *ledger.Tenant) error { return change(t, c) })
	if err != nil {
		return nil, said(err, "tenant", string(id))
	}
	return shownTenant(t), nil
}

func (d direct) DeleteTenant(ctx context.Context, id job.Tenant) error {
	return said(d.ledger.DeleteTenant(ctx, id), "tenant", string(id))
}

func (d direct) Keys(ctx context.Context, t job.Tenant) ([]client.Key, error) {
	all, err := d.ledger.Keys(ctx, t)
	shown := make([]client.Key, len(all))
	for i := range all {
		shown[i] = *shownKey(&all[i], "")
	}
	return shown, err
}

func (d direct) CreateKey(ctx context.Context, c client.NewKey) (*client.Key, error) {
	k := ledger.Key{Tenant: c.Tenant, Name: c.Name, Models: c.Models, Expires: job.Millis(c.ExpiresAt * 1000)}
	if k.Tenant == "" {
		k.Tenant = job.DefaultTenant
	}
	for _, s := range c.Scopes {
		k.Scopes = append(k.Scopes, ledger.Scope(s))
	}
	for name, v := range c.Limits {
		*k.Limits.Named(name) = v
	}
	if err := ledger.CheckKey(k, job.MillisOf(time.Now())); err != nil {
		return nil, said(err, "", "")
	}
	secret, made, err := d.ledger.CreateKey(ctx, k)
	if err != nil {
		return nil, said(err, "tenant", string(k.Tenant))
	}
	return shownKey(made, secret), nil
}

func (d direct) RotateKey(ctx context.Context, id, grace string) (*client.Key, error) {
	open, err := time.ParseDuration(grace)
	if err != nil {
		return nil, fmt.Errorf("grace is %q: it must be a length of time like 24h", grace)
	}
	secret, made, err := d.ledger.RotateKey(ctx, id, open)
	if err != nil {
		return nil, said(err, "key", id)
	}
	return shownKey(made, secret), nil
}

func (d direct) RevokeKey(ctx context.Context, id string) (*client.Key, error) {
	k, err := d.ledger.RevokeKey(ctx, id)
	if err != nil {
		return nil, said(err, "key", id)
	}
	return shownKey(k, ""), nil
}

func (d direct) Usage(ctx context.Context, q client.UsageQuery) ([]client.Usage, error) {
	by := q.By
	if by == nil {
		by = []string{"day", "tenant", "model"}
	}
	rows, err := d.ledger.Usage(ctx, ledger.UsageQuery{From: q.From, To: q.To, Tenant: q.Tenant, Model: q.Model, Key: q.Key, By: by})
	shown := make([]client.Usage, len(rows))
	for i := range rows {
		r := &rows[i]
		u := client.Usage{Object: "usage", Requests: r.Requests, Failed: r.Failed, Usage: r.Usage}
		for _, name := range by {
			switch name {
			case "day":
				u.Day = &r.Day
			case "tenant":
				u.Tenant = &r.Tenant
			case "model":
				u.Model = &r.Model
			case "key":
				u.Key = &r.Key
			}
		}
		shown[i] = u
	}
	return shown, err
}

// limitFlags are the limits of a tenant or a key.
type limitFlags struct {
	values map[string]*int64
	fs     *pflag.FlagSet
}

// add adds the limits of those names, with what each is.
func (l *limitFlags) add(fs *pflag.FlagSet, names []string, help map[string]string) {
	l.fs, l.values = fs, make(map[string]*int64)
	for _, name := range names {
		l.values[name] = new(int64)
		if flag := flagOf(name); name == "file_bytes" {
			fs.Var((*size)(l.values[name]), flag, help[name])
		} else {
			fs.Int64Var(l.values[name], flag, 0, help[name])
		}
	}
}

var tenantLimits = map[string]string{
	"requests_per_minute": "most calls, jobs, and creates of files and batches a minute; 0 for no limit",
	"tokens_per_minute":   "most `tokens` a minute that calls and jobs are expected to need; 0 for no limit",
	"running":             "most calls that run on their connections at once, and, counted apart, most jobs and lines that are given to workers at once; 0 for no limit",
	"running_tokens":      "most `tokens` that those are expected to need; 0 for no limit",
	"queued":              "most accepted jobs that have not ended; 0 for no limit of its own",
	"queued_tokens":       "most `tokens` that those and the lines of batches are expected to need; 0 for no limit of its own",
	"file_bytes":          "most `bytes` of all files that are kept; 0 for no limit",
}

// keyLimits: a key's bound calls alone where a tenant's bound jobs and lines as well.
var keyLimits = map[string]string{
	"requests_per_minute": tenantLimits["requests_per_minute"],
	"tokens_per_minute":   tenantLimits["tokens_per_minute"],
	"running":             "most calls that run on their connections at once, jobs and lines aside; 0 for no limit",
	"running_tokens":      tenantLimits["running_tokens"],
}

func flagOf(limit string) string { return strings.ReplaceAll(limit, "_", "-") }

// given are the limits that were given; nil if there are none.
func (l *limitFlags) given() map[string]int64 {
	var given map[string]int64
	for name, v := range l.values {
		if l.fs.Changed(flagOf(name)) {
			if given == nil {
				given = make(map[string]int64)
			}
			given[name] = *v
		}
	}
	return given
}

// limitsText lists the limits that are set.
func limitsText(l client.Limits) string {
	var set []string
	for _, name := range ledger.LimitNames() {
		if v := l[name]; v != nil {
			set = append(set, flagOf(name)+" "+count(*v))
		}
	}
	if set == nil {
		return "-"
	}
	return strings.Join(set, ", ")
}
