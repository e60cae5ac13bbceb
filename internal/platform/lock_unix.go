//go:build unix

package platform

import (
	"errors"
	"os"
	"syscall"
)

// tryLock takes the file's lock, which ends when the file is closed. errLocked if another process has it.
func tryLock(f *os.File) error {
	err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return errLocked
	}
	return err
}
