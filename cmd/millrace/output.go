package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/pflag"

	"github.com/millrace/millrace/internal/config"
)

// output is how a command prints its answer: for people, or as JSON.
type output string

func (o *output) add(fs *pflag.FlagSet) {
	*o = "text"
	fs.VarP(o, "output", "o", "how to print: text or json")
}

func (o *output) json() bool { return *o == "json" }

func (o *output) String() string { return string(*o) }

func (o *output) Set(s string) error {
	if err := config.OneOf("output", s, "text", "json"); err != nil {
		return err
	}
	*o = output(s)
	return nil
}

func (o *output) Type() string { return "format" }

func printJSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

// deleted is what the API answers where something is removed.
type deleted struct {
	ID      string `json:"id"`
	Object  string `json:"object"`
	Deleted bool   `json:"deleted"`
}

// each does something to each of the names, and prints what came of it: a line for each, or one list as JSON, which also holds what was done before one that failed.
func each[T any](w io.Writer, out output, names []string, do func(name string) (one T, text string, err error)) error {
	done := make([]T, 0, len(names))
	var failed error
	for _, name := range names {
		one, text, err := do(name)
		if err != nil {
			failed = err
			break
		}
		done = append(done, one)
		if !out.json() {
			if _, err := fmt.Fprintln(w, text); err != nil {
				return err
			}
		}
	}
	if out.json() && (len(done) > 0 || failed == nil) {
		if err := printJSON(w, done); err != nil {
			return errors.Join(failed, err)
		}
	}
	return failed
}

// table prints rows in columns; the first row is the heads.
func table(w io.Writer, rows [][]string) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, row := range rows {
		if _, err := fmt.Fprintln(t, strings.Join(row, "\t")); err != nil {
			return err
		}
	}
	return t.Flush()
}

// fact is one line of a page about one thing.
type fact struct{ name, value string }

// facts prints those that have a value.
func facts(w io.Writer, all ...fact) error {
	var rows [][]string
	for _, f := range all {
		if f.value != "" {
			rows = append(rows, []string{f.name, f.value})
		}
	}
	return table(w, rows)
}

// unixTime is a time of the API.
func unixTime(seconds float64) time.Time {
	if seconds == 0 {
		return time.Time{}
	}
	return time.UnixMilli(int64(math.Round(seconds * 1000)))
}

// short prints a length of time with about three digits.
func short(d time.Duration) string {
	switch {
	case d < 0:
		return "0s"
	case d < time.Millisecond:
		return fmt.Sprintf("%.2gms", float64(d)/float64(time.Millisecond))
	case d < time.Second:
		return fmt.Sprintf("%dms", d.Milliseconds())
	case d < time.Minute:
		return fmt.Sprintf("%.1fs", d.Seconds())
	case d < time.Hour:
		return fmt.Sprintf("%dm%02ds", int(d.Minutes()), int(d.Seconds())%60)
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh%02dm", int(d.Hours()), int(d.Minutes())%60)
	default:
		return fmt.Sprintf("%dd", int(d.Hours())/24)
	}
}

// count prints a number with a thin mark at the thousands.
func count[T ~int | ~int64](n T) string {
	s := fmt.Sprint(int64(n))
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// bar draws a share from 0 to 1.
func bar(share float64, width int) string {
	full := int(math.Round(min(max(share, 0), 1) * float64(width)))
	return strings.Repeat("█", full) + strings.Repeat("░", width-full)
}

// plural is n and the noun.
func plural(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return count(n) + " " + noun + "s"
}
