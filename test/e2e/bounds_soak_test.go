//go:build soak

package e2e_test

// What is asked of warm caches and of balance on a machine that has time for it.
const (
	warmShare   = 0.9
	alikeShare  = 0.8
	mostOfShare = 1.4
)
