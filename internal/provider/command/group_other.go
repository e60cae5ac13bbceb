//go:build !unix

package command

import "os/exec"

// ownGroup does nothing: without process groups only the program itself is killed.
func ownGroup(*exec.Cmd) {}
