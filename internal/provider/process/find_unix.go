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

// find is the id of the process of the worker of the name, 0 if there is none.
func find(_, name string) (int, error) {
	out, err := exec.Command("ps", "-axww", "-o", "pid=,args=").Output()
	if err != nil {
		return 0, fmt.Errorf("looking for the process of worker %s: %w", name, err)
	}
	for line := range strings.Lines(string(out)) {
		pid, args, _ := strings.Cut(strings.TrimSpace(line), " ")
		if strings.Contains(args, "worker --name "+name+" ") {
			return strconv.Atoi(pid)
		}
	}
	return 0, nil
}

// leftovers needs the environments of processes: here an engine ends with its worker.
func leftovers(string) ([]int, error) { return nil, nil }
