//go:build !soak

package e2e_test

// cycles is how often a pool goes from zero to one worker and back; the soak tests make more.
const cycles = 2
