//go:build !unix

package batch

import "syscall"

func dieWithParent() *syscall.SysProcAttr { return nil }
