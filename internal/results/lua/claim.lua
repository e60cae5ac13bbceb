-- Takes a job for a worker's attempt, or says why not.
-- KEYS: 1 record, 2 events
-- ARGV: 1 worker, 2 lease (ms), 3 ack subject, 4 '1' if DONE was looked at, 5 '1' if this is not the first delivery,
--       6 '1' if the job keeps events, 7 when the keys expire (ms), 8 bound of the event stream, 9 '1' if the worker can perhaps continue a partial answer
-- Returns {'taken', token, number of the event appended, charged, deaths, uncharged, cancel asked, now, 1 if it was a reset, 2 if the worker is to continue or reset},
--         {'held', rest of the lease (ms), its worker}, {'too_early', rest of the delay (ms)}, {'ended'}, {'check_done'}, {'unrecorded'}
local record, events = KEYS[1], KEYS[2]
local s, k, w, l, q, nb, n, cn, rs, d, ch, un, c, at, v, f, fr = unpack(redis.call('HMGET', record,
	's', 'k', 'w', 'l', 'q', 'nb', 'n', 'cn', 'rs', 'd', 'ch', 'un', 'c', 'at', 'v', 'f', 'fr'))
if ended[s] then return {'ended'} end
k, l, n, ch, un = num(k), num(l), num(n), num(ch), num(un)
if s == 'running' and l > now then
	if w == ARGV[1] and q == ARGV[3] then -- the same delivery: the answer to this very claim was lost
		return {'taken', k, num(cn), ch, num(d), un, num(c), now, num(rs)}
	end
	return {'held', l - now, w}
end
if num(nb) > now then return {'too_early', nb - now} end
if ARGV[4] ~= '1' and (not s or k > 0 or ARGV[5] == '1') then return {'check_done'} end
if not s then return {'unrecorded'} end

at = at or ''
if s == 'running' then -- a lease that ran out is nobody's fault: the store may have been away
	at = at .. '-' .. l .. ' lease_lost\n'
	un = un + 1
end
if #at > 4000 then -- the first attempt and the latest ones
	at = (string.match(at, '^%+[^\n]*\n%-[^\n]*\n') or '') .. (string.match(at, '\n(%+.*)$', 2000) or '')
end
local token = math.max(k + 1, now)
cn, rs = 0, 0
if ARGV[6] == '1' then
	local t, number, kind = last(events)
	if t then
		token = math.max(token, t + 1)
		cn = math.max(number, n) + 1
		if f or kind == 'token' then rs = ARGV[9] == '1' and 2 or 1 end
	elseif fr and k == 0 and ARGV[5] ~= '1' then
		cn = 1
	else -- there may have been events: start above any number that they can have had, and from nothing for whoever has seen them
		cn, rs = math.max(n + 1, now), 1
	end
	local data = '"attempt":' .. (ch + un + 1) .. '}'
	if rs == 1 then
		redis.call('XADD', events, 'MAXLEN', '~', ARGV[8], token .. '-' .. cn, 'reset', '{"text":"",' .. data)
	else
		redis.call('XADD', events, 'MAXLEN', '~', ARGV[8], token .. '-' .. cn, 'status', '{"status":"running",' .. data)
	end
	if not t then redis.call('PEXPIREAT', events, ARGV[7]) end
end
redis.call('HSET', record, 's', 'running', 'k', token, 'w', ARGV[1], 'l', now + ARGV[2], 'q', ARGV[3], 'n', cn, 'cn', cn, 'rs', rs,
	'un', un, 'at', at .. '+' .. now .. ' ' .. ARGV[1] .. '\n', 'v', rise(v))
return {'taken', token, cn, ch, num(d), un, num(c), now, rs}
