package ledger_test

import (
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
	"github.com/millrace/millrace/internal/testenv"
)

func pool(name string, models ...string) ledger.Pool {
	return ledger.Pool{Name: name, Spec: []byte(`{"name":"` + name + `","models":["` + strings.Join(models, `","`) + `"]}`), Source: ledger.FromAPI, Created: noon, Updated: noon}
}

func TestPools(t *testing.T) {
	each(t, func(t *testing.T, s *ledger.Store) {
		ctx := t.Context()
		all, err := s.Pools(ctx)
		ok(t, err)
		same(t, len(all), 0)
		_, err = s.Pool(ctx, "a")
		want(t, err, ledger.ErrNotFound)

		// An order that a database's own collation would get wrong.
		for _, name := range []string{"ab", "a-c", "a"} {
			p := pool(name, "m-"+name)
			got, err := s.CreatePool(ctx, p)
			ok(t, err)
			same(t, *got, p)
		}
		all, err = s.Pools(ctx)
		ok(t, err)
		same(t, all, []ledger.Pool{pool("a", "m-a"), pool("a-c", "m-a-c"), pool("ab", "m-ab")})
		_, err = s.CreatePool(ctx, pool("a", "new"))
		want(t, err, ledger.ErrExists)

		p := pool("a", "m-a", "more")
		p.Updated = noon + 1
		got, err := s.UpdatePool(ctx, p)
		ok(t, err)
		same(t, *got, p)
		got, err = s.Pool(ctx, "a")
		ok(t, err)
		same(t, *got, p)
		_, err = s.UpdatePool(ctx, pool("nobody", "x"))
		want(t, err, ledger.ErrNotFound)

		ok(t, s.DeletePool(ctx, "a"))
		want(t, s.DeletePool(ctx, "a"), ledger.ErrNotFound)
		_, err = s.Pool(ctx, "a")
		want(t, err, ledger.ErrNotFound)

		before := job.MillisOf(time.Now())
		got, err = s.CreatePool(ctx, ledger.Pool{Name: "now", Spec: []byte("{}"), Source: ledger.FromFile})
		ok(t, err)
		if got.Created < before || got.Updated != got.Created || got.Source != ledger.FromAPI {
			t.Errorf("made now it is %+v", got)
		}
	})
}

func TestAModelIsOfOnePool(t *testing.T) {
	each(t, func(t *testing.T, s *ledger.Store) {
		ctx := t.Context()
		_, err := s.CreatePool(ctx, pool("a", "m", "n"))
		ok(t, err)
		_, err = s.CreatePool(ctx, pool("b", "x", "n"))
		want(t, err, ledger.ErrTaken)
		if err == nil || !strings.Contains(err.Error(), "n is of the pool a") {
			t.Error(err)
		}
		_, err = s.CreatePool(ctx, pool("b", "x"))
		ok(t, err)
		_, err = s.UpdatePool(ctx, pool("b", "m"))
		want(t, err, ledger.ErrTaken)
		updated := pool("b", "y")
		updated.Updated++
		_, err = s.UpdatePool(ctx, updated)
		ok(t, err)
		// The file's pools are held to it too, and the ones before stay as they are.
		file := pool("f", "z")
		file.Source = ledger.FromFile
		ok(t, s.SyncPools(ctx, 1, []ledger.Pool{file}))
		for _, twice := range [][]ledger.Pool{{pool("g", "m")}, {pool("g", "1", "2"), pool("h", "3", "1")}} {
			want(t, s.SyncPools(ctx, 1, twice), ledger.ErrTaken)
		}
		all, err := s.Pools(ctx)
		ok(t, err)
		same(t, all, []ledger.Pool{pool("a", "m", "n"), updated, file})
		// A pool that the file takes over, and one that it gives up, do not count.
		ok(t, s.SyncPools(ctx, 1, []ledger.Pool{pool("a", "z")}))
		// Of several at once, one gets the model.
		var wg sync.WaitGroup
		var made atomic.Int64
		for i := range 4 {
			wg.Go(func() {
				switch _, err := s.CreatePool(ctx, pool(fmt.Sprintf("many-%d", i), "wanted")); {
				case err == nil:
					made.Add(1)
				default:
					want(t, err, ledger.ErrTaken)
				}
			})
		}
		wg.Wait()
		same(t, made.Load(), int64(1))
	})
}

func TestAWorkloadIsOfOnePool(t *testing.T) {
	each(t, func(t *testing.T, s *ledger.Store) {
		ctx := t.Context()
		scaled := func(name, workload string) ledger.Pool {
			p := pool(name)
			p.Spec = []byte(`{"name":"` + name + `","models":["m-` + name + `"],"kubernetes":` + workload + `}`)
			return p
		}
		const llm = `{"namespace":"prod","kind":"Deployment","name":"llm","context":"","observe":false}`
		_, err := s.CreatePool(ctx, scaled("a", llm))
		ok(t, err)
		_, err = s.CreatePool(ctx, scaled("b", `{"namespace":"prod","kind":"Deployment","name":"llm","observe":true}`))
		want(t, err, ledger.ErrWorkload)
		if err == nil || !strings.Contains(err.Error(), "Deployment llm is of the pool a") {
			t.Error(err)
		}
		// Another kind, namespace or context is another workload, and a pool may keep its own.
		for i, other := range []string{`{"namespace":"prod","kind":"StatefulSet","name":"llm"}`, `{"namespace":"test","kind":"Deployment","name":"llm"}`, `{"namespace":"prod","kind":"Deployment","name":"llm","context":"far"}`, `null`} {
			_, err = s.CreatePool(ctx, scaled(fmt.Sprint("other-", i), other))
			ok(t, err)
		}
		_, err = s.UpdatePool(ctx, scaled("a", llm))
		ok(t, err)
		_, err = s.UpdatePool(ctx, scaled("other-3", llm))
		want(t, err, ledger.ErrWorkload)
		want(t, s.SyncPools(ctx, 1, []ledger.Pool{scaled("filed", llm)}), ledger.ErrWorkload)
		ok(t, s.SyncPools(ctx, 1, []ledger.Pool{scaled("a", llm)})) // it takes the pool over
	})
}

func TestPoolsOfAFile(t *testing.T) {
	each(t, func(t *testing.T, s *ledger.Store) {
		ctx := t.Context()
		for _, name := range []string{"api", "both"} {
			_, err := s.CreatePool(ctx, pool(name, name))
			ok(t, err)
		}
		of := func(source string, p ledger.Pool, updated job.Millis) ledger.Pool {
			p.Source, p.Updated = source, updated
			return p
		}
		sync := func(at job.Millis, file ...ledger.Pool) {
			t.Helper()
			for i := range file {
				file[i].Updated, file[i].Source = at, ""
			}
			ok(t, s.SyncPools(ctx, 1, file))
		}
		expect := func(wanted ...ledger.Pool) {
			t.Helper()
			all, err := s.Pools(ctx)
			ok(t, err)
			same(t, all, wanted)
		}
		sync(noon+1, pool("both", "both"), pool("file", "file"))
		expect(pool("api", "api"), of(ledger.FromFile, pool("both", "both"), noon+1), of(ledger.FromFile, pool("file", "file"), noon+1))
		for _, name := range []string{"both", "file"} {
			_, err := s.UpdatePool(ctx, pool(name, "x"))
			want(t, err, ledger.ErrInUse)
			want(t, s.DeletePool(ctx, name), ledger.ErrInUse)
			_, err = s.CreatePool(ctx, pool(name, "x"))
			want(t, err, ledger.ErrExists)
		}
		// Only what changed is updated, and what is gone is gone.
		sync(noon+2, pool("both", "both", "more"), pool("file", "file"))
		expect(pool("api", "api"), of(ledger.FromFile, pool("both", "both", "more"), noon+2), of(ledger.FromFile, pool("file", "file"), noon+1))
		sync(noon+3, pool("file", "file"))
		expect(pool("api", "api"), of(ledger.FromFile, pool("file", "file"), noon+1))
		sync(noon + 4)
		expect(pool("api", "api"))
	})
}

func TestLaunches(t *testing.T) {
	each(t, func(t *testing.T, s *ledger.Store) {
		ctx := t.Context()
		a, b, c := ledger.Launch{Pool: "p", Name: "p-a", At: noon}, ledger.Launch{Pool: "p", Name: "p-b", At: noon + 1}, ledger.Launch{Pool: "o", Name: "p-b", At: noon + 2, Ready: 3, Stopping: 4}
		expect := func(wanted ...ledger.Launch) {
			t.Helper()
			all, err := s.Launches(ctx)
			ok(t, err)
			same(t, all, wanted)
		}
		expect()
		ok(t, s.InsertLaunches(ctx, 1))
		ok(t, s.InsertLaunches(ctx, 1, b, a, c))
		expect(c, a, b)
		// All or none.
		want(t, s.InsertLaunches(ctx, 1, ledger.Launch{Pool: "p", Name: "p-new"}, b), ledger.ErrExists)
		expect(c, a, b)

		a.Ready = noon + 5
		ok(t, s.UpdateLaunch(ctx, 1, a))
		b.Stopping = noon + 6
		ok(t, s.UpdateLaunch(ctx, 1, b))
		expect(c, a, b)
		moved := a
		moved.At = 1 // when it was asked for never changes
		ok(t, s.UpdateLaunch(ctx, 1, moved))
		expect(c, a, b)
		want(t, s.UpdateLaunch(ctx, 1, ledger.Launch{Pool: "o", Name: "p-a"}), ledger.ErrNotFound)
		ok(t, s.DeleteLaunch(ctx, 1, "p", "p-b"))
		ok(t, s.DeleteLaunch(ctx, 1, "p", "p-b"))
		expect(c, a)
	})
}

func TestPoolStates(t *testing.T) {
	each(t, func(t *testing.T, s *ledger.Store) {
		ctx := t.Context()
		expect := func(wanted map[string][]byte) {
			t.Helper()
			all, err := s.PoolStates(ctx)
			ok(t, err)
			same(t, all, wanted)
		}
		expect(map[string][]byte{})
		ok(t, s.SavePoolState(ctx, 1, "a", []byte(`{"cold_starts":[1]}`)))
		ok(t, s.SavePoolState(ctx, 1, "b", []byte(`{}`)))
		ok(t, s.SavePoolState(ctx, 1, "a", []byte(`{"cold_starts":[1,2]}`)))
		expect(map[string][]byte{"a": []byte(`{"cold_starts":[1,2]}`), "b": []byte(`{}`)})
		ok(t, s.SavePoolState(ctx, 1, "a", nil))
		ok(t, s.SavePoolState(ctx, 1, "a", nil))
		expect(map[string][]byte{"b": []byte(`{}`)})
	})
}

func TestArrivalsAddUp(t *testing.T) {
	each(t, func(t *testing.T, s *ledger.Store) {
		ctx := t.Context()
		const five = job.Millis(300_000)
		ok(t, s.AddArrivals(ctx, 1))
		ok(t, s.AddArrivals(ctx, 1,
			ledger.Arrivals{Model: "b", Start: noon, Jobs: 1, Tokens: 10, Squares: 100},
			ledger.Arrivals{Model: "a-z", Start: noon, Jobs: 2, Tokens: 20, Squares: 200.5},
			ledger.Arrivals{Model: "aa", Start: noon + five, Jobs: 3, Tokens: 1 << 40, Squares: 1e30},
			ledger.Arrivals{Model: "aa", Start: noon, Jobs: 4, Tokens: 40, Squares: 400},
			ledger.Arrivals{Model: "aa", Start: noon, Jobs: 1, Tokens: 1, Squares: 1},
		))
		ok(t, s.AddArrivals(ctx, 1, ledger.Arrivals{Model: "a-z", Start: noon, Jobs: 1, Tokens: 5, Squares: 0.25}))
		read := func(since job.Millis, models ...job.Model) []ledger.Arrivals {
			t.Helper()
			all, err := s.Arrivals(ctx, models, since)
			ok(t, err)
			return all
		}
		az, aa, aa2 := ledger.Arrivals{Model: "a-z", Start: noon, Jobs: 3, Tokens: 25, Squares: 200.75}, ledger.Arrivals{Model: "aa", Start: noon, Jobs: 5, Tokens: 41, Squares: 401}, ledger.Arrivals{Model: "aa", Start: noon + five, Jobs: 3, Tokens: 1 << 40, Squares: 1e30}
		same(t, read(0, "aa", "a-z", "aa", "none"), []ledger.Arrivals{az, aa, aa2})
		same(t, read(noon+1, "aa", "a-z"), []ledger.Arrivals{aa2})
		same(t, read(0), []ledger.Arrivals(nil))
		var many []job.Model
		for i := range 250 {
			many = append(many, job.Model(fmt.Sprintf("none-%d", i)))
		}
		same(t, read(0, append(many, "aa")...), []ledger.Arrivals{aa, aa2})

		ok(t, s.TrimScaling(ctx, 1, 0, noon+1))
		same(t, read(0, "aa", "a-z", "b"), []ledger.Arrivals{aa2})
	})
}

func TestDecisionsAreListedInPages(t *testing.T) {
	each(t, func(t *testing.T, s *ledger.Store) {
		ctx := t.Context()
		for i := range 7 {
			ok(t, s.InsertScaling(ctx, 1, ledger.Scaling{ID: 77, Pool: []string{"a", "b"}[i%2], At: noon + job.Millis(i), Action: "hold", Decision: fmt.Appendf(nil, `{"want":%d}`, i)}))
		}
		decision := func(i int) ledger.Scaling {
			return ledger.Scaling{ID: int64(i + 1), Pool: []string{"a", "b"}[i%2], At: noon + job.Millis(i), Action: "hold", Decision: fmt.Appendf(nil, `{"want":%d}`, i)}
		}
		for _, c := range []struct {
			name   string
			pool   string
			before int64
			limit  int
			wanted []int
			more   bool
		}{
			{"all", "", 0, 10, []int{6, 5, 4, 3, 2, 1, 0}, false},
			{"the newest", "", 0, 3, []int{6, 5, 4}, true},
			{"the next", "", 5, 3, []int{3, 2, 1}, true},
			{"the last", "", 2, 1, []int{0}, false},
			{"none", "", 1, 3, nil, false},
			{"of a pool", "b", 0, 2, []int{5, 3}, true},
			{"of a pool before one", "b", 4, 2, []int{1}, false},
			{"of a pool that has none", "c", 0, 2, nil, false},
		} {
			var wanted []ledger.Scaling
			for _, i := range c.wanted {
				wanted = append(wanted, decision(i))
			}
			all, more, err := s.Scalings(ctx, c.pool, c.before, c.limit)
			ok(t, err)
			if d := cmp.Diff(wanted, all); d != "" || more != c.more {
				t.Errorf("%s: more is %v\n%s", c.name, more, d)
			}
		}
		if _, _, err := s.Scalings(ctx, "", 0, 0); err == nil {
			t.Error("a page of nothing was given")
		}

		// Old ones go; the newest stays, whatever its age, so that IDs rise for ever.
		ok(t, s.TrimScaling(ctx, 1, noon+4, 0))
		all, _, err := s.Scalings(ctx, "", 0, 10)
		ok(t, err)
		same(t, all, []ledger.Scaling{decision(6), decision(5), decision(4)})
		ok(t, s.TrimScaling(ctx, 1, noon+day, 0))
		all, _, err = s.Scalings(ctx, "", 0, 10)
		ok(t, err)
		same(t, all, []ledger.Scaling{decision(6)})
		ok(t, s.InsertScaling(ctx, 1, ledger.Scaling{Pool: "b", At: noon + 7, Action: "hold", Decision: []byte(`{"want":7}`)}))
		all, _, err = s.Scalings(ctx, "", 0, 10)
		ok(t, err)
		same(t, all, []ledger.Scaling{decision(7), decision(6)})
	})
}

func TestWhoLeadsTheScalingNoMoreWritesNothing(t *testing.T) {
	each(t, func(t *testing.T, s *ledger.Store) {
		ctx := t.Context()
		l := ledger.Launch{Pool: "p", Name: "p-1", At: noon}
		ok(t, s.InsertLaunches(ctx, 4, l))
		ok(t, s.LeadScaling(ctx, 5))
		ok(t, s.LeadScaling(ctx, 5))
		writes := map[string]func(epoch uint64) error{
			"lead":   func(epoch uint64) error { return s.LeadScaling(ctx, epoch) },
			"pools":  func(epoch uint64) error { return s.SyncPools(ctx, epoch, []ledger.Pool{pool("f", "f")}) },
			"launch": func(epoch uint64) error { return s.InsertLaunches(ctx, epoch, ledger.Launch{Pool: "p", Name: "p-2"}) },
			"update": func(epoch uint64) error {
				return s.UpdateLaunch(ctx, epoch, ledger.Launch{Pool: "p", Name: "p-1", Ready: 1})
			},
			"delete": func(epoch uint64) error { return s.DeleteLaunch(ctx, epoch, "p", "p-1") },
			"state":  func(epoch uint64) error { return s.SavePoolState(ctx, epoch, "p", []byte("{}")) },
			"arrival": func(epoch uint64) error {
				return s.AddArrivals(ctx, epoch, ledger.Arrivals{Model: "m", Start: noon, Jobs: 1})
			},
			"scaling": func(epoch uint64) error {
				return s.InsertScaling(ctx, epoch, ledger.Scaling{Pool: "p", Decision: []byte("{}")})
			},
			"trim": func(epoch uint64) error { return s.TrimScaling(ctx, epoch, noon, noon) },
		}
		for name, f := range writes {
			if err := f(4); err == nil {
				t.Errorf("%s with an old epoch was written", name)
			} else {
				want(t, err, ledger.ErrFenced)
			}
		}
		pools, err := s.Pools(ctx)
		ok(t, err)
		launches, err := s.Launches(ctx)
		ok(t, err)
		states, err := s.PoolStates(ctx)
		ok(t, err)
		arrivals, err := s.Arrivals(ctx, []job.Model{"m"}, 0)
		ok(t, err)
		decisions, _, err := s.Scalings(ctx, "", 0, 10)
		ok(t, err)
		same(t, launches, []ledger.Launch{l})
		if len(pools)+len(states)+len(arrivals)+len(decisions) > 0 {
			t.Errorf("there are %v %v %v %v", pools, states, arrivals, decisions)
		}

		// The dispatchers' epochs are others.
		ok(t, s.Lead(ctx, 1))
		ok(t, s.Lead(ctx, 99))
		ok(t, writes["launch"](5))
		// A write with a higher epoch fences as LeadScaling does.
		ok(t, writes["state"](6))
		want(t, writes["scaling"](5), ledger.ErrFenced)
		want(t, s.Lead(ctx, 6), ledger.ErrFenced)
	})
}

// TestRowsOfTheSecondSchema: what an older build has written is read as it was meant.
func TestRowsOfTheSecondSchema(t *testing.T) {
	eachURL(t, func(t *testing.T, url string) {
		ctx := t.Context()
		s := testenv.OpenLedger(t, url)
		db := raw(t, url)
		for _, text := range []string{
			`INSERT INTO pools (name, spec, source, created, updated) VALUES ('a', '{"models":["m"]}', 'api', 1772366400000, 1772366400001), ('f', '{"models":["n"]}', 'file', 1772366400002, 1772366400003)`,
			`INSERT INTO pool_states (pool, state) VALUES ('a', '{"x":1}')`,
			`INSERT INTO launches (pool, name, at, ready, stopping) VALUES ('a', 'a-1', 1772366400000, 1772366400001, 1772366400002)`,
			`INSERT INTO arrivals (model, start, jobs, tokens, squares) VALUES ('m', 1772366400000, 1, 2, 3.5)`,
			`INSERT INTO scaling (id, pool, at, action, decision) VALUES (9, 'a', 1772366400000, 'scale_up', '{"want":1}')`,
			`UPDATE leadership SET epoch = 7 WHERE id = 2`,
		} {
			_, err := db.ExecContext(ctx, text)
			ok(t, err)
		}
		pools, err := s.Pools(ctx)
		ok(t, err)
		same(t, pools, []ledger.Pool{
			{Name: "a", Spec: []byte(`{"models":["m"]}`), Source: ledger.FromAPI, Created: noon, Updated: noon + 1},
			{Name: "f", Spec: []byte(`{"models":["n"]}`), Source: ledger.FromFile, Created: noon + 2, Updated: noon + 3},
		})
		states, err := s.PoolStates(ctx)
		ok(t, err)
		same(t, states, map[string][]byte{"a": []byte(`{"x":1}`)})
		launches, err := s.Launches(ctx)
		ok(t, err)
		same(t, launches, []ledger.Launch{{Pool: "a", Name: "a-1", At: noon, Ready: noon + 1, Stopping: noon + 2}})
		arrivals, err := s.Arrivals(ctx, []job.Model{"m"}, 0)
		ok(t, err)
		same(t, arrivals, []ledger.Arrivals{{Model: "m", Start: noon, Jobs: 1, Tokens: 2, Squares: 3.5}})
		decisions, _, err := s.Scalings(ctx, "a", 0, 1)
		ok(t, err)
		same(t, decisions, []ledger.Scaling{{ID: 9, Pool: "a", At: noon, Action: "scale_up", Decision: []byte(`{"want":1}`)}})
		want(t, s.LeadScaling(ctx, 6), ledger.ErrFenced)
		ok(t, s.LeadScaling(ctx, 7))
	})
}

// TestAnOlderLedgerLearnsToScale: the step to the second schema keeps what is there, and so does the way back.
func TestAnOlderLedgerLearnsToScale(t *testing.T) {
	eachURL(t, func(t *testing.T, url string) {
		ctx, cfg, log := t.Context(), ledger.Config{URL: url}, testenv.Log(t)
		_, _, err := ledger.Migrate(ctx, cfg, log)
		ok(t, err)
		_, _, err = ledger.MigrateDown(ctx, cfg, 1, log)
		ok(t, err)
		_, err = raw(t, url).ExecContext(ctx, `INSERT INTO tenants (id, name, weight, limits, created, disabled) VALUES ('acme', '', 7, '{}', 1772366400000, 0)`)
		ok(t, err)
		_, err = raw(t, url).ExecContext(ctx, "UPDATE leadership SET epoch = 3")
		ok(t, err)
		for range 2 {
			s := testenv.OpenLedger(t, url)
			got, err := s.Tenant(ctx, acme)
			ok(t, err)
			same(t, *got, ledger.Tenant{ID: acme, Weight: 7, Created: noon})
			want(t, s.Lead(ctx, 2), ledger.ErrFenced)
			ok(t, s.LeadScaling(ctx, 2))
			_, _, err = ledger.MigrateDown(ctx, cfg, 1, log)
			ok(t, err)
		}
	})
}
