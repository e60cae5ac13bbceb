package scale_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/scale"
)

func TestSecretsAreFoundWhereverTheyStand(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ kept, shown []string }{
		"an empty JSON value":            {[]string{`{"api_key":"","token": "a"}`}, []string{`{"api_key":"","token": "***"}`}},
		"an empty variable":              {[]string{`sh`, `-c`, `HF_TOKEN='' x`}, []string{`sh`, `-c`, `HF_TOKEN='' x`}},
		"a variable in a flag":           {[]string{"--env=HF_TOKEN=a b"}, []string{"--env=HF_TOKEN=***"}},
		"a variable in a list":           {[]string{"--export=ALL,HF_TOKEN=a b"}, []string{"--export=ALL,HF_TOKEN=***"}},
		"a second command":               {[]string{"sh", "-c", "true;HF_TOKEN=a x"}, []string{"sh", "-c", "true;HF_TOKEN=*** x"}},
		"a subshell":                     {[]string{"sh", "-c", "(HF_TOKEN=a x y)"}, []string{"sh", "-c", "(HF_TOKEN=*** x y)"}},
		"a query":                        {[]string{"http://h/?api_key=a&n=1&token=b"}, []string{"http://h/?api_key=***&n=1&token=***"}},
		"several values":                 {[]string{"--api-key", "k1", "k2", "--port", "1"}, []string{"--api-key", "***", "***", "--port", "1"}},
		"several values in a shell":      {[]string{"sh", "-c", "v --api-key k1 k2 \\\n --port 1"}, []string{"sh", "-c", "v --api-key *** \\\n --port 1"}},
		"a value with blanks":            {[]string{"env", "PASSPHRASE=a b c"}, []string{"env", "PASSPHRASE=***"}},
		"a quote in JSON":                {[]string{`{"token":"a\"b","n":1}`}, []string{`{"token":"***","n":1}`}},
		"a variable in quotes":           {[]string{"sh", "-c", `env 'HF_TOKEN=a b' "KEY=c d" x`}, []string{"sh", "-c", `env 'HF_TOKEN=***' "KEY=***" x`}},
		"a password with an at sign":     {[]string{"redis://:p@ss@h"}, []string{"redis://:***@h"}},
		"a password with a slash":        {[]string{"redis://u:p/w@h"}, []string{"redis://u:***@h"}},
		"a token with an at sign":        {[]string{"http://h:80/?token=a@b"}, []string{"http://h:***"}},
		"a long text":                    {[]string{"x", strings.Repeat("://a:key='", 1000)}, []string{"x", "***"}},
		"a value that looks like a flag": {[]string{"--token", "-key", "K"}, []string{"--token", "***", "***"}},
	} {
		p := &scale.Pool{Engine: scale.Engine{Command: c.kept}}
		got := p.Shown()
		if d := cmp.Diff(c.shown, got.Engine.Command); d != "" {
			t.Errorf("%s: (-want +got):\n%s", name, d)
		}
		if err := got.Unhide(p); err != nil || !slices.Equal(got.Engine.Command, c.kept) {
			t.Errorf("%s: kept %q, %v", name, got.Engine.Command, err)
		}
	}
	p := &scale.Pool{Engine: scale.Engine{URL: "http://user:s3cret@h:{port}"}}
	got := p.Shown()
	if got.Engine.URL != "http://user:***@h:{port}" || !slices.Contains(p.Secrets(), "s3cret") {
		t.Errorf("%q, of secrets %q", got.Engine.URL, p.Secrets())
	}
	if err := got.Unhide(p); err != nil || got.Engine.URL != p.Engine.URL {
		t.Errorf("%q, %v", got.Engine.URL, err)
	}
}

func TestEachSecretIsKnownAlone(t *testing.T) {
	t.Parallel()
	p := &scale.Pool{Engine: scale.Engine{Command: []string{
		"--api-key", "k1", "k2", "--env=HF_TOKEN=k3", "--export=ALL,KEY=k4", "http://h/?api_key=k5&token=k6", "redis://:k@7@h", `{"token":"k8"}`,
		"sh", "-c", `(KEY=k9) true;KEY=k10; v --api-key k11 "k12" --x 'A=1 KEY=k13' KEY=k14,B=1`,
	}}}
	for _, secret := range []string{"k1", "k2", "k3", "k4", "k5", "k6", "k@7", "k8", "k9", "k10", "k11", "k12", "k13", "k14"} {
		if !slices.Contains(p.Secrets(), secret) {
			t.Errorf("%s is not among %q", secret, p.Secrets())
		}
	}
}

func TestWhatCannotBeRestoredIsAnError(t *testing.T) {
	t.Parallel()
	old := &scale.Pool{Engine: scale.Engine{URL: "http://u:p@h", Command: []string{"--token", "a", "b", "--key", "c", "d"}}}
	for field, next := range map[string]scale.Engine{
		"engine.url":        {URL: "http://u:***@other"},
		"engine.command[1]": {Command: []string{"--new-token", "***"}},
		"engine.command[3]": {Command: []string{"--token", "***", "***", "***"}},
		"engine.command[0]": {Command: []string{`{"n":***""}`}},
	} {
		var f *scale.FieldError
		if err := (&scale.Pool{Engine: next}).Unhide(old); !errors.As(err, &f) || f.Field != field {
			t.Errorf("%s: %v", field, err)
		}
	}
	next := &scale.Pool{Engine: scale.Engine{Command: []string{"--token", "***", "--key", "***", "***"}}}
	if err := next.Unhide(old); err != nil || !slices.Equal(next.Engine.Command, []string{"--token", "a", "--key", "c", "d"}) {
		t.Errorf("one value less: %q, %v", next.Engine.Command, err)
	}
}

func TestWhatIsShownStandsForWhatIsKept(t *testing.T) {
	t.Parallel()
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 0))
	// In each # stands for a secret of its own.
	arguments := [][]string{
		{"--api-key", "#"},
		{"--api-key", "#", "#"},
		{"--token", "-key", "#"},
		{"--token", "-#"},
		{"--hf_token=# #"},
		{"HF_TOKEN=#,#;#&#"},
		{"PASSPHRASE=# '# \"#"},
		{"--env=HF_TOKEN=# #"},
		{"--export=ALL,HF_TOKEN=# #"},
		{`{"api_key":"","token":"#\"# \\","a":1}`},
		{"redis://:#@#/#@h"},
		{"http://h:80/?api_key=#&n=1&token=#@#"},
		{"--token", ""},
		{"--token", "***"},
		{"***"},
		{"a***b"},
		{"--port", "1"},
		{"serve"},
		{"-key"},
		{"KEY="},
	}
	texts := []string{
		"HF_TOKEN=#", "true;HF_TOKEN=#;", "(HF_TOKEN=# x)", "A=1 KEY='# #' x", `KEY="#\"# #" x`, `KEY=#"# #"'#'# x`, "'KEY=# #'", `"KEY=# #"`, "x --api-key # #", `x --api-key "# #" '#' --x`,
		"x --token \\\n # \\\n --x", `'{"token": "# #"}'`, "redis://u:#@#/#@h", "'http://h/?token=#&key=#'", "&&", "|", "x***", "KEY=''", `KEY=""`, "echo it\\'s",
	}
	n := 0
	fill := func(text string) string {
		for strings.Contains(text, "#") {
			n++
			text = strings.Replace(text, "#", fmt.Sprintf("s3cret%d", n), 1)
		}
		return text
	}
	for range 5000 {
		var args []string
		for range r.IntN(7) {
			if r.IntN(3) > 0 {
				for _, arg := range arguments[r.IntN(len(arguments))] {
					args = append(args, fill(arg))
				}
				continue
			}
			var words []string
			for range 1 + r.IntN(4) {
				words = append(words, fill(texts[r.IntN(len(texts))]))
			}
			args = append(args, "sh", "-c", strings.Join(words, " "))
		}
		p := &scale.Pool{Engine: scale.Engine{Command: args, URL: fill([]string{"", "http://h", "http://u:#@h", "http://u:#@#/#@h"}[r.IntN(4)])}}
		shown := p.Shown()
		if text := fmt.Sprintf("%q %q", shown.Engine.Command, shown.Engine.URL); strings.Contains(text, "s3cret") {
			t.Fatalf("seed %d: %q %q is shown as %s", seed, args, p.Engine.URL, text)
		}
		if err := shown.Unhide(p); err != nil || !slices.Equal(shown.Engine.Command, args) || shown.Engine.URL != p.Engine.URL {
			t.Fatalf("seed %d: of %q %q is kept %q %q, %v", seed, args, p.Engine.URL, shown.Engine.Command, shown.Engine.URL, err)
		}
	}
}
