package provider

import (
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/millrace/millrace/internal/scale"
)

// DefaultEngineURL is where a worker looks for its engine if the pool does not say.
const DefaultEngineURL = "http://127.0.0.1:{port}"

// Place is what the placeholders of an engine's command and URL stand for in one worker. What is "" stays as it is written.
type Place struct {
	// Port is free for the engine.
	Port string
	// GPUs are the indices of the worker's GPUs, with commas.
	GPUs string
	// Millrace is the path of this program where the command runs.
	Millrace string
}

// Fill puts what is known in place of {port}, {gpus}, {millrace}, {tensor_parallel} and {pipeline_parallel}.
func (pl Place) Fill(p *scale.Pool, text string) string {
	degree := func(n int) string { return strconv.Itoa(max(n, 1)) }
	pairs := []string{"{tensor_parallel}", degree(p.Shape.TensorParallel), "{pipeline_parallel}", degree(p.Shape.PipelineParallel)}
	for name, value := range map[string]string{"{port}": pl.Port, "{gpus}": pl.GPUs, "{millrace}": pl.Millrace} {
		if value != "" {
			pairs = append(pairs, name, value)
		}
	}
	return strings.NewReplacer(pairs...).Replace(text)
}

// EngineCommand is the pool's engine command in this place.
func (pl Place) EngineCommand(p *scale.Pool) []string {
	var command []string
	for _, arg := range p.Engine.Command {
		command = append(command, pl.Fill(p, arg))
	}
	return command
}

// NeedsPort tells whether the pool's engine wants to be given a port.
func NeedsPort(p *scale.Pool) bool {
	return p.Engine.URL == "" || strings.Contains(p.Engine.URL, "{port}") || slices.ContainsFunc(p.Engine.Command, func(arg string) bool { return strings.Contains(arg, "{port}") })
}

// WorkerArgs are the arguments of the millrace program that make it a worker of the pool under a name, but for those of the place where it runs; the engine's command, if the worker is to run it, follows behind "--".
func (pl Place) WorkerArgs(p *scale.Pool, name string) []string {
	engine := p.Engine.URL
	if engine == "" {
		engine = DefaultEngineURL
	}
	args := []string{"worker", "--name", name, "--engine", pl.Fill(p, engine)}
	if len(p.Models) > 0 {
		models := make([]string, len(p.Models))
		for i, m := range p.Models {
			models[i] = string(m)
		}
		args = append(args, "--serve", csv(models))
	}
	if d := time.Duration(p.Drain); d > 0 {
		args = append(args, "--drain", d.String())
	}
	if n := p.Shape.TensorParallel; n > 0 {
		args = append(args, "--tensor-parallel", strconv.Itoa(n))
	}
	if n := p.Shape.PipelineParallel; n > 0 {
		args = append(args, "--pipeline-parallel", strconv.Itoa(n))
	}
	gpus := pl.GPUs
	if p.Shape.GPUs == 0 {
		gpus = "none"
	}
	if gpus != "" {
		args = append(args, "--gpus", gpus)
	}
	return args
}

// csv writes a list as flags that hold lists read it.
func csv(all []string) string {
	for i, s := range all {
		if strings.ContainsAny(s, "\",\n") {
			all[i] = `"` + strings.ReplaceAll(s, `"`, `""`) + `"`
		}
	}
	return strings.Join(all, ",")
}

// reasonBytes is how much of what a program said is shown.
const reasonBytes = 300

// Clean makes one line of a text that may be shown to people, of 300 bytes at most: the end of it, in which the values of join and the pool's secrets are hidden, and the passwords of URLs among them.
func Clean(text string, p *scale.Pool, join Join) string {
	var secrets []string
	add := func(value string) {
		if len(value) >= 4 { // "1" or "on" is no secret, and stands in every text
			secrets = append(secrets, value)
		}
	}
	for _, value := range join {
		add(value)
		for part := range strings.SplitSeq(value, ",") {
			add(part)
			if u, err := url.Parse(part); err == nil && u.User != nil {
				if password, ok := u.User.Password(); ok {
					add(password)
				} else { // a token
					add(u.User.Username())
				}
			}
		}
	}
	if p != nil {
		for _, value := range p.Secrets() {
			add(value)
		}
	}
	slices.SortFunc(secrets, func(a, b string) int { return len(b) - len(a) }) // one may hold another
	for _, s := range secrets {
		text = strings.ReplaceAll(text, s, "***")
	}
	text = strings.Join(strings.Fields(strings.ToValidUTF8(text, "?")), " ")
	if len(text) > reasonBytes {
		text = text[len(text)-reasonBytes:]
		for text != "" && !utf8.RuneStart(text[0]) {
			text = text[1:]
		}
	}
	return text
}
