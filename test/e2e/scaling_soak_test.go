//go:build soak

package e2e_test

// cycles is how often a pool goes from zero to one worker and back.
const cycles = 20
