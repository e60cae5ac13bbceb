package main

import (
	"fmt"
	"runtime"

	"github.com/spf13/cobra"
)

func newVersion(p *program) *cobra.Command {
	var out output
	cmd := &cobra.Command{
		Use: "version", Short: "Print the version", Long: "Print the version of this binary, of Go, and the platform that it was built for.",
		Example: "  millrace version\n  millrace version -o json", Args: args(0, 0, ""),
		RunE: func(*cobra.Command, []string) error {
			v := struct {
				Version  string `json:"version"`
				Go       string `json:"go"`
				Platform string `json:"platform"`
			}{buildVersion(), runtime.Version(), runtime.GOOS + "/" + runtime.GOARCH}
			if out.json() {
				return printJSON(p.out, v)
			}
			_, err := fmt.Fprintf(p.out, "millrace %s (%s, %s)\n", v.Version, v.Go, v.Platform)
			return err
		},
	}
	out.add(cmd.Flags())
	return cmd
}
