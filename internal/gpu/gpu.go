// Package gpu reads facts and faults of NVIDIA GPUs by NVML. A machine without the library has no GPUs, which is said once.
//
// # Failure
//
// A call into the driver may block for as long as the driver likes, also for ever: one goroutine makes all of them, and nobody waits for it. What it has read last is
// served until then, marked as stale.
package gpu

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

const (
	defaultEvery = 2 * time.Second
	staleAfter   = 5                // readings missed after which the last one is stale
	reopenAfter  = 30 * time.Second // between looks whether a lost GPU is back, or whether the driver answers at all
	endWithin    = time.Second      // how long Run waits for a driver that may block, beyond one reading
)

// GPU is what one GPU says of itself.
type GPU struct {
	// Index is NVML's, which counts by PCI address. CUDA counts alike with CUDA_DEVICE_ORDER=PCI_BUS_ID, and where all GPUs are of one model.
	Index int
	UUID  string
	Model string
	// MemoryTotal and MemoryUsed in bytes; Utilization 0..1 of the last period that the driver measured; Temperature in degrees Celsius.
	MemoryTotal uint64
	MemoryUsed  uint64
	Utilization float64
	Temperature int
	// ECCUncorrected counts uncorrectable memory errors since the driver was loaded, 0 also for a GPU without ECC. Xid is the last Xid error's number, 0 if none was told.
	ECCUncorrected uint64
	Xid            uint64
	// Fault is why the GPU must not be used; "" if it may.
	Fault string
	// Stale: the driver has not answered for a while. The other fields are its last answer.
	Stale bool
}

// errNone means that there is nothing to watch, and never will be while this process lives.
var errNone = errors.New("no GPU can be read")

// driver is the way to the GPUs. All calls come from one goroutine, and each may block.
type driver interface {
	// Open loads the library and finds the GPUs. errNone: it need not be tried again.
	Open() error
	// Wait returns what Xid errors were told within d. It may return earlier if there is one.
	Wait(ctx context.Context, d time.Duration) []xidError
	// Read returns each GPU that Open found. Only lost GPUs have a Fault, and then no facts that change.
	Read() []GPU
	Close()
}

// xidError is an error that the driver tells of a GPU.
type xidError struct {
	uuid   string
	number uint64
}

// Config of a Watcher. Zero fields get the defaults named.
type Config struct {
	// Every is the pause between readings. Default 2 s.
	Every time.Duration
}

// Watcher follows all GPUs of this machine. Safe for concurrent use.
type Watcher struct {
	driver driver
	every  time.Duration
	reopen time.Duration // reopenAfter; tests are less patient
	log    *slog.Logger
	states map[string]*state // by UUID; of the reading goroutine alone

	first     chan struct{} // closed once it is known what GPUs there are
	closeOnce sync.Once

	mu   sync.Mutex // guards what follows
	gpus []GPU
	read time.Time // when gpus were read; zero before the first time
}

// state is what must be remembered of one GPU.
type state struct {
	last    GPU
	before  uint64 // its uncorrectable errors when it was first seen, or was reset
	xid     uint64
	verdict string // the fault of a critical Xid error
	gone    bool
	fault   string // as published
}

// New starts nothing.
func New(cfg Config, log *slog.Logger) *Watcher { return newWatcher(newDriver(), cfg, log) }

func newWatcher(d driver, cfg Config, log *slog.Logger) *Watcher {
	return &Watcher{driver: d, every: cmp.Or(cfg.Every, defaultEvery), reopen: reopenAfter, log: log, states: map[string]*state{}, first: make(chan struct{})}
}

// Run reads until ctx ends. A driver that blocks at that moment is left behind: its goroutine ends when it comes back, or with the process.
func (w *Watcher) Run(ctx context.Context) error {
	done := make(chan struct{})
	go func() {
		defer close(done)
		w.follow(ctx)
	}()
	<-ctx.Done()
	t := time.NewTimer(w.every + endWithin)
	defer t.Stop()
	select {
	case <-done:
	case <-t.C:
	}
	return nil
}

// GPUs are those last read, by index; nil before the first reading, and where there are none. The slice is the caller's.
func (w *Watcher) GPUs() []GPU {
	w.mu.Lock()
	defer w.mu.Unlock()
	all := slices.Clone(w.gpus)
	if time.Since(w.read) > staleAfter*w.every {
		for i := range all {
			all[i].Stale = true
		}
	}
	return all
}

// First is closed once it is known what GPUs there are: after the first reading, or when there is nothing to read.
func (w *Watcher) First() <-chan struct{} { return w.first }

// follow reads while ctx lives and there is anything to read.
func (w *Watcher) follow(ctx context.Context) {
	said := false
	for ctx.Err() == nil {
		err := w.driver.Open()
		switch {
		case errors.Is(err, errNone) && len(w.states) == 0: // else a GPU that was there may come back
			w.log.Info("no GPU facts", "err", err)
			w.known()
			return
		case err != nil:
			if !said {
				w.log.Warn("reading the GPUs: trying again", "err", err, "every", w.reopen)
			}
			said = true
			w.take(nil, nil) // those that were there are gone
			sleep(ctx, w.reopen)
			continue
		}
		said = false
		w.session(ctx)
		w.driver.Close()
	}
}

func (w *Watcher) known() { w.closeOnce.Do(func() { close(w.first) }) }

// session reads until ctx ends, or until the driver must be opened anew because a GPU is lost: NVML never finds one again that has left.
func (w *Watcher) session(ctx context.Context) {
	opened := time.Now()
	var told []xidError
	for ctx.Err() == nil {
		lost := w.take(w.driver.Read(), told)
		w.known()
		if lost && time.Since(opened) > w.reopen {
			return
		}
		told = w.driver.Wait(ctx, w.every)
	}
}

// take judges a reading and what was told since the last one, and publishes it. It tells whether a GPU is lost.
func (w *Watcher) take(reading []GPU, told []xidError) (lost bool) {
	seen := make(map[string]bool, len(reading))
	for _, g := range reading {
		seen[g.UUID] = true
		s := w.states[g.UUID]
		switch {
		case s == nil:
			s = &state{before: g.ECCUncorrected}
			w.states[g.UUID] = s
		case g.Fault == "" && s.gone: // it has been away and is back: it was reset
			*s = state{before: g.ECCUncorrected, xid: s.xid}
			w.log.Info("gpu answers again", "gpu", g.Index, "uuid", g.UUID)
		}
		switch {
		case g.Fault == "":
			s.before, s.last = min(s.before, g.ECCUncorrected), g
		case s.last.UUID == "":
			s.last, s.gone = g, true
		default: // it tells nothing now: keep what was known
			s.last.Fault, s.gone = g.Fault, true
		}
	}
	for _, x := range told {
		s := w.states[x.uuid]
		if s == nil {
			continue // no GPU of ours
		}
		s.xid = x.number
		what, critical := criticalXids[x.number]
		if critical && s.verdict == "" {
			s.verdict = fmt.Sprintf("Xid %d: %s", x.number, what)
		}
		w.log.Warn("gpu error told by the driver", "gpu", s.last.Index, "uuid", x.uuid, "xid", x.number, "critical", critical)
	}
	all := make([]GPU, 0, len(w.states))
	for uuid, s := range w.states {
		g := s.last
		if !seen[uuid] {
			s.gone = true
			g.Fault = faultLost
		}
		lost = lost || s.gone
		g.Xid = s.xid
		switch {
		case s.verdict != "":
			g.Fault = s.verdict
		case g.Fault == "" && g.ECCUncorrected > s.before:
			g.Fault = fmt.Sprintf("%d uncorrectable memory errors more than at the start", g.ECCUncorrected-s.before)
		}
		if g.Fault != s.fault && g.Fault != "" {
			w.log.Error("gpu must not be used", "gpu", g.Index, "uuid", uuid, "fault", g.Fault)
		}
		s.fault = g.Fault
		all = append(all, g)
	}
	slices.SortFunc(all, func(a, b GPU) int { return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.UUID, b.UUID)) })
	w.mu.Lock()
	defer w.mu.Unlock()
	w.gpus, w.read = all, time.Now()
	return lost
}

// faultLost is the fault of a GPU that cannot be reached any more.
const faultLost = "it has fallen off the bus"

// criticalXids are the errors after which a GPU gives no right answers before it was reset or replaced: in NVIDIA's catalog of Xid errors
// (https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html) those whose immediate action is to reset the GPU or to restart the machine, the uncorrectable memory
// errors (48, 94, 171, 172), and 74, a failed NVLink.
//
// All others stop nothing. Most are an application's doing, and the GPU goes on when that has ended: 13 and 31 (illegal access), 43 (a channel stopped), 45 (cleaning up after a
// process), 69, 137. Or they are notes: 63 (a row was remapped), 92, 154. Of 144 to 150 (NVLink 5) the number alone does not tell; their fatal forms come with a 48.
var criticalXids = map[uint64]string{
	46:  "it stopped processing and needs a reset",
	48:  "an uncorrectable memory error",
	62:  "its micro-controller halted",
	64:  "bad memory could not be remapped",
	74:  "an NVLink failed",
	79:  faultLost,
	94:  "a contained memory error: the engine must be restarted",
	95:  "an uncontained memory error",
	109: "a context switch timed out and it needs a reset",
	110: "a security fault",
	119: "its system processor does not answer",
	120: "its system processor failed",
	136: "an NVLink could not be trained",
	140: "an unrecovered memory error",
	143: "it could not be initialized",
	158: "a fatal timeout",
	171: "an uncorrectable memory error (DRAM)",
	172: "an uncorrectable memory error (SRAM)",
}

// Critical are the Xid errors after which a GPU must not be used, in order.
func Critical() []uint64 { return slices.Sorted(maps.Keys(criticalXids)) }

// Pick returns those of gpus that names name: by index, by UUID, or by the beginning of one UUID, as CUDA_VISIBLE_DEVICES does.
func Pick(gpus []GPU, names []string) ([]GPU, error) {
	picked := make([]GPU, 0, len(names))
	for _, name := range names {
		g, err := find(gpus, name)
		if err != nil {
			return nil, err
		}
		if slices.ContainsFunc(picked, func(p GPU) bool { return p.UUID == g.UUID }) {
			return nil, fmt.Errorf("GPU %s is named twice", name)
		}
		picked = append(picked, g)
	}
	return picked, nil
}

func find(gpus []GPU, name string) (GPU, error) {
	index, err := strconv.Atoi(name)
	byIndex := err == nil
	var found []GPU
	for _, g := range gpus {
		if byIndex && g.Index == index || !byIndex && strings.HasPrefix(strings.ToLower(g.UUID), strings.ToLower(name)) {
			found = append(found, g)
		}
	}
	switch len(found) {
	case 1:
		return found[0], nil
	case 0:
		return GPU{}, fmt.Errorf("this machine has no GPU %q: it has %s", name, list(gpus))
	default:
		return GPU{}, fmt.Errorf("%q is the beginning of several GPUs' UUIDs", name)
	}
}

func list(gpus []GPU) string {
	if len(gpus) == 0 {
		return "none"
	}
	names := make([]string, len(gpus))
	for i, g := range gpus {
		names[i] = fmt.Sprintf("%d (%s)", g.Index, g.UUID)
	}
	return strings.Join(names, ", ")
}

func sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}
