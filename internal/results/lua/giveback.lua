-- Ends an attempt without an outcome.
-- KEYS: 1 record
-- ARGV: 1 token, 2 delay before the next claim (ms), 3 '1' if the attempt counts, 4 reason
-- Returns 'ok' or 'fenced'. A record that is gone is 'ok'; so is an attempt that was ended before, which is not counted again.
local s, k, at, ch, un, v = unpack(redis.call('HMGET', KEYS[1], 's', 'k', 'at', 'ch', 'un', 'v'))
if not s then return 'ok' end
if ended[s] or (num(k) > 0 and k ~= ARGV[1]) then return 'fenced' end
if num(k) > 0 and s ~= 'running' then return 'ok' end
if s == 'running' then at = at .. '-' .. now .. ' ' .. ARGV[4] .. '\n' end
if ARGV[3] == '1' then ch = num(ch) + 1 else un = num(un) + 1 end
redis.call('HSET', KEYS[1], 's', 'queued', 'k', ARGV[1], 'l', 0, 'nb', now + ARGV[2], 'at', at or '', 'ch', num(ch), 'un', num(un), 'v', rise(v))
return 'ok'
