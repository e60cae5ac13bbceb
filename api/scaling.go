package api

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"

	"github.com/labstack/echo/v4"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
	"github.com/millrace/millrace/internal/scale"
)

// scalingObject is a decision as operators see it. Times are unix seconds, lengths of time seconds.
type scalingObject struct {
	ID     string  `json:"id"`
	Object string  `json:"object"`
	Pool   string  `json:"pool"`
	At     float64 `json:"at"`
	Action string  `json:"action"`
	Reason string  `json:"reason"`
	// From is how many workers there were that do not drain, Want how many are wanted, Start how many were asked for, Stop which were to drain and go.
	From     int            `json:"from"`
	Want     int            `json:"want"`
	Start    int            `json:"start"`
	Stop     []string       `json:"stop"`
	Forecast scale.Forecast `json:"forecast"`
	Need     scale.Need     `json:"need"`
	Sample   sampleObject   `json:"sample"`
}

// sampleObject is what a decision was made of.
type sampleObject struct {
	Unknown         *string                    `json:"unknown"`
	Waiting         map[job.Class]scale.Amount `json:"waiting"`
	InFlight        scale.Amount               `json:"in_flight"`
	Unfed           []dueObject                `json:"unfed"`
	Workers         []poolWorkerObject         `json:"workers"`
	TokensPerSecond *float64                   `json:"tokens_per_second"`
	ColdStart       coldStartObject            `json:"cold_start"`
	Failures        int                        `json:"failures"`
	Failure         *string                    `json:"failure"`
	RetryAt         *float64                   `json:"retry_at"`
	Limit           *int                       `json:"limit"`
}

type dueObject struct {
	scale.Amount
	By float64 `json:"by"`
}

type poolWorkerObject struct {
	Name      string            `json:"name"`
	State     scale.WorkerState `json:"state"`
	Since     float64           `json:"since"`
	Jobs      int               `json:"jobs"`
	IdleSince *float64          `json:"idle_since"`
}

type coldStartObject struct {
	P50     float64 `json:"p50_seconds"`
	P90     float64 `json:"p90_seconds"`
	Samples int     `json:"samples"`
}

// ifSet is nil for the zero value.
func ifSet[T comparable](v T) *T {
	var zero T
	if v == zero {
		return nil
	}
	return &v
}

func newScalingObject(k *ledger.Scaling) (*scalingObject, error) {
	var d scale.Decision
	if err := json.Unmarshal(k.Decision, &d); err != nil {
		return nil, fmt.Errorf("reading the decision %d: %w", k.ID, err)
	}
	s := &d.Sample
	o := &scalingObject{
		ID: strconv.FormatInt(k.ID, 10), Object: "scaling_decision", Pool: k.Pool, At: k.At.Seconds(), Action: k.Action, Reason: d.Reason, Want: d.Want, Start: d.Start, Stop: append([]string{}, d.Stop...),
		Forecast: d.Forecast, Need: d.Need,
		Sample: sampleObject{
			Unknown: ifSet(s.Unknown), Waiting: s.Waiting, InFlight: s.InFlight, Unfed: make([]dueObject, len(s.Unfed)), Workers: make([]poolWorkerObject, len(s.Workers)), TokensPerSecond: ifSet(s.Throughput),
			ColdStart: coldStartObject{s.ColdStart.P50.Seconds(), s.ColdStart.P90.Seconds(), s.ColdStart.Samples}, Failures: s.Failures, Failure: ifSet(s.Failure),
			RetryAt: ifSet(job.MillisOf(s.RetryAt).Seconds()), Limit: ifSet(s.Limit),
		},
	}
	if o.Sample.Waiting == nil {
		o.Sample.Waiting = map[job.Class]scale.Amount{}
	}
	for i, d := range s.Unfed {
		o.Sample.Unfed[i] = dueObject{d.Amount, job.MillisOf(d.By).Seconds()}
	}
	for i, w := range s.Workers {
		o.Sample.Workers[i] = poolWorkerObject{w.Name, w.State, job.MillisOf(w.Since).Seconds(), w.Jobs, ifSet(job.MillisOf(w.IdleSince).Seconds())}
		if w.State != scale.Draining {
			o.From++
		}
	}
	return o, nil
}

// listScaling answers GET /admin/v1/scaling: the decisions about ?pool=, or about all pools, newest first.
func (s *Server) listScaling(c echo.Context) error {
	limit, err := limitParam(c)
	if err != nil {
		return err
	}
	var before int64
	if after := c.QueryParam("after"); after != "" {
		if before, err = strconv.ParseInt(after, 10, 64); err != nil || before < 1 {
			return unknownAfter(after)
		}
	}
	ctx, cancel := s.brief(c)
	defer cancel()
	all, more, err := s.deps.Ledger.Scalings(ctx, c.QueryParam("pool"), before, limit)
	if err != nil {
		return err
	}
	objects := make([]*scalingObject, len(all))
	for i := range all {
		if objects[i], err = newScalingObject(&all[i]); err != nil {
			return err
		}
	}
	return writeJSON(c, http.StatusOK, newList(objects, func(o *scalingObject) string { return o.ID }, more))
}
