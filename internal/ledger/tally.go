package ledger

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/millrace/millrace/internal/job"
)

// done is the row of positions that Tally moves.
const done = "done"

// Tallied is how far DONE was counted; zero at first.
func (s *Store) Tallied(ctx context.Context) (p Position, err error) {
	err = s.read(ctx, "reading how far outcomes are counted", func(q *query) error {
		return q.row("SELECT stream, seq FROM positions WHERE name = $1", done).Scan(&p.Stream, &p.Seq)
	})
	return p, err
}

// sum is what a row of usage or of batches gets added.
type sum struct {
	requests, failed int64
	tokens           job.Tokens
	usage            job.Usage
}

func (s *sum) add(e *Ended) {
	s.requests++
	if !e.OK {
		s.failed++
	}
	s.tokens += e.Tokens
	s.usage.PromptTokens += e.Usage.PromptTokens
	s.usage.CompletionTokens += e.Usage.CompletionTokens
	s.usage.TotalTokens += e.Usage.TotalTokens
	s.usage.CachedTokens += e.Usage.CachedTokens
	s.usage.ReasoningTokens += e.Usage.ReasoningTokens
}

// usageKey is a row of usage.
type usageKey struct {
	tenant job.Tenant
	model  job.Model
	day    string
	key    string
}

func (k usageKey) compare(o usageKey) int {
	return cmp.Or(cmp.Compare(k.tenant, o.tenant), cmp.Compare(k.model, o.model), cmp.Compare(k.day, o.day), cmp.Compare(k.key, o.key))
}

// Tally adds outcomes to usage and to their batches' counts, and moves the position from `from` to `to`, in one transaction. ErrState: the position is not at `from`. Batches that have ended are left as they are.
func (s *Store) Tally(ctx context.Context, epoch uint64, from, to Position, ended []Ended) error {
	byUsage, byBatch := map[usageKey]*sum{}, map[string]*sum{}
	for i := range ended {
		e := &ended[i]
		k := usageKey{e.Tenant, e.Model, e.At.Time().UTC().Format(time.DateOnly), e.Key}
		if e.At == 0 {
			k.day = time.UnixMilli(0).UTC().Format(time.DateOnly)
		}
		entry(byUsage, k).add(e)
		if e.Group != job.NoGroup && e.Group != "" {
			entry(byBatch, e.Group).add(e)
		}
	}
	return s.write(ctx, "counting outcomes", func(q *query) error {
		if err := q.fence(epoch); err != nil {
			return err
		}
		n, err := q.exec("UPDATE positions SET stream = $2, seq = $3 WHERE name = $1 AND stream = $4 AND seq = $5", done, to.Stream, to.Seq, from.Stream, from.Seq)
		if err != nil {
			return err
		}
		if n == 0 {
			return refuse(ErrState)
		}
		if err := q.addUsage(byUsage); err != nil {
			return err
		}
		return q.addCounts(byBatch)
	})
}

func entry[K comparable](m map[K]*sum, k K) *sum {
	if m[k] == nil {
		m[k] = new(sum)
	}
	return m[k]
}

const usageColumns = "tenant, model, day, api_key, requests, failed, prompt_tokens, completion_tokens, total_tokens, cached_tokens, reasoning_tokens"

func (q *query) addUsage(sums map[usageKey]*sum) error {
	keys := make([]usageKey, 0, len(sums))
	for k := range sums {
		keys = append(keys, k)
	}
	slices.SortFunc(keys, usageKey.compare)
	const columns = 11
	for part := range slices.Chunk(keys, 2*chunk/columns) {
		var values strings.Builder
		args := make([]any, 0, len(part)*columns)
		for i, k := range part {
			if i > 0 {
				values.WriteByte(',')
			}
			values.WriteString("(" + marks(len(args)+1, columns) + ")")
			s := sums[k]
			u := s.usage
			args = append(args, k.tenant, k.model, k.day, k.key, s.requests, s.failed, u.PromptTokens, u.CompletionTokens, u.TotalTokens, u.CachedTokens, u.ReasoningTokens)
		}
		if _, err := q.exec(`INSERT INTO usage (`+usageColumns+`) VALUES `+values.String()+` ON CONFLICT (tenant, model, day, api_key) DO UPDATE SET
			requests = usage.requests + excluded.requests, failed = usage.failed + excluded.failed,
			prompt_tokens = usage.prompt_tokens + excluded.prompt_tokens, completion_tokens = usage.completion_tokens + excluded.completion_tokens,
			total_tokens = usage.total_tokens + excluded.total_tokens, cached_tokens = usage.cached_tokens + excluded.cached_tokens,
			reasoning_tokens = usage.reasoning_tokens + excluded.reasoning_tokens`, args...); err != nil {
			return err
		}
	}
	return nil
}

// addCounts adds to the counts of live batches, and never more than they have lines.
func (q *query) addCounts(sums map[string]*sum) error {
	ids := make([]string, 0, len(sums))
	for id := range sums {
		ids = append(ids, id)
	}
	slices.Sort(ids) // so that rows are always locked in one order
	for _, id := range ids {
		s := sums[id]
		u := s.usage
		// A line that fails adds to bad, but both together never pass the total: what is counted twice in spite of all is lost here, and not shown.
		if _, err := q.exec(`UPDATE batches SET
			done = CASE WHEN done + bad + $2 <= total THEN done + $2 ELSE total - bad END,
			bad = CASE WHEN done + bad + $2 + $3 <= total THEN bad + $3 WHEN done + bad + $2 <= total THEN total - done - $2 ELSE bad END,
			tokens_done = CASE WHEN tokens_done + $4 <= tokens THEN tokens_done + $4 ELSE tokens END,
			prompt_tokens = prompt_tokens + $5, completion_tokens = completion_tokens + $6, total_tokens = total_tokens + $7, cached_tokens = cached_tokens + $8, reasoning_tokens = reasoning_tokens + $9
			WHERE id = $1 AND live = 1`,
			id, s.requests-s.failed, s.failed, s.tokens, u.PromptTokens, u.CompletionTokens, u.TotalTokens, u.CachedTokens, u.ReasoningTokens); err != nil {
			return err
		}
	}
	return nil
}

// usageFields are what sums can be kept apart by, with their columns.
var usageFields = []struct{ name, column string }{{"day", "day"}, {"tenant", "tenant"}, {"model", "model"}, {"key", "api_key"}}

// Usage sums what was used, by the fields asked for and in their order: day, tenant, model, key.
func (s *Store) Usage(ctx context.Context, uq UsageQuery) ([]UsageRow, error) {
	by := map[string]bool{}
	for _, name := range uq.By {
		if !slices.ContainsFunc(usageFields, func(f struct{ name, column string }) bool { return f.name == name }) {
			return nil, fmt.Errorf("usage cannot be kept apart by %q: it must be day, tenant, model or key", name)
		}
		by[name] = true
	}
	var columns, groups, wheres []string
	for _, f := range usageFields {
		if by[f.name] {
			columns = append(columns, f.column)
			groups = append(groups, f.column)
		} else {
			columns = append(columns, "''")
		}
	}
	var args []any
	where := func(condition, value string) {
		if value != "" {
			args = append(args, value)
			wheres = append(wheres, fmt.Sprintf("%s $%d", condition, len(args)))
		}
	}
	where("day >=", uq.From)
	where("day <=", uq.To)
	where("tenant =", string(uq.Tenant))
	where("model =", string(uq.Model))
	where("api_key =", uq.Key)
	for _, name := range []string{"requests", "failed", "prompt_tokens", "completion_tokens", "total_tokens", "cached_tokens", "reasoning_tokens"} {
		columns = append(columns, "CAST(SUM("+name+") AS BIGINT)")
	}
	text := "SELECT " + strings.Join(columns, ", ") + " FROM usage"
	if len(wheres) > 0 {
		text += " WHERE " + strings.Join(wheres, " AND ")
	}
	if len(groups) > 0 {
		list := strings.Join(groups, ", ")
		text += " GROUP BY " + list + " ORDER BY " + list
	} else {
		text += " HAVING COUNT(*) > 0" // the sum of nothing is no row
	}
	var all []UsageRow
	err := s.read(ctx, "summing the usage", func(q *query) error {
		return q.rows(func(row scanner) error {
			var r UsageRow
			u := &r.Usage
			err := row.Scan(&r.Day, &r.Tenant, &r.Model, &r.Key, &r.Requests, &r.Failed, &u.PromptTokens, &u.CompletionTokens, &u.TotalTokens, &u.CachedTokens, &u.ReasoningTokens)
			all = append(all, r)
			return err
		}, text, args...)
	})
	return all, err
}
