-- Reads a page of a tenant's list, newest first by (created, id).
-- KEYS: 1 list
-- ARGV: 1 how many, 2 id to begin after ('' = from the newest), 3 when that was created (ms), '' if the list must know it
-- Returns id and created of each, alternating, or nil if the list does not know the id
local start = 0
if ARGV[2] ~= '' then
	local rank = redis.call('ZREVRANK', KEYS[1], ARGV[2])
	if rank then
		start = rank + 1
	elseif ARGV[3] == '' then
		return false
	else -- it was removed while the caller went through the list
		start = redis.call('ZCOUNT', KEYS[1], '(' .. ARGV[3], '+inf')
		for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], ARGV[3], ARGV[3])) do
			if id > ARGV[2] then start = start + 1 end
		end
	end
end
return redis.call('ZREVRANGE', KEYS[1], start, start + ARGV[1] - 1, 'WITHSCORES')
