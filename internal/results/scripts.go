package results

import (
	_ "embed"

	"github.com/redis/go-redis/v9"
)

var (
	//go:embed lua/prelude.lua
	prelude string
	//go:embed lua/append.lua
	appendLua string
	//go:embed lua/bind.lua
	bindLua string
	//go:embed lua/cancel.lua
	cancelLua string
	//go:embed lua/claim.lua
	claimLua string
	//go:embed lua/create.lua
	createLua string
	//go:embed lua/delete.lua
	deleteLua string
	//go:embed lua/discard.lua
	discardLua string
	//go:embed lua/dismiss.lua
	dismissLua string
	//go:embed lua/endlease.lua
	endLeaseLua string
	//go:embed lua/enter.lua
	enterLua string
	//go:embed lua/events.lua
	eventsLua string
	//go:embed lua/finish.lua
	finishLua string
	//go:embed lua/giveback.lua
	giveBackLua string
	//go:embed lua/leave.lua
	leaveLua string
	//go:embed lua/occupy.lua
	occupyLua string
	//go:embed lua/page.lua
	pageLua string
	//go:embed lua/queued.lua
	queuedLua string
	//go:embed lua/release.lua
	releaseLua string
	//go:embed lua/renew.lua
	renewLua string
	//go:embed lua/vacate.lua
	vacateLua string
)

// Each script is atomic, takes all its keys by KEYS and only from one slot, and writes nothing before it can fail no more.
var (
	appendScript   = newScript(prelude + appendLua)
	bindScript     = newScript(bindLua)
	cancelScript   = newScript(prelude + cancelLua)
	claimScript    = newScript(prelude + claimLua)
	createScript   = newScript(prelude + createLua)
	deleteScript   = newScript(prelude + deleteLua)
	discardScript  = newScript(discardLua)
	dismissScript  = newScript(dismissLua)
	endLeaseScript = newScript(prelude + endLeaseLua)
	enterScript    = newScript(enterLua)
	eventsScript   = newScript(eventsLua)
	finishScript   = newScript(prelude + finishLua)
	giveBackScript = newScript(prelude + giveBackLua)
	leaveScript    = newScript(leaveLua)
	occupyScript   = newScript(occupyLua)
	pageScript     = newScript(pageLua)
	queuedScript   = newScript(queuedLua)
	releaseScript  = newScript(releaseLua)
	renewScript    = newScript(prelude + renewLua)
	vacateScript   = newScript(vacateLua)

	scripts = []*script{
		appendScript, bindScript, cancelScript, claimScript, createScript, deleteScript, discardScript, dismissScript, endLeaseScript, enterScript, eventsScript,
		finishScript, giveBackScript, leaveScript, occupyScript, pageScript, queuedScript, releaseScript, renewScript, vacateScript,
	}
)

// script is a Lua script and its text.
type script struct {
	*redis.Script
	text string
}

func newScript(text string) *script { return &script{redis.NewScript(text), text} }
