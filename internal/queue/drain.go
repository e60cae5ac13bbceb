package queue

import "time"

// drainTimeout bounds how long Drain waits for the server's word that nothing more comes.
const drainTimeout = 500 * time.Millisecond

// Drain ends the pulling for good, at once, also in the middle of a pull: its channel closes, what is in it stays the owner's, and what still arrives is handed back.
// It returns when nothing can arrive any more, or after half a second while the server does not answer. A message that the server was about to deliver is
// delivered to another, at once. Close is still to be called.
func (p *Puller) Drain() {
	gone := make(chan struct{})
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return
	}
	p.closed = true
	p.sub.SetClosedHandler(func(string) { close(gone) })
	// The server is told first: what is handed back from here on cannot come here again.
	err := p.sub.Drain()
	if p.open != nil {
		p.finish(p.open)
	}
	p.mu.Unlock()
	if err != nil { // the connection is closed, and with it the subscription
		return
	}
	limit := time.NewTimer(drainTimeout)
	defer limit.Stop()
	select {
	case <-gone:
	case <-limit.C:
		_ = p.sub.Unsubscribe() // fails only when it has just ended
	}
}
