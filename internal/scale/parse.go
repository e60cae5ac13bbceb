package scale

import (
	"bytes"
	"cmp"
	"encoding"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net/url"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"

	"github.com/millrace/millrace/internal/job"
)

// FieldError is what is wrong with a field of a pool, by the field's name in YAML and JSON.
type FieldError struct {
	Field, Problem string
	// Unknown: there is no such field.
	Unknown bool
}

func (e *FieldError) Error() string { return e.Field + " " + e.Problem }

func bad(field, format string, args ...any) *FieldError {
	return &FieldError{Field: field, Problem: fmt.Sprintf(format, args...)}
}

// ParsePools reads YAML of the form "pools: [...]": unknown fields, duplicate names and values out of bounds are errors that name the line or the field. The pools have their defaults.
func ParsePools(raw []byte) ([]Pool, error) {
	root, err := document(raw)
	if err != nil {
		return nil, err
	}
	var list *yaml.Node
	if root != nil && root.Kind == yaml.MappingNode {
		for i := 0; i < len(root.Content); i += 2 {
			if key := root.Content[i]; key.Value != "pools" {
				return nil, fmt.Errorf("line %d: there is no field %.100q here: pools are listed under the one field \"pools\"", key.Line, key.Value)
			}
			if list != nil {
				return nil, fmt.Errorf("line %d: pools is there twice", root.Content[i].Line)
			}
			list = root.Content[i+1]
		}
	}
	if list == nil || list.Kind != yaml.SequenceNode {
		// A file that is being written may be empty for a moment: that must not be taken for no pools.
		return nil, errors.New(`there is no list of pools: write them under "pools:", or "pools: []" for none`)
	}
	pools := make([]Pool, 0, len(list.Content))
	byName, byModel, byWorkload := map[string]int{}, map[job.Model]string{}, map[string]string{}
	for _, node := range list.Content {
		p, line, err := readPool(node)
		if err != nil {
			return nil, fmt.Errorf("line %d: %s: %w", line, poolAt(node), err)
		}
		if line, twice := byName[p.Name]; twice {
			return nil, fmt.Errorf("line %d: there is a pool %q already, at line %d", node.Line, p.Name, line)
		}
		byName[p.Name] = node.Line
		for _, m := range p.Models {
			if other, twice := byModel[m]; twice {
				return nil, fmt.Errorf("line %d: pool %q: the model %q is of the pool %q: a model has one pool, for there is no telling whose workers its work will come to", node.Line, p.Name, string(m), other)
			}
			byModel[m] = p.Name
		}
		if k := p.Kubernetes; k != nil {
			workload := strings.ToLower(strings.Join([]string{k.Context, k.Namespace, k.Kind, k.Name}, "/"))
			if other, twice := byWorkload[workload]; twice {
				return nil, fmt.Errorf("line %d: pool %q: its workload is that of the pool %q: each would undo what the other does", node.Line, p.Name, other)
			}
			byWorkload[workload] = p.Name
		}
		pools = append(pools, *p)
	}
	return pools, nil
}

// ParsePool reads one pool's JSON as ParsePools does. What is wrong with a field is a *FieldError.
func ParsePool(raw []byte) (*Pool, error) {
	// JSON's escapes are not quite YAML's, so they are taken out first.
	var v any
	in := json.NewDecoder(bytes.NewReader(raw))
	in.UseNumber()
	if err := in.Decode(&v); err != nil {
		return nil, fmt.Errorf("reading a pool: not valid JSON: %w", err)
	}
	if _, err := in.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("reading a pool: not valid JSON: there is something after the object")
	}
	var plain bytes.Buffer
	out := json.NewEncoder(&plain)
	out.SetEscapeHTML(false)
	if err := out.Encode(v); err != nil {
		return nil, fmt.Errorf("reading a pool: %w", err)
	}
	node, err := document(plain.Bytes())
	if err != nil {
		return nil, err
	}
	p, _, err := readPool(node)
	return p, err
}

// document reads YAML that must be one document; nil is an empty one.
func document(raw []byte) (*yaml.Node, error) {
	dec := yaml.NewDecoder(bytes.NewReader(raw))
	var doc, more yaml.Node
	err := dec.Decode(&doc)
	if errors.Is(err, io.EOF) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading YAML: %w", plainYAML(err))
	}
	if err := dec.Decode(&more); !errors.Is(err, io.EOF) {
		return nil, errors.New("reading YAML: there is more than one document")
	}
	return doc.Content[0], nil
}

// plainYAML is an error without the library's name in front.
func plainYAML(err error) error { return errors.New(strings.TrimPrefix(err.Error(), "yaml: ")) }

// poolAt names the pool that a node holds, as well as it can.
func poolAt(node *yaml.Node) string {
	for i := 0; node.Kind == yaml.MappingNode && i < len(node.Content); i += 2 {
		if node.Content[i].Value == "name" {
			return fmt.Sprintf("pool %.100q", node.Content[i+1].Value)
		}
	}
	return "a pool without a name"
}

// readPool reads, checks and completes one pool. line is where it is wrong.
func readPool(node *yaml.Node) (p *Pool, line int, err error) {
	if node == nil {
		return nil, 0, bad("pool", "is empty")
	}
	if at, err := new(fitting).fits(node, reflect.TypeFor[Pool](), ""); err != nil {
		return nil, at.Line, err
	}
	p = unset()
	if err := node.Decode(p); err != nil {
		return nil, node.Line, plainYAML(err)
	}
	p.complete()
	if err := p.check(); err != nil {
		return nil, node.Line, err
	}
	return p, 0, nil
}

var readsText = reflect.TypeFor[encoding.TextUnmarshaler]()

// fitting counts the nodes that were looked at: an alias may stand for itself.
type fitting struct{ nodes int }

// maxNodes bounds the nodes of one pool, those that aliases stand for included.
const maxNodes = 10_000

// fits finds what of a node does not fit a type, which decoding would leave out, or bend until it fits: fields that the type has not, those that are there twice, fractions for whole numbers. It returns the node
// that is wrong. A null is as if it were not there.
func (f *fitting) fits(n *yaml.Node, t reflect.Type, path string) (*yaml.Node, error) {
	if f.nodes++; f.nodes > maxNodes {
		return n, bad(orPool(path), "has more than %d values, or holds itself", maxNodes)
	}
	for n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if n.Kind == yaml.ScalarNode && n.Tag == "!!null" {
		return nil, nil
	}
	if reflect.PointerTo(t).Implements(readsText) {
		v, _ := reflect.New(t).Interface().(encoding.TextUnmarshaler)
		if n.Kind != yaml.ScalarNode {
			return n, bad(path, "must be text")
		}
		if err := v.UnmarshalText([]byte(n.Value)); err != nil {
			return n, bad(path, "%v", err)
		}
		return nil, nil
	}
	switch t.Kind() {
	case reflect.Struct:
		return f.fitsStruct(n, t, path)
	case reflect.Map:
		if n.Kind != yaml.MappingNode {
			return n, bad(path, "must be an object")
		}
		return eachField(n, path, func(key, value *yaml.Node, path string) (*yaml.Node, error) { return f.fitsItem(value, t.Elem(), path) })
	case reflect.Slice:
		if n.Kind != yaml.SequenceNode {
			return n, bad(path, "must be a list")
		}
		for i, item := range n.Content {
			if at, err := f.fitsItem(item, t.Elem(), fmt.Sprintf("%s[%d]", path, i)); err != nil {
				return at, err
			}
		}
		return nil, nil
	}
	if n.Kind != yaml.ScalarNode {
		return n, bad(path, "must be %s", wanted(t))
	}
	switch t.Kind() {
	case reflect.Int, reflect.Int64:
		if n.Tag != "!!int" || n.Decode(reflect.New(t).Interface()) != nil {
			return n, bad(path, "is %.100q: it must be %s", n.Value, wanted(t))
		}
	case reflect.Float64:
		if n.Tag != "!!int" && n.Tag != "!!float" {
			return n, bad(path, "is %.100q: it must be %s", n.Value, wanted(t))
		}
	case reflect.Bool:
		if n.Tag != "!!bool" {
			return n, bad(path, "is %.100q: it must be %s", n.Value, wanted(t))
		}
	case reflect.String:
		if n.Tag == "!!int" || n.Tag == "!!float" || n.Tag == "!!bool" {
			return n, bad(path, "is %.100s: it must be text, as %q", n.Value, n.Value)
		}
	}
	return nil, nil
}

// fitsItem is fits for an item of a list or a map, which may not be null. The words of commands and the values of variables are text also where they look like a number.
func (f *fitting) fitsItem(n *yaml.Node, t reflect.Type, path string) (*yaml.Node, error) {
	if n.Kind == yaml.ScalarNode && n.Tag == "!!null" {
		return n, bad(path, "must be %s", wanted(t))
	}
	if t == reflect.TypeFor[string]() && (n.Kind == yaml.ScalarNode || n.Kind == yaml.AliasNode && n.Alias.Kind == yaml.ScalarNode) {
		return nil, nil
	}
	return f.fits(n, t, path)
}

func wanted(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Int, reflect.Int64:
		return "a whole number"
	case reflect.Float64:
		return "a number"
	case reflect.Bool:
		return "true or false"
	}
	return "text"
}

func (f *fitting) fitsStruct(n *yaml.Node, t reflect.Type, path string) (*yaml.Node, error) {
	if n.Kind != yaml.MappingNode {
		return n, bad(orPool(path), "must be an object")
	}
	types, names := map[string]reflect.Type{}, make([]string, 0, t.NumField())
	for field := range t.Fields() {
		name, _, _ := strings.Cut(field.Tag.Get("yaml"), ",")
		types[name] = field.Type
		names = append(names, name)
	}
	return eachField(n, path, func(key, value *yaml.Node, path string) (*yaml.Node, error) {
		ft, known := types[key.Value]
		switch {
		case key.Tag == "!!merge": // what is merged in may be any of the fields
			if value.Kind == yaml.SequenceNode {
				for _, one := range value.Content {
					if at, err := f.fits(one, t, path); err != nil {
						return at, err
					}
				}
				return nil, nil
			}
			return f.fits(value, t, path)
		case !known:
			err := bad(path, "is not known: %s has %s", orPool(strings.TrimSuffix(strings.TrimSuffix(path, key.Value), ".")), strings.Join(names, ", "))
			err.Unknown = true
			return key, err
		}
		return f.fits(value, ft, path)
	})
}

func orPool(path string) string {
	if path == "" {
		return "a pool"
	}
	return path
}

// eachField calls f for the fields of a mapping, none of which may be there twice.
func eachField(n *yaml.Node, path string, f func(key, value *yaml.Node, path string) (*yaml.Node, error)) (*yaml.Node, error) {
	seen := map[string]bool{}
	for i := 0; i < len(n.Content); i += 2 {
		key, inner := n.Content[i], n.Content[i].Value
		if key.Kind != yaml.ScalarNode {
			return key, bad(orPool(path), "has a field whose name is not text")
		}
		if path != "" {
			inner = path + "." + inner
		}
		if key.Tag == "!!merge" {
			inner = path
		}
		if seen[key.Value] {
			return key, bad(inner, "is there twice")
		}
		seen[key.Value] = true
		if at, err := f(key, n.Content[i+1], inner); err != nil {
			return at, err
		}
	}
	return nil, nil
}

// noMax is the max of a pool that names none.
const noMax = math.MinInt

// unset has the defaults of the fields in which zero is a value of its own.
func unset() *Pool {
	return &Pool{Max: noMax, Idle: Duration(5 * time.Minute), Cooldown: Duration(5 * time.Minute), Headroom: 0.2, Drain: Duration(10 * time.Minute), ColdStart: Duration(time.Minute)}
}

// UnmarshalYAML reads a section, with the default of what it leaves out.
func (c *Command) UnmarshalYAML(node *yaml.Node) error {
	type plain Command
	read := plain{Timeout: Duration(2 * time.Minute)}
	if err := node.Decode(&read); err != nil {
		return err
	}
	*c = Command(read)
	return nil
}

// complete gives the other fields that are zero their defaults.
func (p *Pool) complete() {
	if p.Shape.GPUs == 0 && (p.Shape.TensorParallel > 0 || p.Shape.PipelineParallel > 0) {
		p.Shape.GPUs = max(1, p.Shape.TensorParallel) * max(1, p.Shape.PipelineParallel)
	}
	if p.Shape.GPUs > 0 {
		orDefault(&p.Shape.TensorParallel, 1)
		orDefault(&p.Shape.PipelineParallel, 1)
	}
	if len(p.Engine.Command) > 0 || p.Engine.Image != "" {
		orDefault(&p.Engine.URL, "http://127.0.0.1:{port}")
	}
	orDefault(&p.Timezone, "UTC")
	wait := map[job.Class]Duration{job.Interactive: Duration(2 * time.Second), job.Standard: Duration(30 * time.Second), job.Batch: Duration(10 * time.Minute)}
	maps.Copy(wait, p.TargetWait)
	p.TargetWait = wait
	if p.Provider == "docker" {
		if p.Docker == nil {
			p.Docker = new(Docker)
		}
		orDefault(&p.Docker.WorkerImage, "millrace:local")
	}
	// Lists are shown as lists also where there is nothing in them.
	if p.Schedule == nil {
		p.Schedule = []Entry{}
	}
	if p.Engine.Command == nil {
		p.Engine.Command = []string{}
	}
	if p.Engine.Env == nil {
		p.Engine.Env = map[string]string{}
	}
}

// orDefault puts def into *field if it is zero.
func orDefault[T comparable](field *T, def T) {
	var zero T
	if *field == zero {
		*field = def
	}
}

// Bounds of what is named and set.
const (
	maxPoolName  = 40
	maxModels    = 100
	maxModelName = 256
	maxWorkers   = 10_000
	maxGPUs      = 1024
	maxTime      = Duration(30 * 24 * time.Hour)
)

var (
	poolName = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]*[a-z0-9])?$`)
	envName  = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)
	// placeholder stands in an engine's command and URL for what is known when it is started.
	placeholder = regexp.MustCompile(`\{[a-z_]+\}`)
	// volume is one of Docker's: what is mounted, where, and how.
	volume = regexp.MustCompile(`^([A-Za-z0-9][A-Za-z0-9_.-]*|/[^:]*):/[^:]*(:[a-zA-Z,]+)?$`)
	// objectName and namespaceName are what Kubernetes takes as such.
	objectName    = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*$`)
	namespaceName = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]*[a-z0-9])?$`)
)

// check returns a *FieldError if the pool cannot be one.
func (p *Pool) check() error {
	if len(p.Name) > maxPoolName || !poolName.MatchString(p.Name) {
		return bad("name", "is %.100q: it must be 1 to %d lower-case letters, digits and dashes, the first and the last no dash", p.Name, maxPoolName)
	}
	for _, check := range []func() error{p.checkModels, p.checkNumbers, p.checkTimes, p.checkSchedule, p.checkEngine, p.checkProvider} {
		if err := check(); err != nil {
			return err
		}
	}
	return nil
}

func (p *Pool) checkModels() error {
	if len(p.Models) == 0 || len(p.Models) > maxModels {
		return bad("models", "has %d entries: it must name 1 to %d models", len(p.Models), maxModels)
	}
	for i, m := range p.Models {
		switch {
		case m == "" || utf8.RuneCountInString(string(m)) > maxModelName:
			return bad("models", "holds %.100q: a model's name has 1 to %d characters", string(m), maxModelName)
		case slices.Contains(p.Models[:i], m):
			return bad("models", "holds %.100q twice", string(m))
		}
	}
	return nil
}

func (p *Pool) checkNumbers() error {
	if p.Max == noMax {
		return bad("max", "is missing: it is how many workers there may be, from 1 to %d", maxWorkers)
	}
	for _, f := range []struct {
		name         string
		value        int
		least, most  int
		becauseOfMax bool
	}{
		{"max", p.Max, 1, maxWorkers, false},
		{"min", p.Min, 0, p.Max, true},
		{"spare", p.Spare, 0, p.Max, true},
		{"shape.gpus", p.Shape.GPUs, 0, maxGPUs, false},
		{"shape.tensor_parallel", p.Shape.TensorParallel, 0, maxGPUs, false},
		{"shape.pipeline_parallel", p.Shape.PipelineParallel, 0, maxGPUs, false},
	} {
		if f.value < f.least || f.value > f.most {
			why := ""
			if f.becauseOfMax {
				why = ", the pool's max"
			}
			return bad(f.name, "is %d: it must be from %d to %d%s", f.value, f.least, f.most, why)
		}
	}
	switch needed := p.Shape.TensorParallel * p.Shape.PipelineParallel; {
	case p.Shape.GPUs > 0 && p.Shape.GPUs < needed:
		return bad("shape.gpus", "is %d: tensor_parallel times pipeline_parallel need %d", p.Shape.GPUs, needed)
	case p.Headroom != -1 && !(p.Headroom >= 0 && p.Headroom <= 10): // which no NaN passes
		return bad("headroom", "is %v: it must be a share from 0 to 10, where 0 (or -1) is none", p.Headroom)
	case !(p.TokensPerSecond >= 0) || math.IsInf(p.TokensPerSecond, 0):
		return bad("tokens_per_second", "is %v: it must be a number of 0, which is unknown, or more", p.TokensPerSecond)
	}
	return nil
}

func (p *Pool) checkTimes() error {
	for class, d := range p.TargetWait {
		if !slices.Contains(job.Classes(), class) {
			return bad("target_wait."+string(class), "is not known: the classes are interactive, standard and batch")
		}
		if d < 0 || d > maxTime {
			return bad("target_wait."+string(class), "is %v: it must be from 0s to %v", d, maxTime)
		}
	}
	for _, f := range []struct {
		name  string
		value Duration
	}{{"idle", p.Idle}, {"cooldown", p.Cooldown}} {
		if f.value < 0 || f.value > maxTime {
			return bad(f.name, "is %v: it must be from 0s, which is at once, to %v", f.value, maxTime)
		}
	}
	return cmp.Or(someTime("drain", p.Drain), someTime("cold_start", p.ColdStart))
}

// someTime returns a *FieldError if d is none, or too long.
func someTime(field string, d Duration) error {
	if d <= 0 || d > maxTime {
		return bad(field, "is %v: it must be more than 0s, and %v at most; leave it out for the default", d, maxTime)
	}
	return nil
}

func (p *Pool) checkSchedule() error {
	if _, err := zoneOf(p.Timezone); err != nil {
		return bad("timezone", `is %.100q: it must be a name like "Europe/Berlin" or "UTC"`, p.Timezone)
	}
	for i, e := range p.Schedule {
		field := fmt.Sprintf("schedule[%d]", i)
		s, err := e.parse()
		if err != nil {
			return bad(field, "%v", err)
		}
		if s.atLeast < 1 || s.atLeast > p.Max {
			return bad(field, "is %.100q: at least must be from 1 to %d, the pool's max", string(e), p.Max)
		}
	}
	return nil
}

func (p *Pool) checkEngine() error {
	for name, value := range p.Engine.Env {
		if !envName.MatchString(name) {
			return bad("engine.env", "holds %.100q: a variable's name is letters, digits and underscores, the first no digit", name)
		}
		if strings.ContainsRune(value, 0) {
			return bad("engine.env."+name, "must not hold a NUL")
		}
	}
	if len(p.Engine.Command) > 0 && p.Engine.Command[0] == "" {
		return bad("engine.command", "begins with an empty word: its first is the program")
	}
	if p.Engine.URL == "" {
		return nil
	}
	if u, err := url.Parse(placeholder.ReplaceAllString(p.Engine.URL, "1")); err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" {
		shown, _ := hideWithin(p.Engine.URL)
		return bad("engine.url", "is %.100q: it must be a URL like http://127.0.0.1:{port} or https://host/path", shown)
	}
	return nil
}

// Providers lists the names of the providers that pools may have.
func Providers() []string { return []string{"process", "docker", "kubernetes", "command"} }

// Kinds lists what the kubernetes provider scales.
func Kinds() []string { return []string{"Deployment", "StatefulSet", "LeaderWorkerSet"} }

func (p *Pool) checkProvider() error {
	if !slices.Contains(Providers(), p.Provider) {
		return bad("provider", "is %.100q: it must be one of %s", p.Provider, strings.Join(Providers(), ", "))
	}
	for _, section := range []struct {
		name  string
		given bool
	}{{"docker", p.Docker != nil}, {"kubernetes", p.Kubernetes != nil}, {"command", p.Command != nil}} {
		if section.given && section.name != p.Provider {
			return bad(section.name, "is what the provider %s needs, and the pool's is %s", section.name, p.Provider)
		}
	}
	switch p.Provider {
	case "process":
		if len(p.Engine.Command) == 0 {
			return bad("engine.command", "is missing: the provider process starts the engine by it")
		}
	case "docker":
		if len(p.Engine.Command) == 0 && p.Engine.Image == "" {
			return bad("engine.image", "is missing: the provider docker needs it, or an engine.command that runs in the worker's container")
		}
		if p.Docker.ShmSize < 0 {
			return bad("docker.shm_size", "is %d: it must be 0, which is Docker's default, or more bytes", p.Docker.ShmSize)
		}
		for i, v := range p.Docker.Volumes {
			if !volume.MatchString(v) {
				return bad(fmt.Sprintf("docker.volumes[%d]", i), `is %.100q: it must be like "name:/path" or "/path:/path:ro"`, v)
			}
		}
	case "kubernetes":
		return p.Kubernetes.check()
	case "command":
		return p.Command.check()
	}
	if p.Provider != "docker" && p.Engine.Image != "" {
		return bad("engine.image", "is what the provider docker runs, and the pool's is %s", p.Provider)
	}
	return nil
}

func (k *Kubernetes) check() error {
	switch {
	case k == nil:
		return bad("kubernetes", "is missing: the provider kubernetes needs its kind and name")
	case !slices.Contains(Kinds(), k.Kind):
		return bad("kubernetes.kind", "is %.100q: it must be one of %s", k.Kind, strings.Join(Kinds(), ", "))
	case k.Name == "":
		return bad("kubernetes.name", "is missing: it names the %s", k.Kind)
	case len(k.Name) > 253 || !objectName.MatchString(k.Name):
		return bad("kubernetes.name", "is %.100q: a %s's name is lower-case letters, digits, dashes and dots, the first and the last a letter or a digit", k.Name, k.Kind)
	case k.Namespace != "" && (len(k.Namespace) > 63 || !namespaceName.MatchString(k.Namespace)):
		return bad("kubernetes.namespace", "is %.100q: it must be lower-case letters, digits and dashes, the first and the last no dash", k.Namespace)
	}
	return nil
}

func (c *Command) check() error {
	if c == nil {
		return bad("command", "is missing: the provider command needs start, stop and list")
	}
	for _, f := range []struct {
		name string
		args []string
	}{{"start", c.Start}, {"stop", c.Stop}, {"list", c.List}} {
		if len(f.args) == 0 || f.args[0] == "" {
			return bad("command."+f.name, "is missing: it is a program and its arguments")
		}
	}
	return someTime("command.timeout", c.Timeout)
}
