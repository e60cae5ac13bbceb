package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// newFailing is of batches of which one line fails.
func newFailing(t *testing.T) *fakeBatches {
	t.Helper()
	f := newFakeBatches(t, `"status":"validating"`,
		`"status":"completed","request_counts":{"total":3,"completed":2,"failed":1},"completed_at":CREATED+7,"output_file_id":"file-out","error_file_id":"file-err"`)
	f.files["file-err"] = `{"custom_id":"c","response":{"status_code":400,"body":{}},"error":null}` + "\n"
	return f
}

func TestErrorsGoIntoAPipeOnce(t *testing.T) {
	t.Parallel()
	f := newFailing(t)
	in := writeInput(t, threeLines)
	pipe := filepath.Join(filepath.Dir(in), "pipe")
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	read := make(chan string)
	go func() {
		raw, err := os.ReadFile(pipe)
		if err != nil {
			t.Error(err)
		}
		read <- string(raw)
	}()
	r := f.ask(t, "", "run", in, "--errors", pipe)
	if got := <-read; got != f.files["file-err"] {
		t.Errorf("the pipe had %q", got)
	}
	if r.code != exitJob || !strings.Contains(r.out, pipe+": 1 status 400") || strings.Contains(r.err, "says why") {
		t.Errorf("%+v", r)
	}
}

// TestAStandardStreamByItsNameIsNotReplaced: as by -o /dev/stdout >> all.jsonl.
func TestAStandardStreamByItsNameIsNotReplaced(t *testing.T) {
	f := newFailing(t)
	appended := func(name string) *os.File {
		put(t, ".", name, requestLine)
		file, err := os.OpenFile(name, os.O_WRONLY|os.O_APPEND, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = file.Close() }) // its content is looked at
		return file
	}
	for _, command := range []string{"run in.jsonl", "run --resume batch_1", "retry batch_1 --wait", "results batch_1"} {
		for _, byLink := range []bool{true, false} {
			t.Chdir(t.TempDir())
			put(t, ".", "in.jsonl", threeLines)
			stdout, stderr := appended("all.jsonl"), appended("log")
			out, errs := "all.jsonl", "log"
			if byLink {
				out, errs = fmt.Sprintf("/dev/fd/%d", stdout.Fd()), fmt.Sprintf("/dev/fd/%d", stderr.Fd())
			}
			args := append([]string{"batch"}, strings.Fields(command)...)
			args = append(args, "-o", out)
			code, want, noted := exitJob, f.files["file-out"], f.files["file-err"]
			if strings.HasPrefix(command, "results") {
				code, want, noted = 0, `{"custom_id":"a"}`+"\n", ""
			} else {
				args = append(args, "--errors", errs)
			}
			p := &program{in: strings.NewReader(""), out: stdout, err: stderr, lookup: lookup(map[string]string{"MILLRACE_URL": f.URL})}
			if got := run(t.Context(), p, args); got != code {
				t.Errorf("%v: code %d", args, got)
			}
			if got := contentOf(t, "all.jsonl"); got != requestLine+want {
				t.Errorf("%v: the standard output is %q", args, got)
			}
			if got := contentOf(t, "log"); !strings.HasPrefix(got, requestLine) || !strings.Contains(got, noted) || strings.Contains(got, "says why") {
				t.Errorf("%v: the standard error is %q", args, got)
			}
			if entries, _ := os.ReadDir("."); len(entries) != 3 {
				t.Errorf("%v left %v", args, entries)
			}
		}
	}
}

func TestWhatGoesToTheNullDeviceSaysNothing(t *testing.T) {
	t.Parallel()
	f := newFailing(t)
	r := f.ask(t, "", "run", writeInput(t, threeLines), "-o", os.DevNull, "--errors", os.DevNull)
	if r.code != exitJob || !strings.HasSuffix(r.err, "1 of 3 lines did not complete: `millrace batch retry batch_1 --wait` runs them again\n") {
		t.Errorf("%+v", r)
	}
}
