// Command millrace is the whole of Millrace in one binary: each role of the platform, and what people do with it.
package main

import (
	"context"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"

	"github.com/spf13/cobra"
)

func main() {
	cobra.EnableCommandSorting = false // in the order in which they are learnt
	// The first signal asks; a second one ends the process at once, for then nobody listens any more.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	code := run(ctx, &program{in: os.Stdin, out: os.Stdout, err: os.Stderr, lookup: os.LookupEnv}, os.Args[1:])
	stop()
	os.Exit(code)
}

// program is what a command has of the world outside.
type program struct {
	in       io.Reader
	out, err io.Writer
	lookup   func(string) (string, bool)
}

// version is set by the linker in released builds.
var version string

// buildVersion is the version of this build: the linker's, else the module's, else the commit.
func buildVersion() string {
	if version != "" {
		return version
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "dev"
	}
	if v := info.Main.Version; v != "" && v != "(devel)" {
		return v
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" && len(s.Value) >= 12 {
			return "dev-" + s.Value[:12]
		}
	}
	return "dev"
}
