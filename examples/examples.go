// Package examples holds the requests that `millrace demo` sends. Beside it stand small clients to read and copy from.
package examples

import _ "embed" // for Prompts

// Prompts is the file prompts.jsonl: on each line the body of a chat completion without its model.
//
//go:embed prompts.jsonl
var Prompts []byte
