package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"
	"golang.org/x/term"

	"github.com/millrace/millrace/internal/client"
	"github.com/millrace/millrace/internal/telemetry"
)

// tellEvery is how often a line is written where there is no terminal to draw a bar on.
const tellEvery = 5 * time.Second

// teller tells a person how something long gets on: by bars on a terminal, else by a line now and then.
type teller struct {
	ctx  context.Context //nolint:containedctx // of the command: the bars end with it
	w    io.Writer
	term bool

	mu   sync.Mutex    // guards what follows
	bars *mpb.Progress // of the stage that is shown now, nil for none
}

func newTeller(ctx context.Context, w io.Writer) *teller {
	return &teller{ctx: ctx, w: w, term: drawable(w)}
}

// drawable tells whether w is a terminal with room for a bar: one without a size has none.
func drawable(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok || !telemetry.Terminal(f) {
		return false
	}
	width, height, err := term.GetSize(int(f.Fd()))
	return err == nil && width > 0 && height > 0
}

// say writes a line: above the bar, if one is shown.
func (t *teller) say(format string, v ...any) {
	text := fmt.Sprintf(format, v...) + "\n"
	t.mu.Lock()
	bars := t.bars
	t.mu.Unlock()
	if bars != nil {
		if _, err := io.WriteString(bars, text); err == nil {
			return
		}
	}
	io.WriteString(t.w, text) //nolint:errcheck // shown to people only
}

// stage is one long thing. Its total may change.
type stage struct {
	t    *teller
	bars *mpb.Progress // nil off a terminal
	bar  *mpb.Bar

	mu          sync.Mutex // guards what follows
	total       int64
	left, right string
	told        time.Time
}

func (t *teller) stage(total int64) *stage {
	s := &stage{t: t, total: total, told: time.Now()}
	if !t.term {
		return s
	}
	s.bars = mpb.NewWithContext(t.ctx, mpb.WithOutput(t.w), mpb.WithWidth(32))
	text := func(of *string) decor.Decorator {
		return decor.Any(func(decor.Statistics) string {
			s.mu.Lock()
			defer s.mu.Unlock()
			return *of
		})
	}
	// A total of 0 at its making keeps the bar from being over when it is full: what it shows may not be.
	s.bar = s.bars.New(0, mpb.BarStyle().Lbound("").Filler("█").Tip("█").Padding("░").Rbound(""),
		mpb.BarRemoveOnComplete(), mpb.PrependDecorators(text(&s.left)), mpb.AppendDecorators(text(&s.right)))
	t.mu.Lock()
	t.bars = s.bars
	t.mu.Unlock()
	return s
}

// of changes the total.
func (s *stage) of(total int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.total = total
}

// at shows how far it is: left and right of the bar, or both in a line when the last one is a while ago.
func (s *stage) at(now time.Time, done int64, left, right string) {
	s.mu.Lock()
	s.left, s.right = "  "+left+" ", " "+right
	total, due := s.total, now.Sub(s.told) >= tellEvery
	if due {
		s.told = now
	}
	s.mu.Unlock()
	switch {
	case s.bar != nil:
		s.bar.SetTotal(max(total, 1), false)
		s.bar.SetCurrent(done)
	case due:
		s.t.say("%s: %s", left, right)
	}
}

// end removes the bar.
func (s *stage) end() {
	if s.bars == nil {
		return
	}
	s.bar.Abort(true)
	s.bars.Wait()
	s.t.mu.Lock()
	defer s.t.mu.Unlock()
	s.t.bars = nil
}

// pace is how fast something goes of late.
type pace struct{ seen []point }

type point struct {
	at   time.Time
	done int64
}

// paceOver is over what time a pace is measured.
const paceOver = 30 * time.Second

// add takes how much is done at a time, and returns how much that is a second, 0 while it is not known.
func (p *pace) add(now time.Time, done int64) float64 {
	for len(p.seen) > 1 && now.Sub(p.seen[0].at) > paceOver {
		p.seen = p.seen[1:]
	}
	p.seen = append(p.seen, point{now, done})
	first := p.seen[0]
	if d := now.Sub(first.at).Seconds(); d >= 0.5 && done > first.done {
		return float64(done-first.done) / d
	}
	return 0
}

// watching shows how a batch gets on.
type watching struct {
	c     *client.Client
	tell  *teller
	stage *stage
	lines int64 // that the batch will have, 0 if it is not known
	pace  pace

	status string
	done   int64
	// moved is when the last line ended, asked when it was last asked why none does, why the answer.
	moved, asked time.Time
	why          string
}

// words of the statuses of a batch that lives.
var batchWords = map[string]string{
	client.BatchValidating: "validating", client.BatchInProgress: "running", client.BatchFinalizing: "writing the files", client.BatchCancelling: "cancelling",
}

// stuckAfter is after how long without an end of any line it is asked why.
const stuckAfter = 5 * time.Second

func (w *watching) show(ctx context.Context, now time.Time, b *client.Batch) {
	if b.Ended() {
		return
	}
	n := b.RequestCounts
	done, total := n.Completed+n.Failed, max(n.Total, w.lines)
	if n.Total > 0 {
		total = n.Total
	}
	if w.stage == nil {
		w.stage, w.moved = w.tell.stage(total), now
	}
	if w.status != b.Status || done != w.done {
		w.moved, w.why = now, ""
	}
	rate := 0.0
	if b.Status == client.BatchInProgress {
		if rate = w.pace.add(now, done); now.Sub(w.moved) >= stuckAfter && now.Sub(w.asked) >= stuckAfter {
			w.asked, w.why = now, whyStuck(ctx, w.c, b)
		}
	}
	word := batchWords[b.Status]
	if word == "" {
		word = b.Status
	}
	left := word
	if total > 0 {
		left = fmt.Sprintf("%s  %*s of %s", word, len(count(total)), count(done), count(total)) // of one width, so that the bar stays where it is
	}
	right, plain := pieces(n.Failed, rate, total-done, w.why)
	w.stage.of(total)
	switch {
	case w.tell.term:
		w.stage.at(now, done, left, right)
	case total == 0 && w.status != b.Status:
		w.tell.say("%s", word)
	case w.status != b.Status: // at once, and then every while
		w.tell.say("%s: %s of %s lines%s", word, count(done), count(total), plain)
	default:
		w.stage.at(now, done, word, fmt.Sprintf("%s of %s lines%s", count(done), count(total), plain))
	}
	w.status, w.done = b.Status, done
}

// pieces says what else there is to say, for a bar and for a line.
func pieces(failed int64, rate float64, left int64, why string) (bar, line string) {
	add := func(short, long string) { bar, line = bar+"  "+short, line+", "+long }
	if failed > 0 {
		text := count(failed) + " failed"
		add(text, text)
	}
	switch {
	case why != "":
		add(why, why)
	case rate > 0:
		speed := fmt.Sprintf("%.1f", rate)
		if rate >= 10 {
			speed = count(int64(rate))
		}
		eta := seconds(time.Duration(float64(left) / rate * float64(time.Second)))
		add(speed+"/s  "+eta+" left", speed+" a second, about "+eta+" left")
	}
	return bar, line
}

// seconds prints a length of time in whole seconds.
func seconds(d time.Duration) string {
	if d = d.Round(time.Second); d < time.Minute {
		return fmt.Sprintf("%ds", int(d.Seconds()))
	}
	return short(d)
}

// whyStuck asks the server what keeps a batch's model from moving; "" if it does not say, or not to this key.
func whyStuck(ctx context.Context, c *client.Client, b *client.Batch) string {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	queues, err := c.Queues(ctx)
	if err != nil {
		return ""
	}
	for _, q := range queues {
		if q.Reason != nil && *q.Reason != "dispatching" && (b.Model == "" || q.Model == b.Model) {
			return because(*q.Reason)
		}
	}
	return ""
}
