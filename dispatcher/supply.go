package dispatcher

import (
	"context"

	"github.com/millrace/millrace/internal/job"
)

// supply is work of one tenant for one model that waits outside the lane which workers pull: the tenant's waiting line of one class, or a batch's lines. Only its model's feeder calls it, one call at a time; other supplies,
// of the same model too, are called meanwhile.
type supply interface {
	tenant() job.Tenant
	class() job.Class
	// name tells the supply from all others of its model, and stays.
	name() string
	// head is what the next job is expected to need; false if there is none for now. It may read ahead.
	head(ctx context.Context) (job.Tokens, bool, error)
	// feed moves the next jobs into the lane that workers pull, as class c, up to most jobs of at most tokens in all but for the first, and returns what was moved. An error may come with a part.
	feed(ctx context.Context, c job.Class, most int, tokens job.Tokens) ([]fed, error)
	// urgency is the share of the model's throughput, 0..1, that the supply needs from now on to be done in time; 0 where it has no end, or time to spare.
	urgency(throughput float64) float64
}

// fed is one job that was moved into the lane.
type fed struct {
	id     job.ID
	tokens job.Tokens
}

// supplies are where the feeder finds work besides the waiting lines: the batch driver's. What it gets new, it tells by feeder.wake.
type supplies interface {
	// of lists the running batches' supplies of a model; models lists the models that have any.
	of(m job.Model) []supply
	models() []job.Model
}
