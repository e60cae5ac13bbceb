package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/millrace/millrace/internal/batch"
	"github.com/millrace/millrace/internal/client"
	"github.com/millrace/millrace/internal/job"
)

func newBatchRun(p *program) *cobra.Command {
	var (
		conn   clientFlags
		out    output
		what   createFlags
		files  outFlags
		resume string
		fresh  bool
	)
	cmd := &cobra.Command{
		Use: "run FILE", Short: "Run a file of requests and fetch its results",
		Long: `Send a file of requests ("-" is the standard input), wait until every line has ended,
and write the results and the errors beside it.

A file that -o or --errors names is replaced, and is empty in the end if there is nothing
for it. A file that is there under a default name is replaced or removed if it is of an
earlier run, else it is refused before anything is sent. So is one that holds requests.

Ctrl-C ends the waiting and not the batch: it says how to go on. So does the same
command: it finds the batch that it began, unless --new asks for another.
The exit code is 0 if all lines completed, 3 if some did not or the file has faults,
2 for a wrong command line, and 1 if it could not be done.`,
		Example: `  millrace batch run requests.jsonl
  millrace batch run requests.jsonl -o answers.jsonl --window 48h
  zcat requests.jsonl.gz | millrace batch run - > answers.jsonl
  millrace batch run --resume batch_06f2…`,
		Args: args(0, 1, "FILE"),
		RunE: func(cmd *cobra.Command, given []string) error {
			if (len(given) == 1) == (resume != "") {
				return usageError(cmd, errors.New("name either a FILE or a batch with --resume"))
			}
			files = files.streams(p)
			if err := errors.Join(what.check(), files.check(out)); err != nil {
				return usageError(cmd, err)
			}
			c, err := conn.open()
			if err != nil {
				return err
			}
			ctx := cmd.Context()
			r := &batchRun{p: p, c: c, given: files, flags: conn.given(p), out: out, tell: newTeller(ctx, p.err)}
			if resume != "" {
				r.files = files.of(resume).streams(p)
				if err := r.files.claim(p, "", files); err != nil {
					return err
				}
				b, err := c.Batch(ctx, resume)
				if err != nil {
					return explain(c, err)
				}
				return explain(c, r.finish(ctx, b))
			}
			r.files = files.of(given[0]).streams(p)
			if r.files.out == "-" && out.json() {
				return usageError(cmd, errors.New("the results and the batch cannot both go to the standard output: name a file for the results with -o"))
			}
			if err := r.files.claim(p, given[0], files); err != nil {
				return err
			}
			b, err := r.begin(cmd, given[0], what, fresh)
			if err != nil {
				return explain(c, err)
			}
			return explain(c, r.finish(ctx, b))
		},
	}
	files.add(cmd.Flags(), "FILE.output.jsonl, with --resume ID.output.jsonl, for the standard input the standard output")
	what.add(cmd.Flags())
	cmd.Flags().StringVar(&resume, "resume", "", "go on waiting for the batch of this `id`")
	cmd.Flags().BoolVar(&fresh, "new", false, "start another batch, though one of the same file runs")
	conn.add(cmd.Flags())
	out.addLong(cmd.Flags())
	return cmd
}

// addLong adds the flag without its short form, which is another flag's there.
func (o *output) addLong(fs *pflag.FlagSet) {
	*o = "text"
	fs.Var(o, "output", "how to print the end: text or json")
}

// outFlags say where a batch's lines go.
type outFlags struct{ out, errors string }

func (f *outFlags) add(fs *pflag.FlagSet, standard string) {
	fs.StringVarP(&f.out, "out", "o", "", "`file` for the results; - is the standard output (default "+standard+")")
	fs.StringVar(&f.errors, "errors", "", "`file` for the lines that did not complete, empty if all did (default beside the results, as .errors.jsonl, and none if all did)")
}

func (f *outFlags) check(out output) error {
	if f.out == "-" && out.json() {
		return errors.New("the results and the batch cannot both go to the standard output: name a file for the results with -o")
	}
	if f.errors == "-" {
		return errors.New("errors must be a file")
	}
	return errors.Join(fileName("out", f.out), fileName("errors", f.errors))
}

// streams puts "-" for a name under which the standard output is open, as /dev/stdout.
func (f outFlags) streams(p *program) outFlags {
	if p.streamOf(f.out) == p.out {
		f.out = "-"
	}
	return f
}

// fileName refuses what was surely meant for --output.
func fileName(flag, name string) error {
	if name == "json" || name == "text" {
		return fmt.Errorf("%s is %q: it names a file here; --output %s is how to print, and ./%s is a file", flag, name, name, name)
	}
	return nil
}

// of fills in what was not said, from the input's name or the batch's id.
func (f outFlags) of(input string) outFlags {
	stem, _ := strings.CutSuffix(input, ".jsonl")
	switch {
	case f.out != "":
	case input == "-":
		f.out = "-"
	default:
		f.out = stem + ".output.jsonl"
	}
	if f.errors == "" {
		switch {
		case input == "-" && f.out == "-":
			f.errors = "batch.errors.jsonl"
		case f.out == "-":
			f.errors = stem + ".errors.jsonl"
		default:
			base, _ := strings.CutSuffix(f.out, ".jsonl")
			base, _ = strings.CutSuffix(base, ".output")
			f.errors = base + ".errors.jsonl"
		}
	}
	return f
}

// input is a file of requests, at hand for more than one reading.
type input struct {
	*os.File
	name   string // for people
	size   int64
	lines  int64  // that are not blank
	digest string // SHA-256, hex
	// first is the first line that is not blank.
	first []byte
	temp  bool
}

// maxFirst bounds the first line, of which only the url is read, in bytes.
const maxFirst = 64 << 20

// openInput opens a file and reads it once. What cannot be read twice is first copied to a temporary file.
func openInput(ctx context.Context, p *program, name string) (*input, error) {
	in := &input{name: name}
	var err error
	if name == "-" {
		in.name = "the standard input"
		err = in.spool(ctx, p.in)
	} else if in.File, err = os.Open(name); err == nil {
		if info, statErr := in.Stat(); statErr != nil || !info.Mode().IsRegular() {
			pipe := in.File
			err = errors.Join(statErr, in.spool(ctx, pipe), pipe.Close())
		}
	}
	if err == nil {
		err = in.measure(ctx)
	}
	if err != nil {
		in.close()
		return nil, fmt.Errorf("reading %s: %w", in.name, err)
	}
	return in, nil
}

// openRequests is openInput of a file that is to be sent.
func openRequests(ctx context.Context, p *program, name string) (*input, error) {
	in, err := openInput(ctx, p, name)
	if err == nil && in.lines == 0 {
		in.close()
		return nil, &exitError{exitJob, fmt.Errorf("%s holds no request: put one JSON object on each line, as `millrace batch --help` shows", in.name)}
	}
	return in, err
}

func (in *input) spool(ctx context.Context, from io.Reader) (err error) {
	if in.File, err = os.CreateTemp("", "millrace-batch-*.jsonl"); err != nil {
		return err
	}
	in.temp = true
	// A read of a terminal or a pipe cannot be broken off: on Ctrl-C it is left behind, for the process ends.
	copied := make(chan error, 1)
	to := in.File
	go func() {
		_, err := io.Copy(to, from)
		copied <- err
	}()
	select {
	case err := <-copied:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// measure reads it all: its lines, its digest, its first line.
func (in *input) measure(ctx context.Context) error {
	if _, err := in.Seek(0, io.SeekStart); err != nil {
		return err
	}
	sum, r := sha256.New(), bufio.NewReaderSize(in.File, 256<<10)
	blank, inFirst := true, false
	for {
		piece, err := r.ReadSlice('\n')
		in.size += int64(len(piece))
		sum.Write(piece)
		if content := bytes.TrimSpace(bytes.TrimPrefix(piece, []byte("\ufeff"))); len(content) > 0 && blank {
			blank = false
			in.lines++
			inFirst = in.lines == 1
		}
		if inFirst {
			if len(in.first)+len(piece) > maxFirst {
				return fmt.Errorf("its first line is longer than %d bytes", maxFirst)
			}
			in.first = append(in.first, piece...)
		}
		switch {
		case errors.Is(err, bufio.ErrBufferFull):
			continue
		case errors.Is(err, io.EOF):
			in.digest = hex.EncodeToString(sum.Sum(nil))
			_, err := in.Seek(0, io.SeekStart)
			return err
		case err != nil:
			return err
		case ctx.Err() != nil:
			return ctx.Err()
		}
		blank, inFirst = true, false
	}
}

func (in *input) close() {
	if in.File == nil {
		return
	}
	_ = in.Close() // it was only read
	if in.temp {
		_ = os.Remove(in.Name())
	}
}

// endpointOr is the endpoint as said, or the first line's url.
func (in *input) endpointOr(said string) (job.Endpoint, error) {
	if said != "" {
		return job.Endpoint(said), nil
	}
	var line struct {
		URL string `json:"url"`
	}
	if err := json.Unmarshal(bytes.TrimPrefix(bytes.TrimSpace(in.first), []byte("\ufeff")), &line); err != nil || line.URL == "" {
		return "", &exitError{exitJob, fmt.Errorf("the first line of %s names no url: say what the requests are for with --endpoint, or see what is wrong with `millrace batch validate`", in.name)}
	}
	e, err := job.ParseEndpoint(line.URL)
	if err != nil {
		return "", &exitError{exitJob, fmt.Errorf("the url of the first line of %s: %w", in.name, err)}
	}
	return e, nil
}

// upload sends it, telling how far it is.
func (in *input) upload(ctx context.Context, c *client.Client, tell *teller) (*client.File, error) {
	name := "stdin.jsonl"
	if !in.temp {
		name = filepath.Base(in.name)
	}
	s := tell.stage(in.size)
	f, err := c.Upload(ctx, client.Upload{Content: in.File, Size: in.size, Name: name, Progress: func(sent int64) {
		s.at(time.Now(), sent, "sending", bytesOf(sent, in.size))
	}})
	s.end()
	if err != nil {
		return nil, fmt.Errorf("sending %s: %w", in.name, err)
	}
	return f, nil
}

func bytesOf(done, total int64) string {
	return fmt.Sprintf("%.1f of %.1f MB", float64(done)/1e6, float64(total)/1e6)
}

// batchRun waits for one batch and fetches what comes out.
type batchRun struct {
	p     *program
	c     *client.Client
	files outFlags
	given outFlags // of those the ones that were said
	flags string   // for another command to the same server
	out   output
	tell  *teller
	lines int64 // of the input, 0 if it is not at hand
}

// inputDigest is the metadata that a batch is known by to the command that began it.
const inputDigest = "millrace_input"

// mostMetadata is how many pairs a batch may have.
const mostMetadata = 16

// begin sends the file and starts the batch, or finds the one that was begun before.
func (r *batchRun) begin(cmd *cobra.Command, name string, what createFlags, fresh bool) (*client.Batch, error) {
	ctx := cmd.Context()
	in, err := openRequests(ctx, r.p, name)
	if err != nil {
		return nil, err
	}
	defer in.close()
	r.lines = in.lines
	endpoint, err := in.endpointOr(what.endpoint)
	if err != nil {
		return nil, err
	}
	digest := digestOf(in.digest, endpoint, what)
	if !fresh {
		b, err := r.find(ctx, digest)
		if err != nil {
			return nil, err
		}
		if b != nil {
			r.tell.say("%s of the same file runs already: waiting for it (--new starts another)", b.ID)
			return b, nil
		}
	}
	f, err := in.upload(ctx, r.c, r.tell)
	if err != nil {
		if interrupted(ctx, err) {
			r.tell.say("\nnothing was started")
		}
		return nil, err
	}
	n := client.NewBatch{InputFileID: f.ID, Endpoint: endpoint, CompletionWindow: what.window, Metadata: what.metadata}
	if len(what.metadata) < mostMetadata {
		n.Metadata = maps.Clone(what.metadata)
		if n.Metadata == nil {
			n.Metadata = make(map[string]string)
		}
		n.Metadata[inputDigest] = digest
	}
	b, err := r.c.CreateBatch(ctx, n)
	if err != nil {
		if interrupted(ctx, err) {
			r.tell.say("\nit may have been started: the same command, or `millrace batch list%s`, finds it then", r.flags)
		}
		return nil, err
	}
	r.tell.say("%s: %s from %s", b.ID, plural(int(in.lines), "line"), in.name)
	return b, nil
}

// digestOf names what a batch was made of: another file or another setting is another batch.
func digestOf(content string, e job.Endpoint, what createFlags) string {
	sum := sha256.New()
	_ = json.NewEncoder(sum).Encode([]any{content, e, what.window, what.metadata}) // maps are written in the order of their keys; a hash takes everything
	return hex.EncodeToString(sum.Sum(nil))
}

// longestWindow is after what time a batch has surely ended.
const longestWindow = 8 * 24 * time.Hour

// find returns the newest batch that lives and was made of the same; nil if there is none.
func (r *batchRun) find(ctx context.Context, digest string) (*client.Batch, error) {
	oldest, after := time.Now().Add(-longestWindow).Unix(), ""
	for {
		page, err := r.c.Batches(ctx, after, 100)
		if err != nil {
			return nil, err
		}
		for i := range page.Data {
			b := &page.Data[i]
			if b.CreatedAt < oldest {
				return nil, nil //nolint:nilnil // there is none, as it says
			}
			if b.Metadata[inputDigest] == digest && b.Metadata[batch.RetryOf] == "" && !b.Ended() && b.Status != client.BatchCancelling {
				return b, nil
			}
		}
		if !page.HasMore || len(page.Data) == 0 {
			return nil, nil //nolint:nilnil // as above
		}
		after = page.LastID
	}
}

// finish waits for the batch, fetches its files, and sums up.
func (r *batchRun) finish(ctx context.Context, b *client.Batch) error {
	id := b.ID
	b, err := waitBatch(ctx, r.c, b, r.tell, r.lines)
	var failed errorCount
	if err == nil {
		failed, err = r.fetch(ctx, b)
	}
	if err != nil {
		if interrupted(ctx, err) {
			r.tell.say("\n%s goes on. To wait for it and fetch its results:\n  %s\nTo end it:\n  millrace batch cancel%s %s", id, r.resume(id), r.flags, id)
		} else if b != nil {
			r.tell.say("the batch is not lost by this. To try again:\n  %s", r.resume(id))
		}
		return err
	}
	if r.out.json() {
		if err := printJSON(r.p.out, b); err != nil {
			return err
		}
		return r.verdict(b)
	}
	w := r.p.out
	if r.files.out == "-" {
		w = r.p.err // the results have the other
	}
	if err := r.print(w, b, failed); err != nil {
		return err
	}
	return r.verdict(b)
}

// resume is the command that goes on.
func (r *batchRun) resume(id string) string {
	text := "millrace batch run" + r.flags + " --resume " + id
	def := outFlags{}.of(id)
	if r.files.out != def.out {
		text += " -o " + quote(r.files.out)
	}
	if (outFlags{out: r.files.out}).of(id).errors != r.files.errors {
		text += " --errors " + quote(r.files.errors)
	}
	return text
}

// waitBatch waits until the batch has ended, and shows how it gets on. lines is how many it will have, 0 if that is not known.
func waitBatch(ctx context.Context, c *client.Client, b *client.Batch, tell *teller, lines int64) (*client.Batch, error) {
	w := &watching{c: c, tell: tell, lines: lines}
	defer func() {
		if w.stage != nil {
			w.stage.end()
		}
	}()
	for pause := 50 * time.Millisecond; !b.Ended(); pause = min(2*pause, time.Second) {
		w.show(ctx, time.Now(), b)
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return b, fmt.Errorf("waiting for %s: %w", b.ID, ctx.Err())
		}
		next, err := c.Batch(ctx, b.ID)
		if err != nil {
			return b, err
		}
		b = next
	}
	w.show(ctx, time.Now(), b)
	return b, nil
}

// errorCount counts the lines of an error file that is written to it, by what went wrong.
type errorCount struct {
	codes map[string]int64
	part  []byte // of a line whose end has not come yet
}

func (n *errorCount) Write(p []byte) (int, error) {
	for rest := p; ; {
		piece, after, ended := bytes.Cut(rest, []byte("\n"))
		n.part = append(n.part, piece...)
		if !ended {
			return len(p), nil
		}
		n.count(n.part)
		n.part, rest = n.part[:0], after
	}
}

func (n *errorCount) count(text []byte) {
	var line struct {
		Response *struct {
			StatusCode int `json:"status_code"`
		} `json:"response"`
		Error *job.Error `json:"error"`
	}
	code := "unknown"
	if json.Unmarshal(text, &line) == nil {
		if line.Response != nil {
			code = fmt.Sprintf("status %d", line.Response.StatusCode)
		} else if c := line.Error.CodeOf(); c != "" {
			code = string(c)
		}
	}
	if len(n.codes) < 100 || n.codes[code] > 0 {
		n.codes[code]++
	}
}

// fetch writes the batch's files to where they belong.
func (r *batchRun) fetch(ctx context.Context, b *client.Batch) (errorCount, error) {
	failed := errorCount{codes: make(map[string]int64)}
	for _, f := range []struct {
		id, name, given, what string
		also                  io.Writer
	}{{b.OutputFileID, r.files.out, r.given.out, "results", io.Discard}, {b.ErrorFileID, r.files.errors, r.given.errors, "errors", &failed}} {
		switch {
		case f.id != "":
			s := r.tell.stage(0)
			_, err := writeFile(r.p, f.name, func(w io.Writer) (int64, error) {
				return r.c.Download(ctx, f.id, io.MultiWriter(w, f.also), func(done, total int64) {
					s.of(total)
					s.at(time.Now(), done, "fetching the "+f.what, bytesOf(done, total))
				})
			})
			s.end()
			if err != nil {
				return errorCount{}, fmt.Errorf("fetching the %s: %w", f.what, err)
			}
		case b.Status == client.BatchFailed || r.p.streamOf(f.name) != nil:
		case f.given != "":
			if _, err := writeFile(r.p, f.name, func(io.Writer) (int64, error) { return 0, nil }); err != nil {
				return errorCount{}, fmt.Errorf("emptying the %s: %w", f.what, err)
			}
		default:
			// What an earlier run left there would be taken for this one's.
			if err := removeResults(f.name); err != nil {
				return errorCount{}, fmt.Errorf("removing the %s of an earlier run: %w", f.what, err)
			}
		}
	}
	return failed, nil
}

// removeResults removes a plain file that holds lines of a batch, or nothing, if there is one.
func removeResults(name string) error {
	info, err := os.Lstat(name)
	if err != nil || !info.Mode().IsRegular() {
		return nil //nolint:nilerr // there is nothing to remove
	}
	if holds := contentOfFile(spot{name, name, info}); holds != holdsNothing && holds != holdsResults {
		return nil // it came there since the run began
	}
	return os.Remove(name)
}

// writeFile has write fill a file, which appears under its name when it is whole. What is open as a standard stream is written to as that.
func writeFile(p *program, name string, write func(io.Writer) (int64, error)) (int64, error) {
	if std := p.streamOf(name); std != nil {
		return write(std)
	}
	target := name
	if at, err := filepath.EvalSymlinks(name); err == nil {
		target = at
	}
	if info, err := os.Stat(target); err == nil && !info.Mode().IsRegular() { // as /dev/null: it must not be replaced
		f, err := os.OpenFile(target, os.O_WRONLY, 0)
		if err != nil {
			return 0, fmt.Errorf("opening %s: %w", name, err)
		}
		n, err := write(f)
		return n, errors.Join(err, f.Close())
	}
	part := partOf(target)
	f, err := os.Create(part)
	if err != nil {
		return 0, fmt.Errorf("making a file for %s: %w", name, err)
	}
	defer os.Remove(part) //nolint:errcheck // it has moved, or is of no use
	n, err := write(f)
	if err = errors.Join(err, f.Close()); err != nil {
		return n, err
	}
	if err := os.Rename(part, target); err != nil {
		return n, fmt.Errorf("writing %s: %w", name, err)
	}
	return n, nil
}

func (n errorCount) String() string {
	names := slices.SortedFunc(maps.Keys(n.codes), func(a, b string) int {
		if n.codes[a] != n.codes[b] {
			return int(n.codes[b] - n.codes[a])
		}
		return strings.Compare(a, b)
	})
	var parts []string
	for i, name := range names {
		if i == 4 {
			parts = append(parts, "…")
			break
		}
		parts = append(parts, count(n.codes[name])+" "+name)
	}
	return strings.Join(parts, ", ")
}

// print sums up.
func (r *batchRun) print(w io.Writer, b *client.Batch, failed errorCount) error {
	if _, err := fmt.Fprintf(w, "%s %s after %s\n\n", b.ID, b.Status, tookOf(b)); err != nil {
		return err
	}
	n := b.RequestCounts
	all := []fact{{"  lines", fmt.Sprintf("%s completed, %s failed", count(n.Completed), count(n.Failed))}}
	if b.Usage != nil && b.Usage.TotalTokens > 0 {
		text := tokensOf(b)
		if took := b.EndedAt() - b.CreatedAt; took > 0 {
			text += fmt.Sprintf("; %s a second", count(int64(b.Usage.TotalTokens)/took))
		}
		all = append(all, fact{"  tokens", text})
	}
	if b.OutputFileID != "" && r.files.out != "-" {
		all = append(all, fact{"  results", r.files.out})
	}
	if b.ErrorFileID != "" {
		all = append(all, fact{"  errors", r.files.errors + ": " + failed.String()})
	}
	if b.Status == client.BatchFailed {
		all = nil
	}
	if err := facts(w, all...); err != nil {
		return err
	}
	errs := lineErrors(b)
	if len(errs) == 0 {
		return nil
	}
	if err := errorTable(w, errs[:min(len(errs), 10)]); err != nil {
		return err
	}
	if more := len(errs) - 10; more > 0 {
		_, err := fmt.Fprintf(w, "and %s: `millrace batch get%s %s` shows them\n", plural(more, "more error"), r.flags, b.ID)
		return err
	}
	return nil
}

// verdict is nil if every line completed.
func (r *batchRun) verdict(b *client.Batch) error {
	n := b.RequestCounts
	switch {
	case b.Status == client.BatchCompleted && n.Completed == n.Total:
		return nil
	case b.Status == client.BatchFailed:
		return &exitError{exitJob, fmt.Errorf("%s was refused and nothing ran: correct the file, and check it with `millrace batch validate`", b.ID)}
	default:
		why := ""
		if at, err := spotOf(r.files.errors, nil); err == nil && at.plain() && r.p.streamOf(r.files.errors) == nil { // what went elsewhere is not there to be read
			why = r.files.errors + " says why; "
		}
		return &exitError{exitJob, fmt.Errorf("%s of %s did not complete: %s`millrace batch retry%s %s --wait` runs them again",
			count(n.Total-n.Completed), plural(int(n.Total), "line"), why, r.flags, b.ID)}
	}
}
