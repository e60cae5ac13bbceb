package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"

	"github.com/labstack/echo/v4"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
	"github.com/millrace/millrace/internal/scale"
)

// poolObject is a pool as operators see it. Times are unix seconds.
type poolObject struct {
	Object string `json:"object"`
	Name   string `json:"name"`
	// Source is where it can be changed: "api", or "file" for the autoscaler's --pools.
	Source    string  `json:"source"`
	CreatedAt float64 `json:"created_at"`
	UpdatedAt float64 `json:"updated_at"`
	// Spec describes it. Its secrets are hidden.
	Spec *scale.Pool `json:"spec"`
	// State is what the leading autoscaler does about it; null while none leads, or has decided about it yet.
	State *cluster.PoolInfo `json:"state"`
}

func (s *Server) newPoolObject(p *ledger.Pool) (*poolObject, error) {
	var spec scale.Pool // as another version may have written it
	if err := json.Unmarshal(p.Spec, &spec); err != nil {
		return nil, fmt.Errorf("reading the description of the pool %s: %w", p.Name, err)
	}
	info, _ := s.poolInfo(p.Name)
	return &poolObject{"pool", p.Name, p.Source, p.Created.Seconds(), p.Updated.Seconds(), spec.Shown(), info}, nil
}

// autoscaler is the leading one, as far as it is heard: of several that say so, the one that was heard last.
func (s *Server) autoscaler() (leader cluster.Member, leads bool) {
	for _, m := range s.deps.Cluster.Members() {
		if m.Role == cluster.RoleAutoscaler && m.Leader && (!leads || m.Heard.After(leader.Heard)) {
			leader, leads = m, true
		}
	}
	return leader, leads
}

// poolInfo is what the leading autoscaler last said of a pool, nil if nothing; leads tells whether there is one.
func (s *Server) poolInfo(name string) (info *cluster.PoolInfo, leads bool) {
	leader, leads := s.autoscaler()
	for i := range leader.Pools {
		if leader.Pools[i].Name == name {
			return &leader.Pools[i], true
		}
	}
	return nil, leads
}

// listPools answers GET /admin/v1/pools: all, by name.
func (s *Server) listPools(c echo.Context) error {
	ctx, cancel := s.brief(c)
	defer cancel()
	all, err := s.deps.Ledger.Pools(ctx)
	if err != nil {
		return err
	}
	objects := make([]*poolObject, len(all))
	for i := range all {
		if objects[i], err = s.newPoolObject(&all[i]); err != nil {
			return err
		}
	}
	return writeJSON(c, http.StatusOK, newList(objects, func(p *poolObject) string { return p.Name }, false))
}

// readPool reads a pool from the request's body. name is what it must be called, "" for any.
func (s *Server) readPool(c echo.Context, name string) (*scale.Pool, error) {
	body, o, release, err := s.readBody(c)
	if err != nil {
		return nil, err
	}
	defer release()
	given := make(map[string]bool)
	for _, f := range o.Fields {
		if given[f.Key] {
			return nil, invalid(clip(f.Key), job.CodeInvalidValue, "%s is there twice.", clip(f.Key))
		}
		given[f.Key] = true
	}
	if name != "" && isNull(o.Get("name")) {
		if body, err = job.SetField(body, "name", encode(name)); err != nil {
			return nil, err
		}
	}
	p, err := scale.ParsePool(body)
	if err != nil {
		return nil, badPool(err)
	}
	if name != "" && p.Name != name {
		return nil, invalid("name", job.CodeInvalidValue, "name is %q: the pool is %q, and a pool's name stays.", p.Name, clip(name))
	}
	return p, nil
}

// badPool is what a client is told of a pool that cannot be one.
func badPool(err error) error {
	var f *scale.FieldError
	switch {
	case !errors.As(err, &f):
		return invalid("", job.CodeInvalidValue, "The pool cannot be read: %v.", err)
	case f.Unknown:
		return invalid(clip(f.Field), job.CodeUnsupportedParameter, "%s.", f.Error())
	}
	return invalid(clip(f.Field), job.CodeInvalidValue, "%s.", f.Error())
}

// refusedPool is what a client is told of a pool that the ledger refuses; other errors stay as they are.
func refusedPool(err error, name string) error {
	conflict := func(code job.Code, format string, args ...any) *failure {
		f := fail(http.StatusConflict, code, format, args...)
		f.final = true
		return f
	}
	switch {
	case errors.Is(err, ledger.ErrNotFound):
		return fail(http.StatusNotFound, job.CodePoolNotFound, "There is no pool %q.", clip(name)).at("name")
	case errors.Is(err, ledger.ErrExists):
		return conflict(job.CodePoolExists, "There is a pool %q already: change it by PUT, or in the file that the autoscaler was given by --pools, if it comes from there.", name).at("name")
	case errors.Is(err, ledger.ErrInUse):
		return conflict(job.CodePoolFromFile, "The pool %q comes from the file that the autoscaler was given by --pools: change it there.", name)
	case errors.Is(err, ledger.ErrTaken):
		return conflict(job.CodeModelTaken, "The pool cannot be as it is described: %v.", err).at("models")
	case errors.Is(err, ledger.ErrWorkload):
		return conflict(job.CodeWorkloadTaken, "The pool cannot be as it is described: %v.", err).at("kubernetes.name")
	}
	return err
}

// createPool answers POST /admin/v1/pools.
func (s *Server) createPool(c echo.Context) error {
	p, err := s.readPool(c, "")
	if err != nil {
		return err
	}
	if err := p.Unhide(nil); err != nil {
		return badPool(err)
	}
	ctx, cancel := s.brief(c)
	defer cancel()
	made, err := s.deps.Ledger.CreatePool(ctx, ledger.Pool{Name: p.Name, Spec: encode(p)})
	if err != nil {
		return refusedPool(err, p.Name)
	}
	s.nameModels(c, p.Models, nil)
	return s.showPool(c, made)
}

// nameModels makes the models known that a pool names, and those no more that it named before, so that their jobs are accepted, or not, from now on and not when an autoscaler has read the pools.
func (s *Server) nameModels(c echo.Context, models, before []job.Model) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(c.Request().Context()), storeTimeout) // the pool is stored, though its client may leave
	defer cancel()
	for _, m := range models {
		if err := s.deps.Cluster.Name(ctx, m); err != nil { // the leading autoscaler does so too
			s.log.Warn("a pool's model is not known yet", "model", m, "err", err)
		}
	}
	for _, m := range before {
		if slices.Contains(models, m) {
			continue
		}
		if err := s.deps.Cluster.Unname(ctx, m); err != nil { // and this
			s.log.Warn("a model that no pool names any more is known still", "model", m, "err", err)
		}
	}
}

func (s *Server) showPool(c echo.Context, p *ledger.Pool) error {
	o, err := s.newPoolObject(p)
	if err != nil {
		return err
	}
	return writeJSON(c, http.StatusOK, o)
}

// getPool answers GET /admin/v1/pools/{name}.
func (s *Server) getPool(c echo.Context) error {
	ctx, cancel := s.brief(c)
	defer cancel()
	p, err := s.deps.Ledger.Pool(ctx, pathParam(c, "name"))
	if err != nil {
		return refusedPool(err, pathParam(c, "name"))
	}
	return s.showPool(c, p)
}

// replacePool answers PUT /admin/v1/pools/{name}: the description is the body alone, but for hidden values, which stay as they are.
func (s *Server) replacePool(c echo.Context) error {
	name := pathParam(c, "name")
	p, err := s.readPool(c, name)
	if err != nil {
		return err
	}
	ctx, cancel := s.brief(c)
	defer cancel()
	old, err := s.deps.Ledger.Pool(ctx, name)
	if err == nil && old.Source == ledger.FromFile {
		err = ledger.ErrInUse
	}
	if err != nil {
		return refusedPool(err, name)
	}
	var before scale.Pool // what it is otherwise does not matter: it is replaced
	if err := json.Unmarshal(old.Spec, &before); err != nil {
		return fmt.Errorf("reading the description of the pool %s: %w", name, err)
	}
	if err := p.Unhide(&before); err != nil {
		return badPool(err)
	}
	now, err := s.deps.Ledger.UpdatePool(ctx, ledger.Pool{Name: name, Spec: encode(p)})
	if err != nil {
		return refusedPool(err, name)
	}
	s.nameModels(c, p.Models, before.Models)
	return s.showPool(c, now)
}

type deletedPool struct {
	Name    string `json:"name"`
	Object  string `json:"object"`
	Deleted bool   `json:"deleted"`
}

// deletePool answers DELETE /admin/v1/pools/{name}. The autoscaler then drains and stops its workers.
func (s *Server) deletePool(c echo.Context) error {
	ctx, cancel := s.brief(c)
	defer cancel()
	name := pathParam(c, "name")
	old, err := s.deps.Ledger.Pool(ctx, name)
	if err != nil {
		return refusedPool(err, name)
	}
	if err := s.deps.Ledger.DeletePool(ctx, name); err != nil {
		return refusedPool(err, name)
	}
	var before scale.Pool
	if err := json.Unmarshal(old.Spec, &before); err != nil { // the leading autoscaler sees to its models
		s.log.Warn("the description of a pool that was deleted cannot be read", "pool", name, "err", err)
	}
	s.nameModels(c, nil, before.Models)
	return writeJSON(c, http.StatusOK, deletedPool{name, "pool", true})
}

// desiredObject is how many workers a pool is to have, for scalers that ask.
type desiredObject struct {
	Pool    string `json:"pool"`
	Object  string `json:"object"`
	Desired int    `json:"desired"`
}

// desiredWorkers answers GET /admin/v1/pools/{name}/desired by the leading autoscaler's word, in the form that KEDA's metrics-api scaler reads: as many as are wanted, and those too many that have not drained yet, for whoever lowers a number chooses nobody who is idle. What is not known is a 503 and never 0, which would stop all workers.
func (s *Server) desiredWorkers(c echo.Context) error {
	name := pathParam(c, "name")
	info, leads := s.poolInfo(name)
	switch {
	case info != nil && info.Desired == 0 && info.Action == string(scale.Unknown): // the plan that is kept is none
		return unavailable(nil, "How many workers the pool %q is to have is not known now: %s", clip(name), info.Reason)
	case info != nil:
		return writeJSON(c, http.StatusOK, desiredObject{name, "pool.desired", info.Desired})
	}
	ctx, cancel := s.brief(c)
	defer cancel()
	if _, err := s.deps.Ledger.Pool(ctx, name); err != nil {
		return refusedPool(err, name)
	}
	if leads {
		return unavailable(nil, "The autoscaler has not decided about the pool %q yet: try again later.", name)
	}
	return unavailable(nil, "No autoscaler leads, so that nobody knows how many workers the pool %q is to have: is one running?", name)
}
