package kubernetes_test

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/millrace/millrace/internal/provider"
	"github.com/millrace/millrace/internal/scale"
)

// manifest is what is looked at of an object in deploy/kubernetes.
type manifest struct {
	APIVersion string `yaml:"apiVersion"`
	Kind       string
	Metadata   struct{ Name string }
	Data       map[string]string
	Rules      []struct {
		APIGroups []string `yaml:"apiGroups"`
		Resources []string
		Verbs     []string
	}
}

// manifests are all objects in deploy/kubernetes.
func manifests(t *testing.T) []manifest {
	t.Helper()
	files, err := filepath.Glob("../../../deploy/kubernetes/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("there are no manifests: %v", err)
	}
	var all []manifest
	for _, file := range files {
		raw, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for dec := yaml.NewDecoder(bytes.NewReader(raw)); ; {
			var m manifest
			err := dec.Decode(&m)
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatalf("%s: %v", file, err)
			}
			if m.Kind == "" || m.APIVersion == "" {
				t.Errorf("%s: an object without a kind or a version", file)
			}
			all = append(all, m)
		}
	}
	return all
}

func TestTheRoleInDeployIsJustEnough(t *testing.T) {
	t.Parallel()
	var allowed []string
	for _, m := range manifests(t) {
		for _, rule := range m.Rules {
			for _, resource := range rule.Resources {
				for _, verb := range rule.Verbs {
					allowed = append(allowed, verb+" "+resource)
				}
			}
		}
	}
	used := make(chan string, 10_000)
	for _, l := range []*load{{resource: "deployments", name: "d"}, {resource: "statefulsets", name: "s"}, {resource: "leaderworkersets", name: "l"}} {
		w := newWorld(t, l)
		p := w.open(t)
		w.do(func() {
			w.hook = func(request string) {
				used <- request
				if !slices.Contains(allowed, request) {
					w.do(func() { w.denied[request] = true })
				}
			}
		})
		names := started(t, w, p, l, 4)
		list := func() []provider.Instance {
			all, err := p.List(t.Context(), pool(l))
			if err != nil {
				t.Fatal(err)
			}
			return all
		}
		list()
		if err := p.Stop(t.Context(), pool(l), names[3]); err != nil {
			t.Error(err)
		}
		w.do(func() { l.quota = true })
		if err := p.Start(t.Context(), pool(l), "x", 4); err != nil {
			t.Error(err)
		}
		if l.resource == "deployments" { // a pod, while another replica has none
			if err := p.Stop(t.Context(), pool(l), names[0]); err != nil {
				t.Error(err)
			}
		}
		for _, i := range slices.Backward(list()) {
			if err := p.Stop(t.Context(), pool(l), i.Name); err != nil {
				t.Error(err)
			}
		}
	}
	close(used)
	needed := make(map[string]bool)
	for request := range used {
		needed[request] = true
	}
	for request := range needed {
		if !slices.Contains(allowed, request) {
			t.Errorf("the Role does not allow %q", request)
		}
	}
	for _, a := range allowed {
		if !needed[a] {
			t.Errorf("the Role allows %q, which nobody needs", a)
		}
	}
}

func TestThePoolsInDeployNameTheirWorkloads(t *testing.T) {
	t.Parallel()
	all := manifests(t)
	found := 0
	for _, m := range all {
		if m.Kind != "ConfigMap" || m.Data["pools.yaml"] == "" {
			continue
		}
		pools, err := scale.ParsePools([]byte(m.Data["pools.yaml"]))
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range pools {
			found++
			if !slices.ContainsFunc(all, func(m manifest) bool { return m.Kind == p.Kubernetes.Kind && m.Metadata.Name == p.Kubernetes.Name }) {
				t.Errorf("there is no %s %s", p.Kubernetes.Kind, p.Kubernetes.Name)
			}
		}
	}
	if found == 0 {
		t.Error("there are no pools")
	}
}
