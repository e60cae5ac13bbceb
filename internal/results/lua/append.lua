-- Adds an attempt's events that are not there yet.
-- KEYS: 1 record, 2 events
-- ARGV: 1 token, 2 '1' if a missing stream is made, 3 when the keys expire (ms), 4 bound of the stream, then number, kind and data of each event
-- Returns 'ok', 'fenced' or 'gone'
local record, events = KEYS[1], KEYS[2]
local s, k, f, v = unpack(redis.call('HMGET', record, 's', 'k', 'f', 'v'))
local token = num(ARGV[1])
if ended[s] or num(k) > token then return 'fenced' end
local t, n = last(events)
if not t and ARGV[2] ~= '1' then return 'gone' end
if num(t) > token then return 'fenced' end
local first = false
for i = 5, #ARGV, 3 do
	if t ~= token or num(ARGV[i]) > n then -- else it is a repeat
		redis.call('XADD', events, 'MAXLEN', '~', ARGV[4], ARGV[1] .. '-' .. ARGV[i], ARGV[i + 1], ARGV[i + 2])
		t, n = token, num(ARGV[i])
		first = first or ARGV[i + 1] == 'token'
	end
end
if ARGV[2] == '1' then redis.call('PEXPIREAT', events, ARGV[3]) end
if s then -- a write to a hash that is gone would make one that never expires
	redis.call('HSET', record, 'n', n)
	if first and not f then redis.call('HSET', record, 'f', now, 'v', rise(v)) end
end
return 'ok'
