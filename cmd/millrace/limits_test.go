package main

import (
	"strings"
	"testing"
)

// TestLimitsOfNothingStopTheStart: before anything is connected, and with the flag and the value named. Where 0 is no limit, it is allowed.
func TestLimitsOfNothingStopTheStart(t *testing.T) {
	t.Parallel()
	worker := []string{"worker", "--engine", "http://x"}
	api := []string{"api"}
	for flag, tt := range map[string]struct {
		command []string
		values  []string
	}{
		"kv-tokens":                {worker, []string{"0", "-1"}},
		"max-concurrency":          {worker, []string{"0", "-1"}},
		"max-attempts":             {worker, []string{"0", "-1"}},
		"max-failures":             {worker, []string{"0", "-1"}},
		"token-budget":             {worker, []string{"0", "-1"}},
		"default-output":           {worker, []string{"0", "-1"}},
		"kv-reserve":               {worker, []string{"0", "-1"}},
		"batch-trickle":            {worker, []string{"-1"}}, // 0 is none
		"drain":                    {worker, []string{"0s", "-1s"}},
		"stall-timeout":            {worker, []string{"0s", "-1s"}},
		"probe-timeout":            {worker, []string{"0s", "-1s"}},
		"session-ttl":              {worker, []string{"0s", "-1s"}},
		"prefix-ttl":               {worker, []string{"0s", "-1s"}},
		"data-parallel":            {worker, []string{"0", "-1"}},
		"max-held":                 {api, []string{"0", "-1"}},
		"max-body":                 {api, []string{"0", "-1"}},
		"max-bodies":               {api, []string{"0", "-1"}},
		"default-deadline":         {api, []string{"0s", "-1s"}},
		"max-deadline":             {api, []string{"0s", "-1s"}},
		"default-run-timeout":      {api, []string{"0s", "-1s"}},
		"drain-timeout":            {api, []string{"0s", "-1s"}},
		"retention":                {api, []string{"0s", "-1s"}},
		"replicas":                 {api, []string{"0", "-1"}},
		"max-queued-jobs":          {api, []string{"-1"}}, // 0 is no limit
		"max-queued-jobs-tenant":   {api, []string{"-1"}},
		"max-queued-jobs-model":    {api, []string{"-1"}},
		"max-queued-bytes":         {api, []string{"-1"}},
		"max-queued-bytes-tenant":  {api, []string{"-1"}},
		"max-queued-bytes-model":   {api, []string{"-1"}},
		"max-queued-tokens":        {api, []string{"-1"}},
		"max-queued-tokens-tenant": {api, []string{"-1"}},
		"max-queued-tokens-model":  {api, []string{"-1"}},
		"max-interactive-wait":     {api, []string{"-1s"}},
	} {
		for _, value := range tt.values {
			t.Run(flag+"="+value, func(t *testing.T) {
				t.Parallel()
				r := millrace(t, nil, "", append(tt.command, "--"+flag+"="+value)...)
				if r.code != exitUsage || !strings.Contains(r.err, flag) || !strings.Contains(r.err, value) {
					t.Errorf("code %d: %s", r.code, r.err)
				}
			})
		}
	}
}
