package process

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"syscall"
)

// detached makes a session of the process's own: what ends ours does not reach it, nor do the keys of our terminal.
func detached(attached bool) *syscall.SysProcAttr {
	attr := &syscall.SysProcAttr{Setsid: true}
	if attached {
		attr.Pdeathsig = syscall.SIGTERM
	}
	return attr
}

// has tells whether the process lives and has the token. One that has ended and was not waited for has no environment any more. That it cannot be told is an error, so that one that lives is not taken for dead.
func has(pid int, token, name string) (bool, error) {
	path := "/proc/" + strconv.Itoa(pid)
	there, err := marked(path+"/environ", token)
	if !errors.Is(err, fs.ErrPermission) {
		return there, err
	}
	// Somebody else's has the id by now, unless its arguments, which all may read, are those of the worker.
	args, readErr := os.ReadFile(path + "/cmdline")
	switch {
	case vanished(readErr) || readErr == nil && !bytes.Contains(args, []byte("\x00--name\x00"+name+"\x00")):
		return false, nil
	case readErr != nil:
		return false, fmt.Errorf("looking whether process %d is a worker: %w", pid, readErr)
	}
	return false, err
}

// marked tells whether the environment in a file of /proc has the token.
func marked(path, token string) (bool, error) {
	env, err := os.ReadFile(path)
	if vanished(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("looking for a worker's processes: %w", err)
	}
	for v := range bytes.SplitSeq(env, []byte{0}) {
		if string(v) == tokenVariable+"="+token {
			return true, nil
		}
	}
	return false, nil
}

// vanished tells whether an error of /proc's says that there is no such process.
func vanished(err error) bool { return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH) }

// ending tells whether the process, which is a child of ours that was not waited for, is about to end: it has no environment any more, and some kernels say so by an error.
func ending(pid int) bool {
	env, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/environ")
	return err != nil || len(env) == 0
}

// find is the id of the worker's process with the token, 0 if there is none: it leads a session, which its engine does not.
func find(token, _ string) (int, error) {
	all, err := leftovers(token)
	for _, pid := range all {
		if sid, _, err := syscall.RawSyscall(syscall.SYS_GETSID, uintptr(pid), 0, 0); err == 0 && int(sid) == pid {
			return pid, nil
		}
	}
	return 0, err
}

// leftovers are all processes with the token. Other users' are none of them.
func leftovers(token string) ([]int, error) {
	dirs, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("looking for a worker's processes: %w", err)
	}
	var pids []int
	for _, d := range dirs {
		pid, err := strconv.Atoi(d.Name())
		if err != nil {
			continue // no process
		}
		there, err := marked("/proc/"+d.Name()+"/environ", token)
		if err != nil && !errors.Is(err, fs.ErrPermission) {
			return nil, err
		}
		if there {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}
