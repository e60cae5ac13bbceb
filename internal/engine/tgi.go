package engine

import (
	"context"
	"math"

	"github.com/millrace/millrace/internal/job"
)

// TGI, text-generation-inference from its version 3 on. What it tells as used is reserved: a request's prompt and all that it may yet write. Its gauges of the running
// batch appear with the first one.
var tgi = &driver{
	kind:       TGI,
	signs:      []string{"tgi_"},
	recognize:  recognizeTGI,
	health:     []string{"/health"},
	hint:       "text-generation-launcher serves /metrics beside its API, and tells its batch from the first request on",
	load:       fromMetrics(tgiLoad),
	rawPrompts: true,
}

func recognizeTGI(ctx context.Context, e *Engine) (facts, bool, error) {
	var info struct {
		Model         job.Model  `json:"model_id"`
		MaxConcurrent int        `json:"max_concurrent_requests"`
		MaxBatch      int        `json:"max_batch_size"`
		Length        job.Tokens `json:"max_total_tokens"`
		BatchTokens   job.Tokens `json:"max_batch_total_tokens"`
		Shards        int        `json:"num_shard"`
	}
	ok, err := e.hasJSON(ctx, "/info", &info)
	if !ok || err != nil || info.Model == "" || info.MaxConcurrent < 1 || info.Length < 1 { // its sister for embeddings has no max_total_tokens
		return facts{}, false, err
	}
	f := facts{
		shape:         Shape{TensorParallel: max(info.Shards, 0)},
		capacity:      believed(info.BatchTokens),
		maxRunning:    int(believed(job.Tokens(info.MaxConcurrent))),
		model:         info.Model,
		contextLength: believed(info.Length),
	}
	if batch := int(believed(job.Tokens(info.MaxBatch))); batch > 0 {
		f.maxRunning = min(f.maxRunning, batch)
	}
	return f, true, nil
}

func tgiLoad(m metrics, f facts, _ Config) (l Load, missing string) {
	l = unknownLoad() // it counts tokens when a request ends
	l.MaxRunning = f.maxRunning
	missing = l.queue(m, "tgi_batch_current_size", "tgi_queue_size")
	capacity, ok := by(m.samples("tgi_batch_max_total_tokens"), math.Min)[""]
	if !ok {
		capacity = float64(f.capacity)
	}
	if !(capacity >= 1) { // NaN
		return l, "tgi_batch_max_total_tokens"
	}
	rank := Rank{Capacity: job.Tokens(capacity)}
	if used := at(by(m.samples("tgi_batch_current_max_tokens"), math.Max), ""); used <= capacity {
		rank.Used = job.Tokens(used)
	} else { // NaN, or more than there is
		missing = "tgi_batch_current_max_tokens"
	}
	l.Ranks = []Rank{rank}
	return l, missing
}
