// Package providertest is the suite that every provider passes.
package providertest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/provider"
	"github.com/millrace/millrace/internal/scale"
)

// Fixture is a world of its own in which a provider starts workers. Of the pools, which differ by name and have a Max of at least 5, those that the world cannot make are nil, and the tests that need them are left out.
type Fixture struct {
	// Open makes a provider in this world, and another one whenever it is called again: what an autoscaler has that starts later, or elsewhere. The suite closes it.
	Open func(t *testing.T) provider.Provider
	// NamesItself: the provider names its instances itself, and goes by the total that Start is given.
	NamesItself bool
	// Secrets are texts that no error and no listing may hold. Every value of Join and of each pool's Engine.Env is to be among them, and unlike any other text.
	Secrets []string

	// Plain pool: its workers run until they are told to end, and end at once. Other is one more like it. Both are required.
	Plain, Other *scale.Pool
	// Broken pool: each worker that is asked for fails, with Reason in what is said of it.
	Broken *scale.Pool
	Reason string
	// Fail makes a running instance of Plain end by itself; nil if it cannot be done.
	Fail func(t *testing.T, name string)
	// Busy pool: its workers, once told to end, go on until Release lets them.
	Busy    *scale.Pool
	Release func(t *testing.T, name string)
	// Up waits until a running instance of Busy or Stubborn does as its pool says; nil if it does from the beginning.
	Up func(t *testing.T, p *scale.Pool, name string)
	// Stubborn pool: its workers never end by themselves, and its Drain is short.
	Stubborn *scale.Pool
	// Full pool: there is room for Room of its workers, and no more.
	Full *scale.Pool
	Room int
	// Invalid pools cannot work, by why.
	Invalid map[string]*scale.Pool
	// Gone fails the test if anything is left of an instance that was stopped; nil if there is nothing to look at.
	Gone func(t *testing.T, p *scale.Pool, name string)
}

// patience is how long the suite waits for what must come.
const patience = 60 * time.Second

// Run runs the suite. fixture makes a new world each time.
func Run(t *testing.T, fixture func(t *testing.T) Fixture) {
	tests := []struct {
		name  string
		needs func(f *Fixture) bool
		run   func(s *suite)
	}{
		{"AWorkerIsStartedListedAndStopped", nil, (*suite).startListStop},
		{"TheSameNameTwiceIsOneWorker", nil, (*suite).sameName},
		{"ASecondAutoscalerSeesAndStopsTheWorkersOfTheFirst", nil, (*suite).second},
		{"PoolsAreApart", nil, (*suite).apart},
		{"StartsAtTheSameTimeAllCount", nil, (*suite).concurrent},
		{"ManyWhoAskForTheSameNameGetOneWorker", nil, (*suite).concurrentSame},
		{"StopOfOneThatDoesNotExistIsNoError", nil, (*suite).unknown},
		{"AnEndedContextIsAnError", nil, (*suite).ended},
		{"AStartThatFailsIsListedUntilItIsStopped", func(f *Fixture) bool { return f.Broken != nil }, (*suite).broken},
		{"AWorkerThatEndsByItselfHasFailed", func(f *Fixture) bool { return f.Fail != nil }, (*suite).fails},
		{"StopWaitsForTheDrain", func(f *Fixture) bool { return f.Busy != nil }, (*suite).drain},
		{"AStopThatWasGivenUpGoesOn", func(f *Fixture) bool { return f.Busy != nil }, (*suite).givenUp},
		{"StopKillsAfterTheDrain", func(f *Fixture) bool { return f.Stubborn != nil }, (*suite).kill},
		{"NoRoomIsErrCapacity", func(f *Fixture) bool { return f.Full != nil }, (*suite).capacity},
		{"WhatCannotWorkIsErrInvalid", func(f *Fixture) bool { return len(f.Invalid) > 0 }, (*suite).invalid},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			f := fixture(t)
			if test.needs != nil && !test.needs(&f) {
				return // this world cannot make it
			}
			test.run(&suite{T: t, f: &f})
		})
	}
}

// suite is one test.
type suite struct {
	*testing.T
	f *Fixture
}

// open makes a provider that is watched for secrets.
func (s *suite) open() provider.Provider {
	s.Helper()
	p := &watched{Provider: s.f.Open(s.T), t: s.T, secrets: s.f.Secrets}
	s.Cleanup(func() { _ = p.Close() })
	return p
}

// start asks for the workers that names says, one after the other, and stops all of the pool when the test ends. total is how many there are before.
func (s *suite) start(p provider.Provider, pool *scale.Pool, before int, names ...string) {
	s.Helper()
	s.Cleanup(func() { s.clear(pool) })
	for i, name := range names {
		if err := p.Start(s.Context(), pool, name, before+i+1); err != nil {
			s.Fatalf("starting %s: %v", name, err)
		}
	}
}

// clear stops all instances of a pool.
func (s *suite) clear(pool *scale.Pool) {
	ctx, cancel := context.WithTimeout(context.Background(), patience) // the test's own has ended
	defer cancel()
	p := s.f.Open(s.T)
	defer p.Close()
	all, err := p.List(ctx, pool)
	if err != nil {
		s.Errorf("listing what is left: %v", err)
	}
	quick := *pool
	quick.Drain = scale.Duration(time.Millisecond)
	var stopping sync.WaitGroup
	for _, i := range all {
		stopping.Go(func() {
			if err := p.Stop(ctx, &quick, i.Name); err != nil {
				s.Errorf("stopping what is left: %v", err)
			}
		})
	}
	stopping.Wait()
}

// list is the pool's instances.
func (s *suite) list(p provider.Provider, pool *scale.Pool) []provider.Instance {
	s.Helper()
	all, err := p.List(s.Context(), pool)
	if err != nil {
		s.Fatalf("listing %s: %v", pool.Name, err)
	}
	for _, i := range all {
		switch i.State {
		case provider.Pending, provider.Running, provider.Stopping, provider.Failed:
		default:
			s.Errorf("%s has the state %q", i.Name, i.State)
		}
		if !i.Created.IsZero() && (time.Since(i.Created) > time.Hour || time.Until(i.Created) > time.Minute) {
			s.Errorf("%s was asked for at %v", i.Name, i.Created)
		}
	}
	return all
}

// names are those of the pool's instances, as they are listed.
func (s *suite) names(p provider.Provider, pool *scale.Pool) []string {
	s.Helper()
	var names []string
	for _, i := range s.list(p, pool) {
		names = append(names, i.Name)
	}
	if !slices.IsSorted(names) {
		s.Errorf("they are not listed by name: %q", names)
	}
	return names
}

// wantNames fails the test unless these are the pool's instances; where the provider names them itself, as many.
func (s *suite) wantNames(p provider.Provider, pool *scale.Pool, want ...string) {
	s.Helper()
	got := s.names(p, pool)
	if s.f.NamesItself {
		if len(got) != len(want) {
			s.Fatalf("there are %q, want %d", got, len(want))
		}
		return
	}
	if d := cmp.Diff(want, got); d != "" {
		s.Fatalf("the instances (-want +got):\n%s", d)
	}
}

// await waits until all of n instances of the pool have the state, and returns them.
func (s *suite) await(p provider.Provider, pool *scale.Pool, state provider.State, n int) []provider.Instance {
	s.Helper()
	for deadline := time.Now().Add(patience); ; {
		all := s.list(p, pool)
		if len(all) == n && !slices.ContainsFunc(all, func(i provider.Instance) bool { return i.State != state }) {
			return all
		}
		if time.Now().After(deadline) {
			s.Fatalf("waiting for %d that are %s: %+v", n, state, all)
		}
		time.Sleep(10 * time.Millisecond) // nobody tells when another process is there
	}
}

// stop stops an instance and looks whether it is gone.
func (s *suite) stop(p provider.Provider, pool *scale.Pool, name string) {
	s.Helper()
	if err := p.Stop(s.Context(), pool, name); err != nil {
		s.Fatalf("stopping %s: %v", name, err)
	}
	s.gone(p, pool, name)
}

func (s *suite) gone(p provider.Provider, pool *scale.Pool, name string) {
	s.Helper()
	if slices.Contains(s.names(p, pool), name) {
		s.Errorf("%s is listed after it was stopped", name)
	}
	if s.f.Gone != nil {
		s.f.Gone(s.T, pool, name)
	}
}

func (s *suite) startListStop() {
	p, pool := s.open(), s.f.Plain
	s.wantNames(p, pool)
	s.start(p, pool, 0, "a", "b")
	s.wantNames(p, pool, "a", "b")
	all := s.await(p, pool, provider.Running, 2)
	s.stop(p, pool, all[1].Name)
	s.wantNames(p, pool, "a")
	s.stop(p, pool, all[0].Name)
	s.wantNames(p, pool)
}

func (s *suite) sameName() {
	p, pool := s.open(), s.f.Plain
	s.start(p, pool, 0, "a")
	before := s.await(p, pool, provider.Running, 1)
	s.start(p, pool, 0, "a")
	after := s.await(p, pool, provider.Running, 1)
	if d := cmp.Diff(before, after); d != "" {
		s.Errorf("the second start changed (-before +after):\n%s", d)
	}
	s.stop(p, pool, after[0].Name)
	s.wantNames(p, pool)
}

func (s *suite) second() {
	first, pool := s.open(), s.f.Plain
	s.start(first, pool, 0, "a", "b")
	before := s.await(first, pool, provider.Running, 2)
	if err := first.Close(); err != nil {
		s.Fatal(err)
	}
	second := s.open()
	if d := cmp.Diff(before, s.list(second, pool)); d != "" {
		s.Errorf("what the second sees (-first +second):\n%s", d)
	}
	// It asks again for what it does not know to be there: nothing is started twice.
	s.start(second, pool, 0, "a", "b")
	if d := cmp.Diff(before, s.await(second, pool, provider.Running, 2)); d != "" {
		s.Errorf("after it asked again (-before +after):\n%s", d)
	}
	third := s.open()
	s.stop(second, pool, before[1].Name)
	s.gone(third, pool, before[1].Name)
	s.stop(third, pool, before[0].Name)
	s.wantNames(second, pool)
}

func (s *suite) apart() {
	p := s.open()
	s.start(p, s.f.Plain, 0, "a")
	s.wantNames(p, s.f.Other)
	s.start(p, s.f.Other, 0, "b")
	s.wantNames(p, s.f.Plain, "a")
	s.wantNames(p, s.f.Other, "b")
	all := s.await(p, s.f.Other, provider.Running, 1)
	s.stop(p, s.f.Other, all[0].Name)
	s.wantNames(p, s.f.Plain, "a")
}

func (s *suite) concurrent() {
	p, other, pool := s.open(), s.open(), s.f.Plain
	s.Cleanup(func() { s.clear(pool) })
	var names []string
	var starts sync.WaitGroup
	for i := range 5 {
		name, by := fmt.Sprint("w", i), p
		if i%2 == 1 {
			by = other
		}
		names = append(names, name)
		starts.Go(func() {
			total := i + 1
			if s.f.NamesItself {
				total = 5
			}
			if err := by.Start(s.Context(), pool, name, total); err != nil {
				s.Errorf("starting %s: %v", name, err)
			}
		})
	}
	starts.Wait()
	s.wantNames(p, pool, names...)
	all := s.await(p, pool, provider.Running, 5)
	// Those who name their instances themselves may only give up the last one.
	for _, i := range slices.Backward(all) {
		s.stop(p, pool, i.Name)
	}
	s.wantNames(other, pool)
}

func (s *suite) concurrentSame() {
	p, other, pool := s.open(), s.open(), s.f.Plain
	s.Cleanup(func() { s.clear(pool) })
	var starts sync.WaitGroup
	for i := range 6 {
		by := p
		if i%2 == 1 {
			by = other
		}
		starts.Go(func() {
			if err := by.Start(s.Context(), pool, "a", 1); err != nil {
				s.Errorf("starting: %v", err)
			}
		})
	}
	starts.Wait()
	s.wantNames(p, pool, "a")
	s.stop(p, pool, s.await(other, pool, provider.Running, 1)[0].Name)
	s.wantNames(p, pool)
}

func (s *suite) unknown() {
	p, pool := s.open(), s.f.Plain
	if err := p.Stop(s.Context(), pool, "never-was"); err != nil {
		s.Errorf("one that never was: %v", err)
	}
	s.start(p, pool, 0, "a")
	name := s.await(p, pool, provider.Running, 1)[0].Name
	if err := p.Stop(s.Context(), pool, "never-was"); err != nil {
		s.Errorf("one that never was, beside another: %v", err)
	}
	s.wantNames(p, pool, name)
	s.stop(p, pool, name)
	if err := p.Stop(s.Context(), pool, name); err != nil {
		s.Errorf("one that is gone: %v", err)
	}
}

func (s *suite) ended() {
	p, pool := s.open(), s.f.Plain
	s.start(p, pool, 0, "a")
	name := s.await(p, pool, provider.Running, 1)[0].Name
	ctx, cancel := context.WithCancel(s.Context())
	cancel()
	if _, err := p.List(ctx, pool); !errors.Is(err, context.Canceled) {
		s.Errorf("List: %v", err)
	}
	if err := p.Start(ctx, pool, "b", 2); !errors.Is(err, context.Canceled) {
		s.Errorf("Start: %v", err)
	}
	if err := p.Stop(ctx, pool, name); !errors.Is(err, context.Canceled) {
		s.Errorf("Stop: %v", err)
	}
}

func (s *suite) broken() {
	p, pool := s.open(), s.f.Broken
	s.start(p, pool, 0, "a")
	i := s.await(p, pool, provider.Failed, 1)[0]
	switch {
	case !strings.Contains(i.Reason, s.f.Reason):
		s.Errorf("the reason is %q, without %q", i.Reason, s.f.Reason)
	case strings.ContainsAny(i.Reason, "\r\n"):
		s.Errorf("the reason is more than a line: %q", i.Reason)
	case len(i.Reason) > 500:
		s.Errorf("the reason has %d bytes: %q", len(i.Reason), i.Reason)
	}
	// It stays so, whoever asks, until it is tidied away; and then it can be started anew.
	other := s.open()
	if again := s.await(other, pool, provider.Failed, 1)[0]; again.Name != i.Name {
		s.Errorf("another one sees %+v", again)
	}
	s.stop(other, pool, i.Name)
	s.wantNames(p, pool)
	s.start(p, pool, 0, "a")
	i = s.await(p, pool, provider.Failed, 1)[0]
	s.stop(p, pool, i.Name)
}

func (s *suite) fails() {
	p, pool := s.open(), s.f.Plain
	s.start(p, pool, 0, "a")
	i := s.await(p, pool, provider.Running, 1)[0]
	s.f.Fail(s.T, i.Name)
	failed := s.await(p, pool, provider.Failed, 1)[0]
	if failed.Name != i.Name || failed.Reason == "" || !failed.Created.Equal(i.Created) {
		s.Errorf("%+v became %+v", i, failed)
	}
	s.stop(p, pool, i.Name)
	s.wantNames(p, pool)
}

// up starts an instance and returns its name once it does as its pool says.
func (s *suite) up(p provider.Provider, pool *scale.Pool) string {
	s.Helper()
	s.start(p, pool, 0, "a")
	name := s.await(p, pool, provider.Running, 1)[0].Name
	if s.f.Up != nil {
		s.f.Up(s.T, pool, name)
	}
	return name
}

func (s *suite) drain() {
	p, other, pool := s.open(), s.open(), s.f.Busy
	name := s.up(p, pool)
	ended := make(chan error, 2)
	go func() { ended <- p.Stop(s.Context(), pool, name) }()
	s.await(other, pool, provider.Stopping, 1)
	// One who stops it as well waits along, and does not tell the worker a second time, which would make it hurry.
	go func() { ended <- other.Stop(s.Context(), pool, name) }()
	s.await(p, pool, provider.Stopping, 1)
	select {
	case err := <-ended:
		s.Errorf("a stop returned before the worker had ended: %v", err)
		ended <- err
	default:
	}
	s.f.Release(s.T, name)
	for range 2 {
		if err := <-ended; err != nil {
			s.Errorf("stopping: %v", err)
		}
	}
	s.gone(p, pool, name)
}

func (s *suite) givenUp() {
	p, pool := s.open(), s.f.Busy
	name := s.up(p, pool)
	ctx, cancel := context.WithCancel(s.Context())
	ended := make(chan error, 1)
	go func() { ended <- p.Stop(ctx, pool, name) }()
	s.await(p, pool, provider.Stopping, 1)
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		s.Errorf("the stop that was given up: %v", err)
	}
	other := s.open()
	s.await(other, pool, provider.Stopping, 1)
	go func() { ended <- other.Stop(s.Context(), pool, name) }()
	s.f.Release(s.T, name)
	if err := <-ended; err != nil {
		s.Errorf("the stop after it: %v", err)
	}
	s.gone(other, pool, name)
}

func (s *suite) kill() {
	p, pool := s.open(), s.f.Stubborn
	name := s.up(p, pool)
	begun := time.Now()
	s.stop(p, pool, name)
	if took := time.Since(begun); took < time.Duration(pool.Drain) {
		s.Errorf("it was killed after %v, before the %v of its drain were over", took, time.Duration(pool.Drain))
	}
}

func (s *suite) capacity() {
	p, pool := s.open(), s.f.Full
	var names []string
	for i := range s.f.Room {
		names = append(names, fmt.Sprint("w", i))
	}
	s.start(p, pool, 0, names...)
	s.await(p, pool, provider.Running, s.f.Room)
	err := p.Start(s.Context(), pool, "w9", s.f.Room+1)
	if !errors.Is(err, provider.ErrCapacity) {
		s.Errorf("one too many: %v", err)
	} else if err.Error() == provider.ErrCapacity.Error() {
		s.Errorf("it does not say what is short: %v", err)
	}
	s.wantNames(p, pool, names...)
	if s.f.Room == 0 {
		return
	}
	// Room that is given back can be had.
	s.stop(p, pool, s.names(p, pool)[s.f.Room-1])
	s.start(p, pool, s.f.Room-1, "w9")
	s.await(p, pool, provider.Running, s.f.Room)
}

func (s *suite) invalid() {
	p := s.open()
	for why, pool := range s.f.Invalid {
		err := p.Start(s.Context(), pool, "a", 1)
		if !errors.Is(err, provider.ErrInvalid) {
			s.Cleanup(func() { s.clear(pool) })
			s.Errorf("%s: %v", why, err)
			continue
		}
		if err.Error() == provider.ErrInvalid.Error() {
			s.Errorf("%s: it does not say what to change: %v", why, err)
		}
		if errors.Is(err, provider.ErrCapacity) {
			s.Errorf("%s: it is short of room too: %v", why, err)
		}
	}
}

// watched fails the test if a secret leaves the provider.
type watched struct {
	provider.Provider
	t       *testing.T
	secrets []string
}

func (w *watched) look(where, text string) {
	w.t.Helper()
	for _, s := range w.secrets {
		if strings.Contains(text, s) {
			w.t.Errorf("%s holds a secret: %q", where, text)
		}
	}
}

func (w *watched) List(ctx context.Context, p *scale.Pool) ([]provider.Instance, error) {
	all, err := w.Provider.List(ctx, p)
	w.look("the listing", fmt.Sprintf("%+v %v", all, err))
	return all, err
}

func (w *watched) Start(ctx context.Context, p *scale.Pool, name string, total int) error {
	err := w.Provider.Start(ctx, p, name, total)
	w.look("the error of a start", fmt.Sprint(err))
	return err
}

func (w *watched) Stop(ctx context.Context, p *scale.Pool, name string) error {
	err := w.Provider.Stop(ctx, p, name)
	w.look("the error of a stop", fmt.Sprint(err))
	return err
}
