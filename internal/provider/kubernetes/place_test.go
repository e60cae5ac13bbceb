//go:build kubernetes

package kubernetes_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/millrace/millrace/internal/provider/kubernetes"
	"github.com/millrace/millrace/internal/scale"
)

// place is a namespace of a real cluster: its API server, its controllers and its RBAC are the real ones. The pods' node is this test. It binds them to a node that does not exist, so that no kubelet takes them, and writes their status; so a test says when a
// pod starts, and whether it is ready.
//
// Kubernetes' pod garbage collector removes pods of a node that it has not seen for 40 s: no test may take so long.
type place struct {
	admin     dynamic.Interface
	namespace string
	config    clientcmdapi.Config // of the cluster alone
	anonymous *rest.Config
	token     string // of the autoscaler's ServiceAccount

	kick chan struct{} // wakes the node
	mu   sync.Mutex    // guards what is below
	mode map[string]mode
}

// mode is what becomes of a workload's pods: they run, if nothing is said.
type mode string

const (
	stuck  mode = "stuck"  // they go on as they are, without a node if they are new
	broken mode = "broken" // their container ends again and again
	busy   mode = "busy"   // they run, and do not end when they are told to
)

type object = map[string]any

var (
	pods       = schema.GroupVersionResource{Version: "v1", Resource: "pods"}
	namespaces = schema.GroupVersionResource{Version: "v1", Resource: "namespaces"}
)

// connect to the cluster, as whoever runs the test.
func connect(t *testing.T) *place {
	t.Helper()
	if os.Getenv("KUBECONFIG") == "" {
		t.Fatal("KUBECONFIG is missing: name the kubeconfig of a cluster in which namespaces can be made: make kubernetes-test KUBECONFIG=…")
	}
	loaded := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(clientcmd.NewDefaultClientConfigLoadingRules(), nil)
	cfg, err := loaded.ClientConfig()
	if err != nil {
		t.Fatal(err)
	}
	cfg.QPS, cfg.WarningHandler = -1, rest.NoWarnings{}
	p := &place{anonymous: rest.AnonymousClientConfig(cfg), kick: make(chan struct{}, 1), mode: make(map[string]mode)}
	if p.config, err = loaded.RawConfig(); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(clientcmdapi.MinifyConfig(&p.config), clientcmdapi.FlattenConfig(&p.config)); err != nil {
		t.Fatal(err)
	}
	hc, err := rest.HTTPClientFor(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { utilnet.CloseIdleConnectionsFor(hc.Transport) })
	if p.admin, err = dynamic.NewForConfigAndClient(cfg, hc); err != nil {
		t.Fatal(err)
	}
	return p
}

// newPlace makes a namespace with a ServiceAccount that has the Role of deploy/kubernetes, without the rights that are withdrawn, as "update deployments/scale". It removes the namespace after the test.
func newPlace(t *testing.T, withdrawn ...string) *place {
	t.Helper()
	p := connect(t)
	made := p.create(t, object{"apiVersion": "v1", "kind": "Namespace", "metadata": object{"generateName": "millrace-test-"}})
	p.namespace = made.GetName()

	ctx, cancel := context.WithCancel(context.Background()) // the test's own has ended when the namespace is removed
	stopped := make(chan struct{})
	go func() { defer close(stopped); p.node(ctx, t) }()
	t.Cleanup(func() {
		defer func() { cancel(); <-stopped }()
		if err := p.admin.Resource(namespaces).Delete(ctx, p.namespace, metav1.DeleteOptions{}); err != nil {
			t.Errorf("removing namespace %s: %v", p.namespace, err)
			return
		}
		now := int64(0)
		until(t, func() bool { // Kubernetes removes the rest, but the pods' node ends with the test
			if err := p.in(pods).DeleteCollection(ctx, metav1.DeleteOptions{GracePeriodSeconds: &now}, metav1.ListOptions{}); err != nil {
				t.Errorf("removing the pods: %v", err)
			}
			all, err := p.in(pods).List(ctx, metav1.ListOptions{})
			return err == nil && len(all.Items) == 0
		})
	})

	account := schema.GroupVersionResource{Version: "v1", Resource: "serviceaccounts"}
	until(t, func() bool { // before it, no pod can be made
		_, err := p.in(account).Get(ctx, "default", metav1.GetOptions{})
		return err == nil
	})
	var role *unstructured.Unstructured
	for _, o := range deployed(t, "autoscaler.yaml") {
		switch o.GetKind() {
		case "Role":
			role = o
			withdraw(t, role, withdrawn...)
		case "RoleBinding":
			subjects, _, _ := unstructured.NestedSlice(o.Object, "subjects")
			for _, s := range subjects {
				s.(object)["namespace"] = p.namespace
			}
			if err := unstructured.SetNestedSlice(o.Object, subjects, "subjects"); err != nil {
				t.Fatal(err)
			}
		case "ServiceAccount":
		default:
			continue
		}
		p.create(t, o.Object)
	}
	asked, err := p.in(account).Create(ctx, &unstructured.Unstructured{Object: object{
		"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "metadata": object{"name": role.GetName()}, "spec": object{"expirationSeconds": int64(3600)},
	}}, metav1.CreateOptions{}, "token")
	if err != nil {
		t.Fatal(err)
	}
	if p.token, _, _ = unstructured.NestedString(asked.Object, "status", "token"); p.token == "" {
		t.Fatal("there is no token")
	}
	until(t, func() bool { // the Role is known to whoever looks at it
		review := p.create(t, object{"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": object{
			"user":               "system:serviceaccount:" + p.namespace + ":" + role.GetName(),
			"resourceAttributes": object{"namespace": p.namespace, "verb": "get", "group": "apps", "resource": "deployments"},
		}})
		allowed, _, _ := unstructured.NestedBool(review.Object, "status", "allowed")
		return allowed
	})
	return p
}

// eachRight calls f with each right of a Role, as "update deployments/scale", and with a rule of that alone.
func eachRight(t *testing.T, role *unstructured.Unstructured, f func(right string, rule object)) {
	t.Helper()
	rules, _, err := unstructured.NestedSlice(role.Object, "rules")
	if err != nil || len(rules) == 0 {
		t.Fatalf("the Role has no rules: %v", err)
	}
	for _, r := range rules {
		rule := r.(object)
		for _, resource := range rule["resources"].([]any) {
			for _, verb := range rule["verbs"].([]any) {
				f(fmt.Sprint(verb, " ", resource), object{"apiGroups": rule["apiGroups"], "resources": []any{resource}, "verbs": []any{verb}})
			}
		}
	}
}

// withdraw takes rights out of a Role.
func withdraw(t *testing.T, role *unstructured.Unstructured, rights ...string) {
	t.Helper()
	var kept []any
	found := 0
	eachRight(t, role, func(right string, rule object) {
		if slices.Contains(rights, right) {
			found++
		} else {
			kept = append(kept, rule)
		}
	})
	if found != len(rights) {
		t.Fatalf("the Role does not allow all of %q", rights)
	}
	role.Object["rules"] = kept
}

// deployed are the objects of a file of deploy/kubernetes.
func deployed(t *testing.T, file string) []*unstructured.Unstructured {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join("../../../deploy/kubernetes", file))
	if err != nil {
		t.Fatal(err)
	}
	var all []*unstructured.Unstructured
	for dec := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(raw), 4096); ; {
		o := new(unstructured.Unstructured)
		err := dec.Decode(&o.Object)
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		all = append(all, o)
	}
}

// open makes a provider that has the autoscaler's rights. through is what stands between it and the API server; nil if nothing does.
func (p *place) open(t *testing.T, through *httptest.Server) *kubernetes.Provider {
	t.Helper()
	c := *p.config.DeepCopy()
	current := c.Contexts[c.CurrentContext]
	current.Namespace = p.namespace
	c.AuthInfos = map[string]*clientcmdapi.AuthInfo{current.AuthInfo: {Token: p.token}}
	if through != nil {
		c.Clusters[current.Cluster] = &clientcmdapi.Cluster{Server: through.URL, CertificateAuthorityData: authority(through)}
	}
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := clientcmd.WriteToFile(c, path); err != nil {
		t.Fatal(err)
	}
	opened := kubernetes.New(kubernetes.Config{Kubeconfig: path, Poll: 50 * time.Millisecond})
	t.Cleanup(func() { _ = opened.Close() })
	return opened
}

// front is a server before the API server, which calls hook before each request, as "update deployments/scale", and loses the reply where hook says so.
func (p *place) front(t *testing.T, hook func(request string) (lose bool)) *httptest.Server {
	t.Helper()
	// Without the credentials of whoever runs the test: those of the request count.
	transport, err := rest.TransportFor(p.anonymous)
	if err != nil {
		t.Fatal(err)
	}
	target, err := url.Parse(p.anonymous.Host)
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewTLSServer(http.HandlerFunc(func(out http.ResponseWriter, r *http.Request) {
		lose := hook(asked(r).what)
		forward := httputil.ReverseProxy{
			Transport: transport,
			Rewrite:   func(r *httputil.ProxyRequest) { r.SetURL(target) },
			ModifyResponse: func(*http.Response) error {
				if lose {
					return errors.New("the reply is lost")
				}
				return nil
			},
			ErrorHandler: func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
		}
		forward.ServeHTTP(out, r)
	}))
	t.Cleanup(func() { server.Close(); utilnet.CloseIdleConnectionsFor(transport) })
	return server
}

func resource(apiVersion, kind string) schema.GroupVersionResource {
	r, _ := meta.UnsafeGuessKindToResource(schema.FromAPIVersionAndKind(apiVersion, kind))
	return r
}

// in is the place's own of a resource; what lies in no namespace, where there is none.
func (p *place) in(r schema.GroupVersionResource) dynamic.ResourceInterface {
	switch {
	case r == namespaces, r.Group == "authorization.k8s.io":
		return p.admin.Resource(r)
	default:
		return p.admin.Resource(r).Namespace(p.namespace)
	}
}

func (p *place) create(t *testing.T, o object) *unstructured.Unstructured {
	t.Helper()
	made, err := p.in(resource(o["apiVersion"].(string), o["kind"].(string))).Create(context.Background(), &unstructured.Unstructured{Object: o}, metav1.CreateOptions{})
	if err != nil {
		t.Fatalf("making a %s: %v", o["kind"], err)
	}
	return made
}

// versions of the kinds of workload.
var versions = map[string]string{"Deployment": "apps/v1", "StatefulSet": "apps/v1", "LeaderWorkerSet": "leaderworkerset.x-k8s.io/v1"}

// served fails a test of a kind that the cluster does not know.
func served(t *testing.T, kind string) {
	t.Helper()
	switch _, err := connect(t).admin.Resource(resource(versions[kind], kind)).List(t.Context(), metav1.ListOptions{Limit: 1}); {
	case apierrors.IsNotFound(err):
		t.Fatalf("the cluster has no %ss, which are an addition to Kubernetes: install them, or leave these tests out by TESTFLAGS=-skip=%s", kind, kind)
	case err != nil:
		t.Fatal(err)
	}
}

// workload makes one without replicas. more is added to its spec.
func (p *place) workload(t *testing.T, kind, name string, more object) *scale.Pool {
	t.Helper()
	labels := object{"app": name}
	template := object{"metadata": object{"labels": labels}, "spec": object{
		"schedulerName": "millrace-test", "automountServiceAccountToken": false, "terminationGracePeriodSeconds": int64(1), "containers": []any{object{"name": "engine", "image": "engine:1"}},
	}}
	var spec object
	switch kind {
	case "Deployment":
		spec = object{"selector": object{"matchLabels": labels}, "template": template}
	case "StatefulSet":
		spec = object{"selector": object{"matchLabels": labels}, "template": template, "serviceName": name, "podManagementPolicy": "Parallel"}
	case "LeaderWorkerSet":
		// Without this policy its controller replaces a pod of which a container has ended.
		spec = object{"leaderWorkerTemplate": object{"size": int64(2), "restartPolicy": "None", "workerTemplate": template}}
	}
	spec["replicas"] = int64(0)
	maps.Copy(spec, more)
	p.create(t, object{"apiVersion": versions[kind], "kind": kind, "metadata": object{"name": name}, "spec": spec})
	return &scale.Pool{Name: name, Max: 20, Provider: "kubernetes", Kubernetes: &scale.Kubernetes{Kind: kind, Name: name}}
}

// own is where a pool's workload lies.
func (p *place) own(pool *scale.Pool) dynamic.ResourceInterface {
	return p.in(resource(versions[pool.Kubernetes.Kind], pool.Kubernetes.Kind))
}

// set changes what becomes of pods.
func (p *place) set(f func()) {
	p.mu.Lock()
	f()
	p.mu.Unlock()
	select {
	case p.kick <- struct{}{}:
	default:
	}
}

// scale a workload as somebody else does.
func (p *place) scale(t *testing.T, pool *scale.Pool, replicas int) {
	t.Helper()
	patch, err := json.Marshal(object{"spec": object{"replicas": replicas}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.own(pool).Patch(context.Background(), pool.Kubernetes.Name, types.MergePatchType, patch, metav1.PatchOptions{}, "scale"); err != nil {
		t.Error(err)
	}
}

// status sets a pod's; if version is not "", in that version of the pod alone.
func (p *place) status(ctx context.Context, name, version string, status object) error {
	change := object{"status": status}
	if version != "" {
		change["metadata"] = object{"resourceVersion": version}
	}
	patch, err := json.Marshal(change)
	if err != nil {
		return err
	}
	_, err = p.in(pods).Patch(ctx, name, types.MergePatchType, patch, metav1.PatchOptions{}, "status")
	return err
}

// bind gives a pod a node.
func (p *place) bind(ctx context.Context, name string) error {
	_, err := p.in(pods).Create(ctx, &unstructured.Unstructured{Object: object{"apiVersion": "v1", "kind": "Binding", "metadata": object{"name": name}, "target": object{"kind": "Node", "name": p.namespace}}}, metav1.CreateOptions{}, "binding")
	return err
}

// runs is the status of a pod that runs.
func runs(ready bool) object {
	is := map[bool]string{true: "True", false: "False"}[ready]
	return object{
		"phase": "Running", "conditions": []any{object{"type": "PodScheduled", "status": "True"}, object{"type": "ContainersReady", "status": is}, object{"type": "Ready", "status": is}},
		"containerStatuses": []any{object{"name": "engine", "image": "engine:1", "imageID": "", "ready": ready, "restartCount": 0, "state": object{"running": object{"startedAt": time.Now().UTC().Format(time.RFC3339)}}}},
	}
}

// ends is the status of a pod whose container ends again and again.
func ends(last string) object {
	status := runs(false)
	c := crashLoop(last)
	c["name"], c["image"], c["imageID"], c["ready"], c["restartCount"] = "engine", "engine:1", "", false, 4
	status["containerStatuses"] = []any{c}
	return status
}

// node does as the scheduler and a kubelet do, until ctx ends.
func (p *place) node(ctx context.Context, t *testing.T) {
	for ctx.Err() == nil {
		all, err := p.in(pods).List(ctx, metav1.ListOptions{})
		if err != nil {
			if ctx.Err() == nil {
				t.Errorf("listing pods: %v", err)
			}
			return
		}
		known := make(map[types.UID]*unstructured.Unstructured)
		for _, o := range all.Items {
			known[o.GetUID()] = &o
		}
		changes, err := p.in(pods).Watch(ctx, metav1.ListOptions{ResourceVersion: all.GetResourceVersion()})
		if err != nil {
			if ctx.Err() == nil {
				t.Errorf("watching pods: %v", err)
			}
			return
		}
		for open := true; open; {
			for _, o := range known {
				if err := p.next(ctx, o); err != nil && ctx.Err() == nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) && !apierrors.HasStatusCause(err, "NamespaceTerminating") {
					t.Errorf("pod %s: %v", o.GetName(), err)
				}
			}
			select {
			case <-p.kick:
			case e, ok := <-changes.ResultChan():
				o, isPod := e.Object.(*unstructured.Unstructured)
				switch {
				case !ok, !isPod, e.Type == watch.Error: // the server ends a watch now and then
					open = false
				case e.Type == watch.Deleted:
					delete(known, o.GetUID())
				default:
					known[o.GetUID()] = o
				}
			}
		}
		changes.Stop()
	}
}

// next does the next thing of a pod's life.
func (p *place) next(ctx context.Context, o *unstructured.Unstructured) error {
	p.mu.Lock()
	as := p.mode[o.GetLabels()["app"]]
	p.mu.Unlock()
	phase, _, _ := unstructured.NestedString(o.Object, "status", "phase")
	node, _, _ := unstructured.NestedString(o.Object, "spec", "nodeName")
	uid := o.GetUID()
	switch {
	case o.GetDeletionTimestamp() != nil && as != busy:
		now := int64(0)
		return p.in(pods).Delete(ctx, o.GetName(), metav1.DeleteOptions{GracePeriodSeconds: &now, Preconditions: &metav1.Preconditions{UID: &uid}})
	case o.GetDeletionTimestamp() != nil, as == stuck, phase != "Pending":
		return nil
	case node == "":
		return p.bind(ctx, o.GetName())
	case as == broken:
		return p.status(ctx, o.GetName(), o.GetResourceVersion(), ends("no model here"))
	default:
		return p.status(ctx, o.GetName(), o.GetResourceVersion(), runs(true))
	}
}

// state is how many replicas are asked for, and the names of the pods that are neither ended nor told to. Of a LeaderWorkerSet only the leaders count.
func (p *place) state(t *testing.T, pool *scale.Pool) (int, []string) {
	t.Helper()
	of, err := p.own(pool).Get(context.Background(), pool.Kubernetes.Name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	replicas, _, _ := unstructured.NestedInt64(of.Object, "spec", "replicas")
	selector := "app=" + pool.Kubernetes.Name
	if pool.Kubernetes.Kind == "LeaderWorkerSet" {
		selector += ",leaderworkerset.sigs.k8s.io/worker-index=0"
	}
	all, err := p.in(pods).List(context.Background(), metav1.ListOptions{LabelSelector: selector})
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, o := range all.Items {
		if phase, _, _ := unstructured.NestedString(o.Object, "status", "phase"); o.GetDeletionTimestamp() == nil && phase != "Failed" && phase != "Succeeded" {
			names = append(names, o.GetName())
		}
	}
	slices.Sort(names)
	return int(replicas), names
}
