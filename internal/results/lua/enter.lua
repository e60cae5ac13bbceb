-- Counts a job in the backlog, unless a limit would be passed by it. A job that is counted already stays as it is, and no limit is asked.
-- KEYS: 1 sums, 2 members of the job's tenant and model
-- ARGV: 1 tenant, 2 model, 3 id, 4 class (its rank), 5 bytes, 6 tokens, 7 time to live of the keys (ms),
--       8-10 most jobs, bytes and tokens of the tenant in the model, 11-13 of the tenant in all, 14-16 of the model; 0 = no limit
-- Returns {'in', jobs of its class before it, their tokens, then jobs and tokens of each class of the model},
--         {'full', which limit (the first is 0), what is in use of it, then jobs and tokens of each class of the model}
--
-- The sums are a hash: "<tenant>:<model>" and "<tenant>:" have jobs, bytes and tokens; ":<model>:<class>" has these and how many jobs and tokens have come in all. A
-- member is its class, bytes and tokens, and what had come before it in all, itself counted among the jobs.
local sums, members, id = KEYS[1], KEYS[2], ARGV[3]
local pair, tenant, model = ARGV[1] .. ':' .. ARGV[2], ARGV[1] .. ':', ':' .. ARGV[2] .. ':'
local mine = {1, tonumber(ARGV[5]), tonumber(ARGV[6])}

local function split(v)
	local list = {}
	for n in string.gmatch(v or '', '%d+') do list[#list + 1] = tonumber(n) end
	for i = #list + 1, 5 do list[i] = 0 end
	return list
end
local read = redis.call('HMGET', sums, pair, tenant, model .. 0, model .. 1, model .. 2)
local ofPair, ofTenant, ofClass = split(read[1]), split(read[2]), {split(read[3]), split(read[4]), split(read[5])}
local own = ofClass[ARGV[4] + 1]

local function answer(...)
	local list = {...}
	for _, c in ipairs(ofClass) do
		list[#list + 1] = c[1]
		list[#list + 1] = c[3]
	end
	return list
end
if not read[1] then redis.call('DEL', members) end -- the sums are lost: begin anew
local v = redis.call('HGET', members, id)
if not v then
	for i = 1, 3 do
		local used = {ofPair[i], ofTenant[i], ofClass[1][i] + ofClass[2][i] + ofClass[3][i]}
		for scope = 1, 3 do
			local limit = tonumber(ARGV[4 + 3 * scope + i])
			if limit > 0 and used[scope] + mine[i] > limit then return answer('full', 3 * (scope - 1) + i - 1, used[scope]) end
		end
	end
	for i = 1, 3 do
		for _, sum in ipairs({ofPair, ofTenant, own}) do sum[i] = sum[i] + mine[i] end
	end
	v = string.format('%s %.0f %.0f %.0f %.0f', ARGV[4], mine[2], mine[3], own[4] + 1, own[5])
	own[4], own[5] = own[4] + 1, own[5] + mine[3]
	redis.call('HSET', members, id, v)
	redis.call('HSET', sums, pair, string.format('%.0f %.0f %.0f', ofPair[1], ofPair[2], ofPair[3]),
		tenant, string.format('%.0f %.0f %.0f', ofTenant[1], ofTenant[2], ofTenant[3]),
		model .. ARGV[4], string.format('%.0f %.0f %.0f %.0f %.0f', own[1], own[2], own[3], own[4], own[5]))
	redis.call('PEXPIRE', members, ARGV[7])
	redis.call('PEXPIRE', sums, ARGV[7])
end
local place = split(v)
-- Who came and is there no more came before it, as far as jobs end in the order in which they came.
return answer('in', place[4] - 1 - (own[4] - own[1]), place[5] - (own[5] - own[3]))
