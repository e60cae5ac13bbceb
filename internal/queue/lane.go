package queue

import (
	"context"
	"errors"
	"fmt"
	"iter"

	"github.com/millrace/millrace/internal/job"
)

// Undelivered yields the messages of a worker's lane that were never delivered, in stream order, headers only. What its worker has, or had and handed back, is not among them: that is
// the worker's own to move. Like Waiting it may be a moment behind, so a message that it yields can be on its way to the worker by now.
func (q *Queue) Undelivered(ctx context.Context, kind Kind, name job.Model, lane Lane) iter.Seq2[*Stored, error] {
	var info struct {
		Delivered struct {
			Stream uint64 `json:"stream_seq"`
		} `json:"delivered"`
	}
	err := q.call(ctx, "CONSUMER.INFO."+q.model(name).stream(kind)+"."+lane.token(), struct{}{}, &info)
	if err != nil && !hasCode(err, codeNoConsumer) && !errors.Is(err, errNoStream) { // without a consumer nothing is delivered
		err = fmt.Errorf("reading what lane %s of model %s has delivered: %w", lane, name, outward(err))
		return func(yield func(*Stored, error) bool) { yield(nil, err) }
	}
	return q.waitingFrom(ctx, kind, name, lane, false, info.Delivered.Stream+1)
}
