-- Stands before every script that decides about a job. Times are unix milliseconds by the clock of Redis.
--
-- A job's record is a hash:
--   j job (JSON)            s state                a accepting since        v version
--   k token of the attempt  w its worker           l its lease's end        q its delivery's ack subject
--   nb not before           c cancel asked (1)     x token whose lease was ended for a dead worker
--   n last event's number   cn the claim's number  rs the claim appended a reset (1), or left that to its worker (2)
--   d deaths                ch charged attempts    un uncharged attempts    at log of attempts
--   f first token           o outcome (JSON)       h the answer is kept (1)
--   fr (1): written when the job was submitted, and there ever since: no attempt can have been forgotten
-- The log of attempts has a line "+<started> <worker>" for each beginning and "-<ended> <outcome>" for each end. An attempt is open while the state is running.
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local ended = {completed = true, failed = true, cancelled = true, expired = true}

local function num(v) return tonumber(v or 0) or 0 end

-- The next version: a time where that is more, so that it rises across a wiped store too.
local function rise(v) return math.max(num(v) + 1, now) end

-- The last entry of a stream: token, number and kind, or nil if the stream is not there.
local function last(stream)
	local e = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1]
	if not e then return nil end
	local token, n = string.match(e[1], '(%d+)-(%d+)')
	return num(token), num(n), e[2][1]
end
