package kubernetes

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/millrace/millrace/internal/provider"
	"github.com/millrace/millrace/internal/scale"
)

// kind of workload.
type kind struct {
	name     string
	resource schema.GroupVersionResource
	ordered  bool // it removes its highest ordinal only
}

var kinds = []kind{
	{name: "Deployment", resource: schema.GroupVersionResource{Group: "apps", Version: "v1", Resource: "deployments"}},
	{name: "StatefulSet", resource: schema.GroupVersionResource{Group: "apps", Version: "v1", Resource: "statefulsets"}, ordered: true},
	{name: "LeaderWorkerSet", resource: schema.GroupVersionResource{Group: "leaderworkerset.x-k8s.io", Version: "v1", Resource: "leaderworkersets"}, ordered: true},
}

var podResource = schema.GroupVersionResource{Version: "v1", Resource: "pods"}

// cluster is one API server.
type cluster struct {
	client    dynamic.Interface
	http      *http.Client
	namespace string // what is meant when none is named
}

// workload is what a pool scales.
type workload struct {
	kind            kind
	namespace, name string
	client          dynamic.Interface
	poll            time.Duration
	observe         bool          // somebody else changes its replicas
	busy            chan struct{} // holds an element while its replicas are being changed

	mu        sync.Mutex
	firstSeen map[string]time.Time // of the replicas without a pod, by their made-up names
}

// scaled is a workload's scale.
type scaled struct {
	object   *unstructured.Unstructured
	replicas int
	selector string
}

// workload of a pool. It asks nobody.
func (p *Provider) workload(pool *scale.Pool) (*workload, error) {
	if pool.Kubernetes == nil {
		return nil, fmt.Errorf("%w: kubernetes is missing: say which workload of Kubernetes it scales, by kind and name", provider.ErrInvalid)
	}
	k := *pool.Kubernetes
	if k.Name == "" {
		return nil, fmt.Errorf("%w: kubernetes.name is missing: it is the name of the workload to scale", provider.ErrInvalid)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if w := p.workloads[k]; w != nil {
		return w, nil
	}
	w := &workload{name: k.Name, poll: p.cfg.Poll, observe: k.Observe, busy: make(chan struct{}, 1), firstSeen: make(map[string]time.Time)}
	for _, known := range kinds {
		if known.name == k.Kind {
			w.kind = known
		}
	}
	if w.kind.name == "" {
		return nil, fmt.Errorf("%w: kubernetes.kind is %q: it must be Deployment, StatefulSet or LeaderWorkerSet", provider.ErrInvalid, k.Kind)
	}
	c := p.clusters[k.Context]
	if c == nil {
		var err error
		if c, err = p.connect(k.Context); err != nil {
			return nil, fmt.Errorf("%w: finding the Kubernetes cluster: %w", provider.ErrInvalid, err)
		}
		p.clusters[k.Context] = c
	}
	w.client, w.namespace = c.client, cmp.Or(k.Namespace, c.namespace)
	p.workloads[k] = w
	return w, nil
}

// connect finds the API server: the one around this process if no context is named, else that of the kubeconfig. It makes no connection yet.
func (p *Provider) connect(name string) (*cluster, error) {
	cfg, err := rest.InClusterConfig()
	namespace := "default"
	switch {
	case name == "" && p.cfg.Kubeconfig == "" && err == nil:
		if raw, err := os.ReadFile("/var/run/secrets/kubernetes.io/serviceaccount/namespace"); err == nil {
			namespace = cmp.Or(string(bytes.TrimSpace(raw)), namespace)
		}
	case name == "" && p.cfg.Kubeconfig == "" && !errors.Is(err, rest.ErrNotInCluster):
		return nil, err
	default:
		rules := clientcmd.NewDefaultClientConfigLoadingRules()
		rules.ExplicitPath = p.cfg.Kubeconfig
		kubeconfig := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &clientcmd.ConfigOverrides{CurrentContext: name})
		if cfg, err = kubeconfig.ClientConfig(); err != nil {
			return nil, err
		}
		if namespace, _, err = kubeconfig.Namespace(); err != nil {
			return nil, err
		}
	}
	cfg.UserAgent = "millrace-autoscaler"
	cfg.Timeout = 10 * time.Second         // of each request
	cfg.QPS, cfg.Burst = 50, 100           // the default, 5, is less than a few pools that are looked at each second
	cfg.WarningHandler = rest.NoWarnings{} // they would go to stderr, past the log
	hc, err := rest.HTTPClientFor(cfg)
	if err != nil {
		return nil, err
	}
	client, err := dynamic.NewForConfigAndClient(cfg, hc)
	if err != nil {
		return nil, err
	}
	return &cluster{client: client, http: hc, namespace: namespace}, nil
}

func (c *cluster) close() { utilnet.CloseIdleConnectionsFor(c.http.Transport) }

// lock makes this the only call that changes the workload's replicas, until unlock.
func (w *workload) lock(ctx context.Context) error {
	select {
	case w.busy <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("waiting for another change of the %s %s/%s: %w", w.kind.name, w.namespace, w.name, ctx.Err())
	}
}

func (w *workload) unlock() { <-w.busy }

// wait for the next look.
func (w *workload) wait(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// seen sets when the replicas without a pod were first seen, and forgets those that are not listed any more.
func (w *workload) seen(list []provider.Instance, now time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	still := make(map[string]time.Time)
	for i := range list {
		if !list[i].Created.IsZero() {
			continue
		}
		at, ok := w.firstSeen[list[i].Name]
		if !ok {
			at = now
		}
		still[list[i].Name], list[i].Created = at, at
	}
	w.firstSeen = still
}

func (w *workload) own() dynamic.ResourceInterface {
	return w.client.Resource(w.kind.resource).Namespace(w.namespace)
}

func (w *workload) ofPods() dynamic.ResourceInterface {
	return w.client.Resource(podResource).Namespace(w.namespace)
}

// scale reads how many replicas are asked for.
func (w *workload) scale(ctx context.Context) (*scaled, error) {
	o, err := w.own().Get(ctx, w.name, metav1.GetOptions{}, "scale")
	if err != nil {
		return nil, w.explain("reading the scale of", w.name, w.kind.resource.GroupResource(), "scale", "get", err)
	}
	replicas, _, err := unstructured.NestedInt64(o.Object, "spec", "replicas") // 0 is left out
	if err != nil {
		return nil, fmt.Errorf("reading the scale of %s %s/%s: %w", w.kind.name, w.namespace, w.name, err)
	}
	selector, _, err := unstructured.NestedString(o.Object, "status", "selector")
	if err != nil {
		return nil, fmt.Errorf("reading the scale of %s %s/%s: %w", w.kind.name, w.namespace, w.name, err)
	}
	if selector == "" { // every pod of the namespace would fit
		if w.kind.name != "LeaderWorkerSet" {
			return nil, fmt.Errorf("reading the scale of %s %s/%s: it names no selector of pods", w.kind.name, w.namespace, w.name)
		}
		// Its controller writes this once it has seen the object.
		selector = "leaderworkerset.sigs.k8s.io/name=" + w.name + ",leaderworkerset.sigs.k8s.io/worker-index=0"
	}
	return &scaled{object: o, replicas: int(replicas), selector: selector}, nil
}

// setReplicas asks for another number. It is false if the workload has changed since s was read: read it again.
func (w *workload) setReplicas(ctx context.Context, s *scaled, replicas int) (bool, error) {
	o := s.object.DeepCopy()
	if err := unstructured.SetNestedField(o.Object, int64(replicas), "spec", "replicas"); err != nil {
		return false, fmt.Errorf("setting the replicas of %s %s/%s: %w", w.kind.name, w.namespace, w.name, err)
	}
	_, err := w.own().Update(ctx, o, metav1.UpdateOptions{}, "scale")
	if apierrors.IsConflict(err) {
		return false, nil
	}
	if err != nil {
		return false, w.explain(fmt.Sprintf("setting to %d the replicas of", replicas), w.name, w.kind.resource.GroupResource(), "scale", "update", err)
	}
	return true, nil
}

// look reads the scale, and then the pods.
func (w *workload) look(ctx context.Context) (*scaled, []*pod, error) {
	s, err := w.scale(ctx)
	if err != nil {
		return nil, nil, err
	}
	list, err := w.ofPods().List(ctx, metav1.ListOptions{LabelSelector: s.selector})
	if err != nil {
		return nil, nil, w.explain("listing the pods of", w.name, podResource.GroupResource(), "", "list", err)
	}
	pods := make([]*pod, len(list.Items))
	for i := range list.Items {
		if pods[i], err = readPod(&list.Items[i]); err != nil {
			return nil, nil, err
		}
	}
	return s, pods, nil
}

// pod reads one; nil if there is none of that name.
func (w *workload) pod(ctx context.Context, name string) (*pod, error) {
	o, err := w.ofPods().Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, w.explain("reading pod", name, podResource.GroupResource(), "", "get", err)
	}
	return readPod(o)
}

func readPod(o *unstructured.Unstructured) (*pod, error) {
	p := new(pod)
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, p); err != nil {
		return nil, fmt.Errorf("reading pod %s/%s: %w", o.GetNamespace(), o.GetName(), err)
	}
	return p, nil
}

// annotate a pod. A pod that is not there is an error that apierrors.IsNotFound knows.
func (w *workload) annotate(ctx context.Context, p *pod, name, value string) error {
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"uid": p.UID, "annotations": map[string]string{name: value}}})
	if err != nil {
		return fmt.Errorf("annotating pod %s/%s: %w", w.namespace, p.Name, err)
	}
	_, err = w.ofPods().Patch(ctx, p.Name, types.MergePatchType, patch, metav1.PatchOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return w.explain("annotating pod", p.Name, podResource.GroupResource(), "", "patch", err)
	}
	return err
}

// deletePod orders that a pod ends; one that is gone is no error.
func (w *workload) deletePod(ctx context.Context, p *pod) error {
	err := w.ofPods().Delete(ctx, p.Name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &p.UID}})
	if err != nil && !apierrors.IsNotFound(err) {
		return w.explain("deleting pod", p.Name, podResource.GroupResource(), "", "delete", err)
	}
	return nil
}

// firstOrdinal of the workload's pods.
func (w *workload) firstOrdinal(ctx context.Context) (int, error) {
	if w.kind.name != "StatefulSet" {
		return 0, nil
	}
	o, err := w.own().Get(ctx, w.name, metav1.GetOptions{})
	if err != nil {
		return 0, w.explain("reading", w.name, w.kind.resource.GroupResource(), "", "get", err)
	}
	n, _, err := unstructured.NestedInt64(o.Object, "spec", "ordinals", "start")
	if err != nil {
		return 0, fmt.Errorf("reading the first ordinal of %s %s/%s: %w", w.kind.name, w.namespace, w.name, err)
	}
	return int(n), nil
}

// whyMissing says why a Deployment's controller cannot make pods, as for a quota; "" if it can, or does not tell.
func (w *workload) whyMissing(ctx context.Context) string {
	o, err := w.own().Get(ctx, w.name, metav1.GetOptions{})
	if err != nil { // a reason is a courtesy: what was asked for is known without it
		return ""
	}
	var d struct {
		Status struct {
			Conditions []condition `json:"conditions"`
		} `json:"status"`
	}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, &d); err != nil {
		return ""
	}
	for _, c := range d.Status.Conditions {
		if c.Type == "ReplicaFailure" && c.Status == "True" {
			return oneLine(join(c.Reason, c.Message))
		}
	}
	return ""
}

// explain adds to an answer of the API server what was being done and, where it can be told, what to change.
func (w *workload) explain(doing, object string, resource schema.GroupResource, sub, verb string, err error) error {
	name := resource.Resource
	if sub != "" {
		name += "/" + sub
	}
	at := w.namespace + "/" + object
	switch {
	case apierrors.IsUnauthorized(err): // which new credentials mend, without a change of the pool
		return fmt.Errorf("%s %s: the API server does not accept the credentials: has the kubeconfig's token expired, or was the ServiceAccount removed? %w", doing, at, err)
	case apierrors.IsForbidden(err):
		return fmt.Errorf("%w: %s %s: the autoscaler's Role in namespace %s needs apiGroups [%q], resources [%q], verbs [%q]: %w", provider.ErrInvalid, doing, at, w.namespace, resource.Group, name, verb, err)
	case apierrors.IsNotFound(err) && resource != podResource.GroupResource():
		hint := ""
		if w.kind.name == "LeaderWorkerSet" {
			hint = ", or LeaderWorkerSets are not installed in the cluster"
		}
		return fmt.Errorf("%w: %s %s: there is no %s of this name in the namespace%s: %w", provider.ErrInvalid, doing, at, w.kind.name, hint, err)
	case apierrors.IsInvalid(err), apierrors.IsBadRequest(err):
		return fmt.Errorf("%w: %s %s: %w", provider.ErrInvalid, doing, at, err)
	default:
		return fmt.Errorf("%s %s: %w", doing, at, err)
	}
}
