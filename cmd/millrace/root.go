package main

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/millrace/millrace/internal/client"
	"github.com/millrace/millrace/internal/config"
)

// The exit codes.
const (
	exitOK          = 0
	exitFailed      = 1
	exitUsage       = 2   // the command line or the configuration is wrong
	exitJob         = 3   // a job or a line ended otherwise than completed, or the file of a batch has faults
	exitInterrupted = 130 // as a shell counts a Ctrl-C
)

// exitError ends the program with a code of its own. Without err nothing is printed.
type exitError struct {
	code int
	err  error
}

func (e *exitError) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit code %d", e.code)
	}
	return e.err.Error()
}

func (e *exitError) Unwrap() error { return e.err }

// usageError says that the command was called wrongly, and how to find out more.
func usageError(cmd *cobra.Command, err error) error {
	return &exitError{exitUsage, fmt.Errorf("%w: see `%s --help`", err, cmd.CommandPath())}
}

// flagError says that a flag is wrong, and which takes the key where the command takes another one.
func flagError(cmd *cobra.Command, err error) error {
	var unknown *pflag.NotExistError
	if errors.As(err, &unknown) {
		for _, keys := range [][2]string{{"api-key", "admin-key"}, {"admin-key", "api-key"}} {
			if unknown.GetSpecifiedName() == keys[0] && cmd.Flags().Lookup(keys[1]) != nil {
				err = fmt.Errorf("%w: this command takes --%s", err, keys[1])
			}
		}
	}
	return usageError(cmd, err)
}

// run runs one command line and returns the program's exit code.
func run(ctx context.Context, p *program, args []string) int {
	root := newRoot(p)
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return exitOK
	}
	code, text := exitFailed, err.Error()
	var exit *exitError
	switch {
	case errors.As(err, &exit):
		code = exit.code
		if exit.err == nil {
			text = ""
		}
	case ctx.Err() != nil && errors.Is(err, context.Canceled):
		code, text = exitInterrupted, ""
	}
	if text != "" {
		fmt.Fprintln(p.err, "millrace:", oneLine(text)) //nolint:errcheck // nowhere else to say it
	}
	return code
}

// oneLine joins the lines of a text.
func oneLine(s string) string {
	lines := strings.FieldsFunc(s, func(r rune) bool { return r == '\n' || r == '\r' })
	for i := range lines {
		lines[i] = strings.TrimSpace(lines[i])
	}
	return strings.Join(lines, "; ")
}

const rootLong = `Millrace puts requests to large language models on a queue, and lets workers
beside your own inference engines pull them as fast as their GPUs have room.

  millrace up                           the whole platform, in this process
  millrace submit --stream "Hello"      ask it something`

// footer ends the help of every command.
const footer = `
Every flag can also be set in the environment (--nats-url is MILLRACE_NATS_URL)
and in the YAML file named by --config (nats-url: …). Flags win over the
environment, the environment wins over the file.
`

const usageTemplate = `Usage:{{if not .HasAvailableSubCommands}}
  {{.UseLine}}{{end}}{{if .HasAvailableSubCommands}}
  {{.CommandPath}} COMMAND{{end}}{{if .HasExample}}

Examples:
{{.Example}}{{end}}{{if .HasAvailableSubCommands}}{{$cmds := .Commands}}{{if eq (len .Groups) 0}}

Commands:{{range $cmds}}{{if .IsAvailableCommand}}
  {{rpad .Name .NamePadding }} {{.Short}}{{end}}{{end}}{{else}}{{range $group := .Groups}}

{{.Title}}{{range $cmds}}{{if (and (eq .GroupID $group.ID) .IsAvailableCommand)}}
  {{rpad .Name .NamePadding }} {{.Short}}{{end}}{{end}}{{end}}{{end}}{{end}}{{if .HasAvailableLocalFlags}}

Flags:
{{.LocalFlags.FlagUsages | trimTrailingWhitespaces}}{{end}}{{if .HasAvailableInheritedFlags}}

Flags of all commands:
{{.InheritedFlags.FlagUsages | trimTrailingWhitespaces}}{{end}}
` + footer

func newRoot(p *program) *cobra.Command {
	root := &cobra.Command{
		Use: "millrace", Short: "Queue-based inference on your own GPUs", Long: rootLong,
		Example:      "  millrace demo\n  millrace up --engine http://127.0.0.1:11434\n  millrace status",
		SilenceUsage: true, SilenceErrors: true, SuggestionsMinimumDistance: 2, Version: buildVersion(),
	}
	group(root)
	root.SetIn(p.in)
	root.SetOut(p.out)
	root.SetErr(p.err)
	root.SetUsageTemplate(usageTemplate)
	root.SetVersionTemplate("millrace {{.Version}}\n")
	root.SetFlagErrorFunc(flagError)
	root.AddGroup(
		&cobra.Group{ID: "run", Title: "Run the platform:"}, &cobra.Group{ID: "use", Title: "Use it:"}, &cobra.Group{ID: "more", Title: "And:"},
	)
	file := root.PersistentFlags().String("config", "", "YAML `file` with settings")
	root.PersistentPreRunE = func(cmd *cobra.Command, _ []string) error {
		path := *file
		if v, ok := p.lookup(config.Prefix + "CONFIG"); ok && path == "" {
			path = v
		}
		if err := config.Load(cmd.Flags(), config.Sources{File: path, Known: settings(root), Lookup: p.lookup}); err != nil {
			return &exitError{exitUsage, err}
		}
		return nil
	}
	add := func(id string, cmds ...*cobra.Command) {
		for _, cmd := range cmds {
			cmd.GroupID = id
		}
		root.AddCommand(cmds...)
	}
	add("run", newUp(p), newDemo(p), newAPI(p), newDispatcher(p), newAutoscaler(p), newWorker(p), newEmulator(p), newHealth(p))
	add("use", newSubmit(p), newJobs(p), newBatch(p), newStatus(p), newScaling(p), newDrain(p))
	add("more", newPools(p), newTenants(p), newKeys(p), newUsage(p), newMigrate(p), newBench(p), newVersion(p))
	for _, cmd := range descendants(root) {
		cmd.Flags().SortFlags = false // in the order in which they are learnt
	}
	root.SetHelpCommandGroupID("more")
	root.SetCompletionCommandGroupID("more")
	return root
}

// group makes cmd, which only holds others, print its help, and refuse what is none of them.
func group(cmd *cobra.Command) {
	cmd.Args = cobra.ArbitraryArgs
	cmd.RunE = func(cmd *cobra.Command, given []string) error {
		if len(given) == 0 {
			return cmd.Help()
		}
		text := fmt.Sprintf("%s has no command %q", cmd.CommandPath(), given[0])
		if near := cmd.SuggestionsFor(given[0]); len(near) > 0 {
			text += fmt.Sprintf(" (did you mean %s?)", strings.Join(near, " or "))
		}
		return usageError(cmd, errors.New(text))
	}
}

// descendants are cmd and all commands below it.
func descendants(cmd *cobra.Command) []*cobra.Command {
	all := []*cobra.Command{cmd}
	for _, sub := range cmd.Commands() {
		all = append(all, descendants(sub)...)
	}
	return all
}

// settings are the names of all settings of all commands.
func settings(root *cobra.Command) []string {
	var names []string
	for _, cmd := range descendants(root) {
		cmd.Flags().VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
	}
	return names
}

// args checks how many arguments there are; name says what they are.
func args(least, most int, name string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, given []string) error {
		switch {
		case len(given) < least:
			return usageError(cmd, fmt.Errorf("%s is missing", name))
		case len(given) > most && most == 0:
			return usageError(cmd, fmt.Errorf("%s takes no arguments, and %q is one", cmd.CommandPath(), given[0]))
		case len(given) > most:
			return usageError(cmd, fmt.Errorf("%q is one argument too many: put quotes around a text with spaces", given[most]))
		}
		return nil
	}
}

// clientFlags are those of every command that calls the API.
type clientFlags struct{ url, key string }

func (c *clientFlags) add(fs *pflag.FlagSet) {
	fs.StringVar(&c.url, "url", client.DefaultURL, "the API's `URL`")
	fs.StringVar(&c.key, "api-key", "", "`key` for the API; better set in MILLRACE_API_KEY, where ps does not show it")
	variables(fs, "url", "MILLRACE_URL", "OPENAI_BASE_URL")
	variables(fs, "api-key", "MILLRACE_API_KEY", "OPENAI_API_KEY")
}

// variables names the environment variables of a flag, where its own name would not do.
func variables(fs *pflag.FlagSet, name string, env ...string) {
	f := fs.Lookup(name)
	f.Annotations = map[string][]string{config.EnvAnnotation: env}
}
