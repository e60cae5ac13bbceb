//go:build unix && !linux

package batch

import "syscall"

// dieWithParent keeps signals from the terminal from a child: this process ends it.
func dieWithParent() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }
