package scale

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
)

// Hidden stands for what is kept and not shown: a value of Engine.Env, or a secret in the arguments of a command or in Engine.URL.
const Hidden = "***"

// Shown is the pool as everybody may see it: the values of its engine's environment are Hidden, and of its commands the values of arguments whose names say that they are secrets, and the passwords of URLs.
func (p *Pool) Shown() *Pool {
	c := *p
	c.Engine.Env = make(map[string]string, len(p.Engine.Env))
	for name := range p.Engine.Env {
		c.Engine.Env[name] = Hidden
	}
	if p.Command != nil {
		own := *p.Command
		c.Command = &own
	}
	c.Engine.URL, _ = hideWithin(p.Engine.URL)
	for _, of := range c.commands() {
		*of.args, _ = hide(*of.args)
	}
	return &c
}

// Unhide gives what is Hidden the value that it has in old, which may be nil. A *FieldError names what has none there.
func (p *Pool) Unhide(old *Pool) error {
	if old == nil {
		old = &Pool{}
	}
	for _, name := range slices.Sorted(maps.Keys(p.Engine.Env)) {
		if p.Engine.Env[name] != Hidden {
			continue
		}
		value, known := old.Engine.Env[name]
		if !known {
			return notKept("engine.env." + name)
		}
		p.Engine.Env[name] = value
	}
	if strings.Contains(p.Engine.URL, Hidden) {
		if shown, _ := hideWithin(old.Engine.URL); shown != p.Engine.URL {
			return notKept("engine.url")
		}
		p.Engine.URL = old.Engine.URL
	}
	kept := map[string][]string{}
	for _, of := range old.commands() {
		kept[of.field] = *of.args
	}
	for _, of := range p.commands() {
		if err := unhide(of.field, *of.args, kept[of.field]); err != nil {
			return err
		}
	}
	return nil
}

func notKept(field string) *FieldError {
	return bad(field, "is %s, which stands for a value that is kept already, and there is none: give the value", Hidden)
}

// Secrets are the values that Shown hides, in no order.
func (p *Pool) Secrets() []string {
	all := slices.Collect(maps.Values(p.Engine.Env))
	_, ofURL := hideWithin(p.Engine.URL)
	all = append(all, ofURL...)
	for _, of := range p.commands() {
		_, secrets := hide(*of.args)
		all = append(all, slices.Concat(secrets...)...)
	}
	return all
}

// command is one of a pool's commands, by the name of its field.
type command struct {
	field string
	args  *[]string
}

func (p *Pool) commands() []command {
	all := []command{{"engine.command", &p.Engine.Command}}
	if c := p.Command; c != nil {
		all = append(all, command{"command.start", &c.Start}, command{"command.stop", &c.Stop}, command{"command.list", &c.List})
	}
	return all
}

// Names of secrets end so: --api-key, HF_TOKEN, --redis-password; and not --tokenizer, --max-num-batched-tokens, --ssl-keyfile.
const (
	secretName = `[\w.-]*(?:key|token|secret|password|passwd|passphrase|credentials?)`
	// What stands before a name within an argument, besides quotes: a name in these may have its value up to their end.
	beforeName = `(?:^|[\s=,;&|?({])`
	// A shell's words: text that is quoted or bare, and more of either without a blank between. Quotes that nothing ends are a value to the end of the argument.
	quotedText = `'[^']*'|"(?:[^"\\]|\\.)*"`
	wordStart  = `(?:` + quotedText + `|'[^']*$|"[^"]*$|\\[^\n]|`
	wordRest   = `(?:` + quotedText + `|\\[^\n]|[^\s'"\\&;])*`
	firstWord  = wordStart + `[^\s'"\\&;-])` + wordRest
	nextWord   = wordStart + `[^\s'"\\&;|<>()-])` + wordRest
	// secretEnds are the characters at which a secret may end, besides blanks.
	secretEnds = `,;&|()<>\'"`
	// maxText bounds the work of looking for secrets in an argument, in bytes: it grows with the square.
	maxText = 8 << 10
)

var (
	// A flag whose values are the next arguments, and an argument that is a name and its value: NAME=value, --name=value, --env=NAME=value.
	secretFlag  = regexp.MustCompile(`(?i)^--?` + secretName + `$`)
	secretGiven = regexp.MustCompile(`(?is)^(?:--?[\w.-]+=(?:[^\s&?/]*,)?)?(-{0,2})` + secretName + `=(.+)$`)
	// What an argument may hold, as the text of a shell's command does, by its name, the value that follows it, and the characters at which a secret in the value ends.
	secretsWithin = []struct {
		name, value *regexp.Regexp
		ends        string
	}{
		// NAME=value and --name=value, these in quotes, and --name values.
		{regexp.MustCompile(`(?i)` + beforeName + `-{0,2}` + secretName + `=`), regexp.MustCompile(`(?s)^()(` + wordStart + `[^\s'"\\&;])` + wordRest + `)`), secretEnds},
		{regexp.MustCompile(`(?i)'-{0,2}` + secretName + `=`), regexp.MustCompile(`^()([^']+)`), secretEnds},
		{regexp.MustCompile(`(?i)"-{0,2}` + secretName + `=`), regexp.MustCompile(`(?s)^()((?:[^"\\]|\\.)+)`), secretEnds},
		{regexp.MustCompile(`(?i)(?:` + beforeName + `|['"])--?` + secretName), regexp.MustCompile(`(?s)^((?:\\\n|\s)+)(` + firstWord + `(?:(?:\\\n|[ \t])+` + nextWord + `)*)`), secretEnds + " \t\n"},
		// "name": "value".
		{regexp.MustCompile(`(?i)"` + secretName + `"`), regexp.MustCompile(`(?s)^(\s*:\s*")((?:[^"\\]|\\.)+)`), secretEnds},
		// The password of a URL, up to the last @ that may be its end and to the first.
		{regexp.MustCompile(`://[^/\s:@]*:`), regexp.MustCompile(`^()(\S+)@`), secretEnds},
		{regexp.MustCompile(`://[^/\s:@]*:`), regexp.MustCompile(`^()([^/\s@]+)@`), secretEnds},
	}
	shell     = regexp.MustCompile(`(?:^|/)\w*sh$`)
	shellText = regexp.MustCompile(`^-\w*c$`)
)

// hide returns arguments as they may be shown, and the secrets that each of them holds.
func hide(args []string) (shown []string, secrets [][]string) {
	shown, secrets = slices.Clone(args), make([][]string, len(args))
	ofFlag := false
	for i, arg := range args {
		ofFlag = ofFlag && !strings.HasPrefix(arg, "-") || i > 0 && secretFlag.MatchString(args[i-1]) && !strings.HasPrefix(arg, "--")
		if ofFlag {
			if arg != "" {
				shown[i], secrets[i] = Hidden, []string{arg}
			}
			continue
		}
		if m := secretGiven.FindStringSubmatchIndex(arg); m != nil && (m[3] > m[2] || !isShellText(args[:i])) {
			shown[i], secrets[i] = arg[:m[4]]+Hidden, []string{arg[m[4]:]}
			continue
		}
		shown[i], secrets[i] = hideWithin(arg)
	}
	return shown, secrets
}

// isShellText tells whether what follows these arguments is a command as a shell reads it.
func isShellText(args []string) bool {
	return len(args) > 0 && shellText.MatchString(args[len(args)-1]) && slices.ContainsFunc(args, shell.MatchString)
}

// hideWithin hides the secrets that a text holds. Where they overlap they are one, and a text of more than maxText bytes is one as a whole.
func hideWithin(text string) (shown string, secrets []string) {
	if len(text) > maxText {
		return Hidden, []string{text}
	}
	var spans [][2]int
	for _, within := range secretsWithin {
		for _, name := range within.name.FindAllStringIndex(text, -1) {
			m := within.value.FindStringSubmatchIndex(text[name[1]:])
			if m == nil {
				continue
			}
			from, to := name[1]+m[4], name[1]+m[5]
			for from < to && strings.ContainsRune(`'"`, rune(text[from])) {
				from++
			}
			for from < to && strings.ContainsRune(`'"`, rune(text[to-1])) {
				to--
			}
			if from == to {
				continue
			}
			spans = append(spans, [2]int{from, to})
			secrets = append(secrets, text[from:to])
			secrets = append(secrets, strings.FieldsFunc(text[from:to], func(r rune) bool { return strings.ContainsRune(within.ends, r) })...)
		}
	}
	slices.SortFunc(spans, func(a, b [2]int) int { return a[0] - b[0] })
	var b strings.Builder
	at := 0
	for i, span := range spans {
		if i == 0 || span[0] > at {
			b.WriteString(text[at:span[0]] + Hidden)
		}
		at = max(at, span[1])
	}
	return b.String() + text[at:], secrets
}

// unhide puts what is kept in place of each of args that holds Hidden: the argument of old which is shown so.
func unhide(field string, args, old []string) error {
	shown, _ := hide(old)
	kept := map[place][]string{} // in their order
	for i, at := range places(shown) {
		kept[at] = append(kept[at], old[i])
	}
	for i, at := range places(args) {
		if !strings.Contains(args[i], Hidden) {
			continue
		}
		if len(kept[at]) == 0 {
			return notKept(fmt.Sprintf("%s[%d]", field, i))
		}
		args[i], kept[at] = kept[at][0], kept[at][1:]
	}
	return nil
}

// place says which argument is meant: by its text, or if it is Hidden by the last one before it that is not, and how many are Hidden since.
type place struct {
	text   string
	hidden int
}

func places(args []string) []place {
	all := make([]place, len(args))
	for i, arg := range args {
		all[i] = place{text: arg}
		if i > 0 && arg == Hidden {
			all[i] = place{all[i-1].text, all[i-1].hidden + 1}
		}
	}
	return all
}
