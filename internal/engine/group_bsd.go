//go:build unix && !linux

package engine

import "syscall"

// ownGroup puts the child into a process group of its own.
func ownGroup() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }
