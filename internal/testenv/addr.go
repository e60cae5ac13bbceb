package testenv

import (
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
	"testing"
)

// The ports that tests listen on lie below those that systems give to outgoing connections: none of these takes one before it is listened on, or while a process that is
// to have it again is dead.
const (
	firstPort = 15_000
	ports     = 15_000
	ownPorts  = 500
)

// block is ports of which no other process's tests get one while this process listens on the one before the first.
type block struct {
	first, n int
	held     net.Listener
}

// own is this process's block; all ports if there are more processes than blocks.
var own = sync.OnceValue(func() block {
	for _, i := range rand.Perm(ports / ownPorts) {
		at := firstPort + i*ownPorts
		if l, err := net.Listen("tcp", loopback(at)); err == nil {
			return block{at + 1, ownPorts - 1, l}
		}
	}
	return block{first: firstPort, n: ports}
})

// given are the ports of tests that run: one that is free now may be another test's in a moment.
var given sync.Map

func loopback(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }

// FreeAddr is a loopback address that nobody listens on, and that no other test gets before this one has ended.
func FreeAddr(t testing.TB) string {
	t.Helper()
	own := own()
	for range 1000 {
		addr := loopback(own.first + rand.IntN(own.n))
		l, err := net.Listen("tcp", addr)
		if err != nil {
			continue
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		if _, taken := given.LoadOrStore(addr, true); !taken {
			t.Cleanup(func() { given.Delete(addr) })
			return addr
		}
	}
	t.Fatal("no free port was found")
	return ""
}
