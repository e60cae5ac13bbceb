package batch

import (
	"regexp"
	"strconv"
	"time"
)

// maxWindow bounds a completion window.
const maxWindow = 7 * 24 * time.Hour

var windowForm = regexp.MustCompile(`^([1-9][0-9]{0,5})([mh])$`)

// ParseWindow reads a completion window: a whole number of minutes or hours, up to 7 days.
func ParseWindow(text string) (time.Duration, bool) {
	m := windowForm.FindStringSubmatch(text)
	if m == nil {
		return 0, false
	}
	n, err := strconv.Atoi(m[1])
	if err != nil {
		return 0, false
	}
	d := time.Duration(n) * time.Minute
	if m[2] == "h" {
		d = time.Duration(n) * time.Hour
	}
	return d, d <= maxWindow
}
