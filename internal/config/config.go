// Package config fills a command's flags from the environment and from a YAML file. It knows no role.
//
// A setting has one name. The flag --nats-url is MILLRACE_NATS_URL in the environment and nats-url in the file. The command line wins over the
// environment, the environment over the file, the file over the default. A variable that is set to nothing counts as not set.
package config

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/knadh/koanf/v2"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

// Prefix begins every variable's name.
const Prefix = "MILLRACE_"

// EnvAnnotation is the annotation of a flag that is read from other variables than its own name gives: their names, the first that is set wins.
const EnvAnnotation = "millrace_env"

// Sources of settings.
type Sources struct {
	// File is the path of a YAML file, "" for none.
	File string
	// Known are names that the file may hold besides the flags at hand: those of other commands, so that all can share one file.
	Known []string
	// Lookup reads the environment; nil is os.LookupEnv.
	Lookup func(string) (string, bool)
}

// Error is a setting that cannot be used.
type Error struct {
	// Name of the setting, and where it was found: a variable, or a file.
	Name, Source string
	Err          error
}

func (e *Error) Error() string { return fmt.Sprintf("%s (from %s): %v", e.Name, e.Source, e.Err) }

func (e *Error) Unwrap() error { return e.Err }

// Load sets each flag of fs that the command line left alone.
func Load(fs *pflag.FlagSet, s Sources) error {
	if s.Lookup == nil {
		s.Lookup = os.LookupEnv
	}
	k := koanf.New("\x00") // names are flat: nothing parts them
	origin := make(map[string]string)
	if s.File != "" {
		raw, err := os.ReadFile(s.File)
		if err != nil {
			return fmt.Errorf("reading the configuration: %w", err)
		}
		values, err := parse(raw)
		if err != nil {
			return fmt.Errorf("reading the configuration %s: %w", s.File, err)
		}
		if err := checkNames(fs, values, s); err != nil {
			return err
		}
		for name := range values {
			origin[name] = s.File
		}
		if err := k.Load(layer(values), nil); err != nil {
			return fmt.Errorf("reading the configuration %s: %w", s.File, err)
		}
	}
	env := make(map[string]any)
	fs.VisitAll(func(f *pflag.Flag) {
		if f.Name == "help" || f.Name == "version" {
			return // asked for, never configured; and builds set MILLRACE_VERSION
		}
		for _, name := range Variables(f) {
			if v, ok := s.Lookup(name); ok && v != "" {
				env[f.Name], origin[f.Name] = v, name
				return
			}
		}
	})
	if err := k.Load(layer(env), nil); err != nil {
		return fmt.Errorf("reading the environment: %w", err)
	}
	var errs []error
	fs.VisitAll(func(f *pflag.Flag) {
		if f.Changed || !k.Exists(f.Name) {
			return
		}
		if err := set(fs, f, k.Get(f.Name)); err != nil {
			errs = append(errs, &Error{Name: f.Name, Source: origin[f.Name], Err: err})
		}
	})
	return errors.Join(errs...)
}

// Variables are the names of the environment variables that f is read from.
func Variables(f *pflag.Flag) []string {
	if names := f.Annotations[EnvAnnotation]; len(names) > 0 {
		return names
	}
	return []string{Prefix + strings.ToUpper(strings.ReplaceAll(f.Name, "-", "_"))}
}

// Between checks that lo <= v <= hi.
func Between[T cmp.Ordered](name string, v, lo, hi T) error {
	if v < lo || v > hi {
		return fmt.Errorf("%s is %v: it must be between %v and %v", name, v, lo, hi)
	}
	return nil
}

// AtLeast checks that v >= lo.
func AtLeast[T cmp.Ordered](name string, v, lo T) error {
	if v < lo {
		return fmt.Errorf("%s is %v: it must be at least %v", name, v, lo)
	}
	return nil
}

// OneOf checks that v is one of the values.
func OneOf(name, v string, values ...string) error {
	if !slices.Contains(values, v) {
		return fmt.Errorf("%s is %q: it must be one of %s", name, v, strings.Join(values, ", "))
	}
	return nil
}

// layer is a koanf.Provider of values that are here already.
type layer map[string]any

func (l layer) Read() (map[string]any, error) { return l, nil }

func (layer) ReadBytes() ([]byte, error) { return nil, errors.ErrUnsupported }

// parse reads a YAML mapping. An empty file is an empty mapping; a key that stands twice is an error.
func parse(raw []byte) (map[string]any, error) {
	values := make(map[string]any)
	if err := yaml.Unmarshal(raw, &values); err != nil {
		return nil, err
	}
	return values, nil
}

func checkNames(fs *pflag.FlagSet, values map[string]any, s Sources) error {
	known := slices.Clone(s.Known)
	fs.VisitAll(func(f *pflag.Flag) { known = append(known, f.Name) })
	var errs []error
	for name := range values {
		if slices.Contains(known, name) {
			continue
		}
		err := errors.New("no setting has this name")
		if near := nearest(name, known); near != "" {
			err = fmt.Errorf("no setting has this name: did you mean %s?", near)
		}
		errs = append(errs, &Error{Name: name, Source: s.File, Err: err})
	}
	slices.SortFunc(errs, func(a, b error) int { return cmp.Compare(a.Error(), b.Error()) })
	return errors.Join(errs...)
}

// nearest returns the name that differs from s in a hyphen for an underscore, in case, or in at most two letters; "" if there is none.
func nearest(s string, names []string) string {
	best, least := "", 3
	s = strings.ToLower(strings.ReplaceAll(s, "_", "-"))
	for _, name := range names {
		if d := distance(s, name); d < least {
			best, least = name, d
		}
	}
	return best
}

// distance is the Levenshtein distance in bytes.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			d := diagonal
			if a[i] != b[j] {
				d++
			}
			diagonal = row[j+1]
			row[j+1] = min(d, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}

// set gives f a value from a file or a variable.
func set(fs *pflag.FlagSet, f *pflag.Flag, v any) error {
	if list, ok := v.([]any); ok {
		values := make([]string, len(list))
		for i, item := range list {
			text, err := scalar(item)
			if err != nil {
				return err
			}
			values[i] = text
		}
		slice, ok := f.Value.(pflag.SliceValue)
		if !ok {
			return errors.New("a list stands where one value is wanted")
		}
		f.Changed = true
		return slice.Replace(values)
	}
	text, err := scalar(v)
	if err != nil {
		return err
	}
	if err := fs.Set(f.Name, text); err != nil {
		// The flag's own words name the flag, and its value, once more.
		if inner := errors.Unwrap(err); inner != nil {
			err = inner
		}
		return fmt.Errorf("%q is not a valid %s: %w", text, f.Value.Type(), err)
	}
	return nil
}

func scalar(v any) (string, error) {
	switch v := v.(type) {
	case string:
		return v, nil
	case bool:
		return strconv.FormatBool(v), nil
	case int, int64, uint64:
		return fmt.Sprint(v), nil
	case float64:
		return strconv.FormatFloat(v, 'g', -1, 64), nil
	case nil:
		return "", errors.New("it has no value")
	default:
		return "", fmt.Errorf("a %T stands where one value is wanted", v)
	}
}
