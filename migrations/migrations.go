// Package migrations holds the SQL schema as numbered steps, the same for PostgreSQL and SQLite. A step that was released is never changed: the next one adds to it.
package migrations

import "embed"

// FS holds the steps, in goose's format.
//
//go:embed *.sql
var FS embed.FS
