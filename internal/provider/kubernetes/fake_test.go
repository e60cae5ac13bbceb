package kubernetes_test

import (
	"cmp"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/millrace/millrace/internal/provider/kubernetes"
	"github.com/millrace/millrace/internal/scale"
)

// world is an API server of Kubernetes with its controllers and one kubelet, as far as the provider uses them. It keeps their rules: writes of what has changed since are refused, a ReplicaSet's controller chooses pods as the real one does, a StatefulSet's
// takes the highest ordinal; and both act some time after the number has changed.
type world struct {
	server *httptest.Server

	mu        sync.Mutex // guards what is below
	version   int
	workloads map[string]*load // by resource and name
	pods      map[string]*fakePod
	denied    map[string]bool // verbs with resources, as "update deployments/scale"
	extended  bool            // it has LeaderWorkerSets
	paused    bool            // the controllers do nothing
	down      bool            // the server answers 503 to all
	expired   bool            // and 401 to the token
	hook      func(request string)
	lose      func(request string) bool // the request is done, and its reply is lost

	kick chan struct{} // wakes the controllers
}

// load is a workload.
type load struct {
	resource, name  string
	version         int
	replicas, start int
	labels          map[string]string
	conditions      []map[string]any
	// What becomes of its pods: they run, unless stuck (they never get a node), broken (their container ends again and again) or quota (none can be made); told to end they go on until they are let, if busy.
	stuck, broken, quota, busy bool
}

type fakePod struct {
	name, uid   string
	of          *load
	born        time.Time
	seq         int
	node, phase string
	ready       bool
	deleted     bool
	labels      map[string]string
	annotations map[string]string
	status      map[string]any // beside phase and the condition Ready
	waiting     map[string]any // its container's state
}

const namespace = "batch"

func newWorld(t *testing.T, loads ...*load) *world {
	w := &world{workloads: make(map[string]*load), pods: make(map[string]*fakePod), denied: make(map[string]bool), kick: make(chan struct{}, 1)}
	for _, l := range loads {
		l.labels = map[string]string{"app": l.name}
		if l.resource == "leaderworkersets" {
			w.extended = true
			l.labels = map[string]string{"leaderworkerset.sigs.k8s.io/name": l.name, "leaderworkerset.sigs.k8s.io/worker-index": "0"}
		}
		w.workloads[l.resource+"/"+l.name] = l
	}
	w.server = httptest.NewTLSServer(w) // a token is sent over TLS only
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-w.kick:
				w.mu.Lock()
				w.control()
				w.mu.Unlock()
			case <-stop:
				return
			}
		}
	}()
	t.Cleanup(func() { close(stop); <-stopped; w.server.Close() })
	w.do(func() {})
	return w
}

// open makes a provider of this world.
func (w *world) open(t *testing.T) *kubernetes.Provider {
	path := filepath.Join(t.TempDir(), "kubeconfig")
	config := fmt.Sprintf(`{"apiVersion": "v1", "kind": "Config", "current-context": "main",
"clusters": [{"name": "c", "cluster": {"server": %q, "certificate-authority-data": %q}}], "users": [{"name": "u", "user": {"token": "the-token"}}],
"contexts": [{"name": "main", "context": {"cluster": "c", "user": "u", "namespace": %q}}]}`, w.server.URL, base64.StdEncoding.EncodeToString(authority(w.server)), namespace)
	if err := os.WriteFile(path, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	p := kubernetes.New(kubernetes.Config{Kubeconfig: path, Poll: 2 * time.Millisecond})
	t.Cleanup(func() { _ = p.Close() })
	return p
}

// authority of a server's certificate.
func authority(s *httptest.Server) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})
}

// do changes the world, and wakes the controllers.
func (w *world) do(f func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f()
	w.wake()
}

func (w *world) wake() {
	select {
	case w.kick <- struct{}{}:
	default:
	}
}

// replicas that are asked for, and the names of the pods that there are and are not told to end.
func (w *world) state(l *load) (int, []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	var names []string
	for _, p := range w.active(l) {
		names = append(names, p.name)
	}
	slices.Sort(names)
	return l.replicas, names
}

// --- the controllers and the kubelet ---

func (w *world) active(l *load) []*fakePod {
	var list []*fakePod
	for _, p := range w.pods {
		if p.of == l && !p.deleted && p.phase != "Failed" {
			list = append(list, p)
		}
	}
	return list
}

// control brings all nearer to what is asked for, until nothing changes.
func (w *world) control() {
	for again := !w.paused; again; {
		again = false
		for _, l := range w.workloads {
			changed := w.replicate(l)
			if changed {
				w.version++
				l.version = w.version // its status has changed
			}
			again = again || changed
		}
		for _, p := range w.pods {
			again = w.kubelet(p) || again
		}
	}
}

func (w *world) replicate(l *load) bool {
	have := w.active(l)
	if l.resource == "deployments" {
		switch excess := len(have) - l.replicas; {
		case excess > 0:
			slices.SortFunc(have, w.before)
			for _, p := range have[:excess] {
				p.deleted = true
			}
			return true
		case excess < 0 && !l.quota:
			w.create(l, fmt.Sprintf("%s-6d4cf56db6-%s", l.name, word(w.version)))
			return true
		}
		return false
	}
	for _, p := range have {
		if n, _ := strconv.Atoi(strings.TrimPrefix(p.name, l.name+"-")); n < l.start || n >= l.start+l.replicas {
			p.deleted = true
			return true
		}
	}
	for n := l.start; n < l.start+l.replicas; n++ {
		if name := fmt.Sprintf("%s-%d", l.name, n); w.pods[name] == nil && !l.quota {
			w.create(l, name)
			return true
		}
	}
	return false
}

// word is a pod's suffix: unlike the pods' order.
func word(n int) string { return strconv.FormatInt(int64(n)*7919%46656+46656, 36) }

// before is the order in which a ReplicaSet's controller removes pods.
func (w *world) before(a, b *fakePod) int {
	number := func(yes bool) int {
		if yes {
			return 1
		}
		return 0
	}
	phases := map[string]int{"Pending": 0, "Unknown": 1, "Running": 2}
	cost := func(p *fakePod) int {
		n, _ := strconv.Atoi(p.annotations["controller.kubernetes.io/pod-deletion-cost"])
		return n
	}
	beside := func(p *fakePod) (n int) {
		for _, q := range w.active(p.of) {
			n += number(q.node == p.node)
		}
		return n
	}
	return cmp.Or(
		cmp.Compare(number(a.node != ""), number(b.node != "")), cmp.Compare(phases[a.phase], phases[b.phase]), cmp.Compare(number(a.ready), number(b.ready)),
		cmp.Compare(cost(a), cost(b)), cmp.Compare(beside(b), beside(a)), cmp.Compare(b.seq, a.seq),
	)
}

func (w *world) create(l *load, name string) {
	w.version++
	labels := map[string]string{"pod-template-hash": "6d4cf56db6"}
	for k, v := range l.labels {
		labels[k] = v
	}
	w.pods[name] = &fakePod{
		name: name, uid: fmt.Sprint("uid-", w.version), of: l, born: time.Now().Truncate(time.Second), seq: w.version, phase: "Pending", labels: labels, annotations: make(map[string]string), status: make(map[string]any),
	}
}

// kubelet does the next thing of a pod's life.
func (w *world) kubelet(p *fakePod) bool {
	switch {
	case p.deleted && (!p.of.busy || p.phase == "Failed"):
		delete(w.pods, p.name)
	case p.deleted || p.of.stuck || p.phase == "Running":
		return false
	case p.node == "":
		p.node = "node-1"
	case p.of.broken && p.waiting == nil:
		p.phase, p.waiting = "Running", crashLoop("no model here")
	case p.of.broken || p.phase != "Pending":
		return false
	default:
		p.phase, p.ready = "Running", true
	}
	return true
}

// crashLoop is how a container stands that ends again and again.
func crashLoop(last string) map[string]any {
	return map[string]any{
		"state":     map[string]any{"waiting": map[string]any{"reason": "CrashLoopBackOff", "message": "back-off 40s restarting failed container"}},
		"lastState": map[string]any{"terminated": map[string]any{"reason": "Error", "exitCode": 3, "message": "loading\n" + last + "\n"}},
	}
}

// --- the API ---

// question is what a request is about.
type question struct {
	group, namespace, resource, name string
	what                             string // "update deployments/scale"
}

func asked(r *http.Request) question {
	path := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	at := slices.Index(path, "namespaces")
	if at < 0 || len(path) < at+3 {
		return question{}
	}
	q := question{group: strings.Join(path[:at], "/"), namespace: path[at+1], resource: path[at+2]}
	if len(path) > at+3 {
		q.name = path[at+3]
	}
	verb := map[string]string{"GET": "get", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}[r.Method]
	if verb == "get" && q.name == "" {
		verb = "list"
	}
	q.what = verb + " " + strings.Join(append([]string{q.resource}, path[min(len(path), at+4):]...), "/")
	return q
}

func (w *world) ServeHTTP(out http.ResponseWriter, r *http.Request) {
	if r.Header.Get("Authorization") != "Bearer the-token" {
		http.Error(out, "unauthorized", http.StatusUnauthorized)
		return
	}
	q := asked(r)
	if q.namespace != namespace {
		w.answer(out, http.StatusNotFound, status(http.StatusNotFound, "NotFound", "the server could not find the requested resource"))
		return
	}
	w.mu.Lock()
	hook, lose := w.hook, w.lose
	w.mu.Unlock()
	if hook != nil {
		hook(q.what)
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		http.Error(out, err.Error(), http.StatusBadRequest)
		return
	}
	w.mu.Lock()
	code, answer := w.handle(q.group, q.resource, q.name, q.what, r.URL.Query().Get("labelSelector"), body)
	w.mu.Unlock()
	w.wake()
	if lose != nil && code < 400 && lose(q.what) {
		panic(http.ErrAbortHandler)
	}
	w.answer(out, code, answer)
}

func (w *world) answer(out http.ResponseWriter, code int, body any) {
	if body == nil { // as for a group that nobody has installed
		http.Error(out, "404 page not found", code)
		return
	}
	out.Header().Set("Content-Type", "application/json")
	out.WriteHeader(code)
	_ = json.NewEncoder(out).Encode(body)
}

func status(code int, reason, message string) map[string]any {
	return map[string]any{"apiVersion": "v1", "kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message}
}

func (w *world) handle(group, resource, name, what, selector string, body []byte) (int, any) {
	if w.expired {
		return http.StatusUnauthorized, status(http.StatusUnauthorized, "Unauthorized", "Unauthorized")
	}
	if w.down {
		return http.StatusServiceUnavailable, status(http.StatusServiceUnavailable, "ServiceUnavailable", "etcd leader changed")
	}
	if w.denied[what] {
		return http.StatusForbidden, status(http.StatusForbidden, "Forbidden", fmt.Sprintf("User \"autoscaler\" cannot %s", what))
	}
	groups := map[string]string{"pods": "api/v1", "deployments": "apis/apps/v1", "statefulsets": "apis/apps/v1", "leaderworkersets": "apis/leaderworkerset.x-k8s.io/v1"}
	missing := status(http.StatusNotFound, "NotFound", fmt.Sprintf("%s %q not found", resource, name))
	if groups[resource] != group || resource == "leaderworkersets" && !w.extended {
		return http.StatusNotFound, nil
	}
	if resource == "pods" {
		p := w.pods[name]
		switch {
		case what == "list pods":
			return http.StatusOK, map[string]any{"apiVersion": "v1", "kind": "PodList", "metadata": map[string]any{"resourceVersion": strconv.Itoa(w.version)}, "items": w.selected(selector)}
		case p == nil:
			return http.StatusNotFound, missing
		case what == "get pods":
			return http.StatusOK, p.json()
		case what == "patch pods", what == "delete pods":
			var in struct {
				Metadata struct {
					UID         string
					Annotations map[string]string
				}
				Preconditions struct{ UID string }
			}
			if err := json.Unmarshal(body, &in); err != nil {
				return http.StatusBadRequest, status(http.StatusBadRequest, "BadRequest", err.Error())
			}
			switch other := func(uid string) bool { return uid != "" && uid != p.uid }; {
			case other(in.Metadata.UID):
				return http.StatusUnprocessableEntity, status(http.StatusUnprocessableEntity, "Invalid", "metadata.uid: field is immutable")
			case other(in.Preconditions.UID):
				return http.StatusConflict, status(http.StatusConflict, "Conflict", "the UID in the precondition does not match")
			}
			for k, v := range in.Metadata.Annotations {
				p.annotations[k] = v
			}
			p.deleted = p.deleted || what == "delete pods"
			return http.StatusOK, p.json()
		}
		return http.StatusMethodNotAllowed, status(http.StatusMethodNotAllowed, "MethodNotAllowed", what)
	}
	l := w.workloads[resource+"/"+name]
	switch {
	case l == nil:
		return http.StatusNotFound, missing
	case strings.HasPrefix(what, "get ") && !strings.HasSuffix(what, "/scale"):
		return http.StatusOK, map[string]any{
			"apiVersion": strings.TrimPrefix(group, "apis/"), "kind": "Whatever", "metadata": map[string]any{"name": name, "namespace": namespace},
			"spec": map[string]any{"replicas": l.replicas, "ordinals": map[string]any{"start": l.start}}, "status": map[string]any{"conditions": l.conditions},
		}
	case strings.HasPrefix(what, "update ") && strings.HasSuffix(what, "/scale"):
		var in struct {
			Metadata struct{ ResourceVersion string }
			Spec     struct{ Replicas int }
		}
		if err := json.Unmarshal(body, &in); err != nil {
			return http.StatusBadRequest, status(http.StatusBadRequest, "BadRequest", err.Error())
		}
		if in.Metadata.ResourceVersion != strconv.Itoa(l.version) {
			return http.StatusConflict, status(http.StatusConflict, "Conflict", "the object has been modified; please apply your changes to the latest version and try again")
		}
		if in.Spec.Replicas < 0 {
			return http.StatusUnprocessableEntity, status(http.StatusUnprocessableEntity, "Invalid", "spec.replicas: must be greater than or equal to 0")
		}
		w.version++
		l.version, l.replicas = w.version, in.Spec.Replicas
		fallthrough
	case strings.HasPrefix(what, "get "):
		spec := map[string]any{}
		if l.replicas > 0 {
			spec["replicas"] = l.replicas
		}
		return http.StatusOK, map[string]any{
			"apiVersion": "autoscaling/v1", "kind": "Scale", "metadata": map[string]any{"name": name, "namespace": namespace, "resourceVersion": strconv.Itoa(l.version)},
			"spec": spec, "status": map[string]any{"replicas": len(w.active(l)), "selector": selectorOf(l)},
		}
	}
	return http.StatusMethodNotAllowed, status(http.StatusMethodNotAllowed, "MethodNotAllowed", what)
}

func selectorOf(l *load) string {
	var terms []string
	for k, v := range l.labels {
		terms = append(terms, k+"="+v)
	}
	slices.Sort(terms)
	return strings.Join(terms, ",")
}

func (w *world) selected(selector string) []map[string]any {
	list := []map[string]any{}
	for _, p := range w.pods {
		fits := true
		for term := range strings.SplitSeq(selector, ",") {
			k, v, _ := strings.Cut(term, "=")
			fits = fits && (selector == "" || p.labels[k] == v)
		}
		if fits {
			o := p.json()
			delete(o, "apiVersion") // the list's own tells them
			delete(o, "kind")
			list = append(list, o)
		}
	}
	return list
}

func (p *fakePod) json() map[string]any {
	meta := map[string]any{
		"name": p.name, "namespace": namespace, "uid": p.uid, "creationTimestamp": p.born.UTC().Format(time.RFC3339), "labels": p.labels, "annotations": p.annotations,
		"managedFields": []any{map[string]any{"manager": "kube-controller-manager", "operation": "Update"}},
	}
	if p.deleted {
		meta["deletionTimestamp"], meta["deletionGracePeriodSeconds"] = time.Now().UTC().Format(time.RFC3339), 30
	}
	is := map[string]any{"phase": p.phase}
	for k, v := range p.status {
		is[k] = v
	}
	conditions, _ := p.status["conditions"].([]any)
	is["conditions"] = append([]any{map[string]any{"type": "Ready", "status": map[bool]string{true: "True", false: "False"}[p.ready]}}, conditions...)
	if p.waiting != nil {
		c := map[string]any{"name": "engine", "image": "engine:1", "restartCount": 4}
		for k, v := range p.waiting {
			c[k] = v
		}
		is["containerStatuses"] = []any{c}
	}
	spec := map[string]any{"containers": []any{map[string]any{"name": "engine"}}}
	if p.node != "" {
		spec["nodeName"] = p.node
	}
	return map[string]any{"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec, "status": is}
}

// pool that scales a workload.
func pool(l *load) *scale.Pool {
	kind := map[string]string{"deployments": "Deployment", "statefulsets": "StatefulSet", "leaderworkersets": "LeaderWorkerSet"}[l.resource]
	return &scale.Pool{Name: l.name, Max: 20, Provider: "kubernetes", Kubernetes: &scale.Kubernetes{Kind: kind, Name: l.name}}
}
