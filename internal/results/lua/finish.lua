-- Writes a job's outcome, its answer, and its last events. A job that has ended is left alone.
-- KEYS: 1 record, 2 events, 3 body, 4 answer
-- ARGV: 1 state, 2 outcome (JSON), 3 first token (ms, 0 = none), 4 finished (ms), 5 token, 6 number of the last event, 7 '1' if the job keeps events,
--       8 data of `done`, 9 '1' if a `reset` goes before it, 10 its data, 11 '1' if the answer is kept, 12 the answer, 13 when the keys expire (ms),
--       14 bound of the stream
-- Returns 'ok', 'ended' or 'gone'
local record, events = KEYS[1], KEYS[2]
local s, k, n, at, v, fr = unpack(redis.call('HMGET', record, 's', 'k', 'n', 'at', 'v', 'fr'))
if not s then return 'gone' end
if ended[s] then return 'ended' end
n = num(n)
if ARGV[7] == '1' then
	local t, number = last(events)
	n = math.max(n, num(number)) + 1
	if ARGV[9] == '1' then n = n + 1 end
	if num(ARGV[6]) > 0 then -- events may have come after the outcome was written: `done` stands last in any case
		n = math.max(n, num(ARGV[6]))
	elseif not t and not (fr and num(k) == 0) then
		n = math.max(n, now)
	end
	local token = math.max(num(t), num(k), num(ARGV[5]))
	if ARGV[9] == '1' then redis.call('XADD', events, token .. '-' .. (n - 1), 'reset', ARGV[10]) end
	redis.call('XADD', events, 'MAXLEN', '~', ARGV[14], token .. '-' .. n, 'done', ARGV[8])
	if not t then redis.call('PEXPIREAT', events, ARGV[13]) end
end
if s == 'running' then at = at .. '-' .. ARGV[4] .. ' ' .. ARGV[1] .. '\n' end
redis.call('HSET', record, 's', ARGV[1], 'o', ARGV[2], 'l', 0, 'n', n, 'at', at or '', 'v', rise(v))
if ARGV[3] ~= '0' then redis.call('HSET', record, 'f', ARGV[3]) end
if ARGV[11] == '1' then
	redis.call('SET', KEYS[4], ARGV[12], 'PXAT', ARGV[13])
	redis.call('HSET', record, 'h', 1)
end
redis.call('DEL', KEYS[3])
redis.call('PEXPIREAT', record, ARGV[13])
return 'ok'
