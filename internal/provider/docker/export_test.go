package docker

import "time"

// SetGrace sets how long a worker has to end once its drain is over. It counts if nothing was done before.
func (p *Provider) SetGrace(d time.Duration) { p.grace = d }
