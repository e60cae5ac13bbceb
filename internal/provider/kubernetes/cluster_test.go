//go:build kubernetes

package kubernetes_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"

	"github.com/millrace/millrace/internal/provider"
	"github.com/millrace/millrace/internal/provider/kubernetes"
	"github.com/millrace/millrace/internal/provider/providertest"
	"github.com/millrace/millrace/internal/scale"
)

func TestClusterProvider(t *testing.T) {
	t.Parallel()
	for _, kind := range slices.Sorted(maps.Keys(versions)) {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			served(t, kind)
			providertest.Run(t, func(t *testing.T) providertest.Fixture {
				p := newPlace(t)
				p.set(func() { p.mode["broken"], p.mode["busy"] = broken, busy })
				add := func(name string) *scale.Pool { return p.workload(t, kind, name, nil) }
				plain := add("plain")
				of := func(change func(k *scale.Kubernetes)) *scale.Pool {
					other, k := *plain, *plain.Kubernetes
					change(&k)
					other.Kubernetes = &k
					return &other
				}
				return providertest.Fixture{
					Open:        func(t *testing.T) provider.Provider { return p.open(t, nil) },
					NamesItself: true,
					Secrets:     []string{p.token},
					Plain:       plain, Other: add("other"),
					Broken: add("broken"), Reason: "no model here",
					Fail: func(t *testing.T, name string) {
						if err := p.status(t.Context(), name, "", ends("out of memory")); err != nil {
							t.Error(err)
						}
					},
					Busy:    add("busy"),
					Release: func(t *testing.T, name string) { p.set(func() { delete(p.mode, "busy") }) },
					Invalid: map[string]*scale.Pool{
						"no workload of that name":      of(func(k *scale.Kubernetes) { k.Name = "absent" }),
						"not a kind that can be scaled": of(func(k *scale.Kubernetes) { k.Kind = "DaemonSet" }),
						"no context of that name":       of(func(k *scale.Kubernetes) { k.Context = "nowhere" }),
						"a namespace without rights":    of(func(k *scale.Kubernetes) { k.Namespace = "default" }),
					},
					Gone: func(t *testing.T, pool *scale.Pool, name string) {
						if o, err := p.in(pods).Get(t.Context(), name, metav1.GetOptions{}); err == nil {
							t.Errorf("pod %s is still there: %v", name, o.Object["status"])
						}
					},
				}
			})
		})
	}
}

// brought brings a workload to n running pods, and returns their names.
func (p *place) brought(t *testing.T, by *kubernetes.Provider, pool *scale.Pool, n int) []string {
	t.Helper()
	if err := by.Start(t.Context(), pool, "ignored", n); err != nil {
		t.Fatal(err)
	}
	p.await(t, by, pool, provider.Running, n)
	_, names := p.state(t, pool)
	return names
}

// await waits until n instances have the state.
func (p *place) await(t *testing.T, by *kubernetes.Provider, pool *scale.Pool, state provider.State, n int) (all []provider.Instance) {
	t.Helper()
	until(t, func() bool {
		list, err := by.List(t.Context(), pool)
		if err != nil {
			t.Fatal(err)
		}
		all = slices.DeleteFunc(list, func(i provider.Instance) bool { return i.State != state })
		return len(all) == n
	})
	return all
}

// settled waits until the workload has as many pods as replicas, and fails the test unless these are they.
func (p *place) settled(t *testing.T, pool *scale.Pool, want []string) {
	t.Helper()
	var replicas int
	var names []string
	until(t, func() bool { replicas, names = p.state(t, pool); return replicas == len(names) })
	if d := cmp.Diff(want, names); d != "" {
		t.Errorf("the pods (-want +got):\n%s", d)
	}
}

func TestClusterTakesTheNamedPodOfADeployment(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	by, pool := p.open(t, nil), p.workload(t, "Deployment", "d", nil)
	left := p.brought(t, by, pool, 5)
	for _, at := range []int{2, 0, 2, 1} {
		name := left[at]
		if err := by.Stop(t.Context(), pool, name); err != nil {
			t.Fatal(err)
		}
		left = without(left, name)
		p.settled(t, pool, left)
	}
}

func TestClusterStopsAtTheSameTimeAllCount(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	by, pool := p.open(t, nil), p.workload(t, "Deployment", "d", nil)
	names := p.brought(t, by, pool, 6)
	gone := []string{names[0], names[2], names[5]}
	var stops sync.WaitGroup
	for _, name := range gone {
		stops.Go(func() {
			if err := by.Stop(t.Context(), pool, name); err != nil {
				t.Error(err)
			}
		})
	}
	stops.Wait()
	p.settled(t, pool, without(names, gone...))
}

func TestClusterLetsSomebodyElseScaleAnObservedPool(t *testing.T) {
	t.Parallel()
	p := newPlace(t, "update deployments/scale", "delete pods")
	pool := p.workload(t, "Deployment", "d", nil)
	pool.Kubernetes.Observe = true
	marked := make(chan struct{})
	var once sync.Once
	by := p.open(t, p.front(t, func(request string) bool {
		if request == "get pods" { // it waits for the pod to go, so that the mark is set
			once.Do(func() { close(marked) })
		}
		return false
	}))
	p.scale(t, pool, 4)
	p.await(t, by, pool, provider.Running, 4)
	_, names := p.state(t, pool)
	ended := make(chan error, 1)
	go func() { ended <- by.Stop(t.Context(), pool, names[1]) }()
	<-marked
	p.scale(t, pool, 3)
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	p.settled(t, pool, without(names, names[1]))
}

func TestClusterStopsDuringARollout(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	by, pool := p.open(t, nil), p.workload(t, "Deployment", "d", object{"strategy": object{"rollingUpdate": object{"maxSurge": int64(0), "maxUnavailable": int64(1)}}})
	names := p.brought(t, by, pool, 4)
	p.set(func() { p.mode["d"] = stuck }) // the rollout comes no further than its first pod
	change := `{"spec": {"template": {"metadata": {"annotations": {"version": "2"}}}}}`
	if _, err := p.own(pool).Patch(t.Context(), "d", types.MergePatchType, []byte(change), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	var old []string
	until(t, func() bool {
		_, all := p.state(t, pool)
		old = without(names, without(names, all...)...)
		return len(all) == 4 && len(old) == 3
	})
	if err := by.Stop(t.Context(), pool, old[1]); err != nil {
		t.Fatal(err)
	}
	until(t, func() bool { replicas, all := p.state(t, pool); return replicas == 3 && len(all) == 3 })
	if _, all := p.state(t, pool); slices.Contains(all, old[1]) {
		t.Errorf("%s is still there", old[1])
	}
}

func TestClusterKeepsOneThatStartsWhenAReadyOneIsStopped(t *testing.T) {
	t.Parallel()
	for name, starts := range map[string]func(ctx context.Context, p *place, pod string) error{
		"it has no node":     func(context.Context, *place, string) error { return nil },
		"it pulls its image": func(ctx context.Context, p *place, pod string) error { return p.bind(ctx, pod) },
		"it loads its model": func(ctx context.Context, p *place, pod string) error {
			return errors.Join(p.bind(ctx, pod), p.status(ctx, pod, "", runs(false)))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newPlace(t)
			by, pool := p.open(t, nil), p.workload(t, "Deployment", "d", nil)
			ready := p.brought(t, by, pool, 3)
			p.set(func() { p.mode["d"] = stuck })
			if err := by.Start(t.Context(), pool, "x", 4); err != nil {
				t.Fatal(err)
			}
			var all []string
			until(t, func() bool { _, all = p.state(t, pool); return len(all) == 4 })
			if err := starts(t.Context(), p, without(all, ready...)[0]); err != nil {
				t.Fatal(err)
			}
			if err := by.Stop(t.Context(), pool, ready[1]); err != nil {
				t.Fatal(err)
			}
			p.settled(t, pool, without(all, ready[1]))
		})
	}
}

func TestClusterRefusesWhatHasChangedMeanwhile(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	pool := p.workload(t, "Deployment", "d", nil)
	meanwhile := make(chan int, 1) // somebody else sets this number in the last moment
	by := p.open(t, p.front(t, func(request string) bool {
		if request == "update deployments/scale" {
			select {
			case n := <-meanwhile:
				p.scale(t, pool, n)
			default:
			}
		}
		return false
	}))
	meanwhile <- 5
	if err := by.Start(t.Context(), pool, "x", 3); err != nil {
		t.Fatal(err)
	}
	all := p.await(t, by, pool, provider.Running, 5)
	meanwhile <- 6
	if err := by.Stop(t.Context(), pool, all[2].Name); err != nil {
		t.Fatal(err)
	}
	p.await(t, by, pool, provider.Running, 5)
	if replicas, left := p.state(t, pool); replicas != 5 || slices.Contains(left, all[2].Name) {
		t.Errorf("of 6, after one was stopped, there are %d: %q", replicas, left)
	}
}

func TestClusterLowersOnceForAStopWhoseReplyIsLost(t *testing.T) {
	t.Parallel()
	for _, lost := range []string{"patch pods", "update deployments/scale"} {
		t.Run(lost, func(t *testing.T) {
			t.Parallel()
			p := newPlace(t)
			by, pool := p.open(t, nil), p.workload(t, "Deployment", "d", nil)
			names := p.brought(t, by, pool, 4)
			cut := p.open(t, p.front(t, func(request string) bool { return request == lost }))
			if err := cut.Stop(t.Context(), pool, names[1]); err == nil {
				t.Fatal("the lost reply is no error")
			}
			if err := by.Stop(t.Context(), pool, names[1]); err != nil {
				t.Fatal(err)
			}
			p.settled(t, pool, without(names, names[1]))
		})
	}
}

func TestClusterReplacesAnEvictedPod(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{"Deployment", "StatefulSet"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			p := newPlace(t)
			by, pool := p.open(t, nil), p.workload(t, kind, "w", nil)
			names := p.brought(t, by, pool, 2)
			p.set(func() { p.mode["w"] = busy })
			_, err := p.in(pods).Create(t.Context(), &unstructured.Unstructured{Object: object{"apiVersion": "policy/v1", "kind": "Eviction", "metadata": object{"name": names[1]}}}, metav1.CreateOptions{}, "eviction")
			if err != nil {
				t.Fatal(err)
			}
			if all := p.await(t, by, pool, provider.Stopping, 1); all[0].Name != names[1] {
				t.Errorf("%s stops, want %s", all[0].Name, names[1])
			}
			p.set(func() { delete(p.mode, "w") })
			p.await(t, by, pool, provider.Running, 2)
			if kind == "Deployment" { // nobody comes again under its name
				if err := by.Stop(t.Context(), pool, names[1]); err != nil {
					t.Fatal(err)
				}
			}
			if replicas, all := p.state(t, pool); replicas != 2 || len(all) != 2 {
				t.Errorf("it left %d replicas, %q", replicas, all)
			}
		})
	}
}

func TestClusterTellsWhyAKubeletEvictedAPod(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	by, pool := p.open(t, nil), p.workload(t, "Deployment", "w", nil)
	names := p.brought(t, by, pool, 2)
	p.set(func() { p.mode["w"] = stuck })
	if err := p.status(t.Context(), names[0], "", object{"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: ephemeral-storage."}); err != nil {
		t.Fatal(err)
	}
	until(t, func() bool {
		all := p.await(t, by, pool, provider.Pending, 1)
		return all[0].Reason == "in the place of "+names[0]+", which ended: Failed: Evicted: The node was low on resource: ephemeral-storage."
	})
	if err := by.Stop(t.Context(), pool, names[0]); err != nil { // it is tidied away
		t.Fatal(err)
	}
	if replicas, all := p.state(t, pool); replicas != 2 || len(all) != 2 {
		t.Errorf("tidying it away left %d replicas, %q", replicas, all)
	}
}

func TestClusterSaysThatAQuotaIsFull(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{"Deployment", "StatefulSet"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			p := newPlace(t)
			by, pool := p.open(t, nil), p.workload(t, kind, "w", nil)
			p.brought(t, by, pool, 1)
			quotas := resource("v1", "ResourceQuota")
			p.create(t, object{"apiVersion": "v1", "kind": "ResourceQuota", "metadata": object{"name": "few"}, "spec": object{"hard": object{"pods": "1"}}})
			until(t, func() bool {
				o, err := p.in(quotas).Get(t.Context(), "few", metav1.GetOptions{})
				used, _, _ := unstructured.NestedString(o.Object, "status", "used", "pods")
				return err == nil && used == "1"
			})
			if err := by.Start(t.Context(), pool, "x", 3); err != nil {
				t.Fatal(err)
			}
			last := map[string]string{"Deployment": "w-pending-3", "StatefulSet": "w-2"}[kind]
			var all []provider.Instance
			until(t, func() bool {
				all = p.await(t, by, pool, provider.Pending, 2)
				return kind != "Deployment" || strings.Contains(all[1].Reason, "exceeded quota: few")
			})
			if all[1].Name != last || all[0].After != last {
				t.Errorf("without a pod are %+v, want %s as the last one", all, last)
			}
			if err := by.Stop(t.Context(), pool, last); err != nil {
				t.Fatal(err)
			}
			if replicas, names := p.state(t, pool); replicas != 2 || len(names) != 1 {
				t.Errorf("there are %d replicas, %q", replicas, names)
			}
		})
	}
}

func TestClusterShrinksOrderedWorkloadsFromTheEnd(t *testing.T) {
	t.Parallel()
	for kind, c := range map[string]struct {
		spec  object
		names []string
	}{
		"StatefulSet":     {object{"ordinals": object{"start": int64(3)}}, []string{"w-3", "w-4", "w-5"}},
		"LeaderWorkerSet": {nil, []string{"w-0", "w-1", "w-2"}},
	} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			served(t, kind)
			p := newPlace(t, "patch pods", "delete pods") // these are for Deployments only
			by, pool := p.open(t, nil), p.workload(t, kind, "w", c.spec)
			names := p.brought(t, by, pool, 3)
			if d := cmp.Diff(c.names, names); d != "" {
				t.Errorf("the pods (-want +got):\n%s", d)
			}
			all, err := by.List(t.Context(), pool)
			if err != nil {
				t.Fatal(err)
			}
			for n, i := range all {
				if want := append(names[1:], "")[n]; i.Name != names[n] || i.After != want {
					t.Errorf("%s can be stopped after %q, want %s after %q", i.Name, i.After, names[n], want)
				}
			}
			if err := by.Stop(t.Context(), pool, names[0]); err == nil || !strings.Contains(err.Error(), "stop "+names[2]+" first") {
				t.Errorf("out of order it says: %v", err)
			}
			for _, last := range []int{2, 1, 0} {
				if err := by.Stop(t.Context(), pool, names[last]); err != nil {
					t.Fatal(err)
				}
				p.settled(t, pool, nilIfEmpty(names[:last]))
			}
		})
	}
}

// needs is which call needs a right of the Role, for a workload with two running pods.
var needs = map[string]func(ctx context.Context, p *place, by *kubernetes.Provider, pool *scale.Pool, names []string) error{
	"get deployments/scale":         startMore,
	"update deployments/scale":      startMore,
	"get statefulsets/scale":        startMore,
	"update statefulsets/scale":     startMore,
	"get leaderworkersets/scale":    startMore,
	"update leaderworkersets/scale": startMore,
	"get statefulsets":              listAll,
	"list pods":                     listAll,
	"get pods":                      stopOne,
	"patch pods":                    stopOne,
	"delete pods": func(ctx context.Context, p *place, by *kubernetes.Provider, pool *scale.Pool, names []string) error {
		if err := p.status(ctx, names[0], "", runs(false)); err != nil {
			return err
		}
		return stopOne(ctx, p, by, pool, names)
	},
}

func startMore(ctx context.Context, _ *place, by *kubernetes.Provider, pool *scale.Pool, _ []string) error {
	return by.Start(ctx, pool, "x", 3)
}

func listAll(ctx context.Context, _ *place, by *kubernetes.Provider, pool *scale.Pool, _ []string) error {
	_, err := by.List(ctx, pool)
	return err
}

func stopOne(ctx context.Context, _ *place, by *kubernetes.Provider, pool *scale.Pool, names []string) error {
	return by.Stop(ctx, pool, names[1])
}

func TestClusterNamesTheRightThatIsMissing(t *testing.T) {
	t.Parallel()
	var role *unstructured.Unstructured
	for _, o := range deployed(t, "autoscaler.yaml") {
		if o.GetKind() == "Role" {
			role = o
		}
	}
	eachRight(t, role, func(right string, _ object) {
		if right == "get deployments" { // a courtesy: without it, what a quota says is not told
			return
		}
		t.Run(right, func(t *testing.T) {
			t.Parallel()
			if needs[right] == nil {
				t.Fatal("the Role allows what nobody needs")
			}
			verb, of, _ := strings.Cut(right, " ")
			kind := "Deployment"
			for k := range versions {
				if strings.HasPrefix(of, strings.ToLower(k)) {
					kind = k
				}
			}
			served(t, kind)
			group, _, _ := strings.Cut(versions[kind], "/")
			if of == "pods" {
				group = ""
			}
			p := newPlace(t, right)
			pool := p.workload(t, kind, "d", nil)
			p.scale(t, pool, 2)
			var names []string
			until(t, func() bool { _, names = p.state(t, pool); return len(names) == 2 })
			for _, name := range names {
				until(t, func() bool {
					o, err := p.in(pods).Get(t.Context(), name, metav1.GetOptions{})
					phase, _, _ := unstructured.NestedString(o.Object, "status", "phase")
					return err == nil && phase == "Running"
				})
			}
			err := needs[right](t.Context(), p, p.open(t, nil), pool, names)
			rule := fmt.Sprintf("the autoscaler's Role in namespace %s needs apiGroups [%q], resources [%q], verbs [%q]", p.namespace, group, of, verb)
			if !errors.Is(err, provider.ErrInvalid) || !strings.Contains(err.Error(), rule) {
				t.Errorf("it says %v, want %s", err, rule)
			}
		})
	})
}

func TestClusterKeepsARoleToItsWorkloads(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	by, pool, other := p.open(t, nil), p.workload(t, "Deployment", "d", nil), p.workload(t, "Deployment", "other", nil)
	p.brought(t, by, other, 1)
	roles := resource("rbac.authorization.k8s.io/v1", "Role")
	role, err := p.in(roles).Get(t.Context(), "millrace-autoscaler", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	rules, _, _ := unstructured.NestedSlice(role.Object, "rules")
	for _, r := range rules[:2] {
		r.(object)["resourceNames"] = []any{"d"}
	}
	role.Object["rules"] = rules
	if _, err := p.in(roles).Update(t.Context(), role, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	until(t, func() bool { return errors.Is(by.Start(t.Context(), other, "x", 1), provider.ErrInvalid) }) // the change is known after a while
	names := p.brought(t, by, pool, 2)
	if err := by.Stop(t.Context(), pool, names[0]); err != nil {
		t.Fatal(err)
	}
	p.settled(t, pool, names[1:])
}

func TestClusterRefusesAnotherToken(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	pool := p.workload(t, "Deployment", "d", nil)
	p.token += "x"
	if _, err := p.open(t, nil).List(t.Context(), pool); err == nil || errors.Is(err, provider.ErrInvalid) || !strings.Contains(err.Error(), "does not accept the credentials") {
		t.Errorf("it says: %v", err)
	}
}

func TestClusterTakesTheManifestsInDeploy(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	for _, file := range []string{"settings.yaml", "migrate.yaml", "api.yaml", "dispatcher.yaml", "worker.yaml", "autoscaler.yaml"} {
		for _, o := range deployed(t, file) {
			o.SetName("dry-" + o.GetName()) // some are there already
			if _, err := p.in(resource(o.GetAPIVersion(), o.GetKind())).Create(t.Context(), o, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}, FieldValidation: metav1.FieldValidationStrict}); err != nil {
				t.Errorf("%s: %v", file, err)
			}
		}
	}
}
