//go:build unix

package command_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/millrace/millrace/internal/provider"
	"github.com/millrace/millrace/internal/provider/command"
	"github.com/millrace/millrace/internal/provider/providertest"
	"github.com/millrace/millrace/internal/scale"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	natsSecret  = "hunter2hunter2"
	tokenSecret = "hf_sesame_open"
)

func shell(script string) []string {
	return []string{"/bin/sh", "-c", script, "sh", "{pool}", "{worker}"}
}

// cloud is an operator's programs: a worker is a file that holds its state.
const (
	start = `set -e; mkdir -p "$CLOUD/$1"; cd "$CLOUD/$1"
		if [ -e "$2" ]; then exit 0; fi
		if [ "$1" = full ] && [ "$(ls | wc -l)" -ge 2 ]; then echo "no spot left for $MILLRACE_NATS_URL" >&2; exit 75; fi
		if [ "$1" = wrong ]; then echo "no such machine type"; exit 78; fi
		if [ "$1" = broken ]; then echo "failed image of $TOKEN not found" > "$2"; else echo running > "$2"; fi`
	stop = `cd "$CLOUD/$1" 2>/dev/null || exit 0
		[ -e "$2" ] || exit 0
		if [ "$1" = busy ]; then echo stopping > "$CLOUD/$2.new"; mv "$CLOUD/$2.new" "$2"; while [ -e "$2" ] && ! [ -e "$CLOUD/release" ]; do sleep 0.01; done; fi
		rm -f "$2"`
	list = `cd "$CLOUD/$1" 2>/dev/null || exit 0
		for f in *; do state=$(cat "$f" 2>/dev/null); if [ -n "$state" ]; then echo "$f $state"; fi; done`
)

func pool(name, dir string) *scale.Pool {
	return &scale.Pool{
		Name: name, Provider: "command", Max: 5, Drain: scale.Duration(time.Minute),
		Engine:  scale.Engine{Env: map[string]string{"CLOUD": dir, "TOKEN": tokenSecret}},
		Command: &scale.Command{Start: shell(start), Stop: shell(stop), List: shell(list)},
	}
}

func newProvider() *command.Provider {
	return command.New(command.Config{Join: provider.Join{"MILLRACE_NATS_URL": "nats://worker:" + natsSecret + "@127.0.0.1:4222"}}, slog.New(slog.DiscardHandler))
}

func TestConformance(t *testing.T) {
	t.Parallel()
	providertest.Run(t, func(t *testing.T) providertest.Fixture {
		dir := t.TempDir()
		absent, half, none := pool("absent", dir), pool("half", dir), pool("none", dir)
		absent.Command.Start, half.Command.Start, none.Command = []string{"/no/such/program"}, nil, nil
		write := func(t *testing.T, name, text string) {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
				t.Error(err)
			}
		}
		return providertest.Fixture{
			Open:    func(*testing.T) provider.Provider { return newProvider() },
			Secrets: []string{natsSecret, tokenSecret},
			Plain:   pool("plain", dir), Other: pool("other", dir),
			Broken: pool("broken", dir), Reason: "image of *** not found",
			Fail: func(t *testing.T, name string) { write(t, "plain/"+name, "failed") },
			Busy: pool("busy", dir), Release: func(t *testing.T, _ string) { write(t, "release", "") },
			Full: pool("full", dir), Room: 2,
			Invalid: map[string]*scale.Pool{"no command": none, "no start": half, "no such program": absent, "exit code 78": pool("wrong", dir)},
		}
	})
}

func TestAFailedCommandSaysItsLastLine(t *testing.T) {
	t.Parallel()
	p, failing := newProvider(), pool("p", t.TempDir())
	for script, want := range map[string]string{
		"echo one >&2; echo two >&2; exit 3": "running command.start of pool p: exit status 3: two", // each stream is read on its own: of two, either may come last
		"exit 4":                             "running command.start of pool p: exit status 4, and it says nothing",
		"echo " + strings.Repeat("x", 5000) + "y; exit 1": "running command.start of pool p: exit status 1: " + strings.Repeat("x", 299) + "y",
		"kill -9 $$": "running command.start of pool p: signal: killed, and it says nothing",
		`printf 'a\r\nb %s\r\n' "$MILLRACE_NATS_URL"; exit 1`:        "running command.start of pool p: exit status 1: b ***",
		`printf '\377\n'; exit 75`:                                   "the provider has no room: running command.start of pool p: exit code 75: ?",
		"printf '%s' \"$MILLRACE_WORKER in $MILLRACE_POOL\"; exit 1": "running command.start of pool p: exit status 1: w in p",
	} {
		failing.Command.Start = shell(script)
		if err := p.Start(t.Context(), failing, "w", 1); err == nil || err.Error() != want {
			t.Errorf("%.60s: %v, want %s", script, err, want)
		}
	}
}

func TestACommandThatHangsIsKilledWithWhatItStarted(t *testing.T) {
	t.Parallel()
	p, hung := newProvider(), pool("p", t.TempDir())
	hung.Command.Start = shell("echo loading; sleep 1000 & sleep 1000")
	hung.Command.Timeout = scale.Duration(2 * time.Second) // to begin
	err := p.Start(t.Context(), hung, "w", 1)
	if err == nil || !strings.Contains(err.Error(), "it has not ended after 2s") || !strings.HasSuffix(err.Error(), ": loading") || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
}

func TestWhatACommandLeavesRunningDoesNotHoldItUp(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	p := command.New(command.Config{}, slog.New(slog.NewTextHandler(&log, nil)))
	left := pool("p", t.TempDir())
	left.Command.Start = shell("sleep 3 &")
	if err := p.Start(t.Context(), left, "w", 1); err != nil {
		t.Error(err)
	}
	if !strings.Contains(log.String(), "held by what it left running") {
		t.Errorf("the log says %q", log.String())
	}
}

func TestAListThatCannotBeReadIsAnError(t *testing.T) {
	t.Parallel()
	p, odd := newProvider(), pool("p", t.TempDir())
	for out, want := range map[string]string{
		"a running\n\n  b   pending  no node \nc failed\n": "",
		"a":                       `line 1 is "a": it must be a worker's name and its state`,
		"a running\\nb Running":   `line 2 is "b Running": the state must be pending, running, stopping or failed`,
		"a running\\na failed no": `worker "a" is listed twice`,
	} {
		odd.Command.List = []string{"printf", out}
		all, err := p.List(t.Context(), odd)
		switch {
		case want == "":
			wanted := []provider.Instance{
				{Name: "a", State: provider.Running}, {Name: "b", State: provider.Pending, Reason: "no node"}, {Name: "c", State: provider.Failed, Reason: "command.list calls it failed"},
			}
			if d := cmp.Diff(wanted, all); d != "" || err != nil {
				t.Errorf("%v (-want +got):\n%s", err, d)
			}
		case err == nil || err.Error() != "reading what command.list of pool p prints: "+want:
			t.Errorf("%q: %v", out, err)
		}
	}
	odd.Command.List = shell("yes running | head -c 2000000")
	if _, err := p.List(t.Context(), odd); err == nil || !strings.Contains(err.Error(), "more than 1048576 bytes") {
		t.Errorf("too much: %v", err)
	}
}

func TestCommandsDoNotGetTheAutoscalersOwnSettings(t *testing.T) {
	t.Setenv("MILLRACE_DATABASE_URL", "postgres://secret")
	t.Setenv("CLOUD_CREDENTIALS", "mine")
	p, asking := newProvider(), pool("p", t.TempDir())
	asking.Command.List = shell(`echo "w running $MILLRACE_DATABASE_URL,$CLOUD_CREDENTIALS,$MILLRACE_DRAIN"`)
	all, err := p.List(t.Context(), asking)
	if err != nil || len(all) != 1 || all[0].Reason != ",mine,1m0s" {
		t.Errorf("%+v %v", all, err)
	}
}
