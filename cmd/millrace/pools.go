package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"github.com/millrace/millrace/internal/client"
	"github.com/millrace/millrace/internal/scale"
)

// operatorFlags say which API an operator's command asks.
type operatorFlags struct{ clientFlags }

func (c *operatorFlags) add(fs *pflag.FlagSet) {
	fs.StringVar(&c.url, "url", client.DefaultURL, "the API's `URL`")
	fs.StringVar(&c.key, "admin-key", "", "`key` that opens /admin; better set in MILLRACE_ADMIN_KEY, or else MILLRACE_API_KEY, where ps does not show it")
	variables(fs, "url", "MILLRACE_URL", "OPENAI_BASE_URL")
	variables(fs, "admin-key", "MILLRACE_ADMIN_KEY", "MILLRACE_API_KEY", "OPENAI_API_KEY")
}

// do calls f with the API, and adds to its error what can be done about it.
func (c *operatorFlags) do(cmd *cobra.Command, f func(context.Context, *client.Client) error) error {
	cl, err := c.open()
	if err != nil {
		return err
	}
	return explainAdmin(cl, f(cmd.Context(), cl), "")
}

const poolsLong = `A pool is a set of workers that are alike: which models they serve, how one of them is
started, and how many there may be. The autoscaler keeps as many as the moment needs.
Pools come from here, or from the file that the autoscaler is given by --pools.`

func newPools(p *program) *cobra.Command {
	cmd := &cobra.Command{
		Use: "pools", Short: "List, read, apply and delete pools of workers", Long: poolsLong,
		Example: "  millrace pools apply -f pools.yaml\n  millrace pools list\n  millrace pools get chat > chat.yaml",
	}
	group(cmd)
	cmd.AddCommand(newPoolsList(p), newPoolsGet(p), newPoolsApply(p), newPoolsDelete(p))
	return cmd
}

func newPoolsList(p *program) *cobra.Command {
	var (
		conn operatorFlags
		out  output
	)
	cmd := &cobra.Command{
		Use: "list", Short: "List the pools", Long: "List the pools: what they may be, and what the autoscaler does about them now.\n`millrace scaling` says why.",
		Example: "  millrace pools list\n  millrace pools list -o json",
		Args:    args(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return conn.do(cmd, func(ctx context.Context, c *client.Client) error {
				all, err := c.Pools(ctx)
				if err != nil {
					return err
				}
				return printPools(p.out, time.Now(), all, out)
			})
		},
	}
	conn.add(cmd.Flags())
	out.add(cmd.Flags())
	return cmd
}

// specOf reads what a pool is described as. Fields that a newer server has are left out.
func specOf(p *client.Pool) (*scale.Pool, error) {
	var spec scale.Pool
	if err := json.Unmarshal(p.Spec, &spec); err != nil {
		return nil, fmt.Errorf("reading the pool %s: %w", p.Name, err)
	}
	return &spec, nil
}

// noPools is said where there are none.
const noPools = "there are no pools: write one, and `millrace pools apply -f FILE`"

func printPools(w io.Writer, now time.Time, all []client.Pool, out output) error {
	if out.json() {
		if all == nil {
			all = []client.Pool{}
		}
		return printJSON(w, all)
	}
	if len(all) == 0 {
		_, err := fmt.Fprintln(w, noPools)
		return err
	}
	rows := [][]string{{"POOL", "PROVIDER", "MIN", "MAX", "WANTED", "READY", "STARTING", "FROM", "CHANGED", "MODELS"}}
	for i := range all {
		p := &all[i]
		spec, err := specOf(p)
		if err != nil {
			return err
		}
		wanted, ready, starting := "?", "?", "?"
		if s := p.State; s != nil {
			wanted, ready, starting = count(s.Wanted), count(s.Ready), count(s.Starting)
		}
		names := make([]string, len(spec.Models))
		for i, m := range spec.Models {
			names[i] = string(m)
		}
		rows = append(rows, []string{p.Name, spec.Provider, count(spec.Min), count(spec.Max), wanted, ready, starting, p.Source, since(now, p.UpdatedAt) + " ago", strings.Join(names, ", ")})
	}
	return table(w, rows)
}

func newPoolsGet(p *program) *cobra.Command {
	var (
		conn operatorFlags
		out  output
	)
	cmd := &cobra.Command{
		Use: "get NAME…", Short: "Print pools as YAML",
		Long: `Print pools as YAML, in the form that apply takes. The values of an engine's environment,
and of arguments named as secrets are, are not shown to anybody: they stand as ***, and
stay as they are when that is applied.`,
		Example: "  millrace pools get chat > chat.yaml\n  millrace pools get chat -o json",
		Args:    args(1, 1000, "a pool's name"),
		RunE: func(cmd *cobra.Command, given []string) error {
			return conn.do(cmd, func(ctx context.Context, c *client.Client) error {
				all := make([]client.Pool, 0, len(given))
				for _, name := range given {
					one, err := c.Pool(ctx, name)
					if err != nil {
						return err
					}
					all = append(all, *one)
				}
				return printSpecs(p.out, all, out)
			})
		},
	}
	conn.add(cmd.Flags())
	out.add(cmd.Flags())
	return cmd
}

func printSpecs(w io.Writer, all []client.Pool, out output) error {
	if out.json() {
		if len(all) == 1 {
			return printJSON(w, all[0])
		}
		return printJSON(w, all)
	}
	list := struct {
		Pools []*scale.Pool `yaml:"pools"`
	}{}
	for i := range all {
		spec, err := specOf(&all[i])
		if err != nil {
			return err
		}
		list.Pools = append(list.Pools, spec)
	}
	var text bytes.Buffer
	enc := yaml.NewEncoder(&text)
	enc.SetIndent(2)
	if err := errors.Join(enc.Encode(list), enc.Close()); err != nil {
		return fmt.Errorf("writing the pools as YAML: %w", err)
	}
	_, err := w.Write(text.Bytes())
	return err
}

func newPoolsApply(p *program) *cobra.Command {
	var (
		conn operatorFlags
		out  output
		file string
	)
	cmd := &cobra.Command{
		Use: "apply -f FILE", Short: "Make pools, or change them, as a file describes them",
		Long: `Make the pools of a YAML file, and change those that are there already: what the file
leaves out gets its default. Pools that are not in the file stay. All of the file is
checked before anything is changed. It has the form of the autoscaler's own file:

  pools:
    - name: chat
      models: [llama-3.1-8b]
      provider: process
      engine: {command: [vllm, serve, llama-3.1-8b, --port, "{port}"]}
      shape: {gpus: 1}
      max: 4`,
		Example: "  millrace pools apply -f pools.yaml\n  millrace pools get chat | sed 's/max: 4/max: 8/' | millrace pools apply -f -",
		Args:    args(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if file == "" {
				return usageError(cmd, errors.New("file is missing: name the pools' YAML with -f, or - for the standard input"))
			}
			pools, err := readPools(p.in, file)
			if err != nil {
				return err
			}
			return conn.do(cmd, func(ctx context.Context, c *client.Client) error { return applyPools(ctx, p.out, c, pools, out) })
		},
	}
	cmd.Flags().StringVarP(&file, "file", "f", "", "YAML `file` with pools; - is the standard input")
	conn.add(cmd.Flags())
	out.add(cmd.Flags())
	return cmd
}

// maxPoolsFile bounds a file of pools, in bytes.
const maxPoolsFile = 4 << 20

func readPools(in io.Reader, file string) ([]scale.Pool, error) {
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return nil, fmt.Errorf("reading the pools: %w", err)
		}
		defer f.Close() //nolint:errcheck // it was read
		in = f
	}
	raw, err := io.ReadAll(io.LimitReader(in, maxPoolsFile+1))
	if err != nil {
		return nil, fmt.Errorf("reading the pools: %w", err)
	}
	if len(raw) > maxPoolsFile {
		return nil, fmt.Errorf("reading the pools: %s has more than %d bytes", file, maxPoolsFile)
	}
	pools, err := scale.ParsePools(raw)
	if err != nil {
		return nil, &exitError{exitUsage, fmt.Errorf("%s: %w", file, err)}
	}
	return pools, nil
}

// appliedPool is a pool as it is now, and whether it was made or changed.
type appliedPool struct {
	*client.Pool
	Result string `json:"result"`
}

func applyPools(ctx context.Context, w io.Writer, c *client.Client, pools []scale.Pool, out output) error {
	specs, names := make(map[string]*scale.Pool, len(pools)), make([]string, len(pools))
	for i := range pools {
		names[i] = pools[i].Name
		specs[names[i]] = &pools[i]
	}
	return each(w, out, names, func(name string) (appliedPool, string, error) {
		raw, err := json.Marshal(specs[name])
		if err != nil {
			return appliedPool{}, "", fmt.Errorf("writing the pool %s as JSON: %w", name, err)
		}
		what := "changed"
		now, err := c.ReplacePool(ctx, name, raw)
		var refused *client.Error
		if errors.As(err, &refused) && refused.Status == 404 {
			what = "made"
			now, err = c.CreatePool(ctx, raw)
		}
		if err != nil {
			return appliedPool{}, "", fmt.Errorf("pool %s: %w", name, err)
		}
		return appliedPool{now, what}, name + " " + what, nil
	})
}

// deletedPool is a deleted that has a name for an id.
type deletedPool struct {
	Name    string `json:"name"`
	Object  string `json:"object"`
	Deleted bool   `json:"deleted"`
}

func newPoolsDelete(p *program) *cobra.Command {
	var (
		conn operatorFlags
		out  output
	)
	cmd := &cobra.Command{
		Use: "delete NAME…", Short: "Delete pools", Long: "Delete pools. The autoscaler drains their workers, and stops them.",
		Example: "  millrace pools delete chat",
		Args:    args(1, 1000, "a pool's name"),
		RunE: func(cmd *cobra.Command, given []string) error {
			return conn.do(cmd, func(ctx context.Context, c *client.Client) error {
				return each(p.out, out, given, func(name string) (deletedPool, string, error) {
					return deletedPool{name, "pool", true}, name + " deleted", c.DeletePool(ctx, name)
				})
			})
		},
	}
	conn.add(cmd.Flags())
	out.add(cmd.Flags())
	return cmd
}
