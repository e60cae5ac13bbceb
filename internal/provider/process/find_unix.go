//go:build unix && !linux

package process

import (
	"os/exec"
	"strconv"
	"strings"
	"syscall"
)

// detached makes a session of the process's own: what ends ours does not reach it, nor do the keys of our terminal.
func detached(bool) *syscall.SysProcAttr { return &syscall.SysProcAttr{Setsid: true} }

// has tells whether the process lives and is the worker of the name: other processes' environments cannot be read here.
func has(pid int, _, name string) bool {
	out, err := exec.Command("ps", "-o", "args=", "-ww", "-p", strconv.Itoa(pid)).Output()
	return err == nil && strings.Contains(string(out), "worker --name "+name+" ")
}

// ending cannot be told here.
func ending(int) bool { return false }

// find and leftovers need the environments of processes. A worker whose start was cut off between its two writes is not found here, and an engine ends with its worker.
func find(string) int { return 0 }

func leftovers(string) []int { return nil }
