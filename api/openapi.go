package api

import (
	_ "embed"
	"net/http"

	"github.com/labstack/echo/v4"
)

// openapi.json describes every route that is served, and no other; a test holds it to that.
//
//go:embed openapi.json
var openAPIDocument []byte

// openAPI answers GET /openapi.json.
func (s *Server) openAPI(c echo.Context) error { return writeRaw(c, http.StatusOK, openAPIDocument) }
