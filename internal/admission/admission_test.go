package admission_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/admission"
	"github.com/millrace/millrace/internal/job"
)

func TestDecide(t *testing.T) {
	t.Parallel()
	const short = `{"model":"m","messages":[{"role":"user","content":"hi"}]}`
	long := `{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("x", 16*1001) + `"}]}`
	image := `{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,` +
		strings.Repeat("A", 16*2000) + `"}},{"type":"text","text":"what is it?"}]}]}`
	many := `{"model":"m","input":["` + strings.Repeat("a", 9000) + `","` + strings.Repeat("b", 9000) + `"]}`
	tests := map[string]struct {
		body     string
		endpoint job.Endpoint
		live     bool
		view     admission.View
		lane     admission.Lane
		code     job.Code
		names    []string
	}{
		"an idle model takes it in the shared lane":       {view: admission.View{Known: true, Leader: true}, lane: admission.Shared},
		"nobody serves the model":                         {view: admission.View{Leader: true}, code: job.CodeModelNotFound, names: []string{`"m"`}},
		"the tenant waits already":                        {view: admission.View{Known: true, Leader: true, TenantWaiting: 1}, lane: admission.TenantLine},
		"the shared lane is deep":                         {view: admission.View{Known: true, Leader: true, Shared: 64}, lane: admission.TenantLine},
		"others of its class wait in lines":               {view: admission.View{Known: true, Leader: true, Lined: 1}, lane: admission.TenantLine},
		"a limit on what runs is held by the line alone":  {view: admission.View{Known: true, Leader: true, Limited: true}, lane: admission.TenantLine},
		"also without a dispatcher":                       {view: admission.View{Known: true, Limited: true}, lane: admission.TenantLine},
		"but a live job is counted where it waits":        {live: true, view: admission.View{Known: true, Limited: true}, lane: admission.Shared},
		"a fast model's lane is deeper":                   {view: admission.View{Known: true, Leader: true, Shared: 64, JobsPerSecond: 100}, lane: admission.Shared},
		"and deep at three seconds of work":               {view: admission.View{Known: true, Leader: true, Shared: 300, JobsPerSecond: 100}, lane: admission.TenantLine},
		"without a dispatcher nobody moves waiting lines": {view: admission.View{Known: true, Shared: 1000, TenantWaiting: 9}, lane: admission.Shared},
		"a live job has no waiting line":                  {live: true, view: admission.View{Known: true, Leader: true, Shared: 1000, TenantWaiting: 9}, lane: admission.Shared},
		"the queue is 80 % full":                          {view: admission.View{Known: true, WorkFill: 0.8}, code: job.CodeQueueFull, names: []string{"80 %"}},
		"a live job does not mind a full durable queue":   {live: true, view: admission.View{Known: true, WorkFill: 0.9}, lane: admission.Shared},
		"the outcomes are 80 % full":                      {live: true, view: admission.View{Known: true, DoneFill: 0.85}, code: job.CodeQueueFull},
		"an unknown model is 404 even when all is full":   {view: admission.View{WorkFill: 1}, code: job.CodeModelNotFound},
		"too long for the largest worker":                 {body: long, view: admission.View{Known: true, Largest: 1000}, code: job.CodeContextLength, names: []string{"1001", "1000"}},
		"too long even when all is full":                  {body: long, view: admission.View{Known: true, Largest: 1000, WorkFill: 1}, code: job.CodeContextLength},
		"just as long as the largest worker":              {body: long, view: admission.View{Known: true, Largest: 1001}, lane: admission.Shared},
		"no worker has said how much it holds":            {body: long, view: admission.View{Known: true}, lane: admission.Shared},
		"no worker can be started for a call": {
			live: true, view: admission.View{Known: true, Unavailable: "no image", NextTry: 39500 * time.Millisecond}, code: job.CodeModelUnavailable, names: []string{`"m"`, "no image. The", "about 40 s"},
		},
		"nor is it known when it is tried again": {live: true, view: admission.View{Known: true, Unavailable: "no image"}, code: job.CodeModelUnavailable, names: []string{"tried again"}},
		"a durable job waits for that":           {view: admission.View{Known: true, Unavailable: "no image"}, lane: admission.Shared},
		"too long even when none can be started": {live: true, body: long, view: admission.View{Known: true, Largest: 1000, Unavailable: "no image"}, code: job.CodeContextLength},
		"an image's bytes are no prompt":         {body: image, view: admission.View{Known: true, Largest: 1000}, lane: admission.Shared},
		"two inputs that fit by themselves":      {body: many, endpoint: job.Embeddings, view: admission.View{Known: true, Largest: 1000}, lane: admission.Shared},
		"one input that does not":                {body: many, endpoint: job.Embeddings, view: admission.View{Known: true, Largest: 500}, code: job.CodeContextLength, names: []string{"562", "500"}},
		"spaces between JSON are no prompt":      {body: short + strings.Repeat(" ", 40_000), view: admission.View{Known: true, Largest: 1000}, lane: admission.Shared},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if tt.body == "" {
				tt.body = short
			}
			if tt.endpoint == "" {
				tt.endpoint = job.ChatCompletions
			}
			o, err := job.ParseObject([]byte(tt.body))
			if err != nil {
				t.Fatal(err)
			}
			got := admission.Decide(admission.Request{Tenant: "t", Model: "m", Endpoint: tt.endpoint, Body: o, Size: int64(len(tt.body)), Live: tt.live}, tt.view)
			if got.Lane != tt.lane || got.Refuse.CodeOf() != tt.code {
				t.Fatalf("got lane %q, refusal %v; want lane %q, code %q", got.Lane, got.Refuse, tt.lane, tt.code)
			}
			for _, name := range tt.names {
				if !strings.Contains(got.Refuse.Message, name) {
					t.Errorf("%q does not name %s", got.Refuse.Message, name)
				}
			}
		})
	}
}

func TestRefusalsAreShort(t *testing.T) {
	t.Parallel()
	d := admission.Decide(admission.Request{Model: job.Model(strings.Repeat("é", 1<<20))}, admission.View{})
	if n := len(d.Refuse.Message); d.Refuse.CodeOf() != job.CodeModelNotFound || n > 1000 {
		t.Errorf("%s in %d bytes", d.Refuse.CodeOf(), n)
	}
}

func TestLeastPromptNeverExceedsWhatIsThere(t *testing.T) {
	t.Parallel()
	text := strings.Repeat("y", 160)
	tests := map[string]struct {
		endpoint job.Endpoint
		body     string
		want     job.Tokens
	}{
		"a text":                         {job.Completions, fmt.Sprintf(`{"prompt":%q}`, text), 10},
		"tokens":                         {job.Completions, `{"prompt":[1,2,3]}`, 3},
		"lists of tokens":                {job.Completions, `{"prompt":[[1,2,3],[4,5]]}`, 3},
		"no prompt":                      {job.Completions, `{}`, 0},
		"a prompt of another type":       {job.Completions, `{"prompt":{"a":1}}`, 0},
		"message texts add up":           {job.ChatCompletions, fmt.Sprintf(`{"messages":[{"content":%q},{"content":[{"text":%q}]}]}`, text, text), 20},
		"what is not text":               {job.ChatCompletions, fmt.Sprintf(`{"messages":[{"role":%q,"content":null,"input_audio":{"data":%q}}]}`, text, text), 0},
		"messages that are not a list":   {job.ChatCompletions, `{"messages":7}`, 0},
		"a response's text":              {job.Responses, fmt.Sprintf(`{"input":%q,"instructions":%q}`, text, text), 20},
		"a response's messages":          {job.Responses, fmt.Sprintf(`{"input":[{"role":"user","content":[{"type":"input_text","text":%q},{"type":"input_image","image_url":"data:x"}]}]}`, text), 10},
		"escapes count as what they are": {job.Completions, `{"prompt":"` + strings.Repeat(`\u0041`, 160) + `"}`, 10},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o, err := job.ParseObject([]byte(tt.body))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, admission.LeastPrompt(tt.endpoint, o)); diff != "" {
				t.Error(diff)
			}
		})
	}
}
