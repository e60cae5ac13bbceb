package schedule

import "time"

// Scheduler is one engine's ledger and line of jobs in hand. Not safe for concurrent use.
type Scheduler struct{ cfg Config }

// Ticket is a job in hand or running.
type Ticket struct{ Ask Ask }

// New validates cfg; the error names the field, its value and the bound.
func New(cfg Config) (*Scheduler, error) { panic("not yet") }

// Observe takes what the engine says about itself. Readings come every 250 ms while anything runs, else every few seconds.
func (s *Scheduler) Observe(now time.Time, r Reading) { panic("not yet") }

// Unseen notes that the engine's metrics could not be read: until the next reading the ledger alone counts, and starts are few.
func (s *Scheduler) Unseen(now time.Time) { panic("not yet") }

// Offer puts a job in hand.
func (s *Scheduler) Offer(now time.Time, a Ask) *Ticket { panic("not yet") }

// Withdraw takes a job from the hand again. One that has started is not touched: end it.
func (s *Scheduler) Withdraw(t *Ticket) { panic("not yet") }

// Start takes from the hand what may start now, in order, and counts it as running. next is when to look again though nothing happens; zero is never.
func (s *Scheduler) Start(now time.Time) (started []*Ticket, next time.Time) { panic("not yet") }

// Preempt names the running jobs of the batch class that are to be given back now, youngest first, because an interactive job in hand finds no room. Each is named once; it
// holds its room until its End.
func (s *Scheduler) Preempt(now time.Time) []*Ticket { panic("not yet") }

// First notes that a running job's first token came.
func (s *Scheduler) First(now time.Time, t *Ticket) { panic("not yet") }

// Grow counts n more tokens of a running job.
func (s *Scheduler) Grow(t *Ticket, n int) { panic("not yet") }

// End releases what a running job held, and learns from how it went. Only the first call for a ticket does anything.
func (s *Scheduler) End(now time.Time, t *Ticket, r Result) { panic("not yet") }

// Pull tells what may be pulled now for a class by its rank; -1 is the worker's own lane, which has all classes.
func (s *Scheduler) Pull(now time.Time, class int) Wish { panic("not yet") }

// Status is the state now.
func (s *Scheduler) Status(now time.Time) Status { panic("not yet") }
