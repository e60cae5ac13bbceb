package engine

import "syscall"

// ownGroup puts the child into a process group of its own, and has it told to stop if we are killed: its restarted parent would find its port and its GPU taken.
func ownGroup() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
}
