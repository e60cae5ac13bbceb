package worker

import (
	"context"
	"slices"
	"time"

	"github.com/millrace/millrace/internal/affinity"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/results"
)

const (
	// maxBinds bounds the jobs whose bindings wait to be written. Those of more are dropped: a binding is a hint.
	maxBinds = 256
	// bindTimeout bounds one trip to the store.
	bindTimeout = time.Second
	// rebindShare of a beginning's TTL is how long it counts as bound without being bound again: one that all prompts share would be written by each.
	rebindShare = 10
	// maxRecent bounds how many beginnings are remembered for that.
	maxRecent = 20_000
)

// binding is one to write, of a job's model.
type binding struct {
	results.Binding
	model job.Model
}

// bind notes that the engine has j's prompt in its cache now, if o is a success, for those who look where the next like it should go. request is the client's body. It waits for nothing, and
// is called as soon as the engine has answered: most often it is written before the client has heard of it and sends the next turn.
func (w *Worker) bind(j *job.Job, request []byte, o *job.Outcome) {
	if o.State != job.Completed {
		return
	}
	all := affinity.Workers(w.deps.Cluster.Members(), j.Model)
	if len(all) < 2 || !slices.ContainsFunc(all, func(o affinity.Worker) bool { return o.ID == w.id }) {
		return // there is no choice, or this one's cache is about to go
	}
	ttl, most := w.cfg.SessionTTL, 1
	var body *job.Object
	if j.Session == "" {
		ttl, most = w.cfg.PrefixTTL, affinity.MostOwners
		if !w.cfg.NoPrefixAffinity && j.Endpoint.Generates() {
			var err error
			if body, err = job.ParseObject(request); err != nil {
				return // not reached: it was parsed when it was accepted
			}
		}
	}
	keys := affinity.Keys(j, body, !w.cfg.NoPrefixAffinity)
	if len(keys) == 0 {
		return
	}
	list := make([]binding, 0, len(keys))
	for _, k := range keys {
		list = append(list, binding{results.Binding{Key: k, Worker: w.id, TTL: ttl, Most: most}, j.Model})
	}
	select {
	case w.binds <- list:
	default:
	}
}

// writeBinds writes the bindings that come, as many at once as there are, until ctx ends.
func (w *Worker) writeBinds(ctx context.Context) {
	var known recent
	for {
		var list []binding
		select {
		case <-ctx.Done():
			return
		case list = <-w.binds:
		}
		for len(w.binds) > 0 && len(list) < maxBinds {
			list = append(list, <-w.binds...)
		}
		list = slices.DeleteFunc(list, func(b binding) bool {
			return b.Most > 1 && known.has(b.Key, time.Now(), b.TTL/rebindShare)
		})
		if err := w.writeBindings(ctx, list); err != nil {
			w.log.Debug("telling whose cache holds a prompt", "err", err) // the store's absence is told by those who need it
			continue
		}
		for _, b := range list {
			if b.Most > 1 {
				known.add(b.Key)
			}
		}
	}
}

// writeBindings writes bindings, and then those once more that found no place, in the place of workers that are gone or still overloaded.
func (w *Worker) writeBindings(ctx context.Context, list []binding) error {
	ctx, cancel := context.WithTimeout(ctx, bindTimeout)
	defer cancel()
	var again []binding
	for n := range 2 {
		if len(list) == 0 {
			return nil
		}
		plain := make([]results.Binding, 0, len(list))
		for _, b := range list {
			plain = append(plain, b.Binding)
		}
		owners, err := w.deps.Results.Bind(ctx, plain...)
		if err != nil || n > 0 {
			return err
		}
		members := w.deps.Cluster.Members()
		for i, bound := range owners {
			if b := list[i]; !slices.Contains(bound, w.id) {
				if b.Replace = affinity.Replaceable(w.id, bound, affinity.Workers(members, b.model)); len(b.Replace) > 0 {
					again = append(again, b)
				}
			}
		}
		list = again
	}
	return nil
}

// recent is a set of keys that forgets them after a time. The zero value is empty.
type recent struct {
	now, before map[string]struct{}
	turned      time.Time
}

// has tells whether key was added within about the last period.
func (r *recent) has(key string, now time.Time, period time.Duration) bool {
	if now.Sub(r.turned) > period || len(r.now) >= maxRecent/2 {
		r.now, r.before, r.turned = map[string]struct{}{}, r.now, now
	}
	_, young := r.now[key]
	_, old := r.before[key]
	return young || old
}

func (r *recent) add(key string) { r.now[key] = struct{}{} }
