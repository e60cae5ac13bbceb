package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/millrace/millrace/internal/client"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
)

func newKeys(p *program) *cobra.Command {
	cmd := &cobra.Command{
		Use: "keys", Short: "List, create, rotate and revoke API keys",
		Long: `API keys open the API to tenants. From the first one on nobody is let in without a key.
The database keeps no secrets, only their hashes.` + adminLong,
		Example: "  millrace keys create --tenant acme --name ci\n  millrace keys list --tenant acme\n  millrace keys revoke key_06f2…",
	}
	group(cmd)
	cmd.AddCommand(newKeysList(p), newKeysCreate(p), newKeysRotate(p), newKeysRevoke(p))
	return cmd
}

func newKeysList(p *program) *cobra.Command {
	var (
		conn   adminFlags
		out    output
		tenant string
	)
	cmd := &cobra.Command{
		Use: "list", Short: "List keys, newest first", Long: "List keys, newest first: what they open, and when they were last used." + adminLong,
		Example: "  millrace keys list\n  millrace keys list --tenant acme -o json",
		Args:    args(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return conn.do(cmd, func(ctx context.Context, a administration) error {
				all, err := a.Keys(ctx, job.Tenant(tenant))
				if err != nil {
					return err
				}
				return printKeys(p.out, all, out)
			})
		},
	}
	cmd.Flags().StringVar(&tenant, "tenant", "", "only the keys of this `tenant`")
	conn.add(cmd.Flags())
	out.add(cmd.Flags())
	return cmd
}

func printKeys(w io.Writer, all []client.Key, out output) error {
	if out.json() {
		if all == nil {
			all = []client.Key{}
		}
		return printJSON(w, all)
	}
	if len(all) == 0 {
		_, err := fmt.Fprintln(w, "no keys")
		return err
	}
	now := time.Now()
	rows := [][]string{{"ID", "TENANT", "NAME", "SECRET", "STATE", "SCOPES", "MODELS", "CREATED", "LAST USED", "EXPIRES", "LIMITS"}}
	for _, k := range all {
		state := "open"
		switch {
		case k.RevokedAt != nil:
			state = "revoked"
		case k.ExpiresAt != nil && !unixTime(*k.ExpiresAt).After(now):
			state = "expired"
		}
		models := "all"
		if len(k.Models) > 0 {
			names := make([]string, len(k.Models))
			for i, m := range k.Models {
				names[i] = string(m)
			}
			models = strings.Join(names, ",")
		}
		rows = append(rows, []string{
			k.ID, string(k.Tenant), dash(k.Name), k.Prefix + "…", state, strings.Join(k.Scopes, ","), models, date(&k.CreatedAt), date(k.LastUsedAt), date(k.ExpiresAt), limitsText(k.Limits),
		})
	}
	return table(w, rows)
}

// printSecret prints a new key: the secret alone on the standard output, so that it can be piped, and the rest beside it.
func printSecret(p *program, k *client.Key, out output, more string) error {
	if out.json() {
		return printJSON(p.out, k)
	}
	if _, err := fmt.Fprintln(p.out, k.Secret); err != nil {
		return err
	}
	_, err := fmt.Fprintf(p.err, "%s of tenant %s opens %s. This is the only time that its secret is shown.%s\n", k.ID, k.Tenant, strings.Join(k.Scopes, " and "), more)
	return err
}

func newKeysCreate(p *program) *cobra.Command {
	var (
		conn           adminFlags
		out            output
		limits         limitFlags
		tenant, name   string
		scopes, models []string
		lives          time.Duration
	)
	cmd := &cobra.Command{
		Use: "create", Short: "Make a key, and print its secret once",
		Long: `Make a key. Its secret alone is printed on the standard output, and can be read nowhere
else and never again. The first key of a platform closes it to all who have none, within
a second and in all its processes: make one of scope admin first, for yourself.` + adminLong,
		Example: `  millrace keys create --scope admin --database-url postgres://millrace@db/millrace
  millrace keys create --tenant acme --name ci --model llama-3.1-8b --expires-in 2160h
  millrace keys create --tenant acme --requests-per-minute 60 > acme.key`,
		Args: args(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			k := client.NewKey{Tenant: job.Tenant(tenant), Name: name, Scopes: scopes, Limits: limits.given()}
			for _, m := range models {
				k.Models = append(k.Models, job.Model(m))
			}
			if cmd.Flags().Changed("expires-in") {
				if lives <= 0 {
					return usageError(cmd, fmt.Errorf("expires-in is %v: it must be more than 0", lives))
				}
				k.ExpiresAt = float64(time.Now().Add(lives).Unix())
			}
			return conn.do(cmd, func(ctx context.Context, a administration) error {
				before, err := a.Keys(ctx, "")
				if err != nil {
					return err
				}
				made, err := a.CreateKey(ctx, k)
				if err != nil {
					return err
				}
				more := ""
				if len(before) == 0 && !slices.Contains(scopes, string(ledger.Admin)) {
					more = "\nIt is the first key: from now on nobody is let in without one, nor you. For /admin make one with --scope admin, straight in the database: --data DIR or --database-url URL."
				}
				return printSecret(p, made, out, more)
			})
		},
	}
	f := cmd.Flags()
	f.StringVar(&tenant, "tenant", string(job.DefaultTenant), "the `tenant` that it belongs to")
	f.StringVar(&name, "name", "", "a `name` for people")
	f.StringSliceVar(&scopes, "scope", nil, "what it `opens`: inference, batches, admin (default inference,batches)")
	f.StringSliceVarP(&models, "model", "m", nil, "the `models` that it may use (default all)")
	f.DurationVar(&lives, "expires-in", 0, "after how long it opens nothing any more (default never)")
	limits.add(f, ledger.KeyLimitNames(), keyLimits)
	conn.add(f)
	out.add(f)
	return cmd
}

func newKeysRotate(p *program) *cobra.Command {
	var (
		conn  adminFlags
		out   output
		grace time.Duration
	)
	cmd := &cobra.Command{
		Use: "rotate ID", Short: "Make a new key in place of an old one, and print its secret once",
		Long: `Make a new key like the old one, which opens beside it for the grace yet. The new secret
alone is printed on the standard output, and can be read nowhere else and never again.` + adminLong,
		Example: "  millrace keys rotate key_06f2… --grace 24h\n  millrace keys rotate key_06f2… --grace 0s > new.key",
		Args:    args(1, 1, "the key's id"),
		RunE: func(cmd *cobra.Command, given []string) error {
			if grace < 0 {
				return usageError(cmd, errors.New("grace must be at least 0"))
			}
			return conn.do(cmd, func(ctx context.Context, a administration) error {
				made, err := a.RotateKey(ctx, given[0], grace.String())
				if err != nil {
					return err
				}
				return printSecret(p, made, out, fmt.Sprintf(" %s opens for %v yet.", given[0], grace))
			})
		},
	}
	cmd.Flags().DurationVar(&grace, "grace", time.Hour, "how long the old key opens yet")
	conn.add(cmd.Flags())
	out.add(cmd.Flags())
	return cmd
}

func newKeysRevoke(p *program) *cobra.Command {
	var (
		conn adminFlags
		out  output
	)
	cmd := &cobra.Command{
		Use: "revoke ID…", Short: "Close keys for ever",
		Long: `Close keys for ever, within five seconds and in all processes. What was accepted with
them goes on.` + adminLong,
		Example: "  millrace keys revoke key_06f2… key_06f3…",
		Args:    args(1, 1000, "a key's id"),
		RunE: func(cmd *cobra.Command, given []string) error {
			return conn.do(cmd, func(ctx context.Context, a administration) error {
				return each(p.out, out, given, func(id string) (*client.Key, string, error) {
					k, err := a.RevokeKey(ctx, id)
					if err != nil {
						return nil, "", err
					}
					return k, k.ID + " revoked", nil
				})
			})
		},
	}
	conn.add(cmd.Flags())
	out.add(cmd.Flags())
	return cmd
}
