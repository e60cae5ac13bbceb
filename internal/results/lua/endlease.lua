-- Ends the lease of an attempt whose worker is dead. The token stays: the attempt's outcome still counts if it comes before another's.
-- KEYS: 1 record
-- ARGV: 1 worker, 2 '1' if the death is charged to the job
-- Returns all fields of the record, 'fenced' or 'gone'. A repeat is not counted again.
local s, k, w, x, at, d, ch, un, v = unpack(redis.call('HMGET', KEYS[1], 's', 'k', 'w', 'x', 'at', 'd', 'ch', 'un', 'v'))
if not s then return 'gone' end
if w ~= ARGV[1] then return 'fenced' end
if s == 'running' then
	d, ch, un = num(d), num(ch), num(un)
	if ARGV[2] == '1' then d, ch = d + 1, ch + 1 else un = un + 1 end
	redis.call('HSET', KEYS[1], 's', 'queued', 'l', 0, 'x', k, 'at', (at or '') .. '-' .. now .. ' worker_lost\n', 'd', d, 'ch', ch, 'un', un, 'v', rise(v))
elseif s ~= 'queued' or x ~= k then
	return 'fenced'
end
return redis.call('HGETALL', KEYS[1])
