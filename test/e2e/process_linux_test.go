package e2e_test

import "syscall"

// dieWithParent has the kernel kill a process whose parent is gone, so that nothing outlives tests that time out.
func dieWithParent() *syscall.SysProcAttr { return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} }
