package resultstest

import (
	"net"
	"sync"
	"sync/atomic"
	"testing"
)

// Proxy stands between a store and its server, and loses replies on demand: the command has run, and nobody hears of it.
type Proxy struct {
	listener net.Listener
	target   atomic.Value // string
	lose     atomic.Int64 // replies still to be lost
	conns    sync.WaitGroup
}

// NewProxy forwards a free loopback port to target (host:port) until the test ends.
func NewProxy(t testing.TB, target string) *Proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &Proxy{listener: l}
	p.Point(target)
	p.conns.Go(p.accept)
	t.Cleanup(func() { // after the store's own clean-up, which closes the connections
		_ = l.Close()
		p.conns.Wait()
	})
	return p
}

// Addr is where the proxy listens.
func (p *Proxy) Addr() string { return p.listener.Addr().String() }

// Point sends new connections to another server, as a changed DNS name does.
func (p *Proxy) Point(target string) { p.target.Store(target) }

// Lose drops the next n replies, and with each its connection.
func (p *Proxy) Lose(n int64) { p.lose.Store(n) }

func (p *Proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial("tcp", p.target.Load().(string))
		if err != nil {
			_ = client.Close()
			continue
		}
		p.conns.Go(func() { p.copy(server, client, func() bool { return false }) })
		p.conns.Go(func() { p.copy(client, server, func() bool { return p.lose.Load() > 0 && p.lose.Add(-1) >= 0 }) })
	}
}

// copy forwards what from says to to, until either closes or drop tells to lose a piece.
func (p *Proxy) copy(to, from net.Conn, drop func() bool) {
	defer to.Close()   // the other side sees the end in any case
	defer from.Close() // likewise
	buf := make([]byte, 64<<10)
	for {
		n, err := from.Read(buf)
		if err != nil || drop() {
			return
		}
		if _, err := to.Write(buf[:n]); err != nil {
			return
		}
	}
}
