package batch

import "syscall"

// dieWithParent has a child end with this process, however that ends. A signal from the terminal is for this process alone: it ends the children in their order.
func dieWithParent() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
}
