package queue

import (
	"context"
	"errors"
	"fmt"

	"github.com/millrace/millrace/internal/job"
)

const linePageBytes = 1 << 20 // of one page of a line: bodies travel with their headers

// Line names the messages of one class in one lane.
type Line struct {
	Class job.Class
	Lane  Lane
}

// LinePage reads up to most messages of a line of a model's WORK stream from sequence from on, in stream order, headers only. next is the sequence to go on from. The page may be short; an empty one says that there are
// none, as far as the replica knows that answers: what was stored or removed a moment ago may be missing or still there. It costs what it reads, however much waits in other lines. A message that cannot be read is logged and left out.
func (q *Queue) LinePage(ctx context.Context, name job.Model, l Line, from uint64, most int) (page []*Stored, next uint64, err error) {
	m := q.model(name)
	filter := m.prefix(Work) + string(l.Class) + "." + l.Lane.token() + ".*"
	for next = max(from, 1); len(page) == 0; {
		all, last, err := q.directPage(ctx, m.stream(Work), filter, next, most, linePageBytes)
		if err != nil {
			return nil, next, fmt.Errorf("reading lane %s of model %s: %w", l.Lane, name, outward(err))
		}
		for _, r := range all {
			next = r.seq + 1
			s, err := decodeStored(r, Work, false)
			if err != nil {
				q.log.Error("a queued message cannot be read", "stream", m.stream(Work), "err", err)
				continue
			}
			page = append(page, s)
		}
		if last {
			break
		}
	}
	return page, next, nil
}

// LineIDs lists the ids of the jobs that wait in a lane of a model's WORK stream, of any class. The leader answers.
func (q *Queue) LineIDs(ctx context.Context, name job.Model, lane Lane) (map[job.ID]bool, error) {
	m := q.model(name)
	ids := map[job.ID]bool{}
	err := q.subjects(ctx, m.stream(Work), m.prefix(Work)+"*."+lane.token()+".*", func(subject string, _ int) error {
		p, err := parsePlace(subject)
		if err != nil {
			q.log.Error("a queued message's subject cannot be read", "stream", m.stream(Work), "err", err)
			return nil
		}
		ids[p.id] = true
		return nil
	})
	if err != nil && !errors.Is(err, errNoStream) {
		return nil, fmt.Errorf("listing lane %s of model %s: %w", lane, name, outward(err))
	}
	return ids, nil
}

// Shared counts the messages of AnyLane in one of a model's streams by class: those that wait and those that workers have. It costs three short requests, whatever waits elsewhere.
func (q *Queue) Shared(ctx context.Context, kind Kind, name job.Model) (waiting, delivered map[job.Class]int, err error) {
	ctx, cancel := q.bound(ctx)
	defer cancel()
	waiting, delivered = map[job.Class]int{}, map[job.Class]int{}
	if err := q.shared(ctx, q.model(name).stream(kind), waiting, delivered); err != nil && !errors.Is(err, errNoStream) { // no stream: nothing waits
		return nil, nil, fmt.Errorf("counting the %s stream of model %s: %w", kind, name, outward(err))
	}
	return waiting, delivered, nil
}

// shared counts what the consumers of a stream say. A class without a consumer is missing.
func (q *Queue) shared(ctx context.Context, stream string, waiting, delivered map[job.Class]int) error {
	for _, c := range job.Classes() {
		var info struct {
			Pending    int `json:"num_pending"`
			AckPending int `json:"num_ack_pending"`
		}
		err := q.call(ctx, "CONSUMER.INFO."+stream+"."+string(c), struct{}{}, &info)
		if hasCode(err, codeNoConsumer) { // its next user makes it again
			continue
		}
		if err != nil {
			return err
		}
		waiting[c], delivered[c] = info.Pending, info.AckPending
	}
	return nil
}
