package dispatcher

import "context"

// Lead does the leader's duties without the lease.
func (d *Dispatcher) Lead(ctx context.Context) { d.lead(ctx, 1) }

// Leads tells whether d leads.
func (d *Dispatcher) Leads() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.leading
}
