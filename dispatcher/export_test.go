package dispatcher

import "context"

// Lead does the leader's duties without the lease.
func (d *Dispatcher) Lead(ctx context.Context) { d.lead(ctx, 1) }
