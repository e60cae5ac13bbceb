//go:build compose

package compose_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/provider"
	"github.com/millrace/millrace/internal/provider/docker"
	"github.com/millrace/millrace/internal/provider/providertest"
	"github.com/millrace/millrace/internal/scale"
)

const (
	workerImage = "millrace-test-worker:local"
	natsURL     = "nats://user:s3cret-of-the-platform@nats:4222"
	token       = "t0ken-of-the-engine"
)

// dockerfile of a stand-in for worker and engine: it does what the last word of its command says. A busy one goes on after SIGTERM until it gets SIGUSR1.
const dockerfile = `FROM alpine:3.22
ENTRYPOINT ["/bin/sh", "-c", "for mode; do :; done; case $mode in broken) echo first; echo no such model, says $HF_TOKEN; exit 3;; busy) trap : TERM; trap 'exit 0' USR1;; stubborn) trap : TERM;; *) trap 'exit 0' TERM;; esac; while :; do sleep 1000 & wait $!; done", "sh"]
`

// run runs a docker command and returns what it wrote.
func run(t *testing.T, stdin string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(context.WithoutCancel(t.Context()), "docker", args...) // clean-ups run after the test's context has ended
	cmd.Stdin = strings.NewReader(stdin)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		t.Fatalf("docker %s: %v\n%s", strings.Join(args, " "), err, errs.Bytes())
	}
	return out.String()
}

// apart gives each test names of its own on the one engine that all share.
type apart struct {
	provider.Provider
	prefix string
}

func (a apart) List(ctx context.Context, p *scale.Pool) ([]provider.Instance, error) {
	all, err := a.Provider.List(ctx, p)
	for i := range all {
		all[i].Name = strings.TrimPrefix(all[i].Name, a.prefix)
	}
	return all, err
}

func (a apart) Start(ctx context.Context, p *scale.Pool, name string, total int) error {
	return a.Provider.Start(ctx, p, a.prefix+name, total)
}

func (a apart) Stop(ctx context.Context, p *scale.Pool, name string) error {
	return a.Provider.Stop(ctx, p, a.prefix+name)
}

var worlds atomic.Int64

// TestDockerProvider runs the providers' suite against a real engine. A GPU there is none of: that there is no room says Docker itself.
func TestDockerProvider(t *testing.T) {
	t.Parallel()
	run(t, dockerfile, "build", "--quiet", "--tag", workerImage, "-")
	for name, change := range map[string]func(*scale.Pool){"OneContainer": func(*scale.Pool) {}, "EngineInItsOwn": func(p *scale.Pool) { p.Engine.Image = workerImage }} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			providertest.Run(t, func(t *testing.T) providertest.Fixture { return world(t, change) })
		})
	}
}

func world(t *testing.T, change func(*scale.Pool)) providertest.Fixture {
	prefix := fmt.Sprintf("test%d-%d-", time.Now().Unix(), worlds.Add(1))
	pool := func(name, mode string, changes ...func(*scale.Pool)) *scale.Pool {
		p := &scale.Pool{
			Name: prefix + name, Models: []job.Model{"m"}, Provider: "docker", Max: 8, Drain: scale.Duration(2 * time.Second),
			Engine: scale.Engine{Command: []string{mode}, Env: map[string]string{"HF_TOKEN": token}},
			Docker: &scale.Docker{WorkerImage: workerImage},
		}
		for _, change := range changes {
			change(p)
		}
		return p
	}
	oneGPU := func(p *scale.Pool) { p.Shape.GPUs = 1 }
	acts := ""
	if pool("x", "", change).Engine.Image != "" {
		acts = ".engine" // what its command does is done there
	}
	return providertest.Fixture{
		Open: func(t *testing.T) provider.Provider {
			return apart{docker.New(provider.Join{"MILLRACE_NATS_URL": natsURL}, slog.New(slog.DiscardHandler)), prefix}
		},
		Secrets: []string{natsURL, "s3cret-of-the-platform", token},
		Plain:   pool("plain", "plain", change), Other: pool("other", "plain", change),
		Broken: pool("broken", "broken", change), Reason: "exit code 3: no such model, says",
		Fail: func(t *testing.T, name string) { run(t, "", "kill", "millrace-"+prefix+name+acts) },
		Busy: pool("busy", "busy", func(p *scale.Pool) { p.Drain = scale.Duration(time.Minute) }),
		Release: func(t *testing.T, name string) {
			run(t, "", "kill", "--signal=USR1", "millrace-"+prefix+name+".stopping")
		},
		Stubborn: pool("stubborn", "stubborn"),
		Full:     pool("full", "plain", change, oneGPU), Room: 0,
		Invalid: map[string]*scale.Pool{
			"no such network": pool("i1", "plain", change, func(p *scale.Pool) { p.Docker.Network = "nowhere" }),
			"no such volume":  pool("i2", "plain", change, func(p *scale.Pool) { p.Docker.Volumes = []string{"models:relative"} }),
			"no such program": pool("i3", "plain", func(p *scale.Pool) {
				p.Engine.Image, p.Engine.Command = "alpine:3.22", []string{"missing"}
			}),
		},
		Gone: func(t *testing.T, _ *scale.Pool, name string) {
			if left := run(t, "", "ps", "--all", "--quiet", "--filter", "label=dev.millrace.worker="+prefix+name); left != "" {
				t.Errorf("containers are left: %s", left)
			}
		},
	}
}
