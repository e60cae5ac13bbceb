package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"

	"github.com/millrace/millrace/internal/provider"
)

// settingsOf are the variables that the workers of a command line get.
func settingsOf(t *testing.T, env map[string]string, args ...string) provider.Join {
	t.Helper()
	p := &program{lookup: lookup(env)}
	root := newRoot(p)
	var join provider.Join
	cmd, _, err := root.Find(args)
	if err != nil {
		t.Fatal(err)
	}
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		join, err = workerSettings(cmd, p)
		return err
	}
	root.SetArgs(args)
	if err := root.ExecuteContext(t.Context()); err != nil {
		t.Fatal(err)
	}
	return join
}

func TestWorkersGetTheSettingsOfWorkersThatAreSetHere(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "millrace.yaml")
	if err := os.WriteFile(file, []byte("stall-timeout: 20s\nlisten: 127.0.0.1:1\nmax-attempts: 7\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	env := map[string]string{
		"MILLRACE_CONFIG": file, "MILLRACE_ENGINE_API_KEY": "key", "MILLRACE_BLOB_URL": "dir:/files", "MILLRACE_MAX_ATTEMPTS": "8",
		// These are other processes' own, or differ from worker to worker.
		"MILLRACE_DATABASE_URL": "sqlite:/x", "MILLRACE_API_KEY": "secret", "MILLRACE_ADMIN_KEY": "secret", "MILLRACE_NATS_URL": "nats://one:1", "MILLRACE_METRICS_LISTEN": "0.0.0.0:1", "MILLRACE_NAME": "me", "MILLRACE_GPUS": "0",
	}
	want := provider.Join{
		"MILLRACE_STALL_TIMEOUT": "20s", "MILLRACE_ENGINE_API_KEY": "key", "MILLRACE_BLOB_URL": "dir:/files", "MILLRACE_MAX_ATTEMPTS": "8", "MILLRACE_WORK_MAX_BYTES": "1GiB", "MILLRACE_MAX_ENGINE_EXITS": "3",
	}
	if d := cmp.Diff(want, settingsOf(t, env, "autoscaler", "--work-max-bytes", "1GiB")); d != "" {
		t.Errorf("of an autoscaler (-want +got):\n%s", d)
	}
	want = provider.Join{"MILLRACE_ORDER": "shortest", "MILLRACE_MAX_ENGINE_EXITS": "0", "MILLRACE_LOG_LEVEL": "debug"}
	if d := cmp.Diff(want, settingsOf(t, map[string]string{"MILLRACE_MAX_ENGINE_EXITS": "0"}, "up", "--order", "shortest", "--listen", "127.0.0.1:1", "--log-level", "debug")); d != "" {
		t.Errorf("of millrace up (-want +got):\n%s", d)
	}
}

func TestUpRefusesPoolsThatItCannotRun(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"pools: [{name: a, models: [m], max: 0}]":                                                               "max is 0",
		"pools: [{name: a, models: [m], provider: docker, max: 1, engine: {command: [x], image: y}}]":           "pool a in FILE has the provider docker, and `millrace up` runs workers as processes alone",
		"pools: [{name: a, models: [m], provider: process, max: 1, engine: {command: [x], env: {KEY: '***'}}}]": `pool "a": engine.env.KEY is ***`,
		"": "pools",
	} {
		file := filepath.Join(t.TempDir(), "pools.yaml")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		r := millrace(t, nil, "", "up", "--pool", file, "--data", t.TempDir(), "--listen", "127.0.0.1:0", "--metrics-listen", "off")
		if r.code != exitUsage || !strings.Contains(strings.ReplaceAll(r.err, file, "FILE"), want) {
			t.Errorf("%q: %+v", text, r)
		}
	}
}
