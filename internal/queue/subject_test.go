package queue_test

import (
	"strings"
	"testing"

	"github.com/millrace/millrace/internal/queue"
)

func TestTokens(t *testing.T) {
	t.Parallel()
	for _, row := range []struct{ reason, name, want string }{
		{"plain", "llama-3-8B", "llama-3-8B"},
		{"subject syntax", "a.b*c>d e", "a_2Eb_2Ac_3Ed_20e"},
		{"the escape itself", "a_b", "a_5Fb"},
		{"not ASCII", "ü", "_C3_BC"},
		{"any byte", "\x00\xff", "_00_FF"},
		{"none", "", "_"},
		{"the longest", strings.Repeat("x", 100), strings.Repeat("x", 100)},
		{"too long", strings.Repeat("x", 101), strings.Repeat("x", 60) + "_-c675a2e604b0cd1229c036e3ce0c8742"},
		{"too long once escaped", strings.Repeat("/", 34), strings.Repeat("_2F", 20) + "_-1f62aeee9540aa9022a24e0c65a754e3"},
	} {
		if got := queue.Token(row.name); got != row.want {
			t.Errorf("%s: %q, want %q", row.reason, got, row.want)
		}
	}
}

func FuzzTokenReadsBack(f *testing.F) {
	for _, s := range []string{"", "a", "a_b", "ü.*>", strings.Repeat("_", 50), "_-"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, name string) {
		tok := queue.Token(name)
		if len(tok) == 0 || len(tok) > 100 || strings.ContainsAny(tok, ".*> \t\r\n/\\") {
			t.Fatalf("%q gives %q", name, tok)
		}
		if queue.Hashed(tok) {
			return
		}
		if back, err := queue.Untoken(tok); err != nil || back != name {
			t.Fatalf("%q gives %q, which reads %q, %v", name, tok, back, err)
		}
		_, _ = queue.Untoken(name) // must not panic on what is no token
	})
}
