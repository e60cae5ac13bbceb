// Package kubernetes scales a workload that runs workers: a Deployment, a StatefulSet or a LeaderWorkerSet. What a pod is the workload's manifest says; the provider moves the number of its replicas, through the scale subresource alone, and
// sees to it that the right pod goes.
//
// # Names
//
// Kubernetes names the pods, and a pod's name is its worker's. A replica that has no pod yet is listed too, so that the length of a list tells what was asked for: in a StatefulSet and a LeaderWorkerSet (of which the leader pods count) under the
// name that its pod will have, in a Deployment as NAME-pending-4, the fourth of the replicas. As pods come, the made-up names vanish, lowest number first.
//
// # Which pod goes
//
// A StatefulSet and a LeaderWorkerSet remove the highest ordinal only. Stop refuses another one and changes nothing; Instance.After tells beforehand.
//
// Of a Deployment any pod can be stopped. Its controller takes, when the number falls, first pods without a node, then those that are pending, then those that are not ready, and only then looks at the cost that a pod names in an annotation.
// So where the pod to stop would be the first of these, it is marked with the lowest cost and the number is lowered: the controller then takes it, and Stop makes sure of that. Where another one would be taken (one that starts, or has no pod yet)
// the pod is deleted, and then the number is lowered: the controller removes what it has just made in its place.
//
// # Failure
//
// Whatever was cut off is healed by calling again. While there are more pods than replicas an earlier call has lowered the number already and Stop waits; so it is never lowered twice for one pod. A crash between deleting and lowering leaves the pool with one
// more than before the call, under a new name, which the next List shows. An error that says that another pod was taken means what it says: the number is right, and the pod to stop still runs.
package kubernetes

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"

	"github.com/millrace/millrace/internal/provider"
	"github.com/millrace/millrace/internal/scale"
)

// Config of a Provider. Zero fields get the defaults named.
type Config struct {
	// Kubeconfig is the path of a kubeconfig, for pools that name a context and outside of a cluster. Default KUBECONFIG, else ~/.kube/config.
	Kubeconfig string
	// Poll is the period of looking whether a pod is gone. Default 1 s.
	Poll time.Duration
}

// Provider is a provider.Provider of pods. It needs the rights of deploy/kubernetes/autoscaler.yaml; an error names the one that is missing.
type Provider struct {
	cfg Config

	mu        sync.Mutex // guards what is below
	clusters  map[string]*cluster
	workloads map[scale.Kubernetes]*workload
}

var _ provider.Provider = (*Provider)(nil)

// New returns a Provider, which talks to nobody before it is used.
func New(cfg Config) *Provider {
	cfg.Poll = cmp.Or(cfg.Poll, time.Second)
	return &Provider{cfg: cfg, clusters: make(map[string]*cluster), workloads: make(map[scale.Kubernetes]*workload)}
}

// List returns the workload's pods and its replicas without a pod. When a replica without a pod was asked for nobody keeps: Created is when this Provider has first seen it.
func (p *Provider) List(ctx context.Context, pool *scale.Pool) ([]provider.Instance, error) {
	w, err := p.workload(pool)
	if err != nil {
		return nil, err
	}
	s, pods, err := w.look(ctx)
	if err != nil {
		return nil, err
	}
	var list []provider.Instance
	if w.kind.ordered {
		list, err = w.listOrdered(ctx, s, pods)
	} else {
		list = w.listAny(ctx, s, pods)
	}
	if err != nil {
		return nil, err
	}
	slices.SortFunc(list, func(a, b provider.Instance) int { return strings.Compare(a.Name, b.Name) })
	w.seen(list, time.Now())
	return list, nil
}

// Start raises the workload's replicas to total, and never lowers them. The name is of no use: Kubernetes gives its own. Of a pool that is only observed it leaves that to somebody else.
func (p *Provider) Start(ctx context.Context, pool *scale.Pool, _ string, total int) error {
	w, err := p.workload(pool)
	if err != nil {
		return err
	}
	if err := w.lock(ctx); err != nil {
		return err
	}
	defer w.unlock()
	for {
		s, err := w.scale(ctx)
		if err != nil || s.replicas >= total || w.observe {
			return err
		}
		if done, err := w.setReplicas(ctx, s, total); err != nil || done {
			return err
		}
	}
}

// Stop lets a pod go, and returns once it is gone: of a pool that is only observed, once somebody else has lowered the number. How long it may drain is the manifest's terminationGracePeriodSeconds.
func (p *Provider) Stop(ctx context.Context, pool *scale.Pool, name string) error {
	w, err := p.workload(pool)
	if err != nil {
		return err
	}
	uid, err := w.order(ctx, name)
	if err != nil || uid == "" {
		return err
	}
	for {
		there, err := w.pod(ctx, name)
		if err != nil {
			return err
		}
		if there == nil || there.UID != uid { // another of the same name is the next one of its ordinal
			return nil
		}
		if err := w.wait(ctx, w.poll); err != nil {
			return fmt.Errorf("waiting for pod %s/%s to end: %w", w.namespace, name, err)
		}
	}
}

// Close gives up the connections to clusters. Pods run on.
func (p *Provider) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.clusters {
		c.close()
	}
	clear(p.clusters)
	clear(p.workloads)
	return nil
}

// order sets in motion that the instance goes. It returns its pod's UID, or "" if there is nothing to wait for.
func (w *workload) order(ctx context.Context, name string) (types.UID, error) {
	// One at a time, also against Start: which pod the controller took is told by comparing before and after.
	if err := w.lock(ctx); err != nil {
		return "", err
	}
	defer w.unlock()
	if w.observe {
		return w.markOnly(ctx, name)
	}
	if w.kind.ordered {
		return w.orderLast(ctx, name)
	}
	if number, ok := w.placeholder(name); ok {
		return "", w.orderMissing(ctx, number)
	}
	return w.orderAny(ctx, name)
}

// markOnly leaves it to somebody else to lower the number, and has the pod removed first when that happens.
func (w *workload) markOnly(ctx context.Context, name string) (types.UID, error) {
	s, pods, err := w.look(ctx)
	if err != nil {
		return "", err
	}
	if number, ok := w.placeholder(name); ok && !w.kind.ordered && number > len(active(pods)) && number <= s.replicas {
		return "", fmt.Errorf("stopping %s: it has no pod, and somebody else sets the number of replicas, which is %d", name, s.replicas)
	}
	at := slices.IndexFunc(pods, func(p *pod) bool { return p.Name == name })
	if at < 0 {
		return "", nil
	}
	victim := pods[at]
	switch {
	case w.kind.ordered || victim.DeletionTimestamp != nil:
		return victim.UID, nil
	case victim.ended(): // another one stands in its place, and it may lie there for days
		return "", nil
	}
	return victim.UID, w.mark(ctx, victim, active(pods))
}

// --- StatefulSet, LeaderWorkerSet ---

func (w *workload) listOrdered(ctx context.Context, s *scaled, pods []*pod) ([]provider.Instance, error) {
	first, err := w.firstOrdinal(ctx)
	if err != nil {
		return nil, err
	}
	end := first + s.replicas
	there := make(map[int]*pod)
	for _, p := range pods {
		if n, ok := w.ordinal(p.Name); ok {
			there[n] = p
		}
	}
	var list []provider.Instance
	for n := first; n < end; n++ {
		i := provider.Instance{Name: w.podName(n), State: provider.Pending, Reason: noPod}
		if p := there[n]; p != nil {
			i = p.instance()
		}
		if n < end-1 {
			i.After = w.podName(n + 1)
		}
		list = append(list, i)
	}
	for n, p := range there {
		if n < first || n >= end { // not asked for any more
			i := p.instance()
			i.State, i.Reason = provider.Stopping, ""
			list = append(list, i)
		}
	}
	return list, nil
}

func (w *workload) orderLast(ctx context.Context, name string) (types.UID, error) {
	n, ok := w.ordinal(name)
	if !ok {
		return "", nil
	}
	first, err := w.firstOrdinal(ctx)
	if err != nil {
		return "", err
	}
	for {
		s, err := w.scale(ctx)
		if err != nil {
			return "", err
		}
		if last := first + s.replicas - 1; n >= first && n < last {
			return "", fmt.Errorf("stopping %s: a %s removes its last pod only: stop %s first", name, w.kind.name, w.podName(last))
		}
		var uid types.UID
		if p, err := w.pod(ctx, name); err != nil {
			return "", err
		} else if p != nil {
			uid = p.UID
		}
		if n < first || n >= first+s.replicas { // it was never asked for, or an earlier call has lowered the number
			return uid, nil
		}
		if done, err := w.setReplicas(ctx, s, s.replicas-1); err != nil || done {
			return uid, err
		}
	}
}

func (w *workload) podName(ordinal int) string { return w.name + "-" + strconv.Itoa(ordinal) }

// ordinal of a pod by its name.
func (w *workload) ordinal(name string) (int, bool) { return numbered(name, w.name+"-") }

// --- Deployment ---

func (w *workload) listAny(ctx context.Context, s *scaled, pods []*pod) []provider.Instance {
	list := make([]provider.Instance, 0, max(len(pods), s.replicas))
	var ended *pod
	for _, p := range pods {
		if !p.ended() || p.DeletionTimestamp != nil {
			list = append(list, p.instance())
		} else if ended == nil || p.CreationTimestamp.After(ended.CreationTimestamp.Time) { // the controller has made another one in its place: it does not count
			ended = p
		}
	}
	missing := s.replicas - len(active(pods))
	if missing > 0 {
		why := cmp.Or(w.whyMissing(ctx), noPod)
		for n := s.replicas - missing + 1; n <= s.replicas; n++ {
			i := provider.Instance{Name: w.placeholderName(n), State: provider.Pending, Reason: why}
			if n < s.replicas {
				i.After = w.placeholderName(n + 1)
			}
			list = append(list, i)
		}
	}
	if ended != nil {
		for n := range list {
			if list[n].State == provider.Pending && (list[n].Reason == "" || list[n].Reason == noPod) {
				list[n].Reason = fmt.Sprintf("in the place of %s, which ended: %s", ended.Name, ended.instance().Reason)
			}
		}
	}
	return list
}

// orderMissing lowers the number of replicas by one that has no pod yet.
func (w *workload) orderMissing(ctx context.Context, number int) error {
	for {
		s, pods, err := w.look(ctx)
		if err != nil {
			return err
		}
		switch have := len(active(pods)); {
		case number <= have || number > s.replicas: // a pod has come, which has a name of its own; or it is gone
			return nil
		case number < s.replicas:
			return fmt.Errorf("stopping %s: of replicas without a pod the last one goes first: stop %s first", w.placeholderName(number), w.placeholderName(s.replicas))
		}
		if done, err := w.setReplicas(ctx, s, s.replicas-1); err != nil || done {
			return err
		}
	}
}

// orderAny lets one pod of a Deployment go.
func (w *workload) orderAny(ctx context.Context, name string) (types.UID, error) {
	for {
		s, pods, err := w.look(ctx)
		if err != nil {
			return "", err
		}
		at := slices.IndexFunc(pods, func(p *pod) bool { return p.Name == name })
		if at < 0 {
			return "", nil
		}
		victim, have, rollout := pods[at], active(pods), severalTemplates(pods)
		switch {
		case victim.DeletionTimestamp != nil:
			return victim.UID, nil
		case victim.ended(): // another one stands in its place, so that the number stays
			return victim.UID, w.deletePod(ctx, victim)
		case len(have) > s.replicas && !rollout:
			// The number was lowered, by an earlier call that was cut off or by somebody else, and the controller has not acted yet: perhaps it takes this one.
			if err := w.wait(ctx, w.poll); err != nil {
				return "", fmt.Errorf("stopping %s: waiting for Kubernetes to remove a pod, as there are %d for %d replicas: %w", name, len(have), s.replicas, err)
			}
			continue
		case len(have) < s.replicas, rollout, !goesFirst(victim, have):
			return victim.UID, w.deleteAndLower(ctx, victim, have)
		}
		if err := w.mark(ctx, victim, have); err != nil {
			return "", err
		}
		// If we crash here, or the reply is lost, the pod is marked and nothing else has changed; or the number is lowered, which the next call sees by comparing it with the pods.
		done, err := w.setReplicas(ctx, s, s.replicas-1)
		if err != nil {
			return "", err
		}
		if done {
			return victim.UID, w.makeSure(ctx, victim, have)
		}
	}
}

// deleteAndLower lets go of a pod that the controller would not take first.
func (w *workload) deleteAndLower(ctx context.Context, victim *pod, all []*pod) error {
	// The controller may make a pod in its place before it hears of the lower number, and then removes one. Those that start are made dearer than that new one.
	for _, p := range all {
		if p.same(victim) || p.rank() == ready || p.cost() > 0 {
			continue
		}
		if err := w.annotate(ctx, p, costAnnotation, "1"); err != nil && !apierrors.IsNotFound(err) {
			return err
		}
	}
	if err := w.deletePod(ctx, victim); err != nil {
		return err
	}
	// If we crash here, the controller replaces the pod and the number stays: the pool has one too many, which whoever looks next can stop.
	for {
		s, err := w.scale(ctx)
		if err != nil || s.replicas == 0 {
			return err
		}
		if done, err := w.setReplicas(ctx, s, s.replicas-1); err != nil || done {
			return err
		}
	}
}

// makeSure waits until the controller has taken a pod, and says so if that was another one than victim.
func (w *workload) makeSure(ctx context.Context, victim *pod, before []*pod) error {
	for {
		s, pods, err := w.look(ctx)
		if err != nil {
			return err
		}
		now := active(pods)
		if !slices.ContainsFunc(now, victim.same) {
			return nil
		}
		if len(now) <= s.replicas {
			var taken []string
			for _, p := range before {
				if !slices.ContainsFunc(now, p.same) {
					taken = append(taken, p.Name)
				}
			}
			if len(taken) == 0 {
				return fmt.Errorf("stopping %s: the %s %s/%s was set back to %d replicas by somebody else: is another autoscaler at work on it?", victim.Name, w.kind.name, w.namespace, w.name, s.replicas)
			}
			return fmt.Errorf("stopping %s: Kubernetes took %s in its place; %s still runs", victim.Name, strings.Join(taken, ", "), victim.Name)
		}
		if err := w.wait(ctx, w.poll/5); err != nil { // soon: others wait for their turn
			return fmt.Errorf("stopping %s: waiting for Kubernetes to remove it: %w", victim.Name, err)
		}
	}
}

const (
	pendingInfix = "-pending-"
	noPod        = "it has no pod yet"
)

func (w *workload) placeholderName(number int) string {
	return w.name + pendingInfix + strconv.Itoa(number)
}

// placeholder is the number of a replica without a pod, by its made-up name.
func (w *workload) placeholder(name string) (int, bool) { return numbered(name, w.name+pendingInfix) }

// numbered reads the number that follows prefix in name.
func numbered(name, prefix string) (int, bool) {
	digits, ok := strings.CutPrefix(name, prefix)
	if !ok {
		return 0, false
	}
	n, err := strconv.ParseUint(digits, 10, 31)
	return int(n), err == nil && strconv.FormatUint(n, 10) == digits
}

// mark gives victim a lower cost of deletion than any other pod has.
func (w *workload) mark(ctx context.Context, victim *pod, all []*pod) error {
	const low = -1_000_000
	cost := int64(low)
	for _, p := range all {
		if !p.same(victim) {
			cost = min(cost, p.cost()-1)
		}
	}
	if victim.cost() <= cost {
		return nil
	}
	err := w.annotate(ctx, victim, costAnnotation, strconv.FormatInt(cost, 10))
	if apierrors.IsNotFound(err) { // it went by itself: the next look sees that
		return nil
	}
	return err
}
