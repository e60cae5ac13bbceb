package platform

import (
	"errors"
	"os"

	"golang.org/x/sys/windows"
)

// tryLock takes the file's lock, which ends when the file is closed. errLocked if another process has it. A byte far behind the end is locked, so that others can
// still read who has it.
func tryLock(f *os.File) error {
	at := &windows.Overlapped{OffsetHigh: 1}
	err := windows.LockFileEx(windows.Handle(f.Fd()), windows.LOCKFILE_EXCLUSIVE_LOCK|windows.LOCKFILE_FAIL_IMMEDIATELY, 0, 1, 0, at)
	if errors.Is(err, windows.ERROR_LOCK_VIOLATION) {
		return errLocked
	}
	return err
}
