//go:build unix

package testenv

import (
	"errors"
	"os"
	"os/exec"
	"os/user"
	"strconv"
	"syscall"
)

// postgresUser is whom the server runs as where this process is root's, as which it refuses to run.
func postgresUser() (uid, gid int, err error) {
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, err1 := strconv.Atoi(u.Uid)
		gid, err2 := strconv.Atoi(u.Gid)
		if err := errors.Join(err1, err2); err != nil {
			return 0, 0, err
		}
		return uid, gid, nil
	}
	return 0, 0, errors.New("it does not run as root, and there is no user postgres or nobody")
}

// givePostgres makes the folder the server's.
func givePostgres(dir string) error {
	if os.Getuid() != 0 {
		return nil
	}
	uid, gid, err := postgresUser()
	if err != nil {
		return err
	}
	return os.Chown(dir, uid, gid)
}

// asPostgres has cmd run as a user as whom the server runs, in a group of its own: a Ctrl-C in the terminal is not for it.
func asPostgres(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if os.Getuid() != 0 {
		return
	}
	if uid, gid, err := postgresUser(); err == nil { // givePostgres has said so otherwise
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
	}
}
