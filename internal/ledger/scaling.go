package ledger

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/millrace/millrace/internal/job"
)

// Where a pool comes from.
const (
	FromFile = "file" // the autoscaler's --pools: it is changed there alone
	FromAPI  = "api"
)

// Pool is a pool's description as it is kept: Spec is its JSON. Of Spec the ledger reads "models" and "kubernetes" alone: no model, and no workload, is of two pools.
type Pool struct {
	Name             string
	Spec             []byte
	Source           string
	Created, Updated job.Millis
}

const poolColumns = "name, spec, source, created, updated"

func scanPool(row scanner, p *Pool) error {
	var spec string
	err := row.Scan(&p.Name, &spec, &p.Source, &p.Created, &p.Updated)
	p.Spec = []byte(spec)
	return err
}

// pools lists all, by name.
func (q *query) pools() ([]Pool, error) {
	var all []Pool
	err := q.rows(func(row scanner) error {
		var p Pool
		err := scanPool(row, &p)
		all = append(all, p)
		return err
	}, "SELECT "+poolColumns+" FROM pools")
	slices.SortFunc(all, func(a, b Pool) int { return strings.Compare(a.Name, b.Name) })
	return all, err
}

// Pools lists all, by name.
func (s *Store) Pools(ctx context.Context) (all []Pool, err error) {
	err = s.read(ctx, "listing the pools", func(q *query) error {
		all, err = q.pools()
		return err
	})
	return all, err
}

// Pool returns one.
func (s *Store) Pool(ctx context.Context, name string) (*Pool, error) {
	var p Pool
	err := s.read(ctx, "reading the pool "+name, func(q *query) error {
		return scanPool(q.row("SELECT "+poolColumns+" FROM pools WHERE name = $1", name), &p)
	})
	if err != nil {
		return nil, err
	}
	return &p, nil
}

// alone refuses a pool one of whose models another one serves, or whose workload another one scales.
func alone(p Pool, others []Pool) error {
	mine, err := partsOf(p)
	if err != nil {
		return err
	}
	for _, o := range others {
		if o.Name == p.Name {
			continue
		}
		theirs, err := partsOf(o)
		if err != nil {
			return err
		}
		for _, m := range mine.Models {
			if slices.Contains(theirs.Models, m) {
				return refuse(fmt.Errorf("%w: %s is of the pool %s, and there is no telling which of two pools' workers its work will come to", ErrTaken, m, o.Name))
			}
		}
		if w := mine.Kubernetes; w != nil && theirs.Kubernetes != nil && w.key() == theirs.Kubernetes.key() {
			return refuse(fmt.Errorf("%w: the %s %s is of the pool %s, and each would undo what the other does", ErrWorkload, w.Kind, w.Name, o.Name))
		}
	}
	return nil
}

// parts of a pool's description that no other pool may have.
type parts struct {
	Models     []job.Model `json:"models"`
	Kubernetes *workload   `json:"kubernetes"`
}

type workload struct{ Context, Namespace, Kind, Name string }

// key is the same for two descriptions of one workload.
func (w *workload) key() string {
	return strings.ToLower(strings.Join([]string{w.Context, w.Namespace, w.Kind, w.Name}, "/"))
}

func partsOf(p Pool) (parts, error) {
	var of parts
	err := decode("spec", string(p.Spec), &of)
	return of, err
}

// lockPools keeps the pools as they are until the transaction ends, and returns them, by name.
func (q *query) lockPools() ([]Pool, error) {
	// All who change pools do so under the autoscaler's row.
	if _, err := q.highest(autoscaling); err != nil {
		return nil, err
	}
	return q.pools()
}

// CreatePool adds one of the API's; Created and Updated are now unless they are given. ErrExists; ErrTaken if one of its models, and ErrWorkload if its workload, is another pool's.
func (s *Store) CreatePool(ctx context.Context, p Pool) (*Pool, error) {
	p.Source = FromAPI
	if p.Created == 0 {
		p.Created = job.MillisOf(time.Now())
	}
	p.Updated = cmp.Or(p.Updated, p.Created)
	err := s.write(ctx, "creating the pool "+p.Name, func(q *query) error {
		all, err := q.lockPools()
		if err != nil {
			return err
		}
		if slices.ContainsFunc(all, func(o Pool) bool { return o.Name == p.Name }) {
			return refuse(ErrExists)
		}
		if err := alone(p, all); err != nil {
			return err
		}
		_, err = q.exec("INSERT INTO pools ("+poolColumns+") VALUES ($1, $2, $3, $4, $5)", p.Name, string(p.Spec), p.Source, p.Created, p.Updated)
		return err
	})
	if err != nil {
		return nil, err
	}
	return &p, nil
}

// ofAPI is nil if there is a pool of that name and it is the API's to change.
func ofAPI(name string, all []Pool) error {
	i := slices.IndexFunc(all, func(p Pool) bool { return p.Name == name })
	switch {
	case i < 0:
		return refuse(ErrNotFound)
	case all[i].Source == FromFile:
		return refuse(fmt.Errorf("%w: the pool %s comes from the autoscaler's file", ErrInUse, name))
	}
	return nil
}

// UpdatePool changes the description of one of the API's; Updated is now unless it is given. ErrNotFound; ErrInUse if it comes from a file; ErrTaken and ErrWorkload as CreatePool.
func (s *Store) UpdatePool(ctx context.Context, p Pool) (*Pool, error) {
	if p.Updated == 0 {
		p.Updated = job.MillisOf(time.Now())
	}
	var now Pool
	err := s.write(ctx, "changing the pool "+p.Name, func(q *query) error {
		all, err := q.lockPools()
		if err != nil {
			return err
		}
		if err := ofAPI(p.Name, all); err != nil {
			return err
		}
		if err := alone(p, all); err != nil {
			return err
		}
		return scanPool(q.row("UPDATE pools SET spec = $2, updated = $3 WHERE name = $1 RETURNING "+poolColumns, p.Name, string(p.Spec), p.Updated), &now)
	})
	if err != nil {
		return nil, err
	}
	return &now, nil
}

// DeletePool removes one of the API's. ErrNotFound; ErrInUse if it comes from a file. Its state and launches stay until the autoscaler has stopped its workers.
func (s *Store) DeletePool(ctx context.Context, name string) error {
	return s.write(ctx, "deleting the pool "+name, func(q *query) error {
		all, err := q.lockPools()
		if err != nil {
			return err
		}
		if err := ofAPI(name, all); err != nil {
			return err
		}
		_, err = q.exec("DELETE FROM pools WHERE name = $1", name)
		return err
	})
}

// What follows is the leading autoscaler's. Each write compares its epoch with the highest that has written, and is ErrFenced behind it.

// leadScaling runs f in one transaction, if no higher epoch has written.
func (s *Store) leadScaling(ctx context.Context, epoch uint64, doing string, f func(*query) error) error {
	return s.write(ctx, doing, func(q *query) error {
		if err := q.fenceOf(autoscaling, epoch); err != nil {
			return err
		}
		return f(q)
	})
}

// LeadScaling makes epoch the highest.
func (s *Store) LeadScaling(ctx context.Context, epoch uint64) error {
	return s.leadScaling(ctx, epoch, "taking the lead of scaling", func(*query) error { return nil })
}

// SyncPools makes the pools that come from a file those given, in one transaction: others of the file are removed, and one of the API's of the same name becomes the file's. Those that are as they were keep
// their Updated. ErrTaken or ErrWorkload, and nothing changed, if a model or a workload is of two pools, one of which may be the API's.
func (s *Store) SyncPools(ctx context.Context, epoch uint64, file []Pool) error {
	now := job.MillisOf(time.Now())
	return s.leadScaling(ctx, epoch, "taking over the file's pools", func(q *query) error {
		all, err := q.pools()
		if err != nil {
			return err
		}
		inFile := func(name string) bool { return slices.ContainsFunc(file, func(p Pool) bool { return p.Name == name }) }
		together := slices.DeleteFunc(slices.Clone(all), func(p Pool) bool { return p.Source == FromFile || inFile(p.Name) })
		together = append(together, file...)
		for _, p := range file {
			if err := alone(p, together); err != nil {
				return err
			}
		}
		for _, p := range all {
			if p.Source != FromFile || inFile(p.Name) {
				continue
			}
			if _, err := q.exec("DELETE FROM pools WHERE name = $1", p.Name); err != nil {
				return err
			}
		}
		for _, p := range file {
			if _, err := q.exec("INSERT INTO pools ("+poolColumns+`) VALUES ($1, $2, $3, $4, $5) ON CONFLICT (name) DO UPDATE SET spec = excluded.spec, source = excluded.source, updated = excluded.updated
				WHERE pools.spec <> excluded.spec OR pools.source <> excluded.source`, p.Name, string(p.Spec), FromFile, cmp.Or(p.Created, now), cmp.Or(p.Updated, now)); err != nil {
				return err
			}
		}
		return nil
	})
}

// Launch is a worker that the autoscaler asked for, written before the provider is asked: whoever leads next asks again under the same name, so that it is started once.
type Launch struct {
	Pool, Name string
	At         job.Millis
	// Ready is when its worker was first ready, 0 if it was not yet. Stopping is when it was chosen to drain and go, 0 if it was not.
	Ready, Stopping job.Millis
}

// InsertLaunches adds some, all or none. ErrExists: one of them is there already.
func (s *Store) InsertLaunches(ctx context.Context, epoch uint64, all ...Launch) error {
	return s.leadScaling(ctx, epoch, "noting launches", func(q *query) error {
		for _, l := range all {
			n, err := q.exec("INSERT INTO launches (pool, name, at, ready, stopping) VALUES ($1, $2, $3, $4, $5) ON CONFLICT (pool, name) DO NOTHING", l.Pool, l.Name, l.At, l.Ready, l.Stopping)
			if err != nil {
				return err
			}
			if n == 0 {
				return refuse(fmt.Errorf("%w: the launch of %s in the pool %s", ErrExists, l.Name, l.Pool))
			}
		}
		return nil
	})
}

// UpdateLaunch changes Ready and Stopping of one. ErrNotFound.
func (s *Store) UpdateLaunch(ctx context.Context, epoch uint64, l Launch) error {
	return s.leadScaling(ctx, epoch, "changing the launch of "+l.Name, func(q *query) error {
		n, err := q.exec("UPDATE launches SET ready = $3, stopping = $4 WHERE pool = $1 AND name = $2", l.Pool, l.Name, l.Ready, l.Stopping)
		if err == nil && n == 0 {
			err = refuse(ErrNotFound)
		}
		return err
	})
}

// DeleteLaunch removes one that is gone. One that is not there is no error.
func (s *Store) DeleteLaunch(ctx context.Context, epoch uint64, pool, name string) error {
	return s.leadScaling(ctx, epoch, "removing the launch of "+name, func(q *query) error {
		_, err := q.exec("DELETE FROM launches WHERE pool = $1 AND name = $2", pool, name)
		return err
	})
}

// Launches lists all, by pool and name.
func (s *Store) Launches(ctx context.Context) ([]Launch, error) {
	var all []Launch
	err := s.read(ctx, "listing the launches", func(q *query) error {
		return q.rows(func(row scanner) error {
			var l Launch
			err := row.Scan(&l.Pool, &l.Name, &l.At, &l.Ready, &l.Stopping)
			all = append(all, l)
			return err
		}, "SELECT pool, name, at, ready, stopping FROM launches")
	})
	slices.SortFunc(all, func(a, b Launch) int { return cmp.Or(cmp.Compare(a.Pool, b.Pool), cmp.Compare(a.Name, b.Name)) })
	return all, err
}

// SavePoolState keeps what was learned of a pool (JSON: cold starts, throughput, failures); nil removes it.
func (s *Store) SavePoolState(ctx context.Context, epoch uint64, pool string, state []byte) error {
	return s.leadScaling(ctx, epoch, "keeping the state of the pool "+pool, func(q *query) error {
		if state == nil {
			_, err := q.exec("DELETE FROM pool_states WHERE pool = $1", pool)
			return err
		}
		_, err := q.exec("INSERT INTO pool_states (pool, state) VALUES ($1, $2) ON CONFLICT (pool) DO UPDATE SET state = excluded.state", pool, string(state))
		return err
	})
}

// PoolStates returns them all by pool.
func (s *Store) PoolStates(ctx context.Context) (map[string][]byte, error) {
	all := map[string][]byte{}
	err := s.read(ctx, "reading the pools' states", func(q *query) error {
		return q.rows(func(row scanner) error {
			var pool, state string
			err := row.Scan(&pool, &state)
			all[pool] = []byte(state)
			return err
		}, "SELECT pool, state FROM pool_states")
	})
	return all, err
}

// Arrivals is what came in for a model in the five minutes from Start.
type Arrivals struct {
	Model   job.Model
	Start   job.Millis
	Jobs    int64
	Tokens  int64
	Squares float64
}

func (a Arrivals) compare(b Arrivals) int {
	return cmp.Or(cmp.Compare(a.Model, b.Model), cmp.Compare(a.Start, b.Start))
}

// AddArrivals adds to what is recorded. After ErrUnavailable it may be added or not.
func (s *Store) AddArrivals(ctx context.Context, epoch uint64, all ...Arrivals) error {
	return s.leadScaling(ctx, epoch, "recording arrivals", func(q *query) error {
		for _, a := range all {
			if _, err := q.exec(`INSERT INTO arrivals (model, start, jobs, tokens, squares) VALUES ($1, $2, $3, $4, $5) ON CONFLICT (model, start) DO UPDATE SET
				jobs = arrivals.jobs + excluded.jobs, tokens = arrivals.tokens + excluded.tokens, squares = arrivals.squares + excluded.squares`, a.Model, a.Start, a.Jobs, a.Tokens, a.Squares); err != nil {
				return err
			}
		}
		return nil
	})
}

// Arrivals lists those of some models since a time, by model and start.
func (s *Store) Arrivals(ctx context.Context, models []job.Model, since job.Millis) ([]Arrivals, error) {
	models = slices.Compact(slices.Sorted(slices.Values(models)))
	var all []Arrivals
	err := s.read(ctx, "reading recorded arrivals", func(q *query) error {
		for part := range slices.Chunk(models, chunk) {
			args := []any{since}
			for _, m := range part {
				args = append(args, m)
			}
			if err := q.rows(func(row scanner) error {
				var a Arrivals
				err := row.Scan(&a.Model, &a.Start, &a.Jobs, &a.Tokens, &a.Squares)
				all = append(all, a)
				return err
			}, "SELECT model, start, jobs, tokens, squares FROM arrivals WHERE start >= $1 AND model IN ("+marks(2, len(part))+")", args...); err != nil {
				return err
			}
		}
		return nil
	})
	slices.SortFunc(all, Arrivals.compare)
	return all, err
}

// Scaling is a decision about a pool as it is kept: Decision is the JSON of a scale.Decision. IDs rise.
type Scaling struct {
	ID       int64
	Pool     string
	At       job.Millis
	Action   string
	Decision []byte
}

// InsertScaling adds one, under an ID of its own.
func (s *Store) InsertScaling(ctx context.Context, epoch uint64, d Scaling) error {
	return s.leadScaling(ctx, epoch, "keeping a decision about the pool "+d.Pool, func(q *query) error {
		// Who writes decisions is alone until the transaction ends, and the newest one is never removed: so the IDs rise.
		_, err := q.exec("INSERT INTO scaling (id, pool, at, action, decision) SELECT COALESCE(MAX(id), 0) + 1, $1, $2, $3, $4 FROM scaling", d.Pool, d.At, d.Action, string(d.Decision))
		return err
	})
}

// Scalings lists those of a pool ("" = all), newest first, of IDs before one (0 = the newest), limit at most; more tells whether there are more.
func (s *Store) Scalings(ctx context.Context, pool string, before int64, limit int) (all []Scaling, more bool, err error) {
	if limit <= 0 {
		return nil, false, errors.New("a listing of decisions needs a limit of 1 at least")
	}
	text, args := "SELECT id, pool, at, action, decision FROM scaling WHERE true", []any{}
	if pool != "" {
		args = append(args, pool)
		text += fmt.Sprintf(" AND pool = $%d", len(args))
	}
	if before > 0 {
		args = append(args, before)
		text += fmt.Sprintf(" AND id < $%d", len(args))
	}
	text += fmt.Sprintf(" ORDER BY id DESC LIMIT %d", limit+1)
	err = s.read(ctx, "listing decisions", func(q *query) error {
		return q.rows(func(row scanner) error {
			var d Scaling
			var decision string
			err := row.Scan(&d.ID, &d.Pool, &d.At, &d.Action, &decision)
			d.Decision = []byte(decision)
			all = append(all, d)
			return err
		}, text, args...)
	})
	if err != nil {
		return nil, false, err
	}
	if more = len(all) > limit; more {
		all = all[:limit]
	}
	return all, more, nil
}

// TrimScaling removes decisions and arrivals that are older. The newest decision stays.
func (s *Store) TrimScaling(ctx context.Context, epoch uint64, decisions, arrivals job.Millis) error {
	return s.leadScaling(ctx, epoch, "removing old decisions and arrivals", func(q *query) error {
		if _, err := q.exec("DELETE FROM scaling WHERE at < $1 AND id < (SELECT MAX(id) FROM scaling)", decisions); err != nil {
			return err
		}
		_, err := q.exec("DELETE FROM arrivals WHERE start < $1", arrivals)
		return err
	})
}
