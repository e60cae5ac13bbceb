-- Extends an attempt's lease. A record without a token has been rebuilt meanwhile: the attempt is written into it again.
-- KEYS: 1 record
-- ARGV: 1 token, 2 lease (ms), 3 worker, 4 ack subject, 5 number of the last event, 6 when the attempt started (ms)
-- Returns {'ok' | 'written' | 'fenced' | 'gone', 1 if cancelling was asked}
local s, k, c, n, at, v = unpack(redis.call('HMGET', KEYS[1], 's', 'k', 'c', 'n', 'at', 'v'))
if not s then return {'gone', 0} end
if ended[s] then return {'fenced', 0} end
if num(k) == 0 then
	redis.call('HSET', KEYS[1], 's', 'running', 'k', ARGV[1], 'w', ARGV[3], 'l', now + ARGV[2], 'q', ARGV[4],
		'n', math.max(num(n), num(ARGV[5])), 'at', (at or '') .. '+' .. ARGV[6] .. ' ' .. ARGV[3] .. '\n', 'v', rise(v))
	return {'written', num(c)}
end
-- A lease that merely ran out is extended: nobody has claimed the job since. One that was ended has left the state running.
if k ~= ARGV[1] or s ~= 'running' then return {'fenced', 0} end
redis.call('HSET', KEYS[1], 'l', now + ARGV[2])
return {'ok', num(c)}
