package embedded_test

import (
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/alicebob/miniredis/v2/proto"
	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/millrace/millrace/internal/testenv"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Each script is given the keys k1, k2, k3 and the arguments a1, "two\r\n$5\r\n\x00\xff", "3".
var dialect = []struct{ name, text string }{
	{"nothing", ""},
	{"nil", "return nil"},
	{"true", "return true"},
	{"false", "return false"},
	{"whole number", "return 1700000000000"},
	{"fraction", "return {3.99, -3.99}"},
	{"number as text", "return {tostring(1700000000000), 1700000000000 .. '', 0.5 .. '', tostring(-7)}"},
	{"string", "return 'x'"},
	{"empty string", "return ''"},
	{"bytes", "return ARGV[2]"},
	{"list", "return {1, 'x', {true, false, {}}, 4}"},
	{"list with a hole", "return {1, nil, 3}"},
	{"only the first result", "return 1, 2"},
	{"status", "return {ok = 'fine'}"},
	{"error", "return {err = 'MINE it is'}"},
	{"status reply", "return redis.status_reply('fine')"},
	{"error reply", "return redis.error_reply('MINE it is')"},
	{"error reply of one word", "return redis.error_reply('oops')"},
	{"in a list", "return {redis.status_reply('fine'), redis.error_reply('MINE it is')}"},
	{"counts", "return {#KEYS, #ARGV, KEYS[3], ARGV[3] + 1, tostring(KEYS[4])}"},

	{"call's status", "local r = redis.call('SET', KEYS[1], 'v') return {type(r), r.ok, r}"},
	{"call's string", "redis.call('SET', KEYS[1], ARGV[2]) return {redis.call('GET', KEYS[1]), #redis.call('GET', KEYS[1])}"},
	{"call's null", "local r = redis.call('GET', 'none') return {type(r), tostring(r), r}"},
	{"call's number", "local r = redis.call('INCRBY', KEYS[1], 41) return {type(r), r + 1}"},
	{"call's list", "redis.call('RPUSH', KEYS[1], 'a', ARGV[2], '') return redis.call('LRANGE', KEYS[1], 0, -1)"},
	{"call's list with nulls", "redis.call('HSET', KEYS[1], 'b', 2) local r = redis.call('HMGET', KEYS[1], 'a', 'b', 'c') return {#r, tostring(r[1]), r[2], r[3]}"},
	{"call's list unpacked", "redis.call('HSET', KEYS[1], 'b', 2) local a, b, c, d = unpack(redis.call('HMGET', KEYS[1], 'a', 'b', 'c')) return {tostring(a), b, tostring(c), tostring(d)}"},
	{"call's empty list", "return #redis.call('LRANGE', KEYS[1], 0, -1)"},
	{"call's nested lists", "redis.call('XADD', KEYS[1], '5-1', 'k', 'v') redis.call('XADD', KEYS[1], '5-2', 'k', ARGV[2]) return redis.call('XREVRANGE', KEYS[1], '+', '-')"},
	{"call's score", "redis.call('ZADD', KEYS[1], 1.5, 'm') return redis.call('ZSCORE', KEYS[1], 'm')"},
	{"call in lower case", "return redis.call('set', KEYS[1], 1)"},
	{"numbers as arguments", "redis.call('RPUSH', KEYS[1], 1, 1.5, 1700000000000, -2, 2^40) return redis.call('LRANGE', KEYS[1], 0, -1)"},
	{"expiry", "redis.call('SET', KEYS[1], 1, 'PX', 100000) return redis.call('PTTL', KEYS[1]) > 90000"},
	{"delete", "redis.call('MSET', KEYS[1], 1, KEYS[2], 2) return redis.call('DEL', unpack(KEYS))"},
	{"a thousand calls", "for i = 1, 1000 do redis.call('INCR', KEYS[1]) end return redis.call('GET', KEYS[1])"},

	{"call fails", "redis.call('SET', KEYS[1], 1) redis.call('LPUSH', KEYS[1], 1) redis.call('SET', KEYS[1], 2)"},
	{"pcall fails", "redis.call('SET', KEYS[1], 1) local r = redis.pcall('LPUSH', KEYS[1], 1) return {type(r), r.err}"},
	{"pcall's error returned", "redis.call('SET', KEYS[1], 1) return redis.pcall('LPUSH', KEYS[1], 1)"},
	{"a failing call is caught", "redis.call('SET', KEYS[1], 1) local ok = pcall(redis.call, 'LPUSH', KEYS[1], 1) return tostring(ok)"},
	{"unknown command", "redis.call('NOSUCH')"},
	{"call of nothing", "redis.call()"},
	{"call of a table", "redis.call('GET', {})"},
	{"call of nil", "redis.call('GET', nil)"},
	{"call of true", "redis.call('GET', true)"},
	{"too few arguments", "redis.call('GET')"},
	{"script in a script", "redis.call('EVAL', 'return 1', 0)"},
	{"script by its name in a script", "redis.call('EVALSHA', 'e0e1f9fabfc9d4800c877a703b823ac0578ff8db', 0)"},
	{"transaction in a script", "redis.call('MULTI')"},
	{"subscription in a script", "redis.call('SUBSCRIBE', 'c')"},
	{"error raised", "error('boom')"},
	{"error raised as a table", "error({err = 'MINE it is'})"},
	{"error caught", "local ok, e = pcall(error, {1}) return {tostring(ok), e}"},
	{"index of nil", "local x = nil return x.y"},
	{"endless recursion", "local function f() return 1 + f() end return f()"},
	{"too much to unpack", "return {unpack(ARGV, 1, 100000000)}"},
	{"what comes after them", "return redis.call('SET', KEYS[1], 'v')"},

	{"numbers", "return {tonumber('12') + 1, tonumber('0x10'), tostring(tonumber('x')), math.floor(7 / 2), math.max(1, 9, 3), 7 % 4, string.format('%.0f', 2^53)}"},
	{"strings", "return {string.match('17-4', '(%d+)-(%d+)'), ('x'):rep(3), string.sub('abc', 2), ('a b'):gsub(' ', '_'), ('%d'):format(3), ('x'):upper(), #'abc'}"},
	{"captures", "local a, b = string.match('17-4\\n+', '^(%d+)-(%d+)\\n%+') return {a, b}"},
	{"tables", "local t = {3, 1, 2} table.sort(t) table.insert(t, 4) return {table.concat(t, ','), select('#', 1, 2, 3), next({}) == nil}"},
	{"iteration", "local s = '' for i, v in ipairs({'a', 'b'}) do s = s .. i .. v end for k, v in pairs({x = 1}) do s = s .. k .. v end return s"},
	{"metatables of its own", "local t = setmetatable({}, {__index = function(_, k) return k .. '!' end}) return {t.x, type(getmetatable(t))}"},
	{"closures see the globals", "local function f() return KEYS[1] .. ARGV[1] end return f()"},
	{"JSON", `local v = cjson.decode('{"a":[1,"x",true]}') return {v.a[1], v.a[2], tostring(v.a[3]), cjson.encode({1, 'x', {y = 2}})}`},
	{"digest", "return redis.sha1hex('')"},
	{"log", "redis.log(redis.LOG_DEBUG, 'x') return 1"},
	{"replication", "return redis.replicate_commands()"},
	{"unknown global variable", "return nosuch"},
	{"global variable set", "x = 1 return x"},
	{"global function set", "function f() end return 1"},
	{"library changed", "string.x = 1 return 1"},
	{"library function replaced", "string.sub = string.rep return 1"},
	{"redis changed", "redis.call = nil return 1"},
}

// Scripts mean the same here as on a real Redis: each answers alike, byte for byte, but for what errors say after their first word.
func TestScriptsAnswerAsRedisDoes(t *testing.T) {
	t.Parallel()
	ours, redis := dial(t, testenv.MiniRedis(t).URL()), dial(t, testenv.Redis(t).URL())
	for _, s := range dialect {
		run := func(c client) string {
			c.do("FLUSHALL")
			sha := c.bulk("SCRIPT", "LOAD", s.text)
			reply := c.do("EVALSHA", sha, "3", "k1", "k2", "k3", "a1", "two\r\n$5\r\n\x00\xff", "3")
			if strings.HasPrefix(reply, "-") {
				reply, _, _ = strings.Cut(strings.Replace(reply, "-This ", "-ERR This ", 1), " ") // which is what miniredis says
			}
			return reply + "\n" + c.do("GET", "k1")
		}
		if d := cmp.Diff(run(redis), run(ours)); d != "" {
			t.Errorf("%s: answer, and what is stored in the end (-Redis +ours):\n%s", s.name, d)
		}
	}
}

func TestScriptsLeaveNothingBehind(t *testing.T) {
	t.Parallel()
	c := dial(t, testenv.MiniRedis(t).URL())
	probe := c.bulk("SCRIPT", "LOAD", `
		redis.call('SET', 'in', 'database 0')
		return {#KEYS, #ARGV, string.sub('abc', 2), ('abc'):sub(2), math.floor(1.5), type(table.sort), tostring(pcall(function() return left end)), tostring(string.left), tostring(math[1]), type(redis.call), type(redis.call('GET', 'none'))}`)
	want := c.do("EVALSHA", probe, "0")
	for _, text := range []string{
		"left = 1",
		"KEYS[1], ARGV[1] = 1, 1",
		"KEYS, ARGV = {1}, {1}",
		"string.sub = nil",
		"string.left = 1",
		"rawset(string, 'left', 1)",
		"table.insert(math, 'left')",
		"_G.left = 1",
		"getfenv(0).left = 1",
		"setfenv(0, {})",
		"loadstring('left = 1')()",
		"setmetatable(string, {__index = {left = 1}})",
		"getmetatable(string).__index.left = 1",
		"getmetatable('').__index.sub = nil",
		"(''):sub().__index.sub = nil",
		"local lib = ('').__index lib.sub = nil",
		"for _, lib in pairs({string, math, table, redis}) do for name in pairs(lib) do lib[name] = nil end end",
		"redis.call('SELECT', 1)",
		"redis.call('HELLO', 3)",
		"redis.pcall('SELECT', 1) redis.pcall('hello', 3)",
		"redis.call('QUIT')",
		"redis.call('BLPOP', 'none', 0)",
		"redis.call('XREAD', 'block', 0, 'STREAMS', 'none', '$')",
		"redis.call('WATCH', 'in')",
	} {
		reply := c.do("EVALSHA", c.bulk("SCRIPT", "LOAD", text), "0")
		if d := cmp.Diff(want, c.do("EVALSHA", probe, "0")); d != "" {
			t.Errorf("after %q, which answered %q, a script sees (-before +after):\n%s", text, reply, d)
		}
		if got := c.do("GET", "in"); got != proto.String("database 0") {
			t.Errorf("after %q a script wrote to another database: %q", text, got)
		}
		c.do("DEL", "in")
	}
}

func TestScriptsAreAtomic(t *testing.T) {
	t.Parallel()
	server := testenv.MiniRedis(t)
	const rounds = 300
	// Each actor adds 2 to both keys in every round, however it does that, and complains if it ever sees them differ.
	script := `
		local a, b = redis.call('GET', KEYS[1]) or 0, redis.call('GET', KEYS[2]) or 0
		if a ~= b then return redis.error_reply('TORN ' .. a .. ' and ' .. b) end
		redis.call('SET', KEYS[1], a + 1)
		for i = 1, 50 do redis.call('GET', KEYS[2]) end
		if redis.call('GET', KEYS[1]) ~= tostring(a + 1) then return redis.error_reply('TORN in the middle') end
		redis.call('SET', KEYS[2], b + 2)
		redis.call('INCR', KEYS[1])
		return 'ok'`
	byScript := func(c client) {
		sha := c.bulk("SCRIPT", "LOAD", script)
		for range rounds {
			if got := c.do("EVALSHA", sha, "2", "a", "b"); got != proto.String("ok") {
				c.t.Errorf("a script answered %q", got)
			}
		}
	}
	inTransaction := func(c client) {
		sha := c.bulk("SCRIPT", "LOAD", script)
		for i := range rounds {
			c.do("MULTI")
			if i%2 == 0 {
				c.do("EVALSHA", sha, "2", "a", "b")
			} else {
				c.do("INCRBY", "a", "2")
				c.do("INCRBY", "b", "2")
			}
			if got := c.do("EXEC"); strings.Contains(got, "-") {
				c.t.Errorf("a transaction answered %q", got)
			}
		}
	}
	byCommand := func(c client) {
		for range rounds {
			got, err := proto.ReadStrings(c.do("MGET", "a", "b"))
			if err != nil || got[0] != got[1] {
				c.t.Errorf("MGET sees %q, %v", got, err)
				return
			}
			c.do("INCRBY", "alone", "2")
		}
	}
	byScriptAlone := func(c client) {
		sha := c.bulk("SCRIPT", "LOAD", `
			local was = redis.call('GET', KEYS[1]) or 0
			for i = 1, 50 do redis.call('GET', KEYS[1]) end
			return redis.call('SET', KEYS[1], was + 2)`)
		for range rounds {
			c.do("EVALSHA", sha, "1", "alone")
		}
	}
	actors := []func(client){byScript, byScript, inTransaction, byCommand, byCommand, byScriptAlone}
	var running sync.WaitGroup
	for _, act := range actors {
		c := dial(t, server.URL())
		running.Go(func() { act(c) })
	}
	running.Wait()
	c := dial(t, server.URL())
	got, err := proto.ReadStrings(c.do("MGET", "a", "b", "alone"))
	sum := strconv.Itoa(3 * 2 * rounds)
	if d := cmp.Diff([]string{sum, sum, sum}, got); d != "" || err != nil {
		t.Errorf("both keys and the one of commands alone in the end (-want +got), %v:\n%s", err, d)
	}
}

func TestScriptsNeedThePassword(t *testing.T) {
	t.Parallel()
	server := testenv.MiniRedis(t)
	known := dial(t, server.URL()).bulk("SCRIPT", "LOAD", "return 1")
	stranger := connect(t, server.URL())
	for _, args := range [][]string{
		{"EVALSHA", known, "0"}, {"EVAL", "return 1", "0"}, {"SCRIPT", "LOAD", "return 2"}, {"SCRIPT", "FLUSH"}, {"EVALSHA", known, "0"},
	} {
		if got := stranger.do(args...); !strings.HasPrefix(got, "-NOAUTH") {
			t.Errorf("%q without a password: %q", args, got)
		}
	}
	stranger.login()
	if got := stranger.do("EVALSHA", known, "0"); got != proto.Int(1) {
		t.Errorf("with the password: %q", got)
	}
}

func TestScriptsAreKnownByName(t *testing.T) {
	t.Parallel()
	c := dial(t, testenv.MiniRedis(t).URL())
	const text = "return {KEYS[1] or 'none', ARGV[1] or 'none'}"
	const sha = "0c5b8afc2ec7ca4a7ee5cfb5ad0d4d3ce6a8b8c1"
	want := func(what, want string, args ...string) {
		t.Helper()
		if got := c.do(args...); !strings.HasPrefix(got, want) {
			t.Errorf("%s: %q, want %q", what, got, want)
		}
	}
	want("never loaded", "-NOSCRIPT", "EVALSHA", sha, "0")
	known := c.bulk("SCRIPT", "LOAD", text)
	want("loaded", proto.Strings("k", "a"), "EVALSHA", known, "1", "k", "a")
	want("flushed", proto.Inline("OK"), "SCRIPT", "FLUSH")
	want("after the flush", "-NOSCRIPT", "EVALSHA", known, "0")
	want("sent whole", proto.Strings("none", "a"), "EVAL", text, "0", "a")
	want("after it was sent whole", proto.Strings("none", "a"), "EVALSHA", known, "0", "a")
	want("no script at all", "-ERR", "SCRIPT", "LOAD", "return (")
	want("too few keys", "-ERR", "EVALSHA", known, "2", "k")
	want("fewer than no keys", "-ERR", "EVALSHA", known, "-1", "k")
	want("no number of keys", "-ERR", "EVALSHA", known, "x")
	want("no arguments", "-ERR", "EVALSHA", known)
}

// Where a connection is not a plain one, its scripts are left to miniredis.
func TestScriptsOnConnectionsInAnotherState(t *testing.T) {
	t.Parallel()
	server := testenv.MiniRedis(t)
	c, other := dial(t, server.URL()), dial(t, server.URL())
	set := c.bulk("SCRIPT", "LOAD", "return redis.call('SET', KEYS[1], ARGV[1])")
	run := func(value string) string { return c.do("EVALSHA", set, "1", "k", value) }
	want := func(what, want, got string) {
		t.Helper()
		if got != want {
			t.Errorf("%s: %q, want %q", what, got, want)
		}
	}
	want("plain", proto.Inline("OK"), run("1"))
	c.do("MULTI")
	want("in a transaction", proto.Inline("QUEUED"), run("2"))
	want("seen before EXEC", proto.String("1"), other.do("GET", "k"))
	want("EXEC", proto.Array(proto.Inline("OK")), c.do("EXEC"))
	want("seen after EXEC", proto.String("2"), other.do("GET", "k"))
	nested := c.bulk("SCRIPT", "LOAD", "return redis.pcall('EVALSHA', ARGV[1], 0).err and 'refused'")
	want("a script in a script", proto.String("refused"), c.do("EVALSHA", nested, "0", set))

	c = dial(t, server.URL())
	c.do("SELECT", "1")
	want("in database 1", proto.Inline("OK"), run("3"))
	want("seen in database 0", proto.String("2"), other.do("GET", "k"))
	want("seen in database 1", proto.String("3"), c.do("GET", "k"))

	c = dial(t, server.URL())
	c.do("HELLO", "3")
	null := c.bulk("SCRIPT", "LOAD", "return false")
	want("null on RESP 3", "_\r\n", c.do("EVALSHA", null, "0"))
}

func TestKeysExpire(t *testing.T) {
	t.Parallel()
	c := dial(t, testenv.MiniRedis(t).URL())
	c.do("SET", "short", "1", "PX", "300")
	c.do("SET", "long", "1", "PX", "3600000")
	for c.do("GET", "short") != proto.Nil { // the test's own time limit ends it
	}
	if got := c.do("GET", "long"); got != proto.String("1") {
		t.Errorf("a key that lives for an hour: %q", got)
	}
}
