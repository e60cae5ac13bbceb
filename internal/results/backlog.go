package results

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/millrace/millrace/internal/job"
)

// Amount is durable work: jobs, the bytes of their bodies, and the tokens that they are expected to need.
type Amount struct {
	Jobs, Bytes int64
	Tokens      job.Tokens
}

// Limits bound what is accepted and has not ended: of one tenant in one model, of one tenant in all models, and of one model for all tenants. 0 is no limit. The lines of batches count in the last alone.
type Limits struct{ Queue, Tenant, Model Amount }

// Unit is what a limit counts.
type Unit string

// The units.
const (
	Jobs   Unit = "jobs"
	Bytes  Unit = "bytes"
	Tokens Unit = "tokens"
)

// Scope is whose work a limit bounds.
type Scope string

// The scopes.
const (
	OfQueue  Scope = "queue"  // one tenant's in one model
	OfTenant Scope = "tenant" // one tenant's in all models
	OfModel  Scope = "model"  // all tenants' in one model
)

// LimitError is why a job was not accepted: Used of Limit are in use, and the job asked for Asked more.
type LimitError struct {
	Scope              Scope
	Unit               Unit
	Limit, Used, Asked int64
	// Place is where the job would stand: behind all that is there.
	Place Place
}

func (e *LimitError) Error() string {
	return fmt.Sprintf("the %s's limit of %d %s: %d are in use, and the job needs %d", e.Scope, e.Limit, e.Unit, e.Used, e.Asked)
}

// Place is where a durable job stands among all of its model that have not ended.
type Place struct {
	// Jobs of its own class came before it and have not ended, and Tokens are theirs. Both suppose that jobs of a class end in the order in which they came.
	Jobs   int64
	Tokens job.Tokens
	// Classes is what there is of each class in all, by rank.
	Classes [3]ClassAmount
}

// ClassAmount is what a model has accepted in one class and not ended.
type ClassAmount struct {
	Jobs   int64
	Tokens job.Tokens
}

// Backlog is what a model has accepted and not ended.
type Backlog struct {
	Tenants map[job.Tenant]Amount
	Classes map[job.Class]Amount
}

// Sum is all of it. A nil backlog is none.
func (b *Backlog) Sum() Amount {
	var sum Amount
	if b != nil {
		for _, a := range b.Classes {
			sum.Jobs += a.Jobs
			sum.Bytes += a.Bytes
			sum.Tokens += a.Tokens
		}
	}
	return sum
}

// Largest is the part of the n tenants that have the most tokens in it.
func (b *Backlog) Largest(n int) map[job.Tenant]Amount {
	if b == nil {
		return nil
	}
	if len(b.Tenants) <= n {
		return b.Tenants
	}
	names := slices.SortedFunc(maps.Keys(b.Tenants), func(x, y job.Tenant) int {
		return cmp.Or(cmp.Compare(b.Tenants[y].Tokens, b.Tenants[x].Tokens), cmp.Compare(x, y))
	})
	largest := make(map[job.Tenant]Amount, n)
	for _, t := range names[:n] {
		largest[t] = b.Tenants[t]
	}
	return largest
}

// The backlog's keys share one slot, so that one script decides about all three limits.
func (s *Store) sumsKey() string { return s.cfg.Prefix + "{backlog}:sums" }

func (s *Store) membersKey(t, m string) string {
	return s.cfg.Prefix + "{backlog}:in:" + t + ":" + m
}

// backlogNames are a tenant and a model as they stand in keys and fields.
func backlogNames(t job.Tenant, m job.Model) (tenant, model string) {
	return url.QueryEscape(string(t)), url.QueryEscape(string(m))
}

// memberOf is a job's id without the beginning that all have: it is kept once for each waiting job.
func memberOf(id job.ID) string { return strings.TrimPrefix(string(id), "job_") }

func idOfMember(member string) job.ID { return job.ID("job_" + member) }

// asLines stands behind the tenant's name where the lines of its batches are counted: apart from its other jobs, whose limits are not theirs. No tenant's own name has it.
const asLines = "\x00lines"

// countedFor is under which name j is counted.
func countedFor(j *job.Job) job.Tenant {
	if j.InBatch() {
		return j.Tenant + asLines
	}
	return j.Tenant
}

// enterCall counts j in the backlog within limits.
func (s *Store) enterCall(j *job.Job, l Limits) call {
	t, m := backlogNames(countedFor(j), j.Model)
	args := []any{t, m, memberOf(j.ID), max(0, j.Class.Rank()), j.BodySize, int64(j.Expected()), s.listTTL().Milliseconds()}
	if l != (Limits{}) {
		for _, a := range []Amount{l.Queue, l.Tenant, l.Model} {
			args = append(args, a.Jobs, a.Bytes, int64(a.Tokens))
		}
	}
	return call{script: enterScript, keys: []string{s.sumsKey(), s.membersKey(t, m)}, args: args}
}

func (s *Store) leaveCall(t job.Tenant, m job.Model, id job.ID) call {
	tenant, model := backlogNames(t, m)
	return call{script: leaveScript, keys: []string{s.sumsKey(), s.membersKey(tenant, model)}, args: []any{tenant, model, memberOf(id)}}
}

// entered reads the answer of enterCall: a place, or the *LimitError that refused it.
func entered(answer any, j *job.Job, l Limits) (Place, error) {
	a, ok := answer.([]any)
	if !ok || len(a) != 9 {
		return Place{}, fmt.Errorf("%w: %v", errAnswer, answer)
	}
	var p Place
	for i := range p.Classes {
		p.Classes[i] = ClassAmount{Jobs: number(a[3+2*i]), Tokens: job.Tokens(number(a[4+2*i]))}
	}
	if text(a[0]) == "in" {
		p.Jobs, p.Tokens = max(0, number(a[1])), job.Tokens(max(0, number(a[2])))
		return p, nil
	}
	own := p.Classes[max(0, j.Class.Rank())]
	p.Jobs, p.Tokens = own.Jobs, own.Tokens
	which := int(number(a[1]))
	if text(a[0]) != "full" || which < 0 || which > 8 {
		return Place{}, fmt.Errorf("%w: %v", errAnswer, answer)
	}
	full := []Amount{l.Queue, l.Tenant, l.Model}[which/3]
	return p, &LimitError{
		Scope: []Scope{OfQueue, OfTenant, OfModel}[which/3], Unit: []Unit{Jobs, Bytes, Tokens}[which%3],
		Limit: []int64{full.Jobs, full.Bytes, int64(full.Tokens)}[which%3], Used: number(a[2]),
		Asked: []int64{1, j.BodySize, int64(j.Expected())}[which%3], Place: p,
	}
}

// enter asks the limits by a call of its own.
func (s *Store) enter(ctx context.Context, j *job.Job, l Limits) error {
	c := s.enterCall(j, l)
	answer, err := c.script.Run(ctx, s.db, c.keys, c.args...).Result()
	if err == nil {
		_, err = entered(answer, j, l)
	}
	return err
}

// leave drops a job from the backlog and from the live index, in one round trip.
func (s *Store) leave(ctx context.Context, j *job.Job) error {
	pipe := s.db.Pipeline()
	pipe.ZRem(ctx, s.liveKey(j.ID), string(j.ID))
	_, err := s.run(ctx, pipe, s.leaveCall(countedFor(j), j.Model, j.ID))
	return err
}

// Places tells where jobs stand, in one round trip; nil for one that is not counted: it has ended, was never durable, or is not restored yet.
func (s *Store) Places(ctx context.Context, jobs []*job.Job) ([]*Place, error) {
	if len(jobs) == 0 {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	members, sums := make([]*redis.StringCmd, len(jobs)), make([]*redis.SliceCmd, len(jobs))
	_, err := s.db.Pipelined(ctx, func(p redis.Pipeliner) error {
		for i, j := range jobs {
			t, m := backlogNames(countedFor(j), j.Model)
			own := fmt.Sprintf(":%s:%d/", m, max(0, j.Class.Rank()))
			members[i] = p.HGet(ctx, s.membersKey(t, m), memberOf(j.ID))
			sums[i] = p.HMGet(ctx, s.sumsKey(), ":"+m+":0/j", ":"+m+":0/t", ":"+m+":1/j", ":"+m+":1/t", ":"+m+":2/j", ":"+m+":2/t", own+"j", own+"t", own+"a", own+"s")
		}
		return nil
	})
	if err != nil && !errors.Is(err, redis.Nil) {
		return nil, wrap(err, "reading the places of %d jobs", len(jobs))
	}
	places := make([]*Place, len(jobs))
	for i := range jobs {
		member, err := members[i].Result()
		if errors.Is(err, redis.Nil) {
			continue
		}
		v, sum := numbers(member), make([]int64, 10)
		for f, n := range sums[i].Val() {
			sum[f], _ = strconv.ParseInt(text(n), 10, 64) // a missing one is 0
		}
		if err != nil || len(v) != 5 {
			return nil, wrap(cmp.Or(err, errAnswer), "reading the places of %d jobs", len(jobs))
		}
		p := &Place{Jobs: max(0, v[3]-1-(sum[8]-sum[6])), Tokens: job.Tokens(max(0, v[4]-(sum[9]-sum[7])))}
		for class := range p.Classes {
			p.Classes[class] = ClassAmount{Jobs: sum[2*class], Tokens: job.Tokens(sum[2*class+1])}
		}
		places[i] = p
	}
	return places, nil
}

// numbers reads the whole numbers of a member.
func numbers(v string) []int64 {
	var list []int64
	for f := range strings.FieldsSeq(v) {
		n, _ := strconv.ParseInt(f, 10, 64) // written by our scripts alone
		list = append(list, n)
	}
	return list
}

// Backlogs is what each model has accepted and not ended. Models without any are not among them.
func (s *Store) Backlogs(ctx context.Context) (map[job.Model]*Backlog, error) {
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	sums, err := s.db.HGetAll(ctx, s.sumsKey()).Result()
	if err != nil {
		return nil, wrap(err, "reading the backlog")
	}
	return backlogs(sums), nil
}

// sum is whose work a sum of the backlog counts: a tenant's in a model, a tenant's in all (no model), or a model's in a class (no tenant).
type sum struct {
	tenant job.Tenant
	model  job.Model
	class  job.Class
}

// parseSum reads the name of one number of a sum.
func parseSum(field string) (of sum, unit string, ok bool) {
	name, unit, _ := strings.Cut(field, "/")
	parts := strings.Split(name, ":")
	if len(parts) == 3 && parts[0] == "" {
		rank, err := strconv.Atoi(parts[2])
		if err != nil || rank < 0 || rank >= len(job.Classes()) {
			return of, unit, false
		}
		of.class = job.Classes()[rank]
	} else if len(parts) != 2 {
		return of, unit, false
	}
	tenant, err1 := url.QueryUnescape(parts[0])
	model, err2 := url.QueryUnescape(parts[1])
	of.tenant, of.model = job.Tenant(tenant), job.Model(model)
	return of, unit, err1 == nil && err2 == nil
}

// amounts reads the sums; false if some of them cannot be.
func amounts(sums map[string]string) (all map[sum]Amount, ok bool) {
	all, ok = make(map[sum]Amount), true
	for field, v := range sums {
		of, unit, readable := parseSum(field)
		n, err := strconv.ParseInt(v, 10, 64)
		if !readable || err != nil {
			ok = false
			continue
		}
		a := all[of]
		switch unit {
		case "j":
			a.Jobs = n
		case "b":
			a.Bytes = n
		case "t":
			a.Tokens = job.Tokens(n)
		}
		all[of] = a
	}
	return all, ok
}

func backlogs(sums map[string]string) map[job.Model]*Backlog {
	all := make(map[job.Model]*Backlog)
	numbers, _ := amounts(sums)
	for of, a := range numbers {
		if of.model == "" {
			continue
		}
		b := all[of.model]
		if b == nil {
			b = &Backlog{Tenants: make(map[job.Tenant]Amount), Classes: make(map[job.Class]Amount)}
			all[of.model] = b
		}
		if of.tenant == "" {
			b.Classes[of.class] = a
		} else {
			t := job.Tenant(strings.TrimSuffix(string(of.tenant), asLines))
			b.Tenants[t] = b.Tenants[t].plus(a)
		}
	}
	return all
}

// consistent tells whether the sums of tenants and of classes are those of the pairs, and the pairs' those of their members.
func consistent(all map[sum]Amount, members map[sum]int64) bool {
	tenants, models := map[job.Tenant]Amount{}, map[job.Model]Amount{}
	for of, a := range all {
		switch {
		case of.model == "":
			tenants[of.tenant] = tenants[of.tenant].minus(a)
		case of.tenant == "":
			models[of.model] = models[of.model].minus(a)
		case members[of] != a.Jobs:
			return false
		default:
			negative := Amount{}.minus(a)
			tenants[of.tenant] = tenants[of.tenant].minus(negative)
			models[of.model] = models[of.model].minus(negative)
		}
	}
	for _, rest := range tenants {
		if rest != (Amount{}) {
			return false
		}
	}
	for _, rest := range models {
		if rest != (Amount{}) {
			return false
		}
	}
	return true
}

func (a Amount) plus(b Amount) Amount {
	return Amount{Jobs: a.Jobs + b.Jobs, Bytes: a.Bytes + b.Bytes, Tokens: a.Tokens + b.Tokens}
}

func (a Amount) minus(b Amount) Amount {
	return Amount{Jobs: a.Jobs - b.Jobs, Bytes: a.Bytes - b.Bytes, Tokens: a.Tokens - b.Tokens}
}

const backlogPage = 1000

// RepairBacklog compares the backlog with the jobs that live, and tells how many jobs it dropped and added. A member that is not in live is dropped if its record has ended or is gone; a live job that is no member is
// added if its record has not ended. Jobs of which settled is false are on their way and left alone. Sums that are not those of the members, which only a loss within the store can bring about, are thrown away with
// the members, and made anew from live. Entries of live are set to false.
func (s *Store) RepairBacklog(ctx context.Context, live map[job.ID]bool, settled func(job.ID) bool) (dropped, added int, err error) {
	if dropped, err = s.dropEnded(ctx, live, settled); err != nil {
		return dropped, 0, wrap(err, "comparing the backlog with its jobs")
	}
	missing := make([]job.ID, 0)
	for id, notSeen := range live {
		if notSeen && settled(id) {
			missing = append(missing, id)
		}
	}
	slices.Sort(missing) // they come in the order of their making
	for ids := range slices.Chunk(missing, rebuildCount) {
		n, err := s.addMissing(ctx, ids)
		added += n
		if err != nil {
			return dropped, added, wrap(err, "adding %d jobs to the backlog", len(ids))
		}
	}
	return dropped, added, nil
}

func (s *Store) dropEnded(ctx context.Context, live map[job.ID]bool, settled func(job.ID) bool) (dropped int, err error) {
	sums, err := s.checkedSums(ctx)
	if err != nil {
		return 0, err
	}
	for of := range sums {
		if of.tenant == "" || of.model == "" {
			continue
		}
		tenant, model := backlogNames(of.tenant, of.model)
		for cursor := uint64(0); ; {
			page, next, err := s.memberPage(ctx, s.membersKey(tenant, model), cursor)
			if err != nil {
				return dropped, err
			}
			var suspects []job.ID
			for i := 0; i+1 < len(page); i += 2 {
				id := idOfMember(page[i])
				if _, ok := live[id]; ok {
					live[id] = false
				} else if settled(id) {
					suspects = append(suspects, id)
				}
			}
			for ids := range slices.Chunk(suspects, rebuildCount) {
				n, err := s.dropSuspects(ctx, of.tenant, of.model, ids)
				dropped += n
				if err != nil {
					return dropped, err
				}
			}
			if cursor = next; cursor == 0 {
				break
			}
		}
	}
	return dropped, nil
}

func (s *Store) memberPage(ctx context.Context, key string, cursor uint64) ([]string, uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	return s.db.HScan(ctx, key, cursor, "", backlogPage).Result()
}

// checkedSums reads the sums, and removes all of the backlog if they do not agree with each other or with their members.
func (s *Store) checkedSums(ctx context.Context) (map[sum]Amount, error) {
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	fields, err := s.db.HGetAll(ctx, s.sumsKey()).Result()
	if err != nil || len(fields) == 0 {
		return nil, err
	}
	before, _ := amounts(fields)
	keys := map[sum]string{}
	for of := range before {
		if of.tenant != "" && of.model != "" {
			t, m := backlogNames(of.tenant, of.model)
			keys[of] = s.membersKey(t, m)
		}
	}
	var again *redis.MapStringStringCmd
	lengths := make(map[sum]*redis.IntCmd, len(keys))
	_, err = s.db.TxPipelined(ctx, func(p redis.Pipeliner) error { // all at one moment
		again = p.HGetAll(ctx, s.sumsKey())
		for of, key := range keys {
			lengths[of] = p.HLen(ctx, key)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	now, ok := amounts(again.Val())
	members := make(map[sum]int64, len(lengths))
	for of := range now {
		n, known := lengths[of]
		switch {
		case known:
			members[of] = n.Val()
		case of.tenant != "" && of.model != "": // a tenant's first job in the model came between: the next turn looks
			return before, nil
		}
	}
	if ok && consistent(now, members) {
		return now, nil
	}
	s.log.Warn("the sums of the backlog are not those of its jobs: counting anew")
	gone := []string{s.sumsKey()}
	for _, key := range keys {
		gone = append(gone, key)
	}
	return nil, s.db.Del(ctx, gone...).Err()
}

// dropSuspects drops those of a tenant's jobs in a model whose records have ended or are gone.
func (s *Store) dropSuspects(ctx context.Context, t job.Tenant, m job.Model, ids []job.ID) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	states, err := s.States(ctx, ids)
	if err != nil {
		return 0, err
	}
	var calls []call
	for i, id := range ids {
		if states[i] == "" || states[i].Ended() {
			calls = append(calls, s.leaveCall(t, m, id))
		}
	}
	if len(calls) == 0 {
		return 0, nil
	}
	answers, err := s.run(ctx, s.db.Pipeline(), calls...)
	n := 0
	for _, a := range answers {
		n += int(number(a))
	}
	return n, err
}

// addMissing counts those of ids that have a record which has not ended, in their order.
func (s *Store) addMissing(ctx context.Context, ids []job.ID) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	gets := make([]*redis.SliceCmd, len(ids))
	_, err := s.db.Pipelined(ctx, func(p redis.Pipeliner) error {
		for i, id := range ids {
			gets[i] = p.HMGet(ctx, s.recordKey(id), "s", "j")
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	var jobs []*job.Job
	var calls []call
	for _, get := range gets {
		v := get.Val()
		if len(v) != 2 || text(v[0]) == "" || job.State(text(v[0])).Ended() {
			continue
		}
		r, err := decode(map[string]string{"s": text(v[0]), "j": text(v[1])})
		if err != nil {
			return 0, err
		}
		jobs, calls = append(jobs, &r.Job), append(calls, s.enterCall(&r.Job, Limits{}))
	}
	if len(calls) == 0 {
		return 0, nil
	}
	if _, err := s.run(ctx, s.db.Pipeline(), calls...); err != nil {
		return 0, err
	}
	return len(calls), s.leaveEnded(ctx, jobs)
}

// leaveEnded drops those of jobs that ended while they were counted. If we crash before, the next repair does.
func (s *Store) leaveEnded(ctx context.Context, jobs []*job.Job) error {
	ids := make([]job.ID, len(jobs))
	for i, j := range jobs {
		ids[i] = j.ID
	}
	states, err := s.States(ctx, ids)
	if err != nil {
		return err
	}
	var calls []call
	for i, j := range jobs {
		if states[i] == "" || states[i].Ended() {
			calls = append(calls, s.leaveCall(countedFor(j), j.Model, j.ID))
		}
	}
	if len(calls) == 0 {
		return nil
	}
	_, err = s.run(ctx, s.db.Pipeline(), calls...)
	return err
}

// askedFor is for how long after a refusal limits are asked before anything is written: it costs a round trip, and spares a store that is full already the bodies of what it refuses.
const askedFor = 2 * time.Second
