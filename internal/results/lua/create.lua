-- Writes a record where there is none. An accepting one that is accepted again gets a new `since`, later than the old one.
-- KEYS: 1 record, 2 body
-- ARGV: 1 state, 2 job (JSON), 3 when the keys expire (ms), 4 body ('' = none), then more fields and their values
-- Returns {state that holds now, its since}
local s, a = unpack(redis.call('HMGET', KEYS[1], 's', 'a'))
if s then
	a = num(a)
	if s == 'accepting' and ARGV[1] == 'accepting' then
		a = math.max(a + 1, now)
		redis.call('HSET', KEYS[1], 'a', a)
	end
	return {s, a}
end
redis.call('HSET', KEYS[1], 's', ARGV[1], 'j', ARGV[2], 'a', now, 'v', now, unpack(ARGV, 5))
redis.call('PEXPIREAT', KEYS[1], ARGV[3])
if ARGV[4] ~= '' then redis.call('SET', KEYS[2], ARGV[4], 'PXAT', ARGV[3]) end
return {ARGV[1], now}
