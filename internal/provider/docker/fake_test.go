package docker_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/moby/moby/api/pkg/stdcopy"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/jsonstream"
	"github.com/moby/moby/api/types/network"
)

// engine is what of Docker's API the provider uses, over HTTP, with containers that do what the last word of their command says. Where a real one fails on nobody's command, it does.
type engine struct {
	url string

	mu         sync.Mutex
	containers []*fakeContainer
	made       int
	images     map[string]bool
	networks   map[string]bool
	gpus       int
	// faults are what goes wrong next, by the name of the call; without a status nothing does. What is not applied is as if the call never came.
	faults map[string][]fault
	// calls are the names of those that were made, but for those that only look.
	calls []string
	// load answers the loading of an image; nil refuses it.
	load func(w http.ResponseWriter, r *http.Request)
}

type fault struct {
	applied bool
	status  int
	message string
}

type fakeContainer struct {
	id, name string
	created  time.Time
	config   *container.Config
	host     *container.HostConfig
	networks map[string]*network.EndpointSettings
	state    container.State
	log      string
	ended    chan struct{} // closed once it does not run any more
	removed  chan struct{}
	signals  int
}

func newEngine(t *testing.T) *engine {
	e := &engine{images: map[string]bool{"worker:test": true, "engine:test": true}, networks: map[string]bool{"bridge": true}, gpus: 2, faults: make(map[string][]fault)}
	s := httptest.NewServer(e)
	e.url = "tcp://" + s.Listener.Addr().String()
	t.Cleanup(func() {
		e.mu.Lock()
		for _, c := range e.containers {
			c.exit(137)
		}
		e.mu.Unlock()
		s.Close()
	})
	return e
}

// fail makes the next call of that name go wrong.
func (e *engine) fail(call string, f fault) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.faults[call] = append(e.faults[call], f)
}

func (e *engine) count(call string) int {
	e.mu.Lock()
	defer e.mu.Unlock()
	n := 0
	for _, c := range e.calls {
		if c == call {
			n++
		}
	}
	return n
}

func (e *engine) add(c *fakeContainer) *fakeContainer {
	e.made++
	if c.id == "" {
		c.id = fmt.Sprintf("%064d", e.made)
	}
	c.created, c.ended, c.removed = time.Now(), make(chan struct{}), make(chan struct{})
	c.state.Status = container.StateCreated
	e.containers = append(e.containers, c)
	return c
}

// find looks a container up by id or name. The lock is held.
func (e *engine) find(ref string) *fakeContainer {
	for _, c := range e.containers {
		if c.id == ref || c.name == ref || (len(ref) >= 12 || c.name == "ours") && strings.HasPrefix(c.id, ref) {
			return c
		}
	}
	return nil
}

// get is a container that the test knows to be there.
func (e *engine) get(t *testing.T, name string) *fakeContainer {
	t.Helper()
	e.mu.Lock()
	defer e.mu.Unlock()
	c := e.find(name)
	if c == nil {
		t.Fatalf("there is no container %s", name)
	}
	return c
}

// end makes a container end by itself.
func (e *engine) end(t *testing.T, name string, code int, oom bool, log string) {
	c := e.get(t, name)
	e.mu.Lock()
	defer e.mu.Unlock()
	c.state.OOMKilled, c.log = oom, c.log+log
	c.exit(code)
}

// exit ends it. The lock is held.
func (c *fakeContainer) exit(code int) {
	if !c.state.Running {
		return
	}
	c.state.Running, c.state.Status, c.state.ExitCode = false, container.StateExited, code
	close(c.ended)
}

func (c *fakeContainer) mode() string {
	if len(c.config.Cmd) == 0 {
		return "plain"
	}
	return c.config.Cmd[len(c.config.Cmd)-1]
}

var version = regexp.MustCompile(`^/v1\.\d+`)

func refuse(w http.ResponseWriter, status int, format string, args ...any) {
	answerJSON(w, status, map[string]string{"message": fmt.Sprintf(format, args...)})
}

func answerJSON(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v) //nolint:errchkjson // of a fake
}

func (e *engine) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	path := strings.Split(strings.Trim(version.ReplaceAllString(r.URL.Path, ""), "/"), "/")
	call, ref := path[len(path)-1], ""
	if len(path) == 3 {
		ref = path[1]
	}
	if r.Method == http.MethodDelete {
		call, ref = "remove", path[1]
	}
	e.mu.Lock()
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		e.calls = append(e.calls, call)
	}
	if f := e.faults[call]; len(f) > 0 {
		e.faults[call] = f[1:]
		switch {
		case f[0].status == 0: // this one goes well
		case !f[0].applied:
			e.mu.Unlock()
			refuse(w, f[0].status, "%s", f[0].message)
			return
		default:
			defer func(asked http.ResponseWriter) { refuse(asked, f[0].status, "%s", f[0].message) }(w)
			w = httptest.NewRecorder()
		}
	}
	e.mu.Unlock()

	switch {
	case call == "_ping":
		w.Header().Set("Api-Version", "1.41")
		answerJSON(w, http.StatusOK, "OK")
	case path[0] == "images" && call == "create":
		e.mu.Lock()
		load := e.load
		e.mu.Unlock()
		if load == nil {
			refuse(w, http.StatusNotFound, "pull access denied for %s, repository does not exist or may require 'docker login'", r.URL.Query().Get("fromImage"))
			return
		}
		load(w, r)
	case path[0] == "images":
		e.mu.Lock()
		defer e.mu.Unlock()
		if !e.images[ref] {
			refuse(w, http.StatusNotFound, "No such image: %s", ref)
			return
		}
		answerJSON(w, http.StatusOK, map[string]string{"Id": "sha256:" + ref})
	case call == "create":
		e.create(w, r)
	case call == "json" && len(path) == 2:
		e.list(w, r)
	default:
		e.mu.Lock()
		c := e.find(ref)
		e.mu.Unlock()
		if c == nil {
			refuse(w, http.StatusNotFound, "No such container: %s", ref)
			return
		}
		switch call {
		case "json":
			e.mu.Lock()
			defer e.mu.Unlock()
			state := c.state
			answerJSON(w, http.StatusOK, container.InspectResponse{ID: c.id, Name: "/" + c.name, State: &state, Config: c.config, HostConfig: c.host, NetworkSettings: &container.NetworkSettings{Networks: c.networks}})
		case "start":
			e.start(w, c)
		case "rename":
			e.rename(w, c, r.URL.Query().Get("name"))
		case "stop":
			e.stop(w, r, c)
		case "wait":
			e.wait(w, r, c)
		case "logs":
			e.mu.Lock()
			defer e.mu.Unlock()
			w.WriteHeader(http.StatusOK)
			header := []byte{byte(stdcopy.Stderr), 0, 0, 0, 0, 0, 0, byte(len(c.log))}
			_, _ = w.Write(append(header, c.log...))
		case "remove":
			e.remove(w, r, c)
		default:
			refuse(w, http.StatusNotImplemented, "%s is not there", r.URL.Path)
		}
	}
}

func (e *engine) create(w http.ResponseWriter, r *http.Request) {
	var asked container.CreateRequest
	if err := json.NewDecoder(r.Body).Decode(&asked); err != nil {
		refuse(w, http.StatusBadRequest, "%v", err)
		return
	}
	name := r.URL.Query().Get("name")
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case e.find(name) != nil:
		refuse(w, http.StatusConflict, "Conflict. The container name \"/%s\" is already in use", name)
	case !e.images[asked.Image]:
		refuse(w, http.StatusNotFound, "No such image: %s", asked.Image)
	case slices.ContainsFunc(asked.HostConfig.Binds, func(b string) bool { return !strings.Contains(b, ":/") }):
		refuse(w, http.StatusBadRequest, "invalid volume specification: '%s'", asked.HostConfig.Binds)
	default:
		c := e.add(&fakeContainer{name: name, config: asked.Config, host: asked.HostConfig})
		answerJSON(w, http.StatusCreated, container.CreateResponse{ID: c.id})
	}
}

func (e *engine) list(w http.ResponseWriter, r *http.Request) {
	var filters map[string]map[string]bool
	if err := json.Unmarshal([]byte(r.URL.Query().Get("filters")), &filters); err != nil {
		refuse(w, http.StatusBadRequest, "%v", err)
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	found := []container.Summary{}
	for _, c := range e.containers {
		fits := true
		for f := range filters["label"] {
			name, want, valued := strings.Cut(f, "=")
			got, has := c.config.Labels[name]
			fits = fits && has && (!valued || got == want)
		}
		if fits {
			found = append(found, container.Summary{ID: c.id, Names: []string{"/" + c.name}, Labels: c.config.Labels, State: c.state.Status, Created: c.created.Unix()})
		}
	}
	answerJSON(w, http.StatusOK, found)
}

func (e *engine) start(w http.ResponseWriter, c *fakeContainer) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if c.state.Running {
		w.WriteHeader(http.StatusNotModified)
		return
	}
	fail := func(status int, format string, args ...any) {
		c.state.Error = fmt.Sprintf(format, args...)
		refuse(w, status, "%s", c.state.Error)
	}
	if c.host.NetworkMode.IsContainer() {
		if other := e.find(c.host.NetworkMode.ConnectedContainer()); other == nil || !other.state.Running {
			fail(http.StatusConflict, "cannot join network of a non running container")
			return
		}
	} else if !e.networks[string(c.host.NetworkMode)] {
		fail(http.StatusNotFound, "network %s not found", c.host.NetworkMode)
		return
	}
	for _, d := range c.host.DeviceRequests {
		for _, id := range d.DeviceIDs {
			if n, err := strconv.Atoi(id); err != nil || n >= e.gpus {
				fail(http.StatusInternalServerError, "OCI runtime create failed: nvidia-container-cli: device error: %s: unknown device", id)
				return
			}
		}
	}
	switch mode := c.mode(); mode {
	case "missing":
		fail(http.StatusBadRequest, "OCI runtime create failed: exec: \"missing\": executable file not found in $PATH")
		return
	case "broken":
		c.state.Running = true
		c.log = "first\nno such model, says " + strings.Join(c.config.Env, " ") + "\n\n"
		c.exit(3)
	default:
		c.state.Running, c.state.Status = true, container.StateRunning
	}
	w.WriteHeader(http.StatusNoContent)
}

func (e *engine) rename(w http.ResponseWriter, c *fakeContainer, name string) {
	name = strings.TrimPrefix(name, "/")
	e.mu.Lock()
	defer e.mu.Unlock()
	switch other := e.find(name); {
	case other == c:
		refuse(w, http.StatusBadRequest, "Renaming a container with the same name as its current name")
	case other != nil:
		refuse(w, http.StatusConflict, "Conflict. The container name \"/%s\" is already in use", name)
	default:
		c.name = name
		w.WriteHeader(http.StatusNoContent)
	}
}

// stop tells a container to end, and kills it after t seconds, each of which lasts ten milliseconds here; also if nobody waits for that.
func (e *engine) stop(w http.ResponseWriter, r *http.Request, c *fakeContainer) {
	t, _ := strconv.Atoi(r.URL.Query().Get("t"))
	e.mu.Lock()
	running := c.state.Running
	c.signals++
	if running && c.mode() != "busy" && c.mode() != "stubborn" {
		c.exit(0)
	}
	e.mu.Unlock()
	if !running {
		w.WriteHeader(http.StatusNotModified)
		return
	}
	kill := time.AfterFunc(time.Duration(t)*10*time.Millisecond, func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		c.exit(137)
	})
	select {
	case <-c.ended:
		kill.Stop()
	case <-r.Context().Done():
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

func (e *engine) wait(w http.ResponseWriter, r *http.Request, c *fakeContainer) {
	until := c.ended
	if r.URL.Query().Get("condition") == string(container.WaitConditionRemoved) {
		until = c.removed
	}
	w.WriteHeader(http.StatusOK)
	_ = http.NewResponseController(w).Flush()
	select {
	case <-until:
	case <-r.Context().Done():
		return
	}
	_ = json.NewEncoder(w).Encode(container.WaitResponse{})
}

func (e *engine) remove(w http.ResponseWriter, r *http.Request, c *fakeContainer) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if c.state.Running && r.URL.Query().Get("force") == "" {
		refuse(w, http.StatusConflict, "You cannot remove a running container")
		return
	}
	if i := slices.Index(e.containers, c); i >= 0 {
		e.containers = slices.Delete(e.containers, i, i+1)
		c.exit(137)
		close(c.removed)
	}
	w.WriteHeader(http.StatusNoContent)
}

// loading answers the loading of an image with these messages.
func loading(messages ...jsonstream.Message) func(http.ResponseWriter, *http.Request) {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		for _, m := range messages {
			_ = json.NewEncoder(w).Encode(m)
		}
		_, _ = io.WriteString(w, "\n")
	}
}
