package main

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// a line of results, of errors, and of requests.
const (
	resultLine  = `{"id":"batch_req_1","custom_id":"old","response":{"status_code":200,"body":{}},"error":null}` + "\n"
	requestLine = `{"custom_id":"r","method":"POST","url":"/v1/chat/completions","body":{"model":"m"}}` + "\n"
	foreign     = "my notes\n"
)

// longText is longer than what is looked at.
var longText = strings.Repeat("x", maxLook)

func put(t *testing.T, dir, name, text string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// everything in a folder, by its name.
func everything(t *testing.T, dir string) map[string]string {
	t.Helper()
	all := map[string]string{}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if !e.IsDir() {
			all[e.Name()] = contentOf(t, filepath.Join(dir, e.Name()))
		}
	}
	return all
}

func TestResultsNeverReplaceWhatTheyShouldNot(t *testing.T) {
	f := newFakeBatches(t)
	for _, tt := range []struct {
		name  string
		there map[string]string
		link  func(dir string) error
		args  []string
		code  int
		want  string
	}{
		{name: "the input", args: []string{"run", "in.jsonl", "-o", "in.jsonl"}, code: exitUsage, want: "in.jsonl is the input"},
		{name: "the input by another path", args: []string{"run", "in.jsonl", "-o", "./sub/../in.jsonl"}, code: exitUsage, want: "is the input"},
		{name: "a link to the input", link: func(dir string) error { return os.Symlink("in.jsonl", filepath.Join(dir, "l.jsonl")) }, args: []string{"run", "in.jsonl", "-o", "l.jsonl"}, code: exitUsage, want: "is the input"},
		{name: "the input by a link", link: func(dir string) error { return os.Symlink("in.jsonl", filepath.Join(dir, "l.jsonl")) }, args: []string{"run", "l.jsonl", "-o", "in.jsonl"}, code: exitUsage, want: "is the input"},
		{name: "another name of the input", link: func(dir string) error { return os.Link(filepath.Join(dir, "in.jsonl"), filepath.Join(dir, "h.jsonl")) }, args: []string{"run", "in.jsonl", "-o", "h.jsonl"}, code: exitUsage, want: "is the input"},
		{name: "errors to the input", args: []string{"run", "in.jsonl", "--errors", "in.jsonl"}, code: exitUsage, want: "errors would replace the requests"},
		{name: "errors to the input by default", there: map[string]string{"x.errors.jsonl": threeLines}, args: []string{"run", "x.errors.jsonl", "-o", "x.jsonl"}, code: exitUsage, want: "x.errors.jsonl is the input"},
		{name: "other requests", there: map[string]string{"b.jsonl": "\ufeff\n" + requestLine}, args: []string{"run", "in.jsonl", "-o", "b.jsonl"}, code: exitUsage, want: "b.jsonl holds some"},
		{name: "other requests of which the first is long", there: map[string]string{"b.jsonl": `{"custom_id":"r","body":"` + longText + `"}` + "\n"}, args: []string{"run", "in.jsonl", "-o", "b.jsonl"}, code: exitUsage, want: "b.jsonl holds some"},
		{name: "long requests under a default name", there: map[string]string{"in.output.jsonl": `{"custom_id":"r","body":"` + longText + `"}` + "\n"}, args: []string{"run", "in.jsonl"}, code: exitUsage, want: "in.output.jsonl holds some"},
		{name: "requests of a batch that is resumed", args: []string{"run", "--resume", "batch_1", "-o", "in.jsonl"}, code: exitUsage, want: "in.jsonl holds some"},
		{name: "requests of a batch whose results are read", args: []string{"results", "batch_1", "-o", "in.jsonl"}, code: exitUsage, want: "in.jsonl holds some"},
		{name: "requests of a batch that is retried", args: []string{"retry", "batch_1", "--wait", "-o", "in.jsonl"}, code: exitUsage, want: "in.jsonl holds some"},
		{name: "requests, by the errors of a retry", args: []string{"retry", "batch_1", "--wait", "--errors", "in.jsonl"}, code: exitUsage, want: "in.jsonl holds some"},
		{name: "something else under a default name", there: map[string]string{"in.errors.jsonl": foreign}, args: []string{"run", "in.jsonl"}, code: exitUsage, want: "in.errors.jsonl, which holds no lines of a batch"},
		{name: "something else under the results' default name", there: map[string]string{"in.output.jsonl": foreign}, args: []string{"run", "in.jsonl"}, code: exitUsage, want: "in.output.jsonl"},
		{name: "one file for both by two names", args: []string{"run", "in.jsonl", "-o", "x", "--errors", "./x"}, code: exitUsage, want: "both"},
		{name: "one file for both by a link", there: map[string]string{"x": ""}, link: func(dir string) error { return os.Symlink("x", filepath.Join(dir, "y")) }, args: []string{"run", "in.jsonl", "-o", "x", "--errors", "y"}, code: exitUsage, want: "both"},
		{name: "a folder that is not there", args: []string{"run", "in.jsonl", "-o", "nowhere/x.jsonl"}, code: exitFailed, want: "writing the results to nowhere/x.jsonl: no such file or directory: name another file with -o"},
		{name: "a folder for errors that is not there", args: []string{"run", "in.jsonl", "--errors", "nowhere/x.jsonl"}, code: exitFailed, want: "name another file with --errors"},
		{name: "a folder", args: []string{"run", "in.jsonl", "-o", "sub"}, code: exitFailed, want: "it is a folder"},
		{name: "a folder that would be new", args: []string{"run", "in.jsonl", "-o", "new/"}, code: exitFailed, want: "it is a folder"},
		{name: "a file taken for a folder", args: []string{"run", "in.jsonl", "-o", "in.jsonl/x"}, code: exitFailed, want: "not a directory"},
		{name: "a retry to a folder that is not there", args: []string{"retry", "batch_1", "--wait", "-o", "nowhere/x.jsonl"}, code: exitFailed, want: "no such file or directory"},
		{name: "a resumed one to a folder that is not there", args: []string{"run", "--resume", "batch_1", "-o", "nowhere/x.jsonl"}, code: exitFailed, want: "no such file or directory"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			put(t, dir, "in.jsonl", threeLines)
			for name, text := range tt.there {
				put(t, dir, name, text)
			}
			if err := os.Mkdir(filepath.Join(dir, "sub"), 0o700); err != nil {
				t.Fatal(err)
			}
			if tt.link != nil {
				if err := tt.link(dir); err != nil {
					t.Fatal(err)
				}
			}
			before := everything(t, dir)
			t.Chdir(dir)
			r := f.ask(t, "", tt.args...)
			if r.code != tt.code || r.out != "" || !strings.Contains(r.err, tt.want) || strings.Count(r.err, "\n") != 1 {
				t.Errorf("got %+v, want code %d and %q", r, tt.code, tt.want)
			}
			if len(f.asked) > 0 || len(f.batches) > 0 {
				t.Errorf("it was refused after %v", f.asked)
			}
			after := everything(t, dir)
			for name, text := range before {
				if after[name] != text {
					t.Errorf("%s held %q, and now %q", name, text, after[name])
				}
			}
			if len(after) != len(before) {
				t.Errorf("it left %v", after)
			}
		})
	}
}

// TestTheStandardInputIsNotReplacedEither: a shell opened the file, which has no name here.
func TestTheStandardInputIsNotReplacedEither(t *testing.T) {
	f := newFakeBatches(t)
	dir := t.TempDir()
	t.Chdir(dir)
	for _, name := range []string{"in.jsonl", "batch.errors.jsonl"} {
		put(t, dir, name, threeLines)
		stdin, err := os.Open(name)
		if err != nil {
			t.Fatal(err)
		}
		defer stdin.Close()
		args := []string{"batch", "run", "-"}
		if name == "in.jsonl" {
			args = append(args, "-o", name)
		}
		out, errs := newScreen(), newScreen()
		code := run(t.Context(), &program{in: stdin, out: out, err: errs, lookup: lookup(map[string]string{"MILLRACE_URL": f.URL})}, args)
		if code != exitUsage || !strings.Contains(errs.String(), name+" is the input") || contentOf(t, name) != threeLines || len(f.asked) > 0 {
			t.Errorf("%s: code %d: %s", name, code, errs)
		}
	}
}

func TestFilesOfEarlierRunsAreReplaced(t *testing.T) {
	f := newFakeBatches(t)
	for _, tt := range []struct {
		name  string
		there map[string]string
		args  []string
		gone  []string
		want  map[string]string
	}{
		{
			name: "under default names", there: map[string]string{"in.output.jsonl": resultLine, "in.errors.jsonl": resultLine}, args: []string{"in.jsonl"},
			gone: []string{"in.errors.jsonl"}, want: map[string]string{"in.output.jsonl": f.files["file-out"]},
		},
		{
			name: "under a name that was said", there: map[string]string{"keep.txt": foreign, "x": foreign}, args: []string{"in.jsonl", "-o", "x", "--errors", "keep.txt"},
			want: map[string]string{"keep.txt": "", "x": f.files["file-out"]},
		},
		{name: "an errors file that was asked for is there though nothing failed", args: []string{"in.jsonl", "--errors", "e.jsonl"}, want: map[string]string{"e.jsonl": ""}},
		{name: "something else under a default name, when it is named", there: map[string]string{"in.errors.jsonl": foreign}, args: []string{"in.jsonl", "--errors", "in.errors.jsonl"}, want: map[string]string{"in.errors.jsonl": ""}},
		{
			name: "of long lines", there: map[string]string{"in.output.jsonl": `{"id":"batch_req_1","custom_id":"r","response":"` + longText + `"}` + "\n"}, args: []string{"in.jsonl"},
			want: map[string]string{"in.output.jsonl": f.files["file-out"]},
		},
		{name: "both to a device", args: []string{"in.jsonl", "-o", "/dev/null", "--errors", "/dev/./null"}, want: map[string]string{}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			put(t, dir, "in.jsonl", threeLines)
			for name, text := range tt.there {
				put(t, dir, name, text)
			}
			t.Chdir(dir)
			if r := f.ask(t, "", append([]string{"run"}, tt.args...)...); r.code != 0 {
				t.Fatalf("%+v", r)
			}
			for name, text := range tt.want {
				if got := contentOf(t, name); got != text {
					t.Errorf("%s holds %q", name, got)
				}
			}
			for _, name := range tt.gone {
				if _, err := os.Stat(name); !errors.Is(err, fs.ErrNotExist) {
					t.Errorf("%s is still there: %v", name, err)
				}
			}
			if contentOf(t, "in.jsonl") != threeLines {
				t.Error("the requests are gone")
			}
		})
	}
}
