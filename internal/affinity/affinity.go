// Package affinity decides where a request's KV cache may still be: by its session, or by how it begins. Its decisions are pure; the bindings stand in the results store.
//
// # Keys
//
// A key stands for a session, or for a beginning of prompts. It is a hash over the tenant and the model too, so no tenant ever shares one, it tells nothing of what it stands for, and
// all are equally long. A session has one owner at a time, the worker that its binding names. A beginning has up to [MostOwners]: prompts that many share, as a system prompt, are soon
// cached in several places, and must not pull everything to one.
//
// # Bounded load
//
// A binding is a preference. An owner is used while it has at most [Slack] times its fair share of the jobs and is less than [FullAt] full, after "Consistent Hashing with Bounded
// Loads" (Mirrokni, Thorup, Zadimoghaddam, 2016); else the job goes where any worker pulls it, at once. The worker that then runs it has the newest turns in its cache, and the owner the
// older ones, so neither is cold, and the binding moves only if the overload has outlasted the turn: see [Replaceable].
package affinity

import (
	"cmp"
	"math"
	"slices"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
)

// Bounds of the load under which an owner is used.
const (
	// Slack is how many times its fair share of the jobs an owner may have.
	Slack = 1.25
	// FullAt is the load, 0..1, from which on an owner gets no more by affinity.
	FullAt = 0.8
	// Few jobs at once are never too many, whatever the fair share: what so many cost each other in one batch is little beside a prompt that is computed anew, and chance alone puts so
	// many together. Without it one turn in seven of fifty sessions over four workers spilled at a tenth of their load.
	Few = 8
)

// MostOwners bounds how many workers are bound to one beginning of prompts.
const MostOwners = 4

// Worker is what is known of a worker that serves the model and is ready.
type Worker struct {
	ID job.Worker
	// Capacity of its KV cache, the measure of its fair share.
	Capacity job.Tokens
	// Load is the share of what may be used that is, 0..1 and more: of its KV cache, or of the sequences that it may run where fewer of those are free.
	Load float64
	// Jobs that run or are in its hand, Limit how many may run at once; 0 is no limit.
	Jobs, Limit int
	// Braked: it takes nothing now though it may have room, or leaves what it can to others.
	Braked bool
}

// Workers lists the workers of model m that are ready, as they said last.
func Workers(members []cluster.Member, m job.Model) []Worker {
	var list []Worker
	for _, member := range members {
		w := member.Worker
		if w == nil || w.State != cluster.Ready || !slices.Contains(w.Models, m) {
			continue
		}
		load := w.Load
		if w.CacheLoad > 0 { // an engine whose places are taken by batches has room in its cache, and places that are not for batches
			load = w.CacheLoad
			if w.Limit > 0 {
				load = max(load, float64(w.Sequences)/float64(w.Limit))
			}
		}
		list = append(list, Worker{
			ID: job.Worker(member.ID), Capacity: w.Capacity, Load: load, Jobs: w.Running + w.InHand, Limit: w.Limit, Braked: w.Brake != "" || w.Yields,
		})
	}
	return list
}

// Assign counts jobs that the worker was given since it said what it has, with prompts of that many tokens together. Negative are those that have ended since.
func (w *Worker) Assign(jobs int, prompts job.Tokens) {
	w.Jobs = max(0, w.Jobs+jobs)
	if w.Capacity > 0 {
		w.Load = max(0, w.Load+float64(prompts)/float64(w.Capacity))
	}
}

// Overloaded tells whether w, one of all, has too much for another job to be sent to it.
func Overloaded(w Worker, all []Worker) bool {
	if w.Braked || w.Load >= FullAt || w.Limit > 0 && w.Jobs >= w.Limit {
		return true
	}
	jobs, share := 0, 1/float64(len(all))
	var capacity job.Tokens
	known := true
	for _, o := range all {
		jobs += o.Jobs
		capacity += o.Capacity
		known = known && o.Capacity > 0
	}
	if known {
		share = float64(w.Capacity) / float64(capacity)
	}
	return w.Jobs >= max(Few, int(math.Ceil(Slack*share*float64(jobs+1))))
}

// Result is what came of a look for a warm cache.
type Result string

// The results. Off is where no look was taken, or one would not have helped.
const (
	Hit   Result = "hit"
	Spill Result = "spill" // an owner is known, and gone or overloaded
	Miss  Result = "miss"
	Off   Result = "off"
)

// Choose picks the worker to send a job to, given who is bound to each of its keys, the deepest key last. The deepest that has an owner among the workers decides; of several owners it
// is the least loaded. "" is any worker. Where most workers are owners it is any, too: whoever pulls it next has the cache, most likely, and knows its own load best.
func Choose(owners [][]job.Worker, all []Worker) (job.Worker, Result) {
	result := Miss
	for _, bound := range slices.Backward(owners) {
		var live []Worker
		for _, w := range all {
			if slices.Contains(bound, w.ID) {
				live = append(live, w)
			}
		}
		switch {
		case len(live) == 0:
			if len(bound) > 0 {
				result = Spill
			}
			continue
		case len(live) > 1 && 2*len(live) > len(all):
			return "", Off
		}
		live = slices.DeleteFunc(live, func(w Worker) bool { return Overloaded(w, all) })
		if len(live) == 0 {
			return "", Spill
		}
		return slices.MinFunc(live, func(a, b Worker) int { return cmp.Compare(a.Load, b.Load) }).ID, Hit
	}
	return "", result
}

// Replaceable lists those of owners whose binding me, the worker that has just run a job with success, may take over: the owner is gone, or is still overloaded while me is not. So a
// short overload moves nothing, and where all are overloaded nothing moves to and fro.
func Replaceable(me job.Worker, owners []job.Worker, all []Worker) []job.Worker {
	var list []job.Worker
	free := slices.ContainsFunc(all, func(w Worker) bool { return w.ID == me && !Overloaded(w, all) })
	for _, o := range owners {
		i := slices.IndexFunc(all, func(w Worker) bool { return w.ID == o })
		if i < 0 || free && Overloaded(all[i], all) {
			list = append(list, o)
		}
	}
	return list
}
