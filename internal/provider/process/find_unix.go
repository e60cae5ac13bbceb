//go:build unix && !linux

package process

import (
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
)

// detached makes a session of the process's own: what ends ours does not reach it, nor do the keys of our terminal.
func detached(bool) *syscall.SysProcAttr { return &syscall.SysProcAttr{Setsid: true} }

// has tells whether the process lives and is the worker of the name: other processes' environments cannot be read here. That it cannot be told is an error.
func has(pid int, _, name string) (bool, error) {
	out, err := exec.Command("ps", "-o", "args=", "-ww", "-p", strconv.Itoa(pid)).Output()
	var none *exec.ExitError
	if err != nil && !errors.As(err, &none) {
		return false, fmt.Errorf("looking whether process %d is a worker: %w", pid, err)
	}
	return err == nil && strings.Contains(string(out), "worker --name "+name+" "), nil
}

// ending cannot be told here.
func ending(int) bool { return false }

// find and leftovers need the environments of processes. A worker whose start was cut off between its two writes is not found here, and an engine ends with its worker.
func find(string) (int, error) { return 0, nil }

func leftovers(string) ([]int, error) { return nil, nil }
