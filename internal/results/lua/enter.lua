-- Counts a job in the backlog, unless a limit would be passed by it. A job that is counted already stays as it is, and no limit is asked.
-- KEYS: 1 sums, 2 members of the job's tenant and model
-- ARGV: 1 tenant, 2 model, 3 id, 4 class (its rank), 5 bytes, 6 tokens, 7 time to live of the keys (ms), and where there are limits
--       8-10 most jobs, bytes and tokens of the tenant in the model, 11-13 of the tenant in all, 14-16 of the model; 0 = no limit
-- Returns {'in', jobs of its class before it, their tokens, then jobs and tokens of each class of the model},
--         {'full', which limit (the first is 0), what is in use of it, then jobs and tokens of each class of the model}
--
-- The sums are a hash of numbers: "<tenant>:<model>/j", …/b and …/t are jobs, bytes and tokens; so are those of "<tenant>:" and ":<model>:<class>". The last has also /a and /s, how many jobs
-- and tokens have come in all. A member is its class, bytes and tokens, and what had come in its class before it, itself counted among the jobs.
local sums, members, id, class = KEYS[1], KEYS[2], ARGV[3], tonumber(ARGV[4])
local pair, tenant, model = ARGV[1] .. ':' .. ARGV[2] .. '/', ARGV[1] .. ':/', ':' .. ARGV[2] .. ':'
local own = model .. class .. '/'
local n = redis.call('HMGET', sums, pair .. 'j', pair .. 'b', pair .. 't', tenant .. 'j', tenant .. 'b', tenant .. 't',
	model .. '0/j', model .. '0/b', model .. '0/t', model .. '1/j', model .. '1/b', model .. '1/t', model .. '2/j', model .. '2/b', model .. '2/t',
	own .. 'a', own .. 's')
if not n[1] then redis.call('DEL', members) end -- members without sums are left of a loss
for i = 1, 17 do n[i] = tonumber(n[i] or 0) end
local j, b, t = 7 + 3 * class, 8 + 3 * class, 9 + 3 * class -- of its class
local before, tokensBefore
local v = redis.call('HGET', members, id)
if v then
	before, tokensBefore = string.match(v, '(%d+) (%d+)$')
else
	local bytes, tokens = tonumber(ARGV[5]), tonumber(ARGV[6])
	for i = 8, #ARGV do
		local limit = tonumber(ARGV[i])
		if limit > 0 then
			local used, mine = n[i - 7], 1
			if i > 13 then used = n[i - 7] + n[i - 4] + n[i - 1] end -- of all classes
			if i % 3 == 0 then mine = bytes elseif i % 3 == 1 then mine = tokens end
			if used + mine > limit then return {'full', i - 8, used, n[7], n[9], n[10], n[12], n[13], n[15]} end
		end
	end
	before, tokensBefore = n[16] + 1, n[17]
	n[1], n[4], n[j], n[16] = n[1] + 1, n[4] + 1, n[j] + 1, n[16] + 1
	n[2], n[5], n[b] = n[2] + bytes, n[5] + bytes, n[b] + bytes
	n[3], n[6], n[t], n[17] = n[3] + tokens, n[6] + tokens, n[t] + tokens, n[17] + tokens
	redis.call('HSET', members, id, table.concat({class, ARGV[5], ARGV[6], string.format('%.0f', before), string.format('%.0f', tokensBefore)}, ' '))
	redis.call('HSET', sums, pair .. 'j', n[1], pair .. 'b', n[2], pair .. 't', n[3], tenant .. 'j', n[4], tenant .. 'b', n[5], tenant .. 't', n[6],
		own .. 'j', n[j], own .. 'b', n[b], own .. 't', n[t], own .. 'a', n[16], own .. 's', n[17])
	redis.call('PEXPIRE', members, ARGV[7])
	redis.call('PEXPIRE', sums, ARGV[7])
end
-- Who came and is there no more came before it, as far as jobs end in the order in which they came.
return {'in', before - 1 - (n[16] - n[j]), tokensBefore - (n[17] - n[t]), n[7], n[9], n[10], n[12], n[13], n[15]}
