package engine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"net"
	"slices"
	"strconv"
	"strings"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/millrace/millrace/internal/job"
)

const (
	// maxRanks bounds the ranks that an engine may have: more are a page gone wrong.
	maxRanks = 4096
	// maxCount bounds every number that is believed: it is exact as a float, and leaves room to add.
	maxCount = 1 << 50
)

var errNotMetrics = errors.New("the page has no metrics")

// metrics is a page of them by name; nil is one that is not there.
type metrics map[string]*dto.MetricFamily

func parseMetrics(page []byte) (metrics, error) {
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(page))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errNotMetrics, err)
	}
	return families, nil
}

// readMetrics reads the page at path (of "/metrics" if empty), or at the same path of another port if that is not 0; nil if there is none. A page that cannot be read is
// an error, and one of something else is errNotMetrics.
func (e *Engine) readMetrics(ctx context.Context, path string, port int) (metrics, error) {
	var garbage error
	for i, place := range e.metricsURLs(path, port) {
		page, err := e.getURL(ctx, place)
		if err == nil {
			m, err := parseMetrics(page)
			if err == nil {
				return m, nil
			}
			garbage = fmt.Errorf("reading the page of metrics: %w", err)
			continue
		}
		// Another port than the engine's may well be closed: whether the engine is there, its own port tells.
		if closed := i > 0 && errors.Is(err, ErrUnreachable) && ctx.Err() == nil; !absent(err) && !closed {
			return nil, err
		}
	}
	return nil, garbage
}

// metricsURLs are the places where the metrics may be.
func (e *Engine) metricsURLs(path string, port int) []string {
	if e.cfg.MetricsURL != "" {
		return []string{e.cfg.MetricsURL}
	}
	if path == "" {
		path = "/metrics"
	}
	places := []string{e.base + path}
	if port != 0 {
		u := *e.url
		u.Host, u.Path, u.RawPath = net.JoinHostPort(u.Hostname(), strconv.Itoa(port)), path, ""
		places = append(places, u.String())
	}
	return places
}

// has tells whether the page has one of signs.
func (m metrics) has(signs []string) bool {
	for name := range m {
		for _, sign := range signs {
			if name == sign || (strings.HasSuffix(sign, ":") || strings.HasSuffix(sign, "_")) && strings.HasPrefix(name, sign) {
				return true
			}
		}
	}
	return false
}

// samples returns those of the first of names that the page has. Some exporters on the way make an underscore of a name's colon.
func (m metrics) samples(names ...string) []*dto.Metric {
	for _, name := range names {
		for _, name := range []string{name, strings.Replace(name, ":", "_", 1)} {
			if s := m[name].GetMetric(); len(s) > 0 {
				return s
			}
		}
	}
	return nil
}

// with returns the samples whose label has the value.
func with(samples []*dto.Metric, name, want string) []*dto.Metric {
	return slices.DeleteFunc(slices.Clone(samples), func(s *dto.Metric) bool { return label(s, name) != want })
}

func label(s *dto.Metric, name string) string {
	for _, l := range s.GetLabel() {
		if l.GetName() == name {
			return l.GetValue()
		}
	}
	return ""
}

// labelNumber is a label's value, 0 if it is no whole number or beyond belief.
func labelNumber(s *dto.Metric, name string) int64 {
	n, err := strconv.ParseInt(label(s, name), 10, 64)
	if err != nil || n < 0 || n > maxCount {
		return 0
	}
	return n
}

// value is a sample's, NaN if it has none or is no count: negative, infinite, beyond belief.
func value(s *dto.Metric) float64 {
	v := math.NaN()
	switch {
	case s.GetGauge() != nil:
		v = s.GetGauge().GetValue()
	case s.GetCounter() != nil:
		v = s.GetCounter().GetValue()
	case s.GetUntyped() != nil:
		v = s.GetUntyped().GetValue()
	}
	if !(v >= 0 && v <= maxCount) {
		return math.NaN()
	}
	return v
}

// total sums a count over ranks and models; it is unknown if there is no sample, or one that is no count.
func total(samples []*dto.Metric) (int64, bool) {
	var sum float64
	for _, s := range samples {
		sum += value(s)
	}
	return whole(sum, len(samples) > 0)
}

// whole is a sum of counts as a number, false if it is unknown.
func whole(sum float64, known bool) (int64, bool) {
	if !known || !(sum <= maxCount) { // NaN
		return 0, false
	}
	return int64(sum), true
}

// counter is a total, -1 if it is unknown.
func counter(samples []*dto.Metric) int64 {
	if n, ok := total(samples); ok {
		return n
	}
	return -1
}

// by returns each rank's value, a rank being what has the same values of the labels. Of several samples of one rank, which are models that share it, pick takes one;
// NaN stays.
func by(samples []*dto.Metric, pick func(a, b float64) float64, labels ...string) map[string]float64 {
	ranks := map[string]float64{}
	for _, s := range samples {
		values := make([]string, len(labels))
		for i, l := range labels {
			values[i] = label(s, l)
		}
		rank, v := strings.Join(values, "\x00"), value(s)
		if before, ok := ranks[rank]; ok {
			v = pick(before, v)
		}
		ranks[rank] = v
	}
	return ranks
}

// sharesOf makes ranks of capacities in tokens and shares of them that are used, 0 to 1, both by rank. It tells false if a share is missing or is none: a percentage is
// no share. Those ranks' Used is 0 then.
func sharesOf(capacity, used map[string]float64) ([]Rank, bool) {
	// A capacity without a rank's label holds for every rank; several ranks that are told as one share cannot be told apart.
	if all, ok := capacity[""]; ok && len(capacity) == 1 && len(used) > 0 {
		capacity = map[string]float64{}
		for rank := range used {
			capacity[rank] = all
		}
	}
	all, shared := used[""]
	shared = shared && len(used) == 1 && len(capacity) == 1
	complete := true
	var ranks []Rank
	for _, rank := range slices.Sorted(maps.Keys(capacity)) {
		tokens := capacity[rank]
		share, ok := used[rank]
		if shared {
			share, ok = all, true
		}
		if !ok || !(share <= 1) { // NaN
			share, complete = 0, false
		}
		if tokens >= 1 {
			ranks = append(ranks, Rank{Capacity: job.Tokens(tokens), Used: job.Tokens(math.Ceil(math.Floor(tokens) * share))})
		} else {
			complete = false
		}
	}
	return ranks, complete
}
