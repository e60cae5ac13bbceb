// Package resultstest is the conformance suite of package results: the same tests on a real Redis, on a cluster, and on the embedded store.
package resultstest

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/results"
)

// Run runs the suite on the server at url. Each test keeps to keys of its own.
func Run(t *testing.T, url string) {
	for name, test := range map[string]func(*env){
		"claim takes a queued job":                  claimTakes,
		"claim takes a job that is still accepting": claimTakesAccepting,
		"claim finds the job ended":                 claimEnded,
		"claim finds the job held":                  claimHeld,
		"claim repeated is the same claim":          claimRepeated,
		"claim comes too early":                     claimTooEarly,
		"claim must look at DONE":                   claimChecks,
		"claim finds no record":                     claimUnrecorded,
		"claim takes over a lease that ran out":     claimLapsed,
		"claim after a dead worker":                 claimAfterDeath,
		"claim learns of a cancel":                  claimCancelled,
		"claim numbers events above lost ones":      claimNumbersLost,
		"claim leaves a partial answer":             claimPartial,
		"claim keeps fifty attempts":                claimTrimsAttempts,
		"an old token is refused":                   oldTokenFenced,
		"ended jobs refuse all writes":              endedFenced,
		"renew extends":                             renewExtends,
		"renew rebuilds":                            renewRebuilds,
		"give back":                                 giveBack,
		"end lease":                                 endLease,
		"held sets":                                 heldSets,
		"events over attempts":                      eventsOverAttempts,
		"events are bytes":                          eventsAreBytes,
		"append repeats":                            appendRepeats,
		"restore":                                   restoreStream,
		"stream is bounded":                         streamBounded,
		"finish":                                    finish,
		"finish after a stranger's events":          finishAfterEvents,
		"finish with a reset":                       finishReset,
		"finish before any attempt":                 finishUnstarted,
		"finish writes a lost record":               finishLost,
		"first token":                               firstToken,
		"version rises":                             versionRises,
		"idempotency keys":                          keys,
		"fifty reserve one key":                     keysConcurrent,
		"accept, queued, discard":                   submit,
		"accept races discard":                      acceptRacesDiscard,
		"list pages":                                listPages,
		"list filters":                              listFilters,
		"list outlives removals":                    listRemovals,
		"due":                                       due,
		"live":                                      live,
		"cancel":                                    cancel,
		"delete":                                    remove,
		"sentinel":                                  sentinel,
		"rebuild":                                   rebuild,
		"wiped in every state":                      wipedInEveryState,
		"sessions are bound":                        sessionsBound,
		"sessions expire":                           sessionsExpire,
		"sessions are raced for":                    sessionsRaced,
		"sessions are wiped":                        sessionsWiped,
		"beginnings of prompts are bound":           prefixesBound,
		"scripts flushed":                           scriptsFlushed,
		"backlog counts once":                       backlogCounts,
		"backlog limits":                            backlogLimits,
		"backlog keeps lines apart":                 backlogLines,
		"backlog limits hold in a race":             backlogRace,
		"backlog places":                            backlogPlaces,
		"backlog members":                           backlogMembers,
		"backlog after a wipe":                      backlogRebuilt,
		"backlog repaired":                          backlogRepaired,
		"rates":                                     rates,
		"rates hold in a race":                      ratesConcurrent,
		"running calls are counted":                 occupancy,
		"running calls of the dead are forgotten":   occupancyHeals,
		"lines of batches are accepted":             linesAccepted,
		"lines of batches keep no body":             linesKeepNoBody,
		"a line's record is soon gone":              lineRecordIsSoonGone,
		"every key expires":                         everyKeyExpires,
		"clock":                                     clock,
	} {
		t.Run(strings.ReplaceAll(name, " ", "_"), func(t *testing.T) {
			t.Parallel()
			test(newEnv(t, url))
		})
	}
}

// env is one test's store and what looks at it from outside.
type env struct {
	testing.TB
	*results.Store
	ctx    context.Context
	raw    redis.UniversalClient
	url    string
	prefix string
}

var prefixes atomic.Int64

func newEnv(t testing.TB, url string, change ...func(*results.Config)) *env {
	t.Helper()
	prefix := fmt.Sprintf("t%d:", prefixes.Add(1))
	cfg := results.Config{URL: url, Prefix: prefix}
	for _, f := range change {
		f(&cfg)
	}
	s, err := results.Open(t.Context(), cfg, slog.New(slog.NewTextHandler(t.Output(), nil)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	var raw redis.UniversalClient
	if addrs := strings.Split(url, ","); len(addrs) > 1 {
		raw = redis.NewClusterClient(&redis.ClusterOptions{Addrs: addrs})
	} else {
		o, err := redis.ParseURL(url)
		if err != nil {
			t.Fatal(err)
		}
		raw = redis.NewClient(o)
	}
	t.Cleanup(func() { _ = raw.Close() })
	return &env{TB: t, Store: s, ctx: t.Context(), raw: raw, url: url, prefix: prefix}
}

// keys lists all keys of the test.
func (e *env) keys() []string {
	e.Helper()
	var keys []string
	scan := func(ctx context.Context, c *redis.Client) error {
		it := c.Scan(ctx, 0, e.prefix+"*", 1000).Iterator()
		for it.Next(ctx) {
			keys = append(keys, it.Val())
		}
		return it.Err()
	}
	var err error
	switch c := e.raw.(type) {
	case *redis.ClusterClient:
		err = c.ForEachMaster(e.ctx, scan)
	case *redis.Client:
		err = scan(e.ctx, c)
	}
	e.ok(err)
	return keys
}

// wipe is FLUSHALL as far as the test's store can tell.
func (e *env) wipe() {
	e.Helper()
	for _, k := range e.keys() {
		e.ok(e.raw.Del(e.ctx, k).Err())
	}
}

func (e *env) ok(err error) {
	e.Helper()
	if err != nil {
		e.Fatal(err)
	}
}

// job makes a job that keeps events, created now.
func (e *env) job(change ...func(*job.Job)) *job.Job {
	now := e.Now()
	j := &job.Job{
		ID: job.NewID(now.Time()), Tenant: "acme", Model: "m", Endpoint: job.ChatCompletions, Class: job.Standard, Group: job.NoGroup,
		Events: true, Created: now, Expires: now + job.Millis(time.Hour.Milliseconds()), Metadata: map[string]string{"big": "9007199254740993"},
	}
	for _, f := range change {
		f(j)
	}
	return j
}

var body = []byte(`{"model":"m","n":9007199254740993,"x":"<b>&</b>` + "\x00\xff" + `"}`)

// accept accepts a job without limits.
func (e *env) accept(j *job.Job, body []byte) (job.State, job.Millis, error) {
	a, err := e.Accept(e.ctx, j, body, results.Limits{})
	if err != nil {
		return "", 0, err
	}
	return a.State, a.Since, nil
}

// queued submits a job.
func (e *env) queued(change ...func(*job.Job)) *job.Job {
	e.Helper()
	j := e.job(change...)
	state, since, err := e.accept(j, body)
	e.ok(err)
	if state != job.Accepting || since < j.Created-1000 {
		e.Fatalf("accepted job is %s since %d", state, since)
	}
	e.ok(e.Queued(e.ctx, j, body))
	return j
}

// request is a first delivery's claim.
func request(j *job.Job, w job.Worker) results.ClaimRequest {
	return results.ClaimRequest{Job: j, Worker: w, Lease: 15 * time.Second, AckSubject: "$JS.ACK." + string(w) + ".1", Delivered: 1}
}

// again is the claim of a later delivery, after a look at DONE.
func again(j *job.Job, w job.Worker, delivered int) results.ClaimRequest {
	r := request(j, w)
	r.AckSubject, r.Delivered, r.Checked = fmt.Sprintf("$JS.ACK.%s.%d", w, delivered), delivered, true
	return r
}

func (e *env) claim(r results.ClaimRequest, want results.Verdict) *results.Claim {
	e.Helper()
	c, err := e.Claim(e.ctx, r)
	e.ok(err)
	if c.Verdict != want {
		e.Fatalf("claim is %s, want %s: %+v", c.Verdict, want, c)
	}
	return c
}

func (e *env) get(j *job.Job) *results.Record {
	e.Helper()
	r, err := e.Get(e.ctx, j.ID)
	e.ok(err)
	return r
}

func (e *env) state(j *job.Job, want job.State) *results.Record {
	e.Helper()
	r := e.get(j)
	if r.State != want {
		e.Fatalf("job is %s, want %s: %+v", r.State, want, r)
	}
	return r
}

// tokens makes token events n, n+1, … of an attempt.
func tokens(c *results.Claim, n int64, data ...string) []job.Event {
	var list []job.Event
	for i, d := range data {
		list = append(list, job.Event{N: n + int64(i), Token: c.Token, Kind: job.EventToken, Data: []byte(d)})
	}
	return list
}

func completed(c *results.Claim, e *env, last int64) *job.Outcome {
	return &job.Outcome{State: job.Completed, Token: c.Token, StatusCode: 200, ContentType: "application/json", Finished: e.Now(), LastEvent: last}
}

// all reads a job's whole stream.
func (e *env) all(j *job.Job) []job.Event {
	e.Helper()
	list, _, err := e.Events(e.ctx, j.ID, 0, 100_000)
	e.ok(err)
	return list
}

// show writes events as "n:kind:data".
func show(list []job.Event) []string {
	var lines []string
	for _, ev := range list {
		lines = append(lines, fmt.Sprintf("%d:%s:%s", ev.N, ev.Kind, ev.Data))
	}
	return lines
}
