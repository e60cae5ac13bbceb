-- Turns accepting into queued. Clients see no difference, so the version stays.
-- KEYS: 1 record
-- Returns the state that was, or nil if there is no record
local s = redis.call('HGET', KEYS[1], 's')
if s == 'accepting' then redis.call('HSET', KEYS[1], 's', 'queued') end
return s
