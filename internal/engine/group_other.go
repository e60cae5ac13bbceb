//go:build !unix

package engine

import (
	"os"
	"syscall"
)

// Without process groups only the child itself can be stopped, and not gently.

func ownGroup() *syscall.SysProcAttr { return nil }

func terminateGroup(leader int) { killGroup(leader) }

func killGroup(leader int) {
	if p, err := os.FindProcess(leader); err == nil {
		_ = p.Kill()
		_ = p.Release()
	}
}
