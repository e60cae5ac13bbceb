package main

import (
	"testing"

	"github.com/spf13/pflag"
)

func TestPrefixAffinityIsOnUnlessSwitchedOff(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		args []string
		off  bool
	}{{nil, false}, {[]string{"--prefix-affinity"}, false}, {[]string{"--prefix-affinity=true"}, false}, {[]string{"--prefix-affinity=false"}, true}} {
		var api, worker bool
		fs := pflag.NewFlagSet("", pflag.ContinueOnError)
		addPrefixAffinity(fs, &api, &worker)
		if err := fs.Parse(c.args); err != nil || api != c.off || worker != c.off {
			t.Errorf("%v: off %v and %v, %v", c.args, api, worker, err)
		}
		if got := fs.Lookup("prefix-affinity").DefValue; got != "true" {
			t.Errorf("the default is shown as %q", got)
		}
	}
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	addPrefixAffinity(fs, new(bool))
	if fs.Parse([]string{"--prefix-affinity=perhaps"}) == nil {
		t.Error("what is neither true nor false was taken")
	}
}
