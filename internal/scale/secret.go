package scale

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
)

// Hidden stands for what is kept and not shown: a value of Engine.Env, or a secret in the arguments of a command.
const Hidden = "***"

// Shown is the pool as everybody may see it: the values of its engine's environment are Hidden, and of its commands the values of arguments whose names say that they are secrets.
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
	before := map[string][]string{}
	for _, of := range old.commands() {
		before[of.field] = *of.args
	}
	for _, of := range p.commands() {
		if err := unhide(of.field, *of.args, before[of.field]); err != nil {
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
const secretName = `[\w.-]*(?:key|token|secret|password|passwd|passphrase|credentials?)`

var (
	// A flag whose value is the next argument, and one that has it.
	secretFlag  = regexp.MustCompile(`(?i)^--?` + secretName + `$`)
	secretGiven = regexp.MustCompile(`(?is)^(--?` + secretName + `=)(.+)$`)
	// What an argument may hold, as the text of a shell's command does: NAME=value and --name=value, --name value, "name": "value", and the password of a URL. Each is what stands before the value, and the value.
	secretsWithin = []*regexp.Regexp{
		regexp.MustCompile(`(?i)((?:^|[\s'"])-{0,2}` + secretName + `=)('[^']*'|"[^"]*"|[^\s'"]+)`),
		regexp.MustCompile(`(?i)((?:^|[\s'"])--?` + secretName + `\s+)('[^']*'|"[^"]*"|[^\s'"-][^\s'"]*)`),
		regexp.MustCompile(`(?i)("` + secretName + `"\s*:\s*)("[^"]*")`),
		regexp.MustCompile(`(://[^/\s:@]*:)([^/\s@]+)@`),
	}
)

// hide returns arguments as they may be shown, and the secrets that each of them holds.
func hide(args []string) (shown []string, secrets [][]string) {
	shown, secrets = slices.Clone(args), make([][]string, len(args))
	for i, arg := range args {
		if i > 0 && secretFlag.MatchString(args[i-1]) && arg != "" && !strings.HasPrefix(arg, "--") {
			shown[i], secrets[i] = Hidden, []string{arg}
			continue
		}
		if m := secretGiven.FindStringSubmatch(arg); m != nil {
			shown[i], secrets[i] = m[1]+Hidden, []string{m[2]}
			continue
		}
		for _, within := range secretsWithin {
			shown[i] = within.ReplaceAllStringFunc(shown[i], func(text string) string {
				m := within.FindStringSubmatch(text)
				value := strings.Trim(m[2], `'"`)
				secrets[i] = append(secrets[i], value)
				return m[1] + strings.Replace(text[len(m[1]):], value, Hidden, 1)
			})
		}
	}
	return shown, secrets
}

// unhide puts what is kept in place of what is Hidden in args: that of the argument of old which is shown so.
func unhide(field string, args, old []string) error {
	shown, _ := hide(old)
	_, secrets := hide(args)
	used := make([]bool, len(old))
	for i, arg := range args {
		if !slices.Contains(secrets[i], Hidden) {
			continue
		}
		at := -1
		for j := range old {
			if at < 0 && !used[j] && shown[j] == arg && (arg != Hidden || j > 0 && i > 0 && shown[j-1] == args[i-1]) {
				at = j
			}
		}
		if at < 0 {
			return notKept(fmt.Sprintf("%s[%d]", field, i))
		}
		args[i], used[at] = old[at], true
	}
	return nil
}
