package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/millrace/millrace/internal/client"
	"github.com/millrace/millrace/internal/job"
)

func newUsage(p *program) *cobra.Command {
	var (
		conn          adminFlags
		out           output
		q             client.UsageQuery
		tenant, model string
	)
	cmd := &cobra.Command{
		Use: "usage", Short: "Show what was used: requests and tokens by day, tenant, model and key",
		Long: `Show how many requests ended and how many tokens they took, by days of UTC. With a key
that is no admin's it shows what the key's own tenant used.` + adminLong,
		Example: "  millrace usage\n  millrace usage --from 2026-01-01 --to 2026-01-31 --by tenant\n  millrace usage --tenant acme --by day,key -o json",
		Args:    args(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			q.Tenant, q.Model = job.Tenant(tenant), job.Model(model)
			if q.From == "" {
				q.From = time.Now().UTC().AddDate(0, 0, -29).Format(time.DateOnly)
			}
			for name, text := range map[string]string{"from": q.From, "to": q.To} {
				if _, err := time.Parse(time.DateOnly, text); err != nil && text != "" {
					return usageError(cmd, fmt.Errorf("%s is %q: it must be a day like 2026-01-31", name, text))
				}
			}
			for _, name := range q.By {
				if !slices.Contains([]string{"day", "tenant", "model", "key"}, name) {
					return usageError(cmd, fmt.Errorf("by holds %q: it must be of day, tenant, model and key", name))
				}
			}
			return conn.do(cmd, func(ctx context.Context, a administration) error {
				rows, err := a.Usage(ctx, q)
				var refused *client.Error
				if c, ok := a.(*client.Client); ok && errors.As(err, &refused) && refused.Status == http.StatusForbidden && q.Tenant == "" && !slices.Contains(q.By, "tenant") {
					rows, err = c.OwnUsage(ctx, q)
				}
				if err != nil {
					return err
				}
				return printUsage(p.out, rows, out)
			})
		},
	}
	f := cmd.Flags()
	f.StringVar(&q.From, "from", "", "the first `day`, as 2026-01-31 (default 29 days ago)")
	f.StringVar(&q.To, "to", "", "the last `day`, as 2026-01-31 (default today)")
	f.StringVar(&tenant, "tenant", "", "only what this `tenant` used")
	f.StringVarP(&model, "model", "m", "", "only of this `model`")
	f.StringVar(&q.Key, "key", "", "only with the key of this `id`")
	f.StringSliceVar(&q.By, "by", nil, "the `fields` to keep apart, with commas: day, tenant, model, key (default day,tenant,model)")
	conn.add(f)
	out.add(f)
	return cmd
}

func printUsage(w io.Writer, rows []client.Usage, out output) error {
	if out.json() {
		if rows == nil {
			rows = []client.Usage{}
		}
		return printJSON(w, rows)
	}
	if len(rows) == 0 {
		_, err := fmt.Fprintln(w, "nothing was used")
		return err
	}
	var heads []string
	cells := make([][]string, len(rows))
	column := func(head string, of func(*client.Usage) (string, bool)) {
		if _, ok := of(&rows[0]); !ok {
			return
		}
		heads = append(heads, head)
		for i := range rows {
			text, _ := of(&rows[i])
			cells[i] = append(cells[i], dash(text))
		}
	}
	column("DAY", func(u *client.Usage) (string, bool) { return text(u.Day) })
	column("TENANT", func(u *client.Usage) (string, bool) { return text(u.Tenant) })
	column("MODEL", func(u *client.Usage) (string, bool) { return text(u.Model) })
	column("KEY", func(u *client.Usage) (string, bool) { return text(u.Key) })
	for _, n := range []struct {
		head string
		of   func(*client.Usage) int64
	}{
		{"REQUESTS", func(u *client.Usage) int64 { return u.Requests }},
		{"FAILED", func(u *client.Usage) int64 { return u.Failed }},
		{"PROMPT", func(u *client.Usage) int64 { return int64(u.Usage.PromptTokens) }},
		{"CACHED", func(u *client.Usage) int64 { return int64(u.Usage.CachedTokens) }},
		{"OUTPUT", func(u *client.Usage) int64 { return int64(u.Usage.CompletionTokens) }},
		{"TOTAL", func(u *client.Usage) int64 { return int64(u.Usage.TotalTokens) }},
	} {
		column(n.head, func(u *client.Usage) (string, bool) { return count(n.of(u)), true })
	}
	return table(w, slices.Insert(cells, 0, heads))
}

// text is what a field of an answer says, and whether it is there.
func text[T ~string](v *T) (string, bool) {
	if v == nil {
		return "", false
	}
	return strings.TrimSpace(string(*v)), true
}
