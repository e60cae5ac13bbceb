package testenv

import (
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
	"testing"
)

// given are the ports that this run has given away: one that is free now may be another test's in a moment.
var given sync.Map

// FreeAddr is a loopback address that nobody listens on, and that no other test gets. It lies below the ports that systems give to outgoing connections: none of
// those takes it before it is listened on, or while a process that is to have it again is dead.
func FreeAddr(t testing.TB) string {
	t.Helper()
	for range 1000 {
		addr := net.JoinHostPort("127.0.0.1", strconv.Itoa(15_000+rand.IntN(15_000)))
		l, err := net.Listen("tcp", addr)
		if err != nil {
			continue
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		if _, taken := given.LoadOrStore(addr, true); !taken {
			return addr
		}
	}
	t.Fatal("no free port was found")
	return ""
}
