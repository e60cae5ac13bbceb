package main

import (
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/spf13/cobra"
)

func newHealth(p *program) *cobra.Command {
	var url string
	cmd := &cobra.Command{
		Use: "health", Short: "Ask a role of this machine whether it is ready",
		Long: `Ask a role's readiness route, for health checks of containers.
The exit code is 0 if it is ready, else 1.`,
		Example: "  millrace health\n  millrace health --url http://127.0.0.1:8080/readyz", Args: args(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			req, err := http.NewRequestWithContext(cmd.Context(), http.MethodGet, url, nil)
			if err != nil {
				return usageError(cmd, fmt.Errorf("reading the URL %q: %w", url, err))
			}
			c := &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
			resp, err := c.Do(req)
			if err != nil {
				return fmt.Errorf("not ready: %w", err)
			}
			defer resp.Body.Close() //nolint:errcheck // read as far as it is shown
			text, err := io.ReadAll(io.LimitReader(resp.Body, 4<<10))
			if err != nil {
				return fmt.Errorf("reading the answer of %s: %w", url, err)
			}
			if resp.StatusCode != http.StatusOK {
				return fmt.Errorf("not ready: %s answers %d %s", url, resp.StatusCode, oneLine(string(text)))
			}
			_, err = fmt.Fprintln(p.out, "ready")
			return err
		},
	}
	cmd.Flags().StringVar(&url, "url", "http://127.0.0.1:9464/readyz", "the readiness route's `URL`")
	variables(cmd.Flags(), "url", "MILLRACE_HEALTH_URL")
	return cmd
}
