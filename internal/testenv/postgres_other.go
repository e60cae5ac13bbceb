//go:build !unix

package testenv

import (
	"errors"
	"os/exec"
)

func givePostgres(string) error { return errors.New("only a unix system can run it for tests") }

func asPostgres(*exec.Cmd) {}
