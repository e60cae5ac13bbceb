package scale_test

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/scale"
)

func seconds(n int) scale.Duration { return scale.Duration(time.Duration(n) * time.Second) }

func TestPoolsAreReadWithTheirDefaults(t *testing.T) {
	t.Parallel()
	got, err := scale.ParsePools([]byte(`
pools:
  - name: chat
    models: [llama, llama-long]
    provider: process
    max: 4
    engine: {command: [vllm, serve, --port, "{port}", -n, 8]}
  - name: big
    models: [qwen]
    provider: docker
    min: 1
    max: 2
    spare: 1
    shape: {tensor_parallel: 4, pipeline_parallel: 2}
    engine:
      image: vllm/vllm-openai:latest
      url: http://engine:8000
      env: {TOKEN: s3cret, N: 1}
    idle: 90s
    cooldown: 1h
    headroom: -1
    drain: 30m
    target_wait: {interactive: 500ms, batch: 1h}
    schedule: ["weekdays 08:00-19:00 at least 2"]
    timezone: Europe/Berlin
    tokens_per_second: 1200
    cold_start: 45s
    docker: {network: millrace, volumes: ["models:/models"], shm_size: 1073741824}
  - name: k8s
    models: [a]
    provider: kubernetes
    max: 1
    kubernetes: {kind: Deployment, name: worker}
  - name: own
    models: [b]
    provider: command
    max: 1
    headroom: 0.5
    command: {start: [start, "{worker}"], stop: [stop], list: [list]}
`))
	if err != nil {
		t.Fatal(err)
	}
	wait := func(interactive scale.Duration, standard, batch int) map[job.Class]scale.Duration {
		return map[job.Class]scale.Duration{job.Interactive: interactive, job.Standard: seconds(standard), job.Batch: seconds(batch)}
	}
	nothing := scale.Engine{Command: []string{}, Env: map[string]string{}}
	base := scale.Pool{
		Idle: seconds(300), Cooldown: seconds(300), Headroom: 0.2, Drain: seconds(600), ColdStart: seconds(60), Timezone: "UTC", Schedule: []scale.Entry{}, TargetWait: wait(seconds(2), 30, 600),
		Engine: nothing, Max: 1,
	}
	chat, k8s, own := base, base, base
	chat.Name, chat.Models, chat.Provider, chat.Max = "chat", []job.Model{"llama", "llama-long"}, "process", 4
	chat.Engine = scale.Engine{Command: []string{"vllm", "serve", "--port", "{port}", "-n", "8"}, URL: "http://127.0.0.1:{port}", Env: map[string]string{}}
	k8s.Name, k8s.Models, k8s.Provider, k8s.Kubernetes = "k8s", []job.Model{"a"}, "kubernetes", &scale.Kubernetes{Kind: "Deployment", Name: "worker"}
	own.Name, own.Models, own.Provider, own.Headroom = "own", []job.Model{"b"}, "command", 0.5
	own.Command = &scale.Command{Start: []string{"start", "{worker}"}, Stop: []string{"stop"}, List: []string{"list"}, Timeout: seconds(120)}
	want := []scale.Pool{chat, {
		Name: "big", Models: []job.Model{"qwen"}, Provider: "docker", Shape: scale.Shape{GPUs: 8, TensorParallel: 4, PipelineParallel: 2},
		Engine: scale.Engine{Command: []string{}, Image: "vllm/vllm-openai:latest", URL: "http://engine:8000", Env: map[string]string{"TOKEN": "s3cret", "N": "1"}},
		Min:    1, Max: 2, Spare: 1, Idle: seconds(90), Cooldown: seconds(3600), Headroom: -1, Drain: seconds(1800), TargetWait: wait(scale.Duration(500*time.Millisecond), 30, 3600),
		Schedule: []scale.Entry{"weekdays 08:00-19:00 at least 2"}, Timezone: "Europe/Berlin", TokensPerSecond: 1200, ColdStart: seconds(45),
		Docker: &scale.Docker{WorkerImage: "millrace:local", Network: "millrace", Volumes: []string{"models:/models"}, ShmSize: 1 << 30},
	}, k8s, own}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got)\n%s", d)
	}
	// What is kept as JSON is read as it was.
	for i := range got {
		raw, err := json.Marshal(&got[i])
		if err != nil {
			t.Fatal(err)
		}
		again, err := scale.ParsePool(raw)
		if err != nil {
			t.Fatalf("%s: %v", raw, err)
		}
		if d := cmp.Diff(&got[i], again); d != "" {
			t.Errorf("%s: (-kept +read)\n%s", raw, d)
		}
	}
}

// TestZeroIsNotADefault: what is left out, or null, gets its default, and 0 is none, also when it is kept and read again.
func TestZeroIsNotADefault(t *testing.T) {
	t.Parallel()
	const start = `{"name":"a","models":["m"],"provider":"command","max":1,"command":{"start":["a"],"stop":["b"],"list":["c"],"timeout":"9s"}`
	p, err := scale.ParsePool([]byte(start + `,"idle":"0s","cooldown":"0s","headroom":0,"target_wait":{"interactive":"0s"}}`))
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if p.Idle != 0 || p.Cooldown != 0 || p.Headroom != 0 || p.TargetWait[job.Interactive] != 0 || p.TargetWait[job.Standard] != seconds(30) || p.Drain != seconds(600) || p.Command.Timeout != seconds(9) {
			t.Errorf("%+v", p)
		}
		raw, err := json.Marshal(p)
		if err != nil {
			t.Fatal(err)
		}
		if p, err = scale.ParsePool(raw); err != nil {
			t.Fatal(err)
		}
	}
	if p, err = scale.ParsePool([]byte(start + `,"idle":null,"cooldown":null,"headroom":null,"target_wait":null,"drain":null,"cold_start":null}`)); err != nil {
		t.Fatal(err)
	}
	if p.Idle != seconds(300) || p.Cooldown != seconds(300) || p.Headroom != 0.2 || p.TargetWait[job.Interactive] != seconds(2) || p.Drain != seconds(600) || p.ColdStart != seconds(60) {
		t.Errorf("%+v", p)
	}
}

func TestWhatProvidersTakeIsAccepted(t *testing.T) {
	t.Parallel()
	for _, more := range []string{
		`"provider":"docker","engine":{"image":"i","url":"http://engine:{port}/v1"},"docker":{"volumes":["models:/models","/a b:/c:ro","x:/y:ro,z"]}`,
		`"provider":"process","engine":{"command":["e"],"url":"https://user:***@[::1]:{port}/x?key=***"}`,
		`"provider":"kubernetes","kubernetes":{"kind":"Deployment","name":"a.b-c","namespace":"n-1"}`,
	} {
		if _, err := scale.ParsePool([]byte(`{"name":"a","models":["m"],"max":1,` + more + `}`)); err != nil {
			t.Errorf("%s: %v", more, err)
		}
	}
}

// TestAPoolsJSON: what is kept outlives a build.
func TestAPoolsJSON(t *testing.T) {
	t.Parallel()
	p, err := scale.ParsePool([]byte(`{"name":"a","models":["m"],"provider":"process","max":1,"shape":{"gpus":2},"engine":{"command":["e","\ud83d\ude00\/"]},"min":null}`))
	if err != nil {
		t.Fatal(err)
	}
	raw, err := json.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	const want = `{"name":"a","models":["m"],"provider":"process","shape":{"gpus":2,"tensor_parallel":1,"pipeline_parallel":1},"engine":{"command":["e","😀/"],"image":"","url":"http://127.0.0.1:{port}","env":{}},` +
		`"min":0,"max":1,"spare":0,"idle":"5m","cooldown":"5m","headroom":0.2,"drain":"10m","target_wait":{"batch":"10m","interactive":"2s","standard":"30s"},"schedule":[],"timezone":"UTC","tokens_per_second":0,"cold_start":"1m"}`
	if string(raw) != want {
		t.Errorf("got  %s\nwant %s", raw, want)
	}
}

func TestPoolsMayShareFields(t *testing.T) {
	t.Parallel()
	got, err := scale.ParsePools([]byte(`
pools:
  - &base {name: a, models: [m], provider: process, max: 4, engine: {command: [e]}}
  - <<: *base
    name: b
    models: [n]
`))
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != 2 || got[1].Name != "b" || got[1].Max != 4 || got[1].Models[0] != "n" {
		t.Errorf("%+v", got)
	}
	if got, err := scale.ParsePools([]byte("pools: []")); err != nil || len(got) != 0 {
		t.Errorf("none: %v %v", got, err)
	}
}

func TestAWrongPoolIsRefusedByField(t *testing.T) {
	t.Parallel()
	const (
		start   = `"name":"p","models":["m"],"max":3`
		process = start + `,"provider":"process","engine":{"command":["e"]}`
	)
	for name, c := range map[string]struct {
		json, field string
		says        []string
	}{
		"no name":                          {`"models":["m"]`, "name", []string{`is ""`}},
		"a name in capitals":               {`"name":"Chat"`, "name", []string{`"Chat"`, "lower-case"}},
		"a name that is too long":          {`"name":"` + strings.Repeat("a", 41) + `"`, "name", []string{"40"}},
		"a name that ends in a dash":       {`"name":"a-"`, "name", []string{`"a-"`}},
		"a name that is none":              {`"name":{}`, "name", []string{"must be text"}},
		"a name that is a number":          {`"name":5`, "name", []string{`is 5: it must be text, as "5"`}},
		"a model that is a number":         {`"name":"p","models":["m",1.5]`, "models[1]", []string{"must be text"}},
		"a zone that is a truth":           {process + `,"timezone":true`, "timezone", []string{"must be text"}},
		"a schedule of numbers":            {process + `,"schedule":[8]`, "schedule[0]", []string{"must be text"}},
		"no models":                        {`"name":"p","max":1`, "models", []string{"0 entries"}},
		"a model twice":                    {`"name":"p","models":["m","m"]`, "models", []string{`"m" twice`}},
		"a model without a name":           {`"name":"p","models":[""]`, "models", []string{"1 to 256"}},
		"a model that is null":             {`"name":"p","models":[null]`, "models[0]", []string{"must be text"}},
		"models that are no list":          {`"name":"p","models":"m"`, "models", []string{"must be a list"}},
		"no max":                           {`"name":"p","models":["m"],"provider":"process"`, "max", []string{"is missing", "from 1 to"}},
		"a max of none":                    {`"name":"p","models":["m"],"max":0`, "max", []string{"is 0", "from 1 to"}},
		"a fraction of a worker":           {process + `,"min":1.5`, "min", []string{`"1.5"`, "whole number"}},
		"a number in quotes":               {process + `,"min":"1"`, "min", []string{"whole number"}},
		"a number too large":               {process + `,"min":99999999999999999999`, "min", []string{"whole number"}},
		"a min below none":                 {process + `,"min":-1`, "min", []string{"is -1", "from 0 to 3"}},
		"a min over max":                   {process + `,"min":4`, "min", []string{"is 4", "from 0 to 3, the pool's max"}},
		"a spare over max":                 {process + `,"spare":4`, "spare", []string{"is 4"}},
		"too few GPUs":                     {process + `,"shape":{"gpus":1,"tensor_parallel":2}`, "shape.gpus", []string{"is 1", "need 2"}},
		"a shape below none":               {process + `,"shape":{"tensor_parallel":-2}`, "shape.tensor_parallel", []string{"is -2"}},
		"a cooldown below none":            {process + `,"cooldown":"-1s"`, "cooldown", []string{"is -1s"}},
		"a drain that is a number":         {process + `,"drain":10`, "drain", []string{`"10"`, "90s or 5m"}},
		"a headroom below none":            {process + `,"headroom":-0.5`, "headroom", []string{"is -0.5", "0 (or -1) is none"}},
		"no number at all":                 {process + `,"headroom":"much"`, "headroom", []string{`"much"`, "a number"}},
		"a rate below none":                {process + `,"tokens_per_second":-1`, "tokens_per_second", []string{"is -1"}},
		"an unknown class":                 {process + `,"target_wait":{"urgent":"1s"}`, "target_wait.urgent", []string{"interactive, standard and batch"}},
		"a wait below none":                {process + `,"target_wait":{"batch":"-1s"}`, "target_wait.batch", []string{"is -1s"}},
		"an unknown zone":                  {process + `,"timezone":"Berlin"`, "timezone", []string{`"Berlin"`, "Europe/Berlin"}},
		"the zone of each machine":         {process + `,"timezone":"Local"`, "timezone", []string{`"Local"`}},
		"a schedule over max":              {process + `,"schedule":["08:00-09:00 at least 4"]`, "schedule[0]", []string{"from 1 to 3"}},
		"a schedule of none":               {process + `,"schedule":["08:00-09:00 at least 1","08:00-09:00 at least 0"]`, "schedule[1]", []string{"from 1 to 3"}},
		"a schedule of words":              {process + `,"schedule":["always at least 3"]`, "schedule[0]", []string{"mon-fri 08:00-19:00 at least 3"}},
		"a schedule of no day":             {process + `,"schedule":["monday 08:00-09:00 at least 1"]`, "schedule[0]", []string{`"monday" is no day`}},
		"a schedule of no time":            {process + `,"schedule":["08:00-24:01 at least 1"]`, "schedule[0]", []string{"00:00 to 24:00"}},
		"a schedule of no length":          {process + `,"schedule":["08:00-08:00 at least 1"]`, "schedule[0]", []string{"00:00-24:00"}},
		"an unknown field":                 {process + `,"maxx":1`, "maxx", []string{"is not known", "a pool has name, models"}},
		"a field in capitals":              {process + `,"Min":1`, "Min", []string{"is not known"}},
		"an unknown field below":           {start + `,"provider":"process","engine":{"comand":["e"]}`, "engine.comand", []string{"engine has command, image, url, env"}},
		"an unknown provider":              {start + `,"provider":"slurm"`, "provider", []string{`"slurm"`, "process, docker, kubernetes, command"}},
		"no provider":                      {start, "provider", []string{`is ""`}},
		"a process without a program":      {start + `,"provider":"process"`, "engine.command", []string{"is missing"}},
		"a program without a name":         {start + `,"provider":"process","engine":{"command":[""]}`, "engine.command", []string{"the program"}},
		"an image for a process":           {start + `,"provider":"process","engine":{"command":["e"],"image":"i"}`, "engine.image", []string{"docker"}},
		"a section of another":             {process + `,"docker":{}`, "docker", []string{"the pool's is process"}},
		"a container of nothing":           {start + `,"provider":"docker"`, "engine.image", []string{"is missing"}},
		"shared memory below none":         {start + `,"provider":"docker","engine":{"image":"i"},"docker":{"shm_size":-1}`, "docker.shm_size", []string{"is -1"}},
		"no deployment":                    {start + `,"provider":"kubernetes"`, "kubernetes", []string{"kind and name"}},
		"an unknown kind":                  {start + `,"provider":"kubernetes","kubernetes":{"kind":"deployment","name":"x"}`, "kubernetes.kind", []string{"Deployment, StatefulSet, LeaderWorkerSet"}},
		"a kind without a name":            {start + `,"provider":"kubernetes","kubernetes":{"kind":"StatefulSet"}`, "kubernetes.name", []string{"names the StatefulSet"}},
		"a drain of none":                  {process + `,"drain":"0s"`, "drain", []string{"is 0s", "more than 0s"}},
		"a cold start of none":             {process + `,"cold_start":"0s"`, "cold_start", []string{"is 0s", "more than 0s"}},
		"a time-out of none":               {start + `,"provider":"command","command":{"start":["a"],"stop":["b"],"list":["c"],"timeout":"0s"}`, "command.timeout", []string{"is 0s"}},
		"a URL that is none":               {start + `,"provider":"process","engine":{"command":["e"],"url":"not a url"}`, "engine.url", []string{`"not a url"`, "http://127.0.0.1:{port}"}},
		"a URL without its scheme":         {start + `,"provider":"process","engine":{"command":["e"],"url":"localhost:8000"}`, "engine.url", []string{"localhost:8000"}},
		"a URL of no host":                 {start + `,"provider":"process","engine":{"command":["e"],"url":"http://:{port}"}`, "engine.url", []string{"{port}"}},
		"a volume that is mounted nowhere": {start + `,"provider":"docker","engine":{"image":"i"},"docker":{"volumes":["a:/b","xx"]}`, "docker.volumes[1]", []string{`"xx"`, "name:/path"}},
		"a volume at no path":              {start + `,"provider":"docker","engine":{"image":"i"},"docker":{"volumes":["a:b"]}`, "docker.volumes[0]", []string{`"a:b"`}},
		"a workload in capitals":           {start + `,"provider":"kubernetes","kubernetes":{"kind":"Deployment","name":"Foo_Bar"}`, "kubernetes.name", []string{`"Foo_Bar"`, "lower-case"}},
		"a namespace in capitals":          {start + `,"provider":"kubernetes","kubernetes":{"kind":"Deployment","name":"a","namespace":"N"}`, "kubernetes.namespace", []string{`"N"`}},
		"no commands":                      {start + `,"provider":"command"`, "command", []string{"start, stop and list"}},
		"one command less":                 {start + `,"provider":"command","command":{"start":["a"],"stop":["b"]}`, "command.list", []string{"is missing"}},
		"a time-out below none":            {start + `,"provider":"command","command":{"start":["a"],"stop":["b"],"list":["c"],"timeout":"-1s"}`, "command.timeout", []string{"is -1s"}},
		"a variable without a name":        {start + `,"provider":"process","engine":{"command":["e"],"env":{"a b":"c"}}`, "engine.env", []string{`"a b"`}},
		"a variable that is a list":        {start + `,"provider":"process","engine":{"command":["e"],"env":{"A":["c"]}}`, "engine.env.A", []string{"must be text"}},
		"a variable that is null":          {start + `,"provider":"process","engine":{"command":["e"],"env":{"A":null}}`, "engine.env.A", []string{"must be text"}},
		"environments that are none":       {start + `,"provider":"process","engine":{"command":["e"],"env":"A=1"}`, "engine.env", []string{"must be an object"}},
	} {
		_, err := scale.ParsePool([]byte("{" + c.json + "}"))
		var f *scale.FieldError
		if !errors.As(err, &f) || f.Field != c.field {
			t.Errorf("%s: %v", name, err)
			continue
		}
		for _, w := range c.says {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%s: %v does not say %q", name, err, w)
			}
		}
		if f.Unknown != strings.Contains(f.Problem, "is not known: a pool") && f.Unknown != strings.Contains(f.Problem, "engine has") {
			t.Errorf("%s: unknown is %v", name, f.Unknown)
		}
	}
	for _, text := range []string{"", "[]", "null", "7", `{"name":"a"`, `{} {}`, `{"a":'b'}`} {
		if p, err := scale.ParsePool([]byte(text)); err == nil {
			t.Errorf("%s was read as %+v", text, p)
		}
	}
}

func TestAWrongFileIsRefusedByLine(t *testing.T) {
	t.Parallel()
	const good = "  - {name: a, models: [m], provider: process, max: 1, engine: {command: [e]}}\n"
	for name, c := range map[string]struct {
		yaml string
		says []string
	}{
		"nothing, as of a file that is being written": {"", []string{"pools: []"}},
		"no list":               {"pools:", []string{"pools: []"}},
		"a bare list":           {"- {name: a}", []string{"pools:"}},
		"another field":         {"pools: []\nmodels: []", []string{"line 2", `"models"`}},
		"the list twice":        {"pools: []\npools: []", []string{"line 2"}},
		"two documents":         {"pools: []\n---\npools: []", []string{"more than one document"}},
		"no YAML":               {"pools: [", []string{"reading YAML: ", "line 1"}},
		"a name twice":          {"pools:\n" + good + good, []string{"line 3", `"a" already, at line 2`}},
		"a model of two pools":  {"pools:\n" + good + strings.Replace(good, "name: a", "name: b", 1), []string{"line 3", `pool "b"`, `model "m" is of the pool "a"`}},
		"a field twice":         {"pools:\n  - name: a\n    name: b", []string{"line 3", `pool "a": name is there twice`}},
		"an unknown field":      {"pools:\n  - name: a\n    engine:\n      comand: [x]", []string{"line 4", `pool "a"`, "engine.comand is not known"}},
		"a value out of bounds": {"pools:\n  - name: a\n    models: [m]\n    max: 0", []string{"line 2", `pool "a": max is 0`}},
		"a pool that is text":   {"pools:\n  - chat", []string{"line 2", "a pool without a name", "must be an object"}},
		"what is merged in":     {"pools:\n  - <<: {maxx: 1}", []string{"line 2", "maxx is not known"}},
	} {
		_, err := scale.ParsePools([]byte(c.yaml))
		if err == nil {
			t.Errorf("%s was taken", name)
			continue
		}
		for _, w := range c.says {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%s: %v does not say %q", name, err, w)
			}
		}
	}
}

func TestAnEnvironmentIsNotShown(t *testing.T) {
	t.Parallel()
	read := func(env string) *scale.Pool {
		p, err := scale.ParsePool([]byte(`{"name":"p","models":["m"],"max":1,"provider":"process","engine":{"command":["e"],"env":` + env + `}}`))
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	old := read(`{"TOKEN":"s3cret","A":"1"}`)
	raw, err := json.Marshal(old.Shown())
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(raw), "s3cret") || !strings.Contains(string(raw), `"env":{"A":"***","TOKEN":"***"}`) {
		t.Error(string(raw))
	}
	if old.Engine.Env["TOKEN"] != "s3cret" {
		t.Error("showing it changed it")
	}
	next := read(`{"TOKEN":"***","A":"2","B":"3"}`)
	if err := next.Unhide(old); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(map[string]string{"TOKEN": "s3cret", "A": "2", "B": "3"}, next.Engine.Env); d != "" {
		t.Error(d)
	}
	for _, before := range []*scale.Pool{old, nil} {
		var f *scale.FieldError
		if err := read(`{"NEW":"***"}`).Unhide(before); !errors.As(err, &f) || f.Field != "engine.env.NEW" {
			t.Error(err)
		}
	}
}

func TestLengthsOfTimeAreText(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{"300s": "5m", "90s": "1m30s", "2h": "2h", "1h30m": "1h30m", "3601s": "1h0m1s", "500ms": "500ms", "0": "0s", "-60s": "-1m"} {
		var d scale.Duration
		if err := d.UnmarshalText([]byte(text)); err != nil || d.String() != want {
			t.Errorf("%s: %v, %v", text, d, err)
		}
	}
}

func TestTheScheduleAsksForWorkers(t *testing.T) {
	t.Parallel()
	const cold = time.Minute
	for name, c := range map[string]struct {
		schedule []scale.Entry
		zone     string
		now      string // RFC 3339; 2026-03-02 is a Monday
		want     int
	}{
		"within":                              {[]scale.Entry{"mon-fri 08:00-19:00 at least 3"}, "UTC", "2026-03-02T12:00:00Z", 3},
		"before":                              {[]scale.Entry{"mon-fri 08:00-19:00 at least 3"}, "UTC", "2026-03-02T07:58:59Z", 0},
		"a cold start before":                 {[]scale.Entry{"mon-fri 08:00-19:00 at least 3"}, "UTC", "2026-03-02T07:59:00Z", 3},
		"the last moment":                     {[]scale.Entry{"mon-fri 08:00-19:00 at least 3"}, "UTC", "2026-03-02T18:59:59Z", 3},
		"after":                               {[]scale.Entry{"mon-fri 08:00-19:00 at least 3"}, "UTC", "2026-03-02T19:00:00Z", 0},
		"another day":                         {[]scale.Entry{"mon-fri 08:00-19:00 at least 3"}, "UTC", "2026-03-01T12:00:00Z", 0},
		"weekdays":                            {[]scale.Entry{"weekdays 08:00-19:00 at least 3"}, "UTC", "2026-03-06T12:00:00Z", 3},
		"weekends":                            {[]scale.Entry{"Weekends 08:00-19:00 at least 3"}, "UTC", "2026-03-07T12:00:00Z", 3},
		"no day is each":                      {[]scale.Entry{"8:00-19:00 at least 3"}, "UTC", "2026-03-01T12:00:00Z", 3},
		"daily":                               {[]scale.Entry{"daily 08:00 - 19:00  at least 3"}, "UTC", "2026-03-04T12:00:00Z", 3},
		"a list":                              {[]scale.Entry{"mon,wed,fri-sun 08:00-19:00 at least 3"}, "UTC", "2026-03-04T12:00:00Z", 3},
		"not in the list":                     {[]scale.Entry{"mon,wed,fri-sun 08:00-19:00 at least 3"}, "UTC", "2026-03-05T12:00:00Z", 0},
		"a range over the week's end":         {[]scale.Entry{"sat-mon 08:00-19:00 at least 3"}, "UTC", "2026-03-02T12:00:00Z", 3},
		"over midnight, before it":            {[]scale.Entry{"fri 22:00-06:00 at least 2"}, "UTC", "2026-03-06T23:00:00Z", 2},
		"over midnight, after it":             {[]scale.Entry{"fri 22:00-06:00 at least 2"}, "UTC", "2026-03-07T05:59:59Z", 2},
		"over midnight, over":                 {[]scale.Entry{"fri 22:00-06:00 at least 2"}, "UTC", "2026-03-07T06:00:00Z", 0},
		"over midnight, on its day's morning": {[]scale.Entry{"fri 22:00-06:00 at least 2"}, "UTC", "2026-03-06T05:00:00Z", 0},
		"a whole day":                         {[]scale.Entry{"mon 00:00-24:00 at least 1"}, "UTC", "2026-03-02T23:59:59Z", 1},
		"a day that begins soon":              {[]scale.Entry{"tue 00:00-01:00 at least 1"}, "UTC", "2026-03-02T23:59:30Z", 1},
		"the most counts":                     {[]scale.Entry{"daily 00:00-24:00 at least 1", "mon 11:00-13:00 at least 5", "mon 11:00-13:00 at least 2"}, "UTC", "2026-03-02T12:00:00Z", 5},
		"another zone":                        {[]scale.Entry{"mon 08:00-19:00 at least 3"}, "America/New_York", "2026-03-02T23:59:00Z", 3},
		"another zone, not yet":               {[]scale.Entry{"mon 08:00-19:00 at least 3"}, "America/New_York", "2026-03-02T12:00:00Z", 0},
		"summer":                              {[]scale.Entry{"daily 08:00-09:00 at least 3"}, "Europe/Berlin", "2026-03-29T06:30:00Z", 3},
		"winter":                              {[]scale.Entry{"daily 08:00-09:00 at least 3"}, "Europe/Berlin", "2026-03-28T07:30:00Z", 3},
		"the night that is an hour shorter":   {[]scale.Entry{"sat 22:00-06:00 at least 3"}, "Europe/Berlin", "2026-03-29T03:59:00Z", 3},
		"and its end":                         {[]scale.Entry{"sat 22:00-06:00 at least 3"}, "Europe/Berlin", "2026-03-29T04:00:00Z", 0},
		"none":                                {nil, "UTC", "2026-03-02T12:00:00Z", 0},
	} {
		now, err := time.Parse(time.RFC3339, c.now)
		if err != nil {
			t.Fatal(err)
		}
		p := scale.Pool{Schedule: c.schedule, Timezone: c.zone}
		if got := p.AtLeast(now, now.Add(cold)); got != c.want {
			t.Errorf("%s: at least %d, not %d", name, got, c.want)
		}
	}
	p := scale.Pool{Schedule: []scale.Entry{"mon 08:00-09:00 at least 3"}}
	now := time.Date(2026, 3, 2, 8, 30, 0, 0, time.UTC)
	if got := p.AtLeast(now, now.Add(-time.Hour)); got != 3 {
		t.Errorf("with an end before now: %d", got)
	}
	if got := p.AtLeast(now.Add(-72*time.Hour), now); got != 3 {
		t.Errorf("within days: %d", got)
	}
}

func FuzzParsePools(f *testing.F) {
	f.Add("pools:\n  - {name: a, models: [m], provider: process, max: 1, engine: {command: [e]}, schedule: ['fri 22:00-06:00 at least 1'], timezone: Europe/Berlin}\n")
	f.Add("pools: [&a {name: b, <<: *a}]")
	f.Add("pools: [{target_wait: {batch: 1h}, docker: {shm_size: 1}, min: 1.5}]")
	f.Fuzz(func(t *testing.T, text string) {
		pools, err := scale.ParsePools([]byte(text))
		if err != nil {
			return
		}
		for i := range pools {
			raw, err := json.Marshal(&pools[i])
			if err != nil {
				t.Fatal(err)
			}
			again, err := scale.ParsePool(raw)
			if err != nil {
				t.Fatalf("%q: what was read is refused: %v", text, err)
			}
			if d := cmp.Diff(&pools[i], again); d != "" {
				t.Fatalf("%q: (-read +read again)\n%s", text, d)
			}
			pools[i].AtLeast(time.Unix(1772366400, 0), time.Unix(1772366460, 0))
		}
	})
}

func TestSecretsInCommandsAreNotShown(t *testing.T) {
	t.Parallel()
	read := func(args ...string) *scale.Pool {
		raw, err := json.Marshal(args)
		if err != nil {
			t.Fatal(err)
		}
		p, err := scale.ParsePool([]byte(`{"name":"p","models":["m"],"max":1,"provider":"process","engine":{"command":` + string(raw) + `}}`))
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	for name, c := range map[string]struct{ kept, shown []string }{
		"the next argument": {[]string{"vllm", "--api-key", "s3cret", "--port", "{port}"}, []string{"vllm", "--api-key", "***", "--port", "{port}"}},
		"the same argument": {[]string{"vllm", "--api-key=s3cret and more", "--hf_token=s3cret"}, []string{"vllm", "--api-key=***", "--hf_token=***"}},
		"several of a name": {[]string{"x", "--api-key", "s3cret1", "--api-key", "s3cret2", "--password", "-s3cret"}, []string{"x", "--api-key", "***", "--api-key", "***", "--password", "***"}},
		"a variable":        {[]string{"env", "HF_TOKEN=s3cret", "A=1", "vllm"}, []string{"env", "HF_TOKEN=***", "A=1", "vllm"}},
		"a shell's command": {
			[]string{"sh", "-c", `HF_TOKEN=s3cret API_KEY='s3cret 2' exec vllm serve m --api-key "s3cret" --port {port} --db-password=s3cret`},
			[]string{"sh", "-c", `HF_TOKEN=*** API_KEY='***' exec vllm serve m --api-key "***" --port {port} --db-password=***`},
		},
		"JSON":           {[]string{"x", "--config", `{"a": 1, "auth_token": "s3cret", "tokens": "2"}`}, []string{"x", "--config", `{"a": 1, "auth_token": "***", "tokens": "2"}`}},
		"a URL":          {[]string{"x", "--cache", "redis://me:s3cret@host:6379", "http://host:80/"}, []string{"x", "--cache", "redis://me:***@host:6379", "http://host:80/"}},
		"no secrets":     {[]string{"vllm", "--tokenizer", "t", "--max-num-batched-tokens", "8192", "--ssl-keyfile", "k", "--key", "--x", "***"}, []string{"vllm", "--tokenizer", "t", "--max-num-batched-tokens", "8192", "--ssl-keyfile", "k", "--key", "--x", "***"}},
		"nothing at all": {[]string{"vllm", "--api-key", ""}, []string{"vllm", "--api-key", ""}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			kept := read(c.kept...)
			shown := kept.Shown().Engine.Command
			if d := cmp.Diff(c.shown, shown); d != "" {
				t.Errorf("shown (-want +got):\n%s", d)
			}
			if d := cmp.Diff(c.kept, kept.Engine.Command); d != "" {
				t.Errorf("showing it changed it:\n%s", d)
			}
			// What was shown stands for what is kept, also beside what is new.
			next := read(append([]string{shown[0], "--new"}, shown[1:]...)...)
			if err := next.Unhide(kept); err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(append([]string{c.kept[0], "--new"}, c.kept[1:]...), next.Engine.Command); d != "" {
				t.Errorf("kept (-want +got):\n%s", d)
			}
			for _, secret := range kept.Secrets() {
				if !strings.Contains(secret, "s3cret") {
					t.Errorf("%q is a secret", secret)
				}
			}
			var f *scale.FieldError
			if err := read(shown...).Unhide(nil); len(kept.Secrets()) > 0 && (!errors.As(err, &f) || !strings.HasPrefix(f.Field, "engine.command[")) {
				t.Errorf("without anything kept: %v", err)
			}
		})
	}
	// A secret of another argument's is not what is meant.
	var f *scale.FieldError
	if err := read("x", "--hf-token", "***").Unhide(read("x", "--api-key", "s3cret")); !errors.As(err, &f) || f.Field != "engine.command[2]" {
		t.Error(err)
	}
	// The operator's own commands are no other.
	own := &scale.Pool{Command: &scale.Command{Start: []string{"run", "--token=s3cret"}, Stop: []string{"stop"}, List: []string{"list"}}}
	shown := own.Shown()
	if got := shown.Command.Start[1]; got != "--token=***" || own.Command.Start[1] != "--token=s3cret" {
		t.Errorf("%q, of %q", got, own.Command.Start)
	}
	if err := shown.Unhide(own); err != nil || shown.Command.Start[1] != "--token=s3cret" {
		t.Errorf("%q, %v", shown.Command.Start, err)
	}
}
