//go:build !soak

package e2e_test

// What is asked of warm caches and of balance while other tests take the processors: on a busy machine looks for a cache time out, and heartbeats are late. `make soak` asks for more.
const (
	warmShare   = 0.7
	alikeShare  = 0.6
	mostOfShare = 1.8
)
