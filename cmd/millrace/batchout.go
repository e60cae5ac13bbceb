package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// spot is where a command reads or writes: a file, or a standard stream.
type spot struct {
	name string // "-" is the standard stream
	// path is free of links, as far as it is there; "" for a standard stream.
	path string
	info os.FileInfo // nil if there is nothing yet, or nothing is known
}

// spotOf looks up a name; std is what "-" stands for. Its error is fs.ErrNotExist if there is nothing yet: its path is known all the same.
func spotOf(name string, std any) (spot, error) {
	if name == "-" {
		at := spot{name: name}
		if f, ok := std.(*os.File); ok {
			at.info, _ = f.Stat() // one that is closed is nowhere
		}
		return at, nil
	}
	path, err := filepath.Abs(name)
	if err != nil {
		return spot{}, err
	}
	if to, err := filepath.EvalSymlinks(path); err == nil {
		path = to
	} else if dir, err := filepath.EvalSymlinks(filepath.Dir(path)); err == nil {
		path = filepath.Join(dir, filepath.Base(path))
	}
	info, err := os.Stat(path)
	return spot{name, path, info}, cause(err)
}

// streamOf is the standard stream that is open under a name, as under /dev/stdout, nil if none is: it takes what is written after what it has, and must not be replaced. "-" is the standard output.
func (p *program) streamOf(name string) io.Writer {
	if name == "-" {
		return p.out
	}
	info, err := os.Stat(name)
	if err != nil {
		return nil
	}
	if null, err := os.Stat(os.DevNull); err == nil && os.SameFile(info, null) {
		return nil // where everything goes that nobody wants
	}
	for _, std := range []io.Writer{p.out, p.err} {
		if at, err := spotOf("-", std); err == nil && at.info != nil && os.SameFile(info, at.info) {
			return std
		}
	}
	return nil
}

// cause is what is wrong, without a path that another one stands for.
func cause(err error) error {
	var at *fs.PathError
	if errors.As(err, &at) {
		return at.Err
	}
	return err
}

// is tells whether both are one file, under whatever names. Devices and pipes are none: what is written there replaces nothing.
func (p spot) is(other spot) bool {
	if p.info == nil || other.info == nil {
		return p.info == nil && other.info == nil && p.path != "" && p.path == other.path
	}
	return p.info.Mode().IsRegular() && os.SameFile(p.info, other.info)
}

func (p spot) plain() bool { return p.path != "" && p.info != nil && p.info.Mode().IsRegular() }

// claim makes sure that the files can be written to, and that nothing gets lost by that which nobody meant to: before anything is sent. input is what is read, "" if that is at the server. given tells which of the names were said, not made up.
func (f outFlags) claim(p *program, input string, given outFlags) error {
	var in spot
	if input != "" {
		var err error
		if in, err = spotOf(input, p.in); err != nil {
			return fmt.Errorf("reading %s: %w", input, err)
		}
	}
	var results spot
	for _, to := range []struct {
		name, what, flag string
		named            bool
	}{{f.out, "results", "-o", given.out != ""}, {f.errors, "errors", "--errors", given.errors != ""}} {
		if to.name == "" {
			continue
		}
		at, err := spotOf(to.name, nil)
		if std := p.streamOf(to.name); std != nil {
			at, err = spotOf("-", std)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("writing the %s to %s: %w", to.what, to.name, err)
		}
		switch holds := contentOfFile(at); {
		case input != "" && at.is(in):
			return &exitError{exitUsage, fmt.Errorf("the %s would replace the requests: %s is the input; name another file with %s", to.what, to.name, to.flag)}
		case to.flag == "--errors" && at.is(results):
			return &exitError{exitUsage, fmt.Errorf("the results and the errors cannot both go to %s: name another file with --errors", to.name)}
		case holds == holdsRequests:
			return &exitError{exitUsage, fmt.Errorf("the %s would replace requests: %s holds some; remove it first, or name another file with %s", to.what, to.name, to.flag)}
		case holds == holdsOther && !to.named:
			return &exitError{exitUsage, fmt.Errorf("the %s would replace %s, which holds no lines of a batch: name another file with %s, or the same one to replace it", to.what, to.name, to.flag)}
		}
		if err := at.writable(); err != nil {
			return fmt.Errorf("writing the %s to %s: %w: name another file with %s", to.what, to.name, err, to.flag)
		}
		results = at
	}
	return nil
}

// What a file holds, by its first line.
type content int

const (
	holdsNothing content = iota
	holdsRequests
	holdsResults
	holdsOther
)

// maxLook is how much of a first line is read to see what it is, in bytes. A longer one is taken for a request unless it begins as a result.
const maxLook = 16 << 20

// resultStart is how every line of results begins.
const resultStart = `{"id":"batch_req_`

func contentOfFile(at spot) content {
	if !at.plain() {
		return holdsNothing
	}
	f, err := os.Open(at.path)
	if err != nil {
		return holdsOther
	}
	defer f.Close() //nolint:errcheck // it is only read
	var line struct {
		ID   string          `json:"custom_id"`
		URL  string          `json:"url"`
		Body json.RawMessage `json:"body"`
	}
	limited := &io.LimitedReader{R: f, N: maxLook}
	r := bufio.NewReader(limited)
	if mark, _ := r.Peek(3); string(mark) == "\ufeff" {
		_, _ = r.Discard(3) // they were read
	}
	start, _ := r.Peek(len(resultStart)) // it may be shorter
	ofResults := string(start) == resultStart
	switch err := json.NewDecoder(r).Decode(&line); {
	case errors.Is(err, io.EOF):
		return holdsNothing
	case errors.Is(err, io.ErrUnexpectedEOF) && limited.N == 0 && !ofResults:
		return holdsRequests
	case errors.Is(err, io.ErrUnexpectedEOF) && limited.N == 0:
		return holdsResults
	case err != nil, line.ID == "":
		return holdsOther
	case line.URL != "" || line.Body != nil:
		return holdsRequests
	}
	return holdsResults
}

// writable tells why nothing can be written there, nil if it can be.
func (p spot) writable() error {
	switch {
	case p.path == "":
		return nil
	case p.info != nil && p.info.IsDir(), os.IsPathSeparator(p.name[len(p.name)-1]):
		return errors.New("it is a folder")
	case p.info != nil && !p.info.Mode().IsRegular():
		return nil // a pipe must not be opened twice
	case p.info != nil:
		f, err := os.OpenFile(p.path, os.O_WRONLY, 0)
		if err != nil {
			return cause(err)
		}
		if err := f.Close(); err != nil {
			return cause(err)
		}
	}
	part := partOf(p.path)
	f, err := os.Create(part)
	if err != nil {
		return cause(err)
	}
	return errors.Join(f.Close(), os.Remove(part))
}

// partOf is where a file is written until it is whole.
func partOf(target string) string {
	return filepath.Join(filepath.Dir(target), fmt.Sprintf(".%s.%d.part", filepath.Base(target), os.Getpid()))
}
