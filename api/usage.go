package api

import (
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/labstack/echo/v4"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
)

// usageObject is what was used. The fields that it is not kept apart by are null.
type usageObject struct {
	Object string      `json:"object"`
	Day    *string     `json:"day"` // of UTC, as 2026-01-31
	Tenant *job.Tenant `json:"tenant"`
	Model  *job.Model  `json:"model"`
	Key    *string     `json:"key"` // "" for what needed none of the ledger
	// Requests that ended, and how many of them otherwise than well.
	Requests int64     `json:"requests"`
	Failed   int64     `json:"failed_requests"`
	Usage    job.Usage `json:"usage"`
}

// usageDays is how many days are told if none are named.
const usageDays = 30

// adminUsage answers GET /admin/v1/usage.
func (s *Server) adminUsage(c echo.Context) error {
	return s.usage(c, ledger.UsageQuery{Tenant: job.Tenant(c.QueryParam("tenant")), By: []string{"day", "tenant", "model"}}, "day", "tenant", "model", "key")
}

// ownUsage answers GET /v1/usage: that of the tenant's own.
func (s *Server) ownUsage(c echo.Context) error {
	if c.QueryParam("tenant") != "" {
		return invalid("tenant", job.CodeUnsupportedParameter, "This is your own tenant's usage: leave tenant out.")
	}
	return s.usage(c, ledger.UsageQuery{Tenant: tenantOf(c), By: []string{"day", "model"}}, "day", "model", "key")
}

// usage answers with sums over the days from ?from= to ?to=, kept apart by the fields of ?by=, which must be among those allowed.
func (s *Server) usage(c echo.Context, q ledger.UsageQuery, allowed ...string) error {
	now := s.deps.Results.Now().Time().UTC()
	q.Model, q.Key = job.Model(c.QueryParam("model")), c.QueryParam("key")
	q.From = now.AddDate(0, 0, 1-usageDays).Format(time.DateOnly)
	for _, f := range []struct {
		name string
		to   *string
	}{{"from", &q.From}, {"to", &q.To}} {
		if text := c.QueryParam(f.name); text != "" {
			day, ok := parseDay(text)
			if !ok {
				return invalid(f.name, job.CodeInvalidValue, "%s is %q: it must be a day like 2026-01-31, or a time in unix seconds.", f.name, clip(text))
			}
			*f.to = day
		}
	}
	if q.To != "" && q.To < q.From {
		if c.QueryParam("from") != "" {
			return invalid("to", job.CodeInvalidValue, "to is %s, before from, which is %s.", q.To, q.From)
		}
		q.From = "" // a time long ago: from the beginning on
	}
	if text, given := c.QueryParam("by"), c.QueryParams().Has("by"); given {
		q.By = nil
		for name := range strings.SplitSeq(text, ",") {
			switch name = strings.TrimSpace(name); {
			case name == "":
			case !slices.Contains(allowed, name):
				return invalid("by", job.CodeInvalidValue, "by holds %q: it must be of %s, with commas between them.", clip(name), strings.Join(allowed, ", "))
			case !slices.Contains(q.By, name):
				q.By = append(q.By, name)
			}
		}
	}
	ctx, cancel := s.brief(c)
	defer cancel()
	rows, err := s.deps.Ledger.Usage(ctx, q)
	if err != nil {
		return err
	}
	objects := make([]usageObject, len(rows))
	for i := range rows {
		objects[i] = newUsageObject(&rows[i], q.By)
	}
	return writeJSON(c, http.StatusOK, usageList{"list", objects, orNull(q.From), orNull(q.To)})
}

// usageList are all sums; From and To are the days that were asked for, null for no bound.
type usageList struct {
	Object string        `json:"object"`
	Data   []usageObject `json:"data"`
	From   *string       `json:"from"`
	To     *string       `json:"to"`
}

func newUsageObject(r *ledger.UsageRow, by []string) usageObject {
	o := usageObject{Object: "usage", Requests: r.Requests, Failed: r.Failed, Usage: r.Usage}
	for _, name := range by {
		switch name {
		case "day":
			o.Day = &r.Day
		case "tenant":
			o.Tenant = &r.Tenant
		case "model":
			o.Model = &r.Model
		case "key":
			o.Key = &r.Key
		}
	}
	return o
}

func orNull(text string) *string {
	if text == "" {
		return nil
	}
	return &text
}

// parseDay reads a day of UTC, by its date or by a time in it.
func parseDay(text string) (day string, ok bool) {
	if t, err := time.Parse(time.DateOnly, text); err == nil {
		return t.Format(time.DateOnly), true
	}
	if at, err := strconv.ParseFloat(text, 64); err == nil && at >= 0 && at <= maxUnix {
		return time.Unix(int64(at), 0).UTC().Format(time.DateOnly), true
	}
	return "", false
}
