package embedded

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"crypto/sha1"
	"encoding/hex"
	"errors"
	"strconv"
	"strings"
	"sync"

	"github.com/alicebob/miniredis/v2"
	"github.com/alicebob/miniredis/v2/server"
	lua "github.com/yuin/gopher-lua"
	"github.com/yuin/gopher-lua/parse"
)

// scripts runs Lua scripts in place of miniredis, which makes a whole Lua state for each run: 0.25 ms and 177 KB for `return 1`, all under its one lock. Every step of a
// job is a script, so that would bound everything. Here one state lives on, and a run costs about what its commands cost.
//
// A hook before each command takes EVALSHA of scripts that were loaded before. The rest stays with miniredis: a script's first EVAL, and all scripts on connections that
// are in a transaction, or were in another database or subscribed.
//
// A script runs under the lock that miniredis takes for each command and each transaction, so it is atomic towards all of them. The commands of a script need a connection
// that takes no lock, because miniredis believes it to be a script's: one script that miniredis runs at the start gives us the inside of such a connection.
//
// Scripts have the language, string, table, math, cjson, and of redis: call, pcall, error_reply, status_reply, sha1hex, log and replicate_commands. They leave nothing
// behind for the next one but in the store: global variables are refused, libraries are read-only, and commands that would change the connection are refused too.
type scripts struct {
	lock   sync.Locker // of miniredis
	server *server.Server
	protos sync.Map // *lua.FunctionProto of each script by its SHA-1
	peers  sync.Map // trust by *server.Peer: whether scripts of this connection are run here

	// Whoever holds lock owns these.
	state  *lua.LState
	global *lua.LTable  // metatable of each run's global variables
	caller *server.Peer // runs the scripts' commands, and writes to reply
	reply  bytes.Buffer
}

// startScripts takes the scripts of a store that has just been started, and whose password is given.
func startScripts(mini *miniredis.Miniredis, password string) error {
	s := &scripts{lock: mini, server: mini.Server()}
	inside, err := s.inside(password)
	if err != nil {
		return err
	}
	s.caller = server.NewPeer(bufio.NewWriter(&s.reply))
	s.caller.Ctx = inside
	s.open()
	s.server.SetPreHook(s.hook)
	return nil
}

// inside returns what miniredis keeps about a connection by which a script calls commands. It stays good: no command that scripts may call changes it.
func (s *scripts) inside(password string) (inside any, err error) {
	mark := rand.Text()
	s.server.SetPreHook(func(c *server.Peer, cmd string, args ...string) bool {
		if cmd == "ECHO" && len(args) == 1 && args[0] == mark {
			inside = c.Ctx
		}
		return false
	})
	var reply bytes.Buffer
	c := server.NewPeer(bufio.NewWriter(&reply))
	s.server.Dispatch(c, []string{"AUTH", password})
	s.server.Dispatch(c, []string{"EVAL", "redis.call('ECHO', ARGV[1])", "0", mark})
	if inside == nil {
		c.Flush()
		return nil, errors.New("running the first script: " + reply.String())
	}
	return inside, nil
}

// hook sees each command before miniredis does, and returns true if it has answered.
func (s *scripts) hook(c *server.Peer, cmd string, args ...string) bool {
	if c == s.caller {
		return false
	}
	switch cmd {
	case "EVALSHA":
		return len(args) >= 2 && s.run(c, args[0], args[1], args[2:])
	case "EVAL":
		if len(args) >= 2 && s.trusts(c) {
			s.load(args[0])
		}
	case "SCRIPT":
		if len(args) == 2 && strings.EqualFold(args[0], "LOAD") && s.trusts(c) {
			s.load(args[1])
		} else if len(args) >= 1 && strings.EqualFold(args[0], "FLUSH") && s.trusts(c) {
			s.protos.Clear()
		}
	case "MULTI": // until its end scripts have to wait for it
		if s.trusts(c) {
			s.peers.Store(c, waiting)
		}
	case "EXEC", "DISCARD":
		s.peers.CompareAndSwap(c, waiting, trusted)
	case "SELECT", "SUBSCRIBE", "PSUBSCRIBE": // from now on its scripts mean other keys, or are refused
		s.judge(c, untrusted)
	}
	return false
}

// trust in a connection.
type trust int

const (
	trusted trust = iota
	waiting       // in a transaction
	untrusted
)

// trusts tells whether a connection's scripts may be run here. Only miniredis knows whether a connection is authenticated and not a script's own: one that is both gets an
// answer to what is asked here.
func (s *scripts) trusts(c *server.Peer) bool {
	if known, ok := s.peers.Load(c); ok {
		return known == trusted
	}
	var reply bytes.Buffer
	asking := server.NewPeer(bufio.NewWriter(&reply))
	asking.Ctx = c.Ctx
	s.server.Dispatch(asking, []string{"SCRIPT", "EXISTS", ""})
	asking.Flush()
	if reply.String() != "*1\r\n:0\r\n" {
		return false
	}
	s.judge(c, trusted)
	return true
}

// judge remembers until a connection ends whether its scripts are run here.
func (s *scripts) judge(c *server.Peer, t trust) {
	if _, known := s.peers.Swap(c, t); !known {
		c.OnDisconnect(func() { s.peers.Delete(c) })
	}
}

// load compiles a script. Miniredis is given it as well, and complains if it is wrong.
func (s *scripts) load(text string) {
	chunk, err := parse.Parse(strings.NewReader(text), "user_script")
	if err != nil {
		return
	}
	if proto, err := lua.Compile(chunk, "user_script"); err == nil {
		s.protos.Store(sha1Hex(text), proto)
	}
}

// run runs a script and answers its caller, unless that is left to miniredis: then it returns false.
func (s *scripts) run(c *server.Peer, sha, keys string, args []string) bool {
	proto, known := s.protos.Load(sha)
	n, err := strconv.Atoi(keys)
	if !known || err != nil || n < 0 || n > len(args) || !s.trusts(c) {
		return false
	}
	v, err := s.eval(proto.(*lua.FunctionProto), args[:n], args[n:])
	if err != nil {
		c.WriteError(err.Error() + " script: " + sha)
		return true
	}
	answer(c, v)
	return true
}

// eval runs a script and returns its first result. Its global variables are its own.
func (s *scripts) eval(proto *lua.FunctionProto, keys, argv []string) (lua.LValue, error) {
	s.lock.Lock()
	defer s.lock.Unlock()
	env := s.state.CreateTable(0, 2)
	env.RawSetString("KEYS", s.list(keys))
	env.RawSetString("ARGV", s.list(argv))
	env.Metatable = s.global
	script := s.state.NewFunctionFromProto(proto)
	script.Env = env
	s.state.Push(script)
	if err := s.state.PCall(0, 1, nil); err != nil {
		raised := (*lua.ApiError)(nil)
		if !errors.As(err, &raised) {
			return nil, err
		}
		reply, ok := raised.Object.(*lua.LTable)
		if !ok {
			return nil, errors.New("ERR " + raised.Object.String())
		}
		if text := lua.LVAsString(reply.RawGetString("err")); text != "" { // of a command, as redis.call raised it
			return nil, errors.New(text)
		}
		return nil, errors.New("ERR unknown error")
	}
	v := s.state.Get(-1)
	s.state.Pop(1)
	return v, nil
}

func (s *scripts) list(of []string) *lua.LTable {
	t := s.state.CreateTable(len(of), 0)
	for _, v := range of {
		t.Append(lua.LString(v))
	}
	return t
}

// sha1Hex is the name that Redis gives to a script.
func sha1Hex(text string) string {
	sum := sha1.Sum([]byte(text))
	return hex.EncodeToString(sum[:])
}
