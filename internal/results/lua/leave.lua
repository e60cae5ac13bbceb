-- Drops a job from the backlog: see enter.lua.
-- KEYS: 1 sums, 2 members of the job's tenant and model
-- ARGV: 1 tenant, 2 model, 3 id
-- Returns 1 if it was counted, else 0
local sums, members = KEYS[1], KEYS[2]
local v = redis.call('HGET', members, ARGV[3])
if not v then return 0 end
local function split(v)
	local list = {}
	for n in string.gmatch(v or '', '%d+') do list[#list + 1] = tonumber(n) end
	return list
end
local member = split(v)
local mine = {1, member[2], member[3]}
redis.call('HDEL', members, ARGV[3])
for _, field in ipairs({ARGV[1] .. ':' .. ARGV[2], ARGV[1] .. ':', ':' .. ARGV[2] .. ':' .. member[1]}) do
	local sum = split(redis.call('HGET', sums, field))
	if #sum >= 3 then
		if sum[1] > 1 then
			for i = 1, 3 do sum[i] = string.format('%.0f', math.max(0, sum[i] - mine[i])) end
			for i = 4, #sum do sum[i] = string.format('%.0f', sum[i]) end
			redis.call('HSET', sums, field, table.concat(sum, ' '))
		else -- nobody is left
			redis.call('HDEL', sums, field)
		end
	end
end
return 1
