package client

import (
	"context"
	"encoding/json"
	"net/http"
	"net/url"
	"strconv"
)

// Pool is a set of workers that are alike. Times are unix seconds.
type Pool struct {
	Object string `json:"object"`
	Name   string `json:"name"`
	// Source is where it is changed: "api", or "file" for the autoscaler's.
	Source    string  `json:"source"`
	CreatedAt float64 `json:"created_at"`
	UpdatedAt float64 `json:"updated_at"`
	// Spec describes it, with its secrets hidden.
	Spec json.RawMessage `json:"spec"`
	// State is what the leading autoscaler does about it, nil while none leads or has decided.
	State *PoolState `json:"state"`
}

// ScalingDecision is what the autoscaler decided about a pool.
type ScalingDecision struct {
	ID     string  `json:"id"`
	Object string  `json:"object"`
	Pool   string  `json:"pool"`
	At     float64 `json:"at"` // unix seconds
	Action string  `json:"action"`
	Reason string  `json:"reason"`
	// From is how many workers there were that do not drain, Want how many are wanted, Start how many were asked for, Stop which were to drain and go.
	From  int      `json:"from"`
	Want  int      `json:"want"`
	Start int      `json:"start"`
	Stop  []string `json:"stop"`
	// Forecast, Need and Sample are what it was made of, as the API has them.
	Forecast json.RawMessage `json:"forecast"`
	Need     json.RawMessage `json:"need"`
	Sample   json.RawMessage `json:"sample"`
}

func poolPath(name string) string { return "/admin/v1/pools/" + url.PathEscape(name) }

// Pools lists all pools. This and what follows needs an admin key where any is configured.
func (c *Client) Pools(ctx context.Context) ([]Pool, error) {
	var list struct {
		Data []Pool `json:"data"`
	}
	err := c.do(ctx, request{method: http.MethodGet, path: "/admin/v1/pools"}, &list)
	return list.Data, err
}

// Pool reads one.
func (c *Client) Pool(ctx context.Context, name string) (*Pool, error) {
	var p Pool
	err := c.do(ctx, request{method: http.MethodGet, path: poolPath(name)}, &p)
	return &p, err
}

// CreatePool makes one of its description.
func (c *Client) CreatePool(ctx context.Context, spec json.RawMessage) (*Pool, error) {
	var made Pool
	err := c.do(ctx, request{method: http.MethodPost, path: "/admin/v1/pools", body: spec, once: true}, &made)
	return &made, err
}

// ReplacePool describes one anew.
func (c *Client) ReplacePool(ctx context.Context, name string, spec json.RawMessage) (*Pool, error) {
	var now Pool
	err := c.do(ctx, request{method: http.MethodPut, path: poolPath(name), body: spec}, &now)
	return &now, err
}

// DeletePool removes one; the autoscaler then stops its workers.
func (c *Client) DeletePool(ctx context.Context, name string) error {
	return c.do(ctx, request{method: http.MethodDelete, path: poolPath(name), once: true}, nil)
}

// Scaling lists decisions about a pool ("" is all), newest first: limit at most, of those before the one whose id is after ("" is the newest). more tells whether there are more.
func (c *Client) Scaling(ctx context.Context, pool, after string, limit int) (all []ScalingDecision, more bool, err error) {
	v := url.Values{"limit": {strconv.Itoa(limit)}}
	if pool != "" {
		v.Set("pool", pool)
	}
	if after != "" {
		v.Set("after", after)
	}
	var list struct {
		Data    []ScalingDecision `json:"data"`
		HasMore bool              `json:"has_more"`
	}
	err = c.do(ctx, request{method: http.MethodGet, path: "/admin/v1/scaling", query: v}, &list)
	return list.Data, list.HasMore, err
}
