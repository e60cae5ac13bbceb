package results

import (
	"context"
	"net/url"
	"time"

	"github.com/go-redis/redis_rate/v10"
	"github.com/redis/go-redis/v9"
)

// Rate is so many units a minute for whoever has its name. Whoever has used none for a minute may use all at once.
type Rate struct {
	Name      string
	PerMinute int64
	// Asked is how many units are to be used now.
	Asked int64
}

// RateLeft is what is left of a rate.
type RateLeft struct {
	Remaining int64
	// Reset is when all of it is there again; Retry, of a rate that refused, when what was asked is.
	Reset, Retry time.Duration
}

// TakeRates uses up all rates or none, one round trip for each, and tells what is left of those that it came to. refused is the index of the rate that had not enough, -1 if all had. After a refusal what was taken is given
// back, as far as the store answers.
func (s *Store) TakeRates(ctx context.Context, rates []Rate) (left []RateLeft, refused int, err error) {
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	for i, r := range rates {
		got, err := s.takeRate(ctx, r, r.Asked)
		if err != nil {
			return nil, -1, wrap(err, "asking %d limits per minute", len(rates))
		}
		left = append(left, RateLeft{Remaining: int64(got.Remaining), Reset: got.ResetAfter, Retry: max(0, got.RetryAfter)})
		if got.Allowed == 0 && r.Asked > 0 {
			for _, earlier := range rates[:i] {
				s.giveBack(ctx, earlier)
			}
			return left, i, nil
		}
	}
	return left, -1, nil
}

// giveBack undoes the taking of a rate. Best effort: it comes back by itself, and what another request takes while the last of it is given back is not counted.
func (s *Store) giveBack(ctx context.Context, r Rate) {
	if got, err := s.takeRate(ctx, r, -r.Asked); err == nil && got.ResetAfter <= 0 { // all of it is there again, which the limiter does not write
		_ = s.limiter.Reset(ctx, url.QueryEscape(r.Name)) // as above
	}
}

func (s *Store) takeRate(ctx context.Context, r Rate, n int64) (*redis_rate.Result, error) {
	limit := redis_rate.Limit{Rate: int(r.PerMinute), Burst: int(r.PerMinute), Period: time.Minute}
	return s.limiter.AllowN(ctx, url.QueryEscape(r.Name), limit, int(n))
}

// prefixed gives the limiter's keys our prefix: its own is fixed.
type prefixed struct {
	redis.UniversalClient
	prefix string
}

func (p prefixed) own(keys []string) []string {
	own := make([]string, len(keys))
	for i, k := range keys {
		own[i] = p.prefix + k
	}
	return own
}

// Eval runs the script on our keys.
func (p prefixed) Eval(ctx context.Context, script string, keys []string, args ...any) *redis.Cmd {
	return p.UniversalClient.Eval(ctx, script, p.own(keys), args...)
}

// Del removes our keys.
func (p prefixed) Del(ctx context.Context, keys ...string) *redis.IntCmd {
	return p.UniversalClient.Del(ctx, p.own(keys)...)
}

// EvalSha runs the script on our keys.
func (p prefixed) EvalSha(ctx context.Context, sha string, keys []string, args ...any) *redis.Cmd {
	return p.UniversalClient.EvalSha(ctx, sha, p.own(keys), args...)
}
