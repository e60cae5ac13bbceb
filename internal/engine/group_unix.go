//go:build unix

package engine

import "syscall"

// An error of kill means that the group is gone already.

func terminateGroup(leader int) { _ = syscall.Kill(-leader, syscall.SIGTERM) }

func killGroup(leader int) { _ = syscall.Kill(-leader, syscall.SIGKILL) }
