package config_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"

	"github.com/millrace/millrace/internal/config"
)

type settings struct {
	URL    string
	Drain  time.Duration
	Count  int
	Speed  float64
	On     bool
	Models []string
}

func flags(s *settings) *pflag.FlagSet {
	fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
	fs.StringVar(&s.URL, "nats-url", "nats://default", "")
	fs.DurationVar(&s.Drain, "drain", 30*time.Second, "")
	fs.IntVar(&s.Count, "workers", 1, "")
	fs.Float64Var(&s.Speed, "speed", 1, "")
	fs.BoolVar(&s.On, "pprof", false, "")
	fs.StringSliceVar(&s.Models, "model", nil, "")
	return fs
}

func env(pairs ...string) func(string) (string, bool) {
	return func(name string) (string, bool) {
		for i := 0; i < len(pairs); i += 2 {
			if pairs[i] == name {
				return pairs[i+1], true
			}
		}
		return "", false
	}
}

func write(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "millrace.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestFlagsWinOverEnvironmentWinsOverFileWinsOverDefault(t *testing.T) {
	t.Parallel()
	const file = "nats-url: nats://file\ndrain: 5s\nworkers: 7\n"
	for _, tt := range []struct {
		name string
		args []string
		env  []string
		file string
		want settings
	}{
		{name: "defaults", want: settings{URL: "nats://default", Drain: 30 * time.Second, Count: 1, Speed: 1}},
		{name: "the file", file: file, want: settings{URL: "nats://file", Drain: 5 * time.Second, Count: 7, Speed: 1}},
		{
			name: "the environment over the file", file: file, env: []string{"MILLRACE_NATS_URL", "nats://env", "MILLRACE_WORKERS", "8"},
			want: settings{URL: "nats://env", Drain: 5 * time.Second, Count: 8, Speed: 1},
		},
		{
			name: "the command line over all", file: file, env: []string{"MILLRACE_NATS_URL", "nats://env"}, args: []string{"--nats-url", "nats://flag"},
			want: settings{URL: "nats://flag", Drain: 5 * time.Second, Count: 7, Speed: 1},
		},
		{
			name: "a flag that repeats the default still wins", env: []string{"MILLRACE_WORKERS", "8"}, args: []string{"--workers=1"},
			want: settings{URL: "nats://default", Drain: 30 * time.Second, Count: 1, Speed: 1},
		},
		{
			name: "an empty variable is not set", file: file, env: []string{"MILLRACE_NATS_URL", ""},
			want: settings{URL: "nats://file", Drain: 5 * time.Second, Count: 7, Speed: 1},
		},
		{
			name: "every kind of value", file: "speed: 2.5\npprof: true\nmodel: [a, 'b,c']\n",
			want: settings{URL: "nats://default", Drain: 30 * time.Second, Count: 1, Speed: 2.5, On: true, Models: []string{"a", "b,c"}},
		},
		{
			name: "a list in a variable", env: []string{"MILLRACE_MODEL", "a,b"},
			want: settings{URL: "nats://default", Drain: 30 * time.Second, Count: 1, Speed: 1, Models: []string{"a", "b"}},
		},
		{name: "names of other commands", file: "engine: http://x\n", want: settings{URL: "nats://default", Drain: 30 * time.Second, Count: 1, Speed: 1}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			var got settings
			fs := flags(&got)
			if err := fs.Parse(tt.args); err != nil {
				t.Fatal(err)
			}
			s := config.Sources{Known: []string{"engine"}, Lookup: env(tt.env...)}
			if tt.file != "" {
				s.File = write(t, tt.file)
			}
			if err := config.Load(fs, s); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestErrorsNameTheSettingItsValueAndItsSource(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		env  []string
		file string
		want []string
	}{
		{name: "an unknown name", file: "nats_url: x\n", want: []string{"nats_url", "millrace.yaml", "did you mean nats-url?"}},
		{name: "a name like no other", file: "entirely-else: x\n", want: []string{"entirely-else", "no setting has this name"}},
		{name: "two unknown names", file: "aaaaaaa: 1\nbbbbbbb: 2\n", want: []string{"aaaaaaa", "bbbbbbb"}},
		{name: "not a number", env: []string{"MILLRACE_WORKERS", "many"}, want: []string{"workers", "MILLRACE_WORKERS", `"many"`, "int"}},
		{name: "not a duration", file: "drain: 30\n", want: []string{"drain", `"30"`, "duration"}},
		{name: "a mapping for a value", file: "drain: {a: b}\n", want: []string{"drain"}},
		{name: "a list for a value", file: "drain: [1s]\n", want: []string{"drain", "a list"}},
		{name: "no value", file: "drain:\n", want: []string{"drain", "no value"}},
		{name: "a key twice", file: "drain: 1s\ndrain: 2s\n", want: []string{"drain", "already defined"}},
		{name: "not a mapping", file: "- a\n", want: []string{"millrace.yaml"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s := config.Sources{Lookup: env(tt.env...)}
			if tt.file != "" {
				s.File = write(t, tt.file)
			}
			var got settings
			err := config.Load(flags(&got), s)
			if err == nil {
				t.Fatal("no error")
			}
			for _, want := range tt.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("the error %q does not name %q", err, want)
				}
			}
		})
	}
}

func TestAFileThatIsNotThereIsAnError(t *testing.T) {
	t.Parallel()
	var got settings
	err := config.Load(flags(&got), config.Sources{File: filepath.Join(t.TempDir(), "absent.yaml"), Lookup: env()})
	if err == nil || !strings.Contains(err.Error(), "absent.yaml") {
		t.Errorf("got %v, want an error that names the file", err)
	}
}

func TestAFlagMayHaveVariablesOfItsOwn(t *testing.T) {
	t.Parallel()
	var url string
	fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
	fs.StringVar(&url, "url", "", "")
	fs.Lookup("url").Annotations = map[string][]string{config.EnvAnnotation: {"MILLRACE_URL", "OPENAI_BASE_URL"}}
	if err := config.Load(fs, config.Sources{Lookup: env("OPENAI_BASE_URL", "http://x/v1")}); err != nil {
		t.Fatal(err)
	}
	if url != "http://x/v1" {
		t.Errorf("got %q", url)
	}
}

func TestBoundsNameFieldValueAndBound(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		err  error
		want string
	}{
		{config.Between("workers", 0, 1, 64), "workers is 0: it must be between 1 and 64"},
		{config.Between("workers", 1, 1, 64), ""},
		{config.AtLeast("drain", -time.Second, 0), "drain is -1s: it must be at least 0s"},
		{config.OneOf("durability", "maybe", "always", "relaxed"), `durability is "maybe": it must be one of always, relaxed`},
		{config.OneOf("durability", "always", "always", "relaxed"), ""},
	} {
		got := ""
		if tt.err != nil {
			got = tt.err.Error()
		}
		if got != tt.want {
			t.Errorf("got %q, want %q", got, tt.want)
		}
	}
}
