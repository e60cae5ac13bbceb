package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/millrace/millrace/internal/ledger"
)

func newMigrate(p *program) *cobra.Command {
	var (
		db  databaseFlags
		out output
	)
	// A database that has just been started is waited for.
	var wait time.Duration
	do := func(f func(context.Context, ledger.Config) error) func(*cobra.Command, []string) error {
		return func(cmd *cobra.Command, _ []string) error {
			if err := db.check(true); err != nil {
				return usageError(cmd, err)
			}
			return untilDatabase(cmd.Context(), wait, func() error { return f(cmd.Context(), ledger.Config{URL: db.url}) })
		}
	}
	say := func(m migration) error {
		if out.json() {
			return printJSON(p.out, m)
		}
		_, err := fmt.Fprintln(p.out, m)
		return err
	}
	log := slog.New(slog.DiscardHandler) // what was done is said here
	up := do(func(ctx context.Context, cfg ledger.Config) error {
		from, at, err := ledger.Migrate(ctx, cfg, log)
		if err != nil {
			return err
		}
		return say(migration{from, at})
	})
	cmd := &cobra.Command{
		Use: "migrate", Short: "The database's schema: bring it up to date, show it, take it back",
		Long: `Bring the database's schema to the newest version that this build knows. Run it before
the roles of a new version are started; the old ones that run go on meanwhile. Several
may run at once: one does it, the others wait.

"millrace up" does it by itself for the database in its data folder.`,
		Example: `  MILLRACE_DATABASE_URL=postgres://millrace:secret@db/millrace millrace migrate
  millrace migrate status
  millrace migrate down --to 0`,
		Args: args(0, 0, ""), RunE: up,
	}
	cmd.AddCommand(
		&cobra.Command{
			Use: "up", Short: "Bring the schema to the newest version",
			Long: `Bring the schema to the newest version that this build knows: what "millrace migrate"
does without a further word.`,
			Example: "  millrace migrate up --database-url sqlite:/var/lib/millrace/millrace.db",
			Args:    args(0, 0, ""), RunE: up,
		},
		&cobra.Command{
			Use: "status", Short: "Show which steps the database has",
			Long: `Show the steps of the schema that this build knows, and which of them the database has.
It changes nothing.`,
			Example: "  millrace migrate status --database-url sqlite:/var/lib/millrace/millrace.db",
			Args:    args(0, 0, ""),
			RunE: do(func(ctx context.Context, cfg ledger.Config) error {
				have, steps, err := ledger.Schema(ctx, cfg, log)
				if err != nil {
					return err
				}
				if out.json() {
					return printJSON(p.out, schemaOf(have, steps))
				}
				_, err = fmt.Fprintln(p.out, schemaTable(have, steps))
				return err
			}),
		},
		newMigrateDown(do, say, log),
	)
	for _, c := range descendants(cmd) {
		db.add(c.Flags(), "required")
		out.add(c.Flags())
		c.Flags().DurationVar(&wait, "wait", 30*time.Second, "how long to wait for a database that does not answer")
	}
	return cmd
}

func newMigrateDown(do func(func(context.Context, ledger.Config) error) func(*cobra.Command, []string) error, say func(migration) error, log *slog.Logger) *cobra.Command {
	var to int64
	cmd := &cobra.Command{
		Use: "down --to VERSION", Short: "Take the schema back to an older version; what only the newer one holds is lost",
		Long: `Take the schema back to an older version, for an older build. Stop the API and the
dispatcher first. What only the newer version holds is deleted for good: with --to 0
that is every tenant, key, file, batch and the usage. Make a copy of the database before.`,
		Example: "  millrace migrate down --to 1",
		Args:    args(0, 0, ""),
	}
	cmd.Flags().Int64Var(&to, "to", 0, "the `version` to go back to; 0 removes everything")
	cmd.RunE = func(cmd *cobra.Command, given []string) error {
		if !cmd.Flags().Changed("to") {
			return usageError(cmd, errors.New("the version is missing: name it with --to; `millrace migrate status` lists them"))
		}
		return do(func(ctx context.Context, cfg ledger.Config) error {
			from, at, err := ledger.MigrateDown(ctx, cfg, to, log)
			if err != nil {
				return err
			}
			return say(migration{from, at})
		})(cmd, given)
	}
	return cmd
}

// migration is from which version of the schema to which.
type migration struct {
	From int64 `json:"from"`
	To   int64 `json:"to"`
}

func (m migration) String() string {
	switch {
	case m.From == m.To:
		return fmt.Sprintf("the schema is at version %d already", m.To)
	case m.From < m.To:
		return fmt.Sprintf("the schema was brought from version %d to %d", m.From, m.To)
	}
	return fmt.Sprintf("the schema was taken back from version %d to %d: what only the newer one held is gone", m.From, m.To)
}

// schema is the version that a database has, and the steps that this build knows.
type schema struct {
	Version int64        `json:"version"`
	Steps   []schemaStep `json:"steps"`
}

type schemaStep struct {
	Version int64  `json:"version"`
	Name    string `json:"name"`
	Applied bool   `json:"applied"`
	// AppliedAt is in unix seconds, nil if that was not written down.
	AppliedAt *float64 `json:"applied_at"`
}

func schemaOf(have int64, steps []ledger.Step) schema {
	s := schema{have, make([]schemaStep, len(steps))}
	for i, step := range steps {
		s.Steps[i] = schemaStep{Version: step.Version, Name: step.Name, Applied: step.Version <= have}
		if !step.Applied.IsZero() {
			at := float64(step.Applied.UnixMilli()) / 1000
			s.Steps[i].AppliedAt = &at
		}
	}
	return s
}

// schemaTable shows the steps, one to a line.
func schemaTable(have int64, steps []ledger.Step) string {
	var b strings.Builder
	for _, s := range steps {
		state := "missing: run `millrace migrate`"
		if s.Version <= have {
			state = "applied"
			if !s.Applied.IsZero() {
				state += " " + s.Applied.UTC().Format(time.RFC3339)
			}
		}
		fmt.Fprintf(&b, "%5d  %-30s  %s\n", s.Version, s.Name, state)
	}
	if len(steps) > 0 && have > steps[len(steps)-1].Version {
		fmt.Fprintf(&b, "the database is at version %d, which this build does not know: run a newer millrace\n", have)
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// untilDatabase calls f again while the database does not answer, for up to wait.
func untilDatabase(ctx context.Context, wait time.Duration, f func() error) error {
	deadline := time.Now().Add(wait)
	for {
		err := f()
		if !errors.Is(err, ledger.ErrUnavailable) {
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%w: is it there, and is --database-url right?", err)
		}
		select {
		case <-time.After(500 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
