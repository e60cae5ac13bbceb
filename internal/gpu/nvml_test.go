//go:build linux && cgo

package gpu_test

import (
	"bytes"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"
	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/gpu"
	"github.com/millrace/millrace/internal/testenv"
)

const every = 2 * time.Millisecond

// machine is what NVML shows of two GPUs.
type machine struct {
	mu     sync.Mutex
	init   nvml.Return
	count  int
	away   map[string]bool // cannot be found any more
	states map[string]nvml.Return
	ecc    map[string]uint64
	noECC  bool
	events chan nvml.EventData
}

func newMachine() *machine {
	return &machine{
		count: 2, away: map[string]bool{}, states: map[string]nvml.Return{}, ecc: map[string]uint64{"GPU-0": 3, "GPU-1": 0},
		events: make(chan nvml.EventData, 8),
	}
}

func (m *machine) set(f func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f()
}

func (m *machine) library() nvml.Interface {
	locked := func(f func() nvml.Return) nvml.Return {
		m.mu.Lock()
		defer m.mu.Unlock()
		return f()
	}
	return &mock.Interface{
		InitFunc:           func() nvml.Return { return locked(func() nvml.Return { return m.init }) },
		ShutdownFunc:       func() nvml.Return { return nvml.SUCCESS },
		DeviceGetCountFunc: func() (int, nvml.Return) { return m.count, nvml.SUCCESS },
		DeviceGetHandleByIndexFunc: func(i int) (nvml.Device, nvml.Return) {
			d := m.device(i)
			uuid, _ := d.GetUUID()
			return d, locked(func() nvml.Return {
				if m.away[uuid] {
					return nvml.ERROR_GPU_IS_LOST
				}
				return nvml.SUCCESS
			})
		},
		EventSetCreateFunc: func() (nvml.EventSet, nvml.Return) {
			return &mock.EventSet{
				FreeFunc: func() nvml.Return { return nvml.SUCCESS },
				WaitFunc: func(ms uint32) (nvml.EventData, nvml.Return) {
					select {
					case e := <-m.events:
						return e, nvml.SUCCESS
					case <-time.After(time.Duration(ms) * time.Millisecond):
						return nvml.EventData{}, nvml.ERROR_TIMEOUT
					}
				},
			}, nvml.SUCCESS
		},
	}
}

func (m *machine) device(i int) *mock.Device {
	uuid := [...]string{"GPU-0", "GPU-1"}[i]
	state := func() nvml.Return {
		m.mu.Lock()
		defer m.mu.Unlock()
		return m.states[uuid]
	}
	return &mock.Device{
		GetUUIDFunc:                func() (string, nvml.Return) { return uuid, nvml.SUCCESS },
		GetNameFunc:                func() (string, nvml.Return) { return "NVIDIA A10", nvml.SUCCESS },
		GetMemoryInfoFunc:          func() (nvml.Memory, nvml.Return) { return nvml.Memory{Total: 24 << 30, Used: 20 << 30}, state() },
		GetUtilizationRatesFunc:    func() (nvml.Utilization, nvml.Return) { return nvml.Utilization{Gpu: 75}, state() },
		GetTemperatureFunc:         func(nvml.TemperatureSensors) (uint32, nvml.Return) { return 61, state() },
		GetSupportedEventTypesFunc: func() (uint64, nvml.Return) { return nvml.EventTypeXidCriticalError, nvml.SUCCESS },
		RegisterEventsFunc:         func(uint64, nvml.EventSet) nvml.Return { return nvml.SUCCESS },
		GetTotalEccErrorsFunc: func(nvml.MemoryErrorType, nvml.EccCounterType) (uint64, nvml.Return) {
			m.mu.Lock()
			defer m.mu.Unlock()
			if m.noECC {
				return 0, nvml.ERROR_NOT_SUPPORTED
			}
			return m.ecc[uuid], m.states[uuid]
		},
	}
}

// tell has the driver tell an Xid error of GPU i.
func (m *machine) tell(i int, xid uint64) {
	m.events <- nvml.EventData{Device: m.device(i), EventType: nvml.EventTypeXidCriticalError, EventData: xid}
}

func watch(t *testing.T, m *machine) *gpu.Watcher {
	t.Helper()
	w := gpu.Watch(m.library(), every, testenv.Log(t))
	start(t, w)
	until(t, "the first reading", func() bool { return len(w.GPUs()) == 2 })
	return w
}

// faults are those of both GPUs.
func faults(w *gpu.Watcher) [2]string {
	g := w.GPUs()
	return [2]string{g[0].Fault, g[1].Fault}
}

func untilFaults(t *testing.T, w *gpu.Watcher, want [2]string) {
	t.Helper()
	until(t, "faults "+strings.Join(want[:], ", "), func() bool { return faults(w) == want })
}

func TestFacts(t *testing.T) {
	t.Parallel()
	w := watch(t, newMachine())
	want := gpu.GPU{Index: 0, UUID: "GPU-0", Model: "NVIDIA A10", MemoryTotal: 24 << 30, MemoryUsed: 20 << 30, Utilization: 0.75, Temperature: 61, ECCUncorrected: 3}
	got := w.GPUs()[0]
	got.Stale = false // a busy machine
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// TestUncorrectableErrorThatComesIsAFault, and those of before are none. The driver's counter begins anew with a reset.
func TestUncorrectableErrorThatComesIsAFault(t *testing.T) {
	t.Parallel()
	m := newMachine()
	w := watch(t, m)
	if got := faults(w); got != [2]string{} {
		t.Errorf("faults %q at the start", got)
	}
	m.set(func() { m.ecc["GPU-0"] = 5 })
	untilFaults(t, w, [2]string{"2 uncorrectable memory errors more than at the start", ""})
	m.set(func() { m.ecc["GPU-0"] = 0 })
	untilFaults(t, w, [2]string{})
}

func TestXidErrors(t *testing.T) {
	t.Parallel()
	m := newMachine()
	w := watch(t, m)
	m.tell(1, 31) // an application's
	until(t, "it is noted", func() bool { return w.GPUs()[1].Xid == 31 })
	if got := faults(w); got != [2]string{} {
		t.Errorf("faults %q after an application's error", got)
	}
	m.tell(1, 48)
	m.tell(1, 45) // what follows does not hide it
	until(t, "both are noted", func() bool { return w.GPUs()[1].Xid == 45 })
	if got := faults(w); got != [2]string{"", "Xid 48: an uncorrectable memory error"} {
		t.Errorf("faults %q", got)
	}
}

// TestLostGPU: it tells that it is lost, cannot be found any more when the library is opened anew, and is good again when it has come back.
func TestLostGPU(t *testing.T) {
	t.Parallel()
	m := newMachine()
	w := watch(t, m)
	m.tell(0, 79)
	m.set(func() { m.states["GPU-0"] = nvml.ERROR_GPU_IS_LOST })
	untilFaults(t, w, [2]string{"Xid 79: it has fallen off the bus", ""})
	m.set(func() { m.away["GPU-0"] = true; m.states["GPU-1"] = nvml.ERROR_GPU_IS_LOST })
	untilFaults(t, w, [2]string{"Xid 79: it has fallen off the bus", "it has fallen off the bus"})
	if g := w.GPUs()[1]; g.Model != "NVIDIA A10" || g.MemoryTotal == 0 {
		t.Errorf("what was known is forgotten: %+v", g)
	}
	m.set(func() { m.away["GPU-0"] = false; clear(m.states); m.ecc["GPU-0"] = 7 })
	untilFaults(t, w, [2]string{})
}

func TestGPUThatNeedsAReset(t *testing.T) {
	t.Parallel()
	m := newMachine()
	w := watch(t, m)
	m.set(func() { m.states["GPU-1"] = nvml.ERROR_RESET_REQUIRED })
	untilFaults(t, w, [2]string{"", "it needs a reset"})
}

func TestWithoutECC(t *testing.T) {
	t.Parallel()
	m := newMachine()
	m.noECC = true
	w := watch(t, m)
	if g := w.GPUs()[0]; g.ECCUncorrected != 0 || g.Fault != "" || g.Temperature != 61 {
		t.Errorf("got %+v", g)
	}
}

// TestNoLibrarySaysSoOnce, as a machine without permission or without any GPU.
func TestNoLibrarySaysSoOnce(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*machine){
		"no library":    func(m *machine) { m.init = nvml.ERROR_LIBRARY_NOT_FOUND },
		"no permission": func(m *machine) { m.init = nvml.ERROR_NO_PERMISSION },
		"no driver":     func(m *machine) { m.init = nvml.ERROR_DRIVER_NOT_LOADED },
		"no GPU":        func(m *machine) { m.count = 0 },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newMachine()
			change(m)
			var text lines
			start(t, gpu.Watch(m.library(), every, slog.New(slog.NewTextHandler(&text, nil))))
			until(t, "it says so", func() bool { return text.count() > 0 })
			if n := text.count(); n != 1 {
				t.Errorf("%d lines", n)
			}
		})
	}
}

// lines counts what is logged.
type lines struct {
	mu  sync.Mutex
	all bytes.Buffer
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.all.Write(b)
}

func (l *lines) count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return bytes.Count(l.all.Bytes(), []byte("\n"))
}
