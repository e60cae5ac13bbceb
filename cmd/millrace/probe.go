package main

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"slices"
	"sync"
	"time"
)

// found is an inference engine that answers on its usual port.
type found struct{ name, url string }

// suspects are the engines' usual addresses, and a route whose JSON answer has a field that tells each.
var suspects = []struct {
	found
	path, field string
}{
	{found{"Ollama", "http://127.0.0.1:11434"}, "/api/version", "version"},
	{found{"vLLM", "http://127.0.0.1:8000"}, "/version", "version"},
	{found{"llama.cpp", "http://127.0.0.1:8080"}, "/props", "default_generation_settings"},
	{found{"llama.cpp", "http://127.0.0.1:8081"}, "/props", "default_generation_settings"},
}

// findEngines asks all usual addresses at once, and takes half a second at most.
func findEngines(ctx context.Context) []found {
	ctx, cancel := context.WithTimeout(ctx, 500*time.Millisecond)
	defer cancel()
	c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	answers := make([]bool, len(suspects))
	var wg sync.WaitGroup
	for i, s := range suspects {
		wg.Go(func() { answers[i] = hasField(ctx, c, s.url+s.path, s.field) })
	}
	wg.Wait()
	var all []found
	for i, s := range suspects {
		if answers[i] && !slices.Contains(all, s.found) {
			all = append(all, s.found)
		}
	}
	return all
}

func hasField(ctx context.Context, c *http.Client, url, field string) bool {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return false
	}
	resp, err := c.Do(req)
	if err != nil {
		return false
	}
	defer resp.Body.Close() //nolint:errcheck // read as far as it matters
	var v map[string]json.RawMessage
	return resp.StatusCode == http.StatusOK && json.NewDecoder(io.LimitReader(resp.Body, 1<<20)).Decode(&v) == nil && v[field] != nil
}
