package embedded

import (
	"slices"
	"strconv"
	"strings"

	luajson "github.com/alicebob/miniredis/v2/gopher-json"
	"github.com/alicebob/miniredis/v2/server"
	lua "github.com/yuin/gopher-lua"
)

// open makes the state, and of its libraries the global variables that scripts see.
func (s *scripts) open() {
	l := lua.NewState(lua.Options{SkipOpenLibs: true})
	s.state = l
	for _, f := range []lua.LGFunction{lua.OpenBase, lua.OpenTable, lua.OpenString, lua.OpenMath} {
		l.Push(l.NewFunction(f))
		l.Call(0, 0)
	}
	l.SetGlobal("redis", l.SetFuncs(l.NewTable(), map[string]lua.LGFunction{
		"call": s.call, "pcall": s.pcall, "error_reply": errorReply, "status_reply": statusReply, "sha1hex": sha1hex,
		"log": ignore, "replicate_commands": ignore,
	}))
	l.Push(l.NewFunction(luajson.Loader))
	l.Call(0, 1)
	l.SetGlobal("cjson", l.Get(-1))
	l.Pop(1)

	refuse := l.NewFunction(func(l *lua.LState) int {
		l.RaiseError("Script attempted to set '%s', which is a global or read-only variable", l.ToString(2))
		return 0
	})
	readOnly := func(t *lua.LTable) *lua.LTable { // the metatable of what shows t, and lets nobody change or replace anything
		return fields(l, "__index", t, "__newindex", refuse, "__metatable", lua.LFalse)
	}
	global := l.NewTable()
	// Without what could reach around readOnly, like rawset, getfenv and load, or do anything to the process.
	for _, name := range []string{
		"assert", "error", "getmetatable", "ipairs", "next", "pairs", "pcall", "rawequal", "rawget", "select", "setmetatable", "tonumber", "tostring", "type",
		"unpack", "xpcall",
	} {
		global.RawSetString(name, l.GetGlobal(name))
	}
	l.GetGlobal("string").(*lua.LTable).RawSetString("__index", lua.LNil) // it led from any string to the library itself
	for _, name := range []string{"table", "string", "math", "redis", "cjson"} {
		shown := l.NewUserData() // and not a table, to which table.insert could add
		shown.Metatable = readOnly(l.GetGlobal(name).(*lua.LTable))
		global.RawSetString(name, shown)
	}
	l.SetMetatable(lua.LString(""), readOnly(l.GetGlobal("string").(*lua.LTable))) // of all strings
	global.Metatable = fields(l, "__index", l.NewFunction(func(l *lua.LState) int {
		l.RaiseError("Script attempted to access nonexistent global variable '%s'", l.ToString(2))
		return 0
	}))
	s.global = readOnly(global)
}

// call is redis.call: an error reply is raised.
func (s *scripts) call(l *lua.LState) int {
	v, failed := s.do(l)
	if failed {
		l.Error(v, 0)
	}
	l.Push(v)
	return 1
}

// pcall is redis.pcall: an error reply is a value.
func (s *scripts) pcall(l *lua.LState) int {
	v, _ := s.do(l)
	l.Push(v)
	return 1
}

// do runs the command that a script calls.
func (s *scripts) do(l *lua.LState) (v lua.LValue, failed bool) {
	args := make([]string, l.GetTop()) // not reused: miniredis may keep it
	for i := range args {
		arg := l.Get(i + 1)
		if !lua.LVCanConvToString(arg) {
			return fields(l, "err", lua.LString("ERR Lua redis lib command arguments must be strings or integers")), true
		}
		args[i] = lua.LVAsString(arg)
	}
	if len(args) == 0 {
		return fields(l, "err", lua.LString("ERR Please specify at least one argument for this redis.call() call")), true
	}
	if refused(args) {
		return fields(l, "err", lua.LString("ERR This Redis command is not allowed from script")), true
	}
	s.reply.Reset()
	s.server.Dispatch(s.caller, args)
	s.caller.Flush()
	text := s.reply.String()
	v, _ = value(l, text)
	return v, text[0] == '-'
}

// refused tells whether scripts may not call a command that miniredis would let them call.
func refused(args []string) bool {
	switch strings.ToUpper(args[0]) {
	case "SELECT", "HELLO": // they would change the connection for all scripts after this one
		return true
	case "BLPOP", "BRPOP", "BRPOPLPUSH", "BLMOVE", "BLMPOP", "BZPOPMIN", "BZPOPMAX", "BZMPOP": // while they wait, the lock is free
		return true
	case "XREAD", "XREADGROUP":
		return slices.ContainsFunc(args, func(arg string) bool { return strings.EqualFold(arg, "BLOCK") })
	}
	return false
}

// value turns the first reply of text into a Lua value, as Redis does, and returns what follows it.
func value(l *lua.LState, text string) (v lua.LValue, rest string) {
	line, rest, _ := strings.Cut(text, "\r\n")
	switch line[0] {
	case '-':
		return fields(l, "err", lua.LString(line[1:])), rest
	case '+':
		return fields(l, "ok", lua.LString(line[1:])), rest
	}
	n, _ := strconv.Atoi(line[1:]) // miniredis writes nothing but numbers here
	switch {
	case line[0] == ':':
		return lua.LNumber(n), rest
	case n < 0:
		return lua.LFalse, rest
	case line[0] == '$':
		return lua.LString(rest[:n]), rest[n+2:]
	}
	t := l.CreateTable(n, 0)
	for range n {
		v, rest = value(l, rest)
		t.Append(v)
	}
	return t, rest
}

// answer writes what a script returned to a client, as Redis does.
func answer(c *server.Peer, v lua.LValue) {
	switch v := v.(type) {
	case lua.LString:
		c.WriteBulk(string(v))
	case lua.LNumber:
		c.WriteInt(int(v))
	case lua.LBool:
		if v {
			c.WriteInt(1)
		} else {
			c.WriteNull()
		}
	case *lua.LTable:
		if text, is := v.RawGetString("err").(lua.LString); is {
			c.WriteError(string(text))
			return
		}
		if text, is := v.RawGetString("ok").(lua.LString); is {
			c.WriteInline(string(text))
			return
		}
		n := 0
		for v.RawGetInt(n+1) != lua.LNil {
			n++
		}
		c.WriteLen(n)
		for i := range n {
			answer(c, v.RawGetInt(i+1))
		}
	default:
		c.WriteNull()
	}
}

func errorReply(l *lua.LState) int {
	text := strings.TrimPrefix(l.CheckString(1), "-")
	if !strings.Contains(text, " ") {
		text = "ERR " + text
	}
	l.Push(fields(l, "err", lua.LString(text)))
	return 1
}

func statusReply(l *lua.LState) int {
	l.Push(fields(l, "ok", lua.LString(l.CheckString(1))))
	return 1
}

func sha1hex(l *lua.LState) int {
	l.Push(lua.LString(sha1Hex(l.CheckString(1))))
	return 1
}

// ignore is what other servers need and this one does not.
func ignore(l *lua.LState) int {
	l.Push(lua.LTrue)
	return 1
}

// fields makes a table of names and values.
func fields(l *lua.LState, namesAndValues ...any) *lua.LTable {
	t := l.CreateTable(0, len(namesAndValues)/2)
	for i := 0; i < len(namesAndValues); i += 2 {
		t.RawSetString(namesAndValues[i].(string), namesAndValues[i+1].(lua.LValue))
	}
	return t
}
