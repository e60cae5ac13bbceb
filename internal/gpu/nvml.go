//go:build linux && cgo

package gpu

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// maxTold bounds how many errors one Wait takes: a GPU may tell thousands at once.
const maxTold = 64

// library is the driver behind NVIDIA's management library.
type library struct {
	nvml    nvml.Interface
	devices []device
	events  nvml.EventSet // nil if the driver tells no events here
}

// device is one GPU and what never changes of it.
type device struct {
	nvml.Device
	fixed GPU
}

func newDriver() driver { return &library{nvml: nvml.New()} }

// Open implements driver.
func (l *library) Open() error {
	switch r := l.nvml.Init(); r {
	case nvml.SUCCESS:
	case nvml.ERROR_LIBRARY_NOT_FOUND:
		return fmt.Errorf("%w: the library libnvidia-ml.so.1 is not here", errNone)
	case nvml.ERROR_DRIVER_NOT_LOADED, nvml.ERROR_NO_PERMISSION, nvml.ERROR_LIB_RM_VERSION_MISMATCH, nvml.ERROR_FUNCTION_NOT_FOUND:
		return fmt.Errorf("%w: NVML: %w", errNone, r)
	default:
		return fmt.Errorf("opening NVML: %w", r)
	}
	if err := l.find(); err != nil {
		l.Close()
		return err
	}
	l.listen()
	return nil
}

// find makes the list of GPUs. One that cannot be asked is none of it: the watcher misses it if it was there before.
func (l *library) find() error {
	n, r := l.nvml.DeviceGetCount()
	if r != nvml.SUCCESS {
		return fmt.Errorf("counting the GPUs: %w", r)
	}
	l.devices = nil
	for i := range n {
		d, r := l.nvml.DeviceGetHandleByIndex(i)
		if r != nvml.SUCCESS {
			continue
		}
		uuid, r := d.GetUUID()
		if r != nvml.SUCCESS {
			continue
		}
		fixed := GPU{Index: i, UUID: uuid}
		if name, r := d.GetName(); r == nvml.SUCCESS {
			fixed.Model = name
		}
		l.devices = append(l.devices, device{d, fixed})
	}
	if n == 0 {
		return fmt.Errorf("%w: this machine has none", errNone)
	}
	return nil
}

// listen asks to be told of Xid errors. Where the driver tells none, the counters and the loss of a GPU are all there is.
func (l *library) listen() {
	events, r := l.nvml.EventSetCreate()
	if r != nvml.SUCCESS {
		return
	}
	for _, d := range l.devices {
		types, r := d.GetSupportedEventTypes()
		if r != nvml.SUCCESS || types&nvml.EventTypeXidCriticalError == 0 {
			continue
		}
		if d.RegisterEvents(nvml.EventTypeXidCriticalError, events) == nvml.SUCCESS {
			l.events = events
		}
	}
	if l.events == nil {
		_ = events.Free() // nothing to do about it
	}
}

// Wait implements driver.
func (l *library) Wait(ctx context.Context, d time.Duration) []xidError {
	if l.events == nil {
		sleep(ctx, d)
		return nil
	}
	var told []xidError
	wait := d
	for len(told) < maxTold {
		began := time.Now()
		event, r := l.events.Wait(uint32(wait.Milliseconds()))
		if r != nvml.SUCCESS {
			if r != nvml.ERROR_TIMEOUT { // as of a lost GPU: at once, each time
				sleep(ctx, wait-time.Since(began))
			}
			return told
		}
		if event.EventType == nvml.EventTypeXidCriticalError {
			if uuid, r := event.Device.GetUUID(); r == nvml.SUCCESS {
				told = append(told, xidError{uuid, event.EventData})
			}
		}
		wait = 0 // what else was told at the same time
	}
	return told
}

// Read implements driver. What a GPU does not tell (a consumer's card has no ECC, a virtual one no temperature) stays 0.
func (l *library) Read() []GPU {
	all := make([]GPU, len(l.devices))
	for i, d := range l.devices {
		g := d.fixed
		var lost error
		ask := func(r nvml.Return) bool {
			switch {
			case r == nvml.SUCCESS:
				return true
			case r == nvml.ERROR_GPU_IS_LOST:
				lost = errors.New(faultLost)
			case r == nvml.ERROR_RESET_REQUIRED:
				lost = errors.New("it needs a reset")
			}
			return false
		}
		if m, r := d.GetMemoryInfo(); ask(r) {
			g.MemoryTotal, g.MemoryUsed = m.Total, m.Used
		}
		if u, r := d.GetUtilizationRates(); ask(r) {
			g.Utilization = float64(min(u.Gpu, 100)) / 100
		}
		if t, r := d.GetTemperature(nvml.TEMPERATURE_GPU); ask(r) {
			g.Temperature = int(t)
		}
		if n, r := d.GetTotalEccErrors(nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.VOLATILE_ECC); ask(r) {
			g.ECCUncorrected = n
		}
		if lost != nil {
			g.Fault = lost.Error()
		}
		all[i] = g
	}
	return all
}

// Close implements driver.
func (l *library) Close() {
	if l.events != nil {
		_ = l.events.Free() // the library goes with it
		l.events = nil
	}
	_ = l.nvml.Shutdown() // likewise
}
