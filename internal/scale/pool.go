package scale

import (
	"fmt"
	"strings"
	"time"

	"github.com/millrace/millrace/internal/job"
)

// Pool is a set of workers that are alike: who they serve, what one of them is, and how many there may be. Its YAML and its JSON have the same names; what is left out gets the default named. Durations are written as "90s", "5m".
type Pool struct {
	// Name is lower-case letters, digits and dashes, 40 at most; workers are named after it.
	Name string `json:"name" yaml:"name"`
	// Models that each of its workers serves. A worker of several models is warm for all of them: demand is added up, and a spare counts for all.
	Models []job.Model `json:"models" yaml:"models"`
	// Provider that starts and stops workers: process, docker, kubernetes or command.
	Provider string `json:"provider" yaml:"provider"`
	// Shape of one worker.
	Shape Shape `json:"shape" yaml:"shape"`
	// Engine beside each worker.
	Engine Engine `json:"engine" yaml:"engine"`

	// Min and Max bound how many workers there are. Max is at least 1.
	Min int `json:"min" yaml:"min"`
	Max int `json:"max" yaml:"max"`
	// Spare is how many warm workers there are beyond what the load of this moment needs, while there is any load. What Headroom adds counts as spare.
	Spare int `json:"spare" yaml:"spare"`
	// Idle is for how long nothing was asked of the pool until its last worker goes, if Min is 0. Default 5m; 0 is at once.
	Idle Duration `json:"idle" yaml:"idle"`
	// Cooldown is for how long fewer workers must have been enough until the first one goes. Default 5m; 0 is at once.
	Cooldown Duration `json:"cooldown" yaml:"cooldown"`
	// Headroom is the share of what the forecast needs that is added to it. Default 0.2; 0 is none, and so is -1.
	Headroom float64 `json:"headroom" yaml:"headroom"`
	// Drain bounds how long a worker that goes may finish what it runs. Default 10m.
	Drain Duration `json:"drain" yaml:"drain"`
	// TargetWait is for how long a job of each class may wait for a worker when all is well. Defaults: interactive 2s, standard 30s, batch 10m.
	TargetWait map[job.Class]Duration `json:"target_wait" yaml:"target_wait"`
	// Schedule is how many there are at least at certain times: "weekdays 08:00-19:00 at least 3". Timezone is that of its times, as "Europe/Berlin"; default UTC.
	Schedule []Entry `json:"schedule" yaml:"schedule"`
	Timezone string  `json:"timezone" yaml:"timezone"`
	// TokensPerSecond is what one worker gets done when it is full, in expected tokens (prompt and answer), until it was measured. Without it the first worker is measured before a second is started.
	TokensPerSecond float64 `json:"tokens_per_second" yaml:"tokens_per_second"`
	// ColdStart is how long a start takes until it was measured. One has failed after four times this, or 5m, or four times what was measured, whichever is the longest. Default 60s.
	ColdStart Duration `json:"cold_start" yaml:"cold_start"`

	// What the providers need, each its own.
	Docker     *Docker     `json:"docker,omitempty" yaml:"docker,omitempty"`
	Kubernetes *Kubernetes `json:"kubernetes,omitempty" yaml:"kubernetes,omitempty"`
	Command    *Command    `json:"command,omitempty" yaml:"command,omitempty"`
}

// Shape is what one worker takes.
type Shape struct {
	// GPUs of one worker; 0 for engines without. Default TensorParallel times PipelineParallel where one of these is given.
	GPUs int `json:"gpus" yaml:"gpus"`
	// TensorParallel and PipelineParallel are over how many GPUs one copy of the model is spread. Default 1 where there are GPUs; without, 0.
	TensorParallel   int `json:"tensor_parallel" yaml:"tensor_parallel"`
	PipelineParallel int `json:"pipeline_parallel" yaml:"pipeline_parallel"`
}

// Engine is what runs beside each worker.
type Engine struct {
	// Command that starts the engine; in its arguments {port} stands for a free port, {gpus} for the indices of the worker's GPUs, {tensor_parallel} and {pipeline_parallel} for the shape, {millrace} for the path of the millrace program.
	Command []string `json:"command" yaml:"command"`
	// Image of a container in which the engine runs (docker); without one the command runs in the worker's.
	Image string `json:"image" yaml:"image"`
	// URL at which the worker reaches it; {port} as above. Default http://127.0.0.1:{port}.
	URL string `json:"url" yaml:"url"`
	// Env is added to its environment. Values are not shown to anybody.
	Env map[string]string `json:"env" yaml:"env"`
}

// Docker is what the docker provider needs.
type Docker struct {
	// Host of the engine's API; default DOCKER_HOST, else the local socket.
	Host string `json:"host" yaml:"host"`
	// WorkerImage holds the millrace binary. Default millrace:local.
	WorkerImage string `json:"worker_image" yaml:"worker_image"`
	// Network that reaches NATS and Redis. Default the autoscaler's own, if it runs in a container.
	Network string `json:"network" yaml:"network"`
	// Volumes of the engine's container, as "name:/path" or "/path:/path:ro".
	Volumes []string `json:"volumes" yaml:"volumes"`
	// ShmSize in bytes of the engine's /dev/shm; 0 is Docker's default.
	ShmSize int64 `json:"shm_size" yaml:"shm_size"`
	// GPUs that the pool's workers may have, by index or UUID, in all pools alike. Default all of the machine. No two workers get the same.
	GPUs []string `json:"gpus" yaml:"gpus"`
}

// Kubernetes names what is scaled.
type Kubernetes struct {
	Namespace string `json:"namespace" yaml:"namespace"` // default the autoscaler's own, else "default"
	Kind      string `json:"kind" yaml:"kind"`           // Deployment, StatefulSet or LeaderWorkerSet
	Name      string `json:"name" yaml:"name"`
	Context   string `json:"context" yaml:"context"` // of the kubeconfig, outside of a cluster
	// Observe: something else changes the number of replicas, as KEDA does by /admin/v1/pools/NAME/desired. The pods are watched, drained and marked as those to remove, and the number is left alone.
	Observe bool `json:"observe" yaml:"observe"`
}

// Command is the operator's own programs. They get MILLRACE_POOL, MILLRACE_WORKER (the name) and what the worker needs to join in their environment, and the placeholders {pool} and {worker} in their arguments.
type Command struct {
	Start []string `json:"start" yaml:"start"` // returns once the worker was asked for, and changes nothing if there is one of that name; exit code 75 says that there is no room now
	Stop  []string `json:"stop" yaml:"stop"`   // returns once it is gone; no error if there is none of that name
	List  []string `json:"list" yaml:"list"`   // prints a line per worker of the pool: its name, and "pending", "running", "stopping" or "failed" and why
	// Timeout of one call. Default 2m.
	Timeout Duration `json:"timeout" yaml:"timeout"`
}

// Duration is a time.Duration written as text.
type Duration time.Duration

// String is the shortest text of d, as "5m".
func (d Duration) String() string {
	s := time.Duration(d).String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

// MarshalText writes d as String does.
func (d Duration) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// UnmarshalText reads a length of time like "90s" or "5m".
func (d *Duration) UnmarshalText(text []byte) error {
	v, err := time.ParseDuration(string(text))
	if err != nil {
		return fmt.Errorf("is %.100q: it must be a length of time like 90s or 5m", text)
	}
	*d = Duration(v)
	return nil
}
