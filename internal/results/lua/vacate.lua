-- Drops a call from those that run.
-- KEYS: 1 calls by the ends of their leases, 2 what they are expected to need
-- ARGV: 1 the call's id
if redis.call('ZREM', KEYS[1], ARGV[1]) == 1 then
	local n = redis.call('HMGET', KEYS[2], '', ARGV[1])
	redis.call('HDEL', KEYS[2], ARGV[1])
	redis.call('HSET', KEYS[2], '', string.format('%.0f', math.max(0, tonumber(n[1] or 0) - tonumber(n[2] or 0))))
end
return 0
