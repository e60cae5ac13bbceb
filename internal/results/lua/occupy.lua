-- Counts calls that run, unless a limit would be passed by them. A call that is counted already only has its lease renewed, and no limit is asked.
-- KEYS: 1 calls by the ends of their leases, 2 what they are expected to need
-- ARGV: 1 lease (ms), 2 most calls, 3 most tokens (0 = no limit), then a call's id and tokens, for each call
-- Returns {'in', calls that run, their tokens}, {'full', 'calls' or 'tokens', what is in use of it}
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local calls, tokens, lease = KEYS[1], KEYS[2], tonumber(ARGV[1])
local gone = redis.call('ZRANGEBYSCORE', calls, '-inf', now, 'LIMIT', 0, 1000)
local sum = tonumber(redis.call('HGET', tokens, '') or 0)
for _, id in ipairs(gone) do -- the process that held them is dead
	sum = math.max(0, sum - tonumber(redis.call('HGET', tokens, id) or 0))
	redis.call('HDEL', tokens, id)
	redis.call('ZREM', calls, id)
end
if #gone > 0 then redis.call('HSET', tokens, '', string.format('%.0f', sum)) end
local n = redis.call('ZCARD', calls)
if n == 0 then
	redis.call('DEL', tokens)
	sum = 0
end
for i = 4, #ARGV, 2 do
	local id, need = ARGV[i], tonumber(ARGV[i + 1])
	if not redis.call('ZSCORE', calls, id) then
		if tonumber(ARGV[2]) > 0 and n + 1 > tonumber(ARGV[2]) then return {'full', 'calls', n} end
		if tonumber(ARGV[3]) > 0 and sum + need > tonumber(ARGV[3]) then return {'full', 'tokens', sum} end
		n, sum = n + 1, sum + need
		redis.call('HSET', tokens, id, string.format('%.0f', need), '', string.format('%.0f', sum))
	end
	redis.call('ZADD', calls, string.format('%.0f', now + lease), id)
end
local ttl = math.max(2 * lease, redis.call('PTTL', calls))
redis.call('PEXPIRE', calls, ttl)
redis.call('PEXPIRE', tokens, ttl)
return {'in', n, sum}
