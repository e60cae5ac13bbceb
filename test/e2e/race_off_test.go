//go:build !race

package e2e_test

// raceEnabled: the binary under test is built as the tests are.
const raceEnabled = false
