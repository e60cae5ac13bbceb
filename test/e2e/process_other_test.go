//go:build !linux

package e2e_test

import "syscall"

// dieWithParent does nothing where the kernel offers no such thing.
func dieWithParent() *syscall.SysProcAttr { return nil }
