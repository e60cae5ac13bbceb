package embedded_test

import (
	"net/url"
	"strings"
	"testing"

	"github.com/alicebob/miniredis/v2/proto"

	"github.com/millrace/millrace/internal/testenv"
)

// claim has about the commands of the script that claims a job.
const claim = `
local now = redis.call('TIME')
local s, k, n, at = unpack(redis.call('HMGET', KEYS[1], 's', 'k', 'n', 'at', 'w', 'l', 'q', 'nb', 'cn', 'rs', 'd', 'ch', 'un', 'c', 'v', 'f', 'fr'))
local token = math.max((tonumber(k or 0) or 0) + 1, now[1] * 1000 + math.floor(now[2] / 1000))
local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
if last then
	local t = string.match(last[1], '(%d+)-%d+')
	token = math.max(token, t + 1)
end
redis.call('XADD', KEYS[2], 'MAXLEN', '~', 100, token .. '-' .. 1, 'status', '{"status":"running"}')
redis.call('HSET', KEYS[1], 's', 'running', 'k', token, 'w', ARGV[1], 'l', token + ARGV[2], 'n', 1, 'cn', 1, 'rs', 0, 'un', 0, 'at', '+' .. token .. ' ' .. ARGV[1] .. '\n')
return {'taken', token, 1, 0, 0}
`

func BenchmarkScript(b *testing.B) {
	for _, script := range []struct{ name, text string }{{"return 1", "return 1"}, {"claim", claim}} {
		b.Run(script.name, func(b *testing.B) {
			c := dial(b, testenv.MiniRedis(b).URL())
			sha := c.bulk("SCRIPT", "LOAD", script.text)
			for b.Loop() {
				if got := c.do("EVALSHA", sha, "2", "r", "e", "worker-1", "15000"); strings.HasPrefix(got, "-") {
					b.Fatal(got)
				}
			}
		})
	}
}

// client is a bare connection, which shows each reply as it came.
type client struct {
	t        testing.TB
	c        *proto.Client
	password string
}

// dial connects and logs in, if the address has a password.
func dial(t testing.TB, address string) client {
	t.Helper()
	c := connect(t, address)
	c.login()
	return c
}

func connect(t testing.TB, address string) client {
	t.Helper()
	u, err := url.Parse(address)
	if err != nil {
		t.Fatal(err)
	}
	c, err := proto.Dial(u.Host)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	password, _ := u.User.Password()
	return client{t, c, password}
}

func (c client) login() {
	c.t.Helper()
	if c.password == "" {
		return
	}
	if got := c.do("AUTH", c.password); got != proto.Inline("OK") {
		c.t.Fatalf("AUTH: %q", got)
	}
}

func (c client) do(args ...string) string {
	c.t.Helper()
	reply, err := c.c.Do(args...)
	if err != nil {
		c.t.Fatalf("%s: %v", args[0], err)
	}
	return reply
}

func (c client) bulk(args ...string) string {
	c.t.Helper()
	reply := c.do(args...)
	s, err := proto.ReadString(reply)
	if err != nil {
		c.t.Fatalf("%s: %q: %v", args[0], reply, err)
	}
	return s
}
