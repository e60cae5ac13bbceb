package process

import (
	"bytes"
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

// has tells whether the process lives and has the token. One that has ended and was not waited for has no environment any more.
func has(pid int, token, _ string) bool {
	env, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/environ")
	if err != nil {
		return false
	}
	for v := range bytes.SplitSeq(env, []byte{0}) {
		if string(v) == tokenVariable+"="+token {
			return true
		}
	}
	return false
}

// ending tells whether the process, which is a child of ours that was not waited for, is about to end: it has no environment any more, and some kernels say so by an error.
func ending(pid int) bool {
	env, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/environ")
	return err != nil || len(env) == 0
}

// find is the id of the worker's process with the token, 0 if there is none: it leads a session, which its engine does not.
func find(token string) int {
	for _, pid := range leftovers(token) {
		if sid, _, err := syscall.RawSyscall(syscall.SYS_GETSID, uintptr(pid), 0, 0); err == 0 && int(sid) == pid {
			return pid
		}
	}
	return 0
}

// leftovers are all processes with the token.
func leftovers(token string) []int {
	dirs, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	var pids []int
	for _, d := range dirs {
		if pid, err := strconv.Atoi(d.Name()); err == nil && has(pid, token, "") {
			pids = append(pids, pid)
		}
	}
	return pids
}
