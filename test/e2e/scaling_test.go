package e2e_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/millrace/millrace/internal/testenv"
)

// poolsFile is a file of one pool, whose engine is the emulator with these further arguments.
type poolsFile struct {
	file string
	// settings are YAML lines of the pool, one each.
	settings []string
	emulator []string
	// engine is the command in the emulator's place, nil for that.
	engine []string
}

// write makes the file hold the pool, at once.
func (p *poolsFile) write(t *testing.T) {
	t.Helper()
	command := append([]string{"{millrace}", "emulator", "--listen", "127.0.0.1:{port}", "--profile", "test", "--model", model, "--log-level", "warn"}, p.emulator...)
	if p.engine != nil {
		command = p.engine
	}
	raw, err := json.Marshal(command) // which YAML reads too
	if err != nil {
		t.Fatal(err)
	}
	text := fmt.Sprintf("pools:\n  - name: chat\n    models: [%s]\n    provider: process\n    engine: {command: %s}\n    drain: 30s\n", model, raw)
	for _, s := range p.settings {
		text += "    " + s + "\n"
	}
	if err := os.WriteFile(p.file+".new", []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(p.file+".new", p.file); err != nil {
		t.Fatal(err)
	}
}

func (c *cluster) poolsFile(settings []string, emulator ...string) *poolsFile {
	p := &poolsFile{file: filepath.Join(c.dir, "pools.yaml"), settings: settings, emulator: emulator}
	p.write(c.t)
	return p
}

// autoscaler describes an autoscaler. All of them keep the state of their workers in one folder, as they are on one machine.
func (c *cluster) autoscaler(name string, p *poolsFile) *process {
	c.t.Helper()
	return c.role(name, "autoscaler", "--database-url", c.database, "--pools", p.file, "--data", filepath.Join(c.dir, "instances"))
}

// endWorkers kills the workers whose state is in a folder when the test ends: they outlive the autoscaler that it kills.
func (c *cluster) endWorkers(dir string) {
	c.t.Cleanup(func() {
		for _, pid := range c.instances(dir) {
			_ = syscall.Kill(pid, syscall.SIGKILL) // one that has ended needs none; its engine ends with it
		}
	})
}

// instances are the processes that the provider's folder tells of, by name.
func (c *cluster) instances(dir string) map[string]int {
	c.t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*", "*.json"))
	if err != nil {
		c.t.Fatal(err)
	}
	all := map[string]int{}
	for _, f := range files {
		var r struct {
			Name string `json:"name"`
			PID  int    `json:"pid"`
		}
		raw, err := os.ReadFile(f)
		if err == nil && json.Unmarshal(raw, &r) == nil { // else it went just now
			all[r.Name] = r.PID
		}
	}
	return all
}

// decision is one of the autoscaler's.
type decision struct {
	Action string   `json:"action"`
	Reason string   `json:"reason"`
	From   int      `json:"from"`
	Want   int      `json:"want"`
	Start  int      `json:"start"`
	Stop   []string `json:"stop"`
	Sample struct {
		Failures int     `json:"failures"`
		Failure  *string `json:"failure"`
	} `json:"sample"`
}

// decisions are all that were made, the oldest first.
func (c *client) decisions() ([]decision, error) {
	a, err := c.send("GET", "/admin/v1/scaling?limit=100", nil)
	if err != nil {
		return nil, err
	}
	var list struct {
		Data []decision `json:"data"`
	}
	if err := json.Unmarshal(a.body, &list); err != nil || a.status != http.StatusOK {
		return nil, fmt.Errorf("the decisions answer %d: %s", a.status, a.body)
	}
	slices.Reverse(list.Data)
	return list.Data, nil
}

// firstStart waits for the first decision that starts workers.
func (c *client) firstStart() decision {
	c.t.Helper()
	var first decision
	eventually(c.t, patience, "workers are started", func() error {
		all, err := c.decisions()
		if err != nil {
			return err
		}
		i := slices.IndexFunc(all, func(d decision) bool { return d.Start > 0 })
		if i < 0 {
			return fmt.Errorf("the decisions are %+v", all)
		}
		first = all[i]
		return nil
	})
	return first
}

// known waits until the API knows the model, which the autoscaler tells it.
func (c *client) known() {
	c.t.Helper()
	eventually(c.t, patience, "the model is known", func() error {
		a, err := c.send("GET", "/v1/models", nil)
		if err == nil && !strings.Contains(string(a.body), model) {
			err = fmt.Errorf("the models are %s", a.body)
		}
		return err
	})
}

// names are those of the workers that the API sees.
func (c *client) names() ([]string, error) {
	a, err := c.send("GET", "/admin/v1/workers", nil)
	if err != nil {
		return nil, err
	}
	var list struct {
		Data []struct {
			Name string `json:"name"`
		} `json:"data"`
	}
	if err := json.Unmarshal(a.body, &list); err != nil {
		return nil, err
	}
	var names []string
	for _, w := range list.Data {
		names = append(names, w.Name)
	}
	return names, nil
}

// none waits until there is no worker and no process of one.
func (c *cluster) none(api *client, dir string) {
	c.t.Helper()
	eventually(c.t, patience, "there is no worker", func() error {
		names, err := api.names()
		if err == nil && len(names)+len(c.instances(dir)) > 0 {
			err = fmt.Errorf("workers %q, processes %v", names, c.instances(dir))
		}
		return err
	})
}

// TestABacklogGetsAllItsWorkersInOneDecision: 200 jobs wait when the autoscaler comes, which is killed while their workers start. The next one starts none in addition, and stops all when they are done.
func TestABacklogGetsAllItsWorkersInOneDecision(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	dir := filepath.Join(c.dir, "instances")
	c.endWorkers(dir)
	p := c.poolsFile([]string{"max: 3", "idle: 2s", "cooldown: 1s", "cold_start: 2s", "tokens_per_second: 20"}, "--cold-start", "2s")
	api, dispatcher, first := c.api("api"), c.dispatcher("dispatcher"), c.autoscaler("autoscaler-1", p)
	c.startAll(api.process, dispatcher, first)
	c.whole()
	api.known()
	first.kill()
	ids := api.submitMany(200, "", func(i int) string { return marked("tokens=5", i) })

	second := c.autoscaler("autoscaler-2", p)
	second.start()
	d := api.firstStart()
	if d.Want != 3 || d.Start != d.Want || d.From != 0 {
		t.Errorf("the first decision starts %d of %d workers: %s", d.Start, d.Want, d.Reason)
	}
	var begun map[string]int
	eventually(t, patience, "all workers' processes run", func() error {
		begun = c.instances(dir)
		maps.DeleteFunc(begun, func(_ string, pid int) bool { return pid == 0 }) // is about to be started
		if len(begun) != d.Want {
			return fmt.Errorf("there are %v", begun)
		}
		return nil
	})
	second.kill()

	third := c.autoscaler("autoscaler-3", p)
	third.start()
	exactlyOnce(t, connect(t, c.natsURL()), api.client, 2*patience, ids...)
	c.none(api.client, dir)
	started := 0
	all, err := api.decisions()
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range all {
		if len(d.Stop) > 0 { // it goes down, and may come back for what a worker that goes hands back
			break
		}
		started += d.Start
	}
	if started != d.Want {
		t.Errorf("%d workers were started: %+v", started, all)
	}
	for _, p := range []*process{third, dispatcher, api.process} {
		p.terminate(patience)
	}
}

// upWith describes `millrace up` with a pool, whose workers have their state in the folder dir.
func (c *cluster) upWith(p *poolsFile, args ...string) (u *process, api *client, dir string) {
	data, addr := filepath.Join(c.dir, "up"), testenv.FreeAddr(c.t)
	dir = filepath.Join(data, "workers")
	c.endWorkers(dir)
	return c.role("up", "up", append([]string{"--listen", addr, "--data", data, "--pool", p.file}, args...)...), &client{t: c.t, url: "http://" + addr, http: c.http}, dir
}

// upFromZero starts `millrace up` with a pool that has no worker unless there is work.
func (c *cluster) upFromZero() (up *process, api *client, dir string) {
	p := c.poolsFile([]string{"max: 2", "idle: 1s", "cooldown: 1s", "cold_start: 1s", "tokens_per_second: 1000"}, "--cold-start", "500ms")
	up, api, dir = c.upWith(p)
	up.start()
	api.known()
	return up, api, dir
}

func TestAPoolGoesToZeroAndComesBackForEachJob(t *testing.T) {
	t.Parallel()
	c := newBareCluster(t)
	up, api, dir := c.upFromZero()
	for i := range cycles {
		if i%2 == 0 { // a call that waits on its connection, which is stored nowhere
			api.must(http.StatusOK, "POST", "/v1/chat/completions", chat(marked("tokens=5", i), ""))
		} else if id := api.submit(marked("tokens=5", i), ""); api.ended(patience, id)[id].Status != "completed" {
			t.Errorf("job %d: %+v", i, api.status(id, "completed"))
		}
		c.none(api, dir)
	}
	up.terminate(patience)
}

// TestAKilledPlatformLeavesNoWorkerBehind: what its pool's worker ran is left to the next start.
func TestAKilledPlatformLeavesNoWorkerBehind(t *testing.T) {
	t.Parallel()
	c := newBareCluster(t)
	up, api, dir := c.upFromZero()
	id := api.submit(marked("tokens=40,token-delay=50ms", 1000), "")
	api.status(id, "running")
	before := c.instances(dir)
	up.kill()
	up.start()
	if j := api.ended(patience, id)[id]; j.Status != "completed" {
		t.Errorf("the job that ran is %s: %+v", j.Status, j)
	}
	for name, pid := range before {
		if err := ofNobody(pid, name); err != nil {
			t.Error(err)
		}
	}
	up.terminate(patience)
}

// TestATerminatedPlatformLetsItsPoolsWorkerFinish, and leaves no process behind.
func TestATerminatedPlatformLetsItsPoolsWorkerFinish(t *testing.T) {
	t.Parallel()
	c := newBareCluster(t)
	up, api, dir := c.upFromZero()
	id := api.submit(marked("tokens=40,token-delay=50ms", 1001), "")
	api.status(id, "running")
	before := c.instances(dir)
	up.terminate(patience)
	for name, pid := range before {
		if err := ofNobody(pid, name); err != nil {
			t.Error(err)
		}
	}
	if left := c.instances(dir); len(left) > 0 {
		t.Errorf("it has left %v", left)
	}
	up.start()
	if j := api.ended(patience, id)[id]; j.Status != "completed" || len(j.Attempts) != 1 {
		t.Errorf("the job that ran is %s after %+v", j.Status, j.Attempts)
	}
	up.terminate(patience)
}

// ofNobody is nil unless the process is the worker of the name.
func ofNobody(pid int, name string) error {
	args, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/cmdline")
	if err == nil && strings.Contains(string(args), "\x00"+name+"\x00") {
		return fmt.Errorf("the process %d of worker %s lives", pid, name)
	}
	return nil
}

// TestABusyWorkerIsNeverRemoved: four workers run a job each when nothing waits any more and no worker is wanted. Three go when their jobs are cancelled, and the fourth when its own is.
func TestABusyWorkerIsNeverRemoved(t *testing.T) {
	t.Parallel()
	c := newBareCluster(t)
	settings := []string{"max: 4", "idle: 1s", "cooldown: 1s", "cold_start: 1s", "tokens_per_second: 1000"}
	p := c.poolsFile(append(settings, "min: 4"))
	up, api, dir := c.upWith(p, plain(1)...) // which its workers are given
	up.start()
	api.known()
	ids := api.submitMany(4, "", func(i int) string { return marked("tokens=2000,token-delay=100ms", i) })
	for _, id := range ids {
		api.status(id, "running")
	}
	p.settings = settings
	p.write(t)
	eventually(t, patience, "a decision says that the workers are busy", func() error {
		all, err := api.decisions()
		if err == nil && !slices.ContainsFunc(all, func(d decision) bool { return d.Action == "busy" }) {
			err = fmt.Errorf("the decisions are %+v", all)
		}
		return err
	})
	cancel := func(ids ...string) {
		for _, id := range ids {
			if j := api.status(id, "running"); len(j.Attempts) != 1 {
				t.Errorf("job %s runs after %+v", id, j.Attempts)
			}
			api.must(http.StatusOK, "POST", "/v1/jobs/"+id+"/cancel", nil)
		}
	}
	cancel(ids[:3]...)
	eventually(t, patience, "one worker is left", func() error {
		if left := c.instances(dir); len(left) != 1 {
			return fmt.Errorf("there are %v", left)
		}
		return nil
	})
	cancel(ids[3])
	seen := map[string]bool{}
	for id, j := range api.ended(patience, ids...) {
		if j.Status != "cancelled" || len(j.Attempts) != 1 {
			t.Fatalf("job %s is %s after %+v", id, j.Status, j.Attempts)
		}
		seen[j.Attempts[0].Worker] = true
	}
	if len(seen) != 4 {
		t.Errorf("they ran on %d workers", len(seen))
	}
	c.none(api, dir)
	up.terminate(patience)
}

// TestAnEngineThatCrashesIsAStartThatFails: its worker gives it up, and what the engine said last is shown.
func TestAnEngineThatCrashesIsAStartThatFails(t *testing.T) {
	t.Parallel()
	c := newBareCluster(t)
	p := c.poolsFile([]string{"max: 2"})
	p.engine = []string{"sh", "-c", "echo CUDA error: out of memory >&2; exit 1"}
	p.write(t)
	up, api, dir := c.upWith(p)
	up.start()
	api.known()
	id := api.submit(marked("tokens=5", 1), "")
	eventually(t, patience, "the failure is shown", func() error {
		all, err := api.decisions()
		if err != nil {
			return err
		}
		if len(all) == 0 {
			return errors.New("there is no decision")
		}
		last := all[len(all)-1]
		if why := last.Sample.Failure; why == nil || !strings.Contains(*why, "CUDA error: out of memory") || !strings.Contains(*why, "the engine has ended 3 times in a row") {
			return fmt.Errorf("the last decision is %+v", last)
		}
		return nil
	})
	api.must(http.StatusOK, "POST", "/v1/jobs/"+id+"/cancel", nil)
	up.terminate(patience)
	if left := c.instances(dir); len(left) > 0 {
		t.Errorf("it has left %v", left)
	}
}
