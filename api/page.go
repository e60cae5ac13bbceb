package api

import (
	"strconv"

	"github.com/labstack/echo/v4"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
)

// listObject is a page of objects.
type listObject struct {
	Object  string  `json:"object"`
	Data    any     `json:"data"`
	FirstID *string `json:"first_id"`
	LastID  *string `json:"last_id"`
	HasMore bool    `json:"has_more"`
}

// newList makes a page of items, whose ids are given by id.
func newList[T any](items []T, id func(T) string, more bool) listObject {
	l := listObject{Object: "list", Data: items, HasMore: more && len(items) > 0} // a client goes on from the last item
	if items == nil {
		l.Data = []T{}
	}
	if n := len(items); n > 0 {
		first, last := id(items[0]), id(items[n-1])
		l.FirstID, l.LastID = &first, &last
	}
	return l
}

// Bounds of a page.
const (
	defaultLimit = 20
	maxLimit     = 100
)

// limitParam reads ?limit= with the usual bounds.
func limitParam(c echo.Context) (int, error) { return limitWithin(c, defaultLimit, maxLimit) }

// limitWithin reads ?limit=, a whole number from 1 to most; def where it is not given.
func limitWithin(c echo.Context, def, most int) (int, error) {
	text := c.QueryParam("limit")
	if text == "" {
		if _, given := c.QueryParams()["limit"]; !given {
			return def, nil
		}
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 || n > most {
		return 0, invalid("limit", job.CodeInvalidValue, "limit is %q: it must be a whole number from 1 to %d.", clip(text), most)
	}
	return n, nil
}

// pageParams reads limit, after and order of a list in the ledger, newest first unless order says asc. An `after` that names nothing is found by the ledger: see unknownAfter.
func pageParams(c echo.Context, def, most int) (ledger.Page, error) {
	limit, err := limitWithin(c, def, most)
	if err != nil {
		return ledger.Page{}, err
	}
	p := ledger.Page{After: c.QueryParam("after"), Limit: limit}
	switch order := c.QueryParam("order"); order {
	case "", "desc":
	case "asc":
		p.Asc = true
	default:
		return ledger.Page{}, invalid("order", job.CodeInvalidValue, "order is %q: it must be asc or desc.", clip(order))
	}
	return p, nil
}

// unknownAfter is what a client is told whose `after` names nothing in the list.
func unknownAfter(text string) *failure {
	return invalid("after", job.CodeInvalidValue, "after is %q: there is no such object in this list.", clip(text))
}
