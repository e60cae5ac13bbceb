package archtest_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/millrace/millrace/internal/archtest"
)

const module = "github.com/millrace/millrace"

// Tags of the tests that `make test` leaves out: their imports are held to the rules as well.
const tags = "compose,engine"

// pkg is a package as `go list -json` describes it.
type pkg struct {
	ImportPath, Doc                    string
	GoFiles                            []string
	Imports, TestImports, XTestImports []string
}

// name is the package's path inside the module.
func (p pkg) name() string { return within(p.ImportPath) }

func (p pkg) testImports() []string { return slices.Concat(p.TestImports, p.XTestImports) }

// within is path as seen from the module's root: "" for the root, and for what is not of the module.
func within(path string) string {
	name, ok := strings.CutPrefix(path, module+"/")
	if !ok {
		return ""
	}
	return name
}

// list is what the go command says of every package of the module. One that does not build is listed all the same (-e): the compiler says it better.
var list = sync.OnceValues(func() ([]pkg, error) {
	out, err := exec.Command("go", "list", "-e", "-tags="+tags, "-json=ImportPath,Doc,GoFiles,Imports,TestImports,XTestImports", module+"/...").Output()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return nil, fmt.Errorf("go list: %w\n%s", err, exit.Stderr)
	} else if err != nil {
		return nil, fmt.Errorf("go list: %w", err)
	}
	var all []pkg
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p pkg
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			return all, nil
		} else if err != nil {
			return nil, fmt.Errorf("reading what go list says: %w", err)
		}
		all = append(all, p)
	}
})

func packages(t *testing.T) []pkg {
	t.Helper()
	all, err := list()
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func TestPackagesImportOnlyWhatTheirEdgesAllow(t *testing.T) {
	t.Parallel()
	for _, p := range packages(t) {
		allowed, known := archtest.Edges[p.name()]
		if !known && len(p.GoFiles) > 0 {
			t.Errorf("%s has no line in archtest.Edges", p.name())
			continue
		}
		for _, path := range p.Imports {
			if name := within(path); name != "" && !allows(allowed, name) {
				t.Errorf("%s imports %s, which archtest.Edges does not allow", p.name(), name)
			}
		}
		inTests := slices.Concat(allowed, []string{p.name()})
		for place, more := range archtest.TestEdges {
			if covers(place, p.name()) {
				inTests = append(inTests, more...)
			}
		}
		for _, path := range p.testImports() {
			if name := within(path); name != "" && !allows(inTests, name) {
				t.Errorf("the tests of %s import %s, which archtest.TestEdges does not allow", p.name(), name)
			}
		}
	}
}

// allows tells whether list has name, or everything.
func allows(list []string, name string) bool {
	return slices.Contains(list, name) || slices.Contains(list, archtest.Everything)
}

// covers tells whether place, a package or a folder with "/...", has the package name.
func covers(place, name string) bool {
	if place == "..." {
		return true
	}
	if dir, ok := strings.CutSuffix(place, "/..."); ok {
		return strings.HasPrefix(name, dir+"/")
	}
	return place == name
}

func TestReservedImportsHaveTheirImportersAlone(t *testing.T) {
	t.Parallel()
	for _, p := range packages(t) {
		for _, path := range p.Imports {
			if r, ok := reservation(path); ok && !slices.Contains(r.Importers, p.name()) {
				t.Errorf("%s imports %s, which archtest.Reserved keeps for %v", p.name(), path, r.Importers)
			}
		}
		for _, path := range p.testImports() {
			if r, ok := reservation(path); ok && !r.Tests && path != p.ImportPath && !slices.Contains(r.Importers, p.name()) {
				t.Errorf("the tests of %s import %s, which archtest.Reserved keeps for %v", p.name(), path, r.Importers)
			}
		}
	}
}

// reservation is the longest one whose path is path or above it. A major version's folder is below.
func reservation(path string) (archtest.Reservation, bool) {
	longest := ""
	for place := range archtest.Reserved {
		if (path == place || strings.HasPrefix(path, place+"/")) && len(place) > len(longest) {
			longest = place
		}
	}
	r, ok := archtest.Reserved[longest]
	return r, ok
}

func TestRolesAndAdaptersDoNotImportTheirLike(t *testing.T) {
	t.Parallel()
	roles := []string{"api", "autoscaler", "dispatcher", "worker"}
	for _, role := range roles {
		for _, other := range archtest.Edges[role] {
			if slices.Contains(roles, other) {
				t.Errorf("archtest.Edges lets the role %s import the role %s", role, other)
			}
		}
	}
	adapters := []string{"internal/blob", "internal/cluster", "internal/embedded", "internal/engine", "internal/gpu", "internal/ledger", "internal/queue", "internal/relay", "internal/results"}
	for _, adapter := range adapters {
		for _, other := range archtest.Edges[adapter] {
			if slices.Contains(adapters, other) {
				t.Errorf("archtest.Edges lets the adapter %s import the adapter %s", adapter, other)
			}
		}
	}
}

func TestJobImportsTheStandardLibraryAlone(t *testing.T) {
	t.Parallel()
	for _, p := range packages(t) {
		if p.name() != "internal/job" {
			continue
		}
		for _, path := range p.Imports {
			if first, _, _ := strings.Cut(path, "/"); strings.Contains(first, ".") {
				t.Errorf("internal/job imports %s", path)
			}
		}
	}
}

func TestEveryPackageHasAComment(t *testing.T) {
	t.Parallel()
	for _, p := range packages(t) {
		if len(p.GoFiles) > 0 && p.Doc == "" {
			t.Errorf("%s has no package comment", p.name())
		}
	}
}

func TestEveryLineOfEdgesNamesAPackage(t *testing.T) {
	t.Parallel()
	var names []string
	for _, p := range packages(t) {
		names = append(names, p.name())
	}
	for _, name := range slices.Sorted(maps.Keys(archtest.Edges)) {
		if !slices.Contains(names, name) {
			t.Errorf("archtest.Edges has a line for %s, which is not there", name)
		}
	}
}
