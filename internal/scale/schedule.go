package scale

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"
	_ "time/tzdata" // where the system has no time zones of its own: bare images, Windows
)

// Entry is one line of a schedule: days, a part of the day, and how many workers there are then at least, as "mon-fri 08:00-19:00 at least 3". Days are weekdays, weekends, daily, or names and ranges with commas
// ("mon,wed", "fri-sun"); left out they are daily. A part that ends before it begins lasts until the next day, whose name does not count.
type Entry string

// span is an entry that was read: minutes from midnight of the day on which it begins. until may lie beyond that day.
type span struct {
	days        [7]bool // by time.Weekday
	from, until int
	atLeast     int
}

var entryForm = regexp.MustCompile(`^(?:([a-z][a-z,-]*) +)?(\d{1,2}):(\d\d) *- *(\d{1,2}):(\d\d) +at +least +(\d{1,6})$`)

const entryHelp = `write it like "mon-fri 08:00-19:00 at least 3"`

// parse reads the entry. The error begins with "is".
func (e Entry) parse() (span, error) {
	m := entryForm.FindStringSubmatch(strings.ToLower(strings.TrimSpace(string(e))))
	if m == nil {
		return span{}, fmt.Errorf("is %.100q: %s", string(e), entryHelp)
	}
	days, err := parseDays(m[1])
	if err != nil {
		return span{}, fmt.Errorf("is %.100q: %w", string(e), err)
	}
	number := func(text string) int {
		n, _ := strconv.Atoi(text) // it is digits
		return n
	}
	s := span{days: days, from: 60*number(m[2]) + number(m[3]), until: 60*number(m[4]) + number(m[5]), atLeast: number(m[6])}
	switch {
	case number(m[3]) > 59 || number(m[5]) > 59 || s.from >= 24*60 || s.until > 24*60:
		return span{}, fmt.Errorf("is %.100q: times are from 00:00 to 24:00", string(e))
	case s.from == s.until:
		return span{}, fmt.Errorf("is %.100q: it begins when it ends; a whole day is 00:00-24:00", string(e))
	case s.until < s.from:
		s.until += 24 * 60
	}
	return s, nil
}

var dayNames = []string{"sun", "mon", "tue", "wed", "thu", "fri", "sat"} // as time.Weekday counts

// parseDays reads the days of an entry, "" for daily.
func parseDays(text string) (days [7]bool, err error) {
	if text == "" {
		text = "daily"
	}
	for part := range strings.SplitSeq(text, ",") {
		switch part {
		case "daily":
			part = "mon-sun"
		case "weekdays":
			part = "mon-fri"
		case "weekends":
			part = "sat-sun"
		}
		first, last, isRange := strings.Cut(part, "-")
		if !isRange {
			last = first
		}
		from, to := dayOf(first), dayOf(last)
		if from < 0 || to < 0 {
			return days, fmt.Errorf("%q is no day: there are mon, tue, wed, thu, fri, sat, sun, weekdays, weekends and daily", part)
		}
		for d := from; ; d = (d + 1) % 7 {
			days[d] = true
			if d == to {
				break
			}
		}
	}
	return days, nil
}

func dayOf(name string) int {
	for d, n := range dayNames {
		if n == name {
			return d
		}
	}
	return -1
}

// Zone is the pool's time zone; UTC if it has none, or one that is not known.
func (p *Pool) Zone() *time.Location {
	zone, err := zoneOf(p.Timezone)
	if err != nil {
		return time.UTC
	}
	return zone
}

func zoneOf(name string) (*time.Location, error) {
	if name == "Local" { // which is another one on each machine
		return nil, fmt.Errorf("unknown time zone %s", name)
	}
	return time.LoadLocation(name)
}

// AtLeast is how many workers the schedule asks for at some time from now until soon.
func (p *Pool) AtLeast(now, soon time.Time) int {
	if len(p.Schedule) == 0 {
		return 0
	}
	zone := p.Zone()
	now = now.In(zone)
	if soon.Before(now) {
		soon = now
	}
	most := 0
	for _, e := range p.Schedule {
		s, err := e.parse()
		if err != nil || s.atLeast <= most {
			continue
		}
		// What began yesterday may still last.
		for day := -1; ; day++ {
			at := func(minutes int) time.Time { // by the clock on the wall, also where a day has 23 or 25 hours
				return time.Date(now.Year(), now.Month(), now.Day()+day, 0, minutes, 0, 0, zone)
			}
			if at(0).After(soon) {
				break
			}
			if s.days[time.Date(now.Year(), now.Month(), now.Day()+day, 12, 0, 0, 0, zone).Weekday()] && !at(s.from).After(soon) && at(s.until).After(now) {
				most = s.atLeast
				break
			}
		}
	}
	return most
}
