package main

import (
	"strconv"

	"github.com/spf13/pflag"
)

// addPrefixAffinity adds a switch that is on unless it is said to be off. off are the fields that it sets then.
func addPrefixAffinity(fs *pflag.FlagSet, off ...*bool) {
	f := fs.VarPF((*switches)(&off), "prefix-affinity", "", "send prompts that begin alike where that beginning is in the KV cache; calls with a session go to theirs in any case")
	f.NoOptDefVal = "true"
}

// switches are fields that are true when the flag is false.
type switches []*bool

func (s *switches) Set(text string) error {
	on, err := strconv.ParseBool(text)
	if err != nil {
		return err
	}
	for _, off := range *s {
		*off = !on
	}
	return nil
}

func (s *switches) String() string {
	on := true
	for _, off := range *s {
		on = !*off
	}
	return strconv.FormatBool(on)
}

func (s *switches) Type() string { return "bool" }
