package api

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"

	"github.com/labstack/echo/v4"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
)

// tenantObject is a tenant as operators see it. Times are unix seconds. Limits that are not set are null.
type tenantObject struct {
	ID        job.Tenant        `json:"id"`
	Object    string            `json:"object"`
	Name      string            `json:"name"`
	Weight    int               `json:"weight"`
	Limits    map[string]*int64 `json:"limits"`
	Disabled  bool              `json:"disabled"`
	CreatedAt float64           `json:"created_at"`
}

func newTenantObject(t *ledger.Tenant) tenantObject {
	return tenantObject{t.ID, "tenant", t.Name, t.Weight, shownLimits(&t.Limits, ledger.LimitNames()), t.Disabled, t.Created.Seconds()}
}

// shownLimits are the limits of those names; null is none.
func shownLimits(l *ledger.Limits, names []string) map[string]*int64 {
	shown := make(map[string]*int64, len(names))
	for _, name := range names {
		if shown[name] = l.Named(name); *shown[name] == 0 {
			shown[name] = nil
		}
	}
	return shown
}

// maxOperators bounds a page of tenants or keys, and is what one has that nobody bounds: operators have few, and their programs read them whole.
const maxOperators = 10_000

// listTenants answers GET /admin/v1/tenants: by id.
func (s *Server) listTenants(c echo.Context) error {
	limit, err := limitWithin(c, maxOperators, maxOperators)
	if err != nil {
		return err
	}
	ctx, cancel := s.brief(c)
	defer cancel()
	after := c.QueryParam("after")
	page, more, err := s.deps.Ledger.TenantPage(ctx, job.Tenant(after), limit)
	if errors.Is(err, ledger.ErrNotFound) {
		return unknownAfter(after)
	}
	if err != nil {
		return err
	}
	objects := make([]tenantObject, len(page))
	for i := range page {
		objects[i] = newTenantObject(&page[i])
	}
	return writeJSON(c, http.StatusOK, newList(objects, func(t tenantObject) string { return string(t.ID) }, more))
}

// brief bounds what a request asks of the stores.
func (s *Server) brief(c echo.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(c.Request().Context(), storeTimeout)
}

// createTenant answers POST /admin/v1/tenants.
func (s *Server) createTenant(c echo.Context) error {
	t := ledger.Tenant{Weight: 100}
	err := s.readFields(c, false, fields{"id": &t.ID, "name": &t.Name, "weight": &t.Weight, "limits": &t.Limits, "disabled": &t.Disabled})
	if err != nil {
		return err
	}
	if t.ID == "" {
		return missing("id")
	}
	if err := ledger.CheckTenant(t); err != nil {
		return badField(err)
	}
	ctx, cancel := s.brief(c)
	defer cancel()
	made, err := s.deps.Ledger.CreateTenant(ctx, t)
	if errors.Is(err, ledger.ErrDeleted) {
		f := fail(http.StatusConflict, job.CodeTenantDeleted, "There was a tenant %q, which was deleted, and no id is used twice: choose another.", string(t.ID)).at("id")
		f.final = true
		return f
	}
	if errors.Is(err, ledger.ErrExists) {
		f := fail(http.StatusConflict, job.CodeTenantExists, "There is a tenant %q already: change it by PATCH.", string(t.ID)).at("id")
		f.final = true
		return f
	}
	if err != nil {
		return err
	}
	return writeJSON(c, http.StatusOK, newTenantObject(made))
}

// getTenant answers GET /admin/v1/tenants/{id}.
func (s *Server) getTenant(c echo.Context) error {
	ctx, cancel := s.brief(c)
	defer cancel()
	t, err := s.deps.Ledger.Tenant(ctx, tenantParam(c))
	if err != nil {
		return noTenant(err, tenantParam(c), "id")
	}
	return writeJSON(c, http.StatusOK, newTenantObject(t))
}

// updateTenant answers PATCH /admin/v1/tenants/{id}: what is not given stays as it is, and a limit of null or 0 is none.
func (s *Server) updateTenant(c echo.Context) error {
	_, o, release, err := s.readBody(c)
	if err != nil {
		return err
	}
	defer release()
	ctx, cancel := s.brief(c)
	defer cancel()
	t, err := s.deps.Ledger.UpdateTenant(ctx, tenantParam(c), func(t *ledger.Tenant) error {
		if err := (fields{"name": &t.Name, "weight": &t.Weight, "limits": &t.Limits, "disabled": &t.Disabled}).read(o); err != nil {
			return err
		}
		return badField(ledger.CheckTenant(*t))
	})
	if err != nil {
		return noTenant(err, tenantParam(c), "id")
	}
	return writeJSON(c, http.StatusOK, newTenantObject(t))
}

// deleteTenant answers DELETE /admin/v1/tenants/{id}.
func (s *Server) deleteTenant(c echo.Context) error {
	ctx, cancel := s.brief(c)
	defer cancel()
	id := tenantParam(c)
	jobs, err := s.unended(ctx, id)
	if err != nil {
		return err
	}
	if jobs > 0 {
		return fail(http.StatusConflict, job.CodeTenantInUse, "The tenant %q is in use: %d of its jobs have not ended. Revoke its keys, and let them end or cancel them before; or disable it.", clip(string(id)), jobs)
	}
	err = s.deps.Ledger.DeleteTenant(ctx, id)
	if errors.Is(err, ledger.ErrInUse) {
		f := fail(http.StatusConflict, job.CodeTenantInUse, "The tenant %q is in use: %s", string(id), inUse(id))
		f.final = true
		return f
	}
	if err != nil {
		return noTenant(err, id, "id")
	}
	return writeJSON(c, http.StatusOK, deletedTenant{id, "tenant", true})
}

// unended is how many of a tenant's jobs are accepted and have not ended, lines of batches among them.
func (s *Server) unended(ctx context.Context, id job.Tenant) (jobs int64, err error) {
	all, err := s.deps.Results.Backlogs(ctx)
	if err != nil {
		return 0, fmt.Errorf("counting the jobs of the tenant %s: %w", id, err)
	}
	for _, of := range all {
		jobs += of.Tenants[id].Jobs
	}
	return jobs, nil
}

type deletedTenant struct {
	ID      job.Tenant `json:"id"`
	Object  string     `json:"object"`
	Deleted bool       `json:"deleted"`
}

func inUse(id job.Tenant) string {
	if id == job.DefaultTenant {
		return "it always exists."
	}
	return "revoke its keys, delete its files, and let its batches end or cancel them; or disable it."
}

func tenantParam(c echo.Context) job.Tenant { return job.Tenant(pathParam(c, "id")) }

// noTenant is what a client is told of a tenant that the ledger does not have; other errors stay as they are.
func noTenant(err error, id job.Tenant, param string) error {
	if !errors.Is(err, ledger.ErrNotFound) {
		return err
	}
	return fail(http.StatusNotFound, job.CodeTenantNotFound, "There is no tenant %q.", clip(string(id))).at(param)
}

// badField is what a client is told of a *ledger.FieldError.
func badField(err error) error {
	var f *ledger.FieldError
	if !errors.As(err, &f) {
		return err
	}
	return invalid(f.Field, job.CodeInvalidValue, "%s %s.", f.Field, f.Problem)
}

// fields are where the fields of a body go, by name: pointers to string, whole number, bool, list of strings, *job.Millis (a time in unix seconds), or *ledger.Limits.
type fields map[string]any

// readFields reads a body's fields strictly: one that is not among them is refused. A null is as if it were not given. optional allows that there is no body.
func (s *Server) readFields(c echo.Context, optional bool, to fields) error {
	read := func() (*job.Object, func(), error) {
		_, o, release, err := s.readBody(c)
		return o, release, err
	}
	if optional {
		read = func() (*job.Object, func(), error) { return s.readOptional(c) }
	}
	o, release, err := read()
	if err != nil {
		return err
	}
	defer release()
	return to.read(o)
}

// readOptional is readBody of a request that may have no body, or a blank one, and is then as one without fields.
func (s *Server) readOptional(c echo.Context) (o *job.Object, release func(), err error) {
	if c.Request().ContentLength == 0 {
		return &job.Object{}, func() {}, nil
	}
	body, o, release, err := s.readBody(c)
	if err != nil && body != nil && len(bytes.TrimSpace(body)) == 0 {
		return &job.Object{}, func() {}, nil
	}
	return o, release, err
}

// read reads o's fields as readFields does.
func (to fields) read(o *job.Object) error {
	for _, f := range o.Fields {
		into, ok := to[f.Key]
		if !ok {
			return invalid(clip(f.Key), job.CodeUnsupportedParameter, "There is no field %q.", clip(f.Key))
		}
		if isNull(f.Value) {
			continue
		}
		if err := readField(f.Key, f.Value, into); err != nil {
			return err
		}
	}
	return nil
}

func readField(name string, raw json.RawMessage, into any) error {
	what := "a string"
	switch v := into.(type) {
	case *ledger.Limits:
		return readLimits(name, raw, v)
	case *job.Millis:
		var at float64
		if json.Unmarshal(raw, &at) != nil || at < 0 || at > maxUnix {
			return invalid(name, job.CodeInvalidType, "%s must be a time in unix seconds.", name)
		}
		*v = job.Millis(at * 1000)
		return nil
	case *int:
		what = "a whole number"
	case *bool:
		what = "true or false"
	case *[]ledger.Scope, *[]job.Model:
		what = "a list of strings"
		if bytes.Contains(raw, []byte("null")) { // which decoding takes for an empty string
			var list []*string
			if json.Unmarshal(raw, &list) == nil && slices.Contains(list, nil) {
				return invalid(name, job.CodeInvalidType, "%s must be %s.", name, what)
			}
		}
	}
	if json.Unmarshal(raw, into) != nil {
		return invalid(name, job.CodeInvalidType, "%s must be %s.", name, what)
	}
	return nil
}

// maxUnix bounds times in unix seconds: the year 9999.
const maxUnix = 253402300799

// readLimits reads those limits that are given; null is 0, no limit.
func readLimits(name string, raw json.RawMessage, l *ledger.Limits) error {
	o, err := job.ParseObject(raw)
	if err != nil {
		return invalid(name, job.CodeInvalidType, "%s must be an object of whole numbers.", name)
	}
	for _, f := range o.Fields {
		path := name + "." + clip(f.Key)
		into := l.Named(f.Key)
		if into == nil {
			return invalid(path, job.CodeUnsupportedParameter, "There is no limit %q: there are %v.", clip(f.Key), ledger.LimitNames())
		}
		*into = 0
		if !isNull(f.Value) && json.Unmarshal(f.Value, into) != nil {
			return invalid(path, job.CodeInvalidType, "%s must be a whole number, or null for no limit.", path)
		}
	}
	return nil
}
