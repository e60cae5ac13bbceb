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

// Limits bound what is accepted and has not ended: of one tenant in one model, of one tenant in all models, and of one model for all tenants. 0 is no limit.
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

// enterCall counts j in the backlog within limits.
func (s *Store) enterCall(j *job.Job, l Limits) call {
	t, m := backlogNames(j.Tenant, j.Model)
	args := []any{t, m, memberOf(j.ID), max(0, j.Class.Rank()), j.BodySize, int64(j.Expected()), s.listTTL().Milliseconds()}
	for _, a := range []Amount{l.Queue, l.Tenant, l.Model} {
		args = append(args, a.Jobs, a.Bytes, int64(a.Tokens))
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
	_, err := s.run(ctx, pipe, s.leaveCall(j.Tenant, j.Model, j.ID))
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
			t, m := backlogNames(j.Tenant, j.Model)
			members[i] = p.HGet(ctx, s.membersKey(t, m), memberOf(j.ID))
			sums[i] = p.HMGet(ctx, s.sumsKey(), ":"+m+":0", ":"+m+":1", ":"+m+":2")
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
		v := numbers(member)
		if err != nil || len(v) < 5 || v[0] > 2 {
			return nil, wrap(errors.Join(err, sums[i].Err()), "reading the places of %d jobs", len(jobs))
		}
		var p Place
		for class, field := range sums[i].Val() {
			sum := numbers(text(field))
			if len(sum) < 5 || class > 2 {
				continue
			}
			p.Classes[class] = ClassAmount{Jobs: sum[0], Tokens: job.Tokens(sum[2])}
			if int64(class) == v[0] {
				p.Jobs, p.Tokens = max(0, v[3]-1-(sum[3]-sum[0])), job.Tokens(max(0, v[4]-(sum[4]-sum[2])))
			}
		}
		places[i] = &p
	}
	return places, nil
}

// numbers reads the whole numbers of a sum or a member.
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

func backlogs(sums map[string]string) map[job.Model]*Backlog {
	all := make(map[job.Model]*Backlog)
	for field, v := range sums {
		t, m, class, ok := parseSum(field)
		n := numbers(v)
		if !ok || m == "" || len(n) < 3 {
			continue
		}
		b := all[m]
		if b == nil {
			b = &Backlog{Tenants: make(map[job.Tenant]Amount), Classes: make(map[job.Class]Amount)}
			all[m] = b
		}
		a := Amount{Jobs: n[0], Bytes: n[1], Tokens: job.Tokens(n[2])}
		if t == "" {
			b.Classes[class] = a
		} else {
			b.Tenants[t] = a
		}
	}
	return all
}

// parseSum reads the name of a sum: of a tenant in a model, of a tenant in all (no model), or of a model's class (no tenant).
func parseSum(field string) (t job.Tenant, m job.Model, class job.Class, ok bool) {
	parts := strings.Split(field, ":")
	if len(parts) == 3 && parts[0] == "" {
		rank, err := strconv.Atoi(parts[2])
		if err != nil || rank < 0 || rank >= len(job.Classes()) {
			return "", "", "", false
		}
		class = job.Classes()[rank]
	} else if len(parts) != 2 {
		return "", "", "", false
	}
	tenant, err1 := url.QueryUnescape(parts[0])
	model, err2 := url.QueryUnescape(parts[1])
	return job.Tenant(tenant), job.Model(model), class, err1 == nil && err2 == nil
}

// consistent tells whether the sums of tenants and classes are those of the pairs, and these those of their members.
func consistent(sums map[string]string, members map[string]int64) bool {
	tenants, models := map[job.Tenant]int64{}, map[job.Model]int64{}
	for field, v := range sums {
		t, m, _, ok := parseSum(field)
		n := numbers(v)
		switch {
		case !ok || len(n) < 3:
			return false
		case m == "":
			tenants[t] -= n[0]
		case t == "":
			models[m] -= n[0]
		default:
			tenants[t] += n[0]
			models[m] += n[0]
			if members[field] != n[0] {
				return false
			}
		}
	}
	for _, n := range tenants {
		if n != 0 {
			return false
		}
	}
	for _, n := range models {
		if n != 0 {
			return false
		}
	}
	return true
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
	for field := range sums {
		t, m, _, _ := parseSum(field)
		if t == "" || m == "" {
			continue
		}
		tenant, model := backlogNames(t, m)
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
				n, err := s.dropSuspects(ctx, t, m, ids)
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
func (s *Store) checkedSums(ctx context.Context) (map[string]string, error) {
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	names, err := s.db.HGetAll(ctx, s.sumsKey()).Result()
	if err != nil || len(names) == 0 {
		return nil, err
	}
	keys := map[string]string{}
	for field := range names {
		if t, m, ok := strings.Cut(field, ":"); ok && t != "" && m != "" {
			keys[field] = s.membersKey(t, m)
		}
	}
	var sums *redis.MapStringStringCmd
	lengths := make(map[string]*redis.IntCmd, len(keys))
	_, err = s.db.TxPipelined(ctx, func(p redis.Pipeliner) error { // all at one moment
		sums = p.HGetAll(ctx, s.sumsKey())
		for field, key := range keys {
			lengths[field] = p.HLen(ctx, key)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	members := make(map[string]int64, len(lengths))
	for field, n := range lengths {
		members[field] = n.Val()
	}
	now := sums.Val()
	for field := range now {
		if _, ok := keys[field]; !ok { // a tenant's or model's first job came between: the next turn looks
			if t, m, _, _ := parseSum(field); t != "" && m != "" {
				return names, nil
			}
		}
	}
	if consistent(now, members) {
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
			calls = append(calls, s.leaveCall(j.Tenant, j.Model, j.ID))
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
