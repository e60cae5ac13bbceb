-- Drops a job from the backlog: see enter.lua.
-- KEYS: 1 sums, 2 members of the job's tenant and model
-- ARGV: 1 tenant, 2 model, 3 id
-- Returns 1 if it was counted, else 0
local sums, members = KEYS[1], KEYS[2]
local v = redis.call('HGET', members, ARGV[3])
if not v then return 0 end
local class, bytes, tokens = string.match(v, '^(%d+) (%d+) (%d+)')
local pair, tenant, own = ARGV[1] .. ':' .. ARGV[2] .. '/', ARGV[1] .. ':/', ':' .. ARGV[2] .. ':' .. class .. '/'
redis.call('HDEL', members, ARGV[3])
local n = redis.call('HMGET', sums, pair .. 'j', pair .. 'b', pair .. 't', tenant .. 'j', tenant .. 'b', tenant .. 't', own .. 'j', own .. 'b', own .. 't')
for i = 1, 9, 3 do
	n[i], n[i + 1], n[i + 2] = tonumber(n[i] or 0) - 1, math.max(0, tonumber(n[i + 1] or 0) - bytes), math.max(0, tonumber(n[i + 2] or 0) - tokens)
end
if n[1] > 0 and n[4] > 0 and n[7] > 0 then
	redis.call('HSET', sums, pair .. 'j', n[1], pair .. 'b', n[2], pair .. 't', n[3], tenant .. 'j', n[4], tenant .. 'b', n[5], tenant .. 't', n[6],
		own .. 'j', n[7], own .. 'b', n[8], own .. 't', n[9])
	return 1
end
for i, sum in pairs({[1] = pair, [4] = tenant, [7] = own}) do
	if n[i] > 0 then
		redis.call('HSET', sums, sum .. 'j', n[i], sum .. 'b', n[i + 1], sum .. 't', n[i + 2])
	else -- nobody is left
		redis.call('HDEL', sums, sum .. 'j', sum .. 'b', sum .. 't', sum .. 'a', sum .. 's')
	end
end
return 1
