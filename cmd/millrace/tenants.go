package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/millrace/millrace/internal/client"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
)

// adminLong ends the description of every operator's command.
const adminLong = `

It asks the API with an admin key (MILLRACE_ADMIN_KEY, or else MILLRACE_API_KEY). With
--database-url or --data it works on the database itself, which needs no key.`

func newTenants(p *program) *cobra.Command {
	cmd := &cobra.Command{
		Use: "tenants", Short: "List, create, change and delete tenants",
		Long:    "Tenants own API keys, jobs, files and batches, and see nothing of each other's." + adminLong,
		Example: "  millrace tenants create acme --weight 200 --requests-per-minute 600\n  millrace tenants list",
	}
	group(cmd)
	cmd.AddCommand(newTenantsList(p), newTenantsCreate(p), newTenantsUpdate(p), newTenantsDelete(p))
	return cmd
}

func newTenantsList(p *program) *cobra.Command {
	var (
		conn adminFlags
		out  output
	)
	cmd := &cobra.Command{
		Use: "list", Short: "List the tenants", Long: "List the tenants with their limits." + adminLong,
		Example: "  millrace tenants list\n  millrace tenants list -o json",
		Args:    args(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return conn.do(cmd, func(ctx context.Context, a administration) error {
				all, err := a.Tenants(ctx)
				if err != nil {
					return err
				}
				return printTenants(p.out, all, out)
			})
		},
	}
	conn.add(cmd.Flags())
	out.add(cmd.Flags())
	return cmd
}

func printTenants(w io.Writer, all []client.Tenant, out output) error {
	if out.json() {
		return printJSON(w, all)
	}
	rows := [][]string{{"ID", "NAME", "WEIGHT", "STATE", "CREATED", "LIMITS"}}
	for _, t := range all {
		state := "open"
		if t.Disabled {
			state = "disabled"
		}
		rows = append(rows, []string{string(t.ID), dash(t.Name), fmt.Sprint(t.Weight), state, date(&t.CreatedAt), limitsText(t.Limits)})
	}
	return table(w, rows)
}

// dash stands for what is empty.
func dash(text string) string {
	if text == "" {
		return "-"
	}
	return text
}

// date is a time of the API as people read it, to the minute.
func date(at *float64) string {
	if at == nil || *at == 0 {
		return "-"
	}
	return unixTime(*at).Local().Format("2006-01-02 15:04")
}

// tenantFlags are what can be set of a tenant.
type tenantFlags struct {
	conn    adminFlags
	out     output
	limits  limitFlags
	name    string
	weight  int
	disable bool
}

func (t *tenantFlags) add(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&t.name, "name", "", "a `name` for people")
	f.IntVar(&t.weight, "weight", 100, "its share of a model that is short of room, beside other tenants' weights: 1 to 1000")
	f.BoolVar(&t.disable, "disable", false, "its keys open nothing until --disable=false; what was accepted is finished")
	t.limits.add(f, ledger.LimitNames(), tenantLimits)
	t.conn.add(f)
	t.out.add(f)
}

// change is what was given.
func (t *tenantFlags) change(cmd *cobra.Command) client.TenantChange {
	var c client.TenantChange
	if cmd.Flags().Changed("name") {
		c.Name = &t.name
	}
	if cmd.Flags().Changed("weight") {
		c.Weight = &t.weight
	}
	if cmd.Flags().Changed("disable") {
		c.Disabled = &t.disable
	}
	c.Limits = t.limits.given()
	return c
}

// print prints one tenant.
func (t *tenantFlags) print(w io.Writer, one *client.Tenant) error {
	if t.out.json() {
		return printJSON(w, one)
	}
	return printTenants(w, []client.Tenant{*one}, t.out)
}

func newTenantsCreate(p *program) *cobra.Command {
	var t tenantFlags
	cmd := &cobra.Command{
		Use: "create ID", Short: "Make a tenant", Long: "Make a tenant. Its keys are made by `millrace keys create --tenant ID`." + adminLong,
		Example: "  millrace tenants create acme --name \"Acme Inc.\" --tokens-per-minute 500000\n  millrace tenants create lab --weight 20 --queued 1000 --data /srv/millrace",
		Args:    args(1, 1, "the tenant's id"),
		RunE: func(cmd *cobra.Command, given []string) error {
			return t.conn.do(cmd, func(ctx context.Context, a administration) error {
				c := t.change(cmd)
				c.ID = job.Tenant(given[0])
				made, err := a.CreateTenant(ctx, c)
				if err != nil {
					return err
				}
				return t.print(p.out, made)
			})
		},
	}
	t.add(cmd)
	return cmd
}

func newTenantsUpdate(p *program) *cobra.Command {
	var t tenantFlags
	cmd := &cobra.Command{
		Use: "update ID", Short: "Change a tenant",
		Long: `Change a tenant: what is not named stays as it is, and a limit of 0 is none. It takes
effect within five seconds.` + adminLong,
		Example: "  millrace tenants update acme --requests-per-minute 1200\n  millrace tenants update acme --disable\n  millrace tenants update acme --disable=false --weight 50",
		Args:    args(1, 1, "the tenant's id"),
		RunE: func(cmd *cobra.Command, given []string) error {
			c := t.change(cmd)
			if c.Name == nil && c.Weight == nil && c.Disabled == nil && c.Limits == nil {
				return usageError(cmd, errors.New("nothing is to be changed"))
			}
			return t.conn.do(cmd, func(ctx context.Context, a administration) error {
				now, err := a.UpdateTenant(ctx, job.Tenant(given[0]), c)
				if err != nil {
					return err
				}
				return t.print(p.out, now)
			})
		},
	}
	t.add(cmd)
	return cmd
}

func newTenantsDelete(p *program) *cobra.Command {
	var (
		conn adminFlags
		out  output
	)
	cmd := &cobra.Command{
		Use: "delete ID…", Short: "Delete tenants that have nothing left",
		Long: `Delete tenants that have no keys but revoked ones, no files and no live batches. Their
usage stays.` + adminLong,
		Example: "  millrace tenants delete acme",
		Args:    args(1, 1000, "a tenant's id"),
		RunE: func(cmd *cobra.Command, given []string) error {
			return conn.do(cmd, func(ctx context.Context, a administration) error {
				return each(p.out, out, given, func(id string) (deleted, string, error) {
					return deleted{id, "tenant", true}, id + " deleted", a.DeleteTenant(ctx, job.Tenant(id))
				})
			})
		},
	}
	conn.add(cmd.Flags())
	out.add(cmd.Flags())
	return cmd
}
