package api

import (
	"maps"
	"net/http"
	"slices"

	"github.com/labstack/echo/v4"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
)

// modelObject is a model as the OpenAI routes show it. Created is since when it is known, in unix seconds.
type modelObject struct {
	ID      job.Model `json:"id"`
	Object  string    `json:"object"`
	Created int64     `json:"created"`
	OwnedBy string    `json:"owned_by"`
}

func newModel(k cluster.KnownModel) modelObject {
	return modelObject{ID: k.Model, Object: "model", Created: k.First / 1000, OwnedBy: "millrace"}
}

// listModels answers GET /v1/models with every model that can be asked for.
func (s *Server) listModels(c echo.Context) error {
	known := make(map[job.Model]cluster.KnownModel)
	held, err := s.fills.all(c.Request().Context())
	if err != nil {
		return err
	}
	for m := range held {
		known[m] = cluster.KnownModel{Model: m}
	}
	for _, k := range s.deps.Cluster.Known() {
		known[k.Model] = k
	}
	models, who := make([]modelObject, 0, len(known)), identityOf(c)
	for _, m := range slices.Sorted(maps.Keys(known)) {
		if !mayUse(who, m) {
			continue
		}
		models = append(models, newModel(known[m]))
	}
	return writeJSON(c, http.StatusOK, newList(models, func(m modelObject) string { return string(m.ID) }, false))
}

// getModel answers GET /v1/models/{model}.
func (s *Server) getModel(c echo.Context) error {
	m := job.Model(pathParam(c, "model"))
	if !mayUse(identityOf(c), m) {
		return noModel(m)
	}
	k, ok, err := s.known(c.Request().Context(), m)
	if err != nil {
		return err
	}
	if !ok {
		return noModel(m)
	}
	return writeJSON(c, http.StatusOK, newModel(k))
}
