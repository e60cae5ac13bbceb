package process

import (
	"time"

	"github.com/millrace/millrace/internal/provider"
)

// Config of a Provider. Zero fields get the defaults named; Dir is required.
type Config struct {
	// Dir holds the state and the logs of all instances of this machine.
	Dir string
	// Binary is the path of the millrace program. Default this one's.
	Binary string
	// Join is what workers need to join the platform.
	Join provider.Join
	// Args are added to those of each worker, before the engine's command.
	Args []string
	// GPUs is how many this machine has; 0 is unknown, and then there are always enough.
	GPUs int
	// Attached: when this process ends, however it does, the kernel tells the instances to end (Linux only); Close does so too.
	Attached bool
	// Grace is how long a worker has beyond its pool's Drain until it is killed: to give back what it has not ended, and to end its engine. Default 10 s.
	Grace time.Duration
}

const defaultGrace = 10 * time.Second
