package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/millrace/millrace/internal/client"
	"github.com/millrace/millrace/internal/telemetry"
)

// maxDecisions is the most that the API lists at once.
const maxDecisions = 100

func newScaling(p *program) *cobra.Command {
	var (
		conn  operatorFlags
		out   output
		s     scalingView
		watch bool
	)
	cmd := &cobra.Command{
		Use: "scaling [POOL]", Short: "How many workers there are, and why",
		Long: `Show, for each pool of workers, how many the autoscaler wants, how many are ready or
starting, when the next is ready, and why; and its latest decisions.

With --watch the page stays up to date on a terminal. Elsewhere, and with -o json, each
new decision is a line.`,
		Example: "  millrace scaling\n  millrace scaling chat --watch\n  millrace scaling --limit 100 -o json",
		Args:    args(0, 1, ""),
		RunE: func(cmd *cobra.Command, given []string) error {
			switch {
			case s.limit < 1 || s.limit > maxDecisions:
				return usageError(cmd, fmt.Errorf("limit is %d: it must be from 1 to %d", s.limit, maxDecisions))
			case s.every <= 0:
				return usageError(cmd, fmt.Errorf("every is %v: it must be a length of time like 1s", s.every))
			}
			if len(given) > 0 {
				s.pool = given[0]
			}
			s.w, s.json = p.out, out.json()
			return conn.do(cmd, func(ctx context.Context, c *client.Client) error {
				s.api = c
				if watch {
					return s.watch(ctx, telemetry.Terminal(p.out))
				}
				return s.show(ctx)
			})
		},
	}
	f := cmd.Flags()
	f.BoolVarP(&watch, "watch", "w", false, "go on until Ctrl-C")
	f.DurationVar(&s.every, "every", time.Second, "how often --watch looks")
	f.IntVarP(&s.limit, "limit", "n", 20, "how many decisions to show")
	conn.add(f)
	out.add(f)
	return cmd
}

// scalingView shows what the autoscaler does.
type scalingView struct {
	api   *client.Client
	w     io.Writer
	json  bool
	pool  string // "" is all
	limit int
	every time.Duration
}

// page is what is shown at one moment.
type page struct {
	Pools     []client.Pool            `json:"pools"`
	Decisions []client.ScalingDecision `json:"decisions"`
}

func (s *scalingView) read(ctx context.Context) (*page, error) {
	p := &page{Pools: []client.Pool{}, Decisions: []client.ScalingDecision{}}
	if s.pool != "" {
		one, err := s.api.Pool(ctx, s.pool)
		if err != nil {
			return nil, err
		}
		p.Pools = append(p.Pools, *one)
	} else {
		all, err := s.api.Pools(ctx)
		if err != nil {
			return nil, err
		}
		p.Pools = append(p.Pools, all...)
	}
	all, _, err := s.api.Scaling(ctx, s.pool, "", s.limit)
	p.Decisions = append(p.Decisions, all...)
	return p, err
}

// show prints the page once.
func (s *scalingView) show(ctx context.Context) error {
	p, err := s.read(ctx)
	switch {
	case err != nil:
		return err
	case s.json:
		return printJSON(s.w, p)
	}
	return printScalingPage(s.w, time.Now(), p)
}

// watch prints the page again and again on a terminal; elsewhere once, and then each new decision. It ends with ctx.
func (s *scalingView) watch(ctx context.Context, terminal bool) error {
	tick := time.NewTicker(s.every)
	defer tick.Stop()
	last := ""
	for first := true; ; first = false {
		var err error
		if terminal && !s.json {
			err = s.redraw(ctx)
		} else {
			last, err = s.follow(ctx, first, last)
		}
		if err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// redraw puts the page in place of what the terminal shows.
func (s *scalingView) redraw(ctx context.Context) error {
	p, err := s.read(ctx)
	if err != nil {
		return err
	}
	var text strings.Builder
	text.WriteString("\x1b[H\x1b[2J")
	if err := printScalingPage(&text, time.Now(), p); err != nil {
		return err
	}
	_, err = io.WriteString(s.w, text.String())
	return err
}

// follow prints the decisions that came after the one whose id is last, the oldest first, and returns the newest one's id. The first time it prints all there is to see, but for JSON, which is decisions alone.
func (s *scalingView) follow(ctx context.Context, first bool, last string) (string, error) {
	p, err := s.read(ctx)
	if err != nil {
		return last, err
	}
	newest := last
	if len(p.Decisions) > 0 {
		newest = p.Decisions[0].ID
	}
	if first && !s.json {
		err = printScalingPage(s.w, time.Now(), p)
	} else {
		fresh, more := sinceThen(p.Decisions, last)
		// Those that came while nobody looked, where they are more than a page.
		for more && last != "" {
			var older []client.ScalingDecision
			if older, more, err = s.api.Scaling(ctx, s.pool, fresh[len(fresh)-1].ID, maxDecisions); err != nil {
				return last, err
			}
			older, unseen := sinceThen(older, last)
			fresh, more = append(fresh, older...), more && unseen && len(older) > 0
		}
		slices.Reverse(fresh)
		err = s.lines(fresh)
	}
	return newest, err
}

// sinceThen are those of all, the newest first, that come before the one whose id is last; more tells that it is not among them.
func sinceThen(all []client.ScalingDecision, last string) (fresh []client.ScalingDecision, more bool) {
	for i := range all {
		if all[i].ID == last {
			return all[:i], false
		}
	}
	return all, len(all) > 0
}

// lines prints decisions as they come.
func (s *scalingView) lines(all []client.ScalingDecision) error {
	if s.json {
		enc := json.NewEncoder(s.w)
		enc.SetEscapeHTML(false)
		for i := range all {
			if err := enc.Encode(&all[i]); err != nil {
				return err
			}
		}
		return nil
	}
	for i := range all {
		d := &all[i]
		if _, err := fmt.Fprintf(s.w, "%s  %s  %s  %s  %s\n", unixTime(d.At).Local().Format(time.TimeOnly), d.Pool, action(d.Action), fromTo(d), oneLine(d.Reason)); err != nil {
			return err
		}
	}
	return nil
}

// fromTo tells how many workers there were and are to be.
func fromTo(d *client.ScalingDecision) string { return fmt.Sprintf("%d -> %d", d.From, d.Want) }

// pageWidth is how many columns a page takes at most.
const pageWidth = 120

// printScalingPage prints a page that fits 120 columns.
func printScalingPage(w io.Writer, now time.Time, p *page) error {
	if len(p.Pools) == 0 && len(p.Decisions) == 0 {
		_, err := fmt.Fprintln(w, noPools)
		return err
	}
	rows := [][]string{{"POOL", "WANTED", "READY", "STARTING", "DRAINING", "MAX", "NOW"}}
	var idle bool
	for _, pool := range p.Pools {
		s := pool.State
		if s == nil {
			idle = true
			rows = append(rows, []string{pool.Name, "?", "?", "?", "?", "?", "no autoscaler has told of it"})
			continue
		}
		now, why := does(now, *s), oneLine(s.Reason)
		if now != why && why != "" { // when the next is ready, and why it is wanted
			now += "; " + why
		}
		rows = append(rows, []string{pool.Name, count(s.Wanted), count(s.Ready), count(s.Starting), count(s.Draining), count(s.Max), now})
	}
	if len(p.Pools) > 0 {
		if err := wrappedTable(w, rows); err != nil {
			return err
		}
	}
	if idle {
		if _, err := fmt.Fprintln(w, "\nno autoscaler leads, or it has not decided yet: start one with `millrace autoscaler`"); err != nil {
			return err
		}
	}
	if len(p.Decisions) == 0 {
		_, err := fmt.Fprintln(w, "\nnothing was decided yet")
		return err
	}
	rows = [][]string{{"AGO", "POOL", "ACTION", "WORKERS", "WHY"}}
	for i := range p.Decisions {
		d := &p.Decisions[i]
		rows = append(rows, []string{since(now, d.At), d.Pool, action(d.Action), fromTo(d), oneLine(d.Reason)})
	}
	if _, err := fmt.Fprintln(w); err != nil {
		return err
	}
	return wrappedTable(w, rows)
}

// action is what a decision does, in words.
func action(code string) string { return strings.ReplaceAll(code, "_", " ") }

// wrappedTable is table with the last column wrapped so that all fits the page. A row's further lines stand under its last column.
func wrappedTable(w io.Writer, rows [][]string) error {
	n := len(rows[0]) - 1
	left := pageWidth
	for column := range n {
		widest := 0
		for _, row := range rows {
			widest = max(widest, utf8.RuneCountInString(row[column]))
		}
		left -= widest + 2
	}
	var all [][]string
	for _, row := range rows {
		for i, line := range wrap(row[n], max(left, 30)) {
			next := make([]string, n+1)
			if i == 0 {
				copy(next, row)
			}
			next[n] = line
			all = append(all, next)
		}
	}
	return table(w, all)
}

// wrap parts a text into lines of at most width characters, at spaces where there are any.
func wrap(text string, width int) []string {
	var lines []string
	line := ""
	for word := range strings.FieldsSeq(text) {
		if line != "" && utf8.RuneCountInString(line)+1+utf8.RuneCountInString(word) <= width {
			line += " " + word
			continue
		}
		if line != "" {
			lines = append(lines, line)
		}
		for line = word; utf8.RuneCountInString(line) > width; {
			runes := []rune(line)
			lines, line = append(lines, string(runes[:width])), string(runes[width:])
		}
	}
	return append(lines, line)
}
