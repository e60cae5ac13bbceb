package platform

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// errLocked: another process has the lock.
var errLocked = errors.New("another process has the lock")

// lock makes dir and takes its lock, which ends with the process. unlock gives it back.
func lock(dir string) (unlock func(), err error) {
	if dir == "" {
		return nil, errors.New("no folder for the data is given: name one with --data")
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("making the data folder: %w: name another with --data", err)
	}
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("locking the data folder: %w: name another with --data", err)
	}
	if err := tryLock(f); err != nil {
		holder, _ := io.ReadAll(io.LimitReader(f, 32)) // only to say more
		_ = f.Close()
		if !errors.Is(err, errLocked) {
			return nil, fmt.Errorf("locking the data folder %s: %w: name another with --data", dir, err)
		}
		who := "another process"
		if pid := strings.TrimSpace(string(holder)); pid != "" {
			who = "process " + pid
		}
		return nil, fmt.Errorf("%s uses the data folder %s: stop it, or name another folder with --data", who, dir)
	}
	// The file stays when the lock goes: removing it would let two processes lock two files of one name.
	err = f.Truncate(0)
	if err == nil {
		_, err = f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	}
	if err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("writing to the data folder: %w: name another with --data", err)
	}
	return func() { _ = f.Close() }, nil
}
