package kubernetes_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/millrace/millrace/internal/provider"
	"github.com/millrace/millrace/internal/provider/kubernetes"
	"github.com/millrace/millrace/internal/provider/providertest"
	"github.com/millrace/millrace/internal/scale"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestProvider(t *testing.T) {
	t.Parallel()
	for _, resource := range []string{"deployments", "statefulsets", "leaderworkersets"} {
		t.Run(resource, func(t *testing.T) {
			t.Parallel()
			providertest.Run(t, func(t *testing.T) providertest.Fixture {
				plain, other := &load{resource: resource, name: "plain"}, &load{resource: resource, name: "other"}
				broken, busy := &load{resource: resource, name: "broken", broken: true}, &load{resource: resource, name: "busy", busy: true}
				w := newWorld(t, plain, other, broken, busy)
				absent := &load{resource: resource, name: "absent"}
				unknown := pool(plain)
				unknown.Kubernetes.Kind = "DaemonSet"
				nowhere := pool(plain)
				nowhere.Kubernetes.Context = "nowhere"
				return providertest.Fixture{
					Open:        func(t *testing.T) provider.Provider { return w.open(t) },
					NamesItself: true,
					Secrets:     []string{"the-token"},
					Plain:       pool(plain), Other: pool(other),
					Broken: pool(broken), Reason: "no model here",
					Fail: func(t *testing.T, name string) {
						w.do(func() { w.pods[name].ready, w.pods[name].waiting = false, crashLoop("out of memory") })
					},
					Busy: pool(busy),
					Release: func(t *testing.T, name string) {
						w.do(func() { busy.busy = false })
					},
					Invalid: map[string]*scale.Pool{
						"no workload of that name":       pool(absent),
						"not a kind that can be scaled":  unknown,
						"no context of that name":        nowhere,
						"nothing said":                   {Name: "empty"},
						"no name":                        {Name: "nameless", Kubernetes: &scale.Kubernetes{Kind: "Deployment"}},
						"a namespace without a workload": {Name: "far", Kubernetes: &scale.Kubernetes{Kind: "Deployment", Name: "plain", Namespace: "far"}},
					},
					Gone: func(t *testing.T, p *scale.Pool, name string) {
						w.do(func() {
							if w.pods[name] != nil {
								t.Errorf("pod %s is still there", name)
							}
						})
					},
				}
			})
		})
	}
}

// started brings a workload to n running pods, and returns their names.
func started(t *testing.T, w *world, p *kubernetes.Provider, l *load, n int) []string {
	t.Helper()
	if err := p.Start(t.Context(), pool(l), "ignored", n); err != nil {
		t.Fatal(err)
	}
	until(t, func() bool { return len(ready(w, l)) == n })
	_, names := w.state(l)
	return names
}

func ready(w *world, l *load) []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var names []string
	for _, p := range w.active(l) {
		if p.ready {
			names = append(names, p.name)
		}
	}
	return names
}

// until waits for the controllers of a world.
func until(t *testing.T, come func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !come(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("it never came")
		}
	}
}

// want fails the test unless the workload has as many replicas, and these pods.
func want(t *testing.T, w *world, l *load, replicas int, names []string) {
	t.Helper()
	gotReplicas, got := w.state(l)
	if gotReplicas != replicas {
		t.Errorf("there are %d replicas, want %d", gotReplicas, replicas)
	}
	if d := cmp.Diff(names, got); d != "" {
		t.Errorf("the pods (-want +got):\n%s", d)
	}
}

func without(names []string, gone ...string) []string {
	return slices.DeleteFunc(slices.Clone(names), func(n string) bool { return slices.Contains(gone, n) })
}

func TestStartRaisesAtOnceAndNeverLowers(t *testing.T) {
	t.Parallel()
	l := &load{resource: "deployments", name: "d", replicas: 2}
	w := newWorld(t, l)
	p := w.open(t)
	for _, step := range []struct{ total, want int }{{1, 2}, {7, 7}, {7, 7}, {3, 7}} {
		if err := p.Start(t.Context(), pool(l), "x", step.total); err != nil {
			t.Fatal(err)
		}
		if got, _ := w.state(l); got != step.want {
			t.Errorf("asked for %d there are %d, want %d", step.total, got, step.want)
		}
	}
}

func TestStartReadsAgainWhatChangedMeanwhile(t *testing.T) {
	t.Parallel()
	l := &load{resource: "deployments", name: "d"}
	w := newWorld(t, l)
	p := w.open(t)
	var once sync.Once
	w.do(func() {
		w.hook = func(request string) {
			if request == "update deployments/scale" {
				once.Do(func() { w.do(func() { w.version++; l.version, l.replicas = w.version, 5 }) })
			}
		}
	})
	if err := p.Start(t.Context(), pool(l), "x", 3); err != nil {
		t.Fatal(err)
	}
	if got, _ := w.state(l); got != 5 {
		t.Errorf("somebody raised it to 5 meanwhile; now it is %d", got)
	}
}

func TestStartWhoseReplyIsLostCanBeRepeated(t *testing.T) {
	t.Parallel()
	l := &load{resource: "deployments", name: "d"}
	w := newWorld(t, l)
	p := w.open(t)
	w.do(func() { w.lose = func(request string) bool { return request == "update deployments/scale" } })
	if err := p.Start(t.Context(), pool(l), "x", 3); err == nil {
		t.Error("the lost reply is no error")
	}
	w.do(func() { w.lose = nil })
	if err := p.Start(t.Context(), pool(l), "x", 3); err != nil {
		t.Fatal(err)
	}
	if got, _ := w.state(l); got != 3 {
		t.Errorf("there are %d replicas, want 3", got)
	}
}

func TestTheNamedPodOfADeploymentGoes(t *testing.T) {
	t.Parallel()
	l := &load{resource: "deployments", name: "d"}
	w := newWorld(t, l)
	p := w.open(t)
	left := started(t, w, p, l, 5)
	for _, at := range []int{2, 0, 2, 1, 0} { // whichever the controller would have liked better
		name := left[at]
		if err := p.Stop(t.Context(), pool(l), name); err != nil {
			t.Fatal(err)
		}
		left = without(left, name)
		want(t, w, l, len(left), nilIfEmpty(left))
	}
}

func nilIfEmpty(s []string) []string {
	if len(s) == 0 {
		return nil
	}
	return s
}

func TestAMarkThatWasNotUsedDoesNotDivertTheNextStop(t *testing.T) {
	t.Parallel()
	l := &load{resource: "deployments", name: "d"}
	w := newWorld(t, l)
	p := w.open(t)
	names := started(t, w, p, l, 4)
	w.do(func() { w.denied["update deployments/scale"] = true })
	if err := p.Stop(t.Context(), pool(l), names[0]); err == nil { // marks it, and comes no further
		t.Fatal("it may not lower the number, and says nothing")
	}
	w.do(func() { delete(w.denied, "update deployments/scale") })
	if err := p.Stop(t.Context(), pool(l), names[1]); err != nil {
		t.Fatal(err)
	}
	want(t, w, l, 3, without(names, names[1]))
}

func TestOneThatStartsStaysWhenAReadyOneIsStopped(t *testing.T) {
	t.Parallel()
	for name, starts := range map[string]func(p *fakePod){
		"it loads its model":                 func(p *fakePod) { p.ready = false },
		"it pulls its image":                 func(p *fakePod) { p.ready, p.phase = false, "Pending" },
		"it loads, among others on its node": func(p *fakePod) { p.ready, p.seq = false, p.seq+1000 },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := &load{resource: "deployments", name: "d"}
			w := newWorld(t, l)
			p := w.open(t)
			names := started(t, w, p, l, 4)
			w.do(func() {
				l.stuck = true // what comes new gets no node so soon
				starts(w.pods[names[0]])
			})
			if err := p.Stop(t.Context(), pool(l), names[2]); err != nil {
				t.Fatal(err)
			}
			until(t, func() bool { _, left := w.state(l); return len(left) == 3 })
			want(t, w, l, 3, without(names, names[2]))
		})
	}
}

func TestAReplicaWithoutAPodStaysWhenAReadyPodIsStopped(t *testing.T) {
	t.Parallel()
	l := &load{resource: "deployments", name: "d"}
	w := newWorld(t, l)
	p := w.open(t)
	names := started(t, w, p, l, 2)
	w.do(func() { l.quota = true })
	if err := p.Start(t.Context(), pool(l), "x", 4); err != nil {
		t.Fatal(err)
	}
	if err := p.Stop(t.Context(), pool(l), names[0]); err != nil {
		t.Fatal(err)
	}
	want(t, w, l, 3, names[1:])
}

func TestAStopThatWasCutOffLowersOnce(t *testing.T) {
	t.Parallel()
	for name, broken := range map[string]struct {
		request string
		applied bool
		starts  bool // another pod starts meanwhile, so that the pod is deleted
		want    int
	}{
		"the mark was not set":                        {request: "patch pods", want: 3},
		"the mark's reply was lost":                   {request: "patch pods", applied: true, want: 3},
		"the number was not lowered":                  {request: "update deployments/scale", want: 3},
		"the reply was lost":                          {request: "update deployments/scale", applied: true, want: 3},
		"the deletion did not happen":                 {request: "delete pods", starts: true, want: 3},
		"the deletion's reply was lost":               {request: "delete pods", applied: true, starts: true, want: 4}, // one too many, under a new name
		"it was deleted, the number was not lowered":  {request: "update deployments/scale", starts: true, want: 4},
		"it was deleted, and the lowering's reply is": {request: "update deployments/scale", applied: true, starts: true, want: 3},
	} {
		for _, paused := range []bool{false, true} {
			t.Run(name+map[bool]string{true: ", and the controllers sleep"}[paused], func(t *testing.T) {
				t.Parallel()
				l := &load{resource: "deployments", name: "d"}
				w := newWorld(t, l)
				first := w.open(t)
				names := started(t, w, first, l, 4)
				w.do(func() {
					w.paused = paused
					if broken.starts {
						l.stuck = true // what comes new gets no node so soon
						w.pods[names[0]].ready = false
					}
					if broken.applied {
						w.lose = func(request string) bool { return request == broken.request }
					} else {
						w.denied[broken.request] = true
					}
				})
				if err := first.Stop(t.Context(), pool(l), names[1]); err == nil {
					t.Fatal("what went wrong is no error")
				}
				w.do(func() { w.lose, w.denied = nil, map[string]bool{} })

				second := w.open(t) // another process, which knows nothing of the first
				ended := make(chan error, 1)
				go func() { ended <- second.Stop(t.Context(), pool(l), names[1]) }()
				w.do(func() { w.paused = false })
				if err := <-ended; err != nil {
					t.Fatal(err)
				}
				until(t, func() bool { replicas, left := w.state(l); return replicas == len(left) })
				replicas, left := w.state(l)
				if replicas != broken.want {
					t.Errorf("there are %d replicas, want %d", replicas, broken.want)
				}
				for _, n := range without(names, names[1]) {
					if !slices.Contains(left, n) {
						t.Errorf("%s went too: %q of %q are left", n, left, names)
					}
				}
				if slices.Contains(left, names[1]) {
					t.Errorf("%s is still there", names[1])
				}
			})
		}
	}
}

func TestAnotherAutoscalersUnfinishedStopIsNotCountedTwice(t *testing.T) {
	t.Parallel()
	l := &load{resource: "deployments", name: "d"}
	w := newWorld(t, l)
	first, second := w.open(t), w.open(t)
	names := started(t, w, first, l, 4)
	w.do(func() { w.paused = true })
	ended := make(chan error, 2)
	go func() { ended <- first.Stop(t.Context(), pool(l), names[3]) }()
	until(t, func() bool { replicas, _ := w.state(l); return replicas == 3 })
	looks := make(chan struct{}, 100)
	w.do(func() {
		w.hook = func(request string) {
			if request == "list pods" {
				select {
				case looks <- struct{}{}:
				default:
				}
			}
		}
	})
	go func() { ended <- second.Stop(t.Context(), pool(l), names[3]) }()
	for range 8 { // both look again and again
		<-looks
	}
	w.do(func() { w.paused = false })
	for range 2 {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
	want(t, w, l, 3, names[:3])
}

func TestStopsAtTheSameTimeAllCount(t *testing.T) {
	t.Parallel()
	l := &load{resource: "deployments", name: "d"}
	w := newWorld(t, l)
	p := w.open(t)
	names := started(t, w, p, l, 6)
	var stops sync.WaitGroup
	for _, name := range []string{names[0], names[2], names[5]} {
		stops.Go(func() {
			if err := p.Stop(t.Context(), pool(l), name); err != nil {
				t.Error(err)
			}
		})
	}
	stops.Wait()
	want(t, w, l, 3, []string{names[1], names[3], names[4]})
}

func TestStopSaysThatAnotherPodWasTaken(t *testing.T) {
	t.Parallel()
	l := &load{resource: "deployments", name: "d"}
	w := newWorld(t, l)
	p := w.open(t)
	names := started(t, w, p, l, 3)
	w.do(func() {
		w.hook = func(request string) { // in the last moment one's engine falls ill
			if request == "update deployments/scale" {
				w.mu.Lock()
				w.pods[names[0]].ready = false
				w.mu.Unlock()
			}
		}
	})
	err := p.Stop(t.Context(), pool(l), names[2])
	if err == nil || !strings.Contains(err.Error(), "took "+names[0]) || !strings.Contains(err.Error(), names[2]+" still runs") {
		t.Errorf("it says: %v", err)
	}
	want(t, w, l, 2, names[1:])
}

func TestStopSaysThatSomebodyElseScales(t *testing.T) {
	t.Parallel()
	l := &load{resource: "deployments", name: "d"}
	w := newWorld(t, l)
	p := w.open(t)
	names := started(t, w, p, l, 3)
	w.do(func() {
		lowered := false
		w.hook = func(request string) {
			switch request {
			case "update deployments/scale":
				w.do(func() { w.paused, lowered = true, true })
			case "get deployments/scale":
				w.do(func() {
					if lowered && l.replicas == 2 { // a HorizontalPodAutoscaler, say
						w.version++
						l.version, l.replicas, w.paused = w.version, 3, false
					}
				})
			}
		}
	})
	if err := p.Stop(t.Context(), pool(l), names[2]); err == nil || !strings.Contains(err.Error(), "another autoscaler") {
		t.Errorf("it says: %v", err)
	}
}

func TestARolloutIsNoHindrance(t *testing.T) {
	t.Parallel()
	l := &load{resource: "deployments", name: "d"}
	w := newWorld(t, l)
	p := w.open(t)
	names := started(t, w, p, l, 4)
	w.do(func() { w.pods[names[0]].labels["pod-template-hash"] = "new" })
	if err := p.Stop(t.Context(), pool(l), names[1]); err != nil {
		t.Fatal(err)
	}
	until(t, func() bool { _, left := w.state(l); return len(left) == 3 })
	if _, left := w.state(l); slices.Contains(left, names[1]) {
		t.Errorf("%s is still there", names[1])
	}
}

func TestAnEvictedPodDoesNotCount(t *testing.T) {
	t.Parallel()
	l := &load{resource: "deployments", name: "d"}
	w := newWorld(t, l)
	p := w.open(t)
	names := started(t, w, p, l, 2)
	w.do(func() {
		l.stuck = true
		evicted := w.pods[names[0]]
		evicted.phase, evicted.ready, evicted.status = "Failed", false, map[string]any{"reason": "Evicted", "message": "The node was low on resource: ephemeral-storage."}
	})
	until(t, func() bool { _, all := w.state(l); return len(all) == 2 })
	all, err := p.List(t.Context(), pool(l))
	if err != nil {
		t.Fatal(err)
	}
	if len(all) != 2 {
		t.Errorf("2 replicas, listed: %+v", all)
	}
	for _, i := range all {
		if i.State == provider.Pending && i.Reason != "in the place of "+names[0]+", which ended: Failed: Evicted: The node was low on resource: ephemeral-storage." {
			t.Errorf("the reason is %q", i.Reason)
		}
	}
	watched := pool(l)
	watched.Kubernetes.Observe = true
	if err := p.Stop(t.Context(), watched, names[0]); err != nil { // nobody removes it, and nobody waits for that
		t.Fatal(err)
	}
	if err := p.Stop(t.Context(), pool(l), names[0]); err != nil { // it may be tidied away all the same
		t.Fatal(err)
	}
	if replicas, all := w.state(l); replicas != 2 || len(all) != 2 {
		t.Errorf("tidying it away left %d replicas, %q", replicas, all)
	}
}

func TestReplicasWithoutAPodAreListedAndStopped(t *testing.T) {
	t.Parallel()
	l := &load{resource: "deployments", name: "d"}
	w := newWorld(t, l)
	p := w.open(t)
	started(t, w, p, l, 1)
	w.do(func() {
		l.quota = true
		l.conditions = []map[string]any{
			{"type": "Available", "status": "True", "reason": "MinimumReplicasAvailable"},
			{"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": "pods \"d-6d4cf56db6-\" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=1, used: requests.nvidia.com/gpu=1, limited: requests.nvidia.com/gpu=1"},
		}
	})
	if err := p.Start(t.Context(), pool(l), "x", 4); err != nil {
		t.Fatal(err)
	}
	pending := func() (names []string) {
		all, err := p.List(t.Context(), pool(l))
		if err != nil {
			t.Fatal(err)
		}
		for _, i := range all {
			if i.State == provider.Pending {
				names = append(names, i.Name)
				if !strings.Contains(i.Reason, "exceeded quota: gpus") {
					t.Errorf("%s: the reason is %q", i.Name, i.Reason)
				}
				if after := map[string]string{"d-pending-2": "d-pending-3", "d-pending-3": "d-pending-4"}[i.Name]; i.After != after && len(names) < 3 && len(all) == 4 {
					t.Errorf("%s can be stopped after %q, want %q", i.Name, i.After, after)
				}
			}
		}
		return names
	}
	if d := cmp.Diff([]string{"d-pending-2", "d-pending-3", "d-pending-4"}, pending()); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	if err := p.Stop(t.Context(), pool(l), "d-pending-2"); err == nil || !strings.Contains(err.Error(), "stop d-pending-4 first") {
		t.Errorf("out of order it says: %v", err)
	}
	for range 2 { // a second time it is gone already
		if err := p.Stop(t.Context(), pool(l), "d-pending-4"); err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff([]string{"d-pending-2", "d-pending-3"}, pending()); d != "" {
			t.Errorf("(-want +got):\n%s", d)
		}
	}
	before := pending()
	w.do(func() { l.quota, l.stuck = false, true })
	until(t, func() bool { _, all := w.state(l); return len(all) == 3 })
	if err := p.Stop(t.Context(), pool(l), before[0]); err != nil { // it has become a pod, which has a name of its own
		t.Fatal(err)
	}
	if replicas, _ := w.state(l); replicas != 3 {
		t.Errorf("stopping a name that is no more left %d replicas", replicas)
	}
}

func TestOrderedWorkloadsShrinkFromTheEnd(t *testing.T) {
	t.Parallel()
	for _, l := range []*load{{resource: "statefulsets", name: "s"}, {resource: "statefulsets", name: "s", start: 1}, {resource: "leaderworkersets", name: "s"}} {
		t.Run(l.resource, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, l)
			p := w.open(t)
			names := started(t, w, p, l, 3)
			all, err := p.List(t.Context(), pool(l))
			if err != nil {
				t.Fatal(err)
			}
			for n, i := range all {
				if want := append(names[1:], "")[n]; i.Name != names[n] || i.After != want {
					t.Errorf("%s can be stopped after %q, want %s after %q", i.Name, i.After, names[n], want)
				}
			}
			if err := p.Stop(t.Context(), pool(l), names[0]); err == nil || !strings.Contains(err.Error(), "stop "+names[2]+" first") {
				t.Errorf("out of order it says: %v", err)
			}
			want(t, w, l, 3, names)

			// One whose lowering was done and reported lost is not lowered again.
			w.do(func() {
				w.paused, w.lose = true, func(request string) bool { return strings.HasPrefix(request, "update ") }
			})
			if err := p.Stop(t.Context(), pool(l), names[2]); err == nil {
				t.Error("the lost reply is no error")
			}
			if all, err = p.List(t.Context(), pool(l)); err != nil || len(all) != 3 || all[2].State != provider.Stopping || all[1].After != "" {
				t.Errorf("while the last one goes: %+v, %v", all, err)
			}
			w.do(func() { w.paused, w.lose = false, nil })
			for range 2 {
				if err := p.Stop(t.Context(), pool(l), names[2]); err != nil {
					t.Fatal(err)
				}
				want(t, w, l, 2, names[:2])
			}

			// Replicas without a pod have their pods' names.
			w.do(func() { l.quota = true })
			if err := p.Start(t.Context(), pool(l), "x", 3); err != nil {
				t.Fatal(err)
			}
			if all, err = p.List(t.Context(), pool(l)); err != nil || len(all) != 3 || all[2].Name != names[2] || all[2].State != provider.Pending {
				t.Errorf("one without a pod: %+v, %v", all, err)
			}
		})
	}
}

func TestAnObservedPoolIsScaledBySomebodyElse(t *testing.T) {
	t.Parallel()
	l := &load{resource: "deployments", name: "d"}
	w := newWorld(t, l)
	p := w.open(t)
	names := started(t, w, p, l, 3)
	watched := pool(l)
	watched.Kubernetes.Observe = true
	w.do(func() { w.denied["update deployments/scale"], w.denied["delete pods"] = true, true })
	if err := p.Start(t.Context(), watched, "x", 5); err != nil {
		t.Fatal(err)
	}
	want(t, w, l, 3, names)
	ended := make(chan error, 1)
	marked := make(chan struct{})
	w.do(func() {
		var once sync.Once
		w.lose = func(request string) bool {
			if request == "patch pods" {
				once.Do(func() { close(marked) })
			}
			return false
		}
	})
	go func() { ended <- p.Stop(t.Context(), watched, names[1]) }()
	<-marked
	w.do(func() { w.version++; l.version, l.replicas = w.version, 2 }) // KEDA, say
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	want(t, w, l, 2, without(names, names[1]))
	w.do(func() { l.quota = true; w.version++; l.version, l.replicas = w.version, 3 })
	if err := p.Stop(t.Context(), watched, "d-pending-3"); err == nil || !strings.Contains(err.Error(), "somebody else") {
		t.Errorf("one without a pod: %v", err)
	}
	if err := p.Stop(t.Context(), watched, "d-pending-4"); err != nil {
		t.Errorf("one that does not exist: %v", err)
	}
}

func TestAMissingRightIsNamed(t *testing.T) {
	t.Parallel()
	start := func(p *kubernetes.Provider, l *load, _ string) error {
		return p.Start(context.Background(), pool(l), "x", 9)
	}
	stop := func(p *kubernetes.Provider, l *load, name string) error {
		return p.Stop(context.Background(), pool(l), name)
	}
	list := func(p *kubernetes.Provider, l *load, _ string) error {
		_, err := p.List(context.Background(), pool(l))
		return err
	}
	for _, c := range []struct {
		resource, denied string
		call             func(p *kubernetes.Provider, l *load, name string) error
		rule             string
	}{
		{"deployments", "get deployments/scale", start, `apiGroups ["apps"], resources ["deployments/scale"], verbs ["get"]`},
		{"deployments", "update deployments/scale", start, `apiGroups ["apps"], resources ["deployments/scale"], verbs ["update"]`},
		{"deployments", "list pods", list, `apiGroups [""], resources ["pods"], verbs ["list"]`},
		{"deployments", "get pods", stop, `apiGroups [""], resources ["pods"], verbs ["get"]`},
		{"deployments", "patch pods", stop, `apiGroups [""], resources ["pods"], verbs ["patch"]`},
		{"statefulsets", "get statefulsets", list, `apiGroups ["apps"], resources ["statefulsets"], verbs ["get"]`},
		{"leaderworkersets", "update leaderworkersets/scale", start, `apiGroups ["leaderworkerset.x-k8s.io"], resources ["leaderworkersets/scale"], verbs ["update"]`},
	} {
		t.Run(c.denied, func(t *testing.T) {
			t.Parallel()
			l := &load{resource: c.resource, name: "d"}
			w := newWorld(t, l)
			p := w.open(t)
			names := started(t, w, p, l, 2)
			w.do(func() { w.denied[c.denied] = true })
			err := c.call(p, l, names[1])
			if !errors.Is(err, provider.ErrInvalid) || !strings.Contains(err.Error(), c.rule) || !strings.Contains(err.Error(), namespace) {
				t.Errorf("it says: %v", err)
			}
		})
	}
}

func TestAKindThatIsNotInstalledIsNamed(t *testing.T) {
	t.Parallel()
	p := newWorld(t, &load{resource: "deployments", name: "d"}).open(t)
	if _, err := p.List(t.Context(), pool(&load{resource: "leaderworkersets", name: "l"})); !errors.Is(err, provider.ErrInvalid) || !strings.Contains(err.Error(), "LeaderWorkerSets are not installed") {
		t.Errorf("it says: %v", err)
	}
}

func TestCredentialsThatAreNotAcceptedAreNamed(t *testing.T) {
	t.Parallel()
	l := &load{resource: "deployments", name: "d"}
	w := newWorld(t, l)
	p := w.open(t)
	w.do(func() { w.expired = true })
	if _, err := p.List(t.Context(), pool(l)); err == nil || errors.Is(err, provider.ErrInvalid) || !strings.Contains(err.Error(), "does not accept the credentials") {
		t.Errorf("it says: %v", err)
	}
	w.do(func() { w.expired = false })
	if _, err := p.List(t.Context(), pool(l)); err != nil {
		t.Error(err)
	}
}

func TestStatesOfPods(t *testing.T) {
	t.Parallel()
	container := func(state, last map[string]any) []any {
		return []any{map[string]any{"name": "worker", "state": map[string]any{"running": map[string]any{}}}, map[string]any{"name": "engine", "state": state, "lastState": last}}
	}
	ended := func(reason string, code int, message string) map[string]any {
		return map[string]any{"terminated": map[string]any{"reason": reason, "exitCode": code, "message": message}}
	}
	waits := func(reason, message string) map[string]any {
		return map[string]any{"waiting": map[string]any{"reason": reason, "message": message}}
	}
	for name, c := range map[string]struct {
		phase  string
		status map[string]any
		state  provider.State
		reason string
	}{
		"runs": {"Running", nil, provider.Running, ""},
		"no node has room": {
			"Pending",
			map[string]any{"conditions": []any{map[string]any{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."}}},
			provider.Pending, "Unschedulable: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
		},
		"its image is pulled": {"Pending", map[string]any{"containerStatuses": container(waits("ContainerCreating", ""), nil)}, provider.Pending, "container engine: ContainerCreating"},
		"its image cannot be pulled": {
			"Pending",
			map[string]any{"containerStatuses": container(waits("ImagePullBackOff", `Back-off pulling image "engine:2": not found`), nil)},
			provider.Failed, `container engine: ImagePullBackOff: Back-off pulling image "engine:2": not found`,
		},
		"its program ends again and again": {
			"Running",
			map[string]any{"containerStatuses": container(waits("CrashLoopBackOff", "back-off 5m0s"), ended("Error", 1, "starting\nCUDA error: out of memory\n"))},
			provider.Failed, "container engine: CrashLoopBackOff: it ended with Error (exit code 1): CUDA error: out of memory",
		},
		"it was killed for memory, and comes back": {"Running", map[string]any{"containerStatuses": container(ended("OOMKilled", 137, ""), nil)}, provider.Running, ""},
		"what prepares it has failed once": {
			"Pending",
			map[string]any{"initContainerStatuses": []any{map[string]any{"name": "download", "state": ended("Error", 2, "no space left on device")}}},
			provider.Pending, "container download is started again after it ended: Error (exit code 2): no space left on device",
		},
		"what prepares it fails again and again": {
			"Pending",
			map[string]any{"initContainerStatuses": []any{map[string]any{"name": "download", "state": waits("CrashLoopBackOff", "back-off"), "lastState": ended("Error", 2, "no space left on device")}}},
			provider.Failed, "container download: CrashLoopBackOff: it ended with Error (exit code 2): no space left on device",
		},
		"its node is lost": {"Unknown", map[string]any{"reason": "NodeLost", "message": "Node gpu-7 which was running pod is unresponsive"}, provider.Failed, "Unknown: NodeLost: Node gpu-7 which was running pod is unresponsive"},
		"much is said":     {"Unknown", map[string]any{"message": strings.Repeat("ä", 1000)}, provider.Failed, "Unknown: " + strings.Repeat("ä", 194) + "…"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := &load{resource: "statefulsets", name: "s"}
			w := newWorld(t, l)
			p := w.open(t)
			pod := started(t, w, p, l, 1)[0]
			w.do(func() {
				l.stuck = true
				w.pods[pod].phase = c.phase
				if c.status != nil {
					w.pods[pod].status = c.status
				}
			})
			all, err := p.List(t.Context(), pool(l))
			if err != nil {
				t.Fatal(err)
			}
			if len(all) != 1 || all[0].State != c.state || all[0].Reason != c.reason {
				t.Errorf("got %+v, want %s: %s", all, c.state, c.reason)
			}
		})
	}
}

func TestTheServersTroubleIsNotThePools(t *testing.T) {
	t.Parallel()
	l := &load{resource: "deployments", name: "d"}
	w := newWorld(t, l)
	p := w.open(t)
	w.do(func() { w.down = true })
	_, listed := p.List(t.Context(), pool(l))
	for what, err := range map[string]error{
		"List":  listed,
		"Start": p.Start(t.Context(), pool(l), "x", 1),
		"Stop":  p.Stop(t.Context(), pool(l), "d-1"),
	} {
		if err == nil || errors.Is(err, provider.ErrInvalid) || errors.Is(err, provider.ErrCapacity) {
			t.Errorf("%s: %v", what, err)
		}
	}
}
