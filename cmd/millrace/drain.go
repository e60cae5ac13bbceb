package main

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/millrace/millrace/internal/client"
)

func newDrain(p *program) *cobra.Command {
	var (
		conn operatorFlags
		out  output
	)
	cmd := &cobra.Command{
		Use: "drain WORKER", Short: "Have a worker take no more work",
		Long: `Have a worker, by its id or its name, take no more work. It hands back what has not
started, finishes what runs, and stays, with nothing to do, until its process is told
to stop. ` + "`millrace status`" + ` shows how much still runs. A drain cannot be taken back:
start the worker again.`,
		Example: "  millrace drain gpu-box-1\n  millrace drain gpu-box-1-x7k2m9qa -o json", Args: args(1, 1, "the worker"),
		RunE: func(cmd *cobra.Command, given []string) error {
			return conn.do(cmd, func(ctx context.Context, c *client.Client) error { return drain(ctx, p.out, c, given[0], out) })
		},
	}
	conn.add(cmd.Flags())
	out.add(cmd.Flags())
	return cmd
}

func drain(ctx context.Context, w io.Writer, c *client.Client, worker string, out output) error {
	drained, err := c.DrainWorker(ctx, worker)
	if err != nil {
		return err
	}
	if out.json() {
		return printJSON(w, drained)
	}
	rest := "nothing runs on it: stop it whenever you like"
	if n := drained.Running + drained.InHand; n > 0 {
		rest = plural(n, "job") + " on it, by its last word: stop it once none runs"
	}
	_, err = fmt.Fprintf(w, "%s drains; %s\n", drained.ID, rest)
	return err
}
