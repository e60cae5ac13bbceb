package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// pty is a new pseudo terminal of no size, as some programs give their children.
func pty(t *testing.T) (master, terminal *os.File) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = master.Close() })
	n, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	terminal, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = terminal.Close() }) // it may be closed
	return master, terminal
}

func TestOnATerminalWithoutASizeLinesAreWritten(t *testing.T) {
	t.Parallel()
	f := newFakeBatches(t)
	master, terminal := pty(t)
	in := writeInput(t, threeLines)
	p := &program{in: strings.NewReader(""), out: newScreen(), err: terminal, lookup: lookup(map[string]string{"MILLRACE_URL": f.URL})}
	if code := run(t.Context(), p, []string{"batch", "run", in}); code != 0 {
		t.Errorf("code %d", code)
	}
	if err := terminal.Close(); err != nil {
		t.Fatal(err)
	}
	text, _ := io.ReadAll(master) // its end is an error
	if !strings.Contains(string(text), "running: 1 of 3 lines") || strings.Contains(string(text), "\x1b") {
		t.Errorf("it shows %q", text)
	}
}

func TestOnATerminalABarIsDrawn(t *testing.T) {
	t.Parallel()
	master, terminal := pty(t)
	for size, want := range map[unix.Winsize]bool{{Row: 24, Col: 80}: true, {Row: 0, Col: 80}: false, {Row: 24, Col: 0}: false} {
		if err := unix.IoctlSetWinsize(int(master.Fd()), unix.TIOCSWINSZ, &size); err != nil {
			t.Fatal(err)
		}
		if drawable(terminal) != want {
			t.Errorf("%+v: drawable is %v", size, !want)
		}
	}
}
