// Package provider holds what all providers of workers have in common. Each has a package below; the suite that all pass is in providertest.
package provider

import (
	"context"
	"errors"
	"time"

	"github.com/millrace/millrace/internal/scale"
)

// Provider starts and stops the workers of pools. It is safe for concurrent use. Whether a worker's engine is ready its heartbeat tells; a provider knows processes, containers or pods.
type Provider interface {
	// List returns the pool's instances, by name: all that were asked for and were not stopped, also those that failed. It is the truth, whoever started them: another process's, an earlier one's.
	List(ctx context.Context, p *scale.Pool) ([]Instance, error)
	// Start asks for one more, and returns once that was taken on; it may then be long until it runs. Under a name that exists already it changes nothing. A provider that names its instances itself brings the pool to
	// total, if it has less. ErrCapacity, ErrInvalid and *LaterError as below; after another error it may have been taken on or not.
	Start(ctx context.Context, p *scale.Pool, name string, total int) error
	// Stop tells an instance to end, lets its worker drain for p.Drain at most, and returns once it is gone. One that failed is tidied away; one that does not exist is no error. If ctx ends first the instance may still be ending.
	Stop(ctx context.Context, p *scale.Pool, name string) error
	// Close gives up what the provider holds. Instances run on.
	Close() error
}

// State of an instance.
type State string

// The states.
const (
	Pending  State = "pending"  // it was asked for and does not run yet
	Running  State = "running"  // its process, container or pod runs
	Stopping State = "stopping" // it was told to end and is not gone yet
	Failed   State = "failed"   // it ended by itself, or cannot run: Reason says why. It is listed until it is stopped
)

// Instance is one worker with its engine, as the provider sees it.
type Instance struct {
	// Name is the worker's too: its heartbeats carry it.
	Name  string
	State State
	// Created is when it was asked for, as far as the provider knows.
	Created time.Time
	// Reason of a failure, or of what is waited for: one line for a person, without secrets.
	Reason string
	// After names the instance that must be stopped before this one can be: some workloads shrink from one end only, and refuse it otherwise. "" if this one can be stopped as it is.
	After string
}

// Errors that callers branch on.
var (
	// ErrCapacity: there is no room for another one now. The message says what is short.
	ErrCapacity = errors.New("the provider has no room")
	// ErrInvalid: the pool cannot work as it is described, whenever it is tried. The message says what to change.
	ErrInvalid = errors.New("the pool cannot work as it is described")
)

// LaterError is the error of a start that was not taken on yet, for want of something that is on its way, as an image is. No time is lost by it: asked again under the same name, and after a while again, the worker is started once that is there. If it
// never comes, one of these calls returns another error.
type LaterError struct {
	// For is what it waits for, and how far that is: one line for a person, without secrets.
	For string
}

func (l *LaterError) Error() string { return l.For }

// Join is what a worker needs to join the platform: the variables MILLRACE_… that its process gets. They may hold passwords, so they go into no log, listing or error.
type Join map[string]string
