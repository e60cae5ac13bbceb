package engine

import "context"

// Anything else that speaks OpenAI's API: what it holds is configured, and what it holds now is for its caller to count.
var generic = &driver{
	kind:   Generic,
	health: []string{"/health", "/v1/models"},
	load: func(context.Context, *Engine, *session) (Load, string, error) {
		return unknownLoad(), tellsNothing, nil
	},
}
